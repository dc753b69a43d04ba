"""Lexicographic order of token sequences, and the common prefix lengths of neighbours in it.

This is all that load balancing needs, and `PrefixTree` is built from it.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from dta_compile.errors import PlanError

IntArray = npt.NDArray[np.int64]
_Tokens = npt.NDArray[Any]

BLOCK_TOKENS = 1024  # hashed at a time: long enough to hide the cost of a call, short compared with a rollout


@dataclasses.dataclass(frozen=True, eq=False)
class LexicographicOrder:
    """Lexicographic order of `N` sequences, which is also a depth-first order of the leaves of their tree.

    Attributes:
        lengths: `[N]` length of every sequence, in input order.
        order: `[N]` sequence indices in lexicographic (numeric) order; duplicates in input order.
        common: `[N]` length of the common prefix of `order[k]` and `order[k - 1]`; `common[0] = 0`.
        forks: `[N, 2]` tokens of `order[k - 1]` and `order[k]` at depth `common[k]`; meaningless where one ends there.
    """

    lengths: IntArray
    order: IntArray
    common: IntArray
    forks: IntArray


def lexicographic_order(sequences: Iterable[Any]) -> LexicographicOrder:
    """Sort 1-D integer sequences (arrays, lists, tensors; possibly empty) lexicographically.

    Takes time linear in the number of tokens, however much they share. Arrays of one dtype are not copied.

    Raises:
        PlanError: a sequence is not a 1-D run of integers that fit in 64 bits.
    """
    arrays = _of_one_dtype(
        [as_integers(sequence, f"sequence {index}") for index, sequence in enumerate(each(sequences))]
    )
    order, common = _sort(arrays)
    forks = np.zeros((len(order), 2), np.int64)
    for k in range(1, len(order)):
        left, right, depth = arrays[order[k - 1]], arrays[order[k]], common[k]
        if depth < len(left) and depth < len(right):
            forks[k] = left[depth], right[depth]
    lengths = np.fromiter(map(len, arrays), np.int64, len(arrays))
    return LexicographicOrder(lengths, np.array(order, np.int64), np.array(common, np.int64), forks)


def common_of_some(common: IntArray, positions: IntArray) -> IntArray:
    """Return the common prefix lengths of the neighbours among the sequences at ascending `positions` of an order."""
    left = np.zeros(len(positions), np.int64)
    if len(positions) > 1:
        left[1:] = np.minimum.reduceat(common[: positions[-1] + 1], positions[:-1] + 1)
    return left


def _sort(arrays: Sequence[_Tokens]) -> tuple[list[int], list[int]]:
    """Return `order` and `common` by a most-significant-digit radix sort whose digits are blocks of tokens.

    Hashing a block costs the same however much the sequences share, whereas comparing two sequences reads their whole
    common prefix. Distinct blocks are put in numeric order only where a group splits.
    """
    order: list[int] = []
    common: list[int] = []
    # Of a group: sequences in input order, tokens that all of them share, tokens shared with the sequence before it.
    pending = [(list(range(len(arrays))), 0, 0)] if arrays else []
    while pending:
        members, depth, shared = pending.pop()
        if len(members) == 1:
            order.append(members[0])
            common.append(shared)
            continue
        groups: defaultdict[bytes, list[int]] = defaultdict(list)
        stop, key = depth + BLOCK_TOKENS, b""
        for member in members:
            block = arrays[member][depth:stop].tobytes()
            key = key if block == key else block  # one object, whose hash is known
            groups[key].append(member)
        length = len(arrays[members[0]])
        if len(groups) > 1:
            blocks, agreeing = _in_numeric_order(list(groups), arrays[members[0]].dtype)
            before = [shared, *(depth + tokens for tokens in agreeing)]
            parts = [(groups[key], stop, tokens) for key, tokens in zip(blocks, before, strict=True)]
            pending += reversed(parts)
        elif length >= stop:
            pending.append((members, stop, shared))
        else:  # all end here: duplicates
            order += members
            common += [shared] + [length] * (len(members) - 1)
    return order, common


def _in_numeric_order(blocks: list[bytes], dtype: np.dtype[Any]) -> tuple[list[bytes], list[int]]:
    """Sort distinct blocks lexicographically; return them, and how many tokens each shares with the one before it."""
    unsigned = np.dtype(f"u{dtype.itemsize}")
    sign = unsigned.type(1 << (8 * dtype.itemsize - 1) if dtype.kind == "i" else 0)
    big_endian = unsigned.newbyteorder(">")
    # Once unsigned and big-endian, tokens compare like their bytes.
    ordered = sorted(blocks, key=lambda run: (np.frombuffer(run, unsigned) ^ sign).astype(big_endian).tobytes())
    tokens = [np.frombuffer(run, unsigned) for run in ordered]
    return ordered, [common_run(left, right) for left, right in pairwise(tokens)]


def common_run(a: _Tokens, b: _Tokens, i: int = 0, j: int = 0) -> int:
    """Return the number of equal tokens from `a[i]` and `b[j]` on."""
    size, done, step = min(len(a) - i, len(b) - j), 0, 256
    while done < size:
        step = min(step, size - done)
        different = np.flatnonzero(a[i + done : i + done + step] != b[j + done : j + done + step])
        if len(different):
            return done + int(different[0])
        done, step = done + step, step * 4
    return size


def each(sequences: Iterable[Any]) -> list[Any]:
    """Return the sequences as a list; raise `PlanError` if they are not iterable."""
    try:
        return list(sequences)
    except TypeError:
        raise PlanError(
            "sequences cannot be iterated over", expected="a list of 1-D integer sequences", got=repr(sequences)
        ) from None


def as_integers(sequence: Any, where: str) -> _Tokens:
    """Return one input as a 1-D integer array; raise a `PlanError` naming `where` if it is not one."""
    try:
        array = np.asarray(sequence.detach().cpu().numpy() if hasattr(sequence, "detach") else sequence)
    except (TypeError, ValueError, RuntimeError) as error:  # ragged lists, tensors that numpy cannot hold
        raise _bad_sequence(where, f"{type(sequence).__name__} ({error})") from error
    if isinstance(sequence, (list, tuple)) and not sequence:
        return np.zeros(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise _bad_sequence(where, f"shape {array.shape} of {array.dtype}")
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise _bad_sequence(where, f"the value {array.max()}")
    return array


def _of_one_dtype(arrays: list[_Tokens]) -> list[_Tokens]:
    """Cast to a common dtype, so that equal tokens have equal bytes; copies only arrays of another dtype."""
    dtypes = {array.dtype for array in arrays if array.size}
    if not dtypes:
        return arrays
    dtype = np.result_type(*dtypes).newbyteorder("=")
    if dtype.kind == "f":  # int64 and uint64 promote to float64, but `as_integers` made sure that all fit in int64
        dtype = np.dtype(np.int64)
    return [array.astype(dtype, copy=False) for array in arrays]


def _bad_sequence(where: str, got: str) -> PlanError:
    return PlanError(
        "a sequence is not a run of token ids",
        where=where,
        expected="a 1-D array, list or tensor of integers that fit in 64 bits",
        got=got,
    )


def combine(codes: Sequence[IntArray], length: int) -> IntArray:
    """Return one code per position, equal exactly where all `codes` are equal; ascending with the first of them."""
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
    """Return the rank of every value among the distinct values, and the number of distinct values."""
    distinct, ranks = np.unique(values, return_inverse=True)
    return ranks.reshape(-1).astype(np.int64), len(distinct)


def codes_of(values: npt.NDArray[np.generic]) -> IntArray:
    """Return integers `[n]`, equal exactly where the rows of `values` (`[n, ...]`) are equal bit for bit."""
    flat = np.ascontiguousarray(values.reshape(len(values), -1))
    width = flat.dtype.itemsize * flat.shape[1]
    if flat.shape[1] == 1 and flat.dtype.kind in "iub":
        return flat[:, 0].astype(np.int64)
    if width in (1, 2, 4, 8):
        return flat.view(f"i{width}")[:, 0].astype(np.int64)
    rows = flat.view(np.dtype((np.void, width)))
    return np.unique(rows, return_inverse=True)[1].reshape(-1).astype(np.int64)
