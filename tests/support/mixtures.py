"""Mixtures of experts written by hand, and a hand-written LM with one behind each of its blocks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.helpers import EXACT, Batch, assert_equal, measure, random_loss, reference
from tests.support.inside import inside
from tests.support.tiny import SMALL_CHUNKS, VOCABULARY, WIDTH, TinyLM, shared_ids

EXPERTS, HIDDEN = 3, 6


class Expert(nn.Module):
    """A gated expert, or one with biases and a norm inside."""

    def __init__(self, kind="gated"):
        super().__init__()
        self.kind = kind
        bias = kind != "gated"
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN, bias=bias), nn.Linear(WIDTH, HIDDEN, bias=bias)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=bias)
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, x):
        if self.kind == "gated":
            return self.down(F.silu(self.gate(x)) * self.up(x))
        if self.kind == "norm":
            return self.down(self.norm(F.gelu(self.up(x))))
        y = self.up(x)  # "unsafe": neither its values nor its derivatives are finite for zeros
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True)) / self.norm.weight
        return self.down(y / y.norm(dim=-1, keepdim=True) + torch.log(y.abs()) + y.abs().sqrt())


class Mixture(nn.Module):
    """A router and experts; subclasses write `mix(x, weights, chosen)`, all `[N, .]`, in their ways."""

    def __init__(self, k=2, kind="gated"):
        super().__init__()
        self.k, self.router = k, nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList([Expert(kind) for _ in range(EXPERTS)])
        self.w1 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 4)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 4)

    def route(self, x):
        weights, chosen = torch.topk(F.softmax(self.router(x), -1), self.k, -1)
        return weights / weights.sum(-1, keepdim=True), chosen

    def forward(self, x):
        flat = x.view(-1, x.shape[-1])
        return self.mix(flat, *self.route(flat)).view(x.shape)


class DeepSeek(Mixture):
    """Stacked parameters, `nonzero` and `out[rows] += ...`."""

    def mix(self, x, weights, chosen):
        out = torch.zeros_like(x)
        for number in range(EXPERTS):
            rows, slot = (chosen == number).nonzero(as_tuple=True)
            y = F.silu(x.index_select(0, rows) @ self.w1[number].t()) @ self.w2[number].t()
            out[rows] += y * weights[rows, slot].unsqueeze(-1)
        return out


class Split(Mixture):
    """torchtitan's loop: histogram, stable sort, gather, split by counts, scores behind, scatter_add."""

    before = False

    def mix(self, x, weights, chosen):
        counts = torch.histc(chosen.view(-1).float(), bins=EXPERTS, min=0, max=EXPERTS).long()
        order = torch.argsort(chosen.view(-1), stable=True)
        scores, tokens = weights.view(-1)[order].reshape(-1, 1), (order // self.k).reshape(-1, 1).expand(-1, WIDTH)
        rows = torch.gather(x, dim=0, index=tokens)
        out = self.grouped(rows * scores if self.before else rows, counts)
        return torch.zeros_like(x).scatter_add(0, tokens, out if self.before else out * scores)

    def grouped(self, rows, counts):
        counts = counts.tolist()
        parts = torch.split(rows[: sum(counts)], counts, dim=0)
        return torch.cat([F.silu(part @ w1.T) @ w2.T for part, w1, w2 in zip(parts, self.w1, self.w2, strict=True)])


class Model(TinyLM):
    """`TinyLM` with a mixture behind each block."""

    def __init__(self, mixture, layers=1, **arguments):
        super().__init__(layers=layers)
        self.mixtures = nn.ModuleList([mixture(**arguments) for _ in self.blocks])
        self.double()

    def hidden(self, ids, mask=None):
        positions, pairs = torch.arange(ids.shape[1]), None
        if mask is not None:
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            triangle = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
            pairs = triangle & mask.bool()[:, None, None, :]
        x = self.embedding(ids) + self.position(positions)
        for block, mixture in zip(self.blocks, self.mixtures, strict=True):
            x = block(x, pairs)
            x = x + mixture(self.norm(x))
        return self.norm(x)


class Once(Model):
    """A mixture before the last attention alone."""

    def __init__(self, mixture, **arguments):
        super().__init__(mixture, layers=2, **arguments)
        self.mixtures[1] = nn.Linear(WIDTH, WIDTH).double()


def call(model, batch):
    return model(batch.ids, batch.mask)


def assert_exact(model, batch=None):
    """Over the tree, in one graph, with eager's numbers."""
    torch._dynamo.reset()
    batch = Batch(shared_ids(4, 7)) if batch is None else batch
    loss, before = random_loss(batch, VOCABULARY), torch._dynamo.config.capture_dynamic_output_shape_ops
    compiled = torch.compile(model, backend="dta", options=SMALL_CHUNKS)
    assert_equal(measure(compiled, model, batch, loss, call), reference(model, batch, loss, call), EXACT)
    assert inside(compiled).only
    assert torch._dynamo.config.capture_dynamic_output_shape_ops is before


def one_by_one(every, fast):
    """Parameters of a test, slow but for some."""
    return [one if one in fast else pytest.param(one, marks=pytest.mark.slow) for one in every]
