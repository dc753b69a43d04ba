"""Predict a step for a model, a device and a batch: plans by the real planner, priced by a roofline or measured rates.

A *sweep* is the order in which a tree runs through the layers: "chunks" (all layers for a chunk, then the next chunk)
or "stages" (one layer for the whole tree, then the next layer). `dta estimate` calls `model_shape` and `estimate`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dta_compile.data import Recorded
from dta_compile.data.file_formats import optional
from dta_compile.errors import OptionError, PlanError
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
from dta_compile.plan.cost import BUDGET_SHARE, BY_STAGES, chunk_sizes
from dta_compile.plan.schedule import SWEEPS
from dta_compile.plan.simulate import causal_pairs
from dta_compile.plan.tree.prefix_tree import IntArray
from dta_compile.plan.tree.split_prefixes import Images, with_keys

BYTES_16BIT, BYTES_FP32 = 2, 4  # bytes of a 16-bit weight, activation or gradient, and of a float32 sum of gradients
LAYERS_OF_DEFAULTS = 28  # layers of the model whose launch costs `CostModel.of_gpu` has
# Reads and writes of each output of a matrix product by element-wise operators of the forward.
PASSES = 5.0
ATTENTION_BACKWARD = 2.5  # operations of attention's backward, relative to its forward
HEAD_BACKWARD = 3.0  # relative to the head's forward: the logits are recomputed, then go backward
# Share of the device's memory that plans may take: predictions were up to 14% short (benchmarks/FURTHER.md).
USABLE = 0.88
BATCHES = (1, 2, 4, 8, 16, 32, 64)  # numbers of micro-batches to try
MOST_RANKS = 4096
LEAST_BUDGET = 1e8  # bytes; below it, a default budget is not halved any further
# Bytes per parameter of the optimiser. Mixed precision keeps float32 weights and two float32 moments.
OPTIMIZERS = {"none": 0, "sgd": 0, "adamw": 12, "adamw-bf16": 4, "adamw-8bit": 2}
SHARDS = ("none", "fsdp")
# Smallest and largest ratio of measured to predicted seconds of eager steps (benchmarks/GPU.md).
RIVALS = {"dense": (1.0, 1.8), "dense, checkpointed": (1.7, 3.7)}
RIVALS |= dict.fromkeys(("packed tree", "packed tree, checkpointed"), (1.1, 1.7))
# Temporary memory while each kind of graph runs, as a multiple of the bytes of one layer's outputs.
WORKING = {"cache_only": 2.0, "forward_only": 2.0, "forward": 2.0, "backward": 4.0}
CHECKPOINT = 1.0  # extra forwards of a dense step with checkpointing


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Predicted time and memory of a step, by a plan or by a baseline (dense training, a packed tree).

    Attributes:
        seconds: seconds of forward and backward.
        bytes: peak bytes on a rank, including the model, its gradients and the optimiser.
        forwarded_twice: tokens that are forwarded again for the backward.
        factors: range of the actual seconds, as a smallest and a largest multiple of `seconds`.
        sweep: sweep of the plan; empty for a baseline.
        budget: bytes of activations that the plan may keep for the backward; None: it keeps all.
        chunk_size: largest number of tokens in a chunk; 0 for a baseline.
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
    """Ranks that divide a batch, and the share of the model that each of them holds.

    Attributes:
        shard: "none" (each rank holds all) or "fsdp" (weights, gradients and optimiser states are sharded; layers are
            gathered to run).
        optimizer: key of `OPTIMIZERS`.
    """

    count: int = 1
    shard: str = "none"
    optimizer: str = "none"

    @property
    def holders(self) -> int:
        """Number of ranks that parameters are sharded over."""
        return self.count if self.shard == "fsdp" else 1

    def held(self, shape: ModelShape) -> float:
        """Return the bytes that a rank holds during the whole step: weights, gradients, optimiser states."""
        return shape.parameters * float(BYTES_16BIT + BYTES_16BIT + OPTIMIZERS[self.optimizer]) / self.holders

    def gathered(self, shape: ModelShape, sweep: str) -> float:
        """Return the bytes of gathered weights: all, or by stages those of two layers, embedding and head."""
        if self.holders == 1:
            return 0.0
        return BYTES_16BIT * float(shape.parameters if sweep == "chunks" else shape.outside + 2 * shape.layer)

    def accumulator_bytes(self, parameters: float) -> float:
        """Return the bytes that accumulate gradients: float32 sums and, if sharded, the input of their reduction."""
        return parameters * float(BYTES_FP32 + (BYTES_16BIT if self.holders > 1 else 0))


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Predictions for a step of a batch.

    Attributes:
        plan: the fastest plan that fits, or else the one that needs the least memory.
        head_rows: head rows of the micro-batch (distinct uses of the head).
        fixed_bytes: bytes of weights, gradients and the optimiser on a rank.
        ours: predictions of plans, by sweep and budget.
        others: predictions of the baselines: dense training and the packed tree.
        source: origin of the rates, in words.
        uncertainty: factor by which a plan's actual seconds may be larger or smaller than predicted.
        best: the fastest of `ours` that fits; None: none fits.
        batches: number of micro-batches that each rank accumulates gradients over, so that a plan fits.
        usable: bytes of the device that plans may take.
        ranks_needed: if no plan fits, number of ranks with "fsdp" on which one would; None: not known.
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
    """Return a roofline cost model: matrix products at a share of the peak, the rest at a share of the bandwidth.

    The launch cost per chunk is that of `CostModel.of_gpu`, scaled by the number of layers.
    """
    matmul, bandwidth = device.tflops * 1e12 * MATMUL_SHARE, device.bandwidth * BANDWIDTH_SHARE
    token = 2 * shape.active / matmul + PASSES * shape.outputs * BYTES_16BIT / bandwidth
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
    restored = shape.kv_width * shape.attention_layers * BYTES_16BIT * 2
    shares = f"{MATMUL_SHARE:.0%} of {device.tflops:,.0f} TFLOP/s, attention {ATTENTION_SHARE:.0%}"
    source = f"roofline of {device.name}: {shares}, {BANDWIDTH_SHARE:.0%} of {device.bandwidth / 1e12:.2f} TB/s"
    return CostModel(forward=forward, backward=backward, restore=restored / bandwidth, source=source)


def footprint_of(shape: ModelShape) -> Footprint:
    """Return the footprint of chunks: outputs of matrix products are kept, others recomputed in the backward."""
    per_token = {graph: multiple * shape.layer_outputs * BYTES_16BIT for graph, multiple in WORKING.items()}
    return Footprint(
        graph_token=shape.outputs * BYTES_16BIT,
        kv_token=shape.kv_width * shape.attention_layers * BYTES_16BIT,
        result_token=shape.attention_width * shape.attention_layers * BYTES_16BIT,
        working={graph: ((0.0, size, 0.0),) for graph, size in per_token.items()},  # nothing fixed, or by head row
        kv_gradient=BYTES_FP32 / BYTES_16BIT,
    )


def head_starts_of(tree: PrefixTree, sequences: Sequence[Recorded]) -> IntArray:
    """Return `head_starts` `[R + 1]` (see `simulate`): a token has a head row for each distinct label."""
    rows, labels = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    offset, of_token = 0, tree.token_rows()
    for sequence in sequences:
        size = len(sequence)
        trained = np.flatnonzero(sequence.loss_mask()[1:])
        rows.append(of_token[offset : offset + size][trained])
        labels.append(np.asarray(sequence.tokens, np.int64)[1:][trained])
        offset += size
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
    """Predict time and memory of a training step.

    Args:
        options: `memory_budget` replaces the default budget; `chunk_size` and `sweep` are used as given.
        cost: measured rates; by default, a roofline of the device.
        ranks: ranks that divide the sequences; the prediction is for the rank with the largest tree.
    """
    ranks, usable = ranks or Ranks(), USABLE * device.memory
    factor = device.uncertainty if cost is None else CALIBRATED
    step = _Step(shape, ranks, options, cost or cost_of(shape, device), (1 / factor, factor), device.memory)
    for batches in (*BATCHES, 1):  # back to one batch if nothing fits
        step.take(_largest(sequences, ranks.count * batches), batches)
        recomputing = [step.planned(sweep, "nothing kept", 0) for sweep in step.sweeps]
        smallest = min((prediction for prediction, _ in recomputing), key=lambda prediction: prediction.bytes)
        if smallest.bytes <= usable or ranks.held(shape) > usable:
            break
    planned = [pair for without in recomputing for pair in step.by_budget(without, device.memory, usable)]
    fitting = [pair for pair in planned if pair[0].bytes <= usable]
    fastest = min(fitting, key=lambda pair: (pair[0].seconds, pair[0].bytes)) if fitting else None
    _, plan = fastest or min(planned, key=lambda pair: pair[0].bytes)
    return Estimate(
        plan,
        int(step.heads[-1]),
        ranks.held(shape),
        tuple(prediction for prediction, _ in planned),
        tuple(step.others()),
        step.cost.source,
        factor,
        fastest[0] if fastest else None,
        batches,
        usable,
        ranks,
        None if fastest else _ranks_needed(step, smallest, usable),
    )


def plan_on(
    sequences: Sequence[Recorded], shape: ModelShape, device: Device, options: Options, ranks: Ranks
) -> tuple[Plan, float]:
    """Plan a sweep of chunks over all sequences at once; return the plan, and its predicted peak bytes."""
    step = _Step(shape, ranks, options, cost_of(shape, device), (1.0, 1.0), device.memory)
    step.take(sequences, 1)
    recomputing = step.planned("chunks", "nothing kept", 0)
    prediction, plan = step.by_budget(recomputing, device.memory, USABLE * device.memory)[0]
    return plan, prediction.bytes


def _largest(sequences: Sequence[Recorded], count: int) -> list[Recorded]:
    """Balance the sequences over `count` groups, and return the group with the largest tree."""
    if count == 1:
        return list(sequences)
    groups = [[sequences[i] for i in group] for group in balance([sequence.tokens for sequence in sequences], count)]
    return max(groups, key=lambda group: tree_of(group).num_rows)


def tree_of(sequences: Sequence[Recorded]) -> PrefixTree:
    """Build the prefix tree of sequences; tokens are shared only where recorded routes and images agree."""
    tokens, keys = [sequence.tokens for sequence in sequences], keys_of(sequences)
    if not keys:
        return PrefixTree.build(tokens)
    return with_keys(tokens, keys.get("routes"), Images.of(keys["images"]) if "images" in keys else None)[0]


def keys_of(sequences: Sequence[Recorded]) -> dict[str, list[Any]]:
    """Return the routes and images of all sequences, if any were recorded, as arguments of `plan`.

    Raises:
        PlanError: only some of the sequences have routes.
    """
    keys: dict[str, list[Any]] = {}
    if any(sequence.images for sequence in sequences):
        keys["images"] = [sequence.images for sequence in sequences]
    if any(sequence.routes is not None for sequence in sequences):
        keys["routes"] = [sequence.routes for sequence in sequences]
        missing = [number for number, routes in enumerate(keys["routes"]) if routes is None]
        if missing:
            raise PlanError("routes are there for some sequences only", got=f"none for sequence {missing[0]}")
    return keys


def _ranks_needed(step: _Step, smallest: Prediction, usable: float) -> int | None:
    """Double the ranks that shard the model until the smallest plan fits beside a rank's share; return their number.

    Trees stay as large: more ranks do not divide the sequences further.
    """
    of_plan, count = smallest.bytes - step.held(smallest.sweep), max(step.ranks.count, 2)
    while count <= MOST_RANKS:
        ranks = dataclasses.replace(step.ranks, count=count, shard="fsdp")
        if of_plan + ranks.held(step.shape) + ranks.gathered(step.shape, smallest.sweep) <= usable:
            return count
        count *= 2
    return None


class _Step:
    """Step of one rank, to be planned by each sweep with several budgets.

    Attributes:
        sweeps: sweeps to choose from.
        sums: bytes that accumulate gradients of all parameters, for a sweep of chunks.
        boundary_budget: bytes that hidden states between layers may take; a larger tree is swept in groups of subtrees.
        tree, heads: prefix tree and `head_starts` of one micro-batch (see `take`).
    """

    def __init__(
        self,
        shape: ModelShape,
        ranks: Ranks,
        options: Options,
        cost: CostModel,
        factors: tuple[float, float],
        memory: float,
    ) -> None:
        self.shape, self.ranks, self.options, self.cost, self.factors = shape, ranks, options, cost, factors
        self.sweeps = SWEEPS if options.sweep == "auto" else (options.sweep,)
        self.footprint = footprint_of(shape)
        self.parts = parts_of(shape, ranks)
        self.sums = shape.parameters * float(BYTES_FP32)  # they are cast to gradients one by one
        free = memory - self.held("stages") - max(part.sums for part in self.parts)
        self.boundary_budget = max(free, 0.0) * BUDGET_SHARE

    def take(self, sequences: Sequence[Recorded], batches: int) -> None:
        """Set the micro-batch: predictions are for the tree of `sequences`, run `batches` times."""
        self.tree = tree_of(sequences)
        self.heads, self.batches = head_starts_of(self.tree, sequences), batches

    def held(self, sweep: str) -> float:
        """Return the bytes that a rank holds while a sweep runs, with weights gathered for it."""
        held = self.ranks.held(self.shape) + self.ranks.gathered(self.shape, sweep)
        # A single micro-batch has no gradients beside their sums. Of shards, both are counted, as they are small.
        has_sums_alone = sweep == "chunks" and self.batches == 1 == self.ranks.holders
        return held - BYTES_16BIT * self.shape.parameters if has_sums_alone else held

    def planned(self, sweep: str, name: str, budget: int | None) -> tuple[Prediction, Plan]:
        """Plan a sweep with a budget of activations, and return its prediction and the plan.

        Args:
            name: describes the budget in the prediction's name.
        """
        options = dataclasses.replace(self.options, sweep=sweep)
        most = math.inf if budget is None else budget
        if sweep == "chunks":
            sizes = chunk_sizes(most, self.footprint.graph_token)
        else:
            tokens = self.tree.num_rows
            boundaries = tokens * sum(part.sent for part in self.parts)
            sizes = chunk_sizes(most, self.parts[0].footprint.graph_token, BY_STAGES, boundaries, tokens)
        limits = Limits(budget, self.footprint, self.cost, self.heads, sizes, self.sums, self.parts)
        if sweep == "stages" and budget is not None:
            limits = dataclasses.replace(limits, room=self.boundary_budget)
        plan = make_plan(self.tree, options, limits=limits)
        parts, stack = limits.parts_of(sweep), plan.simulation.peak_stack_tokens
        halves = bytes_of_halves(plan.prefix_tree, plan.schedule, parts, stack, plan.limits.head_starts)
        groups, stride = len(plan.schedule.groups), plan.schedule.stride
        prediction = Prediction(
            f"{sweep}, {name}"
            + (f", {groups} groups of subtrees" if groups else "")
            + (f", stride {stride}" if stride > 1 else ""),
            self.batches * plan.estimates.seconds,
            self.held(sweep) + max(halves),
            self.batches * plan.simulation.recomputed_tokens,
            self.factors,
            sweep,
            budget,
            plan.schedule.chunk_size,
        )
        return prediction, plan

    def by_budget(
        self, recomputing: tuple[Prediction, Plan], memory: float, usable: float
    ) -> list[tuple[Prediction, Plan]]:
        """Plan a sweep with the budget of the options or a default one, and with one for all activations.

        A default budget is halved until the plan fits; if it becomes too small, the plan with it is left out.

        Args:
            recomputing: prediction and plan of the sweep with a budget of 0, which the result includes.
            memory: bytes of the device; plans may take `usable` of them.
        """
        sweep, budget = recomputing[0].sweep, self.options.memory_budget
        if is_default := budget is None:
            sums = self.sums if sweep == "chunks" else max(part.sums for part in self.parts)
            budget = int(max(memory - self.held(sweep) - sums, 0) * BUDGET_SHARE)
        planned = self.planned(sweep, f"{budget / 1e9:.1f} GB kept", budget)
        while is_default and planned[0].bytes > usable >= recomputing[0].bytes and budget > LEAST_BUDGET:
            budget //= 2
            planned = self.planned(sweep, f"{budget / 1e9:.1f} GB kept", budget)
        without, keeping_all = recomputing, self.planned(sweep, "all kept", None)
        return [without, keeping_all] if is_default and budget <= LEAST_BUDGET else [planned, without, keeping_all]

    def others(self) -> list[Prediction]:
        """Predict dense steps (a sequence at a time) and packed trees (one row with a mask), scaled by `RIVALS`."""
        tree, head_rows, lengths = self.tree, int(self.heads[-1]), self.tree.lengths
        tokens, longest = int(lengths.sum()), int(lengths.max(initial=0))
        dense = Work(
            launches=len(lengths),
            slices=len(lengths),
            tokens=tokens,
            pairs=causal_pairs(lengths),
            heads=int(tokens * (head_rows / max(tree.num_rows, 1))),
        )
        tree_pairs = causal_pairs(tree.stop) - causal_pairs(tree.start)
        packed = Work(launches=1, slices=1, tokens=tree.num_rows, pairs=tree_pairs, heads=head_rows)
        fixed, checkpoint_token = self.held("stages"), self.shape.hidden * BYTES_16BIT * self.shape.layers
        predictions = []
        for name, work, row in (("dense", dense, longest), ("packed tree", packed, tree.num_rows)):
            activations = self.footprint.graph_token * row
            one_layer = self.parts[0].footprint.while_running("backward", Work(tokens=row))
            seconds = self.cost.forward.seconds(work) + self.cost.backward.seconds(work)
            again = CHECKPOINT * self.cost.forward.seconds(work._replace(heads=0))
            predictions += [
                self._rival(name, seconds, fixed + activations, 0),
                self._rival(
                    f"{name}, checkpointed", seconds + again, fixed + checkpoint_token * row + one_layer, work.tokens
                ),
            ]
        return predictions

    def _rival(self, name: str, seconds: float, peak: float, forwarded_twice: int) -> Prediction:
        """Scale the seconds of a baseline's micro-batch by the ratios of `RIVALS`, for all micro-batches."""
        low, high = RIVALS[name]
        middle = math.sqrt(low * high)
        factors = low / middle * self.factors[0], high / middle * self.factors[1]
        return Prediction(name, self.batches * middle * seconds, peak, self.batches * forwarded_twice, factors)


def parts_of(shape: ModelShape, ranks: Ranks) -> tuple[PartBytes, ...]:
    """Return the bytes of the parts of a sweep of stages: each is a layer, which sends hidden states to the next one.

    The first part includes the embedding, and the last one the head.
    """
    footprint = dataclasses.replace(
        footprint_of(shape),
        graph_token=shape.outputs / shape.layers * BYTES_16BIT,
        kv_token=shape.kv_width * BYTES_16BIT,
        result_token=shape.attention_width * BYTES_16BIT,
    )
    last = shape.layers - 1
    embedding, head = max(shape.outside - shape.head, 0), min(shape.head, shape.outside)  # tied: all of it is the head
    return tuple(
        PartBytes(
            footprint,
            ranks.accumulator_bytes(shape.layer + embedding * (number == 0) + head * (number == last)),
            shape.hidden * float(BYTES_16BIT) if number < last else 0.0,
            reduced=ranks.accumulator_bytes(shape.layer) if ranks.holders > 1 else 0.0,
        )
        for number in range(shape.layers)
    )


# Keys of configurations: number of experts, and number of experts of a token.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_top_k", "top_k_experts")

# Accepted range of each size in a configuration; no model comes near the upper bounds.
SIZES = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layers", "n_layer"), (1, 512)),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), (1, 2**14)),
    **dict.fromkeys((*EXPERTS, *EXPERTS_PER_TOKEN), (0, 2**14)),
    **dict.fromkeys(("hidden_size", "vocab_size"), (1, 2**24)),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), (0, 2**24)),
}


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """Sizes of a model, as numbers of elements.

    Attributes:
        name: architecture and source of the configuration.
        active: parameters of the matrix products that one token runs, without the head.
        outputs: outputs of the matrix products and attention for one token, without the head.
        layer_outputs: outputs of the average layer.
        head: parameters of the head.
        layers, attention_layers: number of decoder layers, and of those with attention.
        attention_width: heads times head dimension of the queries of a token in a layer.
        kv_width: keys and values of a token in a layer.
        hidden: hidden size.
        layer, outside: parameters of the largest decoder layer, and outside all of them (embedding, head, final norm).
    """

    name: str
    parameters: int
    active: float
    outputs: float
    layer_outputs: float
    head: int
    layers: int
    attention_layers: int
    attention_width: int
    kv_width: int
    hidden: int
    layer: int
    outside: int


def model_shape(config: str) -> ModelShape:
    """Return the sizes of a transformers model, which is built on the meta device.

    Args:
        config: a `config.json`, its folder, or a name that transformers' AutoConfig knows.

    Raises:
        MissingPackageError: transformers or torch is not installed.
        OptionError: not a configuration of a causal language model.
    """
    transformers = optional("transformers", "dta estimate")
    torch = optional("torch", "dta estimate")
    if config.endswith(".json") and not Path(config).exists():  # fail fast: the hub takes long to miss a name
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
    except Exception as error:  # transformers, huggingface_hub and the model's code may raise anything
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise OptionError(
            "not a configuration of a causal language model",
            expected="a config.json of transformers, its folder, or a name of the hub",
            got=f"{config!r}: {first}",
        ) from error


def _check(config: dict[str, Any]) -> None:
    """Raise ValueError for a size out of range, also in nested configurations: building such a model may take hours."""
    if not isinstance(config, dict):
        raise ValueError("the file holds no JSON object")
    for key, value in config.items():
        if key in SIZES and value is not None:
            low, high = SIZES[key]
            sizes = value if isinstance(value, list) else [value]  # a list has a size per layer
            if not all(type(size) is int and low <= size <= high for size in sizes):
                raise ValueError(f"{key} must be an integer from {low} to {high} (or one per layer), not {value!r}")
        elif isinstance(value, dict):
            _check(value)


def _shape(model: Any, config: Any, source: str) -> ModelShape:
    """Count parameters and outputs of a model on the meta device; `source` is where its configuration is from."""
    share = _share_of_experts(config)
    embeddings = (module for module in model.modules() if type(module).__name__.endswith("Embedding"))
    tables = {id(module.weight) for module in embeddings if hasattr(module, "weight")}
    head = model.get_output_embeddings()
    tables.add(id(head.weight))
    active = outputs = 0.0
    stacked: dict[str, list[tuple[float, Sequence[int]]]] = {}  # matrices of experts, by module
    for name, value in model.named_parameters():
        if value.dim() < 2 or id(value) in tables or "conv" in name or name.endswith("bias"):
            continue
        part = share if "expert" in name and "shared" not in name else 1.0
        active += part * value.numel()
        if value.dim() == 3:
            stacked.setdefault(name.removesuffix(".weight").rpartition(".")[0], []).append((part, value.shape))
        else:
            outputs += part * value.shape[0]
    outputs += sum(_outputs_of_stacked(matrices, int(config.hidden_size)) for matrices in stacked.values())
    heads, layers = round(_mean(config.num_attention_heads)), int(config.num_hidden_layers)
    size = round(_mean(getattr(config, "head_dim", None) or config.hidden_size // heads))
    kv_heads = round(_mean(getattr(config, "num_key_value_heads", None) or heads))
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * layers
    attention = sum("linear" not in kind and "mamba" not in kind and "conv" not in kind for kind in kinds)
    outputs += attention * heads * size
    parameters = sum(value.numel() for value in model.parameters())
    lists = (module for module in model.modules() if type(module).__name__ == "ModuleList" and len(module) == layers)
    decoder: Any = max(lists, key=_numel, default=[])
    sizes = [_numel(layer) for layer in decoder] or [parameters // layers]
    return ModelShape(
        name=f"{type(model).__name__} of {source}",
        parameters=parameters,
        active=active,
        outputs=outputs,
        layer_outputs=outputs / max(layers, 1),
        head=head.weight.numel(),
        layers=layers,
        attention_layers=attention,
        attention_width=heads * size,
        kv_width=2 * kv_heads * size,
        hidden=int(config.hidden_size),
        layer=max(sizes),
        outside=parameters - sum(sizes),
    )


def _outputs_of_stacked(matrices: Sequence[tuple[float, Sequence[int]]], width: int) -> float:
    """Return the outputs of a module's experts for a token, given shares of experts, shapes and the model's width.

    Shapes are `[E, out, in]` or `[E, in, out]`. The last of the smallest matrices is the down projection, as gates and
    up projections have no fewer entries: it gives the model's width, and the others take it.
    """
    down = min(range(len(matrices)), key=lambda number: (math.prod(matrices[number][1][1:]), -number))
    total = 0.0
    for number, (part, (experts, first, second)) in enumerate(matrices):
        is_down, out = number == down and len(matrices) > 1, first  # without the width, `[E, out, in]`
        if width in (first, second):
            out = width if is_down else first * second // width
        total += part * experts * out
    return total


def _mean(size: Any) -> float:
    """Return a size, or the mean of one per layer."""
    return float(sum(size) / len(size)) if isinstance(size, (list, tuple)) else float(size)


def _numel(module: Any) -> int:
    return sum(value.numel() for value in module.parameters())


def _share_of_experts(config: Any) -> float:
    """Return the share of the experts that a token takes, 1.0 without experts."""
    count = next((getattr(config, key) for key in EXPERTS if getattr(config, key, None)), None)
    per_token = next((getattr(config, key) for key in EXPERTS_PER_TOKEN if getattr(config, key, None)), None)
    return _mean(per_token) / _mean(count) if count and per_token else 1.0
