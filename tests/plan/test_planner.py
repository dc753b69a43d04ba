import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dta_compile.errors import PlanError
from dta_compile.options import CHOICES, Options
from dta_compile.plan import (
    Anchor,
    Attach,
    Backward,
    Forward,
    PrefixTree,
    Restore,
    Schedule,
    Slice,
    build_schedule,
    choose_kept,
    planner,
    verify,
)
from dta_compile.plan.schedule import MODES

CHUNK_SIZES = [1, 2, 3, 7, 1000]
ORDERS = CHOICES["order"]


def tree_for(sequences, strategy):
    return PrefixTree.build(sequences, share=strategy != "dense")


def planned(sequences, strategy, mode, keep_tokens=None, **options):
    tree = tree_for(sequences, strategy)
    schedule = build_schedule(tree, Options(strategy=strategy, **options), mode, keep_tokens)
    return tree, schedule, verify(tree, schedule)


def execute(tree, schedule):
    """Runs a schedule as the runtime does, with rows for KV and counts for KV gradients, kept by stack position.

    Every token reads the KV of all tokens above it, so by its backward a token has had one gradient from each
    token below it.
    """
    below = np.zeros(tree.num_rows, int)
    for row, (sequence, depth) in token_places(tree).items():
        below[tree.rows(sequence, 0, depth)] += 1
        assert tree.row_at(sequence, depth) == row
    deepest = int(tree.stop.max(initial=0))
    stack, gradients = np.full(deepest, -1), np.zeros(deepest, int)
    for op in schedule.ops:
        if isinstance(op, Attach):
            continue
        (c,) = op.chunk
        if isinstance(op, (Anchor, Forward, Restore, Backward)):
            assert stack[: c.start].tolist() == tree.rows(c.sequence, 0, c.start).tolist()
        if isinstance(op, (Anchor, Forward, Restore)):
            stack[c.start : c.stop] = tree.rows(c.sequence, c.start, c.stop)
        if isinstance(op, Backward):
            received = gradients[c.start : c.stop] + np.arange(c.tokens)[::-1]
            assert received.tolist() == below[tree.rows(c.sequence, c.start, c.stop)].tolist()
            gradients[: c.start] += c.tokens
            gradients[c.start : c.stop] = 0


def token_places(tree):
    """A sequence and the depth of every row."""
    return {
        int(tree.row[node] + depth - tree.start[node]): (int(tree.sequence[node]), depth)
        for node in range(len(tree.stop))
        for depth in range(tree.start[node], tree.stop[node])
    }


@settings(max_examples=400)
@given(st.data())
def test_every_schedule_is_legal_and_exact(batches, data):
    sequences = data.draw(batches)
    strategy = data.draw(st.sampled_from(["vanilla", "dfs", "dense"]))
    tree, schedule, simulation = planned(
        sequences,
        strategy,
        mode=data.draw(st.sampled_from(MODES)),
        keep_tokens=data.draw(st.sampled_from([0, 5, 20, None])),
        order=data.draw(st.sampled_from(ORDERS)),
        chunk_size=data.draw(st.sampled_from(CHUNK_SIZES)),
    )
    assert Schedule.parse(str(schedule)) == schedule
    assert simulation.backward_tokens == (0 if schedule.mode == "score" else tree.num_rows)
    execute(tree, schedule)


@settings(max_examples=200)
@given(st.data())
def test_bounds_on_work_and_memory(batches, data):
    sequences = data.draw(batches)
    chunk_size = data.draw(st.sampled_from(CHUNK_SIZES))
    order = data.draw(st.sampled_from(ORDERS))
    keep = data.draw(st.sampled_from([0, 5, 20]))
    common = {"chunk_size": chunk_size, "order": order}
    longest = max(map(len, sequences), default=0)

    for strategy in ("vanilla", "dfs", "dense"):
        assert planned(sequences, strategy, "score", **common)[2].recomputed_tokens == 0
        _, schedule, kept_all = planned(sequences, strategy, "transparent", **common)
        assert kept_all.recomputed_tokens == 0, "one forward and one backward of the tree"
        assert not any(isinstance(op, Anchor) for op in schedule.ops)
    for strategy in ("dfs", "dense"):
        assert planned(sequences, strategy, "transparent", keep, **common)[2].peak_live_tokens <= max(keep, chunk_size)
        assert planned(sequences, strategy, "streaming", **common)[2].peak_live_tokens <= chunk_size
    vanilla = planned(sequences, "vanilla", "streaming", **common)[2]
    assert vanilla.recomputed_tokens == 0
    assert vanilla.peak_live_tokens <= longest


def test_streaming_attaches_a_sequence_as_soon_as_it_is_on_the_stack():
    _, schedule, _ = planned([[1, 2], [1, 2, 3], [1, 2], [4], []], "dfs", "streaming")
    assert [op.sequences for op in schedule.ops if isinstance(op, Attach)] == [(0, 1, 2, 4), (3,)]


def test_transparent_attaches_once_after_all_outputs():
    _, schedule, _ = planned([[1, 2], [1, 3], []], "dfs", "transparent")
    (attach,) = (k for k, op in enumerate(schedule.ops) if isinstance(op, Attach))
    assert schedule.ops[attach] == Attach((0, 1, 2))
    assert any(op.out for op in schedule.ops[:attach] if isinstance(op, Forward))
    assert not any(getattr(op, "out", False) for op in schedule.ops[attach:])


def test_what_later_leaves_share_is_restored_if_kept_and_anchored_if_not():
    # Lexicographic order visits the short leaf first, so the stack must be rebuilt for the deep branch.
    sequences = [[1, 2], [1, 7, 3, 4, 5], [1, 7, 3, 6]]
    common = {"chunk_size": 2, "order": "lexicographic"}
    kept = planned(sequences, "dfs", "transparent", **common)[1]
    assert [op for op in kept.ops if isinstance(op, Restore)] == [
        Restore((Slice(2, 1, 2),)),
        Restore((Slice(2, 2, 3),)),
    ]
    phase = planned(sequences, "dfs", "transparent", 0, **common)[1]
    rebuilt = phase.ops[phase.ops.index(Attach((0, 1, 2))) :]
    assert not any(isinstance(op, Restore) for op in rebuilt)
    assert [op.chunk[0] for op in rebuilt if isinstance(op, Anchor)] == [Slice(1, 1, 3)]


def test_pieces_are_even():
    _, schedule, _ = planned([[1] * 10], "dfs", "transparent", chunk_size=4)
    assert [op.chunk[0] for op in schedule.ops if isinstance(op, Forward)] == [
        Slice(0, 0, 3),
        Slice(0, 3, 6),
        Slice(0, 6, 10),
    ]


def test_vanilla_cuts_nodes_and_dfs_cuts_what_a_leaf_owns():
    sequences = [[1, 2, 3, 4], [1, 2]]
    vanilla = planned(sequences, "vanilla", "transparent")[1]
    dfs = planned(sequences, "dfs", "transparent")[1]
    assert [str(op.chunk[0]) for op in vanilla.ops if isinstance(op, Forward)] == ["s0[0:2]", "s0[2:4]"]
    assert [str(op.chunk[0]) for op in dfs.ops if isinstance(op, Forward)] == ["s0[0:4]"]


def test_kept_pieces_are_the_first_to_go_backward():
    pieces = [Slice(0, 8, 12), Slice(0, 4, 8), Slice(0, 0, 4)]
    assert choose_kept(pieces, None) == set(pieces)
    assert choose_kept(pieces, 11) == set(pieces[:2])
    assert choose_kept(pieces, 0) == {pieces[0]}, "the last forward is followed by its own backward"
    assert choose_kept([], 0) == set()


@settings(max_examples=200)
@given(st.data())
def test_any_choice_of_kept_pieces_is_legal(batches, data):
    """The choice may be replaced, so the builder must cope with any that keeps the first piece."""

    def choose(pieces, keep_tokens):
        others = data.draw(st.sets(st.sampled_from(pieces))) if pieces else set()
        return {*pieces[:1], *others}

    sequences, strategy = data.draw(batches), data.draw(st.sampled_from(["vanilla", "dfs", "dense"]))
    options = {"chunk_size": data.draw(st.sampled_from(CHUNK_SIZES)), "order": data.draw(st.sampled_from(ORDERS))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "choose_kept", choose)
        tree, schedule, _ = planned(sequences, strategy, "transparent", **options)
    execute(tree, schedule)


def test_batches_without_tokens():
    for strategy in ("vanilla", "dfs", "dense"):
        for mode in MODES:
            assert planned([], strategy, mode)[1].ops == ()
            assert planned([[], []], strategy, mode)[1].ops == (Attach((0, 1)),)


def test_refusals():
    tree = PrefixTree.build([[1]])
    with pytest.raises(PlanError, match="unknown mode"):
        build_schedule(tree, Options(strategy="dfs"), "opaque")
    with pytest.raises(PlanError, match="chosen strategy"):
        build_schedule(tree, Options(), "score")
    with pytest.raises(PlanError, match="does not share"):
        build_schedule(tree, Options(strategy="dense"), "score")


@pytest.mark.parametrize("strategy", ["vanilla", "dfs"])
@pytest.mark.parametrize("shape", ["nested", "caterpillar", "fan"])
def test_schedules_of_large_trees_are_linear_in_size_and_time(shape, strategy):
    base = np.arange(30_000, dtype=np.int32) % 251
    nested = [base[: 15 * n] for n in range(2000)]
    sequences = {
        "nested": nested,
        "caterpillar": [np.append(prefix, -1) for prefix in nested],
        "fan": [[7] * 20 + [n] for n in range(10_000)],
    }[shape]
    tree = PrefixTree.build(sequences)
    started = time.perf_counter()
    schedule = build_schedule(tree, Options(strategy=strategy, chunk_size=64), "transparent", 0)
    assert time.perf_counter() - started < 5
    assert len(schedule.ops) < 10 * (len(tree.stop) + tree.num_rows // 64)
    verify(tree, schedule)
