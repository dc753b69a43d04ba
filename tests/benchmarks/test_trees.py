"""The benchmark's trees have the shape that the tables speak of."""

import pytest

from benchmarks.batches.trees import TREES, build, count, ideal_speedup
from dta_compile.plan import plan

# (linear operations per token, operations per pair) of the benchmark's model: 4 layers, hidden 256, 2048 ids.
FLOPS = (7_340_032, 4_096)


@pytest.mark.parametrize("name", TREES)
def test_counts_by_arithmetic_equal_those_of_the_planner(name):
    sequences = build(TREES[name], vocabulary=2048)
    counts, stats = count(TREES[name]), plan(sequences).stats
    assert {len(sequence) for sequence in sequences} == {1500}
    assert (counts.sequences, counts.tokens) == (stats.sequences, stats.tokens) == (16, 24_000)
    assert counts.tokens / counts.tree_tokens == pytest.approx(stats.compression)
    assert counts.pairs / counts.tree_pairs == pytest.approx(stats.attention_compression)


@pytest.mark.parametrize(("name", "ideal"), [("short", 5.1), ("mid", 2.0), ("none", 1.0)])
def test_ideal_speedups_are_the_published_ones(name, ideal):
    assert ideal_speedup(count(TREES[name]), *FLOPS) == pytest.approx(ideal, abs=0.05)


def test_siblings_never_share_their_first_token():
    sequences = build(((3, 1), (2, 4)), vocabulary=3)
    assert len({int(sequence[0]) for sequence in sequences}) == 3
    assert len({tuple(sequence[:2].tolist()) for sequence in sequences}) == 6


@pytest.mark.parametrize("levels", [((4, 5),), ((1, 0),), ((0, 5),)])
def test_impossible_shapes_are_refused(levels):
    with pytest.raises(ValueError, match="children"):
        build(levels, vocabulary=3)
