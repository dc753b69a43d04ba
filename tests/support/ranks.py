"""Training on ranks in tests: rows by rank and step, their loss, a wrapped model, and the one-process reference."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

from dta_compile import distributed
from tests.support.tiny import VOCABULARY, TinyLM

STEPS, LONGEST = 5, 11
ROWS = [(0, 1, 7, 40), (40, 7, 1, 0), (0, 0, 1, 0), (3, 2, 4, 1), (0, 0, 0, 0)]  # per step, by rank
EXACT = {"rtol": 1e-9, "atol": 1e-12}


class Trained(torch.nn.Module):
    """Log-probs `[B, S]` of the next token: a wrapper that is trained as a whole."""

    def __init__(self, model: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.model = TinyLM(layers=1) if model is None else model

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        labels = torch.nn.functional.pad(ids[:, 1:], (0, 1))
        logits = self.model(ids, mask.bool())
        logits = getattr(logits, "logits", logits)
        return logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]


def rows_of(step: int, rank: int) -> dict[str, torch.Tensor]:
    """Return a rank's rows: rollouts of a few prompts, some of them empty."""
    random = torch.Generator().manual_seed(100 * step + rank)
    count = ROWS[step % len(ROWS)][rank]
    lengths = torch.randint(0, LONGEST + 1, (count,), generator=random)
    mask = torch.arange(LONGEST)[None] < lengths[:, None]
    ids = torch.randint(0, VOCABULARY, (count, LONGEST), generator=random)
    ids[:, :5] = torch.arange(5) + torch.randint(0, 2, (count, 1), generator=random)
    advantages = torch.randn(count, generator=random, dtype=torch.float64)
    return {"input_ids": ids * mask, "attention_mask": mask.long(), "advantages": advantages}


def rows_of_all(step: int) -> dict[str, torch.Tensor]:
    parts = [rows_of(step, rank) for rank in range(dist.get_world_size())]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def loss_of(
    forward: torch.nn.Module, batch: dict[str, torch.Tensor], total: torch.Tensor, group: object
) -> torch.Tensor:
    logprobs = forward(batch["input_ids"], batch["attention_mask"])
    counted = batch["attention_mask"].clone()
    if counted.shape[1]:
        counted = torch.nn.functional.pad(counted[:, 1:], (0, 1))  # the last token has no successor
    losses = -logprobs * batch["advantages"][:, None]
    return distributed.token_mean(losses, counted, total=total, group=group)


def predicted(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Count the tokens that have a predecessor."""
    return (batch["attention_mask"].sum(1) - 1).clamp(min=0).sum()


def optimiser_of(model: torch.nn.Module, kind: str) -> torch.optim.Optimizer:
    """Return the optimiser: SGD in mixed precision, where Adam turns rounding of zero gradients into full steps."""
    return torch.optim.SGD(model.parameters(), 0.1) if kind == "mixed" else torch.optim.AdamW(model.parameters(), 1e-2)


@functools.cache
def reference(
    kind: str, steps: int = STEPS, clip: float = 0.0, build: Callable[[], torch.nn.Module] = Trained
) -> dict[str, torch.Tensor]:
    """Return the parameters after training on all rows in one process, eagerly and one sequence at a time."""
    model = build()
    optimiser = optimiser_of(model, kind)
    for step in range(steps):
        batch = rows_of_all(step)
        total = predicted(batch).clamp(min=1)
        for row in range(len(batch["input_ids"])):
            length = int(batch["attention_mask"][row].sum())
            if length < 2:
                continue
            sequence = {name: value[row : row + 1] for name, value in batch.items()}
            logprobs = model(sequence["input_ids"][:, :length], sequence["attention_mask"][:, :length])[:, :-1]
            (-(logprobs * sequence["advantages"][:, None]).sum() / total).backward()
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimiser.step()
        optimiser.zero_grad()
    return model.state_dict()


class Wrapped:
    """Model in a data-parallel wrapper, with its forward callable and a way to defer reduction."""

    def __init__(self, kind: str, model: torch.nn.Module, forward: Any, wrapped: torch.nn.Module) -> None:
        self.kind, self.model, self.forward, self.wrapped = kind, model, forward, wrapped
        self.optimiser = optimiser_of(model, kind)

    @contextlib.contextmanager
    def without_reduction(self) -> Iterator[None]:
        if self.kind == "ddp":
            with self.wrapped.no_sync():
                yield
        else:
            self.wrapped.set_requires_gradient_sync(False)
            yield
            self.wrapped.set_requires_gradient_sync(True)

    def step(self, step: int, scatter: bool = True, micro_batches: int = 1, clip: float = 0.0) -> None:
        batch = rows_of(step, dist.get_rank())
        if scatter:
            batch = distributed.scatter(batch).batch
        elif not len(batch["input_ids"]):  # no model runs without rows, so use an empty one
            batch = {name: value.new_zeros((1, *value.shape[1:])) for name, value in batch.items()}
        total = distributed.global_count(torch.ones(int(predicted(batch))))
        size = -(-len(batch["input_ids"]) // micro_batches) or 1
        for number in range(micro_batches):
            part = {name: value[number * size : (number + 1) * size] for name, value in batch.items()}
            last = number + 1 == micro_batches
            with contextlib.nullcontext() if last else self.without_reduction():
                loss_of(self.forward, part, total, None).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        self.optimiser.step()
        self.optimiser.zero_grad()

    def parameters(self) -> dict[str, torch.Tensor]:
        return get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True))


def assert_equal(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: dict[str, float]
) -> None:
    """Assert equal parameters; only rank 0 has the full ones, but all ranks have the expected ones."""
    if dist.get_rank() == 0:
        assert set(actual) == set(expected), set(actual) ^ set(expected)
    for name, value in actual.items():
        torch.testing.assert_close(value, expected[name], **tolerance, msg=lambda text, name=name: f"{name}: {text}")


def trained(wrapped: Wrapped, **how: Any) -> Wrapped:
    """Train for all steps and return the wrapper."""
    for step in range(STEPS):
        wrapped.step(step, **how)
    return wrapped


def resume(make: Callable[[], Wrapped]) -> None:
    """Train two steps, save a checkpoint, load it into a fresh model, and train three more."""
    first = make()
    for step in range(2):
        first.step(step)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    model, optimiser = get_state_dict(first.model, first.optimiser)
    dcp.save({"model": model, "optimiser": optimiser}, checkpoint_id=folder[0])
    second = make()
    model, optimiser = get_state_dict(second.model, second.optimiser)
    dcp.load({"model": model, "optimiser": optimiser}, checkpoint_id=folder[0])
    set_state_dict(second.model, second.optimiser, model_state_dict=model, optim_state_dict=optimiser)
    for step in range(2, STEPS):
        second.step(step)
    assert_equal(second.parameters(), reference(second.kind), EXACT)
