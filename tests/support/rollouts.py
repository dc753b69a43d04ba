"""Helpers for streams of rollouts: contents of a batch, and threads that wait for one with a time limit."""

import threading

from dta_compile.plan import PrefixTree

SOON = 20  # seconds after which a test stops waiting for another thread


def tree_tokens(sequences):
    return PrefixTree.build(list(sequences)).num_rows


def rollouts_of(batch):
    return [rollout for group in batch.groups for rollout in group]


def ids(rollouts):
    return [rollout.id for rollout in rollouts]


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Started(threading.Thread):
    """Thread that runs `function` and keeps its result or exception."""

    def __init__(self, function, *args, **kwargs):
        super().__init__(daemon=True)
        self.call, self.outcome = (function, args, kwargs), None
        self.start()

    def run(self):
        function, args, kwargs = self.call
        try:
            self.outcome = function(*args, **kwargs)
        except Exception as error:
            self.outcome = error

    def result(self):
        self.join(SOON)
        assert not self.is_alive(), "a thread waits for ever"
        return self.outcome


def wait_until(condition):
    tick = threading.Event()
    for _ in range(SOON * 200):
        if condition():
            return
        tick.wait(0.005)
    raise AssertionError("what a test waits for never happened")


def producers_waiting(tree):
    """Count the threads that wait for room."""
    return len(tree._producers)


def consumers_waiting(tree):
    """Count the threads that wait for a batch."""
    return len(tree._consumers)
