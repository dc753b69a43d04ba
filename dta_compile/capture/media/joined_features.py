"""Features of several kinds (images and videos) that a model joins before it puts them at tokens."""

from __future__ import annotations

import operator

import torch
from torch import fx

from dta_compile.passes.program import memory, name_of, writes_of


def over_all_tokens(module: fx.GraphModule) -> None:
    """Rewrite features of several kinds that are joined over the tokens of a mask as values of all tokens, in place.

    `y = x.new_zeros(mask.sum(), D); y[images[mask]] = features` becomes `y = zeros([*mask.shape, D]);
    y[images & mask] = features`, and reads of `y` become those of `y[mask]`.
    """
    graph, order = module.graph, {node: i for i, node in enumerate(module.graph.nodes)}
    zeros = graph.find_nodes(op="call_method", target="new_zeros")
    writes = writes_of(graph) if zeros else {}
    written = frozenset().union(*writes.values())
    for node in zeros:
        mask, joins = _counted(node), [write for write, parts in writes.items() if not parts.isdisjoint(memory(node))]
        chosen = [_of_selected(write, node, mask) for write in joins]
        reads = [user for user in node.users if user not in joins]
        early = [read for read in reads if isinstance(read.meta.get("example_value"), torch.Tensor)]
        is_early = any(order[read] < order[join] for read in early for join in joins)
        if mask is None or None in chosen or is_early or any(memory(part) & written for part in (mask, *chosen)):
            continue
        made, value = node.meta["example_value"], mask.meta["example_value"]
        with made.fake_mode, graph.inserting_before(node):
            shape = (*[-1] * value.dim(), int(made.shape[-1]))
            tokens = graph.call_method("expand", (graph.call_function(operator.getitem, (mask, (..., None))), *shape))
            of_tokens = graph.call_function(torch.zeros_like, (tokens,), {"dtype": made.dtype, "device": made.device})
            of_tokens.meta = {**node.meta, "example_value": made.new_zeros(*value.shape, shape[-1])}
        for join, own in zip(joins, chosen, strict=True):
            with graph.inserting_before(join), made.fake_mode:
                both = graph.call_function(operator.and_, (own, mask))
            both.meta["example_value"] = value
            join.args = (of_tokens, both, join.args[2])
        for read in reads:
            with graph.inserting_before(read):
                selected = graph.call_function(operator.getitem, (of_tokens, mask))
            selected.meta = dict(node.meta)
            read.replace_input_with(node, selected)
        graph.erase_node(node)
    module.recompile()


def _counted(zeros: fx.Node) -> fx.Node | None:
    """Return the mask over tokens of `x.new_zeros(mask.sum(), D)`."""
    count = zeros.args[1] if len(zeros.args) == 3 and isinstance(zeros.args[2], int) else None
    if not isinstance(count, fx.Node) or name_of(count) != "sum" or len(count.args) != 1 or count.kwargs:
        return None
    return count.args[0] if count.args[0].meta["example_value"].dtype is torch.bool else None


def _of_selected(write: fx.Node, joined: fx.Node, mask: fx.Node | None) -> fx.Node | None:
    """Return the mask `chosen` of `joined[chosen[mask]] = features`."""
    if write.target is not operator.setitem or write.args[0] is not joined or mask is None:
        return None
    index, *rest = write.args[1] if isinstance(write.args[1], tuple) else (write.args[1],)
    if name_of(index) != "getitem" or index.args[1] is not mask or any(part != slice(None) for part in rest):
        return None
    chosen, value = index.args[0], index.args[0].meta["example_value"]
    return chosen if value.dtype is torch.bool and value.dim() == mask.meta["example_value"].dim() else None
