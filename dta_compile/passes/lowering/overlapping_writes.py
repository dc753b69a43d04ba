"""Refusal of writes in place from an overlapping part of the same tensor, as `x[:, 1:] = x[:, :-1]`.

Eager's result depends on the order in which the device writes; a functional trace reads all of the source first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from dta_compile.errors import RefusalError
from dta_compile.passes.graphs.source_lines import where
from dta_compile.passes.program import all_nodes, memory, name_of, written_by
from dta_compile.passes.symbols import hint
from dta_compile.torch_compat.autograd import is_functorch_wrapped_tensor

COPIES = ("setitem", "copy_")


def refuse_overlapping_writes(captured: fx.GraphModule) -> None:
    """Raise RefusalError if an elementwise write changes what it reads elsewhere, at the sizes of the traced call."""
    for node in all_nodes(captured):
        places = [memory(arg) for arg in node.all_input_nodes]
        if len(set(places)) == len(places):  # as for nearly all: no two views of one tensor
            continue
        for target in written_by(node)[:1]:
            sources = [arg for arg in node.args[1:] if isinstance(arg, fx.Node) and memory(arg) == memory(target)]
            if any(_overlap(node, target, source) for source in sources):
                raise RefusalError(
                    "a tensor is written from an overlapping part of itself, which torch leaves undefined",
                    where=where(node),
                    expected="a source that the write does not change",
                    got=f"{name_of(node)} with two views of one tensor",
                    hint="clone the source first: x[:, 1:] = x[:, :-1].clone()",
                )


def _overlap(node: fx.Node, target: fx.Node, source: fx.Node) -> bool:
    """Return whether a write changes elements of `target` that it reads, through `source`, for other elements."""
    written, read = _geometry(target), _geometry(source)
    if written is None or read is None:
        return False
    if name_of(node) == "setitem":
        if source is not node.args[2] or (index := _numbers(node.args[1])) is None:
            return False
        written = written[index]
    try:
        read = read.expand(written.shape)
    except RuntimeError:  # not elementwise
        return False
    for dim in range(written.dim()):  # where no view reaches the next entry, the first one tells of all
        first = [view.narrow(dim, 0, min(view.shape[dim], 1)) for view in (written, read)]
        span = max(map(_length, first)) - min(view.storage_offset() for view in first)
        if written.stride(dim) == read.stride(dim) >= span:
            written, read = first
    views = [(view.shape, view.stride(), view.storage_offset()) for view in (written, read)]
    if views[0] == views[1] or not written.numel():
        return False
    places = torch.arange(max(map(_length, (written, read))))
    to, of = (places.as_strided(*view) for view in views)
    changed = torch.zeros_like(places, dtype=torch.bool)
    changed[to[to != of] if name_of(node) in COPIES else to] = True  # a copy onto itself changes nothing
    return bool(changed[of[to != of]].any())


def _geometry(node: fx.Node) -> torch.Tensor | None:
    """Return a tensor without data that has the sizes, strides and offset of a value; None if they are no numbers."""
    value = node.meta.get("example_value")
    if not isinstance(value, torch.Tensor) or is_functorch_wrapped_tensor(value) or value.layout is not torch.strided:
        return None
    size, stride, offset = [*map(hint, value.shape)], [*map(hint, value.stride())], hint(value.storage_offset())
    if None in (*size, *stride, offset):
        return None
    return torch.empty(_length(value), device="meta").as_strided(size, stride, offset)


def _numbers(index: Any) -> Any:
    """Return an index that makes a view, with its sizes as numbers; None for others, as tensors and lists."""
    numbers: list[Any] = []

    def number(node: fx.Node) -> Any:
        numbers.append(hint(node.meta.get("example_value")))
        return numbers[-1]

    index = fx.map_arg(index, number)
    parts = index if isinstance(index, tuple) else (index,)
    is_view = all(part is None or part is ... or type(part) in (int, slice) for part in parts)
    return index if is_view and all(isinstance(value, int) for value in numbers) else None


def _length(value: torch.Tensor) -> int:
    """Return the number of elements of a view's memory up to its last element; without any, as for one."""
    steps = zip(map(hint, value.shape), map(hint, value.stride()), strict=True)
    return int(hint(value.storage_offset())) + 1 + sum(max(size - 1, 0) * step for size, step in steps)
