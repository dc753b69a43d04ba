"""Strides: sweeps of stages that keep what passes between parts before every so many-th part alone."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dta_compile.errors import ScheduleError
from dta_compile.options import Options
from dta_compile.plan import Footprint, Limits, PartBytes, PrefixTree, Schedule, bytes_of_halves, make_plan, verify
from tests.support.sequences import BATCHES

TREE = PrefixTree.build([[1, 2, 3, 3, 3], [1, 2, 4, 4, 4], [1, 2, 5, 5, 5], [1, 2, 6, 6, 6], []])
ROWS = TREE.num_rows
LAYER = PartBytes(Footprint(1.0, 0.0, 0.0), sent=4.0)
PARTS = (LAYER,) * 9 + (LAYER._replace(sent=0.0),)
GATHERED = tuple(part._replace(gathered=(1.0, 1.0, 1.0)) for part in PARTS)
OPTIONS = Options(strategy="packed", chunk_size=20, sweep="stages")


def planned(parts=PARTS, budget=0, tree=TREE, options=OPTIONS, **limits):
    known = Limits(budget, Footprint(10.0, 0.0, 0.0), parts=parts, **limits)
    return make_plan(tree, options, limits=known)


def peak(plan, parts):
    return max(bytes_of_halves(TREE, plan.schedule, parts, 0))


def test_the_last_two_parts_are_stretches_of_their_own():
    schedule = planned().schedule
    for parts in range(1, 12):
        for stride in range(1, 13):
            stretches = dataclasses.replace(schedule, stride=stride).stretches(parts)
            assert [number for stretch in stretches for number in stretch] == list(range(parts))
            assert all(len(stretch) == 1 for stretch in stretches[-2:] if stretch[0])
            assert all(len(stretch) == stride for stretch in stretches[1:-2])
            assert len(stretches[0]) <= stride + 1


def test_hidden_states_of_one_stretch_are_there_besides_those_that_are_kept():
    schedule = planned(options=dataclasses.replace(OPTIONS, stride=3)).schedule
    assert schedule.stride == 3 and schedule.share_again == 0.5
    # Stretches 0 to 1, 2 to 4, 5 to 7, 8 and 9. Parts 1, 4, 7 and 8 send what is kept. As part 7 goes backward, what
    # parts 1, 4, 5 and 6 have sent is there, the gradient of what it has sent itself, and activations, or at last the
    # gradient of what it received.
    sent = LAYER.sent * ROWS
    assert bytes_of_halves(TREE, schedule, PARTS, 0) == (4 * sent + ROWS, (4 + 2) * sent)
    whole = dataclasses.replace(schedule, stride=1)
    assert bytes_of_halves(TREE, whole, PARTS, 0)[1] == (8 + 2) * sent
    once, again = verify(TREE, whole), verify(TREE, schedule)
    assert again.forward.tokens == once.forward.tokens + ROWS // 2 and again.backward == once.backward
    assert again.recomputed_tokens == once.recomputed_tokens + ROWS // 2


def test_values_that_later_parts_read_are_there_until_the_first_of_these_went_backward():
    """What part 0 sends to parts 1 and 8 enters the stretch of part 8 as well, and has a gradient from there on."""
    schedule = planned(options=dataclasses.replace(OPTIONS, stride=3)).schedule
    skip = (LAYER._replace(sent=6.0, readers=((4.0, (1,)), (2.0, (8,)))), *PARTS[1:])
    sent = LAYER.sent * ROWS
    assert bytes_of_halves(TREE, schedule, skip, 0) == ((4 + 0.5) * sent + ROWS, (4 + 2 + 0.5) * sent)
    whole = dataclasses.replace(schedule, stride=1)
    assert bytes_of_halves(TREE, whole, skip, 0)[1] == (8 + 2 + 2 * 0.5) * sent
    returned = (*PARTS[:4], LAYER._replace(returned=1e6), *PARTS[5:])
    assert bytes_of_halves(TREE, whole, returned, 0)[1] == 10 * sent + 1e6, "comes before any part goes backward"


def test_a_stride_is_taken_where_hidden_states_do_not_fit_and_groups_where_none_is_enough():
    sent = LAYER.sent * ROWS
    assert planned(room=9 * sent).schedule.stride == 1
    assert planned(room=9 * sent - 1).schedule.stride == planned(room=5 * sent).schedule.stride == 2
    least = planned(room=5 * sent - 1).schedule
    assert least.stride == 1 and len(least.groups) > 1
    deep = PARTS[:-1] * 3 + PARTS[-1:]
    chain = PrefixTree.build([[1] * ROWS])
    assert planned(room=5 * sent, tree=chain).schedule.stride > 1, "one sequence is no two groups"
    assert [planned(deep, room=n * sent).schedule.stride for n in (27, 26, 14, 13, 10, 9)] == [1, 2, 2, 3, 4, 5]
    assert planned(room=9 * sent - 1, options=dataclasses.replace(OPTIONS, stride=1)).schedule.groups
    assert planned(room=9 * sent - 1, options=dataclasses.replace(OPTIONS, groups=2)).schedule.stride == 1
    assert planned(room=9 * sent, stride=4).schedule.stride == 4, "ranks have agreed on it"


def test_a_budget_first_keeps_hidden_states_where_layers_are_gathered():
    assert planned(is_asked_for=True).schedule.stride == 1
    none = planned(GATHERED, is_asked_for=True)
    assert none.schedule.stride > 1 and f"every {none.schedule.stride}. part" in str(none)
    before = none
    for budget in range(1, 400, 7):
        plan = planned(GATHERED, budget, is_asked_for=True)
        assert peak(plan, GATHERED) <= peak(none, GATHERED) + budget
        assert plan.schedule.stride <= before.schedule.stride
        assert plan.estimates.seconds <= before.estimates.seconds
        before = plan
    assert before.schedule.stride == 1 and before.simulation.recomputed_tokens < ROWS
    heavy = tuple(part._replace(gathered=(10**6, 10**6, 0.0)) for part in PARTS)
    assert planned(heavy, is_asked_for=True).schedule.stride == 1, "hidden states do not decide the peak"


@given(BATCHES, st.integers(2, 12), st.sampled_from([2, 5, 100]))
def test_strides_are_legal_and_parse_back(sequences, stride, chunk_size):
    options = dataclasses.replace(OPTIONS, strategy="auto", chunk_size=chunk_size, stride=stride)
    plan = planned(tree=PrefixTree.build(sequences), options=options)
    assert Schedule.parse(str(plan.schedule)) == plan.schedule
    assert plan.schedule.stride == min(stride, len(PARTS))


def test_what_strides_may_not_do():
    schedule = planned(options=dataclasses.replace(OPTIONS, stride=2)).schedule
    kept = planned(budget=10**6).schedule
    for illegal in (
        dataclasses.replace(schedule, mode="score"),
        dataclasses.replace(schedule, sweep="chunks"),
        dataclasses.replace(kept, stride=2),
    ):
        with pytest.raises(ScheduleError, match="parts of a stretch"):
            verify(TREE, illegal)
    groups = planned(options=dataclasses.replace(OPTIONS, groups=2)).schedule
    with pytest.raises(ScheduleError, match="groups are swept"):
        verify(TREE, dataclasses.replace(groups, stride=2))
    with pytest.raises(ScheduleError, match="no header"):
        Schedule.parse(str(schedule).replace(" sweep=stages", ""))
