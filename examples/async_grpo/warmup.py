"""The supervised start: a tokenizer and a model, trained on games of a clumsy player."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

from .game import ClumsyPlayer, draw_task
from .policy import make_model, make_values, pad
from .samples import Sample
from .settings import Settings
from .text import read_tokens, said_tokens, train_tokenizer

Game = list[tuple[str, str]]
TASKS_OF_A_STEP, GAMES_OF_A_TASK = 4, 16  # games of a task share its prompt, so that a step runs over a tree
RATE = 4e-3


def start(
    settings: Settings, folder: Path, report: Callable[[str], None] = lambda line: None
) -> tuple[Qwen3ForCausalLM, Tokenizer]:
    """The model and the tokenizer that everything starts from: made once in a folder, then loaded."""
    weights, words = folder / "start.pt", folder / "tokenizer.json"
    if not weights.exists():
        player = ClumsyPlayer(np.random.default_rng(settings.seed))
        tokenizer = train_tokenizer(_texts(settings, player))
        model = make_model(settings, tokenizer.get_vocab_size())
        _imitate(settings, model, tokenizer, player, report)
        tokenizer.save(str(words))
        torch.save(model.state_dict(), f"{weights}.new")
        os.replace(f"{weights}.new", weights)  # there is a start only when all of it is there
    tokenizer = Tokenizer.from_file(str(words))
    model = make_model(settings, tokenizer.get_vocab_size())
    model.load_state_dict(torch.load(weights, weights_only=True))
    return model, tokenizer


def _texts(settings: Settings, player: ClumsyPlayer) -> list[str]:
    """What the tokenizer is trained on: games, and every number often enough to become a token."""
    games = [player.play(draw_task(settings, number)) for number in range(200)]
    numbers = [f">{number} <{number} [{number}]" for number in range(settings.lowest + settings.most + 1)]
    return [text for game in games for turn in game for text in turn] + 10 * numbers


def _imitate(
    settings: Settings, model: Qwen3ForCausalLM, tokenizer: Tokenizer, player: ClumsyPlayer, report: Callable
) -> None:
    """Next-token prediction of what the player says; a game is a row."""
    steps, generator = settings.warm_steps, np.random.default_rng(settings.seed)
    values = make_values(model, "dta")
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=max(steps, 2), pct_start=0.1)
    for step in range(steps):
        games = []
        for task in (draw_task(settings, TASKS_OF_A_STEP * step + number) for number in range(TASKS_OF_A_STEP)):
            seeds = generator.integers(2**31, size=GAMES_OF_A_TASK).tolist()
            games += [player.play(dataclasses.replace(task, seed=seed)) for seed in seeds]
        rows = [tokens_of(tokenizer, game) for game in games]
        batch = pad([_as_sample(tokens) for tokens, _ in rows])
        said = torch.zeros_like(batch.loss_mask)
        for row, (_, mask) in enumerate(rows):
            said[row, : len(mask) - 1] = torch.tensor(mask[1:])
        loss = -values(batch).logprobs[said].mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if (step + 1) % 20 == 0 or step + 1 == steps:
            report(f"warm-up: step {step + 1} of {steps}, loss {loss.item():.3f}")


def tokens_of(tokenizer: Tokenizer, game: Game) -> tuple[list[int], list[bool]]:
    """The tokens of a game, and which of them the player said."""
    tokens, said = [], []
    for heard, answer in game:
        for new, own in ((read_tokens(tokenizer, heard), False), (said_tokens(tokenizer, answer), True)):
            tokens += new
            said += [own] * len(new)
    return tokens, said


def _as_sample(tokens: list[int]) -> Sample:
    return Sample(np.asarray(tokens, np.int32), 1, np.zeros(0, np.float32), 0.0, 0.0, 0, 0)
