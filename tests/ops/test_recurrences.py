"""Recurrent token mixers over forests, against one token after the other in float64."""

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dta_compile
from dta_compile.ops.recurrences import (
    linear_attention,
    linear_recurrence,
    selective_scan,
    short_convolution,
    token_shift,
)
from dta_compile.ops.recurrences.blocks import Blocks, Runs, choose_size
from dta_compile.ops.recurrences.operators import RECURRENCES
from dta_compile.ops.recurrences.short_convolution import Ancestors
from dta_compile.plan import Segment
from tests.support.forests import draw_forest, segment

HEADS, KEYS, VALUES = 2, 3, 5
CHANNELS, STATES = 5, 3


def tokens_before(forest):
    """Of each token the one above it, -1 for the initial state."""
    for one in forest:
        parent = forest[one.parent]
        yield parent.first + one.depth - parent.depth - 1 if one.parent >= 0 else -1
        yield from range(one.first, one.last - 1)


def token_by_token(forest, kept, initial, step):
    """Outputs and kept states of `step(token, state) -> (output, state)`."""
    outs, states = [], []
    for token, before in enumerate(tokens_before(forest)):
        out, state = step(token, initial if before < 0 else states[before])
        outs.append(out)
        states.append(state)
    wanted = torch.stack([states[number - 1] for number in kept]) if kept else initial[None][:0]
    return torch.stack(outs), wanted


def delta_rule(query, key, value, decay, beta, scale, initial, forest, kept):
    query, key = (one.repeat_interleave(value.shape[1] // one.shape[1], 1) for one in (query, key))

    def step(t, state):
        state = state * decay[t].reshape(value.shape[1], -1, 1).exp()
        read = torch.einsum("hk,hkv->hv", key[t], state)
        update = value[t] if beta is None else beta[t][:, None] * (value[t] - read)
        state = state + key[t][..., None] * update[:, None]
        return scale * torch.einsum("hk,hkv->hv", query[t], state), state

    return token_by_token(forest, kept, initial, step)


def scan(x, dt, A, B, C, initial, forest, kept):
    def step(t, state):
        state = (dt[t][:, None] * A).exp() * state + (dt[t] * x[t])[:, None] * B[t]
        return state @ C[t], state

    return token_by_token(forest, kept, initial, step)


def recurrence(x, factor, initial, forest, kept):
    def step(t, state):
        state = factor[t] * state + x[t]
        return state, state

    return token_by_token(forest, kept, initial, step)


def convolution(x, weight, initial, forest, kept):
    def step(t, state):
        rows = torch.cat([state, x[t][None]])
        return (rows * weight.t()).sum(0), rows[1:]

    return token_by_token(forest, kept, initial, step)


def normal(*size, dtype=torch.float64):
    return torch.randn(size, dtype=dtype, requires_grad=True)


def uniform(*size, scale=1.0):
    return (scale * torch.rand(size, dtype=torch.float64)).requires_grad_()


def attention_operands(tokens, groups=1, decay="head", has_beta=True, strength=1.0):
    sizes = {"head": (tokens, HEADS), "channel": (tokens, HEADS, KEYS)}
    return (
        normal(tokens, groups, KEYS),
        normal(tokens, groups, KEYS),
        normal(tokens, HEADS, VALUES),
        uniform(*sizes[decay], scale=-strength),
        uniform(tokens, HEADS) if has_beta else None,
    )


def check(forward, backward, reference, operands, tolerance=1e-10):
    """Outputs and gradients of `forward` and `backward` against autograd's of `reference`."""
    expected = reference(*operands)
    actual = forward(*operands)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    grads = [torch.randn_like(one) for one in expected]
    leaves = [one for one in operands if isinstance(one, torch.Tensor)]
    of_leaves = torch.autograd.grad(expected, leaves, grads, allow_unused=True)
    of_leaves = [torch.zeros_like(one) if grad is None else grad for one, grad in zip(leaves, of_leaves, strict=True)]
    found = [one for one in backward(*grads, *operands) if one is not None]
    torch.testing.assert_close(found, of_leaves, rtol=10 * tolerance, atol=10 * tolerance)


def draw(seed, longest=20):
    """A forest, kept numbers, and the size of blocks."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    forest = draw_forest(rng, rng.randint(1, 12), longest)
    spine = forest[0].last
    return forest, sorted(rng.sample(range(1, spine + 1), min(spine, rng.randint(0, 3)))), rng.choice([2, 4, 16, 64])


def check_attention(forest, kept, size, **settings):
    operands = (*attention_operands(forest[-1].last, **settings), 0.7, normal(HEADS, KEYS, VALUES))
    blocks = Blocks(forest, kept, size)
    check(
        lambda *given: linear_attention.forward(*given, blocks),
        lambda *given: linear_attention.backward(*given, blocks),
        lambda *given: delta_rule(*given, forest, kept),
        operands,
    )


def check_scan(forest, kept, size):
    tokens = forest[-1].last
    operands = (
        normal(tokens, CHANNELS),
        uniform(tokens, CHANNELS),
        uniform(CHANNELS, STATES, scale=-3),
        normal(tokens, STATES),
        normal(tokens, STATES),
        normal(CHANNELS, STATES),
    )
    blocks = Blocks(forest, kept, size)
    check(
        lambda *given: selective_scan.forward(*given, blocks),
        lambda *given: selective_scan.backward(*given, blocks),
        lambda *given: scan(*given, forest, kept),
        operands,
    )


def check_recurrence(forest, kept, size):
    blocks, factor = Blocks(forest, kept, size), normal(forest[-1].last, CHANNELS)
    factor.data[torch.rand(factor.shape) < 0.2] = 0  # where the state is reset
    check(
        lambda *given: linear_recurrence.forward(*given, blocks),
        lambda *given: linear_recurrence.backward(*given, blocks),
        lambda *given: recurrence(*given, forest, kept),
        (normal(forest[-1].last, CHANNELS), factor, normal(CHANNELS)),
    )


def check_convolution(forest, kept, width):
    ancestors = Ancestors(forest, width, kept)
    check(
        lambda *given: short_convolution.forward(*given, ancestors),
        lambda *given: short_convolution.backward(*given, ancestors),
        lambda *given: convolution(*given, forest, kept),
        (normal(forest[-1].last, CHANNELS), normal(CHANNELS, width), normal(width - 1, CHANNELS)),
    )


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    groups=st.sampled_from([1, 2]),
    decay=st.sampled_from(["head", "channel"]),
    has_beta=st.booleans(),
    strength=st.sampled_from([0.1, 1.0, 50.0]),
)
def test_linear_attention_of_forests(seed, groups, decay, has_beta, strength):
    check_attention(*draw(seed), groups=groups, decay=decay, has_beta=has_beta, strength=strength)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_scans_of_forests(seed):
    check_scan(*draw(seed))
    check_recurrence(*draw(seed))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), width=st.integers(1, 6))
def test_short_convolutions_of_forests(seed, width):
    forest, kept, _ = draw(seed, longest=8)
    check_convolution(forest, kept, width)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), count=st.integers(1, 4))
def test_token_shifts_are_convolutions_with_taps_of_zero_and_one(seed, count):
    forest, kept, _ = draw(seed, longest=8)
    ancestors, taps = Ancestors(forest, count + 1, kept), torch.zeros(CHANNELS, count + 1, dtype=torch.float64)
    taps[:, 0] = 1
    given = normal(forest[-1].last, CHANNELS), taps, normal(count, CHANNELS)
    out, states = token_shift.forward(*given, ancestors)
    torch.testing.assert_close((out, states), short_convolution.forward(*given, ancestors))
    grads = normal(*out.shape), normal(*states.shape)
    of_x, _, of_initial = token_shift.backward(*grads, *given, ancestors)
    expected, _, of_expected_initial = short_convolution.backward(*grads, *given, ancestors)
    torch.testing.assert_close((of_x, of_initial), (expected, of_expected_initial))


def branches(spine, aboves, tokens=1):
    """A spine with a branch below each of some numbers of its tokens, and a further root."""
    found = [segment(0, spine, [])]
    for above in [*aboves, 0]:
        found.append(segment(found[-1].last, tokens, found, 0 if above else -1, above))
    return found


@pytest.mark.parametrize("tokens", [1, 5])
def test_a_branch_at_every_depth(tokens):
    """Also several below one token, which share a step."""
    forest = branches(9, [9, 9, 8, 7, 6, 5, 4, 4, 4, 4, 4, 3, 2, 1], tokens)
    check_attention(forest, [1, 4, 9], 4)
    check_attention(forest, [1, 4, 9], 4, decay="channel", has_beta=False)
    check_scan(forest, [1, 4, 9], 4)
    check_recurrence(forest, [1, 4, 9], 4)
    check_convolution(forest, [1, 4, 9], 4)


@pytest.mark.parametrize("limit", [1, 40])
def test_small_pieces(monkeypatch, limit):
    """States are read, and channels scanned, a few at a time."""
    monkeypatch.setattr(linear_attention, "MOST_STATES", limit * 30)
    monkeypatch.setattr(selective_scan, "MOST_ELEMENTS", limit)
    monkeypatch.setattr(selective_scan, "LEAST_CHANNELS", 2)
    forest = branches(9, [9, 9, 8, 7, 4, 4, 4, 4, 4, 3, 2, 1], 3)
    check_attention(forest, [3], 4)
    check_scan(forest, [3], 4)


@pytest.mark.parametrize("batch, tokens", [(1, 12), (3, 8), (3, 10), (5, 3)])
def test_dense_batches(batch, tokens):
    """Equal rows, which are cut into blocks without a copy, give what each of them gives alone."""
    whole, row = Runs.of_rows(batch, tokens).segments, Runs.of_rows(1, tokens).segments
    blocks, alone = Blocks(whole, (), 4), Blocks(row, (), 4)
    assert blocks.join(blocks.cut(torch.arange(batch * tokens))).tolist() == list(range(batch * tokens))
    operands = attention_operands(batch * tokens)
    numbers = 1.0, torch.zeros(HEADS, KEYS, VALUES, dtype=torch.float64)
    rows = [[one[n * tokens : (n + 1) * tokens] for one in operands] for n in range(batch)]
    actual, _ = linear_attention.forward(*operands, *numbers, blocks)
    torch.testing.assert_close(actual, torch.cat([linear_attention.forward(*one, *numbers, alone)[0] for one in rows]))
    x, weight, initial = normal(batch * tokens, CHANNELS), normal(CHANNELS, 4), normal(3, CHANNELS)
    actual, _ = short_convolution.forward(x, weight, initial, Ancestors(whole, 4))
    parts = [short_convolution.forward(one, weight, initial, Ancestors(row, 4))[0] for one in x.split(tokens)]
    torch.testing.assert_close(actual, torch.cat(parts))


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_strong_decays_stay_finite(decay):
    """In float32, whose exponential overflows beyond 88."""
    operands = attention_operands(200, decay=decay, strength=0.0)
    operands[3].data -= 50
    wide = (*(one.detach() for one in operands), 1.0, torch.randn(HEADS, KEYS, VALUES, dtype=torch.float64))
    narrow = tuple(one.float() if isinstance(one, torch.Tensor) else one for one in wide)
    blocks = Blocks([segment(0, 200, [])], [200])
    expected = delta_rule(*wide, [segment(0, 200, [])], [200])
    actual = linear_attention.forward(*narrow, blocks)
    torch.testing.assert_close([one.double() for one in actual], list(expected), rtol=1e-4, atol=1e-4)
    grads = [torch.ones_like(one) for one in actual]
    assert all(one.isfinite().all() for one in linear_attention.backward(*grads, *narrow, blocks))


def narrowed(operands, dtype):
    return tuple(one.detach().to(dtype) if isinstance(one, torch.Tensor) else one for one in operands)


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_float32_is_accurate_over_many_blocks(decay):
    query, key, *others = attention_operands(500, decay=decay, strength=0.1)
    unit = [torch.nn.functional.normalize(one, dim=-1) for one in (query, key)]
    operands = (*unit, *others, 1.0, normal(HEADS, KEYS, VALUES))
    blocks = Blocks([segment(0, 500, [])], [500])
    wide, narrow = (linear_attention.forward(*narrowed(operands, one), blocks) for one in (torch.double, torch.float))
    torch.testing.assert_close([one.double() for one in narrow], list(wide), rtol=1e-4, atol=1e-5)
    grads = [torch.randn_like(one) for one in wide]
    wide, narrow = (
        linear_attention.backward(*narrowed(grads, one), *narrowed(operands, one), blocks)
        for one in (torch.double, torch.float)
    )
    for actual, expected in zip(narrow, wide, strict=True):
        if expected is not None:
            error = (actual.double() - expected).norm() / expected.norm()
            assert error < 1e-5


def check_precision(forward, backward, reference, operands):
    """Errors in float32 of results and gradients: at most twice those of the reference's, and a few roundings."""
    narrow = narrowed(operands, torch.float)
    grads = [torch.randn_like(one) for one in forward(*narrow)]

    def differentiated(dtype):
        given = narrowed(narrow, dtype)
        leaves = [one.requires_grad_() for one in given if isinstance(one, torch.Tensor)]
        found = reference(*given)
        return [*found, *torch.autograd.grad(found, leaves, [one.to(dtype) for one in grads])]

    exact, plain = differentiated(torch.double), differentiated(torch.float)
    actual = [*forward(*narrow), *(one for one in backward(*grads, *narrow) if one is not None)]
    for one, other, expected in zip(actual, plain, exact, strict=True):
        error, theirs = ((found - expected).abs().max() / expected.abs().max() for found in (one, other))
        assert error <= 2 * theirs + 4 * torch.finfo(torch.float).eps


@pytest.mark.parametrize("strength", [0.1, 20.0])
@pytest.mark.parametrize("decay", ["head", "channel"])
@pytest.mark.parametrize("has_beta", [True, False])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_linear_attention_is_as_precise_as_token_by_token(seed, decay, has_beta, strength):
    """Also where decays are strong, and their gradients small against those of single products."""
    torch.manual_seed(seed)
    query, key, *others = attention_operands(150, decay=decay, has_beta=has_beta, strength=strength)
    unit = [torch.nn.functional.normalize(one, dim=-1) for one in (query, key)]
    forest = [segment(0, 100, []), segment(100, 50, [segment(0, 100, [])], 0, 90)]
    blocks = Blocks(forest, [100], linear_attention.longest_block(key, others[-1]))
    check_precision(
        lambda *given: linear_attention.forward(*given, blocks),
        lambda *given: linear_attention.backward(*given, blocks),
        lambda *given: delta_rule(*given, forest, [100]),
        (*unit, *others, 1.0, normal(HEADS, KEYS, VALUES)),
    )


@pytest.mark.parametrize("strength", [0.1, 20.0])
def test_selective_scans_are_as_precise_as_token_by_token(strength):
    torch.manual_seed(0)
    forest, blocks = [segment(0, 100, [])], Blocks([segment(0, 100, [])], [100], 16)
    x, B, C, initial = (normal(*size) for size in ((100, CHANNELS), (100, STATES), (100, STATES), (CHANNELS, STATES)))
    check_precision(
        lambda *given: selective_scan.forward(*given, blocks),
        lambda *given: selective_scan.backward(*given, blocks),
        lambda *given: scan(*given, forest, [100]),
        (x, uniform(100, CHANNELS), uniform(CHANNELS, STATES, scale=-strength), B, C, initial),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_convolutions_are_rounded_once(dtype):
    ancestors = Ancestors(branches(9, [9, 7, 2], 3), 4, [5])
    low = narrowed((normal(21, CHANNELS), normal(CHANNELS, 4), normal(3, CHANNELS)), dtype)
    out, kept = short_convolution.forward(*low, ancestors)
    expected = short_convolution.forward(*narrowed(low, torch.float), ancestors)
    torch.testing.assert_close((out, kept), tuple(one.to(dtype) for one in expected), rtol=0, atol=0)


def test_a_recurrence_of_one_number_a_token():
    value, factor = normal(2, 7), normal(2, 7)
    out = dta_compile.linear_recurrence(value, factor)
    assert torch.equal(out, dta_compile.linear_recurrence(value[..., None], factor[..., None])[..., 0])


def test_low_precision_is_computed_in_float32():
    operands = (*attention_operands(40), 1.0, normal(HEADS, KEYS, VALUES))
    blocks = Blocks([segment(0, 40, [])], [40])
    low = narrowed(operands, torch.bfloat16)
    out, kept = linear_attention.forward(*low, blocks)
    expected = linear_attention.forward(*narrowed(low, torch.float), blocks)
    assert out.dtype is torch.bfloat16 and kept.dtype is torch.float32
    torch.testing.assert_close((out, kept), (expected[0].bfloat16(), expected[1]))


def test_blocks_have_the_fewest_exits():
    """The end of the spine's first block, which a branch has too; one inside; one that is kept; none at any end."""
    forest = branches(10, [4, 4, 2])
    blocks = Blocks(forest, [4, 9], 4)
    assert (blocks.count, blocks.length, blocks.exits, blocks.kept) == (7, 4, 4, 2)  # after 2, 4, 8 and 9 tokens
    assert not Blocks([segment(0, 3, [])], (), 4).exits


def test_many_siblings_are_a_step():
    forest = branches(8, [8] * 6, 3)
    steps = Blocks(forest, (), 8).steps()
    assert [(step.blocks.stop - step.blocks.start, step.shared) for step in steps] == [(2, True), (6, True)]


@pytest.mark.parametrize(
    "lengths, size", [([2048], 64), ([500] * 4, 64), ([5] * 400, 64), ([512, *[10] * 200], 16), ([40] * 50, 64)]
)
def test_sizes_of_blocks(lengths, size):
    firsts = [0, *itertools.accumulate(lengths)]
    assert choose_size([segment(first, tokens, []) for first, tokens in zip(firsts, lengths, strict=False)]) == size


# A run of 70 tokens, what hangs from inside of its blocks, and a run of its own; states are kept inside of a block.
FOREST = ((0, 70, 0, -1), (70, 80, 40, 0), (80, 83, 45, 1), (83, 90, 20, 0), (90, 99, 0, -1))
RUNS = Runs(tuple(Segment(first, last, last, depth, parent) for first, last, depth, parent in FOREST), kept=(30, 70))
SIZES = {
    "short_convolution": [(5,), (5, 4)],
    "token_shift": [(5,), (5, 3)],
    "gated_delta_rule": [(2, 3), (2, 3), (4, 5), (4,), (4,)],
    "linear_attention": [(2, 3), (2, 3), (4, 5), (4, 3)],
    "linear_recurrence": [(5,), (5,)],
    "cumulative_sum": [(5,), (5,)],
    "selective_scan": [(5,), (5,), (5, 3), (3,), (3,)],
}


NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("value", "bad"),
    [
        *((NAN, bad) for bad in (10, 42, 75, 98)),
        *((value, 42) for value in (INFINITY, -INFINITY)),
        *(pytest.param(value, bad, marks=pytest.mark.slow) for value in (INFINITY, -INFINITY) for bad in (10, 75, 98)),
    ],
)
@pytest.mark.parametrize("recurrence", RECURRENCES.values(), ids=lambda recurrence: recurrence.name)
def test_what_a_token_does_not_read_leaves_no_trace(recurrence, bad, value):
    """A number of one token that is not finite: of an operand, then of its output's gradient."""
    before = list(tokens_before(RUNS.segments))
    reads = torch.eye(RUNS.tokens, dtype=torch.bool)
    for token, above in enumerate(before):
        if above >= 0:
            reads[token] |= reads[above]

    def of_tokens(values):
        return [one for one, operand in zip(values, recurrence.operands, strict=True) if operand.has_tokens]

    def results(number):
        torch.manual_seed(0)
        sizes = SIZES[recurrence.name]
        given = [
            torch.rand((RUNS.tokens, *size) if operand.has_tokens else size, dtype=torch.float64)
            * (-1 if operand.name in ("decay", "matrix") else 1)
            for operand, size in zip(recurrence.operands, sizes, strict=True)
        ]
        out_grad = torch.rand((RUNS.tokens, *sizes[recurrence.like]), dtype=torch.float64)
        if number is not None:
            [*of_tokens(given), out_grad][number][bad] = value
        shape, _ = recurrence.state(given)
        initial, constants = torch.full(shape, 0.1, dtype=torch.float64), (0.5,) * len(recurrence.numbers)
        out, kept = recurrence.forward(given, constants, initial, RUNS)
        grads, _ = recurrence.backward(out_grad, torch.ones_like(kept), given, constants, initial, RUNS)
        return [out, *of_tokens(grads)], kept

    expected, expected_kept = results(None)
    for number in range(len(expected)):
        found, kept = results(number)
        of_grad = number == len(expected) - 1
        changed = torch.arange(RUNS.tokens) == bad if of_grad else reads[:, bad]
        changed_grads = reads[changed].any(0)
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            apart = ~changed_grads if index else torch.ones_like(changed) if of_grad else ~changed
            torch.testing.assert_close(one[apart], other[apart], rtol=1e-9, atol=1e-9)
        for one, other, after in zip(kept, expected_kept, RUNS.kept, strict=True):
            if of_grad or bad >= after:
                torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
