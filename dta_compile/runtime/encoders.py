"""Run the encoders of images and other media before the tree: once per distinct medium of a batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from dta_compile.errors import RefusalError
from dta_compile.integrations.layer_groups import gather_all

__all__ = ["Encoder", "Features", "distinct", "encode_distinct"]

logger = logging.getLogger("dta_compile")


class Encoder(Protocol):
    """Function from the media `[n, ...]` of a batch to feature tensors `[n * t, D]`, or `[n, t, D]`, in their order."""

    def __call__(self, *media: torch.Tensor) -> Sequence[torch.Tensor]: ...


class Features:
    """Tables of features, and the row of each feature of the batch.

    Attributes:
        tables: per feature tensor, the features `[rows, D]` of the distinct media.
        rows: per feature tensor, `[N]` the row of each of the batch's features.
        media, encoded: numbers of media in the batch, and of those that were encoded.
    """

    def __init__(self, tables: Sequence[torch.Tensor], rows: Sequence[torch.Tensor], media: int, encoded: int) -> None:
        self.tables, self.rows, self.media, self.encoded = tables, rows, media, encoded


def distinct(media: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
    """Find equal media: those with the same bits in every tensor `[n, ...]`.

    Media are grouped by a hash on their device, and equality within a group is confirmed.

    Returns:
        The first medium of each kind, and `n` the position among those of every medium.
    """
    by_hash: dict[tuple[int, ...], list[int]] = {}
    first: list[int] = []
    kinds: list[int] = []
    for i, key in enumerate(zip(*map(_hashes, media), strict=True)):
        same = (k for k in by_hash.setdefault(key, []) if all(_equal_bits(t[first[k]], t[i]) for t in media))
        kind = next(same, len(first))
        if kind == len(first):
            first.append(i)
            by_hash[key].append(kind)
        kinds.append(kind)
    return first, kinds


def _words(value: torch.Tensor) -> torch.Tensor:
    """Return the bits `[n, words]` of a tensor `[n, ...]` as integers."""
    flat = value.detach().reshape(len(value), -1).contiguous()
    return flat.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])


def _hashes(value: torch.Tensor) -> list[int]:
    words = _words(value)
    # Multiplication by odd numbers modulo 2**64 that depend on the position.
    factors = torch.arange(words.shape[1], device=words.device, dtype=torch.int64) * 0x9E3779B97F4A7C15 % 2**63 | 1
    hashes: list[int] = torch.stack([(row.to(torch.int64) * factors).sum() for row in words]).tolist()
    return hashes


def _equal_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(_words(left[None]), _words(right[None]))


def encode_distinct(
    encoder: Encoder, media: Sequence[torch.Tensor], look: bool, works_for: Callable[[int], bool] = lambda count: True
) -> Features:
    """Encode each distinct medium once.

    Args:
        media: tensors `[n, ...]` of the batch. If their first sizes differ, the batch is one medium.
        look: compare the features with those of the whole batch.
        works_for: whether the encoder takes so many media; if not, all are encoded, and equal ones have one's features.

    Raises:
        RefusalError: features of a medium depend on the other media of the batch.
    """
    count = len(media[0])
    if count == 0 or any(len(value) != count for value in media):
        tables = [_as_rows(value) for value in encoder(*media)]
        return Features(tables, [_range(table, len(table)) for table in tables], 1, 1)
    first, kinds = distinct(media)
    if len(first) == count or not works_for(len(first)):
        first, kinds = list(range(count)), [first[kind] for kind in kinds]
    else:
        chosen = torch.tensor(first, device=media[0].device)
        alone = [value.index_select(0, chosen) for value in media]
    tables = [_as_rows(value) for value in encoder(*(media if len(first) == count else alone))]
    rows = [_rows(table, kinds, len(first)) for table in tables]
    if look and len(set(kinds)) < count:
        _require_independence(encoder, media, tables, rows)
    return Features(tables, rows, count, len(first))


def _as_rows(features: torch.Tensor) -> torch.Tensor:
    return features.reshape(-1, features.shape[-1])


def _range(table: torch.Tensor, end: int) -> torch.Tensor:
    return torch.arange(end, device=table.device)


def _rows(table: torch.Tensor, kinds: Sequence[int], encoded: int) -> torch.Tensor:
    each = len(table) // encoded
    if each * encoded != len(table):
        raise _dependence(f"{encoded} media have {len(table)} features together")
    start = torch.tensor(kinds, device=table.device) * each
    return (start[:, None] + _range(table, each)).flatten()


def _require_independence(
    encoder: Encoder, media: Sequence[torch.Tensor], tables: Sequence[torch.Tensor], rows: Sequence[torch.Tensor]
) -> None:
    """Raise RefusalError unless the features of the whole batch are those of its distinct media, up to rounding."""
    with torch.no_grad():
        for whole, table, row in zip(map(_as_rows, encoder(*media)), tables, rows, strict=True):
            if len(whole) != len(row):
                raise _dependence(f"{len(whole)} features of all media, {len(row)} of each alone")
            alone = table.detach()[row]
            error = (whole - alone).abs().max() if whole.numel() else torch.zeros(())
            largest = torch.cat([whole.abs().flatten(), torch.ones(1, device=whole.device, dtype=whole.dtype)]).max()
            if not error <= 1000 * torch.finfo(whole.dtype).eps * largest and bool(whole.isfinite().all()):
                raise _dependence(f"features that differ by {float(error):.2g}")


def _dependence(got: str) -> RefusalError:
    return RefusalError(
        "features of an image (or another medium) depend on the other images of the batch",
        where="the encoder in front of the tokens",
        expected="an encoder that treats each image by itself, without dropout or batch statistics",
        got=got,
        hint="call .eval() on the encoder's dropout and batch-norm layers, or encode images outside of the function",
    )
