"""Generated pools of agent rollouts, as large as wanted, that share prefixes as real ones do."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.unsignedinteger]


@dataclasses.dataclass(frozen=True)
class Shape:
    """Of a pool. The defaults give the proportions of the tau^2-bench airline rollouts with reasoning: C 10.2 to 10.4.

    Attributes:
        domains: system prompts; every task has one of them.
        prompt, task, turn, reasoning: mean tokens of a system prompt, of a task's first message, that a turn adds to
            the history, and that the answer of a turn begins with and later turns leave out; as shares of the mean
            length of a rollout.
        trials: attempts at a task.
        turns: mean number of turns of a trial, each of which is a rollout.
        copied: mean number of turns at the beginning of a trial that are those of the one before it.
        vocabulary: number of token ids, which are held in as few bytes as these need.
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
    """`rollouts` sequences of about `mean_tokens` tokens, in random order of arrival, each in memory of its own."""
    shape = shape or Shape()
    random, dtype = np.random.default_rng(seed), np.min_scalar_type(shape.vocabulary - 1)

    def text(mean: float) -> Tokens:
        size = max(1, round(mean_tokens * mean * random.gamma(4.0, 0.25)))
        return random.integers(0, shape.vocabulary, size, dtype)

    prompt_size = max(1, round(mean_tokens * shape.prompt))
    prompts = random.integers(0, shape.vocabulary, (shape.domains, prompt_size), dtype)
    made: list[Tokens] = []
    while len(made) < rollouts:
        prompt = prompts[random.integers(shape.domains)]
        previous = [np.concatenate([prompt, text(shape.task)])]  # the history before every turn of the last trial
        for _ in range(shape.trials):
            copied = min(random.poisson(shape.copied), len(previous) - 1)
            histories = previous[: copied + 1]
            for _ in range(1 + random.poisson(shape.turns - 1)):
                made.append(np.concatenate([histories[-1], text(shape.reasoning)]))
                histories.append(np.concatenate([histories[-1], text(shape.turn)]))
            previous = histories
    return [made[index] for index in random.permutation(len(made))[:rollouts]]
