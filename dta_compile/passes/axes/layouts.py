"""The algebra of layouts: how the axes of operands combine, and what it means that an operator mixes tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from dta_compile.executable.layouts import Axis, Frame, Layout
from dta_compile.ops.mixer import MIXERS
from dta_compile.passes.graphs.operators import DIFFERENTIABLE_COPIES
from dta_compile.passes.symbols import hint, sizes

aten = torch.ops.aten

Rule = Callable[[fx.Node, "Arguments"], "Layout | tuple[Layout, ...]"]


class MixesTokens(Exception):
    """The operator makes one token's value depend on another's (or on another sequence's)."""


class Arguments:
    """The layouts of a node's arguments, and the adoption of dense inputs into a frame.

    A value computed outside the token region (shifted labels, say) carries no frame of its own: its token axis takes
    the frame of the token-region value that it is combined with. `adopted` records that, per argument.
    """

    def __init__(self, layouts: dict[fx.Node, Layout], dense: Callable[[fx.Node], bool]) -> None:
        self.layouts, self.dense = layouts, dense
        self.adopted: dict[fx.Node, Layout] = {}

    def __getitem__(self, node: Any) -> Layout:
        if not isinstance(node, fx.Node):
            return Layout(())
        return self.adopted.get(node) or self.layouts[node]

    def adopt(self, node: fx.Node, layout: Layout) -> None:
        """Let a dense argument take on a layout: that of the tokens it is combined with."""
        if layout != self.layouts[node]:
            self.adopted[node] = layout


def memory_order(value: torch.Tensor) -> tuple[int, ...]:
    """Dimensions from the widest stride to the narrowest, as copies of the value have them (preserve_format)."""
    shape, strides = (list(map(hint, numbers)) for numbers in (value.shape, value.stride()))
    copy = torch.empty_like(torch.empty_strided(shape, strides, device="meta"))
    return tuple(sorted(range(len(shape)), key=lambda dim: (-int(copy.stride()[dim]), dim)))


def broadcast(
    node: fx.Node,
    arguments: Arguments,
    operands: Sequence[fx.Node] | None = None,
    beside: Layout | None = None,
    at_left: bool = False,
) -> Layout:
    """Layout of an elementwise result: operands aligned at the right, at most one axis a dimension, one frame.

    `beside` is the layout of one more operand, which is no argument of the node. `at_left`: aligned there instead.
    """
    operands = [arg for arg in (operands or node.all_input_nodes) if is_tensor(arg)]
    layouts = [arguments[arg] for arg in operands] + ([beside] if beside else [])
    rank = max(len(layout.dims) for layout in layouts)
    frame = unify_frames([layout.frame for layout in layouts if layout.token_dim is not None])
    dims: list[Axis | None] = []
    for dim in range(rank):
        axes = {axis for layout in layouts if (axis := _aligned(layout, rank, dim, at_left)) is not None}
        if len(axes) > 1:
            raise MixesTokens("it combines the batch axis with the token axis")
        dims.append(next(iter(axes), None))
    result = Layout(tuple(dims), frame)
    for arg in operands:
        _adopt_operand(arg, result, rank, arguments, at_left)
    return single_token_axis(result)


def _aligned(layout: Layout, rank: int, dim: int, at_left: bool) -> Axis | None:
    own = dim if at_left else dim - (rank - len(layout.dims))
    return layout.dims[own] if 0 <= own < len(layout.dims) else None


def _adopt_operand(arg: fx.Node, result: Layout, rank: int, arguments: Arguments, at_left: bool) -> None:
    """Give a dense operand the axes and frame of the result where its sizes say that it has them."""
    layout, shape = arguments[arg], sizes(arg)
    dims = list(layout.dims)
    for own, size in enumerate(shape):
        axis = result.dims[own if at_left else own + rank - len(shape)]
        if dims[own] is None and axis is not None and size != 1:
            if (
                axis is not Axis.TOKEN
                or not arguments.dense(arg)
                or result.frame is None
                or size != result.frame.length
            ):
                raise MixesTokens(f"it lines up {arg.name} (size {size}) with the {axis.value} axis")
            dims[own] = axis
    frame = result.frame if Layout(tuple(dims)).token_dim is not None else None
    if arguments.dense(arg):
        arguments.adopt(arg, Layout(tuple(dims), frame))


def unify_frames(frames: Sequence[Frame | None]) -> Frame | None:
    """The one frame that all operands agree on; operands without a start (dense values) take the others'."""
    known = [frame for frame in frames if frame is not None]
    if not known:
        return None
    best = next((frame for frame in known if frame.start is not None), known[0])
    for frame in known:
        if sympy.simplify(frame.length - best.length) != 0:
            raise MixesTokens(f"it combines {frame.length} tokens with {best.length}")
        if frame.start is not None and sympy.simplify(frame.start - best.start) != 0:
            raise MixesTokens("it combines tokens at different positions (a shift along the token axis)")
    return best


def single_token_axis(layout: Layout) -> Layout:
    """The layout, if it runs over tokens once and over sequences once; else raises `MixesTokens`."""
    axes = [axis for axis in layout.dims if axis is not None]
    if sum(axis.is_over_tokens for axis in axes) > 1:
        raise MixesTokens("it compares every token with every other")
    if sum(axis.is_over_sequences for axis in axes) > 1:
        raise MixesTokens("it compares every sequence with every other")
    return layout


def require_feature(layout: Layout, dim: int, what: str) -> int:
    """`dim` made non-negative; raises unless it is a feature dimension."""
    dim = dim % max(len(layout.dims), 1)
    axis = layout.dims[dim] if layout.dims else None
    if axis is not None:
        raise MixesTokens(f"it {what} along the {'token' if axis.is_over_tokens else 'batch'} axis")
    return dim


def argument(node: fx.Node, position: int, name: str) -> Any:
    """An argument by the operator's own schema: given by position, by name, or its default."""
    schema = node.target._schema.arguments if hasattr(node.target, "_schema") else ()
    if position < len(node.args):
        return node.args[position]
    named = {argument.name: argument.default_value for argument in schema}
    return node.kwargs.get(name, named.get(name))


def is_tensor(node: Any) -> bool:
    """Whether an argument is a node whose value is one tensor."""
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


def through_copies(node: fx.Node) -> fx.Node:
    """The value that a node only copies, or slices everything of."""
    while node.target in DIFFERENTIABLE_COPIES or (
        node.target is aten.slice.Tensor and sizes(node) == sizes(node.args[0])
    ):
        node = node.args[0]
    return node


def mixer_calls(graph: fx.Graph) -> list[fx.Node]:
    """The calls, in order."""
    return [node for node in graph.nodes if node.target in MIXERS]


def batch_and_tokens(call: fx.Node) -> tuple[sympy.Expr, sympy.Expr]:
    """The sizes that a call is over, by its first operand: for attention, the query `[B, heads, S, D]`."""
    mixer, shape = MIXERS[call.target], sizes(call.args[0])
    return shape[mixer.batch_dim], shape[mixer.token_dim]
