"""A run: starts its processes, starts anew those that die, shows progress, and ends all of them together."""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from . import evaluator, trainer, warmup, worker
from .engine import Engine, Handle, make_engine
from .record import Record
from .roles import STOP
from .settings import Settings

PAUSE = 0.1  # seconds between two looks at the processes
MOST_DEATHS = 3  # of one process without an update in between
GRACE = 120.0  # seconds that processes have to end


class RunFailed(RuntimeError):
    """A process died again and again."""


class Run:
    """The processes of a run in its folder, which may hold an earlier part of it."""

    def __init__(self, folder: Path, settings: Settings, engine: Engine, evaluate: bool = True) -> None:
        self.folder, self.settings, self._engine = folder, settings, engine
        self._roles: dict[str, tuple[Callable[..., None], tuple[Any, ...]]] = {"trainer": (trainer.main, (folder,))}
        for index in range(settings.workers):
            self._roles[f"worker-{index}"] = worker.main, (folder, index)
        if evaluate:
            self._roles["evaluator"] = evaluator.main, (folder,)
        self._handles: dict[str, Handle] = {}
        self._deaths: dict[str, int] = {}
        self._record = Record(folder)
        self._latest, self._interrupted = 0, False

    def go(self, tick: Callable[[Run], None] = lambda run: None) -> None:
        """Until the trainer has finished. An interruption stops the run, which can then be resumed.

        To be called in the main thread, as are all functions that handle interruptions.

        Raises:
            RunFailed: a process died `MOST_DEATHS` times while the policy did not advance.
        """
        before = signal.signal(signal.SIGINT, self._interrupt)  # also where Ray has a handler of its own
        try:
            for name in self._roles:
                self._start(name)
            while (ended := self._handles["trainer"].ended()) is not True:
                if ended is False:
                    self._restart("trainer")
                for name, handle in self._handles.items():
                    if name != "trainer" and handle.ended() is not None:
                        self._restart(name)
                tick(self)
                time.sleep(PAUSE)
                if self._interrupted:
                    raise KeyboardInterrupt
        finally:
            self._stop()
            signal.signal(signal.SIGINT, before)

    def _interrupt(self, number: int, frame: Any) -> None:
        """The first time, end all processes in order; the second time, at once."""
        if self._interrupted:
            raise KeyboardInterrupt
        self._interrupted = True

    def latest(self) -> dict[str, Any] | None:
        """The facts of the newest update."""
        return self._record.latest()

    def _start(self, name: str) -> None:
        function, arguments = self._roles[name]
        self._handles[name] = self._engine.start(function, *arguments)

    def _restart(self, name: str) -> None:
        """Start a process anew; its deaths count anew after every update."""
        update = self.latest()
        version = update["version"] if update else 0
        if version > self._latest:
            self._latest, self._deaths = version, {}
        self._deaths[name] = self._deaths.get(name, 0) + 1
        self._record.add_death(name, time.time())
        if self._deaths[name] > MOST_DEATHS:
            raise RunFailed(
                f"{name} died {MOST_DEATHS + 1} times and no update was made in between (version {version}); its error"
                f" is above. The run in {self.folder} can be resumed"
            )
        self._start(name)

    def _stop(self) -> None:
        """End all processes; the trainer writes a checkpoint first."""
        (self.folder / STOP).touch()
        deadline = time.monotonic() + GRACE
        try:
            while any(handle.ended() is None for handle in self._handles.values()) and time.monotonic() < deadline:
                time.sleep(PAUSE)
        finally:
            for handle in self._handles.values():
                if handle.ended() is None:
                    handle.kill()
            self._record.close()


def prepare(folder: Path, settings: Settings) -> Settings:
    """The folder of a new run, or of an earlier one that goes on: with its settings, but for where it ends.

    Raises:
        ValueError: the folder holds a run with other settings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "settings.json").exists():
        found = Settings.load(folder)
        other = {
            field.name: getattr(found, field.name)
            for field in dataclasses.fields(Settings)
            if getattr(found, field.name) != getattr(settings, field.name) and field.name not in ("updates", "seconds")
        }
        if other:
            raise ValueError(f"{folder} holds a run with other settings: {other}; take another folder, or those")
    settings.save(folder)
    (folder / STOP).unlink(missing_ok=True)
    return settings


def run(folder: Path, settings: Settings, engine: str = "auto", evaluate: bool = True, quiet: bool = False) -> None:
    """Train in a folder, from its start or from where it stands."""
    console = Console(quiet=quiet)
    prepare(folder, settings)
    warmup.start(settings, folder, lambda line: console.print(line, highlight=False))
    maker = make_engine(engine)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console, disable=quiet) as progress:
            bar = progress.add_task("starting", total=settings.updates)
            Run(folder, settings, maker, evaluate).go(lambda run: _show(run, progress, bar))
    finally:
        maker.close()


def _show(run: Run, progress: Progress, bar: Any) -> None:
    facts = run.latest()
    if facts is None:
        return
    share = facts["dta/compression"]
    text = (
        f"version {facts['version']}  reward {facts['reward/train']:.3f}  C {share:.1f}  update"
        f" {facts['time/update']:.2f} s  waited {facts['time/wait']:.2f} s  stale {facts['stream/staleness']:.1f}"
    )
    progress.update(bar, completed=facts["version"], description=text)
