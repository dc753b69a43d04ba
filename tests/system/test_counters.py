"""Buffers that a model writes to have eager's numbers: every token counts as often as the batch has it."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from dta_compile.errors import RefusalError, RuntimeContractError
from tests.support.helpers import make_batch
from tests.support.inside import inside
from tests.support.mixtures import EXPERTS, DeepSeek, Mixture, Model, Once, Split, one_by_one
from tests.support.tiny import SMALL_CHUNKS, VOCABULARY, BareLM, assert_same, gradients, shared_ids


class Counted(DeepSeek):
    """Balanced without a loss: sigmoid scores, a bias for the choice, counts that its update needs."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.register_buffer("tokens_per_expert", torch.zeros(EXPERTS))
        self.register_buffer("bias", torch.tensor([0.0, 0.1, -0.1]))

    def route(self, x):
        scores = self.router(x).sigmoid()
        chosen = (scores + self.bias).topk(self.k, -1).indices
        weights = scores.gather(-1, chosen)
        with torch.no_grad():
            self.tokens_per_expert.add_(torch.histc(chosen.float(), bins=EXPERTS, min=0, max=EXPERTS))
        return weights / weights.sum(-1, keepdim=True), chosen


class CountedAndSorted(Counted):
    mix, grouped, before = Split.mix, Split.grouped, False


class Average(Counted):
    """An average over steps of the load and of scores, which have a gradient elsewhere."""

    def route(self, x):
        weights, chosen = Mixture.route(self, x)
        load, scores = F.one_hot(chosen, EXPERTS).sum((0, 1)), self.router(x).softmax(-1)
        with torch.no_grad():
            self.tokens_per_expert.mul_(0.9).add_(load, alpha=0.1)
            self.bias.lerp_(scores.mean(0), 0.1)
        return weights * (1 + scores.gather(-1, chosen)), chosen


class Updated(Counted):
    """The bias that a step reads is updated in it, for the next one."""

    def route(self, x):
        weights, chosen = super().route(x)
        with torch.no_grad():
            self.bias += 0.01 * (self.tokens_per_expert.mean() - self.tokens_per_expert).sign()
        return weights, chosen


def run(function, model, calls):
    """Two steps whose gradients add up, and a call without: outputs, buffers after each of them, gradients."""
    found = []
    for number, arguments in enumerate(calls):
        with torch.set_grad_enabled(number < 2):
            out = function(*arguments)
        if number < 2:
            (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
        found += [out.detach(), *(buffer.clone() for buffer in model.buffers())]
    return found, gradients(model)


def assert_counts(model, calls, wrap=lambda function: function, **options):
    torch._dynamo.reset()
    eager = copy.deepcopy(model)
    compiled = torch.compile(wrap(model), backend="dta", options={**SMALL_CHUNKS, **options})
    assert_same(run(compiled, model, calls), run(wrap(eager), eager, calls))
    return inside(compiled)


def three_calls():
    first = shared_ids(4, 7)
    return [(first,), (first.flip(0)[:3, :5],), (first,)]


@pytest.mark.parametrize("mixture", one_by_one([Counted, CountedAndSorted, Average, Updated], (Counted,)))
def test_written_as(mixture):
    assert_counts(Once(mixture), three_calls())


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"verify": "always"}, {"verify": "first"}, {"sweep": "stages"}, {"sweep": "chunks"}]
)
def test_options(options):
    assert_counts(Once(Counted), three_calls(), **options)


@pytest.mark.slow
def test_every_layer_behind_the_last_attention_as_well():
    assert_counts(Model(Counted, layers=2), three_calls())


@pytest.mark.slow
def test_a_program_from_a_file(tmp_path):
    for _ in range(2):
        assert_counts(Once(Counted), three_calls(), cache_dir=str(tmp_path))


@pytest.mark.slow
def test_two_calls_before_one_backward():
    torch._dynamo.reset()
    found = []
    for compiles in (True, False):
        model = Once(Counted)
        function = torch.compile(model, backend="dta", options=SMALL_CHUNKS) if compiles else model
        outputs = [function(ids) for ids in (shared_ids(4, 7), shared_ids(4, 7).flip(0))]
        sum(out.square().mean() for out in outputs).backward()
        found.append(([out.detach() for out in outputs] + [*model.buffers()], gradients(model)))
    assert_same(*found)


class Steps(BareLM):
    """Counts its calls, and the tokens of each."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("seen", torch.zeros(VOCABULARY))

    def forward(self, ids):
        self.calls += 1
        self.seen.index_add_(0, ids.flatten(), torch.ones(ids.numel(), dtype=self.seen.dtype))
        return super().forward(ids)


@pytest.mark.slow
def test_counts_of_the_data_alone():
    assert_counts(Steps().double(), three_calls())


# ---- Padding, which is not computed


class OfRealTokens(Counted):
    """Counts what a mask selects."""

    real = None

    def route(self, x):
        weights, chosen = Mixture.route(self, x)
        with torch.no_grad():
            self.tokens_per_expert += (F.one_hot(chosen, EXPERTS) * self.real.flatten()[:, None, None]).sum((0, 1))
        return weights, chosen


def padded():
    sequences = [row[: 7 - i] for i, row in enumerate((shared_ids(4, 7) % (VOCABULARY - 1) + 1).tolist())]
    return make_batch(sequences, "right")


@pytest.mark.slow
def test_padding_that_is_masked():
    batch = padded()

    def wrap(model):
        def function(ids, mask):
            model.mixtures[0].real = mask
            return torch.where(mask.bool()[..., None], model(ids, mask), 0)

        return function

    assert_counts(Once(OfRealTokens), [(batch.ids, batch.mask)] * 3, wrap)


class OfRareNumbers(Counted):
    """Counts only numbers that hardly any token has."""

    def route(self, x):
        with torch.no_grad():
            self.tokens_per_expert += (self.router(x) - 1e4).relu().sum(0)
        return Mixture.route(self, x)


@pytest.mark.slow
def test_padding_that_counts_is_refused():
    torch._dynamo.reset()
    model, batch, whole = Once(OfRareNumbers), padded(), shared_ids(4, 7)
    compiled = torch.compile(model, backend="dta", options={**SMALL_CHUNKS, "verify": "off"})
    compiled(whole, torch.ones_like(whole))
    before = model.mixtures[0].tokens_per_expert.clone()
    with pytest.raises(RuntimeContractError, match="tokens_per_expert may depend on padding"):
        compiled(batch.ids, batch.mask)
    assert torch.equal(before, model.mixtures[0].tokens_per_expert)


# ---- What is refused


class Checkpointed(Counted):
    """Counts once more in the backward, in eager mode."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Followed(Counted):
    """A buffer that autograd follows from then on."""

    def route(self, x):
        weights, chosen = Mixture.route(self, x)
        self.bias += weights.mean()
        return weights, chosen


@pytest.mark.sample(1)
@pytest.mark.parametrize(("mixture", "message"), [(Checkpointed, "checkpoint|graph break"), (Followed, "writes to")])
def test_refused(mixture, message):
    torch._dynamo.reset()
    with pytest.raises(RefusalError, match=message):
        torch.compile(Once(mixture), backend="dta", options=SMALL_CHUNKS)(shared_ids(4, 7))


@pytest.mark.slow
def test_memory_in_common_is_refused():
    torch._dynamo.reset()
    model, whole = Model(Counted, layers=2), torch.zeros(2, EXPERTS, dtype=torch.double)
    for mixture, part in zip(model.mixtures, whole, strict=True):
        mixture.tokens_per_expert = part
    with pytest.raises(RuntimeContractError, match="memory in common"):
        torch.compile(model, backend="dta", options=SMALL_CHUNKS)(shared_ids(4, 7))
