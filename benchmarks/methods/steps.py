"""Steps and their inputs: tensors built from a workload, and a step to run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.batches.trees import IntArray
from benchmarks.batches.workloads import FloatArray, Workload

ROW_TOKENS = 8192  # most tokens of a row of concatenated sequences

Row = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # ids, labels, weights, each [1, S]


@dataclasses.dataclass(frozen=True)
class Step:
    """Forward and backward, accumulating into `.grad`. After the first run, the note describes how the step ran."""

    run: Callable[[], None]
    note: Callable[[], str] = str


Prepare = Callable[[Workload], Step]
Build = Callable[[PreTrainedModel], Prepare]  # for a model of its own


def row_of(sequence: IntArray, weights: FloatArray) -> Row:
    """Return one sequence as a row; the label of its last token, which has no successor, is 0."""
    ids = torch.from_numpy(sequence)[None]
    return ids, torch.nn.functional.pad(ids[:, 1:], (0, 1)), torch.from_numpy(weights)[None]


def rectangle_of(workload: Workload) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ids, labels, weights and padding mask `[B, S]`, padded on the right."""
    shape = len(workload.sequences), max(map(len, workload.sequences))
    ids, mask, weights = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(shape, np.float32)
    for row, (sequence, weight) in enumerate(zip(workload.sequences, workload.weights, strict=True)):
        ids[row, : len(sequence)], mask[row, : len(sequence)], weights[row, : len(sequence)] = sequence, 1, weight
    tensors = [torch.from_numpy(array) for array in (ids, weights, mask)]
    return tensors[0], torch.nn.functional.pad(tensors[0][:, 1:], (0, 1)), tensors[1], tensors[2]


def fill_rows(sequences: Sequence[IntArray], most: int = ROW_TOKENS) -> list[list[int]]:
    """Assign sequences to rows in order; a row has at most `most` tokens, or one sequence."""
    rows: list[list[int]] = []
    used = 0
    for index, sequence in enumerate(sequences):
        if not rows or used + len(sequence) > most:
            rows.append([])
            used = 0
        rows[-1].append(index)
        used += len(sequence)
    return rows


def concatenated(pairs: Sequence[tuple[IntArray, FloatArray]]) -> tuple[Row, list[int]]:
    """Concatenate sequences with weights into one row; return it with their lengths."""
    rows = [row_of(*pair) for pair in pairs]
    ids, labels, weights = (torch.cat(tensors, dim=1) for tensors in zip(*rows, strict=True))
    return (ids, labels, weights), [len(sequence) for sequence, _ in pairs]
