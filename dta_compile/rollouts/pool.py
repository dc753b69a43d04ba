"""State of a `RolloutTree`: the waiting and expired rollouts, and the selection of the next batch."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from dta_compile.plan.division.balance import balance
from dta_compile.rollouts.trie import ForkPoint, Node, Trie


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Rollout:
    """Rollout handed out by a `RolloutTree`.

    Attributes:
        id: the id returned by `RolloutTree.add`; ids increase in order of arrival.
        tokens: `[n]` token ids, in an array of its own.
        policy_version: version of the policy that generated the rollout.
        payload: the object passed to `RolloutTree.add`.
        seconds_waited: time from arrival to departure.
        batches_waited: number of batches that left in between.
    """

    id: int
    tokens: npt.NDArray[Any]
    policy_version: int
    payload: Any
    seconds_waited: float
    batches_waited: int


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class RolloutBatch:
    """Batch returned by `RolloutTree.take`.

    Attributes:
        groups: K lists that partition the batch, in lexicographic order, minimising the largest number of tree tokens
            per group. No list is empty if there are at least K rollouts.
        expired: rollouts that have become too stale for training since the previous batch.
        tokens, tree_tokens: tokens of all groups together, counted by sequence and as one prefix tree.
    """

    groups: list[list[Rollout]]
    expired: list[Rollout]
    tokens: int
    tree_tokens: int

    @property
    def compression(self) -> float:
        """Ratio `tokens / tree_tokens` (the paper's C); 1 without tokens."""
        return self.tokens / self.tree_tokens if self.tree_tokens else 1.0

    def __len__(self) -> int:
        return sum(map(len, self.groups))


@dataclasses.dataclass(frozen=True, slots=True)
class RolloutTreeStats:
    """Snapshot of the figures of a `RolloutTree`. Always `added == waiting + trained + expired`.

    Attributes:
        waiting: number of rollouts that may still be trained.
        tokens, tree_tokens, compression: figures of the waiting rollouts, defined like those of `RolloutBatch`.
        oldest_version: lowest policy version among them; None if none waits.
        oldest_age, mean_age: seconds since their arrival; 0 if none waits.
        added: rollouts accepted so far.
        trained: rollouts that left in the groups of a batch.
        expired: rollouts that became too stale; `expired_pending` of them leave with the next batch.
        rejected: calls of `add` that raised an error.
        batches: calls of `take` that returned a batch.
    """

    waiting: int
    tokens: int
    tree_tokens: int
    compression: float
    oldest_version: int | None
    oldest_age: float
    mean_age: float
    added: int
    trained: int
    expired: int
    expired_pending: int
    rejected: int
    batches: int


@dataclasses.dataclass(slots=True)
class _Waiting:
    end: Node  # last node, whose `stop` is the number of tokens
    policy_version: int
    payload: Any
    arrived: float
    batch: int  # number of batches that had left on arrival


class RolloutPool:
    """Contents of a `RolloutTree`, without threads or clocks: callers pass times in seconds of any single clock.

    Attributes:
        trie: tokens of the waiting rollouts.
        oldest_arrival: arrival time of the oldest waiting rollout; None if none waits.
        expired: rollouts that leave with the next batch.
    """

    def __init__(
        self,
        max_staleness: int | None,
        max_rollouts: int | None,
        max_tokens: int | None,
        patience: int,
        dtype: npt.DTypeLike,
    ) -> None:
        self._max_staleness, self._max_rollouts, self._max_tokens = max_staleness, max_rollouts, max_tokens
        self._patience = patience
        self.trie = Trie(dtype)
        self.expired: list[Rollout] = []
        self._expired_tokens = 0
        self._waiting: OrderedDict[int, _Waiting] = OrderedDict()  # by id, hence oldest first
        self._of_version: dict[int, dict[int, None]] = {}
        self._tokens = 0  # total over the waiting rollouts
        self._arrivals = 0.0  # sum of their arrival times
        self._added = self._trained = self._expired_ever = self._batches = self._latest_size = 0
        self._left: deque[int] = deque(maxlen=patience)  # rollouts that had left after each of the latest batches

    def __len__(self) -> int:
        """Number of waiting rollouts."""
        return len(self._waiting)

    @property
    def oldest_arrival(self) -> float | None:
        """Arrival time of the rollout that waits longest; None if none waits."""
        return next(iter(self._waiting.values())).arrived if self._waiting else None

    def find_room(self, key: bytes) -> ForkPoint | None:
        """Return the insertion point of a rollout, or None if it exceeds the limits; `key` is its tokens as bytes."""
        if self._max_rollouts is not None and len(self._waiting) + len(self.expired) >= self._max_rollouts:
            return None
        fork, length = self.trie.find(key), len(key) // self.trie.dtype.itemsize
        stored = self.trie.tokens + self._expired_tokens + length - fork.shared
        return fork if self._max_tokens is None or stored <= self._max_tokens else None

    def insert(self, key: bytes, fork: ForkPoint, policy_version: int, payload: Any, now: float) -> int:
        """Insert a rollout at the point that `find_room` returned, and return its id."""
        name = self._added
        waiting = _Waiting(self.trie.root, policy_version, payload, now, self._batches)
        waiting.end = self.trie.insert(name, key, fork)  # after the objects that take memory are there
        self._waiting[name] = waiting
        self._of_version.setdefault(policy_version, {})[name] = None
        self._added += 1
        self._tokens += waiting.end.stop
        self._arrivals += now
        return name

    def expire(self, policy_version: int | None, now: float) -> bool:
        """Set stale rollouts aside for the next batch; return whether there were any."""
        if policy_version is None or self._max_staleness is None:
            return False
        old = [version for version in self._of_version if policy_version - version > self._max_staleness]
        stale = [self._rollout(name, now) for name in sorted(name for v in old for name in self._of_version[v])]
        for rollout in stale:
            self._remove(rollout.id)
        self.expired += stale
        self._expired_tokens += sum(len(rollout.tokens) for rollout in stale)
        self._expired_ever += len(stale)
        return bool(stale)

    def take(
        self, num_groups: int, rows: int | None, tokens: int | None, policy_version: int | None, now: float
    ) -> RolloutBatch:
        """Select a batch and remove it. All steps that may fail precede the first change."""
        last_chance = self._last_chance(policy_version, rows)
        choice = choose_batch(self.trie, self._waiting, self._overdue(), last_chance, rows, tokens)
        chosen = [self._rollout(name, now) for name in sorted(choice.names)]
        groups = balance([rollout.tokens for rollout in chosen], num_groups, contiguous=True)
        batch = RolloutBatch(
            groups=[[chosen[index] for index in group] for group in groups],
            expired=self.expired,
            tokens=sum(len(rollout.tokens) for rollout in chosen),
            tree_tokens=choice.tokens,
        )
        for rollout in chosen:
            self._remove(rollout.id)
        self.expired, self._expired_tokens = [], 0
        self._trained, self._latest_size = self._trained + len(chosen), len(chosen)
        self._batches += 1
        self._left.append(self._added - len(self._waiting))
        return batch

    def stats(self, now: float, rejected: int) -> RolloutTreeStats:
        """Return all figures, in O(distinct policy versions)."""
        count, oldest = len(self._waiting), self.oldest_arrival
        return RolloutTreeStats(
            waiting=count,
            tokens=self._tokens,
            tree_tokens=self.trie.tokens,
            compression=self._tokens / self.trie.tokens if self.trie.tokens else 1.0,
            oldest_version=min(self._of_version, default=None),
            oldest_age=0.0 if oldest is None else now - oldest,
            mean_age=now - self._arrivals / count if count else 0.0,
            added=self._added,
            trained=self._trained,
            expired=self._expired_ever,
            expired_pending=len(self.expired),
            rejected=rejected,
            batches=self._batches,
        )

    def _overdue(self) -> Iterable[int]:
        """Return rollouts due `patience` or more batches ago under first-come-first-served, oldest first."""
        if not self._patience:
            return self._waiting
        first = self._left[0] if len(self._left) == self._patience else 0
        return itertools.takewhile(lambda name: name < first, self._waiting)

    def _last_chance(self, policy_version: int | None, rows: int | None) -> Collection[int]:
        """Return the rollouts that will expire unless they leave now: lowest versions first, then oldest first.

        These are the rollouts that expire with the next version, plus the excess over the capacity of later batches:
        `k` batches take `k * rows` of the rollouts that have `k` batches left after this one. The result is cut to the
        size of one batch. It assumes a new version per batch and, if `rows` is None, batches of the latest size.
        """
        if policy_version is None or self._max_staleness is None:
            return ()
        rows = rows or self._latest_size
        urgent = count = 0
        versions = sorted(self._of_version)
        for version in versions:
            count += len(self._of_version[version])
            batches_left = version + self._max_staleness - policy_version
            urgent = max(urgent, count - batches_left * rows) if rows or not batches_left else urgent
        ranked = itertools.chain.from_iterable(self._of_version[version] for version in versions)
        return dict.fromkeys(itertools.islice(ranked, min(urgent, rows) if rows else urgent))

    def _remove(self, name: int) -> None:
        waiting = self._waiting.pop(name)
        self.trie.remove(name, waiting.end)
        peers = self._of_version[waiting.policy_version]
        del peers[name]
        if not peers:
            del self._of_version[waiting.policy_version]
        self._tokens -= waiting.end.stop
        self._arrivals = self._arrivals - waiting.arrived if self._waiting else 0.0  # the reset drops rounding errors

    def _rollout(self, name: int, now: float) -> Rollout:
        """Build the `Rollout` to hand out; changes nothing."""
        waiting = self._waiting[name]
        return Rollout(
            id=name,
            tokens=np.frombuffer(self.trie.key(waiting.end), self.trie.dtype),
            policy_version=waiting.policy_version,
            payload=waiting.payload,
            seconds_waited=now - waiting.arrived,
            batches_waited=self._batches - waiting.batch,
        )


class Choice:
    """Batch under selection, which grows up to its limits.

    Attributes:
        names: the selected rollouts, in order of selection.
        tokens: tokens of their prefix tree.
        nodes: the root and the nodes of their prefix tree.
    """

    def __init__(self, trie: Trie, rows: int | None, tokens: int | None) -> None:
        self.names: dict[int, None] = {}
        self.tokens = 0
        self.nodes: dict[Node, None] = {trie.root: None}
        self._most_rows, self._most_tokens = rows, math.inf if tokens is None else tokens

    @property
    def full(self) -> bool:
        """Whether no rollout with tokens of its own fits any more."""
        return len(self.names) == self._most_rows or self.tokens >= self._most_tokens

    def take(self, name: int, end: Node) -> None:
        """Add a rollout that ends at `end` unless it is in the batch or exceeds a limit; the first always fits."""
        if name in self.names or len(self.names) == self._most_rows:
            return
        new, node = [], end
        while node not in self.nodes:
            assert node.parent is not None
            new.append(node)
            node = node.parent
        tokens = self.tokens + end.stop - node.stop
        if self.names and tokens > self._most_tokens:
            return
        self.names[name] = None
        self.tokens = tokens
        self.nodes.update(dict.fromkeys(new))


def choose_batch(
    trie: Trie,
    waiting: Mapping[int, _Waiting],
    overdue: Iterable[int],
    last_chance: Collection[int],
    rows: int | None = None,
    tokens: int | None = None,
) -> Choice:
    """Select rollouts until there are `rows` of them, or their tree has `tokens` tokens.

    Overdue rollouts come first, in their order, then those with a last chance, then all others. Each of the latter two
    groups is ordered by the prefix shared with the rollouts selected before. If none is selected yet, the oldest comes
    first, so that no part of the tree starves. Takes O(waiting rollouts) at worst.

    Args:
        waiting: all rollouts, oldest first.
        overdue: oldest first; the first one that does not fit leads the next batch.
        last_chance: rollouts that expire unless they leave now, oldest first.
        rows: most rollouts, at least 1.
        tokens: most tokens of the tree; the first rollout may exceed it.
    """
    choice = Choice(trie, rows, tokens)
    for name in overdue:
        if choice.full:
            break
        choice.take(name, waiting[name].end)
    for wanted in (last_chance, waiting):
        if wanted and not choice.names:
            oldest = next(iter(wanted))
            choice.take(oldest, waiting[oldest].end)
        for name, node in _closest_first(list(choice.nodes)) if wanted else ():
            if choice.full and node not in choice.nodes:
                break
            if name in wanted:
                choice.take(name, node)
    return choice


def _closest_first(chosen: list[Node]) -> Iterator[tuple[int, Node]]:
    """Yield every waiting rollout and its last node, by the prefix length shared with the tree of `chosen` nodes.

    Rollouts that add no token come first, then those that leave the tree deepest. Rollouts that leave it at the same
    node come depth first, which keeps relatives together, and in order of arrival.
    """
    for node in chosen:
        for name in node.ending:
            yield name, node
    known = set(chosen)
    for start in sorted(chosen, key=lambda node: -node.stop):
        stack = _others(start, known)
        while stack:
            node = stack.pop()
            for name in node.ending:
                yield name, node
            stack += _others(node, known)


def _others(node: Node, known: set[Node]) -> list[Node]:
    """Return the children that are not in `known`, in reverse order for a stack."""
    return [child for child in reversed(node.children.values()) if child not in known]
