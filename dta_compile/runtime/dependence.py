"""Follow which entries of tensors depend on marked entries of others, operator by operator.

A mark says that an entry may change with the marked ones; an entry without a mark provably does not. The rules are what
operators mean; an operator without one marks all of its results. Numbers are taken to be finite, so that an unmarked
zero hides what it multiplies.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from dta_compile.torch_compat.tensors import TorchDispatchMode, tree_leaves, tree_map

aten = torch.ops.aten

# Entries of the first operand, moved or left out by numbers and by the other operands.
MOVES = re.compile(
    "view|_unsafe_view|reshape|transpose|permute|t|unsqueeze|squeeze|expand|slice|select|clone|alias|detach|flip|cat|"
    "stack|split|split_with_sizes|unbind|repeat|roll|diagonal|tril|triu|unfold|index_select|index"
)
# Each result depends on all entries along `dim`, or on all entries if it has none.
LINES = re.compile(
    "sum|mean|amax|amin|any|all|argmax|argmin|prod|max|min|cumsum|cumprod|logcumsumexp|_softmax|_log_softmax|topk|"
    "sort|var|std|logsumexp"
)
SHAPES = re.compile("(zeros|ones|full|empty)_like|new_(zeros|ones|full|empty)")
DIM = dict.fromkeys(("topk", "sort"), -1)  # defaults, where they are not all dimensions
UNKNOWN_SHAPES = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


class Dependence(TorchDispatchMode):
    """Mode under which the marks of `mark` follow all operators; `of` reads those of a result."""

    def __init__(self) -> None:
        super().__init__()
        self._marks: Any = WeakTensorKeyDictionary()  # bool tensors of the same shapes
        self._is_lost = False  # a marked entry decided about a shape or number, or was written in place

    def mark(self, tensor: torch.Tensor, marks: torch.Tensor) -> None:
        """Mark entries of a tensor, by bools of its shape."""
        self._marks[tensor] = marks

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the marks of a tensor."""
        marks = self._marks.get(tensor)
        marks = torch.zeros((), dtype=torch.bool, device=tensor.device) if marks is None else marks
        return (torch.ones_like(marks) if self._is_lost else marks).expand(tensor.shape)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, and mark its results."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        marked = [leaf for leaf in tree_leaves((args, kwargs)) if self._is_marked(leaf)]
        if marked and not SHAPES.fullmatch(_name(func)):
            call = _Call(func, {**dict(zip(_names(func), args, strict=False)), **kwargs}, result)
            if self._decides(call):
                self._is_lost |= any(bool(self.of(one).any()) for one in marked)
            else:
                for one, marks in zip(tree_leaves(result), tree_leaves(self._marks_of(call)), strict=True):
                    self._marks[one] = marks.to(one.device)
        return result

    def _is_marked(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value in self._marks

    def _is_first_alone(self, call: _Call) -> bool:
        """Return whether no operand after the first is marked; in `x[x]` the index is, too."""
        _, *others = call.given.values()
        return not any(map(self._is_marked, tree_leaves(others)))

    def _decides(self, call: _Call) -> bool:
        """Return whether marked operands decide about a shape or a number, or are in memory that is written to."""
        if call.func._schema.is_mutable or not all(isinstance(one, torch.Tensor) for one in call.results):
            return True
        is_selection = call.func is aten.index.Tensor and self._is_first_alone(call)
        return any(tag in call.func.tags for tag in UNKNOWN_SHAPES) and not is_selection

    def _marks_of(self, call: _Call) -> Any:
        """Return the marks of an operator's results, in their structure."""
        name, of_first = _name(call.func), self._is_first_alone(call)
        if name in RULES and (marks := RULES[name](self, **call.given)) is not None:
            return marks.expand(call.result.shape)
        if MOVES.fullmatch(name) and of_first:
            name_of_first, *_ = _names(call.func)
            return call.func(
                **{**call.given, name_of_first: tree_map(lambda one: self.of(one).contiguous(), call.first)}
            )
        if LINES.fullmatch(name) and of_first and torch.Tag.pointwise not in call.func.tags:
            return self._along(call)
        every = [self.of(leaf) for leaf in tree_leaves(call.given) if isinstance(leaf, torch.Tensor)]
        if torch.Tag.pointwise not in call.func.tags and name != "_to_copy":
            every = [marks.any() for marks in every]
        marks = functools.reduce(torch.logical_or, every)
        return tree_map(lambda one: marks.expand(one.shape), call.result)

    def _along(self, call: _Call) -> Any:
        marks, given = self.of(call.first), call.given.get("dim", DIM.get(_name(call.func)))
        dims = [given] if isinstance(given, int) else given or range(marks.dim())
        dims = [dim % marks.dim() for dim in dims] if marks.dim() else []
        kept = marks.any(dims, keepdim=True) if dims else marks
        return tree_map(
            lambda one: (kept if one.dim() == kept.dim() else kept.squeeze(dims)).expand(one.shape), call.result
        )

    def counts(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return where a tensor is no unmarked zero."""
        return (tensor != 0) | self.of(tensor)


@dataclasses.dataclass(frozen=True)
class _Call:
    """Call of an operator, with its arguments by name."""

    func: Any
    given: dict[str, Any]
    result: Any

    @property
    def first(self) -> Any:
        return next(iter(self.given.values()))

    @property
    def results(self) -> list[Any]:
        return tree_leaves(self.result) or [None]


@functools.cache
def _names(func: Any) -> list[str]:
    return [argument.name for argument in func._schema.arguments]


@functools.cache
def _name(func: Any) -> str:
    """Return the name that rules know an operator by: "" for `view.dtype`, which regroups bits, and other libraries."""
    is_known = func.namespace == "aten" and func is not aten.view.dtype
    return str(func.overloadpacket.__name__) if is_known else ""


# Rules of operators take their arguments by name, and return None for operands that they are not about.


def _product(marks: Dependence, self: Any, other: Any) -> torch.Tensor | None:
    if not isinstance(self, torch.Tensor) or not isinstance(other, torch.Tensor):
        return None
    return (marks.of(self) & marks.counts(other)) | (marks.counts(self) & marks.of(other))


def _either(marks: Dependence, self: Any, other: Any) -> torch.Tensor | None:
    if not all(isinstance(one, torch.Tensor) and one.dtype is torch.bool for one in (self, other)):
        return None
    of_self, of_other = marks.of(self), marks.of(other)
    return (of_self & (~other | of_other)) | (of_other & (~self | of_self))


def _where(marks: Dependence, condition: torch.Tensor, self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return torch.where(condition, marks.of(self), marks.of(other)) | marks.of(condition)


def _masked_fill(marks: Dependence, self: torch.Tensor, mask: torch.Tensor, value: Any) -> torch.Tensor:
    of_value = marks.of(value) if isinstance(value, torch.Tensor) else torch.zeros_like(mask)
    return torch.where(mask, of_value, marks.of(self)) | marks.of(mask)


def _matmul(marks: Dependence, self: torch.Tensor, mat2: torch.Tensor, **_: Any) -> torch.Tensor:
    pairs = ((marks.of(self), marks.counts(mat2)), (marks.counts(self), marks.of(mat2)))
    return functools.reduce(torch.logical_or, ((left.float() @ right.float()) > 0 for left, right in pairs))


def _addmm(marks: Dependence, self: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor, **_: Any) -> torch.Tensor:
    return _matmul(marks, mat1, mat2) | marks.of(self)


def _index_add(
    marks: Dependence, self: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, **_: Any
) -> torch.Tensor:
    into = torch.zeros(self.shape, device=self.device).index_add(dim, index, marks.of(source).float())
    moved = (marks.of(index).reshape(-1, 1) & marks.counts(source).movedim(dim, 0).reshape(index.numel(), -1)).any()
    return marks.of(self) | (into > 0) | moved


def _scatter(
    marks: Dependence, self: torch.Tensor, dim: int, index: torch.Tensor, reduce: Any = None, **source: Any
) -> torch.Tensor | None:
    beside = [i for i in range(self.dim()) if i != dim % self.dim()]
    if reduce is not None or not self.dim() or any(self.shape[i] != index.shape[i] for i in beside):
        return None
    written = torch.zeros_like(self, dtype=torch.bool).scatter(dim, index, True)
    into = (marks.of(self) & ~written) | marks.of(index).any(dim, keepdim=True)
    (source,) = source.values()
    return into if not isinstance(source, torch.Tensor) else into | _added(marks, self, dim, index, source)


def _added(marks: Dependence, self: torch.Tensor, dim: int, index: torch.Tensor, src: torch.Tensor) -> torch.Tensor:
    of_source = marks.of(src)[tuple(map(slice, index.shape))]
    return torch.zeros(self.shape, device=self.device).scatter_add(dim, index, of_source.float()) > 0


def _scatter_add(
    marks: Dependence, self: torch.Tensor, dim: int, index: torch.Tensor, src: torch.Tensor
) -> torch.Tensor:
    moved = (marks.of(index) & marks.counts(src)[tuple(map(slice, index.shape))]).any()
    return marks.of(self) | _added(marks, self, dim, index, src) | moved


def _gather(marks: Dependence, self: torch.Tensor, dim: int, index: torch.Tensor, **_: Any) -> torch.Tensor:
    return marks.of(self).gather(dim, index) | marks.of(index)


RULES: dict[str, Callable[..., torch.Tensor | None]] = {
    "mul": _product,
    "bitwise_and": _product,
    "logical_and": _product,
    "bitwise_or": _either,
    "logical_or": _either,
    "where": _where,
    "masked_fill": _masked_fill,
    "mm": _matmul,
    "bmm": _matmul,
    "addmm": _addmm,
    "index_add": _index_add,
    "scatter": _scatter,
    "scatter_add": _scatter_add,
    "gather": _gather,
}
