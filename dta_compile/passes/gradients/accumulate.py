"""accumulate: add parameter gradients into accumulators inside the backward graphs, without full-size temporaries.

A matrix product whose result is a gradient becomes `addmm_` into the accumulator, and an embedding's gradient an
`index_add_` of the chunk's rows. Products of experts are added only to experts that were chosen, and an LM head adds
block by block. Any other gradient is added by `add_`. The summands of a gradient are added one by one.

`emit` lets the graphs take sums that begin with their first summand (`with_sums`), see `ops.products`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from dta_compile.ops.dtypes import statistics_dtype
from dta_compile.ops.experts.operators import EXPERT_PRODUCTS, EXPERT_PRODUCTS_
from dta_compile.ops.lm_head.operators import IN_PLACE, Wanted
from dta_compile.ops.products import ADD_PRODUCT, add_product_to, add_to, tensor_of
from dta_compile.passes.contracts import contract
from dta_compile.passes.graphs.nodes import call, erase_unused, is_item, swaps
from dta_compile.passes.graphs.operators import TRANSPOSITIONS
from dta_compile.passes.program import Program, output_node, writes_in_place

aten = torch.ops.aten
PRODUCTS = (aten.addmm_.default, ADD_PRODUCT)


@contract(rewrites=["stages"])
def accumulate(program: Program) -> None:
    """Rewrite the backward graphs of `program.stages` to take an accumulator per parameter gradient as their last
    inputs, and to return the other gradients.

    Accumulators have the shape of the parameter and `statistics_dtype` of its dtype: sums over chunks in float32.
    """
    for kind in program.stages.kinds:
        if kind.backward is not None:
            _accumulate(kind.backward, [i in kind.parameters for i in kind.gradients])


def _accumulate(module: fx.GraphModule, are_parameters: Sequence[bool]) -> None:
    graph, output = module.graph, output_node(module.graph)
    gradients = list(zip(output.args[0], are_parameters, strict=True))
    added = [gradient for gradient, is_parameter in gradients if is_parameter]
    first_call = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first_call):
        accumulators = [graph.placeholder(f"accumulator_{i}") for i in range(len(added))]
    output.args = (tuple(gradient for gradient, is_parameter in gradients if not is_parameter),)
    parts = []
    for gradient, accumulator in zip(added, accumulators, strict=True):
        value = gradient.meta["val"]
        accumulator.meta["val"] = value.new_empty(value.shape, dtype=statistics_dtype(value.dtype))
        accumulator.meta["gradient"] = value.dtype
        parts += [(part, accumulator) for part in _summands(gradient)]
    in_heads = _add_in_heads(graph, parts)
    for part, accumulator in parts:
        if part not in in_heads:
            # A gradient may be a placeholder that a stage passes on; accumulators come after all of these.
            with graph.inserting_before(first_call if part.op == "placeholder" else part.next):
                _add(graph, accumulator, part)
    erase_unused(graph, _has_side_effects)
    module.recompile()


def _has_side_effects(node: fx.Node) -> bool:
    """Return whether a node has side effects: accumulations, and mixers, which add state gradients to the path."""
    return node.op in ("placeholder", "output", "call_method") or writes_in_place(node)


def _summands(grad: fx.Node) -> list[fx.Node]:
    """Return the summands of a gradient: one per use of a weight that is used twice (a tied embedding)."""
    is_sum = grad.target is aten.add.Tensor and not grad.kwargs
    if not is_sum or any(part.meta["val"].shape != grad.meta["val"].shape for part in grad.all_input_nodes):
        return [grad]
    return [summand for part in grad.args for summand in _summands(part)]


def _add_in_heads(graph: fx.Graph, parts: list[tuple[fx.Node, fx.Node]]) -> set[fx.Node]:
    """Let LM-head operators add their gradients to accumulators themselves; return the gradients that they add."""
    heads: dict[fx.Node, list[tuple[int, tuple[fx.Node, fx.Node]]]] = {}
    for part, accumulator in parts:
        source, _ = _untranspose(part)
        if is_item(source) and source.args[0].target in IN_PLACE:
            heads.setdefault(source.args[0], []).append((source.args[1], (part, accumulator)))
    added: set[fx.Node] = set()
    for head, results in heads.items():
        items = dict(results)
        # Not if a result goes to several parameters, or to none, as with a computed weight.
        if sorted(i for i, _ in results) == [i for i in (1, 2) if IN_PLACE[head.target][1].of(head.args).wanted[i]]:
            _add_in_head(graph, head, items)
            added |= {part for part, _ in items.values()}
    return added


def _add_in_head(graph: fx.Graph, head: fx.Node, items: dict[int, tuple[fx.Node, fx.Node]]) -> None:
    in_place, cls = IN_PLACE[head.target]
    arguments, targets = cls.of(head.args), dict[int, fx.Node]()
    with graph.inserting_before(head):
        for i, (part, accumulator) in items.items():
            transposed = _untranspose(part)[1]
            targets[i] = call(graph, aten.t.default, accumulator) if transposed else accumulator
        wanted = Wanted(arguments.wanted.hidden, targets.get(1), targets.get(2))
        of_hidden = graph.call_function(in_place, (*arguments.operands, *wanted))
    of_hidden.meta = {**head.meta, "val": head.meta["val"][0]}
    for item in list(head.users):
        if item.args[1] == 0:
            item.replace_all_uses_with(of_hidden)


def _add(graph: fx.Graph, accumulator: fx.Node, grad: fx.Node) -> None:
    wide = accumulator.meta["val"].dtype
    source, transposed = _untranspose(grad)
    if source.target is aten._to_copy.default and source.meta["val"].device == source.args[0].meta["val"].device:
        source, again = _untranspose(source.args[0])  # before a cast of autocast
        transposed = transposed != again
    dtype = source.meta["val"].dtype
    if source.target is aten.mm.default and statistics_dtype(dtype) == wide:
        target = call(graph, aten.t.default, accumulator) if transposed else accumulator
        graph.call_function(aten.addmm_.default if dtype == wide else ADD_PRODUCT, (target, *source.args))
    elif source.target is EXPERT_PRODUCTS and statistics_dtype(dtype) == wide:
        graph.call_function(EXPERT_PRODUCTS_, (accumulator, *source.args[:3]))
    elif grad.target is aten.squeeze.dim and grad.args[1] == 0 and _is_of_one_expert(grad.args[0], wide):
        target = call(graph, aten.unsqueeze.default, accumulator, 0)
        graph.call_function(EXPERT_PRODUCTS_, (target, *grad.args[0].args[:3]))
    elif grad.target is aten.embedding_dense_backward.default and not grad.args[4]:
        _add_rows(graph, accumulator, grad, wide)
    else:
        graph.call_function(aten.add_.Tensor, (accumulator, grad))


def _is_of_one_expert(grad: fx.Node, wide: torch.dtype) -> bool:
    value = grad.meta["val"]
    return grad.target is EXPERT_PRODUCTS and value.shape[0] == 1 and statistics_dtype(value.dtype) == wide


def _untranspose(node: fx.Node) -> tuple[fx.Node, bool]:
    transposed = False
    while node.target in TRANSPOSITIONS and node.args[0].meta["val"].dim() == 2:
        node, transposed = node.args[0], transposed != swaps(node)
    return node, transposed


def _add_rows(graph: fx.Graph, accumulator: fx.Node, grad: fx.Node, dtype: torch.dtype) -> None:
    """Add an embedding's gradient: that of each token to the row of its index, except for the padding row."""
    rows, index, _, padding = grad.args[:4]
    width = int(grad.meta["val"].shape[1])
    flat_index = call(graph, aten.reshape.default, index, [-1])
    flat_rows = call(graph, aten.reshape.default, rows, [-1, width])
    if padding is not None and padding >= 0:
        is_padding = call(graph, aten.eq.Scalar, flat_index, padding)
        column = call(graph, aten.unsqueeze.default, is_padding, 1)
        flat_rows = call(graph, aten.masked_fill.Scalar, flat_rows, column, 0)
    if rows.meta["val"].dtype != dtype:
        flat_rows = call(graph, aten._to_copy.default, flat_rows, dtype=dtype)
    graph.call_function(aten.index_add_.default, (accumulator, 0, flat_index, flat_rows))


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
    """Return whether a node is an accumulator of a parameter gradient."""
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
