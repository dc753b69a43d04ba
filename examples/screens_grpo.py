"""GRPO on drawn screens: a tiny Qwen3-VL moves a cursor to a target, and sees a screenshot every turn.

    python examples/screens_grpo.py [--steps 4] [--threads 2]

Rollouts of a task begin with the same screen, and every turn is a row of its own, as trainers of agents make them: the
screens of a rollout are in all its later rows. Both ways compute every update from the same rollouts and weights, eager
and over the prefix tree. Printed are the time of each (forward, loss and backward), tokens and encoder runs, and the
largest difference of a gradient. Model and screens are made here; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

import dta_compile

WORDS, IMAGE, VIDEO, START, END, USER, ASSISTANT = 64, 64, 65, 66, 67, 68, 69  # ids; words are 0 to 63
MOVES = ((0, 1), (0, -1), (1, 0), (-1, 0))  # a word stands for the move `word % 4`
PATCH, MERGE = 8, 2


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes: `tasks` tasks with `group` rollouts each, of `turns` screens and answers of `answer` words.

    A screen has `cells` x `cells` places for the cursor, each of `cell` x `cell` pixels; its side is a multiple of 16.
    """

    steps: int = 4
    tasks: int = 2
    group: int = 8
    turns: int = 4
    answer: int = 6
    cells: int = 4
    cell: int = 24
    hidden: int = 128
    layers: int = 3


@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows of an update: arguments of the model, labels `[B, S]` (-1: not trained), advantages `[B]`, mean reward."""

    inputs: dict[str, torch.Tensor]
    labels: torch.Tensor
    advantages: torch.Tensor
    reward: float


def make_model(settings: Settings) -> Qwen3VLForConditionalGeneration:
    torch.manual_seed(0)
    sizes = {"hidden_size": settings.hidden, "intermediate_size": 3 * settings.hidden}
    text = {
        "vocab_size": 72,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rope_parameters": {"rope_type": "default", "mrope_section": [6, 5, 5], "rope_theta": 1e4},
        **sizes,
    }
    vision = {
        "depth": settings.layers,
        "num_heads": 4,
        "out_hidden_size": settings.hidden,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
        **sizes,
    }
    tokens = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START}
    config = Qwen3VLConfig(text_config=text, vision_config=vision, vision_end_token_id=END, **tokens)
    return Qwen3VLForConditionalGeneration._from_config(config, attn_implementation="sdpa")


def draw(settings: Settings, task: int, cursor: tuple[int, int], target: tuple[int, int]) -> torch.Tensor:
    """Draw a screen and return its patches `[n, 3 * 2 * 8 * 8]` in the order of Qwen3-VL's processor."""
    side, cell = settings.cells * settings.cell, settings.cell
    screen = torch.rand(3, settings.cells, settings.cells, generator=torch.Generator().manual_seed(task)) / 2
    screen = screen.repeat_interleave(cell, 1).repeat_interleave(cell, 2)  # the task's background
    for (row, column), colour in ((target, (1.0, 0.1, 0.1)), (cursor, (1.0, 1.0, 1.0))):
        inside = screen[:, row * cell + 6 : (row + 1) * cell - 6, column * cell + 6 : (column + 1) * cell - 6]
        inside[:] = torch.tensor(colour)[:, None, None]
    blocks = side // (PATCH * MERGE)
    patches = (2 * screen - 1).view(3, blocks, MERGE, PATCH, blocks, MERGE, PATCH).permute(1, 4, 2, 5, 0, 3, 6)
    return patches.reshape(-1, 3, 1, PATCH, PATCH).repeat(1, 1, 2, 1, 1).flatten(1)  # a still image: two equal frames


def arguments(settings: Settings, ids: torch.Tensor, screens: list[list[torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the arguments of the model for rows of ids with their screens."""
    side = settings.cells * settings.cell // PATCH
    flat = [screen for row in screens for screen in row]
    return {
        "input_ids": ids,
        "mm_token_type_ids": (ids == IMAGE).int(),
        "pixel_values": torch.cat(flat),
        "image_grid_thw": torch.tensor([[1, side, side]] * len(flat)),
    }


def roll_out(model: Any, settings: Settings, step: int) -> Batch:
    """Let the policy play a group of rollouts of each task; return a row per turn."""
    draws = torch.Generator().manual_seed(step)
    tasks = [settings.tasks * step + number for number in range(settings.tasks) for _ in range(settings.group)]
    corners = torch.randint(1, settings.cells, (max(tasks) + 1, 2), generator=draws).tolist()
    cursors, ids = [(0, 0)] * len(tasks), torch.zeros(len(tasks), 0, dtype=torch.int64)
    screens: list[list[torch.Tensor]] = [[] for _ in tasks]
    rows: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
    places = (settings.cells * settings.cell // (PATCH * MERGE)) ** 2
    prompt = torch.tensor([USER, START, *[IMAGE] * places, END, ASSISTANT])
    for _ in range(settings.turns):
        for i, task in enumerate(tasks):
            screens[i] = [*screens[i], draw(settings, task, cursors[i], tuple(corners[task]))]
        ids = torch.cat([ids, prompt.expand(len(tasks), -1)], 1)
        torch.manual_seed(step)
        call = arguments(settings, ids, screens) | {"attention_mask": torch.ones_like(ids)}
        own = {"max_new_tokens": settings.answer, "do_sample": True, "top_k": 0, "pad_token_id": 0}
        ids = model.generate(**call, **own, suppress_tokens=list(range(WORDS, 72)))
        words = ids[:, -settings.answer].tolist()
        cursors = [
            tuple(min(max(at + by, 0), settings.cells - 1) for at, by in zip(cursor, MOVES[word % 4], strict=True))
            for cursor, word in zip(cursors, words, strict=True)
        ]
        rows += zip(ids, screens, strict=True)
    distances = [
        sum(abs(at - to) for at, to in zip(cursor, corners[task], strict=True))
        for cursor, task in zip(cursors, tasks, strict=True)
    ]
    rewards = -torch.tensor(distances, dtype=torch.float32).view(settings.tasks, settings.group)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    lengths = torch.tensor([len(row) for row, _ in rows])
    padded = torch.nn.utils.rnn.pad_sequence([row for row, _ in rows], batch_first=True)
    columns = torch.arange(padded.shape[1])
    is_trained = (columns >= lengths[:, None] - settings.answer) & (columns < lengths[:, None])
    inputs = arguments(settings, padded, [of_row for _, of_row in rows])
    inputs["attention_mask"] = (columns < lengths[:, None]).long()
    labels = padded.masked_fill(~is_trained, -1)
    return Batch(inputs, labels, advantages.flatten().repeat(settings.turns), float(rewards.mean()))


def update(loss: Callable[..., torch.Tensor], model: Any, batch: Batch) -> tuple[float, dict[str, torch.Tensor], int]:
    """Compute the gradients of an update; return its seconds, the gradients and how many images were encoded."""
    model.zero_grad()
    images = []
    hook = model.model.visual.register_forward_pre_hook(
        lambda _, args, kwargs: images.append(len(kwargs["grid_thw"] if "grid_thw" in kwargs else args[1])),
        with_kwargs=True,
    )
    started = time.perf_counter()
    loss(batch.inputs, batch.labels, batch.advantages).backward()
    seconds = time.perf_counter() - started
    hook.remove()
    return seconds, {name: weight.grad.clone() for name, weight in model.named_parameters()}, sum(images)


def train(settings: Settings, options: dict[str, Any] | None = None) -> Iterator[dict[str, float]]:
    """Train by the gradients of the prefix tree; yield the figures of every step."""
    model = make_model(settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss(inputs: dict[str, torch.Tensor], labels: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        logits = model(**inputs, use_cache=False).logits[:, :-1].float()
        log_probs = logits.log_softmax(-1).gather(-1, labels[:, 1:, None].clamp(min=0))[..., 0]
        mask = labels[:, 1:] >= 0
        # On policy: the gradient of the probability ratio is that of the log-prob.
        return -(log_probs * advantages[:, None] * mask).sum() / mask.sum()

    compiled = torch.compile(loss, backend="dta", options=options)
    for step in range(settings.steps):
        batch = roll_out(model, settings, step)
        eager_seconds, expected, eager_images = update(loss, model, batch)
        seconds, found, images = update(compiled, model, batch)
        optimizer.step()
        stats = dta_compile.last_plan(compiled).stats
        differences = [
            (found[name] - grad).abs().max() / grad.abs().max().clamp(min=1e-12) for name, grad in expected.items()
        ]
        yield {
            "reward": batch.reward,
            "tokens": stats.tokens,
            "tree_tokens": stats.tree_tokens,
            "eager_images": eager_images,
            "images": images,
            "eager_seconds": eager_seconds,
            "seconds": seconds,
            "difference": float(max(differences)),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    print("eager / dta; the first step compiles, and compares images that are encoded alone and together")
    for step, one in enumerate(train(Settings(steps=given.steps)), 1):
        print(
            f"step {step}: reward {one['reward']:.2f}, "
            f"tokens {one['tokens']:,} / {one['tree_tokens']:,} (C {one['tokens'] / one['tree_tokens']:.2f}), "
            f"images encoded {one['eager_images']} / {one['images']}, "
            f"{one['eager_seconds']:.2f} s / {one['seconds']:.2f} s "
            f"({one['eager_seconds'] / one['seconds']:.1f} times), "
            f"gradients differ by {one['difference']:.0e}",
            flush=True,
        )


if __name__ == "__main__":
    main()
