"""Derive entries of the tensors of an FX graph as terms: constants, numbers of the call, and pointwise operators.

Rules for operators that move entries are in `elements`. A rule must give exactly the operator's numbers in its dtype,
since calls evaluate terms (`terms.Evaluation`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import sympy
import torch
from torch import fx

from dta_compile.passes.graphs.arguments import argument
from dta_compile.passes.graphs.nodes import First, filled_with, is_pointwise
from dta_compile.passes.graphs.operators import aten
from dta_compile.passes.program import Program, ancestors, has_tensor
from dta_compile.passes.symbols import expression, sizes, symbolic, value_of
from dta_compile.proofs.terms import Const, Index, Leaf, Term, Terms

Indices = tuple[Term, ...]

HALVES = (torch.bfloat16, torch.float16)


class Entries:
    """Terms for entries of the tensors of a program.

    Args:
        program: the program of the nodes.
        terms: the factory of the terms.

    Attributes:
        leaves: the nodes of the leaves in terms.
        rules: by operator, the name of the method that returns an entry of its result, or None if it has no rule for
            the node.
    """

    rules: ClassVar[Mapping[Any, str]] = {}

    def __init__(self, program: Program, terms: Terms) -> None:
        self.program, self.terms = program, terms
        self._known: dict[tuple[fx.Node, Indices], Term] = {}
        self._first = First(program.draws)
        self.leaves: dict[Leaf, fx.Node] = {}

    def entry(self, node: fx.Node, index: Indices) -> Term:
        """Return the entry of a node's tensor at an index; along dimensions of size 1 the index is replaced by 0."""
        index = tuple(self._zero if size == 1 else at for size, at in zip(sizes(node), index, strict=True))
        key = (node, index)
        if key not in self._known:
            rule = self._rule(node)
            term = rule(node, index) if rule is not None else None
            if term is None:
                term = self.terms.entry(self._leaf(self._first.like(node)), index)
            self._known[key] = self._like(term, node.meta["val"])
        return self._known[key]

    def _leaf(self, node: fx.Node) -> Leaf:
        leaf = leaf_of(self.program, node)
        self.leaves[leaf] = node
        return leaf

    def _like(self, term: Term, value: torch.Tensor) -> Term:
        """Convert a term to the dtype of a tensor, and to a scalar if the tensor has no dimensions."""
        return self.terms.with_rank(self._cast(term, value.dtype), is_scalar=value.dim() == 0)

    @property
    def _zero(self) -> Const:
        return self.terms.const(0)

    def _rule(self, node: fx.Node) -> Callable[[fx.Node, Indices], Term | None] | None:
        """Return the rule for entries of a node's result; None if they are opaque."""
        if node.op == "get_attr":
            return self._attribute
        if node.op != "call_function":
            return None
        name = self.rules.get(node.target)
        if name is None and is_pointwise(node):
            name = "_pointwise"
        return None if name is None else getattr(self, name)

    # Numbers

    def _number(self, arg: Any) -> sympy.Expr:
        """Return a size or an integer among a node's arguments as an expression."""
        return expression(value_of(arg))

    def _scalar(self, arg: Any) -> Any:
        """Return a number argument of an operator: a term if it is symbolic."""
        if not isinstance(arg, fx.Node):
            return arg
        value = arg.meta["val"]
        if (expr := symbolic(value)) is None:
            return value
        return self.terms.number(expr, torch.float64 if isinstance(value, torch.SymFloat) else torch.int64)

    def _plus(self, at: Term, offset: sympy.Expr) -> Term:
        if offset == 0:
            return at
        return self.terms.apply(aten.add.Scalar, at, self._python(offset))

    def _times(self, at: Term, factor: sympy.Expr) -> Term:
        return at if factor == 1 else self.terms.apply(aten.mul.Scalar, at, self._python(factor))

    def _python(self, expr: sympy.Expr) -> Any:
        """Return a size as the number operand of an operator of a tensor and a number."""
        return int(expr) if isinstance(expr, sympy.Integer) else self.terms.number(expr)

    def _clamped(self, at: Term, size: sympy.Expr) -> Term:
        """Clamp an index into the tensor, for entries that are selected only if the index is valid."""
        raised = self.terms.apply(aten.maximum.default, at, self._zero)
        return self.terms.apply(aten.minimum.default, raised, self._as_tensor(size - 1))

    def _as_tensor(self, expr: sympy.Expr) -> Term:
        """Return a number as a tensor operand, for operators of two tensors."""
        return self._plus(self._zero, expr) if not isinstance(expr, sympy.Integer) else self.terms.const(int(expr))

    def _wrapped(self, at: Term, size: sympy.Expr) -> Term:
        """Wrap a negative index, which counts from the end."""
        if isinstance(at, Index) or (isinstance(at, Const) and at.value >= 0):
            return at
        is_negative = self.terms.apply(aten.lt.Scalar, at, 0)
        return self.terms.apply(aten.where.self, is_negative, self._plus(at, size), at)

    def _attribute(self, node: fx.Node, index: Indices) -> Term | None:
        value = getattr(self.program.module, str(node.target), None)
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            return self.terms.const(value.item(), value.dtype, value.dim() == 0)
        return None

    def _filled(self, node: fx.Node, index: Indices) -> Term | None:
        number, value = filled_with(node), node.meta["val"]
        fill = self._scalar(number)
        if not isinstance(fill, Term):
            return self._filled_with(fill, value.dtype)
        if value.is_floating_point() or fill.dtype.is_floating_point:
            return None
        return self._plus(self._zero, self._number(number))

    def _filled_with(self, number: bool | int | float, dtype: torch.dtype) -> Const:
        """Return a number rounded to a dtype, as a fill stores it."""
        return self.terms.const(torch.full((), number, dtype=dtype).item(), dtype)

    def _arange(self, node: fx.Node, index: Indices) -> Term | None:
        start, step = argument(node, "start") or 0, argument(node, "step") or 1
        is_integer = all(isinstance(value_of(arg), (int, torch.SymInt)) for arg in (start, step))
        if not is_integer or node.meta["val"].dtype in HALVES:  # some devices also round the start of 16-bit ranges
            return None
        return self._plus(self._times(index[0], self._number(step)), self._number(start))

    def _cast(self, term: Term, dtype: torch.dtype) -> Term:
        return term if term.dtype == dtype else self.terms.apply(aten._to_copy.default, term, dtype=dtype)

    # Pointwise operators

    def _aligned(self, node: fx.Node, index: Indices) -> Term:
        """Return the entry of an operand that is broadcast to `index`."""
        rank = node.meta["val"].dim()
        return self.entry(node, index[len(index) - rank :] if rank else ())

    def _pointwise(self, node: fx.Node, index: Indices) -> Term | None:
        def converted(arg: Any) -> Any:
            if isinstance(arg, fx.Node) and isinstance(arg.meta["val"], torch.Tensor):
                return self._aligned(arg, index)
            return self._scalar(arg)

        if any(isinstance(arg, (list, tuple)) for arg in node.args) or not isinstance(node.meta["val"], torch.Tensor):
            return None
        args = [converted(arg) for arg in node.args]
        kwargs = {name: converted(arg) for name, arg in node.kwargs.items()}
        if any(isinstance(arg, Term) for arg in kwargs.values()):
            return None
        return self.terms.apply(node.target, *args, result=node.meta["val"].dtype, **kwargs)


def leaf_of(program: Program, node: fx.Node) -> Leaf:
    """Return the leaf for a tensor of the lowered graph."""
    sources = ancestors([node])
    inputs = [(i, source) for i, source in enumerate(program.placeholders) if source in sources and has_tensor(source)]
    texts = tuple((i, source.meta.get("source") or source.name) for i, source in inputs)
    return Leaf(node.name, node.meta["val"].dtype, node.meta.get("source", ""), texts)


def leaves_of_masks(program: Program) -> list[fx.Node]:
    """Return the nodes of the leaves that masks read, sorted by name."""
    names = {leaf.name for layer in program.mixers for leaf in layer.leaves}
    return sorted((node for node in program.graph.nodes if node.name in names), key=lambda node: node.name)
