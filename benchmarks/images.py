"""Compare a step over rollouts with screenshots with eager mode, one row at a time: time, operations, memory.

    python -m benchmarks.images [--threads 2] [--repetitions 3] [--turns 8] [--frozen]

The rollouts are those of `examples/screens_grpo.py` with random answers: 16 of 8 turns with a screen each; every turn
is a row. The ratio of operations counts the encoder by images and the rest by tokens, eager over tree.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

import dta_compile
from benchmarks.measuring.allocations import allocated_at_the_peak
from benchmarks.measuring.memory import growth, peak_memory_is_available
from examples.screens_grpo import (
    ASSISTANT,
    END,
    IMAGE,
    MERGE,
    MOVES,
    PATCH,
    START,
    USER,
    WORDS,
    Settings,
    draw,
    make_model,
)
from examples.screens_grpo import arguments as arguments_of

Call = dict[str, torch.Tensor]


def rows_of(settings: Settings) -> list[Call]:
    """Return the arguments of the model for every turn of every rollout, one row each."""
    drawn = torch.Generator().manual_seed(0)
    places = (settings.cells * settings.cell // (PATCH * MERGE)) ** 2
    rows = []
    for task, _ in itertools.product(range(settings.tasks), range(settings.group)):
        cursor, ids, screens = (0, 0), [], []
        for _ in range(settings.turns):
            answer = torch.randint(WORDS, (settings.answer,), generator=drawn).tolist()
            screens.append(draw(settings, task, cursor, (settings.cells - 1, task % settings.cells)))
            ids += [USER, START, *[IMAGE] * places, END, ASSISTANT, *answer]
            row = torch.tensor([ids])
            rows.append(arguments_of(settings, row, [list(screens)]) | {"attention_mask": torch.ones_like(row)})
            cursor = tuple(
                min(max(at + by, 0), settings.cells - 1) for at, by in zip(cursor, MOVES[answer[0] % 4], strict=True)
            )
    return rows


def batch_of(rows: list[Call]) -> Call:
    """Return one call over all rows, padded on the right."""
    of_tokens = ("input_ids", "mm_token_type_ids", "attention_mask")
    return {
        name: torch.nn.utils.rnn.pad_sequence([row[name][0] for row in rows], batch_first=True)
        if name in of_tokens
        else torch.cat([row[name] for row in rows])
        for name in rows[0]
    }


def log_probs(model: Any, call: Call) -> torch.Tensor:
    """Return the sum of the log-probs of all words."""
    logits = model(**call, use_cache=False).logits[:, :-1].float()
    labels = call["input_ids"][:, 1:]
    chosen = logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    return (chosen * (labels < WORDS) * call["attention_mask"][:, 1:]).sum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("threads", 2), ("repetitions", 3), ("turns", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--frozen", action="store_true", help="do not train the encoder")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    settings = Settings(turns=given.turns)
    model = make_model(settings)
    model.model.visual.requires_grad_(not given.frozen)
    rows = rows_of(settings)
    batch, images = batch_of(rows), sum(len(row["image_grid_thw"]) for row in rows)
    compiled = torch.compile(log_probs, backend="dta")

    def eager() -> None:
        for row in rows:
            log_probs(model, row).backward()

    def ours() -> None:
        compiled(model, batch).backward()

    ours()
    model.zero_grad()
    seconds: dict[Any, list[float]] = {eager: [], ours: []}
    gradients = {}
    for way in seconds:
        way()
        gradients[way] = {
            name: weight.grad.clone() for name, weight in model.named_parameters() if weight.requires_grad
        }
        model.zero_grad()
    scale = max(float(gradient.abs().max()) for gradient in gradients[eager].values())
    difference = max(float((gradients[ours][name] - g).abs().max()) for name, g in gradients[eager].items()) / scale
    for _ in range(given.repetitions):
        for way, taken in seconds.items():
            model.zero_grad()
            started = time.perf_counter()
            way()
            taken.append(time.perf_counter() - started)
    plan = dta_compile.last_plan(compiled)
    stats = plan.stats
    encoded = int(next(note for note in plan.estimates.notes if "images" in note).split(", ")[1].split()[0])
    of_image, of_token = operations(model, rows[-1])
    tokens = (images * of_image + stats.tokens * of_token) / (encoded * of_image + stats.tree_tokens * of_token)
    medians = [statistics.median(taken) for taken in seconds.values()]
    ratio = medians[0] / medians[1]
    print(f"{len(rows)} rows, tokens {stats.tokens:,} / {stats.tree_tokens:,}, images {images} / {encoded}")
    print(f"operations {tokens:.2f} times fewer; eager {medians[0]:.2f} s, dta {medians[1]:.2f} s: {ratio:.2f} times")
    print(f"share {ratio / tokens:.2f}; gradients differ by {difference:.0e} of the largest")
    if peak_memory_is_available():
        peaks = [growth(model, way) / 1e6 for way in (eager, ours)]
        print(f"resident memory grows by: eager {peaks[0]:.0f} MB, dta {peaks[1]:.0f} MB")
    allocated, predicted = (size / 2**20 for size in (allocated_at_the_peak(ours), plan.estimates.peak_bytes or 0))
    print(f"dta allocates {allocated:.1f} MiB at the peak, predicted {predicted:.1f} MiB")


def operations(model: Any, row: Call) -> tuple[float, float]:
    """Count the operations of a step, by image and by token."""
    count = FlopCounterMode(display=False)
    with count:
        features = model.model.get_image_features(row["pixel_values"], row["image_grid_thw"]).pooler_output
        values = torch.cat(features)
        if values.requires_grad:
            values.sum().backward()
    of_images = count.get_total_flops()
    with count:
        log_probs(model, row).backward()
    model.zero_grad()
    of_text = count.get_total_flops() - of_images
    return of_images / len(row["image_grid_thw"]), of_text / row["input_ids"].numel()


if __name__ == "__main__":
    main()
