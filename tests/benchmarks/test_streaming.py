"""The benchmark of streams measures both effects of choosing batches by sharing."""

import pytest

from benchmarks.streaming import agents, answers, arrive, simulate


@pytest.mark.parametrize(
    "sequences",
    [
        answers(prompts=16, count=8, prompt=20, answer=20),
        agents(tasks=4, trials=4, turns=8, system=20, turn=5, thought=5),
    ],
)
@pytest.mark.parametrize("arrival", ["shuffled", "jittered"])
def test_sharing_compresses_more_and_leaves_nobody_behind(sequences, arrival):
    arrived = arrive(sequences, arrival, waiting=32, seed=0)
    first_come, left_first = simulate(arrived, rows=8, waiting=4, groups=2, patience=0)
    sharing, left = simulate(arrived, rows=8, waiting=4, groups=2, patience=2)
    assert left_first == {rollout: 1 + rollout // 8 for rollout in range(len(arrived))}
    assert sorted(left) == sorted(left_first)
    assert sharing["compression"] > 1.1 * first_come["compression"]
    assert sharing["compression_in_groups"] > first_come["compression_in_groups"]
    assert all(left[rollout] <= left_first[rollout] + 2 for rollout in left)
    assert first_come["mean_waited"] == pytest.approx(sharing["mean_waited"]), "as many wait as before"
