"""`PrefixSampler`: an order of the rows of an epoch in which rows that share prefixes fall into one optimiser step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from dta_compile.errors import PlanError
from dta_compile.plan.tree.lexicographic import IntArray
from dta_compile.plan.tree.prefix_tree import PrefixTree
from dta_compile.rollouts.tree import integer


class PrefixSampler:
    """Sampler of the positions `0..N-1` of a data set, a new order for each epoch.

    The rows are taken depth first from their prefix tree, children of a node in random order, and cut into steps, which
    are shuffled. Every row comes once in an epoch; those of an incomplete step come last. The order depends on nothing
    but the seed and the epoch, so that all ranks, and a run that is resumed, have the same.

    Args:
        sequences: token ids of the rows, 1-D integer sequences; they are read once and not kept.
        rows: rows of an optimiser step, of all ranks together.
        batch: consecutive rows that one rank receives; the next ones are the next rank's. By default, a step has one
            batch. Otherwise each rank gets neighbours for all of its batches of a step.
        ranks: ranks that receive batches in turn.
        seed: any integer.

    Attributes:
        epoch: number of the epoch that the next iteration yields.

    Raises:
        PlanError: an argument is no integer, a step is not a number of batches for each rank, or sequences are no
            sequences of integers.
    """

    def __init__(
        self, sequences: Iterable[Any], rows: int, batch: int | None = None, ranks: int = 1, seed: int = 0
    ) -> None:
        rows, ranks, seed = (integer(*given, None) for given in (("rows", rows), ("ranks", ranks), ("seed", seed)))
        batch = rows // max(ranks, 1) if batch is None else integer("batch", batch, None)
        if min(rows, batch, ranks) < 1 or rows % (batch * ranks):
            raise PlanError(
                "a step cannot be divided into batches",
                expected="rows a multiple of batch * ranks",
                got=f"rows={rows}, batch={batch}, ranks={ranks}",
            )
        self.rows, self.batch, self.ranks, self.seed = rows, batch, ranks, seed
        self.epoch = 0
        self._tree = PrefixTree.build(sequences)

    def __len__(self) -> int:
        return len(self._tree.order)

    def __iter__(self) -> Iterator[int]:
        random = np.random.default_rng([self.seed % 2**64, self.epoch])
        order = self._depth_first(random)
        whole = len(order) - len(order) % self.rows
        if whole:
            steps = order[:whole].reshape(-1, self.ranks, self.rows // (self.ranks * self.batch), self.batch)
            random.shuffle(steps)
            yield from steps.swapaxes(1, 2).ravel().tolist()
        yield from order[whole:].tolist()

    def _depth_first(self, random: np.random.Generator) -> IntArray:
        tree, order = self._tree, np.flatnonzero(self._tree.end_node < 0).tolist()  # empty rows first
        pending = random.permutation(tree.roots).tolist()
        while pending:
            node = pending.pop()
            order += tree.sequences_ending_at(node)
            pending += random.permutation(tree.children(node)).tolist()
        return np.array(order, np.int64)
