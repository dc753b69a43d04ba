"""Run every causal LM architecture of transformers at toy size against one sequence at a time in eager mode.

    python benchmarks/zoo.py [model types] [--write benchmarks/MODELS.md]

Prints a table: the largest relative error of outputs and gradients in float64, or why the model was refused (by `dta`)
or skipped (eager mode fails at this size). Models that transformers does not run with SDPA attention run with
`attn_implementation="dta"`, or else "eager", against "eager". Mixtures of experts run with transformers' default
experts, against its loop over experts, and once more with their load-balancing loss, against a padded batch in eager
mode. `--write` writes all types to a table on a page.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import logging
import pathlib
import re
import sys
import warnings
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from dta_compile import records
from dta_compile.backend import dta
from dta_compile.errors import DTAError
from tests.support.helpers import errors, make_batch, measure, random_loss, reference, rollouts

VOCABULARY = 96
EXPERTS = 8
LENGTH = max(map(len, rollouts(VOCABULARY)))
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers")
SIZES = {
    ("hidden_size", "n_embd", "d_model", "embedding_size", "word_embed_proj_dim", "input_embedding_size"): 64,
    ("vocab_size",): VOCABULARY,
    LAYERS: 2,
    ("num_attention_heads", "n_head", "n_heads", "num_heads"): 4,
    ("decoder_attention_heads", "encoder_attention_heads"): 4,
    ("num_key_value_heads", "n_head_kv", "num_kv_heads"): 2,
    ("head_dim", "v_head_dim", "kv_channels"): 16,
    ("intermediate_size", "ffn_dim", "ffn_hidden_size", "d_ff", "n_inner", "shared_intermediate_size"): 96,
    ("decoder_ffn_dim", "encoder_ffn_dim"): 96,
    ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"): 32,
    ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"): EXPERTS,
    ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k", "top_k_experts"): 2,
    ("topk_group", "n_shared_experts", "num_shared_experts", "moe_num_shared_experts"): 1,
    ("n_group", "num_expert_group", "zero_expert_num"): 2,
    ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"): 1,  # a dense layer and one of experts
    ("router_hidden_size", "hidden_size_per_layer_input"): 16,
    ("vocab_size_per_layer_input",): VOCABULARY,
    ("enable_moe_block",): True,
    ("q_lora_rank", "kv_lora_rank", "pad_token_id"): 16,
    ("qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim"): 8,
    ("max_position_embeddings", "n_positions", "max_seq_len"): 128,
    ("sliding_window", "sliding_window_size", "attention_window", "attention_window_size", "window_size"): 5,
    ("keep_window_size", "local_attention", "local_attention_window_len", "attention_chunk_size", "rel_extent"): 5,
    ("index_topk", "index_block_size"): 4,
    ("mamba_chunk_size",): 4,  # tokens that its scan in eager takes at once
    ("index_topk_blocks", "index_n_heads", "no_rope_layer_interval", "attn_layer_period"): 2,
    ("index_head_dim",): 16,
    ("attn_layer_offset",): 1,
}
# Names of settings that bound a token's attention span, which must be shorter than a sequence to be tested.
SPANS = re.compile("window(_size|_len)?$|attention_chunk|local_attention|rel_extent|index_(topk|block)")
# Settings with one entry per layer: every kind that a model has by default must occur.
PER_LAYER = ("indexer_types", "layer_types", "layers_block_type", "mlp_layer_types")
# Kinds of layers that a type has in its checkpoints but not by default.
KINDS = {
    "minimax_m3_vl_text": ("full_attention", "minimax_m3_sparse"),
    "lfm2_moe": ("conv", "full_attention"),
    "cohere_compass_text": ("sliding_attention", "full_attention"),
}
_VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_MIXED = {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2, "use_mamba_kernels": False}
_SLIDING_HEADS = {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16}
# Settings of single types that follow from others, or that no other type has.
OWN: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in KINDS["cohere_compass_text"]}
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 32, "moe_num_experts": EXPERTS, "moe_top_k": 2},
    },
    "dots3_note_text": {
        "shared_experts_intermediate_size": 32,
        **{f"swa_{name}": 16 for name in ("q_lora_rank", "kv_lora_rank", "head_dim", "v_head_dim")},
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_qk_nope_head_dim": 8,
    },
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
        "laurel_rank": 8,
        "altup_coef_clip": 0.02,  # to which weights are clamped in training
    },
    "git": {"vision_config": {**_VISION, "image_size": 32}},
    "inkling2_loop_text": {
        **_SLIDING_HEADS,
        "num_hidden_layers": 4,
        "layer_types": ["hybrid_sliding", "hybrid"] * 2,
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 3,
        "loop_num_passes": 2,
        "unpadded_vocab_size": VOCABULARY,
    },
    "inkling2_text": {**_SLIDING_HEADS, "n_layers_per_attn_res_block": 1, "unpadded_vocab_size": VOCABULARY},
    "phi4_multimodal": {
        "vision_config": _VISION,
        "audio_config": {**_VISION, "num_blocks": 1, "depthwise_separable_out_channel": 32, "nemo_conv_channels": 32},
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "hc_lowrank": 8,
    },
    "reformer": {"attn_layers": ["local", "lsh"], "axial_pos_embds": False},
    "roc_bert": {"pronunciation_embed_dim": 16, "shape_embed_dim": 16, "shape_vocab_size": 32},
    "xglm": {"attention_heads": 4, "num_layers": 2},
    "xlm": {"emb_dim": 64, "causal": True},
    "xmod": {"default_language": "en_XX"},
    "zamba": {**_MIXED, "attention_hidden_size": 128, "attention_head_dim": 32, "mamba_dt_rank": 4},
    "zamba2": {**_MIXED, "attention_hidden_size": 128, "attention_head_dim": 32, "mamba_headdim": 16},
    "zaya": {"num_experts_per_tok": 1},
}
AS_CAUSAL = {"is_decoder": True, "causal": True}  # settings of types that are encoders by default
EXPERT_COUNTS, CHOSEN = (
    next(names for names in SIZES if name in names) for name in ("num_experts", "num_experts_per_tok")
)
WITHOUT_GROUPS = ("n_group", "topk_group")  # unchanged where the model does not route within groups by default


def toy_config(model_type: str) -> Any:
    """Return a configuration of two layers, or one of each kind, and 64 features, without dropout; see `idle`."""
    cls = transformers.CONFIG_MAPPING[model_type]
    default = cls()
    if hasattr(default, "text_config"):
        raise NotImplementedError("several modalities")
    computed = {name for name in dir(cls) if isinstance(getattr(cls, name), property)}
    known = {
        name: size for names, size in SIZES.items() for name in names if name in vars(default) or hasattr(cls, name)
    }
    values = {name: size for name, size in known.items() if name not in computed}
    if "kv_lora_rank" in values:
        values["num_key_value_heads"] = values["num_attention_heads"]  # latent attention has no groups
    for name, value in vars(default).items():
        if ("drop" in name or "pdrop" in name) and isinstance(value, float):
            values[name] = 0.0
    if "is_decoder" in vars(default) and not getattr(default, "is_encoder_decoder", False):
        values["is_decoder"] = True  # an encoder otherwise, which predicts no next tokens
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        values[name] = 0 if name == "pad_token_id" else None
    for name in WITHOUT_GROUPS:
        if getattr(default, name, None) is None:
            values.pop(name, None)
    if {"head_dim", "qk_rope_head_dim"} <= values.keys() and default.head_dim == default.qk_rope_head_dim:
        values["head_dim"] = values["qk_rope_head_dim"]
    if "index_topk" in values:
        values["index_n_heads"] = 16  # with few, many scores are zero, and `topk` of equal ones depends on the row
    rates = getattr(default, "compress_rates", None)
    if rates:
        values["compress_rates"] = dict(zip(rates, range(2, 9), strict=False))
    kinds = list(dict.fromkeys(KINDS.get(model_type) or vars(default).get("layer_types") or ()))
    pattern = vars(default).get("block_types") or ()
    layers = max(2, len(kinds), len(pattern))
    values |= {name: layers for name in LAYERS if name in values}
    if kinds:
        values["layer_types"] = (kinds * 2)[:layers]
    if types := vars(default).get("attention_types"):  # [[[kind, ...], repetitions], ...]
        values |= {"attention_types": [[types[0][0], 1]], "num_layers": len(types[0][0])}
    if {"num_heads", "head_dim"} <= values.keys() and hasattr(default, "expand"):
        values["num_heads"] = values["hidden_size"] * default.expand // values["head_dim"]
    for name in ("mlp_layer_types", "indexer_types"):
        kinds = list(dict.fromkeys(vars(default).get(name) or ()))
        if kinds:
            values[name] = (kinds + kinds[-1:] * layers)[:layers]
    values |= OWN.get(model_type, {})
    try:
        return cls(**values)
    except Exception:  # a type that does not do without such tokens
        return cls(**values | {"bos_token_id": 1, "eos_token_id": 1})


def idle(config: Any) -> list[str]:
    """Return the settings that keep a toy model from exercising a mechanism of its type, at `LENGTH` tokens.

    These are spans that no sequence exceeds, kinds of layers that the type has by default and the toy has not, and
    experts of which all are chosen.
    """
    default = type(config)()
    settings = []
    for name, value in vars(config).items():
        if SPANS.search(name) and isinstance(value, int) and not isinstance(value, bool) and value >= LENGTH:
            settings.append(f"{name}={value} for {LENGTH} tokens")
    blocks = getattr(config, "index_topk_blocks", None)
    if blocks is not None and blocks * config.index_block_size >= LENGTH:
        settings.append(f"index_topk_blocks={blocks} of {config.index_block_size} for {LENGTH} tokens")
    for name in PER_LAYER:
        kinds, own = (set(getattr(source, name, None) or ()) for source in (default, config))
        settings += [f"no layer of {name} {kind}" for kind in sorted(map(str, kinds - own))]
    counts, chosen = ([getattr(config, name, None) for name in names] for names in (EXPERT_COUNTS, CHOSEN))
    counts, chosen = ([n for n in numbers if isinstance(n, int)] for numbers in (counts, chosen))
    if counts and chosen and min(chosen) >= max(counts):
        settings.append(f"all of {max(counts)} experts are chosen")
    return settings


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Result for one model type; `of_loss` is the gradient error with its load-balancing loss."""

    model_type: str
    word: str  # exact, captured, refused, FAILS or skipped
    outputs: str = ""
    gradients: str = ""
    of_loss: str = ""
    remark: str = ""

    def __str__(self) -> str:
        numbers = f"{self.outputs:>8} {self.gradients:>8} {self.of_loss:>8}"
        return f"{self.model_type:24} {self.word:8} {numbers}  {self.remark}"

    @property
    def row(self) -> str:
        """Row of a Markdown table."""
        cells = (f"`{self.model_type}`", self.word, self.outputs, self.gradients, self.of_loss, self.remark)
        return "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) + " |"


def try_model(model_type: str) -> Verdict:
    """Try a type with torch's attention, or else with ours, or else with its own."""
    first = _try_with(model_type, "sdpa", "sdpa")
    if first.word == "exact" or not first.remark.startswith(("ValueError", "KeyError", "eager", "attention")):
        return first
    for implementation in ("dta", "eager"):
        verdict = _try_with(model_type, implementation, "eager")
        if verdict.word not in ("skipped", "FAILS"):
            return verdict
    return first  # no other attention is possible


def _try_with(model_type: str, implementation: str, eager: str) -> Verdict:
    def verdict(word: str, *parts: str, remark: str) -> Verdict:
        return Verdict(model_type, word, *parts, remark=remark)

    try:
        config = toy_config(model_type)
        with torch.device("meta"):
            shape = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
        if sum(parameter.numel() for parameter in shape.parameters()) > 5_000_000:
            return verdict("skipped", remark="its configuration has sizes that this script does not know")
        model, exact = _build(model_type, implementation), _build(model_type, eager, is_reference=True)
    except Exception as error:
        return verdict("skipped", remark=_line(error))
    batch = make_batch(rollouts(VOCABULARY))
    loss = random_loss(batch, VOCABULARY)
    try:
        expected = reference(exact, batch, loss)
    except Exception as error:
        return verdict("skipped", remark=f"eager mode fails: {_line(error)}")
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=dta, options={"chunk_size": 4})
    try:
        error_of = errors(measure(compiled, model, batch, loss), expected)
        out, of_loss = error_of.pop("outputs"), ""
    except DTAError as error:
        return verdict("refused", remark=f"{error.what}; {error.got}")
    except Exception as error:
        return verdict("FAILS", remark=_line(error))
    if hasattr(config, "router_aux_loss_coef"):
        of_loss = _with_auxiliary_loss(compiled, model, exact, batch, loss)
    word = "exact" if records.of(compiled).plan else "captured"
    not_shown = [f"not shown: {what}" for what in idle(config)]
    remark = ", ".join([implementation, *_features(model, config), *not_shown])
    return verdict(word, f"{out:.1e}", f"{max(error_of.values()):.1e}", of_loss, remark=remark)


def _features(model: Any, config: Any) -> list[str]:
    """List the features of a model besides attention of one kind."""
    kinds = dict.fromkeys(vars(model.config).get("layer_types") or ())
    has_experts = model._can_set_experts_implementation()
    changed = [f"{name}={own}" for name, own in AS_CAUSAL.items() if vars(config).get(name) == own]
    kinds = [str(kind) for kind in kinds if len(kinds) > 1 or kind != "full_attention"]
    return [*changed, *kinds, *["experts"] * has_experts]


def _with_auxiliary_loss(compiled: Any, model: Any, exact: Any, batch: Any, loss: Any) -> str:
    """Return the gradient error on a padded batch; the loss is a mean over its tokens, so single sequences differ."""
    balancing: list[torch.Tensor] = []

    def forward(function: Any, batch: Any) -> torch.Tensor:
        out = function(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False, output_router_logits=True)
        balancing.append(out.aux_loss)
        return out.logits

    def with_balancing(outputs: torch.Tensor) -> torch.Tensor:
        return loss(outputs) + 10 * balancing.pop()

    try:
        expected = measure(exact, exact, batch, with_balancing, forward)
    except Exception:
        return "not in eager"
    try:
        error_of = errors(measure(compiled, model, batch, with_balancing, forward), expected)
    except DTAError:
        return "refused"
    return f"{max(error_of.values()):.1e}"


def _build(model_type: str, implementation: str, is_reference: bool = False) -> Any:
    torch.manual_seed(1)
    config = toy_config(model_type)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).double().train()
    strict = model._keep_in_fp32_modules_strict or ()
    for name, parameter in model.named_parameters():
        if any(re.search(rf"\b{kept}\b", name) for kept in strict):
            parameter.data = parameter.data.float()
    if is_reference and model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the loop; the default supports at most float32
    return model


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:150]}"


PAGE = """# Causal language models of transformers {transformers}

`python benchmarks/zoo.py --write benchmarks/MODELS.md` made this page: every type at toy size (two layers,
or one of each kind, 64 features) with random weights in float64, {what}.

- **exact**: outputs and the gradients of all parameters of a batch with shared prefixes, against one sequence at a time
  in eager mode: largest error over largest entry. "With its loss": gradients with the model's own load-balancing loss
  over the padded batch. The remark says which attention ran, and whether the model has experts (on; eager mode loops).
  Types that are encoders by default decode, as `is_decoder=True` has them.
  transformers computes norms and routers in float32, which rounds to about 1e-7.
- **captured**: the model has nothing that the tree could share, and runs as it is (figures as above).
- **refused**: a typed error says that it cannot be proven equivalent; the remark is the error's.
- **skipped**: eager mode does not run at this size, or the type has no such model.

{counts}

| type | verdict | outputs | gradients | with its loss | remark |
|---|---|---|---|---|---|
{rows}

{why}"""
REASONS = pathlib.Path(__file__).with_name("refused_models.md")


def page(verdicts: list[Verdict]) -> str:
    """Return the page with the table."""
    counted = collections.Counter(verdict.word for verdict in verdicts)
    counts = ", ".join(f"{number} {word}" for word, number in counted.most_common())
    rows = "\n".join(verdict.row for verdict in sorted(verdicts, key=lambda verdict: verdict.model_type))
    what = f"chunks of 4 tokens, torch {torch.__version__.split('+')[0]}"
    return PAGE.format(
        transformers=transformers.__version__, what=what, counts=counts, rows=rows, why=REASONS.read_text()
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("types", nargs="*", metavar="TYPE", help="model types (default: all)")
    parser.add_argument("--write", metavar="OUT", help="write the table to a Markdown page")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    verdicts = []
    for model_type in arguments.types or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        verdicts.append(try_model(model_type))
        print(verdicts[-1], flush=True)
    if arguments.write:
        pathlib.Path(arguments.write).write_text(page(verdicts))
    return any(verdict.word == "FAILS" for verdict in verdicts)


if __name__ == "__main__":
    sys.exit(main())
