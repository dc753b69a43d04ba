"""`dta_compile.attention` of a dense batch, against the softmax written out."""

from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import dta_compile
from dta_compile.errors import OptionError
from dta_compile.ops import dense_attention
from dta_compile.ops.attention import DENSE_ATTENTION_BACKWARD, Masking
from dta_compile.ops.scoring import Scoring
from tests.support.tiny import BareLM, after, assert_same, shared_ids, weighted

SEGMENTS = st.lists(st.lists(st.integers(0, 3), min_size=7, max_size=7), min_size=2, max_size=2)


def operands(heads=4, kv_heads=2, tokens=7, batch=2):
    torch.manual_seed(0)
    sizes = [(batch, heads, tokens, 3), (batch, kv_heads, tokens, 3), (batch, kv_heads, tokens, 5)]
    return [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in sizes]


def written_out(query, key, value, segments=None, window=None, softcap=None, sinks=None, scale=None):
    batch, heads, tokens, width = query.shape
    key, value = (tensor.repeat_interleave(heads // key.shape[1], 1) for tensor in (key, value))
    scores = query @ key.mT * (width**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    index = torch.arange(tokens)
    allowed = (index <= index[:, None]).expand(batch, 1, -1, -1)
    if window is not None:
        allowed = allowed & (index[:, None] - index < window)
    if segments is not None:
        number = segments.long()
        same = (number[:, :, None] == number[:, None]) & (number != 0)[:, None]
        allowed = allowed & same[:, None]
    scores = scores.masked_fill(~allowed, -1e300)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(batch, heads, tokens, 1)], -1)
    weights = scores.softmax(-1)[..., :tokens] * allowed
    return weights @ value


def check(query, key, value, sinks=None, **settings):
    leaves = [query, key, value, *([] if sinks is None else [sinks])]
    actual = dta_compile.attention(query, key, value, sinks=sinks, **settings)
    expected = written_out(query, key, value, sinks=sinks, **settings)
    weights = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    mine, theirs = (torch.autograd.grad((out * weights).sum(), leaves) for out in (actual, expected))
    torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    segments=st.none() | SEGMENTS,
    window=st.sampled_from([None, 1, 3, 50]),
    softcap=st.sampled_from([None, 0.5]),
    has_sinks=st.booleans(),
    kv_heads=st.sampled_from([1, 2, 4]),
    scale=st.sampled_from([None, 2.0]),
    pairs=st.sampled_from([1, 10**6]),
)
@example([[1, 1, 1, 0, 0, 2, 2], [0, 0, 3, 1, 1, 3, 3]], 3, None, False, 2, None, 1)
def test_as_the_softmax_written_out(segments, window, softcap, has_sinks, kv_heads, scale, pairs):
    sinks = torch.linspace(-1, 2, 4, dtype=torch.float64).requires_grad_() if has_sinks else None
    segments = None if segments is None else torch.tensor(segments)
    with mock.patch.multiple(dense_attention, MOST_PAIRS=pairs, LEAST_ROWS=2):
        check(*operands(kv_heads=kv_heads), sinks=sinks, segments=segments, window=window, softcap=softcap, scale=scale)


def test_a_padding_mask_is_segments():
    padding = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0]])
    check(*operands(), segments=padding)
    check(*operands(), segments=padding.bool())


def test_a_sink_of_minus_infinity_is_none():
    query, key, value = operands()
    sinks = torch.tensor([0.5, -torch.inf, 1.0, 0.0], dtype=torch.float64).requires_grad_()
    segments = torch.tensor([[0, 0, 1, 1, 1, 2, 2]] * 2)
    dta_compile.attention(query, key, value, segments=segments, sinks=sinks).sum().backward()
    assert sinks.grad.isfinite().all() and sinks.grad[1] == 0


def test_compiled_by_another_backend():
    """Operands as models have them, views of projections."""
    heads = [tensor.detach().transpose(1, 2).contiguous().transpose(1, 2) for tensor in operands()]
    leaves = [tensor.requires_grad_() for tensor in heads]
    compiled = torch.compile(lambda *qkv: dta_compile.attention(*qkv, window=3, softcap=1.0), backend="aot_eager")
    both = [
        torch.autograd.grad(run(*leaves).square().sum(), leaves)
        for run in (compiled, compiled._torchdynamo_orig_callable)
    ]
    torch.testing.assert_close(*both)
    assert [grad.stride() for grad in both[0]] == [grad.stride() for grad in both[1]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_summed_in_single_precision(dtype):
    query, key, value = operands(tokens=40)
    exact = dta_compile.attention(query, key, value, softcap=1.0)
    rounded = dta_compile.attention(*(tensor.to(dtype) for tensor in (query, key, value)), softcap=1.0)
    assert rounded.dtype is dtype
    torch.testing.assert_close(rounded.double(), exact, rtol=0.02, atol=0.02)
    halves = [tensor.detach().to(dtype) for tensor in (query, key, value)]
    grads = DENSE_ATTENTION_BACKWARD(rounded, *halves, None, *Masking.causal(Scoring(1.0)).arguments)
    assert {grad.dtype for grad in grads} == {dtype}


@pytest.mark.parametrize(
    ("wide", "window", "provider"), [("qk", 5, "auto"), ("v", 5, "auto"), ("qkv", 2**40, "reference")]
)
def test_several_dtypes_and_windows_beyond_32_bits_over_the_tree(wide, window, provider):
    class Mixed(BareLM):
        def mix(self, x, pairs=None):
            heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
            dtypes = [torch.float64 if name in wide else torch.float32 for name in "qkv"]
            y = dta_compile.attention(*map(heads.to, dtypes), window=window)
            return self.norm(x + y.transpose(1, 2).flatten(2))

    torch.compiler.reset()
    model, ids = Mixed(), shared_ids()
    compiled = torch.compile(model, backend="dta", options={"codegen": "eager", "attention": provider})

    def step(run):
        out = run(ids)
        weighted(out).backward()
        return out

    assert_same(after(model, lambda: step(compiled)), after(model, lambda: step(model)), 1e-5)


def test_under_autocast_as_torch_has_it():
    query, key, value = (tensor.detach().float() for tensor in operands())
    with torch.autocast("cpu", torch.bfloat16):
        assert dta_compile.attention(query, key, value).dtype is torch.bfloat16
        assert dta_compile.attention(query, key, value, window=3).dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window": 0}, "window of attention is not positive"),
        ({"softcap": -1.0}, "softcap of attention is not positive"),
        ({"scale": 0.0}, "scale of attention is not positive"),
        ({"segments": torch.ones(2, 6, dtype=torch.long)}, "segments of attention do not fit"),
        ({"segments": torch.ones(2, 7)}, "segments of attention do not fit"),
        ({"sinks": torch.ones(2)}, "one sink a head"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(OptionError, match=message):
        dta_compile.attention(*operands(), **settings)


@pytest.mark.parametrize("kv_heads", [0, 3])
def test_heads_that_do_not_fit_are_refused(kv_heads):
    with pytest.raises(OptionError, match="sizes of query, key and value do not fit"):
        dta_compile.attention(*operands(kv_heads=kv_heads), window=2)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("operand", ["query", "key", "value", "grad"])
@pytest.mark.parametrize("settings", [{}, {"window": 2}, {"softcap": 0.5}])
def test_what_is_not_attended_to_leaves_no_trace(settings, operand, value):
    """Of the third token in packed rows of four and three: the tokens before it and those of the other sequence."""

    def results(bad):
        given = dict(zip(("query", "key", "value"), operands(), strict=True))
        leaves = [*given.values(), torch.randn(4, dtype=torch.float64).requires_grad_()]
        grad = torch.ones((2, 4, 7, 5), dtype=torch.float64)
        if bad is not None:
            (grad if operand == "grad" else given[operand].detach())[:, :, 2] = bad
        segments = torch.tensor([[1] * 4 + [2] * 3] * 2)
        out = dta_compile.attention(*given.values(), segments=segments, sinks=leaves[3], **settings)
        return out, *torch.autograd.grad(out, leaves[:3], grad)

    # Of the output and the query's gradient those before are apart as well, which keys are read by.
    for found, expected, before in zip(results(value), results(None), (2, 2, 0, 0), strict=True):
        for apart in (slice(0, before), slice(4, 7)):
            assert found[:, :, apart].isfinite().all()
            torch.testing.assert_close(found[:, :, apart], expected[:, :, apart], rtol=1e-12, atol=1e-12)
