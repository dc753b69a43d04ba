"""Count the sharing that keys other than token ids cost, such as replayed routes of experts."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
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


def ids_at_forks(ids: IntArray, tree: PrefixTree, begins: IntArray) -> IntArray:
    """Return the ids `[N, 2]` of neighbours where they fork, as `PrefixTree.forks` of a tree whose codes join all keys.

    Args:
        ids: `[P]` ids of all tokens.
        begins: `[N]` index of the first token of each sequence in `ids`.
    """
    forks = np.zeros((len(tree.order), 2), np.int64)
    neighbours = begins[np.stack([tree.order[:-1], tree.order[1:]], 1)]
    if len(ids):  # else all is padding
        forks[1:] = ids[np.minimum(neighbours + tree.common[1:, None], len(ids) - 1)]
    return forks


def with_keys(
    sequences: Iterable[Any] | PrefixTree, routes: Iterable[Any] | None, images: Images | None = None
) -> tuple[PrefixTree, SplitPrefixes | None]:
    """Build the tree of sequences that share tokens only where routes and images are equal, and what the routes split.

    Args:
        sequences: 1-D integer sequences.
        routes: for every sequence, integers `[n, ...]`.
        images: for every sequence, what `Images` says.

    Raises:
        PlanError: a sequence or its routes are not integers, or differ in length; or `sequences` is a tree.
    """
    if isinstance(sequences, PrefixTree):
        raise PlanError("a tree has no tokens to be told apart by routes or images", expected="sequences of token ids")
    ids = [as_integers(sequence, f"sequence {index}") for index, sequence in enumerate(sequences)]
    begins = np.cumsum([0, *map(len, ids)])[:-1]
    tokens = np.concatenate([np.zeros(0, np.int64), *(sequence.astype(np.int64) for sequence in ids)])
    codes = {"token ids": tokens}
    if images is not None:
        codes["images"] = np.zeros_like(tokens)
        for index, start, stop, number in images.spans([len(sequence) for sequence in ids]):
            codes["images"][begins[index] + start : begins[index] + stop] = number
    if routes is not None:
        rows = [route for route in _as_routes(routes, [len(sequence) for sequence in ids]) if route.size]
        codes["routes"] = codes_of(np.concatenate(rows)) if rows else np.zeros_like(tokens)
    combined = combine(list(codes.values()), len(tokens))
    tree = PrefixTree.build(np.split(combined, begins[1:]) if ids else [])
    tree.forks = ids_at_forks(tokens, tree, begins)
    return tree, None if routes is None else SplitPrefixes.of(tree, codes, begins, ["routes"])


@dataclasses.dataclass(frozen=True, eq=False)
class Images:
    """Images (or other media) of sequences.

    Attributes:
        of_sequences: for every sequence, `(start, stop, image)` of the placeholder tokens of each image. Equal images
            have an equal `image`, which may be a number, a hash or a path.
        numbers: a number from 1 for every different `image`.
    """

    of_sequences: Sequence[Sequence[tuple[int, int, Hashable]]]
    numbers: Mapping[Hashable, int]

    @classmethod
    def of(cls, images: Iterable[Any]) -> Images:
        """Number the images of all sequences in the order of their first token.

        Raises:
            PlanError: not lists of `(start, stop, image)`.
        """
        try:
            rows = [
                [(operator.index(start), operator.index(stop), image) for start, stop, image in row] for row in images
            ]
            different = dict.fromkeys(image for row in rows for *_, image in row)
        except (TypeError, ValueError) as error:  # no integers, nothing to iterate over, or nothing to hash
            raise _no_image("", str(error)) from error
        return cls(rows, {image: number for number, image in enumerate(different, 1)})

    def spans(self, lengths: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
        """Yield the index of the sequence, start, stop and number of every image.

        Raises:
            PlanError: an image is not among the tokens of its sequence, or has some of another.
        """
        if len(self.of_sequences) != len(lengths):
            raise _no_image("", f"{len(self.of_sequences)} lists of images for {len(lengths)} sequences")
        for index, (row, length) in enumerate(zip(self.of_sequences, lengths, strict=True)):
            end = 0
            for start, stop, image in sorted(row, key=lambda image: image[0]):
                if not 0 <= start < stop <= length:
                    raise _no_image(f"sequence {index}", f"[{start}:{stop}] of {length} tokens")
                if start < end:
                    raise _no_image(f"sequence {index}", f"[{start}:{stop}] with tokens of an image before it")
                end = stop
                yield index, start, stop, self.numbers[image]

    def __str__(self) -> str:
        count = sum(map(len, self.of_sequences))
        return f"{count:,} in the sequences, {len(self.numbers):,} different, each encoded once"


def _no_image(where: str, got: str) -> PlanError:
    expected = "for every sequence, (start, stop, image) of the tokens of each image"
    return PlanError("images do not fit the sequences", where=where, expected=expected, got=got)


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
