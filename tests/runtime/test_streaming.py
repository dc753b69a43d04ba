"""`streaming_step` is the compiled function on the whole batch, with the sum of `loss_fn(row, *outputs[row])`."""

import concurrent.futures
import dataclasses

import pytest
import torch
from torch import nn

import dta_compile
from dta_compile.errors import RefusalError, RuntimeContractError, VerificationError
from tests.support.tiny import SMALL_CHUNKS, BareLM, after, assert_same, log_probs, shared_ids, weights_like

IDS = shared_ids()


@dataclasses.dataclass
class Scores:
    chosen: torch.Tensor
    temperature: float
    squares: torch.Tensor | None = None


class Policy(nn.Module):
    """A model, a parameter that only formulas use, and one that only losses use."""

    def __init__(self):
        super().__init__()
        self.lm = BareLM()
        self.scale, self.coefficient = (nn.Parameter(torch.tensor(x, dtype=torch.float64)) for x in (0.7, 1.5))
        self.kept = []


@pytest.fixture(scope="module")
def policy():
    return Policy()


def flat(value):
    if isinstance(value, Scores):
        return flat((value.chosen, value.squares))
    if isinstance(value, dict):
        return flat(tuple(value.values()))
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in flat(item)]
    return [value] if isinstance(value, torch.Tensor) else []


def loss_of_row(row, *outputs):
    """Every position of every output counts differently."""
    floats = [out for out in outputs if out.is_floating_point()]
    numbers = [out.double().mean() for out in outputs if not out.is_floating_point()]
    return sum((i + 1) * (out.square() * weights_like(out)).sum() for i, out in enumerate(floats)) + sum(numbers)


def check(policy, function, *args, loss=loss_of_row, compiled=None):
    """A streaming step gives the losses and gradients of eager."""
    if compiled is None:
        torch.compiler.reset()
        compiled = torch.compile(function, backend="dta", options=SMALL_CHUNKS)

    def eager():
        rows = zip(*flat(function(*args)), strict=True)
        losses = [loss(row, *outputs) for row, outputs in enumerate(rows)]
        if losses:
            sum(losses).backward()
        return [one.detach() for one in losses]

    actual = after(policy, lambda: dta_compile.streaming_step(compiled, loss, *args))
    assert_same(actual, after(policy, eager))
    return compiled


def test_the_batch_size_as_a_number_and_as_a_shape(policy):
    def formulas(ids):
        rows, columns = ids.shape
        chosen = log_probs(policy.lm(ids), ids)
        sums = chosen.sum(1)
        shares = torch.full((rows,), 1 / rows, dtype=torch.float64)
        flat = (chosen.cumsum(1) * policy.scale).reshape(rows * (columns - 1)) / len(ids)
        means = chosen.mean(1, keepdim=True).expand(rows, columns - 1)
        discounted = chosen @ torch.ones(columns - 1, columns - 1, dtype=torch.float64).tril()
        return (
            chosen / rows,
            sums * policy.scale / ids.numel(),
            sums * shares * columns,
            flat.view(rows, -1) * (rows + 1),
            chosen - means / (ids != 3).sum(),
            discounted.repeat(1, 2) * rows**-0.5,
        )

    compiled = check(policy, formulas, IDS)
    check(policy, formulas, IDS[:, :5], compiled=compiled)  # as many tokens as rows
    check(policy, formulas, IDS[:1], compiled=compiled)


def test_loss_fn_gets_what_the_function_returns(policy):
    def everything(ids, weights):
        chosen = log_probs(policy.lm(ids), ids)
        policy.kept.append(ids * 2)  # exists for the whole batch
        return ids, chosen, None, {"twice": chosen, "number": ids.shape[0]}, Scores(chosen + 1, 0.5, chosen**2), weights

    compiled = check(policy, everything, IDS, weights_like(IDS.double()))
    assert torch.equal(policy.kept[-1], IDS * 2)
    policy.kept.clear()
    seen = []
    dta_compile.streaming_step(compiled, lambda row, *given: seen.append(given) or given[1].sum(), IDS, IDS.double())
    for ids, chosen, twice, more, squares, weights in seen:
        assert ids.dtype == torch.int64 and weights.shape == ids.shape == (9,)
        assert torch.equal(chosen, twice) and torch.equal(more, chosen + 1) and torch.equal(squares, chosen**2)
    policy.zero_grad()


@pytest.mark.slow
def test_what_never_exists_for_the_whole_batch_is_refused_by_name(policy):
    def stored(ids):
        hidden = policy.lm.hidden(ids)
        policy.kept.append(hidden)
        return log_probs(policy.lm.head(hidden), ids)

    def continued(ids):
        chosen = log_probs(policy.lm(ids), ids)
        torch._dynamo.graph_break()
        return chosen * 2

    class Opaque:
        def __init__(self, chosen):
            self.chosen = chosen

    def in_an_object(ids):
        return Opaque(log_probs(policy.lm(ids), ids))

    def over_the_batch(ids):
        return log_probs(policy.lm(ids), ids).sum(0)

    def without_a_batch_axis(ids):
        return log_probs(policy.lm(ids), ids), (ids != 3).sum()

    for function, message, line in (
        (stored, "stores a value outside of what it returns", "self.norm(x + "),
        (continued, "used outside of loss_fn", "log_softmax"),
        (in_an_object, "returns tensors in an object", "log_softmax"),
        (over_the_batch, "mixes sequences", "sum(0)"),
        (without_a_batch_axis, "no batch axis in front", ""),
    ):
        torch.compiler.reset()
        with pytest.raises(RefusalError, match=message) as caught:
            dta_compile.streaming_step(torch.compile(function, backend="dta"), loss_of_row, IDS)
        assert line in caught.value.where and caught.value.hint
    assert all(p.grad is None for p in policy.parameters())
    with pytest.raises(RefusalError, match="used outside of loss_fn"):
        policy.kept[-1] + 1
    policy.kept.clear()


def test_rows_that_share_nothing_and_batches_of_none(policy):
    def chosen(ids):
        return log_probs(policy.lm(ids), ids) / ids.shape[0], ids

    check(policy, chosen, IDS[:, :2])
    check(policy, chosen, IDS[:1, :2])
    check(policy, lambda ids: policy.lm(ids), IDS[:, :1])
    compiled = torch.compile(lambda ids: policy.scale * ids, backend="dta")
    assert dta_compile.streaming_step(compiled, loss_of_row, IDS[:0].double()) == []


def test_gradients_outside_of_the_rows_are_sent_once(policy):
    hooks = [p.register_hook(lambda grad: grad * 3) for p in (policy.scale, policy.coefficient, policy.lm.norm.weight)]
    shared = None

    def loss(row, chosen):
        chosen.mul_(2)  # outputs may be written to
        return (chosen.square() * weights_like(chosen)).sum() * policy.coefficient * shared

    def function(ids):
        return log_probs(policy.lm(ids), ids) * policy.scale

    compiled = torch.compile(function, backend="dta", options=SMALL_CHUNKS)

    def step(run):
        nonlocal shared
        shared = policy.coefficient.exp() * policy.lm.head.weight.sum()  # before the step, for all rows
        return run()

    def eager():
        losses = [loss(row, chosen.clone()) for row, chosen in enumerate(function(IDS))]
        sum(losses).backward()
        return [one.detach() for one in losses]

    actual = after(policy, lambda: step(lambda: dta_compile.streaming_step(compiled, loss, IDS)))
    assert_same(actual, after(policy, lambda: step(eager)))
    for hook in hooks:
        hook.remove()


def test_losses_may_be_computed_in_another_thread_and_by_functions_of_their_own(policy):
    """Autograd counts its nodes in every thread, and calls what a function keeps by the function's own names."""

    class Named(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            ctx.name = "named"
            return value * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    with concurrent.futures.ThreadPoolExecutor(1) as pool:

        def loss(row, values):
            return pool.submit(loss_of_row, row, Named.apply(values)).result(30) + policy.scale.exp()

        compiled = check(policy, lambda ids: log_probs(policy.lm(ids), ids), IDS, loss=loss)
        kept = []

        def pairs(row, values):
            kept.append(pool.submit(torch.sum, values).result(30))
            return kept[-1] - kept[0]

        with pytest.raises(RuntimeContractError, match="reads a value of another row"):
            dta_compile.streaming_step(compiled, pairs, IDS)


def test_losses_of_pairs_of_rows_are_refused(policy):
    """What is behind a value of an earlier row went backward with that row."""
    torch.compiler.reset()
    compiled = torch.compile(lambda ids: log_probs(policy.lm(ids), ids), backend="dta", options=SMALL_CHUNKS)
    kept = []

    def loss(row, values):
        kept.append(values.sum())
        return kept[-1] - kept[0]

    with pytest.raises(RuntimeContractError, match="reads a value of another row"):
        dta_compile.streaming_step(compiled, loss, IDS)


def test_numbers_over_padding_are_refused_as_in_other_calls(policy):
    torch.compiler.reset()
    mask = torch.ones_like(IDS, dtype=torch.bool)
    mask[1, 5:] = False

    def function(ids, mask):
        values = log_probs(policy.lm(ids, mask), ids)
        return (values * mask[:, 1:]).sum(1) * values.detach().mean(1)

    compiled = torch.compile(function, backend="dta", options={"chunk_size": 3})
    dta_compile.streaming_step(compiled, lambda row, value: value, IDS, torch.ones_like(mask))
    with pytest.raises(VerificationError, match="depends on padding"):
        dta_compile.streaming_step(compiled, lambda row, value: value, IDS, mask)


def test_frozen_models_and_bad_losses(policy):
    probe = nn.Linear(16, 1).double()
    policy.lm.requires_grad_(False)
    try:
        check(probe, policy.lm.hidden, IDS, loss=lambda row, hidden: probe(hidden).square().sum())
        with pytest.raises(RefusalError, match="no loss of this step has a gradient"):
            dta_compile.streaming_step(torch.compile(policy.lm, backend="dta"), loss_of_row, IDS)
    finally:
        policy.lm.requires_grad_(True)
    compiled = torch.compile(policy.lm, backend="dta")
    for loss in (lambda row, logits: logits, lambda row, logits: 0.0):
        with pytest.raises(RuntimeContractError, match="did not return a scalar tensor"):
            dta_compile.streaming_step(compiled, loss, IDS)
    with pytest.raises(RuntimeContractError, match="went backward itself"):
        dta_compile.streaming_step(compiled, lambda row, logits: logits.sum().backward() or logits.sum(), IDS)
