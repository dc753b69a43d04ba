"""input_sizes: find the inputs of a call that are weights, make sizes of weights and ids constant, and those of indices
equal to those of what they index.

Dynamo traces all inputs except parameters of modules with symbolic sizes, since the sizes that count rows and tokens
are known only from the mixer calls. Making a size constant adds a guard, so another number is traced anew.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import sympy
import torch
from torch import fx

from dta_compile.executable.layouts import InputKind
from dta_compile.ops.mixer import MIXERS
from dta_compile.passes.axes.layouts import batch_and_tokens, mixer_calls
from dta_compile.passes.contracts import contract
from dta_compile.passes.graphs.operators import aten
from dta_compile.passes.program import AmbiguousAxes, Program, ancestors
from dta_compile.passes.symbols import free_symbols, hint, sizes, value_of

BY_INDEX = (aten.gather.default, aten.scatter.src, aten.scatter.value, aten.scatter_add.default)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)


@contract(reads=["module", "placeholders", "own_symbols"], rewrites=["inputs"])
def input_sizes(program: Program) -> None:
    """Mark computed weights as parameters in `program.inputs`, and make feature sizes of weights and ids constant."""
    calls = [batch_and_tokens(call) for call in mixer_calls(program.graph)]
    tokens = {length for _, length in calls}
    counting = free_symbols(size for both in calls for size in both)
    inputs, frozen = list(program.inputs), _frozen_weights(program)
    for index, (node, spec) in enumerate(zip(program.placeholders, inputs, strict=True)):
        if calls and (spec.kind is InputKind.DIFFERENTIABLE_DATA or node in frozen):
            if counting.isdisjoint(free_symbols(sizes(node))):
                _fix(node, range(len(sizes(node))))
                inputs[index] = dataclasses.replace(spec, kind=InputKind.PARAMETER)
            elif not program.own_symbols:
                raise AmbiguousAxes()  # a weight may be as wide as the batch is long
        elif spec.kind is InputKind.DATA and node.meta["val"].dtype in INTEGERS and len(sizes(node)) > 2:
            _fix(node, _codebooks(node, counting, tokens))
    program.inputs = inputs
    for node in program.graph.nodes:
        if node.target in BY_INDEX:
            _equal_sizes(node)


def _frozen_weights(program: Program) -> set[fx.Node]:
    """Return floating-point inputs that are no masks, if operands of a mixer are computed of no parameter at all.

    Weights are among them, as buffers or as the tensors without a gradient that `functional_call` puts in their place.
    """
    trained = (InputKind.PARAMETER, InputKind.DIFFERENTIABLE_DATA)
    pairs = list(zip(program.placeholders, program.inputs, strict=True))
    parameters = {node for node, spec in pairs if spec.kind in trained}
    calls = [(call, len(MIXERS[call.target].operands)) for call in mixer_calls(program.graph)]
    read = [ancestors(arg for arg in call.args[:count] if isinstance(arg, fx.Node)) for call, count in calls]
    if not any(parameters.isdisjoint(sources) for sources in read):
        return set()
    masks = ancestors(arg for call, count in calls for arg in call.args[count:] if isinstance(arg, fx.Node))
    data = {n for n, spec in pairs if spec.kind is InputKind.DATA and n.meta["val"].is_floating_point()}
    return data - (masks - set().union(*read))


def _codebooks(node: fx.Node, counting: set[sympy.Symbol], tokens: set[sympy.Expr]) -> list[int]:
    """Return the dimensions of ids `[B, S, K]` or `[B, K, S]` that count neither rows nor tokens.

    The second dimension counts tokens if no dimension has their number: these may be others (labels `[B, S - 1, K]`).
    """
    first = 1 if tokens.intersection(sizes(node)) else 2
    return [i for i, size in enumerate(sizes(node)) if i >= first and not size.free_symbols <= counting]


def _equal_sizes(node: fx.Node) -> None:
    """Make equal sizes of an operand and its indices one by a guard: these may be fewer, so that torch asks for none.

    Labels `[B, S - 1]` that are an input are then known to be of the tokens of `logits[:, :-1]`.
    """
    source, dim, index = (value_of(arg) for arg in node.args[:3])
    for i, (one, other) in enumerate(zip(source.shape, index.shape, strict=True)):
        if i != dim % source.dim() and hint(one) == hint(other):
            bool(one == other)


def _fix(node: fx.Node, dims: Iterable[int]) -> None:
    for dim in dims:
        int(node.meta["val"].shape[dim])
