"""Attention provider that leaves large blocks of a chunk to cuDNN: rectangles and squares.

A rectangle is all queries of the chunk over the first tokens of the stack, without a mask. A square is a long slice
over itself, causally. A chunk that begins at the root is divided into its trunk and its branches, for which the trunk
is a rectangle. With a prefix of 8,192 tokens attention is 1.2 times as fast forward and 1.2 to 1.4 times backward
(benchmarks/GPU.md). Our kernels add the rest of the stack and of the chunk's own tree to cuDNN's results, by the
log-sum-exp of both.

cuDNN makes a plan per shape, which takes 50 ms forward and backward each. So a plan is only made for sizes that have
been met often, and sizes are rounded: the queries of a rectangle up, with rows of zeros; its keys, and squares, down.

cuDNN multiplies what a mask hides by zero, and 0 * NaN is NaN: a value that is not finite spoils earlier queries of its
square. So the results of squares are added up on the GPU. If the sum is not finite they are dropped, and our kernels
compute the squares of the call.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from dta_compile.ops.attention import empty_by_tokens
from dta_compile.ops.scoring import Scoring
from dta_compile.runtime.attention import triton
from dta_compile.runtime.attention.provider import Operands, Provider, Tensors
from dta_compile.runtime.path.chunk_shape import ChunkShape

aten = torch.ops.aten
logger = logging.getLogger("dta_compile")

LEAST_QUERIES = 1024  # chunks in CUDA graphs, whose shapes vary between replays, are smaller
LEAST_KEYS = 3072  # of a rectangle: over fewer our kernels are as fast
LEAST_SQUARE = 2048  # tokens of a slice
LARGEST_HEAD = 128
PAIRS_WORTH_A_PLAN = 3e10  # pairs of queries and keys, over heads and calls
CAPABILITY, VERSION = (9, 0), 90_100  # of the device and of cuDNN


def make(query: torch.Tensor, value: torch.Tensor, scoring: Scoring) -> Provider | str:
    """Return the provider if it supports such tensors, else its requirements."""
    fits = query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] == value.shape[-1] <= LARGEST_HEAD
    fits = fits and query.shape[-1] % 8 == 0 and scoring.is_linear
    if fits and triton.has_kernels(query, value) and _has_cudnn(query):
        return CudnnAttention()
    return f"bfloat16 or float16 on a Hopper GPU or later, heads of one size up to {LARGEST_HEAD}, no soft cap"


Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # gradient of the output, output and log-sum-exp
OfPrefix = tuple[torch.Tensor, torch.Tensor]  # gradients of the stack's keys and values


class CudnnAttention:
    """Provider by cuDNN for long rectangles and squares, and by `TritonAttention` for all else."""

    replayable = True

    def __init__(self) -> None:
        self.rest = triton.TritonAttention()

    def forward(self, x: Operands) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Provider.forward`."""
        if parts := _trunk_and_rest(x):
            outs, logsumexps = zip(*map(self.forward, parts), strict=True)
            return _joined(outs), torch.cat(logsumexps, 2)
        blocks = _blocks(x)
        for block in blocks:
            _pairs_so_far[block.plan] += block.plan.pairs
        results = self._forward_rest(x, [(block, result) for block in blocks if (result := block.forward(x))])
        if _is_first_of_kind("forward", blocks):
            self._forward_rest(x, [(block, block.zero_outputs(x)) for block in blocks])
        return results

    def _forward_rest(self, x: Operands, done: Sequence[Done]) -> tuple[torch.Tensor, torch.Tensor]:
        """Add to outputs and log-sum-exps of blocks what they do not cover."""
        if not done:
            return self.rest.forward(x)
        squares = [(block, result) for block, result in done if block.plan.is_causal]
        if len(squares) < len(done):
            out, logsumexp = (tensor[:, :, : x.query.shape[2]] for tensor in done[0][1])
            logsumexp = logsumexp[..., 0].contiguous()
        else:
            out = empty_by_tokens(x.query).zero_()
            logsumexp = x.query.new_full(x.query.shape[:3], float("-inf"), dtype=torch.float32)
        checked = _sum_of([result[:1] for _, result in squares])
        for block, (own_out, own_logsumexp) in squares:
            _merge(block.rows_of(out), block.rows_of(logsumexp), own_out, own_logsumexp[..., 0], checked)
        return self.rest.forward(_without(x, done, checked), (out, logsumexp))

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
        blocks, given, of_prefix = _blocks(x), (grad, out, logsumexp), (prefix_key_grad, prefix_value_grad)
        done = [(block, result) for block in blocks if (result := block.backward(x, *given))]
        grads = self._backward_rest(x, given, of_prefix, done)
        if _is_first_of_kind("backward", blocks):
            of_prefix = torch.zeros_like(prefix_key_grad), torch.zeros_like(prefix_value_grad)
            self._backward_rest(x, given, of_prefix, [(block, block.zero_gradients(x)) for block in blocks])
        return grads

    def _backward_rest(self, x: Operands, given: Given, of_prefix: OfPrefix, done: Sequence[Done]) -> Tensors:
        """Add to gradients of query, key and value of blocks what they do not cover, and to `of_prefix`."""
        if not done:
            return self.rest.backward(*given, x, *of_prefix)
        squares = [(block, result) for block, result in done if block.plan.is_causal]
        if len(squares) < len(done):
            block, result = done[0]
            of_query = result[0][:, :, : x.query.shape[2]]
            for target, source in zip(of_prefix, result[1:], strict=True):
                target[:, :, : block.plan.keys] += source
        else:
            of_query = empty_by_tokens(x.query).zero_()
        checked = _sum_of([result for _, result in squares])
        for block, result in squares:
            _add(block.rows_of(of_query), result[0], checked)
        rest = _without(x, done, checked)
        below = slice(x.prefix_key.shape[2] - rest.prefix_key.shape[2], None)
        of_keys, of_values = (tensor[:, :, below] for tensor in of_prefix)
        grads = self.rest.backward(*given, rest, of_keys, of_values, of_query)
        for block, (_, *own) in squares:
            for target, source in zip(grads[1:], own, strict=True):
                _add(block.rows_of(target), source, checked)
        return grads

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


class _Plan(NamedTuple):
    """Sizes of a block that cuDNN computes, and what else its plan depends on."""

    queries: int
    keys: int
    is_causal: bool
    heads: int
    kv_heads: int
    width: int
    dtype: torch.dtype
    device: torch.device

    @property
    def pairs(self) -> int:
        """Pairs of queries and keys, over all heads."""
        return self.queries * self.keys * self.heads // (1 + self.is_causal)

    def run(self, function: Any, *arguments: Any, **further: Any) -> Tensors | None:
        """Call cuDNN; None: such blocks were not met often enough for a plan, or it does not take them."""
        if _pairs_so_far[self] <= PAIRS_WORTH_A_PLAN:
            return None
        try:
            return tuple(function(*arguments, **further))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            text = str(error).splitlines()[0]
            logger.warning("dta: cuDNN does not take attention of this shape, our kernels do: %s", text)
            _pairs_so_far[self] = -(1 << 62)
            return None


class _Block(NamedTuple):
    """Attention of the queries from `first` on over the first tokens of the stack, or causally over their own keys."""

    first: int
    plan: _Plan

    def forward(self, x: Operands) -> Tensors | None:
        """Return output `[1, Hq, queries, D]` and log-sum-exp `[1, Hq, queries, 1]`, or None, see `_Plan.run`."""
        run, how = aten._scaled_dot_product_cudnn_attention, (None, True, 0.0, self.plan.is_causal)
        results = self.plan.run(run, self._padded(x.query), *self._keys(x), *how, scale=x.scoring.scale)
        return results and results[:2]

    def backward(self, x: Operands, grad: torch.Tensor, out: torch.Tensor, logsumexp: torch.Tensor) -> Tensors | None:
        """Return gradients of queries, keys and values, or None, see `_Plan.run`."""
        run, plan = aten._scaled_dot_product_cudnn_attention_backward, self.plan
        of_out, query, result = map(self._padded, (grad, x.query, out))
        statistics = self._padded(logsumexp[..., None]).contiguous()
        random = torch.zeros((), dtype=torch.int64, device=grad.device)  # state of a generator, for dropout
        how = random, random, None, None, None, plan.queries, plan.keys, 0.0, plan.is_causal
        return plan.run(run, of_out, query, *self._keys(x), result, statistics, *how, scale=x.scoring.scale)

    def zero_outputs(self, x: Operands) -> Tensors:
        """Return zeros in the place of results of `forward`."""
        out = torch.zeros_like(self._padded(x.query))
        return out, out.new_zeros((*out.shape[:3], 1), dtype=torch.float32)

    def zero_gradients(self, x: Operands) -> Tensors:
        """Return zeros in the place of results of `backward`."""
        return tuple(map(torch.zeros_like, (self._padded(x.query), *self._keys(x))))

    def rows_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return those of `[1, H, c, ..]` that belong to the queries."""
        return tensor[:, :, self.first : self.first + self.plan.queries]

    def _padded(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `rows_of`, filled up with rows of zeros: with output gradients of zero these change no gradient."""
        rows = self.rows_of(tensor)
        if lacking := self.plan.queries - rows.shape[2]:
            rows = torch.nn.functional.pad(rows.transpose(1, 2), (0, 0, 0, 0, 0, lacking)).transpose(1, 2)
        return rows

    def _keys(self, x: Operands) -> Tensors:
        """Return the keys and values that the queries read."""
        if self.plan.is_causal:
            return self.rows_of(x.key), self.rows_of(x.value)
        return x.prefix_key[:, :, : self.plan.keys], x.prefix_value[:, :, : self.plan.keys]


Done = tuple[_Block, Tensors]  # a block with its outputs or gradients
_pairs_so_far: collections.Counter[_Plan] = collections.Counter()  # of all calls
_compiled: set[tuple[Any, ...]] = set()  # kinds of blocks, see `_is_first_of_kind`


def _blocks(x: Operands) -> list[_Block]:
    """Return the blocks of a call for cuDNN: what all queries read of the stack first, then squares of long slices."""
    chunk, tokens = x.chunk, x.query.shape[2]
    if tokens < LEAST_QUERIES or x.limit is not None or torch.are_deterministic_algorithms_enabled():
        return []
    others = x.query.shape[1], x.key.shape[1], x.key.shape[3], x.query.dtype, x.query.device
    blocks = []
    if chunk.start >= LEAST_KEYS:
        plan = _Plan(-_rounded_down(-tokens, bits=4), _rounded_down(chunk.start, bits=4), False, *others)
        blocks.append(_Block(0, plan))
    for part in chunk.segments if not (x.units and chunk.units) else ():
        if part.last - part.first >= LEAST_SQUARE:
            size = _rounded_down(part.last - part.first, bits=5)
            blocks.append(_Block(part.first, _Plan(size, size, True, *others)))
    return blocks


def _rounded_down(size: int, bits: int) -> int:
    """Round to so many significant bits, towards minus infinity."""
    step = 1 << max(abs(size).bit_length() - bits, 0)
    return size // step * step


def _without(x: Operands, done: Sequence[Done], checked: torch.Tensor | None) -> Operands:
    """Return what is left of a call: without the first tokens of the stack, and without squares if they were finite."""
    keys = sum(block.plan.keys for block, _ in done if not block.plan.is_causal)
    squares = tuple((block.first, block.first + block.plan.queries) for block, _ in done if block.plan.is_causal)
    left, device = _shape_without(x.chunk, keys, squares), x.query.device
    key, value = (tensor[:, :, keys:] for tensor in (x.prefix_key, x.prefix_value))
    table = left.table(device)
    if checked is not None:
        whole = _shape_without(x.chunk, keys, ()).table(device)
        table = table._replace(numbers=torch.where(checked.isfinite(), table.numbers, whole.numbers))
    return x._replace(prefix_key=key, prefix_value=value, chunk=left, table=lambda: table)


def _shape_without(chunk: ChunkShape, keys: int, squares: tuple[tuple[int, int], ...]) -> ChunkShape:
    name = _shape_without, keys, squares
    if name not in chunk.derived:
        chunk.derived[name] = dataclasses.replace(chunk, start=chunk.start - keys, squares=squares)
    shape: ChunkShape = chunk.derived[name]
    return shape


def _sum_of(results: Sequence[Tensors]) -> torch.Tensor | None:
    """Return the sum of all numbers, which is finite only if all of them are; None: there are no tensors."""
    sums = [tensor.sum(dtype=torch.float32) for tensors in results for tensor in tensors]
    return torch.stack(sums).sum() if sums else None


def _merge(
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    own_out: torch.Tensor,
    own_logsumexp: torch.Tensor,
    checked: torch.Tensor | None,
) -> None:
    """Merge output and log-sum-exp over further keys into those that are there, if the sum `checked` is finite."""
    from dta_compile.runtime.attention.partial_kernels import ROWS, merge_kernel

    _, heads, tokens, width = out.shape
    strides = (stride for tensor in (out, own_out) for stride in triton.rows_of(tensor))
    merge_kernel[(heads, -(-tokens // ROWS))](
        out, logsumexp, own_out, own_logsumexp, checked, tokens, *strides, logsumexp.stride(1), own_logsumexp.stride(1),
        DIM=width, WIDTH=triton.padded(width), ROWS=ROWS,
    )  # fmt: skip


def _add(target: torch.Tensor, source: torch.Tensor, checked: torch.Tensor | None) -> None:
    """Add gradients to those that are there, if the sum `checked` is finite."""
    from dta_compile.runtime.attention.partial_kernels import ROWS, add_kernel

    _, heads, tokens, width = target.shape
    strides = (stride for tensor in (target, source) for stride in triton.rows_of(tensor))
    constants = {"DIM": width, "WIDTH": triton.padded(width), "ROWS": ROWS}
    add_kernel[(heads, -(-tokens // ROWS))](target, source, checked, tokens, *strides, **constants)


def _is_first_of_kind(kernels: str, blocks: Sequence[_Block]) -> bool:
    """Return whether a kind of block is met for the first time, and note it.

    The caller then runs our kernels for what cuDNN leaves over once on zeros, so that they are compiled in the first
    step and not when cuDNN takes over, in the middle of a training.
    """
    kinds = {(kernels, *block.plan[2:]) for block in blocks}
    is_new = not kinds <= _compiled
    _compiled.update(kinds)
    return is_new


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
    return (above, below) if any(not block.plan.is_causal for block in _blocks(below)) else None


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate `[1, H, tokens, D]` by tokens, laid out token by token."""
    return torch.cat([part.transpose(1, 2) for part in parts], 1).transpose(1, 2)


def _has_cudnn(query: torch.Tensor) -> bool:
    if query.device.type != "cuda" or torch.cuda.get_device_capability(query.device) < CAPABILITY:
        return False
    return (torch.backends.cudnn.version() or 0) >= VERSION
