"""FlashAttention's calls of variable lengths, on a CPU in plain math."""

from __future__ import annotations

import torch
from hypothesis import given, settings

from dta_compile.plan import Segment
from dta_compile.runtime.attention.layer import AttentionRuntime
from dta_compile.runtime.attention.varlen import VarlenAttention
from dta_compile.runtime.path.chunk_shape import ChunkShape
from tests.support.attention import Case, Run, cases, shapes


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
            if x.softcap:
                scores = (scores / x.softcap).tanh() * x.softcap
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
    run.path.mix(0, *run.given, *run.scoring)
    # Within slices; against the first slice; against the second one; against the stack.
    assert calls == [(9, 9, True, False), (5, 3 + 1, False, False), (2, 1, False, False), (9, 3, False, True)]
