"""Models and batches of `benchmarks.gpu`: Qwen3 with random weights, and rollouts that fit the time limits."""

from __future__ import annotations

import dataclasses
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from benchmarks.batches.model import flops
from benchmarks.batches.trees import Counts, IntArray, count_sequences
from benchmarks.batches.workloads import Workload
from dta_compile.data import bundled, load_rollouts, vocab_size

PEAK_FLOPS = 989e12  # of an H100 or H200 in bfloat16, without sparsity
EXPECTED_MFU = 0.4  # for time estimates
LONGEST = 16_384  # most tokens of a sequence
TOKENIZER_IDS = 151_669  # models with a smaller vocabulary use the dense ids of rollout files
# Layer sizes of the published models; `config_of` adds the common ones.
MODELS: dict[str, dict[str, Any]] = {
    "1.7b": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "4b": {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": True,
    },
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 7936,
        "tie_word_embeddings": True,
    },
}


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits on the size of a batch.

    Attributes:
        tokens: most tokens of all sequences.
        tree_seconds: most seconds of a step over the tree, at the expected efficiency.
        dense_seconds: most seconds of a step over single sequences; slower batches run only a part of them.
    """

    tokens: int
    tree_seconds: float
    dense_seconds: float


def config_of(name: str) -> Qwen3Config:
    """Return the configuration of one of `MODELS`."""
    common = {
        "vocab_size": 151_936,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "use_cache": False,
    }
    return Qwen3Config(**{**common, **MODELS[name]})


def build_on(device: torch.device, config: Qwen3Config, dtype: torch.dtype) -> PreTrainedModel:
    """Build a model in training mode, always with the same weights, which are drawn on the device."""
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype).train()


class Subject:
    """Model on a device, with the state that methods keep for it.

    Attributes:
        compiled: compiled functions by their options.
        expected: by workload, sampled gradients of the first method that ran the whole batch.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self.name, self.device = name, device
        self.config = config_of(name)
        self.model = build_on(device, self.config, torch.bfloat16 if device.type == "cuda" else torch.float32)
        self.compiled: dict[Any, Any] = {}
        self.expected: dict[str, list[torch.Tensor]] = {}

    @cached_property
    def sampled(self) -> list[torch.nn.Parameter]:
        """Parameters whose gradients are compared: small ones from the bottom, middle and top."""
        layers = self.model.model.layers
        middle = layers[len(layers) // 2].mlp.down_proj.weight
        return [layers[0].self_attn.q_proj.weight, middle, self.model.model.norm.weight]


def operations(config: Qwen3Config, counts: Counts, tree: bool) -> float:
    """Return the floating-point operations of forward and backward, of the tree or of single sequences."""
    per_token, per_pair = flops(config)
    tokens, pairs = (counts.tree_tokens, counts.tree_pairs) if tree else (counts.tokens, counts.pairs)
    return 3 * (tokens * per_token + pairs * per_pair)


def expected_seconds(amount: float) -> float:
    """Return the expected seconds of so many operations."""
    return amount / (EXPECTED_MFU * PEAK_FLOPS)


def batch_of(name: str, rollouts: Path | None, config: Qwen3Config, limits: Limits) -> Workload:
    """Build a training batch of whole groups from a rollout file, with about the file's compression if any fits.

    Raises:
        ValueError: the file does not exist.
    """
    path = rollouts / f"{name}.npz" if rollouts else bundled(f"{name}.npz")
    if not path.is_file():
        raise ValueError(f"no rollout file {path.name} in {path.parent}")
    own_ids = vocab_size(path) <= config.vocab_size < TOKENIZER_IDS
    samples = load_rollouts(path, dense=own_ids, max_length=LONGEST)
    groups: dict[int, list[IntArray]] = {}
    for sample in sorted(samples, key=lambda sample: (sample.group, sample.trajectory, sample.turn)):
        groups.setdefault(sample.group, []).append(sample.tokens.astype(np.int64))

    def fits(sequences: list[IntArray]) -> bool:
        counts = count_sequences(sequences)
        seconds = expected_seconds(operations(config, counts, tree=True))
        return counts.tokens <= limits.tokens and seconds <= limits.tree_seconds

    target = _compression([sequence for group in groups.values() for sequence in group])
    chosen: list[IntArray] = []
    whole_groups = 0
    by_likeness = sorted(groups.values(), key=lambda group: abs(_compression(group) - target))
    for group in by_likeness:
        if fits(chosen + group):
            chosen, whole_groups = chosen + group, whole_groups + 1
    if not whole_groups:
        for sequence in by_likeness[0]:
            if not chosen or fits([*chosen, sequence]):
                chosen.append(sequence)
    text = f"{len(chosen)} of {len(samples)} samples, {whole_groups or 'a part of 1'} of {len(groups)} groups"
    return Workload(name, "rollouts", f"{text}; C of the file {target:.2f}", config.vocab_size, chosen)


def _compression(sequences: list[IntArray]) -> float:
    counts = count_sequences(sequences)
    return counts.tokens / counts.tree_tokens
