"""Name the entries that a node of Dynamo's graph selects, the same for nodes that select the same entries."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import fx

from dta_compile.passes import program
from dta_compile.passes.program import is_boolean, is_mutable, memory, name_of
from dta_compile.torch_compat.operators import HigherOrderOperator, OpOverloadPacket

# What has entries exactly where its first argument has some.
AS_MANY = {"squeeze", "unsqueeze", "flatten", "view", "reshape", "long", "to", "contiguous", "unbind", "clone", "cpu"}
SHAPES = {"squeeze", "unsqueeze", "flatten", "view", "reshape", "contiguous", "clone"}  # that change no entry
COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    name: getattr(operator, name) for name in ("gt", "ge", "eq", "ne", "lt", "le")
}
COMPARISONS |= {
    long: COMPARISONS[name]
    for name, long in (("gt", "greater"), ("ge", "greater_equal"), ("ne", "not_equal"), ("lt", "less"))
}
NUMBER = "dta_number"  # in the meta of a node, a tensor of one entry: the integer that it is
WHOLE, INTEGERS = slice(None), (torch.int64, torch.int32)


def emptiness(node: fx.Node) -> tuple[Hashable, bool] | None:
    """Return the selection that a condition asks about, and whether the condition is true if it is not empty."""
    name = name_of(node)
    if name == "any" and len(node.args) == 1 and not node.kwargs:
        return _found(mask_of(node.args[0]), True)
    if name in COMPARISONS and len(node.args) == 2 and isinstance(node.args[0], fx.Node):
        bound = node.args[1]
        if type(bound) is not int:
            return None
        none, one, many = (COMPARISONS[name](count, bound) for count in (0, 1, 1 << 40))
        return _found(counted(node.args[0]), one) if none != one == many else None
    return _found(counted(node), True)


def _found(selection: Hashable, is_true: bool) -> tuple[Hashable, bool] | None:
    return None if selection is None else (selection, is_true)


def counted(node: Any) -> Hashable:
    """Return the selection that a number counts the entries of, or a multiple; None for other numbers."""
    name, source = name_of(node), node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return None
    if name == "sum" and len(node.args) == 1 and not node.kwargs and is_boolean(source):
        return mask_of(source)
    if name == "count_nonzero" and len(node.args) == 1 and is_boolean(source):
        return mask_of(source)
    if name == "numel" or (name in ("size", "sym_size") and node.args[1:] == (0,)):
        return selection_of(source, has_all=True)
    if name in ("item", "int", "to", "cpu"):
        return counted(source)
    if name == "getitem" and type(node.args[1]) is int:
        if name_of(source) in ("size", "shape") and node.args[1] == 0:
            return selection_of(source.args[0], has_all=True)
        while name_of(source) in ("cpu", "to") or (name_of(source) == "getitem" and isinstance(source.args[1], slice)):
            if is_written(source) or (name_of(source) == "getitem" and not _is_from_first(source.args[1])):
                return None
            source = source.args[0]
        if _counts_all(source):
            return _equal(source.args[0], node.args[1])
    return None


def _counts_all(node: fx.Node) -> bool:
    """Return whether a node counts how often each number occurs, each time as one."""
    weights = node.kwargs.get("weights", node.args[1] if len(node.args) > 1 else None)
    return name_of(node) == "bincount" and weights is None and not is_written(node)


def _is_from_first(part: slice) -> bool:
    return part.start in (0, None) and part.step in (1, None)


def selection_of(node: fx.Node, has_all: bool = False) -> Hashable:
    """Return the selection without which an index has no entries; None if there is none.

    With `has_all` also the other way around: the index has entries if the selection has any, unlike `rows[2:]`.
    """
    name, source = name_of(node), node.args[0] if node.args else None
    if is_boolean(node):
        return mask_of(node)
    if not isinstance(source, fx.Node):
        return None
    if name in ("where", "nonzero", "argwhere") and len(node.args) == 1:
        return mask_of(source)
    if name == "getitem":
        index = node.args[1]
        index = index if isinstance(index, tuple) else (index,)
        if has_all and not all(map(_keeps_some, index)):
            return None
        parts = [part for part in index if isinstance(part, fx.Node)]
        chosen = next((own for part in parts if (own := selection_of(part, has_all)) is not None), None)
        return selection_of(source, has_all) if chosen is None and not parts else chosen
    is_as_many = name in AS_MANY and not is_boolean(source)  # a mask as numbers picks no rows
    return selection_of(source, has_all) if is_as_many else None


def _keeps_some(part: Any) -> bool:
    """Return whether a part of an index picks something of every axis that has entries."""
    if not isinstance(part, slice):
        return True
    return part.start in (None, 0) and (part.stop is None or (type(part.stop) is int and part.stop > 0))


def mask_of(node: fx.Node) -> Hashable:
    """Return a name for the entries where a mask is true, the same for masks that are empty if this one is.

    The entries of `chosen == 3` are those that `bincount(chosen.flatten())[3]` counts, and `one_hot(chosen, E)[..., 3]`
    has. None if anything writes to the mask, or to what it is computed from: then it may be another one later.
    """
    source = node.args[0] if node.args else None
    if isinstance(source, fx.Node) and (_is_reshaped(node) or (name_of(node) == "any" and is_boolean(source))):
        return None if is_written(node) else mask_of(source)
    return _mask(node)


def _mask(node: fx.Node) -> Hashable:
    """Return a name of a mask, the same for masks that are true at the same entries, if their shapes are the same."""
    if is_written(node):
        return None
    source = node.args[0] if node.args else None
    if isinstance(source, fx.Node) and _is_reshaped(node):
        return _mask(source)
    if isinstance(source, fx.Node) and (chosen := _chosen(node)) is not None:
        return _row(source, *chosen)
    if not is_boolean(node) or node.op not in ("call_function", "call_method") or node.kwargs:
        return node
    values = [arg for arg in node.args if isinstance(arg, fx.Node)]
    if any(is_written(value) for value in values):
        return None
    if name_of(node) == "eq" and len(node.args) == 2 and (number := number_of(node.args[1])) is not None:
        return _equal(values[0], number)
    parts = [_mask(arg) if isinstance(arg, fx.Node) else repr(arg) for arg in node.args]
    return None if None in parts else (name_of(node), str(list(map(_shape, values))), *parts)


def number_of(value: Any) -> int | None:
    """Return an integer, also of a tensor that holds one by `NUMBER`; None for other values."""
    if not isinstance(value, fx.Node):
        return value if type(value) is int else None
    kept, source = value.meta.get("example_value"), value.args[0] if value.args else None
    if not isinstance(kept, torch.Tensor) or kept.dtype not in INTEGERS or not _is_one(kept.shape):
        return None
    is_same = name_of(value) in {"getitem", "detach", *AS_MANY}
    number = value.meta.get(NUMBER, number_of(source) if is_same else None)
    return None if number is None or is_written(value) else int(number)


def known(condition: fx.Node) -> bool | None:
    """Return what a comparison of known numbers says; None for other conditions."""
    numbers = [number for arg in condition.args if (number := number_of(arg)) is not None]
    is_comparison = name_of(condition) in COMPARISONS and any(isinstance(arg, fx.Node) for arg in condition.args)
    return COMPARISONS[name_of(condition)](*numbers) if is_comparison and len(numbers) == 2 else None


def hit_indices(node: fx.Node) -> tuple[Callable[[int], Hashable], int] | None:
    """Return what a list of numbers says is not empty, and a bound of the numbers; None for other values.

    Such a list has the numbers of the experts that any token has chosen, in ascending order, as from
    `one_hot(chosen, E).sum((0, 1)).nonzero()` or `chosen.unique()`. The function returns the selection of a number,
    which is empty if the number is not listed.
    """
    if not _is_one(_shape(node)[1:]):
        return None
    while name_of(node) in AS_MANY - {"unbind"} or (name_of(node) == "getitem" and _is_column(node)):
        if is_written(node):
            return None
        node = node.args[0]
    name, source = name_of(node), node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or is_written(node) or not {*node.kwargs} <= {"as_tuple", "sorted"}:
        return None
    if name == "unique":
        bound, is_usual = places(source), len(node.args) == 1 and node.kwargs.get("sorted") is not False
        return (functools.partial(_equal, source), bound) if bound and is_usual and "dim" not in node.kwargs else None
    if name not in ("where", "nonzero", "argwhere") or len(_shape(source)) != 1 or is_written(source):
        return None
    if name_of(source) in COMPARISONS and type(bound := source.args[1]) is int:
        none, one, many = (COMPARISONS[name_of(source)](count, bound) for count in (0, 1, 1 << 40))
        if none or not one or not many:
            return None
        source = source.args[0]
    return _counts(source)


def _is_column(node: fx.Node) -> bool:
    """Return whether a node picks the first column of a list of indices: of its tuple, or of a matrix."""
    first = 0 if isinstance(node.args[0].meta.get("example_value"), (tuple, list)) else (WHOLE, 0)
    return node.args[1] == first


def _counts(node: Any) -> tuple[Callable[[int], Hashable], int] | None:
    """Return which selection each entry of a vector counts, or whether it is not empty, and a bound of the entries."""
    name, source = name_of(node), node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or is_written(node):
        return None
    if name == "bincount":
        bound = places(source)
        return (functools.partial(_equal, source), bound) if bound and _counts_all(node) else None
    dims = node.kwargs.get("dim", node.args[1] if len(node.args) == 2 else None)
    rank, dims = len(_shape(source)), (dims,) if type(dims) is int else dims
    if name not in ("sum", "any", "count_nonzero") or not dims or len(node.args) > 2 or set(node.kwargs) > {"dim"}:
        return None
    kept = set(range(rank)) - {dim % rank for dim in dims}
    one_hot = _one_hot(source)
    if len(kept) != 1 or not (is_boolean(source) or one_hot):
        return None
    (axis,), size = kept, _shape(source)[min(kept)]
    bound = places(one_hot[0]) if one_hot and one_hot[1] == axis else None
    if type(size) is not int:
        return None
    return lambda number: _row(source, axis, number), size if bound is None else min(size, bound)


def _equal(chosen: fx.Node, number: int) -> Hashable:
    """Return the name of the entries with a number, as `chosen == number` selects."""
    source = entries(chosen)
    return None if is_written(chosen) or is_written(source) else ("eq", source, number)


def _row(mask: fx.Node, axis: int, number: int) -> Hashable:
    """Return the name of the entries of one row of a mask, or of numbers of which those that are not zero count."""
    one_hot = _one_hot(mask)
    if one_hot is not None and one_hot[1] == axis:
        return _equal(one_hot[0], number)
    name = _mask(mask)
    return None if name is None else ("row", str(_shape(mask)), name, axis, number)


def _chosen(node: fx.Node) -> tuple[int, int] | None:
    """Return the axis and the number by which a node picks one row of its argument."""
    name, rank = name_of(node), len(_shape(node.args[0]))
    if name in ("select", "narrow") and not node.kwargs and (number := number_of(node.args[2])) is not None:
        return (node.args[1] % rank, number) if name == "select" or node.args[3] == 1 else None
    if name != "getitem" or not rank:
        return None
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    numbers = [(axis, number) for axis, part in enumerate(index) if (number := number_of(part)) is not None]
    if len(numbers) != 1 or any(part not in (WHOLE, ...) for axis, part in enumerate(index) if axis != numbers[0][0]):
        return None
    ((axis, number),) = numbers
    axis += rank - len(index) if Ellipsis in index[:axis] else 0
    return (axis, number) if number >= 0 else None


def _one_hot(node: fx.Node) -> tuple[fx.Node, int] | None:
    """Return the numbers that `one_hot` was called with, and the axis of its result that counts up to them."""
    name, source = name_of(node), node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or is_written(node):
        return None
    rank = len(_shape(node))
    if name == "one_hot":
        return source, rank - 1
    if name not in ("permute", "transpose", "bool", "int", "long", "contiguous", "detach", "clone") or node.kwargs:
        return None
    of_source = _one_hot(source)
    if of_source is None or name not in ("permute", "transpose"):
        return of_source
    dims = node.args[1] if isinstance(node.args[1], (tuple, list)) else node.args[1:]
    if name == "transpose":
        a, b = (dim % rank for dim in dims)
        dims = [{a: b, b: a}.get(dim, dim) for dim in range(rank)]
    return of_source[0], [dim % rank for dim in dims].index(of_source[1])


def places(node: fx.Node) -> int | None:
    """Return a number that all entries are below, and not negative: they are places along an axis of that size."""
    while name_of(node) in {*AS_MANY, "getitem", "detach"} and isinstance(node.args[0], fx.Node):
        if is_written(node):
            return None
        source = node.args[0]
        if name_of(node) == "getitem" and name_of(source) in ("topk", "sort", "max", "min"):
            if node.args[1] != 1:
                return None
            node = source
            break
        node = source
    if is_written(node):
        return None
    if name_of(node) in ("mod", "remainder") and type(divisor := node.args[1]) is int:
        return divisor if divisor > 0 and node.meta["example_value"].dtype in INTEGERS else None
    place = {"topk": 2, "sort": 1, "max": 1, "min": 1, "argsort": 1, "argmax": 1}.get(name_of(node))
    if place is None:
        return None
    dim = node.kwargs.get("dim", node.args[place] if len(node.args) > place else -1)
    size = _shape(node.args[0])[dim] if type(dim) is int else None
    return size if type(size) is int else None


def _shape(node: fx.Node) -> torch.Size | tuple[()]:
    value = node.meta.get("example_value")
    return value.shape if isinstance(value, torch.Tensor) else ()


def _is_one(shape: Iterable[Any]) -> bool:
    """Return whether a shape is known to have one entry."""
    return all(type(size) is int and size == 1 for size in shape)


def is_written(node: fx.Node) -> bool:
    """Return whether anything writes to the memory of a value."""
    own = memory(node)
    while (base := next((arg for arg in node.all_input_nodes if memory(arg) & own), None)) is not None:
        node = base
    pending, seen = [node], set[fx.Node]()
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            if any(written is None or written is node for user in node.users for written in written_by(user)):
                return True
            pending += [user for user in node.users if memory(user) & own]
    return False


def entries(node: fx.Node) -> fx.Node:
    """Return a value with the same entries in another shape, as far back as it goes."""
    while _is_reshaped(node) and isinstance(node.args[0], fx.Node) and not is_written(node.args[0]):
        node = node.args[0]
    return node


def _is_reshaped(node: fx.Node) -> bool:
    return name_of(node) in SHAPES or (name_of(node) == "getitem" and node.args[1] == WHOLE)


def written_by(node: fx.Node) -> list[fx.Node | None]:
    """Return the values that a node writes to; None if it may be any."""
    target = node.target
    overloads = target.overloads() if isinstance(target, OpOverloadPacket) else ()
    mutates = any(is_mutable(getattr(target, name)) for name in overloads)
    may_write = mutates or name_of(node) in ("batch_norm", "instance_norm")
    is_opaque = node.op == "call_module" or isinstance(target, HigherOrderOperator)
    return [None] if is_opaque or may_write else [*program.written_by(node)]
