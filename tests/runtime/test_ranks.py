"""What ranks of a tensor-parallel group agree on, and what they compare; the group is a stand-in."""

import dataclasses

import numpy as np
import pytest

from dta_compile.errors import PlanError, RefusalError, RuntimeContractError
from dta_compile.plan import CostModel, Limits
from dta_compile.plan.cost import OfMachine
from dta_compile.runtime.calls.ranks import Ranks


class Told:
    """A group of two, of which the second rank tells what it is given."""

    size = 2

    def __init__(self, *others):
        self.others = list(others)

    def gather(self, value):
        return [value, self.others.pop(0)]


def ranks(*others):
    made = Ranks()
    made._group = Told(*others)
    return made


def fail(error):
    raise error


OWN = Limits(budget=100, cost=CostModel(), chunk_sizes=(2048, 4096), by_stages=(80, (2048,)), room=70.0)


def test_limits_are_the_least_memory_and_the_times_of_the_first_rank():
    other = OfMachine(50, CostModel.of_gpu(), (2048,), (90, (2048, 4096)), 60.0)
    value, limits = ranks(other).agreed(lambda: ("read", OWN))
    assert value == "read"
    assert limits.of_machine == OfMachine(50, CostModel(), (2048,), (80, (2048,)), 60.0)
    theirs = dataclasses.replace(Limits(), **other._asdict())
    assert theirs.agreed([OWN.of_machine, other]).of_machine == limits.of_machine
    assert ranks(OfMachine(None, CostModel(), (2048,))).agreed(lambda: ("read", Limits()))[1].budget is None


def test_an_error_of_one_rank_is_raised_on_all():
    with pytest.raises(RuntimeContractError, match="rank 1 of 2: no plan"):
        ranks("no plan").agreed(lambda: ("read", OWN))
    with pytest.raises(RuntimeContractError, match="rank 0 of 2: no mask"):
        ranks(OfMachine(100, CostModel(), (2048,))).agreed(lambda: fail(RefusalError("no mask")))


def test_a_check_that_fails_on_one_rank_fails_on_all():
    ranks(None).check(lambda: None)
    with pytest.raises(RuntimeContractError, match="rank 1 of 2: large scores"):
        ranks("large scores").check(lambda: None)
    with pytest.raises(RuntimeContractError, match="rank 0 of 2: large scores"):
        ranks(None).check(lambda: fail(RefusalError("large scores")))


def test_an_error_that_is_not_ours_is_told_to_the_others_and_stays_what_it_is():
    told = []
    for run in (lambda made, make: made.agreed(make), lambda made, make: made.check(make)):
        made = ranks(None)
        gather = made._group.gather
        made._group.gather = lambda value, gather=gather: told.append(value) or gather(value)
        with pytest.raises(IndexError, match="a table"):
            run(made, lambda: fail(IndexError("a table of the model")))
    assert told == ["IndexError: a table of the model"] * 2


def test_an_error_of_all_ranks_stays_what_it_is():
    with pytest.raises(PlanError, match="mine"):
        ranks("theirs").agreed(lambda: fail(PlanError("mine")))


def test_what_differs_is_an_error_and_what_has_a_gradient_anywhere_is_active():
    with pytest.raises(RuntimeContractError, match="the tokens of a batch are not the same") as caught:
        ranks("another digest").require_same("the tokens of a batch", np.arange(3), "schedule")
    assert "ranks [1]" in caught.value.got
    active = np.array([True] + [False] * 9)
    theirs = np.array([False] * 9 + [True])
    made = ranks(None, np.packbits(theirs).tobytes())
    made.require_same = lambda *_: made._group.others.pop(0)
    assert made.with_gradient(active, [True]).tolist() == [True] + [False] * 8 + [True]


def test_one_process_asks_nobody():
    alone = Ranks()
    assert not alone.several and alone.agreed(lambda: ("read", OWN))[1] is OWN
    active = np.array([True, False])
    assert alone.with_gradient(active, [True]) is active
