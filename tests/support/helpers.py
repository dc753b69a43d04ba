"""Batches of sequences with shared prefixes, the one-sequence-at-a-time reference, and comparison with it.

    batch = make_batch(rollouts(vocabulary=96), padding="right")
    expected = reference(model, batch, loss)            # every row alone, without padding, in eager mode
    actual = measure(compiled, model, batch, loss)      # the whole batch through torch.compile
    assert_equal(actual, expected, EXACT)

`loss` takes the outputs `[B, S, ...]` of the whole batch in both cases (zero at padding), so it may mix sequences.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

EXACT = 1e-9  # float64 throughout
FLOAT32_ISLANDS = 2e-6  # float64 models that compute norms in float32, like most of transformers
# A gradient that is zero except for rounding (the key bias of a softmax) is compared on the scale of the others.
NOISE_FLOOR = 1e-6


@dataclasses.dataclass(frozen=True)
class Batch:
    """Sequences as a padded rectangle.

    Attributes:
        ids: `[B, S]` token ids; padding is 0.
        mask: `[B, S]` int64, 1 at real tokens; None without padding.
        extras: further `[B, S]` tensors (labels, advantages), cut like the ids.
    """

    ids: torch.Tensor
    mask: torch.Tensor | None = None
    extras: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)

    @property
    def valid(self) -> torch.Tensor:
        """Mask of real tokens, `[B, S]` bool."""
        return torch.ones_like(self.ids, dtype=torch.bool) if self.mask is None else self.mask.bool()

    @property
    def positions(self) -> torch.Tensor:
        """Position ids `[B, S]` that count real tokens from 0."""
        return (self.valid.long().cumsum(1) - 1).clamp(min=0)

    def row(self, index: int) -> Batch:
        """Return one sequence alone, without padding: `[1, length]`."""
        real = self.valid[index]
        return Batch(self.ids[index, real][None], None, {k: v[index, real][None] for k, v in self.extras.items()})

    def to(self, device: torch.device) -> Batch:
        """Move the batch to another device."""
        mask = None if self.mask is None else self.mask.to(device)
        return Batch(self.ids.to(device), mask, {name: value.to(device) for name, value in self.extras.items()})

    def with_extras(self, **extras: torch.Tensor) -> Batch:
        return dataclasses.replace(self, extras={**self.extras, **extras})


def rollouts(vocabulary: int = 96, seed: int = 0, length: int = 17) -> list[list[int]]:
    """Draw sequences that share prefixes in every way: forks, a duplicate, prefixes, one token, no sharing."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> list[int]:
        return torch.randint(1, vocabulary, (count,), generator=generator).tolist()

    first = tokens(length)
    fork = first[: length // 2] + tokens(length // 3)
    return [
        first,
        fork,
        first[: length - 4] + tokens(4),  # forks late
        fork[:-2] + tokens(3),  # forks from a fork
        list(first),  # a duplicate
        first[: length // 3],  # a prefix of others
        first[:1],  # one token
        tokens(length // 2),  # shares nothing
    ]


def make_batch(sequences: Sequence[Sequence[int]], padding: str = "right") -> Batch:
    """Build a rectangle of sequences, padded "right" or "left", or ("none") cut to the shortest length."""
    if padding == "none":
        shortest = min(map(len, sequences))
        return Batch(torch.tensor([list(sequence[:shortest]) for sequence in sequences]))
    longest = max(map(len, sequences))
    ids = torch.zeros(len(sequences), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, sequence in enumerate(sequences):
        columns = slice(0, len(sequence)) if padding == "right" else slice(longest - len(sequence), longest)
        ids[i, columns] = torch.tensor(sequence, dtype=torch.int64)
        mask[i, columns] = 1
    return Batch(ids, mask)


Forward = Callable[[Any, Batch], torch.Tensor]
Loss = Callable[[torch.Tensor], torch.Tensor]


def logits(model: Any, batch: Batch) -> torch.Tensor:
    """Call a transformers model with ids and mask only."""
    return model(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False).logits


def logits_at_positions(model: Any, batch: Batch) -> torch.Tensor:
    """Call a transformers model with position ids as well, which left padding needs."""
    return model(input_ids=batch.ids, attention_mask=batch.mask, position_ids=batch.positions, use_cache=False).logits


def ids_only(model: Any, batch: Batch) -> torch.Tensor:
    """Call a hand-written module."""
    return model(batch.ids)


@dataclasses.dataclass
class Measurement:
    """Outputs `[B, S, ...]` (zero at padding) and the gradient of every parameter that received one."""

    outputs: torch.Tensor
    gradients: dict[str, torch.Tensor]


def random_loss(batch: Batch, features: int) -> Loss:
    """Return a loss that weights every output differently, so that no errors cancel."""
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(*batch.ids.shape, features, generator=generator, dtype=torch.float64)
    return lambda outputs: (outputs * weights.to(outputs)).sum()


def reference(model: torch.nn.Module, batch: Batch, loss: Loss, forward: Forward = logits) -> Measurement:
    """Run the eager model on every sequence alone, unpadded, in one autograd graph: the definition of correct."""
    rows = [forward(model, batch.row(i))[0] if batch.valid[i].any() else None for i in range(len(batch.ids))]
    some = next(row for row in rows if row is not None)
    outputs = torch.zeros((*batch.ids.shape, *some.shape[1:]), dtype=some.dtype, device=some.device)
    indices = [torch.nonzero(batch.valid[i])[:, 0] for i in range(len(rows))]
    for i, row in enumerate(rows):
        if row is not None:
            outputs = outputs.index_put((torch.full_like(indices[i], i), indices[i]), row)
    return _differentiate(model, outputs, loss)


def measure(compiled: Any, model: torch.nn.Module, batch: Batch, loss: Loss, forward: Forward = logits) -> Measurement:
    """Run a compiled callable on the whole batch; its parameters are those of `model`."""
    outputs = forward(compiled, batch)
    keep = batch.valid.reshape(*batch.valid.shape, *(1,) * (outputs.dim() - 2))
    return _differentiate(model, torch.where(keep, outputs, outputs.new_zeros(())), loss)


def _differentiate(model: torch.nn.Module, outputs: torch.Tensor, loss: Loss) -> Measurement:
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(loss(outputs), list(named.values()), allow_unused=True)
    gradients = {name: grad for name, grad in zip(named, grads, strict=True) if grad is not None}
    return Measurement(outputs.detach(), gradients)


def errors(actual: Measurement, expected: Measurement) -> dict[str, float]:
    """Return the largest difference of the outputs and of every gradient, each relative to its largest entry."""
    assert actual.gradients.keys() == expected.gradients.keys(), (
        f"parameters with a gradient on one side only: {sorted(actual.gradients.keys() ^ expected.gradients.keys())}"
    )
    scale = max((float(g.abs().max()) for g in expected.gradients.values()), default=0.0)
    relative = {"outputs": _relative(actual.outputs, expected.outputs, 0.0)}
    for name, grad in expected.gradients.items():
        relative[name] = _relative(actual.gradients[name], grad, scale * NOISE_FLOOR)
    return relative


def _relative(actual: torch.Tensor, expected: torch.Tensor, floor: float) -> float:
    actual, expected = actual.double().cpu(), expected.double().cpu()
    size = max(float(expected.abs().max()), floor, 1e-300)
    return float((actual - expected).abs().max()) / size


def distances(actual: Measurement, expected: Measurement) -> dict[str, float]:
    """Return the L2 distance of the outputs and of every gradient, each relative to its norm; measures rounding."""
    pairs = {"outputs": (actual.outputs, expected.outputs)}
    pairs |= {name: (actual.gradients[name], grad) for name, grad in expected.gradients.items()}
    wide = {name: (got.double().cpu(), want.double().cpu()) for name, (got, want) in pairs.items()}
    return {name: float((got - want).norm() / want.norm()) for name, (got, want) in wide.items()}


def rounds_worse(actual: Measurement, eager: Measurement, exact: Measurement) -> dict[str, tuple[float, float]]:
    """Return values whose distance to `exact` is over twice that of `eager`, which has the precision of `actual`."""
    ours, theirs = distances(actual, exact), distances(eager, exact)
    return {name: (ours[name], theirs[name]) for name in ours if not ours[name] <= 2 * theirs[name]}


def assert_equal(actual: Measurement, expected: Measurement, tolerance: float) -> None:
    """Assert that outputs and every gradient agree within `tolerance`, each relative to its largest entry."""
    wrong = {name: error for name, error in errors(actual, expected).items() if not error <= tolerance}
    assert not wrong, f"beyond {tolerance:g}: " + ", ".join(f"{name} {error:.2g}" for name, error in wrong.items())


def assert_within_rounding(actual: Measurement, eager: Measurement, exact: Measurement) -> None:
    """Assert that each error against float64 is at most twice that of eager at the same precision."""
    worse = rounds_worse(actual, eager, exact)
    assert not worse, worse
