"""Capture flash attention functions of flash-attn and torch as one node each, and rewrite these as our operator.

These functions call kernels in autograd functions that Dynamo cannot always trace. So when Dynamo traces for this
backend, a call becomes one node that runs the function itself, which also works in a graph that runs as captured. In a
graph for the tree, `with_our_attention` replaces the node by our operator, or refuses a call that the operator cannot
compute. For other backends Dynamo traces the function's own code as always. Importing this module sets this up, also
for packages that are imported later.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx

from dta_compile import registration
from dta_compile.errors import RefusalError
from dta_compile.integrations.tracing import in_our_graphs
from dta_compile.ops.attention import ATTENTION_MIXER
from dta_compile.ops.causal_attention import attention_tokens_first
from dta_compile.ops.mixer import TOKENS, Mixer
from dta_compile.passes.graphs.regions import rewritten
from dta_compile.passes.graphs.source_lines import where
from dta_compile.passes.symbols import expression

FUNCTIONS = {  # by the module that defines them: flash-attn 2, flash-attn 3, torch
    "flash_attn.flash_attn_interface": ("flash_attn_func", "flash_attn_varlen_func"),
    "flash_attn_interface": ("flash_attn_func", "flash_attn_varlen_func"),
    "torch.nn.attention.varlen": ("varlen_attn",),
}
# Arguments that only select an implementation, or repeat what the sizes say.
WITHOUT_MEANING = (
    "deterministic",
    "enable_gqa",
    "max_k",
    "max_q",
    "max_seqlen_k",
    "max_seqlen_q",
    "num_splits",
    "pack_gqa",
    "sm_margin",
)
STATISTICS = "compute what needs the statistics of attention outside of the compiled function"
HINTS = {
    "alibi_slopes": "use rotary or learned positions",
    "block_table": "a paged KV cache is for generation, which runs as captured under torch.no_grad()",
    "dropout_p": "set the model's attention dropout to 0, or call model.eval()",
    "return_attn_probs": STATISTICS,
    "return_aux": STATISTICS,
}

# By function that is a node in graphs, its mixer, of which only `functions`, `operands` and `dims` count. Filled when
# packages are imported.
IN_GRAPH: dict[Callable[..., Any], Mixer] = {}


class _Call(NamedTuple):
    """Arguments of a call that define its result, named alike for all functions; `others` under their own names."""

    query: fx.Node
    key: fx.Node
    value: fx.Node
    ends: fx.Node | None
    ends_of_keys: fx.Node | None
    causal: bool
    window: tuple[int, int]
    scale: float | None
    softcap: float
    others: dict[str, Any]


def with_our_attention(module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of the graph with our operator for flash attention calls; the graph itself if it has none.

    Raises:
        RefusalError: a call is not causal self-attention, or returns more than its output.
    """

    def rewrite(graph: fx.Graph) -> None:
        for node in filter(_is_flash_attention, graph.nodes):
            node.args, node.kwargs = _our_arguments(node), {}
            node.target = attention_tokens_first

    return rewritten(module, _is_flash_attention, rewrite)


def _is_flash_attention(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in IN_GRAPH


def _our_arguments(node: fx.Node) -> tuple[Any, ...]:
    """Return the arguments of `attention_tokens_first` for a flash attention call."""
    call = _arguments(node)
    _require_nothing_else(node, call)
    _require_causal(node, call)
    left, _ = call.window
    window = left + 1 if left >= 0 else 0
    return (call.query, call.key, call.value, call.ends, window, call.scale, max(call.softcap, 0.0))


def _require_nothing_else(node: fx.Node, call: _Call) -> None:
    """Raise `RefusalError` for unsupported arguments, further results, or numbers that are not constants."""
    for name, value in call.others.items():
        left_out = inspect.signature(node.target).parameters[name].default
        is_default = not isinstance(value, fx.Node) and (value is None or value == left_out)
        if name not in WITHOUT_MEANING and not is_default:
            raise _refusal(
                node, f"{name} is not supported", f"{name} left as it is", f"{name}={value}", HINTS.get(name)
            )
    if not isinstance(node.meta["example_value"], torch.Tensor):
        raise _refusal(node, "it returns more than the output", "the output alone", "statistics, too", STATISTICS)
    numbers = (call.causal, *call.window, call.scale, call.softcap)
    if any(isinstance(number, fx.Node) for number in numbers):
        raise _refusal(node, "its numbers depend on the call", "constants", f"{numbers}")
    if call.scale is not None and not call.scale > 0:
        raise _refusal(node, "its scale is not positive", "a positive number", f"{call.scale}")


def _require_causal(node: fx.Node, call: _Call) -> None:
    """Raise `RefusalError` unless a call is causal self-attention over rows of a batch or one packed row."""
    if not call.causal and call.window[1] != 0:
        raise _refusal(
            node,
            "it is bidirectional",
            "causal=True, or a window of (left, 0)",
            f"causal={call.causal}, window_size={call.window}",
            "prefix sharing needs causal attention; compile the causal model only",
        )
    if call.ends is not call.ends_of_keys:
        raise _refusal(
            node,
            "queries and keys have sequences of their own (cu_seqlens)",
            "one tensor for both",
            f"{call.ends} and {call.ends_of_keys}",
            "pass the same tensor twice: two with the same numbers cannot be told from others",
        )
    lengths = [expression(operand.meta["example_value"].shape[-3]) for operand in (call.query, call.key)]
    if lengths[0] != lengths[1]:
        raise _refusal(node, "it reads other tokens' keys", "as many keys as queries", f"{lengths[0]} and {lengths[1]}")
    if call.ends is not None and len(lengths[0].free_symbols) > 1:
        raise _refusal(
            node,
            "its row of sequences is several rows of the batch, flattened",
            "a batch that is one row [1, S], or [S]",
            f"{lengths[0]} tokens",
            "pack all sequences into one row",
        )


def _arguments(node: fx.Node) -> _Call:
    bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    arguments = bound.arguments

    def take(*names: str, default: Any = None) -> Any:
        return next((arguments.pop(name) for name in names if name in arguments), default)

    query, key, value = (take(operand.name) for operand in IN_GRAPH[node.target].operands)
    ends, ends_of_keys = take("cu_seqlens_q", "cu_seq_q"), take("cu_seqlens_k", "cu_seq_k")
    causal, window = take("causal", "is_causal", default=False), tuple(take("window_size") or (-1, -1))
    scale, softcap = take("softmax_scale", "scale"), take("softcap", default=0.0)
    return _Call(query, key, value, ends, ends_of_keys, causal, window, scale, softcap, arguments)


def _refusal(node: fx.Node, what: str, expected: str, got: str, hint: str | None = None) -> RefusalError:
    return RefusalError(
        f"{node.target.__name__} cannot run over a prefix tree: {what}",
        where=where(node),
        expected=expected,
        got=got,
        hint=hint or "",
    )


def _allow_in_graph(module: types.ModuleType) -> None:
    """Have Dynamo capture calls of a module's flash attention functions as nodes when it traces for this backend."""
    for name in FUNCTIONS[module.__name__]:
        original = getattr(module, name, None)
        if isinstance(original, types.FunctionType) and not hasattr(original, "_torchdynamo_disable"):
            _allow_function_in_graph(original)


def _allow_function_in_graph(original: types.FunctionType) -> None:
    copy_of_original = copy_of(original)

    @functools.wraps(original)
    def whole(*args: Any, **kwargs: Any) -> Any:
        return copy_of_original(*args, **kwargs)

    torch.compiler.allow_in_graph(whole)
    traced = in_our_graphs(whole, copy_of_original)
    torch.compiler.substitute_in_graph(original, skip_signature_check=True)(traced)
    names = list(inspect.signature(original).parameters)[:3]
    operands = [operand._replace(name=name) for operand, name in zip(ATTENTION_MIXER.operands, names, strict=True)]
    IN_GRAPH[whole] = dataclasses.replace(
        ATTENTION_MIXER, functions=(whole,), operands=tuple(operands), dims=(TOKENS, "heads", "head_dim")
    )


def copy_of(function: types.FunctionType) -> types.FunctionType:
    """Copy a function, so that Dynamo traces the copy's code although it substitutes calls of the original."""
    twin = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


for _name in FUNCTIONS:
    registration.when_loaded(_name, _allow_in_graph)
