"""Recurrent mixers by functions of transformers, fla, mamba-ssm and causal-conv1d: calls become our operators.

Inside of them Dynamo would find loops over blocks of tokens, or kernels. Where it traces for this backend, it traces in
their place what they mean, written with `ops.recurrences`; for other backends their own code. A function is known by
its name and the module that defines it, never by the model that calls it. A call that continues a state, or that hands
one over, as generation does, is the function's own; one that trains is refused, see `refuse_final_states`. Importing
the module sees to all that, also for packages that are imported later.

Causal depthwise convolutions may be written out as well, over a sequence with `k - 1` zeros before it:

    conv1d(x, weight, bias, padding=k - 1, groups=D)[..., :S]        x [B, D, S], weight [D, 1, k]
    conv1d(pad(x, (k - 1, 0)), weight, bias, groups=D)

In a graph for the tree both become our operator.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import fx

from dta_compile import registration
from dta_compile.capture.flash_attention import copy_of
from dta_compile.errors import RefusalError
from dta_compile.integrations.keywords import refuse_unknown
from dta_compile.integrations.tracing import traces_for_this_backend
from dta_compile.ops.causal_attention import segments_by_ends
from dta_compile.ops.dtypes import autocast
from dta_compile.ops.library import LIBRARY
from dta_compile.passes.program import where
from dta_compile.passes.symbols import expression

Given = dict[str, Any]  # the arguments of a call, by name

LIBRARY.define("final_state(Tensor value, SymInt[] shape) -> Tensor")
FINAL_STATE = torch.ops.dta.final_state.default


@torch.library.register_fake("dta::final_state", lib=LIBRARY)
def _final_state_fake(value: torch.Tensor, shape: list[int]) -> torch.Tensor:
    return value.new_empty(shape)


LIBRARY.define("state_continues(Tensor value) -> Tensor")
STATE_CONTINUES = torch.ops.dta.state_continues.default


@torch.library.impl("dta::state_continues", "CompositeExplicitAutograd", lib=LIBRARY)
def _state_continues(value: torch.Tensor) -> torch.Tensor:
    return value.clone()


@torch.library.register_fake("dta::state_continues", lib=LIBRARY)
def _state_continues_fake(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(value)


def hands_over_states(module: fx.GraphModule) -> bool:
    """Whether a graph without gradients returns the states of recurrences for later calls, as generation does."""
    return bool(module.graph.find_nodes(op="call_function", target=STATE_CONTINUES))


def refuse_final_states(module: fx.GraphModule) -> None:
    """Raise for a graph that trains and hands over the states after its last tokens."""
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


def _take(given: Given, *names: str) -> Any:
    """The argument that has one of these names; None if it was left out, or is None or False."""
    for name in names:
        if given.get(name) is not None and given[name] is not False:
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


def causal_convolution(
    value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, segments: torch.Tensor | None = None
) -> torch.Tensor:
    """`[B, D, S]` convolved channel by channel with weight `[D, 1, k]`, with `k - 1` zeros before it."""
    own, weight = autocast(value.transpose(1, 2), weight.squeeze(1))
    out = torch.ops.dta.short_convolution(own, weight, segments)
    return (out if bias is None else out + bias.to(out.dtype)).transpose(1, 2)


def _causal_conv1d(given: Given) -> Any:
    """`[B, D, S]` convolved channel by channel, with a bias and an activation."""
    value, weight, bias = _take(given, "x", "hidden_states"), _take(given, "weight"), _take(given, "bias")
    segments = _segments(given, value.shape[0], value.shape[2])
    out = causal_convolution(value.to(weight.dtype), weight[:, None], bias, segments)
    activation = _take(given, "activation")
    if activation in ("silu", "swish"):
        out = F.silu(out)
    elif activation is not None:
        from transformers.activations import ACT2FN

        out = ACT2FN[activation](out)
    out = out.to(value.dtype)
    if not _take(given, "return_final_states"):
        return out
    return out, FINAL_STATE(value, [value.shape[0], value.shape[1], weight.shape[1] - 1])


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
    beta = torch.ones_like(value[..., 0]) if beta is None else beta
    decay = torch.zeros_like(beta) if decay is None else decay
    segments = _segments(given, value.shape[0], value.shape[1])
    out = torch.ops.dta.gated_delta_rule(query, key, value, _wide(decay), beta, segments, scale)
    shape = [value.shape[0], value.shape[2], key.shape[3], value.shape[3]]
    state = FINAL_STATE(value, shape) if _take(given, "output_final_state") else None
    return out.to(_take(given, "q", "query").dtype), state


def _gated_linear_attention(given: Given) -> Any:
    """Linear attention with a decay by head or by channel."""
    query, key, value = _take(given, "q", "query"), _take(given, "k", "key"), _take(given, "v", "value")
    decay, scale = _take(given, "g"), _take(given, "scale")
    scale = key.shape[-1] ** -0.5 if scale is None else scale
    decay = torch.zeros_like(value[..., 0]) if decay is None else decay
    segments = _segments(given, value.shape[0], value.shape[1])
    out = torch.ops.dta.linear_attention(query, key, value, _wide(decay), segments, scale)
    shape = [value.shape[0], value.shape[2], key.shape[3], value.shape[3]]
    return out, FINAL_STATE(value, shape) if _take(given, "output_final_state") else None


def _steps(given: Given, step: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The steps of a discretised recurrence."""
    step = _wide(step)
    step = step if bias is None else step + bias
    step = F.softplus(step) if _take(given, "dt_softplus", "delta_softplus") else step
    limits = _take(given, "dt_limit")
    return step if limits is None else step.clamp(limits[0], limits[1])


def _chunk_scan(given: Given, dtype: torch.dtype | None = torch.float32) -> Any:
    """Mamba-2's scan over `[B, S, H, P]`: linear attention, whose values are scaled by the steps."""
    value, matrix = _take(given, "x", "hidden_states"), _take(given, "A")
    entry, reading, skip, gate = (_take(given, name) for name in ("B", "C", "D", "z"))
    step = _steps(given, _take(given, "dt"), _take(given, "dt_bias"))
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
    if value.dim() != 3 or entry.dim() != 3 or reading.dim() != 3:
        return NotImplemented  # of groups, or the same for all tokens
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


def _chunk_scan_like_input(given: Given) -> Any:
    return _chunk_scan(given, None)


class Meaning(NamedTuple):
    """What a function computes, and the arguments that this takes into account: with anything but its default in
    another one, a call is the function's own."""

    compute: Callable[[Given], Any]
    understood: frozenset[str]


def _meaning(compute: Callable[[Given], Any], *understood: str) -> Meaning:
    return Meaning(compute, frozenset(understood) | WITHOUT_MEANING)


HANDS_OVER = ("output_final_state", "return_final_states", "return_last_state")
WITHOUT_MEANING = frozenset(  # for what is computed
    ("chunk_indices", "chunk_size", "cu_seqlens_cpu", "seq_lens_cpu", "use_associative_scan", "use_mambapy")
)
OF_ATTENTION = ("cu_seq_lens_q", "position_ids")  # what models pass on to all layers alike
NO_HINT = "leave them out, or call the model without the backend"
_QKV = ("q", "k", "v", "query", "key", "value", "g", "scale", "cu_seqlens", "output_final_state")
_DELTA_RULE = _meaning(_delta_rule, *_QKV, "beta", "use_qk_l2norm_in_kernel")
_CHUNK_SCAN = ("x", "hidden_states", "dt", "A", "B", "C", "D", "z", "dt_bias", "dt_softplus", "dt_limit")
_SELECTIVE_SCAN = ("u", "hidden_states", "delta", "dt", "A", "B", "C", "D", "z", "delta_bias", "delta_softplus")

MEANINGS: dict[str, Meaning] = {
    "causal_conv1d_fn": _meaning(
        _causal_conv1d, "x", "hidden_states", "weight", "bias", "activation", "seq_idx", "return_final_states"
    ),
    "chunk_delta_rule": _DELTA_RULE,
    "chunk_gated_delta_rule": _DELTA_RULE,
    "chunk_gla": _meaning(_gated_linear_attention, *_QKV),
    "chunk_kda": _DELTA_RULE,
    "chunk_kimi_delta_attention": _DELTA_RULE,
    "chunk_simple_gla": _meaning(_gated_linear_attention, *_QKV),
    "fused_recurrent_gated_delta_rule": _DELTA_RULE,
    "mamba2_chunk_scan": _meaning(_chunk_scan, *_CHUNK_SCAN, "seq_idx", "return_final_states"),
    "mamba_chunk_scan_combined": _meaning(_chunk_scan_like_input, *_CHUNK_SCAN, "seq_idx", "return_final_states"),
    "mamba_selective_scan": _meaning(_selective_scan, *_SELECTIVE_SCAN, "return_last_state"),
    "selective_scan_fn": _meaning(_selective_scan, *_SELECTIVE_SCAN, "return_last_state"),
    "torch_chunk_gated_delta_rule": _DELTA_RULE,
}
# Fused functions that transformers calls first, and goes on with the parts where there is none.
FUSED = ("mamba2_split_conv1d_scan_combined", "mamba_inner_fn")
# Modules by how their names begin.
TRANSFORMERS = "transformers.models."
PACKAGES = (TRANSFORMERS, "transformers_modules.", "fla.ops.", "mamba_ssm.ops.", "causal_conv1d.")

_known: set[types.FunctionType] = set()


def _keep(module: types.ModuleType) -> None:
    """Have Dynamo trace the meaning of the functions that a module defines, where it traces for this backend."""
    for name, original in list(vars(module).items()):
        is_fused = name in FUSED and module.__name__.startswith(TRANSFORMERS)
        if name not in MEANINGS and not is_fused:
            continue
        is_own = isinstance(original, types.FunctionType) and original.__module__ == module.__name__
        if is_own and original not in _known:
            _known.add(original)
            own = copy_of(original)
            vars(own).update(vars(original))  # that it is not to be traced, perhaps
            _substitute(original, own, _absent if is_fused else _traced(original, own, MEANINGS[name]))


def _substitute(original: types.FunctionType, own: Callable[..., Any], traced: Callable[..., Any]) -> None:
    @functools.wraps(original, updated=())
    def chosen(*args: Any, **kwargs: Any) -> Any:
        found = traced(*args, **kwargs) if traces_for_this_backend() else NotImplemented
        return own(*args, **kwargs) if found is NotImplemented else found

    torch._dynamo.substitute_in_graph(original, skip_signature_check=True)(chosen)


def _absent(*args: Any, **kwargs: Any) -> None:
    return None


def _traced(original: types.FunctionType, own: Callable[..., Any], meaning: Meaning) -> Callable[..., Any]:
    """What is traced for a function; where the call is the function's own, it gives `NotImplemented`."""
    parameters = inspect.signature(original).parameters.values()
    names = tuple(one.name for one in parameters if one.kind is not inspect.Parameter.VAR_KEYWORD)
    defaults = {one.name: one.default for one in parameters if one.default is not inspect.Parameter.empty}
    # transformers' functions take more than they read; those of packages may read more than they name.
    takes_others = not original.__module__.startswith("transformers")
    known = {*names, *meaning.understood, *OF_ATTENTION}

    def is_understood(given: Given) -> bool:
        for name in given:
            if name in meaning.understood or given[name] is defaults.get(name):
                continue
            if name in names or takes_others:
                return False
        return True

    def traced(*args: Any, **kwargs: Any) -> Any:
        given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        if _take(given, *HANDS_OVER) and not torch.is_grad_enabled():
            return own(*(STATE_CONTINUES(args[0]), *args[1:]), **kwargs) if args else NotImplemented
        if not takes_others:
            given[names[0]] = refuse_unknown(given[names[0]], original.__name__, given, known, NO_HINT)
        return meaning.compute(given) if is_understood(given) else NotImplemented

    return traced


for _name, _module in list(sys.modules.items()):
    if _name.startswith(PACKAGES) and isinstance(_module, types.ModuleType):
        _keep(_module)
registration.when_any_loaded(PACKAGES, _keep)


PADS = (F.pad, torch._C._nn.pad)
ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")


def with_our_convolutions(module: fx.GraphModule) -> fx.GraphModule:
    """A graph whose causal depthwise convolutions are calls of ours; the same graph if it has none."""
    if not any(_convolved(node) for node in module.graph.nodes):
        return module
    result = fx.GraphModule(module, copy.deepcopy(module.graph))
    for node in list(result.graph.nodes):
        if (found := _convolved(node)) is not None:
            _replace(node, found)
    result.graph.eliminate_dead_code()
    result.recompile()
    return result


def _convolved(node: fx.Node) -> dict[str, Any] | None:
    """The arguments of a causal depthwise convolution, its input without padding; None for anything else."""
    if node.op != "call_function" or node.target not in (torch.conv1d, F.conv1d):
        return None
    given = {**dict(zip(ARGUMENTS, node.args, strict=False)), **node.kwargs}
    value, weight = given["input"], given["weight"]
    if not all(isinstance(one, fx.Node) and "example_value" in one.meta for one in (value, weight)):
        return None
    shape, (channels, per_group, width) = _sizes(value), weight.meta["example_value"].shape
    is_plain = _one(given.get("stride", 1)) == 1 and _one(given.get("dilation", 1)) == 1
    if not is_plain or per_group != 1 or len(shape) != 3 or given.get("groups", 1) != channels or shape[1] != channels:
        return None
    padding = _one(given.get("padding", 0))
    if padding == width - 1 and width > 1:
        return given if node.users and all(_is_first_part(user, node, shape[2]) for user in node.users) else None
    if padding == 0 and (source := _padded_before(value, width - 1)) is not None:
        return {**given, "input": source}
    return None


def _sizes(node: fx.Node) -> tuple[Any, ...]:
    return tuple(map(expression, node.meta["example_value"].shape))


def _one(number: Any) -> Any:
    """Of a number for each dimension, that for the only one."""
    return number[0] if isinstance(number, (tuple, list)) and len(number) == 1 else number


def _is_first_part(user: fx.Node, value: fx.Node, tokens: Any) -> bool:
    """Whether a node is `value[..., :tokens]`."""
    if user.op != "call_function" or getattr(user.target, "__name__", "") != "getitem" or user.args[0] is not value:
        return False
    index = user.args[1] if isinstance(user.args[1], tuple) else (user.args[1],)
    *others, last = index
    whole = all(one is Ellipsis or one == slice(None) for one in others) and (Ellipsis in others or len(index) == 3)
    if not whole or not isinstance(last, slice) or last.start not in (None, 0) or last.step not in (None, 1):
        return False
    return bool(_sizes(user)[2] == tokens)


def _padded_before(value: fx.Node, count: int) -> fx.Node | None:
    """The `x` of `pad(x, (count, 0))`."""
    if value.op != "call_function" or value.target not in PADS:
        return None
    given = {**dict(zip(("input", "pad", "mode", "value"), value.args, strict=False)), **value.kwargs}
    zeros = given.get("mode", "constant") == "constant" and not given.get("value")
    return given["input"] if zeros and tuple(given["pad"]) == (count, 0) else None


def _replace(node: fx.Node, given: dict[str, Any]) -> None:
    users = list(node.users) if _one(given.get("padding", 0)) else [node]
    with node.graph.inserting_after(node):
        ours = node.graph.call_function(causal_convolution, (given["input"], given["weight"], given.get("bias")))
    ours.meta = {**node.meta, "example_value": users[0].meta["example_value"]}
    for user in users:
        user.replace_all_uses_with(ours)
