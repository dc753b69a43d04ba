"""examples/screens_grpo.py: both ways compute the same gradients, with an encoder run for each different screen."""

from examples.screens_grpo import Settings, train


def test_both_ways_compute_the_same_gradients():
    tiny = Settings(steps=2, tasks=1, group=4, turns=2, answer=2, cells=2, cell=16, hidden=32, layers=1)
    reports = list(train(tiny, {"codegen": "eager"}))
    for report in reports:
        assert 0 < report["difference"] < 1e-4, "0 only if the rollouts of a group have equal rewards"
        assert report["tokens"] > 1.8 * report["tree_tokens"]
    images = tiny.group * (1 + 2)  # the first row of a rollout has one, the second two
    assert reports[1]["eager_images"] == images and reports[1]["images"] <= 1 + tiny.group
