"""Tables of embeddings that a caller gives with a gradient, and which of them are the same vector of their source.

Every given vector has a gradient of its own, while tokens that rows share have one: the sum. That sum may stand for the
single gradients only if nothing but sums of them are read. So given embeddings are rows of a table by themselves, but
for a tensor that an embedding or an expansion made: their derivative sums over all vectors that were copied from one
vector of the source, and the gradient of the first copy may be the sum, and that of the others zero. Whoever reads the
gradient of the *copies* would notice. So they are told apart if the tensor retains its gradient, or has a hook; and a
backward pass raises an error if it got one since, or if it computes gradients of chosen tensors (`autograd.grad`) and
anybody still has that tensor. Tensors in between (of `cat([prompt.expand(...), embed(ids)])`) have readers that cannot
be seen, so their copies are always told apart.
"""

from __future__ import annotations

import functools
import gc
import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from dta_compile.errors import RuntimeContractError
from dta_compile.torch_compat.autograd import will_execute


def table_of(given: torch.Tensor, counted: int) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Return given vectors as a table, and the row of each.

    Args:
        given: `[*counts, ...]`.
        counted: the number of dimensions that count vectors.

    Returns:
        the table `[R, D]`, int64 `[*counts]`, and whether some vectors have a row together.
    """
    leading = given.shape[:counted]
    vectors = given.reshape(math.prod(leading), -1)
    each = torch.arange(len(vectors), device=given.device).view(leading)
    source = _source(given, leading)
    if source is not None:
        numbers, rows = source.unique(return_inverse=True)
        first = torch.full_like(numbers, len(vectors)).scatter_reduce_(0, rows.flatten(), each.flatten(), "amin")
        if len(first) < len(vectors) and torch.equal(vectors.detach()[first[rows.flatten()]], vectors.detach()):
            return _FirstCopies.apply(vectors, first, [given], torch.zeros((), requires_grad=True)), rows, True
    return vectors, each, False


def _source(given: torch.Tensor, leading: Sequence[int]) -> torch.Tensor | None:
    """Return which vector of its source each given vector is a copy of, `[*counts]`; None if that is not known."""
    if type(given) is not torch.Tensor or given.is_leaf or given.retains_grad or given._backward_hooks:
        return None
    embedding, expand = _copying_nodes()
    node: Any = given.grad_fn
    kind = type(node)
    if kind is embedding:
        try:
            indices: torch.Tensor = node._saved_indices
        except RuntimeError:  # they were written to, or a backward pass has freed them
            return None
        return indices if indices.shape == leading else None
    if kind is not expand:
        return None
    shape = [1] * (given.dim() - len(node._saved_self_sym_sizes)) + [*node._saved_self_sym_sizes]
    if shape[len(leading) :] != [*given.shape[len(leading) :]]:
        return None
    counts = shape[: len(leading)]
    return torch.arange(math.prod(counts), device=given.device).view(counts).expand(leading)


@functools.cache
def _copying_nodes() -> tuple[type, type]:
    """Return the types of autograd's nodes of an embedding and an expansion."""
    with torch.enable_grad():
        weight = torch.zeros(1, 1, requires_grad=True)
        looked_up = F.embedding(torch.zeros(1, dtype=torch.int64), weight)
        return type(looked_up.grad_fn), type(weight.expand(2, 1).grad_fn)


class _FirstCopies(torch.autograd.Function):
    """Some of the given vectors `[N, D]`, as `[R, D]`; gradients of the other ones are zero.

    Args:
        first: int64 `[R]`: their numbers.
        given: a list of the tensor that the vectors are views of.
        witness: a leaf that nobody else has, so that only a backward pass to all leaves gets there.
    """

    @staticmethod
    def forward(
        ctx: Any, vectors: torch.Tensor, first: torch.Tensor, given: list[torch.Tensor], witness: torch.Tensor
    ) -> torch.Tensor:
        ctx.first, ctx.given, ctx.shape = first, given[0], vectors.shape
        ctx.witness = torch.autograd.graph.get_gradient_edge(witness).node
        with torch.enable_grad():
            ctx.alone = witness * 1  # nothing else refers to it
        return vectors[first]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        is_read = ctx.given.retains_grad or ctx.given._backward_hooks
        may_be_chosen = not will_execute(ctx.witness) and _is_known_elsewhere(ctx)
        if is_read or may_be_chosen:
            raise RuntimeContractError(
                "gradients of given embeddings may be read row by row, and rows that share tokens have their sum",
                expected="loss.backward(), without retain_grad() or hooks on the embeddings after the forward pass",
                got="retain_grad() or a hook on them" if is_read else "gradients of chosen tensors (autograd.grad)",
                hint="embed ids inside of the compiled function, or pass embeds.clone(), of which rows share nothing",
            )
        return grad.new_zeros(ctx.shape).index_copy_(0, ctx.first, grad), None, None, None


def _is_known_elsewhere(ctx: Any) -> bool:
    """Return whether anything else refers to the given tensor, or to its node, and so can ask for its gradient."""
    for collect in (False, True):
        if collect:
            gc.collect()  # what compiling the call has left in cycles
        tensor, node = sys.getrefcount(ctx.alone), sys.getrefcount(ctx.alone.grad_fn)
        if sys.getrefcount(ctx.given) <= tensor and sys.getrefcount(ctx.given.grad_fn) <= node:
            return False
    return True
