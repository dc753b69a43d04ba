"""Baselines: one sequence at a time, padded, concatenated, checkpointed, leaves only, and one packed tree."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from benchmarks.batches.model import LogProbs, label_logprobs, token_logprobs
from benchmarks.batches.trees import IntArray, count_sequences, neighbours
from benchmarks.batches.workloads import FloatArray, Workload
from benchmarks.methods.packed_tree import PackedTree, pack, split
from benchmarks.methods.steps import Prepare, Row, Step, concatenated, fill_rows, rectangle_of, row_of
from dta_compile.capture.recurrences import DEFINITIONS


def dense(model: PreTrainedModel) -> Prepare:
    """Run one sequence at a time."""
    return one_by_one(token_logprobs(model))


def one_by_one(logprobs: LogProbs) -> Prepare:
    """Run a function of log-probs on one sequence at a time."""

    def prepare(workload: Workload) -> Step:
        rows = [row_of(*pair) for pair in workload.pairs]
        return Step(lambda: _backward_rows(logprobs, rows))

    return prepare


def dense_recurrences(model: PreTrainedModel) -> Prepare:
    """Run one sequence at a time, with our recurrences in place of transformers' own fallback."""
    prepare_dense = dense(model)

    def prepare(workload: Workload) -> Step:
        step = prepare_dense(workload)

        def run() -> None:
            with _our_recurrences(sys.modules[type(model).__module__]):
                step.run()

        return dataclasses.replace(step, run=run)

    return prepare


@contextlib.contextmanager
def _our_recurrences(module: types.ModuleType) -> Iterator[None]:
    """Replace the recurrences of a modelling file of transformers by ours, for the dense batch."""

    def ours(name: str, names: Sequence[str], *args: Any, **kwargs: Any) -> Any:
        return DEFINITIONS[name].compute({**dict(zip(names, args, strict=False)), **kwargs})

    theirs = {name: function for name, function in vars(module).items() if name in DEFINITIONS}
    for name, function in theirs.items():
        setattr(module, name, functools.partial(ours, name, list(inspect.signature(function).parameters)))
    try:
        yield
    finally:
        for name, function in theirs.items():
            setattr(module, name, function)


def checkpoint(model: PreTrainedModel) -> Prepare:
    """Run one sequence at a time, saving only the inputs of every layer."""
    _enable_checkpointing(model)
    return dense(model)


def leaves(model: PreTrainedModel) -> Prepare:
    """Run one sequence at a time, leaving out sequences that are prefixes of others."""
    logprobs = token_logprobs(model)

    def prepare(workload: Workload) -> Step:
        def run() -> None:
            merged = merge_into_leaves(workload.sequences, workload.weights)
            _backward_rows(logprobs, (row_of(*pair) for pair in merged))

        return Step(run, lambda: f"{len(merge_into_leaves(workload.sequences, workload.weights))} leaves")

    return prepare


def padded(model: PreTrainedModel) -> Prepare:
    """Run the whole batch at once, padded on the right."""
    logprobs = token_logprobs(model)

    def prepare(workload: Workload) -> Step:
        ids, labels, weights, mask = rectangle_of(workload)
        note = f"{1 - mask.float().mean().item():.0%} padding" if not mask.all() else ""
        return Step(lambda: (weights * logprobs(ids, labels, mask)).sum().backward(), lambda: note)

    return prepare


def varlen(model: PreTrainedModel) -> Prepare:
    """Concatenate sequences into rows of bounded size; only attention treats each sequence separately."""
    AttentionInterface.register("sdpa_per_sequence", attention_per_sequence)
    model.set_attn_implementation("sdpa_per_sequence")

    def prepare(workload: Workload) -> Step:
        pairs = workload.pairs
        rows = [concatenated([pairs[index] for index in group]) for group in fill_rows(workload.sequences)]

        def run() -> None:
            for (ids, labels, weights), lengths in rows:
                positions = torch.cat([torch.arange(length) for length in lengths])[None]
                logits = model(ids, position_ids=positions, sequence_lengths=lengths).logits
                (weights * label_logprobs(logits, labels)).sum().backward()

        return Step(run, lambda: f"{len(rows)} rows" if len(rows) > 1 else "")

    return prepare


def sparse(model: PreTrainedModel) -> Prepare:
    """Run the prefix tree in one row under an ancestor mask; split it where that mask grows too large."""

    def prepare(workload: Workload) -> Step:
        sequences, weights = workload.sequences, workload.weights

        def run() -> None:
            for group in split(sequences):
                _backward_packed(model, pack([sequences[i] for i in group], [weights[i] for i in group]))

        return Step(run, lambda: _split_note(sequences))

    return prepare


def sparse_checkpoint(model: PreTrainedModel) -> Prepare:
    """Run `sparse`, saving only the inputs of every layer."""
    _enable_checkpointing(model)
    return sparse(model)


def merge_into_leaves(
    sequences: Sequence[IntArray], weights: Sequence[FloatArray]
) -> list[tuple[IntArray, FloatArray]]:
    """Drop sequences that are prefixes of others and add their weights to those of the containing sequence.

    A prefix predicts the same next tokens as the leaf that contains it, except for its last token, whose weight is 0.
    """
    order, shared = neighbours(sequences)
    merged: list[tuple[IntArray, FloatArray]] = []
    for index, common_with_next in reversed(list(zip(order, [*shared[1:], 0], strict=True))):
        sequence, weight = sequences[index], weights[index]
        if merged and common_with_next == len(sequence):
            merged[-1][1][: len(sequence)] += weight
        else:
            merged.append((sequence, weight.copy()))
    return merged


def _enable_checkpointing(model: PreTrainedModel) -> None:
    # transformers 5 has begun to rename this method.
    name = "activation_checkpointing" if hasattr(model, "activation_checkpointing_enable") else "gradient_checkpointing"
    getattr(model, f"{name}_enable")(**{f"{name}_kwargs": {"use_reentrant": False}})


def _backward_rows(logprobs: LogProbs, rows: Iterable[Row]) -> None:
    for ids, labels, weights in rows:
        (weights * logprobs(ids, labels)).sum().backward()


def attention_per_sequence(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    sequence_lengths: list[int],
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention of `[1, heads, T, D]` within every sequence of a row, as CPUs have no varlen kernel."""
    parts = zip(*(tensor.split(sequence_lengths, dim=2) for tensor in (query, key, value)), strict=True)
    outputs = [sdpa_attention_forward(module, q, k, v, None, scaling=scaling)[0] for q, k, v in parts]
    return torch.cat(outputs, dim=1), None


def _backward_packed(model: PreTrainedModel, tree: PackedTree) -> None:
    hidden = model.model(tree.tokens, attention_mask=tree.mask(), position_ids=tree.depths).last_hidden_state
    logprobs = model.lm_head(hidden[0, tree.heads]).float().log_softmax(-1)
    (tree.weights * logprobs[tree.sources, tree.labels]).sum().backward()


def _split_note(sequences: Sequence[IntArray]) -> str:
    groups = split(sequences)
    if len(groups) == 1:
        return ""
    counts = [count_sequences([sequences[index] for index in group]) for group in groups]
    compression = sum(count.tokens for count in counts) / sum(count.tree_tokens for count in counts)
    return f"split into {len(groups)} rows, C {compression:.2f}"
