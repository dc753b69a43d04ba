"""Models of transformers with recurrent layers, against the eager model on one sequence at a time.

In float32: most of them compute in it whatever their dtype is. What is exact is told by float64 without those casts.
"""

from __future__ import annotations

import inspect

import pytest
import torch

import dta_compile
from dta_compile.errors import RefusalError
from tests.support.helpers import (
    Measurement,
    assert_equal,
    errors,
    logits,
    logits_at_positions,
    make_batch,
    measure,
    random_loss,
    reference,
)
from tests.support.recurrent import FAMILIES, V, build, no_float32_islands

QUICK = ("qwen3_next", "mamba2", "recurrent_gemma")
ALL = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
SLOWLY = [pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
ROUNDING = 5e-6  # of what is as exact in eager mode
# Decays are added up over blocks, as fla's kernels do; Mamba-2 in eager mode adds them up for every pair of tokens.
DECAY_ROUNDING = 1e-4


def rollouts(seed=0, length=40):
    """Forks late and in the first tokens, inside of blocks and at their ends; a duplicate; no sharing."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(count):
        return torch.randint(1, V, (count,), generator=generator).tolist()

    first = tokens(length)
    fork = first[:25] + tokens(12)
    return [first, fork, fork[:30] + tokens(2), first[:2] + tokens(30), first[:16] + tokens(1), first[:20], first[:1]]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


def compiled_with(model, **options):
    return torch.compile(model, backend="dta", options={"chunk_size": 16, "codegen": "eager", **options})


def assert_rounds_alike(actual: Measurement, eager: Measurement, exact: Measurement) -> None:
    """Each error against `exact` at most twice that of eager mode, and some units of rounding."""
    ours, theirs = errors(actual, exact), errors(eager, exact)
    few = {name: DECAY_ROUNDING if name.endswith(("A_log", "dt_bias")) else ROUNDING for name in ours}
    worse = {name: (ours[name], theirs[name]) for name in ours if not ours[name] <= 2 * theirs[name] + few[name]}
    assert not worse, worse


def check(name, batch, forward, alone=logits, **options):
    """Through a compiled model by `forward`, and row by row by `alone`."""
    model, loss = build(name), random_loss(batch, V)
    compiled = compiled_with(model, **options)
    actual, eager = measure(compiled, model, batch, loss, forward), reference(model, batch, loss, alone)
    with no_float32_islands():
        exact = reference(model.double(), batch, loss, alone)
    assert_rounds_alike(actual, eager, exact)
    plan = dta_compile.last_plan(compiled)
    assert plan.stats.compression > 1.2
    return plan


@pytest.mark.parametrize("name", ALL)
@pytest.mark.sample(1)
def test_right_padding(name):
    check(name, make_batch(rollouts()), logits)


def takes_positions(name):
    return "position_ids" in inspect.signature(build(name).forward).parameters


@pytest.mark.parametrize("name", [name for name in SLOWLY if "recurrent_gemma" not in name.values])  # has no mask
def test_left_padding(name):
    check(name, make_batch(rollouts(), padding="left"), logits_at_positions if takes_positions(name) else logits)


@pytest.mark.parametrize("name", SLOWLY)
def test_no_padding(name):
    batch = make_batch(rollouts(seed=1)[:5], padding="none")
    check(name, batch, logits)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_next_experts", "falcon_h1", "mamba", "lfm2"])
def test_the_whole_first_call_is_checked_by_itself(name):
    plan = check(name, make_batch(rollouts()), logits, verify="first", chunk_size=7)
    assert plan.estimates.self_check


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_next", "mamba2"])
def test_inductor(name):
    check(name, make_batch(rollouts()), logits, codegen="inductor")


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_chosen_code(name):
    check(name, make_batch(rollouts()), logits, codegen="auto")


PACKED = ("qwen3_next", "qwen3_5", "olmo_hybrid", "lfm2", "bamba", "falcon_h1", "nemotron_h", "recurrent_gemma")


@pytest.mark.slow
@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("name", PACKED)
def test_packed_rows(name, told):
    """Sequences are told apart by position ids, and where models take them by what collators add."""
    sequences = rollouts()
    lengths = [len(sequence) for sequence in sequences]

    def packed(model, batch):
        ids = batch.ids[batch.valid][None]
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        more = {}
        if told:
            ends = torch.tensor([0, *lengths]).cumsum(0).int()
            numbers = torch.cat([torch.full((length,), number) for number, length in enumerate(lengths)])
            more = {"cu_seq_lens_q": ends, "seq_idx": numbers[None].int()}
        out = model(input_ids=ids, position_ids=positions, use_cache=False, **more).logits[0]
        return out.new_zeros(*batch.ids.shape, V).masked_scatter(batch.valid[..., None], out)

    check(name, make_batch(sequences), packed)


@pytest.mark.parametrize("name", ["lfm2", "mamba2", "qwen3_next"])
@pytest.mark.slow
def test_scoring(name):
    model, batch = build(name), make_batch(rollouts())
    compiled = compiled_with(model)
    with torch.no_grad():
        found = torch.where(batch.valid[..., None], logits(compiled, batch), 0.0)
        expected = torch.where(batch.valid[..., None], logits(model, batch), 0.0)
    assert dta_compile.last_plan(compiled).schedule.mode == "score"
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "name", ["recurrent_gemma", *(pytest.param(n, marks=pytest.mark.slow) for n in ("mamba2", "qwen3_next"))]
)
def test_a_cache_while_training_is_refused(name):
    model, batch = build(name), make_batch(rollouts())
    with pytest.raises(RefusalError, match="use_cache=False"):
        compiled_with(model)(input_ids=batch.ids, attention_mask=batch.mask, use_cache=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_next", "lfm2", "falcon_h1", "mamba2", "recurrent_gemma"])
def test_generation_is_that_of_eager_mode(name):
    model = build(name).eval()
    prompt = torch.tensor([rollouts()[0][:7], rollouts()[1][:7]])
    expected = model.generate(prompt, max_new_tokens=6, do_sample=False)
    model.forward = compiled_with(model.forward)
    assert torch.equal(model.generate(prompt, max_new_tokens=6, do_sample=False), expected)


@pytest.mark.slow
def test_one_compilation_serves_other_batches():
    torch._dynamo.utils.counters.clear()
    model = build("lfm2")
    compiled = compiled_with(model)
    for seed, length in ((0, 40), (3, 31), (4, 50)):
        batch = make_batch(rollouts(seed, length)[: 7 - seed])
        loss = random_loss(batch, V)
        actual, eager = measure(compiled, model, batch, loss), reference(model, batch, loss)
        assert_equal(actual, eager, 1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
