"""Recurrent mixers by functions of transformers, fla, mamba-ssm and causal-conv1d: calls become our operators.

Inside of them Dynamo would find loops over blocks of tokens, or kernels. Where it traces for this backend, it traces in
their place what they mean, written with `ops.recurrences`; for other backends their own code. A function is known by
its name and the module that defines it, never by the model that calls it. A call that continues a state, or that hands
one over, as generation does, is the function's own; one that trains is refused, see `refuse_final_states`. Importing
the module sees to all that, also for packages that are imported later.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import fx

from dta_compile import registration
from dta_compile.capture.flash_attention import copy_of
from dta_compile.errors import RefusalError
from dta_compile.integrations.tracing import traces_for_this_backend
from dta_compile.ops.causal_attention import segments_by_ends
from dta_compile.ops.dtypes import autocast
from dta_compile.ops.library import LIBRARY
from dta_compile.passes.program import where

__all__ = ["refuse_final_states"]

Given = dict[str, Any]  # the arguments of a call, by name

LIBRARY.define("final_state(Tensor value, int[] shape) -> Tensor")
FINAL_STATE = torch.ops.dta.final_state.default


@torch.library.register_fake("dta::final_state", lib=LIBRARY)
def _final_state_fake(value: torch.Tensor, shape: list[int]) -> torch.Tensor:
    return value.new_empty(shape)


def refuse_final_states(module: fx.GraphModule) -> None:
    """Raise for a graph that trains and hands over the states after its last tokens."""
    for node in module.graph.find_nodes(op="call_function", target=FINAL_STATE):
        raise RefusalError(
            "a call that trains returns the state of a recurrent mixer (a cache), which a prefix tree has at no one"
            " place",
            where=where(node),
            expected="no cache",
            got="output_final_state=True",
            hint="pass use_cache=False while training (transformers: model.config.use_cache = False)",
        )


def _take(given: Given, *names: str) -> Any:
    """The argument that has one of these names; None if it was left out."""
    for name in names:
        if given.get(name) is not None:
            return given[name]
    return None


def _segments(given: Given, batch: Any, tokens: Any) -> torch.Tensor | None:
    """`[B, S]` numbers of the sequences of packed rows, from 1 on."""
    numbers = _take(given, "seq_idx")
    if numbers is not None:
        return numbers + 1
    ends = _take(given, "cu_seqlens", "cu_seq_lens_q")
    return None if ends is None else segments_by_ends(ends, batch, tokens)


def _wide(value: torch.Tensor) -> torch.Tensor:
    """At least in float32."""
    return value.to(torch.promote_types(value.dtype, torch.float32))


def _causal_conv1d(given: Given) -> torch.Tensor:
    """`[B, D, S]` convolved channel by channel, with a bias and an activation."""
    value, weight, bias = _take(given, "x", "hidden_states"), _take(given, "weight"), _take(given, "bias")
    own, weight = autocast(value.transpose(1, 2).to(weight.dtype), weight)
    segments = _segments(given, own.shape[0], own.shape[1])
    out = torch.ops.dta.short_convolution(own, weight, segments)
    if bias is not None:
        out = out + bias
    activation = _take(given, "activation")
    if activation in ("silu", "swish"):
        out = F.silu(out)
    elif activation is not None:
        from transformers.activations import ACT2FN

        out = ACT2FN[activation](out)
    return out.to(value.dtype).transpose(1, 2)


def _normalised(value: torch.Tensor) -> torch.Tensor:
    """Of length one, as the kernels have it."""
    value = _wide(value)
    return value * torch.rsqrt(value.square().sum(-1, keepdim=True) + 1e-6)


def _delta_rule(given: Given) -> Any:
    """The gated delta rule over `[B, S, heads, width]`, with a decay by head or by channel."""
    query, key, value = _take(given, "q", "query"), _take(given, "k", "key"), _take(given, "v", "value")
    decay, beta, scale = _take(given, "g"), _take(given, "beta"), _take(given, "scale")
    if _take(given, "use_qk_l2norm_in_kernel"):
        query, key = _normalised(query), _normalised(key)
    scale = key.shape[-1] ** -0.5 if scale is None else scale
    decay = torch.zeros_like(beta) if decay is None else decay
    segments = _segments(given, value.shape[0], value.shape[1])
    out = torch.ops.dta.gated_delta_rule(query, key, value, _wide(decay), beta, segments, scale)
    shape = [value.shape[0], value.shape[2], key.shape[3], value.shape[3]]
    state = FINAL_STATE(value, shape) if _take(given, "output_final_state") else None
    return out.to(_take(given, "q", "query").dtype), state


def _gated_linear_attention(given: Given) -> Any:
    """Linear attention with a decay by head or by channel."""
    query, key, value = _take(given, "q", "query"), _take(given, "k", "key"), _take(given, "v", "value")
    decay, scale = _take(given, "g", "gk"), _take(given, "scale")
    scale = key.shape[-1] ** -0.5 if scale is None else scale
    decay = torch.zeros_like(value[..., 0]) if decay is None else decay
    segments = _segments(given, value.shape[0], value.shape[1])
    out = torch.ops.dta.linear_attention(query, key, value, _wide(decay), segments, scale)
    shape = [value.shape[0], value.shape[2], key.shape[3], value.shape[3]]
    return out, FINAL_STATE(value, shape) if _take(given, "output_final_state") else None


def _steps(given: Given, step: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The steps of a discretised recurrence."""
    step = step if bias is None else step + bias.to(step.dtype)
    step = F.softplus(step) if _take(given, "dt_softplus", "delta_softplus") else step
    limits = _take(given, "dt_limit")
    return step if limits is None else step.clamp(limits[0], limits[1])


def _chunk_scan(given: Given, dtype: torch.dtype | None = torch.float32) -> Any:
    """Mamba-2's scan over `[B, S, H, P]`: linear attention, whose values are scaled by the steps."""
    value, matrix = _take(given, "x", "hidden_states"), _take(given, "A")
    entry, reading, skip, gate = (_take(given, name) for name in ("B", "C", "D", "z"))
    step = _wide(_steps(given, _take(given, "dt"), _take(given, "dt_bias")))
    segments = _segments(given, value.shape[0], value.shape[1])
    wide = _wide(value)
    out = torch.ops.dta.linear_attention(reading, entry, wide * step[..., None], _wide(matrix) * step, segments, 1.0)
    if skip is not None:
        out = out + wide * (skip[..., None] if skip.dim() == 1 else skip)
    if gate is not None:
        out = out * F.silu(gate)
    out = out.to(value.dtype if dtype is None else dtype)
    if not _take(given, "return_final_states"):
        return out
    return out, FINAL_STATE(value, [value.shape[0], value.shape[2], value.shape[3], entry.shape[3]])


def _selective_scan(given: Given) -> Any:
    """Mamba-1's scan over `[B, D, S]`."""
    value, matrix = _take(given, "u", "hidden_states"), _take(given, "A")
    entry, reading, skip, gate = (_take(given, name) for name in ("B", "C", "D", "z"))
    bias = _take(given, "delta_bias")
    step = _steps(given, _take(given, "delta", "dt"), None if bias is None else bias[..., None])
    own, step, entry, reading = (_wide(one.transpose(1, 2)) for one in (value, step, entry, reading))
    out = torch.ops.dta.selective_scan(own, step, _wide(matrix), entry, reading, None).transpose(1, 2)
    if skip is not None:
        out = out + _wide(value) * skip[:, None]
    if gate is not None:
        out = out * F.silu(_wide(gate))
    out = out.to(value.dtype)
    if not _take(given, "return_last_state"):
        return out
    return out, FINAL_STATE(value, [value.shape[0], value.shape[1], entry.shape[2]])


def _of_parts(given: Given) -> None:
    """A fused function that transformers calls first: none, so that it goes on with the parts."""
    return None


def _chunk_scan_like_input(given: Given) -> Any:
    return _chunk_scan(given, None)


# By name. Arguments that continue a state or that we have no word for: with one of them a call is the function's own.
MEANINGS: dict[str, Callable[[Given], Any]] = {
    "causal_conv1d_fn": _causal_conv1d,
    "chunk_gated_delta_rule": _delta_rule,
    "chunk_gla": _gated_linear_attention,
    "chunk_delta_rule": _delta_rule,
    "chunk_kda": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "chunk_simple_gla": _gated_linear_attention,
    "fused_recurrent_gated_delta_rule": _delta_rule,
    "mamba2_chunk_scan": _chunk_scan,
    "mamba2_split_conv1d_scan_combined": _of_parts,
    "mamba_chunk_scan_combined": _chunk_scan_like_input,
    "mamba_inner_fn": _of_parts,
    "mamba_selective_scan": _selective_scan,
    "selective_scan_fn": _selective_scan,
    "torch_chunk_gated_delta_rule": _delta_rule,
}
CONTINUES = ("initial_state", "initial_states", "return_final_states_out", "head_first", "A_log", "g_gamma", "gv")
HANDS_OVER = ("output_final_state", "return_final_states", "return_last_state")
# Modules by how their names begin, and what of the above they define.
PACKAGES = {
    "transformers.models.": None,
    "transformers_modules.": None,
    "fla.ops.": None,
    "mamba_ssm.ops.": ("mamba_chunk_scan_combined", "selective_scan_fn"),
    "causal_conv1d.": None,
}


def _keep(module: types.ModuleType) -> None:
    """Have Dynamo trace the meaning of a module's functions, where it traces for this backend."""
    names = next((known for start, known in PACKAGES.items() if module.__name__.startswith(start)), ())
    for name in MEANINGS if names is None else names:
        original = vars(module).get(name)
        if isinstance(original, types.FunctionType) and original not in _known:
            _known.add(original)
            _keep_function(original, MEANINGS[name])


_known: set[types.FunctionType] = set()


def _keep_function(original: types.FunctionType, meaning: Callable[[Given], Any]) -> None:
    own = copy_of(original)
    names = tuple(inspect.signature(original).parameters)

    def traced(*args: Any, **kwargs: Any) -> Any:
        if not traces_for_this_backend():
            return own(*args, **kwargs)
        given = dict(zip(names, args, strict=False))
        given.update(kwargs)
        if _take(given, *CONTINUES) is not None:
            return own(*args, **kwargs)
        if _take(given, *HANDS_OVER) and not torch.is_grad_enabled():
            return own(*args, **kwargs)
        return meaning(given)

    torch._dynamo.substitute_in_graph(original, skip_signature_check=True)(functools.wraps(original)(traced))


for _name, _module in list(sys.modules.items()):
    if _name.startswith(tuple(PACKAGES)) and isinstance(_module, types.ModuleType):
        _keep(_module)
registration.when_any_loaded(tuple(PACKAGES), _keep)
