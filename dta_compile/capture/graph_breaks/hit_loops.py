"""Trace loops over the indices of the experts hit by at least one token as loops over all experts.

    for e in one_hot(chosen, E).sum((0, 1)).nonzero():
        rows, k = torch.where(chosen == e)
        y.index_add_(0, rows, self.experts[e](x[rows]))

Dynamo would end the graph there, since how often the loop runs depends on data. The graph runs its body for every
index, as a branch that the model skips if the expert is not hit (`selected_branches`). At the end of the branch it is
proven that it does nothing if it selects no rows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from dta_compile.capture.graph_breaks.selections import NUMBER, number_of, numbers_hit
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
    """Iterator over the indices of all experts; `selection_of` names the tokens that have chosen an expert."""

    _nonvar_fields = {"selection_of", *ListIteratorVariable._nonvar_fields}  # noqa: RUF012

    def __init__(self, items: list[Any], selection_of: Callable[[int], Hashable], **arguments: Any) -> None:
        super().__init__(items, **arguments)
        self.selection_of = selection_of


def iterator(translator: Any, value: Any, as_integers: bool = False) -> HitIterator | None:
    """Return an iterator over all indices for a tensor of those that are hit, as rows of it or integers, or None."""
    hit = numbers_hit(value.as_proxy().node)
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


def make_index_constant(translator: Any, _: Any) -> None:
    """Replace the index of a subscript by a constant if its value is known."""
    index = translator.stack[-1]
    if isinstance(index, TupleVariable) and any(known_number(part) is not None for part in index.items):
        translator.stack[-1] = TupleVariable([_scalar(part) or part for part in index.items])
    if (number := known_number(index)) is None:
        return
    container = translator.stack[-2]
    if isinstance(container, TensorVariable) and _scalar(index) is None:  # indexing by `[1]` copies a row
        narrow = [ConstantVariable.create(argument) for argument in (0, number, 1)]
        row = container.call_method(translator, "narrow", narrow, {}).call_method(translator, "clone", [], {})
        translator.stack[-2:] = row, SliceVariable([ConstantVariable.create(None)] * 3, translator)
    elif isinstance(container, TensorVariable) or isinstance(getattr(container, "value", None), LISTS):
        translator.stack[-1] = ConstantVariable.create(number)


def known_number(value: Any) -> int | None:
    """Return the value of a tensor that is an index of such a loop; None for others."""
    return number_of(value.as_proxy().node) if isinstance(value, TensorVariable) else None


def _scalar(value: Any) -> VariableTracker | None:
    """Return the value of a known tensor without dimensions, which indexes as an integer does; None for others."""
    number = known_number(value)
    is_scalar = number is not None and value.as_proxy().node.meta["example_value"].dim() == 0
    return ConstantVariable.create(number) if is_scalar else None
