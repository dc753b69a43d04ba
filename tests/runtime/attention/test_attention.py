"""Attention of chunks, packed or not, against a dense softmax over the pairs of the tree."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dta_compile.plan import Chunk, PrefixTree, Segment, Slice, segments
from dta_compile.runtime.attention import chosen_keys, cpu, cpu_parts
from dta_compile.runtime.attention.chosen_keys import Blockwise
from dta_compile.runtime.attention.cpu import FlashCPU
from dta_compile.runtime.attention.kept_keys import KeptKeys
from dta_compile.runtime.attention.reference import Reference
from dta_compile.runtime.path.chunk_shape import ChunkShape
from tests.support.attention import FORKED, TIGHT, Case, Run, ancestry, cases, check_unread, shapes, unread

PROVIDERS = [Reference, FlashCPU]
TINY = {
    "_CALL_PAIRS": 6,
    "_BLOCK": 4,
    "_SUBTREE": 6,
    "_PIECE": 3,
    "_ONE_CALL": 3,
    "_LARGE_BLOCKS": 10,
    "_ROWS": 4,
}  # every kind of part in few tokens


@pytest.mark.parametrize("provider", PROVIDERS)
@settings(max_examples=60, deadline=None)
@given(case=cases(shapes()))
def test_chunks_attend_as_the_dense_softmax_over_the_tree(provider, case):
    Run(case, provider).check()


@settings(max_examples=30, deadline=None)
@given(case=cases(shapes()), extent=st.sampled_from([1, 3, 40]), pairs=st.sampled_from([1, 60, 10**6]))
def test_biases_by_distance(case, extent, pairs):
    case = dataclasses.replace(case, bias=extent, with_sinks=False, units=False)
    with mock.patch.object(chosen_keys, "MOST_PAIRS", pairs):
        Run(case, Blockwise).check()


@settings(max_examples=40, deadline=None)
@given(
    case=cases(shapes()),
    window=st.integers(1, 12),
    kept=st.sampled_from([(), (0,), (0, 1, 2), (3, 7, 11, 19, 40)]),
    make=st.sampled_from([Blockwise, lambda: KeptKeys(FlashCPU()), lambda: KeptKeys(Reference())]),
)
def test_tokens_that_stay_visible_beside_a_window(case, window, kept, make):
    Run(dataclasses.replace(case, window=window, chunk=0, units=False, kept=kept), make).check()


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


@settings(max_examples=100, deadline=None)
@given(case=cases(shapes(sizes=(1, 2, 3, 5, 20, 60))), cuts=st.sampled_from([TINY, {}]))
def test_parts_are_the_pairs_of_the_tree_each_once(case, cuts):
    shape = case.shape
    with mock.patch.dict(vars(cpu_parts), cuts):
        parts = cpu_parts.parts_of(shape, case.limit, case.units, torch.float32)
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
    ranges = sorted((part.first, part.last) for part in fresh)
    assert [first for first, _ in ranges] + [shape.tokens] == [0] + [last for _, last in ranges]
    touched = set()
    for part in parts:
        own = {key for span in part.spans for key in range(*span) if key >= shape.start}
        assert own.isdisjoint(touched) if part.fresh_keys else own <= touched or not any(p.fresh_keys for p in parts)
        touched |= own


def test_branches_that_are_small_share_a_call_and_long_ones_do_not():
    def count(*sizes):
        ends = list(itertools.accumulate(sizes))
        parts = [Segment(end - size, end, end, 5, -1) for size, end in zip(sizes, ends, strict=True)]
        found = cpu_parts.parts_of(ChunkShape.of(0, 0, parts), None, False, torch.float32)
        return [(part.first, part.last, part.causal) for part in found]

    assert count(8, 8, 8) == [(0, 24, False)]
    assert count(*[8] * 12) == [(0, 48, False), (48, 96, False)]
    assert count(100, 8, 8, 100) == [(0, 100, True), (100, 116, False), (116, 216, True)]


@pytest.mark.parametrize(("value", "operand", "token", "limit", "softcap"), unread(0.0, 1.5))
@pytest.mark.parametrize("provider", PROVIDERS)
def test_what_is_not_read_leaves_no_trace(provider, softcap, operand, token, limit, value):
    case = Case(FORKED, groups=2, softcap=softcap, with_sinks=True, **limit)
    for cuts in (TINY, {}):
        with mock.patch.dict(vars(cpu_parts), cuts):
            check_unread(functools.partial(Run, case, provider), operand, token, value)


def test_slices_of_a_schedule():
    sequences = [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 8, 9], [1, 2, 3, 9, 9], [1, 2, 3, 4, 7], [1, 2, 5]]
    tree = PrefixTree.build(sequences)
    branches = (Slice(1, 5, 7), Slice(3, 4, 5), Slice(2, 3, 5), Slice(4, 2, 3))
    for chunk in (Chunk(Slice(0, 2, 7), branches), Chunk(None, (Slice(1, 5, 7), Slice(0, 5, 6)))):
        spine = chunk.spine.tokens if chunk.spine else 0
        shape = ChunkShape.of(chunk.start, spine, segments(tree, chunk))
        for provider in PROVIDERS:
            for limit in ({}, {"window": 2}, {"chunk": 3}):
                Run(Case(shape, groups=2, **limit), provider).check()


def test_value_heads_of_another_size():
    shape = ChunkShape.of(3, 2, [Segment(0, 2, 5, 3, -1), Segment(2, 5, 5, 4, 0)])
    Run(Case(shape, groups=2, value_width=6), Reference).check()


def test_rows_that_are_not_contiguous():
    shape = ChunkShape.run(0, 9)
    run = Run(Case(shape, groups=2), FlashCPU)
    columns = [tensor.mT.contiguous().mT for tensor in (run.query, run.key, run.value)]
    out, logsumexp = run.path.mix(0, *columns, *run.scoring)
    assert torch.equal(out, run.out)
    run.path.pending = 0
    for grad in (run.grad.sum().expand(run.grad.shape), run.grad.mT.contiguous().mT):
        expected = run.path.mix_backward(0, grad.contiguous(), *run.given, out, logsumexp, *run.scoring)
        actual = run.path.mix_backward(0, grad, *columns, out, logsumexp, *run.scoring)
        for a, b in zip(actual, expected, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("limit", [{}, {"window": 50}, {"chunk": 64}])
@pytest.mark.parametrize("sizes", [(300,), (40,) * 6, (8,) * 30, (150, 20, 20, 20)])
def test_bfloat16_is_as_accurate_as_one_plain_call(sizes, limit):
    end, parts = sum(sizes), [Segment(0, sizes[0], sum(sizes), 17, -1)]
    for size in sizes[1:]:
        first = parts[-1].last
        parts.append(Segment(first, first + size, first + size, 17 + sizes[0] // 2, 0))
    assert parts[-1].last == end
    sizes_of = {"groups": 2, "width": 16, "value_width": 16}
    case = Case(ChunkShape.of(17, sizes[0], parts), dtype=torch.bfloat16, **sizes_of, **limit)
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
