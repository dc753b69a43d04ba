"""Codes: integers that are equal exactly where values are, so that sequences of anything are sequences of integers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dta_compile.plan.tree.lexicographic import IntArray

__all__ = ["codes_of", "combine"]


def combine(codes: Sequence[IntArray], length: int) -> IntArray:
    """One code per position, equal exactly where all `codes` are equal; ascending with the first of them."""
    result, low, bound = np.zeros(length, np.int64), 0, 1
    for code in codes if length else ():
        least = int(code.min())
        spread = int(code.max()) - least + 1
        if spread == 1:
            continue
        if bound == 1:
            result, low, bound = code, least, spread
            continue
        if bound * spread >= 2**62:
            result, bound = _ranks(result)
            code, spread = _ranks(code)
            low = least = 0
        result, low, bound = (result - low) * spread + (code - least), 0, bound * spread
    return result


def _ranks(values: IntArray) -> tuple[IntArray, int]:
    """The rank of every value among the distinct ones, and their number."""
    distinct, ranks = np.unique(values, return_inverse=True)
    return ranks.reshape(-1).astype(np.int64), len(distinct)


def codes_of(values: npt.NDArray[np.generic]) -> IntArray:
    """Integers that are equal exactly where the rows `values[i, ...]` are equal, bit for bit: `[n]` of `[n, ...]`."""
    flat = np.ascontiguousarray(values.reshape(len(values), -1))
    width = flat.dtype.itemsize * flat.shape[1]
    if flat.shape[1] == 1 and flat.dtype.kind in "iub":
        return flat[:, 0].astype(np.int64)
    if width in (1, 2, 4, 8):
        return flat.view(f"i{width}")[:, 0].astype(np.int64)
    rows = flat.view(np.dtype((np.void, width)))
    return np.unique(rows, return_inverse=True)[1].reshape(-1).astype(np.int64)
