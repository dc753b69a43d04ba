"""head_rows: find the tokens at which frontier values are used, so that the head runs on rows of these tokens only.

A loss over labels ignores most tokens of a rollout: `where(labels != -100, nll, 0)`. A frontier value `x` needs no row
where a condition on the call's inputs does not hold, if one of two facts is proven there:

* no output depends on it: on every path from `x` to the outputs a selection takes another value (in the epilogue);
* it is zero, and so is its gradient: `x` itself is a selection between a value and zero (in the token region).

In both cases zero at such a token gives the same outputs, and a gradient that arrives there is dropped, even if it is
infinite: in the epilogue it flows to other frontier values only, since all token-wise uses of weights belong to the
region. A product with a mask of zeros and ones is no selection, because `0 * inf` is not zero; the backward, which
knows the gradients themselves, skips those tokens.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from dta_compile.executable.executable import Condition, Use
from dta_compile.executable.layouts import Layout
from dta_compile.passes.axes.layouts import is_tensor
from dta_compile.passes.contracts import contract
from dta_compile.passes.graphs.arguments import argument, where_of
from dta_compile.passes.graphs.nodes import filled_with
from dta_compile.passes.graphs.operators import FILLS, PRODUCTS, QUOTIENTS, SAME_ENTRIES, SUMS, ZERO_OF_ZERO, aten
from dta_compile.passes.program import FrontierValue, Program, Value, items_of

Conditions = frozenset[Condition]  # a conjunction
ALWAYS: frozenset[Conditions] = frozenset([frozenset()])  # a disjunction of conjunctions, here of the empty one
NEVER: frozenset[Conditions] = frozenset()
MOST_USES = 8  # a value with more uses counts as used everywhere


@contract(
    reads=["module", "batch", "values", "input_layouts", "parameter_dependent", "region"],
    rewrites=["frontier"],
    may_be_skipped=True,
)
def head_rows(program: Program) -> None:
    """Narrow the `uses` of every frontier value."""
    reads, nonzero = _reads(program), _nonzero(program)
    narrowed = []
    for value in program.frontier:
        by_sequence = value.layout.is_over_sequences or program.batch is None
        if by_sequence and not value.is_cache:
            value = dataclasses.replace(value, uses=_combined(value, reads[value.node], nonzero[value.node]))
        narrowed.append(value)
    program.frontier = narrowed


def _combined(value: FrontierValue, reads: Iterable[Use], nonzero: frozenset[Conditions]) -> tuple[Use, ...]:
    """Return the tokens at which a value is both read and not zero, without uses that are part of another use."""
    uses = {Use(read.frame, read.conditions | conditions) for read in reads for conditions in nonzero}
    widest = [
        use for use in uses if not any(use.frame == other.frame and other.conditions < use.conditions for other in uses)
    ]
    return tuple(sorted(widest, key=str)) if len(widest) <= MOST_USES else value.uses


def _reads(program: Program) -> dict[fx.Node, frozenset[Use]]:
    """By frontier value and token-wise value of the epilogue, return the tokens at which outputs depend on it."""
    frontier = {value.node for value in program.frontier}
    reads: dict[fx.Node, frozenset[Use]] = {}
    for node in reversed(program.graph.nodes):
        inside = node in program.region and node not in frontier
        if node in program.parameter_dependent and not inside and _is_token_wise(program.values.get(node)):
            # Users inside the region read the rows of a chunk, not the dense value.
            outside = [user for user in node.users if user not in program.region]
            uses = frozenset().union(*(_read_by(program, user, node, reads) for user in outside))
            reads[node] = uses if len(uses) <= MOST_USES else _everywhere(program, node)
    return reads


def _read_by(program: Program, user: fx.Node, node: fx.Node, reads: dict[fx.Node, frozenset[Use]]) -> frozenset[Use]:
    """Return the tokens at which outputs depend on `node` through `user`."""
    if user.target is aten.sym_size.int:
        return frozenset()
    if user not in reads:  # an output, or an operator that mixes tokens
        return _everywhere(program, node)
    branches = [condition for operand, condition in _branches(program, user) if operand is node]
    if len(branches) != 1:
        return reads[user]
    return frozenset(dataclasses.replace(use, conditions=use.conditions | {branches[0]}) for use in reads[user])


def _everywhere(program: Program, node: fx.Node) -> frozenset[Use]:
    return frozenset([Use(_frame(program.values[node]))])


def _nonzero(program: Program) -> dict[fx.Node, frozenset[Conditions]]:
    """By value of the region, return the conditions under which it may be other than zero, for any parameters."""
    nonzero: dict[fx.Node, frozenset[Conditions]] = {}

    def of(arg: Any) -> frozenset[Conditions]:
        return NEVER if _is_zero(program, arg) else nonzero.get(arg, ALWAYS)

    for node in program.graph.nodes:
        if node not in program.region:
            continue
        branches = _branches(program, node)
        if branches:
            parts = [frozenset(all_of | {condition} for all_of in of(operand)) for operand, condition in branches]
        else:
            operands = _zero_if_zero(node)
            parts = [ALWAYS] if operands is None else [of(operand) for operand in operands]
        union = frozenset().union(*parts)
        nonzero[node] = union if len(union) <= MOST_USES else ALWAYS
    return nonzero


def _branches(program: Program, node: fx.Node) -> list[tuple[Any, Condition]]:
    """Return the operands of a selection, each with the condition under which it is taken; empty for other nodes."""
    mask, value, other = where_of(node) or (None, None, None)
    if mask is None or (layout := _mask_layout(program, node, mask)) is None:
        return []
    return [(value, Condition(mask, layout, True)), (other, Condition(mask, layout, False))]


def _mask_layout(program: Program, node: fx.Node, mask: fx.Node) -> Layout | None:
    """Return the layout of a mask that has one number per token and needs no parameters; None for other masks."""
    value = program.values[node]
    own = program.input_layouts.get((node, mask), program.values[mask])
    if mask in program.parameter_dependent or not isinstance(own, Layout) or not own.labelled:
        return None
    shape = mask.meta["val"].shape
    if any(axis is None and size != 1 for size, axis in zip(shape, own.dims, strict=True)):
        return None
    return Layout(own.dims, _frame(value)) if _is_token_wise(value) else None


def _zero_if_zero(node: fx.Node) -> list[Any] | None:
    """Return operands such that the result is zero if all of them are; None if nothing is known."""
    if node.target in ZERO_OF_ZERO:
        return [node.args[0]]
    if node.target in SUMS:
        return list(node.args[:2]) if _is_finite(argument(node, "alpha")) else None
    if node.target in PRODUCTS:
        first, second = node.args[:2]
        return [first] if _is_finite(second) else [second] if _is_finite(first) else None
    if node.target in QUOTIENTS:
        by = node.args[1]  # not a tensor of integers, which may be zero
        return [node.args[0]] if not is_tensor(by) and _is_finite(by) and by != 0 else None
    return None


def _is_finite(factor: Any) -> bool:
    """Return whether `0 * factor` is zero: the factor is a finite number or a tensor of integers."""
    if is_tensor(factor):
        return not (factor.meta["val"].is_floating_point() or factor.meta["val"].is_complex())
    return isinstance(factor, (int, float)) and math.isfinite(factor)


def _is_zero(program: Program, arg: Any) -> bool:
    """Return whether an argument is the constant zero."""
    if not isinstance(arg, fx.Node):
        return isinstance(arg, (int, float)) and arg == 0
    if arg.op == "get_attr":
        constant = getattr(program.module, arg.target, None)
        return isinstance(constant, torch.Tensor) and constant.numel() == 1 and not constant.item()
    if arg.target in FILLS:
        return _is_zero(program, filled_with(arg))
    return arg.target in SAME_ENTRIES and _is_zero(program, arg.args[0])


def _is_token_wise(value: Value) -> bool:
    return all(isinstance(item, Layout) and item.frame is not None for item in items_of(value))


def _frame(value: Value) -> Any:
    """Return the token positions that a token-wise value covers."""
    return items_of(value)[0].frame  # type: ignore[union-attr]
