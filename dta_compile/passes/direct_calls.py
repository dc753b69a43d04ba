"""Executable graphs as plain functions whose calls go straight to torch's own bindings.

A call of `torch.ops.aten.mul.Tensor` looks four names up, enters a Python frame, and boxes its arguments by the
operator's schema; `torch.mul` is the same operator behind a parser that was generated for it, at about half of the
host's time. Chunks call a thousand operators, and a GPU waits for the host if that is slow.
"""

from __future__ import annotations

import itertools
import linecache
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

__all__ = ["BINDINGS", "direct"]

aten = torch.ops.aten
_CALL = re.compile(r"\btorch\.ops\.([A-Za-z_]\w*)\.([A-Za-z_]\w*)\.([A-Za-z_]\w*)\(")
_VIEW = re.compile(r"\btorch\.ops\.aten\.view\.default\((\w+), \[([\w, -]+)\]\)")
_numbers = itertools.count()

# By overload, what calls it for the same positional and keyword arguments.
BINDINGS: dict[Any, Callable[..., Any]] = {
    aten.add.Tensor: torch.add,
    aten.add_.Tensor: torch.Tensor.add_,
    aten.addmm_.default: torch.Tensor.addmm_,
    aten.bmm.default: torch.bmm,
    aten.cat.default: torch.cat,
    aten.contiguous.default: torch.Tensor.contiguous,
    aten.div.Tensor: torch.div,
    aten.div_.Scalar: torch.Tensor.div_,
    aten.div_.Tensor: torch.Tensor.div_,
    aten.embedding.default: torch.embedding,
    aten.exp.default: torch.exp,
    aten.expand.default: torch.Tensor.expand,
    aten.index_select.default: torch.index_select,
    aten.mean.dim: torch.mean,
    aten.mm.default: torch.mm,
    aten.mul.Scalar: torch.mul,
    aten.mul.Tensor: torch.mul,
    aten.mul_.Scalar: torch.Tensor.mul_,
    aten.mul_.Tensor: torch.Tensor.mul_,
    aten.neg.default: torch.neg,
    aten.neg_.default: torch.Tensor.neg_,
    aten.permute.default: torch.permute,
    aten.pow.Tensor_Scalar: torch.pow,
    aten.rsqrt.default: torch.rsqrt,
    aten.sigmoid.default: torch.sigmoid,
    aten.silu.default: torch._C._nn.silu,
    aten.sub.Tensor: torch.sub,
    aten.sum.dim_IntList: torch.sum,
    aten.t.default: torch.t,
    aten.transpose.int: torch.transpose,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.view.default: torch.Tensor.view,
}


def direct(module: fx.GraphModule) -> Callable[..., Sequence[torch.Tensor]]:
    """The graph of a module as a function of the same arguments.

    It computes the same by the same operators; hooks of the module do not run.
    """
    code = module.graph.python_code("self")
    names: dict[str, Any] = dict(code.globals)

    def name(match: re.Match[str]) -> str:
        namespace, operator, overload = match.groups()
        target = getattr(getattr(getattr(torch.ops, namespace), operator), overload)
        bound = f"_{namespace}_{operator}_{overload}"
        names[bound] = BINDINGS.get(target, target)
        return f"{bound}("

    source = _CALL.sub(name, _VIEW.sub(r"\1.view(\2)", code.src))  # a list of sizes takes longer to read than sizes
    file = f"<dta chunk graph {next(_numbers)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)  # for tracebacks
    exec(compile(source, file, "exec"), names)  # what FX itself does with the code of a graph
    run: Callable[..., Sequence[torch.Tensor]] = names["forward"].__get__(module)
    return run
