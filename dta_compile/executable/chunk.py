"""The executable graphs of a chunk: its stages one after the other, each of a kind that others share.

What a stage reads and writes are *slots* of the chunk: first the chunk's inputs (parameters, constants, the trunk's
inputs, head rows, the head's inputs), then transposes of some of these, then the values that cross from stage to stage.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from dta_compile.executable.code import Code

__all__ = ["ChunkGraphs", "Generated", "Part", "Path", "Run", "Stage", "StageCode"]

Run = Callable[..., Sequence[Any]]
Linear = tuple[float, float, float]


class Path(Protocol):
    """The states of mixers above a chunk; see `runtime.path.stack`."""

    def of_layers(self, layers: Sequence[int]) -> Any:
        """The path as a stage sees it, which counts its own layers from zero."""


class Generated(Protocol):
    """Code that the graphs call; `str` of it is the report. See `codegen.generated.GeneratedCode`."""

    @property
    def pieces(self) -> Mapping[str, Sequence[Any]]:
        """The parts that code is generated for, by the graph that calls them; see `executable.pieces`."""

    @property
    def is_used(self) -> bool:
        """Whether calls that begin now run generated code."""

    @property
    def swaps(self) -> int:
        """How often code took the place of ATen between two calls."""

    def prepare(self, graphs: Iterable[str], wait: bool = False) -> Mapping[Any, Any]:
        """The code that a call of these graphs runs which begins now; `wait` for all of it."""


@dataclasses.dataclass(frozen=True, eq=False)
class StageCode:
    """A kind of stage. Its graphs take the path, then what the stage reads.

    Attributes:
        cache_only: writes the states of its mixers to the path; returns nothing.
        forward_only: writes states, returns what the stage writes.
        forward: writes states, returns what the stage writes, then the values that it saves.
        backward: takes a list of the path, what is kept for it, gradients and accumulators, which it empties; returns
            gradients of what the stage reads from other stages.
    """

    cache_only: Code
    forward_only: Code
    forward: Code
    backward: Code | None


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of a chunk: the first one (embeddings), a layer, the last one (norm, head, log-probs).

    Attributes:
        kind: its position in `ChunkGraphs.kinds`.
        layers: the numbers of its mixers' layers.
        reads, writes: slots.
        last_reads: those slots, written by stages, that nobody needs after its forward.
        keeps: those of the slots that it writes which are kept for the backward, after what it saves.
        kept: what its backward takes, as positions among all that is kept of the chunk.
        last_kept: those of them that no stage before it takes.
        tangents: slots whose gradients its backward takes.
        gradients: slots whose gradients its backward returns.
        accumulators: what its backward adds gradients of parameters to, as positions among the chunk's.
        only_states: in the graph that leaves states alone (an anchor): True, it runs `cache_only`; False,
            `forward_only`; None, not at all.
    """

    kind: int
    layers: tuple[int, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    last_reads: tuple[int, ...]
    keeps: tuple[int, ...]
    kept: tuple[int, ...]
    last_kept: tuple[int, ...]
    tangents: tuple[int, ...]
    gradients: tuple[int, ...]
    accumulators: tuple[int, ...]
    only_states: bool | None


@dataclasses.dataclass(frozen=True, eq=False)
class ChunkGraphs:
    """The graphs of a chunk, or of a part of its stages. All take `path`, then the inputs with the transposes of some
    (see `transposes`).

    Attributes:
        kinds, stages: what they are made of; stages in order of the forward.
        inputs: how many inputs there are: those of a chunk, then what a part reads of others.
        received: of those, the slots of what a part reads of others.
        slots: how many slots.
        transposed: the inputs whose transposes have slots, right after those of the inputs.
        outputs: slots of the frontier values.
        backward_inputs: inputs that are kept for the backward; the first of what is kept, before the saved values.
        saved_states: for each mixer layer, where its states (key and value) are among what is kept.
        differentiated: positions of the frontier values whose gradients the backward takes.
        grad_parameters: positions among the inputs of the parameters that receive a gradient.
        grad_sources: for each of `grad_parameters`, which frontier values its gradient comes from.
        token_bytes, head_bytes: what one chunk keeps for its backward, per token and per head row: saved values, and
            the inputs of trunk and head among `backward_inputs`.
        kv_bytes: the states of all layers, per token: keys and values, for attention.
        head_dims: for each of `backward_inputs` and then of the saved values, the dimension that runs over head rows.
        head_rows_separable: the backward may be run for some of the head rows, see `of_head_rows`.
        working: per graph, the bytes that it allocates at its peak, as the largest of several functions
            `fixed, per token, per head row`. The backward's includes the saved values that it is handed and frees.
        generated: the code that the graphs call, if any is generated for them.
    """

    kinds: tuple[StageCode, ...]
    stages: tuple[Stage, ...]
    inputs: int
    received: tuple[int, ...]
    slots: int
    transposed: tuple[int, ...]
    outputs: tuple[int, ...]
    backward_inputs: tuple[int, ...]
    saved_states: tuple[tuple[int, ...], ...]
    differentiated: tuple[int, ...]
    grad_parameters: tuple[int, ...]
    grad_sources: tuple[frozenset[int], ...]
    token_bytes: float
    head_bytes: float
    kv_bytes: float
    head_dims: tuple[int | None, ...]
    head_rows_separable: bool
    working: Mapping[str, tuple[Linear, ...]]
    generated: Generated | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Without what was compiled."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @property
    def saved_bytes_per_token(self) -> float:
        """Bytes kept per chunk token that has one head row."""
        return self.token_bytes + self.head_bytes

    def transposes(self, whole: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What graphs take after a chunk's inputs, made once a call; `whole`: parameters and constants."""
        return [whole[i].t() for i in self.transposed]

    @functools.cached_property
    def differentiated_reads(self) -> frozenset[int]:
        """Positions of what is `received` that gets a gradient."""
        taken = {slot for stage in self.stages for slot in stage.gradients}
        return frozenset(i for i, slot in enumerate(self.received) if slot in taken)

    @functools.cached_property
    def run_cache_only(self) -> Run:
        """An anchor: writes the states of a chunk's spine to the path; returns nothing."""
        stages = [stage for stage in self.stages if stage.only_states is not None]
        kinds = self.kinds
        runs = [
            kinds[stage.kind].cache_only if stage.only_states else kinds[stage.kind].forward_only for stage in stages
        ]
        return _Forward(self, stages, [code.function for code in runs], returns_outputs=False)

    @functools.cached_property
    def run_forward_only(self) -> Run:
        """Writes states, returns the frontier values (an anchor with outputs, or scoring)."""
        return _Forward(self, self.stages, [self.kinds[stage.kind].forward_only.function for stage in self.stages])

    @functools.cached_property
    def run_forward(self) -> Run:
        """Writes states, returns the frontier values, then the saved values."""
        runs = [self.kinds[stage.kind].forward.function for stage in self.stages]
        return _Forward(self, self.stages, runs, saves=True)

    @functools.cached_property
    def run_backward(self) -> Run:
        """Takes a list of `path`, what is kept (`backward_inputs`, saved values), the gradients of the `differentiated`
        frontier values, and accumulators for `grad_parameters`; empties it, so that values are freed after their last
        use. Returns the gradients of what is `received`, None for those that have none."""
        return _Backward(self)

    def of_head_rows(self, kept: Sequence[torch.Tensor], rows: torch.Tensor) -> list[torch.Tensor]:
        """The kept values (`backward_inputs`, then saved values) for some of the head rows, in the memory order that
        the backward expects. With the tangents of these rows it gives what all rows give with zeros elsewhere."""
        return [
            value if dim is None else _select(value, dim, rows) for value, dim in zip(kept, self.head_dims, strict=True)
        ]


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """Consecutive stages of a chunk, all of them or a layer, that a schedule's ops run; see `plan.schedule`.

    Attributes:
        graphs: from `inputs` and `reads` to `writes`, and then frontier values; parts alike share them.
        inputs: which of a chunk's inputs it reads, ascending: parameters, constants, the trunk's, the head's.
        layers: the numbers of its mixers' layers, which its graphs count from zero.
        reads, writes: numbers of the values that cross from part to part; of each there is a tensor a chunk.
        frontier: the frontier values that it computes.
        written_bytes: what it writes, per token.
    """

    graphs: ChunkGraphs
    inputs: tuple[int, ...]
    layers: tuple[int, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    frontier: tuple[int, ...]
    written_bytes: float = 0.0


class _Forward:
    """Stages one after the other."""

    def __init__(
        self,
        chunk: ChunkGraphs,
        stages: Sequence[Stage],
        runs: Sequence[Run],
        returns_outputs: bool = True,
        saves: bool = False,
    ) -> None:
        self.stages = list(zip(stages, runs, strict=True))
        self.outputs = chunk.outputs if returns_outputs else ()
        self.saves = saves
        self.crossing = [None] * (chunk.slots - chunk.inputs - len(chunk.transposed))

    def __call__(self, path: Path, *inputs: torch.Tensor) -> list[torch.Tensor]:
        values: list[Any] = [*inputs, *self.crossing]
        saved: list[torch.Tensor] = []
        for stage, run in self.stages:
            results = run(path.of_layers(stage.layers), *[values[i] for i in stage.reads])
            for slot, value in zip(stage.writes, results, strict=False):
                values[slot] = value
            if self.saves:
                saved += results[len(stage.writes) :]
                saved += [values[slot] for slot in stage.keeps]
            for slot in stage.last_reads:
                values[slot] = None
        return [*(values[slot] for slot in self.outputs), *saved]


class _Backward:
    """Stages one after the other, the last one first; gradients of a value that several of them read are added."""

    def __init__(self, chunk: ChunkGraphs) -> None:
        self.kept, self.tangents = len(chunk.head_dims), [chunk.outputs[i] for i in chunk.differentiated]
        self.received = chunk.received
        backwards = [(stage, chunk.kinds[stage.kind].backward) for stage in reversed(chunk.stages)]
        self.stages = [(stage, code.function) for stage, code in backwards if code is not None]

    def __call__(self, arguments: list[Any]) -> Sequence[torch.Tensor | None]:
        path, kept = arguments[0], arguments[1 : 1 + self.kept]
        first = 1 + self.kept + len(self.tangents)
        gradients: dict[int, torch.Tensor] = {}
        _add(gradients, self.tangents, arguments[1 + self.kept : first])
        accumulators = arguments[first:]
        arguments.clear()
        for stage, run in self.stages:
            handed = [path.of_layers(stage.layers), *[kept[i] for i in stage.kept]]
            handed += [gradients.pop(slot) for slot in stage.tangents]
            handed += [accumulators[i] for i in stage.accumulators]
            for i in stage.last_kept:
                kept[i] = None
            _add(gradients, stage.gradients, run(handed))
        return [gradients.pop(slot, None) for slot in self.received]


def _add(gradients: dict[int, torch.Tensor], slots: Sequence[int], parts: Sequence[torch.Tensor]) -> None:
    for slot, part in zip(slots, parts, strict=True):
        gradients[slot] = gradients[slot] + part if slot in gradients else part


def _select(value: torch.Tensor, dim: int, rows: torch.Tensor) -> torch.Tensor:
    """`value.index_select(dim, rows)` with dimensions in the same order in memory, as views of it rely on that."""
    order = sorted(range(value.dim()), key=value.stride, reverse=True)
    inverse = [order.index(i) for i in range(value.dim())]
    return value.permute(order).index_select(order.index(dim), rows).permute(inverse)
