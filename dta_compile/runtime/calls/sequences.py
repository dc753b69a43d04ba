"""Sequences of packed rows, and blocks of tokens that attend to each other, as the masks of a call tell them."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import torch

from dta_compile.errors import RuntimeContractError
from dta_compile.proofs.mask_class import Bound, MaskClass
from dta_compile.proofs.terms import Term, shown
from dta_compile.runtime.calls.mask_values import MaskValues

Booleans = npt.NDArray[np.bool_]


@dataclasses.dataclass(frozen=True)
class Sequences:
    """Real tokens of a batch in row-major order, and the starts of sequences among them.

    Attributes:
        places: `[P]` indices of the tokens in the flattened batch, whose rows have `width` tokens.
        begins: `[P]` bool, tokens that begin a sequence.
    """

    places: torch.Tensor
    width: int
    begins: torch.Tensor

    @classmethod
    def rows_of(cls, valid: torch.Tensor) -> Sequences:
        """Return the real tokens with one sequence per row."""
        places = valid.reshape(-1).nonzero()[:, 0]
        rows = places // valid.shape[1]
        return cls(places, valid.shape[1], torch.diff(rows, prepend=rows.new_full((1,), -1)) != 0)

    def at(self, values: torch.Tensor) -> torch.Tensor:
        """Gather `[P]` from `[B, S]`."""
        return values.reshape(-1)[self.places]

    def where(self, number: int) -> tuple[int, int]:
        """Return row and column of a token."""
        row, column = divmod(int(self.places[number]), self.width)
        return row, column

    def on_batch(self, values: torch.Tensor, like: Booleans) -> Booleans:
        """Return bool `[B, S]` from `[P]`, False at padding."""
        out = np.zeros_like(like)
        out.reshape(-1)[self.places.cpu().numpy()] = values.cpu().numpy()
        return out

    def first(self, wrong: torch.Tensor) -> int | None:
        """Return the index of the first True of `[P]`, or None."""
        return int(wrong.nonzero()[0, 0]) if bool(wrong.any()) else None

    @property
    def depths(self) -> torch.Tensor:
        """`[P]` number of tokens of the same sequence before each."""
        numbers = torch.arange(len(self.places), device=self.places.device)
        return numbers - torch.where(self.begins, numbers, 0).cummax(0).values


def agreed_sequences(masks: MaskValues, classes: list[MaskClass], rows: Sequences) -> Sequences:
    """Return the starts of sequences; raise RuntimeContractError if masks disagree."""
    first, *others = [_begins_of(masks, mask_class, rows) for mask_class in classes]
    for mask_class, other in zip(classes[1:], others, strict=True):
        if (number := rows.first(first != other)) is not None:
            row, column = rows.where(number)
            raise RuntimeContractError(
                "attention layers take different tokens of a row for one sequence",
                expected=f"{_segments(classes[0])}, as another layer has it",
                got=f"{_segments(mask_class)}, which differs at row {row}, token {column}",
                hint="give all layers the same packed rows, or pass one sequence per row",
            )
    return dataclasses.replace(rows, begins=first)


def _begins_of(masks: MaskValues, mask_class: MaskClass, rows: Sequences) -> torch.Tensor:
    """Return `[P]` real tokens that begin a sequence by one mask class; raise if a sequence is interrupted."""
    values = [rows.at(masks.value(term)) for term in mask_class.segments]
    begins = rows.begins
    for numbers in values:
        begins = begins | torch.cat([rows.begins[:1], numbers[1:] != numbers[:-1]])
    if all(_never_falls(numbers, rows.begins) for numbers in values):
        return begins
    ranks = [numbers[begins].unique(return_inverse=True)[1] for numbers in values]
    runs = torch.stack([rows.places[begins] // rows.width, *ranks])
    _, run, count = runs.unique(dim=1, return_inverse=True, return_counts=True)
    if bool((is_split := count[run] > 1).any()):
        row, column = rows.where(int(begins.nonzero()[is_split.nonzero()[-1, 0], 0]))
        raise RuntimeContractError(
            "a sequence of a packed row is in several pieces, with another one in between",
            where=masks.inputs(mask_class.segments[0]),
            expected=f"the tokens of one {shown(mask_class.segments[0])} next to each other",
            got=f"row {row}, where one goes on at token {column}",
            hint="put all tokens of a sequence together",
        )
    return begins


def joined_of(masks: MaskValues, classes: list[MaskClass], sequences: Sequences) -> torch.Tensor:
    """Return `[P]` tokens that are in the block of the real token before them; raise if masks disagree."""
    first, *others = [_joined_of(masks, mask_class, sequences) for mask_class in classes]
    for mask_class, other in zip(classes[1:], others, strict=True):
        if (number := sequences.first(first != other)) is not None:
            row, column = sequences.where(number)
            raise RuntimeContractError(
                "attention layers have different blocks of tokens that attend to each other",
                expected=f"one for each {shown(classes[0].of_blocks[0])}, as another layer has it",
                got=f"one for each {shown(mask_class.of_blocks[0])}, which differs at row {row}, token {column}",
                hint="give all layers with blocks the same ones",
            )
    return first


def _joined_of(masks: MaskValues, mask_class: MaskClass, sequences: Sequences) -> torch.Tensor:
    assert mask_class.block is not None
    numbers, where = sequences.at(masks.value(mask_class.block)), masks.inputs(mask_class.block)
    inside = torch.ones_like(sequences.begins)
    if mask_class.in_block is not None:
        inside = sequences.at(masks.value(mask_class.in_block))
    joined = ~sequences.begins
    joined[1:] &= inside[1:] & inside[:-1] & (numbers[1:] == numbers[:-1])
    begins = (inside & ~joined).nonzero()[:, 0]
    pairs = torch.stack([sequences.begins.cumsum(0)[begins], numbers[begins].unique(return_inverse=True)[1]])
    _, block, count = pairs.unique(dim=1, return_inverse=True, return_counts=True)
    if bool((is_split := count[block] > 1).any()):
        row, column = sequences.where(int(begins[is_split.nonzero()[-1, 0]]))
        raise RuntimeContractError(
            "tokens that attend to each other in both directions are in several pieces, with others in between",
            where=where,
            expected=f"the tokens of one {shown(mask_class.block)} next to each other",
            got=f"row {row}, where one goes on at token {column}",
            hint="number every run of such tokens differently",
        )
    sizes = torch.diff((~joined).nonzero()[:, 0], append=begins.new_tensor([len(joined)]))
    longest = int(sizes.max()) if len(sizes) else 0
    if mask_class.fits_window and mask_class.window is not None and longest > mask_class.window:
        raise RuntimeContractError(
            "more tokens attend to each other in both directions than fit into the sliding window",
            where=where,
            expected=f"at most {mask_class.window:,} tokens in a block",
            got=f"{longest:,}",
            hint="make the window as long as the longest block",
        )
    return joined


def check_sequences(masks: MaskValues, mask_class: MaskClass, sequences: Sequences) -> None:
    """Raise unless positions count the tokens of each sequence as the proof assumes."""
    for term in mask_class.positions:
        _require_consecutive(masks, term, sequences)
    for bound in mask_class.bounds:
        _require_bounds(masks, bound, sequences)
    if mask_class.chunk is not None and mask_class.counted is not None:
        _require_aligned(masks, mask_class.counted, mask_class.chunk, sequences)


def kept_depths(masks: MaskValues, mask_class: MaskClass, sequences: Sequences) -> tuple[int, ...]:
    """Return the depths of the tokens that stay visible beyond a window; raise unless depths tell them."""
    if mask_class.kept is None or not len(sequences.places):
        return ()
    is_kept, depths = sequences.at(masks.value(mask_class.kept)), sequences.depths
    every, kept = depths.bincount(), depths[is_kept].bincount(minlength=int(depths.max()) + 1)
    if (number := sequences.first(is_kept & (kept < every)[depths])) is not None:
        row, column = sequences.where(number)
        depth = int(depths[number])
        raise RuntimeContractError(
            "the tokens that stay visible beside a sliding window are others in each sequence",
            where=masks.inputs(mask_class.kept),
            expected=f"{shown(mask_class.kept)} to be alike at all tokens with {depth} tokens of their sequence before",
            got=f"a token that stays visible at row {row}, token {column}, and another one that does not",
            hint="let positions count from 0 in every sequence, or pad on the right",
        )
    return tuple(kept.nonzero()[:, 0].tolist())


def _require_consecutive(masks: MaskValues, term: Term, sequences: Sequences) -> None:
    if term.dtype is torch.int64:
        masks.require_bounded(term)
    offsets = sequences.at(masks.value(term)) - sequences.places
    jumps = (torch.diff(offsets, prepend=offsets[:1]) != 0) & ~sequences.begins
    if (number := sequences.first(jumps)) is not None:
        row, column = sequences.where(number)
        raise RuntimeContractError(
            "attention goes by positions that make a row several packed sequences, or leave out some",
            where=masks.inputs(term),
            expected=f"{shown(term)} to grow by one from each real token of a sequence to the next",
            got=f"row {row}, where it jumps at token {column}",
            hint="let the mask also compare which sequence a token is of, or pass one sequence per row",
        )


def _require_bounds(masks: MaskValues, bound: Bound, sequences: Sequences) -> None:
    """Raise unless the bound of a token is not before (after) it, and before (after) those with another bound."""
    if bound.term.dtype is torch.int64:
        masks.require_bounded(bound.term)
    ends, columns = sequences.at(masks.value(bound.term)) - bound.offset, sequences.places % sequences.width
    rows = sequences.places // sequences.width
    if not bound.is_last:
        masks.require(bound.term, masks.value(bound.term) <= masks.evaluate.indices["key"], "at most its column", "")
        ends, columns, rows = -ends.flip(0), -columns.flip(0), rows.flip(0)
    wrong = ends < columns
    wrong[:-1] |= (ends[1:] != ends[:-1]) & (rows[1:] == rows[:-1]) & (ends[:-1] >= columns[1:])
    if (number := sequences.first(wrong if bound.is_last else wrong.flip(0))) is not None:
        row, column = sequences.where(number)
        side = "last" if bound.is_last else "first"
        raise RuntimeContractError(
            f"attention goes by the {side} column of each sequence, which is another one",
            where=masks.inputs(bound.term),
            expected=f"{shown(bound.term)} to be the {side} column of the sequence of each real token"
            + (", plus one" if bound.offset else ""),
            got=f"{int(masks.value(bound.term)[row, column])} at row {row}, token {column}",
            hint="let the mask compare which sequence a token is of, or pass one sequence per row",
        )


def _require_aligned(masks: MaskValues, term: Term, chunk: int, sequences: Sequences) -> None:
    if term.dtype is torch.int64:
        masks.require_bounded(term)
    values, depths = sequences.at(masks.value(term)), sequences.depths
    origins = values - depths
    wrong = (origins % chunk != 0) | (~sequences.begins & (torch.diff(origins, prepend=origins[:1]) != 0))
    if (number := sequences.first(wrong)) is not None:
        row, column = sequences.where(number)
        raise RuntimeContractError(
            "attention goes by chunks that do not count the tokens of a sequence from its first one",
            where=masks.inputs(term),
            expected=f"{shown(term)} to be a multiple of {chunk} at the first token of a sequence, and to grow by "
            "one from each real token to the next",
            got=f"{int(values[number])} at row {row}, token {column}, which has {int(depths[number])} tokens of "
            "its sequence before it",
            hint="let positions count from 0 in every sequence, with padding before or after it only",
        )


def _segments(mask_class: MaskClass) -> str:
    each = (f"one for each {shown(term)}" for term in mask_class.segments)
    return " and ".join(each) or "one sequence a row"


def _never_falls(values: torch.Tensor, begins_row: torch.Tensor) -> bool:
    """Return whether values are non-decreasing along each row, so that equal ones are adjacent."""
    return bool(((values[1:] >= values[:-1]) | begins_row[1:]).all())
