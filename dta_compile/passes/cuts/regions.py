"""regions: cut the graph into prologue (needs no parameters), token region (one value per token) and epilogue.

The token region ends where the fewest bytes per token leave it: after log-probs, not after logits. All token-wise uses
of parameters (the LM head) belong to it. The values that leave it are the frontier.
"""

from __future__ import annotations

import sympy
import torch
from torch import fx

from dta_compile.errors import RefusalError
from dta_compile.executable.executable import Use
from dta_compile.executable.layouts import Layout
from dta_compile.passes.axes.layouts import memory_order
from dta_compile.passes.axes.refusals import mixing_refusal
from dta_compile.passes.axes.shape_rules import factors
from dta_compile.passes.contracts import contract
from dta_compile.passes.graphs.nodes import SizeNodes, call, erase_unused, is_item, may_have_gradient
from dta_compile.passes.graphs.operators import MATRIX_PRODUCTS, aten
from dta_compile.passes.graphs.source_lines import where
from dta_compile.passes.graphs.storage import owner, view_source
from dta_compile.passes.graphs.subgraph import bytes_per_token, cheapest_cut, is_per_token
from dta_compile.passes.masks.entries import leaves_of_masks
from dta_compile.passes.masks.mixers import cache_outputs
from dta_compile.passes.program import FrontierValue, Mixed, Program, ancestors, has_tensor, items_of, output_node
from dta_compile.passes.symbols import expression, sizes


@contract(
    reads=["training", "batch", "tokens", "mixers", "mixer_nodes", "draws", "asserted", "other_batches"],
    fills=["region", "frontier", "dense_layer"],
    rewrites=["module", "values", "parameter_dependent"],
)
def regions(program: Program) -> None:
    """Fill `program.region`, `.frontier` and `.dense_layer`."""
    kept = {*leaves_of_masks(program), *program.draws, *program.asserted}
    views = _views_to_return(program)
    erase_unused(program.graph, lambda node: node.op in ("placeholder", "output") or node in kept)
    live = [node for node in program.graph.nodes if node in program.parameter_dependent and node.op != "placeholder"]
    of_mixers = ancestors(program.mixer_nodes)
    before_last_mixer = of_mixers & set(live)
    for node in live:
        value = program.values[node]
        if isinstance(value, Mixed) and node in before_last_mixer:
            raise mixing_refusal(value)
    candidates = [node for node in live if is_per_token(program.values[node]) and node not in views]
    weights = {node for node in program.parameter_dependent if _is_weight(program, node)}
    outputs = {node for node in program.outputs if isinstance(node, fx.Node)}
    per_token = set(candidates)
    others = set(live) - per_token - weights
    feeds_others = {node for node in candidates if node in outputs or not others.isdisjoint(node.users)}
    of_weights = {node for node in candidates if not weights.isdisjoint(node.all_input_nodes)}
    forced = (of_mixers | ancestors(of_weights - of_mixers, stop=of_mixers.__contains__)) & per_token
    region = cheapest_cut(
        candidates,
        lambda node: bytes_per_token(node, program.values[node]),
        first=forced,
        last=set(),
        leaving=feeds_others,
    )
    region |= ancestors(region) & weights.intersection(live)
    _unflatten(program, region)
    live = [node for node in program.graph.nodes if node in program.parameter_dependent and node.op != "placeholder"]
    program.region = region
    program.dense_layer = _dense_layer(program, [node for node in live if node not in region], weights)
    caches = cache_outputs(program)
    program.frontier = [
        _frontier_value(program, node, node in caches)
        for node in live
        if node in region
        and (node in outputs or any(user not in region and user.op != "output" for user in node.users))
        and _is_handed_over(program, node)
    ]
    _refuse_absolute_strides(program)


def _views_to_return(program: Program) -> set[fx.Node]:
    """Give outputs that share memory views of their own, for the epilogue: a write to one is then seen in the others.

    Not if the memory is larger than they are together, as that of all logits is beside two of them.
    """
    graph, caches, sharing = program.graph, cache_outputs(program), dict[fx.Node, dict[fx.Node, None]]()
    for node in program.outputs:
        if isinstance(node, fx.Node) and is_per_token(program.values.get(owner(node))) and node not in caches:
            sharing.setdefault(owner(node), {})[node] = None
    output, copies = output_node(graph), dict[fx.Node, fx.Node]()

    def copy(node: fx.Node) -> fx.Node:
        if node not in copies and (source := view_source(node)) is not None:
            viewed = node.args[0] if is_item(node) else source
            operand = copy(viewed)
            with graph.inserting_before(output):
                copies[node] = graph.node_copy(node, lambda arg: operand if arg is viewed else arg)
        return copies.get(node, node)

    for memory, nodes in sharing.items():
        sizes = [bytes_per_token(node, program.values[node]) for node in nodes if is_per_token(program.values[node])]
        if len(nodes) > 1 and sum(sizes) >= bytes_per_token(memory, program.values[memory]):
            for node in nodes:
                node.replace_all_uses_with(copy(node), delete_user_cb=lambda user: user is output)
    program.values = {**program.values, **{new: program.values[node] for node, new in copies.items()}}
    program.parameter_dependent = program.parameter_dependent | set(copies.values())
    return set(copies.values())


def _unflatten(program: Program, region: set[fx.Node]) -> None:
    """Hand over what flattens tokens with features with a dimension for each; readers outside flatten it again."""
    graph, builder = program.graph, SizeNodes(program.graph)
    for node in list(graph.nodes):
        layout = program.values.get(node)
        if node not in region or not isinstance(layout, Layout) or not layout.has_flat:
            continue
        readers = {user for user in node.users if user not in region}
        if not readers:
            continue
        parts = [part for dim, size in enumerate(sizes(node)) for part in factors(layout, dim, size)]
        known = set(graph.nodes)
        with node.meta["val"].fake_mode, torch.no_grad(), graph.inserting_before(node.next):
            split = call(graph, aten.reshape.default, node, [builder.build(size) for _, size in parts])
            again = call(graph, aten.reshape.default, split, [builder.build(size) for size in sizes(node)])
        for new in (split, again):
            new.meta = {**node.meta, "val": new.meta["val"]}
        node.replace_all_uses_with(again, delete_user_cb=readers.__contains__)
        region.add(split)
        added = {new: None for new in graph.nodes if new not in known}
        axes = Layout(tuple(axis for axis, _ in parts), layout.frame)
        program.values = {**program.values, **added, split: axes, again: layout}
        program.parameter_dependent = program.parameter_dependent | {split, again}


def _dense_layer(program: Program, epilogue: list[fx.Node], weights: set[fx.Node]) -> str | None:
    """Return the line of the first product of weights with mixed tokens after the last mixer, run per sequence.

    Raises `RefusalError` if what mixes them is attention that was not recognised.
    """
    if program.other_batches:
        return None  # these have an epilogue of their own
    for node in epilogue:
        is_layer = node.target in MATRIX_PRODUCTS and not weights.isdisjoint(node.all_input_nodes)
        if not is_layer or not any(_has_tokens(program, arg) for arg in node.all_input_nodes if arg not in weights):
            continue
        for source in ancestors([node], stop=program.region.__contains__):
            if "unrecognised" in source.meta:
                raise source.meta["unrecognised"]
        return where(node)
    return None


def _has_tokens(program: Program, node: fx.Node) -> bool:
    """Return whether a value of mixed tokens has as many entries as there are tokens."""
    is_mixed = has_tensor(node) and isinstance(program.values.get(node), Mixed)
    symbols = program.tokens.free_symbols if program.tokens is not None else set()
    return is_mixed and any(symbols & size.free_symbols for size in sizes(node))


def _is_weight(program: Program, node: fx.Node) -> bool:
    """Return whether a value is one of parameters alone: without batch or token axis, and cheap to have twice."""
    value = program.values.get(node)
    if isinstance(value, Layout):  # most are
        return not value.labelled and has_tensor(node)
    return has_tensor(node) and all(isinstance(item, Layout) and not item.labelled for item in items_of(value))


def _is_handed_over(program: Program, node: fx.Node) -> bool:
    """Return whether the epilogue takes a value's rows from the tree, not computing it anew from parameters.

    What is the same for all sequences or for all tokens of one is cheap to have twice, and exists at padding, too.
    """
    value = program.values.get(node)
    if _is_weight(program, node) or (isinstance(value, Layout) and value.token_dim is None):
        return False
    if not isinstance(value, Layout) or value.is_over_sequences:
        return True
    sources = ancestors([node])
    if not sources.isdisjoint(program.mixer_nodes):
        return True
    data = [program.values[source] for source in sources if source.op == "placeholder" and has_tensor(source)]
    return program.batch is None and any(not isinstance(value, Layout) or value.labelled for value in data)


def _frontier_value(program: Program, node: fx.Node, is_cache: bool) -> FrontierValue:
    layout = program.values[node]
    assert isinstance(layout, Layout), (node, layout)
    if layout.frame is None or layout.frame.start is None:
        raise RefusalError(
            "the positions of the tokens in this value are unknown", where=where(node), got=f"{layout} {layout.frame}"
        )
    shape = node.meta["val"].shape
    features = tuple(int(size) for size, axis in zip(shape, layout.dims, strict=True) if axis is None)
    differentiable = may_have_gradient(node) and program.training
    everywhere = (Use(layout.frame),)
    order = memory_order(node.meta["val"])
    dtype = node.meta["val"].dtype
    return FrontierValue(
        node.name, layout, sizes(node), features, dtype, differentiable, order, is_cache, everywhere, False, node
    )


def _refuse_absolute_strides(program: Program) -> None:
    """Refuse `as_strided` in the epilogue of values with gaps: it counts entries of memory."""
    gaps = {value.node for value in program.frontier if not _is_dense(value)}
    for node in program.graph.nodes:
        if node.target is not aten.as_strided.default or node in program.region:
            continue
        if strided := gaps & ancestors([node], stop=program.region.__contains__):
            raise RefusalError(
                "as_strided counts entries of memory, and this value has other memory than in eager mode",
                where=where(node),
                expected="as_strided of a value that fills its memory",
                got=f"a part or repetition of one: {next(iter(strided)).name}",
                hint="index or reshape the value instead, or call .contiguous() first",
            )


def _is_dense(value: FrontierValue) -> bool:
    """Return whether a value's traced strides are those of its memory order, from the start of its memory."""
    traced, expected = value.node.meta["val"], sympy.Integer(1)
    for dim in reversed(value.memory_order):
        if expression(traced.stride(dim)) != expected:
            return False
        expected *= expression(traced.shape[dim])
    return traced.storage_offset() == 0
