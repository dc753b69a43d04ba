"""What ranks tell each other about their calls, before they plan one tree of all their rows."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from dta_compile.errors import RefusalError, RuntimeContractError
from dta_compile.executable.executable import ChunkInput
from dta_compile.plan.simulate import Simulation
from dta_compile.plan.tree.lexicographic import codes_of, combine
from dta_compile.plan.tree.prefix_tree import PrefixTree
from dta_compile.proofs.mask_class import MaskClass
from dta_compile.runtime.calls.masks import ReadMasks
from dta_compile.runtime.calls.planned_call import PlannedCall
from dta_compile.runtime.rows.batch_rows import BatchRows, BatchTokens, Integers
from dta_compile.runtime.rows.dense_to_tree import entries_first, over_batch, to_numpy


class Facts(NamedTuple):
    """What a rank tells the others about its call.

    Attributes:
        options: what decides, besides the tokens, which ops run.
        tokens: `[P, C]` for every real token: whether it begins a sequence, whether it is joined with the one before,
            whether its outputs are used, and the contents of its keys.
        widths: number of columns of each trunk key, then of each head key.
        kinds: dtypes and shapes of an entry of the values that move to other ranks, dtypes of those that come back, and
            the states of each layer.
        numbers: see `Executable.numbers`.
        masks: class of each mask, and the numbers that they hide keys by; None: the rank has no tokens.
        spans: what layers need to know of them: spans, whether there are blocks, and the numbers.
        columns, from_first: tokens of a row, and whether every sequence begins at the first of its row.
        constants: shapes and checksums of the values that all tokens read.
        limits: properties of its machine.
        counts: counts of the schedule over its own tree.
    """

    options: dict[str, Any]
    tokens: Integers
    widths: tuple[int, ...]
    kinds: Any
    numbers: list[list[str]]
    masks: tuple[list[MaskClass], list[float]] | None
    spans: Any
    columns: int
    from_first: bool
    constants: Any
    limits: Any
    counts: Simulation


def facts_of(own: PlannedCall, is_forced: bool) -> Facts:
    """Return what this rank tells the others; `is_forced`: one tree is asked for."""
    executable, masks = own.executable, own.masks
    if any(masks.kept):
        raise RefusalError(
            "one tree over ranks has sliding windows alone, without tokens that stay visible beside them",
            got=f"the keys at {len(max(masks.kept, key=len))} depths beside a window",
            hint="compile without options={'mesh': ...}: each rank runs a tree of its own",
        )
    places = np.flatnonzero(masks.valid)
    starts = masks.starts
    if starts is None:
        starts = np.zeros_like(masks.valid)
        rows = np.flatnonzero(masks.valid.any(1))
        starts[rows, masks.valid.argmax(1)[rows]] = True
    joined = np.zeros_like(starts) if masks.joined is None else masks.joined
    used = np.logical_or.reduce([np.zeros_like(starts), *(mask for mask in own.layout.used if mask is not None)])
    columns = [flags.reshape(-1)[places].astype(np.int64)[:, None] for flags in (starts, joined, used)]
    items = (*executable.trunk_keys, *executable.head_keys)
    keys = [_contents(own, item).reshape(masks.valid.size, -1)[places] for item in items]
    moved = [entries_first(own.dense[i.slot], i.layout) for i in (*executable.trunk_inputs, *executable.head_inputs)]
    shared = [own.dense[slot] for slot in executable.constant_inputs]
    spans = [(mask.window, mask.chunk, mask.block is not None) for mask in masks.classes], masks.fillers
    states = [layer.states for layer in executable.mixers]
    return Facts(
        {
            "mode": own.plan.schedule.mode,
            "chunk_size": own.plan.options.chunk_size,
            "strategy": "one_tree" if is_forced else "auto",
        },
        np.concatenate([*columns, *keys], 1),
        tuple(key.shape[1] for key in keys),
        ([(_sizes(v), str(v.dtype)) for v in moved], [str(v.dtype) for v in executable.frontier], states),
        executable.numbers,
        (masks.classes, masks.fillers) if len(places) else None,
        spans if len(places) else None,
        masks.valid.shape[1],
        masks.from_first,
        ([(tuple(value.shape), str(value.dtype)) for value in shared], checksums(shared)),
        own.plan.limits.of_machine,
        own.plan.simulation,
    )


def _sizes(entries: torch.Tensor) -> tuple[int, ...]:
    """Return the sizes of an entry: without those of 1, which the axis of a single row is taken for."""
    return tuple(size for size in entries.shape[1:] if size != 1)


def _contents(own: PlannedCall, item: ChunkInput) -> Integers:
    """Return `[B, S, c]` numbers that are equal where the values of a key are, on any rank.

    Values of more than 8 bytes are hashed, to 128 bits.
    """
    entries = to_numpy(entries_first(own.dense[item.slot].detach(), item.layout))
    flat = np.ascontiguousarray(entries.reshape(len(entries), -1))
    codes = codes_of(flat)[:, None]
    if flat.dtype.itemsize * flat.shape[1] not in (1, 2, 4, 8):  # else codes are the values themselves
        _, first, inverse = np.unique(codes[:, 0], return_index=True, return_inverse=True)
        hashes = [hashlib.blake2b(flat[index].tobytes(), digest_size=16).digest() for index in first.tolist()]
        codes = np.frombuffer(b"".join(hashes), np.int64).reshape(-1, 2)[inverse.reshape(-1)]
    window = own.window(item.layout.frame)
    return np.stack([over_batch(item.layout, code, own.batch, own.tokens, window) for code in codes.T], -1)


def checksums(values: Sequence[torch.Tensor]) -> list[int]:
    """Return a checksum of each value, of 64 bits and of its order: made where it is, so that few bytes are copied.

    It is the sum of all words, each times a pseudo-random odd number that belongs to its place.
    """
    sums = []
    for value in values:
        word = torch.int32 if value.dtype.itemsize % 4 == 0 else torch.uint8
        words = value.detach().contiguous().reshape(-1).view(word).to(torch.int64)
        places = torch.arange(len(words), device=words.device) * 0x1E3779B97F4A7C15
        sums.append((words * ((places ^ (places >> 29)) * 0x3F58476D1CE4E5B9 | 1)).sum())
    return torch.stack([total.to(sums[0].device) for total in sums]).tolist() if sums else []


def require_alike(facts: Sequence[Facts]) -> None:
    """Raise `RuntimeContractError` unless the calls of all ranks can be parts of one."""
    for name, what in _WORDS.items():
        known = [(rank, getattr(of_rank, name)) for rank, of_rank in enumerate(facts)]
        (first, value), *others = [(rank, value) for rank, value in known if value is not None] or [(0, None)]
        for rank, other in others:
            if value != other:
                raise RuntimeContractError(
                    f"one tree over ranks: the calls of ranks {first} and {rank} differ in {what}",
                    expected="the same model, options and kinds of inputs on all ranks",
                    got=f"{name} {value!s:.100} and {other!s:.100}",
                    hint="options={'mesh': None} runs a tree of its own on each rank",
                )


_WORDS = {
    "options": "their options, or in whether gradients are wanted",
    "widths": "the inputs that tell tokens apart",
    "kinds": "the dtypes or shapes of inputs, outputs, or states of layers",
    "numbers": "numbers of the model, such as a scale",
    "constants": "values that all tokens read, such as tables made from the number of columns",
    "spans": "how far tokens attend",
}


def rows_of_all(own: PlannedCall, facts: Sequence[Facts]) -> tuple[BatchRows, list[int]]:
    """Return the rows of all ranks' tokens, one rank after the other, and `[ranks + 1]` each rank's first position."""
    tokens = np.concatenate([of_rank.tokens for of_rank in facts])
    begins = [0, *np.cumsum([len(of_rank.tokens) for of_rank in facts]).tolist()]
    starts, joined, used = (tokens[:, column].astype(np.bool_)[None] for column in range(3))
    bounds = np.cumsum([3, *facts[0].widths])
    contents = [tokens[:, a:b] for a, b in pairwise(bounds.tolist())]
    keys = [combine(list(columns.T), len(tokens))[None] for columns in contents]
    trunk = len(own.executable.trunk_keys)
    # No sequence goes on over the end of a rank.
    batch = BatchTokens.read(np.ones_like(starts), starts, keys[:trunk], False, joined if joined.any() else None)
    tree = PrefixTree.build(batch.keys, units=batch.units)
    return BatchRows.of(batch, tree, keys[trunk:], used), begins


def masks_of(facts: Sequence[Facts]) -> ReadMasks | None:
    """Return masks with what layers need to know of those of all ranks; None if no rank has tokens."""
    some = [of_rank for of_rank in facts if of_rank.masks is not None]
    if not some or some[0].masks is None:
        return None
    classes, fillers = some[0].masks
    columns = max(of_rank.columns for of_rank in some)
    from_first = all(of_rank.from_first for of_rank in some)
    valid = np.ones((1, columns), np.bool_)
    return ReadMasks(valid, None if from_first else np.zeros_like(valid), None, classes, fillers, [()] * len(classes))
