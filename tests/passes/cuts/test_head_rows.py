"""The head runs where its output is used: fewer rows, and still eager's loss and gradients to the last digit."""

import pytest
import torch
import torch.nn.functional as F

import dta_compile
from dta_compile.errors import RuntimeContractError
from dta_compile.token_rules import pointwise
from tests.support.inside import inside
from tests.support.tiny import SMALL_CHUNKS, VOCABULARY, BareLM, after, assert_same, shared_ids, weights_like

BATCH, TOKENS = 6, 12
IDS = shared_ids(BATCH, TOKENS)
MASK = torch.ones(BATCH, TOKENS, dtype=torch.bool)
MASK[1, 9:] = MASK[3, 11:] = False
NEXT = F.pad(IDS[:, 1:], (0, 1), value=-100).masked_fill(~MASK, -100)
NEXT[:, :3] = -100  # the prompt
NEXT[0, 5:8] = -100  # a tool's answer, in one of the branches only
NEXT[2] = -100  # a row without any label
NEXT[4, 6] = (NEXT[4, 6] + 1) % VOCABULARY  # differs on a shared token
LABELLED = NEXT != -100
ACTIONS = LABELLED & (weights_like(torch.zeros(BATCH, TOKENS)) > -0.3)  # a loss mask that is stricter than the labels
SOME = NEXT.clamp(min=0)
WEIGHTS = weights_like(torch.zeros(VOCABULARY, dtype=torch.float64)).abs()
OLD = weights_like(torch.zeros(BATCH, TOKENS, dtype=torch.float64)) - 3
SMALL = OLD / 100

counted: list[int] = []


@torch.library.custom_op("dta_tests::count_rows", mutates_args=())
def count_rows(x: torch.Tensor) -> torch.Tensor:
    """Identity that notes how many rows `[..., features]` it is run on."""
    counted.append(x.numel() // x.shape[-1])
    return x.clone()


count_rows.register_fake(torch.empty_like)
count_rows.register_autograd(lambda ctx, grad: grad)
dta_compile.register_token_rule(torch.ops.dta_tests.count_rows.default, pointwise)


class Counting(BareLM):
    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return count_rows(super().forward(ids, mask))


@pytest.fixture(scope="module")
def model():
    return Counting()


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def distinct(used, labels=NEXT):
    """Head rows of a batch by definition: used pairs of a prefix and a label."""
    pairs = {(tuple(IDS[b, : t + 1].tolist()), int(labels[b, t])) for b, t in used.nonzero().tolist()}
    return len(pairs)


def check(model, function, *args, rows, **options):
    """The compiled function gives eager's loss and gradients, and its head runs on `rows` rows."""
    compiled = torch.compile(function, backend="dta", options={**SMALL_CHUNKS, "verify": "off", **options})

    def step(forward):
        loss = forward(*args)
        loss.sum().backward()
        return loss.detach()

    expected = after(model, lambda: step(function))
    counted.clear()
    actual = after(model, lambda: step(compiled))
    head_rows = sum(counted)
    assert_same(actual, expected)
    assert head_rows == rows
    return compiled


def log_probs(logits):
    return logits.log_softmax(-1).gather(-1, SOME[..., None])[..., 0]


def entropy(logits):
    log = logits.log_softmax(-1)
    return -(log.exp() * log).sum(-1)


def assigned(values, mask):
    values = values.clone()
    values[~mask] = 0.0
    return values


def surrogate(logits):
    """The per-token objective of PPO with the k3 estimate of the KL divergence."""
    new = log_probs(logits)
    ratio = (new - OLD).exp()
    kl = (OLD - new).exp() - (OLD - new) - 1
    return -torch.min(ratio * SMALL, ratio.clamp(0.8, 1.2) * SMALL) + 0.1 * kl


def cross_entropy(logits, labels=NEXT, **options):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **options)


LOSSES = {
    "mean": lambda logits: cross_entropy(logits),
    "channels first": lambda logits: F.cross_entropy(logits.transpose(1, 2), NEXT),
    "another ignored label": lambda logits: cross_entropy(logits, NEXT.masked_fill(~LABELLED, 1000), ignore_index=1000),
    "an ignored class": lambda logits: cross_entropy(logits, NEXT.masked_fill(~LABELLED, 0), ignore_index=0),
    "smoothing": lambda logits: F.cross_entropy(logits.transpose(1, 2), NEXT, label_smoothing=0.1),
    "smoothing, by token": lambda logits: cross_entropy(logits, label_smoothing=0.1, reduction="none"),
    "class weights and smoothing": lambda logits: cross_entropy(
        logits, weight=WEIGHTS, label_smoothing=0.2, reduction="sum"
    ),
    "nll": lambda logits: F.nll_loss(logits.log_softmax(-1).transpose(1, 2), NEXT),
    "where": lambda logits: torch.where(LABELLED, log_probs(logits), 0.0).sum(1).exp(),
    "where, turned around": lambda logits: torch.where(~LABELLED, 0.0, log_probs(logits)) * OLD,
    "where another value": lambda logits: torch.where(LABELLED, log_probs(logits), OLD).pow(2),
    "masked_fill": lambda logits: log_probs(logits).masked_fill(~LABELLED, -1.0).exp(),
    "assignment": lambda logits: assigned(log_probs(logits), LABELLED).mean(),
    "PPO": lambda logits: torch.where(LABELLED, surrogate(logits), 0.0).sum() / LABELLED.sum(),
    "z-loss": lambda logits: cross_entropy(logits) + torch.where(LABELLED, logits.logsumexp(-1).pow(2), 0.0).mean(),
    "entropy": lambda logits: torch.where(LABELLED, log_probs(logits) + 0.1 * entropy(logits), 0.0).sum(),
    "a mask applied twice": lambda logits: torch.where(
        LABELLED, cross_entropy(logits, reduction="none").view(logits.shape[:2]), 0
    ),
    "infinite where it is ignored": lambda logits: torch.where(LABELLED, log_probs(logits).neg().log(), 0.0).mean(),
}


OFTEN_USED = {"mean", "an ignored class", "class weights and smoothing", "nll", "where", "assignment", "PPO", "entropy"}


@pytest.mark.slow
def test_losses_that_ignore_tokens_side_by_side(model):
    """One of them that needs other rows would need them for all."""

    def losses(ids):
        logits = model(ids, MASK)
        return torch.stack([LOSSES[name](logits).sum() * number for number, name in enumerate(sorted(OFTEN_USED), 1)])

    check(model, losses, IDS, rows=distinct(LABELLED))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "name", [name if name in ("mean", "PPO") else pytest.param(name, marks=pytest.mark.slow) for name in LOSSES]
)
def test_losses_that_ignore_tokens(model, name):
    def loss(ids):
        return LOSSES[name](model(ids, MASK))

    check(model, loss, IDS, rows=distinct(LABELLED))


def stricter(logits):
    """Cross entropy by token, of which a loss mask picks some."""
    values = cross_entropy(logits, reduction="none").view(logits.shape[:2])
    return torch.where(ACTIONS, values, 0.0).sum() / ACTIONS.sum()


def two_parts(logits):
    """Two values with conditions of their own."""
    return torch.where(ACTIONS, entropy(logits), 0.0).sum() + torch.where(NEXT > 9, log_probs(logits), 0.0).sum()


def either_side(logits):
    """Every token is used, each by one of two values."""
    return torch.where(ACTIONS, log_probs(logits), entropy(logits)).where(MASK, 0.0).sum()


def completions(logits):
    """A window of the tokens and a condition within it."""
    return cross_entropy(logits[:, 4:10], NEXT[:, 4:10])


WINDOW = torch.zeros(BATCH, TOKENS, dtype=torch.bool)
WINDOW[:, 4:10] = True
KEPT_ROWS = torch.tensor([1, 0, 0, 1, 1, 0], dtype=torch.bool)


def rows_that_were_kept(logits):
    """A condition for each sequence."""
    return torch.where(KEPT_ROWS[:, None] & MASK, log_probs(logits), 0.0).sum()


def late_columns(logits):
    """A condition on the column alone."""
    late = torch.arange(logits.shape[1]) > 5
    return torch.where(late, log_probs(logits).masked_fill(~MASK, 0.0), 0.0).sum()


NARROWED = {
    stricter: (ACTIONS, NEXT),
    two_parts: (ACTIONS | (NEXT > 9), SOME),
    either_side: (MASK, SOME + VOCABULARY * ACTIONS),  # the selection is made in the region, which reads the mask
    completions: (WINDOW & LABELLED, NEXT),
    rows_that_were_kept: (KEPT_ROWS[:, None] & MASK, SOME),
    late_columns: (MASK & (torch.arange(TOKENS) > 5), SOME),
}


@pytest.mark.parametrize("function", NARROWED, ids=lambda function: function.__name__)
@pytest.mark.sample(1)
def test_conditions_combine(model, function):
    check(model, lambda ids: function(model(ids, MASK)), IDS, rows=distinct(*NARROWED[function]))


def multiplied(logits):
    """`0 * inf` is no zero: eager's loss would not be a number, and so must ours."""
    return (log_probs(logits) * LABELLED).sum()


def other_side_in_the_region(logits):
    """Ignored tokens have a value, which the region computes."""
    return (torch.where(LABELLED[..., None], logits, 1.0).logsumexp(-1) * MASK).sum()


def by_the_model(logits):
    """A condition that the parameters decide."""
    return (torch.where(logits[..., 0] > 0, logits[..., 1], 0.0) * MASK).sum()


def logits_too(logits):
    """The logits of all tokens are returned as well."""
    return torch.where(LABELLED, log_probs(logits), 0.0).sum() + logits.where(MASK[..., None], 0.0).sum()


def outside_the_window(logits):
    """A mean over all tokens reads those that the condition excludes."""
    values = log_probs(logits).where(MASK, 0.0)
    return torch.where(LABELLED, values, values.mean()).sum()


@pytest.mark.parametrize(
    "function", [multiplied, other_side_in_the_region, by_the_model, logits_too, outside_the_window]
)
@pytest.mark.sample(1)
def test_tokens_that_are_not_ignored(model, function):
    compiled = torch.compile(lambda ids: function(model(ids, MASK)), backend="dta", options=SMALL_CHUNKS)
    expected = after(model, lambda: function(model(IDS, MASK)).backward())
    counted.clear()
    actual = after(model, lambda: compiled(IDS).backward())
    assert_same(actual, expected)
    assert sum(counted) >= distinct(MASK, torch.zeros_like(NEXT))


def test_zero_by_a_count_of_zero_is_not_a_number(model):
    def shares(ids):
        kept = torch.where(LABELLED[..., None], model(ids, MASK), 0.0)
        return torch.where(MASK, (kept / LABELLED.sum(1)[:, None, None]).sum(-1), 0.0)

    compiled = torch.compile(shares, backend="dta", options=SMALL_CHUNKS | {"verify": "off"})
    with torch.no_grad():
        expected = shares(IDS)
    assert expected.isnan().any()
    torch.testing.assert_close(compiled(IDS).detach(), expected, rtol=1e-9, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize(
    ("strategy", "memory_budget"),
    [
        pytest.param("vanilla", None, marks=pytest.mark.slow),
        ("dfs", 0),
        pytest.param("dense", None, marks=pytest.mark.slow),
    ],
)
def test_strategies(model, strategy, memory_budget):
    def loss(ids, labels):
        return cross_entropy(model(ids, MASK), labels, label_smoothing=0.1)

    options = {**SMALL_CHUNKS, "strategy": strategy, "memory_budget": memory_budget, "verify": "off"}
    compiled = torch.compile(loss, backend="dta", options=options)
    for labels in (NEXT, NEXT.masked_fill(ACTIONS, -100)):  # the same graph, other tokens ignored
        expected = after(model, lambda labels=labels: loss(IDS, labels).backward())
        assert_same(after(model, lambda labels=labels: compiled(IDS, labels).backward()), expected)
        with torch.no_grad():
            counted.clear()
            compiled(IDS, labels)
        used = labels != -100
        assert sum(counted) == (int(used.sum()) if strategy == "dense" else distinct(used, labels))


@pytest.mark.parametrize("trained", [True, False])
def test_ignored_tokens_are_exactly_zero(model, trained):
    """What is returned of them is counted by the caller, and what is not returned is summed."""

    def losses(ids):
        logits = model(ids, MASK)
        both = torch.where(LABELLED, log_probs(logits), 0.0) + 0.1 * torch.where(LABELLED, entropy(logits), 0.0)
        return -both, both.sum(1), F.cross_entropy(logits.transpose(1, 2), NEXT, label_smoothing=0.1, reduction="none")

    compiled = torch.compile(losses, backend="dta", options=SMALL_CHUNKS | {"verify": "off"})
    with torch.set_grad_enabled(trained):
        found, expected = compiled(IDS), losses(IDS)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert torch.equal(found[0] != 0, LABELLED) and torch.equal(found[2] != 0, LABELLED)


def test_nothing_but_ignored_labels(model):
    nothing = torch.full_like(NEXT, -100)

    def loss(ids, labels):
        return cross_entropy(model(ids), labels, reduction="sum")

    check(model, loss, IDS, nothing, rows=0)
    mean = torch.compile(lambda ids, labels: cross_entropy(model(ids), labels), backend="dta", options=SMALL_CHUNKS)
    _, gradients = after(model, lambda: mean(IDS, nothing).backward())
    assert all(bool((grad == 0).all()) for grad in gradients.values())  # as in eager
    assert mean(IDS, nothing).isnan()


def test_padding_may_receive_gradients_where_the_loss_ignores_it(model):
    compiled = torch.compile(
        lambda ids, labels: cross_entropy(model(ids, MASK), labels, label_smoothing=0.1, reduction="none"),
        backend="dta",
        options=SMALL_CHUNKS,
    )
    compiled(IDS, NEXT).sum().backward()
    with pytest.raises(RuntimeContractError, match="4 of 4 padding positions with a gradient"):
        compiled(IDS, NEXT.masked_fill(~MASK, 3)).sum().backward()
    model.zero_grad()


def test_streaming_steps(model):
    def values(ids, labels):
        logits = model(ids, MASK)
        return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none", label_smoothing=0.1), log_probs(logits)

    def row_loss(row, losses, chosen):
        return (losses * WEIGHTS[row]).sum() + chosen.where(ACTIONS[row], 0.0).sum()

    def only_losses(ids, labels):
        return cross_entropy(model(ids, MASK), labels, reduction="none").view(labels.shape)

    def eager(function, loss):
        return [loss(row, *outputs) for row, outputs in enumerate(zip(*function(IDS, NEXT), strict=True))]

    compiled = torch.compile(values, backend="dta", options=SMALL_CHUNKS)
    expected = after(model, lambda: sum(eager(values, row_loss)).backward())
    assert_same(after(model, lambda: dta_compile.streaming_step(compiled, row_loss, IDS, NEXT) and None), expected)

    compiled = torch.compile(only_losses, backend="dta", options={**SMALL_CHUNKS, "memory_budget": 0})
    expected = after(model, lambda: only_losses(IDS, NEXT).sum().backward())
    actual = after(model, lambda: dta_compile.streaming_step(compiled, lambda row, x: x.sum(), IDS, NEXT) and None)
    assert_same(actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize("padding", ["right", pytest.param("left", marks=pytest.mark.slow)])
def test_the_labels_loss_of_transformers(padding):
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(config).double()
    mask = MASK if padding == "right" else MASK.flip(1)
    labels = IDS.masked_fill(~mask, -100)
    labels[:, :5] = -100

    def loss(ids, labels):
        positions = (mask.long().cumsum(1) - 1).clamp(min=0)
        arguments = {"input_ids": ids, "attention_mask": mask.long(), "position_ids": positions, "use_cache": False}
        return model(**arguments, labels=labels, num_items_in_batch=7).loss

    compiled = torch.compile(loss, backend="dta", options=SMALL_CHUNKS)
    expected = after(model, lambda: loss(IDS, labels).backward())
    assert_same(after(model, lambda: compiled(IDS, labels).backward()), expected, tolerance=2e-6)
    (value,) = inside(compiled).newest.program.frontier
    assert all(use.conditions for use in value.uses)
