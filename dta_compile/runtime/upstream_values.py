"""Refuse gradients at outputs that lack what comes by way of other outputs.

Outputs of a call are siblings in autograd's graph: hidden states that are returned get no gradient from logits that are
computed from them. Tokens that rows share have one gradient, the sum over these rows, so there is none to hand out by
row. Gradients of parameters are complete, but hooks, `retain_grad()` and `torch.autograd.grad` at such an output would
see, and change, less than in eager mode. Each such pair of values goes through two identities, whose backward notices.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dta_compile.errors import RuntimeContractError
from dta_compile.executable.executable import Output
from dta_compile.runtime.transparent import TreeFunction
from dta_compile.torch_compat.autograd import note_hooks, will_run


def noticing_gradients(outputs: Sequence[Any], facts: Sequence[Output]) -> tuple[Any, ...]:
    """Return the outputs of a call; a backward raises where a gradient is asked for that lacks a part."""
    noticing, watched = list(outputs), dict[int, Watched]()
    sources_of = {i: [j for j in fact.upstream if _has_gradient(outputs[j])] for i, fact in enumerate(facts)}
    upstream = {source for i, sources in sources_of.items() if _has_gradient(outputs[i]) for source in sources}
    distinct = {id(output): output for output, fact in zip(outputs, facts, strict=True) if not fact.is_cache}
    own = filter(_has_gradient, distinct.values()) if upstream else ()
    memory = collections.Counter(output.untyped_storage()._cdata for output in own)

    def is_shared(i: int) -> bool:
        return memory[outputs[i].untyped_storage()._cdata] > 1

    # An output comes after all that it is computed from, because it has these upstream and all that they have.
    for i in sorted(upstream | {i for i, sources in sources_of.items() if sources}, key=lambda i: len(sources_of[i])):
        if not _has_gradient(outputs[i]):
            continue
        if sources := sources_of[i]:
            of_sources = [watched[source] for source in sources]
            tensors = (noticing[source] for source in sources)
            noticing[i] = DownstreamValue.apply(noticing[i], is_shared(i), facts[i].name, of_sources, *tensors)
        if i in upstream:
            watched[i] = Watched(facts[i].name, facts[i].where)
            noticing[i] = watched[i].watch(noticing[i], is_shared(i))
    by_tensor = {id(before): after for before, after in zip(outputs, noticing, strict=True) if before is not after}
    return tuple(by_tensor.get(id(output), output) for output in outputs)  # one tensor may be several outputs


def _identity(value: torch.Tensor, is_shared: bool) -> torch.Tensor:
    """Return a value as the result of a custom function.

    Autograd refuses writes to a view that one returns: of memory that is shared it would not follow them.
    """
    return value.view_as(value) if is_shared else value.detach()


def _has_gradient(output: Any) -> bool:
    return isinstance(output, torch.Tensor) and output.requires_grad


class Watched:
    """Who asks for the gradient of an output from which others are computed.

    Attributes:
        name, where: for messages: the value's name and the user's source line.
        tensor: weak reference to the output.
        hooks: the hooks registered on it and on its autograd node, which may outlive it.
    """

    def __init__(self, name: str, where: str) -> None:
        self.name, self.where = name, where
        self.tensor: weakref.ref[torch.Tensor] | None = None
        self.hooks: list[Mapping[int, Any]] = []

    def watch(self, value: torch.Tensor, is_shared: bool) -> torch.Tensor:
        """Return an identity of the value that notes its hooks."""
        noticing: torch.Tensor = UpstreamValue.apply(value, is_shared, self)
        self.tensor = weakref.ref(noticing)
        return noticing

    @property
    def asked_by(self) -> str:
        """What takes its gradient, as far as the tensor knows."""
        tensor = self.tensor() if self.tensor is not None else None
        if any(self.hooks):
            return f"a hook on {self.name}"
        return f"retain_grad() on {self.name}" if tensor is not None and tensor.retains_grad else ""


class UpstreamValue(torch.autograd.Function):
    """Identity of a value from which others are computed."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, is_shared: bool, watched: Watched) -> torch.Tensor:
        """Return the value."""
        ctx.watched = watched
        ctx.set_materialize_grads(False)
        return _identity(value, is_shared)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None]:
        """Return the gradient."""
        return grad, None, None

    jvp = TreeFunction.jvp


@note_hooks(UpstreamValue)
def _note_hooks(ctx: Any, hooks: Mapping[int, Any]) -> None:
    ctx.watched.hooks.append(hooks)


class DownstreamValue(torch.autograd.Function):
    """Identity of a value computed from others, with an edge to each, so that it goes backward before them."""

    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, is_shared: bool, name: str, watched: Sequence[Watched], *upstream: torch.Tensor
    ) -> torch.Tensor:
        """Return the value."""
        ctx.name, ctx.watched = name, watched
        ctx.set_materialize_grads(False)
        return _identity(value, is_shared)

    @staticmethod
    @torch.compiler.disable  # else Dynamo would trace it in a compiled function that calls backward()
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient of the value, and none for those that it is computed from.

        Raises:
            RuntimeContractError: a hook, `retain_grad()` or `torch.autograd.grad` asks for a gradient of these.
        """
        if grad is not None:
            for watched in ctx.watched:
                if watched.asked_by:
                    raise _incomplete(ctx.name, watched.asked_by, watched.where)
            (of_value, _), *_ = ctx.next_functions
            if not will_run(of_value):
                names = " or ".join(watched.name for watched in ctx.watched)
                raise _incomplete(ctx.name, f"torch.autograd.grad with respect to {names}")
        return grad, None, None, None, *[None] * len(ctx.watched)

    jvp = TreeFunction.jvp


def _incomplete(name: str, asked: str, where: str = "") -> RuntimeContractError:
    return RuntimeContractError(
        f"the gradient of an output lacks what comes by way of {name}, which is computed from it",
        where=where,
        expected="hooks, retain_grad() and torch.autograd.grad on outputs from which no other output of the loss is"
        " computed",
        got=asked,
        hint="rows that share a prefix share its hidden states, with one gradient: take gradients of hidden states in"
        " eager mode",
    )
