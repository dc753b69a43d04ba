"""What ranks of one tree compare before they plan it."""

import types

import pytest
import torch

from dta_compile.errors import RuntimeContractError
from dta_compile.runtime.one_tree.facts import checksums, require_alike


def facts(widths=(1,), kinds=(), constants=((), [7]), spans=None, numbers=(), **options):
    facts = {"options": options, "widths": widths, "kinds": kinds, "numbers": numbers, "constants": constants}
    return types.SimpleNamespace(**facts, spans=spans)


@pytest.mark.parametrize(
    ("of_ranks", "ranks"),
    [
        ([facts(), facts(spans=([4], [])), facts(), facts(spans=([5], []))], "1 and 3 differ in how far tokens attend"),
        ([facts(), facts(widths=(1, 1)), facts()], "0 and 1 differ in the inputs"),
        ([facts(mode="score"), facts(mode="transparent")], "0 and 1 differ in their options, or in whether gradients"),
        ([facts(chunk_size=3), facts(chunk_size=4)], "0 and 1 differ in their options"),
        ([facts(numbers=[["1.0"]]), facts(numbers=[["1.5"]])], "0 and 1 differ in numbers of the model"),
        ([facts(), facts(), facts(constants=((), [8]))], "0 and 2 differ in values that all tokens read"),
    ],
)
def test_ranks_that_differ_are_named(of_ranks, ranks):
    with pytest.raises(RuntimeContractError, match=ranks):
        require_alike(of_ranks)
    require_alike(of_ranks[:1] * 3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.uint8])
def test_a_checksum_tells_values_and_their_order_apart(dtype):
    value = torch.arange(1, 9).to(dtype)
    others = [value.flip(0), value[[1, 0, *range(2, 8)]], value + 1, value[:4], value[:0], value[0]]
    sums = checksums([value, *others, value.clone().reshape(2, 4)])
    assert len(set(sums[:-1])) == 7 and sums[-1] == sums[0]
    assert checksums([]) == []
