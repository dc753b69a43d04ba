"""Attention of a chunk: its queries over the prefix (no mask) and over itself (causal), merged by log-sum-exp.

One interface, several providers: `Reference` in plain math, and torch's CPU flash kernels. Shapes: query
`[1, Hq, c, D]`, key and value of the chunk `[1, Hkv, c, D]`, of the prefix `[1, Hkv, p, D]`; Hq is a multiple of Hkv.
The backward takes the merged output and log-sum-exp, which makes the gradient of each part exact by itself.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

aten = torch.ops.aten
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Operands(NamedTuple):
    """What one attention call reads."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    prefix_key: torch.Tensor
    prefix_value: torch.Tensor
    scale: float
    window: int  # 0: none


class Gradients(NamedTuple):
    """Gradients of one attention call's operands; the prefix parts are None when there is no prefix."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    prefix_key: torch.Tensor | None
    prefix_value: torch.Tensor | None


class Provider(Protocol):
    """How attention is computed."""

    def forward(self, x: Operands) -> tuple[torch.Tensor, torch.Tensor]:
        """Output `[1, Hq, c, Dv]` and log-sum-exp `[1, Hq, c]`."""

    def backward(self, grad: torch.Tensor, out: torch.Tensor, logsumexp: torch.Tensor, x: Operands) -> Gradients:
        """Gradients of all operands."""


def provider_for(query: torch.Tensor, value: torch.Tensor) -> Provider:
    """The fastest provider for these tensors."""
    flash_types = (torch.float32, torch.float64, torch.bfloat16)
    if query.device.type == "cpu" and query.dtype in flash_types and query.shape[-1] == value.shape[-1]:
        return FlashCPU()
    return Reference()


def repeat_heads(tensor: torch.Tensor, groups: int) -> torch.Tensor:
    """`[1, Hkv, n, D]` to `[1, Hkv * groups, n, D]`."""
    return tensor.repeat_interleave(groups, 1) if groups > 1 else tensor


def sum_groups(tensor: torch.Tensor, groups: int) -> torch.Tensor:
    """The gradient of `repeat_heads`."""
    return tensor.unflatten(1, (-1, groups)).sum(2) if groups > 1 else tensor


def allowed_pairs(x: Operands) -> torch.Tensor:
    """Which of the `p + c` keys each of the `c` queries may read, bool `[c, p + c]`: causal, within the window."""
    prefix, chunk = x.prefix_key.shape[2], x.query.shape[2]
    device = x.query.device
    distance = torch.arange(prefix, prefix + chunk, device=device)[:, None] - torch.arange(
        prefix + chunk, device=device
    )
    allowed = distance >= 0
    return allowed & (distance < x.window) if x.window else allowed


class Reference:
    """Plain softmax over all keys at once, in at least float32: the definition of correct."""

    def forward(self, x: Operands) -> tuple[torch.Tensor, torch.Tensor]:
        scores, value = self._scores_and_values(x)
        logsumexp = scores.logsumexp(-1)
        return ((scores - logsumexp[..., None]).exp() @ value).to(x.query.dtype), logsumexp

    def backward(self, grad: torch.Tensor, out: torch.Tensor, logsumexp: torch.Tensor, x: Operands) -> Gradients:
        scores, value = self._scores_and_values(x)
        grad, out = grad.to(value.dtype), out.to(value.dtype)
        weights = (scores - logsumexp[..., None]).exp()
        grad_scores = weights * (grad @ value.mT - (grad * out).sum(-1, keepdim=True)) * x.scale
        prefix, groups = x.prefix_key.shape[2], self._groups(x)
        key = repeat_heads(torch.cat([x.prefix_key, x.key], 2), groups).to(value.dtype)
        grad_query = (grad_scores @ key).to(x.query.dtype)
        grad_key = sum_groups(grad_scores.mT @ x.query.to(value.dtype), groups)
        grad_value = sum_groups(weights.mT @ grad, groups)
        own = grad_key[:, :, prefix:].to(x.key.dtype), grad_value[:, :, prefix:].to(x.value.dtype)
        return Gradients(grad_query, *own, grad_key[:, :, :prefix], grad_value[:, :, :prefix])

    def _groups(self, x: Operands) -> int:
        return x.query.shape[1] // x.key.shape[1]

    def _scores_and_values(self, x: Operands) -> tuple[torch.Tensor, torch.Tensor]:
        wide = torch.promote_types(x.query.dtype, torch.float32)
        key = repeat_heads(torch.cat([x.prefix_key, x.key], 2), self._groups(x)).to(wide)
        value = repeat_heads(torch.cat([x.prefix_value, x.value], 2), self._groups(x)).to(wide)
        scores = x.query.to(wide) @ key.mT * x.scale
        return scores.masked_fill(~allowed_pairs(x), float("-inf")), value


class FlashCPU:
    """torch's CPU flash kernels. The prefix part folds query groups into rows, so that its KV is never repeated."""

    def forward(self, x: Operands) -> tuple[torch.Tensor, torch.Tensor]:
        groups = x.query.shape[1] // x.key.shape[1]
        if x.window and x.window < x.prefix_key.shape[2] + x.query.shape[2]:
            joined, mask = self._windowed(x)
            key, value = repeat_heads(joined.key, groups), repeat_heads(joined.value, groups)
            return self._flash(x.query, key, value, x.scale, mask=mask)
        key, value = repeat_heads(x.key, groups), repeat_heads(x.value, groups)
        out, logsumexp = self._flash(x.query, key, value, x.scale, causal=True)
        if not x.prefix_key.shape[2]:
            return out, logsumexp
        kv_heads = x.key.shape[1]
        far, far_logsumexp = self._flash(_fold(x.query, kv_heads), x.prefix_key, x.prefix_value, x.scale)
        far, far_logsumexp = far.reshape(out.shape), far_logsumexp.reshape(logsumexp.shape)
        total = torch.logaddexp(logsumexp, far_logsumexp)
        near_share, far_share = (logsumexp - total).exp_(), (far_logsumexp - total).exp_()
        return (out * near_share[..., None] + far * far_share[..., None]).to(x.query.dtype), total

    def backward(self, grad: torch.Tensor, out: torch.Tensor, logsumexp: torch.Tensor, x: Operands) -> Gradients:
        groups, kv_heads = x.query.shape[1] // x.key.shape[1], x.key.shape[1]
        if x.window and x.window < x.prefix_key.shape[2] + x.query.shape[2]:
            return self._windowed_backward(grad, out, logsumexp, x, groups)
        key, value = repeat_heads(x.key, groups), repeat_heads(x.value, groups)
        near = self._flash_backward(grad, x.query, key, value, out, logsumexp, x.scale, causal=True)
        grad_query, grad_key, grad_value = near[0], sum_groups(near[1], groups), sum_groups(near[2], groups)
        if not x.prefix_key.shape[2]:
            return Gradients(grad_query, grad_key, grad_value, None, None)
        grad, query, out, logsumexp = (_fold(t, kv_heads) for t in (grad, x.query, out, logsumexp))
        far = self._flash_backward(grad, query, x.prefix_key, x.prefix_value, out, logsumexp, x.scale)
        return Gradients(grad_query + far[0].reshape(grad_query.shape), grad_key, grad_value, far[1], far[2])

    def _windowed(self, x: Operands) -> tuple[Operands, torch.Tensor]:
        """Prefix (only what the window reaches) and chunk joined, and the additive mask of the band."""
        reach = min(x.prefix_key.shape[2], x.window - 1)
        first = x.prefix_key.shape[2] - reach
        near = x._replace(prefix_key=x.prefix_key[:, :, first:], prefix_value=x.prefix_value[:, :, first:])
        joined = near._replace(
            key=torch.cat([near.prefix_key, x.key], 2), value=torch.cat([near.prefix_value, x.value], 2)
        )
        mask = torch.zeros((), dtype=x.query.dtype, device=x.query.device)
        return joined, mask.masked_fill(~allowed_pairs(near), float("-inf"))

    def _windowed_backward(
        self, grad: torch.Tensor, out: torch.Tensor, logsumexp: torch.Tensor, x: Operands, groups: int
    ) -> Gradients:
        joined, mask = self._windowed(x)
        key, value = repeat_heads(joined.key, groups), repeat_heads(joined.value, groups)
        grads = self._flash_backward(grad, x.query, key, value, out, logsumexp, x.scale, mask=mask)
        grad_key, grad_value = sum_groups(grads[1], groups), sum_groups(grads[2], groups)
        reach, prefix = joined.prefix_key.shape[2], x.prefix_key.shape[2]
        far = (torch.nn.functional.pad(g[:, :, :reach], (0, 0, prefix - reach, 0)) for g in (grad_key, grad_value))
        return Gradients(grads[0], grad_key[:, :, reach:], grad_value[:, :, reach:], *far)

    def _flash(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        causal: bool = False,
        mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, attn_mask=mask, scale=scale
        )
        return out, logsumexp

    def _flash_backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        logsumexp: torch.Tensor,
        scale: float,
        causal: bool = False,
        mask: torch.Tensor | None = None,
    ) -> Tensors:
        grads: Tensors = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, logsumexp, 0.0, causal, attn_mask=mask, scale=scale
        )
        return grads


def _fold(tensor: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """`[1, Hkv * g, c, ...]` to `[1, Hkv, g * c, ...]`: queries of a group are rows over the same keys."""
    return tensor.reshape(1, kv_heads, -1, *tensor.shape[3:])
