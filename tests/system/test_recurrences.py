"""Recurrences through the whole pipeline, alone and beside attention, against one token after the other."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import dta_compile
from dta_compile.capture.recurrences import SOURCES
from dta_compile.errors import RefusalError, RuntimeContractError
from dta_compile.integrations.models.known_source import is_known
from dta_compile.options import Options
from dta_compile.plan.schedule import Schedule
from dta_compile.plan.verify import verify
from tests.support.cases import LOSSES, QUICK, chain, fan, make_case, with_options
from tests.support.helpers import Measurement, errors
from tests.support.inside import inside
from tests.support.tiny import (
    SMALL_CHUNKS,
    VOCABULARY,
    WIDTH,
    BareLM,
    Block,
    after,
    assert_same,
    gradients,
    shared_ids,
    weighted,
)

HEADS, GROUPS, KEYS, STATES = 4, 2, 3, 3
OPS = torch.ops.dta


def _steps(tokens, state, step):
    """Outputs `[B, S, ...]` of `step(token, state) -> (output, state)`."""
    outs = []
    for token in range(tokens):
        out, state = step(token, state)
        outs.append(out)
    return torch.stack(outs, 1)


def convolution(value, weight):
    """A token at a time, as are the two below."""
    width, tokens = weight.shape[1], value.shape[1]
    padded = F.pad(value, (0, 0, width - 1, 0))
    return sum(weight[:, j] * padded[:, j : j + tokens] for j in range(width))


def attention_of_states(query, key, value, decay, beta, scale):
    """With a beta the delta rule."""
    query, key = (one.repeat_interleave(HEADS // GROUPS, 2) for one in (query, key))
    decay = decay if decay.dim() == 4 else decay[..., None]

    def step(t, state):
        state = decay[:, t, :, :, None].exp() * state
        read = (key[:, t, :, :, None] * state).sum(-2)
        update = value[:, t] if beta is None else beta[:, t, :, None] * (value[:, t] - read)
        state = state + key[:, t, :, :, None] * update[..., None, :]
        return scale * (query[:, t, :, :, None] * state).sum(-2), state

    return _steps(value.shape[1], value.new_zeros(len(value), HEADS, KEYS, value.shape[-1]), step)


def scan(value, step, matrix, entry, reading):
    def one(t, state):
        state = (step[:, t, :, None] * matrix).exp() * state + (step[:, t] * value[:, t])[..., None] * entry[:, t, None]
        return (state * reading[:, t, None]).sum(-1), state

    return _steps(value.shape[1], value.new_zeros(len(value), *matrix.shape), one)


def recurrence(value, factor):
    def one(t, state):
        state = factor[:, t] * state + value[:, t]
        return state, state

    return _steps(value.shape[1], torch.zeros_like(value[:, 0]), one)


class Mixer(nn.Module):
    """Pre-norm, a recurrence of a kind ("c", "d", "l", "r" or "s"), a gate, an output projection; `plain`: by loops."""

    def __init__(self, kind, width=4):
        super().__init__()
        self.kind, self.plain = kind, False
        self.norm, self.gate = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.value, self.out = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        if kind == "c":
            self.weight = nn.Parameter(torch.randn(WIDTH, width))
        elif kind == "r":
            self.step = nn.Linear(WIDTH, WIDTH)
        elif kind == "s":
            self.entry, self.reading = (nn.Linear(WIDTH, STATES, bias=False) for _ in range(2))
            self.step, self.matrix = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.rand(WIDTH, STATES))
        else:
            self.query, self.key = (nn.Linear(WIDTH, GROUPS * KEYS, bias=False) for _ in range(2))
            self.decay = nn.Linear(WIDTH, HEADS * KEYS if kind == "l" else HEADS)
            self.beta = nn.Linear(WIDTH, HEADS) if kind == "d" else None

    def forward(self, x, real=None, segments=None):
        y = self.norm(x)
        y = y if real is None else y * real[..., None]
        return x + self.out(self.gate(y).sigmoid() * self.mixed(y, segments))

    def mixed(self, y, segments):
        value = self.value(y)
        if self.kind == "c":
            return (
                convolution(value, self.weight) if self.plain else OPS.short_convolution(value, self.weight, segments)
            )
        if self.kind == "s":
            operands = value, F.softplus(self.step(y)), -self.matrix.exp(), self.entry(y), self.reading(y)
            return scan(*operands) if self.plain else OPS.selective_scan(*operands, segments)
        if self.kind == "r":
            operands = value, torch.tanh(self.step(y)).relu()  # zero, as where states are reset, and at most one
            return recurrence(*operands) if self.plain else OPS.linear_recurrence(*operands, segments)
        query, key = (linear(y).unflatten(-1, (GROUPS, KEYS)) for linear in (self.query, self.key))
        key, value = F.normalize(key, dim=-1), value.unflatten(-1, (HEADS, -1))
        decay = -F.softplus(self.decay(y))
        if self.kind == "l":
            decay = decay.unflatten(-1, (HEADS, KEYS))
            given = query, key, value, decay
            call = attention_of_states if self.plain else OPS.linear_attention
        else:
            given = query, key, value, decay, self.beta(y).sigmoid()
            call = attention_of_states if self.plain else OPS.gated_delta_rule
        if self.plain:
            return call(*given, *[None] * (self.kind == "l"), 0.5).flatten(2)
        return call(*given, segments, 0.5).flatten(2)


class RecurrentLM(nn.Module):
    """Logits `[B, S, V]` of ids `[B, S]`, with a mask of padding or the segments of packed rows.

    `kinds` has a letter for each layer: those of `Mixer`, and "a" for attention.
    """

    def __init__(self, kinds, width=4):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) if kind == "a" else Mixer(kind, width) for kind in kinds)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.checkpoints = False
        self.double()

    def forward(self, ids, mask=None, segments=None):
        x, pairs = self.embedding(ids), None
        if mask is not None or segments is not None:
            pairs = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril()
        if mask is not None:
            pairs = pairs & mask[:, None, None, :]
        if segments is not None:
            pairs = pairs & (segments[:, None, :, None] == segments[:, None, None]) & (segments != 0)[:, None, None]
        for block in self.blocks:
            given = (x, pairs) if isinstance(block, Block) else (x, mask, segments)
            x = checkpoint(block, *given, use_reentrant=False) if self.checkpoints else block(*given)
        return self.head(self.norm(x))

    @contextlib.contextmanager
    def plainly(self):
        mixers = [block for block in self.blocks if isinstance(block, Mixer)]
        for mixer in mixers:
            mixer.plain = True
        checkpoints, self.checkpoints = self.checkpoints, False
        yield self
        self.checkpoints = checkpoints
        for mixer in mixers:
            mixer.plain = False


def expected_logits(model, case):
    """Logits `[B, S, V]` token by token, without the mask; zero at padding. The sequences are aligned on the left."""
    order = case.mask.long().argsort(dim=1, descending=True, stable=True)
    with model.plainly():
        aligned = model(case.ids.gather(1, order))
    back = torch.empty_like(order).scatter_(1, order, torch.arange(order.shape[1]).expand_as(order))
    logits = aligned.gather(1, back[..., None].expand_as(aligned))
    return torch.where(case.mask[..., None], logits, 0.0)


class Compiled:
    """A model, and one compilation of it for all options; one graph each with a mask, with segments and without."""

    def __init__(self, kinds, dynamic=None, **more):
        torch._dynamo.reset()
        self.model = RecurrentLM(kinds, **more)
        self.function = torch.compile(self.model, backend="dta", dynamic=dynamic, options={"codegen": "eager"})

    def with_options(self, chosen, arguments):
        """The callable, after a first call, in which Dynamo makes a graph for its arguments."""
        some = [torch.ones(3, 5, dtype=torch.int64) if one is not None else None for one in arguments]
        if len(some) > 1 and some[1] is not None:
            some[1] = some[1].bool()
        self.function(*some)
        return with_options(self.function, dataclasses.replace(chosen, codegen="eager"))

    def check_plan(self, case, chosen, mode):
        plan = dta_compile.last_plan(self.function)
        verify(plan.prefix_tree, plan.schedule, states=True)
        assert plan.schedule.mode == mode and plan.stats.tokens == int(case.mask.sum())
        assert plan.schedule.strategy == chosen.strategy
        assert str(plan) and Schedule.parse(str(plan.schedule)) == plan.schedule
        if chosen.strategy != "dense":
            assert plan.stats.tree_tokens == len(case.prefixes)
        return plan

    def check(self, case, chosen, loss="weights"):
        """Outputs and all gradients are those of one token after the other."""

        def step(logits):
            logits = torch.where(case.mask[..., None], logits, 0.0)
            LOSSES[loss](logits, case.mask).backward()
            return logits.detach()

        run = self.with_options(chosen, case.arguments)
        actual = after(self.model, lambda: step(run(*case.arguments)))
        assert_same(actual, after(self.model, lambda: step(expected_logits(self.model, case))))
        return self.check_plan(case, chosen, "transparent")


QUICK_KINDS = ("cdalsr",)
SLOW_KINDS = ("c", "d", "l", "r", "s", "ca", "dcs", "aslac")


@pytest.fixture(
    scope="module", params=[*QUICK_KINDS, *(pytest.param(kinds, marks=pytest.mark.slow) for kinds in SLOW_KINDS)]
)
def compiled(request):
    return Compiled(request.param)


@st.composite
def sequences(draw):
    """Grown from others: cut where blocks, chunks and convolutions end (also to nothing), then extended."""

    def tokens(count):
        return torch.randint(0, 3, (count,), generator=generator).tolist()

    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    length = draw(st.sampled_from([1, 2, 3, 4, 9, 17, 33, 64, 80]))
    grown = [tokens(length)]
    for _ in range(draw(st.integers(1, 7))):
        source = draw(st.sampled_from(grown))
        edges = [0, 1, 2, 3, 4, 15, 16, 17, 63, 64, 65, len(source) - 1, len(source), draw(st.integers(0, len(source)))]
        kept = draw(st.sampled_from([edge for edge in edges if 0 <= edge <= len(source)]))
        grown.append(source[:kept] + tokens(draw(st.sampled_from([0, 1, 1, 2, 4, 20]))))
    return grown


cases = st.builds(make_case, sequences(), st.sampled_from(["right", "left", "none"]))
options = st.builds(
    Options,
    chunk_size=st.sampled_from([1, 2, 3, 5, 16, 17, 64, 70, 10_000]),
    strategy=st.sampled_from(["packed", "packed", "dfs", "vanilla", "dense"]),
    order=st.sampled_from(["backward_dfs", "lexicographic", "random"]),
    memory_budget=st.none() | st.just(0) | st.integers(10_000, 3_000_000),
    sweep=st.sampled_from(["auto", "stages"]),
)
losses = st.sampled_from(sorted(LOSSES.keys() - {"group", "pairs"}))


@settings(max_examples=5, **QUICK)
@given(case=cases, chosen=options, loss=losses)
def test_any_batch(compiled, case, chosen, loss):
    compiled.check(case, chosen, loss)


@pytest.mark.slow
@settings(**{**QUICK, "max_examples": 150, "derandomize": False})
@given(case=cases, chosen=options, loss=losses)
def test_many_batches(compiled, case, chosen, loss):
    compiled.check(case, chosen, loss)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("chunk_size", "padding"),
    [
        *((1, "right"), (3, "left"), (16, "right")),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in ((1, "left"), (3, "right"), (16, "left"))),
    ],
)
def test_a_branch_at_every_depth(compiled, chunk_size, padding):
    stem = [1 + i % 5 for i in range(20)]
    branches = [stem, *(stem[:depth] + [0] * (1 + depth % 3) for depth in range(20))]
    compiled.check(make_case(branches, padding), Options(chunk_size, "packed", memory_budget=0))


@pytest.mark.slow
@pytest.mark.parametrize("chunk_size", [1, 2, 3, 5, 10_000])
@pytest.mark.parametrize("budget", [0, None])
@pytest.mark.parametrize("strategy", ["packed", "vanilla", "dfs"])
def test_forks_and_chains(compiled, chunk_size, budget, strategy):
    for batch in (fan(20), chain(12), [[1, 2, 3, 4]] * 4, [[1], [], [2], [1]]):
        compiled.check(make_case(batch, "right"), Options(chunk_size, strategy, memory_budget=budget))


def pack(rows):
    """`[B, T]` ids and segments of rows of sequences, padded with segment 0."""
    width = max(3, *(sum(map(len, row)) for row in rows))  # shorter rows run as captured
    ids, segments = torch.zeros(2, len(rows), width, dtype=torch.int64)
    for number, row in enumerate(rows):
        joined = [token for sequence in row for token in sequence]
        ids[number, : len(joined)] = torch.tensor(joined, dtype=torch.int64)
        owners = [i + 1 for i, sequence in enumerate(row) for _ in sequence]
        segments[number, : len(joined)] = torch.tensor(owners, dtype=torch.int64)
    return ids, segments


def check_packed(compiled, rows, chosen):
    ids, segments = pack(rows)
    alone = make_case([sequence for row in rows for sequence in row], "right")

    def step(logits):
        (logits * weights).sum().backward()
        return logits.detach()

    def packed(run):
        logits = run(ids, None, segments)
        pieces = []
        for out, row in zip(logits, rows, strict=True):
            pieces += out[: sum(map(len, row))].split(list(map(len, row)))
        found = torch.zeros(*alone.ids.shape, VOCABULARY, dtype=torch.float64)
        return torch.stack(
            [torch.cat([piece, empty[len(piece) :]]) for piece, empty in zip(pieces, found, strict=True)]
        )

    weights = torch.randn(*alone.ids.shape, VOCABULARY, generator=torch.Generator().manual_seed(0)).double()
    run = compiled.with_options(chosen, (ids, None, segments))
    actual = after(compiled.model, lambda: step(packed(run)))
    expected = after(compiled.model, lambda: step(expected_logits(compiled.model, alone)))
    assert_same(actual, expected)
    plan = dta_compile.last_plan(compiled.function)
    verify(plan.prefix_tree, plan.schedule, states=True)
    assert plan.stats.tokens == sum(len(sequence) for row in rows for sequence in row)
    assert_same(after(compiled.model, lambda: step(packed(compiled.model))), expected)  # the operators' own segments


@st.composite
def packings(draw):
    grown = [sequence or [1] for sequence in draw(sequences())]
    several = draw(st.integers(1, 3))
    rows = [grown[number::several] for number in range(several)]
    return [row or [[2]] for row in rows]


@settings(max_examples=3, **QUICK)
@given(rows=packings(), chosen=options)
@pytest.mark.slow
def test_packed_rows(compiled, rows, chosen):
    check_packed(compiled, rows, chosen)


@pytest.mark.slow
@settings(**{**QUICK, "max_examples": 80, "derandomize": False})
@given(rows=packings(), chosen=options)
def test_many_packed_rows(compiled, rows, chosen):
    check_packed(compiled, rows, chosen)


@settings(max_examples=5, **QUICK)
@given(case=cases, chosen=options)
def test_streaming(compiled, case, chosen):
    def loss_of_row(row, logits):
        return weighted(torch.where(case.mask[row, :, None], logits, 0.0).log_softmax(-1))

    def plain():
        losses = [loss_of_row(row, logits) for row, logits in enumerate(expected_logits(compiled.model, case))]
        sum(losses).backward()
        return [loss.detach() for loss in losses]

    run = compiled.with_options(chosen, case.arguments)
    actual = after(compiled.model, lambda: dta_compile.streaming_step(run, loss_of_row, *case.arguments))
    compiled.check_plan(case, chosen, "streaming")
    assert_same(actual, after(compiled.model, plain))


@pytest.mark.parametrize(
    "padding", ["left", *(pytest.param(side, marks=pytest.mark.slow) for side in ("right", "none"))]
)
@pytest.mark.slow
def test_scoring(compiled, padding):
    case = make_case([*chain(30), *fan(9)], padding)
    for chunk_size in (1, 4, 16, 10_000):
        chosen = Options(chunk_size, "packed")
        with torch.no_grad():
            run = compiled.with_options(chosen, case.arguments)
            logits = torch.where(case.mask[..., None], run(*case.arguments), 0.0)
            compiled.check_plan(case, chosen, "score")
            assert_same(logits, expected_logits(compiled.model, case))


FORKS = make_case([*chain(20), *fan(9)], "right")
SMALL = Options(5, "packed", memory_budget=0)


def training_step(model, logits, case=FORKS):
    logits = torch.where(case.mask[..., None], logits, 0.0)
    weighted(logits).backward()
    return logits.detach()


def check_forks(compiled, run, case=FORKS):
    actual = after(compiled.model, lambda: training_step(compiled.model, run(*case.arguments), case))
    expected = after(compiled.model, lambda: training_step(compiled.model, expected_logits(compiled.model, case), case))
    assert_same(actual, expected)


@pytest.mark.parametrize("budget", [0, None])
def test_backward_twice(compiled, budget):
    run = compiled.with_options(Options(5, "packed", memory_budget=budget), FORKS.arguments)

    def twice(logits):
        loss = weighted(torch.where(FORKS.mask[..., None], logits, 0.0))
        loss.backward(retain_graph=True)
        (2 * loss).backward()

    actual = after(compiled.model, lambda: twice(run(*FORKS.arguments)))
    assert_same(actual, after(compiled.model, lambda: twice(expected_logits(compiled.model, FORKS))))


def test_a_call_after_one_that_failed(compiled, monkeypatch):
    """In the middle of the forward, and of the backward."""
    from dta_compile.runtime.recurrent.layer import RecurrentLayerRuntime

    run = compiled.with_options(SMALL, FORKS.arguments)
    for name in ("forward", "backward"):
        original, calls = getattr(RecurrentLayerRuntime, name), iter(range(10**6))

        def fails(self, *given, original=original, calls=calls):
            if next(calls) == 2:
                raise KeyboardInterrupt
            return original(self, *given)

        with monkeypatch.context() as patch:
            patch.setattr(RecurrentLayerRuntime, name, fails)
            with pytest.raises(KeyboardInterrupt):
                training_step(compiled.model, run(*FORKS.arguments))
        check_forks(compiled, run)


@pytest.mark.slow
def test_forwards_before_their_backwards(compiled):
    """Two calls in flight, whose backwards come in either order, with a scoring call in between."""
    run, second = compiled.with_options(SMALL, FORKS.arguments), make_case(fan(12), "right")
    for order in ((0, 1), (1, 0)):

        def step(call, order=order):
            losses = []
            for case in (FORKS, second):
                losses.append(weighted(torch.where(case.mask[..., None], call(case), 0.0)))
                with torch.no_grad():
                    call(FORKS)
            for number in order:
                losses[number].backward()

        actual = after(compiled.model, lambda: step(lambda case: run(*case.arguments)))
        assert_same(actual, after(compiled.model, lambda: step(lambda case: expected_logits(compiled.model, case))))


@pytest.mark.slow
def test_two_models_alternate():
    both = [Compiled("cd"), Compiled("ld")]
    for _ in range(2):
        for one in both:
            check_forks(one, one.with_options(SMALL, FORKS.arguments))


@pytest.mark.slow
def test_checkpointed_layers():
    one = Compiled("da")
    one.model.checkpoints = True
    check_forks(one, one.with_options(SMALL, FORKS.arguments))


@pytest.mark.slow
def test_frozen_parameters():
    """A frozen first layer, whose states get no gradients; and then nothing but a convolution is trained."""
    one = Compiled("dc")
    for part in (one.model.embedding, one.model.blocks[0]):
        part.requires_grad_(False)
    check_forks(one, one.with_options(SMALL, FORKS.arguments))
    one.model.requires_grad_(False)
    one.model.blocks[1].weight.requires_grad_()
    check_forks(one, one.with_options(SMALL, FORKS.arguments))


@pytest.mark.slow
@pytest.mark.xfail(reason="the operators in eager mode compute under autocast: dtypes that do not fit", strict=True)
def test_autocast_rounds_no_worse_than_eager():
    def step(model, run):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = run(*FORKS.arguments)
        return training_step(model, logits.double())

    one = Compiled("cdals")
    one.model.float()
    run = with_options(one.function, dataclasses.replace(SMALL, codegen="eager"))
    actual = after(one.model, lambda: step(one.model, run))
    eager = after(one.model, lambda: step(one.model, one.model))
    one.model.double()
    exact = after(one.model, lambda: training_step(one.model, expected_logits(one.model, FORKS)))
    ours, theirs = (errors(Measurement(*found), Measurement(*exact)) for found in (actual, eager))
    # Biases of a few heads are sums that nearly cancel: of them luck decides.
    assert max(ours.values()) <= 2 * max(theirs.values())


@pytest.mark.slow
def test_plans_count_states():
    one = Compiled("dca")
    plan = one.check(FORKS, SMALL)
    counts = verify(plan.prefix_tree, plan.schedule, states=True)
    assert counts.peak_states and counts.peak_state_gradients
    assert any(op.states for op in plan.schedule.ops if hasattr(op, "states"))
    delta, convolution, _ = inside(one.function).newest.program.mixers
    assert (delta.running.shape, convolution.running.shape) == ((HEADS, KEYS, WIDTH // HEADS), (3, WIDTH))
    text = dta_compile.explain(one.model, FORKS.ids).text
    assert "gated delta rule" in text and "short convolution" in text


@pytest.mark.parametrize("verify", ["first", pytest.param("always", marks=pytest.mark.slow)])
def test_whole_calls_are_checked_by_themselves(compiled, verify):
    for padding in ("right", "left"):
        case = make_case(FORKS.sequences, padding)
        run = compiled.with_options(dataclasses.replace(SMALL, verify=verify), case.arguments)
        check_forks(compiled, run, case)
        assert dta_compile.last_plan(compiled.function).estimates.self_check


@pytest.mark.slow
def test_short_rows_and_wide_convolutions():
    """One row, one token, convolutions that are wider than all rows, and of one token."""
    for width in (1, 8):
        one = Compiled("ca", width=width)
        for batch in ([[1, 2, 3]], [[1], [2], [1]], [[1, 2, 3]] * 3, [[1], [1, 2], [1, 2, 3]], [[1]], [[], [1, 2]]):
            for chunk_size in (1, 10_000):
                for padding in ("right", "left", "none"):
                    one.check(make_case(batch, padding), Options(chunk_size, "packed", memory_budget=0))


class Dilated(BareLM):
    """Causal convolutions of channels whose taps are not of neighbouring tokens, in two ways to write padding."""

    def __init__(self):
        super().__init__()
        sizes = {"groups": WIDTH, "dtype": torch.float64}
        self.first = nn.Conv1d(WIDTH, WIDTH, 3, dilation=2, padding=4, **sizes)
        self.second = nn.Conv1d(WIDTH, WIDTH, 2, dilation=5, bias=False, **sizes)

    def mix(self, x, pairs=None):
        tokens = x.shape[1]
        added = torch.zeros_like(x)
        added.add_(self.first(x.mT)[..., :tokens].mT)  # nobody reads the result, and the write counts
        x = x + added
        return super().mix(x + self.second(F.pad(x.mT, (5, 0))[..., -(5 + tokens) :]).mT, pairs)


def test_dilated_convolutions():
    torch._dynamo.reset()
    model, eager = Dilated(), Dilated()
    compiled = torch.compile(model, backend="dta", options=SMALL_CHUNKS)
    found = [(weighted(function(shared_ids())).backward(), function(shared_ids())) for function in (compiled, eager)]
    assert_same(*((out.detach(), gradients(each)) for (_, out), each in zip(found, (model, eager), strict=True)))


@pytest.mark.parametrize("scale", [0.0, 1e4, 1e30])
def test_strong_and_absent_decays(scale):
    """Of the operators as such, as all of the above goes by them."""
    torch.manual_seed(0)
    query, key = (torch.randn(2, 70, GROUPS, KEYS).double() for _ in range(2))
    key, value, beta = (
        F.normalize(key, dim=-1),
        torch.randn(2, 70, HEADS, 4).double(),
        torch.rand(2, 70, HEADS).double(),
    )
    for shape in ((2, 70, HEADS), (2, 70, HEADS, KEYS)):
        decay = -scale * torch.rand(shape).double()
        given = [one.requires_grad_() for one in (query, key, value, decay, beta)]
        found, expected = OPS.gated_delta_rule(*given, None, 0.5), attention_of_states(*given, 0.5)
        grads = [list(torch.autograd.grad(weighted(out), given)) for out in (found, expected)]
        assert_same((found, grads[0]), (expected, grads[1]))


# What is refused, and what a call may not do.


def test_left_padding_that_no_mask_silences():
    class Unmasked(RecurrentLM):
        def forward(self, ids, mask):
            triangle = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
            first, second = self.blocks
            return self.head(second(first(self.embedding(ids)), triangle & mask[:, None, None, :]))

    torch._dynamo.reset()
    run = torch.compile(Unmasked("da"), backend="dta", options={"codegen": "eager"})
    right, left = (make_case([[1, 2, 3, 4], [1, 2, 3]], side) for side in ("right", "left"))
    run(*right.arguments)
    with pytest.raises(RuntimeContractError, match="gated delta rule, which no mask keeps it from") as error:
        run(*left.arguments)
    assert "pad on the right" in error.value.hint and error.value.got == "row 1, padding at token 0"
    assert "in mixed" in error.value.where


def test_padding_between_real_tokens(compiled):
    ids = torch.tensor([[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 1, 1]]).bool()
    run = compiled.with_options(SMALL, (ids, mask))
    with pytest.raises(RuntimeContractError, match="padding between real tokens") as error:
        run(ids, mask)
    assert "row 1" in error.value.got and "one end" in error.value.hint


def test_a_function_of_a_model_repository_is_known_by_no_name(tmp_path, monkeypatch):
    """One with the name of fla's, which does not scale queries."""
    package = tmp_path / "transformers_modules" / "toy"
    package.mkdir(parents=True)
    (package / "modeling_toy.py").write_text(
        "def chunk_gated_delta_rule(query, key, value, g, beta):\n"
        "    return (query * key).sum(-1, keepdim=True) * value + g[..., None] * beta[..., None], None\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
        monkeypatch.delitem(sys.modules, name)
    remote = importlib.import_module("transformers_modules.toy.modeling_toy")

    class Remote(BareLM):
        def mix(self, x, pairs=None):
            heads = x.unflatten(-1, (2, -1))
            out, _ = remote.chunk_gated_delta_rule(heads, heads, heads, heads[..., 0], heads[..., 1])
            return super().mix(out.flatten(2), pairs)

    torch.compiler.reset()
    model, ids = Remote(), shared_ids()
    compiled = torch.compile(model, backend="dta", options={"codegen": "eager"})
    torch.testing.assert_close(compiled(ids), model(ids), rtol=1e-9, atol=1e-9)


def test_copies_of_functions_of_transformers_in_model_repositories_are_known():
    """Other versions of transformers may have other sources: then add theirs."""
    for name, model in {"torch_chunk_gated_delta_rule": "qwen3_next", "mamba2_chunk_scan": "mamba2"}.items():
        module, (helpers, known) = (
            importlib.import_module(f"transformers.models.{model}.modeling_{model}"),
            SOURCES[name],
        )
        assert is_known(module, [name, *helpers], known)


def test_a_recurrence_written_with_cumprod():
    class Sums(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
            self.block = Block(WIDTH)

        def forward(self, ids):
            return self.head(self.block(self.embedding(ids).cumprod(1), None))

    torch._dynamo.reset()
    with pytest.raises(RefusalError, match="mixed before the last attention") as error:
        torch.compile(Sums(), backend="dta")(torch.zeros(3, 5, dtype=torch.int64)).sum().backward()
    assert "cumprod" in error.value.where
