"""What the attention masks of a call say: which tokens are real, and each layer's window; with the checks of everything
that their proofs take for granted."""

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
from dta_compile.passes.mask_logic import LONGEST_ROW
from dta_compile.passes.mask_proof import FORBIDDEN, Mask
from dta_compile.passes.mask_tables import Facts, Table, read_table
from dta_compile.passes.mask_terms import Entry, Evaluation, Term, shown, subterms
from dta_compile.passes.program import MaskClass, Program, ancestors, has_tensor

Booleans = npt.NDArray[np.bool_]


@dataclasses.dataclass(frozen=True)
class ReadMasks:
    """The masks of one call.

    Attributes:
        valid: `[B, S]` real tokens.
        classes: by attention layer.
    """

    valid: Booleans
    classes: list[MaskClass]

    @property
    def windows(self) -> list[int]:
        """By attention layer the tokens that a token attends to, itself included; 0: all above it."""
        return [one.window or 0 for one in self.classes]


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
    masks = dict.fromkeys(layer.mask for layer in program.attention)
    reader = _Reader(program, dense, number, shape)
    classes = {mask: reader.class_of(mask) for mask in masks}
    valid = reader.valid_of(list(dict.fromkeys(classes.values())))
    for one in dict.fromkeys(classes.values()):
        reader.check(one, valid)
    on_host: Booleans = valid.cpu().numpy()
    if any(one.window for one in classes.values()):
        _require_contiguous(on_host)
    return ReadMasks(on_host, [classes[layer.mask] for layer in program.attention])


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
        items = {expr: node for mask in self.masks for expr, node in mask.items.items()}
        self.number = lambda expr: dense[items[expr]].item() if expr in items else number(expr)

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

    def class_of(self, mask: Mask | None) -> MaskClass:
        if mask is None:
            return MaskClass()
        if mask.constant is not None:
            return mask.constant
        if self.shape[1] > LONGEST_ROW:
            raise _too_long(self.shape[1])
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

    def check(self, one: MaskClass, valid: torch.Tensor) -> None:
        """Raise unless the inputs are what a proof takes for granted."""
        for term in one.segments:
            self._require_one_segment(term, valid)
        for term in one.positions:
            self._require_consecutive(term, valid)
        for term in one.binary:
            values = self.value(term)
            self._require(term, (values == 0) | (values == 1), "zero or one")
        for term in one.bias:
            values = self.value(term)
            self._require(term, (values == 0) | (values <= FORBIDDEN), f"zero, or at most {FORBIDDEN:g}")

    def _require(self, term: Term, holds: torch.Tensor, expected: str) -> None:
        if bool(holds.all()):
            return
        row, column = (int(number) for number in (~holds).nonzero()[0])
        raise RuntimeContractError(
            "a mask is made of other numbers than its proof takes for granted",
            where=self._inputs(term),
            expected=f"{shown(term)} to be {expected}",
            got=f"{self.value(term)[row, column].item()} at row {row}, token {column}",
            hint="pass a mask of zeros and ones, or compare (mask > 0) before you use it",
        )

    def _require_one_segment(self, term: Term, valid: torch.Tensor) -> None:
        values = self.value(term)
        first = values.gather(1, valid.to(torch.int8).argmax(1, keepdim=True))
        differs = (values != first) & valid
        if not bool(differs.any()):
            return
        row, column = (int(number) for number in differs.nonzero()[0])
        raise RuntimeContractError(
            "a row holds several packed sequences, between which the model lets no token attend",
            where=self._inputs(term),
            expected=f"one sequence a row: the same {shown(term)} for all of its real tokens",
            got=f"row {row}, where another sequence starts at token {column}",
            hint="pass one sequence per row, with an attention_mask if rows are padded (position ids that start again, "
            "segment ids and document separators make several of one)",
        )

    def _require_consecutive(self, term: Term, valid: torch.Tensor) -> None:
        offsets = self.value(term) - torch.arange(self.shape[1], device=valid.device)
        first = offsets.gather(1, valid.to(torch.int8).argmax(1, keepdim=True))
        differs = (offsets != first) & valid
        if not bool(differs.any()):
            return
        row, column = (int(number) for number in differs.nonzero()[0])
        raise RuntimeContractError(
            "attention goes by positions that make a row several packed sequences, or leave out some",
            where=self._inputs(term),
            expected=f"{shown(term)} to grow by one from each real token to the next",
            got=f"row {row}, where it jumps at token {column}",
            hint="pass an attention_mask along with position_ids, and one sequence per row",
        )

    def _inputs(self, term: Term) -> str:
        """The call's inputs that a term is made of."""
        found = ancestors([one.node for one in subterms(term) if isinstance(one, Entry)])
        names = [node.meta["source"] for node in self.program.placeholders if node in found and has_tensor(node)]
        return "input " + ", ".join(names) if names else ""


def _padding(term: Term | None) -> str:
    return "no padding" if term is None else f"real tokens where {shown(term)}"


def _too_long(tokens: int) -> RuntimeContractError:
    return RuntimeContractError("rows are too long", expected=f"at most {LONGEST_ROW} tokens", got=f"{tokens}")


def _require_contiguous(valid: Booleans) -> None:
    changes = np.diff(valid.astype(np.int8), axis=1, prepend=0, append=0)
    if ((changes == 1).sum(1) > 1).any():
        raise RuntimeContractError(
            "a row has padding between real tokens, and a sliding window counts padding",
            expected="padding at the left or right end of a row only",
            got=f"row {int(((changes == 1).sum(1) > 1).argmax())}",
            hint="move the padding to one end of the row",
        )


# By the tensor's address; what is known of a tensor is good while it lives and nothing is written to it.
_tables: dict[int, tuple[weakref.ref[torch.Tensor], int, Table | None]] = {}


def _table(values: torch.Tensor) -> Table | None:
    """`read_table`, once for each state of a tensor."""
    if values.is_inference():
        return read_table(values)
    known = _tables.get(id(values))
    if known is None or known[0]() is not values or known[1] != values._version:
        key = id(values)
        reference = weakref.ref(values, lambda _: _tables.pop(key, None))
        known = _tables[key] = (reference, values._version, read_table(values.detach()))
    return known[2]
