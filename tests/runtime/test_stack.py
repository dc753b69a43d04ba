"""The path stack: gradients of KV wait until every layer has taken its own, and KV can be kept and put back."""

from __future__ import annotations

import torch

from dta_compile.plan import Segment
from dta_compile.runtime.attention.chunk_shape import ChunkShape
from dta_compile.runtime.stack import PathStack
from tests.support.attention import TIGHT, attention_layer, random


def test_gradients_wait_until_all_layers_have_taken_theirs():
    layers = [attention_layer(1, 4, 4)] * 3
    path = PathStack(layers, 12, torch.device("cpu"))
    path.allocate_gradients()
    assert not path.waits_for(0)

    def run(shape):
        path.chunk = shape
        inputs = [random(1, 1, shape.tokens, 4, seed=seed) for seed in range(4)]
        taken = []
        for layer in range(len(layers)):
            out, logsumexp = path.attend(*inputs[:3], layer, 1.0)
            taken.append(path.attend_backward(inputs[3], *inputs[:3], out, logsumexp, layer, 1.0))
        path.finish()
        return taken

    run(ChunkShape.run(8, 4))
    assert path.waiting == 8
    assert path.waits_for(7)
    assert not path.waits_for(8)
    run(ChunkShape.of(5, 0, [Segment(0, 2, 2, 5, -1)]))  # a branch leaves what waits beside it
    assert path.waiting == 8
    below = [grad[:, :, 5:8].clone() for grad in path.key_grads]
    first, *others = run(ChunkShape.run(5, 3))
    assert path.waiting == 5
    for number, (taken, waiting) in enumerate(zip([first, *others], below, strict=True)):
        assert waiting.any()
        path.waiting = 5  # nothing waits any more: the same chunk without what waited
        again = run(ChunkShape.run(5, 3))[number]
        torch.testing.assert_close(taken[1] - again[1], waiting, rtol=TIGHT, atol=TIGHT)


def test_kv_is_copied_and_put_back():
    layers = [attention_layer(2, 4, 6, torch.float32)] * 2
    path = PathStack(layers, 9, torch.device("cpu"))
    for layer in range(2):
        path.keys[layer].copy_(random(1, 2, 9, 4, seed=layer))
        path.values[layer].copy_(random(1, 2, 9, 6, seed=9 + layer))
    kept, before = path.copy(3, 7), [buffer.clone() for buffer in (*path.keys, *path.values)]
    for buffer in (*path.keys, *path.values):
        buffer[:, :, 3:7] = -1
    assert [(key.shape[2], value.shape[2]) for key, value in kept] == [(4, 4)] * 2
    path.put(3, kept)
    for buffer, expected in zip((*path.keys, *path.values), before, strict=True):
        assert torch.equal(buffer, expected)
