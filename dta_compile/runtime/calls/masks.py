"""What the attention masks of a call say: which tokens are real, where sequences begin, and how far up each layer
reaches; with the checks of everything that their proofs take for granted."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import sympy
import torch
from torch import fx

from dta_compile.errors import RuntimeContractError
from dta_compile.passes.masks.proof import FORBIDDEN, Mask
from dta_compile.passes.masks.ranges import BOUND, LONGEST_ROW
from dta_compile.passes.masks.tables import Facts, Table, read_table
from dta_compile.passes.mixer_layers import AttentionLayer, AttentionMask, MaskClass
from dta_compile.passes.program import Program, ancestors, has_tensor
from dta_compile.passes.terms import Entry, Evaluation, Term, shown, subterms
from dta_compile.runtime.path.chunk_shape import Limit

Booleans = npt.NDArray[np.bool_]

BINARY_HINT = "pass a mask of zeros and ones, or compare (mask > 0) before you use it"


@dataclasses.dataclass(frozen=True)
class ReadMasks:
    """The masks of one call.

    Attributes:
        valid: `[B, S]` real tokens.
        starts: `[B, S]` real tokens that begin a sequence, where rows are packed; None: the real tokens of a row are
            one sequence.
        classes: by attention layer; what mixes tokens otherwise has no mask, and takes all tokens of a row for real
            and for one sequence.
    """

    valid: Booleans
    starts: Booleans | None
    classes: list[MaskClass]

    @property
    def limits(self) -> list[Limit | None]:
        """By attention layer, how far up a token attends; None: to all above it."""
        return [_limit(one) for one in self.classes]


def _limit(one: MaskClass) -> Limit | None:
    if one.chunk is not None:
        return Limit(one.chunk, by_chunks=True)
    return None if one.window is None else Limit(one.window)


def read_masks(
    program: Program,
    dense: Mapping[fx.Node, torch.Tensor],
    number: Callable[[sympy.Expr], int | float],
    shape: tuple[int, int],
) -> ReadMasks:
    """Read the masks of a call of `shape` rows and tokens, from dense values and the values of size expressions.

    Raises:
        RefusalError: a mask is of no supported class with the numbers and tables of this call.
        RuntimeContractError: the inputs are not what the proof of a mask takes for granted.
    """
    masks = dict.fromkeys(layer.mask if isinstance(layer, AttentionLayer) else None for layer in program.mixers)
    reader = _Reader(program, dense, number, shape)
    classes = {mask: reader.class_of(mask) for mask in masks}
    distinct = list(dict.fromkeys(classes.values()))
    valid = reader.valid_of(distinct)
    starts = reader.starts_of(distinct, valid)
    for one in distinct:
        reader.check(one, valid, starts)
    on_host: Booleans = valid.cpu().numpy()
    starts_on_host: Booleans | None = None if starts is None else starts.cpu().numpy()
    if any(one.window for one in distinct):
        _require_contiguous(on_host, starts_on_host)
    return ReadMasks(on_host, starts_on_host, [classes[layer.mask] for layer in program.attention])


def number_of_call(
    number: Callable[[sympy.Expr], int | float],
    dense: Mapping[fx.Node, torch.Tensor],
    items: Mapping[sympy.Symbol, fx.Node],
    expr: sympy.Expr,
) -> int | float:
    """The value of an expression some of whose symbols are read from tensors; `number` knows the others."""
    if expr in items:
        return dense[items[expr]].item()
    read = {symbol: dense[items[symbol]].item() for symbol in expr.free_symbols & items.keys()}
    return number(expr.subs(read))


class _Reader:
    def __init__(
        self,
        program: Program,
        dense: Mapping[fx.Node, torch.Tensor],
        number: Callable[[sympy.Expr], int | float],
        shape: tuple[int, int],
    ) -> None:
        self.program, self.dense, self.shape = program, dense, shape
        self.masks = [layer.mask for layer in program.attention if layer.mask is not None]
        items = {symbol: node for mask in self.masks for symbol, node in mask.items.items()}
        self.number = functools.partial(number_of_call, number, dense, items)

    @functools.cached_property
    def _evaluate(self) -> Evaluation:
        batch, tokens = self.shape
        read = (self.dense[node] for mask in self.masks for node in mask.leaves)
        device = next((value.device for value in read if value.dim()), torch.device("cpu"))
        rows, keys = (torch.arange(size, device=device) for size in (batch, tokens))
        return Evaluation(self.dense, self.number, {"row": rows[:, None], "key": keys[None]})

    def value(self, term: Term) -> torch.Tensor:
        """`[B, S]` of a term over row and key."""
        with torch.no_grad():
            return torch.as_tensor(self._evaluate(term)).expand(self.shape)

    def class_of(self, mask: AttentionMask | None) -> MaskClass:
        if mask is None:
            return MaskClass()
        if not isinstance(mask, Mask):
            assert mask.constant is not None, "a mask that is stated is the same for every call"
            return mask.constant
        for size in mask.sizes.values():
            if (found := self.number(size)) > LONGEST_ROW:
                raise _too_large(found)
        if mask.constant is not None:
            return mask.constant
        numbers = {symbol: self.number(symbol) for expr in self._expressions(mask) for symbol in expr.free_symbols}
        scalars = {node: self.dense[node].item() for node in mask.scalars}
        tables = {node: table for node in mask.tables if (table := _table(self.dense[node])) is not None}
        return mask.classify(Facts(numbers, scalars, {**mask.fixed, **tables}))

    def _expressions(self, mask: Mask) -> list[sympy.Expr]:
        return [*mask.numbers, *mask.sizes.values()]

    def valid_of(self, classes: list[MaskClass]) -> torch.Tensor:
        """`[B, S]` real tokens, which all masks have to agree on."""
        everything = torch.ones((1, 1), dtype=torch.bool, device=self._evaluate.indices["row"].device)
        different = dict.fromkeys(one.valid for one in classes)
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

    def starts_of(self, classes: list[MaskClass], valid: torch.Tensor) -> torch.Tensor | None:
        """`[B, S]` real tokens that begin a sequence, on which all masks have to agree; None: one sequence a row."""
        if not any(one.segments for one in classes):
            return None
        places = valid.reshape(-1).nonzero()[:, 0]
        rows = places // self.shape[1]
        begins_row = torch.diff(rows, prepend=rows.new_full((1,), -1)) != 0
        begins = [self._begins_of(one, places, rows, begins_row) for one in classes]
        for one, other in zip(classes[1:], begins[1:], strict=True):
            if not torch.equal(begins[0], other):
                place = int(places[(begins[0] != other).nonzero()[0, 0]])
                raise RuntimeContractError(
                    "attention layers take different tokens of a row for one sequence",
                    expected=f"{_segments(classes[0])}, as another layer has it",
                    got=f"{_segments(one)}, which differs at row {place // self.shape[1]}, token "
                    f"{place % self.shape[1]}",
                    hint="give all layers the same packed rows, or pass one sequence per row",
                )
        if torch.equal(begins[0], begins_row):
            return None
        return torch.zeros_like(valid).reshape(-1).index_put((places,), begins[0]).view(self.shape)

    def _begins_of(
        self, one: MaskClass, places: torch.Tensor, rows: torch.Tensor, begins_row: torch.Tensor
    ) -> torch.Tensor:
        """Which of the real tokens at some places of the batch begin a sequence, by one class."""
        values = [self.value(term).reshape(-1)[places] for term in one.segments]
        begins = begins_row
        for each in values:
            begins = begins | torch.cat([begins_row[:1], each[1:] != each[:-1]])
        if all(_never_falls(each, begins_row) for each in values):
            return begins
        runs = torch.stack([rows[begins], *(each[begins].unique(return_inverse=True)[1] for each in values)])
        _, run, count = runs.unique(dim=1, return_inverse=True, return_counts=True)
        if bool((again := count[run] > 1).any()):
            place = int(places[begins][again.nonzero()[-1, 0]])
            raise RuntimeContractError(
                "a sequence of a packed row is in several pieces, with another one in between",
                where=self._inputs(one.segments[0]),
                expected=f"the tokens of one {shown(one.segments[0])} next to each other",
                got=f"row {place // self.shape[1]}, where one goes on at token {place % self.shape[1]}",
                hint="put all tokens of a sequence together",
            )
        return begins

    def check(self, one: MaskClass, valid: torch.Tensor, starts: torch.Tensor | None) -> None:
        """Raise unless the inputs are what a proof takes for granted."""
        for term in one.positions:
            self._require_consecutive(term, valid, starts)
        if one.chunk is not None and one.counted is not None:
            self._require_aligned(one.counted, one.chunk, valid, starts)
        for term in one.binary:
            values = self.value(term)
            self._require(term, (values == 0) | (values == 1), "zero or one")
        for term in one.bias:
            values = self.value(term)
            self._require(term, (values == 0) | (values <= FORBIDDEN), f"zero, or at most {FORBIDDEN:g}")
        for term in one.bounded:
            self._require_bounded(term)

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

    def _require_consecutive(self, term: Term, valid: torch.Tensor, starts: torch.Tensor | None) -> None:
        if term.dtype is torch.int64:
            self._require_bounded(term)
        places = valid.reshape(-1).nonzero()[:, 0]
        rows = places // self.shape[1]
        offsets = self.value(term).reshape(-1)[places] - places
        goes_on = (rows[1:] == rows[:-1]) if starts is None else ~starts.reshape(-1)[places][1:]
        differs = (offsets[1:] != offsets[:-1]) & goes_on
        if not bool(differs.any()):
            return
        place = int(places[1:][differs.nonzero()[0, 0]])
        raise RuntimeContractError(
            "attention goes by positions that make a row several packed sequences, or leave out some",
            where=self._inputs(term),
            expected=f"{shown(term)} to grow by one from each real token of a sequence to the next",
            got=f"row {place // self.shape[1]}, where it jumps at token {place % self.shape[1]}",
            hint="let the mask also compare which sequence a token is of, or pass one sequence per row",
        )

    def _require_aligned(self, term: Term, chunk: int, valid: torch.Tensor, starts: torch.Tensor | None) -> None:
        if term.dtype is torch.int64:
            self._require_bounded(term)
        places = valid.reshape(-1).nonzero()[:, 0]
        begins = torch.diff(places // self.shape[1], prepend=places.new_full((1,), -1)) != 0
        if starts is not None:
            begins |= starts.reshape(-1)[places]
        numbers = torch.arange(len(places), device=places.device)
        depths = numbers - torch.where(begins, numbers, 0).cummax(0).values
        values = self.value(term).reshape(-1)[places]
        origins = values - depths
        wrong = (origins % chunk != 0) | (~begins & (torch.diff(origins, prepend=origins[:1]) != 0))
        if not bool(wrong.any()):
            return
        first = int(wrong.nonzero()[0, 0])
        place = int(places[first])
        raise RuntimeContractError(
            "attention goes by chunks that do not count the tokens of a sequence from its first one",
            where=self._inputs(term),
            expected=f"{shown(term)} to be a multiple of {chunk} at the first token of a sequence, and to grow by one "
            "from each real token to the next",
            got=f"{int(values[first])} at row {place // self.shape[1]}, token {place % self.shape[1]}, which has "
            f"{int(depths[first])} tokens of its sequence before it",
            hint="let positions count from 0 in every sequence, with padding before or after it only",
        )

    def _inputs(self, term: Term) -> str:
        """The call's inputs that a term is made of."""
        found = ancestors([one.node for one in subterms(term) if isinstance(one, Entry)])
        names = [node.meta["source"] for node in self.program.placeholders if node in found and has_tensor(node)]
        return "input " + ", ".join(names) if names else ""


def _padding(term: Term | None) -> str:
    return "no padding" if term is None else f"real tokens where {shown(term)}"


def _too_large(size: float) -> RuntimeContractError:
    expected = f"at most {LONGEST_ROW} rows, and as many tokens in each"
    return RuntimeContractError("the batch is too large for the proof of its mask", expected=expected, got=f"{size}")


def _segments(one: MaskClass) -> str:
    return "one sequence a row" if not one.segments else " and ".join(f"one for each {shown(t)}" for t in one.segments)


def _never_falls(values: torch.Tensor, begins_row: torch.Tensor) -> bool:
    """Whether values never fall along a row, so that equal ones are next to each other."""
    return bool(((values[1:] >= values[:-1]) | begins_row[1:]).all())


def _require_contiguous(valid: Booleans, starts: Booleans | None) -> None:
    """Raise unless the tokens of every sequence are next to each other."""
    begins = np.diff(valid.astype(np.int8), axis=1, prepend=0) == 1
    begins &= (np.cumsum(valid, axis=1) > 1) & (True if starts is None else ~starts)
    if begins.any():
        raise RuntimeContractError(
            "a row has padding between real tokens, and a sliding window counts padding",
            expected="padding before or after a sequence only",
            got=f"row {int(begins.any(1).argmax())}",
            hint="move the padding to one end of the row",
        )


# By tensor: its contents when it was read, and what they say. Writes through `.data` and numpy leave no other trace.
_tables: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor, Table | None]] = {}


def _table(values: torch.Tensor) -> Table | None:
    """`read_table`, once for all calls that find the same contents."""
    known = _tables.get(id(values))
    if known is None or known[0]() is not values or not _is_same(values, known[1]):
        key, contents = id(values), values.detach().clone()
        reference = weakref.ref(values, lambda _: _tables.pop(key, None))
        known = _tables[key] = (reference, contents, read_table(contents))
    return known[2]


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    alike = (one.dtype, one.device, one.shape) == (other.dtype, other.device, other.shape)
    return alike and torch.equal(_words(one), _words(other))


def _words(table: torch.Tensor) -> torch.Tensor:
    """Eight bytes at a time, which are compared ten times as fast as truth values; every call waits for it."""
    offset = table.storage_offset() * table.itemsize
    whole = table.is_contiguous() and table.nbytes % 8 == offset % 8 == 0
    return table.detach().view(-1).view(torch.int64) if whole else table
