"""Log-probs and entropies over a large vocabulary: recognised in every spelling, exact, and no logits in memory."""

import importlib
import itertools

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from dta_compile.ops.lm_head import by_kernels
from dta_compile.ops.lm_head import operators as head_operators
from dta_compile.ops.lm_head.operators import (
    LINEAR_CROSS_BACKWARD,
    LINEAR_CROSS_BACKWARD_,
    LINEAR_LOG_PROB,
    LINEAR_LOG_PROB_BACKWARD,
    LINEAR_LOG_PROB_BACKWARD_,
)
from dta_compile.passes.memory.working_memory import working_memory
from dta_compile.passes.to_executable.emit import emit
from tests.support.chunk_graphs import Run, allocations, nodes_of, peak
from tests.support.helpers import (
    EXACT,
    FLOAT32_ISLANDS,
    assert_equal,
    assert_within_rounding,
    make_batch,
    measure,
    random_loss,
    reference,
    rollouts,
)
from tests.support.inside import inside
from tests.support.tiny import VOCABULARY, WIDTH, BareLM

PASS = importlib.import_module("dta_compile.passes.chunk.lm_head")
aten = torch.ops.aten


@pytest.fixture(autouse=True)
def small_vocabularies(monkeypatch):
    """Tiny vocabularies count as large, and take several blocks, the last one shorter."""
    torch._dynamo.reset()
    monkeypatch.setattr(PASS, "LEAST_VOCABULARY", VOCABULARY)
    for limit in ("BLOCK_COLUMNS", "FEWEST_COLUMNS"):
        monkeypatch.setattr(head_operators, limit, 7)


@pytest.fixture
def model():
    return BareLM()


def labelled_batch(vocabulary=VOCABULARY):
    batch = make_batch(rollouts(vocabulary, length=13))
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(0, vocabulary, batch.ids.shape, generator=generator)
    labels[:, 1:3] = labels[0, 1:3]
    return batch.with_extras(labels=labels)


BATCH = labelled_batch()


def compare(model, spelling, *, outputs=1, tolerance=EXACT, batch=BATCH, logits=None):
    """The compiled function gives eager's outputs and gradients; returns its program."""

    def function(ids, mask, labels):
        values = (logits or model)(ids, mask)
        return spelling(values, labels)

    def forward(call, batch):
        mask = None if batch.mask is None else batch.mask.bool()
        found = call(batch.ids, mask, batch.extras["labels"])
        return torch.stack(found, -1) if isinstance(found, tuple) else found[..., None]

    compiled = torch.compile(function, backend="dta", options={"chunk_size": 6})
    loss = random_loss(batch, outputs)
    actual = measure(compiled, model, batch, loss, forward)
    expected = reference(model, batch, loss, lambda _, row: forward(function, row))
    assert_equal(actual, expected, tolerance)
    return inside(compiled).newest.program


def heads_of(program):
    """The fused heads of a program's forward."""
    return [node for node in nodes_of(program, "forward") if node.target is LINEAR_LOG_PROB]


def assert_no_logits(program, heads=1, vocabulary=VOCABULARY):
    """The graphs hold the operators, nothing of the size of logits, and no gradient of the size of the weight."""
    backward = [node.target for node in nodes_of(program, "backward")]
    assert len(heads_of(program)) == backward.count(LINEAR_LOG_PROB_BACKWARD_) == heads
    assert LINEAR_LOG_PROB_BACKWARD not in backward
    for name in ("forward_only", "forward", "backward"):
        for node in nodes_of(program, name):
            shape = getattr(node.meta.get("val"), "shape", ())
            if node.op == "call_function" and any(isinstance(size, int) and size == vocabulary for size in shape):
                assert node.target is aten.t.default, f"{node} of shape {tuple(shape)}"


def gathered(log, labels):
    return log.gather(-1, labels[..., None])[..., 0]


def log_softmax(logits, labels):
    return gathered(logits.log_softmax(-1), labels)


def logsumexp(logits, labels):
    return gathered(logits, labels) - logits.logsumexp(-1)


def normalised(logits, labels):
    return gathered(logits - logits.logsumexp(-1, keepdim=True), labels)


def cross_entropy(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)


def channels_first(logits, labels):
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")


def ignored_labels(logits, labels):
    return cross_entropy(logits, labels.masked_fill(labels % 3 == 0, -100))


def nll(logits, labels):
    return F.nll_loss(logits.log_softmax(-1).transpose(1, 2), labels, reduction="none")


def entropy(logits, labels=None):
    log = logits.log_softmax(-1)
    return -(log.exp() * log).sum(-1)


def entropy_of_softmax(logits, labels):
    return (-logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)


def entropy_by_logsumexp(logits, labels):
    return logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)


def entropy_normalised(logits, labels):
    log = logits - logits.logsumexp(-1, keepdim=True)
    return -(F.softmax(log, -1) * log).sum(dim=-1, keepdim=True)[..., 0]


def both(logits, labels):
    log = logits.log_softmax(-1)
    return gathered(log, labels), -(log.exp() * log).sum(-1)


def z_loss(logits, labels):
    return cross_entropy(logits, labels) + 0.1 * logits.logsumexp(-1).pow(2)


def temperature(logits, labels):
    return log_softmax(logits / 0.7, labels), entropy(logits / 0.7)


def multiplied(logits, labels):
    return log_softmax(0.5 * logits * 1.5, labels)


HOT = torch.tensor(1.7, dtype=torch.float64)


def temperature_tensor(logits, labels):
    return both(logits / HOT / 0.8, labels)


def temperature_of_the_token(logits, labels):
    return both(logits * (1 + labels % 3)[..., None].double(), labels)


def two_temperatures(logits, labels):
    return log_softmax(logits / 0.7, labels), entropy(logits)


def entropy_without_gradient(logits, labels):
    with torch.no_grad():
        measured = entropy_by_logsumexp(logits, labels) + entropy(logits)
    return log_softmax(logits, labels), measured


def soft_cap(logits, labels):
    return both((logits / 30).tanh() * 30 / 0.8, labels)


def soft_cap_of_the_token(logits, labels):
    capped = 20 * (0.05 * logits).tanh()
    return both(capped * (labels % 3)[..., None].double(), labels)


def smoothed(logits, labels):
    mean = -logits.log_softmax(-1).mean(-1)
    by_torch = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none", label_smoothing=0.1)
    return by_torch, 0.9 * cross_entropy(logits, labels) + 0.1 * mean, logits.sum(-1) / VOCABULARY


def greedy_tokens(logits, labels):
    log, best = logits.log_softmax(-1), logits.argmax(-1)
    right = (best == labels) | (log.exp().argmax(dim=-1, keepdim=True)[..., 0] == (labels + 1) % VOCABULARY)
    return gathered(log, labels), right.double(), best.double()


def distilled(logits, labels):
    """Forward and reverse Kullback-Leibler divergence over a teacher's top entries."""
    log = logits.log_softmax(-1).gather(-1, (labels[..., None] + torch.arange(5)) % VOCABULARY)
    teacher = torch.linspace(-3, -1, 5).double().log_softmax(-1)
    student = log - log.logsumexp(-1, keepdim=True)
    return (teacher.exp() * (teacher - log)).sum(-1), (student.exp() * (student - teacher)).sum(-1)


def replayed(logits, labels):
    """Renormalised over the entries that a sampler kept (top-p, top-k), as ids of which -1 is no entry."""
    kept = (labels[..., None] + torch.arange(6)) % VOCABULARY
    kept = torch.where(torch.arange(6) > (labels % 5)[..., None], -1, kept)
    hot = logits / 0.7
    among = hot.gather(-1, kept.clamp(min=0)).masked_fill(kept < 0, -torch.inf)
    return gathered(hot, labels) - among.logsumexp(-1)


def largest(logits, labels):
    """Renormalised over a sampler's largest entries, hidden ones among them; the largest of all, in two spellings."""
    hot = logits / 0.7
    top, (best, index) = hot.topk(4, -1), hot.softmax(-1).max(-1)
    kept = (
        hot.log_softmax(-1)
        .topk(4, dim=-1)
        .values.masked_fill(torch.arange(4) > (labels % 3 + 1)[..., None], -torch.inf)
    )
    held = (top.indices == labels[..., None]).any(-1) | (index == labels)
    by_token = hot.transpose(1, 2).max(1, keepdim=True).values[:, 0]
    return gathered(hot, labels) - top.values.logsumexp(-1), kept.logsumexp(-1) * held.double(), best + by_token


def several_labels(logits, labels):
    log = logits.log_softmax(-1)
    pairs = log.gather(-1, torch.stack([labels, (labels + 1) % VOCABULARY], -1))
    return pairs[..., 0], pairs[..., 1], gathered(log, (labels + 2) % VOCABULARY), gathered(logits, labels)


SPELLINGS = [
    log_softmax, logsumexp, normalised, cross_entropy, channels_first, ignored_labels, nll, entropy, entropy_of_softmax,
    entropy_by_logsumexp, entropy_normalised, z_loss, multiplied,
]  # fmt: skip
SEVERAL = {
    both: 2, temperature: 2, temperature_tensor: 2, temperature_of_the_token: 2, two_temperatures: 2,
    entropy_without_gradient: 2, several_labels: 4, soft_cap: 2, soft_cap_of_the_token: 2, smoothed: 3,
    greedy_tokens: 3, distilled: 2, largest: 3, replayed: 1,
}  # fmt: skip


# The reading of logits is one for all that follows from them: a spelling that it does not know leaves all of them.
TOGETHER = {
    "log-probs": ([*SPELLINGS[:7], z_loss, several_labels], 1),
    "entropies": ([entropy, entropy_of_softmax, entropy_by_logsumexp, entropy_normalised, both], 1),
    "capped": ([soft_cap, soft_cap_of_the_token], 2),
    "further": ([smoothed, greedy_tokens, distilled], 1),
    "largest": ([largest, replayed], 1),
    "scaled": ([temperature, multiplied, temperature_tensor, temperature_of_the_token, two_temperatures], 5),
}


@pytest.mark.parametrize("name", TOGETHER)
@pytest.mark.sample(1)
def test_spellings_side_by_side(model, name):
    spellings, heads = TOGETHER[name]

    def side_by_side(logits, labels):
        found = [spelling(logits, labels) for spelling in spellings]
        return tuple(value for one in found for value in (one if isinstance(one, tuple) else (one,)))

    outputs = sum(SEVERAL.get(spelling, 1) for spelling in spellings)
    program = compare(model, side_by_side, outputs=outputs)
    assert_no_logits(program, heads)
    assert any(node.args[6][0] for node in heads_of(program)) == (name not in ("log-probs", "further", "largest"))


ALONE = {log_softmax, two_temperatures, entropy_without_gradient}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "spelling",
    [one if one in ALONE else pytest.param(one, marks=pytest.mark.slow) for one in (*SPELLINGS, *SEVERAL)],
    ids=lambda function: function.__name__,
)
def test_spellings(model, spelling):
    program = compare(model, spelling, outputs=SEVERAL.get(spelling, 1))
    assert_no_logits(program, heads=2 if spelling is two_temperatures else 1)
    without = {several_labels, smoothed, greedy_tokens, distilled, largest, replayed, *SPELLINGS}
    without -= {entropy, entropy_of_softmax, entropy_by_logsumexp, entropy_normalised}
    assert any(node.args[6][0] for node in heads_of(program)) == (spelling not in without)


def in_float32(logits, labels):
    return both(logits.float(), labels)


def only_log_prob_in_float32(logits, labels):
    return gathered(F.log_softmax(logits, -1, dtype=torch.float32), labels), entropy(logits).float()


@pytest.mark.sample(1)
@pytest.mark.parametrize("spelling", [in_float32, only_log_prob_in_float32])
def test_float32_logits_of_a_float64_model(spelling):
    model = BareLM(width=8)  # narrow, for the cut between trunk and head is where least crosses
    assert_no_logits(compare(model, spelling, outputs=2, tolerance=FLOAT32_ISLANDS))


def selective_log_softmax(logits, labels):
    return trl.selective_log_softmax(logits, labels, temperature=0.9)


@pytest.fixture
def trl_imported():
    global trl
    trl = pytest.importorskip("trl.trainer.utils")


@pytest.mark.filterwarnings("ignore:Dynamo detected a call")
def test_the_log_probs_of_trl(model, trl_imported):
    assert_no_logits(compare(model, selective_log_softmax))


def two_selections(logits, labels):
    return selective_log_softmax(logits, labels), selective_log_softmax(logits.float(), labels)


@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore:Dynamo detected a call")
@pytest.mark.parametrize(
    "spelling",
    [
        in_float32,
        both,
        two_selections,
        *(pytest.param(one, marks=pytest.mark.slow) for one in (temperature, only_log_prob_in_float32)),
    ],
)
@pytest.mark.parametrize("autocast", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_bfloat16_rounds_no_worse_than_eager(spelling, autocast, request):
    if spelling is two_selections:
        request.getfixturevalue("trl_imported")
    model, batch = BareLM(), BATCH
    model = model.to(torch.float32 if autocast else torch.bfloat16)

    def function(ids, mask, labels):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast and model.head.weight.dtype is torch.float32):
            return spelling(model(ids, mask), labels)

    def forward(call, batch):
        mask = None if batch.mask is None else batch.mask.bool()
        return torch.stack(call(batch.ids, mask, batch.extras["labels"]), -1)

    compiled, loss = torch.compile(function, backend="dta", options={"chunk_size": 6}), random_loss(batch, 2)
    actual = measure(compiled, model, batch, loss, forward)
    eager = reference(model, batch, loss, lambda _, row: forward(function, row))
    exact = reference(model.double(), batch, loss, lambda _, row: forward(function, row))
    assert_within_rounding(actual, eager, exact)
    assert_no_logits(inside(compiled).newest.program)


class Headed(nn.Module):
    """A trunk with another head."""

    def __init__(self, head):
        super().__init__()
        self.trunk, self.head = BareLM(), head
        del self.trunk.head

    def forward(self, ids, mask):
        return self.head(self.trunk.hidden(ids, mask))


def tied():
    model = Headed(nn.Linear(WIDTH, VOCABULARY, bias=False).double())
    model.head.weight = model.trunk.embedding.weight
    return model


def frozen_head():
    model = BareLM()
    model.head.requires_grad_(False)
    return model


def frozen_weight():
    model = BareLM()
    model.head.weight.requires_grad_(False)
    return model


def frozen_trunk():
    model = BareLM().requires_grad_(False)
    model.head.requires_grad_(True)
    return model


class TiedTransposed(nn.Module):
    """One weight `[H, V]`, of the embedding and of the head."""

    def __init__(self):
        super().__init__()
        self.trunk = BareLM()
        del self.trunk.head
        self.weight = nn.Parameter(self.trunk.embedding.weight.detach().t().clone())
        del self.trunk.embedding
        self.trunk.embedding = lambda ids: F.embedding(ids, self.weight.t())

    def forward(self, ids, mask):
        return self.trunk.hidden(ids, mask) @ self.weight


def test_a_transposed_weight_that_is_tied_gets_both_of_its_gradients():
    compare(TiedTransposed(), log_softmax)


class Transposed(nn.Module):
    """A weight `[H, V]`, and a bias that is added."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.weight, self.bias = (
            nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))
            for shape in ((WIDTH, VOCABULARY), (VOCABULARY,))
        )

    def forward(self, x):
        return x @ self.weight + self.bias


@pytest.mark.parametrize("build", [tied, frozen_head, frozen_weight, frozen_trunk, lambda: Headed(Transposed())])
@pytest.mark.sample(1)
def test_heads(build):
    program = compare(build(), both, outputs=2)
    if build is frozen_head:
        (head,) = [node for node in nodes_of(program, "backward") if node.target is LINEAR_LOG_PROB_BACKWARD]
        assert head.args[-1] == [True, False, False]
        return
    assert_no_logits(program)
    (head,) = [node for node in nodes_of(program, "backward") if node.target is LINEAR_LOG_PROB_BACKWARD_]
    *_, wants_hidden, weight, bias = head.args
    assert wants_hidden == (build is not frozen_trunk)
    assert (weight is None) == (build is frozen_weight) and (bias is None) == (build is tied)


class LowRank(nn.Module):
    """A head whose weight is computed from parameters, as adapters do."""

    def __init__(self):
        super().__init__()
        self.base, self.up = nn.Linear(WIDTH, VOCABULARY).double(), nn.Linear(3, VOCABULARY, bias=False).double()
        self.down = nn.Linear(WIDTH, 3, bias=False).double()

    def forward(self, x):
        return F.linear(x, self.base.weight + self.up.weight @ self.down.weight, self.base.bias)


class Summed(nn.Module):
    """A head whose weight is the sum of two, which get the same gradient."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Linear(WIDTH, VOCABULARY, bias=False).double() for _ in range(2))

    def forward(self, x):
        return F.linear(x, self.first.weight + self.second.weight)


@pytest.mark.parametrize("head", [LowRank, Summed])
def test_a_weight_that_is_computed(head):
    program = compare(Headed(head()), both, outputs=2)
    assert len(heads_of(program)) == 1
    assert [node for node in nodes_of(program, "backward") if node.target is LINEAR_LOG_PROB_BACKWARD]


class WithTemperature(BareLM):
    """A temperature that is trained."""

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.3, dtype=torch.float64))

    def forward(self, ids, mask=None):
        return super().forward(ids, mask) / self.temperature


LEFT_ALONE = {
    "smallest entry": (BareLM, lambda z, y: (log_softmax(z, y), (-z.log_softmax(-1)).argmax(-1).double())),
    "largest logits": (BareLM, lambda z, y: (log_softmax(z, y), z.sort(-1).values[..., -2])),
    "a soft cap twice": (BareLM, lambda z, y: both(((z / 30).tanh() * 30).tanh(), y)),
    "mean of probabilities": (BareLM, lambda z, y: log_softmax(z, y) - 0.1 * z.softmax(-1).mean(-1)),
    "second moment": (BareLM, lambda z, y: (z.log_softmax(-1).exp() * z.log_softmax(-1).pow(2)).sum(-1)),
    "collision": (BareLM, lambda z, y: z.softmax(-1).pow(2).sum(-1)),
    "one factor detached": (BareLM, lambda z, y: (z.softmax(-1) * z.log_softmax(-1).detach()).sum(-1)),
    "two temperatures in one": (BareLM, lambda z, y: ((z / 2).softmax(-1) * z.log_softmax(-1)).sum(-1)),
    "a part of the vocabulary": (BareLM, lambda z, y: log_softmax(z[..., :20], y % 20)),
    "a bias per entry after scaling": (BareLM, lambda z, y: log_softmax(z / 2 + torch.arange(VOCABULARY) / 9, y)),
    "a weight per entry": (BareLM, lambda z, y: log_softmax(z * torch.linspace(0.5, 1, VOCABULARY).double(), y)),
    "a trained temperature": (WithTemperature, lambda z, y: log_softmax(z, y)),
    "labels from the logits": (BareLM, lambda z, y: log_softmax(z, (y + (z.logsumexp(-1) > 3.5)) % VOCABULARY)),
    "another normaliser": (BareLM, lambda z, y: gathered(z - (z / 2).logsumexp(-1, keepdim=True), y)),
    "a scaled normaliser": (BareLM, lambda z, y: gathered(z - 2 * z.logsumexp(-1, keepdim=True), y)),
}  # fmt: skip


ANOTHER_READER = (
    *("smallest entry", "largest logits", "a soft cap twice", "a part of the vocabulary", "mean of probabilities"),
)
QUICK = LEFT_ALONE.keys() - {*ANOTHER_READER[1:], "second moment"}


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in LEFT_ALONE]
)
@pytest.mark.sample(2)
def test_other_uses_of_the_logits_are_left_alone(name):
    build, spelling = LEFT_ALONE[name]
    two = name in ("smallest entry", "largest logits", "a soft cap twice")
    assert not heads_of(compare(build(), spelling, outputs=2 if two else 1))


class WithLateBias(BareLM):
    """A trained bias that is added to logits without a gradient, or to narrower ones."""

    def __init__(self, is_wider):
        super().__init__()
        self.bias = nn.Parameter(1e3 + torch.linspace(0, 3, VOCABULARY).double().sin())
        self.is_wider = is_wider

    def forward(self, ids, mask=None):
        hidden, weight = self.hidden(ids, mask), self.head.weight
        if self.is_wider:
            return F.linear(hidden.float(), weight.float()).double() + self.bias
        return F.linear(hidden, weight).detach() + self.bias + 0 * hidden.sum(-1, keepdim=True)


@pytest.mark.parametrize("is_wider", [False, True])
def test_a_bias_behind_a_cast_or_a_detached_value_is_none_of_the_layer(is_wider):
    compare(WithLateBias(is_wider), log_softmax, tolerance=1e-6 if is_wider else EXACT)


def test_entries_that_rounding_makes_equal_are_as_large_as_each_other():
    model = BareLM()
    with torch.no_grad():
        pairs = model.head.weight[: VOCABULARY // 2 * 2]
        pairs[1::2] = pairs[::2] * (1 + 1e-6)

    def largest(z, y):
        rounded = (z / 2).bfloat16().softmax(-1)
        return z.logsumexp(-1), z.bfloat16().argmax(-1).double(), rounded.max(-1).indices.double()

    compare(model, largest, outputs=3)


def test_a_sum_of_entries_that_are_cut_off_is_left_alone():
    def cut_off(z, y):
        return log_softmax(z, y), (9 * z.detach()).sum(-1, dtype=torch.int64).double()

    assert not heads_of(compare(BareLM(), cut_off, outputs=2))


def test_small_vocabularies_are_left_alone(model, monkeypatch):
    monkeypatch.setattr(PASS, "LEAST_VOCABULARY", VOCABULARY + 1)
    assert not heads_of(compare(model, both, outputs=2))


def test_logits_that_are_returned_too(model):
    def function(ids, mask, labels):
        logits = model(ids, mask)
        return log_softmax(logits, labels), logits

    compiled = torch.compile(function, backend="dta")
    log_probs, logits = compiled(BATCH.ids, BATCH.valid, BATCH.extras["labels"])
    expected = log_softmax(logits, BATCH.extras["labels"])
    torch.testing.assert_close(log_probs[BATCH.valid], expected[BATCH.valid])
    assert not heads_of(inside(compiled).newest.program)


class WithTeacher(BareLM):
    """A student and a teacher, both trained, over the same tokens."""

    def __init__(self):
        super().__init__()
        self.teacher = BareLM(seed=9)

    def forward(self, ids, mask=None):
        return super().forward(ids, mask) / 0.9, 4 * (self.teacher(ids, mask) / 4).tanh()


def divergences(logits, labels):
    """Kullback-Leibler divergences both ways and over the teacher's largest entries, and cross entropies, one of them
    without a gradient of the teacher."""
    student, teacher = (values.log_softmax(-1) for values in logits)
    forward = F.kl_div(student, teacher, log_target=True, reduction="none").sum(-1)
    reverse = -2 * (student.exp() * (teacher - student)).sum(-1, keepdim=True)[..., 0]
    target = logits[1].detach().softmax(-1).transpose(1, 2)
    soft = F.cross_entropy(logits[0].transpose(1, 2), target, reduction="none")
    top = teacher.topk(4, -1)
    largest = (top.values.exp() * (top.values - student.gather(-1, top.indices))).sum(-1)
    return forward, reverse, soft, -(student.exp() * teacher).sum(-1), largest


def test_divergences_between_two_models_have_no_logits():
    program = compare(WithTeacher(), divergences, outputs=5)
    assert_no_logits(program, heads=2)
    backward = [node.target for node in nodes_of(program, "backward")]
    assert backward.count(LINEAR_CROSS_BACKWARD_) == 7 and LINEAR_CROSS_BACKWARD not in backward


class WithSecondHead(BareLM):
    """Two heads over the same hidden values, the second one scaled by a statistic of the first."""

    def __init__(self):
        super().__init__()
        self.second = nn.Linear(WIDTH, VOCABULARY, bias=False).double()

    def forward(self, ids, mask=None):
        hidden = self.hidden(ids, mask)
        first = self.head(hidden)
        return first, self.second(hidden) / first.logsumexp(-1, keepdim=True)


def at_each_others_best(logits, labels):
    first, second = logits
    return gathered(second.log_softmax(-1), first.argmax(-1)), gathered(first.log_softmax(-1), labels)


def test_heads_that_read_results_of_each_other():
    model = WithSecondHead().requires_grad_(False)  # a scale with a gradient is not fused
    model.second.requires_grad_(True)
    assert len(heads_of(compare(model, at_each_others_best, outputs=2))) == 2


def test_logits_that_are_divided_by_their_largest(model):
    def function(ids, mask, labels):
        logits = model(ids, mask)
        return (logits / logits.max(-1, keepdim=True).values).topk(3, -1).values

    compiled = torch.compile(function, backend="dta", options={"chunk_size": 6, "codegen": "eager"})
    arguments = BATCH.ids, BATCH.valid, BATCH.extras["labels"]
    with torch.no_grad():
        found, expected = (call(*arguments)[BATCH.valid] for call in (compiled, function))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_scoring(model):
    def function(ids, mask, labels):
        return both(model(ids, mask), labels)

    compiled = torch.compile(function, backend="dta", options={"chunk_size": 6})
    arguments = BATCH.ids, BATCH.valid, BATCH.extras["labels"]
    with torch.no_grad():
        for mine, theirs in zip(compiled(*arguments), function(*arguments), strict=True):
            torch.testing.assert_close(mine[BATCH.valid], theirs[BATCH.valid], rtol=1e-9, atol=1e-12)
    program = inside(compiled).newest.program
    assert len(heads_of(program)) == 1 and not program.joint.differentiated


@pytest.mark.slow
def test_the_labels_loss_of_transformers(monkeypatch):
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config).double()
    labels = BATCH.ids.masked_fill(~BATCH.valid, -100)

    def loss(ids, mask, labels):
        return model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss

    compiled = torch.compile(loss, backend="dta", options={"chunk_size": 6})
    found = []
    for call in (loss, compiled):
        value = call(BATCH.ids, BATCH.mask, labels)
        found.append([value.detach(), *torch.autograd.grad(value, list(model.parameters()))])
    for theirs, mine in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=FLOAT32_ISLANDS, atol=float(theirs.abs().max()) * FLOAT32_ISLANDS)
    assert_no_logits(inside(compiled).newest.program)


def test_the_backward_of_some_head_rows_is_that_of_all_with_zero_gradients_elsewhere(model):
    program = compare(model, both, outputs=2)
    run = Run(program, 7, 5)
    assert program.joint.head_rows_separable
    for rows in (torch.tensor(one, dtype=torch.int64) for one in ([], [2], [4, 0, 3])):
        some = run.backward(program.joint.of_head_rows(run.kept, rows), [tangent[rows] for tangent in run.tangents])
        masked = [torch.zeros_like(tangent).index_copy(0, rows, tangent[rows]) for tangent in run.tangents]
        for mine, expected in zip(some, run.backward(run.kept, masked), strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-12)


def test_logits_of_masked_entries_are_minus_infinity():
    class Masked(BareLM):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False).double()
            self.register_buffer("allowed", torch.zeros(VOCABULARY, dtype=torch.float64))
            self.allowed[:20] = -torch.inf

        def forward(self, ids, mask=None):
            return super().forward(ids, mask) + self.allowed

    def allowed_labels(logits, labels):
        return log_softmax(logits, 20 + labels % 11), logits.logsumexp(-1)

    assert_no_logits(compare(Masked(), allowed_labels, outputs=2))


# Memory.

LARGE = 2000


@pytest.fixture(scope="module", params=[pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16], ids=str)
def large(request):
    torch._dynamo.reset()
    config = transformers.Qwen3Config(
        vocab_size=LARGE, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, pad_token_id=0,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PASS, "LEAST_VOCABULARY", LARGE)

        def function(ids, labels):
            return both(model(ids, use_cache=False).logits.float(), labels)

        compiled = torch.compile(function, backend="dta")
        sum(value.sum() for value in compiled(*torch.randint(1, LARGE, (2, 3, 9)))).backward()
    return inside(compiled).newest.program


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["forward_only", "forward", "backward"])
@pytest.mark.parametrize(("tokens", "head_rows"), [pytest.param(40, 200, marks=pytest.mark.slow), (150, 60)])
def test_nothing_of_the_size_of_logits_or_weight_is_allocated(large, monkeypatch, name, tokens, head_rows):
    monkeypatch.setattr(head_operators, "BLOCK_COLUMNS", 128)
    sizes, _ = allocations(large, name, tokens, head_rows)
    assert max(sizes) < LARGE * min(64, head_rows) * large.attention[0].dtype.itemsize


def measure_again(program):
    working_memory(program)
    program.filled -= emit.fills
    emit(program)


@pytest.mark.parametrize("name", ["forward_only", "forward", "backward"])
@pytest.mark.parametrize(("tokens", "head_rows"), [(40, 200), (150, 60)])
def test_the_working_memory_is_what_a_profiler_counts(large, monkeypatch, name, tokens, head_rows):
    for limit in ("BLOCK_COLUMNS", "FEWEST_COLUMNS"):
        monkeypatch.setattr(head_operators, limit, 128)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # the interpreter allocates, where a GPU does not
    measure_again(large)
    assert all(large.joint.working.values()) and getattr(large.joint, f"run_{name}")  # not while the profiler counts
    sizes, held = allocations(large, name, tokens, head_rows)
    measured = held + max(itertools.accumulate(sizes, initial=0))
    assert peak(large.joint.working[name], tokens, head_rows) == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize("name", ["forward_only", "forward", "backward"])
def test_kernels_need_the_products_of_a_block_alone(large, monkeypatch, name):
    monkeypatch.setattr(head_operators, "BLOCK_COLUMNS", 512)
    peaks, rows, narrow = [], 10_000, large.attention[0].dtype.itemsize
    for has_kernels in (False, True):
        monkeypatch.setattr(by_kernels, "fits", lambda head, dtype, found=has_kernels: found)
        measure_again(large)
        peaks.append(peak(large.joint.working[name], 1, rows))
    saved = rows * 512 * (2 * 4 - narrow)  # for an entropy torch's operators keep two numbers of a logit
    assert 0.5 * saved < peaks[0] - peaks[1] <= saved
