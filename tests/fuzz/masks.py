"""Attention masks: boolean combinations over query `i`, key `j` and inputs of every rank, as bools and as floats."""

from __future__ import annotations

import re

from hypothesis import strategies as st

from tests.fuzz.program import Mask

CAUSAL = Mask("")

INDICES = [
    "i, j = torch.arange(S)[:, None], torch.arange(S)[None, :]",
    "i, j = torch.meshgrid(torch.arange(S), torch.arange(S), indexing='ij')",
    "i = torch.arange(S).view(S, 1)\nj = torch.arange(S)",
    "i = torch.ones(S, dtype=torch.int64).cumsum(0)[:, None]\nj = i.T",
    "i, j = torch.arange(1, S + 1)[:, None] * 2, 2 * torch.arange(1, S + 1)",
]
_BUFFER = 'self.register_buffer("tril", torch.ones(LONGEST, LONGEST, dtype=torch.bool).tril())'
CAUSES = [
    "(j <= i)",
    "(i >= j)",
    "torch.ones(S, S, dtype=torch.bool).tril()",
    "(i - j >= 0)",
    "~(j > i)",
    "(j < i + 1)",
    "torch.ones(S, S).triu(1).logical_not()",
    "self.tril[:S, :S]",
    "(torch.ones(S, S).tril() == 1)",
    "torch.tril(torch.ones(B, 1, S, S, dtype=torch.bool))",
]
# Further conditions, with the arguments of every rank; `n` is a small number.
WINDOWS = [
    "(i - j < $n)",
    "(j > i - $n)",
    "(i - j < window)",
    "(i - j <= limit)",
    "(i - j < windows[:, None, None, None])",
    "((i - j) // 2 < $n)",
    "(i - j <= $n / 2)",
    "((i - j).abs() < $n)",
    "((i - j).clamp(min=0) < $n)",
    "torch.ones(S, S, dtype=torch.bool).triu(-$n)",
    "(torch.minimum(i - j, torch.tensor($n)) < $n)",
]
KEYS = [
    "(pad[:, None, None, :] != 0)",
    "pad[:, None, None, :].bool()",
    "(pad[:, None, None, :] == 1)",
    "(pad[:, None, None, :] > 0)",
    "(pad * 1.0)[:, None, None, :].to(torch.bool)",
    "(ids != 0)[:, None, None, :]",
    "(pad[:, None, :, None] * pad[:, None, None, :] != 0)",
    "(1 - (pad == 0).long())[:, None, None, :].bool()",
]
SEGMENTS = [
    "(segments[:, None, :, None] == segments[:, None, None, :])",
    "(segments[:, None, :, None] - segments[:, None, None, :] == 0)",
    "((ids == 1).cumsum(1)[:, None, :, None] == (ids == 1).cumsum(1)[:, None, None, :])",
    "((pos == 0).cumsum(1)[:, None, :, None] == (pos == 0).cumsum(1)[:, None, None, :])",
]
ODD = [
    "(i // $n - j // $n < 2)",
    "(i // $n == j // $n)",
    "((i + j) % 2 == 0)",
    "((i - j) % $n == 0)",
    "(j < $n)",
    "(i > $n)",
    "((ids > 6)[:, None, :, None] & (ids > 6)[:, None, None, :])",
    "(ids > 3)[:, None, :, None]",
    "self.allowed[ids][:, None, None, :]",
    "(advantage[:, None, None, :] < 1.5)",
    "(pos[:, None, None, :] <= pos[:, None, :, None])",
    "(factor > 1)[:, None, None, None]",
    "(limit > 2)",
    "torch.tensor([[True]])",
    "(i * j >= 0)",
    "(j.clamp(max=$n) <= i)",
    "(i - j != $n)",
    "(j * $n < i * $n + 1)",
]
_ALLOWED = 'self.register_buffer("allowed", torch.arange(V) % 3 > 0)'
FORMS = [
    *["m = $m"] * 6,
    "m = torch.zeros(()).masked_fill(~($m), float('-inf'))",
    "m = torch.where($m, 0.0, -1e9)",
    "m = torch.where($m, 0.0, torch.finfo(x.dtype).min)",
    "m = (1.0 - ($m).to(x.dtype)) * -1e9",
    "m = ($m).to(x.dtype).log()",
    "m = ($m).expand(B, H, S, S)",
    "m = ($m).logical_not().logical_not()",
    "m = ($m) | torch.eye(S, dtype=torch.bool)",
    "m = ($m) | ~($m).any(-1, keepdim=True)",
]
_MULTIPLIED = "m = (1 - $m) * -1e9"


# Arguments over pairs of tokens, whose values alone tell what they are.
TENSORS = [
    "m = pairs",
    "m = additive",
    "m = torch.where(pairs, 0.0, float('-inf'))",
    "m = pairs.expand(B, H, S, S)",
    "m = pairs & (torch.arange(S)[:, None] - torch.arange(S) < 3)",
    "m = pairs & (pad != 0)[:, None, None, :]",
    "m = additive + torch.where(pad != 0, 0.0, -1e9)[:, None, None, :]",
]
# Conditions of functions for flex_attention, and its functions of scores.
FLEX = [
    "i - j < $n",
    "pad[b, j] != 0",
    "segments[b, i] == segments[b, j]",
    "(segments[b, i] == segments[b, j]) & (pad[b, j] != 0)",
    "i - j < window",
]
SCORES = ["3 * torch.tanh(s / 3)", "s + 0.5 * h", "s * 2", "torch.where(i >= j, s, -float('inf'))"]


def _some(draw: st.DrawFn, choices: list[str], percent: int) -> list[str]:
    if draw(st.integers(0, 99)) < 100 - percent:
        return []
    return [draw(st.sampled_from(choices)).replace("$n", str(draw(st.integers(1, 4))))]


STATED = ["pad", "pad.bool()", "segments", "(pad != 0) * (pos == 0).cumsum(1)", "(ids == 1).cumsum(1)"]


@st.composite
def stated(draw: st.DrawFn) -> Mask:
    """What `dta_compile.attention` is told in words."""
    told, real = [], ""
    if chosen := _some(draw, STATED, 70):
        told.append(f"segments={chosen[0]}")
        real = f"({chosen[0]} != 0)"
    told += [f"window={number}" for number in _some(draw, ["$n"], 40)]
    told += ["softcap=0.7"] if draw(st.booleans()) else []
    sinks = draw(st.booleans())
    told += ["sinks=self.sinks"] if sinks else []
    init = "self.sinks = nn.Parameter(torch.linspace(-1, 1, H, dtype=torch.float64))" if sinks else ""
    return Mask("", init, attend=", ".join(told) or "softcap=1.3", real=real, function="dta_compile.attention")


@st.composite
def flex_masks(draw: st.DrawFn) -> Mask:
    """A mask function for `flex_attention`, and seldom a function of scores."""
    chosen = _some(draw, FLEX, 60)
    seen = " & ".join(["(i >= j)", *(f"({one})" for one in chosen)])
    code = f"m = flex.create_block_mask(lambda b, h, i, j: {seen}, B, None, S, S, device='cpu')"
    scores = [f"score_mod=lambda s, b, h, i, j: {one}" for one in _some(draw, SCORES, 40)]
    real = "(pad != 0)" if any("pad" in one for one in chosen) else ""
    return Mask(code, attend=", ".join([*scores, "block_mask=m"]), real=real, function="flex.flex_attention")


@st.composite
def masks(draw: st.DrawFn) -> Mask:
    """`is_causal`, a conjunction as models have it, or (seldom) any combination."""
    if draw(st.integers(0, 99)) < 15:
        return CAUSAL
    if draw(st.integers(0, 99)) < 15:
        return draw(stated())
    if draw(st.integers(0, 99)) < 10:
        return draw(flex_masks())
    if draw(st.integers(0, 99)) < 15:
        return Mask(draw(st.sampled_from(TENSORS)), attend="attn_mask=m", real="(pad != 0)")
    keys = _some(draw, KEYS, 50)
    terms = [draw(st.sampled_from(CAUSES)), *_some(draw, WINDOWS, 35), *keys, *_some(draw, SEGMENTS, 15)]
    if draw(st.integers(0, 9)) == 9 and len(terms) > 1:  # as older models multiply them
        product = " * ".join(f"({term}).to(x.dtype)" for term in terms)
        return _mask(draw, _MULTIPLIED.replace("$m", product), keys)
    text = " & ".join(draw(st.permutations(terms)))
    odds = _some(draw, ODD, 10)
    for odd in odds:
        text = f"({text}) {draw(st.sampled_from(['&', '|', '^']))} {odd}"
    return _mask(draw, draw(st.sampled_from(FORMS)).replace("$m", text), keys, bool(odds))


def _mask(draw: st.DrawFn, text: str, keys: list[str], is_odd: bool = False) -> Mask:
    init = "\n".join(line for name, line in (("tril", _BUFFER), ("allowed", _ALLOWED)) if f"self.{name}" in text)
    indices = draw(st.sampled_from(INDICES)) + "\n" if re.search(r"\b[ij]\b", text) else ""
    real = next((compared[0] for key in keys if (compared := re.match(r"\((ids|pad) (!=|==|>) \d\)", key))), "")
    real = real or ("(pad != 0)" if keys else "")
    return Mask(indices + text, init, is_odd, attend="attn_mask=m", real=real)
