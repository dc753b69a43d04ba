import json
import math
import pickle

import numpy as np
import pytest

from dta_compile.data import bundled, load_rollouts
from dta_compile.errors import OptionError, PlanError
from dta_compile.options import Options
from dta_compile.plan import CostModel, PrefixTree, make_plan, plan, verify

SHARED = [[1] * 20 + [n] * 5 for n in range(8)]


def test_statistics_of_the_bundled_rollouts_are_the_published_ones():
    sequences = [rollout.tokens for rollout in load_rollouts(bundled())]
    published = json.loads(bundled().with_suffix(".json").read_text())["statistics"]
    stats, full, leaves = plan(sequences).stats, published["full"], published["leaf_only"]
    assert (stats.sequences, stats.tokens, stats.tree_tokens) == (40, full["tokens"], full["tree_tokens"])
    assert (stats.leaves, stats.longest_path) == (full["n_leaves"], full["max_len"])
    assert stats.compression == pytest.approx(full["C"], abs=1e-4)
    assert stats.leaf_compression == pytest.approx(leaves["C"], abs=1e-4)
    assert stats.attention_compression == pytest.approx(full["C_attn"], abs=1e-4)


def test_stats_repeat_the_simulation():
    made = plan(SHARED, strategy="dfs", chunk_size=4, memory_budget=0)
    simulation = verify(made.prefix_tree, made.schedule)
    assert made.stats.tokens_forwarded_twice == simulation.recomputed_tokens > 0
    assert made.stats.launches == simulation.launches
    assert made.stats.peak_live_tokens == simulation.peak_live_tokens <= 4
    assert made.stats.peak_stack_tokens == simulation.peak_stack_tokens == 25


def test_a_plan_prints_on_one_screen():
    text = str(plan(SHARED, strategy="dfs"))
    for part in ("8 sequences, 200 tokens, 60 to run", "C 3.33", "dfs", "asked for", "8 backward", "25 tokens on the"):
        assert part in text
    assert "low sharing" not in text


def test_a_packed_plan_of_a_batch_that_fits_is_one_chunk():
    made = plan(SHARED)
    assert (made.schedule.strategy, made.stats.launches, made.stats.peak_stack_tokens) == ("packed", 2, 0)
    assert "packed 1.00" in str(made) and "3: 1 attach, 1 backward, 1 forward" in str(made)


def test_kv_alone_is_kept_within_a_small_budget():
    sequences = [[1, 2, 2, 3, 3], [1, 2, 2, 4, 4], [1, 5, 5, 6, 6], [1, 5, 5, 7, 7], [1, 9]]
    small = {"strategy": "packed", "chunk_size": 4, "memory_budget": 50, "bytes_per_token": 100}
    made, without = plan(sequences, kv_bytes_per_token=1, **small), plan(sequences, **small)
    assert (made.stats.peak_stored_tokens, without.stats.peak_stored_tokens) == (3, 0)
    assert made.stats.tokens_forwarded_twice < without.stats.tokens_forwarded_twice
    assert "3 with KV alone kept" in str(made)


@pytest.mark.parametrize("ranks", [None, 2])
def test_a_plan_can_be_sent_to_another_process(ranks):
    made = plan(SHARED, ranks=ranks)
    sent = pickle.loads(pickle.dumps(made))
    assert (str(sent), sent.schedule, sent.scalars()) == (str(made), made.schedule, made.scalars())


def test_estimates_are_shown_as_far_as_they_are_known():
    made = plan(SHARED)
    assert made.estimates.seconds == CostModel().estimate(made.simulation)
    assert "predicted" not in str(made)
    made.estimates.measured_seconds, made.estimates.peak_bytes = 1.25, 3 * 2**20
    assert "s predicted (not calibrated), 1.25 s measured" in str(made)
    assert "3 MiB predicted at the peak" in str(made)


def test_low_sharing_is_explained():
    text = str(plan([[5, 6, 7, 17, n] for n in range(1)] + [[5, 6, 7, 42, n] for n in range(3)] + [[5], [8] * 200]))
    assert "low sharing" in text
    assert "1 of 5 neighbours diverge at token 3: 17 vs 42" in text
    assert "2 of 5 neighbours diverge at token 4: 0 vs 1 (and 1 more)" in text
    assert "1 of 5 neighbours diverge at token 0: 5 vs 8" in text
    assert "first difference at: 0: 1, 1-9: 3" in text
    assert "1 of 5 neighbours are a prefix of the next, or equal to it" in text


def test_neighbours_diverge_at_token_ids_or_at_equal_ids_of_other_images():
    equal = [[[0], [1], [0]]] * 2
    assert "diverge at token 2: 30 vs 40" in str(plan([[10, 20, 30], [10, 20, 40]], routes=equal))
    text = str(plan([[1, 2, 3, 4], [1, 2, 3, 5]], images=[[(1, 2, "a")], [(1, 2, "b")]]))
    assert "1 of 1 neighbours diverge at token 1: 2 in both, which differ in another key" in text


@pytest.mark.slow
def test_screens_stay_small():
    generator = np.random.default_rng(0)
    base = generator.integers(-(2**62), 2**62, 30_000)
    sequences = [np.append(base[: 3**n], generator.integers(-(2**62), 2**62, 60_000)) for n in range(10)] * 2
    lines = str(plan(sequences, chunk_size=77, memory_budget=0)).splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100


def test_dense_plans_tell_what_sharing_would_give():
    made = plan(SHARED, strategy="dense")
    assert made.stats.compression == made.stats.attention_compression == 1
    assert not made.prefix_tree.shared
    assert "a prefix tree would have C 3.33" in str(made)


def test_the_tree_is_a_networkx_graph_and_can_be_given():
    tree = PrefixTree.build(SHARED)
    made = make_plan(tree, Options(strategy="dfs"), mode="score")
    assert made.prefix_tree is tree
    assert made.tree is made.tree
    assert made.tree.number_of_nodes() == 9


def test_memory_budget_is_in_bytes():
    everything = plan(SHARED, strategy="dfs", chunk_size=5)
    half = plan(SHARED, strategy="dfs", chunk_size=5, memory_budget=3000, bytes_per_token=100)
    nothing = plan(SHARED, strategy="dfs", chunk_size=5, memory_budget=0)
    # The graph of the chunk that goes backward first is not counted.
    assert [p.stats.peak_live_tokens for p in (everything, half, nothing)] == [60, 30 + 5, 5]
    for bytes_per_token in (None, 0):
        with pytest.raises(OptionError, match="bytes_per_token"):
            plan(SHARED, memory_budget=3000, bytes_per_token=bytes_per_token)


def test_bad_requests():
    with pytest.raises(OptionError, match="did you mean 'chunk_size'"):
        plan(SHARED, chunksize=4)
    with pytest.raises(PlanError, match="unknown mode"):
        plan(SHARED, mode="opaque")
    for wrong in ({"state_bytes": math.nan}, {"state_bytes": "x"}, {"link": 0.0}, {"link": -1.0}):
        with pytest.raises(OptionError, match=f"bad value for {next(iter(wrong))}"):
            plan(SHARED, **wrong)
    for wrong in ({"rank": 5}, {"ranks": 2, "mesh": (0, 1, 2)}):
        with pytest.raises(OptionError, match=r"plan\(..., ranks=8"):
            plan(SHARED, **wrong)


@pytest.mark.parametrize("mode", ["score", "transparent", "streaming"])
@pytest.mark.parametrize("sequences", [[], [[]], [[1]], [[1], [1]]])
def test_tiny_batches_plan_and_print(sequences, mode):
    made = plan(sequences, mode=mode)
    assert made.stats.sequences == len(sequences)
    assert str(made) and repr(made)
