"""Weights that are buffers are inputs of chunks as parameters are."""

import torch
import torch.nn.functional as F

from tests.support.tiny import SMALL_CHUNKS, TinyLM, after, assert_same, shared_ids, weighted


class Rotated(TinyLM):
    def __init__(self):
        super().__init__(layers=1)
        self.register_buffer("rotation", torch.randn(16, 16, dtype=torch.float64))

    def forward(self, ids, mask=None):
        return self.head(F.linear(self.hidden(ids, mask), self.rotation))


def test_a_square_buffer_is_transposed_as_eager_does():
    model, ids = Rotated(), shared_ids()
    compiled = torch.compile(model, backend="dta", options={**SMALL_CHUNKS, "codegen": "eager", "verify": "off"})
    expected = after(model, lambda: weighted(model(ids)))
    assert_same(after(model, lambda: weighted(compiled(ids))), expected)
