"""Attention provider that leaves rectangles to cuDNN: all queries of a large chunk over the first tokens of the stack.

A chunk that begins at the root is divided into its trunk and its branches, for which the trunk is such a rectangle.
With a prefix of 8,192 tokens attention is 1.2 times as fast forward and 1.2 to 1.4 times backward (benchmarks/GPU.md).
Our kernels add the rest of the stack and of the chunk's own tree to cuDNN's results, by the log-sum-exp of both.

cuDNN makes a plan per shape, which takes 50 ms forward and backward each. So a plan is only made for sizes that have
been met often, and sizes are rounded to four significant bits: queries up, with rows of zeros, and keys down.

What the tokens of a long slice read of their own slice stays with our kernels. cuDNN's causal kernels take a slice of
16,384 tokens alone 1.1 to 1.3 times as fast, but with them whole steps were 5 to 10% slower.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from dta_compile.ops.scoring import Scoring
from dta_compile.runtime.attention import triton
from dta_compile.runtime.attention.provider import Operands, Provider, Tensors
from dta_compile.runtime.path.chunk_shape import ChunkShape

aten = torch.ops.aten
logger = logging.getLogger("dta_compile")

LEAST_QUERIES = 1024  # chunks in CUDA graphs, whose shapes vary between replays, are smaller
LEAST_KEYS = 3072  # over fewer our kernels are as fast
LARGEST_HEAD = 128
CALLS_WORTH_A_PLAN = 128  # of one size: those of a few chunks in all layers of a model
CAPABILITY, VERSION = (9, 0), 90_100  # of the device and of cuDNN


def make(query: torch.Tensor, value: torch.Tensor, scoring: Scoring) -> Provider | str:
    """Return the provider if it supports such tensors, else its requirements."""
    fits = query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] == value.shape[-1] <= LARGEST_HEAD
    fits = fits and query.shape[-1] % 8 == 0 and scoring.is_linear
    if fits and triton.has_kernels(query, value) and _has_cudnn(query):
        return CudnnAttention()
    return f"bfloat16 or float16 on a Hopper GPU or later, heads of one size up to {LARGEST_HEAD}, no soft cap"


class CudnnAttention:
    """Provider by cuDNN for long rectangles, and by `TritonAttention` for all else."""

    replayable = True

    def __init__(self) -> None:
        self.rest = triton.TritonAttention()

    def forward(self, x: Operands) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Provider.forward`."""
        if parts := _trunk_and_rest(x):
            outs, logsumexps = zip(*map(self.forward, parts), strict=True)
            return _joined(outs), torch.cat(logsumexps, 2)
        rectangle = _rectangle(x)
        if rectangle is None:
            return self.rest.forward(x)
        queries, keys = rectangle[:2]
        _calls[rectangle] += 1
        if not _is_planned(rectangle):
            results = self.rest.forward(x)
            if _is_first_of_kind("forward", rectangle):
                self.rest.forward(_below(x, keys), (results[0].clone(), results[1].clone()))
            return results
        tensors = _padded(x.query, queries), x.prefix_key[:, :, :keys], x.prefix_value[:, :, :keys]
        try:
            out, logsumexp, *_ = aten._scaled_dot_product_cudnn_attention(*tensors, None, True, scale=x.scoring.scale)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            _give_up(rectangle, error)
            return self.rest.forward(x)
        tokens = x.query.shape[2]
        return self.rest.forward(_below(x, keys), (out[:, :, :tokens], logsumexp[:, :, :tokens, 0].contiguous()))

    def backward(
        self,
        grad: torch.Tensor,
        out: torch.Tensor,
        logsumexp: torch.Tensor,
        x: Operands,
        prefix_key_grad: torch.Tensor,
        prefix_value_grad: torch.Tensor,
    ) -> Tensors:
        """See `Provider.backward`."""
        if parts := _trunk_and_rest(x):
            return self._backward_of_parts(grad, out, logsumexp, *parts)
        rectangle = _rectangle(x)
        if rectangle is None:
            return self.rest.backward(grad, out, logsumexp, x, prefix_key_grad, prefix_value_grad)
        queries, keys = rectangle[:2]
        if not _is_planned(rectangle):
            results = self.rest.backward(grad, out, logsumexp, x, prefix_key_grad, prefix_value_grad)
            if _is_first_of_kind("backward", rectangle):
                of_key, of_value = (
                    torch.zeros_like(buffer[:, :, keys:]) for buffer in (prefix_key_grad, prefix_value_grad)
                )
                partial = results[0].clone()
                self.rest.backward(grad, out, logsumexp, _below(x, keys), of_key, of_value, partial)
            return results
        key, value = (tensor[:, :, :keys] for tensor in (x.prefix_key, x.prefix_value))
        of_out, query, result = (_padded(tensor, queries) for tensor in (grad, x.query, out))
        statistics = _padded(logsumexp[..., None], queries).contiguous()
        random = torch.zeros((), dtype=torch.int64, device=grad.device)  # state of a generator, for dropout
        others = random, random, None, None, None, queries, keys, 0.0, False
        try:
            of_query, of_key, of_value = aten._scaled_dot_product_cudnn_attention_backward(
                of_out, query, key, value, result, statistics, *others, scale=x.scoring.scale
            )
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            _give_up(rectangle, error)
            return self.rest.backward(grad, out, logsumexp, x, prefix_key_grad, prefix_value_grad)
        prefix_key_grad[:, :, :keys] += of_key
        prefix_value_grad[:, :, :keys] += of_value
        rest = _below(x, keys), prefix_key_grad[:, :, keys:], prefix_value_grad[:, :, keys:]
        return self.rest.backward(grad, out, logsumexp, *rest, partial=of_query[:, :, : grad.shape[2]])

    def _backward_of_parts(
        self, grad: torch.Tensor, out: torch.Tensor, logsumexp: torch.Tensor, trunk: Operands, rest: Operands
    ) -> Tensors:
        """Return gradients of a chunk that `_trunk_and_rest` divided."""
        above, below = slice(trunk.query.shape[2]), slice(trunk.query.shape[2], None)
        of_stack = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in (trunk.key, trunk.value)]
        of_rest = self.backward(grad[:, :, below], out[:, :, below], logsumexp[:, :, below], rest, *of_stack)
        nothing = [tensor[:, :, :0] for tensor in of_stack]
        of_trunk = self.backward(grad[:, :, above], out[:, :, above], logsumexp[:, :, above], trunk, *nothing)
        for own, read_below in zip(of_trunk[1:], of_stack, strict=True):
            own.add_(read_below)
        return tuple(_joined(parts) for parts in zip(of_trunk, of_rest, strict=True))


class _Rectangle(NamedTuple):
    """Sizes of a rectangle for cuDNN, and what else a plan depends on."""

    queries: int
    keys: int
    heads: int
    kv_heads: int
    width: int
    dtype: torch.dtype
    device: torch.device


_calls: collections.Counter[_Rectangle] = collections.Counter()
_compiled: set[tuple[Any, ...]] = set()  # kinds of rectangles, see `_is_first_of_kind`


def _rectangle(x: Operands) -> _Rectangle | None:
    """Return the rectangle of a call, queries rounded up and keys rounded down; None: all is for our kernels."""
    tokens, start = x.query.shape[2], x.chunk.start
    if (
        tokens < LEAST_QUERIES
        or start < LEAST_KEYS
        or x.limit is not None
        or torch.are_deterministic_algorithms_enabled()
    ):
        return None
    heads = x.query.shape[1], x.key.shape[1], x.key.shape[3]
    return _Rectangle(-_rounded_down(-tokens), _rounded_down(start), *heads, x.query.dtype, x.query.device)


def _trunk_and_rest(x: Operands) -> tuple[Operands, Operands] | None:
    """Divide a chunk with the root path into its trunk, and the tokens that read all of it, with the trunk as stack.

    None: it does not begin with the root path, or the rest has no rectangle for cuDNN.
    """
    chunk, device = x.chunk, x.query.device
    in_units = x.units and chunk.units
    if chunk.start or chunk.trunk < LEAST_KEYS or in_units or x.choice is not None or x.bias is not None:
        return None
    x, (trunk, rest) = x.with_dense_rows(), chunk.divided

    def part(tokens: slice, prefix: tuple[torch.Tensor, torch.Tensor], shape: ChunkShape) -> Operands:
        query, key, value = (tensor[:, :, tokens] for tensor in (x.query, x.key, x.value))
        return Operands(query, key, value, *prefix, shape, lambda: shape.table(device), x.scoring, x.limit)

    above = part(slice(trunk.tokens), (x.prefix_key[:, :, :0], x.prefix_value[:, :, :0]), trunk)
    below = part(slice(trunk.tokens, None), (above.key, above.value), rest)
    return (above, below) if _rectangle(below) is not None else None


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate `[1, H, tokens, D]` by tokens, laid out token by token."""
    return torch.cat([part.transpose(1, 2) for part in parts], 1).transpose(1, 2)


def _is_first_of_kind(kernels: str, rectangle: _Rectangle) -> bool:
    """Return whether a kind of rectangle is met for the first time, and note it.

    The caller then runs our kernels for what cuDNN leaves over once and drops the results, so that they are compiled in
    the first step and not when cuDNN takes over, in the middle of a training.
    """
    kind = kernels, *rectangle[2:]
    is_new = kind not in _compiled
    _compiled.add(kind)
    return is_new


def _is_planned(rectangle: _Rectangle) -> bool:
    """Return whether a rectangle was met often enough for a plan, and cuDNN takes it."""
    return _calls[rectangle] > CALLS_WORTH_A_PLAN


def _give_up(rectangle: _Rectangle, error: RuntimeError) -> None:
    logger.warning("dta: cuDNN does not take attention of this shape, our kernels do: %s", str(error).splitlines()[0])
    _calls[rectangle] = -(1 << 62)


def _rounded_down(size: int) -> int:
    """Round to four significant bits, towards minus infinity."""
    step = 1 << max(abs(size).bit_length() - 4, 0)
    return size // step * step


def _padded(tensor: torch.Tensor, queries: int) -> torch.Tensor:
    """Append zeros to the tokens of `[1, H, c, D]`: rows of zeros, with gradients of zero, change no gradient."""
    tokens = tensor.shape[2]
    if tokens == queries:
        return tensor
    return torch.nn.functional.pad(tensor.transpose(1, 2), (0, 0, 0, 0, 0, queries - tokens)).transpose(1, 2)


def _below(x: Operands, keys: int) -> Operands:
    """Return the operands without the first `keys` tokens of the stack."""
    chunk, device = x.chunk, x.query.device
    if (_below, keys) not in chunk.derived:
        chunk.derived[_below, keys] = dataclasses.replace(chunk, start=chunk.start - keys)
    rest: ChunkShape = chunk.derived[_below, keys]
    key, value = (tensor[:, :, keys:] for tensor in (x.prefix_key, x.prefix_value))
    return x._replace(prefix_key=key, prefix_value=value, chunk=rest, table=lambda: rest.table(device))


def _has_cudnn(query: torch.Tensor) -> bool:
    if query.device.type != "cuda" or torch.cuda.get_device_capability(query.device) < CAPABILITY:
        return False
    return (torch.backends.cudnn.version() or 0) >= VERSION
