"""Strategies for batches of sequences that share prefixes in every relevant way."""

from __future__ import annotations

from hypothesis import strategies as st


@st.composite
def _batches(draw, max_sequences=7, max_suffix=9):
    """Extend prefixes of earlier sequences: empty rows, duplicates, prefixes of others, forks anywhere."""
    sequences: list[list[int]] = []
    for _ in range(draw(st.integers(0, max_sequences))):
        base = draw(st.sampled_from(sequences)) if sequences and draw(st.booleans()) else []
        suffix = draw(st.lists(st.integers(0, 2), max_size=max_suffix))
        sequences.append(base[: draw(st.integers(0, len(base)))] + suffix)
    return sequences


_DEEP_CHAIN = [list(range(n)) for n in range(0, 40, 3)]
_CATERPILLAR = [[*range(n), -1] for n in range(25)]
_WIDE_FAN = [[5, 5, n, n] for n in range(30)]

# Small batches of random trees, deep chains and wide fans.
BATCHES = st.one_of(_batches(), _batches(), st.sampled_from([_DEEP_CHAIN, _CATERPILLAR, _WIDE_FAN]))
