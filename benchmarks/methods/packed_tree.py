"""Packed prefix tree: every tree token once in one row, with a mask that shows each token only its ancestors."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from benchmarks.batches.trees import IntArray, neighbours
from benchmarks.batches.workloads import FloatArray

TOKEN_LIMIT = 16_384  # tokens per row: the mask of such a row has 1 GiB


@dataclasses.dataclass(frozen=True, eq=False)
class PackedTree:
    """Packed row of T tree tokens.

    A token is predicted once, from its parent, with the summed weights of all sequences that contain it. So a token
    with several children has several labels, and the head runs once on each token that has any.

    Attributes:
        tokens, depths: `[1, T]`; depths are the positions.
        ends: `[T]` end of each token's subtree: token i reads token j if and only if `j <= i < ends[j]`.
        heads: rows on which the head runs.
        sources: index into `heads` of each predicted token's parent.
        labels, weights: the predicted tokens and the weights of their log-probs.
    """

    tokens: torch.Tensor
    depths: torch.Tensor
    ends: torch.Tensor
    heads: torch.Tensor
    sources: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor

    def mask(self) -> torch.Tensor:
        """Return the additive attention mask `[1, 1, T, T]`: 0 at ancestors and the token itself, else -inf."""
        rows = torch.arange(len(self.ends))[:, None]
        allowed = (rows >= rows.T) & (rows < self.ends)
        return torch.zeros(allowed.shape).masked_fill_(~allowed, -torch.inf)[None, None]


def pack(sequences: Sequence[IntArray], weights: Sequence[FloatArray]) -> PackedTree:
    """Pack sequences into their prefix tree; per-token weights are summed onto tree tokens."""
    order, shared = neighbours(sequences)
    size = sum(len(sequences[index]) for index in order) - sum(shared)
    tokens, depths, parents = (np.zeros(size, np.int64) for _ in range(3))
    ends, summed = np.full(size, size), np.zeros(size, np.float32)
    path, first = np.zeros(0, np.int64), 0  # rows of the current sequence; first free row
    for index, common in zip(order, shared, strict=True):
        sequence, last = sequences[index], first + len(sequences[index]) - common
        ends[path[common:]] = first
        path = np.concatenate([path[:common], np.arange(first, last)])
        tokens[first:last], depths[first:last] = sequence[common:], np.arange(common, len(sequence))
        parents[first:last] = np.concatenate([[-1], path])[common : len(sequence)]
        summed[path[1:]] += weights[index][:-1]
        first = last
    predicted = parents >= 0
    heads, sources = np.unique(parents[predicted], return_inverse=True)
    arrays = (tokens[None], depths[None], ends, heads, sources, tokens[predicted], summed[predicted])
    return PackedTree(*map(torch.from_numpy, arrays))


def split(sequences: Sequence[IntArray], limit: int = TOKEN_LIMIT) -> list[list[int]]:
    """Group neighbouring sequences so that their trees have at most `limit` tokens (or one sequence each).

    Sharing across groups is lost, as in every trainer that splits a packed tree to fit into memory.
    """
    groups: list[list[int]] = []
    used = 0
    for index, common in zip(*neighbours(sequences), strict=True):
        if not groups or used + len(sequences[index]) - common > limit:
            groups.append([])
            used, common = 0, 0
        groups[-1].append(index)
        used += len(sequences[index]) - common
    return groups
