"""The executable graphs of a chunk: a sequence of stages, which share the code of their kind.

Stages read and write *slots* of the chunk: first the chunk's inputs (parameters, constants, the trunk's inputs, head
rows, the head's inputs), then transposes of some of these, then the values that cross from stage to stage.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

import torch

from dta_compile.executable.code import Code

Run = Callable[..., Sequence[Any]]
Linear = tuple[float, float, float]


class Path(Protocol):
    """The mixer states of the tokens above a chunk; see `runtime.path.stack`."""

    def of_layers(self, layers: Sequence[int]) -> Any:
        """Return the path for a stage, in which the given layers are numbered from zero."""


class Generated(Protocol):
    """Generated code that the graphs call; `str` gives the report. See `codegen.generated.GeneratedCode`."""

    @property
    def pieces(self) -> Mapping[str, Sequence[Any]]:
        """Return the pieces with generated code, by the graph that calls them; see `executable.pieces`."""

    @property
    def is_used(self) -> bool:
        """Return whether calls that start now run generated code."""

    @property
    def swaps(self) -> int:
        """Return how often generated code replaced ATen operators between two calls."""

    def prepare(self, graphs: Iterable[str], wait: bool = False) -> Mapping[Any, Any]:
        """Return the code for a call of these graphs that starts now; with `wait`, generate all of it first."""


@dataclasses.dataclass(frozen=True, eq=False)
class StageCode:
    """The graphs of one kind of stage. They take the path, then the slots that the stage reads.

    Attributes:
        cache_only: writes the states of its mixers to the path; returns nothing.
        forward_only: writes states, returns the slots that the stage writes.
        forward: writes states, returns the slots that the stage writes, then the saved values.
        backward: takes one list (the path, the values kept for it, gradients, accumulators) and empties it;
            returns gradients of the slots that the stage reads from other stages.
    """

    cache_only: Code
    forward_only: Code
    forward: Code
    backward: Code | None


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stage of a chunk: the first one (embeddings), a layer, the last one (norm, head, log-probs).

    Attributes:
        kind: position in `ChunkGraphs.kinds`.
        layers: numbers of its mixer layers.
        reads, writes: slots.
        last_reads: slots, written by stages, that are dead after its forward.
        saved_writes: written slots that are kept for the backward, after the saved values.
        backward_reads: values that its backward takes, as positions among all kept values of the chunk.
        last_backward_reads: those of them that no stage before it takes.
        tangents: slots whose gradients its backward takes.
        gradients: slots whose gradients its backward returns.
        accumulators: accumulators of parameter gradients for its backward, as positions among the chunk's.
        anchor: the graph that runs in a pass that only writes states (an anchor): "cache_only", "forward_only" where
            another stage that runs reads what it writes, or None.
    """

    kind: int
    layers: tuple[int, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    last_reads: tuple[int, ...]
    saved_writes: tuple[int, ...]
    backward_reads: tuple[int, ...]
    last_backward_reads: tuple[int, ...]
    tangents: tuple[int, ...]
    gradients: tuple[int, ...]
    accumulators: tuple[int, ...]
    anchor: Literal["cache_only", "forward_only"] | None


@dataclasses.dataclass(frozen=True, eq=False)
class ChunkGraphs:
    """The graphs of a chunk, or of some of its stages. All take `path`, then the inputs, then `transposes` of some.

    Attributes:
        kinds, stages: kinds of stages with their code; stages in forward order.
        inputs: number of inputs: those of a chunk, then the values that a part reads from other parts.
        received: the slots of the values that a part reads from other parts.
        slots: number of slots.
        transposed: inputs whose transposes have slots, right after those of the inputs.
        outputs: slots of the frontier values: what code outside of the tree reads, such as log-probabilities.
        backward_inputs: inputs that are kept for the backward; they precede the saved values.
        saved_states: for each mixer layer, positions of its states (key and value) among the kept values.
        differentiated: positions of the frontier values whose gradients the backward takes.
        grad_parameters: positions among the inputs of the parameters that receive a gradient.
        grad_sources: for each of `grad_parameters`, the frontier values that its gradient comes from.
        token_bytes, head_bytes: bytes that one chunk keeps for its backward, per token and per head row (a token
            whose logits are read): saved values, and the inputs of trunk and head among `backward_inputs` that no other
            part has sent.
        kv_bytes: bytes per token of the states of all layers (for attention, keys and values).
        result_bytes: bytes per token of the results of all layers without running states (for attention, output and
            log-sum-exps).
        head_dims: for each of `backward_inputs`, then for each saved value, the dimension that runs over head rows.
        head_rows_separable: whether the backward may run for a subset of the head rows, see `of_head_rows`.
        working: per graph, the bytes allocated at its peak, as the maximum of several functions
            `fixed, per token, per head row`. For the backward they include the saved values that it takes and frees;
            "first_backward" also begins the sums of parameter gradients.
        generated: generated code that the graphs call, if there is any.
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
    result_bytes: float
    head_dims: tuple[int | None, ...]
    head_rows_separable: bool
    working: Mapping[str, tuple[Linear, ...]]
    generated: Generated | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave the compiled functions out."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @property
    def saved_bytes_per_token(self) -> float:
        """Return the bytes kept for a chunk token that has one head row."""
        return self.token_bytes + self.head_bytes

    def transposes(self, whole: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the transposes that graphs take after a chunk's inputs, once per call.

        `whole` are the parameters and constants.
        """
        return [whole[i].t() for i in self.transposed]

    @functools.cached_property
    def differentiated_reads(self) -> frozenset[int]:
        """Return the positions in `received` of the values that get a gradient."""
        with_gradient = {slot for stage in self.stages for slot in stage.gradients}
        return frozenset(i for i, slot in enumerate(self.received) if slot in with_gradient)

    @functools.cached_property
    def run_cache_only(self) -> Run:
        """Write the states of a chunk's spine to the path (an anchor); return nothing."""
        stages = [stage for stage in self.stages if stage.anchor is not None]
        codes: list[Code] = [getattr(self.kinds[stage.kind], str(stage.anchor)) for stage in stages]
        return _Forward(self, stages, codes, returns_outputs=False)

    @functools.cached_property
    def run_forward_only(self) -> Run:
        """Write states, return the frontier values (an anchor with outputs, or scoring)."""
        return _Forward(self, self.stages, [self.kinds[stage.kind].forward_only for stage in self.stages])

    @functools.cached_property
    def run_forward(self) -> Run:
        """Write states, return the frontier values, then the saved values."""
        return _Forward(self, self.stages, [self.kinds[stage.kind].forward for stage in self.stages], saves=True)

    @functools.cached_property
    def run_backward(self) -> Run:
        """Return the gradients of the `received` values, None for those without one.

        Takes a list of `path`, the kept values (`backward_inputs`, saved values), the gradients of the `differentiated`
        frontier values, and accumulators for `grad_parameters`; empties it so that values are freed after their last
        use.
        """
        return _Backward(self)

    def of_head_rows(self, kept: Sequence[torch.Tensor], rows: torch.Tensor) -> list[torch.Tensor]:
        """Select head rows of the kept values (`backward_inputs`, then saved values), in the backward's memory order.

        With the tangents of these rows the backward gives the same result as with all rows and zeros elsewhere.
        """
        return [
            value if dim is None else _select(value, dim, rows) for value, dim in zip(kept, self.head_dims, strict=True)
        ]


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """Consecutive stages of a chunk, all of them or one layer, that one op of a schedule runs; see `plan.schedule`.

    Attributes:
        graphs: from `inputs` and `reads` to `writes`, then frontier values; equal parts share them.
        inputs: the chunk's inputs that it reads, ascending: parameters, constants, the trunk's, the head's.
        layers: numbers of its mixer layers, which its graphs number from zero.
        reads, writes: numbers of the values that cross from part to part, one tensor per chunk each.
        frontier: the frontier values that it computes.
        written: bytes per token of each tensor that it writes, and the parts that read it, ascending.
    """

    graphs: ChunkGraphs
    inputs: tuple[int, ...]
    layers: tuple[int, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    frontier: tuple[int, ...]
    written: tuple[tuple[float, tuple[int, ...]], ...] = ()

    @property
    def written_bytes(self) -> float:
        """Return the bytes that it writes, per token."""
        return sum(size for size, _ in self.written)


def first_backward(parts: Sequence[Part]) -> int:
    """Return the number of the first part that goes backward: earlier ones have no parameters with a gradient."""
    return next((number for number, part in enumerate(parts) if part.graphs.differentiated), 0)


class _Forward:
    """A callable that runs stages in order."""

    def __init__(
        self,
        chunk: ChunkGraphs,
        stages: Sequence[Stage],
        codes: Sequence[Code],
        returns_outputs: bool = True,
        saves: bool = False,
    ) -> None:
        self.stages = [(stage, code.function) for stage, code in zip(stages, codes, strict=True)]
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
                saved += [values[slot] for slot in stage.saved_writes]
            for slot in stage.last_reads:
                values[slot] = None
        return [*(values[slot] for slot in self.outputs), *saved]


class _Backward:
    """A callable that runs the backward of stages in reverse order and sums the gradients of each slot."""

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
            stage_arguments = [path.of_layers(stage.layers), *[kept[i] for i in stage.backward_reads]]
            stage_arguments += [gradients.pop(slot) for slot in stage.tangents]
            stage_arguments += [accumulators[i] for i in stage.accumulators]
            for i in stage.last_backward_reads:
                kept[i] = None
            _add(gradients, stage.gradients, run(stage_arguments))
        return [gradients.pop(slot, None) for slot in self.received]


def _add(gradients: dict[int, torch.Tensor], slots: Sequence[int], parts: Sequence[torch.Tensor]) -> None:
    for slot, part in zip(slots, parts, strict=True):
        gradients[slot] = gradients[slot] + part if slot in gradients else part


def _select(value: torch.Tensor, dim: int, rows: torch.Tensor) -> torch.Tensor:
    """Return `value.index_select(dim, rows)` with the same memory order of dimensions, which views of it rely on."""
    order = sorted(range(value.dim()), key=value.stride, reverse=True)
    inverse = [order.index(i) for i in range(value.dim())]
    return value.permute(order).index_select(order.index(dim), rows).permute(inverse)
