"""Drawn decoders equal eager, outputs and gradients, or are refused by name. `make fuzz` draws many more."""

import pytest

from tests.fuzz.__main__ import drawn
from tests.fuzz.minimise import minimised
from tests.fuzz.program import verdict

PROGRAMS = 20


@pytest.mark.parametrize("number", range(PROGRAMS))
def test_drawn_programs_equal_eager_or_are_refused_by_name(number):
    program = drawn(number)
    kind, detail = verdict(program)
    if kind in ("wrong", "crashed"):
        print(minimised(program, kind, attempts=30).source())
    assert kind not in ("wrong", "crashed"), detail
