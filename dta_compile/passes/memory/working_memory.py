"""working_memory: compute the bytes that each graph of a stage allocates at its peak, as functions of the chunk's size.

A graph is walked in execution order. A tensor is alive from the node that allocates it to the last node that reads it
or a view of it, since the generated code deletes every name after its last use. Inputs are counted only if the graph
frees them. A piece of generated code counts with its results alone: it keeps intermediate values in registers, and
needs beside them a few numbers per row.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType

import torch
from torch import fx

from dta_compile.ops.dtypes import statistics_dtype
from dta_compile.ops.experts import operators as expert_operators
from dta_compile.ops.experts.operators import EXPERT_PRODUCTS_, EXPERT_SUM
from dta_compile.ops.lm_head import by_kernels
from dta_compile.ops.lm_head import operators as head_operators
from dta_compile.ops.products import ADD_PRODUCT
from dta_compile.passes.contracts import contract
from dta_compile.passes.gradients.accumulate import adds_first, is_accumulator
from dta_compile.passes.graphs.nodes import is_item
from dta_compile.passes.graphs.operators import MAYBE_COPIES, is_tagged_pointwise
from dta_compile.passes.graphs.storage import Storage, last_uses, owner, storages, view_source
from dta_compile.passes.program import Program, has_tensor
from dta_compile.passes.stage_graphs import StageGraphs
from dta_compile.passes.value_bytes import Bytes, ChunkSizes, Peaks, total


@contract(rewrites=["stages"])
def working_memory(program: Program) -> None:
    """Fill `working` of the kinds of `program.stages`."""
    sizes, known = program.stages.sizes, dict[tuple[fx.GraphModule, bool], Peaks]()

    def peaks(name: str, module: fx.GraphModule) -> Peaks:
        key = module, name == "backward"
        if key not in known:
            known[key] = peaks_of(module.graph, sizes, frees_inputs=key[1])
        return known[key]

    def filled(kind: StageGraphs) -> StageGraphs:
        working, sums = {name: peaks(name, module) for name, module in kind.graphs.items()}, {}
        if kind.backward is not None:
            graph = kind.backward.graph
            sums = {node: _bytes_of_sum(node, sizes) for node in graph.nodes if is_accumulator(node)}
            working["first_backward"] = peaks_of(graph, sizes, frees_inputs=True, sums=sums)
        return dataclasses.replace(kind, working=working, sums=tuple(sums.values()))

    program.stages = dataclasses.replace(program.stages, kinds=tuple(map(filled, program.stages.kinds)))


def peaks_of(
    graph: fx.Graph, sizes: ChunkSizes, frees_inputs: bool = False, sums: Mapping[fx.Node, Bytes] = MappingProxyType({})
) -> Peaks:
    """Return the peak as a maximum of linear functions; results of the graph count from their allocation to the end.

    With `frees_inputs`, inputs whose size depends on the chunk count until their last use. Accumulators in `sums` count
    from their first use to the end.
    """
    nodes = [node for node in graph.nodes if node.op != "placeholder"]
    dying: dict[fx.Node, list[Storage]] = {}
    for storage, node in last_uses(nodes).items():
        dying.setdefault(node, []).append(storage)
    live: dict[Storage, Bytes] = dict(_inputs(graph)) if frees_inputs else {}
    allocated = total(live.values())
    peaks: list[Bytes] = [allocated]
    begun: dict[Storage, Bytes] = {}
    for node in nodes:
        first = {(arg, 0): sums[arg] for arg in node.all_input_nodes if arg in sums and (arg, 0) not in begun}
        begun |= first
        new = dict(_allocations(node, sizes)) | first
        live |= new
        allocated = allocated.plus(total(new.values()))
        for scratch in [Bytes()] if _begins_by(node, sums) else _scratch(node, sizes):
            add_peak(peaks, allocated.plus(scratch))
        for storage in dying.get(node, ()):
            if storage not in begun:
                allocated = allocated.minus(live.pop(storage, Bytes()))
    return tuple(peaks)


def _begins_by(node: fx.Node, sums: Collection[fx.Node]) -> bool:
    """Return whether a sum begins with a product, which is not added to zeros."""
    return node.target is ADD_PRODUCT and owner(node.args[0]) in sums and _is_narrow(owner(node.args[0]))


def _is_narrow(accumulator: fx.Node) -> bool:
    """Return whether a sum is in the parameter's dtype after a first backward: it has one summand."""
    users = list(accumulator.users)
    is_one = len(users) == 1 and len(users[0].users) < 2 and adds_first(accumulator, users[0])
    return is_one and accumulator.meta["val"].device.type == "cpu"


def _bytes_of_sum(accumulator: fx.Node, sizes: ChunkSizes) -> Bytes:
    value = accumulator.meta["val"]
    narrow = accumulator.meta["gradient"].itemsize / value.dtype.itemsize
    return sizes.bytes(value).times(narrow if _is_narrow(accumulator) else 1.0)


def _inputs(graph: fx.Graph) -> Iterable[tuple[Storage, Bytes]]:
    """Yield the storages of inputs whose size depends on the chunk; several inputs may share one."""
    for node in graph.find_nodes(op="placeholder"):
        name, size = node.meta.get("memory", ("", Bytes()))
        if size.per_token or size.per_head_row:
            yield (name, 0), size


def _allocations(node: fx.Node, sizes: ChunkSizes) -> Iterable[tuple[Storage, Bytes]]:
    if node.target in MAYBE_COPIES:
        return [((node, 0), sizes.bytes(node.meta["val"]))]
    if is_item(node) or view_source(node) is not None or not has_tensor(node):
        return ()
    value = node.meta["val"]
    results = value if isinstance(value, (tuple, list)) else (value,)
    return zip(storages(node), map(sizes.bytes, results), strict=True)


def _scratch(node: fx.Node, sizes: ChunkSizes) -> list[Bytes]:
    """Return the bytes that a node allocates besides its results, at each moment of its run that may be the peak."""
    if "scratch" in node.meta:
        return [Bytes(per_token=node.meta["scratch"])]
    if node.op == "call_method" and node.target == "mix":
        results = node.meta["val"]  # attention: the output over the prefix, before it is merged with the chunk's
        return [sizes.bytes(results[0] if isinstance(results, (tuple, list)) else results)]
    if node.op == "call_method" and node.target == "mix_backward":
        return [sizes.bytes(node.meta["val"])]  # attention: gradients from the prefix, and of repeated heads
    if node.target in head_operators.OPERATORS:
        return _scratch_of_head(node, sizes)
    if node.target in expert_operators.OPERATORS:
        return [_scratch_of_experts(node, sizes)]
    if node.target is ADD_PRODUCT:
        _, left, right = (arg.meta["val"] for arg in node.args)
        return [Bytes(int(left.shape[0]) * int(right.shape[1]) * left.dtype.itemsize)]
    return [_casts(node, sizes)]


def _casts(node: fx.Node, sizes: ChunkSizes) -> Bytes:
    """Return the bytes of operands that a pointwise operator on a CPU first copies to the dtype that it computes in."""
    values = [arg.meta["val"] for arg in node.all_input_nodes if isinstance(arg.meta.get("val"), torch.Tensor)]
    operands = [value for value in values if value.dim() and value.dtype is not torch.bool]
    if not is_tagged_pointwise(node.target) or any(value.device.type != "cpu" for value in operands):
        return Bytes()
    wide = functools.reduce(torch.promote_types, (value.dtype for value in operands), torch.bool)
    return total(
        sizes.bytes(value).times(wide.itemsize / value.dtype.itemsize) for value in operands if value.dtype != wide
    )


def add_peak(peaks: list[Bytes], candidate: Bytes) -> None:
    """Add a function to a maximum, and drop the functions that another one exceeds for every chunk."""
    if not any(all(a <= b for a, b in zip(candidate, known, strict=True)) for known in peaks):
        peaks[:] = [known for known in peaks if not all(a <= b for a, b in zip(known, candidate, strict=True))]
        peaks.append(candidate)


def _scratch_of_experts(node: fx.Node, sizes: ChunkSizes) -> Bytes:
    """Return the bytes of operands sorted by expert, of products before they are reordered, and of the order itself."""
    values = {
        formal.name: arg.meta["val"]
        for formal, arg in zip(node.target._schema.arguments, node.args, strict=True)
        if isinstance(arg, fx.Node)
    }
    expert, first = values["expert"], values["rows" if "rows" in values else "left"]
    slots = sizes.bytes(expert).times(1 / expert.dtype.itemsize)  # (token, expert) pairs
    bytes_per_slot, fixed = 3 * torch.int64.itemsize, 0  # sorted experts, their slots, and slots by token
    if "weight" in values:
        columns = values["weight"].shape[2 if node.args[-1] else 1]
        bytes_per_slot += (first.shape[-1] + columns) * first.dtype.itemsize
        if node.target is EXPERT_SUM:  # products times scales, and a copy in the dtype of the sum
            dtype = torch.promote_types(first.dtype, values["scale"].dtype)
            wide = statistics_dtype(dtype)
            bytes_per_slot += columns * (dtype.itemsize + (wide.itemsize if wide != dtype else 0))
            if wide != dtype:
                bytes_per_slot += columns * wide.itemsize / max(expert.shape[-1], 1)
    else:
        left, right = values["left"], values["right"]
        bytes_per_slot += (left.shape[-1] + right.shape[-1]) * left.dtype.itemsize
        if node.target is EXPERT_PRODUCTS_ and values["total"].dtype != left.dtype:
            fixed = left.shape[-1] * right.shape[-1] * left.dtype.itemsize  # the rounded product of one expert
    return slots.times(bytes_per_slot).plus(Bytes(fixed))


def _scratch_of_head(node: fx.Node, sizes: ChunkSizes) -> list[Bytes]:
    """Return the bytes that an LM-head operator allocates besides its results, at each moment that may be the peak."""
    if node.target is head_operators.LINEAR_LOG_PROB:
        (head, further, dtype), wanted = head_operators.Forward.of(node.args), None
        copies = 1 + further.mean
    elif node.target is head_operators.LINEAR_TOP:
        head, dtype, wanted, copies = head_operators.Head(*node.args[:6]), node.args[-1], None, 1
    elif node.target is head_operators.LINEAR_CROSS:
        head, dtype, wanted, copies = head_operators.Head(*node.args[:6]), node.args[-1], None, 3
    else:
        is_cross = node.target in (head_operators.LINEAR_CROSS_BACKWARD, head_operators.LINEAR_CROSS_BACKWARD_)
        call = (head_operators.CrossBackward if is_cross else head_operators.Backward).of(node.args)
        head, dtype, wanted = call.head, call.log_sum.meta["val"].dtype, call.wanted
        copies = 1 + (call.of_mean is not None) + is_cross + (head.inverse_cap is not None)
    head = head_operators.Head(*(arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in head))
    hidden, weight = head.hidden, head.weight
    narrow, wide = hidden.dtype, statistics_dtype(hidden.dtype)
    vocabulary, width = weight.shape
    columns = min(vocabulary, head_operators.BLOCK_COLUMNS)
    rows = sizes.bytes(hidden).times(1 / (width * narrow.itemsize))
    rounded = 0 if narrow == dtype else narrow.itemsize
    cast = Bytes(columns * width * narrow.itemsize if weight.dtype != narrow else 0)
    # A mean needs probabilities and their logarithms, a soft cap its slopes. Kernels need only the product.
    by_torch = max(copies * dtype.itemsize, dtype.itemsize + rounded)
    may_have_kernel = node.target not in head_operators.WITHOUT_KERNELS
    has_kernel = may_have_kernel and by_kernels.fits(head, dtype)
    logits = rows.times(columns * (narrow.itemsize if has_kernel else by_torch)).plus(cast)
    if wanted is None or narrow == wide:
        return [logits]
    # Products with the logits' gradient are rounded, then added to sums of a wider dtype.
    both = narrow.itemsize + wide.itemsize
    gradient, sums = rows.times(columns * narrow.itemsize), rows.times(width * wide.itemsize)
    if node.target in head_operators.IN_PLACE and wanted.weight:
        sums = sums.plus(Bytes(vocabulary * width * wide.itemsize))
    products = (rows.times(width * both).plus(cast), Bytes(columns * width * both))
    return [sums.plus(logits), *(sums.plus(gradient).plus(product) for product in products)]
