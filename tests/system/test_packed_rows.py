"""Packed rows against the eager model on every sequence alone: what the masks compare tells the sequences of a row."""

import hypothesis
import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st

import dta_compile
from tests.support.families import FAMILIES, V, build
from tests.support.helpers import assert_equal, make_batch, measure, random_loss, reference, rollouts
from tests.support.tiny import SMALL_CHUNKS, BareLM, after, assert_same, weighted

ROLLOUTS = rollouts(V)


def pack(rows, tail=0):
    """`[B, T]` ids and restarting positions of rows of sequences, with a padded tail of a position of its own each."""
    width = max(sum(map(len, row)) for row in rows) + tail
    ids, positions = torch.zeros(2, len(rows), width, dtype=torch.int64)
    for i, row in enumerate(rows):
        joined = [token for sequence in row for token in sequence]
        ids[i, : len(joined)] = torch.tensor(joined)
        positions[i, : len(joined)] = torch.cat([torch.arange(len(sequence)) for sequence in row])
    return ids, positions


def segment_ids(rows, width):
    """`[B, T]` numbers of the sequences of each row, from 1 on; 0 at padding."""
    numbers = [[i + 1 for i, sequence in enumerate(row) for _ in sequence] for row in rows]
    return torch.tensor([row + [0] * (width - len(row)) for row in numbers])


def unpacked(outputs, rows):
    """The sequences of packed outputs `[B, T, ...]`, one after the other, padded to one length like a batch."""
    pieces = []
    for out, row in zip(outputs, rows, strict=True):
        pieces += out[: sum(map(len, row))].split(list(map(len, row)))
    return torch.nn.utils.rnn.pad_sequence(pieces, batch_first=True)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


SLOW = ("qwen3", "llama", "mistral", "gemma3", "llama4")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name
        for name in ("qwen3", "llama", "mistral", "gemma3", "gpt2", "llama4")
    ],
)
def test_models(name):
    """One row of all sequences, and two of them: each is an example of the same trees as one sequence a row."""
    model, batch = build(name), make_batch(ROLLOUTS)
    loss, expected = random_loss(batch, V), None
    compiled = torch.compile(model, backend="dta", options={"chunk_size": 4})
    statistics = []
    for rows in ([ROLLOUTS], [ROLLOUTS[:3], ROLLOUTS[3:]]):
        ids, positions = pack(rows)

        def forward(model, _, ids=ids, positions=positions, rows=rows):
            return unpacked(model(input_ids=ids, position_ids=positions, use_cache=False).logits, rows)

        expected = expected or reference(model, batch, loss)
        assert_equal(measure(compiled, model, batch, loss, forward), expected, FAMILIES[name][2])
        statistics.append(dta_compile.last_plan(compiled).stats)
    padded = measure(compiled, model, batch, loss)
    assert_equal(padded, expected, FAMILIES[name][2])
    tail = ROLLOUTS[3:]  # the second row ends in padding, whose positions are all zero: sequences of one token
    padding = max(sum(map(len, row)) for row in (ROLLOUTS[:3], tail)) - sum(map(len, tail))
    plan = dta_compile.last_plan(compiled)
    assert plan.segments is None and "packed    " not in str(plan)
    assert statistics[0] == plan.stats
    extra = max(padding, 0)
    assert (statistics[1].sequences, statistics[1].tokens) == (plan.stats.sequences + extra, plan.stats.tokens + extra)


class Packed(BareLM):
    """Attention within segments `[B, T]`; segment 0 is padding if it `pads`. Positions are counted in each segment."""

    def __init__(self, window=None, pads=True):
        super().__init__()
        self.window, self.pads = window, pads

    def hidden(self, ids, segments):
        index = torch.arange(ids.shape[1])
        begins = F.pad(segments[:, 1:] != segments[:, :-1], (1, 0), value=True)
        positions = index - (begins * index).cummax(1).values
        mask = (index[:, None] >= index) & (segments[:, :, None] == segments[:, None])
        if self.window is not None:
            mask = mask & (index[:, None] - index < self.window)
        if self.pads:
            mask = mask & (segments != 0)[:, None]
        return self.mix(self.embedding(ids) + self.position(positions), mask[:, None])


def check(model, compiled, rows, tail=0):
    ids, _ = pack(rows, tail)
    segments = segment_ids(rows, ids.shape[1])

    def step(run):
        out = torch.where((segments != 0)[..., None], run(ids, segments), 0)
        weighted(out).backward()
        return out.detach()

    assert_same(after(model, lambda: step(compiled)), after(model, lambda: step(model)))
    return dta_compile.last_plan(compiled)


class WithGivenMask(BareLM):
    """Attention by a mask over pairs that it is given."""

    def forward(self, ids, pairs):
        return self.head(self.mix(self.embedding(ids), pairs))


def test_masks_over_pairs_pack_rows_by_their_values():
    model = WithGivenMask()
    compiled = torch.compile(model, backend="dta")
    ids = torch.tensor([[3, 1, 2, 3, 1, 2, 3, 1, 1], [3, 1, 2, 3, 2, 2, 3, 1, 2], [3, 1, 2, 3, 1, 2, 1, 1, 3]])
    numbers = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 1])
    pairs = torch.ones(9, 9, dtype=torch.bool).tril() & (numbers == numbers[:, None])

    def step(run):
        out = run(ids, pairs.expand(3, 1, 9, 9).contiguous())
        weighted(out).backward()
        return out.detach()

    assert_same(after(model, lambda: step(compiled)), after(model, lambda: step(model)))
    assert dta_compile.last_plan(compiled).stats.sequences == 6


TOKENS = st.lists(st.integers(1, 3), min_size=1, max_size=7)  # few kinds: much is shared, also by chance


@st.composite
def packings(draw):
    """Rows of sequences: prefixes of each other, equal ones, single tokens; as many rows as one or three."""
    stems = draw(st.lists(TOKENS, min_size=1, max_size=3))
    sequence = st.builds(
        lambda stem, cut, rest: (stem[:cut] + rest) or stem,
        st.sampled_from(stems),
        st.integers(0, 7),
        st.lists(st.integers(1, 3), max_size=3),
    )
    rows = draw(st.sampled_from([1, 3]))
    return draw(st.lists(st.lists(sequence, min_size=1, max_size=5), min_size=rows, max_size=rows))


@pytest.mark.sample(1)
@pytest.mark.parametrize("window", [None, 3])
def test_random_packings(window):
    model = Packed(window)
    compiled = torch.compile(model, backend="dta", options=SMALL_CHUNKS)

    @hypothesis.settings(max_examples=30, deadline=None)
    @hypothesis.given(packings(), st.integers(0, 4))
    @hypothesis.example([[[1, 2, 3]]], 0)
    @hypothesis.example([[[1], [1], [1, 2], [1, 2]]], 0)
    @hypothesis.example([[[1, 2, 3]], [[1, 2, 3]], [[1], [2]]], 3)
    def run(rows, tail):
        hypothesis.assume(tail + max(sum(map(len, row)) for row in rows) > 2)  # shorter rows run as captured
        plan = check(model, compiled, rows, tail)
        sequences = [tuple(sequence) for row in rows for sequence in row]
        assert plan.stats.tokens == sum(map(len, sequences))
        prefixes = {sequence[: i + 1] for sequence in sequences for i in range(len(sequence))}
        assert not plan.prefix_tree.shared or plan.stats.tree_tokens == len(prefixes)

    run()


def test_long_tails_of_single_tokens_are_one_sequence():
    """Where positions are zero, transformers takes every token for a sequence of its own; they are computed, too."""
    model = Packed(pads=False)
    compiled = torch.compile(model, backend="dta", options=SMALL_CHUNKS)
    ids = torch.tensor([[1, 2, 3] + [0] * 100, [4] * 2 + [1, 2] + [0] * 99])
    segments = torch.tensor([[1, 1, 1, *range(2, 102)], [1, 2, 3, 3, *range(4, 103)]])

    def step(run):
        out = run(ids, segments)
        weighted(out).backward()
        return out.detach()

    assert_same(after(model, lambda: step(compiled)), after(model, lambda: step(model)))
    plan = dta_compile.last_plan(compiled)
    assert list(plan.segments) == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3)]
    assert (plan.stats.tokens, plan.stats.tree_tokens) == (9, 5)


def test_plans_name_rows_and_segments():
    model = Packed()
    compiled = torch.compile(model, backend="dta", options=SMALL_CHUNKS)
    plan = check(model, compiled, [[[1, 2], [1, 3], [2]], [[1, 2, 3, 1, 2]], [[1], [1, 2, 3, 1]]])
    assert list(plan.segments) == [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1)]
    assert "packed    row 0 is s0..s2, row 1 is s3, row 2 is s4..s5" in str(plan)
    assert (plan.stats.tokens, plan.stats.tree_tokens) == (15, 7)


@pytest.mark.slow
def test_no_packing_needs_a_compilation_of_its_own():
    """Rows of all lengths, with what transformers' collator adds, one or several; padded rows in between."""
    torch._dynamo.utils.counters.clear()
    model = build("llama")
    compiled = torch.compile(model, backend="dta")

    def step(**inputs):
        logits = compiled(**inputs, use_cache=False).logits
        (logits * inputs.get("attention_mask", torch.ones(1, 1))[..., None]).sum().backward()

    for seed in range(20):
        sequences = rollouts(V, seed, 9 + seed)[: 2 + seed % 5]
        ids, positions = pack([sequences], tail=seed % 3)
        ends = torch.tensor([0, *map(len, sequences)]).cumsum(0).int()
        longest = max(map(len, sequences))
        lengths = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), ends) | dict.fromkeys(
            ("max_length_q", "max_length_k"), longest
        )
        step(input_ids=ids, position_ids=positions, **lengths)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    for seed in range(4):
        rows = [rollouts(V, seed + row)[:3] for row in range(2 + seed)]
        ids, positions = pack(rows)
        step(input_ids=ids, position_ids=positions)
        batch = make_batch(rows[0])
        step(input_ids=batch.ids, attention_mask=batch.mask)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3


class Scores(Packed):
    """The mean log-prob of labels, which run over the ends of sequences as trainers' shifted labels do."""

    def __init__(self, keep=None):
        super().__init__()
        self.keep = keep

    def forward(self, ids, segments):
        x = self.hidden(ids, segments)
        if self.keep is not None:
            x, ids = x[:, -self.keep :], ids[:, -self.keep :]
        log_probs = self.head(x[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        return log_probs


@pytest.mark.parametrize("keep", [None, 6])
def test_labels_run_over_the_ends_of_sequences(keep):
    model = Scores(keep)
    compiled = torch.compile(model, backend="dta", options=SMALL_CHUNKS)
    rows = [[[1, 2, 3, 4], [1, 2, 5], [1, 2, 3, 4]], [[1, 2, 3, 4, 6, 6, 6], [1, 2, 3, 4]]]
    ids, _ = pack(rows)
    segments = segment_ids(rows, ids.shape[1])

    def step(run):
        out = run(ids, segments)
        weighted(out).backward()
        return out.detach()

    assert_same(after(model, lambda: step(compiled)), after(model, lambda: step(model)))
    assert dta_compile.last_plan(compiled).stats.compression > 1.5


def test_a_streaming_step_has_a_loss_for_every_row():
    model = Scores()
    compiled = torch.compile(model, backend="dta", options=SMALL_CHUNKS)
    rows = [[[1, 2, 3, 4], [1, 2, 5], [1, 2, 3, 4]], [[1, 2, 3, 4, 6, 6, 6], [1, 2, 3, 4]]]
    ids, _ = pack(rows)
    segments = segment_ids(rows, ids.shape[1])

    def loss(row, log_probs):
        return (row + 1) * (log_probs * torch.arange(len(log_probs))).sum()

    def eager():
        losses = [loss(row, out) for row, out in enumerate(model(ids, segments))]
        sum(losses).backward()
        return [one.detach() for one in losses]

    actual = after(model, lambda: dta_compile.streaming_step(compiled, loss, ids, segments))
    assert_same(actual, after(model, eager))


@pytest.mark.parametrize("rows", [[[[1, 2, 3]]], [[[1, 2], [1, 2]]], [[[2] * 40, [2] * 30 + [3], [1]]]])
def test_self_checks_see_sequences_that_share(rows):
    model = Packed()
    compiled = torch.compile(model, backend="dta", options={**SMALL_CHUNKS, "verify": "auto"})
    plan = check(model, compiled, rows)
    assert "outputs within" in plan.estimates.self_check
