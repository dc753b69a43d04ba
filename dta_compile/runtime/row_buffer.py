"""Storage for values of head rows: all rows of a batch at once, or only those on the current path."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Ranges = Sequence[tuple[int, int]]


class AllRows:
    """`[H + 1, *features]` in one zeroed tensor; the last row is read for padding and stays zero."""

    def __init__(self, rows: int, features: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self.values = torch.zeros((rows + 1, *features), dtype=dtype, device=device)

    def acquire(self, ranges: Ranges) -> None:
        """Make room for rows that are about to be written."""

    def release(self, ranges: Ranges) -> None:
        """Rows that are not read any more."""

    def write(self, ranges: Ranges, values: torch.Tensor) -> None:
        """Store `[rows, *features]` at the given ranges of rows."""
        offset = 0
        for start, stop in ranges:
            self.values[start:stop] = values[offset : offset + stop - start]
            offset += stop - start

    def read(self, ranges: Ranges) -> torch.Tensor:
        """`[rows, *features]` at the given ranges."""
        parts = [self.values[start:stop] for start, stop in ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def gather(self, index: torch.Tensor) -> torch.Tensor:
        """Rows by index; index H gives zeros."""
        return self.values.index_select(0, index)

    def add(self, index: torch.Tensor, values: torch.Tensor) -> None:
        """Add to rows by index; what is added at index H is lost."""
        self.values.index_add_(0, index, values.to(self.values.dtype))


class PathRows:
    """The same for the rows that are in use only: acquired rows share a buffer that grows to the most used at a time.

    In streaming mode a row is acquired when its outputs are written and released after its backward, so that the buffer
    holds one path's worth of rows, never the batch's.
    """

    def __init__(self, rows: int, features: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self.features, self.dtype, self.device = tuple(features), dtype, device
        # Slot 0 is the zero row; index H and rows that are not in use map to it.
        self.slots = torch.zeros(rows + 1, dtype=torch.int64)
        self.values = torch.zeros((1, *self.features), dtype=dtype, device=device)
        self.free: list[int] = []

    def acquire(self, ranges: Ranges) -> None:
        """Zeroed slots for rows that have none."""
        index = _indices(ranges)
        index = index[self.slots[index] == 0]
        if len(self.free) < len(index):
            self._grow(len(index) - len(self.free))
        taken = torch.tensor([self.free.pop() for _ in range(len(index))], dtype=torch.int64)
        self.slots[index] = taken
        self.values.index_fill_(0, taken.to(self.device), 0)

    def release(self, ranges: Ranges) -> None:
        """Give the rows' slots back."""
        index = _indices(ranges)
        used = self.slots[index]
        self.free.extend(used[used > 0].tolist())
        self.slots[index] = 0

    def write(self, ranges: Ranges, values: torch.Tensor) -> None:
        """Store `[rows, *features]` at rows that were acquired."""
        self.values.index_copy_(0, self._slots(_indices(ranges)), values)

    def read(self, ranges: Ranges) -> torch.Tensor:
        """`[rows, *features]` at the given ranges."""
        return self.values.index_select(0, self._slots(_indices(ranges)))

    def gather(self, index: torch.Tensor) -> torch.Tensor:
        """Rows by index; index H gives zeros."""
        return self.values.index_select(0, self._slots(index.cpu()))

    def add(self, index: torch.Tensor, values: torch.Tensor) -> None:
        """Add to rows by index; what is added at index H is lost."""
        slots = self._slots(index.cpu())
        self.values.index_add_(0, slots, values.to(self.dtype))
        self.values[0] = 0

    def _slots(self, index: torch.Tensor) -> torch.Tensor:
        return self.slots[index].to(self.device)

    def _grow(self, missing: int) -> None:
        before = len(self.values)
        added = max(missing, before)
        self.values = torch.cat([self.values, self.values.new_zeros((added, *self.features))])
        self.free.extend(range(before + added - 1, before - 1, -1))


RowBuffer = AllRows | PathRows


def _indices(ranges: Ranges) -> torch.Tensor:
    return torch.cat([torch.zeros(0, dtype=torch.int64), *(torch.arange(*bounds) for bounds in ranges)])
