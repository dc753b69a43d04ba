"""Triton's attention kernels, on a CPU by its interpreter."""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dta_compile.ops import triton_use
from dta_compile.plan import Segment
from dta_compile.runtime.attention import cudnn
from dta_compile.runtime.attention import triton as attention_triton
from dta_compile.runtime.attention.reference import Reference
from dta_compile.runtime.path.chunk_shape import ChunkShape
from tests.support.attention import FORKED, Case, Run, cases, check_unread, shapes


def interpreter_runs() -> bool:
    """Whether Triton's interpreter runs here; that of 3.6 cannot loop to a loaded number with numpy 2.4 or later."""
    if not triton_use.has_triton() or not triton_use.is_interpreted():
        return False
    from triton.runtime.errors import InterpreterError

    from tests.support.interpreted_kernel import count_kernel

    counted = torch.zeros(1, dtype=torch.int32)
    try:
        count_kernel[(1,)](torch.tensor([3], dtype=torch.int32), counted)
    except InterpreterError:
        return False
    return counted.item() == 3


INTERPRETED = interpreter_runs()
interpreted = pytest.mark.skipif(
    not INTERPRETED,
    reason="needs the package triton with an interpreter that runs, and TRITON_INTERPRET=1 where there is no GPU",
)


@interpreted
@settings(max_examples=25, deadline=None)
@given(case=cases(shapes(sizes=(1, 2, 5, 20))))
def test_triton_kernels(case):
    Run(dataclasses.replace(case, dtype=torch.float32), triton).check(1e-5)


@interpreted
@pytest.mark.parametrize(("width", "value_width"), [(16, 16), (24, 24), (20, 12), (80, 80)])
@pytest.mark.parametrize("limit", [{}, {"window": 30}, {"chunk": 48}])
def test_triton_kernels_with_heads_of_any_size(width, value_width, limit):
    parts = [
        Segment(0, 40, 75, 70, -1),
        Segment(40, 70, 70, 101, 0),
        Segment(70, 75, 75, 74, 0),
        Segment(75, 80, 80, 70, -1),
    ]
    case = Case(ChunkShape.of(70, 40, parts), 0, 2, 2, width, value_width, torch.float32)
    Run(dataclasses.replace(case, **limit), triton).check(1e-5)


@interpreted
@pytest.mark.parametrize("limit", [{}, {"window": 100}])
def test_triton_kernels_go_by_lists_of_blocks(limit):
    """Whole blocks, blocks cut by a branch point, and blocks that only part of a block of queries reads."""
    import triton.language as tl

    from dta_compile.runtime.attention import triton_kernels

    parts = [
        Segment(0, 150, 420, 70, -1),
        Segment(150, 290, 355, 190, 0),
        Segment(290, 355, 355, 330, 1),
        Segment(355, 420, 420, 134, 0),
        Segment(420, 500, 500, 70, -1),
    ]
    case = Case(ChunkShape.of(70, 150, parts), 0, 1, 2, 16, 16, torch.float32)
    Run(dataclasses.replace(case, **limit), triton).check(1e-5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_kernels, "LONG_REACH", tl.constexpr(100))  # programs share blocks of keys
        patch.setattr(attention_triton, "LEAST_KEYS", 64)
        Run(dataclasses.replace(case, **limit), triton).check(1e-5)
        patch.setattr(attention_triton, "_query_blocks", lambda x: attention_triton.Blocks(128, 64, 8, 2))
        patch.setattr(attention_triton, "_key_blocks", lambda *_: attention_triton.Blocks(64, 128, 8, 2))
        patch.setattr(attention_triton, "_forward_blocks", lambda x: attention_triton.Blocks(128, 64, 8, 2))
        Run(dataclasses.replace(case, **limit), triton).check(1e-5)


@interpreted
@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")  # of numpy, which the interpreter computes with
@settings(max_examples=15, deadline=None)
@given(case=cases(shapes(sizes=(1, 2, 5, 20))), calls=st.sampled_from((0, 9)))
def test_a_library_does_the_part_that_all_queries_read(case, calls):
    case = dataclasses.replace(case, dtype=torch.float32, value_width=case.width, softcap=0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cudnn, "aten", Library)
        patch.setattr(cudnn, "LEAST_QUERIES", 3)
        patch.setattr(cudnn, "LEAST_KEYS", 3)
        patch.setattr(cudnn, "CALLS_WORTH_A_PLAN", calls)  # before that, what is compiled early leaves no trace
        cudnn._calls.clear(), cudnn._compiled.clear()
        Run(case, cudnn.CudnnAttention).check(1e-5)
    shape = case.shape
    if not shape.start and shape.trunk >= 3 and not (case.units and shape.units):
        shape = shape.divided[1]  # what all branches of a root path read is a rectangle, too
    is_rectangle = shape.start >= 3 and shape.tokens >= 3 and case.limit is None
    assert any(count > 0 for count in cudnn._calls.values()) == is_rectangle
    assert {kind for kind, *_ in cudnn._compiled} == ({"forward", "backward"} if is_rectangle and calls else set())


class Library:
    """Stands in for cuDNN: the definition of attention of all queries over all keys."""

    @staticmethod
    def _scaled_dot_product_cudnn_attention(query, key, value, bias, with_statistics, scale):
        key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
        scores = query @ key.mT * scale
        return scores.softmax(-1) @ value, scores.logsumexp(-1, keepdim=True)

    @staticmethod
    def _scaled_dot_product_cudnn_attention_backward(grad, query, key, value, out, statistics, *_, scale):
        groups = query.shape[1] // key.shape[1]
        keys, values = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))
        weights = (query @ keys.mT * scale - statistics).exp()
        scores = weights * (grad @ values.mT - (grad * out).sum(-1, keepdim=True)) * scale
        of_keys, of_values = scores.mT @ query, weights.mT @ grad
        return scores @ keys, *(tensor.unflatten(1, (-1, groups)).sum(2) for tensor in (of_keys, of_values))


@interpreted
def test_triton_programs_share_a_long_stack():
    case = Case(ChunkShape.run(1200, 5), 0, 1, 2, 16, 16, torch.float32)
    provider = triton()
    run = Run(case, lambda: provider)
    operands = run.operands()
    assert attention_triton._splits(operands, attention_triton._forward_blocks(operands)) > 1
    run.check(1e-5)


@interpreted
def test_triton_kernels_in_half_precision():
    parts = [Segment(0, 60, 90, 100, -1), Segment(60, 90, 90, 140, 0)]
    # The interpreter has no bfloat16.
    Run(Case(ChunkShape.of(100, 60, parts), 0, 2, 2, 32, 32, torch.float16), triton).check(4e-3)


@pytest.mark.skipif(not triton_use.has_triton(), reason="needs the package triton")
def test_triton_kernels_compile_for_hopper(tmp_path):
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.support.compile_kernels"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.splitlines()) == 28


def triton():
    return attention_triton.TritonAttention()


@interpreted
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of numpy, which the interpreter computes with
@pytest.mark.parametrize(("operand", "token", "limit"), [("value", 7, {}), ("key", 9, {"window": 3}), ("grad", 11, {})])
def test_what_is_not_read_leaves_no_trace(operand, token, limit):
    value = float("inf") if operand == "value" else float("nan")
    case = Case(FORKED, kv_heads=1, dtype=torch.float32, **limit)
    check_unread(functools.partial(Run, case, triton), operand, token, value, tolerance=1e-5)


@pytest.mark.parametrize("provider", [Reference, triton])
def test_what_lies_beyond_the_chunks_start_is_neither_read_nor_given_a_gradient(provider):
    if provider is triton and not INTERPRETED:
        pytest.skip("needs Triton's interpreter")
    case = Case(ChunkShape.run(10, 6), 0, 2, 2, dtype=torch.float32)
    run = Run(case, provider)
    assert provider.replayable if provider is Reference else provider().replayable
    operands = run.operands()
    longer = [torch.full((1, 2, 30, 4), float("nan")) for _ in range(2)]
    for buffer, exact in zip(longer, (operands.prefix_key, operands.prefix_value), strict=True):
        buffer[:, :, :10] = exact
    poisoned = operands._replace(prefix_key=longer[0], prefix_value=longer[1])
    grads = [torch.zeros(1, 2, length, 4) for length in (10, 10, 30, 30)]
    results = []
    for x, into in ((operands, grads[:2]), (poisoned, grads[2:])):
        out, logsumexp = provider().forward(x)
        results.append([out, logsumexp, *provider().backward(run.grad, out, logsumexp, x, *into)])
    for exact, found in zip(*results, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-6)
    for exact, found in zip(grads[:2], grads[2:], strict=True):
        torch.testing.assert_close(found[:, :, :10], exact, rtol=1e-5, atol=1e-6)
        assert not found[:, :, 10:].any()
