"""accumulate: parameter gradients are added into accumulators inside the backward graph, without full-size temporaries.

A matrix product that ends in a gradient becomes `addmm_` into the accumulator, an embedding's gradient an `index_add_`
of the chunk's rows; anything else is added. The parts of a sum are added one by one.
"""

from __future__ import annotations

import torch
from torch import fx

from dta_compile.passes.attention_op import statistics_dtype
from dta_compile.passes.nodes import call
from dta_compile.passes.program import Program, output_node

aten = torch.ops.aten
TRANSPOSITIONS = (aten.t.default, aten.transpose.int, aten.permute.default)
IN_PLACE = (aten.addmm_.default, aten.add_.Tensor, aten.index_add_.default)


def accumulate(program: Program) -> None:
    """Rewrite `program.joint.backward`: it takes one accumulator per gradient as its last inputs and returns nothing.

    Accumulators have the shape of the parameter and `statistics_dtype` of its dtype: sums over chunks in float32.
    """
    module = program.joint.backward
    if module is None:
        return
    graph, output = module.graph, output_node(module.graph)
    grads = list(output.args[0])
    first_call = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first_call):
        accumulators = [graph.placeholder(f"accumulator_{i}") for i in range(len(grads))]
    output.args = ((),)
    for grad, accumulator in zip(grads, accumulators, strict=True):
        value = grad.meta["val"]
        accumulator.meta["val"] = value.new_empty(value.shape, dtype=statistics_dtype(value.dtype))
        for part in _summands(grad):
            with graph.inserting_before(part.next):
                _add(graph, accumulator, part)
    graph.eliminate_dead_code(is_impure_node=_acts)
    module.recompile()


def _acts(node: fx.Node) -> bool:
    """What works in place: accumulations, and attention, which adds KV gradients to the path."""
    return node.op in ("placeholder", "output", "call_method") or node.target in IN_PLACE


def _summands(grad: fx.Node) -> list[fx.Node]:
    """A gradient as a sum: a weight that is used twice (a tied embedding) gets each part as soon as there is one."""
    is_sum = grad.target is aten.add.Tensor and not grad.kwargs
    if not is_sum or any(part.meta["val"].shape != grad.meta["val"].shape for part in grad.all_input_nodes):
        return [grad]
    return [summand for part in grad.args for summand in _summands(part)]


def _add(graph: fx.Graph, accumulator: fx.Node, grad: fx.Node) -> None:
    source, transposed = _untranspose(grad)
    dtype = grad.meta["val"].dtype
    is_wide = statistics_dtype(dtype) == dtype
    if source.target is aten.mm.default and is_wide and source.meta["val"].dtype == dtype:
        target = call(graph, aten.t.default, accumulator) if transposed else accumulator
        graph.call_function(aten.addmm_.default, (target, *source.args))
    elif grad.target is aten.embedding_dense_backward.default and not grad.args[4]:
        _add_rows(graph, accumulator, grad, statistics_dtype(dtype))
    else:
        graph.call_function(aten.add_.Tensor, (accumulator, grad))


def _untranspose(node: fx.Node) -> tuple[fx.Node, bool]:
    transposed = False
    while node.target in TRANSPOSITIONS and node.args[0].meta["val"].dim() == 2:
        node, transposed = node.args[0], transposed != _swaps(node)
    return node, transposed


def _swaps(node: fx.Node) -> bool:
    """Whether a transposition of a matrix is one: it may name the same dimension twice, or leave the order."""
    if node.target is aten.t.default:
        return True
    first, second = node.args[1:] if node.target is aten.transpose.int else (0, node.args[1][0])
    return bool((first - second) % 2)


def _add_rows(graph: fx.Graph, accumulator: fx.Node, grad: fx.Node, dtype: torch.dtype) -> None:
    """The gradient of `embedding(weight, index)`: add each token's gradient to its row (not to the padding row)."""
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
