"""Attention of chunks by C++ of our own, against a dense softmax in float64."""

from __future__ import annotations

import ctypes
import functools
import re
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dta_compile.codegen import inductor
from dta_compile.executable.code import CppSource
from dta_compile.executable.pieces import TreeAttention, running
from dta_compile.ops.tree_attention import kernel
from dta_compile.plan import Segment
from dta_compile.runtime.attention.cpu import FlashCPU
from dta_compile.runtime.path.chunk_shape import ChunkShape
from tests.support.attention import FORKED, Case, Run, cases, check_unread, shapes, unread

TINY = {"ROWS": 6, "FEWEST": 1, "KEYS": 5, "SHORT": 3}  # blocks, tiles and copies in few tokens


@functools.cache
def library(tiny: bool) -> ctypes.CDLL:
    text = kernel.source()
    for name, value in TINY.items() if tiny else ():
        text, count = re.subn(rf"\b{name} = \d+;", f"{name} = {value};", text)
        assert count == 1
    found = inductor.load(inductor.generate(CppSource(text)))
    assert isinstance(found, ctypes.CDLL)
    return found


def run(case: Case, tiny: bool = False, **settings) -> Run:
    with (
        running({TreeAttention(): library(tiny)}),
        mock.patch("dta_compile.runtime.attention.cpu.parts_of", side_effect=AssertionError("by torch's kernels")),
    ):
        return Run(case, FlashCPU, **settings)


@settings(max_examples=150, deadline=None)
@given(case=cases(shapes()).filter(lambda case: not case.softcap), threads=st.sampled_from([1, 2, 3, 16]))
def test_every_kind_of_tile(case, threads):
    with mock.patch.object(torch, "get_num_threads", lambda: threads):
        run(case, tiny=True).check()


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(case=cases(shapes(sizes=(1, 4, 30, 60, 150, 300))).filter(lambda case: not case.softcap))
def test_larger_chunks(case):
    run(case).check(1e-11)


@pytest.mark.parametrize("start", [0, 17, 700])
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 257, 1000])
def test_one_slice_of_any_length(tokens, start):
    run(Case(ChunkShape.run(start, tokens), kv_heads=3, groups=2, width=8, value_width=8)).check(1e-11)


def test_a_soft_cap_and_bfloat16_are_for_other_kernels():
    with running({TreeAttention(): library(tiny=False)}):
        Run(Case(ChunkShape.run(3, 5), softcap=1.5), FlashCPU).check()
        Run(Case(ChunkShape.run(3, 5), dtype=torch.bfloat16), FlashCPU).check(0.1)


def test_rows_that_are_not_contiguous():
    expected = run(Case(ChunkShape.run(0, 9), groups=2))
    columns = [tensor.mT.contiguous().mT for tensor in (expected.query, expected.key, expected.value)]
    grad = expected.grad[..., :1].expand(expected.grad.shape)
    found = expected.path
    with running({TreeAttention(): library(tiny=False)}):
        out, logsumexp = found.mix(0, *columns, *expected.scoring)
        grads = found.mix_backward(0, grad, *columns, out, logsumexp, *expected.scoring)
        wanted = found.mix_backward(0, grad.contiguous(), *columns, out, logsumexp, *expected.scoring)
    assert torch.equal(out, expected.out)
    assert torch.equal(logsumexp, expected.logsumexp)
    assert all(map(torch.equal, grads, wanted))


@pytest.mark.parametrize("tokens", [1, 9])
def test_tokens_that_overlap_and_single_ones_in_any_layout(tokens):
    expected = run(Case(ChunkShape.run(70, tokens), groups=2))
    with running({TreeAttention(): library(tiny=False)}):
        by_channel = [one.transpose(1, 2).flatten(2).mT.contiguous() for one in (expected.key, expected.value)]
        key, value = (one.unflatten(1, (2, 4)).mT for one in by_channel)
        out, _ = expected.path.mix(0, expected.query, key, value, *expected.scoring)
        assert torch.equal(out, expected.out)
        same = expected.value[:, :, :1].expand(expected.value.shape)
        out, logsumexp = expected.path.mix(0, expected.query, key, same, *expected.scoring)
        wanted, _ = expected.path.mix(0, expected.query, key, same.contiguous(), *expected.scoring)
        assert torch.equal(out, wanted)
        expected.path.mix_backward(0, expected.grad, expected.query, key, same, out, logsumexp, *expected.scoring)


def test_a_call_goes_on_with_the_other_kernels():
    case = Case(ChunkShape.run(40, 300), groups=2)
    ours, theirs = run(case), Run(case, FlashCPU)
    given = theirs.grad, *theirs.given, theirs.out, theirs.logsumexp, *theirs.scoring
    grads = theirs.path.mix_backward(0, *given)
    with running({TreeAttention(): library(tiny=False)}):
        found = theirs.path.mix_backward(0, *given)
    torch.testing.assert_close(found, grads)
    torch.testing.assert_close(ours.out, theirs.out)


def test_gradients_are_on_the_cpu_whatever_the_default():
    expected = run(Case(ChunkShape.run(3, 5)))
    with torch.device("meta"), running({TreeAttention(): library(tiny=False)}):
        grads = expected.path.mix_backward(
            0, expected.grad, *expected.given, expected.out, expected.logsumexp, *expected.scoring
        )
    assert all(grad.device.type == "cpu" for grad in grads)


@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
def test_float32_is_as_accurate_as_torchs_kernels(scale):
    """Also where one weight is nearly all, and others are too small to be told from zero."""
    parts = [Segment(0, 300, 500, 40, -1), Segment(300, 400, 400, 340, 0), Segment(400, 500, 500, 200, 0)]
    case = Case(ChunkShape.of(40, 300, parts), groups=2, width=32, value_width=32, dtype=torch.float32)
    with mock.patch.object(Case, "scale", scale):
        ours, theirs = run(case), Run(case, FlashCPU)
        for own, other, exact in zip(ours.results(), theirs.results(), ours.oracle(), strict=True):
            error, torchs = ((found.double() - exact).norm() for found in (own, other))
            assert error <= 1.5 * torchs + 1e-7 * exact.norm()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_seen(value):
    """A key, by the queries that read it, as in torch."""
    with running({TreeAttention(): library(tiny=False)}):
        case = Run(Case(ChunkShape.run(0, 6), kv_heads=1), FlashCPU)
        key = case.key.clone()
        key[:, :, 3] = value
        out, _ = case.path.mix(0, case.query, key, case.value, *case.scoring)
    assert out[:, :, :3].isfinite().all()
    assert out[:, :, 3:].isnan().all()


@pytest.mark.parametrize(("value", "operand", "token", "limit", "softcap"), unread(0.0))
@pytest.mark.parametrize("tiny", [False, True])
def test_what_is_not_read_leaves_no_trace(tiny, operand, token, limit, softcap, value):
    case = Case(FORKED, groups=2, softcap=softcap, with_sinks=True, **limit)
    for threads in (1, 16):
        with mock.patch.object(torch, "get_num_threads", lambda threads=threads: threads):
            check_unread(functools.partial(run, case, tiny), operand, token, value)


def test_no_memory_is_an_error():
    chunk = Run(Case(ChunkShape.run(0, 6)), FlashCPU).operands()
    states = kernel.States(chunk.key, chunk.value, chunk.prefix_key, chunk.prefix_value)
    ends = torch.full((6,), 6, dtype=torch.int32)
    keys = kernel.Keys(torch.arange(6, dtype=torch.int32), ends, torch.arange(6, dtype=torch.int32))
    with mock.patch.object(torch, "get_num_threads", lambda: 2**40), pytest.raises(MemoryError, match="6 tokens"):
        kernel.forward(library(tiny=False), chunk.query, states, keys, 1.0)
