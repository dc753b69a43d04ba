"""Which attention provider a model gets."""

from __future__ import annotations

import pytest
import torch

from dta_compile.errors import OptionError
from dta_compile.runtime.attention.choose import PROVIDERS, provider_for
from dta_compile.runtime.attention.cpu import FlashCPU
from dta_compile.runtime.attention.reference import Reference


def test_a_provider_is_picked_by_name_or_by_what_it_takes():
    float64, float32 = torch.zeros(1, 1, 3, 8, dtype=torch.float64), torch.zeros(1, 1, 3, 8)
    assert isinstance(provider_for("auto", float64, float64), FlashCPU)
    assert isinstance(provider_for("auto", float64, float64[..., :4]), Reference)
    assert isinstance(provider_for("reference", float32, float32), Reference)
    with pytest.raises(OptionError, match="attention='triton' cannot run this model here"):
        provider_for("triton", float64, float64)
    assert list(PROVIDERS)[-1] == "reference", "what takes anything comes last"
