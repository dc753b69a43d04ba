"""Running states in schedules, worked out by hand; `test_planner.py` has them in all that is planned."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dta_compile.errors import ScheduleError
from dta_compile.options import CHOICES, Options
from dta_compile.plan import (
    KEEP_NOTHING,
    CostModel,
    Footprint,
    Keep,
    PrefixTree,
    Schedule,
    build_schedule,
    choose_keep,
    chunk_tree,
    plan,
    verify,
    with_states,
)
from dta_compile.plan.schedule import MODES
from dta_compile.plan.tree.chunk_tree import cut
from tests.support.plans import peak_bytes

SEQUENCES = [[1, 2, 2, 3, 3], [1, 2, 2, 4, 4], [1, 5, 5, 6, 6], [1, 5, 5, 7, 7], [1, 9]]
TREE = PrefixTree.build(SEQUENCES)
HEADER = "# dta schedule strategy=packed order=lexicographic mode=transparent chunk_size=4"
# Only the KV of the spines of s2[0:3] and s0[1:3] is kept.
KEPT = f"""{HEADER}
anchor   s2[0:3] out kv states@1,3
anchor   +s2[3:5]+s3[3:5] out
pop      s2[1:3]
anchor   s0[1:3]+s4[1:2] out kv states@3
forward  +s0[3:5]+s1[3:5] out
attach   s0..s4
backward +s0[3:5]+s1[3:5]
forward  s0[1:3]+s4[1:2]
backward s0[1:3]+s4[1:2]
pop      s0[1:3]
restore  s2[1:3]
forward  +s2[3:5]+s3[3:5]
backward +s2[3:5]+s3[3:5]
forward  s2[0:3]
backward s2[0:3]
pop      s2[0:3]"""


def test_states_are_kept_where_something_starts_and_restored():
    options = Options(strategy="packed", order="lexicographic", chunk_size=4)
    plain = build_schedule(TREE, options, "transparent", Keep(frozenset(), frozenset({1, 3})))
    assert str(with_states(TREE, plain)) == KEPT
    counts = verify(TREE, Schedule.parse(KEPT), states=True)
    # Both of s2[0:3] stay while the one of s0[1:3] is on the stack in place of the deeper of them.
    assert (counts.peak_states, counts.peak_state_gradients) == (3, 2)
    assert verify(TREE, plain).peak_states == verify(TREE, plain).peak_state_gradients == 0


@pytest.mark.parametrize(
    "old, new, row, expected, got",
    [
        ("states@1,3", "states@3", "anchor   s0[1:3]+s4[1:2] out kv states@3", "state at depth 1 of s0", "no states"),
        ("kv states@3", "kv states@2", "forward  +s0[3:5]+s1[3:5] out", "state at depth 3 of s0", "states at 1, 2"),
        ("restore  s2[1:3]", "anchor s2[1:3]", "forward  +s2[3:5]+s3[3:5]", "state at depth 3 of s2", "states at 1"),
        (
            "pop      s2[1:3]",
            "anchor s2[0:1]",
            "anchor   s0[1:3]+s4[1:2] out kv states@3",
            "depth 1 of s0",
            "no states",
        ),
        ("@1,3", "@3,1", "anchor   s2[0:3] out kv states@3,1", "ascending, 0 < depth <= 3", "3, 1"),
        ("@1,3", "@1,3,3", "anchor   s2[0:3] out kv states@1,3,3", "ascending, 0 < depth <= 3", "1, 3, 3"),
        ("@1,3", "@0,1,3", "anchor   s2[0:3] out kv states@0,1,3", "ascending, 0 < depth <= 3", "0, 1, 3"),
        ("kv states@3", "kv states@3,4", "anchor   s0[1:3]+s4[1:2] out kv states@3,4", "1 < depth <= 3", "3, 4"),
        (
            "s1[3:5] out",
            "s1[3:5] out states@4",
            "forward  +s0[3:5]+s1[3:5] out states@4",
            "a spine",
            "+s0[3:5]+s1[3:5]",
        ),
    ],
)
def test_states_that_are_missing_or_out_of_place_are_rejected(old, new, row, expected, got):
    assert old in KEPT
    with pytest.raises(ScheduleError) as error:
        verify(TREE, Schedule.parse(KEPT.replace(old, new, 1)), states=True)
    (marked,) = (line for line in str(error.value).splitlines() if line.strip().startswith(">>"))
    assert marked.endswith(row)
    assert expected in error.value.expected
    assert error.value.got == got


def test_states_are_part_of_the_peak():
    schedule, working = Schedule.parse(KEPT), {"backward": ((0, 1000, 0),)}
    alone = peak_bytes(TREE, schedule, Footprint(0, state=7))
    # In the second phase: the gradients that wait at 3 and 1, and all states but that of s0[1:3].
    assert alone == (3 * 7, (3 + 1) * 7)
    # The backward of four tokens that finds most states, and leaves a gradient.
    assert peak_bytes(TREE, schedule, Footprint(0, state=7, working=working)) == (3 * 7, 4000 + (3 + 1) * 7)
    assert peak_bytes(TREE, schedule, Footprint(1)) == peak_bytes(TREE, Schedule.parse(KEPT), Footprint(1, state=0))


def test_kept_chunks_pay_for_the_states_that_they_hold():
    options = Options(strategy="packed", chunk_size=4)
    chunks = chunk_tree(TREE, options)
    assert [str(chunk) for chunk in chunks.chunks][3] == "s2[0:3]"
    assert chunks.starts_below() == [0, 1, 0, 2]

    def kept(budget, footprint):
        return choose_keep(TREE, options, chunks, budget, footprint, CostModel())

    # The KV of three tokens, and two states.
    footprint = Footprint(graph_token=1000, kv_token=1, state=50)
    assert kept(102, footprint) == KEEP_NOTHING
    assert kept(103, footprint) == Keep(frozenset(), kv=frozenset({3}))
    assert 3 not in kept(3099, footprint).graphs and 3 in kept(10**6, footprint).graphs
    # Recurrent layers only: the states alone are what comes back.
    assert kept(100, Footprint(graph_token=1000, state=50)) == Keep(frozenset(), kv=frozenset({3}))


def test_plans_of_models_with_running_states():
    for strategy in CHOICES["strategy"]:
        for mode in MODES if strategy != "one_tree" else ():
            made = plan(SEQUENCES, strategy=strategy, mode=mode, chunk_size=2, state_bytes=1)
            assert made.stats.peak_states == made.simulation.peak_states > 0
            shown = f"{made.stats.peak_states} running states, {made.stats.peak_state_gradients} with a gradient"
            assert shown in " ".join(str(made).split())
            assert (made.stats.peak_state_gradients > 0) == (mode != "score")
    without = plan(SEQUENCES, chunk_size=2)
    assert "running states" not in str(without) and "states@" not in str(without.schedule)


@given(st.integers(0, 50), st.integers(1, 700), st.integers(1, 300))
def test_cuts_for_recurrences_are_as_few_and_small(start, tokens, chunk_size):
    plain, aligned = (list(cut(0, start, start + tokens, chunk_size, block)) for block in (1, 64))
    assert len(aligned) == len(plain)
    assert [part.start for part in aligned] == [start, *(part.stop for part in aligned[:-1])]
    assert aligned[-1].stop == start + tokens and all(0 < part.tokens <= chunk_size for part in aligned)
    assert max(part.tokens for part in plain) - min(part.tokens for part in plain) <= 1
    if chunk_size % 64 == 0:
        assert all(part.tokens % 64 == 0 for part in aligned[:-1])
