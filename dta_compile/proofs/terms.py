"""Terms: expressions of one entry of a tensor over its indices, for the derivation of attention masks.

`mask[row, 0, query, key]` of a causal mask with padding becomes `key <= query & attention_mask[row, key]`. Terms are
created by a `Terms` factory, which returns the same object for equal terms, so that they are compared by identity.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import sympy
import torch

from dta_compile.torch_compat.operators import OpOverload

aten = torch.ops.aten

INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "floor_divide": "//", "remainder": "%", "eq": "==", "ne": "!=",
    "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "bitwise_and": "&", "logical_and": "&", "bitwise_or": "|",
    "logical_or": "|", "bitwise_xor": "^", "logical_xor": "^",
}  # fmt: skip
PREFIX = {"bitwise_not": "~", "logical_not": "~", "neg": "-"}
OF_ITSELF = {"eq": True, "le": True, "ge": True, "ne": False, "lt": False, "gt": False}
RANKED = aten.view.default  # of one number: gives or removes dimensions, for type promotion
LONGEST = 400  # characters of a printed term


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A tensor whose entries are opaque.

    Attributes:
        name: name of the node in the lowered graph.
        source: the user's text for it if it is an input, "" if it is computed.
        inputs: the input tensors that it is computed from: position and the user's text of each.
    """

    name: str
    dtype: torch.dtype
    source: str = ""
    inputs: tuple[tuple[int, str], ...] = dataclasses.field(default=(), compare=False, repr=False)

    def __str__(self) -> str:
        return self.source or self.name


@dataclasses.dataclass(frozen=True, eq=False)
class Term:
    """One entry of a tensor.

    Attributes:
        dtype: dtype of the tensor.
        is_scalar: whether the tensor has no dimensions, which matters for type promotion.
        indices: the index variables that the term depends on.
    """

    dtype: torch.dtype
    is_scalar: bool
    indices: frozenset[str]


@dataclasses.dataclass(frozen=True, eq=False)
class Const(Term):
    """A number."""

    value: bool | int | float


@dataclasses.dataclass(frozen=True, eq=False)
class Index(Term):
    """An index variable of a dimension: "row", "query", "key"."""

    name: str


@dataclasses.dataclass(frozen=True, eq=False)
class Number(Term):
    """A size or a number of the call that is not a tensor; `expr` is over Dynamo's symbols."""

    expr: sympy.Expr


@dataclasses.dataclass(frozen=True, eq=False)
class Entry(Term):
    """The entry at `index` of an opaque tensor."""

    leaf: Leaf
    index: tuple[Term, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Apply(Term):
    """A pointwise operator applied to terms and Python numbers."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        """Return the operator's name, without its overload."""
        return _name(self.op)

    @property
    def operands(self) -> tuple[Term, ...]:
        """Return the arguments that are terms."""
        return tuple(arg for arg in self.args if isinstance(arg, Term))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "op": str(self.op)}  # operators do not pickle

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, op=functools.reduce(getattr, state["op"].split("."), torch.ops))


def _name(op: Any) -> str:
    return str(op._schema.name).removeprefix("aten::")


def shown(term: Term) -> str:
    """Format a term for messages, truncated to `LONGEST` characters per subterm."""
    known: dict[Term, str] = {}

    def text(arg: Any, nested: bool = False) -> str:
        if not isinstance(arg, Term):
            return str(arg)
        if arg not in known:
            full = _text(arg, text)
            known[arg] = full if len(full) <= LONGEST else f"{full[:LONGEST]} ..."
        infix = isinstance(arg, Apply) and arg.name in INFIX and not arg.kwargs
        return f"({known[arg]})" if nested and infix else known[arg]

    return text(term)


def _text(term: Term, text: Callable[..., str]) -> str:
    if isinstance(term, Const):
        return str(term.value)
    if isinstance(term, Index):
        return term.name
    if isinstance(term, Number):
        return str(term.expr)
    if isinstance(term, Entry):
        return f"{term.leaf}[{', '.join(map(text, term.index))}]" if term.index else str(term.leaf)
    assert isinstance(term, Apply)
    parts = [text(arg, True) for arg in term.args]
    if term.name in INFIX and len(parts) == 2 and not term.kwargs:
        return f"{parts[0]} {INFIX[term.name]} {parts[1]}"
    if term.op is RANKED:
        return text(term.args[0])
    if term.name in PREFIX:
        return f"{PREFIX[term.name]}{parts[0]}"
    if term.name == "_to_copy":
        return f"{parts[0]}.to({str(term.dtype).removeprefix('torch.')})"
    return f"{term.name}({', '.join([*map(text, term.args), *(f'{k}={v}' for k, v in term.kwargs)])})"


T = TypeVar("T", bound=Term)


class Terms:
    """Factory of terms: equal terms, also those in `known`, are one object; operators of constants are folded."""

    def __init__(self, known: Iterable[Term] = ()) -> None:
        self._known: dict[Any, Any] = {_identity(term): term for term in known}

    def const(self, value: bool | int | float, dtype: torch.dtype = torch.int64, is_scalar: bool = False) -> Const:
        """Return a constant; with `is_scalar`, one of lower priority in type promotion."""
        return self._unique(Const(dtype, is_scalar, frozenset(), value))

    def index(self, name: str) -> Index:
        """Return an index variable: "row", "query", "key" ..."""
        return self._unique(Index(torch.int64, False, frozenset([name]), name))

    def number(self, expr: sympy.Expr, dtype: torch.dtype = torch.int64) -> Const | Number:
        """Return a number of the call: a size, or an argument."""
        if isinstance(expr, sympy.Integer):
            return self.const(int(expr), is_scalar=True)
        return self._unique(Number(dtype, True, frozenset(), expr))

    def entry(self, leaf: Leaf, index: tuple[Term, ...]) -> Entry:
        """Return one entry of an opaque tensor."""
        indices = frozenset().union(*(term.indices for term in index))
        return self._unique(Entry(leaf.dtype, not index, indices, leaf, index))

    def apply(self, op: Any, *args: Any, result: torch.dtype | None = None, **kwargs: Any) -> Term:
        """Return `op(*args, **kwargs)`; `result` is its dtype, determined by torch if None."""
        if (simple := self._simplified(op, args, result)) is not None:
            return simple
        operands = [arg for arg in args if isinstance(arg, Term)]
        constants = [arg.value for arg in operands if isinstance(arg, Const)]
        is_constant = len(constants) == len(operands)
        if is_constant or result is None:
            value = _tried(op, args, kwargs)
            is_known = is_constant and value is not None and result in (None, value.dtype)
            if is_known and not any(is_undefined(op, number, value.dtype) for number in constants):
                return self.const(value.item(), value.dtype, value.dim() == 0)
            result = value.dtype if result is None else result
        items = tuple(sorted(kwargs.items()))
        is_scalar = not args[1] if op is RANKED else all(arg.is_scalar for arg in operands)
        indices = frozenset().union(*(arg.indices for arg in operands))
        return self._unique(Apply(result, is_scalar, indices, op, args, items))

    def _simplified(self, op: Any, args: tuple[Any, ...], result: torch.dtype | None) -> Term | None:
        """Simplify binary operators algebraically: `x == x` of integers, `x & True`, `x + 0`; None if none applies."""
        if len(args) != 2 or not isinstance(args[0], Term) or args[0].is_scalar:
            return None
        name, (first, second) = _name(op), args
        if first is second and not first.dtype.is_floating_point and name in OF_ITSELF:
            return self.const(OF_ITSELF[name], torch.bool)
        if name in ("bitwise_and", "logical_and") and first.dtype == getattr(second, "dtype", None) == torch.bool:
            for left, right in ((first, second), (second, first)):
                if isinstance(left, Const) and not second.is_scalar:
                    return right if left.value else left
        number = second.value if isinstance(second, Const) and second.dtype == first.dtype else second
        adds_nothing = name in ("add", "sub") and isinstance(number, int) and number == 0
        return first if adds_nothing and first.dtype is torch.int64 and result in (None, torch.int64) else None

    def with_rank(self, term: Term, is_scalar: bool) -> Term:
        """Return a term as an entry of a tensor without dimensions (`is_scalar`) or with some."""
        if term.is_scalar == is_scalar:
            return term
        if isinstance(term, Const):
            return self.const(term.value, term.dtype, is_scalar)
        return self.apply(RANKED, term, () if is_scalar else (1,), result=term.dtype)

    def with_index(self, term: Term, name: str, other: str) -> Any:
        """Return a term in which index variable `other` replaces `name`."""
        memo: dict[Term, Term] = {}

        def replaced(term: Any) -> Any:
            if not isinstance(term, Term) or name not in term.indices:
                return term
            if term not in memo:
                memo[term] = rebuilt(term)
            return memo[term]

        def rebuilt(term: Term) -> Term:
            if isinstance(term, Entry):
                return self.entry(term.leaf, tuple(map(replaced, term.index)))
            if isinstance(term, Apply):
                return self.apply(term.op, *map(replaced, term.args), result=term.dtype, **dict(term.kwargs))
            return self.index(other)

        return replaced(term)

    def _unique(self, term: T) -> T:
        known: T = self._known.setdefault(_identity(term), term)
        return known


def is_undefined(op: Any, number: bool | int | float, dtype: torch.dtype) -> bool:
    """Return whether an operator casts a number beyond an integer dtype: the result depends on the device."""
    is_cast = op is aten._to_copy.default and isinstance(number, float) and dtype is not torch.bool
    if not is_cast or dtype.is_floating_point or dtype.is_complex:
        return False
    limits = torch.iinfo(dtype)
    return not limits.min <= number <= limits.max


def _identity(term: Term) -> tuple[Any, ...]:
    """Return a key that is equal for equal terms, given that equal subterms are one object."""
    return type(term), *map(_key, vars(term).values())


def _key(arg: Any) -> Any:
    if isinstance(arg, tuple):
        return tuple(map(_key, arg))
    return (type(arg), repr(arg)) if isinstance(arg, (int, float)) else arg


def _tried(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on constants or examples of its operands; return None if it does not support them."""
    try:
        return op(*map(_example, args), **kwargs)
    except RuntimeError:
        return None


def _example(arg: Any) -> Any:
    """Return an example of an argument with the same effect on type promotion."""
    if not isinstance(arg, Term):
        return arg
    if isinstance(arg, Number):
        return 1
    return torch.full(() if arg.is_scalar else (1,), arg.value if isinstance(arg, Const) else 1, dtype=arg.dtype)


def subterms(term: Term) -> Iterator[Term]:
    """Yield a term and all its subterms, each once."""
    seen, pending = set[Term](), [term]
    while pending:
        current = pending.pop()
        if current not in seen:
            seen.add(current)
            yield current
            pending.extend(_parts(current))


def in_order(*terms: Term) -> tuple[Term, ...]:
    """Return terms and all their subterms in topological order, each once."""
    ordered, pending = dict[Term, None](), list(terms)
    while pending:
        missing = [part for part in _parts(pending[-1]) if part not in ordered]
        pending += missing
        if not missing:
            ordered[pending.pop()] = None
    return tuple(ordered)


def _parts(term: Term) -> tuple[Term, ...]:
    return term.index if isinstance(term, Entry) else term.operands if isinstance(term, Apply) else ()


class Evaluation:
    """Evaluator of terms for one call, with values broadcastable to `[B, S]`.

    Args:
        dense: the leaves' tensors, by the name of the leaf.
        number: returns the value of a size expression.
        indices: tensors of index variables by name, for instance `[B, 1]` rows and `[1, S]` keys.
    """

    def __init__(
        self,
        dense: Mapping[str, torch.Tensor],
        number: Callable[[sympy.Expr], int | float],
        indices: Mapping[str, torch.Tensor],
    ) -> None:
        self.dense, self.number, self.indices = dense, number, indices
        self._known: dict[Term, Any] = {}

    def __call__(self, term: Any) -> Any:
        """Return the value of a term; any other argument unchanged."""
        if not isinstance(term, Term):
            return term
        if term not in self._known:
            self._known[term] = self._value(term)
        return self._known[term]

    def _value(self, term: Term) -> Any:
        if isinstance(term, Index):
            return self.indices[term.name]
        if isinstance(term, Number):
            number = self.number(term.expr)
            return float(number) if term.dtype.is_floating_point else number
        if isinstance(term, Entry):
            value = self.dense[term.leaf.name]
            return value[tuple(map(self, term.index))] if term.index else value
        if isinstance(term, Apply):
            return term.op(*map(self, term.args), **dict(term.kwargs))
        assert isinstance(term, Const)
        device = next(iter(self.indices.values())).device
        return torch.full(() if term.is_scalar else (1, 1), term.value, dtype=term.dtype, device=device)
