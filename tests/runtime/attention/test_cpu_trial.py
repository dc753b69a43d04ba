"""Whether attention on a CPU runs in strips: found by a trial of the machine."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dta_compile.runtime.attention import cpu_trial

TRIED = torch.float32


@pytest.fixture(autouse=True)
def untried():
    cpu_trial._found.cache_clear()
    yield
    cpu_trial._found.cache_clear()


def strips_pay(whole, in_strips):
    """What a trial finds on a machine whose clock shows these seconds."""
    seconds = itertools.accumulate(itertools.cycle([0.0, whole, 0.0, in_strips]))
    with (
        mock.patch.object(cpu_trial, "_TOKENS", 8),
        mock.patch.object(cpu_trial.time, "perf_counter", lambda: next(seconds)),
    ):
        return cpu_trial.strips_pay(TRIED)


@pytest.mark.parametrize(("in_strips", "pays"), [(0.9, True), (0.97, False), (1.2, False)])
def test_strips_are_chosen_where_they_clearly_take_less_time(in_strips, pays):
    assert strips_pay(1.0, in_strips) is pays


def test_a_machine_is_tried_once():
    assert strips_pay(1.0, 0.5)
    with mock.patch.object(cpu_trial, "FlashCPU", side_effect=AssertionError):
        assert cpu_trial.strips_pay(TRIED)


def test_nothing_is_tried_where_results_must_not_depend_on_it():
    with mock.patch.object(cpu_trial, "FlashCPU", side_effect=AssertionError):
        assert not cpu_trial.strips_pay(torch.bfloat16)
        torch.use_deterministic_algorithms(True)
        try:
            assert not cpu_trial.strips_pay(TRIED)
        finally:
            torch.use_deterministic_algorithms(False)


def test_a_trial_is_not_seen_by_what_the_caller_counts_or_draws():
    state = torch.get_rng_state()
    with FlopCounterMode(display=False) as counter:
        strips_pay(1.0, 1.0)
    assert counter.get_total_flops() == 0
    assert torch.equal(torch.get_rng_state(), state)
