"""Attention providers for GPUs, on a CPU: Triton's kernels by its interpreter, FlashAttention's calls in plain math."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings

from dta_compile.errors import OptionError
from dta_compile.plan import Segment
from dta_compile.runtime.attention import triton as attention_triton
from dta_compile.runtime.attention.cpu import FlashCPU
from dta_compile.runtime.attention.layer import AttentionRuntime
from dta_compile.runtime.attention.providers import PROVIDERS, provider_for
from dta_compile.runtime.attention.reference import Reference
from dta_compile.runtime.attention.varlen import VarlenAttention
from dta_compile.runtime.path.chunk_shape import ChunkShape
from tests.test_attention import Case, Run, cases, shapes


def interpreter_runs() -> bool:
    """Whether Triton's interpreter runs here; that of 3.6 cannot loop to a loaded number with numpy 2.4 or later."""
    if not attention_triton._is_at_hand() or not attention_triton._is_interpreted():
        return False
    from triton.runtime.errors import InterpreterError

    from tests.interpreted_kernel import count_kernel

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


class PlainKernel:
    """What a `VarlenKernel` has to do, one sequence at a time and by autograd."""

    def _sequences(self, q, k, v, x):
        groups = q.shape[1] // k.shape[1]
        for n in range(len(x.queries.offsets) - 1):
            (a, b), (c, d) = x.queries.offsets[n : n + 2].tolist(), x.keys.offsets[n : n + 2].tolist()
            assert b - a <= x.queries.longest
            assert d - c <= x.keys.longest
            query, key, value = (t.transpose(0, 1) for t in (q[a:b], k[c:d], v[c:d]))
            scores = query @ key.repeat_interleave(groups, 0).mT * x.scale
            if x.causal:
                assert b - a == d - c  # otherwise libraries differ in what causal means
                scores = scores.masked_fill(torch.ones(b - a, b - a).triu(1).bool(), float("-inf"))
            yield slice(a, b), slice(c, d), scores, value.repeat_interleave(groups, 0)

    def forward(self, q, k, v, x):
        assert (len(q), len(k)) == (x.queries.offsets[-1], x.keys.offsets[-1])
        out, logsumexp = torch.empty(*q.shape[:2], v.shape[2], dtype=q.dtype), torch.empty(q.shape[1], len(q)).to(q)
        for rows, _, scores, value in self._sequences(q, k, v, x):
            out[rows] = (scores.softmax(-1) @ value).transpose(0, 1)
            logsumexp[:, rows] = scores.logsumexp(-1)
        return out, logsumexp

    def backward(self, grad, q, k, v, out, logsumexp, x):
        """The gradients of `exp(scores - logsumexp) @ v` where logsumexp is that of all calls together."""
        q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
        loss = grad.new_zeros(())
        for rows, _, scores, value in self._sequences(q, k, v, x):
            g, o = grad[rows].transpose(0, 1), out[rows].transpose(0, 1)
            weights = (scores - logsumexp[:, rows, None]).exp()
            grad_scores = weights * (g @ value.mT - (g * o).sum(-1, keepdim=True))
            loss = loss + (grad_scores.detach() * scores).sum() + (weights.detach() @ value * g).sum()
        return torch.autograd.grad(loss, [q, k, v])


def varlen():
    return VarlenAttention(PlainKernel())


@settings(max_examples=80, deadline=None)
@given(case=cases(shapes()))
def test_varlen_calls_together_are_the_pairs_of_the_tree(case):
    Run(case, varlen).check()


def test_varlen_takes_one_call_per_level_of_the_chunk():
    parts = [Segment(0, 4, 9, 3, -1), Segment(4, 6, 8, 6, 0), Segment(6, 8, 8, 7, 1), Segment(8, 9, 9, 4, 0)]
    run = Run(Case(ChunkShape.of(3, 4, parts)), varlen)
    kernel, calls = PlainKernel(), []

    class Counting(PlainKernel):
        def forward(self, q, k, v, x):
            calls.append((len(q), len(k), x.causal, x.on_stack))
            return kernel.forward(q, k, v, x)

    run.path.runtimes = [AttentionRuntime(VarlenAttention(Counting()))]
    run.path.mix(0, run.query, run.key, run.value, run.case.scale)
    # Within slices; against the first slice; against the second one; against the stack.
    assert calls == [(9, 9, True, False), (5, 3 + 1, False, False), (2, 1, False, False), (9, 3, False, True)]


@interpreted
@settings(max_examples=25, deadline=None)
@given(case=cases(shapes(sizes=(1, 2, 5, 20))))
def test_triton_kernels(case):
    Run(Case(case.shape, case.window, case.kv_heads, case.groups, dtype=torch.float32), triton).check(1e-5)


@interpreted
@pytest.mark.parametrize(("width", "value_width"), [(16, 16), (24, 24), (20, 12), (80, 80)])
@pytest.mark.parametrize("window", [0, 30])
def test_triton_kernels_with_heads_of_any_size(width, value_width, window):
    parts = [
        Segment(0, 40, 75, 70, -1),
        Segment(40, 70, 70, 101, 0),
        Segment(70, 75, 75, 74, 0),
        Segment(75, 80, 80, 70, -1),
    ]
    case = Case(ChunkShape.of(70, 40, parts), window, 2, 2, width, value_width, torch.float32)
    Run(case, triton).check(1e-5)


@interpreted
def test_triton_programs_share_a_long_stack():
    case = Case(ChunkShape.run(1200, 5), 0, 1, 2, 16, 16, torch.float32)
    provider = triton()
    run = Run(case, lambda: provider)
    inputs = run.path._inputs(0, (run.query, run.key, run.value), (case.scale,))
    operands = run.path.runtimes[0]._operands(inputs)
    assert attention_triton._splits(operands, attention_triton._forward_blocks(operands)) > 1
    run.check(1e-5)


@interpreted
def test_triton_kernels_in_half_precision():
    parts = [Segment(0, 60, 90, 100, -1), Segment(60, 90, 90, 140, 0)]
    # The interpreter has no bfloat16.
    Run(Case(ChunkShape.of(100, 60, parts), 0, 2, 2, 32, 32, torch.float16), triton).check(4e-3)


@pytest.mark.skipif(not attention_triton._is_at_hand(), reason="needs the package triton")
def test_triton_kernels_compile_for_hopper(tmp_path):
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.compile_kernels"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.splitlines()) == 16


def triton():
    return attention_triton.TritonAttention()


@pytest.mark.parametrize("provider", [Reference, triton])
def test_what_lies_beyond_the_chunks_start_is_neither_read_nor_given_a_gradient(provider):
    if provider is triton and not INTERPRETED:
        pytest.skip("needs Triton's interpreter")
    case = Case(ChunkShape.run(10, 6), 0, 2, 2, dtype=torch.float32)
    run = Run(case, provider)
    assert provider.replayable if provider is Reference else provider().replayable
    inputs = run.path._inputs(0, (run.query, run.key, run.value), (case.scale,))
    operands = run.path.runtimes[0]._operands(inputs)
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


def test_a_provider_is_picked_by_name_or_by_what_it_takes():
    float64, float32 = torch.zeros(1, 1, 3, 8, dtype=torch.float64), torch.zeros(1, 1, 3, 8)
    assert isinstance(provider_for("auto", float64, float64), FlashCPU)
    assert isinstance(provider_for("auto", float64, float64[..., :4]), Reference)
    assert isinstance(provider_for("reference", float32, float32), Reference)
    for name in ("triton", "varlen", "flash_attn"):
        with pytest.raises(OptionError, match=f"attention='{name}' cannot run this model here"):
            provider_for(name, float64, float64)
    assert list(PROVIDERS)[-1] == "reference", "what takes anything comes last"
