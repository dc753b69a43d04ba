"""Symbolic sizes: which dimensions of inputs are free, and which of them are the same.

Dynamo's first trace of a call is static, except for inputs that are marked before.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import fx

from dta_compile.capture.dynamo.restarts import TraceAgain
from dta_compile.errors import RefusalError
from dta_compile.passes.symbols import expression, hint
from dta_compile.torch_compat import as_wrapper, frames, wrap_once
from dta_compile.torch_compat.dynamo import (
    NumpyTensorSource,
    TensorifyScalarRestartAnalysis,
    builder,
    callback_handler,
    maybe_mark_dynamic,
)
from dta_compile.torch_compat.dynamo import config as dynamo_config
from dta_compile.torch_compat.sizes import config as symbolic_shape_config

MARKED = "_dta_marked_dynamic"
# Former values of `use_duck_shape`, if the running trace has a symbol for every dimension.
_duck_shapes_before: list[bool] = []


def trace_again_with_symbolic_sizes(graph: fx.Graph) -> None:
    """Make Dynamo trace this call once more with symbolic batch and token sizes, unless it already has.

    Dynamo's first trace of a call is static, except for inputs that `mark_at_hand` found. All dimensions of inputs
    that are no parameters or buffers are marked as dynamic, except for the last one of floats with more than two
    dimensions (features), unless the last two are equal (a bias over pairs of tokens). Sizes 0 and 1 stay specialised,
    as everywhere in torch.
    """
    data = [node for node in graph.nodes if node.op == "placeholder" and is_data(node)]
    marked = [_mark(node.meta["grapharg"].example, node.meta["example_value"]) for node in data]
    if not any(marked):
        marked = [_mark_rows(node, data) for node in graph.find_nodes(op="placeholder")]
    if any(marked):
        raise TraceAgain("dta: trace with symbolic sizes")


def _mark(example: torch.Tensor, traced: torch.Tensor) -> bool:
    """Mark the dimensions of an input that are constants in its trace as dynamic; return whether that is new."""
    has_features = traced.is_floating_point() and traced.dim() > 2 and traced.shape[-2] != traced.shape[-1]
    counted = traced.dim() - 1 if has_features else traced.dim()
    fixed = [dim for dim in range(counted) if isinstance(traced.shape[dim], int) and traced.shape[dim] > 1]
    if not fixed or getattr(example, MARKED, False):
        return False
    maybe_mark_dynamic(example, fixed)
    setattr(example, MARKED, True)
    return True


def _mark_rows(node: fx.Node, data: Sequence[fx.Node]) -> bool:
    """Mark the rows of a leaf `[B, D]` or `[B]`, and the tokens of one `[B, S]`, as dynamic if the trace made as many
    rows or tokens of other inputs a constant. So it does for tensors that are held by submodules and their hooks.

    Both may be weights, whose sizes are constants; so is then the number of rows or tokens that they are combined with.
    """
    value, grapharg = node.meta.get("example_value"), node.meta.get("grapharg")
    if not isinstance(value, torch.Tensor) or grapharg is None or isinstance(grapharg.example, torch.nn.Parameter):
        return False
    if not (is_weight(value) or _is_held(grapharg)) or value.dim() == 0 or getattr(grapharg.example, MARKED, False):
        return False
    shapes = [other.meta["example_value"].shape for other in data if other.meta["example_value"].dim() > 1]
    sizes = enumerate(map(expression, value.shape[:2]))
    fixed = [dim for dim, size in sizes if size != 1 and size in [expression(shape[dim]) for shape in shapes]]
    if not fixed:
        return False
    maybe_mark_dynamic(grapharg.example, fixed)
    setattr(grapharg.example, MARKED, True)
    return True


def mark_at_hand(translator: Any) -> None:
    """Mark tensor arguments of a function before its first trace, so that no second one is needed."""
    pending, seen = [*translator.f_locals.values()], set()
    while pending:
        value = pending.pop()
        if isinstance(value, torch.Tensor):
            if type(value) is torch.Tensor and not is_weight(value):
                _mark(value, value)
        elif isinstance(value, (dict, collections.UserDict, list, tuple)) and id(value) not in seen:
            seen.add(id(value))
            pending += value.values() if hasattr(value, "values") else value


@as_wrapper
def _with_marked_arrays(
    choose_sizes: Callable[..., Any], example: Any, translator: Any, source: Any, *args: Any, **kwargs: Any
) -> Any:
    """Mark numpy arrays whenever Dynamo chooses the sizes of an input, because each trace makes new tensors of them."""
    if isinstance(source, NumpyTensorSource) and frames.is_ours(translator.output.compiler_fn):
        _mark(example, example)
    return choose_sizes(example, translator, source, *args, **kwargs)


@as_wrapper
def _with_constants_of_modules(wrap: Callable[[Any, float], Any], self: Any, value: float) -> Any:
    """Make a float of a module, as an epsilon of a norm, a constant until it changes, as torch makes its integers.

    With `dynamic=True` it would be an input of the graph: several for each layer, which then cannot be traced once.
    """
    if not (frames.is_ours(self.tx.output.compiler_fn) and self.source.guard_source.is_unspecialized_nn_module()):
        return wrap(self, value)
    with dynamo_config.patch(assume_static_by_default=True):
        return wrap(self, value)


wrap_once(builder, "_automatic_dynamic", _with_marked_arrays)
wrap_once(builder.VariableBuilder, "wrap_symfloat", _with_constants_of_modules)


def trace_again_without_duck_shapes(already: bool) -> NoReturn:
    """Make Dynamo trace once more with a size symbol of its own for every dimension.

    Dimensions that are equal at the first call share a symbol by default (duck shaping), so that B = S would leave the
    axes ambiguous. Raises `RefusalError` if this trace is `already` such a one.
    """
    if already:
        raise RefusalError(
            "the batch axis and the token axis cannot be told apart",
            expected="different symbols for batch and token sizes",
            got="one symbol for both",
            hint="pass dynamic=True to torch.compile, or make the first call with different sizes",
        )
    if _restore_duck_shape not in callback_handler.end_callbacks:
        callback_handler.register_end_callback(_restore_duck_shape)  # in case the trace fails
    _duck_shapes_before.append(symbolic_shape_config.use_duck_shape)
    symbolic_shape_config.use_duck_shape = False
    raise TensorifyScalarRestartAnalysis("dta: trace with a symbol for every dimension")


def restore_duck_shapes() -> bool:
    """Undo `trace_again_without_duck_shapes` after its trace; return whether dimensions have symbols of their own."""
    without = not symbolic_shape_config.use_duck_shape
    _restore_duck_shape()
    return without


def _restore_duck_shape(*_: Any) -> None:
    """Restore `use_duck_shape`; Dynamo also calls this at the end of every compilation."""
    if _duck_shapes_before:
        symbolic_shape_config.use_duck_shape = _duck_shapes_before.pop()


def unify_equal_sizes(graph: fx.Graph) -> None:
    """Unify the symbols of batch and token sizes that are equal in this call, under a guard of Dynamo's.

    Dynamo gives every input its own symbols until an operation proves two of them equal, which `gather` never does.
    """
    known: dict[int, list[Any]] = {0: [], 1: []}  # distinct sizes by dimension; several if there are several batches
    data = [node for node in graph.find_nodes(op="placeholder") if is_data(node) and node.users]
    values = [node.meta["example_value"] for node in data]
    of_tokens = {_hints(value) for value in values if value.dim() == 2 and not value.is_floating_point()}
    for value in values:
        # Positions in several axes are [axes, B, S], whatever their number.
        has_axes = value.dim() == 3 and _hints(value)[1:] in of_tokens and _hints(value)[:2] not in of_tokens
        for dim, size in enumerate(value.shape[1:] if has_axes else value.shape[:2]):
            if isinstance(size, torch.SymInt) and value.dim() > 1 and not value.requires_grad:  # else maybe a weight
                same = next((other for other in known[dim] if hint(other) == hint(size)), None)
                if same is None:
                    known[dim].append(size)
                else:
                    bool(same == size)  # adds a guard: a call where they differ is traced anew


def _hints(value: torch.Tensor) -> tuple[Any, ...]:
    return tuple(map(hint, value.shape))


def is_data(node: fx.Node) -> bool:
    """Return whether a node is a tensor input but no parameter, buffer or other weight."""
    value, grapharg = node.meta.get("example_value"), node.meta.get("grapharg")
    if not isinstance(value, torch.Tensor) or grapharg is None or is_weight(value):
        return False
    return not _names(_path(grapharg)) & {"_parameters", "_buffers", "_modules"}


def _is_held(grapharg: Any) -> bool:
    """Return whether a tensor is reached by way of a module and is no parameter or buffer."""
    container, *_ = _path(grapharg).rpartition("[")
    return "_modules" in _names(container) and not container.endswith(("._parameters", "._buffers"))


def _path(grapharg: Any) -> str:
    """Return the expression by which an input is reached from the arguments of the traced function."""
    name = grapharg.source.name
    return name() if callable(name) else str(name)


def _names(path: str) -> set[str]:
    """Return the whole names in an expression: `L['rollout_buffers']` holds no `_buffers`."""
    return set(re.findall(r"\w+", path))


def is_weight(value: Any) -> bool:
    """Return whether an input is a parameter, or a leaf with a gradient that has the rank of one."""
    if isinstance(value, torch.nn.Parameter):
        return True
    return isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf and value.dim() <= 2
