"""Let backward graphs take sums that begin with their first summand, see `ops.products`."""

from __future__ import annotations

import torch
from torch import fx

from dta_compile.ops.products import ADD_PRODUCT, add_product_to, add_to, tensor_of

aten = torch.ops.aten
PRODUCTS = (aten.addmm_.default, ADD_PRODUCT)


def with_sums(module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a backward graph whose accumulators may be sums."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for accumulator in list(graph.find_nodes(op="placeholder")):
        if is_accumulator(accumulator):
            for user in list(accumulator.users):
                _rewrite(graph, accumulator, user)
    return fx.GraphModule(module, graph)


def is_accumulator(node: fx.Node) -> bool:
    """Return whether a node is an accumulator of a parameter gradient; see the pass `accumulate`."""
    return "gradient" in node.meta


def adds_first(accumulator: fx.Node, user: fx.Node) -> bool:
    """Return whether a node only adds something to an accumulator that may become the sum."""
    if user.target in (*PRODUCTS, aten.add_.Tensor):
        return user.args[0] is accumulator and accumulator not in user.args[1:] and not user.users and not user.kwargs
    is_transposed = user.target is aten.t.default and bool(user.users)
    return is_transposed and all(node.target in PRODUCTS and adds_first(user, node) for node in user.users)


def _rewrite(graph: fx.Graph, accumulator: fx.Node, user: fx.Node) -> None:
    if not adds_first(accumulator, user):
        with graph.inserting_before(user):
            user.replace_input_with(accumulator, graph.call_function(tensor_of, (accumulator,)))
    elif user.target is aten.add_.Tensor:
        user.target = add_to
    elif user.target in PRODUCTS:
        user.target = add_product_to
    else:
        for node in list(user.users):
            node.target, node.args = add_product_to, (accumulator, *node.args[1:], True)
        graph.erase_node(user)
