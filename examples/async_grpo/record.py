"""What a run knows for good: an SQLite database in its folder, which all of its processes share.

Rollouts are written when their task is finished, all of a task or none. They wait until the trainer records, together
with the update that it made of them, that they have left: trained, or expired. A trainer that starts anew from the
checkpoint of version v forgets what was recorded after v, so that those rollouts wait again. So whatever process is
killed when, each rollout is in the history of the final weights at most once, and none is lost.
"""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .samples import Sample

TABLES = """
CREATE TABLE IF NOT EXISTS tasks (number INTEGER PRIMARY KEY AUTOINCREMENT, worker INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS waves (worker INTEGER NOT NULL, seconds REAL NOT NULL, tokens INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS rollouts (
    number INTEGER PRIMARY KEY AUTOINCREMENT, task INTEGER NOT NULL, turn INTEGER NOT NULL, version INTEGER NOT NULL,
    tokens BLOB NOT NULL, start INTEGER NOT NULL, logprobs BLOB NOT NULL, advantage REAL NOT NULL, reward REAL NOT NULL,
    gone INTEGER, expired INTEGER NOT NULL DEFAULT 0, UNIQUE (task, turn));
CREATE INDEX IF NOT EXISTS gone ON rollouts (gone);
CREATE TABLE IF NOT EXISTS updates (version INTEGER PRIMARY KEY, facts TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS evaluations (version INTEGER PRIMARY KEY, reward REAL, error REAL, found REAL);
CREATE TABLE IF NOT EXISTS resumed (version INTEGER NOT NULL, undone INTEGER NOT NULL, returned INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS deaths (role TEXT NOT NULL, at REAL NOT NULL);
"""


@dataclasses.dataclass(frozen=True)
class Counts:
    """Rollouts of a run: always `made == waiting + trained + expired`."""

    made: int
    waiting: int
    trained: int
    expired: int


class Record:
    """The database of a run; every thread opens its own."""

    def __init__(self, folder: Path) -> None:
        self._database = sqlite3.connect(folder / "record.sqlite", timeout=60)
        self._database.execute("PRAGMA journal_mode=WAL")  # readers do not wait for writers
        self._database.execute("PRAGMA synchronous=NORMAL")
        self._database.executescript(TABLES)

    def close(self) -> None:
        self._database.close()

    def claim_tasks(self, worker: int, count: int) -> list[int]:
        """Numbers of tasks that nobody has had before."""
        with self._database as database:
            return [
                int(database.execute("INSERT INTO tasks (worker) VALUES (?)", (worker,)).lastrowid or 0)
                for _ in range(count)
            ]

    def add(self, task: int, samples: Sequence[Sample]) -> None:
        """All rollouts of a task, at once."""
        rows = [
            (task, turn, each.version, each.tokens.tobytes(), each.start, each.logprobs.tobytes(), *rest)
            for turn, each in enumerate(samples)
            for rest in [(each.advantage, each.reward)]
        ]
        columns = "task, turn, version, tokens, start, logprobs, advantage, reward"
        with self._database as database:
            database.executemany(f"INSERT INTO rollouts ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)

    def add_wave(self, worker: int, seconds: float, tokens: int) -> None:
        """What a worker needed for rollouts of so many tokens, prompts included."""
        with self._database as database:
            database.execute("INSERT INTO waves VALUES (?, ?, ?)", (worker, seconds, tokens))

    def waiting_after(self, number: int, most: int = 500) -> list[tuple[int, Sample]]:
        """The next waiting rollouts with numbers above this one."""
        return self._samples("number > ? AND gone IS NULL ORDER BY number LIMIT ?", number, most)

    def trained_by(self, version: int) -> list[Sample]:
        """The batch that made a version, in the order of arrival."""
        return [sample for _, sample in self._samples("gone = ? AND NOT expired ORDER BY number", version)]

    def _samples(self, condition: str, *values: int) -> list[tuple[int, Sample]]:
        columns = "number, tokens, start, logprobs, advantage, reward, task, version"
        found = self._database.execute(f"SELECT {columns} FROM rollouts WHERE {condition}", values)
        return [
            (name, Sample(np.frombuffer(tokens, np.int32), start, np.frombuffer(logprobs, np.float32), *rest))
            for name, tokens, start, logprobs, *rest in found
        ]

    def finish_update(
        self, version: int, trained: Iterable[int], expired: Iterable[int], facts: dict[str, Any]
    ) -> None:
        """An update made `version`: what it trained, and what had become too old, has left."""
        left = [(version, 0, number) for number in trained] + [(version, 1, number) for number in expired]
        with self._database as database:
            taken = database.executemany(
                "UPDATE rollouts SET gone = ?, expired = ? WHERE number = ? AND gone IS NULL", left
            ).rowcount
            if taken != len(left):
                raise RuntimeError(f"version {version}: {len(left) - taken} of {len(left)} rollouts had left before")
            database.execute("INSERT INTO updates VALUES (?, ?)", (version, json.dumps(facts)))

    def go_back(self, version: int) -> int:
        """Forget all updates after `version`; how many rollouts wait again."""
        with self._database as database:
            undone = database.execute("DELETE FROM updates WHERE version > ?", (version,)).rowcount
            returned = database.execute(
                "UPDATE rollouts SET gone = NULL, expired = 0 WHERE gone > ?", (version,)
            ).rowcount
            database.execute("DELETE FROM evaluations WHERE version > ?", (version,))
            database.execute("INSERT INTO resumed VALUES (?, ?, ?)", (version, undone, returned))
        return returned

    def count_waiting(self) -> int:
        """Rollouts that have not left."""
        return int(self._database.execute("SELECT COUNT(*) FROM rollouts WHERE gone IS NULL").fetchone()[0])

    def counts(self) -> Counts:
        """All rollouts of the run."""
        made, waiting, expired = self._database.execute(
            "SELECT COUNT(*), COUNT(*) - COUNT(gone), TOTAL(expired) FROM rollouts"
        ).fetchone()
        return Counts(made, waiting, made - waiting - int(expired), int(expired))

    def trained_in(self) -> list[tuple[int, int]]:
        """(rollout, version that was made of it), of all that were trained."""
        found = self._database.execute("SELECT number, gone FROM rollouts WHERE gone NOT NULL AND NOT expired")
        return found.fetchall()

    def updates(self) -> list[dict[str, Any]]:
        """What was recorded of every update, with its version."""
        found = self._database.execute("SELECT version, facts FROM updates ORDER BY version")
        return [{"version": version, **json.loads(facts)} for version, facts in found]

    def latest(self) -> dict[str, Any] | None:
        """The newest update."""
        found = self._database.execute("SELECT version, facts FROM updates ORDER BY version DESC LIMIT 1").fetchone()
        return found and {"version": found[0], **json.loads(found[1])}

    def add_evaluation(self, version: int, reward: float, error: float, found: float) -> None:
        with self._database as database:
            database.execute("INSERT OR REPLACE INTO evaluations VALUES (?, ?, ?, ?)", (version, reward, error, found))

    def evaluations(self) -> list[tuple[int, float, float, float]]:
        """(version, mean reward, its standard error, share of games won) on held-out tasks."""
        return self._database.execute("SELECT * FROM evaluations ORDER BY version").fetchall()

    def add_death(self, role: str, at: float) -> None:
        with self._database as database:
            database.execute("INSERT INTO deaths VALUES (?, ?)", (role, at))

    def rows(self, table: str) -> list[tuple[Any, ...]]:
        """All of "waves", "resumed" or "deaths"."""
        if table not in ("waves", "resumed", "deaths"):
            raise ValueError(f"no table {table!r} to be read; expected 'waves', 'resumed' or 'deaths'")
        return self._database.execute(f"SELECT * FROM {table}").fetchall()
