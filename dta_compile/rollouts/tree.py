"""Rollouts of an asynchronous RL system, from the threads that generate them to the batches that are trained."""

from __future__ import annotations

import numbers
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from dta_compile.errors import PlanError, TreeClosedError, WaitTimeoutError
from dta_compile.options import as_integer
from dta_compile.plan.tree.lexicographic import as_integers
from dta_compile.rollouts.pool import RolloutBatch, RolloutPool, RolloutTreeStats
from dta_compile.rollouts.trie import ForkPoint

_Limits = tuple[int | None, int | None, float | None]
"""`rows`, `tokens` and `seconds` of a batch."""


class RolloutTree:
    """A pool of rollouts that grows while they are generated, and yields balanced groups when a training step is due.

    Any number of threads may `add` and `take`. What rollouts share is stored once and known at any time (`stats`).
    A batch is chosen by sharing (see `choose_batch`): the oldest rollout and those closest to it in the prefix tree.
    Three rules keep this from harming anyone:

    * A rollout is *overdue* once `patience` batches have left since the one in which first-come-first-served would have
      taken it. The overdue go first, oldest first: while batches have one size and nothing expires, no rollout leaves
      more than `patience` batches later than under first-come-first-served.
    * Next come the rollouts that would expire if they did not leave now, because there are too many of their age for
      the batches that remain to them. So sharing lets nothing expire that first-come-first-served would train, while
      every batch of `rows` makes one policy version and rollouts arrive with the latest.
    * A rollout that is too old to be trained is handed out as expired. None is lost, none is handed out twice.

    The bounds hold for all tokens and rollouts that are stored: the waiting ones, which count by the tokens of their
    tree, and expired ones until the next batch, which count by all of their own. When there is no room, `add` waits or
    raises like `queue.Queue.put`, and those that wait are served in their order. A batch is due then, too.

    Args:
        max_staleness: a rollout expires when the trainer's policy version exceeds its own by more than this; None:
            never.
        max_rollouts: most rollouts stored, None without bound.
        max_tokens: most tokens stored, None without bound. Longer rollouts are refused.
        patience: see above; 0 is first-come-first-served.
        dtype: signed or unsigned integers in which tokens are stored and handed out.
        clock: seconds, for ages and for `take(seconds=...)`; `timeout`s are always real time.

    Raises:
        PlanError: a value that cannot be used.
    """

    def __init__(
        self,
        *,
        max_staleness: int | None = None,
        max_rollouts: int | None = None,
        max_tokens: int | None = None,
        patience: int = 2,
        dtype: npt.DTypeLike = np.int32,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        max_staleness = _integer_or_none("max_staleness", max_staleness, 0)
        max_rollouts = _integer_or_none("max_rollouts", max_rollouts, 1)
        max_tokens = _integer_or_none("max_tokens", max_tokens, 1)
        patience = _integer("patience", patience, 0)
        if np.dtype(dtype).kind not in "iu":
            raise PlanError("bad value for dtype", expected="a numpy integer type", got=repr(dtype))
        self.max_staleness, self.max_rollouts, self.max_tokens = max_staleness, max_rollouts, max_tokens
        self.patience, self._clock = patience, clock
        self._pool = RolloutPool(max_staleness, max_rollouts, max_tokens, patience, dtype)
        self._rejected = 0
        self._last_batch = float("-inf")
        self._refused = False  # since the last batch a rollout has found no room
        self._closed = False
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)  # consumers wait for it
        self._consumers: list[_Limits] = []  # what they wait for
        self._producers: deque[threading.Condition] = deque()  # those that wait for room, in their order

    def add(
        self,
        tokens: Any,
        *,
        policy_version: int = 0,
        payload: Any = None,
        block: bool = True,
        timeout: float | None = None,
    ) -> int:
        """Insert a finished rollout and return its id. The tokens are copied, the payload is kept as it is.

        Takes O(length): one comparison of memory along the path, and a step in Python for every node on it.

        Args:
            tokens: a 1-D list, array or tensor of integers, possibly empty.
            policy_version: of the policy that generated it.
            payload: anything that belongs to it (rewards, masks, log-probs).
            block: wait until there is room; else raise at once.
            timeout: most seconds to wait; None without end.

        Raises:
            PlanError: no run of integers of the tree's dtype, or longer than `max_tokens`.
            WaitTimeoutError: no room, or none in time.
            TreeClosedError: the tree is closed, or was closed while this call waited.
        """
        try:
            deadline = _deadline(timeout if block else 0)
            policy_version = _integer("policy_version", policy_version, None)
            key = self._encode(tokens)
            with self._lock:
                fork = self._pool.find_room(key) if not self._closed and not self._producers else None
                fork = fork or self._await_room(key, deadline)
                name = self._pool.insert(key, fork, policy_version, payload, self._clock())
                if len(self._pool) == 1 or any(self._is_due(*limits) for limits in self._consumers):
                    self._arrived.notify_all()  # the first arrival starts the clock of those that wait for seconds
                return name
        except BaseException:
            with self._lock:
                self._rejected += 1
            raise

    def take(
        self,
        num_groups: int,
        *,
        rows: int | None = None,
        tokens: int | None = None,
        seconds: float | None = None,
        policy_version: int | None = None,
        timeout: float | None = None,
    ) -> RolloutBatch:
        """Wait until a batch is due, remove it and return it in `num_groups` balanced groups.

        It is due as soon as one of its limits can be filled, `seconds` are over, the tree is closed, or a rollout
        finds no room. In the last three cases the batch may be smaller than its limits, and in the last two even empty,
        if there are expired rollouts to hand out. Without `rows` and `tokens` it is all that waits.

        If this raises, whatever the reason, no rollout has left. While a batch is chosen and balanced (milliseconds per
        hundred rollouts), `add` waits.

        Args:
            num_groups: K >= 1.
            rows: most rollouts of the batch.
            tokens: most tokens of its prefix tree, which is what it costs to train. A longer rollout goes alone.
            seconds: since the latest batch or, if that is later, since the oldest waiting rollout arrived.
            policy_version: the trainer's, which decides what expires; required if there is a `max_staleness`.
            timeout: most seconds to wait; None without end.

        Raises:
            PlanError: a value that cannot be used, or none of `rows`, `tokens` and `seconds`.
            WaitTimeoutError: no batch was due in time.
            TreeClosedError: the tree is closed and nothing is left in it.
        """
        num_groups = _integer("num_groups", num_groups, 1)
        rows, tokens = _integer_or_none("rows", rows, 1), _integer_or_none("tokens", tokens, 1)
        if policy_version is not None or self.max_staleness is not None:
            policy_version = _integer("policy_version", policy_version, None)
        if seconds is not None and (not isinstance(seconds, numbers.Real) or not seconds >= 0):
            raise PlanError("bad value for seconds", expected="a number >= 0 or None", got=repr(seconds))
        if rows is None and tokens is None and seconds is None:
            raise PlanError("nothing says when a batch is due", expected="rows, tokens or seconds", got="none of them")
        deadline = _deadline(timeout)
        limits = rows, tokens, seconds
        with self._lock:
            self._consumers.append(limits)
            try:
                while not self._is_due_for(policy_version, limits):
                    if (left := deadline - time.monotonic()) <= 0:
                        raise WaitTimeoutError("no batch was due in time", got=f"{len(self._pool)} waiting rollouts")
                    self._arrived.wait(min(left, self._seconds_left(seconds), threading.TIMEOUT_MAX))
            finally:
                self._consumers.remove(limits)
            now = self._clock()
            batch = self._pool.take(num_groups, rows, tokens, policy_version, now)
            self._last_batch, self._refused = now, False
            self._wake_producer()
            return batch

    def close(self) -> None:
        """End of the stream: `add` raises from now on, `take` hands out what is left and raises when nothing is."""
        with self._lock:
            self._closed = True
            self._arrived.notify_all()
            for producer in self._producers:
                producer.notify()

    def __len__(self) -> int:
        """Number of waiting rollouts."""
        return len(self._pool)

    @property
    def stats(self) -> RolloutTreeStats:
        """All numbers at this moment, at a cost that does not depend on how much waits."""
        with self._lock:
            return self._pool.stats(self._clock(), self._rejected)

    def _encode(self, tokens: Any) -> bytes:
        """The tokens as a key of the trie."""
        array, dtype = as_integers(tokens, "the rollout"), self._pool.trie.dtype
        if self.max_tokens is not None and len(array) > self.max_tokens:
            expected, hint = f"at most {self.max_tokens} tokens", "a larger max_tokens"
            raise PlanError("a rollout never fits into the tree", expected=expected, got=f"{len(array)}", hint=hint)
        if array.size and not np.can_cast(array.dtype, dtype):
            low, high, known = int(array.min()), int(array.max()), np.iinfo(dtype)
            if low < known.min or high > known.max:
                hint = "RolloutTree(dtype=numpy.int64)"
                raise PlanError("a token does not fit", expected=str(dtype), got=f"[{low}, {high}]", hint=hint)
        return array.astype(dtype, copy=False).tobytes()

    def _await_room(self, key: bytes, deadline: float) -> ForkPoint:
        """Wait until this rollout fits and no producer has waited for longer."""
        turn = threading.Condition(self._lock)
        self._producers.append(turn)
        try:
            while not self._closed:
                if self._producers[0] is turn:
                    if (fork := self._pool.find_room(key)) is not None:
                        return fork
                    self._refused = True
                    self._arrived.notify_all()
                if (left := deadline - time.monotonic()) <= 0:
                    raise WaitTimeoutError(
                        "no room for the rollout in time",
                        expected=f"at most {self.max_rollouts} rollouts and {self.max_tokens} tokens",
                        got=f"{len(self._pool)} rollouts, {self._pool.trie.tokens} tokens, and what has expired",
                        hint="take batches faster, or allow more",
                    )
                turn.wait(min(left, threading.TIMEOUT_MAX))
            raise TreeClosedError("the rollout tree is closed", hint="add no rollouts after close()")
        finally:
            self._producers.remove(turn)
            self._wake_producer()

    def _wake_producer(self) -> None:
        """Let the producer that has waited longest look for room."""
        if self._producers:
            self._producers[0].notify()

    def _is_due_for(self, policy_version: int | None, limits: _Limits) -> bool:
        """Whether a trainer of this version can have a batch; `TreeClosedError` if it never will."""
        if self._pool.expire(policy_version, self._clock()):
            self._wake_producer()
        if self._is_due(*limits):
            return True
        if self._closed:
            raise TreeClosedError("the rollout tree is closed and nothing is left in it")
        return False

    def _is_due(self, rows: int | None, tokens: int | None, seconds: float | None) -> bool:
        if not len(self._pool):  # only the expired may have to leave
            return bool(self._pool.expired) and (self._closed or self._refused)
        return (
            (rows is not None and len(self._pool) >= rows)
            or (tokens is not None and self._pool.trie.tokens >= tokens)
            or self._seconds_left(seconds) <= 0
            or self._closed
            or self._refused
        )

    def _seconds_left(self, seconds: float | None) -> float:
        """Until `seconds` have passed since the latest batch, or since the oldest arrival if that is later."""
        oldest = self._pool.oldest_arrival
        if seconds is None or oldest is None:
            return float("inf")
        return max(self._last_batch, oldest) + seconds - self._clock()


def _integer(name: str, value: object, least: int | None) -> int:
    """The value as an integer; raises a `PlanError` unless it is one, and at least `least`."""
    number = as_integer(value)
    if number is None or (least is not None and number < least):
        expected = "an integer" if least is None else f"an integer >= {least}"
        raise PlanError(f"bad value for {name}", expected=expected, got=repr(value))
    return number


def _integer_or_none(name: str, value: object, least: int | None) -> int | None:
    return None if value is None else _integer(name, value, least)


def _deadline(timeout: float | None) -> float:
    """Time of the real clock at which a wait of `timeout` seconds from now ends."""
    if timeout is not None and (not isinstance(timeout, numbers.Real) or timeout != timeout):
        raise PlanError("bad value for timeout", expected="seconds or None", got=repr(timeout))
    return float("inf") if timeout is None else time.monotonic() + timeout
