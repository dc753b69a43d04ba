"""Convert dense values of a call to inputs of the tree: integer codes for prefix keys, and entries by row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dta_compile.errors import RuntimeContractError
from dta_compile.executable.executable import ChunkInput, FrontierValue
from dta_compile.executable.layouts import Axis, Layout
from dta_compile.plan.tree.lexicographic import codes_of
from dta_compile.runtime.rows.batch_rows import BatchRows, Booleans, Integers
from dta_compile.runtime.rows.buffers import Gathered
from dta_compile.runtime.rows.upload import upload

IGNORED = -100  # the label that losses of torch and transformers ignore


def entries_first(value: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Reshape a dense value to `[entries, *features]`, entries in the order (sequence, token)."""
    leading = [i for i, axis in enumerate(layout.dims) if axis is not None]
    leading.sort(key=lambda i: layout.dims[i] is not Axis.BATCH)
    features = [i for i, axis in enumerate(layout.dims) if axis is None]
    value = value.permute(*leading, *features)
    return value.flatten(0, len(leading) - 1) if leading else value[None]


def entry_index(item: ChunkInput, sequences: Integers, columns: Integers, window: tuple[int, int]) -> Integers:
    """Return the entry that each (sequence, column) reads; columns outside the window get any entry (never used)."""
    start, length = window
    offsets = np.clip(columns - start, 0, length - 1)
    return sequences * length + offsets if item.layout.is_over_sequences else offsets


def gathered(
    item: ChunkInput,
    value: torch.Tensor,
    rows: BatchRows,
    coordinates: tuple[Integers, Integers],
    window: tuple[int, int],
) -> Gathered:
    """Return a chunk input with the entry index of the given rows and columns of the batch; inputs by depth are of all
    rows of the tree."""
    sequences, columns = coordinates
    index = entry_index(item, sequences, rows.tree.depths() if item.by_depth else columns, window)
    return Gathered(entries_first(value, item.layout), upload(index, value.device))


def key_codes(item: ChunkInput, value: torch.Tensor, batch: int, tokens: int, window: tuple[int, int]) -> Integers:
    """Return `[B, S]` codes of a key value, equal where the value is equal."""
    entries = entries_first(value.detach(), item.layout)
    return over_batch(item.layout, codes_of(to_numpy(entries)), batch, tokens, window)


def require_in_bounds(item: ChunkInput, value: torch.Tensor, read: Booleans, window: tuple[int, int]) -> None:
    """Raise RuntimeContractError if an index is out of bounds at a token of `read [B, S]`.

    On a GPU a failed device assert would end the process.
    """
    if item.indexes is None or not value.numel():
        return
    entries, name, line = item.indexes
    value = value.detach()
    if all(0 <= bound < entries for bound in torch.stack(value.aminmax()).cpu().tolist()):
        return
    by_entry = entries_first(value, item.layout)
    numbers = by_entry.reshape(len(by_entry), -1).cpu().numpy()
    is_outside = (numbers < 0) | (numbers >= entries)
    batch, tokens = read.shape
    first = over_batch(item.layout, np.where(is_outside.any(1), is_outside.argmax(1), -1), batch, tokens, window)
    coordinates = np.argwhere((first >= 0) & read)
    if not len(coordinates):
        return
    row, column = coordinates[0].tolist()
    entry = over_batch(item.layout, np.arange(len(numbers)), batch, tokens, window)[row, column]
    number = int(numbers[entry, first[row, column]])
    if number == IGNORED:
        advice = (
            f"{IGNORED} marks labels that a loss ignores, and is no entry: gather with labels.clamp(min=0), and leave "
            f"these tokens out of the loss with torch.where(labels != {IGNORED}, log_probs, 0)"
        )
    else:
        advice = "check that tokenizer and model belong together, and that padding is a token of the tokenizer's"
    raise RuntimeContractError(
        f"an index is out of bounds: {name} gives {number} for token {column} of row {row}",
        where=line,
        expected=f"numbers from 0 to {entries - 1}",
        got=f"{number}, and others out of bounds at {len(coordinates) - 1:,} more tokens",
        hint=advice,
    )


def used_tokens(
    value: FrontierValue,
    dense: Sequence[torch.Tensor],
    batch: int,
    tokens: int,
    window: Callable[[Any], tuple[int, int]],
) -> Booleans:
    """Return `[B, S]` tokens at which a frontier value is used; `window` returns `(start, length)` of a frame."""
    used = np.zeros((batch, tokens), bool)
    for use in value.uses:
        start, length = window(use.frame)
        part = np.zeros((batch, tokens), bool)
        part[:, start : start + length] = True
        for mask in use.conditions:
            entries = to_numpy(entries_first(dense[mask.source] != 0, mask.layout).reshape(-1))
            part &= over_batch(mask.layout, entries, batch, tokens, window(mask.layout.frame)) == mask.holds
        used |= part
    return used


def over_batch(
    layout: Layout, entries: npt.NDArray[Any], batch: int, tokens: int, window: tuple[int, int]
) -> npt.NDArray[Any]:
    """Gather `[B, S]` from a value's `[entries]` by the rule of `entry_index`."""
    start, length = window
    offsets = np.clip(np.arange(tokens) - start, 0, length - 1)
    if not layout.is_over_sequences:
        return np.broadcast_to(entries[offsets], (batch, tokens))
    by_sequence = entries.reshape(batch, -1)
    if by_sequence.shape[1] == 1:
        return np.broadcast_to(by_sequence, (batch, tokens))
    return by_sequence if window == (0, tokens) else np.take(by_sequence, offsets, axis=1)


def to_numpy(value: torch.Tensor) -> npt.NDArray[np.generic]:
    """Copy a tensor to numpy; bfloat16 and float16 are reinterpreted as int16."""
    value = value.cpu()
    if value.dtype in (torch.bfloat16, torch.float16):
        value = value.contiguous().view(torch.int16)
    return value.numpy()
