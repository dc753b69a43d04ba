"""Trainers on agent rollouts: sharing within their batches, and update times, eager and over the prefix tree.

    python -m benchmarks.trainers                      # both tables, on the bundled rollouts
    python -m benchmarks.trainers --sharing FILE...    # the first table for rollout files, without training

Batches are made by TRL's own functions for shuffling, splitting and packing. Updates are those of TRL's `GRPOTrainer`,
which receives the rollouts instead of generating them: from the rewards to the optimizer step, in float32.
Configurations take turns in one process; the first round, which compiles, is reported separately.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models
from transformers import (
    PreTrainedTokenizerFast,
    PrinterCallback,
    Qwen3Config,
    Qwen3ForCausalLM,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer
from trl.data_utils import pack_dataset
from trl.trainer.utils import shuffle_sequence_dict, split_tensor_dict

import dta_compile
from dta_compile.data import Rollout, bundled, load_rollouts
from dta_compile.integrations.trainer_callback import compressions
from dta_compile.rollouts import PrefixSampler

Batches = list[list[np.ndarray]]
VOCABULARY = 7936  # dense ids of all rollout files


def generated(rollouts: Sequence[Rollout], rows: int, steps: int) -> Batches:
    """Return GRPO's generation batches of `rows * steps` rows, shuffled and split as TRL does."""
    batches: Batches = []
    size = rows * steps
    for start in range(0, len(rollouts) - len(rollouts) % size, size):
        numbers = {"row": torch.arange(start, start + size)}
        parts = split_tensor_dict(shuffle_sequence_dict(numbers), steps)
        batches += [[rollouts[i].tokens for i in part["row"].tolist()] for part in parts]
    return batches


def loaded(rollouts: Sequence[Rollout], rows: int, order: str) -> Batches:
    """Return the data-loader batches of transformers' `Trainer` and TRL's SFT; `order`: random, arrival or grouped."""
    orders: dict[str, Callable[[], Iterable[int]]] = {
        "random": lambda: torch.randperm(len(rollouts)).tolist(),
        "arrival": lambda: range(len(rollouts)),
        "grouped": lambda: PrefixSampler([rollout.tokens for rollout in rollouts], rows),
    }
    tokens = [rollouts[i].tokens for i in orders[order]()]
    return [tokens[i : i + rows] for i in range(0, len(tokens), rows)]


def packed(rollouts: Sequence[Rollout], length: int, rows: int) -> Batches:
    """Return packed SFT batches: rows of whole sequences, best fit first."""
    dataset = Dataset.from_dict({"input_ids": [rollout.tokens.tolist() for rollout in rollouts]})
    result = pack_dataset(dataset.shuffle(seed=0), length, "bfd")
    per_row = []
    for row in result:
        cuts = np.cumsum(row["seq_lengths"])[:-1]
        per_row.append(np.split(np.array(row["input_ids"]), cuts))
    return [[rollout for row in per_row[i : i + rows] for rollout in row] for i in range(0, len(per_row), rows)]


def pairs(rollouts: Sequence[Rollout], rows: int, order: str) -> Batches:
    """Return DPO batches: the same turn of two trajectories of a task, in random order or grouped."""
    by_turn: dict[tuple[int, int], list[np.ndarray]] = {}
    for rollout in rollouts:
        by_turn.setdefault((rollout.group, rollout.turn), []).append(rollout.tokens)
    chosen = [two for alike in by_turn.values() for two in zip(alike[::2], alike[1::2], strict=False)]
    grouped = PrefixSampler([first for first, _ in chosen], rows)
    numbers = list(grouped) if order == "grouped" else torch.randperm(len(chosen)).tolist()
    return [[row for i in numbers[k : k + rows] for row in chosen[i]] for k in range(0, len(chosen), rows)]


def sharing(paths: Sequence[str]) -> Table:
    """Tabulate C of the trainers' batches by file."""
    ways: dict[str, Callable[[Sequence[Rollout]], Batches]] = {
        "GRPO, 8 rows a batch (default)": lambda r: generated(r, 8, 1),
        "GRPO, 2 rows x 4 accumulated": lambda r: generated(r, 2, 4),
        "GRPO, 1 row x 8 accumulated": lambda r: generated(r, 1, 8),
        "GRPO, 8 rows x 5 accumulated": lambda r: generated(r, 8, 5),
        "GRPO, 40 rows a batch": lambda r: generated(r, 40, 1),
        "GRPO, all rows of 5 x 40 a batch": lambda r: generated(r, min(200, len(r)), 1),
        "SFT, Trainer: 8 random rows (default)": lambda r: loaded(r, 8, "random"),
        "SFT, Trainer: 8 rows in order": lambda r: loaded(r, 8, "arrival"),
        "SFT, Trainer: 8 rows, group_rows": lambda r: loaded(r, 8, "grouped"),
        "SFT, Trainer: 40 random rows": lambda r: loaded(r, 40, "random"),
        "SFT, Trainer: 40 rows in order": lambda r: loaded(r, 40, "arrival"),
        "SFT, Trainer: 40 rows, group_rows": lambda r: loaded(r, 40, "grouped"),
        "SFT, packing to the longest, 8 rows": lambda r: packed(r, max(map(len, r)), 8),
        "DPO, 8 random pairs (default)": lambda r: pairs(r, 8, "random"),
        "DPO, 8 pairs, group_rows": lambda r: pairs(r, 8, "grouped"),
        "all rows in one tree": lambda r: [[one.tokens for one in r]],
    }
    files = {path: load_rollouts(path, dense=True) for path in paths}
    table = Table(title="tokens of the batches over tokens of their trees")
    table.add_column("batches")
    for path in paths:
        table.add_column(path.rpartition("/")[2].removesuffix(".npz"), justify="right")
    for name, make in ways.items():
        torch.manual_seed(0)
        table.add_row(name, *(f"{compressions(make(rollouts))[0]:.2f}" for rollouts in files.values()))
    return table


@dataclasses.dataclass
class Clock(TrainerCallback):
    """Callback that records the seconds of every update."""

    started: float = 0.0
    seconds: list[float] = dataclasses.field(default_factory=list)

    def reward(self, completions: list[Any], **kwargs: Any) -> list[float]:
        self.started = time.perf_counter()
        return [float(i % 3) for i in range(len(completions))]

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.seconds.append(time.perf_counter() - self.started)


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {f"w{i}": i for i in range(VOCABULARY)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w7935", eos_token="w7934", unk_token="w0")


def trainer(folder: str, layers: int, hidden: int, way: str | None, clock: Clock, **settings: Any) -> GRPOTrainer:
    """Build a trainer that gets the bundled rollouts at every step; `way`: "whole" (the model), "whole_steps" (the same
    with the batches of a step in one), "backbone", or None for eager."""
    rollouts = load_rollouts(bundled(), dense=True)
    starts = [sample.spans[-1][0] for sample in rollouts]

    def hand_over(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        return {
            "prompt_ids": [sample.tokens[:start].tolist() for sample, start in zip(rollouts, starts, strict=True)],
            "completion_ids": [sample.tokens[start:].tolist() for sample, start in zip(rollouts, starts, strict=True)],
            "logprobs": [[0.0] * (len(sample) - start) for sample, start in zip(rollouts, starts, strict=True)],
        }

    torch.manual_seed(0)
    heads = {"num_attention_heads": hidden // 32, "num_key_value_heads": hidden // 64, "head_dim": 32}
    shape = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers}
    config = Qwen3Config(vocab_size=VOCABULARY, **shape, **heads)
    arguments = GRPOConfig(
        output_dir=folder,
        num_generations=8,
        max_completion_length=1024,
        max_steps=1,
        optim="sgd",
        learning_rate=1e-6,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **settings,
    )
    if way == "whole_steps":
        arguments = dta_compile.DTACallback.whole_steps(arguments)
    grpo = GRPOTrainer(
        Qwen3ForCausalLM(config),
        clock.reward,
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": "w1"}] * 40),
        processing_class=tokenizer(),
        rollout_func=hand_over,
        callbacks=[clock],
    )
    grpo.remove_callback(PrinterCallback)
    if way == "backbone":
        grpo.model.model.compile(backend="dta")
    if way is not None:
        grpo.add_callback(dta_compile.DTACallback())
    return grpo


ONE_BATCH = {"per_device_train_batch_size": 40, "gradient_accumulation_steps": 1}
FIVE_BATCHES = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 5}
PLAIN = {"gradient_checkpointing": False}


def updates(layers: int, hidden: int, rounds: int, chosen: Sequence[int]) -> Table:
    """Tabulate the seconds of an update of all bundled rollouts; `chosen` are indices of configurations."""
    ways: dict[str, tuple[str | None, dict[str, Any]]] = {
        "TRL, defaults: 8 rows x 5, checkpoints": (None, FIVE_BATCHES),
        "TRL, 8 rows x 5": (None, FIVE_BATCHES | PLAIN),
        "TRL, 40 rows": (None, ONE_BATCH | PLAIN),
        "dta, 40 rows": ("whole", ONE_BATCH | PLAIN),
        "dta, 40 rows, backbone only": ("backbone", ONE_BATCH | PLAIN),
        "dta, 8 rows x 5": ("whole", FIVE_BATCHES | PLAIN),
        "dta, 40 rows, checkpoints": ("whole", ONE_BATCH),
        "dta, defaults, whole_steps": ("whole_steps", FIVE_BATCHES),
    }
    ways = {name: way for i, (name, way) in enumerate(ways.items()) if i in chosen}
    with tempfile.TemporaryDirectory() as folder:
        clocks = {name: Clock() for name in ways}
        trainers = {name: trainer(folder, layers, hidden, way, clocks[name], **kw) for name, (way, kw) in ways.items()}
        for _ in range(1 + rounds):
            for each in trainers.values():
                each.train()
            Console(stderr=True).print({name: [round(x, 2) for x in clock.seconds] for name, clock in clocks.items()})
    size = f"{layers} layers, hidden {hidden}, float32, {torch.get_num_threads()} threads"
    table = Table(title=f"one update of airline_tiny, {size}")
    for column in ("", "first", f"median of {rounds}", "C"):
        table.add_column(column, justify="right" if column else "left")
    for name, clock in clocks.items():
        first, *others = clock.seconds
        way = ways[name][0]
        model = trainers[name].model.model if way == "backbone" else trainers[name].model
        compression = f"{dta_compile.last_plan(model).stats.compression:.2f}" if way else ""
        table.add_row(name, f"{first:.2f} s", f"{statistics.median(others):.2f} s", compression)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sharing", nargs="+", metavar="FILE", help="only the table of sharing, for these files")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--ways", type=int, nargs="+", default=range(8), help="rows of the second table")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore")
    console = Console(width=140)
    console.print(sharing(options.sharing or [str(bundled())]))
    if not options.sharing:
        console.print(updates(options.layers, options.hidden, options.rounds, options.ways))


if __name__ == "__main__":
    main()
