"""Operators in terms of others that the rules know: fused reductions, constructors, and what lacks symbolic shapes."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._decomp import get_decompositions

from dta_compile.passes.graphs.nodes import filled_with
from dta_compile.passes.graphs.operators import FULL_VARIANTS, UNINITIALIZED
from dta_compile.passes.symbols import sizes

aten = torch.ops.aten

# Reductions that torch fuses with per-token work: taken apart, the per-token half can run over the tree.
FUSED_REDUCTIONS = get_decompositions(
    [
        aten.nll_loss_forward,
        aten.nll_loss2d_forward,
        aten.mse_loss,
        aten.smooth_l1_loss,
        aten.huber_loss,
        aten.binary_cross_entropy,
        aten.soft_margin_loss,
    ]
)

# Operators without a rule, a derivative or symbolic shapes of their own, in terms of such that have them.
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
        aten.std_mean,
        aten.nansum,
        aten.aminmax,
        aten.dot,
        aten.unsafe_split,
        aten.unsafe_split_with_sizes,
    ]
)


def _copied(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """`target.copy_(source)` as a function that autograd knows."""
    source = source.to(target.dtype)
    return source if source.shape == target.shape else torch.where(target.isnan() | True, source, target)


def _group_norm(
    x: torch.Tensor, weight: Any, bias: Any, rows: Any, channels: int, rest: Any, groups: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Group norm row by row; torch's own takes the number of rows as an argument."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32)).reshape(rows, groups, -1)
    variance, mean = torch.var_mean(wide, -1, correction=0, keepdim=True)
    rstd = torch.rsqrt(variance + eps)
    out = ((wide - mean) * rstd).reshape(x.shape)
    column = (channels, *(1,) * (x.dim() - 2))
    out = out if weight is None else out * weight.reshape(column)
    out = out if bias is None else out + bias.reshape(column)
    return out.to(x.dtype), mean.reshape(rows, groups), rstd.reshape(rows, groups)


def _repeat(x: torch.Tensor, repeats: list[Any]) -> Any:
    """Repeating along dimensions of one entry and new ones is expanding."""
    sizes = (*(1,) * (len(repeats) - x.dim()), *x.shape)
    if any(not _is(times, 1) and not _is(size, 1) for times, size in zip(repeats, sizes, strict=True)):
        return NotImplemented
    wanted = (times if _is(size, 1) else size for times, size in zip(repeats, sizes, strict=True))
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
    """A convolution of single places is a linear map of each; torch's own takes no empty inputs (no head rows, say)."""
    is_wide = not all(_is(size, 1) for size in weight.shape[2:]) or any(n != 1 for n in stride) or any(padding)
    if is_wide or transposed:
        return NotImplemented
    kernels = weight.reshape(groups, weight.shape[0] // groups, weight.shape[1])
    mapped = torch.einsum("...gi,goi->...go", x.movedim(1, -1).unflatten(-1, (groups, -1)), kernels).flatten(-2)
    return (mapped if bias is None else mapped + bias).movedim(-1, 1).contiguous()


def _is(size: Any, number: int) -> bool:
    """Whether a size is that number in every call."""
    return isinstance(size, int) and size == number


TABLE = {
    **FUSED_REDUCTIONS,
    **SPELLED_OUT,
    aten.copy.default: _copied,
    aten.native_group_norm.default: _group_norm,
    aten.repeat.default: _repeat,
    aten.convolution.default: _convolution,
}


def spell_out_constructors(graph: fx.Graph) -> None:
    """`x.new_zeros(size)` and its like become `full(size, value)`, which depends on nothing but sizes."""
    for node in list(graph.nodes):
        if node.target not in FULL_VARIANTS:
            continue
        of_tensor = node.target._schema.arguments[0].name == "self"
        size, val = node.args[1 if of_tensor else 0], node.meta["val"]
        value = 0 if node.target in UNINITIALIZED else filled_with(node)
        with graph.inserting_before(node):
            full = graph.call_function(
                aten.full.default, (size, value), {"dtype": val.dtype, "device": val.device, "pin_memory": False}
            )
        full.meta = dict(node.meta)
        node.replace_all_uses_with(full)
        graph.erase_node(node)


def drop_empty_parts(graph: fx.Graph) -> None:
    """`cat([empty, x])` is `x`: what a KV cache that starts empty does with the first keys."""
    for node in list(graph.nodes):
        if node.target is not aten.cat.default:
            continue
        parts = [part for part in node.args[0] if sizes(part) != (0,)]
        if len(parts) == 1 and parts[0].meta["val"].dtype == node.meta["val"].dtype:  # empty parts have a say in it
            node.replace_all_uses_with(parts[0])
            graph.erase_node(node)
