"""Generated pools of agent rollouts, of any size, that share prefixes like real ones."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.unsignedinteger]


@dataclasses.dataclass(frozen=True)
class Shape:
    """Shape of a pool. The defaults resemble tau^2-bench airline rollouts with reasoning: C 10.2 to 10.4.

    Attributes:
        domains: number of system prompts; every task has one of them.
        prompt, task, turn, reasoning: mean tokens, relative to the mean rollout length, of a system prompt, of a task's
            first message, of a turn's addition to the history, and of the start of an answer that later turns drop.
        trials: attempts per task.
        turns: mean turns per trial, each of which is a rollout.
        copied: mean number of initial turns that a trial copies from the previous one.
        vocabulary: number of token ids; determines the dtype.
    """

    domains: int = 4
    prompt: float = 0.66
    task: float = 0.02
    turn: float = 0.042
    reasoning: float = 0.06
    trials: int = 4
    turns: float = 12.0
    copied: float = 0.7
    vocabulary: int = 7925


def generate(rollouts: int, mean_tokens: int, shape: Shape | None = None, seed: int = 0) -> list[Tokens]:
    """Generate `rollouts` sequences of about `mean_tokens` tokens in random order, each in its own memory."""
    shape = shape or Shape()
    random, dtype = np.random.default_rng(seed), np.min_scalar_type(shape.vocabulary - 1)

    def text(mean: float) -> Tokens:
        size = max(1, round(mean_tokens * mean * random.gamma(4.0, 0.25)))
        return random.integers(0, shape.vocabulary, size, dtype)

    prompt_size = max(1, round(mean_tokens * shape.prompt))
    prompts = random.integers(0, shape.vocabulary, (shape.domains, prompt_size), dtype)
    pool: list[Tokens] = []
    while len(pool) < rollouts:
        prompt = prompts[random.integers(shape.domains)]
        previous = [np.concatenate([prompt, text(shape.task)])]  # histories before every turn of the last trial
        for _ in range(shape.trials):
            copied = min(random.poisson(shape.copied), len(previous) - 1)
            histories = previous[: copied + 1]
            for _ in range(1 + random.poisson(shape.turns - 1)):
                pool.append(np.concatenate([histories[-1], text(shape.reasoning)]))
                histories.append(np.concatenate([histories[-1], text(shape.turn)]))
            previous = histories
    return [pool[index] for index in random.permutation(len(pool))[:rollouts]]
