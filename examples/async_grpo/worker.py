"""A rollout worker: plays tasks with the newest policy, for as long as not too many rollouts wait."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from . import warmup
from .game import draw_task
from .record import Record
from .roles import Role
from .samples import samples_of
from .sampling import Player
from .settings import Settings
from .weights import Follower

PAUSE = 0.02  # seconds between two looks whether there is something to do


def main(folder: Path, index: int) -> None:
    """Work until the run is stopped."""
    settings = Settings.load(folder)
    role = Role(folder, f"worker-{index}", settings.worker_threads)
    record = Record(folder)
    model, tokenizer = warmup.start(settings, folder)
    follower = Follower(folder, model.eval())
    while not role.stops:
        version = follower.refresh()
        if version is None or record.count_waiting() >= settings.most_waiting:
            time.sleep(PAUSE)
            continue
        numbers = record.claim_tasks(index, settings.tasks_at_once)
        generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + numbers[0])
        player = Player(model, tokenizer, generator, settings.action_tokens)
        tasks = [draw_task(settings, number) for number in numbers]
        began = time.perf_counter()
        played = player.play(tasks, settings.roots, settings.branches)
        seconds = time.perf_counter() - began
        for number, turns in zip(numbers, played, strict=True):
            record.add(number, samples_of(turns, number, version))
        record.add_wave(index, seconds, sum(len(turn.tokens) for turns in played for turn in turns))
