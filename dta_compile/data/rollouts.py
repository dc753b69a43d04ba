"""Rollout files: batches of real agent trajectories as token ids (numpy only, no torch).

A file is an `.npz` archive. It stores the distinct leaf sequences in lexicographic order, front-coded: the length of
the prefix shared with the previous leaf, and the new suffix. Every sample is a prefix of a leaf. Loss spans are
half-open ranges of *target* positions: position p is the token predicted from position p - 1. An optional array
`routes` `[tokens of all samples, ...]` concatenates the rows of all samples. `ARRAYS` and `_relations` specify the
format; a file is checked against them completely before it is used.
"""

from __future__ import annotations

import dataclasses
import math
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dta_compile.data.recorded import mask_of_spans
from dta_compile.errors import PlanError
from dta_compile.files import open_regular

EXAMPLE = "airline_tiny.npz"
MOST_TOKENS = 2**30  # over all samples of a file: 4 GiB of ids
MOST_DIMENSIONS = 8  # of the routes array


class Column(NamedTuple):
    """Specification of one array of a rollout file.

    Attributes:
        of: the entity with one entry each; arrays of the same entity have the same length.
        least, below: half-open range of the values.
        more: extra entries; 1 for offsets, which have an end after the last start.
        kinds: allowed dtype kinds, as numpy's letters.
    """

    of: str
    least: int = -(2**63)
    below: int = 2**63
    more: int = 0
    kinds: str = "iu"


ARRAYS = {
    "suffix_tokens": Column("token", 0, 2**31),
    "suffix_offsets": Column("leaf", 0, more=1),
    "leaf_lcp": Column("leaf", 0),
    "dense_vocab": Column("id", 0, 2**31),
    "leaf": Column("sample", 0),
    "length": Column("sample", 0),
    "loss_ptr": Column("sample", 0, more=1),
    "loss_start": Column("span", 0),
    "loss_end": Column("span", 0),
    **dict.fromkeys(("reward", "advantage", "advantage_batch"), Column("sample", kinds="f")),
    **dict.fromkeys(("group", "trial", "traj", "turn"), Column("sample")),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Rollout:
    """One training sample: the conversation from the prompt to the end of one assistant turn.

    Attributes:
        tokens: `[n]` int32 token ids.
        spans: half-open ranges of the positions of tokens that the policy generated and is trained on.
        reward: reward of the trajectory.
        advantage: the reward, normalised over the trajectories of its group (GRPO).
        advantage_batch: the reward, normalised over all samples of the file.
        group: the task; trajectories of one group are comparable.
        trial: number of the attempt within the group.
        trajectory: number of the trajectory within the file.
        turn: number of the assistant turn that ends the sample.
        is_leaf: whether no other sample of the file extends this one.
        routes: `[n, ...]` integers recorded per token for replay, such as the experts of
            every layer `[n, layers, k]`; None: the file has none.
    """

    tokens: NDArray[np.int32]
    spans: tuple[tuple[int, int], ...]
    reward: float
    advantage: float
    advantage_batch: float
    group: int
    trial: int
    trajectory: int
    turn: int
    is_leaf: bool
    routes: NDArray[np.integer[Any]] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def loss_mask(self) -> NDArray[np.bool_]:
        """Return `[n]` bool, true at the positions of trained tokens."""
        return mask_of_spans(self.spans, len(self.tokens))


def bundled(name: str = EXAMPLE) -> Path:
    """Return the path of a rollout file that is installed with the package."""
    return Path(__file__).parents[1] / "examples_data" / name


def load_rollouts(
    path: str | PathLike[str], dense: bool = False, leaf_only: bool = False, max_length: int | None = None
) -> list[Rollout]:
    """Read the samples of a rollout file, in arrival order.

    Args:
        path: the `.npz` file.
        dense: replace the tokenizer's ids by 0 .. `vocab_size(path)` - 1, so that a small model can embed them.
        leaf_only: keep only samples that no other sample extends; each inherits the loss spans of those samples of its
            trajectory that are prefixes of it.
        max_length: drop longer samples (before `leaf_only` gathers spans).

    Raises:
        OSError: the file cannot be read.
        PlanError: the file is not a valid rollout file.
    """
    data = _read(path)
    leaves = _decode_leaves(data, dense, path)
    rollouts = [_rollout(data, leaves, routes, index) for index, routes in enumerate(_routes(data))]
    if max_length is not None:
        rollouts = [rollout for rollout in rollouts if len(rollout) <= max_length]
    return _leaves_with_spans(rollouts) if leaf_only else rollouts


def vocab_size(path: str | PathLike[str], multiple: int = 1) -> int:
    """Return the number of ids under `dense=True`, rounded up to a multiple of `multiple`."""
    return -(-len(_read(path)["dense_vocab"]) // multiple) * multiple


def _read(path: str | PathLike[str]) -> dict[str, NDArray[Any]]:
    """Read the arrays of a rollout file and check them against the specification.

    Raises:
        OSError: the file cannot be read.
        PlanError: the file is not a valid rollout file.
    """
    with open_regular(Path(path)) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                return _checked(archive, path)
        except PlanError:
            raise
        except Exception as error:  # raised by numpy, zipfile, zlib, lzma, bz2 and struct
            raise _damaged(path, "an .npz archive", f"{type(error).__name__}: {error}") from error


def _checked(archive: zipfile.ZipFile, path: str | PathLike[str]) -> dict[str, NDArray[Any]]:
    names = {f"{name}.npy": name for name in (*ARRAYS, "routes")}
    unknown = [entry for entry in archive.namelist() if entry not in names]
    if unknown:  # an array with a corrupted name must not be ignored
        raise _damaged(path, "arrays " + ", ".join([*ARRAYS, "and perhaps routes"]), f"{unknown[0]!r}")
    headers = {names[entry]: _header(archive, entry) for entry in archive.namelist()}
    _check_headers(headers, path)
    arrays: dict[str, NDArray[Any]] = {}
    for name, column in ARRAYS.items():
        arrays[name] = _array(archive, name)
        _check_range(name, arrays[name], column, path)
        if column.kinds != "f":
            arrays[name] = arrays[name].astype(np.int64)
    for name, expected, holds in _relations(arrays):
        if not np.all(holds):
            entry = f", entry {np.argmin(holds)}" if np.ndim(holds) else ""
            raise _damaged(path, f"{name}: {expected}", f"something else{entry}")
    if "routes" in headers:
        (shape, dtype), total = headers["routes"], int(arrays["length"].sum())
        if shape[:1] != (total,) or len(shape) > MOST_DIMENSIONS or dtype.kind not in "iu":
            raise PlanError(
                "the routes of a rollout file do not fit its samples",
                where=str(path),
                expected=f"integers [{total}, ...], as many as tokens of all samples",
                got=f"{dtype} {list(shape)}",
            )
        arrays["routes"] = _array(archive, "routes")
    return arrays


def _header(archive: zipfile.ZipFile, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Read shape and dtype of an array, checked against the stored bytes so that no bogus size is allocated."""
    info = archive.getinfo(name)
    with archive.open(info) as file:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
        if math.prod(shape) * dtype.itemsize != info.file_size - file.tell() or min(shape, default=0) < 0:
            raise ValueError(f"{name} of shape {shape} in {info.file_size} bytes")
    return shape, dtype


def _array(archive: zipfile.ZipFile, name: str) -> NDArray[Any]:
    with archive.open(f"{name}.npy") as file:
        array: NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
    return array


def _check_headers(headers: dict[str, tuple[tuple[int, ...], np.dtype[Any]]], path: str | PathLike[str]) -> None:
    missing = [name for name in ARRAYS if name not in headers]
    if missing:
        raise _damaged(path, "arrays " + ", ".join(ARRAYS), "no " + ", ".join(missing))
    sizes: dict[str, int] = {}
    for name, (of, *_, more, kinds) in ARRAYS.items():
        shape, dtype = headers[name]
        fits = len(shape) == 1 and sizes.setdefault(of, shape[0] - more) + more == shape[0] <= MOST_TOKENS
        if not fits or dtype.kind not in kinds:
            size = f"{sizes[of] + more} " if of in sizes else ""
            plus = " and one more" if more else ""
            expected = f"{name}: {size}{'integers' if kinds == 'iu' else 'floats'}, one for each {of}{plus}"
            raise _damaged(path, expected, f"{dtype} {list(shape)}")


def _check_range(name: str, values: NDArray[Any], column: Column, path: str | PathLike[str]) -> None:
    if column.kinds == "f":
        if not np.isfinite(values).all():
            raise _damaged(path, f"{name}: finite numbers", f"{values[np.argmin(np.isfinite(values))]}")
        return
    for extreme in (int(values.min()), int(values.max())) if values.size else ():
        if not column.least <= extreme < column.below:
            raise _damaged(path, f"{name}: integers in [{column.least}, {column.below})", str(extreme))


def _relations(data: dict[str, NDArray[Any]]) -> Iterator[tuple[str, str, Any]]:
    """Yield (array, rule, whether it holds by entry) for relations between arrays; each relies on those before it."""
    for name, target in (("suffix_offsets", "suffix_tokens"), ("loss_ptr", "loss_start")):
        bounds, size = data[name], len(data[target])
        yield name, f"ascends from 0 to {size}, the length of {target}", _ascends(bounds, size)
    shared, own, length = data["leaf_lcp"], np.diff(data["suffix_offsets"]), data["length"]
    before = np.concatenate([[0], (shared + own)[:-1]])[: len(shared)]
    yield "leaf_lcp", "0 for the first leaf, and less than the leaf before it has", (shared < np.maximum(before, 1))
    total = int((shared + own).sum()) + int(length.astype(np.float64).sum())
    yield "length", f"at most {MOST_TOKENS:,} tokens in all", 0 <= total <= MOST_TOKENS
    yield "suffix_offsets", "a token at least for each of several leaves", own[len(own) < 2 :] > 0
    yield "leaf", f"one of {len(shared)} leaves", data["leaf"] < len(shared)
    yield "length", "at most the tokens of the sample's leaf", length <= (shared + own)[data["leaf"]]
    reached = np.zeros(len(shared), np.int64)
    np.maximum.at(reached, data["leaf"], length)
    yield "leaf", "each leaf is a sample", reached == shared + own
    sample = np.repeat(np.arange(len(length)), np.diff(data["loss_ptr"]))
    yield "loss_start", "at most loss_end", data["loss_start"] <= data["loss_end"]
    yield "loss_end", "at most the length of the sample", data["loss_end"] <= length[sample]
    vocabulary, tokens = data["dense_vocab"], data["suffix_tokens"]
    yield "dense_vocab", "ascends", np.diff(vocabulary) > 0
    yield "dense_vocab", "has all of suffix_tokens", np.isin(tokens, vocabulary)


def _ascends(bounds: NDArray[np.int64], end: int) -> bool:
    return bool(bounds[0] == 0 and bounds[-1] == end and (np.diff(bounds) >= 0).all())


def _damaged(path: str | PathLike[str], expected: str, got: str) -> PlanError:
    return PlanError("not a rollout file", where=str(path), expected=expected, got=got)


def _decode_leaves(data: dict[str, NDArray[Any]], dense: bool, path: str | PathLike[str]) -> list[NDArray[np.int32]]:
    suffixes = np.searchsorted(data["dense_vocab"], data["suffix_tokens"]) if dense else data["suffix_tokens"]
    suffixes, offsets = suffixes.astype(np.int32), data["suffix_offsets"]
    leaves: list[NDArray[np.int32]] = []
    previous = np.zeros(0, np.int32)
    for index, shared in enumerate(data["leaf_lcp"]):
        suffix = suffixes[offsets[index] : offsets[index + 1]]
        if index and previous[shared] >= suffix[0]:
            expected = "leaves in lexicographic order, each with all that it shares with the one before it"
            raise _damaged(path, expected, f"leaf {index} with {suffix[0]} after {previous[shared]}")
        previous = np.concatenate([previous[:shared], suffix])
        leaves.append(previous)
    return leaves


def _routes(data: dict[str, NDArray[Any]]) -> list[NDArray[Any] | None]:
    """Split the routes by sample; None for every sample if the file has no routes."""
    lengths, routes = data["length"], data.get("routes")
    if routes is None or not len(lengths):
        return [None] * len(lengths)
    return list(np.split(routes, np.cumsum(lengths)[:-1]))


def _rollout(
    data: dict[str, NDArray[Any]], leaves: list[NDArray[np.int32]], routes: NDArray[Any] | None, index: int
) -> Rollout:
    leaf, length = leaves[data["leaf"][index]], int(data["length"][index])
    spans = slice(data["loss_ptr"][index], data["loss_ptr"][index + 1])
    return Rollout(
        tokens=leaf[:length],
        spans=tuple(zip(data["loss_start"][spans].tolist(), data["loss_end"][spans].tolist(), strict=True)),
        reward=float(data["reward"][index]),
        advantage=float(data["advantage"][index]),
        advantage_batch=float(data["advantage_batch"][index]),
        group=int(data["group"][index]),
        trial=int(data["trial"][index]),
        trajectory=int(data["traj"][index]),
        turn=int(data["turn"][index]),
        is_leaf=length == len(leaf),
        routes=routes,
    )


def _leaves_with_spans(rollouts: list[Rollout]) -> list[Rollout]:
    by_trajectory: defaultdict[int, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        by_trajectory[rollout.trajectory].append(rollout)
    return [
        dataclasses.replace(leaf, spans=_spans_of_prefixes(leaf, by_trajectory[leaf.trajectory]))
        for leaf in rollouts
        if leaf.is_leaf
    ]


def _spans_of_prefixes(leaf: Rollout, candidates: list[Rollout]) -> tuple[tuple[int, int], ...]:
    spans = set(leaf.spans)
    for other in candidates:
        if len(other) < len(leaf) and np.array_equal(other.tokens, leaf.tokens[: len(other)]):
            spans.update(other.spans)
    return tuple(sorted(spans))
