"""At which tokens the input of a recurrence is zero: where a mask that the model multiplies with is.

A state of zero stays zero there, so padding before a sequence leaves no trace. What follows from what, by operator:
a product is zero where a factor is, a sum where all its terms are, and most activation functions of zero are zero.
"""

from __future__ import annotations

import operator
from typing import Any

import sympy
import torch
from torch import fx

from dta_compile.executable.layouts import Axis, Frame, Layout
from dta_compile.ops.mixer import MIXERS
from dta_compile.passes.graphs.operators import QUOTIENTS, SAME_ENTRIES, ZERO_OF_ZERO
from dta_compile.passes.program import Program
from dta_compile.passes.symbols import sizes

aten = torch.ops.aten

PRODUCTS = (aten.mul.Tensor, aten.mm.default, aten.bmm.default, aten.mv.default)
SUMS = (aten.add.Tensor, aten.sub.Tensor)
LISTS = (aten.cat.default, aten.stack.default)
# Zero where their first argument is; along dimensions, which are features.
FOLLOWED = (
    ZERO_OF_ZERO
    | QUOTIENTS
    | {aten.mul.Scalar, aten.repeat.default, aten.contiguous.default, operator.getitem}
    | {aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int}
    | {aten.silu.default, aten.gelu.default, aten.relu.default, aten.tanh.default}
)
# The same numbers for the same tokens, given that both are over all of them.
SAME_TOKENS = SAME_ENTRIES | {aten.contiguous.default}
Masks = frozenset[fx.Node]
NONE: Masks = frozenset()


class Silencers:
    """For values of a program the masks, one number a token computed from inputs, that make them zero.

    A value is zero at every token before the first one of a sequence where one of its masks is zero. (That of a
    recurrence is so because its state is zero up to there, which needs zeros at all tokens before.)
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.found: dict[fx.Node, Masks] = {}

    def of(self, node: fx.Node) -> Masks:
        """The masks of a value with gradient."""
        pending = [node]
        while pending:
            one = pending[-1]
            missing = [arg for arg in _followed(one) if arg not in self.found]
            if one in self.found or not missing:
                self.found.setdefault(one, self._masks(one))
                pending.pop()
            else:
                pending += missing
        return self.found[node]

    def of_call(self, call: fx.Node) -> Masks:
        """The masks where a recurrence leaves a state of zero alone."""
        return NONE.union(*(self.of(call.args[i]) for i in MIXERS[call.target].silent))

    def _masks(self, node: fx.Node) -> Masks:
        if not self._is_over_tokens(node):
            return NONE
        if node not in self.program.parameter_dependent:
            return frozenset([node]) if self._is_mask(node) else NONE
        arguments = [self.found[arg] for arg in _followed(node)]
        if not arguments:
            return NONE
        if node.target in PRODUCTS or node.target in MIXERS:
            return NONE.union(*arguments)
        return frozenset.intersection(*arguments)

    def _is_over_tokens(self, node: fx.Node) -> bool:
        """Whether a value has entries for all tokens of the batch: else zero at a token means nothing."""
        values = self.program.values.get(node)
        layouts = values if isinstance(values, tuple) else (values,)
        whole = Frame(sympy.S.Zero, self.program.tokens)
        return all(isinstance(one, Layout) and one.token_dim is not None and one.frame == whole for one in layouts)

    def _is_mask(self, node: fx.Node) -> bool:
        """One number for each token."""
        layout = self.program.layout(node)
        axes = tuple(axis for axis in layout.dims if axis is not None)
        is_small = all(axis is not None or size == 1 for axis, size in zip(layout.dims, sizes(node), strict=True))
        return is_small and axes in ((Axis.BATCH, Axis.TOKEN), (Axis.TOKEN,), (Axis.ROWS,))


def _followed(node: fx.Node) -> list[fx.Node]:
    """The arguments that decide whether a value is zero."""
    if node.op != "call_function":
        return []
    arguments: list[Any]
    if node.target in PRODUCTS or node.target in SUMS:
        arguments = list(node.args[:2])
        if not all(isinstance(arg, fx.Node) for arg in arguments):  # by a number, or of one
            return arguments[:1] if node.target in PRODUCTS and isinstance(arguments[0], fx.Node) else []
    elif node.target in LISTS:
        arguments = list(node.args[0])
    elif node.target is aten.where.self:
        arguments = list(node.args[1:3])
    elif node.target in MIXERS:
        arguments = [node.args[i] for i in MIXERS[node.target].silent]
    elif node.target in FOLLOWED:
        arguments = [node.args[0]]
    else:
        return []
    return [arg for arg in arguments if isinstance(arg, fx.Node)]


def padding_mask_of(mask: fx.Node) -> fx.Node | None:
    """The input that a mask is, looked at in another shape or dtype, if it is a padding mask.

    That is taken from its being called a mask, and made of integers or truth values.
    """
    node = mask
    while node.op == "call_function" and node.target in SAME_TOKENS and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    value = node.meta.get("val")
    is_integer = isinstance(value, torch.Tensor) and not value.is_floating_point()
    return node if node.op == "placeholder" and is_integer and "mask" in node.meta.get("source", "") else None
