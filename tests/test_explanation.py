"""What an explained call shows as a page."""

import numpy as np
import pytest
import torch

import dta_compile
from dta_compile.errors import PlanError
from tests.support.pages import read_page
from tests.support.tiny import TinyLM, shared_ids


def test_a_page_has_the_token_ids_of_the_call(tmp_path):
    ids, mask = shared_ids(), torch.ones_like(shared_ids(), dtype=torch.bool)
    mask[1, :2] = False
    explained = dta_compile.explain(TinyLM(), ids, mask)
    path = tmp_path / "plan.html"
    explained.to_html(path, title="explained")
    page = read_page(path)
    assert page.title == "explained"
    assert set(page.columns["vocabulary"]) == set(ids[mask].tolist())
    for found, row, real in zip(explained.plan.sequences, ids, mask, strict=True):
        assert np.array_equal(found, row[real])


def test_without_a_plan_there_is_no_page(tmp_path):
    explained = dta_compile.explain(lambda x: x * 2, torch.ones(3))
    with pytest.raises(PlanError, match="no plan"):
        explained.to_html(tmp_path / "plan.html")
