"""What besides token ids splits prefixes, and what that costs: replayed routes of experts, for one."""

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
    """A tree's keys, of which some may split what the others have in common.

    Attributes:
        tree: the tree of all keys.
        codes: by name of a key the codes `[P]` of all tokens.
        begins: `[N]` where the tokens of each sequence begin among these.
        suspects: the keys that are asked about, together: two that differ at the same tokens are to blame together.
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
        found = cls(tree, codes, begins, tuple(suspects))
        return found if found._split_anything() else None

    def tokens(self) -> dict[str, int]:
        """By keys, how many tokens fewer the tree would have without them; keys that explain nothing are not named."""
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
        """Whether two children of a node begin with tokens that only the suspects tell apart."""
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
    recorded = _as_routes(routes, [len(sequence) for sequence in ids])
    begins = np.cumsum([0, *map(len, ids)])[:-1]
    tokens = np.concatenate([np.zeros(0, np.int64), *(sequence.astype(np.int64) for sequence in ids)])
    rows = [route for route in recorded if route.size]
    codes = {"token ids": tokens, "routes": codes_of(np.concatenate(rows)) if rows else np.zeros_like(tokens)}
    combined = combine(list(codes.values()), len(tokens))
    tree = PrefixTree.build(np.split(combined, begins[1:]) if ids else [])
    return tree, SplitPrefixes.of(tree, codes, begins, ["routes"])


def _as_routes(routes: Iterable[Any], lengths: list[int]) -> list[IntArray]:
    """Routes as `[tokens, numbers]` of every sequence."""
    if not isinstance(routes, Iterable):
        raise _misfit("", f"{routes!r}")
    given = list(routes)
    if len(given) != len(lengths):
        raise _misfit("", f"{len(given)} routes for {len(lengths)} sequences")
    found: list[IntArray] = []
    width: tuple[int, ...] | None = None
    for index, (route, length) in enumerate(zip(given, lengths, strict=True)):
        place = f"sequence {index}"
        try:
            array = np.asarray(route)
        except (ValueError, TypeError) as error:
            raise _misfit(place, str(error)) from error
        if array.ndim == 0 or len(array) != length:
            raise _misfit(place, f"{len(array) if array.ndim else 'no'} routes for {length} tokens")
        if array.size and array.dtype.kind not in "iu":
            raise _misfit(place, f"{array.dtype}")
        width = array.shape[1:] if width is None and length else width
        if length and width is not None and width != array.shape[1:]:
            raise _misfit(place, f"{list(array.shape[1:])} for a token after {list(width)}")
        found.append(array.reshape(length, math.prod(array.shape[1:])).astype(np.int64))
    return found


def _misfit(where: str, got: str) -> PlanError:
    return PlanError(
        "routes do not fit the sequences",
        where=where,
        expected="for every sequence integers [tokens, ...], of the same shape for every token",
        got=got,
    )
