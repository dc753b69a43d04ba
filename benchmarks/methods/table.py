"""Methods of running a step: forward and backward of a weighted sum of token log-probs of a whole batch.

A method is built once on a model of its own and then takes workloads. Data-loader work (tensors, padding, rows of
bounded size) is done beforehand. Work that depends on shared prefixes (leaves, packed trees and their masks, plans) is
done inside every step, because every batch of a training run is a new one.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from benchmarks.methods.baselines import (
    checkpoint,
    dense,
    leaves,
    padded,
    sparse,
    sparse_checkpoint,
    varlen,
)
from benchmarks.methods.compiled_dense import compiled_dense, compiled_packed, compiled_padded
from benchmarks.methods.ours import compiled, streaming
from benchmarks.methods.steps import ROW_TOKENS, Build


@dataclasses.dataclass(frozen=True)
class Method:
    """Method of running a step.

    Attributes:
        family: "dense", "tree mask" or "dta".
        build: maps a model to a function from workloads to steps.
    """

    name: str
    family: str
    description: str
    build: Build


_OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "auto": ("all options at their defaults", {}),
    "vanilla": ("Algorithm 2: every tree segment by itself", {"strategy": "vanilla"}),
    "dfs-random": ("depth first, leaves in random order", {"strategy": "dfs", "order": "random"}),
    "dfs-lexicographic": ("depth first, leaves in lexicographic order", {"strategy": "dfs", "order": "lexicographic"}),
    "dfs": ("depth first, leaves in backward-DFS order (Algorithms 1 and 3)", {"strategy": "dfs"}),
    "dfs-large": ("the same with blocks of 8,192 tokens", {"strategy": "dfs", "chunk_size": 8192}),
    "dfs-0": ("dfs, nothing kept from forward to backward", {"strategy": "dfs", "memory_budget": 0}),
    "packed-0": ("packed chunks, nothing kept from forward to backward", {"strategy": "packed", "memory_budget": 0}),
    "packed": ("packed chunks, the default memory budget", {"strategy": "packed"}),
    "packed-all": ("packed chunks, everything kept", {"strategy": "packed", "memory_budget": 1 << 40}),
}

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("dense", "dense", "one sequence at a time, eager: the reference", dense),
        Method("padded", "dense", "the whole batch at once, padded", padded),
        Method("varlen", "dense", f"sequences packed into rows of {ROW_TOKENS:,} tokens, attention for each", varlen),
        Method("checkpoint", "dense", "one at a time with activation checkpointing of every layer", checkpoint),
        Method("leaves", "dense", "one at a time, only sequences that are no prefix of another", leaves),
        Method("compiled", "dense", "one at a time by inductor, causal flash attention", compiled_dense),
        Method("compiled-padded", "dense", "the whole batch at once, padded, by inductor", compiled_padded),
        Method("compiled-packed", "dense", f"rows of {ROW_TOKENS:,} tokens by inductor", compiled_packed),
        Method("sparse", "tree mask", "the prefix tree in one row with a mask of ancestors", sparse),
        Method("sparse-checkpoint", "tree mask", "the same with activation checkpointing", sparse_checkpoint),
        *(
            Method(name, "dta", description, compiled(name, **options))
            for name, (description, options) in _OURS.items()
        ),
        Method("streaming", "dta", "dfs as the paper's own loop: losses go backward as they come", streaming),
    )
}
