"""What a model costs per token, from its configuration alone: no weights are made."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from dta_compile.data.tables import optional
from dta_compile.errors import OptionError

# Names under which configurations have the number of experts, and of those that a token takes.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
TAKEN = ("num_experts_per_tok", "moe_top_k", "top_k_experts")


# Sizes of a configuration: the least and the most that is taken, several times that of any model.
SIZES = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layers", "n_layer"), (1, 512)),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), (1, 2**14)),
    **dict.fromkeys((*EXPERTS, *TAKEN), (0, 2**14)),
    **dict.fromkeys(("hidden_size", "vocab_size"), (1, 2**24)),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), (0, 2**24)),
}


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """Sizes of a model.

    Attributes:
        name: architecture and where the configuration is from.
        parameters: all of them.
        active: parameters of matrix products that one token takes part in, the head left out.
        outputs: numbers that the matrix products of one token give, the head left out; attention's among them.
        widest: of them, those of one layer.
        head: parameters of the head.
        layers, attention_layers: decoder layers; of them, those with attention.
        attention_width: numbers of the queries of a token in a layer.
        kv_width: numbers of its keys and values in a layer.
    """

    name: str
    parameters: int
    active: float
    outputs: float
    widest: float
    head: int
    layers: int
    attention_layers: int
    attention_width: int
    kv_width: int


def model_shape(config: str) -> ModelShape:
    """The sizes of a model of transformers.

    Args:
        config: a `config.json`, the folder of one, or a name that transformers' AutoConfig knows.

    Raises:
        MissingPackageError: transformers or torch is not installed.
        OptionError: it is no configuration of a causal language model.
    """
    transformers = optional("transformers", "dta estimate")
    torch = optional("torch", "dta estimate")
    if config.endswith(".json") and not Path(config).exists():  # a name of the hub takes its time to be missing
        raise OptionError("there is no such configuration", got=config)
    try:
        path = Path(config)
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise OSError("neither a file nor a folder")
        folder = str(path.parent) if path.is_file() and path.name == "config.json" else config
        _check(transformers.PretrainedConfig.get_config_dict(folder)[0])
        read = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(read, trust_remote_code=False)
        return _shape(model, read.get_text_config(), config)
    except Exception as error:  # of transformers, huggingface_hub and whatever a model's own code raises
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise OptionError(
            "not a configuration of a causal language model",
            expected="a config.json of transformers, its folder, or a name of the hub",
            got=f"{config!r}: {first}",
        ) from error


def _check(config: Any) -> None:
    """Sizes that a model can have: one with others would be built for hours, or its configuration."""
    for key, value in config.items() if isinstance(config, dict) else ():
        least, most = SIZES.get(key, (0, 0))
        if value is None or not most:
            _check(value)
        elif type(value) is not int or not least <= value <= most:
            raise ValueError(f"{key} must be an integer from {least} to {most}, not {value!r}")


def _shape(model: Any, config: Any, source: str) -> ModelShape:
    share = _share_of_experts(config)
    embeddings = (one for one in model.modules() if type(one).__name__.endswith("Embedding"))
    tables = {id(one.weight) for one in embeddings if hasattr(one, "weight")}
    head = model.get_output_embeddings()
    tables.add(id(head.weight))
    active = outputs = 0.0
    for name, value in model.named_parameters():
        if value.dim() < 2 or id(value) in tables or "conv" in name:
            continue
        part = share if "expert" in name and "shared" not in name else 1.0
        active += part * value.numel()
        # Experts are [E, out, in]; a part of the E is taken, and in all of them as many numbers are given.
        outputs += part * (value.shape[0] * value.shape[1] if value.dim() == 3 else value.shape[0])
    heads, layers = int(config.num_attention_heads), int(config.num_hidden_layers)
    size = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * layers
    attention = sum("linear" not in kind and "mamba" not in kind and "conv" not in kind for kind in kinds)
    outputs += attention * heads * size
    return ModelShape(
        name=f"{type(model).__name__} of {source}",
        parameters=sum(value.numel() for value in model.parameters()),
        active=active,
        outputs=outputs,
        widest=outputs / max(layers, 1),
        head=head.weight.numel(),
        layers=layers,
        attention_layers=attention,
        attention_width=heads * size,
        kv_width=2 * kv_heads * size,
    )


def _share_of_experts(config: Any) -> float:
    """The part of the experts that a token takes."""
    count = next((getattr(config, key) for key in EXPERTS if getattr(config, key, None)), None)
    taken = next((getattr(config, key) for key in TAKEN if getattr(config, key, None)), None)
    return float(taken) / float(count) if count and taken else 1.0
