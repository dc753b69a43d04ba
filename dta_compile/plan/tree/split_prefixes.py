"""What besides token ids splits prefixes, and what that costs: replayed routes of experts, for one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from dta_compile.errors import PlanError
from dta_compile.plan.tree.codes import codes_of, combine
from dta_compile.plan.tree.lexicographic import IntArray, as_integers
from dta_compile.plan.tree.prefix_tree import PrefixTree

__all__ = ["SplitPrefixes", "with_routes"]


@dataclasses.dataclass(frozen=True, eq=False)
class SplitPrefixes:
    """A tree's keys, of which some may split what the others have in common.

    Attributes:
        tree: the tree of all keys.
        codes: by name of a key the codes `[P]` of all tokens.
        begins: `[N]` where the tokens of each sequence begin among these.
        suspects: the keys that are asked about.
    """

    tree: PrefixTree
    codes: Mapping[str, IntArray]
    begins: IntArray
    suspects: tuple[str, ...]

    @classmethod
    def of(
        cls, tree: PrefixTree, codes: Mapping[str, IntArray], begins: IntArray, suspects: list[str]
    ) -> SplitPrefixes | None:
        """What remains to be counted; None if no suspect splits anything, which the tree's branches tell."""
        found = cls(tree, codes, begins, ())
        guilty = tuple(name for name in suspects if found._splits(name))
        return dataclasses.replace(found, suspects=guilty) if guilty else None

    def tokens(self) -> dict[str, int]:
        """By key, how many tokens fewer the tree would have without it."""
        lengths = self.tree.lengths
        found = {}
        for name in self.suspects:
            codes = self._without(name)
            sequences = [codes[begin : begin + size] for begin, size in zip(self.begins, lengths, strict=True)]
            found[name] = self.tree.num_rows - PrefixTree.build(sequences).num_rows
        return found

    def _splits(self, name: str) -> bool:
        """Whether two children of a node begin with tokens that only this key tells apart."""
        tree = self.tree
        firsts = self._without(name)[self.begins[tree.sequence] + tree.start]
        branches = np.stack([tree.parent, firsts], 1)
        return len(np.unique(branches, axis=0)) < len(branches)

    def _without(self, name: str) -> IntArray:
        others = [code for other, code in self.codes.items() if other != name]
        return combine(others, len(self.codes[name]))


def with_routes(
    sequences: Iterable[Any] | PrefixTree, routes: Iterable[Any]
) -> tuple[PrefixTree, SplitPrefixes | None]:
    """The tree of sequences whose tokens are the same where their routes are, and what these split.

    Args:
        sequences: 1-D integer sequences.
        routes: for every sequence `[n, ...]` integers.

    Raises:
        PlanError: a sequence or its routes are no integers, or of different lengths.
    """
    if isinstance(sequences, PrefixTree):
        raise PlanError("a tree has no tokens to be told apart by routes", expected="sequences of token ids")
    ids = [as_integers(sequence, f"sequence {index}") for index, sequence in enumerate(sequences)]
    recorded = [np.asarray(route) for route in routes]
    lengths = [len(sequence) for sequence in ids]
    found = [len(route) if route.ndim else -1 for route in recorded]
    widths = {route.shape[1:] for route in recorded if route.size}
    if found != lengths or len(widths) > 1 or any(route.size and route.dtype.kind not in "iu" for route in recorded):
        wrong = next((i for i, pair in enumerate(zip(lengths, found, strict=False)) if pair[0] != pair[1]), None)
        raise PlanError(
            "routes do not fit the sequences",
            where="" if wrong is None else f"sequence {wrong}",
            expected="for every sequence integers [tokens, ...], of the same shape for every token",
            got=f"{len(recorded)} routes for {len(ids)} sequences"
            if wrong is None
            else f"{found[wrong]} routes for {lengths[wrong]} tokens",
        )
    begins = np.cumsum([0, *lengths])[:-1]
    tokens = np.concatenate([np.zeros(0, np.int64), *(sequence.astype(np.int64) for sequence in ids)])
    rows = [route.reshape(len(route), -1).astype(np.int64) for route in recorded if route.size]
    codes = {"token ids": tokens, "routes": codes_of(np.concatenate(rows)) if rows else np.zeros_like(tokens)}
    combined = combine(list(codes.values()), len(tokens))
    tree = PrefixTree.build(np.split(combined, begins[1:]) if lengths else [])
    return tree, SplitPrefixes.of(tree, codes, begins, ["routes"])
