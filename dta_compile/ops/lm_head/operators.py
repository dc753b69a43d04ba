"""The opaque operators of a language-model head: `dta::linear_log_prob`, `dta::linear_cross`, `dta::linear_top`.

For logits `z = (hidden @ weight.T + bias) / temperature`, `[rows, V]`, or with a soft cap
`z = tanh((hidden @ weight.T + bias) / temperature) / inverse_cap`, the operator returns

    log_prob   [rows, K]  `z[labels] - logsumexp(z)`
    logit      [rows, K]  `z[labels]`
    log_sum    [rows]     `logsumexp(z - largest)`
    mean       [rows]     the expectation of `z - largest`: the entropy is `log_sum - mean`
    largest    [rows]     `z.amax(1)`, not differentiable: `logsumexp(z)` is `largest + log_sum`; 0 if infinite
    total      [rows]     `(z - largest).sum(1)`
    best       [rows]     `z.argmax(1)`, int64; any number where z has NaN

in `dtype`, without materialising z (`mean`, `total` and `best` are empty unless asked for): the forward goes over the
vocabulary block by block, and so does the backward, for which `hidden`, `labels` and two or three numbers per row are
saved. `log_sum`, `mean` and `total` are relative to `largest` for precision: an error in them affects all probabilities
of a row. `hidden [rows, H]` is in the dtype of the matrix product, whose result is rounded to it like in eager mode; a
`weight [V, H]` in another dtype is cast block by block. `temperature` and `inverse_cap` are one number or one number
per row (`[]` or `[rows, 1]`), and get no gradient. `dta::linear_top` returns the indices of the largest,
`[rows, count]`.

For two heads, with probabilities p of the one and q of the other, `dta::linear_cross` returns the expectation by p of
`log p - log q` (`is_ratio`) or of `-log q`, and `log_sum` and `largest` of both. The backward operators are for one
head at a time, which is given first.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from dta_compile.ops.library import define

BLOCK_COLUMNS = 2**14  # most vocabulary entries of a block
BLOCK_LOGITS = 2**25  # most logits of a block
FEWEST_COLUMNS = 256  # blocks are multiples of this: matrix products with unaligned rows are slow on GPUs

HEAD = "Tensor hidden, Tensor weight, Tensor? bias, Tensor? temperature, Tensor? labels, Tensor? inverse_cap"
GRADIENTS = (
    "Tensor log_sum, Tensor? mean, Tensor largest, Tensor? of_labels, Tensor of_log_sum, Tensor? of_mean,"
    " Tensor? of_total"
)
HEADS = f"{HEAD}, {', '.join(f'{argument}_2' for argument in HEAD.split(', '))}"
CROSS_GRADIENTS = "Tensor mean, Tensor log_sum, Tensor largest, Tensor log_sum_2, Tensor largest_2, Tensor of_mean"
IN_PLACE_GRADIENTS = "bool wants_hidden, Tensor(a!)? weight_gradient, Tensor(b!)? bias_gradient"


class Head(NamedTuple):
    """The first arguments of every operator here; like in the classes below, tensors or FX nodes."""

    hidden: Any
    weight: Any
    bias: Any
    temperature: Any
    labels: Any
    inverse_cap: Any = None


class Further(NamedTuple):
    """Which of the results that are empty unless asked for are computed."""

    mean: bool = False
    total: bool = False
    best: bool = False


class Forward(NamedTuple):
    """The arguments of `dta::linear_log_prob`."""

    head: Head
    further: Further
    dtype: torch.dtype

    @classmethod
    def of(cls, arguments: Sequence[Any]) -> Forward:
        """Parse the arguments of a call, in the operator's order."""
        *head, further, dtype = arguments
        return cls(Head(*head), Further(*further), dtype)


class Results(NamedTuple):
    """The results of `dta::linear_log_prob`."""

    log_prob: Any
    logit: Any
    log_sum: Any
    mean: Any
    largest: Any
    total: Any
    best: Any


class Wanted(NamedTuple):
    """For each gradient: whether it is needed, or its accumulator (None if it is not needed)."""

    hidden: Any
    weight: Any
    bias: Any


class Backward(NamedTuple):
    """The arguments of `dta::linear_log_prob_backward`, or of its in-place variant, which has accumulators."""

    head: Head
    log_sum: Any
    mean: Any
    largest: Any
    of_labels: Any
    of_log_sum: Any
    of_mean: Any
    of_total: Any
    wanted: Wanted

    @classmethod
    def of(cls, arguments: Sequence[Any]) -> Backward:
        """Parse the arguments of a call, in the operator's order."""
        wanted = arguments[13] if len(arguments) == 14 else arguments[13:]
        return cls(Head(*arguments[:6]), *arguments[6:13], wanted=Wanted(*wanted))  # type: ignore[misc]

    @property
    def operands(self) -> tuple[Any, ...]:
        """Return the arguments that both operators take, in their order."""
        return (*self.head, *self[1:-1])


class CrossBackward(NamedTuple):
    """The arguments of `dta::linear_cross_backward`, or of its in-place variant.

    Attributes:
        head, other: the head whose gradients are computed, and the other one, with `log_sum` and `largest` of both.
        is_weight: whether p is of `head`.
    """

    head: Head
    other: Head
    mean: Any
    log_sum: Any
    largest: Any
    other_log_sum: Any
    other_largest: Any
    of_mean: Any
    is_ratio: bool
    is_weight: bool
    wanted: Wanted

    @classmethod
    def of(cls, arguments: Sequence[Any]) -> CrossBackward:
        """Parse the arguments of a call, in the operator's order."""
        wanted = arguments[20] if len(arguments) == 21 else arguments[20:]
        return cls(Head(*arguments[:6]), Head(*arguments[6:12]), *arguments[12:20], wanted=Wanted(*wanted))  # type: ignore[misc]

    @property
    def operands(self) -> tuple[Any, ...]:
        """Return the arguments that both operators take, in their order."""
        return (*self.head, *self.other, *self[2:-1])


def block_columns(rows: int, vocabulary: int) -> int:
    """Return the number of vocabulary entries per block."""
    columns = min(BLOCK_COLUMNS, BLOCK_LOGITS // max(rows, 1))
    return min(vocabulary, max(columns // FEWEST_COLUMNS, 1) * FEWEST_COLUMNS)


def _fake(*arguments: Any) -> tuple[torch.Tensor, ...]:
    head, further, dtype = Forward.of(arguments)
    rows, chosen = head.hidden.shape[0], 0 if head.labels is None else head.labels.shape[1]
    mean, total, best = ((rows if asked else 0,) for asked in further)
    shapes = ((rows, chosen), (rows, chosen), (rows,), mean, (rows,), total)
    results = (head.hidden.new_empty(shape, dtype=dtype) for shape in shapes)
    return (*results, head.hidden.new_empty(best, dtype=torch.int64))


def _backward_fake(cls: type[Backward] | type[CrossBackward], *arguments: Any) -> tuple[torch.Tensor, ...]:
    call = cls.of(arguments)
    hidden, weight, bias, *_ = call.head
    values = (hidden, weight, hidden if bias is None else bias)
    return tuple(
        value.new_empty(value.shape if want else (0,)) for value, want in zip(values, call.wanted, strict=True)
    )


def _backward_in_place_fake(cls: type[Backward] | type[CrossBackward], *arguments: Any) -> torch.Tensor:
    call = cls.of(arguments)
    hidden: torch.Tensor = call.head.hidden
    return hidden.new_empty(hidden.shape if call.wanted.hidden else (0,))


def _cross_fake(*arguments: Any) -> tuple[torch.Tensor, ...]:
    hidden = Head(*arguments[:6]).hidden
    return tuple(hidden.new_empty((hidden.shape[0],), dtype=arguments[13]) for _ in range(5))


def _save_cross(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:12], *output)
    ctx.is_ratio = inputs[12]
    ctx.mark_non_differentiable(*output[1:])


def _cross_backward(ctx: Any, of_mean: torch.Tensor, *_: Any) -> Any:
    *operands, mean, log_sum, largest, other_log_sum, other_largest = ctx.saved_tensors
    first, second = operands[:6], operands[6:]
    statistics, others = (log_sum, largest), (other_log_sum, other_largest)
    of_heads: list[torch.Tensor | None] = []
    for is_weight, heads in ((True, (*first, *second)), (False, (*second, *first))):
        wanted = list(ctx.needs_input_grad[:3] if is_weight else ctx.needs_input_grad[6:9])
        of_both = (*statistics, *others) if is_weight else (*others, *statistics)
        grads = [None] * 3
        if any(wanted):
            grads = LINEAR_CROSS_BACKWARD(*heads, mean, *of_both, of_mean, ctx.is_ratio, is_weight, wanted)
        of_heads += [*(grad if want else None for grad, want in zip(grads, wanted, strict=True)), *[None] * 3]
    return (*of_heads, None, None)


def _top_fake(*arguments: Any) -> torch.Tensor:
    *head, count, _ = arguments
    hidden: torch.Tensor = Head(*head).hidden
    return hidden.new_empty((hidden.shape[0], count), dtype=torch.int64)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    results = Results(*output)
    ctx.save_for_backward(*Forward.of(inputs).head, results.log_sum, results.mean, results.largest)
    ctx.mark_non_differentiable(results.largest, results.best)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, log_prob: Any, logit: Any, log_sum: Any, mean: Any, _: Any, total: Any, __: Any) -> Any:
    """Reduce to the gradient of z:

    `onehot(labels) * of_labels + p * (of_log_sum + of_mean * (z - largest - mean)) + of_total`.
    """
    *operands, saved_log_sum, saved_mean, largest = ctx.saved_tensors
    of_log_sum = torch.zeros_like(largest) if log_sum is None else log_sum
    of_labels = log_prob if logit is None else logit if log_prob is None else log_prob + logit
    if log_prob is not None:
        of_log_sum = of_log_sum - log_prob.sum(1)
    if mean is not None:
        of_log_sum = of_log_sum + mean
    statistics = (saved_log_sum, None if mean is None else saved_mean, largest)
    wanted = list(ctx.needs_input_grad[:3])
    grads = LINEAR_LOG_PROB_BACKWARD(*operands, *statistics, of_labels, of_log_sum, mean, total, wanted)
    return (*(grad if want else None for grad, want in zip(grads, wanted, strict=True)), *[None] * 5)


# Their implementations are in `blocks`.
LINEAR_LOG_PROB = define(
    f"linear_log_prob({HEAD}, bool[3] further, ScalarType dtype)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake,
    save=_save,
    backward=_backward,
)
LINEAR_LOG_PROB_BACKWARD = define(
    f"linear_log_prob_backward({HEAD}, {GRADIENTS}, bool[3] wanted) -> (Tensor, Tensor, Tensor)",
    functools.partial(_backward_fake, Backward),
)
LINEAR_LOG_PROB_BACKWARD_ = define(
    f"linear_log_prob_backward_({HEAD}, {GRADIENTS}, {IN_PLACE_GRADIENTS}) -> Tensor",
    functools.partial(_backward_in_place_fake, Backward),
)
LINEAR_TOP = define(f"linear_top({HEAD}, int count, ScalarType dtype) -> Tensor", _top_fake)
LINEAR_CROSS = define(
    f"linear_cross({HEADS}, bool is_ratio, ScalarType dtype) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _cross_fake,
    save=_save_cross,
    backward=_cross_backward,
)
LINEAR_CROSS_BACKWARD = define(
    f"linear_cross_backward({HEADS}, {CROSS_GRADIENTS}, bool is_ratio, bool is_weight, bool[3] wanted)"
    " -> (Tensor, Tensor, Tensor)",
    functools.partial(_backward_fake, CrossBackward),
)
LINEAR_CROSS_BACKWARD_ = define(
    f"linear_cross_backward_({HEADS}, {CROSS_GRADIENTS}, bool is_ratio, bool is_weight, {IN_PLACE_GRADIENTS})"
    " -> Tensor",
    functools.partial(_backward_in_place_fake, CrossBackward),
)
WITHOUT_KERNELS = (LINEAR_TOP, LINEAR_CROSS, LINEAR_CROSS_BACKWARD, LINEAR_CROSS_BACKWARD_)
OPERATORS = (LINEAR_LOG_PROB, LINEAR_LOG_PROB_BACKWARD, LINEAR_LOG_PROB_BACKWARD_, *WITHOUT_KERNELS)

# By backward operator: its variant with accumulators, and the arguments of both.
IN_PLACE: dict[Any, tuple[Any, type[Backward] | type[CrossBackward]]] = {
    LINEAR_LOG_PROB_BACKWARD: (LINEAR_LOG_PROB_BACKWARD_, Backward),
    LINEAR_CROSS_BACKWARD: (LINEAR_CROSS_BACKWARD_, CrossBackward),
}
