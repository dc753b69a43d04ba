"""Whole losses, functions to log-probs, and models alone: loss and gradients equal eager's for whatever is compiled."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dta_compile
from dta_compile.errors import RuntimeContractError
from tests.support.inside import inside
from tests.support.tiny import (
    SMALL_CHUNKS,
    VOCABULARY,
    WIDTH,
    BareLM,
    TinyLM,
    after,
    assert_same,
    log_probs,
    shared_ids,
    weights_like,
)

BATCH, TOKENS = 6, 10
IDS = shared_ids(BATCH, TOKENS)
MASK = torch.ones(BATCH, TOKENS, dtype=torch.bool)
MASK[1, 6:] = MASK[3, 9:] = False
LABELS = IDS.masked_fill(~MASK, -100)
LABELS[:, :2] = -100  # the prompt
LABELS[4, 3] = (LABELS[4, 3] + 1) % VOCABULARY  # differs on a shared token
NEXT = F.pad(LABELS[:, 1:], (0, 1), value=-100)
ADVANTAGES = weights_like(torch.zeros(BATCH, TOKENS - 1, dtype=torch.float64))  # differ on shared tokens too
REWARDS = ADVANTAGES[:, 0].clone()
CLASS_WEIGHTS = weights_like(torch.zeros(VOCABULARY, dtype=torch.float64)).abs()


class WithValues(BareLM):
    """A policy with a value head, and a frozen reference model inside."""

    def __init__(self):
        super().__init__()
        self.value = nn.Linear(WIDTH, 1).double()
        self.frozen = BareLM(seed=9).requires_grad_(False)


@pytest.fixture(scope="module")
def model():
    return WithValues()


@pytest.fixture(autouse=True, scope="module")
def fresh_compiler():
    torch._dynamo.reset()


def check(model, function, *args, compression=1.5, **options):
    """The compiled function gives eager's loss and gradients, over a tree; returns its plan and frontier width."""
    compiled = torch.compile(function, backend="dta", options={**SMALL_CHUNKS, **options})

    def step(forward):
        loss = forward(*args)
        loss.sum().backward()
        return loss.detach()

    assert_same(after(model, lambda: step(compiled)), after(model, lambda: step(function)))
    plan = dta_compile.last_plan(compiled)
    assert plan.stats.compression > compression
    frontier = inside(compiled).newest.program.frontier
    return plan, sum(math.prod(value.features) for value in frontier)


CROSS_ENTROPY = {
    "mean": lambda logits: F.cross_entropy(logits.flatten(0, 1), NEXT.flatten()),
    "channels first": lambda logits: F.cross_entropy(logits.transpose(1, 2), NEXT),
    "smoothing": lambda logits: F.cross_entropy(logits.transpose(1, 2), NEXT, label_smoothing=0.1),
    "weight and smoothing": lambda logits: F.cross_entropy(
        logits.transpose(1, 2), NEXT, weight=CLASS_WEIGHTS, label_smoothing=0.2, reduction="sum"
    ),
    "ignore_index": lambda logits: F.cross_entropy(
        logits.flatten(0, 1), NEXT.masked_fill(NEXT == -100, 5).flatten(), ignore_index=5
    ),
    "shifted": lambda logits: F.cross_entropy(logits[:, :-1].flatten(0, 1), LABELS[:, 1:].flatten()),
    "nll": lambda logits: F.nll_loss(logits.log_softmax(-1).transpose(1, 2), NEXT),
}


def test_cross_entropy(model):
    def losses(ids):
        logits = model(ids, MASK)
        return torch.stack([loss(logits) * number for number, loss in enumerate(CROSS_ENTROPY.values(), 1)])

    _, numbers = check(model, losses, IDS)
    assert numbers <= 2 * len(CROSS_ENTROPY) < VOCABULARY  # `[B, S, V]` logits never leave the tree


@pytest.mark.slow
@pytest.mark.parametrize("name", CROSS_ENTROPY)
def test_cross_entropy_alone(model, name):
    _, numbers = check(model, lambda ids: CROSS_ENTROPY[name](model(ids, MASK)), IDS)
    assert numbers <= 2


def test_cross_entropy_of_several_heads_in_front_of_the_tokens(model):
    """Codebooks, `[B, K, S, V]`: flattened labels lie otherwise in the memory of a chunk than in that of the batch."""

    def loss(ids):
        hidden = model.hidden(ids)
        logits = torch.stack([model.head(hidden), model.head(2 * hidden)], 1)
        labels = torch.stack([ids.roll(-1, 1), ids.roll(-2, 1)], 2)
        return F.cross_entropy(logits.flatten(0, 2), labels.transpose(1, 2).flatten())

    check(model, loss, IDS)


def test_labels_do_not_split_prefixes(model):
    def loss(ids, labels):
        return F.cross_entropy(model(ids).transpose(1, 2), labels)

    plan, _ = check(model, loss, IDS, NEXT)
    assert plan.stats.tree_tokens == dta_compile.plan(IDS).stats.tree_tokens


def grpo(model, ids, rewards, old, entropy_weight=0.01):
    logits = model(ids, MASK)[:, :-1] / 0.7
    new = logits.log_softmax(-1)
    chosen = new.gather(-1, ids[:, 1:, None])[..., 0]
    groups = rewards.view(2, -1)
    advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).view(-1, 1)
    ratio = (chosen - old).exp()
    surrogate = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    entropy = -(new.exp() * new).sum(-1)
    real = MASK[:, 1:].double()
    return -((surrogate + entropy_weight * entropy) * real).sum() / real.sum()


def test_grpo_with_group_normalisation_clip_and_entropy(model):
    with torch.no_grad():
        old = log_probs(model(IDS, MASK) / 0.7, IDS) + 0.3 * ADVANTAGES
    check(model, lambda ids, rewards, old: grpo(model, ids, rewards, old), IDS, REWARDS, old)


def per_token(model, ids):
    """A function from ids to log-probs and entropies: what trainers compile."""
    log = model(ids, MASK)[:, :-1].log_softmax(-1)
    return log.gather(-1, ids[:, 1:, None])[..., 0], -(log.exp() * log).sum(-1)


LOSSES_OF_LOG_PROBS = {
    "token advantages": lambda lp, entropy, real: (lp * ADVANTAGES * real).sum(),
    "sequence level (GSPO)": lambda lp, entropy, real: (((lp * real).sum(1) / real.sum(1)).exp() * REWARDS).mean(),
    "truncated importance sampling": lambda lp, entropy, real: (
        (lp.detach() - 3 * ADVANTAGES).exp().clamp(max=2) * lp * ADVANTAGES * real
    ).sum(),
    "pairs (DPO)": lambda lp, entropy, real: -F.logsigmoid((lp * real).sum(1)[::2] - (lp * real).sum(1)[1::2]).mean(),
    "contrastive over the batch": lambda lp, entropy, real: F.cross_entropy(
        (lp * real) @ (entropy * real).T, torch.arange(len(lp))
    ),
    "softmax over rows": lambda lp, entropy, real: ((lp * real).sum(1).softmax(0) * REWARDS).sum(),
    "best of the batch": lambda lp, entropy, real: (lp * real).sum(1).max() + (entropy * real).amax(),
    "one token of one row": lambda lp, entropy, real: lp[2, 4],
}


INSIDE = ("sequence level (GSPO)", "contrastive over the batch", "one token of one row")


@pytest.fixture(scope="module")
def compiled_log_probs(model):
    return torch.compile(lambda ids: per_token(model, ids), backend="dta", options=SMALL_CHUNKS)


@pytest.mark.parametrize("name", LOSSES_OF_LOG_PROBS)
def test_any_loss_of_log_probs_outside(model, compiled_log_probs, name):
    real = MASK[:, 1:].double()

    def step(forward):
        loss = LOSSES_OF_LOG_PROBS[name](*forward(IDS), real)
        loss.backward()
        return loss.detach()

    expected = after(model, lambda: step(lambda ids: per_token(model, ids)))
    assert_same(after(model, lambda: step(compiled_log_probs)), expected)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "name", [name if name in INSIDE else pytest.param(name, marks=pytest.mark.slow) for name in LOSSES_OF_LOG_PROBS]
)
def test_any_loss_of_log_probs_inside(model, name):
    real = MASK[:, 1:].double()
    check(model, lambda ids: LOSSES_OF_LOG_PROBS[name](*per_token(model, ids), real), IDS)


def policy_and_reference(model, ids):
    """Policy gradient with a KL penalty to a frozen model (the k3 estimator) and a value head."""
    hidden = model.hidden(ids)
    mine, values = log_probs(model.head(hidden), ids), model.value(hidden)[:, :-1, 0]
    with torch.no_grad():
        theirs = log_probs(model.frozen(ids), ids)
    kl = (theirs - mine).exp() - (theirs - mine) - 1
    return -(mine * ADVANTAGES).mean() + 0.1 * kl.mean() + (values - REWARDS[:, None]).pow(2).mean()


def full_kl(model, ids):
    mine, theirs = model(ids).log_softmax(-1), model.frozen(ids).log_softmax(-1)
    return F.kl_div(mine, theirs, log_target=True, reduction="batchmean")


def reference_by_detach(model, ids):
    return (log_probs(model(ids), ids) - log_probs(model.frozen(ids), ids).detach()).pow(2).mean()


def one_model_twice(model, ids):
    """The same weights on the same ids, once hotter and once without gradient."""
    with torch.no_grad():
        old = log_probs(model(ids), ids)
    return ((log_probs(model(ids), ids) - old).exp() * ADVANTAGES).mean()


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "function",
    [policy_and_reference, full_kl, one_model_twice, pytest.param(reference_by_detach, marks=pytest.mark.slow)],
)
def test_two_forward_passes_over_the_same_ids(model, function):
    plan, numbers = check(model, lambda ids: function(model, ids), IDS)
    assert numbers <= 3 or function is full_kl  # its sum runs over tokens and vocabulary at once
    assert plan.stats.tree_tokens == dta_compile.plan(IDS).stats.tree_tokens


def dpo(chosen, rejected):
    return -F.logsigmoid(chosen.sum(1) - rejected.sum(1)).mean()


def test_dpo_with_chosen_and_rejected_in_one_batch(model):
    def loss(ids):
        return dpo(*log_probs(model(ids), ids).chunk(2))

    check(model, loss, IDS)


def test_dpo_with_two_calls(model):
    """Both calls read their own ids: one tree of pairs serves both, if they have the same number of tokens."""
    chosen, rejected = IDS, shared_ids(BATCH, TOKENS, seed=8)

    def loss(chosen, rejected):
        return dpo(log_probs(model(chosen), chosen), log_probs(model(rejected), rejected))

    check(model, loss, chosen, rejected, compression=1.2)


SLICES = {
    "last k": lambda model, ids: model(ids)[:, -4:],
    "from k": lambda model, ids: model(ids)[:, 3:],
    "last token": lambda model, ids: model(ids)[:, -1],
    "one before the last": lambda model, ids: model(ids)[:, -5:-1].log_softmax(-1).gather(-1, ids[:, -4:, None]),
    "completion of a prompt": lambda model, ids: log_probs(model(ids), ids)[:, 2:],
    "two windows": lambda model, ids: torch.cat([model(ids)[:, :3].flatten(1), model(ids)[:, -2:].flatten(1)], 1),
    "one row": lambda model, ids: model(ids)[2],
    "last real token": lambda model, ids: model(ids, MASK).gather(
        1, (MASK.sum(1) - 1)[:, None, None].expand(-1, 1, VOCABULARY)
    ),
}


LIKE_THE_LAST = ("from k", "one before the last", "completion of a prompt")  # a window of tokens, in other words


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LIKE_THE_LAST else name for name in SLICES]
)
@pytest.mark.sample(1)
def test_slices_of_the_tokens(model, name):
    def loss(ids):
        picked = SLICES[name](model, ids)
        return (picked * weights_like(picked)).sum()

    check(model, loss, IDS)


def test_labels_of_a_window_of_tokens_that_are_inputs(model):
    """Shifted ones, a teacher's entries for a constant number of tokens: logits stay in the tree for both."""

    def loss(ids, labels, entries):
        shifted = model(ids)[:, :-1].log_softmax(-1).gather(-1, labels[..., None])[..., 0]
        return (shifted * ADVANTAGES).sum() + (model(ids)[:, -5:-1].log_softmax(-1).gather(-1, entries) ** 2).sum()

    entries = (IDS[:, -4:, None] + torch.arange(3)) % VOCABULARY
    _, numbers = check(model, loss, IDS, IDS[:, 1:].clone(), entries)
    assert numbers <= 1 + 3


def test_per_sequence_temperature_and_bias(model):
    temperatures, bias = REWARDS.exp() + 0.5, CLASS_WEIGHTS

    def loss(ids, temperatures, bias):
        logits = model(ids) / temperatures[:, None, None] + bias
        return (log_probs(logits, ids) * ADVANTAGES).sum()

    check(model, loss, IDS, temperatures, bias)


def test_regularisers_and_learned_loss_weights(model):
    balance = nn.Parameter(torch.tensor([0.3, -0.2], dtype=torch.float64))

    def loss(ids):
        log = log_probs(model(ids), ids)
        penalty = sum(parameter.pow(2).sum() for parameter in model.norm.parameters())
        return (balance.softmax(0) * torch.stack([-log.mean(), penalty])).sum()

    check(model, loss, IDS)
    found = torch.autograd.grad(torch.compile(loss, backend="dta")(IDS), balance)
    assert_same(found, torch.autograd.grad(loss(IDS), balance))


@pytest.mark.parametrize("keep", [pytest.param(0, marks=pytest.mark.slow), 4])
def test_the_labels_loss_and_logits_to_keep_of_transformers(keep):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=32, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).double()

    def loss(ids, labels):
        arguments = {"input_ids": ids, "attention_mask": MASK.long(), "use_cache": False}
        if not keep:
            return model(**arguments, labels=labels).loss
        logits = model(**arguments, logits_to_keep=keep).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, -keep + 1 :].flatten())

    check(model, loss, IDS, LABELS)


def test_a_loop_over_sequences_is_traced_for_its_batch_size(model):
    """TRL's selective_log_softmax loops over rows to save memory: the batch size becomes a constant."""

    def loss(ids):
        logits = model(ids)[:, :-1]
        normalisers = torch.stack([torch.logsumexp(row, -1) for row in logits])
        return (logits.gather(-1, ids[:, 1:, None])[..., 0] - normalisers).mul(ADVANTAGES[: len(ids)]).mean()

    for ids in (IDS, IDS[:4]):
        _, numbers = check(model, loss, ids)
        assert numbers <= 2  # the logits stay in the tree


def test_weights_may_be_plain_tensors():
    table = weights_like(torch.zeros(VOCABULARY, WIDTH, dtype=torch.float64)).requires_grad_()

    def loss(ids):
        x = F.embedding(ids, table).unflatten(-1, (2, -1)).transpose(1, 2)
        y = F.scaled_dot_product_attention(x, x, x, is_causal=True).transpose(1, 2).flatten(2)
        return F.cross_entropy((y @ table.T)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    compiled = torch.compile(loss, backend="dta", options=SMALL_CHUNKS)
    (expected,) = torch.autograd.grad(loss(IDS), table)
    (actual,) = torch.autograd.grad(compiled(IDS), table)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)
    assert dta_compile.last_plan(compiled).stats.compression > 1.5


def test_labels_out_of_bounds_are_named_with_what_to_do(model):
    """Also those of -100 that losses ignore, unless they are clamped and masked; a kernel would end a GPU's process."""

    def raw(labels):
        return model(IDS).log_softmax(-1).gather(-1, labels[..., None])

    def ignoring(labels):
        return torch.where(labels == -100, 0, raw(labels.clamp(min=0))[..., 0])

    check(model, lambda: ignoring(NEXT).sum())
    compiled = torch.compile(raw, backend="dta")
    right = NEXT.clamp(min=0)
    assert compiled(right).shape == (BATCH, TOKENS, 1)
    for number, advice in ((-100, "clamp"), (VOCABULARY, "tokenizer")):
        labels = right.clone()
        labels[2, 5] = number
        with pytest.raises(RuntimeContractError, match=f"labels gives {number} for token 5 of row 2") as raised:
            compiled(labels)
        assert "gather" in raised.value.where and advice in raised.value.hint
        assert raised.value.expected == f"numbers from 0 to {VOCABULARY - 1}"


def test_a_plan_notes_what_looks_like_forgotten_padding(model):
    compiled = torch.compile(lambda ids, mask=None: model(ids, mask), backend="dta", options=SMALL_CHUNKS)
    ids = torch.cat([IDS, torch.zeros(BATCH, 5, dtype=torch.int64)], 1)
    compiled(ids)
    (note,) = dta_compile.last_plan(compiled).estimates.notes
    assert (
        "end in runs of token 0" in note
        and "pass attention_mask" in note
        and note in " ".join(str(dta_compile.last_plan(compiled)).split())
    )
    compiled(IDS)
    assert dta_compile.last_plan(compiled).estimates.notes == []


@pytest.mark.parametrize("masked", ["product", "where", "selection"])
@pytest.mark.sample(1)
def test_logarithms_of_inner_values_are_finite_at_padding(masked):
    """A router's entropy and balance read its probabilities, which are valid at padding in eager mode, too."""
    torch._dynamo.reset()
    model, router = TinyLM(), nn.Linear(WIDTH, 8, bias=False).double()

    def function(ids, mask):
        hidden = model.hidden(ids, mask)
        probs = router(hidden).softmax(-1)
        terms, number = (probs * probs.log()).sum(-1), mask.sum()
        shares = (probs * mask[..., None]).sum((0, 1)) / number
        if masked == "product":
            entropy = (terms * mask).sum()
        else:
            entropy = torch.where(mask, terms, 0.0).sum() if masked == "where" else terms[mask].sum()
        return model.head(hidden), entropy / number, (shares * shares).sum()

    def step(run):
        logits, entropy, balance = run(ids, mask)
        loss = (logits.log_softmax(-1)[..., 0] * mask).sum() + entropy + balance
        return entropy, torch.autograd.grad(loss, [*model.parameters(), router.weight], allow_unused=True)

    ids = shared_ids(5, 12)
    mask = torch.arange(12) < torch.tensor([[12], [8], [12], [7], [10]])
    compiled = torch.compile(function, backend="dta", options=SMALL_CHUNKS)
    (entropy, grads), (expected, wanted) = step(compiled), step(function)
    torch.testing.assert_close(entropy, expected, rtol=1e-9, atol=1e-12)
    for mine, theirs in zip(grads, wanted, strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or torch.allclose(mine, theirs, rtol=1e-9, atol=1e-10)
    with torch.no_grad():
        torch.testing.assert_close(compiled(ids, mask)[1], expected.detach(), rtol=1e-9, atol=1e-12)
