import dataclasses
import random
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dta_compile.errors import PlanError, ScheduleError
from dta_compile.options import CHOICES, Options
from dta_compile.plan import (
    KEEP_ALL,
    KEEP_NOTHING,
    Anchor,
    Attach,
    Forward,
    Keep,
    PrefixTree,
    Restore,
    Schedule,
    Slice,
    build_schedule,
    chunk_tree,
    verify,
    with_states,
)
from dta_compile.plan.schedule import MODES, SWEEPS
from tests.support.execution import execute
from tests.support.units import with_units

CHUNK_SIZES = [1, 2, 3, 7, 1000]
ORDERS = CHOICES["order"]
STRATEGIES = ["packed", "dfs", "vanilla", "dense"]


def planned(sequences, strategy, mode, keep=KEEP_ALL, **options):
    tree = PrefixTree.build(sequences, share=strategy != "dense")
    schedule = build_schedule(tree, Options(strategy=strategy, **options), mode, keep)
    return tree, schedule, verify(tree, schedule)


def any_keep(chunks):
    """All graphs, or any subset of the graphs and of the spines' KV."""
    positions = list(range(len(chunks)))
    spines = [k for k in positions if chunks[k].spine is not None]
    graphs = st.none() | st.sets(st.sampled_from(positions)) if positions else st.none()
    kv = st.sets(st.sampled_from(spines)) if spines else st.just(())
    return st.builds(lambda graphs, kv: Keep(None if graphs is None else frozenset(graphs), frozenset(kv)), graphs, kv)


@settings(max_examples=120)
@given(st.data())
def test_every_schedule_is_legal_and_exact(batches, data):
    sequences, units = with_units(data.draw(batches), data.draw(st.sampled_from([1, 2, 1000, 1000])))
    strategy, mode = data.draw(st.sampled_from(STRATEGIES)), data.draw(st.sampled_from(MODES))
    options = Options(
        strategy=strategy,
        order=data.draw(st.sampled_from(ORDERS)),
        chunk_size=data.draw(st.sampled_from(CHUNK_SIZES)),
        sweep=data.draw(st.sampled_from(SWEEPS)),
    )
    tree = PrefixTree.build(sequences, share=strategy != "dense", units=units)
    chunks = chunk_tree(tree, options)
    schedule = build_schedule(tree, options, mode, data.draw(any_keep(chunks.chunks)), chunks)
    simulation = verify(tree, schedule)
    execute(sequences, schedule, tree.shared)
    assert Schedule.parse(str(schedule)) == schedule
    assert simulation.backward.tokens == (0 if mode == "score" else tree.num_rows)
    with_its_states = with_states(tree, schedule)
    check_states(sequences, tree, with_its_states, simulation)
    assert with_states(tree, with_its_states) == with_its_states
    if mode != "streaming":  # whose first phase runs all chunks
        first = {op.chunk: len(op.states) for op in with_its_states.ops if getattr(op, "out", False)}
        assert [first[chunk] for chunk in chunks.chunks] == chunks.starts_below()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_schedule_that_cuts_a_unit_is_illegal(strategy):
    sequences, units = with_units([[1, 9, 9, 9, 9, 2], [1, 9, 9, 9, 9, 3]], 9)
    options = Options(strategy=strategy, chunk_size=3)
    schedule = build_schedule(PrefixTree.build(sequences, share=strategy != "dense"), options, "score")
    with pytest.raises(ScheduleError, match="tokens that read each other both ways are not cut"):
        verify(PrefixTree.build(sequences, share=strategy != "dense", units=units), schedule)


def check_states(sequences, tree, schedule, without):
    """Running states are where they are needed, each of them is, and they change nothing else (counts `without`)."""
    assert Schedule.parse(str(schedule)) == schedule
    counts = verify(tree, schedule, states=True)
    run = execute(sequences, schedule, tree.shared, states=True)
    assert (counts.peak_states, counts.peak_state_gradients) == (run.most_states, run.most_state_gradients)
    assert dataclasses.replace(counts, peak_states=0, peak_state_gradients=0) == without
    kept = [(k, depth) for k, op in enumerate(schedule.ops) for depth in getattr(op, "states", ())]
    assert bool(kept) == any(op.chunk.start for op in schedule.ops if isinstance(op, (Anchor, Forward)))
    for k, depth in random.Random(0).sample(kept, min(len(kept), 10)):
        ops = list(schedule.ops)
        ops[k] = dataclasses.replace(ops[k], states=tuple(d for d in ops[k].states if d != depth))
        with pytest.raises(ScheduleError, match="the stack holds the running state at the start of a chunk"):
            verify(tree, dataclasses.replace(schedule, ops=tuple(ops)), states=True)


@settings(max_examples=80)
@given(st.data())
def test_bounds_on_work_and_memory(batches, data):
    sequences = data.draw(batches)
    chunk_size = data.draw(st.sampled_from(CHUNK_SIZES))
    common = {"chunk_size": chunk_size, "order": data.draw(st.sampled_from(ORDERS))}
    for strategy in STRATEGIES:
        assert planned(sequences, strategy, "score", **common)[2].recomputed_tokens == 0
        _, schedule, kept_all = planned(sequences, strategy, "transparent", **common)
        assert kept_all.recomputed_tokens == 0, "one forward and one backward of the tree"
        assert not any(isinstance(op, Anchor) for op in schedule.ops)
    for strategy in ("packed", "dfs", "dense"):
        # The last graph of the first phase stays: its backward is the first of the second.
        assert planned(sequences, strategy, "transparent", KEEP_NOTHING, **common)[2].peak_live_tokens <= chunk_size
        assert planned(sequences, strategy, "streaming", **common)[2].peak_live_tokens <= chunk_size
    vanilla = planned(sequences, "vanilla", "streaming", **common)[2]
    assert vanilla.recomputed_tokens == 0
    assert vanilla.peak_live_tokens <= max(map(len, sequences), default=0)


@settings(max_examples=100)
@given(st.data())
def test_kept_kv_saves_the_anchors_of_the_second_phase(batches, data):
    sequences, strategy = data.draw(batches), data.draw(st.sampled_from(["packed", "dfs", "dense"]))
    options = Options(strategy=strategy, chunk_size=data.draw(st.sampled_from(CHUNK_SIZES)))
    tree = PrefixTree.build(sequences, share=strategy != "dense")
    chunks = chunk_tree(tree, options).chunks
    spines = frozenset(k for k, chunk in enumerate(chunks) if chunk.spine is not None)
    simulation = verify(tree, build_schedule(tree, options, "transparent", Keep(frozenset(), spines)))
    again = sum(chunk.tokens for chunk in chunks[1:])
    assert simulation.recomputed_tokens == again, "every chunk but the first once more, for its graph"


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
    assert [op for op in kept.ops if isinstance(op, Restore)] == [Restore(Slice(2, 1, 2)), Restore(Slice(2, 2, 3))]
    phase = planned(sequences, "dfs", "transparent", KEEP_NOTHING, **common)[1]
    rebuilt = phase.ops[phase.ops.index(Attach((0, 1, 2))) :]
    assert not any(isinstance(op, Restore) for op in rebuilt)
    assert [op.chunk.spine for op in rebuilt if isinstance(op, Anchor)] == [Slice(2, 1, 3)]
    chunks = chunk_tree(PrefixTree.build(sequences), Options(strategy="dfs", **common)).chunks
    kv = Keep(frozenset(), frozenset(range(len(chunks))))
    stored = planned(sequences, "dfs", "transparent", kv, **common)[1]
    assert [op for op in stored.ops if isinstance(op, Restore)] == [Restore(Slice(2, 1, 2)), Restore(Slice(2, 2, 3))]
    assert all(op.kv == op.out for op in stored.ops if isinstance(op, Anchor))


def test_pieces_are_even():
    _, schedule, _ = planned([[1] * 10], "dfs", "transparent", chunk_size=4)
    assert [op.chunk.spine for op in schedule.ops if isinstance(op, Forward)] == [
        Slice(0, 0, 3),
        Slice(0, 3, 6),
        Slice(0, 6, 10),
    ]


def test_vanilla_cuts_nodes_and_dfs_cuts_what_a_leaf_owns():
    sequences = [[1, 2, 3, 4], [1, 2]]
    vanilla = planned(sequences, "vanilla", "transparent")[1]
    dfs = planned(sequences, "dfs", "transparent")[1]
    assert [str(op.chunk) for op in vanilla.ops if isinstance(op, Forward)] == ["s0[0:2]", "s0[2:4]"]
    assert [str(op.chunk) for op in dfs.ops if isinstance(op, Forward)] == ["s0[0:4]"]


def test_batches_without_tokens():
    for strategy in STRATEGIES:
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


@pytest.mark.parametrize("strategy", ["packed", "dfs", pytest.param("vanilla", marks=pytest.mark.slow)])
@pytest.mark.parametrize("shape", ["nested", "caterpillar", "fan"])
@pytest.mark.sample(3)
def test_schedules_of_large_trees_are_linear_in_size_and_time(shape, strategy):
    base = np.arange(30_000, dtype=np.int32) % 251
    nested = [base[: 15 * n] for n in range(2000)]
    sequences = {
        "nested": nested,
        "caterpillar": [np.append(prefix, -1) for prefix in nested],
        "fan": [[7] * 20 + [n] for n in range(10_000)],
    }[shape]
    tree = PrefixTree.build(sequences)
    started = time.process_time()
    schedule = build_schedule(tree, Options(strategy=strategy, chunk_size=64), "transparent", KEEP_NOTHING)
    assert time.process_time() - started < 5
    assert len(schedule.ops) < 10 * (len(tree.stop) + tree.num_rows // 64)
    started = time.process_time()
    schedule = with_states(tree, schedule)
    assert time.process_time() - started < 5
    assert sum(len(getattr(op, "states", ())) for op in schedule.ops) < len(schedule.ops)
    verify(tree, schedule, states=True)
