"""Workloads: synthetic trees, sweeps over them, and real rollouts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.batches.model import VOCABULARY
from benchmarks.batches.trees import TREES, Counts, IntArray, build, count_sequences
from dta_compile.data import bundled, load_rollouts, vocab_size

FloatArray = npt.NDArray[np.float32]

COMPRESSIONS = (1, 1.25, 1.5, 2, 3, 5, 8, 12, 20, 30)
SUFFIXES = (8, 32, 128, 512, 2048, 4096)
ROLLOUT_FILES = ("airline_tiny", "airline_think", "airline_chain", "airline_nothink", "airline_modprefix", "mathlike")


@dataclasses.dataclass(frozen=True, eq=False)
class Workload:
    """One batch.

    Attributes:
        group: group of the workload in reports.
        parameter: value of the swept parameter; None outside of sweeps.
        vocabulary: vocabulary size of the model.
        sequences: token ids of every sequence.
    """

    name: str
    group: str
    description: str
    vocabulary: int
    sequences: list[IntArray]
    parameter: float | None = None

    @cached_property
    def counts(self) -> Counts:
        return count_sequences(self.sequences)

    @cached_property
    def weights(self) -> list[FloatArray]:
        """Loss weights of the next-token log-probs; 0 where there is no next token."""
        random, scale = np.random.default_rng(1), 1 / sum(map(len, self.sequences))
        weights = [random.standard_normal(len(tokens), np.float32) * np.float32(scale) for tokens in self.sequences]
        for row in weights:
            row[-1] = 0.0
        return weights

    @property
    def pairs(self) -> list[tuple[IntArray, FloatArray]]:
        """Sequences with their weights."""
        return list(zip(self.sequences, self.weights, strict=True))


@dataclasses.dataclass(frozen=True)
class Entry:
    """Workload that can be built."""

    name: str
    group: str
    build: Callable[[], Workload]


def catalogue(rollouts: Path | None, files: Sequence[str], max_tokens: int) -> dict[str, Entry]:
    """Return all workloads by name.

    Args:
        rollouts: folder of rollout files; None: only the bundled file.
        files: names of the files, without suffix.
        max_tokens: most tokens taken from the start of each file.

    Raises:
        ValueError: a file does not exist.
    """
    entries = [Entry("tiny", "check", functools.partial(tiny, VOCABULARY))]
    entries += [*_trees(), *_compression_sweep(), *_suffix_sweep()]
    paths = [bundled()] if rollouts is None else [rollouts / f"{name}.npz" for name in files]
    for path in paths:
        if not path.is_file():
            raise ValueError(f"no rollout file {path.name} in {path.parent}")
        entries.append(Entry(path.stem, "rollouts", functools.partial(_rollouts, path, max_tokens)))
    return {entry.name: entry for entry in entries}


def tiny(vocabulary: int) -> Workload:
    """Return four short sequences of different lengths that share prefixes at two depths: a check, no measurement."""
    sequences = build(((2, 24), (2, 16)), vocabulary)
    cut = [tokens[: len(tokens) - index] for index, tokens in enumerate(sequences)]
    return Workload("tiny", "check", "4 sequences of 37 to 40 tokens", vocabulary, cut)


def _trees() -> Iterator[Entry]:
    for name in TREES:
        text = ", then ".join(f"{children} x {tokens}" for children, tokens in TREES[name])
        yield _synthetic(
            name, "trees", f"16 sequences of 1,500 tokens: {text}", functools.partial(_levels, TREES[name])
        )
    yield _synthetic("fan", "trees", "16 branches of 8 to 32 tokens after 1,000", _fan)
    yield _synthetic("turns", "trees", "4 conversations after each of their 12 turns of 96 tokens, prompt 256", _turns)
    for branches in (4, 64):
        levels = ((1, 1024), (branches, 512))
        text = f"{branches} branches of 512 tokens after 1,024"
        yield _synthetic(f"branches-{branches}", "trees", text, functools.partial(_levels, levels))


def _compression_sweep(branches: int = 40, length: int = 1024) -> Iterator[Entry]:
    """Yield sequences of one length with one common prefix, whose length gives the compression ratio."""
    for ratio in COMPRESSIONS:
        suffix = round((branches * length / ratio - length) / (branches - 1))
        levels = ((1, length - suffix), (branches, suffix)) if suffix < length else ((branches, length),)
        text = f"{branches} sequences of {length:,} tokens, the last {suffix:,} their own"
        yield _synthetic(f"c-{ratio:g}", "c-sweep", text, functools.partial(_levels, levels), ratio)


def _suffix_sweep(branches: int = 16, prefix: int = 1000) -> Iterator[Entry]:
    for suffix in SUFFIXES:
        levels = ((1, prefix), (branches, suffix))
        text = f"{branches} branches of {suffix:,} tokens after {prefix:,}"
        yield _synthetic(f"suffix-{suffix}", "suffix-sweep", text, functools.partial(_levels, levels), suffix)


def _synthetic(
    name: str, group: str, description: str, sequences: Callable[[], list[IntArray]], parameter: float | None = None
) -> Entry:
    def build_workload() -> Workload:
        return Workload(name, group, description, VOCABULARY, sequences(), parameter)

    return Entry(name, group, build_workload)


def _levels(levels: tuple[tuple[int, int], ...]) -> list[IntArray]:
    return build(levels, VOCABULARY)


def _fan() -> list[IntArray]:
    lengths = np.random.default_rng(0).integers(8, 33, 16)
    sequences = build(((1, 1000), (16, 32)), VOCABULARY)
    return [tokens[: 1000 + length] for tokens, length in zip(sequences, lengths, strict=True)]


def _turns() -> list[IntArray]:
    conversations = build(((1, 256), (4, 12 * 96)), VOCABULARY)
    return [tokens[: 256 + 96 * turn] for tokens in conversations for turn in range(1, 13)]


def _rollouts(path: Path, max_tokens: int) -> Workload:
    rollouts = load_rollouts(path, dense=True)
    fitting = int((np.cumsum([len(rollout) for rollout in rollouts]) <= max_tokens).sum())
    if not fitting:
        raise ValueError(f"the first sample of {path.stem} has more than {max_tokens:,} tokens")
    sequences = [rollout.tokens.astype(np.int64) for rollout in rollouts[:fitting]]
    text = f"the first {fitting} of {len(rollouts)} samples"
    return Workload(path.stem, "rollouts", text, vocab_size(path, multiple=64), sequences)
