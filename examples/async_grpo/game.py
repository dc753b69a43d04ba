"""The environment: TextArena's GuessTheNumber, its tasks, and players that talk to it in words."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import random
import sys

import numpy as np

from .settings import Settings

HELD_OUT = 2_000_000  # seeds of held-out tasks start here, those of training tasks at 0


def require_environment() -> None:
    """Raise a `ValueError` that says what to install, unless TextArena is there."""
    if importlib.util.find_spec("textarena") is None:
        version = ".".join(map(str, sys.version_info[:2]))
        raise ValueError(
            f"TextArena, whose game is played, is not installed for Python {version} ({sys.executable}): "
            'pip install -e ".[rl]", with Python 3.10 to 3.13'
        )


@dataclasses.dataclass(frozen=True)
class Task:
    """Guess a number from `low` to `high`, which `seed` draws."""

    low: int
    high: int
    guesses: int
    seed: int


def draw_task(settings: Settings, number: int, held_out: bool = False) -> Task:
    """Task number `number` of this seed. Every fifth range (low + high) is only ever used for held-out tasks.

    The settings were chosen with other ranges held out (those whose low + high is a multiple of 5).
    """
    seed = number + HELD_OUT if held_out else number
    generator = np.random.default_rng((settings.seed if not held_out else 0, seed))
    while True:
        low = int(generator.integers(1, settings.lowest + 1))
        high = low + int(generator.integers(settings.fewest, settings.most + 1)) - 1
        if ((low + high) % 5 == 1) == held_out:
            return Task(low, high, settings.guesses, int(generator.integers(2**31)))


class Game:
    """One game of a player: `say` moves until `done`. What the player reads is in `unread`.

    Attributes:
        unread: what the environment has said since the player's latest turn.
        reward: the environment's own, 0 to 1, when the game is over. 0 if the environment itself raised an error, which
            ends the game: 0.7.4 does at a last move without a number in brackets.
    """

    def __init__(self, task: Task) -> None:
        from textarena.envs.GuessTheNumber.env import GuessTheNumberEnv

        # The environment allows one guess more than it announces.
        self._env = GuessTheNumberEnv(min_number=task.low, max_number=task.high, max_turns=task.guesses - 1)
        state = random.getstate()  # the environment seeds Python's own generator
        self._env.reset(num_players=1, seed=task.seed)
        random.setstate(state)
        self.task, self.done, self.reward, self.turns = task, False, 0.0, 0
        self.unread = self._heard()

    def say(self, text: str) -> None:
        """Make a move."""
        self.turns += 1
        try:
            self.done, _ = self._env.step(text)
        except Exception:  # whatever it is, it must not take the other games of the batch with it
            self.done = True
            return
        if self.done:
            rewards, _ = self._env.close()
            self.reward = float(rewards[0])
        elif self.turns >= 2 * self.task.guesses:  # moves that are not allowed take no guess
            self.done = True
        else:
            self.unread = self._heard()

    def fork(self) -> Game:
        """The same game once more, to go on otherwise."""
        return copy.deepcopy(self)

    def _heard(self) -> str:
        _, messages = self._env.get_observation()
        return "\n".join(text for speaker, text, _ in messages if speaker == -1)


class ClumsyPlayer:
    """Whom the model imitates before it learns by itself.

    It says what it knows and what it guesses: `>8 <16 [12]`. It knows the rules and keeps its knowledge in order, but
    half of the time (`attention`) it guesses as if it knew nothing.
    """

    def __init__(self, generator: np.random.Generator, attention: float = 0.5) -> None:
        self._generator, self._attention = generator, attention

    def play(self, task: Task) -> list[tuple[str, str]]:
        """A whole game as (what the player read, what it said) by turn."""
        game, turns, guessed = Game(task), [], set()
        above, below, guess = task.low - 1, task.high + 1, 0
        while not game.done:
            heard = game.unread
            if turns:
                above, below = (max(above, guess), below) if "higher" in heard else (above, min(below, guess))
            attentive = self._generator.random() < self._attention
            numbers = range(above + 1, below) if attentive else range(task.low, task.high + 1)
            guess = int(self._generator.choice([number for number in numbers if number not in guessed]))
            guessed.add(guess)
            turns.append((heard, f">{above} <{below} [{guess}]"))
            game.say(turns[-1][1])
        return turns
