"""Predictions for a model, a device and a batch: the planner's own choices, priced by a roofline or a calibration."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dta_compile.data import Recorded
from dta_compile.data.tables import optional
from dta_compile.errors import OptionError
from dta_compile.estimate.devices import ATTENTION_SHARE, BANDWIDTH_SHARE, CALIBRATED, MATMUL_SHARE, Device
from dta_compile.options import Options
from dta_compile.plan import (
    CostModel,
    Footprint,
    Limits,
    PartBytes,
    Plan,
    PrefixTree,
    Rates,
    Work,
    balance,
    bytes_of_halves,
    make_plan,
)
from dta_compile.plan.cost import BUDGET_SHARE, BY_CHUNKS, BY_STAGES, chunk_sizes
from dta_compile.plan.schedule import SWEEPS
from dta_compile.plan.tree.prefix_tree import IntArray

NUMBER, SUM = 2, 4  # bytes of a 16-bit weight, activation or gradient, and of a sum of gradients in float32
LAYERS_OF_DEFAULTS = 28  # of the model whose launches `CostModel.of_gpu` has
# Passes over the outputs of matrix products that norms, rotations, activations and residuals make, forward.
PASSES = 5.0
ATTENTION_BACKWARD = 2.5  # operations of the backward of attention, over those of its forward
HEAD_BACKWARD = 3.0  # the head goes over the vocabulary again, and then backward
# Of the device's memory, what plans may take: CUDA and the allocator have their part, and predictions were 12% off.
USABLE = 0.9
BATCHES = (1, 2, 4, 8, 16, 32, 64)  # that are tried
MOST_RANKS = 4096
LEAST_BUDGET = 1e8  # bytes worth keeping
# Bytes of a parameter that optimisers keep. Mixed precision has float32 weights besides, and two float32 moments.
OPTIMIZERS = {"none": 0, "sgd": 0, "adamw": 12, "adamw-bf16": 4, "adamw-8bit": 2}
SHARDS = ("none", "fsdp")
# How many times as long eager steps took as what is predicted for them (benchmarks/GPU.md): the least and the most.
RIVALS = {"dense": (1.0, 1.8), "dense, checkpointed": (1.7, 3.7)}
RIVALS |= dict.fromkeys(("packed tree", "packed tree, checkpointed"), (1.1, 1.7))
WORKING = {"cache_only": 2.0, "forward_only": 2.0, "forward": 2.0, "backward": 4.0}  # times the outputs of a layer
CHECKPOINT = 1.0  # forward runs more of a dense step with checkpoints


@dataclasses.dataclass(frozen=True)
class Prediction:
    """One way to run a step.

    Attributes:
        name: of the way.
        seconds: of forward and backward.
        bytes: on a rank at the peak, with the model, its gradients and the optimiser.
        forwarded_twice: tokens.
        factors: seconds may be so many times as long, at least and at most.
        sweep, budget: options that plans of ours are made with.
        chunk_size: most tokens of a chunk; 0 where there are none.
    """

    name: str
    seconds: float
    bytes: float
    forwarded_twice: int
    factors: tuple[float, float]
    sweep: str = ""
    budget: int | None = None
    chunk_size: int = 0


@dataclasses.dataclass(frozen=True)
class Ranks:
    """The ranks that divide a batch among them, and what each of them holds of the model.

    Attributes:
        count: ranks.
        shard: "none" (each holds all) or "fsdp" (weights, gradients and states are divided; what runs is gathered).
        optimizer: of `OPTIMIZERS`.
    """

    count: int = 1
    shard: str = "none"
    optimizer: str = "none"

    @property
    def holders(self) -> int:
        """Ranks that parameters are divided among."""
        return self.count if self.shard == "fsdp" else 1

    def held(self, shape: ModelShape) -> float:
        """Bytes that a rank holds all the time: weights, gradients, states of the optimiser."""
        return shape.parameters * float(NUMBER + NUMBER + OPTIMIZERS[self.optimizer]) / self.holders

    def gathered(self, shape: ModelShape, sweep: str) -> float:
        """Bytes of weights that are together while a step runs, besides: all, or two layers and what is of no layer."""
        if self.holders == 1:
            return 0.0
        return NUMBER * float(shape.parameters if sweep == "chunks" else shape.outside + 2 * shape.layer)

    def summed(self, parameters: float) -> float:
        """Bytes of the gradients of parameters until they are final: float32 sums; of sharded ones all, not reduced."""
        return parameters * float(SUM + (NUMBER if self.holders > 1 else 0))


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a step of a batch comes to.

    Attributes:
        plan: the best one: the fastest that fits, or the one that needs least.
        head_rows: distinct uses of the head.
        fixed_bytes: of weights, gradients and the optimiser on a rank.
        ours: by sweep and budget.
        others: dense and packed tree.
        source: of the times, in words.
        uncertainty: factor either way in which times of ours may lie.
        best: the fastest of ours that fits; None: none does.
        batches: that each rank runs one after another, their gradients added up, for any to fit.
        usable: bytes of the device that plans may take.
        ranks: what it is for.
        ranks_needed: if none fits, how many ranks would do by "fsdp"; None: that is not known.
    """

    plan: Plan
    head_rows: int
    fixed_bytes: float
    ours: tuple[Prediction, ...]
    others: tuple[Prediction, ...]
    source: str
    uncertainty: float
    best: Prediction | None
    batches: int
    usable: float
    ranks: Ranks
    ranks_needed: int | None


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
    ranks: Ranks | None = None,
) -> Estimate:
    """Predict a step.

    Args:
        options: a `memory_budget` stands for the default one; `chunk_size` and `sweep` are taken as they are.
        cost: measured rates, in place of the roofline.
        ranks: that divide the sequences among them; what is predicted is the rank with the largest tree.
    """
    ranks, usable = ranks or Ranks(), USABLE * device.memory
    factor = device.uncertainty if cost is None else CALIBRATED
    step = _Step(shape, ranks, options, cost or cost_of(shape, device), (1 / factor, factor))
    for batches in (*BATCHES, 1):  # all at once again, if nothing fits
        step.take(_largest(sequences, ranks.count * batches), batches)
        least = {sweep: step.planned(sweep, "nothing kept", 0) for sweep in step.sweeps}
        leanest, _ = min(least.values(), key=lambda found: found[0].bytes)
        if leanest.bytes <= usable or ranks.held(shape) > usable:
            break
    made = [one for sweep, nothing in least.items() for one in step.by_budget(sweep, nothing, device.memory, usable)]
    fitting = [found for found in made if found[0].bytes <= usable]
    best = min(fitting, key=lambda found: (found[0].seconds, found[0].bytes)) if fitting else None
    _, plan = best or min(made, key=lambda found: found[0].bytes)
    return Estimate(
        plan,
        int(step.heads[-1]),
        ranks.held(shape),
        tuple(found for found, _ in made),
        tuple(step.others()),
        step.cost.source,
        factor,
        best[0] if best else None,
        batches,
        usable,
        ranks,
        None if best else _ranks_needed(shape, ranks, leanest, usable),
    )


def _largest(sequences: Sequence[Recorded], count: int) -> list[Recorded]:
    """Of so many groups that share little with each other, the one with the largest tree."""
    if count == 1:
        return list(sequences)
    groups = balance([one.tokens for one in sequences], count)
    trees = {
        number: PrefixTree.build([sequences[i].tokens for i in group]) for number, group in enumerate(groups) if group
    }
    largest = max(trees, key=lambda number: trees[number].num_rows) if trees else 0
    return [sequences[i] for i in groups[largest]]


def _ranks_needed(shape: ModelShape, ranks: Ranks, leanest: Prediction, usable: float) -> int | None:
    """Ranks among which the model can be divided for a step to fit, if each runs as large a tree."""
    running = leanest.bytes - ranks.held(shape) - ranks.gathered(shape, leanest.sweep)
    count = max(ranks.count, 2)
    while count <= MOST_RANKS:
        more = dataclasses.replace(ranks, count=count, shard="fsdp")
        if running + more.held(shape) + more.gathered(shape, leanest.sweep) <= usable:
            return count
        count *= 2
    return None


class _Step:
    """A step of a rank, and the ways to run it.

    Attributes:
        sweeps: to choose from.
        tree, heads: of a batch of it, see `take`.
    """

    def __init__(
        self, shape: ModelShape, ranks: Ranks, options: Options, cost: CostModel, factors: tuple[float, float]
    ) -> None:
        self.shape, self.ranks, self.options, self.cost, self.factors = shape, ranks, options, cost, factors
        self.sweeps = SWEEPS if options.sweep == "auto" else (options.sweep,)
        self.footprint = footprint_of(shape)
        self.parts = parts_of(shape, ranks)
        self.sums = ranks.summed(shape.parameters)
        self.take([], 1)

    def take(self, sequences: Sequence[Recorded], batches: int) -> None:
        """Predict for the tree of these sequences, run so many times."""
        self.tree = PrefixTree.build([one.tokens for one in sequences])
        self.heads, self.batches = head_starts_of(self.tree, sequences), batches

    def planned(self, sweep: str, name: str, budget: int | None) -> tuple[Prediction, Plan]:
        """The plan of a sweep that keeps so much, and what it comes to."""
        shape, options = self.shape, dataclasses.replace(self.options, sweep=sweep)
        footprint, most = (self.footprint, BY_CHUNKS) if sweep == "chunks" else (self.parts[0].footprint, BY_STAGES)
        sizes = chunk_sizes(math.inf if budget is None else budget, footprint.graph_token, most)
        limits = Limits(budget, self.footprint, self.cost, self.heads, sizes, self.sums, self.parts)
        plan = make_plan(self.tree, options, limits=limits)
        parts, stack = limits.parts_of(sweep), plan.simulation.peak_stack_tokens
        first, second = bytes_of_halves(plan.prefix_tree, plan.schedule, parts, stack, plan.limits.head_starts)
        # Gradients of keys and values are sums as well, and those are wider.
        second += stack * max(part.footprint.kv_token for part in parts) * (SUM / NUMBER - 1)
        found = Prediction(
            f"{sweep}, {name}",
            self.batches * plan.estimates.seconds,
            self.ranks.held(shape) + self.ranks.gathered(shape, sweep) + max(first, second),
            self.batches * plan.simulation.recomputed_tokens,
            self.factors,
            sweep,
            budget,
            plan.schedule.chunk_size,
        )
        return found, plan

    def by_budget(
        self, sweep: str, nothing: tuple[Prediction, Plan], memory: float, usable: float
    ) -> list[tuple[Prediction, Plan]]:
        """With the default budget, or as much of it as fits; nothing kept; and all."""
        budget = self.options.memory_budget
        if is_default := budget is None:
            sums = self.sums if sweep == "chunks" else max(part.sums for part in self.parts)
            free = memory - self.ranks.held(self.shape) - self.ranks.gathered(self.shape, sweep) - sums
            budget = int(max(free, 0) * BUDGET_SHARE)
        found = self.planned(sweep, f"{budget / 1e9:.1f} GB kept", budget)
        while is_default and found[0].bytes > usable >= nothing[0].bytes and budget > LEAST_BUDGET:
            budget //= 2
            found = self.planned(sweep, f"{budget / 1e9:.1f} GB kept", budget)
        everything = self.planned(sweep, "all kept", None)
        return [nothing, everything] if is_default and budget <= LEAST_BUDGET else [found, nothing, everything]

    def others(self) -> list[Prediction]:
        """Rivals, scaled as they were measured: one sequence at a time, and the tree in a masked row."""
        tree, heads, footprint, cost = self.tree, self.heads, self.footprint, self.cost
        lengths = tree.lengths
        per_token = float(heads[-1]) / max(tree.num_rows, 1)
        pairs, tree_pairs = _pairs(lengths), _pairs(tree.stop) - _pairs(tree.start)
        dense = Work(len(lengths), len(lengths), int(lengths.sum()), pairs, int(lengths.sum() * per_token))
        packed = Work(1, 1, tree.num_rows, tree_pairs, int(heads[-1]))
        fixed = self.ranks.held(self.shape) + self.ranks.gathered(self.shape, "stages")
        longest, found = int(lengths.max(initial=0)), []
        for name, work, size in (("dense", dense, longest), ("packed tree", packed, tree.num_rows)):
            kept = fixed + footprint.graph_token * size
            layer = fixed + self.shape.hidden * NUMBER * self.shape.layers * size
            layer += self.parts[0].footprint.while_running("backward", Work(tokens=size))
            once = cost.forward.seconds(work) + cost.backward.seconds(work)
            again = once + CHECKPOINT * cost.forward.seconds(work._replace(heads=0))
            for way, seconds, size_in_bytes, twice in (
                (name, once, kept, 0),
                (f"{name}, checkpointed", again, layer, work.tokens),
            ):
                least, most = RIVALS[way]
                middle = math.sqrt(least * most)
                factors = least / middle * self.factors[0], most / middle * self.factors[1]
                scaled = self.batches * middle * seconds
                found.append(Prediction(way, scaled, size_in_bytes, self.batches * twice, factors))
        return found


def parts_of(shape: ModelShape, ranks: Ranks) -> tuple[PartBytes, ...]:
    """Bytes of the parts that a sweep of stages runs, a layer each: the first one with the embedding and the last one
    with the head; what they hand on are hidden states."""
    graph = shape.outputs / shape.layers * NUMBER
    working = {name: ((0.0, times * shape.widest * NUMBER, 0.0),) for name, times in WORKING.items()}
    footprint = Footprint(graph, kv_token=shape.kv_width * NUMBER, working=working)
    last = shape.layers - 1
    outside = {0: max(shape.outside - shape.head, 0) if last else shape.outside, last: min(shape.head, shape.outside)}
    return tuple(
        PartBytes(
            footprint,
            ranks.summed(shape.layer + outside.get(number, 0)),
            shape.hidden * float(NUMBER) if number < last else 0.0,
        )
        for number in range(shape.layers)
    )


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
        hidden: numbers of a hidden state.
        layer, outside: parameters of the largest decoder layer, and of none: embedding, head, the last norm.
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
    hidden: int
    layer: int
    outside: int


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
    parameters = sum(value.numel() for value in model.parameters())
    lists = (one for one in model.modules() if type(one).__name__ == "ModuleList" and len(one) == layers)
    decoder: Any = max(lists, key=_numel, default=[])
    sizes = [_numel(layer) for layer in decoder] or [parameters // layers]
    return ModelShape(
        name=f"{type(model).__name__} of {source}",
        parameters=parameters,
        active=active,
        outputs=outputs,
        widest=outputs / max(layers, 1),
        head=head.weight.numel(),
        layers=layers,
        attention_layers=attention,
        attention_width=heads * size,
        kv_width=2 * kv_heads * size,
        hidden=int(config.hidden_size),
        layer=max(sizes),
        outside=parameters - sum(sizes),
    )


def _numel(module: Any) -> int:
    return sum(value.numel() for value in module.parameters())


def _share_of_experts(config: Any) -> float:
    """The part of the experts that a token takes."""
    count = next((getattr(config, key) for key in EXPERTS if getattr(config, key, None)), None)
    taken = next((getattr(config, key) for key in TAKEN if getattr(config, key, None)), None)
    return float(taken) / float(count) if count and taken else 1.0
