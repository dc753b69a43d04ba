"""A NaN or an infinity of one sequence stays in it: other rows and earlier tokens are as in eager mode."""

from __future__ import annotations

import pytest
import torch

import dta_compile
from tests.support.tiny import PACKED_IDS, SEGMENTS, BareLM, StatedLM, TinyLM, after, assert_same, shared_ids

BAD = 30  # the id whose embedding is not finite


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """`[B, S]` ids, of which the second and fourth rows have the bad one below forks, and which numbers precede it."""
    ids = shared_ids(5, 12).clamp(max=BAD - 1)
    ids[1, 10], ids[3, 8] = BAD, BAD
    return ids, (ids == BAD).cumsum(1) == 0


@pytest.mark.parametrize("options", [{}, {"codegen": "inductor"}, {"chunk_size": 3, "attention": "reference"}])
def test_what_does_not_depend_on_it_is_that_of_eager_mode(options):
    model = TinyLM(layers=1)
    compiled = torch.compile(model, backend="dta", options=options)
    for value in (float("nan"), float("inf")):
        check(model, compiled, value)


def check(model, compiled, value):
    ids, good = batch()
    with torch.no_grad():
        model.embedding.weight[BAD] = value
    rows = good.all(1)

    def loss_of(logits):
        return logits[rows].square().mean()

    # Kernels of eager mode show a NaN to earlier tokens of its row: the oracle ends before it.
    expected = torch.cat([model(row[kept][None])[0] for row, kept in zip(ids, good, strict=True)])
    (logits, loss), found = after(model, lambda: backward(logits := compiled(ids), loss_of(logits)))
    assert_same(logits[good], expected)
    assert logits[~good].isnan().all()
    # Eager mode gives parameters a gradient of NaN as well: that of a weight is summed over all rows. Apart are rows of
    # embeddings that are only in other sequences.
    (_, alone), wanted = after(model, lambda: backward(logits := model(ids[rows]), logits.square().mean()))
    assert_same(loss, alone)
    apart = [number for number in range(BAD) if number in ids[rows] and number not in ids[~rows]]
    assert len(apart) == 3
    assert_same(found["embedding.weight"][apart], wanted["embedding.weight"][apart])


def backward(logits: torch.Tensor, loss: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    loss.backward()
    return logits.detach(), loss.detach()


@pytest.mark.parametrize("codegen", ["auto", pytest.param("inductor", marks=pytest.mark.slow)])
def test_in_packed_rows_and_under_padding(codegen):
    model = StatedLM()
    ids = PACKED_IDS.clone()
    ids[0, 5], ids[SEGMENTS == 0] = BAD, BAD  # in the second sequence, and at padding
    with torch.no_grad():
        model.embedding.weight[BAD] = float("nan")
    good = SEGMENTS != 0
    good[0, 5:8] = False
    compiled = torch.compile(model, backend="dta", options={"codegen": codegen})
    logits = compiled(ids, SEGMENTS)
    for row, number in ((0, 7), (0, 2), (0, 5), (1, 1), (1, 3)):
        own = SEGMENTS[row] == number
        kept = good[row, own]
        alone = model(ids[row, own][kept][None], torch.ones(1, int(kept.sum()), dtype=torch.long))
        assert_same(logits[row, own][kept], alone[0])
        assert not logits[row, own][~kept].isfinite().any()


def test_the_self_check_compares_what_is_finite_and_blames_nobody():
    model, (ids, _) = BareLM(), batch()
    with torch.no_grad():
        model.embedding.weight[BAD] = float("nan")

    def call(ids):
        logits = model(ids)
        return logits, logits.argmax(-1), logits.log_softmax(-1).mean()

    for verify in ("auto", "always"):
        compiled = torch.compile(call, backend="dta", options={"verify": verify})
        compiled(ids)[0].nansum().backward()
        plan = str(dta_compile.last_plan(compiled))
        assert "outputs within" in plan and "gradients within" in plan
