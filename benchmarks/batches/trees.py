"""Synthetic token trees of a given shape, and the ideal speed-up from sharing them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
Level = tuple[int, int]  # (children per node, tokens of each)

TREES: dict[str, tuple[Level, ...]] = {
    # Each tree has 16 sequences of 1500 tokens.
    "short": ((2, 1200), (2, 236), (4, 64)),
    "mid": ((2, 700), (2, 300), (4, 500)),
    "none": ((16, 1500),),
}


@dataclasses.dataclass(frozen=True)
class Counts:
    """Tokens and causal attention (query, key) pairs of single sequences and of their prefix tree."""

    sequences: int
    tokens: int
    pairs: int
    tree_tokens: int
    tree_pairs: int


def build(levels: tuple[Level, ...], vocabulary: int, seed: int = 0) -> list[IntArray]:
    """Generate sequences whose prefix tree has `levels`: random tokens, siblings with distinct first tokens.

    Raises:
        ValueError: a level has more siblings than the vocabulary has tokens, or no tokens or children.
    """
    if not all(0 < children <= vocabulary and tokens > 0 for children, tokens in levels):
        raise ValueError(f"levels {levels} need 1 to {vocabulary} children and at least one token each")
    random = np.random.default_rng(seed)
    paths = [np.zeros(0, np.int64)]
    for children, tokens in levels:
        longer = []
        for path in paths:
            segments = random.integers(0, vocabulary, (children, tokens))
            segments[:, 0] = random.permutation(vocabulary)[:children]
            longer += [np.concatenate([path, segment]) for segment in segments]
        paths = longer
    return paths


def count(levels: tuple[Level, ...]) -> Counts:
    """Compute the counts of `build(levels, ...)` arithmetically, independent of the planner under test."""
    nodes, depth, tree_tokens, tree_pairs = 1, 0, 0, 0
    for children, tokens in levels:
        nodes *= children
        tree_tokens += nodes * tokens
        tree_pairs += nodes * (_triangle(depth + tokens) - _triangle(depth))
        depth += tokens
    return Counts(nodes, nodes * depth, nodes * _triangle(depth), tree_tokens, tree_pairs)


def neighbours(sequences: Sequence[IntArray]) -> tuple[list[int], list[int]]:
    """Return the lexicographic order of the sequences, and the prefix length that each one shares with its predecessor.

    A sequence directly precedes those that it is a prefix of.
    """
    order = sorted(range(len(sequences)), key=lambda index: sequences[index].astype(">u4").tobytes())
    shared = [_common_prefix(sequences[left], sequences[right]) for left, right in pairwise(order)]
    return order, [0, *shared][: len(order)]


def count_sequences(sequences: Sequence[IntArray]) -> Counts:
    """Count tokens and pairs of any sequences by sorting them, independent of the planner under test."""
    order, shared = neighbours(sequences)
    lengths = [len(sequences[index]) for index in order]
    tokens, pairs = sum(lengths), sum(map(_triangle, lengths))
    return Counts(len(order), tokens, pairs, tokens - sum(shared), pairs - sum(map(_triangle, shared)))


def ideal_speedup(counts: Counts, flops_per_token: float, flops_per_pair: float) -> float:
    """Return the ratio of floating-point operations, single sequences over every tree token once."""
    alone = counts.tokens * flops_per_token + counts.pairs * flops_per_pair
    return alone / (counts.tree_tokens * flops_per_token + counts.tree_pairs * flops_per_pair)


def _common_prefix(left: IntArray, right: IntArray) -> int:
    shorter = min(len(left), len(right))
    different = np.flatnonzero(left[:shorter] != right[:shorter])
    return int(different[0]) if len(different) else shorter


def _triangle(depth: int) -> int:
    return depth * (depth + 1) // 2
