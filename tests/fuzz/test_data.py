"""Damaged files and options are refused by name or mean what they say. `make fuzz-data` draws many more."""

import pytest

from tests.fuzz.data import BAD, verdict

CASES = 60
BLOCK = 20


@pytest.mark.parametrize("first", range(0, CASES, BLOCK))
def test_damaged_files_are_refused_or_mean_what_they_say(first, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = [verdict(number) for number in range(first, first + BLOCK)]
    assert not [detail for kind, detail in found if kind in BAD]
    assert {"planned", "refused"} <= {kind for kind, _ in found}
