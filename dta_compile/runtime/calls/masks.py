"""Read the attention masks of a call: real tokens, starts of sequences, and the attention span of each layer.

Proofs of masks (`proofs/`) rest on assumptions about values, such as "zero or one" or "consecutive positions". They are
checked here at every call, and so is the agreement of all layers on padding and sequences.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import sympy
import torch

from dta_compile.errors import RuntimeContractError
from dta_compile.executable.layers import AttentionLayer, MixerLayer, RecurrentLayer
from dta_compile.executable.masks import MaskProgram
from dta_compile.ops.attention import BY_DISTANCE
from dta_compile.ops.chosen_keys import CHOICE_MIXER
from dta_compile.proofs.call_facts import Facts, Table, read_table
from dta_compile.proofs.mask_class import BOUND, FORBIDDEN, LONGEST_ROW, MaskClass
from dta_compile.proofs.pairs import Pairs, UnlikePair, read_pairs, sequences_of
from dta_compile.proofs.terms import Leaf, Term, shown
from dta_compile.runtime.calls.mask_values import MaskValues, mask_of
from dta_compile.runtime.calls.sequences import (
    Booleans,
    Sequences,
    agreed_sequences,
    check_sequences,
    joined_of,
    kept_depths,
)
from dta_compile.runtime.path.chunk_shape import Limit


@dataclasses.dataclass(frozen=True)
class ReadMasks:
    """Facts read from the masks of one call.

    Attributes:
        valid: `[B, S]` real tokens.
        starts: `[B, S]` real tokens that begin a sequence, where rows are packed; None: the real tokens of a row are
            one sequence.
        fillers: by attention layer, the largest finite number that its mask hides keys by; -inf without one.
        joined: `[B, S]` real tokens that read, and are read by, the real token before them: those of a block but its
            first. None: no layer has blocks.
        kept: by attention layer, the depths of tokens that stay visible beyond its window.
        classes: mask class by attention layer. A mixer without a mask takes all tokens of a row for real and for one
            sequence, except recurrences, which then follow the masks of other layers.
    """

    valid: Booleans
    starts: Booleans | None
    joined: Booleans | None
    classes: list[MaskClass]
    fillers: list[float]
    kept: list[tuple[int, ...]]

    @property
    def limits(self) -> list[Limit | None]:
        """Attention span by attention layer; None: a token attends to all tokens above it."""
        return [_limit(mask_class, kept) for mask_class, kept in zip(self.classes, self.kept, strict=True)]

    @property
    def from_first(self) -> bool:
        """Whether every sequence has a row, and begins at its first token."""
        return self.starts is None and _is_behind(self.valid)


def _is_behind(valid: torch.Tensor | Booleans) -> bool:
    """Return whether all padding of `[B, S]` real tokens comes after them."""
    return bool((valid[:, 1:] <= valid[:, :-1]).all())


def _telling_padding(layers: Sequence[MixerLayer], classes: Mapping[MaskProgram | None, MaskClass]) -> list[MaskClass]:
    """Return the distinct classes of masks without those of indices that are causal over padding, too.

    Padding after the real tokens is not read by these either way.
    """
    others = {
        classes[mask_of(layer)] for layer in layers if layer.mixer is not CHOICE_MIXER and mask_of(layer) in classes
    }
    distinct = dict.fromkeys(classes.values())
    telling = [mask for mask in distinct if mask in others or mask.valid is not None or mask.segments]
    return telling or list(distinct)


def _goes_by_others(layer: MixerLayer) -> bool:
    """Return whether a layer follows the masks of other layers: a recurrence without a mask."""
    return isinstance(layer, RecurrentLayer) and layer.mask is None


def _limit(mask_class: MaskClass, kept: tuple[int, ...]) -> Limit | None:
    span = mask_class.window if mask_class.chunk is None else mask_class.chunk
    if span is None or span >= BOUND:  # no row is as long, and depths on the device have 32 bits
        return None
    return Limit(span, kept=kept) if mask_class.chunk is None else Limit(span, by_chunks=True)


def read_masks(
    layers: Sequence[MixerLayer],
    dense: Mapping[str, torch.Tensor],
    number: Callable[[sympy.Expr], int | float],
    shape: tuple[int, int],
) -> ReadMasks:
    """Read the masks of a call of `shape` rows and tokens.

    Args:
        dense: values of the leaves of mask terms, by name.
        number: evaluates a size expression.

    Raises:
        RefusalError: a mask is of no supported class with the numbers and tables of this call.
        RuntimeContractError: the inputs violate an assumption of the proof of a mask, or layers disagree.
    """
    masks = dict.fromkeys(mask_of(layer) for layer in layers if not _goes_by_others(layer))
    reader = _Reader(layers, dense, number, shape)
    classes = {mask: reader.class_of(mask) for mask in masks}
    distinct = list(dict.fromkeys(classes.values()))
    valid = reader.valid_of(_telling_padding(layers, classes)) if distinct else reader.unpadded()
    if distinct and not _is_behind(valid):
        valid = reader.valid_of(distinct)
    fillers = {mask_class: reader.check(mask_class) for mask_class in distinct}
    on_host: Booleans = valid.contiguous().cpu().numpy()
    starts: Booleans | None = None
    joined: Booleans | None = None
    with_blocks = [mask_class for mask_class in distinct if mask_class.block is not None]
    kept: dict[MaskClass, tuple[int, ...]] = {}
    if with_blocks or any(mask.segments or mask.positions or mask.chunk or mask.kept for mask in distinct):
        rows = Sequences.rows_of(valid)
        sequences = agreed_sequences(reader, distinct, rows)
        for mask_class in distinct:
            check_sequences(reader, mask_class, sequences)
            kept[mask_class] = kept_depths(reader, mask_class, sequences)
        if not torch.equal(sequences.begins, rows.begins):
            starts = sequences.on_batch(sequences.begins, on_host)
        if with_blocks:
            reader.refuse_choices()
            joined = sequences.on_batch(joined_of(reader, with_blocks, sequences), on_host)
    if any(mask_class.window for mask_class in distinct):
        _require_contiguous(on_host, starts, "a sliding window counts padding")
    if any(layer.mixer in BY_DISTANCE for layer in layers):
        _require_contiguous(on_host, starts, "a learned bias by distance counts padding")
    if reader.recurrent:
        _require_contiguous(on_host, starts, "a recurrence runs over it")
        reader.require_silence(valid)
    spans = [classes[layer.mask] for layer in layers if isinstance(layer, AttentionLayer)]
    of_spans = [fillers[mask_class] for mask_class in spans], [kept.get(mask_class, ()) for mask_class in spans]
    return ReadMasks(on_host, starts, joined, spans, *of_spans)


class _Reader(MaskValues):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._tables: dict[Leaf, Table | None] = {}
        self._pairs: dict[Leaf, Pairs] = {}
        self.recurrent = [layer for layer in self.layers if isinstance(layer, RecurrentLayer)]

    def class_of(self, mask: MaskProgram | None) -> MaskClass:
        if mask is None:
            return MaskClass()
        for size in mask.sizes.values():
            if (number := self.number(size)) > LONGEST_ROW:
                expected = f"at most {LONGEST_ROW} rows, and as many tokens in each"
                raise RuntimeContractError(
                    "the batch is too large for the proof of its mask", expected=expected, got=f"{number}"
                )
        if mask.constant is not None:
            return mask.constant
        tables = {leaf: table for leaf in mask.tables if (table := self._table(leaf)) is not None}
        pairs = {leaf: (self._tested(leaf, mask), shape) for leaf, shape in mask.tables.items() if leaf not in tables}
        scalars = {leaf: self.dense[leaf.name].item() for leaf in mask.scalars}
        numbers: dict[sympy.Symbol, int | float] = {}
        others = [size for shape in mask.tables.values() for size in shape if size not in (1, *mask.sizes.values())]
        if mask.numbers or scalars or tables or others:  # facts about pairs alone hold for all sizes
            expressions = [*mask.numbers, *others, *mask.sizes.values()]
            numbers = {symbol: self.number(symbol) for expr in expressions for symbol in expr.free_symbols}
        return mask.classify(Facts(numbers, scalars, {**mask.fixed, **tables}, pairs))

    def _table(self, leaf: Leaf) -> Table | None:
        if leaf not in self._tables:
            value = self.dense[leaf.name].detach()
            self._tables[leaf] = None if math.prod(value.shape[:-2]) > 1 else read_table(value)
        return self._tables[leaf]

    def _tested(self, leaf: Leaf, mask: MaskProgram) -> Pairs:
        """Classify the values of a mask tensor over token pairs, once per call. Raises `RefusalError`."""
        if leaf not in self._pairs:
            try:
                self._pairs[leaf], sequences = read_pairs(self.dense[leaf.name])
            except UnlikePair as unlike:
                raise mask.refused(f"{leaf}, {unlike}") from None
            self.dense[sequences_of(leaf).name] = sequences
        return self._pairs[leaf]

    def valid_of(self, classes: list[MaskClass]) -> torch.Tensor:
        """Return `[B, S]` real tokens; raise RuntimeContractError if masks disagree."""
        everything = torch.ones((1, 1), dtype=torch.bool, device=self.evaluate.indices["row"].device)
        different = dict.fromkeys(mask_class.valid for mask_class in classes)
        first, *others = [everything.expand(self.shape) if term is None else self.value(term) for term in different]
        for term, other in zip(list(different)[1:], others, strict=True):
            if not torch.equal(first, other):
                raise RuntimeContractError(
                    "attention layers take their padding from different masks",
                    expected=_padding(next(iter(different))),
                    got=_padding(term),
                    hint="give all layers the same padding mask; join rows with masks of their own into one call of the"
                    " model (torch.cat), or compile a function that calls it once",
                )
        return first

    def unpadded(self) -> torch.Tensor:
        """Return `[B, S]` real tokens by the padding masks common to all recurrences; all tokens if there are none."""
        every = (frozenset(leaf for leaf, _ in layer.padding) for layer in self.recurrent)
        common = frozenset.intersection(*every)
        return ~self._zero_at([mask for leaf, mask in self.recurrent[0].padding if leaf in common])

    def require_silence(self, valid: torch.Tensor) -> None:
        """Raise unless masks zero the inputs of recurrences in the padding before a sequence."""
        leading = ~valid & (valid.cumsum(1) == 0) & valid.any(1, keepdim=True)
        if not bool(leading.any()):
            return
        for layer in {layer.silencers: layer for layer in self.recurrent}.values():
            heard = leading & ~self._zero_at(layer.silencers)
            if bool(heard.any()):
                row, column = (int(number) for number in heard.nonzero()[0])
                raise RuntimeContractError(
                    f"the padding before a sequence reaches {layer.mixer.name}, which no mask keeps it from",
                    where=layer.where,
                    expected="inputs that the padding mask has made zero there, or padding after the sequence",
                    got=f"row {row}, padding at token {column}",
                    hint="pad on the right, or pass the attention_mask that tells padding",
                )

    def _zero_at(self, masks: Collection[Leaf]) -> torch.Tensor:
        """Return `[B, S]` tokens at which any of the masks (one number per token) is zero."""
        batch, tokens = self.shape
        is_zero = torch.zeros((1, 1), dtype=torch.bool, device=self.evaluate.indices["row"].device)
        for leaf in masks:
            is_zero = is_zero | (self.dense[leaf.name].reshape(-1, tokens) == 0)
        return is_zero.expand(batch, tokens)

    def refuse_choices(self) -> None:
        """Raise if a layer chooses its keys, which is done in causal order."""
        for layer in self.layers:
            if layer.mixer is CHOICE_MIXER:
                raise RuntimeContractError(
                    "tokens attend to later ones of their block in a model that chooses keys",
                    where=layer.where,
                    expected="causal masks, or no choice of keys",
                    hint="leave the blocks out",
                )

    def check(self, mask_class: MaskClass) -> float:
        """Return the mask's filler; raise unless values are binary, a bias or bounded, as the proof assumes."""
        filler = mask_class.filler
        for term in mask_class.binary:
            values = self.value(term)
            self.require(term, (values == 0) | (values == 1), "zero or one")
        for term in mask_class.bias:
            values = self.value(term)
            self.require(term, (values == 0) | (values <= FORBIDDEN), f"zero, or at most {FORBIDDEN:g}")
            filler = max(filler, torch.where(values == 0, -torch.inf, values).amax().item())
        for term in mask_class.bounded:
            self.require_bounded(term)
        return filler


def _padding(term: Term | None) -> str:
    return "no padding" if term is None else f"real tokens where {shown(term)}"


def _require_contiguous(valid: Booleans, starts: Booleans | None, why: str) -> None:
    """Raise if there is padding between the tokens of a sequence."""
    begins = np.diff(valid.astype(np.int8), axis=1, prepend=0) == 1
    begins &= (np.cumsum(valid, axis=1) > 1) & (True if starts is None else ~starts)
    if begins.any():
        raise RuntimeContractError(
            f"a row has padding between real tokens, and {why}",
            expected="padding before or after a sequence only",
            got=f"row {int(begins.any(1).argmax())}",
            hint="move the padding to one end of the row",
        )
