"""Held-out tasks: how good a policy is, for every snapshot of a run."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from statistics import fmean, pstdev

import torch
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

from . import warmup
from .game import draw_task
from .metrics import Metrics
from .record import Record
from .roles import Role
from .samples import leaf_rewards
from .sampling import Player
from .settings import Settings
from .weights import read, snapshots

AT_ONCE = 128


def evaluate(settings: Settings, model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> list[float]:
    """Rewards of held-out tasks, in order. Tasks and draws are the same for every policy and for all seeds."""
    player = Player(model, tokenizer, torch.Generator().manual_seed(0), settings.action_tokens)
    rewards = []
    for first in range(0, settings.held_out, AT_ONCE):
        numbers = range(first, min(first + AT_ONCE, settings.held_out))
        for turns in player.play([draw_task(settings, number, held_out=True) for number in numbers]):
            rewards += leaf_rewards(turns)
    return rewards


def summary(rewards: list[float]) -> tuple[float, float, float]:
    """Mean reward, its standard error, and the share of tasks that are won."""
    won = sum(reward == 1 for reward in rewards) / len(rewards)
    return fmean(rewards), pstdev(rewards) / math.sqrt(len(rewards)), won


def evaluate_new(settings: Settings, folder: Path, model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> dict[int, float]:
    """Evaluate the snapshots that have not been evaluated; their rewards by version."""
    record, found = Record(folder), {}
    known = {version for version, *_ in record.evaluations()}
    for version, path in snapshots(folder).items():
        if version not in known:
            try:
                model.load_state_dict(read(path)["weights"])
            except FileNotFoundError:  # of an update that was undone
                continue
            reward, error, won = summary(evaluate(settings, model, tokenizer))
            if path.exists():
                record.add_evaluation(version, reward, error, won)
                found[version] = reward
    record.close()
    return found


def main(folder: Path) -> None:
    """Evaluate snapshots as they come, at the lowest priority."""
    os.nice(10)
    settings = Settings.load(folder)
    role = Role(folder, "evaluator", settings.worker_threads)
    model, tokenizer = warmup.start(settings, folder)
    with Metrics(folder, "held-out") as metrics:
        while not role.stops:
            for version, reward in evaluate_new(settings, folder, model.eval(), tokenizer).items():
                metrics.add(version, {"reward/held_out": reward})
            time.sleep(0.2)
