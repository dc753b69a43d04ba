"""Read the attention masks of a call: real tokens, starts of sequences, and the attention span of each layer.

Proofs of masks (`proofs/`) rest on assumptions about values, such as "zero or one" or "consecutive positions". They are
checked here at every call, and so is the agreement of all layers on padding and sequences.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import sympy
import torch

from dta_compile.errors import RuntimeContractError
from dta_compile.executable.layers import AttentionLayer, MixerLayer, RecurrentLayer
from dta_compile.executable.masks import MaskProgram
from dta_compile.ops.attention import BY_DISTANCE
from dta_compile.ops.chosen_keys import CHOICE_MIXER
from dta_compile.proofs.mask_class import BOUND, FORBIDDEN, LONGEST_ROW, Bound, MaskClass
from dta_compile.proofs.pairs import Pairs, UnlikePair, read_pairs, sequences_of
from dta_compile.proofs.tables import Facts, Table, read_table
from dta_compile.proofs.terms import Entry, Evaluation, Leaf, Term, shown, subterms
from dta_compile.runtime.path.chunk_shape import Limit

Booleans = npt.NDArray[np.bool_]

BINARY_HINT = "pass a mask of zeros and ones, or compare (mask > 0) before you use it"


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
        classes: mask class by attention layer. A mixer without a mask takes all tokens of a row for real and for one
            sequence, except recurrences, which then follow the masks of other layers.
    """

    valid: Booleans
    starts: Booleans | None
    joined: Booleans | None
    classes: list[MaskClass]
    fillers: list[float]

    @property
    def limits(self) -> list[Limit | None]:
        """Attention span by attention layer; None: a token attends to all tokens above it."""
        return [_limit(mask_class) for mask_class in self.classes]

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
    others = {classes[_mask(layer)] for layer in layers if layer.mixer is not CHOICE_MIXER and _mask(layer) in classes}
    distinct = dict.fromkeys(classes.values())
    telling = [one for one in distinct if one in others or one.valid is not None or one.segments]
    return telling or list(distinct)


def _mask(layer: MixerLayer) -> MaskProgram | None:
    return layer.mask if isinstance(layer, (AttentionLayer, RecurrentLayer)) else None


def _goes_by_others(layer: MixerLayer) -> bool:
    """Return whether a layer follows the masks of other layers: a recurrence without a mask."""
    return isinstance(layer, RecurrentLayer) and layer.mask is None


def _limit(mask_class: MaskClass) -> Limit | None:
    if mask_class.chunk is not None:
        return Limit(mask_class.chunk, by_chunks=True)
    return None if mask_class.window is None else Limit(mask_class.window)


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
    masks = dict.fromkeys(_mask(layer) for layer in layers if not _goes_by_others(layer))
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
    if with_blocks or any(mask_class.segments or mask_class.positions or mask_class.chunk for mask_class in distinct):
        rows = _Sequences.rows_of(valid)
        sequences = reader.sequences_of(distinct, rows)
        for mask_class in distinct:
            reader.check_sequences(mask_class, sequences)
        if not torch.equal(sequences.begins, rows.begins):
            starts = sequences.on_batch(sequences.begins, on_host)
        if with_blocks:
            reader.refuse_choices()
            joined = sequences.on_batch(reader.joined_of(with_blocks, sequences), on_host)
    if any(mask_class.window for mask_class in distinct):
        _require_contiguous(on_host, starts, "a sliding window counts padding")
    if any(layer.mixer in BY_DISTANCE for layer in layers):
        _require_contiguous(on_host, starts, "a learned bias by distance counts padding")
    if reader.recurrent:
        _require_contiguous(on_host, starts, "a recurrence runs over it")
        reader.require_silence(valid)
    spans = [classes[layer.mask] for layer in layers if isinstance(layer, AttentionLayer)]
    return ReadMasks(on_host, starts, joined, spans, [fillers[mask_class] for mask_class in spans])


def number_of_call(
    number: Callable[[sympy.Expr], int | float],
    dense: Mapping[str, torch.Tensor],
    items: Mapping[sympy.Symbol, Leaf],
    expr: sympy.Expr,
) -> int | float:
    """Evaluate an expression: symbols in `items` are read from tensors (which synchronises), others by `number`."""
    if expr in items:
        return dense[items[expr].name].item()
    read = {symbol: dense[items[symbol].name].item() for symbol in expr.free_symbols & items.keys()}
    return number(expr.subs(read))


@dataclasses.dataclass(frozen=True)
class _Sequences:
    """Real tokens of a batch in row-major order, and the starts of sequences among them.

    Attributes:
        places: `[P]` indices of the tokens in the flattened batch, whose rows have `width` tokens.
        begins: `[P]` bool, tokens that begin a sequence.
    """

    places: torch.Tensor
    width: int
    begins: torch.Tensor

    @classmethod
    def rows_of(cls, valid: torch.Tensor) -> _Sequences:
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


class _Reader:
    def __init__(
        self,
        layers: Sequence[MixerLayer],
        dense: Mapping[str, torch.Tensor],
        number: Callable[[sympy.Expr], int | float],
        shape: tuple[int, int],
    ) -> None:
        self.layers, self.dense, self.shape = layers, dict(dense), shape
        self._tables: dict[Leaf, Table | None] = {}
        self._pairs: dict[Leaf, Pairs] = {}
        self.recurrent = [layer for layer in layers if isinstance(layer, RecurrentLayer)]
        masks = [mask for layer in layers if (mask := _mask(layer)) is not None]
        items = {symbol: leaf for mask in masks for symbol, leaf in mask.items.items()}
        self.number = functools.partial(number_of_call, number, dense, items)

    @functools.cached_property
    def _evaluate(self) -> Evaluation:
        batch, tokens = self.shape
        read = (self.dense[leaf.name] for layer in self.layers for leaf in layer.leaves)
        device = next((value.device for value in read if value.dim()), torch.device("cpu"))
        rows, keys = (torch.arange(size, device=device) for size in (batch, tokens))
        return Evaluation(self.dense, self.number, {"row": rows[:, None], "key": keys[None]})

    def value(self, term: Term) -> torch.Tensor:
        """Evaluate a term over row and key to `[B, S]`."""
        with torch.no_grad():
            return torch.as_tensor(self._evaluate(term)).expand(self.shape)

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
        everything = torch.ones((1, 1), dtype=torch.bool, device=self._evaluate.indices["row"].device)
        different = dict.fromkeys(mask_class.valid for mask_class in classes)
        first, *others = [everything.expand(self.shape) if term is None else self.value(term) for term in different]
        for term, other in zip(list(different)[1:], others, strict=True):
            if not torch.equal(first, other):
                raise RuntimeContractError(
                    "attention layers take their padding from different masks",
                    expected=_padding(next(iter(different))),
                    got=_padding(term),
                    hint="give all layers the same padding mask",
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
        is_zero = torch.zeros((1, 1), dtype=torch.bool, device=self._evaluate.indices["row"].device)
        for leaf in masks:
            is_zero = is_zero | (self.dense[leaf.name].reshape(-1, tokens) == 0)
        return is_zero.expand(batch, tokens)

    def sequences_of(self, classes: list[MaskClass], rows: _Sequences) -> _Sequences:
        """Return the starts of sequences; raise RuntimeContractError if masks disagree."""
        first, *others = [self._begins_of(mask_class, rows) for mask_class in classes]
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

    def _begins_of(self, mask_class: MaskClass, rows: _Sequences) -> torch.Tensor:
        """Return `[P]` real tokens that begin a sequence by one mask class; raise if a sequence is interrupted."""
        values = [rows.at(self.value(term)) for term in mask_class.segments]
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
                where=self._inputs(mask_class.segments[0]),
                expected=f"the tokens of one {shown(mask_class.segments[0])} next to each other",
                got=f"row {row}, where one goes on at token {column}",
                hint="put all tokens of a sequence together",
            )
        return begins

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

    def joined_of(self, classes: list[MaskClass], sequences: _Sequences) -> torch.Tensor:
        """Return `[P]` tokens that are in the block of the real token before them; raise if masks disagree."""
        first, *others = [self._joined_of(mask_class, sequences) for mask_class in classes]
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

    def _joined_of(self, mask_class: MaskClass, sequences: _Sequences) -> torch.Tensor:
        assert mask_class.block is not None
        numbers, where = sequences.at(self.value(mask_class.block)), self._inputs(mask_class.block)
        inside = torch.ones_like(sequences.begins)
        if mask_class.in_block is not None:
            inside = sequences.at(self.value(mask_class.in_block))
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

    def check_sequences(self, mask_class: MaskClass, sequences: _Sequences) -> None:
        """Raise unless positions count the tokens of each sequence as the proof assumes."""
        for term in mask_class.positions:
            self._require_consecutive(term, sequences)
        for bound in mask_class.bounds:
            self._require_bounds(bound, sequences)
        if mask_class.chunk is not None and mask_class.counted is not None:
            self._require_aligned(mask_class.counted, mask_class.chunk, sequences)

    def check(self, mask_class: MaskClass) -> float:
        """Return the mask's filler; raise unless values are binary, a bias or bounded, as the proof assumes."""
        filler = mask_class.filler
        for term in mask_class.binary:
            values = self.value(term)
            self._require(term, (values == 0) | (values == 1), "zero or one")
        for term in mask_class.bias:
            values = self.value(term)
            self._require(term, (values == 0) | (values <= FORBIDDEN), f"zero, or at most {FORBIDDEN:g}")
            filler = max(filler, torch.where(values == 0, -torch.inf, values).amax().item())
        for term in mask_class.bounded:
            self._require_bounded(term)
        return filler

    def _require_bounded(self, term: Term) -> None:
        values = self.value(term)
        expected = f"between {-BOUND} and {BOUND}, so that no arithmetic with it overflows"
        self._require(term, (values >= -BOUND) & (values <= BOUND), expected, "pass smaller numbers")

    def _require(self, term: Term, holds: torch.Tensor, expected: str, hint: str = BINARY_HINT) -> None:
        if bool(holds.all()):
            return
        row, column = (int(number) for number in (~holds).nonzero()[0])
        raise RuntimeContractError(
            "a mask is made of other numbers than its proof takes for granted",
            where=self._inputs(term),
            expected=f"{shown(term)} to be {expected}",
            got=f"{self.value(term)[row, column].item()} at row {row}, token {column}",
            hint=hint,
        )

    def _require_consecutive(self, term: Term, sequences: _Sequences) -> None:
        if term.dtype is torch.int64:
            self._require_bounded(term)
        offsets = sequences.at(self.value(term)) - sequences.places
        jumps = (torch.diff(offsets, prepend=offsets[:1]) != 0) & ~sequences.begins
        if (number := sequences.first(jumps)) is not None:
            row, column = sequences.where(number)
            raise RuntimeContractError(
                "attention goes by positions that make a row several packed sequences, or leave out some",
                where=self._inputs(term),
                expected=f"{shown(term)} to grow by one from each real token of a sequence to the next",
                got=f"row {row}, where it jumps at token {column}",
                hint="let the mask also compare which sequence a token is of, or pass one sequence per row",
            )

    def _require_bounds(self, bound: Bound, sequences: _Sequences) -> None:
        """Raise unless the bound of a token is not before (after) it, and before (after) those with another bound."""
        if bound.term.dtype is torch.int64:
            self._require_bounded(bound.term)
        ends, columns = sequences.at(self.value(bound.term)) - bound.offset, sequences.places % sequences.width
        rows = sequences.places // sequences.width
        if not bound.is_last:
            self._require(bound.term, self.value(bound.term) <= self._evaluate.indices["key"], "at most its column", "")
            ends, columns, rows = -ends.flip(0), -columns.flip(0), rows.flip(0)
        wrong = ends < columns
        wrong[:-1] |= (ends[1:] != ends[:-1]) & (rows[1:] == rows[:-1]) & (ends[:-1] >= columns[1:])
        if (number := sequences.first(wrong if bound.is_last else wrong.flip(0))) is not None:
            row, column = sequences.where(number)
            side = "last" if bound.is_last else "first"
            raise RuntimeContractError(
                f"attention goes by the {side} column of each sequence, which is another one",
                where=self._inputs(bound.term),
                expected=f"{shown(bound.term)} to be the {side} column of the sequence of each real token"
                + (", plus one" if bound.offset else ""),
                got=f"{int(self.value(bound.term)[row, column])} at row {row}, token {column}",
                hint="let the mask compare which sequence a token is of, or pass one sequence per row",
            )

    def _require_aligned(self, term: Term, chunk: int, sequences: _Sequences) -> None:
        if term.dtype is torch.int64:
            self._require_bounded(term)
        values, depths = sequences.at(self.value(term)), sequences.depths
        origins = values - depths
        wrong = (origins % chunk != 0) | (~sequences.begins & (torch.diff(origins, prepend=origins[:1]) != 0))
        if (number := sequences.first(wrong)) is not None:
            row, column = sequences.where(number)
            raise RuntimeContractError(
                "attention goes by chunks that do not count the tokens of a sequence from its first one",
                where=self._inputs(term),
                expected=f"{shown(term)} to be a multiple of {chunk} at the first token of a sequence, and to grow by "
                "one from each real token to the next",
                got=f"{int(values[number])} at row {row}, token {column}, which has {int(depths[number])} tokens of "
                "its sequence before it",
                hint="let positions count from 0 in every sequence, with padding before or after it only",
            )

    def _inputs(self, term: Term) -> str:
        """Name the inputs of the call that a term reads, for errors."""
        inputs = {name for entry in subterms(term) if isinstance(entry, Entry) for name in entry.leaf.inputs}
        return "input " + ", ".join(name for _, name in sorted(inputs)) if inputs else ""


def _padding(term: Term | None) -> str:
    return "no padding" if term is None else f"real tokens where {shown(term)}"


def _segments(one: MaskClass) -> str:
    return "one sequence a row" if not one.segments else " and ".join(f"one for each {shown(t)}" for t in one.segments)


def _never_falls(values: torch.Tensor, begins_row: torch.Tensor) -> bool:
    """Return whether values are non-decreasing along each row, so that equal ones are adjacent."""
    return bool(((values[1:] >= values[:-1]) | begins_row[1:]).all())


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
