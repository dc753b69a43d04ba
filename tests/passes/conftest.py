"""Tests of passes watch them at work."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def _analysed_anew(analysed_anew):
    """No program comes from the cache."""
