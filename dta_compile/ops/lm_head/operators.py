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

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from dta_compile.ops.library import LIBRARY

BLOCK_COLUMNS = 2**14  # of the vocabulary, at most, and fewer if that would be more than so many logits at a time:
BLOCK_LOGITS = 2**25
FEWEST_COLUMNS = 256  # and always a multiple of these: matrix products of rows that are not aligned are slow on GPUs

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


class Head(NamedTuple):
    """What all three operators take first; tensors, or nodes of a graph that calls them (so in the following)."""

    hidden: Any
    weight: Any
    bias: Any
    temperature: Any
    labels: Any


class Forward(NamedTuple):
    """The arguments of `dta::linear_log_prob`."""

    head: Head
    wants_mean: bool
    dtype: torch.dtype

    @classmethod
    def of(cls, arguments: Sequence[Any]) -> Forward:
        """The arguments of a call, in the operator's order."""
        return cls(Head(*arguments[:5]), *arguments[5:])


class Results(NamedTuple):
    """What `dta::linear_log_prob` returns."""

    log_prob: Any
    logit: Any
    log_sum: Any
    mean: Any
    largest: Any


class Wanted(NamedTuple):
    """By gradient: whether it is wanted, or what it is to be added to (None: it is not wanted)."""

    hidden: Any
    weight: Any
    bias: Any


class Backward(NamedTuple):
    """The arguments of `dta::linear_log_prob_backward`, and of the operator that adds to its last two arguments."""

    head: Head
    log_sum: Any
    mean: Any
    largest: Any
    of_labels: Any
    of_log_sum: Any
    of_mean: Any
    wanted: Wanted

    @classmethod
    def of(cls, arguments: Sequence[Any]) -> Backward:
        """The arguments of a call, in the operator's order."""
        wanted = arguments[11] if len(arguments) == 12 else arguments[11:]
        return cls(Head(*arguments[:5]), *arguments[5:11], wanted=Wanted(*wanted))  # type: ignore[misc]

    @property
    def operands(self) -> tuple[Any, ...]:
        """The arguments that both operators take, in their order."""
        return (*self.head, *self[1:-1])


def block_columns(rows: int, vocabulary: int) -> int:
    """How many entries of the vocabulary to go over at a time."""
    columns = min(BLOCK_COLUMNS, BLOCK_LOGITS // max(rows, 1))
    return min(vocabulary, max(columns // FEWEST_COLUMNS, 1) * FEWEST_COLUMNS)


@torch.library.register_fake("dta::linear_log_prob", lib=LIBRARY)
def _fake(*arguments: Any) -> tuple[torch.Tensor, ...]:
    head, wants_mean, dtype = Forward.of(arguments)
    rows, chosen = head.hidden.shape[0], 0 if head.labels is None else head.labels.shape[1]
    shapes = ((rows, chosen), (rows, chosen), (rows,), (rows if wants_mean else 0,), (rows,))
    return tuple(head.hidden.new_empty(shape, dtype=dtype) for shape in shapes)


@torch.library.register_fake("dta::linear_log_prob_backward", lib=LIBRARY)
def _backward_fake(*arguments: Any) -> tuple[torch.Tensor, ...]:
    call = Backward.of(arguments)
    hidden, weight, bias, *_ = call.head
    values = (hidden, weight, hidden if bias is None else bias)
    return tuple(
        value.new_empty(value.shape if want else (0,)) for value, want in zip(values, call.wanted, strict=True)
    )


@torch.library.register_fake("dta::linear_log_prob_backward_", lib=LIBRARY)
def _backward_in_place_fake(*arguments: Any) -> torch.Tensor:
    call = Backward.of(arguments)
    hidden: torch.Tensor = call.head.hidden
    return hidden.new_empty(hidden.shape if call.wanted.hidden else (0,))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    results = Results(*output)
    ctx.save_for_backward(*Forward.of(inputs).head, results.log_sum, results.mean, results.largest)
    ctx.mark_non_differentiable(results.largest)
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
