"""Storage of values: who allocates it, who reads it last; and functionalisation of writes to temporaries.

Composite operators of torch write over their own temporaries (on CPUs `rms_norm` adds its epsilon in place). Undoing
these writes in the graph saves tracing it once more with torch's functionalisation, which all other writes need.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import fx

from dta_compile.passes.graphs.nodes import call, is_item
from dta_compile.passes.graphs.operators import FUNCTIONAL_VARIANTS, MAYBE_COPIES, UNDECLARED_VIEWS
from dta_compile.passes.program import has_tensor, writes_in_place
from dta_compile.passes.symbols import expression
from dta_compile.torch_compat.operators import OpOverload

Storage = tuple[fx.Node | str, int]  # the node that allocates it (or the name of an input's), position of the result


def same_memory_format(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two values have the same dtype, sizes and strides."""
    if one.dtype != other.dtype or one.dim() != other.dim():
        return False
    if one is other:
        return True
    sizes = zip((*one.shape, *one.stride()), (*other.shape, *other.stride()), strict=True)
    return all(expression(a) == expression(b) for a, b in sizes)


def view_source(node: fx.Node) -> fx.Node | None:
    """Return the argument whose storage a node's result is in (of a view, an item of one, an in-place operator)."""
    if is_item(node):
        return view_source(node.args[0])
    if not isinstance(node.target, OpOverload):
        return None
    position = _viewed_argument(node.target)
    return None if position is None else node.args[position]


@functools.cache
def _viewed_argument(operator: OpOverload) -> int | None:
    """Return the position of the argument that an operator's result aliases; cached, since asking schemas is slow."""
    if operator in UNDECLARED_VIEWS:
        return 0
    schema = operator._schema
    if not schema.returns or schema.returns[0].alias_info is None:
        return None
    return next(i for i, formal in enumerate(schema.arguments) if formal.alias_info is not None)


def owner(node: fx.Node) -> fx.Node:
    """Return the node that allocated the storage of a value: an operator, an item of its results, or a placeholder."""
    while (source := view_source(node)) is not None:
        node = source
    return node


def storages(node: fx.Node) -> list[Storage]:
    """Return the storages of a node's result: several if it is a tuple, or if it may be a view or a copy."""
    if not has_tensor(node):
        return []
    copies: list[Storage] = []
    while (source := view_source(node)) is not None:
        if node.target in MAYBE_COPIES:
            copies.append((node, 0))
        node = source
    if "memory" in node.meta:
        return [(node.meta["memory"][0], 0), *copies]
    if is_item(node):
        return [(node.args[0], node.args[1]), *copies]
    value = node.meta["val"]
    return [*((node, i) for i in range(len(value) if isinstance(value, (tuple, list)) else 1)), *copies]


def last_uses(nodes: Iterable[fx.Node]) -> dict[Storage, fx.Node]:
    """By storage, return the last of some nodes, in execution order, that allocates, reads or writes it."""
    last_use: dict[Storage, fx.Node] = {}
    for node in nodes:
        for value in (node, *node.all_input_nodes):
            last_use |= dict.fromkeys(storages(value), node)
    return last_use


def write_to_new_values(graph: fx.Graph) -> bool:
    """Functionalise writes to temporaries that nothing else reads; return False if other writes are left."""
    return all(_replaced(node) for node in list(graph.nodes) if writes_in_place(node))


def _replaced(node: fx.Node) -> bool:
    functional, written = FUNCTIONAL_VARIANTS.get(node.target), node.args[0]
    is_own = written.op == "call_function" and view_source(written) is None and set(written.users) == {node}
    if functional is None or node.kwargs or not is_own:
        return False
    with node.graph.inserting_before(node):
        new = call(node.graph, functional, *node.args)
    if not same_memory_format(new.meta["val"], node.meta["val"]):  # wider numbers were added, say
        node.graph.erase_node(new)
        return False
    new.meta = {**node.meta, "val": new.meta["val"]}
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
    return True
