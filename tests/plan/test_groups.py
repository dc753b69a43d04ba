"""Groups of subtrees: a sweep of stages whose values between parts do not fit into memory for the whole tree."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dta_compile.errors import ScheduleError
from dta_compile.options import Options
from dta_compile.plan import Footprint, Limits, PartBytes, PrefixTree, Schedule, bytes_of_halves, make_plan, verify
from dta_compile.plan.schedule import GroupOps
from tests.support.sequences import BATCHES

# Four leaves of three tokens below a prefix of two; the last sequence is empty.
SEQUENCES = [[1, 2, 3, 3, 3], [1, 2, 4, 4, 4], [1, 2, 5, 5, 5], [1, 2, 6, 6, 6], []]
TREE = PrefixTree.build(SEQUENCES)
PART = PartBytes(Footprint(10.0, 0.0, 2.0), sums=100.0, sent=4.0)
OPTIONS = Options(strategy="packed", chunk_size=20, sweep="stages")


def planned(room, tree=TREE, options=OPTIONS, parts=(PART, PART), **limits):
    known = Limits(0, Footprint(20.0, 0.0, 4.0), parts=parts, room=room, **limits)
    return make_plan(tree, options, limits=known)


def test_the_tree_of_some_sequences():
    @given(BATCHES, st.data())
    def check(sequences, data):
        whole = PrefixTree.build(sequences)
        chosen = data.draw(st.sets(st.sampled_from(range(len(sequences)))) if sequences else st.just(set()))
        some = whole.of(sorted(chosen))
        expected = PrefixTree.build([tokens if i in chosen else [] for i, tokens in enumerate(sequences)])
        for name in ("start", "stop", "parent", "row", "lengths"):
            assert getattr(some, name).tolist() == getattr(expected, name).tolist()
        rows = some.rows_in(whole)
        for i in chosen:
            length = len(sequences[i])
            assert rows[some.rows(i, 0, length)].tolist() == whole.rows(i, 0, length).tolist()

    check()


def test_as_few_groups_as_fit_each_with_what_it_shares():
    assert TREE.num_rows == 14
    assert not planned(14 * 8).schedule.groups
    plan = planned(14 * 8 - 1)
    # Two leaves and the prefix are eight tokens; one token is in no group alone, but the prefix is in both.
    assert [group.sequences for group in plan.schedule.groups] == [(4, 0, 1), (2, 3)]
    assert str(plan.schedule).splitlines()[1:4] == [
        "group s4 s0 s1:",
        "anchor   +s0[0:5]+s1[2:5] out",
        "attach   s0..s4",
    ]
    # For outputs, for hidden states (which the last group keeps), and for the backward.
    assert plan.simulation.forward.tokens == 2 * 16 + 8 and plan.simulation.backward.tokens == 16
    assert plan.simulation.recomputed_tokens == 2 * 16 + 8 - 14
    assert len(planned(5 * 8).schedule.groups) == len(planned(0).schedule.groups) == 4, "a leaf cannot be cut"
    assert "2 groups of subtrees" in str(plan)


@pytest.mark.parametrize("room", [None, 14 * 8, 5 * 8, 0])
def test_ranks_have_as_many_groups_as_they_agreed_on(room):
    """Also if less memory is free when they plan anew: they gather parameters together, once a group."""
    for number in (2, 3, 7):  # of seven groups, some are without tokens
        assert len(planned(room, groups=number).schedule.groups) == number


def test_sums_of_gradients_stay_from_group_to_group():
    plan = planned(14 * 8 - 1)
    alone = plan.schedule.of_group(0)
    first, second = bytes_of_halves(TREE, plan.schedule, (PART, PART), 0)
    of_group = bytes_of_halves(TREE.of([0, 1]), alone, (PART._replace(sums=0), PART._replace(sums=0)), 0)
    assert (first, second) == (of_group[0], 200 + max(of_group))
    reduced = PART._replace(reduced=60.0)  # from other ranks: only one part's are whole
    of_group = bytes_of_halves(TREE.of([0, 1]), alone, (PART._replace(sums=60), PART._replace(sums=60)), 0)
    assert bytes_of_halves(TREE, plan.schedule, (reduced, reduced), 0)[1] == 80 + max(of_group)


@given(BATCHES, st.integers(0, 400), st.sampled_from([2, 5, 100]))
def test_groups_are_legal_and_parse_back(sequences, room, chunk_size):
    options = dataclasses.replace(OPTIONS, strategy="auto", chunk_size=chunk_size)
    plan = planned(room, PrefixTree.build(sequences), options)
    assert Schedule.parse(str(plan.schedule)) == plan.schedule
    fits = [plan.prefix_tree.of(group.sequences).num_rows * 8 <= room for group in plan.schedule.groups]
    assert all(fits) or room < 8 * max(map(len, sequences))


def test_what_groups_may_not_do():
    schedule = planned(14 * 8 - 1).schedule
    one, other = schedule.groups
    for groups, rule in (
        ((one,), "every sequence is in one group"),
        ((one, GroupOps((*other.sequences, 0), other.ops)), "every sequence is in one group"),
        ((one, GroupOps(other.sequences, one.ops)), "inside their sequence"),
    ):
        with pytest.raises(ScheduleError, match=rule):
            verify(TREE, schedule.in_groups(groups))
    kept = [dataclasses.replace(other.ops[0], results=True), *other.ops[1:]]
    with pytest.raises(ScheduleError, match="swept by stages and keep nothing"):
        verify(TREE, schedule.in_groups((one, GroupOps(other.sequences, tuple(kept)))))
    for change in ({"sweep": "chunks"}, {"mode": "score"}):
        with pytest.raises(ScheduleError, match="swept by stages and keep nothing"):
            verify(TREE, dataclasses.replace(schedule, **change))
    for line in ("group s0", "group s0 1:"):
        with pytest.raises(ScheduleError, match="not a"):
            Schedule.parse("\n".join([*str(schedule).splitlines(), line]))
    with pytest.raises(ScheduleError, match="not a group of sequences"):
        Schedule.parse("\n".join([str(schedule).splitlines()[0], "attach s0", *str(schedule).splitlines()[1:]]))
