"""Rewrite recurrent mixers of transformers, fla, mamba-ssm and causal-conv1d as our operators.

Their code contains loops over blocks of tokens, or kernels. When Dynamo traces for this backend, it traces a definition
written with `ops.recurrences` instead; for other backends it traces the function's own code. A function is identified
by its name and the module that defines it, never by the model that calls it. A call that continues a state or returns
one, as generation does, keeps the function's own code; while training it is refused (`refuse_final_states`). Importing
this module sets this up, also for packages that are imported later.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import fx

from dta_compile import registration
from dta_compile.capture.flash_attention import copy_of
from dta_compile.errors import RefusalError
from dta_compile.integrations.keywords import refuse_unknown
from dta_compile.integrations.models.known_source import is_known
from dta_compile.integrations.tracing import in_our_graphs
from dta_compile.ops.causal_attention import segments_by_ends
from dta_compile.ops.dtypes import autocast
from dta_compile.ops.library import define
from dta_compile.passes.graphs.source_lines import where

Arguments = dict[str, Any]  # arguments of a call, by name

FINAL_STATE = define("final_state(Tensor value, SymInt[] shape) -> Tensor", lambda value, shape: value.new_empty(shape))
STATE_CONTINUES = define("state_continues(Tensor value) -> Tensor", torch.empty_like, torch.clone)


def hands_over_states(module: fx.GraphModule) -> bool:
    """Return whether a graph without gradients returns states of recurrences for later calls, as generation does."""
    return bool(module.graph.find_nodes(op="call_function", target=STATE_CONTINUES))


def refuse_final_states(module: fx.GraphModule) -> None:
    """Raise `RefusalError` for a training graph that returns the states after its last tokens."""
    for node in module.graph.find_nodes(op="call_function", target=FINAL_STATE):
        raise RefusalError(
            "a call that takes gradients returns the state of a recurrent mixer (a cache), which a prefix tree has at"
            " no one place",
            where=where(node),
            expected="no cache",
            got="output_final_state=True",
            hint="pass use_cache=False while training (transformers: model.config.use_cache = False), or call it under"
            " torch.no_grad()",
        )


def _get(args: Arguments, *names: str) -> Any:
    """Return the argument with one of these names; None if it is left out, None or False."""
    for name in names:
        if args.get(name) is not None and args[name] is not False:
            return args[name]
    return None


def _segments(args: Arguments, batch: Any, tokens: Any) -> torch.Tensor | None:
    """Return the sequence numbers of packed rows `[B, S]`, from 1; None if rows are not packed."""
    numbers = _get(args, "seq_idx")
    if numbers is not None:
        return numbers + 1
    ends = _get(args, "cu_seqlens", "cu_seq_lens_q")
    return None if ends is None else segments_by_ends(ends, batch, tokens)


def _wide(value: torch.Tensor) -> torch.Tensor:
    """Cast to float32 unless the dtype is wider."""
    return value.to(torch.promote_types(value.dtype, torch.float32))


def causal_convolution(
    value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, segments: torch.Tensor | None = None
) -> torch.Tensor:
    """Convolve `[B, D, S]` channel by channel with a weight `[D, 1, k]`, padded with `k - 1` zeros at the start."""
    own, weight = autocast(value.transpose(1, 2), weight.squeeze(1))
    out = torch.ops.dta.short_convolution(own, weight, segments)
    return (out if bias is None else out + bias.to(out.dtype)).transpose(1, 2)


def _causal_conv1d(args: Arguments) -> Any:
    """Convolve `[B, D, S]` channel by channel, with a bias and an activation."""
    value, weight, bias = _get(args, "x", "hidden_states"), _get(args, "weight"), _get(args, "bias")
    segments = _segments(args, value.shape[0], value.shape[2])
    out = causal_convolution(value.to(weight.dtype), weight[:, None], bias, segments)
    activation = _get(args, "activation")
    if activation in ("silu", "swish"):
        out = F.silu(out)
    elif activation is not None:
        from transformers.activations import ACT2FN

        out = ACT2FN[activation](out)
    out = out.to(value.dtype)
    if not _get(args, "return_final_states"):
        return out
    return out, FINAL_STATE(value, [value.shape[0], value.shape[1], weight.shape[1] - 1])


def _normalised(value: torch.Tensor) -> torch.Tensor:
    """Normalise the last dimension to length one, with the epsilon of fla's kernels."""
    value = _wide(value)
    return value * torch.rsqrt(value.square().sum(-1, keepdim=True) + 1e-6)


def _delta_rule(args: Arguments) -> Any:
    """Compute the gated delta rule over `[B, S, heads, width]`, with a decay per head or per channel."""
    query, key, value = _get(args, "q", "query"), _get(args, "k", "key"), _get(args, "v", "value")
    decay, beta, scale = _get(args, "g"), _get(args, "beta"), _get(args, "scale")
    if _get(args, "use_qk_l2norm_in_kernel"):
        query, key = _normalised(query), _normalised(key)
    scale = key.shape[-1] ** -0.5 if scale is None else scale
    beta = torch.ones_like(value[..., 0]) if beta is None else beta
    decay = torch.zeros_like(beta) if decay is None else decay
    segments = _segments(args, value.shape[0], value.shape[1])
    out = torch.ops.dta.gated_delta_rule(query, key, value, _wide(decay), beta, segments, scale)
    shape = [value.shape[0], value.shape[2], key.shape[3], value.shape[3]]
    state = FINAL_STATE(value, shape) if _get(args, "output_final_state") else None
    return out.to(_get(args, "q", "query").dtype), state


def _gated_linear_attention(args: Arguments) -> Any:
    """Compute linear attention with a decay per head or per channel."""
    query, key, value = _get(args, "q", "query"), _get(args, "k", "key"), _get(args, "v", "value")
    decay, scale = _get(args, "g"), _get(args, "scale")
    scale = key.shape[-1] ** -0.5 if scale is None else scale
    decay = torch.zeros_like(value[..., 0]) if decay is None else decay
    segments = _segments(args, value.shape[0], value.shape[1])
    out = torch.ops.dta.linear_attention(query, key, value, _wide(decay), segments, scale)
    shape = [value.shape[0], value.shape[2], key.shape[3], value.shape[3]]
    return out, FINAL_STATE(value, shape) if _get(args, "output_final_state") else None


def _steps(args: Arguments, step: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute the time steps of a discretised state space model."""
    step = _wide(step)
    step = step if bias is None else step + bias
    step = F.softplus(step) if _get(args, "dt_softplus", "delta_softplus") else step
    limits = _get(args, "dt_limit")
    return step if limits is None else step.clamp(limits[0], limits[1])


def _chunk_scan(args: Arguments, dtype: torch.dtype | None = torch.float32) -> Any:
    """Compute Mamba-2's scan over `[B, S, H, P]`: linear attention with values scaled by the time steps."""
    value, matrix = _get(args, "x", "hidden_states"), _get(args, "A")
    entry, reading, skip, gate = (_get(args, name) for name in ("B", "C", "D", "z"))
    step = _steps(args, _get(args, "dt"), _get(args, "dt_bias"))
    segments = _segments(args, value.shape[0], value.shape[1])
    wide = _wide(value)
    out = torch.ops.dta.linear_attention(reading, entry, wide * step[..., None], _wide(matrix) * step, segments, 1.0)
    if skip is not None:
        out = out + wide * (skip[..., None] if skip.dim() == 1 else skip)
    if gate is not None:
        out = out * F.silu(gate)
    out = out.to(value.dtype if dtype is None else dtype)
    if not _get(args, "return_final_states"):
        return out
    return out, FINAL_STATE(value, [value.shape[0], value.shape[2], value.shape[3], entry.shape[3]])


def _selective_scan(args: Arguments) -> Any:
    """Compute Mamba-1's selective scan over `[B, D, S]`; `NotImplemented` for B and C with groups or without tokens."""
    value, matrix = _get(args, "u", "hidden_states"), _get(args, "A")
    entry, reading, skip, gate = (_get(args, name) for name in ("B", "C", "D", "z"))
    if value.dim() != 3 or entry.dim() != 3 or reading.dim() != 3:
        return NotImplemented
    bias = _get(args, "delta_bias")
    step = _steps(args, _get(args, "delta", "dt"), None if bias is None else bias[..., None])
    own, step, entry, reading = (_wide(operand.transpose(1, 2)) for operand in (value, step, entry, reading))
    out = torch.ops.dta.selective_scan(own, step, _wide(matrix), entry, reading, None).transpose(1, 2)
    if skip is not None:
        out = out + _wide(value) * skip[:, None]
    if gate is not None:
        out = out * F.silu(_wide(gate))
    out = out.to(value.dtype)
    if not _get(args, "return_last_state"):
        return out
    return out, FINAL_STATE(value, [value.shape[0], value.shape[1], entry.shape[2]])


def _rnn_scan(args: Arguments) -> Any:
    """Compute the scan of RG-LRU layers over `[B, S, D]`, with a state in `acc_dtype`."""
    names = "hidden_states", "recurrent_gate", "reset", "acc_dtype", "recurrent_states"
    *given, state = (_get(args, name) for name in names)
    if any(argument is None for argument in given):
        return NotImplemented  # a method of another model
    value, factor, reset, dtype = given
    factor = (factor * ~reset).type(dtype)
    out = torch.ops.dta.linear_recurrence(value.type(dtype), factor, None).type(value.dtype)
    # Without a cache, layers drop the state at the beginning of the next call.
    return out, None if state is None else FINAL_STATE(value, [value.shape[0], value.shape[2]])


class Definition(NamedTuple):
    """Definition of a function in terms of our operators, with the names of the arguments that it understands.

    A call that sets another argument to anything but its default keeps the function's own code.
    """

    compute: Callable[[Arguments], Any]
    understood: frozenset[str]


def _definition(compute: Callable[[Arguments], Any], *understood: str) -> Definition:
    return Definition(compute, frozenset(understood) | WITHOUT_MEANING)


HANDS_OVER = ("output_final_state", "recurrent_states", "return_final_states", "return_last_state")
WITHOUT_MEANING = frozenset(  # no influence on the result
    ("chunk_indices", "chunk_size", "cu_seqlens_cpu", "seq_lens_cpu", "use_associative_scan", "use_mambapy")
)
OF_ATTENTION = ("cu_seq_lens_q", "position_embeddings", "position_ids")  # passed by models to all layers alike
NO_HINT = "leave them out, or call the model without the backend"
_QKV = ("q", "k", "v", "query", "key", "value", "g", "scale", "cu_seqlens", "output_final_state")
_DELTA_RULE = _definition(_delta_rule, *_QKV, "beta", "use_qk_l2norm_in_kernel")
_CHUNK_SCAN = ("x", "hidden_states", "dt", "A", "B", "C", "D", "z", "dt_bias", "dt_softplus", "dt_limit")
_SELECTIVE_SCAN = ("u", "hidden_states", "delta", "dt", "A", "B", "C", "D", "z", "delta_bias", "delta_softplus")

DEFINITIONS: dict[str, Definition] = {
    "causal_conv1d_fn": _definition(
        _causal_conv1d, "x", "hidden_states", "weight", "bias", "activation", "seq_idx", "return_final_states"
    ),
    "chunk_delta_rule": _DELTA_RULE,
    "chunk_gated_delta_rule": _DELTA_RULE,
    "chunk_gla": _definition(_gated_linear_attention, *_QKV),
    "chunk_kda": _DELTA_RULE,
    "chunk_kimi_delta_attention": _DELTA_RULE,
    "chunk_simple_gla": _definition(_gated_linear_attention, *_QKV),
    "fused_recurrent_gated_delta_rule": _DELTA_RULE,
    "mamba2_chunk_scan": _definition(_chunk_scan, *_CHUNK_SCAN, "seq_idx", "return_final_states"),
    "mamba_chunk_scan_combined": _definition(
        functools.partial(_chunk_scan, dtype=None), *_CHUNK_SCAN, "seq_idx", "return_final_states"
    ),
    "mamba_selective_scan": _definition(_selective_scan, *_SELECTIVE_SCAN, "return_last_state"),
    "selective_scan_fn": _definition(_selective_scan, *_SELECTIVE_SCAN, "return_last_state"),
    "torch_chunk_gated_delta_rule": _DELTA_RULE,
}
# Methods of layers, which Dynamo does not look up as functions.
METHODS = {
    "_rnn_scan": _definition(
        _rnn_scan, "self", "hidden_states", "recurrent_gate", "reset", "recurrent_states", "acc_dtype"
    )
}
# Fused functions that transformers prefers; it calls the separate functions where these are None.
FUSED = ("mamba2_split_conv1d_scan_combined", "mamba_inner_fn")
# Prefixes of the names of modules. A name promises nothing in code of model repositories, but a copy does.
TRANSFORMERS, REPOSITORIES = "transformers.models.", "transformers_modules."
PACKAGES = (TRANSFORMERS, REPOSITORIES, "fla.ops.", "mamba_ssm.ops.", "causal_conv1d.")
# Sources of transformers' functions, of which model repositories hold copies: helpers that they call, and `is_known`.
SOURCES: dict[str, tuple[tuple[str, ...], str]] = {
    "causal_conv1d_fn": ((), "477b7ef08f61dbd7"),
    "chunk_kimi_delta_attention": (("l2norm",), "c9aeba3911244dd1"),
    "mamba2_chunk_scan": (("pad_tensor_by_size", "segment_sum"), "b2c0a466a354947a"),
    "mamba_selective_scan": ((), "7741d95862eac581"),
    "torch_chunk_gated_delta_rule": (("l2norm",), "450ebb44457038d3"),
    "_rnn_scan": ((), "d1d4609c8cbb6c1b"),
}

_known: set[Callable[..., Any]] = set()


def _substitute_functions(module: types.ModuleType) -> None:
    """Have Dynamo trace our definitions of the functions of a module when it traces for this backend."""
    for name, original in list(vars(module).items()):
        is_fused = name in FUSED and module.__name__.startswith(TRANSFORMERS)
        if isinstance(original, type) and original.__module__ == module.__name__:
            _substitute_methods(module, original)
        if name not in DEFINITIONS and not is_fused:
            continue
        is_own = isinstance(original, types.FunctionType) and original.__module__ == module.__name__
        if is_own and original not in _known and _keeps_its_name(module, name):
            _known.add(original)
            own = copy_of(original)
            vars(own).update(vars(original))  # may hold a mark that Dynamo is not to trace it
            ours = _no_function if is_fused else _definition_of(original, own, DEFINITIONS[name])
            torch.compiler.substitute_in_graph(original, skip_signature_check=True)(in_our_graphs(ours, own))


def _keeps_its_name(module: types.ModuleType, path: str) -> bool:
    """Return whether a function computes what its name promises: its package says so, or its source."""
    if not module.__name__.startswith(REPOSITORIES):
        return True
    helpers, known = SOURCES.get(path.rpartition(".")[2], ((), ""))
    return is_known(module, [path, *helpers], known)


def _substitute_methods(module: types.ModuleType, layer: type) -> None:
    for name in METHODS.keys() & vars(layer).keys():
        own = vars(layer)[name]
        is_new = isinstance(own, types.FunctionType) and own not in _known
        if is_new and _keeps_its_name(module, f"{layer.__name__}.{name}"):
            substitute = in_our_graphs(_definition_of(own, own, METHODS[name]), own)
            _known.add(substitute)
            setattr(layer, name, substitute)


def _no_function(*args: Any, **kwargs: Any) -> None:
    return None


def _definition_of(original: types.FunctionType, own: Callable[..., Any], definition: Definition) -> Callable[..., Any]:
    """Build the function that Dynamo traces for `original`; it returns `NotImplemented` for calls left to `own`."""
    parameters = inspect.signature(original).parameters.values()
    names = tuple(each.name for each in parameters if each.kind is not inspect.Parameter.VAR_KEYWORD)
    value = names[names[0] == "self"]
    defaults = {each.name: each.default for each in parameters if each.default is not inspect.Parameter.empty}
    # transformers' functions ignore their `**kwargs`; those of the packages may read theirs.
    takes_others = not original.__module__.startswith("transformers")
    known = {*names, *definition.understood, *OF_ATTENTION}

    def is_understood(arguments: Arguments) -> bool:
        for name in arguments:
            if name in definition.understood or arguments[name] is defaults.get(name):
                continue
            if name in names or takes_others:
                return False
        return True

    def traced(*args: Any, **kwargs: Any) -> Any:
        arguments = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        if _get(arguments, *HANDS_OVER) is not None and not torch.is_grad_enabled():
            return own(**{**arguments, value: STATE_CONTINUES(arguments[value])})
        if not takes_others:
            arguments[value] = refuse_unknown(arguments[value], original.__name__, arguments, known, NO_HINT)
        return definition.compute(arguments) if is_understood(arguments) else NotImplemented

    return traced


for _name, _module in list(sys.modules.items()):
    if _name.startswith(PACKAGES) and isinstance(_module, types.ModuleType):
        _substitute_functions(_module)
registration.when_any_loaded(PACKAGES, _substitute_functions)
