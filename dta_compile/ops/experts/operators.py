"""Products with expert weights in a mixture of experts: each token is multiplied by the weights it was routed to.

    dta::expert_linear(rows, expert, weight)              rows[s] @ weight[expert[s]].T at every (token, expert) slot s
    dta::expert_sum(rows, expert, scale, weight)          the same, times scale[s], summed over a token's slots
    dta::expert_products(left, right, expert)             for every expert the sum of left[s] x right[s] over its slots

The last one is the gradient of the weights; `dta::expert_products_` accumulates it into experts that have slots.
Slots are the entries of `expert`, `[*tokens, k]` or any other shape; operands with one dimension less, `[*tokens, D]`,
are shared by all k slots. A slot whose number is no expert's gives zeros and gets no gradient.

The operators are token-wise: experts have no capacity, so that no token depends on the routes of others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dta_compile.errors import OptionError
from dta_compile.ops.dtypes import autocast, statistics_dtype
from dta_compile.ops.experts import products as grouped_products
from dta_compile.ops.library import define

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def expert_linear(
    rows: torch.Tensor,
    expert: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    transposed: bool = False,
) -> torch.Tensor:
    """Apply a linear layer with the weight of each slot's expert (dropless); works in compiled and in eager code.

    Args:
        rows: `[*tokens, D]`, shared by all experts of a token, or `[*tokens, k, D]`.
        expert: `[*tokens, k]` integers in `[0, E)`; other numbers mean no expert and give zeros.
        weight: `[E, O, D]`.
        bias: `[E, O]`.
        transposed: the weight is `[E, D, O]`.

    Returns:
        `[*tokens, k, O]`.

    Raises:
        OptionError: sizes that do not fit.
    """
    _require_sizes(rows, expert, weight, bias, transposed)
    rows, weight = autocast(rows, weight)
    expert = expert.to(torch.int64)  # expert and slot numbers may not fit in narrower types
    out: torch.Tensor = EXPERT_LINEAR(rows, expert, weight, transposed)
    return out if bias is None else out + _biases(bias, expert)


def expert_sum(
    rows: torch.Tensor,
    expert: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    transposed: bool = False,
) -> torch.Tensor:
    """Return the weighted sum of a token's expert outputs: the second linear layer of a mixture of experts.

    Computes `(expert_linear(rows, ...) * scale[..., None]).sum(-2)` without saving the products for the backward.

    Args:
        rows: `[*tokens, k, D]`.
        expert, weight, bias, transposed: as in `expert_linear`.
        scale: `[*tokens, k]` router weights.

    Returns:
        `[*tokens, O]`, in the promoted dtype of products and `scale`.

    Raises:
        OptionError: sizes that do not fit.
    """
    _require_sizes(rows, expert, weight, bias, transposed)
    if not _same(scale.shape, expert.shape) or rows.dim() != expert.dim() + 1:
        raise OptionError(
            "a mixture of experts needs a weight and a row for every expert of a token",
            expected=f"scale {list(expert.shape)} and rows of {expert.dim() + 1} dimensions",
            got=f"{list(scale.shape)} and {list(rows.shape)}",
        )
    rows, weight = autocast(rows, weight)
    expert = expert.to(torch.int64)
    out: torch.Tensor = EXPERT_SUM(rows, expert, scale, weight, transposed)
    return out if bias is None else out + (_biases(bias, expert) * scale[..., None]).sum(-2)


def _biases(bias: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
    """Gather biases `[*expert, O]`; zeros at slots without an expert."""
    known = (expert >= 0) & (expert < bias.shape[0])
    biases = torch.nn.functional.embedding(torch.where(known, expert, 0), bias)
    return torch.where(known[..., None], biases, 0)


def _require_sizes(
    rows: torch.Tensor, expert: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool
) -> None:
    if weight.dim() == 3 and expert.dim() and expert.dtype in INTEGERS:
        experts, width = weight.shape[0], weight.shape[1 if transposed else 2]
        output = weight.shape[2 if transposed else 1]
        places = _same(rows.shape[:-1], expert.shape) or _same(rows.shape[:-1], expert.shape[:-1])
        if places and rows.shape[-1] == width and (bias is None or _same(bias.shape, (experts, output))):
            return
    raise OptionError(
        "the sizes of rows, experts and weights do not fit",
        expected="rows [*tokens, D] or [*tokens, k, D], integers [*tokens, k], weights [E, O, D] and a bias [E, O]",
        got=f"{list(rows.shape)}, {expert.dtype} {list(expert.shape)}, {list(weight.shape)}"
        + (f" (transposed: {transposed})" if bias is None else f" and {list(bias.shape)} (transposed: {transposed})"),
    )


def _same(one: Sequence[int], other: Sequence[int]) -> bool:
    """Return whether two shapes are equal; comparing size by size lets SymInts be guarded."""
    return len(one) == len(other) and all(a == b for a, b in zip(one, other, strict=True))


def _sum_fake(
    rows: torch.Tensor, expert: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor, transposed: bool
) -> torch.Tensor:
    dtype = torch.promote_types(rows.dtype, scale.dtype)
    return rows.new_empty((*expert.shape[:-1], weight.shape[2 if transposed else 1]), dtype=dtype)


def _products(left: torch.Tensor, right: torch.Tensor, expert: torch.Tensor, experts: int) -> torch.Tensor:
    total = left.new_zeros((experts, left.shape[-1], right.shape[-1]), dtype=statistics_dtype(left.dtype))
    grouped_products.add(total, left, right, expert)
    return total.to(left.dtype)


def _save_linear(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *tensors, ctx.transposed = inputs
    ctx.save_for_backward(*tensors)


def _linear_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    rows, expert, weight = ctx.saved_tensors
    of_rows = of_weight = None
    if ctx.needs_input_grad[0]:
        of_rows = EXPERT_LINEAR(grad, expert, weight, not ctx.transposed)
        of_rows = of_rows if rows.dim() > expert.dim() else of_rows.sum(-2)
    if ctx.needs_input_grad[2]:
        of_weight = _of_weight(grad, rows, expert, weight, ctx.transposed)
    return of_rows, None, of_weight, None


def _sum_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """Return the gradients for the gradient `g` of the sum.

    Of a row it is `scale * g @ weight`, of its scale `rows . (g @ weight)`, which needs no product of the forward, and
    of the weight the sum of `g x (scale * rows)`.
    """
    rows, expert, scale, weight = ctx.saved_tensors
    of_rows = of_scale = of_weight = None
    if ctx.needs_input_grad[0] or ctx.needs_input_grad[2]:
        plain = EXPERT_LINEAR(grad.to(rows.dtype), expert, weight, not ctx.transposed)
        of_rows = (plain * scale[..., None]).to(rows.dtype)
        of_scale = (plain.to(grad.dtype) * rows).sum(-1).to(scale.dtype)
    if ctx.needs_input_grad[3]:
        scaled = (rows * scale[..., None]).to(rows.dtype)
        of_weight = _of_weight(grad.to(rows.dtype), scaled, expert, weight, ctx.transposed)
    return of_rows, None, of_scale, of_weight, None


def _of_weight(
    grad: torch.Tensor, rows: torch.Tensor, expert: torch.Tensor, weight: torch.Tensor, transposed: bool
) -> torch.Tensor:
    sides = (rows, grad) if transposed else (grad, rows)
    products: torch.Tensor = EXPERT_PRODUCTS(*sides, expert, weight.shape[0])
    return products


def _products_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    left, right, expert = ctx.saved_tensors
    of_left, of_right = EXPERT_LINEAR(right, expert, grad, False), EXPERT_LINEAR(left, expert, grad, True)
    sides = ((of_left, left), (of_right, right))
    return *(of if side.dim() > expert.dim() else of.sum(-2) for of, side in sides), None, None


EXPERT_LINEAR = define(
    "expert_linear(Tensor rows, Tensor expert, Tensor weight, bool transposed) -> Tensor",
    lambda rows, expert, weight, transposed: rows.new_empty((*expert.shape, weight.shape[2 if transposed else 1])),
    grouped_products.linear,
    _save_linear,
    _linear_backward,
)
EXPERT_SUM = define(
    "expert_sum(Tensor rows, Tensor expert, Tensor scale, Tensor weight, bool transposed) -> Tensor",
    _sum_fake,
    grouped_products.weighted_sum,
    _save_linear,
    _sum_backward,
)
EXPERT_PRODUCTS = define(
    "expert_products(Tensor left, Tensor right, Tensor expert, SymInt experts) -> Tensor",
    lambda left, right, _, experts: left.new_empty((experts, left.shape[-1], right.shape[-1])),
    _products,
    lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:3]),
    _products_backward,
)
EXPERT_PRODUCTS_ = define(
    "expert_products_(Tensor(a!) total, Tensor left, Tensor right, Tensor expert) -> ()",
    lambda *_: None,
    grouped_products.add,
)
OPERATORS = (EXPERT_LINEAR, EXPERT_SUM, EXPERT_PRODUCTS, EXPERT_PRODUCTS_)
