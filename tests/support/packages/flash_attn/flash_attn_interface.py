"""Causal and other attention as the package computes it, densely in any dtype, behind what Dynamo meets of it.

As the package does, it registers operators of its own for forward and backward, wrapped by autograd functions, and pads
heads to a multiple of eight. Dropout, slopes and block tables are arguments without an effect.
"""

import torch
import torch.nn.functional as F

Forward = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class Dense:
    """Attention of `[B, S, H, D]`, the last query beside the last key; `numbers` `[B, S]` of sequences, if there are
    any, that see their own tokens only."""

    def __init__(self, q, k, v, numbers, scale, causal, left, right, softcap):
        self.q = q.transpose(1, 2).unflatten(1, (k.shape[2], -1))
        self.k, self.v = (t.transpose(1, 2)[:, :, None] for t in (k, v))
        index = torch.arange(k.shape[1])
        distance = index[-q.shape[1] :, None] - index
        allowed = (distance == distance)[None] if numbers is None else numbers[:, :, None] == numbers[:, None]
        right = 0 if causal else right
        if left >= 0:
            allowed = allowed & (distance <= left)
        if right >= 0:
            allowed = allowed & (distance >= -right)
        scores, self.scale, self.slope = self.q @ self.k.mT * scale, scale, 1.0
        if softcap > 0:
            self.slope = 1 - (scores / softcap).tanh() ** 2
            scores = softcap * (scores / softcap).tanh()
        scores = scores.masked_fill(~allowed[:, None, None], float("-inf"))
        self.logsumexp, self.weights = scores.logsumexp(-1).flatten(1, 2), scores.softmax(-1)

    def forward(self):
        return (self.weights @ self.v).flatten(1, 2).transpose(1, 2).contiguous()

    def backward(self, grad):
        grad = grad.transpose(1, 2).unflatten(1, self.q.shape[1:3])
        weighted = self.weights * (grad @ self.v.mT)
        scores = (weighted - self.weights * weighted.sum(-1, keepdim=True)) * self.slope * self.scale
        of_q = (scores @ self.k).flatten(1, 2)
        of_k, of_v = (scores.mT @ self.q).sum(2), (self.weights.mT @ grad).sum(2)
        return tuple(t.transpose(1, 2).contiguous() for t in (of_q, of_k, of_v))


def _numbers(ends: torch.Tensor, tokens: int) -> torch.Tensor:
    return torch.bucketize(torch.arange(tokens), ends[1:].long(), right=True)[None]


def packed(q, k, v, ends, *others):
    return Dense(q[None], k[None], v[None], _numbers(ends, len(q)), *others)


def _results(out: torch.Tensor, logsumexp: torch.Tensor) -> Forward:
    return out, logsumexp.float(), out.new_empty(0), torch.zeros(2, dtype=torch.int64)


@torch.library.custom_op("flash_attn::_flash_attn_forward", mutates_args=())
def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    return_softmax: bool,
) -> Forward:
    dense = Dense(q, k, v, None, softmax_scale, causal, window_size_left, window_size_right, softcap)
    return _results(dense.forward(), dense.logsumexp)


@_forward.register_fake
def _(q, *_):
    return _results(torch.empty_like(q), q.new_empty((q.shape[0], q.shape[2], q.shape[1])))


@torch.library.custom_op("flash_attn::_flash_attn_varlen_forward", mutates_args=())
def _varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    return_softmax: bool = False,
    block_table: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    zero_tensors: bool = False,
) -> Forward:
    dense = packed(q, k, v, cu_seqlens_q, softmax_scale, causal, window_size_left, window_size_right, softcap)
    return _results(dense.forward()[0], dense.logsumexp[0])


@_varlen_forward.register_fake
def _(q, *_, **__):
    return _results(torch.empty_like(q), q.new_empty((q.shape[1], q.shape[0])))


@torch.library.custom_op("flash_attn::_flash_attn_backward", mutates_args=("dq", "dk", "dv"))
def _backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
) -> torch.Tensor:
    dense = Dense(q, k, v, None, softmax_scale, causal, window_size_left, window_size_right, softcap)
    for into, grad in zip((dq, dk, dv), dense.backward(dout), strict=True):
        into.copy_(grad)
    return q.new_empty(0)


@torch.library.custom_op("flash_attn::_flash_attn_varlen_backward", mutates_args=("dq", "dk", "dv"))
def _varlen_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
) -> torch.Tensor:
    dense = packed(q, k, v, cu_seqlens_q, softmax_scale, causal, window_size_left, window_size_right, softcap)
    for into, grad in zip((dq, dk, dv), dense.backward(dout[None]), strict=True):
        into.copy_(grad[0])
    return q.new_empty(0)


@_backward.register_fake
@_varlen_backward.register_fake
def _(dout, *_):
    return dout.new_empty(0)


def _multiple_of_eight(*tensors: torch.Tensor) -> list[torch.Tensor]:
    more = -tensors[0].shape[-1] % 8
    return [F.pad(t, [0, more]) for t in tensors] if more else list(tensors)


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, dropout_p, scale, causal, window, softcap, slopes, return_probs, is_grad_enabled):
        is_grad = is_grad_enabled and any(t.requires_grad for t in (q, k, v))
        scale, width = q.shape[-1] ** -0.5 if scale is None else scale, q.shape[-1]
        q, k, v = _multiple_of_eight(q, k, v)
        out, logsumexp, probs, state = torch.ops.flash_attn._flash_attn_forward(
            q,
            k,
            v,
            dropout_p,
            scale,
            causal=causal,
            window_size_left=window[0],
            window_size_right=window[1],
            softcap=softcap,
            alibi_slopes=slopes,
            return_softmax=return_probs and dropout_p > 0,
        )
        if is_grad:
            ctx.save_for_backward(q, k, v, out, logsumexp, state)
            ctx.scale, ctx.causal, ctx.window, ctx.softcap = scale, causal, window, softcap
        out = out[..., :width]
        return (out, logsumexp, probs) if return_probs else out

    @staticmethod
    def backward(ctx, grad, *_):
        q, k, v, *_ = ctx.saved_tensors
        width, grads = grad.shape[-1], [torch.empty_like(t) for t in (q, k, v)]
        (grad,) = _multiple_of_eight(grad)
        torch.ops.flash_attn._flash_attn_backward(
            grad, q, k, v, *grads, ctx.scale, ctx.causal, *ctx.window, ctx.softcap
        )
        return *[t[..., :width] for t in grads], *[None] * 8


class _VarlenFlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, q, k, v, ends, k_ends, longest, longest_k, dropout_p, scale, causal, window, softcap, slopes,
        return_probs, block_table, is_grad_enabled,
    ):  # fmt: skip
        is_grad = is_grad_enabled and any(t.requires_grad for t in (q, k, v))
        scale, width = q.shape[-1] ** -0.5 if scale is None else scale, q.shape[-1]
        q, k, v = _multiple_of_eight(q, k, v)
        out, logsumexp, probs, state = torch.ops.flash_attn._flash_attn_varlen_forward(
            q,
            k,
            v,
            ends,
            k_ends,
            longest,
            longest_k,
            dropout_p,
            scale,
            causal=causal,
            window_size_left=window[0],
            window_size_right=window[1],
            softcap=softcap,
            alibi_slopes=slopes,
            return_softmax=return_probs and dropout_p > 0,
            block_table=block_table,
        )
        if is_grad:
            ctx.save_for_backward(q, k, v, out, logsumexp, ends, k_ends, state)
            ctx.scale, ctx.causal, ctx.window, ctx.softcap = scale, causal, window, softcap
        out = out[..., :width]
        return (out, logsumexp, probs) if return_probs else out

    @staticmethod
    def backward(ctx, grad, *_):
        q, k, v, _, _, ends, *_ = ctx.saved_tensors
        width, grads = grad.shape[-1], [torch.empty_like(t) for t in (q, k, v)]
        (grad,) = _multiple_of_eight(grad)
        torch.ops.flash_attn._flash_attn_varlen_backward(
            grad, q, k, v, *grads, ends, ctx.scale, ctx.causal, *ctx.window, ctx.softcap
        )
        return *[t[..., :width] for t in grads], *[None] * 13


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
):  # fmt: skip
    return _FlashAttention.apply(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs,
        torch.is_grad_enabled(),
    )  # fmt: skip


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None,
):  # fmt: skip
    return _VarlenFlashAttention.apply(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, return_attn_probs, block_table, torch.is_grad_enabled(),
    )  # fmt: skip
