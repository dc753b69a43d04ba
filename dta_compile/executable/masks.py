"""The mask of attention as a call reads it: an expression of one entry, and what it is proven to be."""

from __future__ import annotations

import dataclasses
import itertools
import os
import pathlib
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import sympy

from dta_compile.errors import RefusalError
from dta_compile.proofs.mask_class import MaskClass
from dta_compile.proofs.tables import Facts, Table
from dta_compile.proofs.terms import Leaf, Term, in_order, shown

if TYPE_CHECKING:
    from dta_compile.proofs.proof import Unproven

HINT = "use a causal mask, a sliding window or chunks of the sequence, and padding from one mask"


@dataclasses.dataclass(frozen=True, eq=False)
class MaskProgram:
    """The mask of an attention call, `[rows, heads, queries, keys]` or what broadcasts to it; or one that is declared.

    Attributes:
        constant: its class, if that is the same for every call.
        leaves: tensors that the class is read from.
        where: the user's line.
        term: an entry of it, over "row", "query" and "key"; None: it is declared, and of a constant class.
        sizes: by index variable, the size of the dimension along which it counts.
        numbers, scalars, tables: what has to be known of a call to say the class, if that is not constant; tables and
            masks over pairs of tokens with their sizes.
        items: tensors that numbers are read from, by the symbol that Dynamo knows the number by.
        fixed: tables that are the same for every call.
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
    _classes: dict[object, MaskClass] = dataclasses.field(default_factory=dict, init=False, repr=False)

    def __str__(self) -> str:
        return str(self.constant) if self.constant is not None or self.term is None else shown(self.term)

    def classify(self, facts: Facts) -> MaskClass:
        """The class of the mask for what is known of a call; raises `RefusalError` if it has none."""
        from dta_compile.proofs.proof import Unproven, classify  # z3 takes its time, and few masks need it at a call

        assert self.term is not None
        if facts.key not in self._classes:
            try:
                self._classes[facts.key] = classify(self.term, self.sizes, facts)
            except Unproven as error:
                raise self.refusal(error) from None
        return self._classes[facts.key]

    def refused(self, got: str) -> RefusalError:
        """The error for a mask of which `got` was found."""
        return refusal(self.where, got, HINT, self.term)

    def refusal(self, unproven: Unproven) -> RefusalError:
        """The error for a mask of no supported class; where `DTA_DEBUG` says so, the query is written to a file."""
        error = self.refused(str(unproven))
        if folder := os.environ.get("DTA_DEBUG"):
            paths = (pathlib.Path(folder) / f"mask_{number:03d}.smt2" for number in itertools.count())
            path = next(path for path in paths if not path.exists())
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.indent(str(error), "; ") + "\n" + unproven.query)
        return error

    def __getstate__(self) -> dict[str, Any]:
        """Terms come one after the other, before what refers to them: pickling one in the other would be too deep."""
        known = self.constant.terms if self.constant is not None else ()
        terms = in_order(*known, *(() if self.term is None else (self.term,)))
        return {"terms": terms, **self.__dict__, "_classes": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        del state["terms"]
        self.__dict__.update(state)


def refusal(where: str, got: str, hint: str, term: Term | None = None) -> RefusalError:
    """The error for a mask that is, or may be, of no supported class."""
    return RefusalError(
        "this attention mask cannot be proven causal",
        where=where,
        expected="causal, also within a sliding window or by chunks, with padding that is the same for every query",
        got=got if term is None else f"{got}\n  mask: {shown(term)}",
        hint=hint,
    )
