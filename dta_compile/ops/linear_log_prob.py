"""The opaque operators of a language-model head: `dta::linear_log_prob` and those that its gradient calls.

For logits `z = (hidden @ weight.T + bias) / temperature`, `[rows, V]`, the operator returns

    log_prob   [rows, K]  `z[labels] - logsumexp(z)`
    logit      [rows, K]  `z[labels]`
    log_sum    [rows]     `logsumexp(z - largest)`
    mean       [rows]     the expectation of `z - largest` (empty unless asked for): the entropy is `log_sum - mean`
    largest    [rows]     `z.amax(1)`, to be taken as a constant: `logsumexp(z)` is `largest + log_sum`; 0 if infinite

in `dtype`, without ever holding z: the runtime goes over the vocabulary block by block, in the forward and again in the
backward, which keeps `hidden`, `labels` and two or three numbers a row. They are relative to `largest`, since what is
common to all probabilities of a row must be as exact as each of them. `hidden [rows, H]` is in the dtype of the matrix
product, whose result is rounded to it as eager's is; a `weight [V, H]` in another dtype is cast block by block.
`temperature` is a number or one number per row (`[]` or `[rows, 1]`), and no gradient flows to it.
"""

from __future__ import annotations

from typing import Any

import torch

from dta_compile.ops.library import LIBRARY

BLOCK_COLUMNS = 2**14  # of the vocabulary, at most, and fewer if that would be more than so many logits at a time:
BLOCK_LOGITS = 2**25
FEWEST_COLUMNS = 256

HEAD = "Tensor hidden, Tensor weight, Tensor? bias, Tensor? temperature, Tensor? labels"
GRADIENTS = "Tensor log_sum, Tensor? mean, Tensor largest, Tensor? of_labels, Tensor of_log_sum, Tensor? of_mean"
LIBRARY.define(
    f"linear_log_prob({HEAD}, bool wants_mean, ScalarType dtype) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
LIBRARY.define(f"linear_log_prob_backward({HEAD}, {GRADIENTS}, bool[3] wanted) -> (Tensor, Tensor, Tensor)")
LIBRARY.define(
    f"linear_log_prob_backward_({HEAD}, {GRADIENTS}, bool wants_hidden,"
    " Tensor(a!)? weight_gradient, Tensor(b!)? bias_gradient) -> Tensor"
)
LINEAR_LOG_PROB = torch.ops.dta.linear_log_prob.default
LINEAR_LOG_PROB_BACKWARD = torch.ops.dta.linear_log_prob_backward.default
LINEAR_LOG_PROB_BACKWARD_ = torch.ops.dta.linear_log_prob_backward_.default
OPERATORS = (LINEAR_LOG_PROB, LINEAR_LOG_PROB_BACKWARD, LINEAR_LOG_PROB_BACKWARD_)


def block_columns(rows: int, vocabulary: int) -> int:
    """How many entries of the vocabulary to go over at a time."""
    return min(vocabulary, BLOCK_COLUMNS, max(FEWEST_COLUMNS, BLOCK_LOGITS // max(rows, 1)))


@torch.library.register_fake("dta::linear_log_prob", lib=LIBRARY)
def _fake(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    temperature: torch.Tensor | None,
    labels: torch.Tensor | None,
    wants_mean: bool,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, ...]:
    rows, chosen = hidden.shape[0], 0 if labels is None else labels.shape[1]
    shapes = ((rows, chosen), (rows, chosen), (rows,), (rows if wants_mean else 0,), (rows,))
    return tuple(hidden.new_empty(shape, dtype=dtype) for shape in shapes)


@torch.library.register_fake("dta::linear_log_prob_backward", lib=LIBRARY)
def _backward_fake(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    temperature: torch.Tensor | None,
    labels: torch.Tensor | None,
    log_sum: torch.Tensor,
    mean: torch.Tensor | None,
    largest: torch.Tensor,
    of_labels: torch.Tensor | None,
    of_log_sum: torch.Tensor,
    of_mean: torch.Tensor | None,
    wanted: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    values = (hidden, weight, hidden if bias is None else bias)
    of_hidden, of_weight, of_bias = (
        value.new_empty(value.shape if want else (0,)) for value, want in zip(values, wanted, strict=True)
    )
    return of_hidden, of_weight, of_bias


@torch.library.register_fake("dta::linear_log_prob_backward_", lib=LIBRARY)
def _backward_in_place_fake(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    temperature: torch.Tensor | None,
    labels: torch.Tensor | None,
    log_sum: torch.Tensor,
    mean: torch.Tensor | None,
    largest: torch.Tensor,
    of_labels: torch.Tensor | None,
    of_log_sum: torch.Tensor,
    of_mean: torch.Tensor | None,
    wants_hidden: bool,
    weight_gradient: torch.Tensor | None,
    bias_gradient: torch.Tensor | None,
) -> torch.Tensor:
    return hidden.new_empty(hidden.shape if wants_hidden else (0,))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    *operands, _, _ = inputs
    _, _, log_sum, mean, largest = output
    ctx.save_for_backward(*operands, log_sum, mean, largest)
    ctx.mark_non_differentiable(largest)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, log_prob: Any, logit: Any, log_sum: Any, mean: Any, _: Any) -> tuple[Any, ...]:
    """The gradient of z is `onehot(labels) * of_labels + p * (of_log_sum + of_mean * (z - largest - mean))`."""
    *operands, found_log_sum, found_mean, largest = ctx.saved_tensors
    of_log_sum = torch.zeros_like(largest) if log_sum is None else log_sum
    of_labels = log_prob if logit is None else logit if log_prob is None else log_prob + logit
    if log_prob is not None:
        of_log_sum = of_log_sum - log_prob.sum(1)
    if mean is not None:
        of_log_sum = of_log_sum + mean
    statistics = (found_log_sum, None if mean is None else found_mean, largest)
    wanted = list(ctx.needs_input_grad[:3])
    found = LINEAR_LOG_PROB_BACKWARD(*operands, *statistics, of_labels, of_log_sum, mean, wanted)
    return (*(grad if want else None for grad, want in zip(found, wanted, strict=True)), None, None, None, None)


torch.library.register_autograd("dta::linear_log_prob", _backward, setup_context=_save, lib=LIBRARY)
