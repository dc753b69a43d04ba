"""Cut a small call for the self-check out of a real one: some rows and columns of its inputs.

Sizes of the program are expressions in SymInts, so that inputs may be cut to any sizes that the guards of the trace
allow; the data need not be meaningful, because both programs get the same. But no index may be out of bounds (on a GPU
that ends the process), so an axis that is indexed by data keeps its length.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import sympy
import torch

from dta_compile.executable.executable import NumberSpec, TensorSpec
from dta_compile.ops.dtypes import statistics_dtype
from dta_compile.plan import PrefixTree
from dta_compile.runtime.calls.planned_call import PlannedCall
from dta_compile.runtime.rows.batch_rows import Integers

MOST_ROWS = 4
LEAST_TOKENS = 256  # limit of tokens of a small call; for larger calls, 1 / SHARE of the tree's tokens
SHARE = 20
LEAST_COLUMNS = 16
WHOLE = 4  # factor on the limit if the sizes cannot be cut further

Sizes = Mapping[sympy.Symbol, int]


class NotSampled(Exception):
    """Reason why no small call can be made."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """Inputs of a small call, its numbers of rows and columns, and an upper bound of its memory in bytes."""

    args: list[Any]
    rows: int
    columns: int
    bytes: int


def sample(call: PlannedCall) -> Sample:
    """Cut out rows of a planned call that share a prefix, if any do, and columns around their fork.

    Raises:
        NotSampled: its sizes cannot be cut, and it is too large to be run as it is.
    """
    values = call.context.sizes.values(call.args)
    limit = max(LEAST_TOKENS, call.rows.tree.num_rows // SHARE)
    fixed = call.executable.comparison.indexed_by_data
    for (rows, columns), together in itertools.product(_candidates(call, limit, fixed), (False, True)):
        new = _resized(call, values, rows, columns, fixed if together else values.keys())
        if new is None or not _is_allowed(call, new):
            continue
        return Sample(_cut(call, values, new, rows, columns), rows, columns, _bytes(call, new))
    raise NotSampled("its inputs cannot be cut to a few tokens, and whole rows would take too long")


def _candidates(call: PlannedCall, limit: int, fixed: Collection[sympy.Basic]) -> Iterator[tuple[int, int]]:
    """Yield numbers of rows and columns in order of preference."""
    batch, tokens = _free_symbol(call.executable.batch), _free_symbol(call.executable.tokens)
    whole_rows = batch is None or batch in fixed or batch != call.executable.batch
    some = range(min(2, call.batch), min(MOST_ROWS, call.batch) + 1)
    numbers = [call.batch] if whole_rows else [*some, *([call.batch] if call.batch > MOST_ROWS else [])]
    for rows in numbers:
        columns = max(LEAST_COLUMNS, limit // rows // LEAST_COLUMNS * LEAST_COLUMNS)
        may_cut = columns < call.tokens and tokens is not None and tokens not in fixed
        for count in (columns, call.tokens) if may_cut else (call.tokens,):
            if rows * count <= WHOLE * limit:
                yield rows, count


def _free_symbol(expr: sympy.Expr | None) -> sympy.Symbol | None:
    """Return the symbol of a size; None if there is not exactly one."""
    symbols = expr.free_symbols if expr is not None else set()
    return next(iter(symbols)) if len(symbols) == 1 else None


def _resized(
    call: PlannedCall, values: Sizes, rows: int, columns: int, fixed: Collection[sympy.Basic]
) -> dict[sympy.Symbol, int] | None:
    """Return values of the symbols for which the call has the given rows and columns; None if there are none.

    Inputs may have separate symbols for these sizes: symbols of equal value change, too, unless they are `fixed`.
    """
    new, executable = dict(values), call.executable
    for expr, size, wanted in ((executable.batch, call.batch, rows), (executable.tokens, call.tokens, columns)):
        if size != wanted:
            symbol = _free_symbol(expr)
            assert symbol is not None
            for other, value in values.items():
                if other == symbol or (value == values[symbol] and other not in fixed):
                    new[other] -= size - wanted
            if _evaluate(expr, new) != wanted:
                return None
    return new


def _evaluate(expr: Any, values: Sizes) -> Any:
    return expr.xreplace({symbol: sympy.Integer(value) for symbol, value in values.items()})


def _is_allowed(call: PlannedCall, values: Sizes) -> bool:
    """Return whether sizes satisfy the assumptions and guards of the trace."""
    assumed = call.executable.comparison
    least = all(assumed.least[symbol] <= value for symbol, value in values.items() if symbol in assumed.least)
    return least and not any(_evaluate(guard, values) == sympy.false for guard in assumed.guards)


def _cut(call: PlannedCall, old: Sizes, new: Sizes, rows: int, columns: int) -> list[Any]:
    chosen, where = _rows_and_columns(call, rows, columns)
    changed = {symbol for symbol, value in new.items() if value != old[symbol]}
    return [
        _cut_input(call, arg, value, changed, new, chosen, where)
        for arg, value in zip(call.args, call.executable.values, strict=True)
    ]


def _cut_input(
    call: PlannedCall,
    arg: Any,
    value: TensorSpec | NumberSpec | None,
    changed: set[Any],
    new: Sizes,
    rows: list[int],
    columns: Integers,
) -> Any:
    batch = call.executable.batch
    if not isinstance(value, TensorSpec):
        is_changed = value is not None and value.expr.free_symbols & changed
        return int(_evaluate(value.expr, new)) if value is not None and is_changed else arg
    result = arg.detach()
    for dim, size in enumerate(value.shape):
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
    """Select at most `length` entries along `dim`, at `columns`, shifted to fit the size."""
    size = value.shape[dim]
    length = min(length, size)
    index = np.resize(columns, length) - max(0, int(columns[:length].max(initial=0)) - (size - 1))
    return value.index_select(dim, torch.from_numpy(np.maximum(index, 0)).to(value.device))


def _in_order_of(arg: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Copy a value into the memory order of dimensions of the argument that it is cut from."""
    order = sorted(range(arg.dim()), key=arg.stride, reverse=True)
    inverse = [order.index(i) for i in range(arg.dim())]
    copy = value.permute(order).contiguous().permute(inverse)
    return copy.requires_grad_(arg.requires_grad)


def _rows_and_columns(call: PlannedCall, rows: int, columns: int) -> tuple[list[int], Integers]:
    """Choose rows and columns of the batch around the fork of two sequences.

    The sequences are neighbours in lexicographic order, the shortest that share something and then fork, if any do.
    """
    tree, tokens = call.rows.tree, call.rows.tokens
    position = _forking(tree)
    begin = max(0, min(position - 1, len(tree.order) - rows))
    near = dict.fromkeys(map(tokens.row_of, tree.order[begin:].tolist()))
    chosen = list(dict.fromkeys([*near, *range(call.batch)]))[:rows]
    packed = tokens.segments is not None
    pair = tree.order[max(0, position - 1) : position + 1] if packed else tree.order[position : position + 1]
    pieces = [_around_fork(call, int(sequence), int(tree.common[position]), columns // len(pair)) for sequence in pair]
    wanted = np.unique(np.concatenate(pieces))
    others = np.setdiff1d(np.arange(call.tokens), wanted)
    return chosen if rows < call.batch else list(range(rows)), np.sort(np.append(wanted, others)[:columns])


def _around_fork(call: PlannedCall, sequence: int, depth: int, columns: int) -> Integers:
    """Return columns of the batch around the fork of a sequence."""
    real = call.rows.tokens.places_of(sequence) % call.tokens
    fork = int(real[min(depth, len(real) - 1)]) if len(real) else 0
    start = int(np.clip(fork - columns // 2, 0, call.tokens - columns))
    return np.arange(start, start + columns)


def _forking(tree: PrefixTree) -> int:
    """Return the lexicographic position of the shortest sequence that shares a prefix with the one before and forks."""
    lengths, common = tree.lengths[tree.order], tree.common
    longer, shorter = (np.append(0, choose(lengths[1:], lengths[:-1])) for choose in (np.maximum, np.minimum))
    return int(np.lexsort((longer, common >= shorter, common == 0, shorter == 0))[0])


def _bytes(call: PlannedCall, new: Sizes) -> int:
    """Bound the memory of both programs: all intermediate values, and gradients of all parameters."""
    executable = call.executable
    total = 0
    for shape, bytes_of_one in executable.comparison.bytes.items():
        known = (int(_evaluate(size, new)) for size in shape if size.free_symbols <= new.keys())
        total += math.prod(known) * bytes_of_one
    trained = [call.args[spec.index] for spec in executable.inputs if spec.requires_grad] if executable.training else []
    return total + sum(p.numel() * (2 * p.dtype.itemsize + statistics_dtype(p.dtype).itemsize) for p in trained)
