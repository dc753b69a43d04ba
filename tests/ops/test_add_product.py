"""Products of low precision, added to sums of high precision."""

import pytest
import torch

from dta_compile.ops.products import ADD_PRODUCT, Sum, add_product_to, add_to, tensor_of


def test_wide_sums_of_products():
    left, right = torch.randn(5, 7).bfloat16(), torch.randn(7, 3).bfloat16()
    for total in (torch.randn(5, 3), torch.randn(3, 5).t()):
        expected = total + (left @ right).float()
        ADD_PRODUCT(total, left, right)
        torch.testing.assert_close(total, expected)
    total = torch.ones(5, 3, dtype=torch.bfloat16)
    ADD_PRODUCT(total, left, right)
    torch.testing.assert_close(total, torch.addmm(torch.ones(5, 3).bfloat16(), left, right))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_sum_begins_with_its_first_summand(dtype, transposed):
    """It is no copy of zeros, may be handed on as a contiguous gradient, and is summed in at least float32."""
    left, right, bias = torch.randn(5, 7).to(dtype), torch.randn(7, 3).to(dtype), torch.randn(4).to(dtype)
    product = (left @ right).t() if transposed else left @ right
    total, of_bias, unused = Sum(torch.empty_like(product).contiguous()), Sum(bias), Sum(bias)
    add_product_to(total, left, right, transposed)
    add_to(of_bias, bias)
    assert total.value.dtype == dtype and total.value.is_contiguous() and of_bias.value.data_ptr() != bias.data_ptr()
    torch.testing.assert_close(total.value, product)
    for _ in range(2):
        add_product_to(total, left, right, transposed)
        add_to(of_bias, bias)
    wide = torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(tensor_of(total), 3 * product.to(wide))
    torch.testing.assert_close(tensor_of(of_bias), 3 * bias.to(wide))
    assert total.taken().dtype == dtype and not unused.taken().any() and tensor_of(bias) is bias


def test_a_sum_is_laid_out_like_its_parameter():
    left, right = torch.randn(5, 7), torch.randn(7, 3)
    total = Sum(torch.empty(3, 5).t())
    add_product_to(total, left, right)
    assert total.value.stride() == (1, 5)
    torch.testing.assert_close(total.value, left @ right)
