"""From games to samples: turns form a tree, and every turn is a sample with the advantage of having been said."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from statistics import fmean, pstdev

import numpy as np


@dataclasses.dataclass(eq=False)
class Turn:
    """A turn of one or, before a fork, of several episodes.

    Attributes:
        parent: the turn before; None for a first one.
        tokens: of the whole game up to the end of the turn.
        start: where the turn's own tokens begin.
        logprobs: of the turn's sampled tokens.
        rewards: of all episodes that went through it.
    """

    parent: Turn | None
    tokens: list[int]
    start: int
    logprobs: list[float]
    rewards: list[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, eq=False)
class Sample:
    """One turn with all that came before it: what is trained.

    Attributes:
        tokens: `[n]` int32.
        start: where the turn begins; `tokens[start : start + len(logprobs)]` were sampled.
        logprobs: float32, of the policy that sampled them.
        advantage: see `advantages`.
        reward: mean of the episodes that went through the turn.
        task, turn: numbers; a sample is known by both and the worker's name for it.
        version: of the policy that sampled it.
    """

    tokens: np.ndarray
    start: int
    logprobs: np.ndarray
    advantage: float
    reward: float
    task: int
    version: int


def finish(last: Turn, reward: float) -> None:
    """Credit an episode's reward to all of its turns."""
    turn: Turn | None = last
    while turn is not None:
        turn.rewards.append(reward)
        turn = turn.parent


def advantages(turns: Sequence[Turn]) -> dict[Turn, float]:
    """GRPO on a tree: a turn is compared with the other turns that were tried in the same state of the game.

    A turn's value is the mean reward of the episodes that went through it; its advantage is the value minus the mean
    over the turns after the same parent, divided by the standard deviation of the task's rewards. A turn that was tried
    alone has its parent's. Without forks that is GRPO's group of whole episodes.

    Args:
        turns: all of a task, parents before their children.
    """
    siblings: dict[Turn | None, list[Turn]] = {}
    for turn in turns:
        siblings.setdefault(turn.parent, []).append(turn)
    rewards = [reward for turn in siblings.get(None, ()) for reward in turn.rewards]
    scale = pstdev(rewards) + 1e-4 if rewards else 1.0
    found: dict[Turn, float] = {}
    for turn in turns:
        group = siblings[turn.parent]
        if len(group) == 1 and turn.parent is not None:
            found[turn] = found[turn.parent]
        else:
            found[turn] = (fmean(turn.rewards) - fmean(fmean(each.rewards) for each in group)) / scale
    return found


def samples_of(turns: Sequence[Turn], task: int, version: int) -> list[Sample]:
    """Every turn of a task as a sample."""
    by_turn = advantages(turns)
    return [
        Sample(
            tokens=np.asarray(turn.tokens, np.int32),
            start=turn.start,
            logprobs=np.asarray(turn.logprobs, np.float32),
            advantage=by_turn[turn],
            reward=fmean(turn.rewards),
            task=task,
            version=version,
        )
        for turn in turns
    ]


def leaf_rewards(turns: Iterable[Turn]) -> list[float]:
    """Rewards of the episodes of a task."""
    return [reward for turn in turns if turn.parent is None for reward in turn.rewards]
