"""Trace a loop over only the experts that got tokens as a loop over all experts.

    for e in one_hot(chosen, E).sum((0, 1)).nonzero():
        rows, k = torch.where(chosen == e)
        y.index_add_(0, rows, self.experts[e](x[rows]))

Dynamo would end the graph there, since how often the loop runs depends on data. The graph runs its body for every
index, as a branch that the model skips if the expert got no token (`selected_branches`). Where the branch ends, it is
proven that its body changes nothing when it selects no rows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from dta_compile.capture.graph_breaks.selections import NUMBER, hit_indices, number_of
from dta_compile.torch_compat.dynamo import (
    ConstantVariable,
    ListIteratorVariable,
    SliceVariable,
    TensorVariable,
    TupleVariable,
    ValueMutationNew,
    VariableTracker,
    wrap_fx_proxy,
)

LISTS = (torch.nn.ModuleList, torch.nn.ParameterList, torch.nn.Sequential)


class HitIterator(ListIteratorVariable):
    """Iterator over the indices of all experts; `selection_of` maps one to a key for its tokens."""

    _nonvar_fields = {"selection_of", *ListIteratorVariable._nonvar_fields}  # noqa: RUF012

    def __init__(self, items: list[Any], selection_of: Callable[[int], Hashable], **arguments: Any) -> None:
        super().__init__(items, **arguments)
        self.selection_of = selection_of


def hit_iterator(translator: Any, value: Any, as_integers: bool = False) -> HitIterator | None:
    """Return an iterator over all indices for a tensor of the indices that are hit; None for another tensor.

    Indices are tensors of the shape of its rows, or Python integers.
    """
    hit = hit_indices(value.as_proxy().node)
    if hit is None:
        return None
    selection_of, count = hit
    example, items = value.as_proxy().node.meta["example_value"], list[Any]()
    for number in range(count):
        if as_integers:
            items.append(ConstantVariable.create(number))
            continue
        options = {"dtype": example.dtype, "device": example.device}
        arguments = ([1] * (example.dim() - 1), number)
        proxy = translator.output.create_proxy("call_function", torch.full, arguments, options)
        proxy.node.meta[NUMBER] = number
        items.append(wrap_fx_proxy(translator, proxy))
    return HitIterator(items, selection_of, mutation_type=ValueMutationNew())


def specialise_subscript(translator: Any, _: Any) -> None:
    """Replace a subscript whose index is known by one with a constant index, or by a copy of the row."""
    index = translator.stack[-1]
    if isinstance(index, TupleVariable) and any(known_index(part) is not None for part in index.items):
        translator.stack[-1] = TupleVariable([_scalar(part) or part for part in index.items])
    if (number := known_index(index)) is None:
        return
    container = translator.stack[-2]
    if isinstance(container, TensorVariable) and _scalar(index) is None:  # an index of shape [1] copies
        narrow = [ConstantVariable.create(argument) for argument in (0, number, 1)]
        row = container.call_method(translator, "narrow", narrow, {}).call_method(translator, "clone", [], {})
        translator.stack[-2:] = row, SliceVariable([ConstantVariable.create(None)] * 3, translator)
    elif isinstance(container, TensorVariable) or isinstance(getattr(container, "value", None), LISTS):
        translator.stack[-1] = ConstantVariable.create(number)


def known_index(value: Any) -> int | None:
    """Return the index that a tensor of a loop over experts stands for; None for another value."""
    return number_of(value.as_proxy().node) if isinstance(value, TensorVariable) else None


def _scalar(value: Any) -> VariableTracker | None:
    """Return the value of a known tensor without dimensions, which indexes as an integer does; None for others."""
    number = known_index(value)
    is_scalar = number is not None and value.as_proxy().node.meta["example_value"].dim() == 0
    return ConstantVariable.create(number) if is_scalar else None
