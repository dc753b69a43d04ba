"""torchtitan's own trainer (its loop, models and sharding) trains to the same weights over a prefix tree."""

import pytest

pytest.importorskip("torchtitan")
pytest.importorskip("triton")

from tests.support import titan


@pytest.mark.parametrize(
    ("family", "way", "settings"),
    [
        ("llama3", "losses", {"flex": True}),
        pytest.param("llama3", "losses", {}, marks=pytest.mark.slow),
        pytest.param("qwen3", "losses", {}, marks=pytest.mark.slow),
        pytest.param("qwen3", "model", {"chunked": True}, marks=pytest.mark.slow),
    ],
)
def test_torchtitan_ends_at_the_weights_of_its_own_path(family, way, settings):
    ((difference, compression),) = titan.launch(family, 1, [way], **settings)
    assert difference < 1e-8 and compression > 1.7


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_torchtitan_on_two_ranks_ends_at_the_weights_of_its_own_path(family):
    """FSDP2 by its `parallelize` function, gradients accumulated over two batches, clipped by their norm."""
    for difference, compression in titan.launch(family, 2, ["losses", "model"], global_batch_size=16):
        assert difference < 1e-8 and compression > 1.7
