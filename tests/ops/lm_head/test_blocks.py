"""Log-probs of a head, block by block of the vocabulary, against the dense formula."""

import pytest
import torch
import torch.nn.functional as F

from dta_compile.ops.lm_head import operators as head_operators
from dta_compile.ops.lm_head.blocks import linear_log_prob
from dta_compile.ops.lm_head.operators import LINEAR_LOG_PROB, LINEAR_TOP
from tests.support.tiny import VOCABULARY


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """A tiny vocabulary takes several blocks, the last one shorter."""
    for limit in ("BLOCK_COLUMNS", "FEWEST_COLUMNS"):
        monkeypatch.setattr(head_operators, limit, 7)


LIMITS = head_operators.BLOCK_COLUMNS, head_operators.FEWEST_COLUMNS


@pytest.mark.parametrize("rows", [0, 1, 2047, 2049, 4090, 8189, 10**6])
def test_blocks_of_logits_are_aligned_and_bounded(rows, monkeypatch):
    """On a GPU matrix products over rows of 4,097 logits take slow kernels, for rows that are not aligned."""
    for limit, value in zip(("BLOCK_COLUMNS", "FEWEST_COLUMNS"), LIMITS, strict=True):
        monkeypatch.setattr(head_operators, limit, value)
    columns = head_operators.block_columns(rows, 151_936)
    assert columns % 256 == 0 and (columns == 256 or rows * columns <= head_operators.BLOCK_LOGITS)
    assert head_operators.block_columns(rows, 100) == 100


def dense(hidden, weight, bias, temperature, labels, outer=None):
    logits = F.linear(hidden, weight, bias)
    logits = logits if temperature is None else logits / temperature
    logits = logits if outer is None else logits.tanh() / outer
    log = logits.log_softmax(-1)
    entropy = -(log.exp() * log).sum(-1)
    return log.gather(1, labels), logits.gather(1, labels), logits.logsumexp(-1), entropy, logits.sum(-1)


def blockwise(hidden, weight, bias, temperature, labels, outer=None):
    operands = (hidden, weight, bias, temperature, labels, outer)
    log_prob, logit, log_sum, mean, largest, total, best = LINEAR_LOG_PROB(*operands, [True] * 3, torch.float64)
    if best.numel():
        logits = dense(hidden, weight, bias, temperature, torch.arange(len(weight)).expand(len(hidden), -1), outer)[1]
        assert logits.isnan().any() or torch.equal(best, logits.argmax(-1))
        top = LINEAR_TOP(*operands, 9, torch.float64)  # more than a block has
        assert logits.isnan().any() or torch.equal(logits.gather(1, top), logits.topk(9, 1).values)
        equal = LINEAR_TOP(torch.zeros_like(hidden), weight, None, None, labels, None, 1, torch.float64)
        assert not equal.any()  # the first, as `max` has it
    return log_prob, logit, largest + log_sum, log_sum - mean, total + len(weight) * largest


@pytest.mark.parametrize("rows", [0, 1, 9])
@pytest.mark.parametrize("scale", [None, (), (1,)])
@pytest.mark.parametrize("capped", [False, True])
@pytest.mark.parametrize("outputs", [(0,), (1,), (2,), (3,), (4,), (0, 1, 2, 3, 4)])
def test_the_operator_is_the_dense_formula(rows, scale, capped, outputs):
    generator = torch.Generator().manual_seed(1)

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    hidden, weight, bias = random(rows, 5), 3 * random(VOCABULARY, 5), random(VOCABULARY)
    temperature = None if scale is None else 0.5 + random(*([rows, 1] if scale else [])).abs()
    outer = None if not capped else 0.2 * (1 if scale is None else 0.5 + random(*([rows, 1] if scale else [])).abs())
    outer = torch.tensor(outer, dtype=torch.float64) if isinstance(outer, float) else outer
    labels = torch.randint(0, VOCABULARY, (rows, 3), generator=generator)
    trained = [value.requires_grad_() for value in (hidden, weight, bias)]
    found = []
    for function in (dense, blockwise):
        results = function(hidden, weight, bias, temperature, labels, outer)
        chosen = [results[i] for i in outputs]
        tangents = [torch.linspace(-1, 2, value.numel(), dtype=torch.float64).view(value.shape) for value in chosen]
        found.append([*results, *torch.autograd.grad(chosen, trained, tangents)])
    for theirs, mine in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-11)


def test_the_operator_is_well_formed():
    hidden, weight = torch.randn(4, 5, requires_grad=True), torch.randn(VOCABULARY, 5, requires_grad=True)
    arguments = (hidden, weight, None, None, torch.tensor([[1], [30], [6], [7]]), torch.tensor(0.1))
    torch.library.opcheck(LINEAR_LOG_PROB, (*arguments, [True, True, False], torch.float32))
    torch.library.opcheck(LINEAR_TOP, (*arguments, 3, torch.float32))


def test_extreme_logits():
    """Logits far apart, largest in the first block or in the last: nothing overflows."""
    hidden = torch.tensor([[1.0], [-1.0], [0.0]], dtype=torch.float64)
    weight = torch.linspace(-4000, 4000, VOCABULARY, dtype=torch.float64)[:, None]
    labels = torch.tensor([[0], [3], [VOCABULARY - 1]])
    expected = dense(hidden, weight, None, None, labels)
    found = blockwise(hidden, weight, None, None, labels)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


INFINITE = {
    "the first block": (slice(0, 7), -torch.inf),
    "the first blocks": (slice(0, 16), -torch.inf),
    "the last blocks": (slice(12, None), -torch.inf),
    "every second": (slice(0, None, 2), -torch.inf),
    "the first block, almost": (slice(0, 7), -1e308),
    "all": (slice(None), -torch.inf),
    "one of the first block": (slice(3, 4), torch.inf),
    "one of the last block": (slice(30, 31), torch.inf),
}


@pytest.mark.parametrize("name", INFINITE)
@pytest.mark.parametrize("temperature", [None, 0.7])
def test_infinite_logits(name, temperature):
    """Log-probs and logsumexps as eager has them, gradients too where it has any; entropies are no numbers in eager."""
    entries, number = INFINITE[name]
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(n, 5, generator=generator, dtype=torch.float64) for n in (4, VOCABULARY))
    bias = torch.randn(VOCABULARY, generator=generator, dtype=torch.float64)
    bias[entries] = number
    temperature = None if temperature is None else torch.tensor(temperature, dtype=torch.float64)
    labels = torch.tensor([[8, 25], [21, 11], [17, 9], [11, 27]])
    trained = [hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
    for outputs in ((0,), (2,), (0, 1, 2)):
        found = []
        for function in (dense, blockwise):
            chosen = [function(hidden, weight, bias, temperature, labels)[i] for i in outputs]
            tangents = [torch.linspace(-1, 2, value.numel(), dtype=torch.float64).view(value.shape) for value in chosen]
            chosen += torch.autograd.grad(chosen, trained, tangents) if number < 0 else ()
            found.append(chosen)
        for theirs, mine in zip(*found, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-11, equal_nan=True)
    entropies = [function(hidden, weight, bias, temperature, labels)[3] for function in (dense, blockwise)]
    torch.testing.assert_close(*entropies, rtol=1e-10, atol=1e-11, equal_nan=True)
    assert bool(entropies[0].isnan().all()) == (abs(number) == torch.inf)


@pytest.mark.parametrize("label", [-100, VOCABULARY])
def test_labels_outside_of_the_vocabulary_are_an_error_as_in_eager(label):
    hidden, weight = torch.randn(1, 5), torch.randn(VOCABULARY, 5)
    with pytest.raises(RuntimeError, match="outside of the vocabulary"):
        linear_log_prob(hidden, weight, None, None, torch.tensor([[label]]), None, [False] * 3, torch.float32)
