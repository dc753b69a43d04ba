"""The path stack: gradients of KV wait until every layer has taken its own, and KV can be kept and put back."""

from __future__ import annotations

import torch

from dta_compile.plan import Segment
from dta_compile.runtime.attention.cpu import FlashCPU
from dta_compile.runtime.attention.layer import AttentionRuntime
from dta_compile.runtime.attention.reference import Reference
from dta_compile.runtime.path.chunk_shape import ChunkShape
from dta_compile.runtime.path.stack import PathStack
from tests.support.attention import TIGHT, attention_layer, random


def test_gradients_wait_until_all_layers_have_taken_theirs():
    layers = [attention_layer(1, 4, 4)] * 3
    path = PathStack(layers, [AttentionRuntime(FlashCPU())] * 3, 12, torch.device("cpu"))
    path.allocate_gradients()
    assert not path.waits_for(0)

    def run(shape):
        path.chunk = shape
        inputs = [random(1, 1, shape.tokens, 4, seed=seed) for seed in range(4)]
        taken = []
        for layer in range(len(layers)):
            out, logsumexp = path.mix(layer, *inputs[:3], 1.0, 0.0)
            taken.append(path.mix_backward(layer, inputs[3], *inputs[:3], out, logsumexp, 1.0, 0.0))
        path.finish()
        return taken

    run(ChunkShape.run(8, 4))
    assert path.pending == 8
    assert path.waits_for(7)
    assert not path.waits_for(8)
    run(ChunkShape.of(5, 0, [Segment(0, 2, 2, 5, -1)]))  # a branch leaves what waits beside it
    assert path.pending == 8
    below = [states.gradients[0][:, :, 5:8].clone() for states in path.states]
    first, *others = run(ChunkShape.run(5, 3))
    assert path.pending == 5
    for number, (taken, waiting) in enumerate(zip([first, *others], below, strict=True)):
        assert waiting.any()
        path.pending = 5  # nothing waits any more: the same chunk without what waited
        again = run(ChunkShape.run(5, 3))[number]
        torch.testing.assert_close(taken[1] - again[1], waiting, rtol=TIGHT, atol=TIGHT)


def test_kv_is_copied_and_put_back():
    layers = [attention_layer(2, 4, 6, torch.float32)] * 2
    path = PathStack(layers, [AttentionRuntime(Reference())] * 2, 9, torch.device("cpu"))
    buffers = [buffer for states in path.states for buffer in states.buffers]
    for seed, buffer in enumerate(buffers):
        buffer.copy_(random(*buffer.shape, seed=seed))
    kept, before = path.copy(3, 7), [buffer.clone() for buffer in buffers]
    for buffer in buffers:
        buffer[:, :, 3:7] = -1
    assert [(key.shape[2], value.shape[2]) for key, value in kept.states] == [(4, 4)] * 2
    path.put(kept, 3, 7)
    for buffer, expected in zip(buffers, before, strict=True):
        assert torch.equal(buffer, expected)
