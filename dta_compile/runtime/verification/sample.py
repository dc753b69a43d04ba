"""A small call of a compiled program: some rows and columns of a real one, for comparing it with the captured program.

Every size of the program is an expression in symbols, so that its inputs may be cut to any sizes that the guards of the
trace allow; what the data then means does not matter, for both programs get the same. What must not happen is an index
out of bounds (on a GPU it ends the process): an axis that is indexed by data keeps its length.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import sympy
import torch
from torch import fx

from dta_compile.ops.dtypes import statistics_dtype
from dta_compile.passes.axes.layouts import is_tensor
from dta_compile.passes.graphs.operators import INDEX_ENTRIES, INDEX_EVERY_AXIS, INDEX_ONE_AXIS
from dta_compile.passes.program import Program
from dta_compile.passes.symbols import expression, free_symbols, sizes
from dta_compile.plan import PrefixTree
from dta_compile.runtime.calls.planned_call import PlannedCall
from dta_compile.runtime.rows.batch_rows import Integers

aten = torch.ops.aten

MOST_ROWS = 4
LEAST_TOKENS = 256  # that are always few enough; of a larger call, a share of what its tree runs
SHARE = 20
LEAST_COLUMNS = 16
WHOLE = 4  # times so many tokens if the sizes cannot be cut further

KNOWN_LIBRARIES = ("aten", "prims", "dta")

Sizes = Mapping[sympy.Symbol, int]


class NotSampled(Exception):
    """Why there is no small call to be made of a call."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """Inputs of a small call, its rows and columns, and the bytes that it and its gradients may take."""

    args: list[Any]
    rows: int
    columns: int
    bytes: int


def sample(call: PlannedCall) -> Sample:
    """Rows of a planned call that share something if any do, and columns around the place where they fork.

    Raises:
        NotSampled: its sizes cannot be cut, and it is too large to be run as it is.
    """
    values = call.context.sizes.values(call.args)
    limit = max(LEAST_TOKENS, call.rows.tree.num_rows // SHARE)
    allowed, fixed = _Guards(call.program), _indexed_by_data(call.program)
    for (rows, columns), together in itertools.product(_candidates(call, limit, fixed), (False, True)):
        new = _resized(call, values, rows, columns, fixed if together else values.keys())
        if new is None or not allowed(new):
            continue
        return Sample(_cut(call, values, new, rows, columns), rows, columns, _bytes(call, new))
    raise NotSampled("its inputs cannot be cut to a few tokens, and whole rows would take too long")


def _candidates(call: PlannedCall, limit: int, fixed: Collection[sympy.Basic]) -> Iterator[tuple[int, int]]:
    """Numbers of rows and columns, the most wanted first."""
    batch, tokens = _free_symbol(call.program.batch), _free_symbol(call.program.tokens)
    whole_rows = batch is None or batch in fixed or batch != call.program.batch
    some = range(min(2, call.batch), min(MOST_ROWS, call.batch) + 1)
    numbers = [call.batch] if whole_rows else [*some, *([call.batch] if call.batch > MOST_ROWS else [])]
    for rows in numbers:
        columns = max(LEAST_COLUMNS, limit // rows // LEAST_COLUMNS * LEAST_COLUMNS)
        may_cut = columns < call.tokens and tokens is not None and tokens not in fixed
        for count in (columns, call.tokens) if may_cut else (call.tokens,):
            if rows * count <= WHOLE * limit:
                yield rows, count


def _free_symbol(expr: sympy.Expr | None) -> sympy.Symbol | None:
    """The one symbol of a size."""
    symbols = expr.free_symbols if expr is not None else set()
    return next(iter(symbols)) if len(symbols) == 1 else None


def _resized(
    call: PlannedCall, values: Sizes, rows: int, columns: int, fixed: Collection[sympy.Basic]
) -> dict[sympy.Symbol, int] | None:
    """Numbers for the symbols with which the call has so many rows and columns.

    Inputs may have symbols of their own for these sizes: those that are equal change too, unless they are `fixed`.
    """
    new, program = dict(values), call.program
    for expr, size, wanted in ((program.batch, call.batch, rows), (program.tokens, call.tokens, columns)):
        if size != wanted:
            symbol = _free_symbol(expr)
            assert symbol is not None
            for one, value in values.items():
                if one == symbol or (value == values[symbol] and one not in fixed):
                    new[one] -= size - wanted
            if _evaluate(expr, new) != wanted:
                return None
    return new


def _evaluate(expr: Any, values: Sizes) -> Any:
    return expr.xreplace({symbol: sympy.Integer(value) for symbol, value in values.items()})


class _Guards:
    """What the trace assumed of its sizes."""

    def __init__(self, program: Program) -> None:
        sizes = [size for node in program.placeholders for size in _symbolic(node)]
        env = sizes[0].node.shape_env if sizes else None
        self.guards = [env.replace(guard.expr) for guard in env.guards] if env else []
        self.ranges = dict(env.var_to_range) if env else {}

    def __call__(self, values: Sizes) -> bool:
        least = all(self.ranges[symbol].lower <= value for symbol, value in values.items() if symbol in self.ranges)
        return least and not any(_evaluate(guard, values) == sympy.false for guard in self.guards)


def _symbolic(node: fx.Node) -> Iterator[torch.SymInt]:
    value = node.meta["val"]
    for size in value.shape if isinstance(value, torch.Tensor) else [value]:
        if isinstance(size, torch.SymInt):
            yield size


def _indexed_by_data(program: Program) -> set[sympy.Basic]:
    """Symbols in the sizes of axes that are read or written by an index which is computed from inputs."""
    computed: set[fx.Node] = set()  # from tensors that the call is given
    found: set[sympy.Basic] = set()
    for node in program.graph.nodes:
        if (is_tensor(node) and node.op == "placeholder") or any(arg in computed for arg in node.all_input_nodes):
            computed.add(node)
        if node.op in ("call_function", "call_module"):
            found |= free_symbols(_indexed_sizes(node, computed, program))
    return found


def _indexed_sizes(node: fx.Node, computed: set[fx.Node], program: Program) -> Iterator[sympy.Expr]:
    """Sizes that an operator's indices must stay below."""
    packet, args = getattr(node.target, "overloadpacket", None), node.args
    shape = sizes(args[0]) if args and is_tensor(args[0]) else ()
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
    elif packet in (aten.nll_loss_forward, aten.nll_loss2d_forward):
        yield shape[min(1, len(shape) - 1)]
    elif _may_do_anything(node):
        yield from (size for size in (program.batch, program.tokens) if size is not None)


def indices_from_values(program: Program) -> bool:
    """Whether values are turned into whole numbers that something is indexed by: others may be out of bounds."""
    rounded: set[fx.Node] = set()
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and not value.is_floating_point() and value.dtype is not torch.bool:
            casts = node.target is aten._to_copy.default and node.args[0].meta["val"].is_floating_point()
            if (casts and node in program.parameter_dependent) or any(arg in rounded for arg in node.all_input_nodes):
                rounded.add(node)
        if node.op == "call_function" and any(True for _ in _indexed_sizes(node, rounded, program)):
            return True
    return False


def _may_do_anything(node: fx.Node) -> bool:
    """An assertion about data, or an operator of others that takes integers: perhaps indices."""
    if "_assert" in str(node.target):
        return True
    if node.op == "call_function" and getattr(node.target, "namespace", "aten") in KNOWN_LIBRARIES:
        return False
    values = [arg.meta["val"] for arg in node.all_input_nodes if is_tensor(arg)]
    return not all(value.is_floating_point() or value.is_complex() for value in values)


def _cut(call: PlannedCall, old: Sizes, new: Sizes, rows: int, columns: int) -> list[Any]:
    """The inputs at the new sizes."""
    chosen, where = _rows_and_columns(call, rows, columns)
    changed = {symbol for symbol, value in new.items() if value != old[symbol]}
    return [
        _cut_input(call, arg, node, changed, new, chosen, where)
        for arg, node in zip(call.args, call.program.placeholders, strict=True)
    ]


def _cut_input(
    call: PlannedCall, arg: Any, node: fx.Node, changed: set[Any], new: Sizes, rows: list[int], columns: Integers
) -> Any:
    value, batch = node.meta["val"], call.program.batch
    if not isinstance(value, torch.Tensor):
        expr = expression(value) if isinstance(value, torch.SymInt) else sympy.S.Zero
        return int(_evaluate(expr, new)) if expr.free_symbols & changed else arg
    result = arg.detach()
    for dim, size in enumerate(sizes(node)):
        if not size.free_symbols & changed:
            continue
        length = int(_evaluate(size, new))
        if batch in size.free_symbols and result.shape[dim] % call.batch == 0:
            parts = result.unflatten(dim, (call.batch, -1))
            parts = parts.index_select(dim, torch.tensor(rows, device=arg.device))
            result = _picked(parts, dim + 1, length // len(rows), columns).flatten(dim, dim + 1)
        result = _picked(result, dim, length, columns)
    return arg if result.shape == arg.shape else _in_order_of(arg, result)


def _picked(value: torch.Tensor, dim: int, length: int, columns: Integers) -> torch.Tensor:
    """At most `length` entries, at the columns as far as there are so many."""
    size = value.shape[dim]
    length = min(length, size)
    index = np.resize(columns, length) - max(0, int(columns[:length].max(initial=0)) - (size - 1))
    return value.index_select(dim, torch.from_numpy(np.maximum(index, 0)).to(value.device))


def _in_order_of(arg: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A copy of the value with its dimensions in the same order in memory as those of the argument."""
    order = sorted(range(arg.dim()), key=arg.stride, reverse=True)
    inverse = [order.index(i) for i in range(arg.dim())]
    copy = value.permute(order).contiguous().permute(inverse)
    return copy.requires_grad_(arg.requires_grad)


def _rows_and_columns(call: PlannedCall, rows: int, columns: int) -> tuple[list[int], Integers]:
    """That many rows and columns of the batch, around the place where two sequences fork.

    The sequences are neighbours in lexicographic order, the shortest that share something and then fork, if any do.
    """
    tree, tokens = call.rows.tree, call.rows.tokens
    position = _forking(tree)
    begin = max(0, min(position - 1, len(tree.order) - rows))
    near = dict.fromkeys(map(tokens.row_of, tree.order[begin:].tolist()))
    chosen = list(dict.fromkeys([*near, *range(call.batch)]))[:rows]
    packed = tokens.segments is not None
    pair = tree.order[max(0, position - 1) : position + 1] if packed else tree.order[position : position + 1]
    pieces = [_around_fork(call, int(one), int(tree.common[position]), columns // len(pair)) for one in pair]
    wanted = np.unique(np.concatenate(pieces))
    others = np.setdiff1d(np.arange(call.tokens), wanted)
    return chosen if rows < call.batch else list(range(rows)), np.sort(np.append(wanted, others)[:columns])


def _around_fork(call: PlannedCall, sequence: int, depth: int, columns: int) -> Integers:
    """Columns of the batch next to the one where a sequence forks."""
    real = call.rows.tokens.places_of(sequence) % call.tokens
    fork = int(real[min(depth, len(real) - 1)]) if len(real) else 0
    start = int(np.clip(fork - columns // 2, 0, call.tokens - columns))
    return np.arange(start, start + columns)


def _forking(tree: PrefixTree) -> int:
    """Where in lexicographic order the shortest sequence is that shares something with the one before, and forks."""
    lengths, common = tree.lengths[tree.order], tree.common
    longer, shorter = (np.append(0, choose(lengths[1:], lengths[:-1])) for choose in (np.maximum, np.minimum))
    return int(np.lexsort((longer, common >= shorter, common == 0, shorter == 0))[0])


def _bytes(call: PlannedCall, new: Sizes) -> int:
    """At most what both programs hold at one time: all intermediate values, and gradients of all parameters."""
    program = call.program
    known: dict[sympy.Expr, int] = {}

    def number(size: Any) -> int:
        expr = expression(size)
        if expr not in known:
            known[expr] = int(_evaluate(expr, new)) if expr.free_symbols <= new.keys() else 1
        return known[expr]

    total = 0
    for node in program.parameter_dependent:
        if is_tensor(node) and node.op != "placeholder":
            value = node.meta["val"]
            count = int(np.prod([number(size) for size in value.shape]))
            total += 2 * count * value.dtype.itemsize
    for layer in program.attention:
        shape = program.mixer_nodes[layer.index].meta["val"].shape
        batch, heads, tokens, _ = (number(size) for size in shape)
        total += 2 * batch * heads * tokens * tokens * layer.dtype.itemsize
    trained = [call.args[spec.index] for spec in program.inputs if spec.requires_grad] if program.training else []
    return total + sum(p.numel() * (2 * p.dtype.itemsize + statistics_dtype(p.dtype).itemsize) for p in trained)
