"""The program of a mask that a graph computes: its term, what calls have to read for it, and its class."""

from __future__ import annotations

import dataclasses

import sympy
import torch
from torch import fx

from dta_compile.errors import RefusalError
from dta_compile.executable.masks import MaskProgram, refusal
from dta_compile.passes.masks.elements import Elements
from dta_compile.passes.masks.entries import leaf_of
from dta_compile.passes.program import Program, ancestors, where
from dta_compile.passes.symbols import expression, free_symbols, symbolic
from dta_compile.proofs.logic import Logic
from dta_compile.proofs.mask_class import MaskClass
from dta_compile.proofs.proof import Z3_LOCK, Unproven, classify
from dta_compile.proofs.tables import Facts, read_table
from dta_compile.proofs.terms import Entry, Leaf, Number, Term, Terms, subterms


def mask_program(program: Program, mask: fx.Node) -> MaskProgram:
    """What a call has to know of the mask of attention; raises `RefusalError` if it is of no supported class."""
    if learned := ancestors([mask]) & program.parameter_dependent:
        if mask.meta["val"].dtype is torch.bool or any("topk" in str(node.target) for node in learned):
            raise refusal(where(mask), "a learned sparse mask: the model chooses keys", "use a causal mask")
        got = "a bias computed from parameters"
        raise refusal(where(mask), got, "add no learned bias to the attention scores")
    found = _Derivation(program, mask).mask_program()
    return dataclasses.replace(found, constant=_constant_class(found))


class _Derivation:
    def __init__(self, program: Program, mask: fx.Node) -> None:
        self.program, self.mask = program, mask
        assert program.tokens is not None
        self.sizes = {"query": program.tokens, "key": program.tokens}
        if program.batch is not None:
            self.sizes["row"] = program.batch
        with Z3_LOCK:
            self.term = self._entry()

    def _entry(self) -> Term:
        """The mask's term; a dimension of several heads is a "head"."""
        shape, terms = self.mask.meta["val"].shape, Terms()

        def constant_of(term: Term, size: sympy.Expr) -> float | None:
            return Logic(terms, {**self.sizes, "scanned": size}).constant(term)

        names = ("row", "head", "query", "key")[4 - len(shape) :]
        if len(shape) == 4 and self.program.batch is None:
            names = ("", *names[1:])
        if len(shape) > 2:
            self.sizes["head"] = expression(shape[-3])
        index = tuple(terms.index(name) if name else terms.const(0) for name in names)
        elements = Elements(self.program, terms, constant_of, self.sizes.values())
        term = elements.entry(self.mask, index)
        self.nodes = elements.leaves
        return term

    def mask_program(self) -> MaskProgram:
        """The mask, as if it were of no constant class."""
        parts = list(subterms(self.term))
        entries = [part for part in parts if isinstance(part, Entry)]
        if "head" in self.term.indices:
            got = "a mask that differs between heads (ALiBi, relative bias)"
            raise self._refusal(got, "use rotary or learned positions")
        of_pairs = [entry for entry in entries if len(entry.indices - {"row", "head"}) > 1]
        for entry in of_pairs:
            if "row" in entry.indices or self.nodes[entry.leaf].op not in ("placeholder", "get_attr"):
                raise self._pair_refusal(self.nodes[entry.leaf])
        constants = {entry.leaf for entry in entries if self.nodes[entry.leaf].op == "get_attr"}
        pairs = {entry.leaf for entry in of_pairs}
        contents = {leaf: getattr(self.program.module, str(self.nodes[leaf].target)) for leaf in pairs & constants}
        numbers = tuple(part.expr for part in parts if isinstance(part, Number))
        items = self._items(free_symbols((*numbers, *self.sizes.values())))
        return MaskProgram(
            constant=None,
            leaves=frozenset({entry.leaf for entry in entries} - constants | set(items.values())),
            where=where(self.mask),
            term=self.term,
            sizes=self.sizes,
            numbers=numbers,
            scalars=frozenset(entry.leaf for entry in entries if not entry.index),
            tables=frozenset(pairs - constants),
            items=items,
            fixed={leaf: table for leaf, values in contents.items() if (table := read_table(values)) is not None},
        )

    def _items(self, symbols: set[sympy.Symbol]) -> dict[sympy.Symbol, Leaf]:
        """The tensors that symbols of the numbers are read from; raises `RefusalError` if nobody knows one."""
        items = self.program.graph.find_nodes(op="call_function", target=torch.ops.aten._local_scalar_dense.default)
        read = {symbolic(node.meta["val"]): node.args[0] for node in items}
        unknown = symbols - read.keys() - set(self.program.input_symbols)
        if unknown:
            got = f"{', '.join(sorted(map(str, unknown)))}, a number that is computed from tensors"
            raise self._refusal(got, "pass the number to the compiled function")
        return {symbol: leaf_of(self.program, read[symbol]) for symbol in sorted(symbols & read.keys(), key=str)}

    def _refusal(self, got: str, hint: str) -> RefusalError:
        return refusal(where(self.mask), got, hint, self.term)

    def _pair_refusal(self, node: fx.Node) -> RefusalError:
        if node.op == "placeholder":
            got = "a mask over pairs of tokens given as an input"
            return self._refusal(got, "pass a [batch, tokens] padding mask instead")
        return self._refusal(
            f"{node.target} of pairs of tokens, which is not understood in a mask",
            "make the mask of comparisons of positions, of per-token conditions and of where",
        )


def _constant_class(mask: MaskProgram) -> MaskClass | None:
    """The class, if nothing has to be known for it; None: it depends on the call. Raises `RefusalError`."""
    assert mask.term is not None
    try:
        found = classify(mask.term, mask.sizes, Facts(tables=mask.fixed))
    except Unproven as error:
        if mask.numbers or mask.scalars or mask.tables:
            return None
        raise mask.refusal(error) from None
    sizes = free_symbols(mask.sizes.values())
    return None if any(_reads_numbers(term, sizes) for term in (*found.segments, *found.positions)) else found


def _reads_numbers(term: Term, sizes: set[sympy.Symbol]) -> bool:
    """Whether a term depends on a number of the call other than a size: known, it may not be taken for anything."""
    parts = list(subterms(term))
    expressions = [part.expr for part in parts if isinstance(part, Number)]
    scalars = any(isinstance(part, Entry) and not part.index for part in parts)
    return scalars or bool(free_symbols(expressions) - sizes)
