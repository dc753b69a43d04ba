"""Products of low precision, added to sums of high precision."""

import torch

from dta_compile.ops.products import ADD_PRODUCT


def test_wide_sums_of_products():
    left, right = torch.randn(5, 7).bfloat16(), torch.randn(7, 3).bfloat16()
    for total in (torch.randn(5, 3), torch.randn(3, 5).t()):
        expected = total + (left @ right).float()
        ADD_PRODUCT(total, left, right)
        torch.testing.assert_close(total, expected)
    total = torch.ones(5, 3, dtype=torch.bfloat16)
    ADD_PRODUCT(total, left, right)
    torch.testing.assert_close(total, torch.addmm(torch.ones(5, 3).bfloat16(), left, right))
