"""Attention providers on single chunks: drawn chunk shapes, and dense softmax over allowed pairs as the oracle.

Run(Case(shape, window=3), Reference).check()
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import strategies as st

from dta_compile.executable.layers import AttentionLayer, StateSpec
from dta_compile.ops.attention import ATTENTION_MIXER, BY_DISTANCE, SINK_ATTENTION_MIXER
from dta_compile.plan import Segment
from dta_compile.runtime.attention.layer import AttentionRuntime
from dta_compile.runtime.path.chunk_shape import ChunkShape, Limit
from dta_compile.runtime.path.stack import PathStack

TIGHT = 1e-12


@dataclasses.dataclass(frozen=True)
class Case:
    """Chunk shape, limit, and sizes of the tensors."""

    shape: ChunkShape
    window: int = 0
    kv_heads: int = 2
    groups: int = 1
    width: int = 4
    value_width: int = 4
    dtype: torch.dtype = torch.float64
    softcap: float = 0.0
    with_sinks: bool = False
    bias: int = 0
    chunk: int = 0
    units: bool = False
    kept: tuple[int, ...] = ()

    @property
    def limit(self) -> Limit | None:
        if self.chunk:
            return Limit(self.chunk, by_chunks=True)
        return Limit(self.window, kept=self.kept) if self.window else None

    @property
    def scale(self) -> float:
        return 0.7


@st.composite
def shapes(draw, sizes=(1, 1, 2, 3, 5, 8, 13)):
    """Draw chunks of random slices: nested branches from any token of a slice, with and without a spine, and units."""
    start = draw(st.sampled_from([0, 1, 17]))
    budget, parts = draw(st.integers(1, 10)), []

    def grow(parent, depth, first):
        size, number = draw(st.sampled_from(sizes)), len(parts)
        parts.append(None)
        end = first + size
        hangs = draw(st.lists(st.one_of(st.just(size), st.integers(1, size)), max_size=3))
        for hang in sorted(hangs, reverse=True):  # depth first: from the last token back
            if len(parts) < budget:
                end = grow(number, depth + hang, end)
        parts[number] = Segment(first, first + size, end, depth, parent)
        return end

    end = 0
    while len(parts) < budget:
        end = grow(-1, start, end)
    hangs = [parts[part.parent].first + part.depth - parts[part.parent].depth for part in parts if part.parent >= 0]
    bounds = sorted({*hangs, *(part.first for part in parts), end})
    pairs = [sorted(draw(st.tuples(st.integers(a, b), st.integers(a, b)))) for a, b in itertools.pairwise(bounds)]
    units = [(first, last) for first, last in pairs if last - first > 1]
    return ChunkShape.of(start, draw(st.sampled_from([0, parts[0].last])), parts, units)


def cases(shape):
    sizes = {
        "kv_heads": [1, 2, 3],
        "groups": [1, 2, 4],
        "softcap": [0.0, 0.0, 1.5],
        "with_sinks": [False, True],
        "units": [False, True],
    }
    limits = st.sampled_from([{}, {"window": 3}, {"window": 50}, {"chunk": 4}, {"chunk": 16}, {"chunk": 50}])
    others = st.fixed_dictionaries({name: st.sampled_from(values) for name, values in sizes.items()})
    return st.builds(lambda shape, limit, others: Case(shape, **limit, **others), shape, limits, others)


def ancestry(case: Case) -> torch.Tensor:
    """Return bool `[c, start + c]`: the keys of the stack and of the chunk that each query reads, token by token."""
    shape = case.shape
    parent = list(range(-1, shape.start - 1)) + [0] * shape.segments[-1].last
    for part in shape.segments:
        if part.parent < 0:
            above = shape.start - 1
        else:
            slice_above = shape.segments[part.parent]
            above = shape.start + slice_above.first + part.depth - slice_above.depth - 1
        for token in range(shape.start + part.first, shape.start + part.last):
            parent[token], above = above, token
    allowed = torch.zeros(len(parent), len(parent), dtype=torch.bool)
    for query in range(len(parent)):
        path = [query]
        while parent[path[-1]] >= 0:
            path.append(parent[path[-1]])
        depth = len(path) - 1
        in_chunk = depth % case.chunk + 1 if case.chunk else len(path)
        allowed[query, path[: min(in_chunk, case.window or len(path))]] = True
        allowed[query, [path[depth - kept] for kept in case.kept if kept <= depth]] = True
    for first, last in shape.units if case.units else ():
        unit = slice(shape.start + first, shape.start + last)
        allowed[unit, unit] |= ~torch.ones(last - first, last - first, dtype=torch.bool).tril()
    return allowed[shape.start :]


def attention_layer(kv_heads, key_dim, value_dim, dtype=torch.float64, mixer=ATTENTION_MIXER):
    """Return an attention layer that belongs to no graph."""
    states = tuple(StateSpec((1, kv_heads, 1, width), 2, dtype) for width in (key_dim, value_dim))
    return AttentionLayer(0, mixer, states, "", None)


def random(*sizes, dtype=torch.float64, seed=0):
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


class Run:
    """Run of one chunk through a `PathStack`, with the results of the dense oracle (float64, autograd)."""

    def __init__(self, case: Case, provider, spare: int = 2, change=lambda run: None) -> None:
        """`change` is called with the run once its operands exist, before anything is computed."""
        self.case, shape, dtype = case, case.shape, case.dtype
        tokens, heads = shape.tokens, case.kv_heads * case.groups
        capacity = shape.start + tokens + spare
        other = BY_DISTANCE[0] if case.bias else ATTENTION_MIXER
        mixer = SINK_ATTENTION_MIXER if case.with_sinks else other
        layer = attention_layer(case.kv_heads, case.width, case.value_width, dtype, mixer)
        runtime = AttentionRuntime(provider(), case.limit, case.units, "bias" if case.bias else None)
        self.path = path = PathStack([layer], [runtime], capacity, torch.device("cpu"))
        key_buffer, value_buffer = path.states[0].buffers
        key_buffer.copy_(random(1, case.kv_heads, capacity, case.width, dtype=dtype, seed=1))
        value_buffer.copy_(random(1, case.kv_heads, capacity, case.value_width, dtype=dtype, seed=2))
        self.before = key_buffer.clone(), value_buffer.clone()
        # Projections have the memory layout [1, c, heads, D].
        self.query, self.key, self.value, self.grad = (
            random(1, tokens, count, width, dtype=dtype, seed=seed).transpose(1, 2)
            for seed, (count, width) in enumerate(
                [
                    (heads, case.width),
                    (case.kv_heads, case.width),
                    (case.kv_heads, case.value_width),
                    (heads, case.value_width),
                ],
                start=3,
            )
        )
        self.sinks = (random(heads, dtype=dtype, seed=9),) if case.with_sinks else ()
        self.bias = (random(1, heads, tokens, case.bias, dtype=dtype, seed=10),) if case.bias else ()
        self.given = (self.query, self.key, self.value, *self.sinks, *self.bias)
        self.scoring = case.scale, case.softcap
        change(self)
        path.chunk = shape
        self.out, self.logsumexp = path.mix(0, *self.given, *self.scoring)
        path.allocate_gradients()
        path.pending = shape.start + shape.spine
        self.waiting = []
        for seed, buffer in enumerate(path.states[0].gradients, start=7):
            buffer[:, :, : path.pending] = random(*buffer.shape, seed=seed)[:, :, : path.pending]
            self.waiting.append(buffer.clone())
        self.grads = path.mix_backward(0, self.grad, *self.given, self.out, self.logsumexp, *self.scoring)

    def operands(self):
        """Return the operands that the stack passes to the provider for this chunk."""
        inputs = self.path._inputs(0, self.given, self.scoring)
        return self.path.runtimes[0]._operands(inputs)

    def oracle(self):
        """Return output, log-sum-exp, gradients of query, keys and values `[.., start + c, ..]`, of sinks and bias."""
        case, start = self.case, self.case.shape.start
        own = [tensor.double() for tensor in (self.query, self.key, self.value)]
        prefix = [buffer[:, :, :start].double() for buffer in self.before]
        query, key, value = own[0], *(torch.cat(both, 2) for both in zip(prefix, own[1:], strict=True))
        leaves = [tensor.double().requires_grad_() for tensor in (query, key, value, *self.sinks, *self.bias)]
        key, value = (tensor.repeat_interleave(case.groups, 1) for tensor in leaves[1:3])
        scores = leaves[0] @ key.mT * case.scale
        if case.softcap:
            scores = (scores / case.softcap).tanh() * case.softcap
        if case.bias:
            depths = [
                *range(start),
                *(one.depth + n for one in case.shape.segments for n in range(one.last - one.first)),
            ]
            apart = (torch.tensor(depths[start:])[:, None] - torch.tensor(depths)).clamp(0, case.bias - 1)
            scores = scores + leaves[-1].gather(-1, apart.expand(1, scores.shape[1], -1, -1))
        scores = scores.masked_fill(~ancestry(case), float("-inf"))
        if self.sinks:
            scores = torch.cat([scores, leaves[3][None, :, None, None].expand(*scores.shape[:-1], 1)], -1)
            value = torch.nn.functional.pad(value, (0, 0, 0, 1))
        out = scores.softmax(-1) @ value
        return out, scores.logsumexp(-1), *torch.autograd.grad(out, leaves, self.grad.double())

    def results(self):
        """Return the results in the form of `oracle`, including the gradients added to the stack."""
        start, spine = self.case.shape.start, self.case.shape.spine
        both = []
        buffers = self.path.states[0].gradients
        for grad, buffer, waiting in zip(self.grads[1:3], buffers, self.waiting, strict=True):
            grad = grad.double()
            grad[:, :, :spine] -= waiting[:, :, start : start + spine]
            both.append(torch.cat([(buffer - waiting)[:, :, :start].double(), grad], 2))
        return self.out, self.logsumexp, self.grads[0], *both, *self.grads[3:]

    def check(self, tolerance: float = TIGHT) -> None:
        for result, expected in zip(self.results(), self.oracle(), strict=True):
            torch.testing.assert_close(result.double(), expected.detach(), rtol=tolerance, atol=tolerance * 10)
        start, stop = self.case.shape.start, self.case.shape.start + self.case.shape.spine
        for buffer, before, own in zip(self.path.states[0].buffers, self.before, (self.key, self.value), strict=True):
            before[:, :, start:stop] = own[:, :, : stop - start]
            assert torch.equal(buffer, before), "the spine, and nothing else, goes onto the stack"
        for buffer in self.path.states[0].gradients:
            assert not buffer[:, :, start:].any(), "what waited for the spine is taken"


# Forks inside and at the end of a spine, a branch with branches, and one that hangs from the stack.
FORKED = ChunkShape.of(
    3,
    8,
    [
        Segment(0, 8, 20, 3, -1),
        Segment(8, 12, 17, 11, 0),
        Segment(12, 15, 15, 15, 1),
        Segment(15, 17, 17, 13, 1),
        Segment(17, 20, 20, 10, 0),
        Segment(20, 23, 23, 3, -1),
    ],
)
UNREAD = [  # operand with a non-finite value, its token in `FORKED`, and a limit
    *((operand, token, {}) for operand in ("query", "key", "value", "grad") for token in (7, 11, 21)),
    *((operand, 9, limit) for operand in ("query", "key", "value", "grad") for limit in ({"window": 3}, {"chunk": 4})),
    ("above", 1, {"window": 3}),
]


def unread(*softcaps: float):
    """Return parameters `(value, operand, token, limit, softcap)`; those that vary several of them at once are slow."""
    parameters = []
    for value, (operand, token, limit), softcap in itertools.product((math.nan, math.inf, 1e200), UNREAD, softcaps):
        changes = (not math.isnan(value)) + (token not in (11, 1)) + bool(softcap)
        marks = [pytest.mark.slow] if changes > 1 else []
        name = f"{value}-{operand}-{token}-{limit or 'all'}-{softcap}"
        parameters.append(pytest.param(value, operand, token, limit, softcap, marks=marks, id=name))
    return parameters


def check_unread(run, operand: str, token: int, value: float, tolerance: float = TIGHT) -> None:
    """Check that a non-finite value reaches only results that depend on it, and does reach the token's own.

    Args:
        run: builds a `Run` of `FORKED`, given `change`.
        operand: operand of the token; "above": key and value on the stack at depth `token`.
    """

    def change(target: Run) -> None:
        if operand == "above":
            for buffer in target.path.states[0].buffers:
                buffer[:, :, token] = value
        else:
            getattr(target, operand)[:, :, token] = value

    plain, changed = run(), run(change=change)
    reads, start = ancestry(plain.case), plain.case.shape.start
    is_read = operand in ("key", "value", "above")
    rows = reads[:, token + (0 if operand == "above" else start)] if is_read else torch.zeros(len(reads)).bool()
    if not is_read:
        rows[token] = True
    keys = reads[rows].any(0)
    forward = torch.zeros_like(rows) if operand == "grad" else rows
    for actual, expected, apart in zip(
        changed.results()[:5], plain.results()[:5], (forward, forward, rows, keys, keys), strict=True
    ):
        assert actual[:, :, ~apart].isfinite().all()
        torch.testing.assert_close(actual[:, :, ~apart], expected[:, :, ~apart], rtol=tolerance, atol=tolerance * 10)
    if math.isnan(value):
        own = changed.grads[0] if operand == "grad" else changed.out
        assert not own[:, :, rows].isfinite().any()
