"""Run the encoders of images and other media before the tree: once per distinct medium of a batch.

An encoder whose activations would take more than the budget runs on groups of media, and again in the backward.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from dta_compile.errors import RefusalError

MULTIPLIER = 0x9E3779B97F4A7C15 - 2**64  # 2**64 over the golden ratio, as a signed number
BLOCK = 2**17  # numbers of media that are hashed or compared at a time
ROUNDING = 1000  # times the precision of the dtype, relative to the largest feature: sums in another order

WHERE = "the encoder in front of the tokens"


# Function from the media `[n, ...]` of a batch to feature tensors `[n * t, D]`, or `[n, t, D]`, in their order.
Encoder = Callable[..., Sequence[torch.Tensor]]


@dataclasses.dataclass(frozen=True)
class Features:
    """Tables of features, and the row of each feature of the batch.

    Attributes:
        tables: per feature tensor, the features `[rows, D]` of the media that were encoded.
        rows: per feature tensor, `[N]` the row of each of the batch's features.
        media, distinct, encoded: number of media in the batch, of different ones, and of those that were encoded.
        is_proof: different media were compared with themselves alone.
        groups: number of groups that were encoded one after the other.
        kept_bytes: about the activations that are kept at a time.
    """

    tables: Sequence[torch.Tensor]
    rows: Sequence[torch.Tensor]
    media: int
    distinct: int
    encoded: int
    is_proof: bool = False
    groups: int = 1
    kept_bytes: float = 0.0

    @property
    def note(self) -> str:
        """What was encoded."""
        what = f"{self.media} images (or other media), {self.distinct} different, {self.encoded} encoded"
        return what + (f" in {self.groups} groups, and again in the backward" if self.groups > 1 else "")


class Kept(torch.autograd.graph.saved_tensors_hooks):
    """Count `bytes` that autograd keeps of what runs within, with gradients, beside `others`: weights."""

    def __init__(self, others: Iterable[torch.Tensor]) -> None:
        super().__init__(self._keep, lambda value: value)
        self._of_others = {value.untyped_storage()._cdata for value in others}
        self._storages: dict[int, Any] = {}

    @property
    def bytes(self) -> int:
        return sum(storage.nbytes() for storage in self._storages.values())

    def _keep(self, value: torch.Tensor) -> torch.Tensor:
        storage = value.untyped_storage()
        if storage._cdata not in self._of_others:
            self._storages[storage._cdata] = storage
        return value.detach()


def distinct(media: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
    """Find equal media: those with the same bits in every tensor `[n, ...]`.

    Media are grouped by a hash on their device, and equality within a group is confirmed.

    Returns:
        The first medium of each kind, and `n` the position among those of every medium.
    """
    words = [_words(value) for value in media]
    kind_of: dict[tuple[int, ...], int] = {}
    first: list[int] = []
    kinds: list[int] = []
    for i, key in enumerate(zip(*map(_hashes, words), strict=True)):
        kind = kind_of.setdefault(key, len(first))
        if kind == len(first):
            first.append(i)
        kinds.append(kind)
    leaders = torch.tensor(first)[torch.tensor(kinds)].to(media[0].device)
    for value in words:
        blocks = zip(value.split(_media_of_block(value)), leaders.split(_media_of_block(value)), strict=True)
        if not all(torch.equal(block, value.index_select(0, of_block)) for block, of_block in blocks):
            return list(range(len(kinds))), list(range(len(kinds)))  # equal hashes of different media: share nothing
    return first, kinds


def _words(value: torch.Tensor) -> torch.Tensor:
    """Return the bits `[n, words]` of a tensor `[n, ...]` as integers."""
    flat = value.detach().resolve_conj().resolve_neg().reshape(len(value), -1).contiguous()
    words = {1: torch.int8, 2: torch.int16, 4: torch.int32}
    return flat.view(words.get(flat.element_size(), torch.int64))  # two for a complex number of 16 bytes


def _media_of_block(words: torch.Tensor) -> int:
    return max(BLOCK // max(words.shape[1], 1), 1)


def _hashes(words: torch.Tensor) -> list[int]:
    # Products modulo 2**64 with odd numbers that depend on the position.
    factors = torch.arange(words.shape[1], device=words.device, dtype=torch.int64) * MULTIPLIER | 1
    hashes = [(block.to(torch.int64) * factors).sum(1) for block in words.split(_media_of_block(words))]
    numbers: list[int] = torch.cat(hashes).tolist()
    return numbers


def encode_distinct(
    encoder: Encoder,
    media: Sequence[torch.Tensor],
    look: bool,
    works_for: Callable[[int], bool] = lambda count: True,
    bytes_each: float = 0.0,
    budget: float = math.inf,
    are_counted: bool = True,
) -> Features:
    """Encode each distinct medium once.

    Args:
        media: tensors `[n, ...]` of the batch. If their first sizes differ, or one requires a gradient (which equal
            media have of their own), the batch is one medium.
        look: compare the features with those of the whole batch, and of a medium alone.
        works_for: whether the encoder takes so many media; if not, the first medium is encoded several times.
        bytes_each: about the activations of a medium that autograd keeps; 0 if it keeps none.
        budget: bytes of activations that may be kept. If they need more, groups of media that need no more, or are as
            small as the encoder takes, are encoded, and again in the backward.
        are_counted: the first size of the tensors is a number of media; if not, the batch is one medium.

    Raises:
        RefusalError: features of a medium depend on the other media of the batch.
    """
    count = len(media[0])
    if not are_counted or count == 0 or any(len(value) != count or value.requires_grad for value in media):
        made = encoder(*media)
        rows = [_range(value, value.numel() // value.shape[-1]) for value in made]
        return Features([*map(as_table, made)], rows, min(count, 1), min(count, 1), 1)
    first, kinds = distinct(media)
    different = len(first)
    encoded = next((k for k in range(different, count) if works_for(k)), count)
    if encoded == count:
        kinds, first = [first[kind] for kind in kinds], list(range(count))
    chosen = [*first, *first[:1] * (encoded - len(first))]
    groups = _groups(chosen, works_for, int(min(budget / bytes_each, encoded)) if bytes_each else encoded)
    if len(groups) == 1:
        tables = _tables(encoder, media, chosen)
    else:
        of_groups = [
            checkpoint(_tables, encoder, media, group, use_reentrant=False, preserve_rng_state=False)
            for group in groups
        ]
        tables = [*map(torch.cat, zip(*of_groups, strict=True))]
    encoded = sum(map(len, groups))
    is_whole = encoded == count and len(groups) == 1
    for sample in ([] if is_whole else [*range(count)], [0] * least(works_for, count)) if look else ():
        if sample:
            rows = [_rows(table, [kinds[i] for i in sample], encoded) for table in tables]
            _require_equal(_tables(encoder, media, sample, torch.no_grad()), tables, rows)
    rows = [_rows(table, kinds, encoded) for table in tables]
    kept = bytes_each * max(map(len, groups))
    return Features(tables, rows, count, different, encoded, look and different > 1, len(groups), kept)


def least(works_for: Callable[[int], bool], count: int) -> int:
    """Return the least number of media that an encoder takes; `count` is one that it takes."""
    return next((k for k in range(1, count) if works_for(k)), count)


def _groups(chosen: list[int], works_for: Callable[[int], bool], most: int) -> list[list[int]]:
    """Divide media into groups of up to `most`, if the encoder takes so few; the last one may repeat some."""
    size = next((k for k in range(min(most, len(chosen)), 0, -1) if works_for(k)), None)
    size = least(works_for, len(chosen)) if size is None else size
    groups = [chosen[i : i + size] for i in range(0, len(chosen), size)]
    groups[-1] = (groups[-1] * size)[:size] if not works_for(len(groups[-1])) else groups[-1]
    return groups


def _tables(
    encoder: Encoder,
    media: Sequence[torch.Tensor],
    chosen: Sequence[int],
    mode: contextlib.AbstractContextManager[Any] = contextlib.nullcontext(),  # noqa: B008 - has no state
) -> list[torch.Tensor]:
    """Encode the chosen media."""
    index = torch.tensor(chosen, device=media[0].device)
    is_whole = list(chosen) == list(range(len(media[0])))
    with mode:
        return [as_table(v) for v in encoder(*(media if is_whole else [v.index_select(0, index) for v in media]))]


def as_table(features: torch.Tensor) -> torch.Tensor:
    """Return features as `[N, D]`; if there are none, a row of zeros, since tokens without features read row 0."""
    table = features.reshape(-1, features.shape[-1])
    return table if len(table) else torch.nn.functional.pad(table, (0, 0, 0, 1))


def _range(table: torch.Tensor, end: int) -> torch.Tensor:
    return torch.arange(end, device=table.device)


def _rows(table: torch.Tensor, kinds: Sequence[int], encoded: int) -> torch.Tensor:
    each = len(table) // encoded
    if each * encoded != len(table):
        raise dependence(WHERE, f"{encoded} media have {len(table)} features together")
    start = torch.tensor(kinds, device=table.device) * each
    return (start[:, None] + _range(table, each)).flatten()


def _require_equal(
    features: Sequence[torch.Tensor], tables: Sequence[torch.Tensor], rows: Sequence[torch.Tensor]
) -> None:
    """Raise RefusalError unless features are these rows of the tables, up to rounding."""
    for own, table, row in zip(features, tables, rows, strict=True):
        if len(own) != len(row):
            raise dependence(WHERE, f"{len(own)} features instead of {len(row)}")
        known = table.detach()[row]
        largest = float(known.abs().nan_to_num(0, 0).amax()) if known.numel() else 0.0
        tolerance = ROUNDING * torch.finfo(own.dtype).eps * max(1.0, largest)
        if not torch.allclose(own, known, 0.0, tolerance, equal_nan=True):
            raise dependence(WHERE, f"features that differ by {float((own - known).abs().max()):.2g}")


def dependence(where: str, got: str) -> RefusalError:
    """Return the error for an encoder that cannot run once per distinct image."""
    return RefusalError(
        "features of an image (or another medium) depend on the other images of the batch",
        where=where,
        expected="an encoder that treats each image by itself, without dropout or batch statistics",
        got=got,
        hint="call .eval() on the encoder, or its dropout and batch-norm layers, or encode outside of the function",
    )
