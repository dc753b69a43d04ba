"""Decide which calls and chunks replay graphs: an engine's arenas, each leased to one call at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import weakref
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from dta_compile.executable.layers import MixerLayer
from dta_compile.executable.pieces import NO_CODES, Codes
from dta_compile.ops.dtypes import statistics_dtype
from dta_compile.plan import ReplayCounts
from dta_compile.runtime.path.chunk_shape import ChunkTable
from dta_compile.runtime.path.mixer_runtime import AnyRuntime
from dta_compile.runtime.path.stack import PathStack
from dta_compile.runtime.path.token_states import Buffer, Reach
from dta_compile.runtime.rows.upload import upload

logger = logging.getLogger("dta_compile")

SIZES = (16, 32, 64, 96, 128, 192, 256, 384, 512)  # padded tokens and head rows; larger chunks gain nothing
CAPACITY = 2048  # granularity of stack sizes, in tokens
LEAST_RUNS = 4  # replay needs more runs of small chunks in a schedule, and at least as many as of others
MODELS = 2  # most sets of parameters that share compiled code, such as two policies
MOST_MOVES = 3  # graphs are given up after parameters have moved more often

Run = Callable[[list[Any]], Sequence[torch.Tensor]]


class Lease:
    """Right of one call to an arena, see `Executor.lease`."""

    def __init__(self, cache: ReplayCache, arena: Arena, parameters: Sequence[torch.Tensor]) -> None:
        self.cache, self.arena, self.path = cache, arena, arena.path
        self.counts = ReplayCounts(bytes=arena.bytes)
        self.fixed = {parameter.data_ptr() for parameter in parameters}

    def size(self, count: int) -> int:
        """Return the size that a number of tokens or head rows is padded to."""
        return SIZES[bisect_left(SIZES, count)] if 0 < count <= SIZES[-1] else count

    def replays(self, tokens: int, head_rows: int) -> bool:
        """Return whether chunks of this size, padding included, are replayed."""
        return tokens <= SIZES[-1] and head_rows <= SIZES[-1]

    def accumulators(self, parameters: Sequence[torch.Tensor], positions: Sequence[int]) -> list[torch.Tensor]:
        """Return zeroed gradient sums of the parameters at `positions`; the same tensors in every call."""
        sums = self.arena.zeroed_sums([parameters[i] for i in positions])
        self.fixed.update(tensor.data_ptr() for tensor in sums)
        return sums

    def run(self, graph: object, run: Run, arguments: list[Any]) -> Sequence[torch.Tensor]:
        """Run a chunk graph on the path and tensors: eagerly the first time for a size, by replay from then on."""
        path, tensors = self.path, arguments[1:]
        if any(tensor.device != path.device for tensor in tensors):
            self.counts.eager += 1  # a CUDA graph would repeat the values of host tensors at recording
            return run(arguments)
        copied = [tensor.data_ptr() not in self.fixed for tensor in tensors]
        shapes = tuple(tensor.shape for tensor, copy in zip(tensors, copied, strict=True) if copy)
        layers = (*(runtime.key for runtime in path.runtimes), *path.fillers)
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
        """Return the recorded graph for a key, recording it on its second use; None: run eagerly."""
        arena, cache = self.arena, self.cache
        is_first = key not in arena.graphs
        recorded = arena.graphs.setdefault(key, None)
        if is_first or recorded is not None or cache.given_up or arena.bytes > _most_bytes(self.path.device):
            return recorded
        try:
            recorded = Recorded.of(cache.record, lambda given: run([self.path, *given]), tensors, copied)
        except RuntimeError as error:
            cache.give_up(str(error).strip().splitlines()[0])
            return None
        arena.graphs[key] = recorded
        arena.bytes += recorded.bytes
        self.counts.recorded += 1
        self.counts.bytes = arena.bytes
        return recorded


class ReplayCache:
    """Arenas of one engine, one for each set of parameters, at most `MODELS`."""

    def __init__(self) -> None:
        self.record: Record = CudaRecorder()
        self.arenas: dict[Any, Arena] = {}  # by addresses of parameters, the most recently used last
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
        """Lease an arena to a call whose stack needs `capacity` tokens and whose pieces run `codes`.

        Returns None if the arena is in use or graphs were given up.
        """
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
        """Return whether graphs exist on a device and pay for a schedule that runs `chunks`, by numbers of tokens."""
        small = sum(tokens <= SIZES[-1] for tokens in chunks)
        return device.type == "cuda" and small > LEAST_RUNS and 2 * small >= len(chunks)

    def _make_room(self) -> bool:
        """Evict the least recently used arena if there are `MODELS`; give up graphs after `MOST_MOVES` evictions."""
        if len(self.arenas) < MODELS:
            return True
        self.arenas.pop(next(iter(self.arenas)))
        self.moves += 1
        if self.moves > MOST_MOVES:
            self.give_up("the parameters are somewhere else in every step")
        return not self.given_up

    def give_up(self, reason: str) -> None:
        """Drop all graphs of this engine for good, with a warning."""
        self.given_up, self.arenas = reason, {}
        logger.warning("dta: chunks run without CUDA graphs from now on: %s", reason)


class Arena:
    """Recorded graphs of one set of parameters, with the memory that they read and write at fixed addresses.

    Attributes:
        path: path stack.
        graphs: graphs by key; None: run once, not recorded yet.
        bytes: bytes that the graphs hold.
        codes: generated code that the graphs were recorded with.
        sums: accumulators of parameter gradients, made at the first backward.
        is_leased: a call is using the arena.
    """

    def __init__(self, path: ReplayStack) -> None:
        self.path = path
        self.graphs: dict[GraphKey, Recorded | None] = {}
        self.bytes = 0
        self.codes: Codes = NO_CODES
        self.sums: list[torch.Tensor] = []
        self.is_leased = False

    def begin(self, runtimes: Sequence[AnyRuntime], codes: Codes) -> None:
        """Reset the arena for a new call, even if the previous one failed half-way; drop graphs of other code."""
        if codes is not self.codes:
            self.graphs, self.bytes, self.codes = {}, 0, codes
        self.path.runtimes = runtimes
        self.path.pending = 0
        for states in self.path.states:
            states.zero_gradients()
        self.is_leased = True

    def release(self) -> None:
        """Free the arena after the call that leased it."""
        self.is_leased = False

    def zeroed_sums(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return zeroed gradient sums of the parameters; the same tensors in every call."""
        if not self.sums:
            self.sums = [torch.empty_like(p, dtype=statistics_dtype(p.dtype)).detach() for p in parameters]
        for tensor in self.sums:
            tensor.zero_()
        return list(self.sums)


SHARE = 0.1  # largest share of the device's memory that graphs hold

Record = Callable[[Callable[[], Sequence[torch.Tensor]]], tuple[Sequence[torch.Tensor], Callable[[], None]]]


@dataclasses.dataclass(frozen=True)
class GraphKey:
    """Facts that a recorded graph depends on.

    Attributes:
        graph: identity of the recorded function.
        tokens, bound: tokens of the chunk, and most tokens of the prefix above it.
        layers: keys of its mixer layers, see `LayerRuntime.key`.
        shapes: shapes of the inputs that are copied to fixed buffers.
    """

    graph: int
    tokens: int
    bound: int
    layers: tuple[Hashable, ...]
    shapes: tuple[torch.Size, ...]


@dataclasses.dataclass(frozen=True)
class Recorded:
    """Recorded graph with its input buffers (None: the input has a fixed address) and output buffers."""

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
        """Record `run`; inputs among `tensors` that are `copied` have another address at every replay."""
        inputs = [torch.empty_like(tensor) if copy else None for tensor, copy in zip(tensors, copied, strict=True)]
        arguments = [tensor if buffer is None else buffer for buffer, tensor in zip(inputs, tensors, strict=True)]
        return cls(inputs, *record(lambda: run(arguments)))

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Replay the graph; return copies of its outputs."""
        for buffer, tensor in zip(self.inputs, tensors, strict=True):
            if buffer is not None:
                buffer.copy_(tensor, non_blocking=True)
        self.replay()
        return [output.clone() for output in self.outputs]

    @property
    def bytes(self) -> int:
        """Bytes of its input and output buffers, without the shared memory pool."""
        return sum(tensor.nbytes for tensor in (*self.inputs, *self.outputs) if tensor is not None)


class CudaRecorder:
    """Recorder of CUDA graphs that share one memory pool, because only one of them runs at a time."""

    def __init__(self) -> None:
        self.graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        self.pool: Any = None

    def __call__(
        self, function: Callable[[], Sequence[torch.Tensor]]
    ) -> tuple[Sequence[torch.Tensor], Callable[[], None]]:
        if not self.graphs:  # the allocator gives a pool up with the last of its graphs
            self.pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with _usable_after_failures(), torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            outputs = function()
        self.graphs.add(graph)
        return outputs, graph.replay


@contextlib.contextmanager
def _usable_after_failures() -> Iterator[None]:
    """Restore what a capture that fails leaves behind: its stream as the current one, and generators that capture."""
    stream = torch.cuda.current_stream()
    generator = torch.cuda.default_generators[stream.device.index]
    try:
        yield
    except BaseException:
        torch.cuda.set_stream(stream)
        generator.graphsafe_set_state(generator.clone_state())
        raise


@functools.cache
def _most_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 1 << 40
    return int(torch.cuda.get_device_properties(device).total_memory * SHARE)


SMALLEST_BOUND = 512  # smallest prefix length, in tokens, that graphs are recorded for


@dataclasses.dataclass(frozen=True)
class DeviceReach:
    """Ranges of the path given by numbers in device memory, see `Reach`.

    Attributes:
        bound: upper bound of the number of tokens above the chunk.
        put, taken: `[tokens]` depths to which the states of each token are written, and at which its pending gradient
            is read.
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
    """Fixed buffers from which graphs for one chunk size read the `ChunkTable` and the indices of `DeviceReach`."""

    table: ChunkTable
    put: torch.Tensor
    taken: torch.Tensor

    @classmethod
    def allocate(cls, tokens: int, device: torch.device) -> DeviceNumbers:
        """Allocate zeroed buffers for chunks of a number of tokens."""
        table = ChunkTable(torch.zeros(ChunkTable.size(tokens), dtype=torch.int32, device=device), tokens)
        put, taken = torch.zeros(2, tokens, dtype=torch.int64, device=device)
        return cls(table, put, taken)


class ReplayStack(PathStack):
    """Path stack at fixed addresses that reads its indices from device memory while `replaying`.

    The last token of every buffer is a dump for states that are not kept; its gradients are always zero.
    """

    def __init__(
        self, layers: Sequence[MixerLayer], runtimes: Sequence[AnyRuntime], capacity: int, device: torch.device
    ) -> None:
        super().__init__(layers, runtimes, capacity + 1, device)
        self.numbers: dict[int, DeviceNumbers] = {}  # by the number of tokens
        self.replaying = False

    def prepare(self) -> None:
        """Upload the shape of `chunk` to the buffers that graphs of its size read."""
        shape, tokens, dump = self.chunk, self.chunk.tokens, self.capacity - 1
        if tokens not in self.numbers:
            self.numbers[tokens] = DeviceNumbers.allocate(tokens, self.device)
        numbers, number = self.numbers[tokens], np.arange(tokens)
        put = np.where(number < shape.spine, shape.start + number, dump)
        taken = np.where(number < min(self.pending - shape.start, shape.spine), shape.start + number, dump)
        for target, values in ((numbers.table.numbers, shape.table_rows()), (numbers.put, put), (numbers.taken, taken)):
            target.copy_(upload(values, self.device), non_blocking=True)

    @property
    def bound(self) -> int:
        """Prefix length that the chunk's graph is recorded for: a power of two, at least the chunk's start."""
        start = self.chunk.start
        return min(max(SMALLEST_BOUND, 1 << (start - 1).bit_length()), self.capacity - 1) if start else 0

    def table(self) -> ChunkTable:
        """Return the table that recorded graphs read while one is recorded or replayed, else the chunk's own."""
        return self.numbers[self.chunk.tokens].table if self.replaying else super().table()

    def _reach(self) -> Reach:
        if not self.replaying:
            return super()._reach()
        numbers = self.numbers[self.chunk.tokens]
        return DeviceReach(self.bound, numbers.put, numbers.taken)
