"""Every number of a run, in one place; a run's folder keeps them as `settings.json`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

WAYS = ("eager", "compiled", "dta")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is trained, on what, and how.

    Attributes:
        way: how the trainer computes its batches: "eager" (padded rows), "compiled" (packed rows without padding,
            `torch.compile` with inductor) or "dta" (the prefix tree of the batch).
        seed: of everything that is drawn.
        hidden, layers, heads: of the model, a Qwen3 with a tokenizer of its own.
        lowest, fewest, most: a task is to guess a number from `low` to `high`; `low` is 1 to `lowest`, and there are
            `fewest` to `most` numbers.
        guesses: how many the game allows.
        roots, branches: a task is played `roots` times from its start; before a later turn drawn at random each of
            these episodes forks into `branches`.
        tasks_at_once: tasks whose episodes a worker samples as one batch.
        action_tokens: most tokens of a turn.
        batch_tokens: most tokens of the prefix tree of a batch, which is what it costs to train.
        epochs: gradient steps on every batch.
        max_staleness: a rollout expires when the trainer is ahead of it by more versions.
        patience: of `RolloutTree`.
        most_waiting: workers pause while so many rollouts wait; bounds staleness as well.
        updates, seconds: a run ends after so many updates, or seconds of training; None: without bound.
        learning_rate, warm_steps, clip, most_weight, kl, entropy, max_norm: of the update; see `update.py`.
        checkpoint_every, snapshot_every: updates; snapshots are what is evaluated.
        held_out: tasks of an evaluation.
        workers, trainer_threads, worker_threads: processes, and threads of torch in them.
    """

    way: str = "dta"
    seed: int = 0
    hidden: int = 160
    layers: int = 2
    heads: int = 4
    lowest: int = 5
    fewest: int = 10
    most: int = 16
    guesses: int = 4
    roots: int = 4
    branches: int = 4
    tasks_at_once: int = 4
    action_tokens: int = 12
    batch_tokens: int = 3000
    epochs: int = 1
    max_staleness: int = 4
    patience: int = 2
    most_waiting: int = 300
    updates: int | None = None
    seconds: float | None = None
    learning_rate: float = 3e-4
    warm_steps: int = 350
    clip: float = 0.2
    most_weight: float = 2.0
    kl: float = 0.03
    entropy: float = 0.0
    max_norm: float = 1.0
    checkpoint_every: int = 5
    snapshot_every: int = 2
    held_out: int = 512
    workers: int = 1
    trainer_threads: int = 1
    worker_threads: int = 1

    def __post_init__(self) -> None:
        if self.way not in WAYS:
            raise ValueError(f"way is {self.way!r}; expected one of {', '.join(WAYS)}")
        for name, value in dataclasses.asdict(self).items():
            may_be_zero = name in ("seed", "warm_steps", "max_staleness", "patience", "kl", "entropy")
            if isinstance(value, (int, float)) and (value < 0 or (value == 0 and not may_be_zero)):
                raise ValueError(f"{name} is {value}; expected {'0 or more' if may_be_zero else 'more than 0'}")
        if self.hidden % self.heads or self.heads % 2 or self.hidden // self.heads % 2:
            raise ValueError(
                f"hidden {self.hidden} and heads {self.heads}: expected even heads of an even, equal width"
            )
        if self.guesses < 2 or self.most < self.fewest:
            raise ValueError("expected at least 2 guesses, and most to be at least fewest")

    def save(self, folder: Path) -> None:
        (folder / "settings.json").write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> Settings:
        """Settings of a run.

        Raises:
            ValueError: they are damaged, or of another version of this program.
        """
        try:
            return cls(**json.loads((folder / "settings.json").read_text()))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{folder / 'settings.json'} holds no settings of this program: {error}") from error
