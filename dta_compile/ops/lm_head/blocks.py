"""Implementation of the `linear_log_prob` operators, one block of logits at a time.

The forward is an online softmax (Milakov and Gimelshein, 2018): it keeps each row's largest logit m, the sum s of
`exp(z - m)` and, for the mean, the sum t of `exp(z - m) * (z - m)`, and rescales them when a block raises m. Then
`log_sum = log(s)` and `mean = t / s`. An infinite m is replaced by 0. The sum and the index of m are kept as they are.
The backward recomputes the logits of every block. On a GPU the steps after a matrix product are one kernel
(`by_kernels`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from dta_compile.ops.dtypes import statistics_dtype
from dta_compile.ops.library import LIBRARY
from dta_compile.ops.lm_head import by_kernels
from dta_compile.ops.lm_head.operators import (
    Backward,
    CrossBackward,
    Forward,
    Further,
    Head,
    Results,
    Wanted,
    block_columns,
)
from dta_compile.ops.products import add_product
from dta_compile.torch_compat.operators import assert_async


class _Blocks(Head):
    """A head that computes its logits block by block."""

    def blocks(self) -> Iterator[slice]:
        vocabulary = self.weight.shape[0]
        step = block_columns(self.hidden.shape[0], vocabulary)
        return (slice(start, min(start + step, vocabulary)) for start in range(0, vocabulary, step))

    def block_weight(self, block: slice) -> torch.Tensor:
        return self.weight[block].to(self.hidden.dtype)

    def product(self, block: slice) -> torch.Tensor:
        """Return the unscaled logits of a block `[rows, columns]` in new memory, in the dtype of the matrix product."""
        bias = None if self.bias is None else self.bias[block].to(self.hidden.dtype)
        return F.linear(self.hidden, self.block_weight(block), bias)

    def logits(self, block: slice, dtype: torch.dtype) -> torch.Tensor:
        """Return the logits of a block in `dtype`, scaled and capped."""
        logits = self.product(block).to(dtype)
        logits = logits if self.temperature is None else logits.div_(self.temperature)
        return logits if self.inverse_cap is None else logits.tanh_().div_(self.inverse_cap)

    def label_columns(self, block: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return which labels are in a block, `[rows, K]` bool, and their columns (0 for others)."""
        assert self.labels is not None
        inside = (self.labels >= block.start) & (self.labels < block.stop)
        return inside, (self.labels - block.start).masked_fill_(~inside, 0)


class _Running(NamedTuple):
    """Running statistics of the forward: logits of labels `[rows, K]`, and m, s, t, sums and argmax `[rows, 1]`."""

    logit: torch.Tensor
    largest: torch.Tensor
    exps: torch.Tensor
    products: torch.Tensor
    total: torch.Tensor
    best: torch.Tensor


def linear_log_prob(*arguments: Any) -> Results:
    """Implement `dta::linear_log_prob`."""
    operands, further, dtype = Forward.of(arguments)
    hidden, weight, labels = operands.hidden, operands.weight, operands.labels
    rows, chosen = hidden.shape[0], 0 if labels is None else labels.shape[1]
    if labels is not None:
        in_range = (labels >= 0) & (labels < weight.shape[0])
        assert_async(in_range.all(), "a label is outside of the vocabulary")
    logit = hidden.new_zeros((rows, chosen), dtype=dtype)
    exps, products, total = hidden.new_zeros((3, rows, 1), dtype=dtype)
    largest, best = hidden.new_full((rows, 1), -torch.inf, dtype=dtype), hidden.new_zeros((rows, 1), dtype=torch.int64)
    running = _Running(logit, largest, exps, products, total, best)
    has_kernel = by_kernels.fits(operands, dtype)
    head = _Blocks(*(by_kernels.with_dense_rows(operands) if has_kernel else operands))
    for block in head.blocks():
        if has_kernel:
            by_kernels.update_(head.product(block), block.start, head, running, further)
        else:
            running = _updated(running, head, block, further)
    logit, largest, exps, products, total, best = running
    log_sum, base = exps.log(), _finite(largest)
    mean, total = products / exps, total - weight.shape[0] * base
    rest = (
        (value[:, 0] if asked else value.new_empty(0))
        for value, asked in zip((mean, total, best), further, strict=True)
    )
    # As in torch: where the sum is infinite, `logsumexp` is infinite and all of `log_softmax` is NaN.
    log_prob = ((logit - base) - log_sum).masked_fill_(log_sum.isinf(), torch.nan)
    mean, total, best = rest
    return Results(log_prob, logit, log_sum[:, 0], mean, base[:, 0], total, best)


def _updated(running: _Running, head: _Blocks, block: slice, further: Further) -> _Running:
    """Return the statistics updated with one block."""
    logit, largest, exps, products, total, best = running
    logits = head.logits(block, exps.dtype)
    if head.labels is not None:
        inside, columns = head.label_columns(block)
        logit = torch.where(inside, logits.gather(1, columns), logit)
    if further.total:
        total = total + logits.sum(1, keepdim=True)
    if further.best:
        top, column = logits.max(1, keepdim=True)
        best = torch.where(top > largest, column + block.start, best)
    new = torch.maximum(largest, logits.amax(1, keepdim=True))
    base = _finite(new)
    drop = largest - base
    rescale = drop.exp()
    logits.sub_(base)
    if further.mean:
        # Before the first block with finite logits the drop is infinite and the sums are zero. A drop may be as large
        # as the dtype allows, so it is multiplied by `rescale` first.
        products = torch.where(exps > 0, products * rescale + exps * (drop * rescale), products)
        block_exps = logits.exp()
        products += logits.mul_(block_exps).sum(1, keepdim=True)
    else:
        block_exps = logits.exp_()
    return _Running(logit, new, exps * rescale + block_exps.sum(1, keepdim=True), products, total, best)


def _finite(largest: torch.Tensor) -> torch.Tensor:
    """Return what to subtract from logits: the largest, or 0 if it is infinite, since inf - inf is NaN."""
    return largest.masked_fill(largest.isinf(), 0)


def linear_top(*arguments: Any) -> torch.Tensor:
    """Implement `dta::linear_top`: the indices of the largest logits, the largest first."""
    *operands, count, dtype = arguments
    head = _Blocks(*operands)
    rows = head.hidden.shape[0]
    values, indices = head.hidden.new_empty((rows, 0), dtype=dtype), head.hidden.new_empty((rows, 0), dtype=torch.int64)
    for block in head.blocks():
        top, columns = _largest(head.logits(block, dtype), count)
        values, order = _largest(torch.cat([values, top], 1), count)
        indices = torch.cat([indices, columns + block.start], 1).gather(1, order)
    return indices


def _largest(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    # Of equal values, which are many in 16 bits, `max` takes the first one, and `topk` any.
    return values.max(1, keepdim=True) if count == 1 else values.topk(min(count, values.shape[1]), 1)


def linear_log_prob_backward_(*arguments: Any) -> torch.Tensor:
    """Implement `dta::linear_log_prob_backward_`: accumulate weight and bias gradients, return that of hidden."""
    call = Backward.of(arguments)
    has_kernel = by_kernels.fits(call.head, call.log_sum.dtype)
    call = by_kernels.gradient_operands(call) if has_kernel else call
    head = _Blocks(*call.head)

    def gradient(block: slice) -> torch.Tensor:
        if not has_kernel:
            return _gradient(head, block, call)
        grad = head.product(block)
        by_kernels.gradient_(grad, block.start, call)
        return grad

    return _accumulate(head, call.wanted, gradient)


def _accumulate(head: _Blocks, wanted: Wanted, gradient: Callable[[slice], torch.Tensor]) -> torch.Tensor:
    """Accumulate weight and bias gradients and return that of hidden, given those of each block's unscaled logits."""
    hidden = head.hidden
    result = hidden.new_zeros(hidden.shape if wanted.hidden else (0,), dtype=statistics_dtype(hidden.dtype))
    for block in head.blocks():
        grad = gradient(block)
        if wanted.hidden:
            add_product(result, grad, head.block_weight(block))
        if wanted.weight is not None:
            add_product(wanted.weight[block], grad.t(), hidden)
        if wanted.bias is not None:
            wanted.bias[block] += grad.sum(0)
        del grad
    return result.to(hidden.dtype)


def _gradient(head: _Blocks, block: slice, call: Backward) -> torch.Tensor:
    """Return the gradient of a block's unscaled logits, in the dtype of the matrix product."""
    _, log_sum, mean, largest, of_labels, of_log_sum, of_mean, of_total, _ = call
    grad = head.logits(block, log_sum.dtype)
    slope = _slope(head, grad)
    grad.sub_(largest[:, None])
    if mean is None or of_mean is None:
        grad.sub_(log_sum[:, None]).exp_().mul_(of_log_sum[:, None])
    else:
        probs = (grad - log_sum[:, None]).exp_()
        grad.sub_(mean[:, None]).mul_(of_mean[:, None]).add_(of_log_sum[:, None]).mul_(probs)
        del probs
    if of_labels is not None:
        inside, columns = head.label_columns(block)
        grad.scatter_add_(1, columns, of_labels.masked_fill(~inside, 0))
    if of_total is not None:
        grad.add_(of_total[:, None])
    return _unscaled(head, grad, slope)


def _slope(head: Head, logits: torch.Tensor) -> torch.Tensor | None:
    """Return the derivative of a soft cap."""
    return None if head.inverse_cap is None else (logits * head.inverse_cap).square_().neg_().add_(1)


def _unscaled(head: Head, grad: torch.Tensor, slope: torch.Tensor | None) -> torch.Tensor:
    """Return the gradient of unscaled logits, in the dtype of the matrix product, from that of logits."""
    if slope is not None:
        grad.mul_(slope).div_(head.inverse_cap)
    if head.temperature is not None:
        grad.div_(head.temperature)
    return grad.to(head.hidden.dtype)


def linear_cross(*arguments: Any) -> tuple[torch.Tensor, ...]:
    """Implement `dta::linear_cross`."""
    first, second, (is_ratio, dtype) = _Blocks(*arguments[:6]), _Blocks(*arguments[6:12]), arguments[12:]
    rows = first.hidden.shape[0]
    largest = first.hidden.new_full((2, rows, 1), -torch.inf, dtype=dtype)
    exps, products = first.hidden.new_zeros((2, rows, 1), dtype=dtype), first.hidden.new_zeros((rows, 1), dtype=dtype)
    for block in first.blocks():
        values = [head.logits(block, dtype) for head in (first, second)]
        new = torch.maximum(largest, torch.stack([logits.amax(1, keepdim=True) for logits in values]))
        rescale = (largest - _finite(new)).exp()
        # Of logits that are alike the difference is small, and so is its error.
        ratio = values[0] - values[1] if is_ratio else -values[1]
        p = values[0].sub_(_finite(new[0])).exp_()
        products = products * rescale[0] + ratio.mul_(p).sum(1, keepdim=True)
        sums = p.sum(1, keepdim=True), values[1].sub_(_finite(new[1])).exp_().sum(1, keepdim=True)
        largest, exps = new, exps * rescale + torch.stack(sums)
        del values, ratio, p  # before those of the next block are computed
    log_sum, base = exps.log(), _finite(largest)
    normaliser = (base[0] - base[1]) + (log_sum[0] - log_sum[1]) if is_ratio else -(base[1] + log_sum[1])
    mean = products / exps[0] - normaliser
    return mean[:, 0], log_sum[0, :, 0].clone(), base[0, :, 0].clone(), log_sum[1, :, 0].clone(), base[1, :, 0].clone()


def linear_cross_backward_(*arguments: Any) -> torch.Tensor:
    """Implement `dta::linear_cross_backward_`."""
    call = CrossBackward.of(arguments)
    head, other, dtype = _Blocks(*call.head), _Blocks(*call.other), call.mean.dtype

    def gradient(block: slice) -> torch.Tensor:
        own = head.logits(block, dtype)
        slope = _slope(head, own)
        own.sub_(call.largest[:, None]).sub_(call.log_sum[:, None])
        others = other.logits(block, dtype).sub_(call.other_largest[:, None]).sub_(call.other_log_sum[:, None])
        if call.is_weight:
            ratio = own - others if call.is_ratio else others.neg_()
            grad = ratio.sub_(call.mean[:, None]).mul_(own.exp_())
        else:
            grad = own.exp_().sub_(others.exp_())
        return _unscaled(head, grad.mul_(call.of_mean[:, None]), slope)

    return _accumulate(head, call.wanted, gradient)


def linear_log_prob_backward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Implement `dta::linear_log_prob_backward`, for weights without accumulators, which are not parameters."""
    return _without_accumulators(Backward.of(arguments), linear_log_prob_backward_)


def linear_cross_backward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Implement `dta::linear_cross_backward`."""
    return _without_accumulators(CrossBackward.of(arguments), linear_cross_backward_)


def _without_accumulators(
    call: Backward | CrossBackward, in_place: Callable[..., torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden, weight, bias, *_ = call.head
    values = (weight, hidden if bias is None else bias)
    sums = [
        torch.zeros(value.shape, dtype=statistics_dtype(value.dtype), device=value.device) if want else None
        for value, want in zip(values, call.wanted[1:], strict=True)
    ]
    of_hidden = in_place(*call.operands, call.wanted.hidden, *sums)
    of_weight, of_bias = (
        value.new_empty((0,)) if grad is None else grad.to(value.dtype)
        for value, grad in zip(values, sums, strict=True)
    )
    return of_hidden, of_weight, of_bias


FUNCTIONS = (linear_log_prob, linear_log_prob_backward, linear_log_prob_backward_, linear_top)
for function in (*FUNCTIONS, linear_cross, linear_cross_backward, linear_cross_backward_):
    LIBRARY.impl(function.__name__, function, "CompositeExplicitAutograd")
