"""Calls between an encoder and the tokens that treat each unit (image, video, clip), or each feature, by itself.

They run before the tree, on the features of distinct units alone. This is exact if row k of their result depends on
row k of the encoder's output, and on what all units share.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import fx

from dta_compile.capture.media.encoder_calls import encode
from dta_compile.capture.media.feature_cut import unknown_use
from dta_compile.passes.program import ancestors, is_boolean, name_of
from dta_compile.passes.symbols import expression
from dta_compile.runtime.encoders.encoder import encoder_of

# Calls that treat each number by itself. The first three kinds are allowed with one tensor input.
CASTS_AND_COPIES = {"to", "type", "type_as", "contiguous", "float", "double", "half", "bfloat16", "detach", "clone"}
SCALES = {"mul", "mul_", "imul", "div", "div_", "truediv", "itruediv"}
ACTIVATIONS = {"gelu", "silu", "relu", "tanh", "sigmoid"}
ELEMENTWISE = {"add", "sub", "mul", "div", "truediv", "where", "masked_fill"}  # with several
SHAPES = {"view", "reshape", "flatten", "unsqueeze"}
LAYERS = {"linear", "layer_norm", "rms_norm"}  # over the last dimension


def call_of(node: fx.Node) -> fx.Node:
    """Return the call of an encoder from which a value (features, or their mask) is computed row by row.

    Raises:
        RefusalError: rows of features are computed from one another, or by several encoders.
    """
    if node.target is encode:
        return node
    sources = [arg for arg in node.all_input_nodes if _is_of_features(arg)]
    calls = {call_of(source) for source in sources}
    if len(calls) != 1 or not _is_row_wise(node, sources, next(iter(calls))):
        raise unknown_use(node)
    return calls.pop()


def _is_row_wise(node: fx.Node, sources: Sequence[fx.Node], call: fx.Node) -> bool:
    """Return whether row k of a node depends on row k of each of its feature inputs only."""
    name, first, args = name_of(node), sources[0], node.all_input_nodes
    if node.target is operator.getitem:
        index = node.args[1]
        adds_dims = isinstance(index, tuple) and all(part in (None, Ellipsis, slice(None)) for part in index)
        # On the call itself, it selects one of the encoder's outputs.
        return first is call or _is_all_true(index) or (adds_dims and _count(node) == _count(first))
    if name in SHAPES or name == "squeeze":
        return is_boolean(node) or (name in SHAPES and _tensor(node).shape[-1] == _tensor(first).shape[-1])
    if name in CASTS_AND_COPIES or (name in SCALES | ACTIVATIONS and len(args) == 1):
        return True
    others = [arg for arg in args if arg not in sources]
    if name in LAYERS:
        reads_last = name == "linear" or (len(node.args) > 1 and len(node.args[1]) == 1)
        return sources == [node.args[0]] and reads_last and all(map(_is_constant, others))
    are_shared = all(_is_shared_by_rows(other, node) for other in others) and _rows_stay_within_units(first, call)
    if name in ELEMENTWISE:
        return are_shared and all(
            _tensor(s).dim() == _tensor(node).dim() and _count(s) == _count(node) for s in sources
        )
    if name == "cat" and node.args:
        dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
        return len(node.args[0]) == 1 or (are_shared and dim % _tensor(node).dim() > 0)
    return False


def _is_all_true(index: Any) -> bool:
    """Return whether an index is an encoder's mask of the features that it returns, which is true for all of them."""
    while isinstance(index, fx.Node) and is_boolean(index) and name_of(index) in (*SHAPES, "squeeze", "to"):
        index = index.args[0]
    if not isinstance(index, fx.Node) or not is_boolean(index) or index.target is not operator.getitem:
        return False
    call = index.args[0]
    return call.target is encode and any(form[0] == "mask" for _, form in encoder_of(call.args[0]).form.fields)


def _is_of_features(node: fx.Node) -> bool:
    """Return whether a value depends on features, and not only on a size of theirs (`x.shape[0]`)."""
    return any(part.target is encode for part in ancestors([node], lambda part: not _is_tensor(part)))


def _is_constant(node: fx.Node) -> bool:
    """Return whether a tensor depends neither on features nor on a size of theirs."""
    return _is_tensor(node) and all(part.target is not encode for part in ancestors([node]))


def _is_shared_by_rows(node: fx.Node, result: fx.Node) -> bool:
    """Return whether all rows of a result share an operand, however many there are: expanded ones have stride 0."""
    source = node.args[0] if name_of(node) in ("expand", "expand_as") else node
    if not isinstance(source, fx.Node) or not _is_tensor(node) or not _is_constant(source):
        return False
    value = _tensor(node)
    return value.dim() < _tensor(result).dim() or _count(node) == 1 or expression(value.stride(0)) == 0


def _rows_stay_within_units(node: fx.Node, call: fx.Node) -> bool:
    """Return whether no row mixes two units: there is a whole multiple of as many rows as the encoder has entries."""
    features: torch.Tensor = call.meta["example_value"][0]
    entries = expression(features.shape[0]) / encoder_of(call.args[0]).form.per_entry
    return bool(sympy.cancel(_count(node) / entries).is_Integer)


def _count(node: fx.Node) -> sympy.Expr:
    return expression(_tensor(node).shape[0])


def _tensor(node: fx.Node) -> torch.Tensor:
    value = node.meta["example_value"]
    assert isinstance(value, torch.Tensor), node
    return value


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.Tensor)
