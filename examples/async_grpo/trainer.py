"""The trainer: takes batches from the stream of rollouts, updates the policy, hands it over, and can start anew."""

from __future__ import annotations

import dataclasses
import threading
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import dta_compile
from dta_compile.errors import TreeClosedError, WaitTimeoutError
from dta_compile.rollouts import RolloutBatch

from . import warmup
from .metrics import Metrics
from .record import Record
from .roles import Role
from .samples import Sample
from .settings import Settings
from .update import Learner
from .weights import CHECKPOINT, publish, read, snapshots, write

PAUSE = 0.02  # seconds between two looks for new rollouts


@dataclasses.dataclass
class Progress:
    """How far training is: the version of the policy, and seconds of training, without starts."""

    version: int = 0
    seconds: float = 0.0


class Feeder(threading.Thread):
    """Brings rollouts from the record to the tree, in the order in which they were recorded."""

    def __init__(self, folder: Path, tree: dta_compile.RolloutTree) -> None:
        super().__init__(daemon=True)
        self._folder, self._tree, self.failure = folder, tree, None
        self._ends = threading.Event()

    def run(self) -> None:
        try:
            record, last = Record(self._folder), 0
            while not self._ends.is_set():
                found = record.waiting_after(last)
                for number, sample in found:
                    self._tree.add(sample.tokens, policy_version=sample.version, payload=(number, sample))
                    last = number
                if not found:
                    self._ends.wait(PAUSE)
        except TreeClosedError:
            pass
        except BaseException as error:
            self.failure = error
            self._tree.close()

    def end(self) -> None:
        self._ends.set()
        self._tree.close()
        self.join()


class Trainer:
    """A run's trainer, at its last checkpoint if there is one."""

    def __init__(self, folder: Path) -> None:
        self.settings = settings = Settings.load(folder)
        self.role = Role(folder, "trainer", settings.trainer_threads)
        self.folder, self.record, self.progress = folder, Record(folder), Progress()
        self._expired: list[int] = []  # since the latest update
        self._waited = 0.0  # seconds for the latest batch
        start, tokenizer = warmup.start(settings, folder)
        model, _ = warmup.start(settings, folder)
        self.learner = Learner(settings, model, start)
        self.learner.rehearse(len(tokenizer.get_vocab()))
        if (folder / CHECKPOINT).exists():
            found = read(folder / CHECKPOINT)
            self.progress = Progress(**found["progress"])
            self.learner.model.load_state_dict(found["model"])
            self.learner.optimizer.load_state_dict(found["optimizer"])
        self.record.go_back(self.progress.version)
        for version, path in snapshots(folder).items():
            if version > self.progress.version:
                path.unlink()

    def run(self) -> None:
        """Train until the run is stopped or has reached its end."""
        settings, progress = self.settings, self.progress
        tree = dta_compile.RolloutTree(max_staleness=settings.max_staleness, patience=settings.patience)
        feeder = Feeder(self.folder, tree)
        publish(self.folder, progress.version, self.learner.model, snapshot=True)
        feeder.start()
        try:
            with Metrics(self.folder, "training", progress.version) as metrics:
                before = time.perf_counter() - progress.seconds
                while not self.finished and (batch := self._take(tree, feeder)) is not None:
                    facts = self._update(batch, tree)
                    progress.version += 1
                    progress.seconds = facts["seconds"] = time.perf_counter() - before
                    self._hand_over(batch, facts)
                    metrics.add(progress.version, {name: value for name, value in facts.items() if "/" in name})
                    if progress.version % settings.checkpoint_every == 0:
                        self._checkpoint()
                progress.seconds = time.perf_counter() - before
        finally:
            feeder.end()
        self._checkpoint()
        publish(self.folder, progress.version, self.learner.model, snapshot=True)

    @property
    def finished(self) -> bool:
        """Whether the run has had its updates or seconds, or is stopped."""
        updates, seconds = self.settings.updates, self.settings.seconds
        return (
            self.role.stops
            or (updates is not None and self.progress.version >= updates)
            or (seconds is not None and self.progress.seconds >= seconds)
        )

    def _take(self, tree: dta_compile.RolloutTree, feeder: Feeder) -> RolloutBatch | None:
        """The next batch; None if the run is stopped before there is one."""
        began = time.perf_counter()
        while not self.role.stops:
            if feeder.failure is not None:
                raise RuntimeError("the stream of rollouts broke off") from feeder.failure
            try:
                batch = tree.take(
                    1, tokens=self.settings.batch_tokens, policy_version=self.progress.version, timeout=0.2
                )
            except WaitTimeoutError:
                continue
            self._expired += [rollout.payload[0] for rollout in batch.expired]  # perhaps of a batch of nothing else
            if len(batch):
                self._waited = time.perf_counter() - began
                return batch
        return None

    def _update(self, batch: RolloutBatch, tree: dta_compile.RolloutTree) -> dict[str, Any]:
        """One update, and what is to be said of it. Names with a slash are metrics."""
        (group,) = batch.groups
        samples: list[Sample] = [rollout.payload[1] for rollout in group]
        began = time.perf_counter()
        means = self.learner.update(samples)
        seconds = time.perf_counter() - began
        behind = [self.progress.version - sample.version for sample in samples]
        facts: dict[str, Any] = {"samples": len(samples), "tokens": batch.tokens, "tree_tokens": batch.tree_tokens}
        facts |= {f"train/{name}": value for name, value in means.items()}
        facts |= {"reward/train": fmean(sample.reward for sample in samples)}
        facts |= {"time/update": seconds, "time/wait": self._waited}
        facts |= {"stream/staleness": fmean(behind), "stream/most_stale": max(behind)}
        facts |= {"stream/waiting": tree.stats.waiting, "stream/expired": len(self._expired)}
        facts |= {"stream/batches_waited": fmean(rollout.batches_waited for rollout in group)}
        return facts | self._sharing(batch)

    def _sharing(self, batch: RolloutBatch) -> dict[str, float]:
        if self.learner.compiled is None:
            return {"dta/compression": batch.compression}
        plan = dta_compile.last_plan(self.learner.compiled)
        named = {"dta/recompute": plan.stats.tokens_forwarded_twice, "dta/peak": plan.stats.peak_live_tokens}
        return plan.scalars() | named

    def _hand_over(self, batch: RolloutBatch, facts: dict[str, Any]) -> None:
        """Record what has left, then let the workers have the new policy."""
        version = self.progress.version
        trained = [rollout.payload[0] for group in batch.groups for rollout in group]
        self.record.finish_update(version, trained, self._expired, facts)
        self._expired = []
        snapshot = version % self.settings.snapshot_every == 0
        publish(self.folder, version, self.learner.model, snapshot)

    def _checkpoint(self) -> None:
        learner = self.learner
        content = {"progress": dataclasses.asdict(self.progress), "model": learner.model.state_dict()}
        write(self.folder / CHECKPOINT, content | {"optimizer": learner.optimizer.state_dict()})


def main(folder: Path) -> None:
    """Train a run to its end, from wherever it stands."""
    Trainer(folder).run()
