"""Which calls replay graphs, and of which chunks: the arenas of an engine, each lent to one call at a time."""

from __future__ import annotations

import dataclasses
import functools
import logging
from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import torch

from dta_compile.executable.layers import MixerLayer
from dta_compile.executable.pieces import NO_CODES, Codes
from dta_compile.ops.dtypes import statistics_dtype
from dta_compile.plan import ReplayCounts
from dta_compile.runtime.path.chunk_shape import ChunkTable
from dta_compile.runtime.path.interface import AnyRuntime
from dta_compile.runtime.path.stack import PathStack
from dta_compile.runtime.path.token_states import Buffer, Reach
from dta_compile.runtime.rows.upload import upload

logger = logging.getLogger("dta_compile")

SIZES = (16, 32, 64, 96, 128, 192, 256, 384, 512)  # tokens, and head rows; larger chunks are worth their launches
CAPACITY = 2048  # stacks grow by so many tokens
LEAST_RUNS = 4  # of small chunks in a schedule, and as many as of others
MODELS = 2  # that are served by the same compiled code, such as two policies
MOST_MOVES = 3  # times that one of them may be somewhere else before graphs are given up

Run = Callable[[list[Any]], Sequence[torch.Tensor]]


class Lease:
    """An arena in the hands of one call, see `Executor.lease`."""

    def __init__(self, cache: ReplayCache, arena: Arena, parameters: Sequence[torch.Tensor]) -> None:
        self.cache, self.arena, self.path = cache, arena, arena.path
        self.counts = ReplayCounts(bytes=arena.table.bytes)
        self.fixed = {parameter.data_ptr() for parameter in parameters}

    def size(self, count: int) -> int:
        """What so many tokens or head rows are padded to."""
        return SIZES[bisect_left(SIZES, count)] if 0 < count <= SIZES[-1] else count

    def replays(self, tokens: int, head_rows: int) -> bool:
        """Whether chunks of this size, padding included, are worth a graph."""
        return tokens <= SIZES[-1] and head_rows <= SIZES[-1]

    def accumulators(self, parameters: Sequence[torch.Tensor], positions: Sequence[int]) -> list[torch.Tensor]:
        """Zeroed sums for the gradients of the parameters at these positions; the same tensors in every call."""
        sums = self.arena.zeroed_sums([parameters[i] for i in positions])
        self.fixed.update(tensor.data_ptr() for tensor in sums)
        return sums

    def run(self, graph: object, run: Run, arguments: list[Any]) -> Sequence[torch.Tensor]:
        """Run a graph of the path and tensors: the first time of a size as it is, from the second time on replayed."""
        path, tensors = self.path, arguments[1:]
        if any(tensor.device != path.device for tensor in tensors):
            self.counts.eager += 1  # a graph would go on with the number that it was recorded with
            return run(arguments)
        copied = [tensor.data_ptr() not in self.fixed for tensor in tensors]
        shapes = tuple(tensor.shape for tensor, copy in zip(tensors, copied, strict=True) if copy)
        layers = tuple(runtime.key for runtime in path.runtimes)
        key = GraphKey(id(graph), path.chunk.tokens, path.bound, layers, shapes)
        path.prepare()
        path.replaying = True
        try:
            recorded = self._find(key, run, tensors, copied)
            if recorded is None:
                self.counts.eager += 1
                return run(arguments)
        finally:
            path.replaying = False
        arguments.clear()
        self.counts.replayed += 1
        return recorded(tensors)

    def _find(
        self, key: GraphKey, run: Run, tensors: Sequence[torch.Tensor], copied: Sequence[bool]
    ) -> Recorded | None:
        """The graph for a key, recorded if it has been run before; None: run it as it is."""
        table, cache = self.arena.table, self.cache
        if table.is_due(key) and not cache.given_up and table.has_room(self.path.device):
            try:
                found = Recorded.of(cache.record, lambda given: run([self.path, *given]), tensors, copied)
            except RuntimeError as error:
                cache.give_up(str(error).strip().splitlines()[0])
                return None
            table.add(key, found)
            self.counts.recorded += 1
            self.counts.bytes = table.bytes
        return table.graphs[key]


class ReplayCache:
    """The arenas of one engine: one for each model that it serves, up to `MODELS`."""

    def __init__(self) -> None:
        self.record: Record = CudaRecorder()
        self.arenas: dict[Any, Arena] = {}  # by the addresses of the parameters, the latest last
        self.moves = 0
        self.given_up = ""

    def lease(
        self,
        layers: Sequence[MixerLayer],
        runtimes: Sequence[AnyRuntime],
        capacity: int,
        device: torch.device,
        attention: str,
        parameters: Sequence[torch.Tensor],
        codes: Codes = NO_CODES,
    ) -> Lease | None:
        """An arena for one call, whose stack needs `capacity` tokens and whose pieces run as `codes`; None: it is in
        use, or none works here."""
        if self.given_up:
            return None
        addresses = (attention, *(parameter.data_ptr() for parameter in parameters))
        arena = self.arenas.pop(addresses, None)
        if arena is not None:
            self.arenas[addresses] = arena
            if arena.is_leased:
                return None
        if arena is None and not self._make_room():
            return None
        if arena is None or arena.path.capacity <= capacity:
            if not all(runtime.replayable for runtime in runtimes):
                self.give_up("attention or a recurrence gets the shape of a chunk from the host")
                return None
            path = ReplayStack(layers, runtimes, -(-max(capacity, 1) // CAPACITY) * CAPACITY, device)
            arena = self.arenas[addresses] = Arena(path)
        arena.begin(runtimes, codes)
        return Lease(self, arena, parameters)

    def pays(self, device: torch.device, chunks: Sequence[int]) -> bool:
        """Whether a device has graphs, and a schedule that runs chunks of so many tokens is worth their memory."""
        small = sum(tokens <= SIZES[-1] for tokens in chunks)
        return device.type == "cuda" and small > LEAST_RUNS and 2 * small >= len(chunks)

    def _make_room(self) -> bool:
        """Forget the arena that was used longest ago, if there are as many as there may be."""
        if len(self.arenas) < MODELS:
            return True
        self.arenas.pop(next(iter(self.arenas)))
        self.moves += 1
        if self.moves > MOST_MOVES:
            self.give_up("the parameters are somewhere else in every step")
        return not self.given_up

    def give_up(self, reason: str) -> None:
        """No more graphs for this engine; says so once."""
        self.given_up, self.arenas = reason, {}
        logger.warning("dta: chunks run without CUDA graphs from now on: %s", reason)


class Arena:
    """What graphs read and write besides the parameters, and the graphs; one call at a time has it.

    Attributes:
        path: the stack.
        codes: the generated code that the graphs were recorded with.
        sums: accumulators of the gradients, once a backward has asked for them.
        is_leased: a call is using it.
    """

    def __init__(self, path: ReplayStack) -> None:
        self.path, self.table = path, GraphTable()
        self.codes: Codes = NO_CODES
        self.sums: list[torch.Tensor] = []
        self.is_leased = False

    def begin(self, runtimes: Sequence[AnyRuntime], codes: Codes) -> None:
        """A call takes it: as new, whatever a call left that ended half-way; graphs of other code are forgotten."""
        if codes is not self.codes:
            self.table, self.codes = GraphTable(), codes
        self.path.runtimes = runtimes
        self.path.pending = 0
        for states in self.path.states:
            states.zero_gradients()
        self.is_leased = True

    def release(self) -> None:
        """The call that had it has ended."""
        self.is_leased = False

    def zeroed_sums(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Sums for the gradients of these parameters; the same tensors in every call."""
        if not self.sums:
            self.sums = [torch.empty_like(p, dtype=statistics_dtype(p.dtype)).detach() for p in parameters]
        for tensor in self.sums:
            tensor.zero_()
        return list(self.sums)


SHARE = 0.1  # of the device's memory that graphs may hold

Record = Callable[[Callable[[], Sequence[torch.Tensor]]], tuple[Sequence[torch.Tensor], Callable[[], None]]]


@dataclasses.dataclass(frozen=True)
class GraphKey:
    """What a recorded graph depends on.

    Attributes:
        graph: the identity of the function that was recorded.
        tokens, bound: of the chunk, and of the prefix that it may have.
        layers: what its mixer layers depend on besides sizes.
        shapes: of the inputs that are copied to it.
    """

    graph: int
    tokens: int
    bound: int
    layers: tuple[Hashable, ...]
    shapes: tuple[torch.Size, ...]


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A recorded graph, and where it reads and writes; None stands for inputs that stay where they are."""

    inputs: Sequence[torch.Tensor | None]
    outputs: Sequence[torch.Tensor]
    replay: Callable[[], None]

    @classmethod
    def of(
        cls,
        record: Record,
        run: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
        tensors: Sequence[torch.Tensor],
        copied: Sequence[bool],
    ) -> Recorded:
        """The graph of `run`; of its `tensors`, those that are `copied` have other addresses at every replay."""
        inputs = [torch.empty_like(tensor) if copy else None for tensor, copy in zip(tensors, copied, strict=True)]
        given = [tensor if place is None else place for place, tensor in zip(inputs, tensors, strict=True)]
        return cls(inputs, *record(lambda: run(given)))

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs for these inputs, in memory of their own."""
        for place, tensor in zip(self.inputs, tensors, strict=True):
            if place is not None:
                place.copy_(tensor, non_blocking=True)
        self.replay()
        return [output.clone() for output in self.outputs]

    @property
    def bytes(self) -> int:
        """What stays allocated for it, besides what all graphs share."""
        held = [*(tensor for tensor in self.inputs if tensor is not None), *self.outputs]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)


class GraphTable:
    """The graphs of one arena.

    Attributes:
        graphs: by key; None: run once, not recorded.
        bytes: that they hold.
    """

    def __init__(self) -> None:
        self.graphs: dict[GraphKey, Recorded | None] = {}
        self.bytes = 0

    def is_due(self, key: GraphKey) -> bool:
        """Whether a graph is to be recorded now: it has been run once, and is not there yet."""
        if key not in self.graphs:
            self.graphs[key] = None
            return False
        return self.graphs[key] is None

    def add(self, key: GraphKey, recorded: Recorded) -> None:
        """Keep a graph."""
        self.graphs[key] = recorded
        self.bytes += recorded.bytes

    def has_room(self, device: torch.device) -> bool:
        """Whether graphs hold less than their share of the device's memory."""
        return self.bytes <= _most_bytes(device)


class CudaRecorder:
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


SMALLEST_BOUND = 512  # tokens of a prefix that graphs are recorded for


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

    def above(self, buffer: Buffer) -> torch.Tensor:
        """See `Reach.above`."""
        return buffer.own.narrow(buffer.dim, 0, self.bound)

    def write(self, buffer: Buffer, values: torch.Tensor) -> None:
        """See `Reach.write`."""
        buffer.own.index_copy_(buffer.dim, self.put, values)

    def take(self, buffer: Buffer, total: torch.Tensor) -> None:
        """See `Reach.take`."""
        total += buffer.own.index_select(buffer.dim, self.taken)
        buffer.own.index_fill_(buffer.dim, self.taken, 0)


@dataclasses.dataclass(frozen=True)
class DeviceNumbers:
    """Where graphs for one number of tokens read the shape of a chunk, and `put` and `taken` of its `DeviceReach`."""

    table: ChunkTable
    put: torch.Tensor
    taken: torch.Tensor

    @classmethod
    def allocate(cls, tokens: int, device: torch.device) -> DeviceNumbers:
        """Zeroed numbers for chunks of so many tokens."""
        table = ChunkTable(torch.zeros(ChunkTable.size(tokens), dtype=torch.int32, device=device), tokens)
        put, taken = torch.zeros(2, tokens, dtype=torch.int64, device=device)
        return cls(table, put, taken)


class ReplayStack(PathStack):
    """A path stack at fixed addresses that goes by numbers in device memory while `replaying`.

    The last token of every buffer takes what is not to be kept; its gradients are always zero.
    """

    def __init__(
        self, layers: Sequence[MixerLayer], runtimes: Sequence[AnyRuntime], capacity: int, device: torch.device
    ) -> None:
        super().__init__(layers, runtimes, capacity + 1, device)
        self.numbers: dict[int, DeviceNumbers] = {}  # by the number of tokens
        self.replaying = False

    def prepare(self) -> None:
        """Bring the shape of `chunk` to where graphs for its number of tokens read it."""
        shape, tokens, dump = self.chunk, self.chunk.tokens, self.capacity - 1
        if tokens not in self.numbers:
            self.numbers[tokens] = DeviceNumbers.allocate(tokens, self.device)
        there, number = self.numbers[tokens], np.arange(tokens)
        put = np.where(number < shape.spine, shape.start + number, dump)
        taken = np.where(number < min(self.pending - shape.start, shape.spine), shape.start + number, dump)
        for target, values in ((there.table.numbers, shape.table_rows()), (there.put, put), (there.taken, taken)):
            target.copy_(upload(values, self.device), non_blocking=True)

    @property
    def bound(self) -> int:
        """The prefix that graphs are recorded for: a power of two that is not less than the chunk's start."""
        start = self.chunk.start
        return min(max(SMALLEST_BOUND, 1 << (start - 1).bit_length()), self.capacity - 1) if start else 0

    def table(self) -> ChunkTable:
        """That of the place in memory which recorded graphs read, while one is recorded or replayed."""
        return self.numbers[self.chunk.tokens].table if self.replaying else super().table()

    def _reach(self) -> Reach:
        if not self.replaying:
            return super()._reach()
        there = self.numbers[self.chunk.tokens]
        return DeviceReach(self.bound, there.put, there.taken)
