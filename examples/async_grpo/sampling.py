"""Games played by the model: many at once, with a KV cache that starts from shared prompts and is copied at forks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from tokenizers import Tokenizer
from transformers import DynamicCache, Qwen3ForCausalLM

from .game import Game, Task
from .samples import Turn, finish
from .text import ASSISTANT, END, PAD, read_tokens, said_text


@dataclasses.dataclass(eq=False)
class Episode:
    """A game in progress.

    Attributes:
        task: its number among those that are played together.
        tokens: of the game so far; the cache has all but the last `len(tokens) - fed` of them.
        last: the latest turn.
        fork_at: the turn before which it forks; 0: never.
    """

    task: int
    game: Game
    tokens: list[int]
    fed: int = 0
    last: Turn | None = None
    fork_at: int = 0

    def fork(self) -> Episode:
        return dataclasses.replace(self, game=self.game.fork(), tokens=list(self.tokens), fork_at=0)


class Rows:
    """Episodes that are sampled side by side: row i of the cache belongs to `episodes[i]`.

    Rows grow at different speeds. A row that has nothing to add gets a hole, which the mask hides for ever; positions
    count a row's own tokens.
    """

    def __init__(self, model: Qwen3ForCausalLM, episodes: Sequence[Episode]) -> None:
        self._model, self.episodes = model, list(episodes)
        self._cache = DynamicCache()
        self._mask = torch.zeros((len(self.episodes), 0), dtype=torch.int64)

    def take(self, rows: Sequence[int], episodes: Sequence[Episode]) -> None:
        """Go on with these rows, which may be named any number of times, as those of `episodes`."""
        index = torch.tensor(rows, dtype=torch.int64)
        if self._mask.shape[1]:
            self._cache.batch_select_indices(index)
        self._mask, self.episodes = self._mask[index], list(episodes)

    def feed(self) -> torch.Tensor:
        """Run what is new of every row; log-probs `[rows, V]` of what comes after it."""
        new = [episode.tokens[episode.fed :] for episode in self.episodes]
        width = max(map(len, new))
        ids, mask = torch.full((len(new), width), PAD), torch.zeros((len(new), width), dtype=torch.int64)
        for row, tokens in enumerate(new):
            if tokens:
                ids[row, width - len(tokens) :] = torch.tensor(tokens)
                mask[row, width - len(tokens) :] = 1
                self.episodes[row].fed += len(tokens)
        before = self._mask.sum(1, keepdim=True)
        positions = (before + mask.cumsum(1) - 1).clamp(min=0)
        self._mask = torch.cat([self._mask, mask], dim=1)
        output = self._model(
            ids,
            attention_mask=self._mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1].float().log_softmax(-1)


class Player:
    """Plays games with a model.

    Args:
        generator: of all that is drawn.
        action_tokens: most tokens of a turn; what is longer is cut.
    """

    def __init__(
        self, model: Qwen3ForCausalLM, tokenizer: Tokenizer, generator: torch.Generator, action_tokens: int
    ) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._generator, self._most = generator, action_tokens

    @torch.inference_mode()
    def play(self, tasks: Sequence[Task], roots: int = 1, branches: int = 1) -> list[list[Turn]]:
        """Play every task `roots` times; each of these episodes forks into `branches` once. Turns of every task."""
        rows = self._start(tasks, roots, branches)
        turns: list[list[Turn]] = [[] for _ in tasks]
        number = 0
        while rows.episodes:
            number += 1
            self._fork(rows, number, branches)
            for episode, turn in zip(rows.episodes, self._say(rows), strict=True):
                turns[episode.task].append(turn)
                self._answer(episode, turn)
            alive = [row for row, episode in enumerate(rows.episodes) if not episode.game.done]
            if len(alive) < len(rows.episodes):
                rows.take(alive, [rows.episodes[row] for row in alive])
        return turns

    def _start(self, tasks: Sequence[Task], roots: int, branches: int) -> Rows:
        """Every prompt is run once, then its cache is copied for all episodes of the task."""
        games = [Game(task) for task in tasks]
        prompts = [
            Episode(number, game, read_tokens(self._tokenizer, game.unread)[:-1]) for number, game in enumerate(games)
        ]
        rows = Rows(self._model, prompts)
        rows.feed()
        for prompt in prompts:  # each episode runs the last token of the prompt itself
            prompt.tokens.append(ASSISTANT)
        index = [row for row in range(len(tasks)) for _ in range(roots)]
        episodes = [prompts[row].fork() for row in index]
        if branches > 1:
            for episode in episodes:
                last = episode.game.task.guesses
                episode.fork_at = int(torch.randint(2, last + 1, (), generator=self._generator))
        rows.take(index, episodes)
        return rows

    def _fork(self, rows: Rows, number: int, branches: int) -> None:
        index, episodes = [], []
        for row, episode in enumerate(rows.episodes):
            copies = branches - 1 if episode.fork_at == number else 0
            index += [row] * (1 + copies)
            episodes += [episode, *(episode.fork() for _ in range(copies))]
        if len(index) > len(rows.episodes):
            rows.take(index, episodes)

    def _say(self, rows: Rows) -> list[Turn]:
        """One turn of every episode, sampled token by token."""
        turns = [Turn(episode.last, episode.tokens, len(episode.tokens), []) for episode in rows.episodes]
        speaking = set(range(len(turns)))
        while speaking:
            logprobs = rows.feed()
            picks = torch.multinomial(logprobs.exp(), 1, generator=self._generator)
            chosen = logprobs.gather(1, picks)[:, 0].tolist()
            for row, token in enumerate(picks[:, 0].tolist()):
                if row not in speaking:
                    continue
                rows.episodes[row].tokens.append(token)
                turns[row].logprobs.append(chosen[row])
                if token == END or len(turns[row].logprobs) == self._most:
                    speaking.remove(row)
        for turn in turns:
            turn.tokens = list(turn.tokens)
        return turns

    def _answer(self, episode: Episode, turn: Turn) -> None:
        """Let the environment answer."""
        episode.last = turn
        episode.game.say(said_text(self._tokenizer, turn.tokens[turn.start :]))
        if episode.game.done:
            finish(turn, episode.game.reward)
            return
        if episode.tokens[-1] != END:
            episode.tokens.append(END)
        episode.tokens += read_tokens(self._tokenizer, episode.game.unread)
