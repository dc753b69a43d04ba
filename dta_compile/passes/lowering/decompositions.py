"""Decompose operators into ones with token rules: fused reductions, constructors, operators without symbolic shapes.

A call of `scaled_dot_product_attention` becomes the opaque `dta::attention_call`.
The operator's contract, which every attention provider relies on: query `[B, Hq, S, D]`, key `[B, Hkv, S, D]` and
value `[B, Hkv, S, Dv]` with Hq a multiple of Hkv, and a positive scale. Whatever else torch accepts is normalised to
this form here: sizes that broadcast, different numbers of heads for keys and values, zero and negative scales.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from dta_compile.errors import RefusalError
from dta_compile.ops.attention import ATTENTION_CALL, Masking
from dta_compile.ops.dtypes import autocast
from dta_compile.ops.scoring import Scoring
from dta_compile.passes.graphs.arguments import argument
from dta_compile.passes.graphs.nodes import filled_with, full_for, replace_nodes
from dta_compile.passes.graphs.operators import FULL_VARIANTS, UNINITIALIZED, aten
from dta_compile.passes.graphs.source_lines import where_now
from dta_compile.passes.lowering.attention.dimensions import dropout_refusal
from dta_compile.torch_compat.tracing import get_decompositions

# Reductions that torch fuses with per-token work: once decomposed, the per-token part can run over the tree.
FUSED_REDUCTIONS = get_decompositions(
    [
        aten.nll_loss_forward,
        aten.nll_loss2d_forward,
        aten.mse_loss,
        aten.soft_margin_loss,
    ]
)

# Operators that lack a token rule, a derivative or symbolic shapes, decomposed into operators that have all three.
SPELLED_OUT = get_decompositions(
    [
        aten.addcmul,
        aten.eye,
        aten.diag_embed,
        aten.addcdiv,
        aten.softshrink,
        aten.log_sigmoid_forward,
        aten.roll,
        aten.index_fill,
        aten.narrow_copy,
        aten.nansum,
        aten.aminmax,
        aten.dot,
        aten.unsafe_split,
        aten.unsafe_split_with_sizes,
    ]
)


def _copied(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Compute `target.copy_(source)` with functional operators that autograd differentiates."""
    source = source.to(target.dtype)
    return source if source.shape == target.shape else torch.where(target.isnan() | True, source, target)


def _group_norm(
    x: torch.Tensor, weight: Any, bias: Any, rows: Any, channels: int, rest: Any, groups: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute group norm row by row; torch's own operator takes the number of rows as an argument."""
    wide = _wide(x).reshape(rows, groups, -1)
    variance, mean = torch.var_mean(wide, -1, correction=0, keepdim=True)
    rstd = torch.rsqrt(variance + eps)
    out = ((wide - mean) * rstd).reshape(x.shape)
    return _affine(out, weight, bias).to(x.dtype), mean.reshape(rows, groups), rstd.reshape(rows, groups)


def _batch_norm(
    x: torch.Tensor, weight: Any, bias: Any, mean: torch.Tensor, variance: torch.Tensor, momentum: float, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute batch norm from running statistics, which is affine in each value."""
    wide = _wide(x)
    scale = torch.rsqrt(variance + eps)
    out = _affine(_affine(wide, scale, -mean * scale), weight, bias)
    return out.to(x.dtype), mean.new_empty(0), mean.new_empty(0)


def _affine(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    """Return `x * weight + bias` per channel, the second dimension of `x`."""
    column = (-1, *(1,) * (x.dim() - 2))
    x = x if weight is None else x * weight.reshape(column)
    return x if bias is None else x + bias.reshape(column)


def _repeat(x: torch.Tensor, repeats: list[Any]) -> Any:
    """Expand `x` instead of repeating it, if only new dimensions and those of size 1 are repeated."""
    sizes = (*(1,) * (len(repeats) - x.dim()), *x.shape)
    if any(not _is_one(times) and not _is_one(size) for times, size in zip(repeats, sizes, strict=True)):
        return NotImplemented
    wanted = (times if _is_one(size) else size for times, size in zip(repeats, sizes, strict=True))
    return x.expand(*wanted).clone(memory_format=torch.contiguous_format)


def _convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
) -> Any:
    """Compute a convolution with kernels of size 1 as a linear map; torch's own rejects empty inputs (no head rows)."""
    is_wide = not all(_is_one(size) for size in weight.shape[2:]) or any(n != 1 for n in stride) or any(padding)
    if is_wide or transposed:
        return NotImplemented
    kernels = weight.reshape(groups, weight.shape[0] // groups, weight.shape[1])
    mapped = torch.einsum("...gi,goi->...go", x.movedim(1, -1).unflatten(-1, (groups, -1)), kernels).flatten(-2)
    return (mapped if bias is None else mapped + bias).movedim(-1, 1).contiguous()


def _sum(x: Any, y: Any, alpha: Any = 1) -> Any:
    """Compute `x + alpha * y` as two operators, so that no reader of sums has to know of `alpha`."""
    return NotImplemented if isinstance(alpha, (int, float)) and alpha == 1 else x + _multiplied(x, y, alpha)


def _difference(x: Any, y: Any, alpha: Any = 1) -> Any:
    """Compute `x - alpha * y` as two operators."""
    return NotImplemented if isinstance(alpha, (int, float)) and alpha == 1 else x - _multiplied(x, y, alpha)


def _reversed_difference(x: Any, y: Any, alpha: Any = 1) -> Any:
    return NotImplemented if isinstance(alpha, (int, float)) and alpha == 1 else y - _multiplied(y, x, alpha)


def _multiplied(x: Any, y: Any, alpha: Any) -> Any:
    """Return `alpha * y` in the dtype of the sum, in which torch multiplies: that of `y` may be too narrow."""
    return (y.to(torch.result_type(x, y)) if isinstance(y, torch.Tensor) else y) * alpha


# Torch's own decompositions of these have other derivatives than its operators: NaN for a deviation of zero, for sure
# probabilities and for infinite distances.


def _std_mean(
    x: torch.Tensor, dim: list[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute deviation and mean; a deviation of zero has the derivative zero."""
    variance, mean = torch.var_mean(x, dim, correction=correction, keepdim=keepdim)
    is_zero = variance == 0
    return variance.masked_fill(is_zero, 1).sqrt().masked_fill(is_zero, 0), mean


LEAST_VARIANCE = 9.999999960041972e-13  # 1e-12 in float32, as in torch's kernels for all dtypes


def _binary_cross_entropy(
    x: torch.Tensor, target: torch.Tensor, weight: Any = None, reduction: int = 1
) -> torch.Tensor:
    """Compute binary cross entropy, whose derivative has a variance of at least `LEAST_VARIANCE` as its divisor."""
    wide, target = _wide(x), _wide(target)
    kept = wide.detach()
    loss = (target - 1) * torch.log1p(-kept).clamp(min=-100) - target * kept.log().clamp(min=-100)
    slope = (kept - target.detach()) / (kept * (1 - kept)).clamp(min=LEAST_VARIANCE)
    loss = loss + (wide - kept) * slope  # which adds zero
    return _reduced(loss if weight is None else loss * weight, reduction, x.dtype)


def _smooth_l1(x: torch.Tensor, target: torch.Tensor, reduction: int = 1, beta: float = 1.0) -> torch.Tensor:
    gap = _wide(x) - _wide(target)
    is_far = gap.abs() >= beta
    squares, distances = gap.masked_fill(is_far, 0).square(), gap.masked_fill(~is_far, 0).abs()
    loss = torch.where(is_far, distances - 0.5 * beta, 0.5 * squares / beta)
    return _reduced(loss, reduction, torch.result_type(x, target))


def _huber(x: torch.Tensor, target: torch.Tensor, reduction: int = 1, delta: float = 1.0) -> torch.Tensor:
    gap = _wide(x) - _wide(target)
    is_far = gap.abs() > delta
    squares, distances = gap.masked_fill(is_far, 0).square(), gap.masked_fill(~is_far, 0).abs()
    loss = torch.where(is_far, delta * (distances - 0.5 * delta), 0.5 * squares)
    return _reduced(loss, reduction, torch.result_type(x, target))


def _wide(x: torch.Tensor) -> torch.Tensor:
    """Return `x` in at least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _reduced(loss: torch.Tensor, reduction: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a loss by entry (0), its mean (1) or its sum (2)."""
    return (loss.mean() if reduction == 1 else loss.sum() if reduction == 2 else loss).to(dtype)


TABLE: dict[Any, Any] = {
    **FUSED_REDUCTIONS,
    **SPELLED_OUT,
    **dict.fromkeys((aten.add.Tensor, aten.add.Scalar), _sum),
    **dict.fromkeys((aten.sub.Tensor, aten.sub.Scalar), _difference),
    **dict.fromkeys((aten.rsub.Tensor, aten.rsub.Scalar), _reversed_difference),
    aten.copy.default: _copied,
    aten.native_group_norm.default: _group_norm,
    aten._native_batch_norm_legit_no_training.default: _batch_norm,
    aten.repeat.default: _repeat,
    aten.convolution.default: _convolution,
    aten.std_mean.correction: _std_mean,
    aten.binary_cross_entropy.default: _binary_cross_entropy,
    aten.smooth_l1_loss.default: _smooth_l1,
    aten.huber_loss.default: _huber,
}


def spell_out_constructors(graph: fx.Graph) -> None:
    """Replace `x.new_zeros(size)` and the like by `full(size, value)`, which depends on sizes alone."""

    def spelled_out(node: fx.Node) -> fx.Node | None:
        if node.target not in FULL_VARIANTS:
            return None
        return full_for(node, argument(node, "size"), 0 if node.target in UNINITIALIZED else filled_with(node))

    replace_nodes(graph, spelled_out)


Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def capture_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Compute `scaled_dot_product_attention` with the opaque operator.

    `enable_gqa` is not read: fewer heads of keys and values than of queries are supported without it, and numbers of
    heads that torch rejects have raised an error before.

    Raises:
        RefusalError: there is dropout, or a tensor has a rank other than 3 and 4.
    """
    if dropout_p:
        raise dropout_refusal(where_now(), f"dropout_p={dropout_p}")
    operands = query, key, value
    ranks = [tensor.dim() for tensor in operands]
    if ranks not in ([3] * 3, [4] * 3):
        raise RefusalError(
            "attention over tensors of these ranks is not supported",
            where=where_now(),
            expected="query, key and value of shape [batch, heads, tokens, head_dim]",
            got=f"ranks {ranks[0]}, {ranks[1]} and {ranks[2]}",
            hint="merge further dimensions with the heads or with the batch, and split them again afterwards",
        )
    if ranks[0] == 3:
        # A constant first size counts the heads of one sequence; a symbolic one counts sequences with one head.
        dim = 0 if all(isinstance(tensor.shape[0], int) for tensor in operands) else 1
        mask = attn_mask.unsqueeze(dim) if attn_mask is not None and attn_mask.dim() == 3 else attn_mask
        query, key, value = (tensor.unsqueeze(dim) for tensor in operands)
        return capture_attention(query, key, value, mask, 0.0, is_causal, scale, enable_gqa).squeeze(dim)
    query, key, value = _with_common_sizes(*autocast(*operands))
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    query, scale = _with_positive_scale(query, scale)
    return ATTENTION_CALL(query, key, value, *Masking(attn_mask, is_causal, None, 0, Scoring(scale)).arguments)


def _with_common_sizes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Tensors:
    """Expand to one number of sequences, and to one number of KV heads that divides the number of query heads."""
    heads = _heads(query, key, value)
    kv_heads = math.lcm(heads[1], heads[2])
    batch = _batch(query, key, value)
    query = _expanded(query, batch, max(heads))
    key, value = (_repeated(_expanded(t, batch, t.shape[1]), kv_heads) for t in (key, value))
    return query, key, value


def _heads(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[int, int, int]:
    counts = query.shape[1], key.shape[1], value.shape[1]
    if not all(isinstance(number, int) and number > 0 for number in counts):
        raise RefusalError(
            "the number of attention heads depends on the batch, or is zero",
            where=where_now(),
            expected="query, key and value of shape [batch, heads, tokens, head_dim] with a constant number of heads",
            got=f"{counts[0]}, {counts[1]} and {counts[2]} heads",
        )
    return counts


def _batch(*tensors: torch.Tensor) -> int | torch.SymInt:
    """Return the number of sequences; tensors whose batch size is 1 broadcast."""
    return next((t.shape[0] for t in tensors if not _is_one(t.shape[0])), 1)


def _is_one(size: int | torch.SymInt) -> bool:
    """Return whether a size is the constant 1."""
    return isinstance(size, int) and size == 1


def _expanded(tensor: torch.Tensor, batch: int | torch.SymInt, heads: int) -> torch.Tensor:
    batch_is_there = not _is_one(tensor.shape[0]) or _is_one(batch)
    return tensor if batch_is_there and tensor.shape[1] == heads else tensor.expand(batch, heads, -1, -1)


def _repeated(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Repeat every head of `[B, h, S, D]` `heads // h` times in a row."""
    batch, own, tokens, width = tensor.shape
    if own == heads:
        return tensor
    return tensor[:, :, None].expand(batch, own, heads // own, tokens, width).reshape(batch, heads, tokens, width)


def _with_positive_scale(query: torch.Tensor, scale: float) -> tuple[torch.Tensor, float]:
    """Return the query and a positive scale: the sign, or zero, moves into the query.

    Fused kernels take the largest score before scaling, or scale masked scores, and are right for positive scales only.
    """
    if scale < 0:
        return -query, -scale
    return (query * 0.0, 1.0) if scale == 0 else (query, scale)
