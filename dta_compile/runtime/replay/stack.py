"""The path stack that graphs of chunks read and write: at fixed addresses, by numbers in device memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from dta_compile.executable.layers import MixerLayer
from dta_compile.runtime.path.chunk_shape import ChunkTable
from dta_compile.runtime.path.interface import AnyRuntime
from dta_compile.runtime.path.stack import PathStack
from dta_compile.runtime.path.token_states import Buffer, Reach
from dta_compile.runtime.rows.upload import upload

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
