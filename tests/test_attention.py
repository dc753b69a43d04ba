"""Attention of chunks, packed or not, against a dense softmax over the pairs of the tree."""

from __future__ import annotations

import dataclasses
import itertools
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dta_compile.ops.attention import ATTENTION_MIXER
from dta_compile.ops.dtypes import statistics_dtype
from dta_compile.passes.mixer_layers import AttentionLayer, StateSpec
from dta_compile.plan import Chunk, PrefixTree, Segment, Slice, segments
from dta_compile.runtime.attention import cpu, cpu_parts
from dta_compile.runtime.attention.cpu import FlashCPU
from dta_compile.runtime.attention.layer import AttentionRuntime
from dta_compile.runtime.attention.reference import Reference
from dta_compile.runtime.path.chunk_shape import ChunkShape
from dta_compile.runtime.path.stack import PathStack

TIGHT = 1e-12
PROVIDERS = [Reference, FlashCPU]
TINY = {
    "_CALL_PAIRS": 6,
    "_BLOCK": 4,
    "_SUBTREE": 6,
    "_PIECE": 3,
    "_HALVED": range(4, 10),
}  # every kind of part in few tokens


@dataclasses.dataclass(frozen=True)
class Case:
    """A chunk and the sizes of its tensors."""

    shape: ChunkShape
    window: int = 0
    kv_heads: int = 2
    groups: int = 1
    width: int = 4
    value_width: int = 4
    dtype: torch.dtype = torch.float64

    @property
    def scale(self) -> float:
        return 0.7


@st.composite
def shapes(draw, sizes=(1, 1, 2, 3, 5, 8, 13)):
    """Chunks of random slices: nested branches, from any token of a slice, with and without a spine."""
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
    return ChunkShape.of(start, draw(st.sampled_from([0, parts[0].last])), parts)


def cases(shape):
    sizes = {"window": [0, 3, 50], "kv_heads": [1, 2, 3], "groups": [1, 2, 4]}
    return st.builds(Case, shape=shape, **{name: st.sampled_from(values) for name, values in sizes.items()})


def ancestry(case: Case) -> torch.Tensor:
    """Bool `[c, start + c]`, token by token: which keys of the stack and of the chunk each query reads."""
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
    for query, above in enumerate(parent):
        if not case.window:
            allowed[query] = allowed[above] if above >= 0 else False
            allowed[query, query] = True
            continue
        token, distance = query, 0
        while token >= 0 and distance < case.window:
            allowed[query, token] = True
            token, distance = parent[token], distance + 1
    return allowed[shape.start :]


def attention_layer(kv_heads, key_dim, value_dim, dtype=torch.float64):
    """An attention layer of no graph."""
    states = tuple(StateSpec((1, kv_heads, 1, width), 2, dtype) for width in (key_dim, value_dim))
    return AttentionLayer(0, None, ATTENTION_MIXER, states, "", None)


def random(*sizes, dtype=torch.float64, seed=0):
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


class Run:
    """One chunk through a `PathStack`, and what the dense oracle (float64, autograd) says about it."""

    def __init__(self, case: Case, provider, spare: int = 2) -> None:
        self.case, shape, dtype = case, case.shape, case.dtype
        tokens, heads = shape.tokens, case.kv_heads * case.groups
        capacity = shape.start + tokens + spare
        layer = attention_layer(case.kv_heads, case.width, case.value_width, dtype)
        runtime = AttentionRuntime(provider(), case.window)
        self.path = path = PathStack([layer], [runtime], capacity, torch.device("cpu"))
        key_buffer, value_buffer = path.states[0].buffers
        key_buffer.copy_(random(1, case.kv_heads, capacity, case.width, dtype=dtype, seed=1))
        value_buffer.copy_(random(1, case.kv_heads, capacity, case.value_width, dtype=dtype, seed=2))
        self.before = key_buffer.clone(), value_buffer.clone()
        # Projections come as [1, c, heads, D] in memory.
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
        path.chunk = shape
        self.out, self.logsumexp = path.mix(0, self.query, self.key, self.value, case.scale)
        path.allocate_gradients()
        path.pending = shape.start + shape.spine
        self.waiting = []
        for seed, buffer in enumerate(path.states[0].gradients, start=7):
            buffer[:, :, : path.pending] = random(*buffer.shape, seed=seed)[:, :, : path.pending]
            self.waiting.append(buffer.clone())
        self.grads = path.mix_backward(
            0, self.grad, self.query, self.key, self.value, self.out, self.logsumexp, case.scale
        )

    def oracle(self):
        """Output, log-sum-exp, and gradients of query, keys and values `[.., start + c, ..]`."""
        case, start = self.case, self.case.shape.start
        own = [tensor.double() for tensor in (self.query, self.key, self.value)]
        prefix = [buffer[:, :, :start].double() for buffer in self.before]
        query, key, value = own[0], *(torch.cat(both, 2) for both in zip(prefix, own[1:], strict=True))
        leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
        key, value = (tensor.repeat_interleave(case.groups, 1) for tensor in leaves[1:])
        scores = (leaves[0] @ key.mT * case.scale).masked_fill(~ancestry(case), float("-inf"))
        out = scores.softmax(-1) @ value
        return out, scores.logsumexp(-1), *torch.autograd.grad(out, leaves, self.grad.double())

    def results(self):
        """As `oracle`, with what the stack was given of the gradients."""
        start, spine = self.case.shape.start, self.case.shape.spine
        both = []
        buffers = self.path.states[0].gradients
        for grad, buffer, waiting in zip(self.grads[1:], buffers, self.waiting, strict=True):
            grad = grad.double()
            grad[:, :, :spine] -= waiting[:, :, start : start + spine]
            both.append(torch.cat([(buffer - waiting)[:, :, :start].double(), grad], 2))
        return self.out, self.logsumexp, self.grads[0], *both

    def check(self, tolerance: float = TIGHT) -> None:
        for result, expected in zip(self.results(), self.oracle(), strict=True):
            torch.testing.assert_close(result.double(), expected.detach(), rtol=tolerance, atol=tolerance * 10)
        start, stop = self.case.shape.start, self.case.shape.start + self.case.shape.spine
        for buffer, before, own in zip(self.path.states[0].buffers, self.before, (self.key, self.value), strict=True):
            before[:, :, start:stop] = own[:, :, : stop - start]
            assert torch.equal(buffer, before), "the spine, and nothing else, goes onto the stack"
        for buffer in self.path.states[0].gradients:
            assert not buffer[:, :, start:].any(), "what waited for the spine is taken"


@pytest.mark.parametrize("provider", PROVIDERS)
@settings(max_examples=60, deadline=None)
@given(case=cases(shapes()))
def test_chunks_attend_as_the_dense_softmax_over_the_tree(provider, case):
    Run(case, provider).check()


@settings(max_examples=150, deadline=None)
@given(case=cases(shapes()), threads=st.sampled_from([1, 2, 4, 64]))
def test_every_kind_of_part(case, threads):
    with (
        mock.patch.dict(vars(cpu_parts), TINY),
        mock.patch.object(cpu.torch, "get_num_threads", lambda: threads),
    ):
        Run(case, FlashCPU).check()


@settings(max_examples=20, deadline=None)
@given(case=cases(shapes(sizes=(1, 4, 30, 60, 150))))
def test_larger_chunks(case):
    Run(case, FlashCPU).check()


@pytest.mark.parametrize("start", [0, 17])
@pytest.mark.parametrize("tokens", [1, 2, 127, 128, 129, 257, 500, 1279, 1280])
def test_one_slice_of_any_length(tokens, start):
    run = Run(Case(ChunkShape.run(start, tokens), kv_heads=1, groups=2), FlashCPU)
    run.check(1e-11 if tokens > 1000 else TIGHT)


@settings(max_examples=200, deadline=None)
@given(case=cases(shapes(sizes=(1, 2, 3, 5, 20, 60))), cuts=st.sampled_from([TINY, {}]))
def test_parts_are_the_pairs_of_the_tree_each_once(case, cuts):
    shape = case.shape
    with mock.patch.dict(vars(cpu_parts), cuts):
        parts = cpu_parts.parts_of(shape, case.window, torch.float32)
    found = torch.zeros(shape.tokens, shape.start + shape.tokens, dtype=torch.int)
    for part in parts:
        columns = list(itertools.chain.from_iterable(range(*span) for span in part.spans))
        pairs = torch.ones(part.last - part.first, len(columns), dtype=torch.int)
        if part.causal:
            pairs = pairs.tril()
        elif part.mask is not None:
            assert set(part.mask.unique().tolist()) <= {0.0, float("-inf")}
            pairs = (part.mask == 0).int()
        found[part.first : part.last, columns] += pairs
    assert torch.equal(found, ancestry(case).int())
    fresh = [part for part in parts if part.fresh]
    assert parts[: len(fresh)] == fresh
    assert [part.first for part in fresh] + [shape.tokens] == [0] + [part.last for part in fresh]


def test_branches_that_are_small_share_a_call_and_long_ones_do_not():
    def count(*sizes):
        ends = list(itertools.accumulate(sizes))
        parts = [Segment(end - size, end, end, 5, -1) for size, end in zip(sizes, ends, strict=True)]
        found = cpu_parts.parts_of(ChunkShape.of(0, 0, parts), 0, torch.float32)
        return [(part.first, part.last, part.causal) for part in found]

    assert count(8, 8, 8) == [(0, 24, False)]
    assert count(*[8] * 12) == [(0, 48, False), (48, 96, False)]
    assert count(100, 8, 8, 100) == [(0, 100, True), (100, 116, False), (116, 216, True)]


def test_slices_of_a_schedule():
    sequences = [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 8, 9], [1, 2, 3, 9, 9], [1, 2, 3, 4, 7], [1, 2, 5]]
    tree = PrefixTree.build(sequences)
    branches = (Slice(1, 5, 7), Slice(3, 4, 5), Slice(2, 3, 5), Slice(4, 2, 3))
    for chunk in (Chunk(Slice(0, 2, 7), branches), Chunk(None, (Slice(1, 5, 7), Slice(0, 5, 6)))):
        spine = chunk.spine.tokens if chunk.spine else 0
        shape = ChunkShape.of(chunk.start, spine, segments(tree, chunk))
        for provider in PROVIDERS:
            for window in (0, 2):
                Run(Case(shape, window, groups=2), provider).check()


def test_value_heads_of_another_size():
    shape = ChunkShape.of(3, 2, [Segment(0, 2, 5, 3, -1), Segment(2, 5, 5, 4, 0)])
    Run(Case(shape, groups=2, value_width=6), Reference).check()


def test_rows_that_are_not_contiguous():
    shape = ChunkShape.run(0, 9)
    run = Run(Case(shape, groups=2), FlashCPU)
    columns = [tensor.mT.contiguous().mT for tensor in (run.query, run.key, run.value)]
    out, logsumexp = run.path.mix(0, *columns, run.case.scale)
    assert torch.equal(out, run.out)
    run.path.pending = 0
    for grad in (run.grad.sum().expand(run.grad.shape), run.grad.mT.contiguous().mT):
        expected = run.path.mix_backward(
            0, grad.contiguous(), run.query, run.key, run.value, out, logsumexp, run.case.scale
        )
        actual = run.path.mix_backward(0, grad, *columns, out, logsumexp, run.case.scale)
        for a, b in zip(actual, expected, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize("sizes", [(300,), (40,) * 6, (8,) * 30, (150, 20, 20, 20)])
def test_bfloat16_is_as_accurate_as_one_plain_call(sizes, window):
    end, parts = sum(sizes), [Segment(0, sizes[0], sum(sizes), 17, -1)]
    for size in sizes[1:]:
        first = parts[-1].last
        parts.append(Segment(first, first + size, first + size, 17 + sizes[0] // 2, 0))
    assert parts[-1].last == end
    case = Case(ChunkShape.of(17, sizes[0], parts), window, groups=2, width=16, value_width=16, dtype=torch.bfloat16)
    run = Run(case, FlashCPU)
    expected = run.oracle()
    leaves = [t.detach().clone().requires_grad_() for t in (run.query, run.key, run.value)]
    prefix = [buffer[:, :, :17] for buffer in run.before]
    key, value = (torch.cat([p, t], 2) for p, t in zip(prefix, leaves[1:], strict=True))
    plain = torch.nn.functional.scaled_dot_product_attention(
        leaves[0], key, value, ancestry(case), scale=case.scale, enable_gqa=True
    )
    plain_grads = torch.autograd.grad(plain, leaves, run.grad)
    results, own = run.results(), slice(17, None)
    pairs = [(results[0], plain, expected[0]), (results[2], plain_grads[0], expected[2])]
    pairs += [(results[k][:, :, own], plain_grads[k - 2], expected[k][:, :, own]) for k in (3, 4)]
    for actual, reference, exact in pairs:
        error, budget = ((tensor.double() - exact).norm() for tensor in (actual, reference))
        assert error <= 2 * budget


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
            out, logsumexp = path.mix(layer, *inputs[:3], 1.0)
            taken.append(path.mix_backward(layer, inputs[3], *inputs[:3], out, logsumexp, 1.0))
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


@settings(max_examples=200, deadline=None)
@given(case=cases(shapes()))
def test_a_table_says_which_tokens_read_which(case):
    """What kernels go by: token i reads token j if `j <= i < ends[j]`, and the first `start` of the stack."""
    table, shape = case.shape.table(torch.device("cpu")), case.shape
    number = torch.arange(shape.tokens)
    own = (number <= number[:, None]) & (number[:, None] < table.ends)
    depths = torch.cat([torch.arange(shape.start), table.depths])
    allowed = torch.cat([torch.ones(shape.tokens, int(table.start), dtype=torch.bool), own], 1)
    if case.window:
        allowed &= table.depths[:, None] - depths < case.window
    assert torch.equal(allowed, ancestry(case))


def test_a_chunk_that_is_not_in_depth_first_order_has_no_table():
    parts = [Segment(0, 4, 6, 0, -1), Segment(4, 5, 5, 2, 0), Segment(5, 6, 6, 3, 0)]  # from token 1, then from token 2
    with pytest.raises(AssertionError, match="depth-first"):
        ChunkShape.of(0, 4, parts).table(torch.device("cpu"))


def test_a_shape_is_a_value():
    first, second = ChunkShape.run(3, 5), ChunkShape.run(3, 5)
    cpu_parts.parts_of(first, 0, torch.float32)
    assert first == second
    assert hash(first) == hash(second)
    assert (first.tokens, first.height, first.spine) == (5, 8, 5)
    assert statistics_dtype(torch.bfloat16) is torch.float32
