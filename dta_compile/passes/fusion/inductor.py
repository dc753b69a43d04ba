"""Every private touch of inductor: from a graph of ATen operators to code generated for it, C++ or Triton.

One compilation serves all sizes: they are traced as symbols, without a guard that anything else would have to check.
What inductor assumes about them nevertheless (two or more, products within 32 bits) is `Code.serves`. Compiled graphs
are kept by inductor itself, in $TORCHINDUCTOR_CACHE_DIR, so that another process finds them there.

Intermediate values stay in float32 where ATen rounds each of them to bfloat16 (`emulate_precision_casts` is off): that
is as fast and nearer to the exact result. Supported torch: 2.11 to 2.15.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import sympy
import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._dynamo.utils import counters
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._sympy.printers import PythonPrinter

from dta_compile.passes.program import output_node
from dta_compile.passes.symbols import expression

TYPICAL_SIZES = (2039, 1021)  # what the code is tuned for; primes, so that none of their divisors is taken for granted


class Code(NamedTuple):
    """Generated code.

    Attributes:
        run: from a list of sizes and tensors, which it empties, to new tensors.
        serves: whether it may be run for these sizes.
        strides: of its tensors, for these sizes.
        found: it was in inductor's cache.
    """

    run: Callable[[list[Any]], Sequence[torch.Tensor]]
    serves: Callable[..., bool]
    strides: Callable[..., tuple[tuple[int, ...], ...]]
    found: bool


def generate(body: fx.GraphModule, symbols: Sequence[sympy.Symbol], inputs: Sequence[torch.Tensor]) -> Code:
    """Code for a function of sizes, named by their symbols in the shapes of `inputs`, and then of tensors like these.

    Raises whatever inductor raises: no compiler, an operator that it cannot lower.
    """
    # Not with this module: importing it takes a second, and only some programs need it.
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.utils import BoxedBool

    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    with _disable_current_modes(), torch._C._DisableAutocast(), torch.no_grad():
        sizes = [_size(env, index) for index in range(len(symbols))]
        known = {symbol: expression(size) for symbol, size in zip(symbols, sizes, strict=True)}
        with mode, enable_python_dispatcher():
            fakes = [_like(env, value, known) for value in inputs]
            module = _decomposed(body, [*sizes, *fakes])
        hits = counters["inductor"]["fxgraph_cache_hit"]
        changes: dict[str, Any] = {"size_asserts": False}  # of every input at every call: a piece has seen to them
        # Fusing reductions over rows with those over columns would be decided by the typical sizes, and hold for those
        # on their side of a threshold only.
        if hasattr(config.triton, "mix_order_reduction"):
            changes["triton.mix_order_reduction"] = False
        # C++ is made for a number of threads, which is no part of the cache's key in all versions unless it is set.
        if any(value.device.type == "cpu" for value in inputs):
            changes["cpp.threads"] = torch.get_num_threads()
        with tracing(TracingContext(mode)), config.patch(changes):
            run = compile_fx_inner(module, [*sizes, *fakes], cudagraphs=BoxedBool(False), is_inference=True)
    own = list(map(expression, sizes))
    if not all(isinstance(symbol, sympy.Symbol) for symbol in own) or len(set(own)) < len(own):
        raise ValueError(f"it works for one number of tokens or head rows only: {own}")
    conditions = [sympy.Ge(symbol, 2, evaluate=False) for symbol in own] + [guard.expr for guard in env.guards]
    strides = [[expression(stride) for stride in fake.stride()] for fake in fakes]
    return Code(
        getattr(run, "current_callable", None) or run,  # what it calls, with more around it than some code takes
        _function(own, " and ".join(f"({_printed(condition)})" for condition in conditions) or "True"),
        _function(own, _tuple(_tuple(map(_printed, each)) for each in strides)),
        counters["inductor"]["fxgraph_cache_hit"] > hits,
    )


def _size(env: ShapeEnv, index: int) -> Any:
    hint = TYPICAL_SIZES[index]
    source = ConstantSource(f"__dta_size_{index}")
    symbol = env.create_symbol(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
    return env.create_symintnode(symbol, hint=hint)


def _like(env: ShapeEnv, value: torch.Tensor, known: dict[sympy.Symbol, sympy.Expr]) -> torch.Tensor:
    """A fake tensor with the shape and strides of `value` in other symbols."""

    def renamed(size: int | torch.SymInt) -> Any:
        if isinstance(size, int):
            return size
        found = expression(size).subs(known)
        hints = {symbol: TYPICAL_SIZES[index] for index, symbol in enumerate(known.values())}
        return env.create_symintnode(found, hint=int(found.subs(hints)))

    shape, strides = map(renamed, value.shape), map(renamed, value.stride())
    return torch.empty_strided(tuple(shape), tuple(strides), dtype=value.dtype, device=value.device)


def _decomposed(body: fx.GraphModule, arguments: list[Any]) -> fx.GraphModule:
    """In operators that inductor has kernels for; results keep their strides, which later operators rely on."""
    from torch._inductor.decomposition import select_decomp_table

    module = make_fx(body, decomposition_table=select_decomp_table())(*arguments)
    module.graph.eliminate_dead_code()
    module.recompile()
    output = output_node(module.graph)
    output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
    return module


def _printed(expression: sympy.Basic) -> str:
    return PythonPrinter().doprint(expression)


def _tuple(parts: Iterable[str]) -> str:
    return f"({''.join(f'{part}, ' for part in parts)})"


def _function(symbols: Sequence[sympy.Symbol], result: str) -> Callable[..., Any]:
    return eval(f"lambda {', '.join(map(str, symbols))}: {result}", {"math": math, "torch": torch})
