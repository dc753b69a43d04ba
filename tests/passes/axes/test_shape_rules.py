"""Rules of operators that move values only."""

import pytest
import sympy

from dta_compile.passes.axes.shape_rules import reshape_groups


@pytest.mark.parametrize(
    ("before", "after", "groups"),
    [
        (("B", "T", 6), ("B*T", 6), [([0, 1], [0]), ([2], [1])]),
        (("B*T", 6), ("B", "T", 2, 3), [([0], [0, 1]), ([1], [2, 3])]),
        (("B", "T", 2, 3), ("B", "T", 6), [([0], [0]), ([1], [1]), ([2, 3], [2])]),
        ((1, "T", 4), ("T", 4), None),
    ],
)
def test_reshapes_are_understood_as_groups_of_dimensions(before, after, groups):
    b, t = sympy.symbols("B T", positive=True, integer=True)

    def sizes(shape):
        return tuple(sympy.sympify(size, locals={"B": b, "T": t}) for size in shape)

    found = reshape_groups(sizes(before), sizes(after))
    assert groups is None or found == groups
    assert sorted(i for group, _ in found for i in group) == list(range(len(before)))
    assert sorted(j for _, group in found for j in group) == list(range(len(after)))
