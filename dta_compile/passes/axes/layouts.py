"""The algebra of layouts, which token rules are written with: combine axes and frames of operands, or raise
`MixesTokens`; and finding the mixer calls of a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from dta_compile.executable.layouts import Axis, Flat, Frame, Layout
from dta_compile.ops.mixer import MIXERS
from dta_compile.passes.axes.refusals import ROWS, SCORES
from dta_compile.passes.graphs.nodes import is_uniform
from dta_compile.passes.program import Advice
from dta_compile.passes.symbols import hint, sizes

Rule = Callable[[fx.Node, "Arguments"], "Layout | tuple[Layout, ...]"]


class MixesTokens(Exception):
    """Raised by a token rule whose operator makes a token's value depend on other tokens or other sequences."""

    def __init__(self, reason: str, advice: Advice | None = None) -> None:
        super().__init__(reason)
        self.advice = advice


class Arguments:
    """Layouts of a node's arguments, with the frames that dense arguments adopt.

    A dense value, computed outside the token region (shifted labels, for example), has no frame of its own: its token
    axis takes the frame of the token-region value that it is combined with. `adopted` records this per argument.
    """

    def __init__(self, layouts: dict[fx.Node, Layout], dense: Callable[[fx.Node], bool]) -> None:
        self.layouts, self.dense = layouts, dense
        self.adopted: dict[fx.Node, Layout] = {}

    def __getitem__(self, node: Any) -> Layout:
        if not isinstance(node, fx.Node):
            return Layout(())
        return self.adopted.get(node) or self.layouts[node]

    def adopt(self, node: fx.Node, layout: Layout) -> None:
        """Give a dense argument the layout of the tokens that it is combined with."""
        if layout != self.layouts[node]:
            self.adopted[node] = layout


def memory_order(value: torch.Tensor) -> tuple[int, ...]:
    """Return the dimensions of a copy of a value (preserve_format) from the widest stride to the narrowest."""
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
    """Return the layout of a pointwise result: operands aligned at the right, one axis per dimension, one frame.

    `beside` is the layout of one more operand that is no argument of the node. `at_left` aligns operands at the left.
    """
    operands = [arg for arg in (operands or node.all_input_nodes) if is_tensor(arg)]
    layouts = [arguments[arg] for arg in operands if not is_uniform(arg)] + ([beside] if beside else [])
    uniform = [arguments[arg] for arg in operands if is_uniform(arg)]  # axes and frames of others go first
    rank = max(len(layout.dims) for layout in (*layouts, *uniform))
    frame = unify_frames(_frames(layouts) or _frames(uniform))
    dims: list[Axis | Flat | None] = []
    for dim in range(rank):
        axes = _axes(layouts, rank, dim, at_left) or _axes(uniform, rank, dim, at_left)
        if len(axes) > 1:
            raise MixesTokens("it combines the batch axis with the token axis")
        dims.append(next(iter(axes), None))
    result = Layout(tuple(dims), frame)
    for arg in operands:
        _adopt_operand(arg, result, rank, arguments, at_left)
    return single_token_axis(result)


def _frames(layouts: Sequence[Layout]) -> list[Frame | None]:
    return [layout.frame for layout in layouts if layout.token_dim is not None]


def _axes(layouts: Sequence[Layout], rank: int, dim: int, at_left: bool) -> set[Axis | Flat]:
    """Return the axes of some operands along a dimension of the result."""
    places = ((layout.dims, dim if at_left else dim - (rank - len(layout.dims))) for layout in layouts)
    return {axis for dims, own in places if 0 <= own < len(dims) and (axis := dims[own]) is not None}


def _adopt_operand(arg: fx.Node, result: Layout, rank: int, arguments: Arguments, at_left: bool) -> None:
    """Give a dense operand the axes and frame of the result where its sizes match; raise `MixesTokens` elsewhere."""
    shape = sizes(arg)
    dims: list[Axis | Flat | None] = [None] * len(shape) if is_uniform(arg) else list(arguments[arg].dims)
    for own, size in enumerate(shape):
        axis = result.dims[own if at_left else own + rank - len(shape)]
        if dims[own] is None and axis is not None and size != 1:
            is_all_tokens = axis is Axis.TOKEN and result.frame is not None and size == result.frame.length
            if not (is_uniform(arg) or (is_all_tokens and arguments.dense(arg))):
                raise MixesTokens(f"it lines up {arg.name} (size {size}) with the {axis.value} axis")
            dims[own] = axis
    frame = result.frame if Layout(tuple(dims)).token_dim is not None else None
    if arguments.dense(arg):
        arguments.adopt(arg, Layout(tuple(dims), frame))


def unify_frames(frames: Sequence[Frame | None]) -> Frame | None:
    """Return the common frame of all operands; frames without a start (dense values) take the start of the others."""
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
    """Return the layout; raise `MixesTokens` if two dimensions run over tokens, or two over sequences."""
    axes = [axis for axis in layout.dims if axis is not None]
    if sum(axis.is_over_tokens for axis in axes) > 1:
        raise MixesTokens("it compares every token with every other", SCORES)
    if sum(axis.is_over_sequences for axis in axes) > 1:
        raise MixesTokens("it compares every sequence with every other", ROWS)
    return layout


def require_feature(layout: Layout, dim: int, what: str, advice: Advice | None = None) -> int:
    """Return `dim` as a non-negative number; raise `MixesTokens`, with advice for tokens, unless it is of features."""
    dim = dim % max(len(layout.dims), 1)
    axis = layout.dims[dim] if layout.dims else None
    if axis is None:
        return dim
    if axis.is_over_tokens:
        raise MixesTokens(f"it {what} along the token axis", advice)
    raise MixesTokens(f"it {what} along the batch axis", ROWS)


def is_tensor(node: Any) -> bool:
    """Return whether an argument is a node whose value is one tensor."""
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


def mixer_calls(graph: fx.Graph) -> list[fx.Node]:
    """Return the mixer calls of a graph, in order."""
    return [node for node in graph.nodes if node.target in MIXERS]


def batch_and_tokens(call: fx.Node) -> tuple[sympy.Expr, sympy.Expr]:
    """Return the numbers of sequences and tokens of a mixer call, from its first operand (query `[B, heads, S, D]`)."""
    mixer, shape = MIXERS[call.target], sizes(call.args[0])
    return shape[mixer.batch_dim], shape[mixer.token_dim]
