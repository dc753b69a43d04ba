"""From dense values of the call to what the tree reads: codes for keys, and entries for rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dta_compile.executable.executable import ChunkInput, FrontierValue
from dta_compile.executable.layouts import Axis, Layout
from dta_compile.plan.tree.lexicographic import codes_of
from dta_compile.runtime.rows.batch_rows import BatchRows, Booleans, Integers
from dta_compile.runtime.rows.buffers import Gathered
from dta_compile.runtime.rows.upload import upload


def entries_first(value: torch.Tensor, layout: Layout) -> torch.Tensor:
    """A dense value as `[entries, *features]`, entries counting sequences, then tokens."""
    leading = [i for i, axis in enumerate(layout.dims) if axis is not None]
    leading.sort(key=lambda i: layout.dims[i] is not Axis.BATCH)
    features = [i for i, axis in enumerate(layout.dims) if axis is None]
    value = value.permute(*leading, *features)
    return value.reshape(-1, *value.shape[len(leading) :])


def entry_index(item: ChunkInput, sequences: Integers, columns: Integers, window: tuple[int, int]) -> Integers:
    """Which entry each (sequence, column) reads; columns outside the value's window read any entry (never used)."""
    start, length = window
    offsets = np.clip(columns - start, 0, length - 1)
    return sequences * length + offsets if item.layout.is_over_sequences else offsets


def gathered(
    item: ChunkInput, value: torch.Tensor, rows: BatchRows, positions: Integers, window: tuple[int, int]
) -> Gathered:
    """A chunk input read at the given positions of the batch."""
    index = entry_index(item, *rows.coordinates(positions), window)
    return Gathered(entries_first(value, item.layout), upload(index, value.device))


def key_codes(item: ChunkInput, value: torch.Tensor, batch: int, tokens: int, window: tuple[int, int]) -> Integers:
    """`[B, S]` codes of a key value, equal where the value is equal."""
    entries = entries_first(value.detach(), item.layout)
    return over_batch(item.layout, codes_of(to_numpy(entries)), batch, tokens, window)


def used_tokens(
    value: FrontierValue,
    dense: Sequence[torch.Tensor],
    batch: int,
    tokens: int,
    window: Callable[[Any], tuple[int, int]],
) -> Booleans:
    """`[B, S]` tokens at which a frontier value is used; `window` gives `(start, length)` of a frame."""
    used = np.zeros((batch, tokens), bool)
    for use in value.uses:
        start, length = window(use.frame)
        part = np.zeros((batch, tokens), bool)
        part[:, start : start + length] = True
        for one in use.conditions:
            entries = to_numpy(entries_first(dense[one.source] != 0, one.layout).reshape(-1))
            part &= over_batch(one.layout, entries, batch, tokens, window(one.layout.frame)) == one.holds
        used |= part
    return used


def over_batch(
    layout: Layout, entries: npt.NDArray[Any], batch: int, tokens: int, window: tuple[int, int]
) -> npt.NDArray[Any]:
    """`[B, S]` entry that every token reads of a value's `[entries]`, as `entry_index` says."""
    start, length = window
    offsets = np.clip(np.arange(tokens) - start, 0, length - 1)
    if not layout.is_over_sequences:
        return np.broadcast_to(entries[offsets], (batch, tokens))
    by_sequence = entries.reshape(batch, -1)
    if by_sequence.shape[1] == 1:
        return np.broadcast_to(by_sequence, (batch, tokens))
    return by_sequence if window == (0, tokens) else np.take(by_sequence, offsets, axis=1)


def to_numpy(value: torch.Tensor) -> npt.NDArray[np.generic]:
    """Bits of a tensor on the host; dtypes that numpy lacks are reinterpreted as integers of their size."""
    value = value.cpu()
    if value.dtype in (torch.bfloat16, torch.float16):
        value = value.contiguous().view(torch.int16)
    return value.numpy()
