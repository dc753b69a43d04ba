"""Expand frontier values from head rows to dense tensors, and sum dense gradients back onto head rows."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from dta_compile.errors import RuntimeContractError
from dta_compile.executable.executable import FrontierValue
from dta_compile.executable.layouts import Axis
from dta_compile.runtime.rows.batch_rows import Booleans, Integers
from dta_compile.runtime.rows.buffers import AllRows, RowBuffer
from dta_compile.runtime.rows.upload import upload


class HeadRows(Protocol):
    """Head rows of a batch's tokens; see `BatchRows.head_rows`."""

    @property
    def num_head_rows(self) -> int:
        """Number of head rows, H."""

    @property
    def head_rows(self) -> Integers:
        """`[B, S]` head row of every token whose output is used; one past the last for all others."""


@dataclasses.dataclass(frozen=True, eq=False)
class BatchLayout:
    """Maps between head rows and the dense layout of frontier values.

    Attributes:
        valid: `[B, S]` real tokens of the batch.
        used: `[B, S]` tokens at which each frontier value is used; None: it is not computed.
        windows: `(start, length)` of the frame of each frontier value.
        device: device of the dense values.
        by_sequence: whether dense values are expanded row by row (streaming), with maps on the host.
    """

    frontier: Sequence[FrontierValue]
    rows: HeadRows
    valid: Booleans
    used: Sequence[Booleans | None]
    windows: Sequence[tuple[int, int]]
    device: torch.device
    by_sequence: bool

    @property
    def batch(self) -> int:
        """Number of rows of the batch."""
        return len(self.valid)

    @functools.cached_property
    def maps(self) -> Sequence[torch.Tensor | None]:
        """Per frontier value `[entries]`, the head row of every dense entry; made while the device runs chunks.

        It is H at padding, and H + 1 where the value is not used and no other value has a row.
        """
        device = torch.device("cpu") if self.by_sequence else self.device
        head_rows = self.rows.head_rows
        has_none = head_rows == self.rows.num_head_rows
        return [
            None if mask is None else upload(_entries(head_rows + (has_none & ~mask), window), device)
            for mask, window in zip(self.used, self.windows, strict=True)
        ]

    @functools.cached_property
    def uncovered(self) -> Sequence[Booleans | None]:
        """Per frontier value `[entries]`, entries at padding that outputs depend on; None: there are none."""
        masks = [
            None if mask is None else _entries(mask & ~self.valid, window)
            for mask, window in zip(self.used, self.windows, strict=True)
        ]
        return [mask if mask is not None and mask.any() else None for mask in masks]

    def is_in_order(self, index: int) -> bool:
        """Return whether the dense entries of a frontier value are the first head rows: none is shared or padding."""
        mask, window = self.used[index], self.windows[index]
        if mask is None or not _entries(mask & self.valid, window).all():
            return False
        head_rows = _entries(self.rows.head_rows, window)
        return np.array_equal(head_rows, np.arange(len(head_rows)))

    def expand(self, index: int, buffer: RowBuffer, row: int | None = None) -> torch.Tensor:
        """Gather a frontier value into its dense layout; for one `row`, the batch axis has size one.

        At padding it is next to zero, or an inner value that of a real token. Where it is unused, it is exactly zero,
        as that may be what is proven of it. Rows that are in order become the dense value, without a copy.
        """
        if row is None and isinstance(buffer, AllRows) and self.is_in_order(index):
            entries = buffer.values[: self.batch * self.windows[index][1]]
            return self._from_entries(self.frontier[index], entries, self.batch)
        value, head_rows = self.frontier[index], self._map(index)
        head_rows, batch = (head_rows, self.batch) if row is None else (self._row_of(head_rows, row), 1)
        return self._from_entries(value, _gathered(value, buffer, head_rows), batch)

    def padding(self, index: int) -> torch.Tensor | None:
        """Return a bool mask of the dense frontier value at padding that outputs depend on; None: there is none."""
        uncovered = self.uncovered[index]
        return None if uncovered is None else self._mask_of(index, uncovered)

    def mask_of(self, index: int, tokens: Booleans) -> torch.Tensor:
        """Return a bool mask of the dense frontier value at tokens `[B, S]`."""
        return self._mask_of(index, _entries(tokens, self.windows[index]))

    def _mask_of(self, index: int, chosen: Booleans) -> torch.Tensor:
        value = self.frontier[index]
        entries = upload(chosen, self.device).reshape(-1, *[1] * len(value.features))
        return self._from_entries(value, entries.expand(-1, *value.features), self.batch)

    def add_row_gradient(self, index: int, buffer: RowBuffer, grad: torch.Tensor, row: int) -> torch.Tensor | None:
        """Add the gradient of `expand` for a row to its head rows; return the argument for `refuse_padding`, if any."""
        value, uncovered = self.frontier[index], self.uncovered[index]
        entries = _to_entries(value, grad, batch=1)
        buffer.add(self._row_of(self._map(index), row), entries)
        return None if uncovered is None else _largest(entries, self._row_of(uncovered, row))

    def _map(self, index: int) -> torch.Tensor:
        head_rows = self.maps[index]
        assert head_rows is not None, "a frontier value that is not computed"
        return head_rows

    def _row_of(self, entries: Any, row: int) -> Any:
        return entries.reshape(self.batch, -1)[row]

    def _from_entries(self, value: FrontierValue, entries: torch.Tensor, batch: int) -> torch.Tensor:
        dims, order = value.layout.dims, _entry_order(value)
        if Axis.BATCH in dims:
            entries = entries.reshape(batch, -1, *value.features)
        elif Axis.TOKEN_ROWS in dims:
            entries = entries.reshape(batch, -1, *value.features).transpose(0, 1).reshape(-1, *value.features)
        ordered = entries.permute([order.index(i) for i in value.memory_order]).contiguous()
        # Not a view for autograd: callers may write to outputs in place (`logits.div_(temperature)`).
        if value.memory_order == tuple(range(len(dims))):
            return torch.ops.aten._unsafe_view(ordered, ordered.shape)
        ordered = ordered.permute([value.memory_order.index(i) for i in range(len(dims))])
        return torch.empty_strided(ordered.shape, ordered.stride(), dtype=ordered.dtype, device=ordered.device).copy_(
            ordered
        )

    def add_gradient(self, index: int, buffer: RowBuffer, grad: torch.Tensor) -> None:
        """Add the gradient of `expand` to its head rows; raise RuntimeContractError if it is nonzero at padding."""
        value, uncovered = self.frontier[index], self.uncovered[index]
        entries = _to_entries(value, grad, self.batch)
        if isinstance(buffer, AllRows) and self.is_in_order(index):
            buffer.values[: len(entries)] += entries
        else:
            buffer.add(self._map(index), entries)
        if uncovered is not None and (at_padding := _largest(entries, uncovered)) is not None:
            self.refuse_padding(index, at_padding, [buffer.values])

    def refuse_padding(self, index: int, at_padding: torch.Tensor, others: Sequence[torch.Tensor | None]) -> None:
        """Raise RuntimeContractError if a gradient at padding, of largest elements `[n]`, is not zero; synchronises.

        A loss that is NaN or infinite has NaN there whatever it is multiplied by, and `others`, gradients of the same
        loss, tell of it: then nothing is raised.
        """
        if not bool(at_padding.any()):
            return
        is_nan = bool(at_padding.isnan().all())
        if is_nan and any(grad is not None and not bool(grad.isfinite().all()) for grad in others):
            return
        of_nan = ", all NaN" if is_nan else ""
        raise RuntimeContractError(
            "the loss uses outputs at padding positions, which the prefix tree does not compute",
            where=f"frontier value {self.frontier[index].name}",
            expected="zero gradients wherever the attention mask is 0",
            got=f"{int(at_padding.count_nonzero())} of {len(at_padding)} padding positions with a gradient{of_nan}",
            hint="mask the loss there (labels: -100), or let the attention mask cover these positions",
        )


def _entries(values: np.ndarray[Any, Any], window: tuple[int, int]) -> np.ndarray[Any, Any]:
    """Flatten `[B, S]` (or `[1, S]`) over a window of tokens to `[entries]` of a frontier value."""
    start, length = window
    return np.ascontiguousarray(values[:, start : start + length]).reshape(-1)


def _gathered(value: FrontierValue, buffer: RowBuffer, index: torch.Tensor) -> torch.Tensor:
    """Gather rows of a frontier value by index."""
    if value.inner and index.numel():
        buffer.padding.copy_(buffer.gather(index.amin()[None])[0])  # those of no real token are the largest
    return buffer.gather(index)


def _largest(gradients: torch.Tensor, entries: Booleans) -> torch.Tensor | None:
    """Return `[n]` on the device, the size of the largest element of each marked entry; None if no entry is marked."""
    positions = upload(np.flatnonzero(entries), gradients.device)
    if not len(positions):
        return None
    return gradients.index_select(0, positions).abs().reshape(len(positions), -1).amax(1)


def _to_entries(value: FrontierValue, dense: torch.Tensor, batch: int) -> torch.Tensor:
    """Reshape a dense frontier value to `[entries, *features]`, entries in the order (sequence, token)."""
    if Axis.TOKEN_ROWS in value.layout.dims:
        dim = value.layout.dims.index(Axis.TOKEN_ROWS)
        dense = dense.unflatten(dim, (-1, batch)).transpose(dim, dim + 1).flatten(dim, dim + 1)
    return dense.permute(_entry_order(value)).reshape(-1, *value.features)


def _entry_order(value: FrontierValue) -> list[int]:
    """Return the dimensions of a frontier value in the order batch, tokens, features."""
    dims = value.layout.dims
    return sorted(range(len(dims)), key=lambda i: (dims[i] is None, dims[i] is not Axis.BATCH, i))
