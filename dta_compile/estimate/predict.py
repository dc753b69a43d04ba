"""Predictions for a model, a device and a batch: the planner's own choices, priced by a roofline or a calibration."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dta_compile.data import Recorded
from dta_compile.data.tables import optional
from dta_compile.errors import OptionError
from dta_compile.estimate.devices import ATTENTION_SHARE, BANDWIDTH_SHARE, CALIBRATED, MATMUL_SHARE, Device
from dta_compile.options import CHUNK_TOKENS, Options
from dta_compile.plan import CostModel, Footprint, Limits, Plan, PrefixTree, Rates, Work, make_plan, peak_bytes
from dta_compile.plan.tree.prefix_tree import IntArray

NUMBER, SUM = 2, 4  # bytes of a 16-bit weight, activation or gradient, and of a sum of gradients in float32
LAYERS_OF_DEFAULTS = 28  # of the model whose launches `CostModel.of_gpu` has
# Passes over the outputs of matrix products that norms, rotations, activations and residuals make, forward.
PASSES = 5.0
ATTENTION_BACKWARD = 2.5  # operations of the backward of attention, over those of its forward
HEAD_BACKWARD = 3.0  # the head goes over the vocabulary again, and then backward
CHUNK_SIZES, CHUNK_SHARE = (CHUNK_TOKENS, 4096, 8192), 0.4  # as the runtime chooses from, of its budget
BUDGET_SHARE = 0.5  # of the free memory, as the runtime has it
WORKING = {"cache_only": 2.0, "forward_only": 2.0, "forward": 2.0, "backward": 4.0}  # times the outputs of a layer
CHECKPOINT = 1.0  # forward runs more of a dense step with checkpoints


@dataclasses.dataclass(frozen=True)
class Prediction:
    """One way to run a step.

    Attributes:
        name: of the way.
        seconds: of forward and backward.
        bytes: at the peak, the model and its gradients included.
        forwarded_twice: tokens.
        chunk_size: most tokens of a chunk; 0 where there are none.
    """

    name: str
    seconds: float
    bytes: float
    forwarded_twice: int
    chunk_size: int = 0


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a step of a batch comes to.

    Attributes:
        plan: the one that the default budget gives.
        head_rows: distinct uses of the head.
        fixed_bytes: of weights and gradients.
        ours: by budget.
        others: dense and packed tree.
        source: of the times, in words.
        uncertainty: factor either way in which times of ours may lie.
    """

    plan: Plan
    head_rows: int
    fixed_bytes: float
    ours: tuple[Prediction, ...]
    others: tuple[Prediction, ...]
    source: str
    uncertainty: float


def cost_of(shape: ModelShape, device: Device) -> CostModel:
    """Seconds by a roofline: operations over a share of the peak, other passes over a share of the bandwidth.

    What a host adds per chunk is that of `CostModel.of_gpu`, by layers.
    """
    matmul, bandwidth = device.tflops * 1e12 * MATMUL_SHARE, device.bandwidth * BANDWIDTH_SHARE
    token = 2 * shape.active / matmul + PASSES * shape.outputs * NUMBER / bandwidth
    pair = 4 * shape.attention_width * shape.attention_layers / (device.tflops * 1e12 * ATTENTION_SHARE)
    head = 2 * shape.head / matmul
    launches, scale = CostModel.of_gpu(), shape.layers / LAYERS_OF_DEFAULTS
    forward = Rates(launches.forward.launch * scale, launches.forward.slice * scale, token, pair, head)
    backward = Rates(
        launches.backward.launch * scale,
        launches.backward.slice * scale,
        2 * token,
        ATTENTION_BACKWARD * pair,
        HEAD_BACKWARD * head,
    )
    copied = shape.kv_width * shape.attention_layers * NUMBER * 2
    shares = f"{MATMUL_SHARE:.0%} of {device.tflops:,.0f} TFLOP/s, attention {ATTENTION_SHARE:.0%}"
    source = f"roofline of {device.name}: {shares}, {BANDWIDTH_SHARE:.0%} of {device.bandwidth / 1e12:.2f} TB/s"
    return CostModel(forward, backward, copied / bandwidth, source)


def footprint_of(shape: ModelShape) -> Footprint:
    """Bytes that chunks take: outputs of matrix products are kept, what lies between them is computed again."""
    working = {name: ((0.0, times * shape.widest * NUMBER, 0.0),) for name, times in WORKING.items()}
    return Footprint(
        graph_token=shape.outputs * NUMBER,
        kv_token=shape.kv_width * shape.attention_layers * NUMBER,
        working=working,
    )


def head_starts_of(tree: PrefixTree, sequences: Sequence[Recorded]) -> IntArray:
    """`[R + 1]` head rows of every tree row: distinct next tokens that are trained on (see `simulate`)."""
    rows, labels = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    at, of_token = 0, tree.token_rows()
    for one in sequences:
        size = len(one)
        trained = np.flatnonzero(one.loss_mask()[1:])
        rows.append(of_token[at : at + size][trained])
        labels.append(np.asarray(one.tokens, np.int64)[1:][trained])
        at += size
    pairs = np.unique(np.stack([np.concatenate(rows), np.concatenate(labels)], axis=1), axis=0)
    return np.concatenate([[0], np.cumsum(np.bincount(pairs[:, 0], minlength=tree.num_rows))])


def estimate(
    sequences: Sequence[Recorded],
    shape: ModelShape,
    device: Device,
    options: Options,
    cost: CostModel | None = None,
) -> Estimate:
    """Predict a step.

    Args:
        options: a `memory_budget` stands for the default one; a `chunk_size` is taken as it is.
        cost: measured rates, in place of the roofline.
    """
    tree = PrefixTree.build([one.tokens for one in sequences])
    heads = head_starts_of(tree, sequences)
    uncertainty = device.uncertainty if cost is None else CALIBRATED
    cost, footprint = cost or cost_of(shape, device), footprint_of(shape)
    fixed = shape.parameters * float(NUMBER + NUMBER + SUM)
    default = options.memory_budget
    if default is None:
        default = max(int((device.memory - shape.parameters * float(NUMBER + SUM)) * BUDGET_SHARE), 0)
    made: list[tuple[str, Plan]] = []
    for name, budget in ((f"{default / 1e9:.1f} GB kept", default), ("nothing kept", 0), ("all kept", None)):
        sizes = _chunk_sizes(default if budget is None else budget, footprint)
        made.append((name, make_plan(tree, options, limits=Limits(budget, footprint, cost, heads, sizes))))
    ours = tuple(_ours(f"dta, {name}", plan, footprint, fixed) for name, plan in made)
    others = tuple(_others(tree, heads, cost, footprint, fixed))
    return Estimate(made[0][1], int(heads[-1]), fixed, ours, others, cost.source, uncertainty)


def _chunk_sizes(budget: float, footprint: Footprint) -> tuple[int, ...]:
    least, *larger = CHUNK_SIZES
    return least, *(size for size in larger if size * footprint.graph_token <= CHUNK_SHARE * budget)


def _ours(name: str, plan: Plan, footprint: Footprint, fixed: float) -> Prediction:
    first, second = peak_bytes(plan.prefix_tree, plan.schedule, footprint, plan.limits.head_starts)
    stack = footprint.kv_token * plan.simulation.peak_stack_tokens
    gradients = stack * SUM / NUMBER
    peak = fixed + stack + max(first, second + gradients)
    twice = plan.simulation.recomputed_tokens
    return Prediction(name, plan.estimates.seconds, peak, twice, plan.schedule.chunk_size)


def _others(tree: PrefixTree, heads: IntArray, cost: CostModel, footprint: Footprint, fixed: float) -> list[Prediction]:
    """Rivals at the same rates: one sequence at a time, and all of the tree in one masked row.

    What they take at least: eager code launches more kernels, keeps more of a token, and makes rows that fit.
    """
    lengths = tree.lengths
    per_token = float(heads[-1]) / max(tree.num_rows, 1)
    pairs, tree_pairs = _pairs(lengths), _pairs(tree.stop) - _pairs(tree.start)
    dense = Work(len(lengths), len(lengths), int(lengths.sum()), pairs, int(lengths.sum() * per_token))
    packed = Work(1, 1, tree.num_rows, tree_pairs, int(heads[-1]))
    graph, longest = footprint.graph_token, int(lengths.max(initial=0))
    found = []
    for name, work, size in (("dense", dense, longest), ("packed tree", packed, tree.num_rows)):
        kept = fixed + graph * size
        layer = fixed + footprint.while_running("backward", Work(tokens=size))
        once = cost.forward.seconds(work) + cost.backward.seconds(work)
        again = once + CHECKPOINT * cost.forward.seconds(work._replace(heads=0))
        found.append(Prediction(name, once, kept, 0))
        found.append(Prediction(f"{name}, checkpointed", again, layer, work.tokens))
    return found


def _pairs(depths: Any) -> int:
    return int((depths * (depths + 1)).sum()) // 2


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
