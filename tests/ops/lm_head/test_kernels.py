"""The kernels of a head against torch's operators: on a GPU, or on a CPU by Triton's interpreter."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from dta_compile.ops import triton_use
from dta_compile.ops.lm_head import by_kernels, operators
from dta_compile.ops.lm_head.blocks import linear_log_prob, linear_log_prob_backward
from dta_compile.ops.lm_head.operators import Head

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
kernels = pytest.mark.skipif(
    not triton_use.runs_kernels(torch.empty(0, device=DEVICE)), reason="needs the package triton"
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A head, over blocks of the vocabulary that a kernel goes over in steps of `columns`.

    Attributes:
        labels: of a row; the last one is the same as the first. None: there are none.
        scale: the temperature's: None, "number" or "rows".
        cap: the same of a soft cap's divisor.
        logit: what the bias is instead at `entries`, or None.
    """

    rows: int = 5
    vocabulary: int = 61
    block: int = 23
    columns: int = 8
    labels: int | None = 3
    scale: str | None = None
    cap: str | None = None
    has_bias: bool = True
    wants_mean: bool = True
    wants_rest: bool = True
    dtype: torch.dtype = torch.float32
    logit: float | None = None
    entries: tuple[int | None, ...] = (0,)

    def head(self) -> Head:
        generator = torch.Generator().manual_seed(1)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        bias = random(self.vocabulary) if self.has_bias else None
        if self.logit is not None:
            bias[slice(*self.entries)] = self.logit
        numbers = {None: None, "number": torch.tensor(0.7), "rows": 0.5 + random(self.rows, 1).abs()}
        temperature, outer = numbers[self.scale], numbers[self.cap]
        labels = None
        if self.labels is not None:  # in rows that are not dense
            labels = torch.randint(self.vocabulary, (self.labels, self.rows), generator=generator).t()
            labels[:, -1:] = labels[:, :1]
        hidden, weight = random(self.rows, 4), 2 * random(self.vocabulary, 4)
        values = (hidden.to(self.dtype), weight.to(self.dtype), bias, temperature, labels, outer)
        return Head(*(None if value is None else value.to(DEVICE) for value in values))

    def logits(self) -> torch.Tensor:
        head = self.head()
        logits = (head.hidden @ head.weight.t()).float()
        logits = logits if head.bias is None else logits + head.bias
        logits = logits if head.temperature is None else logits / head.temperature
        return logits if head.inverse_cap is None else logits.tanh() / head.inverse_cap

    def results(self, has_kernel: bool) -> list[torch.Tensor]:
        """What the operator returns, and gradients of hidden, weight and bias."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(by_kernels, "COLUMNS", self.columns)
            for limit in ("BLOCK_COLUMNS", "FEWEST_COLUMNS"):
                patch.setattr(operators, limit, self.block)
            if has_kernel:
                assert by_kernels.fits(self.head(), torch.float32)
            else:
                patch.setattr(by_kernels, "fits", lambda head, dtype: False)
            further = operators.Further(self.wants_mean, self.wants_rest, self.wants_rest)
            found = linear_log_prob(*self.head(), further, torch.float32)
            of_labels = torch.linspace(-1, 2, found.logit.numel(), device=DEVICE).view_as(found.logit)
            of_labels = None if self.labels is None else of_labels
            of_log_sum = torch.tensor(0.3, device=DEVICE).expand(self.rows)
            of_mean = torch.linspace(1, -1, self.rows, device=DEVICE) if self.wants_mean else None
            of_total = torch.linspace(-0.1, 0.2, self.rows, device=DEVICE) if self.wants_rest else None
            statistics = (found.log_sum, found.mean if self.wants_mean else None, found.largest)
            wanted = [True, True, self.has_bias]
            gradients = linear_log_prob_backward(
                *self.head(), *statistics, of_labels, of_log_sum, of_mean, of_total, wanted
            )
        return [*found, *gradients]

    def check(self) -> None:
        found, expected = self.results(True), self.results(False)
        best = operators.Results._fields.index("best")
        if expected[best].numel():  # logits that a soft cap makes equal may be rounded otherwise: any of them is best
            logits = self.logits()
            found[best], expected[best] = (logits.gather(1, each[best][:, None]) for each in (found, expected))
        # A gradient that was rounded otherwise in its last place weighs as much as its largest summands.
        rounding = {"rtol": 1e-5, "atol": 2e-5} if self.dtype is torch.float32 else {"rtol": 2e-3, "atol": 1e-2}
        for place, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            is_sum = place == operators.Results._fields.index("total")
            tolerance = rounding if place >= len(operators.Results._fields) else {"rtol": 1e-5, "atol": 1e-5}
            tolerance = {"rtol": 1e-5, "atol": 1e-4} if is_sum else tolerance
            torch.testing.assert_close(mine, theirs, **tolerance, equal_nan=True, msg=lambda text: f"{self}: {text}")


@kernels
@settings(max_examples=60, deadline=None)
@given(
    case=st.builds(
        Case,
        rows=st.sampled_from((0, 1, 2, 9)),
        vocabulary=st.integers(1, 70),
        block=st.integers(1, 40),
        columns=st.sampled_from((1, 4, 16, 64)),
        labels=st.sampled_from((None, 0, 1, 3)),
        scale=st.sampled_from((None, "number", "rows")),
        cap=st.sampled_from((None, "number", "rows")),
        has_bias=st.booleans(),
        wants_mean=st.booleans(),
        wants_rest=st.booleans(),
        dtype=st.sampled_from((torch.float32, torch.float16)),
    )
)
def test_kernels_are_the_operators_of_torch(case):
    case.check()


INFINITE = {
    "the first block": ((0, 23), -torch.inf),
    "the first steps": ((0, 16), -torch.inf),
    "the first blocks": ((0, 50), -torch.inf),
    "the last blocks": ((30, None), -torch.inf),
    "every second": ((0, None, 2), -torch.inf),
    "the first block, almost": ((0, 23), -1e38),
    "the last block, almost": ((46, None), 1e38),
    "all": ((None,), -torch.inf),
    "one of the first block": ((3, 4), torch.inf),
    "one of the last block": ((60, 61), torch.inf),
    "inf after -inf": ((46, None), torch.inf),
}


@kernels
@pytest.mark.parametrize("name", INFINITE)
@pytest.mark.parametrize("scale", [None, "rows"])
@pytest.mark.parametrize("wants_mean", [False, True])
def test_kernels_with_infinite_logits(name, scale, wants_mean):
    entries, logit = INFINITE[name]
    Case(scale=scale, wants_mean=wants_mean, entries=entries, logit=logit).check()


@kernels
@pytest.mark.parametrize("place", [0, 30, 60])
def test_a_logit_that_is_no_number_makes_none_of_its_rows_results(place):
    found = operators.Results(*Case(logit=torch.nan, entries=(place, place + 1)).results(True)[:7])
    assert bool(found.log_prob.isnan().all()) and bool(found.log_sum.isnan().all())


@kernels
def test_kernels_with_many_labels_and_with_labels_that_have_no_gradient():
    Case(labels=70, vocabulary=40).check()
    head = Case().head()
    found = linear_log_prob(*head, operators.Further(), torch.float32)
    ones = torch.ones(5, device=DEVICE)
    arguments = (found.log_sum, None, found.largest, None, ones, None, None, [False, False, True])
    (*_, of_bias) = linear_log_prob_backward(*head, *arguments)
    logits = head.hidden @ head.weight.t() + head.bias
    torch.testing.assert_close(of_bias, logits.softmax(1).sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_the_kernels_take(device, monkeypatch):
    """Known of fake tensors, too: the working memory goes by it."""
    monkeypatch.setattr(triton_use, "has_triton", lambda: True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with FakeTensorMode():

        def fits(dtype=torch.bfloat16, statistics=torch.float32, by=None):
            hidden, weight = torch.empty(3, 4, dtype=dtype, device=device), torch.empty(7, 4, device=device)
            return by_kernels.fits(Head(hidden, weight, None, by, None), statistics)

        on_gpu = device == "cuda"
        assert fits() == fits(torch.float16) == fits(torch.float32) == on_gpu
        assert fits(by=torch.empty((), device=device)) == fits(by=torch.empty(3, 1, device=device)) == on_gpu
        assert not fits(torch.float64) and not fits(torch.float32, torch.float64)
        assert not fits(by=torch.empty((), device=device, dtype=torch.float64)) and not fits(by=torch.empty(()))
