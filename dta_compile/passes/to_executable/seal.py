"""Seal a program as an `Executable`: nodes become slots, graphs code, and symbolic sizes expressions.

`Comparison` tells the self-check to which sizes inputs may be cut, and what may differ between two runs. Every size is
an expression in symbols, so inputs may be cut to any sizes that the guards of the trace allow; the meaning of the data
does not matter, since both programs get the same. An index must not get out of bounds, which ends the process on a GPU,
so an axis that is indexed by data keeps its length.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import sympy
import torch
from torch import fx

from dta_compile.executable import executable
from dta_compile.executable.chunk import ChunkGraphs
from dta_compile.executable.code import Code
from dta_compile.executable.executable import (
    OF_SEVERAL_BATCHES,
    ChunkInput,
    Comparison,
    Executable,
    NoRowEpilogue,
    NumberSpec,
    Output,
    RowEpilogue,
    Shape,
    TensorSpec,
    Use,
    Written,
)
from dta_compile.ops.collectives import COLLECTIVES
from dta_compile.ops.distances import BY_DEPTH
from dta_compile.ops.feature_tables import TABLE_ROWS
from dta_compile.ops.library import is_random
from dta_compile.passes.axes.layouts import is_tensor
from dta_compile.passes.chunk.chunk_graph import chunk_device
from dta_compile.passes.cuts.other_batches import programs_of
from dta_compile.passes.cuts.row_epilogue import row_dim, row_layout
from dta_compile.passes.gradients.unroll import all_mixers, all_parameters, times_of
from dta_compile.passes.graphs.nodes import behind, descendants
from dta_compile.passes.graphs.operators import INDEX_ENTRIES, INDEX_EVERY_AXIS, INDEX_ONE_AXIS, SAME_ENTRIES, aten
from dta_compile.passes.graphs.source_lines import where
from dta_compile.passes.masks.entries import leaves_of_masks
from dta_compile.passes.program import ChunkInput as LoweredInput
from dta_compile.passes.program import FrontierValue, Mixed, Program, ancestors, has_tensor, tensors_of
from dta_compile.passes.symbols import expression, free_symbols, hint, sizes, symbolic
from dta_compile.passes.to_executable.upstream import stops_gradients, upstream_outputs


def seal(program: Program) -> Executable:
    """Return the executable of a program that all passes have run on."""
    slots = {node: slot for slot, node in enumerate(program.prologue_nodes)}
    indexed, epilogue_inputs = _indexed_by(program), list(program.epilogue.graph.find_nodes(op="placeholder"))

    def chunk_inputs(items: Iterable[LoweredInput]) -> tuple[ChunkInput, ...]:
        return tuple(_chunk_input(program, item, slots[item.node], indexed.get(item.node)) for item in items)

    return Executable(
        training=program.training,
        codegen=program.codegen,
        device=chunk_device(program).type,
        inputs=tuple(program.inputs),
        values=_values(program),
        symbols=program.input_symbols,
        batch=program.batch,
        tokens=program.tokens,
        prologue=Code.of(program.prologue),
        mixers=all_mixers(program),
        mask_slots={node.name: slots[node] for node in leaves_of_masks(program)},
        frontier=tuple(_frontier_value(program, value, slots) for value in program.frontier),
        trunk_inputs=chunk_inputs(program.trunk_inputs),
        head_inputs=chunk_inputs(program.head_inputs),
        constant_inputs=tuple(slots[node] for node in program.constant_inputs),
        trunk_keys=chunk_inputs(program.trunk_keys),
        head_keys=chunk_inputs(program.head_keys),
        region_parameters=all_parameters(program),
        joint=program.joint,
        parts=tuple(program.parts),
        epilogue=Code.of(program.epilogue) if program.rest is None else None,
        epilogue_slots=tuple(slots[node] for node in program.epilogue_dense_inputs),
        epilogue_reads=tuple(i for i, node in enumerate(epilogue_inputs[: len(program.inputs)]) if node.users),
        row_epilogue=_row_epilogue(program),
        outputs=_outputs(program, slots),
        written=_written(program),
        rest=None if program.rest is None else seal(program.rest),
        comparison=comparison(program),
        regions=_regions(program),
        dense_layer=program.dense_layer,
        chunk_digest=_digest(program.joint),
        seconds=dict(program.timings),
    )


def _digest(chunk: ChunkGraphs) -> str:
    """Return a hash of the code of the kinds of stages, and of how stages are connected."""
    stages = [(stage.kind, stage.layers, stage.reads, stage.writes) for stage in chunk.stages]
    return hashlib.sha256(repr(([kind.forward_only.text for kind in chunk.kinds], stages)).encode()).hexdigest()


def _values(program: Program) -> tuple[TensorSpec | NumberSpec | None, ...]:
    """Return the specs of the inputs; equal specs are one object, since layers have many."""
    known: dict[Any, Any] = {}
    specs = (spec(node.meta["val"]) for node in program.placeholders)
    return tuple(known.setdefault(value, value) for value in specs)


def spec(value: Any) -> TensorSpec | NumberSpec | None:
    """Return the shape, dtype and device of a traced tensor, or the expression of a number; None for other values."""
    if isinstance(value, torch.Tensor):
        return TensorSpec(tuple(map(expression, value.shape)), value.dtype, value.device)
    if (expr := symbolic(value)) is not None:
        return NumberSpec(expr, isinstance(value, torch.SymBool))
    return None


def _indexed_by(program: Program) -> dict[fx.Node, tuple[int, str, str]]:
    """By dense value that is an index into parameters or features of a token, return its `ChunkInput.indexes`."""
    indexes: dict[fx.Node, tuple[int, str, str]] = {}
    for node in program.region:
        packet: Any = getattr(node.target, "overloadpacket", None)
        at = POSITIONS_OF_INDEX.get(packet)
        if at is not None and node.args[at].target is not TABLE_ROWS:  # whose rows are in bounds
            dim = node.args[1] if at == 2 else 0
            size, index = node.args[0].meta["val"].shape[dim], node.args[at]
            if isinstance(size, int) and size <= indexes.get(index, (size,))[0]:
                source = behind(index, SAME_ENTRIES)
                indexes[index] = size, source.meta.get("source") or source.name, where(node)
    return indexes


def _chunk_input(program: Program, item: LoweredInput, slot: int, indexes: tuple[int, str, str] | None) -> ChunkInput:
    node = item.node
    is_input = node.op == "placeholder"
    name = program.inputs[program.placeholders.index(node)].name if is_input else f"{node.name} = {node.target}"
    source, by_depth = node.meta.get("source") or node.name, node.target is BY_DEPTH
    return ChunkInput(slot, item.layout, name, source, is_input, indexes, by_depth)


def _frontier_value(program: Program, value: FrontierValue, slots: Mapping[fx.Node, int]) -> executable.FrontierValue:
    def at_slots(use: Use) -> Use:
        conditions = (dataclasses.replace(condition, source=slots[condition.source]) for condition in use.conditions)
        return Use(use.frame, frozenset(conditions))

    facts = {field.name: getattr(value, field.name) for field in dataclasses.fields(executable.FrontierValue)}
    uses = tuple(map(at_slots, value.uses))
    changed = {"shape": sizes(value.node), "uses": uses, "inner": _is_inner(program, value)}
    return executable.FrontierValue(**{**facts, **changed})


def _is_inner(program: Program, value: FrontierValue) -> bool:
    """Return whether the epilogue computes all that it returns of a value, instead of handing entries over."""
    pending, outputs = [value.node], {node for node in program.outputs if isinstance(node, fx.Node)}
    while pending:
        node = pending.pop()
        if node in outputs:
            return False
        pending += [user for user in node.users if user.target in SAME_ENTRIES]
    return program.rest is None and not value.is_cache


def _row_epilogue(program: Program) -> RowEpilogue | NoRowEpilogue | None:
    epilogue = program.row_epilogue
    if epilogue is None:
        return None
    if isinstance(epilogue, Mixed):
        return NoRowEpilogue(epilogue.reason, where(epilogue.node))

    def dim(node: fx.Node) -> int | None:
        return row_dim(row_layout(program, node)) if has_tensor(node) else None

    return RowEpilogue(
        Code.of(epilogue), tuple(map(dim, program.placeholders)), tuple(map(dim, program.epilogue_dense_inputs))
    )


def _outputs(program: Program, slots: Mapping[fx.Node, int]) -> tuple[Output, ...]:
    chosen, caches = choices(program), {value.node for value in program.frontier if value.is_cache}
    positions = {node: i for i, node in enumerate(program.placeholders)}
    upstream, frontier = upstream_outputs(program), {value.node: i for i, value in enumerate(program.frontier)}
    differentiated = set(program.joint.differentiated)
    stopping = set(filter(stops_gradients, filter(has_tensor, descendants(program.graph, frontier))))

    def output(number: int, node: Any) -> Output:
        if not isinstance(node, fx.Node):
            return Output(str(node), "", node)
        value, between = spec(node.meta["val"]), ancestors([node], stop=frontier.__contains__)
        reads = tuple(i for value, i in frontier.items() if value in between)
        shape = value.shape if isinstance(value, TensorSpec) else ()
        tokens = program.tokens.free_symbols if program.tokens is not None else set()
        return Output(
            str(node),
            where(node),
            node.meta["val"] if value is None else value,
            positions.get(node),
            slots.get(node),
            node in caches,
            not tokens.isdisjoint(free_symbols(shape)),
            bool(chosen) and not chosen.isdisjoint(ancestors([node])),
            reads,
            differentiated.issuperset(reads) and stopping.isdisjoint(between),
            upstream.get(number, ()),
        )

    return tuple(itertools.starmap(output, enumerate(program.outputs)))


def _written(program: Program) -> tuple[Written, ...]:
    values = program.outputs[len(program.outputs) - len(program.written) :]
    frontier = {value.node: i for i, value in enumerate(program.frontier)}

    def of(index: int, value: fx.Node) -> Written:
        read = ancestors([value], stop=frontier.__contains__)
        name = program.placeholders[index].meta.get("source") or program.inputs[index].name
        return Written(index, name, tuple(i for node, i in frontier.items() if node in read))

    return tuple(map(of, program.written, values))


def _regions(program: Program) -> dict[str, int]:
    operators = [node for node in program.graph.nodes if node.op not in ("placeholder", "output") and has_tensor(node)]
    dense = [node for node in operators if node not in program.parameter_dependent]
    times = times_of(program)  # copies share what they compute from inputs
    learned, region, trunk = (
        sum(map(times, nodes)) for nodes in (set(operators) - set(dense), program.region, program.trunk)
    )
    return {"prologue": len(dense), "trunk": trunk, "head": region - trunk, "epilogue": learned - region}


# Position of the index among the arguments of operators that read entries by it, and refuse negative indices.
POSITIONS_OF_INDEX = {aten.gather: 2, aten.index_select: 2, aten.embedding: 1}

LOSSES_BY_INDEX = {aten.nll_loss_forward, aten.nll_loss2d_forward}
INDEXING = {*INDEX_ONE_AXIS, *INDEX_EVERY_AXIS, *INDEX_ENTRIES, aten.embedding, *LOSSES_BY_INDEX}

KNOWN_LIBRARIES = ("aten", "prims", "dta")


def comparison(program: Program) -> Comparison:
    """Return the facts that the self-check needs of a program that all passes have run on."""
    guards, least = _assumed(program)
    if program.length is not None:
        guards = (*guards, sympy.Eq(expression(program.length), hint(program.length)))  # the captured graph's only one
    return Comparison(
        _why_incomparable(program), _precision(program), guards, least, _indexed_by_data(program), _bytes(program)
    )


def _why_incomparable(program: Program) -> str:
    for target in dict.fromkeys(node.target for node in program.graph.nodes):
        if is_random(target):
            return f"{target} draws random numbers"
        if target in COLLECTIVES or "c10d" in str(getattr(target, "namespace", "")):
            return f"{target} waits for other ranks"
    if any(layer.mask is not None for batch in programs_of(program)[1:] for layer in batch.attention):
        return OF_SEVERAL_BATCHES
    return "it indexes by rounded values" if indices_from_values(program) else ""


def _precision(program: Program) -> torch.dtype:
    """Return the least precise dtype among values that depend on parameters."""
    dtypes = {node.meta["val"].dtype for node in program.parameter_dependent if is_tensor(node)}
    dtypes = {dtype.to_real() for dtype in dtypes if dtype.is_floating_point or dtype.is_complex} or {torch.float64}
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def choices(program: Program) -> set[fx.Node]:
    """Return the discrete choices (of an expert, a token) that depend on parameters: rounding may change them."""

    def is_choice(node: fx.Node) -> bool:
        return not all(map(_is_rounded, tensors_of(node.meta.get("val"))))

    return set(filter(is_choice, program.parameter_dependent))


def _is_rounded(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _assumed(program: Program) -> tuple[tuple[sympy.Basic, ...], dict[sympy.Symbol, sympy.Expr]]:
    """Return the guards of the trace, and the least values of the symbols that inputs define."""
    symbolic = [size for node in program.placeholders for size in _symbolic(node)]
    if not symbolic:
        return (), {}
    env = symbolic[0].node.shape_env
    ranges = env.var_to_range
    least = {symbol: ranges[symbol].lower for symbol in program.input_symbols if symbol in ranges}
    return tuple(dict.fromkeys(env.replace(guard.expr) for guard in env.guards)), least


def _symbolic(node: fx.Node) -> Iterator[torch.SymInt]:
    value = node.meta["val"]
    for size in value.shape if isinstance(value, torch.Tensor) else [value]:
        if isinstance(size, torch.SymInt):
            yield size


def _indexed_by_data(program: Program) -> frozenset[sympy.Symbol]:
    """Return the symbols in sizes of axes that are indexed by values computed from tensor inputs."""
    computed: set[fx.Node] = set()  # from tensor inputs
    symbols: set[sympy.Symbol] = set()
    for node in program.graph.nodes:
        if not computed.isdisjoint(node.all_input_nodes) or (node.op == "placeholder" and is_tensor(node)):
            computed.add(node)
        if node.op in ("call_function", "call_module") and _may_index(node.target):
            symbols |= free_symbols(_indexed_sizes(node, computed, program))
    return frozenset(symbols)


@functools.cache
def _may_index(target: Any) -> bool:
    """Return whether indices may be among the arguments of an operator; cached, since layers have the same ones."""
    is_known = getattr(target, "namespace", "aten") in KNOWN_LIBRARIES and not isinstance(target, str)
    return not is_known or getattr(target, "overloadpacket", None) in INDEXING or _is_assertion(target)


def _indexed_sizes(node: fx.Node, computed: set[fx.Node], program: Program) -> Iterator[sympy.Expr]:
    """Yield the sizes that an operator's indices must stay below."""
    packet, args = getattr(node.target, "overloadpacket", None), node.args
    shape = sizes(args[0]) if packet in INDEXING and args and is_tensor(args[0]) else ()
    if packet in INDEX_ONE_AXIS and shape:
        if args[2] in computed:
            yield shape[args[1]]
    elif packet in INDEX_EVERY_AXIS:
        yield from (size for size, index in zip(shape, args[1], strict=False) if index in computed)
    elif not any(arg in computed for arg in node.all_input_nodes):
        return
    elif packet in INDEX_ENTRIES:
        yield from shape
    elif packet is aten.embedding:
        yield shape[0]
    elif packet in LOSSES_BY_INDEX:
        yield shape[min(1, len(shape) - 1)]
    elif _may_do_anything(node):
        yield from (size for size in (program.batch, program.tokens) if size is not None)


def indices_from_values(program: Program) -> bool:
    """Return whether floating-point values are cast to integers that index: rounding may put these out of bounds."""
    rounded: set[fx.Node] = set()
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and not value.is_floating_point() and value.dtype is not torch.bool:
            casts = node.target is aten._to_copy.default and node.args[0].meta["val"].is_floating_point()
            if (casts and node in program.parameter_dependent) or any(arg in rounded for arg in node.all_input_nodes):
                rounded.add(node)
        may_index = rounded and node.op == "call_function" and _may_index(node.target)
        if may_index and any(True for _ in _indexed_sizes(node, rounded, program)):
            return True
    return False


def _may_do_anything(node: fx.Node) -> bool:
    """Return whether an operator is an assertion, or one of another library that takes integers (perhaps indices)."""
    if _is_assertion(node.target):
        return True
    if node.op == "call_function" and getattr(node.target, "namespace", "aten") in KNOWN_LIBRARIES:
        return False
    values = [arg.meta["val"] for arg in node.all_input_nodes if is_tensor(arg)]
    return not all(value.is_floating_point() or value.is_complex() for value in values)


@functools.cache
def _is_assertion(target: Any) -> bool:
    """Return whether a call is of an assertion; cached, since names of operators are slow."""
    return "_assert" in str(target)


def _bytes(program: Program) -> dict[Shape, int]:
    """By shape, return the bytes per entry of all intermediate values and attention scores of two programs, without
    gradients of parameters."""
    bytes_of = collections.Counter[Shape]()
    nodes = (node for node in program.parameter_dependent if is_tensor(node) and node.op != "placeholder")
    times, values = times_of(program), collections.Counter[torch.Tensor]()  # layers that are copies share theirs
    for node in nodes:
        values[node.meta["val"]] += times(node)
    for value, count in values.items():
        bytes_of[tuple(map(expression, value.shape))] += 2 * count * value.dtype.itemsize
    for layer in program.attention:
        call = program.mixer_nodes[layer.index]
        batch, heads, tokens, _ = sizes(call)
        bytes_of[batch, heads, tokens, tokens] += 2 * layer.dtype.itemsize * times(call)
    return dict(bytes_of)
