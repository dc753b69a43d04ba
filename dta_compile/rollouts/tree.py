"""`RolloutTree`: thread-safe pool between rollout generation and training in an asynchronous RL system."""

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
    """Pool of rollouts that grows during generation and hands out balanced groups when a training step is due.

    Any number of threads may call `add` and `take`. Shared prefixes are stored once, and the amount of sharing is known
    at any time (`stats`). A batch is selected by sharing (see `choose_batch`): the oldest rollout and those closest to
    it in the prefix tree. Three rules prevent starvation:

    * A rollout is *overdue* once `patience` batches have left since the one in which first-come-first-served would have
      taken it. Overdue rollouts go first, oldest first: while batches have one size and nothing expires, no rollout
      leaves more than `patience` batches later than under first-come-first-served.
    * Next come the rollouts that would expire if they did not leave now, because there are too many of their age for
      the batches that remain to them. So selection by sharing expires nothing that first-come-first-served would train,
      while every batch of `rows` makes one policy version and rollouts arrive with the latest.
    * A rollout that is too stale for training is handed out as expired. None is lost, none is handed out twice.

    The limits cover all tokens and rollouts in storage: waiting rollouts count by the tokens of their tree, and expired
    ones, which stay until the next batch, by all of their own tokens. When there is no room, a batch is due, and `add`
    waits or raises like `queue.Queue.put`; waiting calls are served in order.

    Args:
        max_staleness: a rollout expires when the trainer's policy version exceeds its own by more than this; None:
            never.
        max_rollouts: most rollouts stored; None: unlimited.
        max_tokens: most tokens stored; None: unlimited. Longer rollouts are refused.
        patience: see above; 0 is first-come-first-served.
        dtype: signed or unsigned integer type in which tokens are stored and handed out.
        clock: returns seconds, for ages and for `take(seconds=...)`; `timeout`s always use real time.

    Raises:
        PlanError: an argument is not usable.
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
        patience = integer("patience", patience, 0)
        if np.dtype(dtype).kind not in "iu":
            raise PlanError("bad value for dtype", expected="a numpy integer type", got=repr(dtype))
        self.max_staleness, self.max_rollouts, self.max_tokens = max_staleness, max_rollouts, max_tokens
        self.patience, self._clock = patience, clock
        self._pool = RolloutPool(max_staleness, max_rollouts, max_tokens, patience, dtype)
        self._rejected = 0
        self._last_batch = float("-inf")
        self._refused = False  # whether a rollout has found no room since the last batch
        self._closed = False
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)  # wakes consumers
        self._consumers: list[_Limits] = []  # limits of the waiting consumers
        self._producers: deque[threading.Condition] = deque()  # producers waiting for room, in order

    def add(
        self,
        tokens: Any,
        *,
        policy_version: int = 0,
        payload: Any = None,
        block: bool = True,
        timeout: float | None = None,
    ) -> int:
        """Insert a finished rollout and return its id. The tokens are copied, the payload is not.

        Takes O(length): one memory comparison along the path, and one Python step per node on it.

        Args:
            tokens: a 1-D list, array or tensor of integers, possibly empty.
            policy_version: version of the policy that generated the rollout.
            payload: any object to keep with it (rewards, masks, log-probs).
            block: wait until there is room; else raise at once.
            timeout: most seconds to wait; None: unlimited.

        Raises:
            PlanError: the tokens are no 1-D integers of the tree's dtype, or more than `max_tokens`.
            WaitTimeoutError: there is no room, or there was none in time.
            TreeClosedError: the tree is closed, or was closed while this call waited.
        """
        try:
            deadline = _deadline(timeout if block else 0)
            policy_version = integer("policy_version", policy_version, None)
            key = self._encode(tokens)
            with self._lock:
                fork = self._pool.find_room(key) if not self._closed and not self._producers else None
                fork = fork or self._await_room(key, deadline)
                name = self._pool.insert(key, fork, policy_version, payload, self._clock())
                if len(self._pool) == 1 or any(self._is_due(*limits) for limits in self._consumers):
                    self._arrived.notify_all()  # the first arrival starts the clock for limits in seconds
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

        A batch is due as soon as one of its limits can be filled, `seconds` have passed, the tree is closed, or a
        rollout finds no room. In the last three cases the batch may be smaller than its limits, and in the last two
        even empty if there are expired rollouts to hand out. Without `rows` and `tokens`, all waiting rollouts form the
        batch.

        If this raises, for whatever reason, no rollout has left. While a batch is selected and balanced (milliseconds
        per hundred rollouts), `add` waits.

        Args:
            num_groups: K >= 1.
            rows: most rollouts of the batch.
            tokens: most tokens of its prefix tree, which determines the cost of training. A longer rollout goes alone.
            seconds: time since the latest batch or, if that is later, since the oldest waiting rollout arrived.
            policy_version: the trainer's version, which decides what expires; required if there is a `max_staleness`.
            timeout: most seconds to wait; None: unlimited.

        Raises:
            PlanError: an argument is not usable, or none of `rows`, `tokens` and `seconds` is given.
            WaitTimeoutError: no batch was due in time.
            TreeClosedError: the tree is closed and nothing is left in it.
        """
        num_groups = integer("num_groups", num_groups, 1)
        rows, tokens = _integer_or_none("rows", rows, 1), _integer_or_none("tokens", tokens, 1)
        if policy_version is not None or self.max_staleness is not None:
            policy_version = integer("policy_version", policy_version, None)
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
        """End the stream: `add` raises from now on; `take` hands out the remaining rollouts and then raises."""
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
        """Current figures, at a cost that does not depend on the number of waiting rollouts."""
        with self._lock:
            return self._pool.stats(self._clock(), self._rejected)

    def _encode(self, tokens: Any) -> bytes:
        """Encode the tokens as a key of the trie."""
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
        """Wait until this rollout fits and no other producer has waited longer; return its insertion point."""
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
        """Wake the producer that has waited longest, to look for room."""
        if self._producers:
            self._producers[0].notify()

    def _is_due_for(self, policy_version: int | None, limits: _Limits) -> bool:
        """Return whether a batch is due at this policy version; raise TreeClosedError if none ever will be."""
        if self._pool.expire(policy_version, self._clock()):
            self._wake_producer()
        if self._is_due(*limits):
            return True
        if self._closed:
            raise TreeClosedError("the rollout tree is closed and nothing is left in it")
        return False

    def _is_due(self, rows: int | None, tokens: int | None, seconds: float | None) -> bool:
        if not len(self._pool):  # there may be expired rollouts to hand out
            return bool(self._pool.expired) and (self._closed or self._refused)
        return (
            (rows is not None and len(self._pool) >= rows)
            or (tokens is not None and self._pool.trie.tokens >= tokens)
            or self._seconds_left(seconds) <= 0
            or self._closed
            or self._refused
        )

    def _seconds_left(self, seconds: float | None) -> float:
        """Return the seconds until `seconds` have passed since the later of the latest batch and the oldest arrival."""
        oldest = self._pool.oldest_arrival
        if seconds is None or oldest is None:
            return float("inf")
        return max(self._last_batch, oldest) + seconds - self._clock()


def integer(name: str, value: object, least: int | None) -> int:
    """Return the value as an int; raise PlanError unless it is an integer of at least `least`."""
    number = as_integer(value)
    if number is None or (least is not None and number < least):
        expected = "an integer" if least is None else f"an integer >= {least}"
        raise PlanError(f"bad value for {name}", expected=expected, got=repr(value))
    return number


def _integer_or_none(name: str, value: object, least: int | None) -> int | None:
    return None if value is None else integer(name, value, least)


def _deadline(timeout: float | None) -> float:
    """Return the time of the monotonic clock at which a wait of `timeout` seconds from now ends."""
    if timeout is not None and (not isinstance(timeout, numbers.Real) or timeout != timeout):
        raise PlanError("bad value for timeout", expected="seconds or None", got=repr(timeout))
    return float("inf") if timeout is None else time.monotonic() + timeout
