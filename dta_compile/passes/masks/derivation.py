"""Derive the `MaskProgram` of a mask that the graph computes: its term, the values that calls read for it, its class.

It also finds the masks that make the input of a recurrence zero, by a product or a choice. A zero state stays zero at
such tokens, so that padding before a sequence has no effect. Zeros propagate by operator: a product is zero where a
factor is, a sum where all its terms are, and most activation functions map zero to zero.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any

import sympy
import torch
from torch import fx

from dta_compile.errors import RefusalError
from dta_compile.executable.layouts import Axis, Frame, Layout
from dta_compile.executable.masks import MaskProgram, refusal
from dta_compile.ops.chosen_keys import CHOSEN
from dta_compile.ops.mixer import MIXERS
from dta_compile.passes.graphs.arguments import where_of
from dta_compile.passes.graphs.nodes import filled_with
from dta_compile.passes.graphs.operators import MASKED_FILLS, NEGATIONS, QUOTIENTS, SAME_ENTRIES, ZERO_OF_ZERO, aten
from dta_compile.passes.graphs.source_lines import where
from dta_compile.passes.graphs.subgraph import missing
from dta_compile.passes.masks.elements import Elements
from dta_compile.passes.masks.entries import leaf_of
from dta_compile.passes.program import Program, ancestors
from dta_compile.passes.symbols import expression, free_symbols, hint, sizes, symbolic
from dta_compile.proofs.call_facts import Facts, read_table
from dta_compile.proofs.logic import Logic
from dta_compile.proofs.mask_class import MaskClass
from dta_compile.proofs.mask_proof import Z3_LOCK, Unproven, classify, forbidden_by
from dta_compile.proofs.terms import Entry, Leaf, Number, Term, Terms, shown, subterms


class MaskPrograms:
    """The masks of the attention calls of a program, each derived and classified once."""

    def __init__(self, program: Program) -> None:
        self.program, self.terms = program, Terms()
        self._known: dict[tuple[Term, float], MaskProgram] = {}

    def of(self, mask: fx.Node) -> tuple[MaskProgram, fx.Node | None]:
        """Return a mask for the keys that are chosen, and the choice of keys that it is made of, if it is.

        Raises:
            RefusalError: the mask is of no supported class, or allows keys that are not chosen.
        """
        choices = {node for node in ancestors([mask], stop=_is_choice) if _is_choice(node)}
        learned = ancestors([mask], stop=_is_choice) & self.program.parameter_dependent
        if any(node.op == "placeholder" for node in learned) or len(choices) > 1:
            raise _learned_refusal(mask, learned)
        derived = _Derivation(self.program, mask, self.terms)
        filler = derived.filler_of_others() if choices else -math.inf
        if filler is None:
            got = "a learned sparse mask that may allow keys besides those chosen for a query"
            raise refusal(where(mask), got, "hide all keys that are not chosen, by False or -inf")
        key = derived.term, filler
        if key not in self._known:
            unclassified = dataclasses.replace(derived.mask_program(), filler=filler)
            self._known[key] = dataclasses.replace(unclassified, constant=_constant_class(unclassified))
        return self._known[key], next((node.args[0] for node in choices), None)


def forced_scores(program: Program, forced: fx.Node) -> Term:
    """Return the term over "query" and "block" of the scores that replace those of an index, NaN where none does.

    Raises:
        RefusalError: they depend on other values than the numbers of query and block.
    """
    terms, rank = Terms(), len(sizes(forced))
    index = tuple(terms.index(name) for name in ("row", "head", "query", "block")[4 - rank :])
    term = Elements(program, terms, lambda *_: None, {}, True).entry(forced, index)
    if any(isinstance(part, (Entry, Number)) for part in subterms(term)) or not term.indices <= {"query", "block"}:
        got = f"scores of a learned index that are replaced by {shown(term)}"
        raise refusal(where(forced), got, "replace scores by numbers of query and block alone, without padding")
    return term


def _is_choice(node: fx.Node) -> bool:
    return node.target is CHOSEN


def _learned_refusal(mask: fx.Node, learned: set[fx.Node]) -> RefusalError:
    """Return the error for a mask that depends on parameters."""
    choosing = [node for node in learned if "topk" in str(node.target)]
    if mask.meta["val"].dtype is not torch.bool and not choosing:
        got = "a bias computed from parameters"
        hint = (
            "add no learned bias to the attention scores, or one that depends on the key alone or on query - key alone,"
            " or is gathered from a tensor [B, H, S, n] by (query - key).clamp(0, n - 1)"
        )
        return refusal(where(mask), got, hint)
    reason = next((reason for node in choosing if (reason := node.meta.get("unrecognised_choice"))), None)
    if reason is None and any(sizes(node.args[0])[-1] != sizes(mask)[-1] for node in choosing):
        reason = "the scores of blocks or of other tokens, not of each key"
    got = "a learned sparse mask: the model chooses keys" + (f" by {reason}" if reason else "")
    hint = "choose keys, or blocks by their best key, by topk of query @ key or of a weighted sum of relu(query @ key)"
    return refusal(where(mask), got, f"{hint} over heads, masked like the attention; or use a causal mask")


class _Derivation:
    def __init__(self, program: Program, mask: fx.Node, terms: Terms) -> None:
        self.program, self.mask, self.terms = program, mask, terms
        assert program.tokens is not None
        tokens = program.tokens if program.length is None else sympy.Integer(hint(program.length))
        self.sizes = {"query": tokens, "key": tokens}
        if program.batch is not None:
            self.sizes["row"] = program.batch
        with Z3_LOCK:
            self.term = self._entry(chosen=True)

    def filler_of_others(self) -> float | None:
        """Return the largest finite number that hides keys that a choice leaves out; None if some may be allowed."""
        with Z3_LOCK:
            term = self._entry(chosen=False)
        return forbidden_by(term, self.sizes, Facts())

    def _entry(self, chosen: bool) -> Term:
        """Return the mask's term for keys that are chosen, or are not; the index of a head dimension is "head"."""
        shape, terms = self.mask.meta["val"].shape, self.terms

        def constant_of(term: Term, size: sympy.Expr) -> float | None:
            return Logic(terms, {**self.sizes, "scanned": size}).constant(term)

        names = ("row", "head", "query", "key")[4 - len(shape) :]
        if len(shape) == 4 and self.program.batch is None:
            names = ("", *names[1:])
        if len(shape) > 2:
            self.sizes["head"] = expression(shape[-3])
        index = tuple(terms.index(name) if name else terms.const(0) for name in names)
        elements = Elements(self.program, terms, constant_of, self.sizes, chosen)
        term = elements.entry(self.mask, index)
        self.nodes = elements.leaves
        if learned := set(self.nodes.values()) & self.program.parameter_dependent:
            raise _learned_refusal(self.mask, learned)
        return term

    def mask_program(self) -> MaskProgram:
        """Return the mask without its class."""
        parts = list(subterms(self.term))
        entries = [part for part in parts if isinstance(part, Entry)]
        if "head" in self.term.indices:
            got = "a mask that differs between heads (ALiBi, relative bias, windows of their own)"
            raise self._refusal(got, "use one window for all heads, and rotary or learned positions instead of biases")
        of_pairs = [entry for entry in entries if len(entry.indices - {"row", "head"}) > 1]
        for entry in of_pairs:
            node = self.nodes[entry.leaf]
            if not _is_over_pairs(node) and ("row" in entry.indices or node.op == "call_function"):
                raise self._pair_refusal(node)
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
            tables={leaf: sizes(self.nodes[leaf]) for leaf in sorted(pairs - constants, key=str)},
            items=items,
            fixed={leaf: table for leaf, values in contents.items() if (table := read_table(values)) is not None},
        )

    def _items(self, symbols: set[sympy.Symbol]) -> dict[sympy.Symbol, Leaf]:
        """Return the tensors that symbols are read from (`.item()`); raise `RefusalError` for unknown symbols."""
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
        name = f"the input {node.meta.get('source') or node.name}" if node.op == "placeholder" else node.target
        return self._refusal(
            f"{name} of pairs of tokens, which is not understood in a mask",
            "make the mask of comparisons of positions, of per-token conditions and of where",
        )


def _is_over_pairs(node: fx.Node) -> bool:
    """Return whether a tensor is a mask `[S, S]`, `[B, S, S]` or `[B, 1, S, S]`, whose values a call can test."""
    shape = sizes(node)
    return len(shape) > 1 and sum(size != 1 for size in shape[:-2]) <= 1


def _constant_class(mask: MaskProgram) -> MaskClass | None:
    """Return the class if it is the same for all calls, None if it depends on the call; may raise `RefusalError`."""
    assert mask.term is not None
    try:
        proven = classify(mask.term, mask.sizes, Facts(tables=mask.fixed))
    except Unproven as error:
        if mask.numbers or mask.scalars or mask.tables:
            return None
        raise mask.refusal(error) from None
    sizes = free_symbols(mask.sizes.values())
    compared = *proven.segments, *proven.positions, *proven.of_blocks
    reads_numbers = any(_reads_numbers(term, sizes) for term in compared)
    return None if reads_numbers else mask.hiding_others(proven)


def _reads_numbers(term: Term, sizes: set[sympy.Symbol]) -> bool:
    """Return whether a term depends on a number of the call other than a size, whose value a call must know."""
    parts = list(subterms(term))
    expressions = [part.expr for part in parts if isinstance(part, Number)]
    scalars = any(isinstance(part, Entry) and not part.index for part in parts)
    return scalars or bool(free_symbols(expressions) - sizes)


PRODUCTS = (aten.mul.Tensor, aten.mm.default, aten.bmm.default, aten.mv.default)
SUMS = (aten.add.Tensor, aten.sub.Tensor)
EQUAL = (aten.eq.Scalar, aten.eq.Tensor)
LISTS = (aten.cat.default, aten.stack.default)
# Operators whose result is zero where their first argument is; dimensions they work along are features.
FOLLOWED = (
    ZERO_OF_ZERO
    | QUOTIENTS
    | {aten.mul.Scalar, aten.repeat.default, aten.contiguous.default, operator.getitem}
    | {aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int}
    | {aten.silu.default, aten.gelu.default, aten.relu.default, aten.tanh.default}
)
# Operators that keep each token's number, if argument and result are both over all tokens.
SAME_TOKENS = SAME_ENTRIES | {aten.contiguous.default}
Masks = frozenset[fx.Node]
NONE: Masks = frozenset()


class Silencers:
    """Analysis of the masks that make values of a program zero; a mask is one number per token, computed from inputs.

    If a mask of a value is zero at all tokens up to some token, the value is zero at these tokens. (Only leading zeros
    count, since the output of a recurrence is zero only as long as its state is.)
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.known: dict[fx.Node, Masks] = {}

    def of(self, node: fx.Node) -> Masks:
        """Return the masks of a value."""
        for value in missing(node, self.known, _followed):
            self.known[value] = self._masks(value)
        return self.known[node]

    def of_call(self, call: fx.Node) -> Masks:
        """Return the masks at whose zeros a recurrence leaves a zero state unchanged."""
        return NONE.union(*(self.of(call.args[i]) for i in MIXERS[call.target].silent))

    def _masks(self, node: fx.Node) -> Masks:
        if not self._is_over_tokens(node):
            return NONE
        if node not in self.program.parameter_dependent:
            return frozenset([node]) if self._is_mask(node) else NONE
        arguments, selecting = [self.known[arg] for arg in _followed(node)], _selecting(node)
        is_given = selecting is not None and selecting not in self.program.parameter_dependent
        own = (
            frozenset([selecting])
            if is_given and self._is_over_tokens(selecting) and self._is_mask(selecting)
            else NONE
        )
        if not arguments:
            return own
        if node.target in PRODUCTS or node.target in MIXERS:
            return NONE.union(*arguments)
        return own | frozenset.intersection(*arguments)

    def _is_over_tokens(self, node: fx.Node) -> bool:
        """Return whether a value has entries for all tokens of the batch, so that its tokens are those of a mask."""
        values = self.program.values.get(node)
        layouts = values if isinstance(values, tuple) else (values,)
        whole = Frame(sympy.S.Zero, self.program.tokens)
        return all(
            isinstance(layout, Layout) and layout.token_dim is not None and layout.frame == whole for layout in layouts
        )

    def _is_mask(self, node: fx.Node) -> bool:
        """Return whether a value has one number per token."""
        layout = self.program.layout(node)
        axes = tuple(axis for axis in layout.dims if axis is not None)
        is_small = all(axis is not None or size == 1 for axis, size in zip(layout.dims, sizes(node), strict=True))
        return is_small and axes in ((Axis.BATCH, Axis.TOKEN), (Axis.TOKEN,), (Axis.ROWS,))


def _is_zero(value: Any) -> bool:
    number = filled_with(value) if isinstance(value, fx.Node) else value
    return isinstance(number, (bool, int, float)) and number == 0


def _selecting(node: fx.Node) -> fx.Node | None:
    """Return the value whose zeros a `where` or `masked_fill` makes zeros of its result; None if there is none."""
    if node.op != "call_function" or (selected := where_of(node)) is None:
        return None
    condition, value, other = selected
    if _is_zero(other):
        return condition
    while condition.target in SAME_TOKENS:
        condition = condition.args[0]
    is_negated = condition.target in NEGATIONS or (condition.target in EQUAL and _is_zero(condition.args[1]))
    return condition.args[0] if _is_zero(value) and is_negated else None


def _followed(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that decide whether a value is zero."""
    if node.op != "call_function":
        return []
    arguments: list[Any]
    if node.target in PRODUCTS or node.target in SUMS:
        arguments = list(node.args[:2])
        if not all(isinstance(arg, fx.Node) for arg in arguments):  # one operand is a number
            return arguments[:1] if node.target in PRODUCTS and isinstance(arguments[0], fx.Node) else []
    elif node.target in LISTS:
        arguments = list(node.args[0])
    elif node.target is aten.where.self:
        arguments = list(node.args[1:3])
    elif node.target in MIXERS:
        arguments = [node.args[i] for i in MIXERS[node.target].silent]
    elif node.target in FOLLOWED or (node.target in MASKED_FILLS and _is_zero(node.args[2])):
        arguments = [node.args[0]]
    else:
        return []
    return [arg for arg in arguments if isinstance(arg, fx.Node)]


def padding_mask_of(mask: fx.Node) -> fx.Node | None:
    """Return the input that a mask is a reshape or cast of, if it is a padding mask, otherwise None.

    An input is a padding mask if its name contains "mask" and its dtype is not floating-point.
    """
    node = mask
    while node.op == "call_function" and node.target in SAME_TOKENS and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    value = node.meta.get("val")
    is_integer = isinstance(value, torch.Tensor) and not value.is_floating_point()
    return node if node.op == "placeholder" and is_integer and "mask" in node.meta.get("source", "") else None
