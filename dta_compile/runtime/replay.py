"""CUDA graphs of chunks: recorded once per size, replayed for every chunk of that size.

A chunk of few tokens keeps a GPU busy for less time than its operators take to launch. A recorded graph launches as
one, but reads and writes the memory that it was recorded with. So small chunks are padded to one of `SIZES`; inputs are
copied to where the graph reads them, and results from where it leaves them; the stack and the accumulators stay where
they are from step to step; and where a chunk hangs on the stack is read from device memory (`ChunkTable`).

One call of a model at a time can have them, from its forward to the end of its backward: others run without.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from dta_compile.ops.dtypes import statistics_dtype
from dta_compile.passes.mixer_layers import MixerLayer
from dta_compile.plan import ReplayCounts
from dta_compile.runtime.path.chunk_shape import ChunkTable
from dta_compile.runtime.path.interface import LayerRuntime
from dta_compile.runtime.path.stack import PathStack
from dta_compile.runtime.path.token_states import Reach
from dta_compile.runtime.rows.upload import upload

__all__ = ["Lease", "ReplayCache", "ReplayStack", "is_possible", "pays"]

logger = logging.getLogger("dta_compile")

SIZES = (16, 32, 64, 96, 128, 192, 256, 384, 512)  # tokens, and head rows; larger chunks are worth their launches
CAPACITY = 2048  # stacks grow by so many tokens
SHARE = 0.1  # of the device's memory that graphs may hold
LEAST_RUNS = 4  # of small chunks in a schedule, and as many as of others
MODELS = 2  # that are served by the same compiled code, such as two policies
MOST_MOVES = 3  # times that one of them may be somewhere else before graphs are given up

Run = Callable[[list[Any]], Sequence[torch.Tensor]]
Record = Callable[[Callable[[], Sequence[torch.Tensor]]], tuple[Sequence[torch.Tensor], Callable[[], None]]]


def is_possible(device: torch.device) -> bool:
    """Whether this device has graphs."""
    return device.type == "cuda"


def pays(chunks: Sequence[int]) -> bool:
    """Whether graphs are worth their memory for a schedule that runs chunks of so many tokens."""
    small = sum(tokens <= SIZES[-1] for tokens in chunks)
    return small > LEAST_RUNS and 2 * small >= len(chunks)


@dataclasses.dataclass
class Recorded:
    """A recorded graph, and where it reads and writes; None stands for inputs that stay where they are."""

    inputs: list[torch.Tensor | None]
    outputs: Sequence[torch.Tensor]
    replay: Callable[[], None]

    @property
    def bytes(self) -> int:
        """What stays allocated for it, besides what all graphs share."""
        held = [*(tensor for tensor in self.inputs if tensor is not None), *self.outputs]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)


@dataclasses.dataclass(frozen=True)
class DeviceReach:
    """What a chunk reads and writes of the path by numbers in device memory: see `Reach`.

    Attributes:
        bound: not less than the number of tokens above the chunk.
        put, taken: `[tokens]` at which depth each token's states go on the path, and where its pending gradient is.
    """

    bound: int
    put: torch.Tensor
    taken: torch.Tensor

    def above(self, buffer: torch.Tensor, dim: int) -> torch.Tensor:
        return buffer.narrow(dim, 0, self.bound)

    def write(self, buffer: torch.Tensor, dim: int, values: torch.Tensor) -> None:
        buffer.index_copy_(dim, self.put, values)

    def take(self, buffer: torch.Tensor, dim: int, total: torch.Tensor) -> None:
        total += buffer.index_select(dim, self.taken)
        buffer.index_fill_(dim, self.taken, 0)


class ReplayStack(PathStack):
    """A path stack at fixed addresses that goes by numbers in device memory.

    The last place of every buffer takes what is not to be kept; its gradients are always zero.
    """

    def __init__(
        self, layers: Sequence[MixerLayer], runtimes: Sequence[LayerRuntime], capacity: int, device: torch.device
    ) -> None:
        super().__init__(layers, runtimes, capacity + 1, device)
        self.tables: dict[int, ChunkTable] = {}
        self.places: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.replaying = False

    def prepare(self) -> None:
        """Bring the shape of `chunk` to where graphs for its number of tokens read it."""
        shape, tokens, dump = self.chunk, self.chunk.tokens, self.capacity - 1
        if tokens not in self.tables:
            self.tables[tokens] = ChunkTable(torch.zeros(1 + 2 * tokens, dtype=torch.int32, device=self.device))
            put, take = torch.zeros(2, tokens, dtype=torch.int64, device=self.device)
            self.places[tokens] = put, take
        number = np.arange(tokens)
        put = np.where(number < shape.spine, shape.start + number, dump)
        take = np.where(number < min(self.pending - shape.start, shape.spine), shape.start + number, dump)
        self.tables[tokens].numbers.copy_(upload(shape.table_rows(), self.device), non_blocking=True)
        for place, numbers in zip(self.places[tokens], (put, take), strict=True):
            place.copy_(upload(numbers, self.device), non_blocking=True)

    @property
    def bound(self) -> int:
        """The prefix that graphs are recorded for: a power of two that is not less than the chunk's start."""
        start = self.chunk.start
        return min(max(512, 1 << (start - 1).bit_length()), self.capacity - 1) if start else 0

    def table(self) -> ChunkTable:
        return self.tables[self.chunk.tokens] if self.replaying else super().table()

    def _reach(self) -> Reach:
        if not self.replaying:
            return super()._reach()
        return DeviceReach(self.bound, *self.places[self.chunk.tokens])


@dataclasses.dataclass
class Workplace:
    """What graphs of one set of parameters read and write, besides those, and the graphs.

    Attributes:
        path: the stack.
        sums: accumulators of the gradients, once a backward has asked for them.
        graphs: by what tells them apart; None: run once, not recorded.
        bytes: that the graphs hold.
        is_leased: a call is using it.
    """

    path: ReplayStack
    sums: list[torch.Tensor] = dataclasses.field(default_factory=list)
    graphs: dict[Any, Recorded | None] = dataclasses.field(default_factory=dict)
    bytes: int = 0
    is_leased: bool = False

    def release(self) -> None:
        """The call that had it has ended."""
        self.is_leased = False

    def clean(self) -> None:
        """As new, whatever a call left that ended half-way."""
        self.path.pending = 0
        for states in self.path.states:
            states.zero_gradients()


class Lease:
    """A workplace in the hands of one call, see `Executor.lease`."""

    def __init__(self, cache: ReplayCache, place: Workplace, parameters: Sequence[torch.Tensor]) -> None:
        self.cache, self.place, self.path = cache, place, place.path
        self.counts = ReplayCounts(bytes=place.bytes)
        self.fixed = {parameter.data_ptr() for parameter in parameters}

    def size(self, count: int) -> int:
        """What so many tokens or head rows are padded to."""
        return SIZES[bisect_left(SIZES, count)] if 0 < count <= SIZES[-1] else count

    def replays(self, tokens: int, head_rows: int) -> bool:
        """Whether chunks of this size, padding included, are worth a graph."""
        return tokens <= SIZES[-1] and head_rows <= SIZES[-1]

    def accumulators(self, parameters: Sequence[torch.Tensor], positions: Sequence[int]) -> list[torch.Tensor]:
        """Zeroed sums for the gradients of the parameters at these positions; the same tensors in every call."""
        chosen = [parameters[i] for i in positions]
        if not self.place.sums:
            self.place.sums = [torch.empty_like(p, dtype=statistics_dtype(p.dtype)).detach() for p in chosen]
        for tensor in self.place.sums:
            tensor.zero_()
        self.fixed.update(tensor.data_ptr() for tensor in self.place.sums)
        return list(self.place.sums)

    def run(self, graph: object, run: Run, arguments: list[Any]) -> Sequence[torch.Tensor]:
        """Run a graph of the path and tensors: the first time of a size as it is, from the second time on replayed."""
        tensors = arguments[1:]
        if any(tensor.device != self.path.device for tensor in tensors):
            self.counts.eager += 1  # a graph would go on with the number that it was recorded with
            return run(arguments)
        copied = [tensor.data_ptr() not in self.fixed for tensor in tensors]
        shapes = [tensor.shape for tensor, copy in zip(tensors, copied, strict=True) if copy]
        key = (id(graph), self.path.chunk.tokens, self.path.bound, *(each.key for each in self.path.runtimes), *shapes)
        self.path.prepare()
        self.path.replaying = True
        try:
            recorded = self._find(key, run, tensors, copied)
            if recorded is None:
                self.counts.eager += 1
                return run(arguments)
        finally:
            self.path.replaying = False
        arguments.clear()
        for place, tensor in zip(recorded.inputs, tensors, strict=True):
            if place is not None:
                place.copy_(tensor, non_blocking=True)
        recorded.replay()
        self.counts.replayed += 1
        return [output.clone() for output in recorded.outputs]

    def _find(self, key: Any, run: Run, tensors: Sequence[torch.Tensor], copied: Sequence[bool]) -> Recorded | None:
        """The graph for a key, recorded if it has been run before; None: run it as it is."""
        place, cache = self.place, self.cache
        if key not in place.graphs:
            place.graphs[key] = None
            return None
        found = place.graphs[key]
        if found is None and not cache.given_up and place.bytes <= _most_bytes(self.path.device):
            try:
                found = self._recorded(run, tensors, copied)
            except RuntimeError as error:
                cache.give_up(str(error).strip().splitlines()[0])
                return None
            place.graphs[key] = found
            place.bytes += found.bytes
            self.counts.recorded += 1
            self.counts.bytes = place.bytes
        return found

    def _recorded(self, run: Run, tensors: Sequence[torch.Tensor], copied: Sequence[bool]) -> Recorded:
        inputs = [torch.empty_like(tensor) if copy else None for tensor, copy in zip(tensors, copied, strict=True)]
        given = [tensor if place is None else place for place, tensor in zip(inputs, tensors, strict=True)]
        outputs, replay = self.cache.record(lambda: run([self.path, *given]))
        return Recorded(inputs, outputs, replay)


class ReplayCache:
    """The workplaces of one engine: one for each model that it serves, up to `MODELS`."""

    def __init__(self) -> None:
        self.record: Record = _CudaRecorder()
        self.places: dict[Any, Workplace] = {}  # by the addresses of the parameters, the latest last
        self.moves = 0
        self.given_up = ""

    def lease(
        self,
        layers: Sequence[MixerLayer],
        runtimes: Sequence[LayerRuntime],
        capacity: int,
        device: torch.device,
        attention: str,
        parameters: Sequence[torch.Tensor],
    ) -> Lease | None:
        """A workplace for one call, whose stack needs `capacity` tokens; None: it is in use, or none works here."""
        if self.given_up:
            return None
        addresses = (attention, *(parameter.data_ptr() for parameter in parameters))
        place = self.places.pop(addresses, None)
        if place is not None:
            self.places[addresses] = place
            if place.is_leased:
                return None
        if place is None and not self._make_room():
            return None
        if place is None or place.path.capacity <= capacity:
            if not all(runtime.replayable for runtime in runtimes):
                self.give_up("this kind of attention gets the shape of a chunk from the host")
                return None
            path = ReplayStack(layers, runtimes, -(-max(capacity, 1) // CAPACITY) * CAPACITY, device)
            place = self.places[addresses] = Workplace(path)
        place.path.runtimes = runtimes
        place.clean()
        place.is_leased = True
        return Lease(self, place, parameters)

    def _make_room(self) -> bool:
        """Forget the workplace that was used longest ago, if there are as many as there may be."""
        if len(self.places) < MODELS:
            return True
        self.places.pop(next(iter(self.places)))
        self.moves += 1
        if self.moves > MOST_MOVES:
            self.give_up("the parameters are somewhere else in every step")
        return not self.given_up

    def give_up(self, reason: str) -> None:
        """No more graphs for this engine; says so once."""
        self.given_up, self.places = reason, {}
        logger.warning("dta: chunks run without CUDA graphs from now on: %s", reason)


class _CudaRecorder:
    """Records CUDA graphs into one memory pool: only one of them is under way at a time."""

    def __init__(self) -> None:
        self.pool: Any = None

    def __call__(
        self, function: Callable[[], Sequence[torch.Tensor]]
    ) -> tuple[Sequence[torch.Tensor], Callable[[], None]]:
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            outputs = function()
        return outputs, graph.replay


@functools.cache
def _most_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 1 << 40
    return int(torch.cuda.get_device_properties(device).total_memory * SHARE)
