"""`dta demo`: GRPO on bundled real rollouts, eager and dta side by side in one process.

Two copies of a small Qwen3-architecture model start from the same weights and train on the same rollouts. Every
optimiser step runs both ways and compares the gradients, so the final table reports speed and agreement of the same
steps. The first call, on a few rollouts, compiles and is verified against the captured program.
"""

from __future__ import annotations

import copy
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen3Config, Qwen3ForCausalLM

import dta_compile
from dta_compile.data import bundled, load_rollouts, pad_batch, vocab_size
from dta_compile.errors import OptionError

# (input_ids, attention_mask, labels), each [B, S] -> log-probs of the labels and entropies, each [B, S] float32.
TokenValues = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of the demo.

    Attributes:
        turns: assistant turns taken from each trajectory; every turn is one rollout.
        steps: optimiser steps, all on the same rollouts (so that ratios leave 1 and the clip acts).
        micro_batch: rows per eager call, padded to the longest of them (1: no padding).
        chunk_size: most tokens per chunk of the dta side.
        backend: backend of `torch.compile`; "eager" runs the harness without dta.
        threads: CPU threads of torch, None for its default.
        html: path of the plan's HTML page.
    """

    turns: int = 3
    steps: int = 3
    micro_batch: int = 1
    chunk_size: int = 2048
    backend: str = "dta"
    learning_rate: float = 1e-4
    clip: float = 0.2
    entropy_weight: float = 1e-3
    seed: int = 0
    threads: int | None = None
    html: str = "dta_demo.html"


# Rows of the first call, which the self-check also runs densely.
CHECKED_ROWS = 3


# The arrays of a `data.Batch` as tensors, and `old_logprobs` `[B, S]`, the log-probs of the old policy.
Tensors = dict[str, torch.Tensor]


def micro_batches(batch: Tensors, rows: int) -> Iterator[Tensors]:
    """Yield consecutive blocks of rows, each cut to its longest row."""
    for first in range(0, len(batch["input_ids"]), rows):
        part = {name: value[first : first + rows] for name, value in batch.items()}
        width = int(part["attention_mask"].sum(1).max())
        cut = {name: value[:, :width] if value.dim() == 2 else value for name, value in part.items()}
        yield {name: value.contiguous() for name, value in cut.items()}  # one graph for all parts


def build_model(vocabulary: int, seed: int) -> torch.nn.Module:
    """Build a Qwen3 of 4 layers and hidden size 256 with random float32 weights, in training mode."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return Qwen3ForCausalLM(config).train()


def token_values(model: torch.nn.Module) -> TokenValues:
    """Return the function to compile: it yields values per token, so that no `[B, S, V]` tensor leaves it."""

    def values(
        input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = model(input_ids, attention_mask=attention_mask).logits.float().log_softmax(-1)
        entropies = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(-1, labels[..., None])[..., 0], entropies

    return values


def grpo_loss(
    logprobs: torch.Tensor, entropies: torch.Tensor, batch: Tensors, total: int, settings: Settings
) -> torch.Tensor:
    """Clipped policy-gradient loss with an entropy bonus: the sum over trained tokens, divided by `total` of them."""
    ratio = (logprobs - batch["old_logprobs"]).exp()
    advantages = batch["advantages"][:, None]
    clipped = ratio.clamp(1 - settings.clip, 1 + settings.clip)
    objective = torch.minimum(ratio * advantages, clipped * advantages) + settings.entropy_weight * entropies
    return -torch.where(batch["loss_mask"], objective, 0.0).sum() / total


class Trainer:
    """One side of the comparison: a model, its optimiser, and token values computed `rows` rows at a time."""

    def __init__(self, model: torch.nn.Module, values: TokenValues, rows: int, settings: Settings) -> None:
        self.model, self.values, self.rows, self.settings = model, values, rows, settings
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
        self.seconds: list[float] = []
        self.loss = float("nan")

    @torch.no_grad()
    def score(self, batch: Tensors) -> torch.Tensor:
        """Return the log-probs `[B, S]` under the current weights; 0 on padding."""
        scores = torch.zeros(batch["labels"].shape)
        for first, part in enumerate(micro_batches(batch, self.rows)):
            values, _ = self.values(part["input_ids"], part["attention_mask"], part["labels"])
            scores[first * self.rows :][: self.rows, : values.shape[1]] = values
        return scores * batch["attention_mask"]

    def backward(self, batch: Tensors) -> None:
        """Accumulate the gradients of the loss over the batch; record the loss and the time in seconds."""
        started = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        total, loss = int(batch["loss_mask"].sum()), 0.0
        for part in micro_batches(batch, self.rows):
            logprobs, entropies = self.values(part["input_ids"], part["attention_mask"], part["labels"])
            partial = grpo_loss(logprobs, entropies, part, total, self.settings)
            partial.backward()
            loss += partial.item()
        self.loss = loss
        self.seconds.append(time.perf_counter() - started)


def gradient_difference(reference: torch.nn.Module, other: torch.nn.Module) -> float:
    """Return the largest max |difference| / max |reference gradient| over all parameters."""
    worst = 0.0
    for left, right in zip(reference.parameters(), other.parameters(), strict=True):
        assert left.grad is not None and right.grad is not None
        worst = max(worst, ((left.grad - right.grad).abs().max() / left.grad.abs().max()).item())
    return worst


@dataclasses.dataclass(frozen=True)
class Result:
    """Measurements of `run`; seconds are per optimiser step, without the first call's compilation.

    Attributes:
        self_check: outcome of comparing the first call with the captured program.
        plan: plan of all rollouts at default rates; both are None for backends other than dta.
    """

    rollouts: int
    tokens: int
    tree_tokens: int | None
    eager_seconds: list[float]
    compiled_seconds: list[float]
    first_call_seconds: float
    gradient_difference: float
    eager_loss: float
    compiled_loss: float
    self_check: str | None
    plan: dta_compile.Plan | None

    @property
    def speedup(self) -> float:
        """Ratio of median eager time to median compiled time."""
        return statistics.median(self.eager_seconds) / statistics.median(self.compiled_seconds)


def run(settings: Settings, console: Console) -> Result:
    """Train both ways in alternating order and print one line per step."""
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    rollouts = [rollout for rollout in load_rollouts(bundled(), dense=True) if rollout.turn < settings.turns]
    batch = {name: torch.from_numpy(array) for name, array in vars(pad_batch(rollouts)).items()}
    model = build_model(vocab_size(bundled(), multiple=64), settings.seed)
    twin = copy.deepcopy(model)
    is_dta = settings.backend == "dta"
    options: dict[str, Any] | None = {"chunk_size": settings.chunk_size, "verify": "first"} if is_dta else None
    compiled = torch.compile(token_values(twin), backend=settings.backend, options=options)
    eager = Trainer(model, token_values(model), settings.micro_batch, settings)
    ours = Trainer(twin, compiled, len(rollouts), settings)

    started = time.perf_counter()
    batch["old_logprobs"] = eager.score(batch)
    console.print(f"log-probs of the old policy, eager: {time.perf_counter() - started:.1f} s")
    ours.backward(next(micro_batches(batch, CHECKED_ROWS)))
    first_call = ours.seconds.pop()
    self_check = dta_compile.last_plan(compiled).estimates.self_check if is_dta else None
    console.print(f"first call, {CHECKED_ROWS} rollouts, compiles: {first_call:.1f} s")
    differences = []
    for step in range(settings.steps):
        for trainer in (eager, ours) if step % 2 == 0 else (ours, eager):
            trainer.backward(batch)
        differences.append(gradient_difference(model, twin))
        seconds = f"eager {eager.seconds[-1]:.2f} s, {settings.backend} {ours.seconds[-1]:.2f} s"
        console.print(f"step {step + 1} of {settings.steps}: {seconds}, gradients within {differences[-1]:.1e}")
        eager.optimizer.step()
        ours.optimizer.step()

    plan = (
        dta_compile.plan([rollout.tokens for rollout in rollouts], chunk_size=settings.chunk_size) if is_dta else None
    )
    return Result(
        rollouts=len(rollouts),
        tokens=int(np.sum([len(rollout) for rollout in rollouts])),
        tree_tokens=plan.stats.tree_tokens if plan else None,
        eager_seconds=eager.seconds,
        compiled_seconds=ours.seconds,
        first_call_seconds=first_call,
        gradient_difference=max(differences),
        eager_loss=eager.loss,
        compiled_loss=ours.loss,
        self_check=self_check,
        plan=plan,
    )


def report(result: Result, settings: Settings, console: Console) -> None:
    """Print the table, the plan, and the next steps for the user."""
    rows = "one rollout at a time" if settings.micro_batch == 1 else f"{settings.micro_batch} padded rollouts at a time"
    table = Table(title=f"GRPO, {result.rollouts} rollouts, {settings.steps} optimiser steps, CPU float32")
    table.add_column("")
    table.add_column(f"eager\n{rows}", justify="right")
    table.add_column(f"torch.compile\nbackend={settings.backend!r}", justify="right")
    tree = "-" if result.tree_tokens is None else f"{result.tree_tokens:,}"
    table.add_row("tokens, tree tokens", f"{result.tokens:,}", tree)
    if result.tree_tokens:
        table.add_row("compression C", "1.00", f"{result.tokens / result.tree_tokens:.2f}")
    medians = [statistics.median(seconds) for seconds in (result.eager_seconds, result.compiled_seconds)]
    table.add_row("seconds per step (median)", *(f"{median:.2f}" for median in medians))
    table.add_row("speed-up", "1.00x", f"{result.speedup:.2f}x", style="bold")
    table.add_row("first call, with compilation", "", f"{result.first_call_seconds:.2f} s")
    table.add_row("largest gradient difference", "reference", f"{result.gradient_difference:.1e}")
    table.add_row("loss at the last step", f"{result.eager_loss:.6f}", f"{result.compiled_loss:.6f}")
    console.print(table)
    console.print(f"torch {torch.__version__}, {torch.get_num_threads()} threads", style="dim")
    if result.plan is None:
        return
    console.print(f"\nself-check of the first call: {result.self_check}", highlight=False, soft_wrap=True)
    console.print("\nThe plan of these rollouts, print(dta_compile.plan(token_ids)):")
    console.print(str(result.plan), markup=False, highlight=False, soft_wrap=True)
    result.plan.to_html(settings.html, title=f"dta demo, {result.rollouts} rollouts")
    console.print(f"\nWhat to do next:\n  {'open ' + settings.html:<36} the page of this plan", highlight=False)
    console.print(f"  {'dta plan YOUR_FILE --html tree.html':<36} what rollouts of your own share", highlight=False)
    console.print(f"  {'README.md, In your trainer':<36} the line that your trainer needs", highlight=False)


def main(settings: Settings, console: Console) -> int:
    """Run the demo and print its report; return 1 if the two sides disagree, else 0.

    Raises:
        OptionError: torch has no such backend.
    """
    known = torch.compiler.list_backends(exclude_tags=())
    if settings.backend not in known:
        raise OptionError("no such backend", expected=", ".join(known), got=repr(settings.backend))
    result = run(settings, console)
    report(result, settings, console)
    agree = result.gradient_difference < 1e-2 and abs(result.eager_loss - result.compiled_loss) < 1e-4
    if not agree:
        console.print("The two ways disagree: this is a bug.", style="bold red")
    return 0 if agree else 1
