"""The mask of an attention layer: a term for one entry, and the class that it is proven to have."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import pathlib
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import sympy

from dta_compile.errors import RefusalError
from dta_compile.proofs.call_facts import Facts, Table
from dta_compile.proofs.mask_class import MaskClass
from dta_compile.proofs.terms import Leaf, Term, in_order, shown

if TYPE_CHECKING:
    from dta_compile.proofs.mask_proof import Unproven

HINT = (
    "use a causal mask, a sliding window (also with tokens that stay visible beside it, such as the first ones) or"
    " chunks of the sequence, and padding from one mask"
)


@dataclasses.dataclass(frozen=True, eq=False)
class MaskProgram:
    """The mask of an attention call, broadcastable to `[rows, heads, queries, keys]`, or a declared mask.

    Attributes:
        constant: its class, if that is the same for every call.
        leaves: tensors that the class refers to.
        where: the user's source line.
        term: one entry of the mask, over "row", "query" and "key"; None for a declared mask, whose class is constant.
        sizes: size of the dimension that each index variable runs along.
        numbers, scalars, tables: values of a call that decide the class if it is not constant; tables and masks over
            pairs of tokens come with their sizes.
        items: tensors that numbers are read from, by Dynamo's symbol of the number.
        fixed: tables that are the same for every call.
        filler: largest finite number that hides keys that were not chosen; -inf if there is none.
    """

    constant: MaskClass | None
    leaves: frozenset[Leaf]
    where: str = ""
    term: Term | None = None
    sizes: Mapping[str, sympy.Expr] = dataclasses.field(default_factory=dict)
    numbers: tuple[sympy.Expr, ...] = ()
    scalars: frozenset[Leaf] = frozenset()
    tables: Mapping[Leaf, tuple[sympy.Expr, ...]] = dataclasses.field(default_factory=dict)
    items: Mapping[sympy.Symbol, Leaf] = dataclasses.field(default_factory=dict)
    fixed: Mapping[Leaf, Table] = dataclasses.field(default_factory=dict)
    filler: float = -math.inf
    _classes: dict[object, MaskClass] = dataclasses.field(default_factory=dict, init=False, repr=False)

    def __str__(self) -> str:
        return str(self.constant) if self.constant is not None or self.term is None else shown(self.term)

    def classify(self, facts: Facts) -> MaskClass:
        """Return the class of the mask given the facts of a call; raise `RefusalError` if it has none."""
        from dta_compile.proofs.mask_proof import (  # importing z3 is slow, and few masks need it in calls
            Unproven,
            classify,
        )

        assert self.term is not None
        if facts.key not in self._classes:
            try:
                self._classes[facts.key] = self.hiding_others(classify(self.term, self.sizes, facts))
            except Unproven as error:
                raise self.refusal(error) from None
        return self._classes[facts.key]

    def hiding_others(self, mask_class: MaskClass) -> MaskClass:
        """Return a class of the mask with its filler for keys that were not chosen, if that is larger."""
        return dataclasses.replace(mask_class, filler=max(mask_class.filler, self.filler))

    def refused(self, got: str) -> RefusalError:
        """Return the error for this mask; `got` says what is wrong with it."""
        return refusal(self.where, got, HINT, self.term)

    def refusal(self, unproven: Unproven) -> RefusalError:
        """Return the error for a mask of no supported class; write the SMT query into the folder `DTA_DEBUG`."""
        error = self.refused(str(unproven))
        if folder := os.environ.get("DTA_DEBUG"):
            paths = (pathlib.Path(folder) / f"mask_{number:03d}.smt2" for number in itertools.count())
            path = next(path for path in paths if not path.exists())
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.indent(str(error), "; ") + "\n" + unproven.query)
        return error

    def __getstate__(self) -> dict[str, Any]:
        """List the terms in topological order first: pickling them nested would exceed the recursion limit."""
        known = self.constant.terms if self.constant is not None else ()
        terms = in_order(*known, *(() if self.term is None else (self.term,)))
        return {"terms": terms, **self.__dict__, "_classes": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        del state["terms"]
        self.__dict__.update(state)


def refusal(where: str, got: str, hint: str, term: Term | None = None) -> RefusalError:
    """Return the error for a mask that is, or may be, of no supported class."""
    return RefusalError(
        "this attention mask cannot be proven causal",
        where=where,
        expected="causal, also within a sliding window or by chunks, with padding that is the same for every query",
        got=got if term is None else f"{got}\n  mask: {shown(term)}",
        hint=hint,
    )
