"""Rollout files: real agent trajectories as batches of token ids (numpy only, no torch).

A file is an `.npz` archive that stores the distinct leaf sequences front-coded in lexicographic order, as what each
one shares with the one before it and the suffix that it adds, and every sample as a prefix of a leaf. Loss spans are
half-open ranges of *target* positions: position p is the token that is predicted from position p - 1. An array `routes`
`[tokens of all samples, ...]`, if there is one, has the rows of all samples one after the other.
"""

from __future__ import annotations

import dataclasses
import zipfile
from collections import defaultdict
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dta_compile.errors import PlanError

__all__ = ["Rollout", "bundled", "load_rollouts", "vocab_size"]

EXAMPLE = "airline_tiny.npz"
# Arrays of a rollout file that every reader needs.
FIELDS = (
    *("suffix_tokens", "suffix_offsets", "leaf_lcp", "dense_vocab"),
    *("leaf", "length", "loss_ptr", "loss_start", "loss_end"),
    *("reward", "advantage", "advantage_batch", "group", "trial", "traj", "turn"),
)


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
    leaves = _decode_leaves(data, dense)
    rollouts = [_rollout(data, leaves, routes, index) for index, routes in enumerate(_routes(data, path))]
    if max_length is not None:
        rollouts = [rollout for rollout in rollouts if len(rollout) <= max_length]
    return _leaves_with_spans(rollouts) if leaf_only else rollouts


def vocab_size(path: str | PathLike[str], multiple: int = 1) -> int:
    """Number of ids under `dense=True`, rounded up to a multiple of `multiple`."""
    return -(-len(_read(path)["dense_vocab"]) // multiple) * multiple


def _read(path: str | PathLike[str]) -> dict[str, NDArray[Any]]:
    try:
        with np.load(path) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (ValueError, EOFError, zipfile.BadZipFile, AttributeError, TypeError) as error:
        raise PlanError("not a rollout file", where=str(path), expected="an .npz archive", got=str(error)) from error
    missing = [name for name in FIELDS if name not in arrays]
    if missing:
        raise PlanError(
            "not a rollout file",
            where=str(path),
            expected="arrays " + ", ".join(FIELDS),
            got="no " + ", ".join(missing),
        )
    return arrays


def _decode_leaves(data: dict[str, NDArray[Any]], dense: bool) -> list[NDArray[np.int32]]:
    suffixes = np.searchsorted(data["dense_vocab"], data["suffix_tokens"]) if dense else data["suffix_tokens"]
    suffixes, offsets = suffixes.astype(np.int32), data["suffix_offsets"]
    leaves: list[NDArray[np.int32]] = []
    previous = np.zeros(0, np.int32)
    for index, shared in enumerate(data["leaf_lcp"]):
        previous = np.concatenate([previous[:shared], suffixes[offsets[index] : offsets[index + 1]]])
        leaves.append(previous)
    return leaves


def _routes(data: dict[str, NDArray[Any]], path: str | PathLike[str]) -> list[NDArray[Any] | None]:
    """The routes of every sample, if the file has some."""
    lengths, routes = data["length"], data.get("routes")
    if routes is None:
        return [None] * len(lengths)
    if routes.ndim == 0 or len(routes) != lengths.sum() or routes.dtype.kind not in "iu":
        raise PlanError(
            "the routes of a rollout file do not fit its samples",
            where=str(path),
            expected=f"integers [{lengths.sum()}, ...], as many as tokens of all samples",
            got=f"{routes.dtype} {list(routes.shape)}",
        )
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
