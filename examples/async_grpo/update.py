"""One update of the policy: GRPO's clipped objective, corrected for stale rollouts, with entropy and KL terms.

Three policies matter. The *behaviour* policy sampled a token, perhaps some versions ago; the *proximal* policy has the
weights with which the batch arrives; the *current* one changes with every gradient step on the batch. As in AReaL's
decoupled objective, clipping keeps the current policy near the proximal one, and a weight that is cut off at
`Settings.most_weight` corrects for the distance of the proximal one from the behaviour:

    w = min(exp(proximal - behaviour), most_weight),  r = exp(current - proximal)
    loss = mean over sampled tokens of  -w * min(r * A, clip(r) * A) + kl * (current - start)^2 / 2 - entropy * H
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import torch
from transformers import Qwen3ForCausalLM

from .policy import Rows, make_values, parts
from .samples import Sample
from .settings import Settings


@dataclasses.dataclass
class Sums:
    """What is summed over the sampled tokens of a batch, for its means."""

    loss: float = 0.0
    kl: float = 0.0
    entropy: float = 0.0
    weight: float = 0.0
    clipped: float = 0.0

    def add(self, **values: torch.Tensor) -> None:
        for name, value in values.items():
            setattr(self, name, getattr(self, name) + float(value.detach().sum()))


class Learner:
    """A model with its optimiser.

    Args:
        start: the supervised start, which the KL term holds on to; None if there is none.
    """

    def __init__(self, settings: Settings, model: Qwen3ForCausalLM, start: Qwen3ForCausalLM | None = None) -> None:
        self.settings, self.model = settings, model
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.0
        )
        if settings.kl:
            start = copy.deepcopy(start if start is not None else model).requires_grad_(False)
        self._values = make_values(model, settings.way, start if settings.kl else None)

    @property
    def compiled(self):
        """What `dta_compile.last_plan` takes; None for the dense ways."""
        return self._values.compiled  # type: ignore[attr-defined]

    def rehearse(self, vocabulary: int) -> None:
        """Compile, on rows of random tokens that share prefixes as turns do, so that no update has to."""
        generator = np.random.default_rng(0)
        for count in (60, 90):
            trunk = generator.integers(4, vocabulary, 100 + 4 * count)
            samples = [
                Sample(np.r_[trunk[: 90 + 4 * turn], 4, 5].astype(np.int32), 94, np.zeros(1, np.float32), 1.0, 0, 0, 0)
                for turn in range(1, count)
            ]
            for rows in parts(samples, self.settings.way):
                self._loss(rows, {}, Sums()).backward()
            self.optimizer.zero_grad()

    def update(self, samples: Sequence[Sample]) -> dict[str, float]:
        """`Settings.epochs` gradient steps on a batch; means over its sampled tokens, of the first step."""
        batch = list(parts(samples, self.settings.way))
        sampled = sum(int(rows.loss_mask.sum()) for rows in batch)
        known: list[dict[str, torch.Tensor]] = [{} for _ in batch]
        first: dict[str, float] = {}
        for _ in range(self.settings.epochs):
            sums = Sums()
            for rows, kept in zip(batch, known, strict=True):
                self._loss(rows, kept, sums).div(sampled).backward()
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.max_norm)
            if not math.isfinite(norm):
                raise FloatingPointError(f"the gradient of a batch of {len(samples)} samples is {norm}")
            self.optimizer.step()
            self.optimizer.zero_grad()
            means = {name: value / sampled for name, value in vars(sums).items()} | {"norm": float(norm)}
            first = first or means
        return first | {"clipped": means["clipped"]}

    def _loss(self, rows: Rows, kept: dict[str, torch.Tensor], sums: Sums) -> torch.Tensor:
        """Sum over the sampled tokens of some rows. `kept`: what later epochs need of the first one."""
        settings, mask = self.settings, rows.loss_mask
        values = self._values(rows, not kept)
        logprobs, entropies = values.logprobs[mask], values.entropies[mask]
        if not kept:
            kept["proximal"] = logprobs.detach()
            if values.start is not None:
                kept["start"] = values.start[mask]
        weight = (kept["proximal"] - rows.behaviour[mask]).exp().clamp(max=settings.most_weight)
        ratio = (logprobs - kept["proximal"]).exp()
        advantage = rows.advantages.expand_as(mask)[mask]
        clipped = ratio.clamp(1 - settings.clip, 1 + settings.clip)
        gain = torch.minimum(ratio * advantage, clipped * advantage)
        loss = -weight * gain - settings.entropy * entropies
        distance = torch.zeros(())
        if "start" in kept:
            # Its gradient is the KL's where the current policy has sampled; unlike that of exp(d) - d - 1, one token
            # that has become improbable cannot outweigh a batch.
            distance = (logprobs - kept["start"]).square() / 2
            loss = loss + settings.kl * distance
        sums.add(loss=loss, kl=distance, entropy=entropies, weight=weight, clipped=(ratio != clipped).float())
        return loss.sum()
