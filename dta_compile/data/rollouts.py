"""Rollout files: real agent trajectories as batches of token ids (numpy only, no torch).

A file is an `.npz` archive that stores the distinct leaf sequences front-coded in lexicographic order, as what each
one shares with the one before it and the suffix that it adds, and every sample as a prefix of a leaf. Loss spans are
half-open ranges of *target* positions: position p is the token that is predicted from position p - 1. An array `routes`
`[tokens of all samples, ...]`, if there is one, has the rows of all samples one after the other. `ARRAYS` and
`_relations` say what a file has to be; nothing of it is used before all of that holds.
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

from dta_compile.errors import PlanError
from dta_compile.files import open_regular

EXAMPLE = "airline_tiny.npz"
MOST_TOKENS = 2**30  # of all samples of a file: four gibibytes of ids
MOST_DIMENSIONS = 8  # of routes


class Column(NamedTuple):
    """What an array of a rollout file has to be.

    Attributes:
        of: what has an entry in it; arrays of the same have the same length.
        least, below: range of its values.
        more: entries beyond one for each; 1 for where each begins and the last one ends.
        kinds: of its dtype, as numpy names them.
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
    """One training sample: a prompt with everything said and called so far, up to the end of one assistant turn.

    Attributes:
        tokens: `[n]` int32 token ids.
        spans: half-open ranges of the positions of the tokens that the policy produced and is trained on.
        reward: the trajectory's reward.
        advantage: the reward, normalised over the trajectories of its group (GRPO).
        advantage_batch: the same, normalised over all samples of the file.
        group: the task that was attempted; trajectories of a group are comparable.
        trial: number of the attempt within the group.
        trajectory: number of the trajectory within the file.
        turn: number of the assistant turn that the sample ends with.
        is_leaf: no other sample of the file extends this one.
        routes: `[n, ...]` integers that were recorded of every token and are to be replayed, such as the experts of
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
        """`[n]`, true at the positions of the tokens that are trained on."""
        mask = np.zeros(len(self.tokens), dtype=bool)
        for start, stop in self.spans:
            mask[start:stop] = True
        return mask


def bundled(name: str = EXAMPLE) -> Path:
    """Path of a rollout file that is installed with the package."""
    return Path(__file__).parents[1] / "examples_data" / name


def load_rollouts(
    path: str | PathLike[str], dense: bool = False, leaf_only: bool = False, max_length: int | None = None
) -> list[Rollout]:
    """The samples of a rollout file, in arrival order.

    Args:
        path: the `.npz` file.
        dense: replace the tokenizer's ids by 0 .. `vocab_size(path)` - 1, so that a small model can take them.
        leaf_only: keep only samples that no other sample extends; each takes over the loss spans of the samples of its
            own trajectory that are prefixes of it.
        max_length: leave longer samples out (before `leaf_only` gathers spans).

    Raises:
        OSError: the file cannot be read.
        PlanError: it is no rollout file.
    """
    data = _read(path)
    leaves = _decode_leaves(data, dense, path)
    rollouts = [_rollout(data, leaves, routes, index) for index, routes in enumerate(_routes(data))]
    if max_length is not None:
        rollouts = [rollout for rollout in rollouts if len(rollout) <= max_length]
    return _leaves_with_spans(rollouts) if leaf_only else rollouts


def vocab_size(path: str | PathLike[str], multiple: int = 1) -> int:
    """Number of ids under `dense=True`, rounded up to a multiple of `multiple`."""
    return -(-len(_read(path)["dense_vocab"]) // multiple) * multiple


def _read(path: str | PathLike[str]) -> dict[str, NDArray[Any]]:
    """The arrays of a rollout file, of which everything holds that is said of them.

    Raises:
        OSError: the file cannot be read.
        PlanError: it is no rollout file, or a damaged one.
    """
    with open_regular(Path(path)) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                return _checked(archive, path)
        except PlanError:
            raise
        except Exception as error:  # of numpy, zipfile, zlib, lzma, bz2 and struct
            raise _damaged(path, "an .npz archive", f"{type(error).__name__}: {error}") from error


def _checked(archive: zipfile.ZipFile, path: str | PathLike[str]) -> dict[str, NDArray[Any]]:
    names = {f"{name}.npy": name for name in (*ARRAYS, "routes")}
    unknown = [one for one in archive.namelist() if one not in names]
    if unknown:  # an array whose name is damaged would be left out otherwise
        raise _damaged(path, "arrays " + ", ".join([*ARRAYS, "and perhaps routes"]), f"{unknown[0]!r}")
    headers = {names[one]: _header(archive, one) for one in archive.namelist()}
    _check_headers(headers, path)
    found: dict[str, NDArray[Any]] = {}
    for name, column in ARRAYS.items():
        found[name] = _array(archive, name)
        _check_range(name, found[name], column, path)
        if column.kinds != "f":
            found[name] = found[name].astype(np.int64)
    for name, expected, holds in _relations(found):
        if not np.all(holds):
            entry = f", entry {np.argmin(holds)}" if np.ndim(holds) else ""
            raise _damaged(path, f"{name}: {expected}", f"something else{entry}")
    if "routes" in headers:
        (shape, dtype), total = headers["routes"], int(found["length"].sum())
        if shape[:1] != (total,) or len(shape) > MOST_DIMENSIONS or dtype.kind not in "iu":
            raise PlanError(
                "the routes of a rollout file do not fit its samples",
                where=str(path),
                expected=f"integers [{total}, ...], as many as tokens of all samples",
                got=f"{dtype} {list(shape)}",
            )
        found["routes"] = _array(archive, "routes")
    return found


def _header(archive: zipfile.ZipFile, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype of an array, which the archive has as many bytes of: nothing is allocated for others."""
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
    """By array, what holds between it and others, and where it does. Each rests on those before it."""
    for name, target in (("suffix_offsets", "suffix_tokens"), ("loss_ptr", "loss_start")):
        bounds, size = data[name], len(data[target])
        yield name, f"ascends from 0 to {size}, the length of {target}", _ascends(bounds, size)
    shared, own, length = data["leaf_lcp"], np.diff(data["suffix_offsets"]), data["length"]
    before = np.concatenate([[0], (shared + own)[:-1]])[: len(shared)]
    yield "leaf_lcp", "0 for the first leaf, and less than the leaf before it has", (shared < np.maximum(before, 1))
    total = int((shared + own).sum()) + int(length.astype(np.float64).sum())
    yield "length", f"at most {MOST_TOKENS:,} tokens in all", 0 <= total <= MOST_TOKENS
    yield "suffix_offsets", "a token at least for each leaf but the first", own[1:] > 0
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
    """The routes of every sample, if the file has some."""
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
