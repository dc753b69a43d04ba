"""Sets of rows, and buffers for values by head row: of all head rows, or of those on the current path."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch

from dta_compile.plan.tree.prefix_tree import IntArray
from dta_compile.runtime.rows.upload import upload


class Rows:
    """Rows of a chunk in its order: one range where possible, else an index.

    `size` is their number with padding: `read` repeats the first row at the end, and `write` drops the padding.
    """

    def __init__(self, ranges: Sequence[tuple[int, int]], device: torch.device, size: int | None = None) -> None:
        self.ranges, self.device = ranges, device
        self.count = sum(stop - start for start, stop in ranges)
        self.size = self.count if size is None or not self.count else size

    @cached_property
    def numpy(self) -> IntArray:
        """`[count]` row numbers."""
        return np.concatenate([np.zeros(0, np.int64), *(np.arange(*bounds) for bounds in self.ranges)])

    @cached_property
    def index(self) -> torch.Tensor:
        """`[size]` row numbers on the device, padding included."""
        return upload(padded(self.numpy, self.size), self.device)

    def read(self, values: torch.Tensor) -> torch.Tensor:
        """Gather `[size, ...]` from `[rows, ...]`."""
        if len(self.ranges) == 1 and self.size == self.count:
            start, stop = self.ranges[0]
            return values[start:stop]
        return values.index_select(0, self.index)

    def write(self, target: torch.Tensor, values: torch.Tensor) -> None:
        """Scatter `[size, ...]` into `[rows, ...]`, without the padding."""
        if len(self.ranges) == 1:
            start, stop = self.ranges[0]
            target[start:stop] = values[: self.count]
        else:
            target.index_copy_(0, self.index[: self.count], values[: self.count])


@dataclasses.dataclass
class Gathered:
    """Dense value that chunks read by row: `values [N, *features]`, and the index of the entry of every row."""

    values: torch.Tensor
    index: torch.Tensor

    def read(self, rows: Rows) -> torch.Tensor:
        """Gather `[c, *features]` for some rows."""
        return self.values.index_select(0, rows.read(self.index))


def padded(numbers: IntArray, size: int) -> IntArray:
    """Pad to `[size]` with the first number."""
    return np.concatenate([numbers, np.repeat(numbers[:1], size - len(numbers))]) if size > len(numbers) else numbers


def next_to_zero(row: torch.Tensor) -> None:
    """Fill the row that is read for padding with tiny numbers, so that a loss that uses padding has a gradient there.

    The gradients of x**2 and abs(x) are 0 at 0, and that of relu is on one side. So entries alternate in sign, and
    their fourth power does not underflow.
    """
    if row.is_floating_point() or row.is_complex():
        row.fill_(-min(torch.finfo(row.dtype).tiny ** 0.25, 2.0**-10))
        row.view(-1)[1::2].neg_()


class AllRows:
    """Buffer of all head rows: one zeroed tensor `[H + 2, *features]`.

    The row before the last is read for padding, the last one, zero, where a value is not used.
    """

    def __init__(self, rows: int, features: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self.values = torch.zeros((rows + 2, *features), dtype=dtype, device=device)

    @property
    def heads(self) -> torch.Tensor:
        """All head rows, `[H, *features]`."""
        return self.values[:-2]

    @property
    def padding(self) -> torch.Tensor:
        """Row `[*features]` that is read for padding; zero unless filled."""
        return self.values[-2]

    def acquire(self, rows: Rows) -> None:
        """No-op: every row has memory."""

    def release(self, rows: Rows) -> None:
        """No-op: see `acquire`."""

    def write(self, rows: Rows, values: torch.Tensor) -> None:
        """Store `[rows, *features]`."""
        rows.write(self.values, values)

    def read(self, rows: Rows) -> torch.Tensor:
        """Read `[rows, *features]`."""
        return rows.read(self.values)

    def gather(self, index: torch.Tensor) -> torch.Tensor:
        """Gather rows by index; index H reads the padding, H + 1 zero."""
        return self.values.index_select(0, index)

    def add(self, index: torch.Tensor, values: torch.Tensor) -> None:
        """Add to rows by index; additions at index H and H + 1 are dropped."""
        self.values.index_add_(0, index, values.to(self.values.dtype))
        self.values[-2:] = 0


class PathRows:
    """Buffer of the head rows in use: acquired rows get slots of a tensor that grows to the most in use at a time.

    In streaming mode a row is acquired when its outputs are written and released after its backward, so that the buffer
    holds the rows of one path, never of the batch.
    """

    def __init__(self, rows: int, features: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self.features, self.dtype, self.device = tuple(features), dtype, device
        # Slot 0 is read for padding: index H and unused rows map to it; index H + 1 to slot 1, which stays zero.
        self.slots = torch.zeros(rows + 2, dtype=torch.int64)
        self.slots[-1] = 1
        self.values = torch.zeros((2, *self.features), dtype=dtype, device=device)
        self.free: list[int] = []

    @property
    def padding(self) -> torch.Tensor:
        """Row `[*features]` that is read for padding; zero unless filled."""
        return self.values[0]

    def acquire(self, rows: Rows) -> None:
        """Assign zeroed slots to rows that have none."""
        index = torch.from_numpy(rows.numpy)
        index = index[self.slots[index] == 0]
        if len(self.free) < len(index):
            self._grow(len(index) - len(self.free))
        slots = torch.tensor([self.free.pop() for _ in range(len(index))], dtype=torch.int64)
        self.slots[index] = slots
        self.values.index_fill_(0, upload(slots.numpy(), self.device), 0)

    def release(self, rows: Rows) -> None:
        """Free the slots of rows."""
        index = torch.from_numpy(rows.numpy)
        used = self.slots[index]
        self.free.extend(used[used > 0].tolist())
        self.slots[index] = 0

    def write(self, rows: Rows, values: torch.Tensor) -> None:
        """Store `[rows, *features]` at acquired rows."""
        self.values.index_copy_(0, self._slots(torch.from_numpy(rows.numpy)), values[: rows.count])

    def read(self, rows: Rows) -> torch.Tensor:
        """Read `[rows, *features]`."""
        return self.values.index_select(0, self._slots(torch.from_numpy(padded(rows.numpy, rows.size))))

    def gather(self, index: torch.Tensor) -> torch.Tensor:
        """Gather rows by index; index H reads the padding, H + 1 zero."""
        return self.values.index_select(0, self._slots(index.cpu()))

    def add(self, index: torch.Tensor, values: torch.Tensor) -> None:
        """Add to rows by index; additions at index H and H + 1 are dropped."""
        slots = self._slots(index.cpu())
        self.values.index_add_(0, slots, values.to(self.dtype))
        self.values[:2] = 0

    def _slots(self, index: torch.Tensor) -> torch.Tensor:
        return upload(self.slots[index].numpy(), self.device)

    def _grow(self, missing: int) -> None:
        before = len(self.values)
        added = max(missing, before)
        self.values = torch.cat([self.values, self.values.new_zeros((added, *self.features))])
        self.free.extend(range(before + added - 1, before - 1, -1))


RowBuffer = AllRows | PathRows
