"""Count the sharing that keys other than token ids cost, such as replayed routes of experts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from dta_compile.errors import PlanError
from dta_compile.plan.tree.lexicographic import IntArray, as_integers, codes_of, combine
from dta_compile.plan.tree.prefix_tree import PrefixTree


@dataclasses.dataclass(frozen=True, eq=False)
class SplitPrefixes:
    """Keys of a tree, some of which (the suspects) may split prefixes that the others have in common.

    Attributes:
        tree: tree over all keys.
        codes: codes `[P]` of all tokens, by name of the key.
        begins: `[N]` index of the first token of each sequence in `codes`.
        suspects: keys to examine, together: two keys that differ at the same tokens share the blame.
    """

    tree: PrefixTree
    codes: Mapping[str, IntArray]
    begins: IntArray
    suspects: tuple[str, ...]

    @classmethod
    def of(
        cls, tree: PrefixTree, codes: Mapping[str, IntArray], begins: IntArray, suspects: list[str]
    ) -> SplitPrefixes | None:
        """Return the keys to count over, or None if no suspect splits a prefix, judged by the branches of the tree."""
        split = cls(tree, codes, begins, tuple(suspects))
        return split if split._split_anything() else None

    def tokens(self) -> dict[str, int]:
        """Return, under the joined names of the guilty keys, the tokens that the tree would save without them.

        Suspects that account for none of these tokens are not named.
        """
        guilty, lost = self.suspects, self._lost_to(self.suspects)
        for name in self.suspects:
            others = tuple(other for other in guilty if other != name)
            if others and self._lost_to(others) == lost:
                guilty = others
        return {" and ".join(guilty): lost}

    def _lost_to(self, names: Sequence[str]) -> int:
        codes, lengths = self._without(names), self.tree.lengths
        sequences = [codes[begin : begin + size] for begin, size in zip(self.begins, lengths, strict=True)]
        return self.tree.num_rows - PrefixTree.build(sequences).num_rows

    def _split_anything(self) -> bool:
        """Return whether two children of a node begin with tokens that differ in suspects alone."""
        tree = self.tree
        firsts = self._without(self.suspects)[self.begins[tree.sequence] + tree.start]
        branches = np.stack([tree.parent, firsts], 1)
        return len(np.unique(branches, axis=0)) < len(branches)

    def _without(self, names: Sequence[str]) -> IntArray:
        others = [code for name, code in self.codes.items() if name not in names]
        return combine(others, len(self.codes[names[0]]))


def with_routes(
    sequences: Iterable[Any] | PrefixTree, routes: Iterable[Any]
) -> tuple[PrefixTree, SplitPrefixes | None]:
    """Build the tree of sequences that share tokens only where routes are equal, and what the routes split.

    Args:
        sequences: 1-D integer sequences.
        routes: for every sequence, integers `[n, ...]`.

    Raises:
        PlanError: a sequence or its routes are not integers, or differ in length; or `sequences` is a tree.
    """
    if isinstance(sequences, PrefixTree):
        raise PlanError("a tree has no tokens to be told apart by routes", expected="sequences of token ids")
    ids = [as_integers(sequence, f"sequence {index}") for index, sequence in enumerate(sequences)]
    recorded = _as_routes(routes, [len(sequence) for sequence in ids])
    begins = np.cumsum([0, *map(len, ids)])[:-1]
    tokens = np.concatenate([np.zeros(0, np.int64), *(sequence.astype(np.int64) for sequence in ids)])
    rows = [route for route in recorded if route.size]
    codes = {"token ids": tokens, "routes": codes_of(np.concatenate(rows)) if rows else np.zeros_like(tokens)}
    combined = combine(list(codes.values()), len(tokens))
    tree = PrefixTree.build(np.split(combined, begins[1:]) if ids else [])
    return tree, SplitPrefixes.of(tree, codes, begins, ["routes"])


def _as_routes(routes: Iterable[Any], lengths: list[int]) -> list[IntArray]:
    """Return the routes of every sequence as `[tokens, numbers]`."""
    if not isinstance(routes, Iterable):
        raise _misfit("", f"{routes!r}")
    recorded = list(routes)
    if len(recorded) != len(lengths):
        raise _misfit("", f"{len(recorded)} routes for {len(lengths)} sequences")
    checked: list[IntArray] = []
    width: tuple[int, ...] | None = None
    for index, (route, length) in enumerate(zip(recorded, lengths, strict=True)):
        where = f"sequence {index}"
        try:
            array = np.asarray(route)
        except (ValueError, TypeError) as error:
            raise _misfit(where, str(error)) from error
        if array.ndim == 0 or len(array) != length:
            raise _misfit(where, f"{len(array) if array.ndim else 'no'} routes for {length} tokens")
        if array.size and array.dtype.kind not in "iu":
            raise _misfit(where, f"{array.dtype}")
        width = array.shape[1:] if width is None and length else width
        if length and width is not None and width != array.shape[1:]:
            raise _misfit(where, f"{list(array.shape[1:])} for a token after {list(width)}")
        checked.append(array.reshape(length, math.prod(array.shape[1:])).astype(np.int64))
    return checked


def _misfit(where: str, got: str) -> PlanError:
    return PlanError(
        "routes do not fit the sequences",
        where=where,
        expected="for every sequence integers [tokens, ...], of the same shape for every token",
        got=got,
    )
