"""Streams of rollouts: what comes in goes out exactly once, by sharing, in time, and within the bounds."""

import threading
import time
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dta_compile import RolloutTree
from dta_compile.errors import PlanError, TreeClosedError, WaitTimeoutError
from dta_compile.rollouts import pool, trie
from tests.support.rollouts import (
    SOON,
    Clock,
    Started,
    consumers_waiting,
    ids,
    producers_waiting,
    rollouts_of,
    tree_tokens,
    wait_until,
)

# What comes in goes out once.


def check_batch(batch, request, waiting, groups):
    """A batch against the rollouts that waited: a naive model of what `take` promises."""
    chosen = rollouts_of(batch)
    sequences = [waiting[rollout.id][0] for rollout in chosen]
    assert [rollout.tokens.tolist() for rollout in chosen] == sequences
    assert len(set(ids(chosen))) == len(chosen)
    assert len(batch.groups) == groups
    assert sum(map(bool, batch.groups)) == min(groups, len(chosen))
    assert sequences == sorted(sequences)
    assert (batch.tokens, batch.tree_tokens) == (sum(map(len, sequences)), tree_tokens(sequences))
    assert len(batch) == len(chosen)
    if "rows" in request:
        assert len(chosen) == request["rows"]
    if "tokens" in request:
        longest = max(map(len, sequences))
        assert batch.tree_tokens <= max(request["tokens"], longest)
        assert batch.tree_tokens <= request["tokens"] or batch.tree_tokens == longest, "only prefixes go with it"
        left = [sequence for name, (sequence, _) in waiting.items() if name not in ids(chosen)]
        assert all(tree_tokens([*sequences, s]) > request["tokens"] for s in left), "whatever fits is taken"


@given(st.data())
def test_every_rollout_is_waiting_trained_or_expired(batches, data):
    staleness = data.draw(st.sampled_from([None, 0, 1, 2]))
    tree = RolloutTree(max_staleness=staleness, patience=data.draw(st.integers(0, 3)))
    waiting, trained, expired, added, version = {}, [], [], 0, 0
    for sequences in data.draw(st.lists(batches, max_size=6)):
        for sequence in sequences:
            policy = max(version - data.draw(st.integers(0, 4)), 0)
            payload = object()
            name = tree.add(sequence, policy_version=policy, payload=payload)
            assert name == added
            waiting[name], added = (sequence, policy), added + 1
        version += data.draw(st.integers(0, 2))
        request = data.draw(st.sampled_from([{"rows": 1}, {"rows": 4}, {"tokens": 5}, {"tokens": 12}]))
        groups = data.draw(st.integers(1, 5))
        stale = {n for n, (_, policy) in waiting.items() if staleness is not None and version - policy > staleness}
        fresh = {n: kept for n, kept in waiting.items() if n not in stale}
        due = fresh and (
            len(fresh) >= request.get("rows", len(fresh) + 1)
            or tree_tokens(s for s, _ in fresh.values()) >= request.get("tokens", float("inf"))
        )
        if due:
            batch = tree.take(groups, **request, policy_version=version, timeout=0)
            check_batch(batch, request, fresh, groups)
            trained += ids(rollouts_of(batch))
            expired += ids(batch.expired)
            waiting = {n: kept for n, kept in fresh.items() if n not in trained}
            assert set(expired) >= stale
        else:
            with pytest.raises(WaitTimeoutError):
                tree.take(groups, **request, policy_version=version, timeout=0)
            waiting = fresh
        stats = tree.stats
        assert stats.waiting == len(tree) == len(waiting)
        assert stats.tokens == sum(len(s) for s, _ in waiting.values())
        assert stats.tree_tokens == tree_tokens(s for s, _ in waiting.values())
        assert stats.compression == (stats.tokens / stats.tree_tokens if stats.tree_tokens else 1)
        assert stats.oldest_version == min((policy for _, policy in waiting.values()), default=None)
        assert stats.added == added == stats.waiting + stats.trained + stats.expired
        assert (stats.trained, stats.expired - stats.expired_pending) == (len(trained), len(expired))
    tree.close()
    if tree.stats.waiting or tree.stats.expired_pending:
        last = tree.take(2, seconds=1, policy_version=version)
        trained, expired = trained + ids(rollouts_of(last)), expired + ids(last.expired)
    assert sorted(trained + expired) == list(range(added))


def test_a_rollout_comes_back_as_it_went_in():
    clock = Clock()
    tree, payload = RolloutTree(clock=clock), object()
    buffer = np.array([7, 8, 9], np.uint16)
    tree.add(buffer, policy_version=np.int64(3), payload=payload)
    buffer[:] = 0
    tree.add([])
    clock.now += 2
    (first, second) = sorted(rollouts_of(tree.take(1, rows=2)), key=lambda rollout: rollout.id)
    assert (first.id, first.tokens.tolist(), first.policy_version, first.payload) == (0, [7, 8, 9], 3, payload)
    assert first.tokens.dtype == np.int32 and first.tokens.flags.writeable
    assert first.seconds_waited == 2
    assert (second.tokens.tolist(), second.policy_version, second.payload) == ([], 0, None)


def test_arrays_handed_out_are_their_own():
    tree = RolloutTree()
    for _ in range(2):
        tree.add([1, 2, 3])
    first, second = rollouts_of(tree.take(1, rows=2))
    first.tokens[:] = 0
    assert second.tokens.tolist() == [1, 2, 3]


def test_eight_producers_lose_nothing_and_repeat_nothing():
    count, producers = 20_000, 8
    tree = RolloutTree(max_staleness=2, max_rollouts=600, max_tokens=20_000, patience=2)
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 50, 40) for _ in range(30)]
    sequences = [np.concatenate([prompts[i % 30][: i % 41], random.integers(0, 50, i % 17)]) for i in range(count)]
    accepted, rejected, batches, version = [], [], [], 0
    lock = threading.Lock()

    def produce(first):
        for index in range(first, count, producers):
            try:
                name = tree.add(
                    sequences[index], policy_version=version - index % 4, payload=index, block=index % 5 > 0, timeout=60
                )
                accepted.append((name, index))
            except WaitTimeoutError:
                rejected.append(index)

    def consume():
        nonlocal version
        while True:
            try:
                batch = tree.take(4, rows=150, policy_version=version, timeout=60)
            except TreeClosedError:
                return
            with lock:
                batches.append(batch)
                version += 1

    consumers = [Started(consume) for _ in range(2)]
    for thread in [Started(produce, first) for first in range(producers)]:
        thread.join(120)
    tree.close()
    for consumer in consumers:
        assert consumer.result() is None
    trained = [rollout for batch in batches for rollout in rollouts_of(batch)]
    expired = [rollout for batch in batches for rollout in batch.expired]
    out = trained + expired
    assert sorted(ids(out)) == sorted(name for name, _ in accepted) == list(range(len(accepted)))
    assert sorted([rollout.payload for rollout in out] + rejected) == list(range(count))
    assert all(np.array_equal(rollout.tokens, sequences[rollout.payload]) for rollout in out)
    stats = tree.stats
    assert (stats.waiting, stats.tree_tokens, stats.tokens) == (0, 0, 0)
    assert (stats.trained, stats.expired, stats.rejected) == (len(trained), len(expired), len(rejected))
    assert trained and expired and stats.batches == len(batches)


# Staleness.


def test_too_old_rollouts_are_handed_out_as_expired():
    tree = RolloutTree(max_staleness=1)
    for version in (3, 1, 2, 4):
        tree.add([version], policy_version=version)
    batch = tree.take(2, rows=2, policy_version=4)
    assert [r.policy_version for r in batch.expired] == [1, 2]
    assert sorted(r.policy_version for r in rollouts_of(batch)) == [3, 4]
    tree.add([1], policy_version=1)
    with pytest.raises(WaitTimeoutError):
        tree.take(1, rows=1, policy_version=4, timeout=0)
    assert (tree.stats.waiting, tree.stats.expired, tree.stats.expired_pending) == (0, 3, 1)
    tree.add([4], policy_version=4)
    assert ids(tree.take(1, rows=1, policy_version=4).expired) == [4]
    assert tree.stats.expired_pending == 0


def test_expired_rollouts_that_fill_the_tree_make_room():
    tree = RolloutTree(max_staleness=0, max_rollouts=2)
    for _ in range(2):
        tree.add([1])
    producer = Started(tree.add, [2], policy_version=1)
    batch = tree.take(3, rows=5, policy_version=1, timeout=SOON)
    assert (batch.groups, ids(batch.expired)) == ([[], [], []], [0, 1])
    assert producer.result() == 2


# When a batch is due.


def test_a_batch_is_due_after_seconds():
    clock = Clock()
    tree = RolloutTree(clock=clock)

    def due(**limits):
        try:
            return len(tree.take(1, seconds=5, **limits, timeout=0))
        except WaitTimeoutError:
            return 0

    clock.now += 100
    assert not due(), "nothing waits"
    tree.add([1])
    tree.add([2])
    assert not due()
    clock.now += 5
    assert due(rows=1) == 1
    assert not due(), "the latest batch has just left"
    clock.now += 4
    tree.add([3])
    assert not due()
    clock.now += 1
    assert due() == 2


def test_rows_and_tokens_together():
    tree = RolloutTree()
    for n in range(6):
        tree.add([0, n])
    assert len(tree.take(1, rows=3, tokens=100)) == 3
    assert len(tree.take(1, rows=100, tokens=4)) == 3


def test_take_waits_for_rollouts():
    tree = RolloutTree()
    consumer = Started(tree.take, 2, rows=3)
    for n in range(3):
        assert consumer.is_alive()
        tree.add([n])
    assert len(consumer.result()) == 3


def test_take_waits_for_seconds():
    tree = RolloutTree()
    consumer = Started(tree.take, 2, seconds=0.02)
    tree.add([1])
    batch = consumer.result()
    assert rollouts_of(batch)[0].seconds_waited >= 0.02


def test_several_consumers_share_the_stream():
    tree = RolloutTree()
    consumers = [Started(tree.take, 1, rows=2) for _ in range(3)]
    for n in range(6):
        tree.add([n])
    taken = [name for consumer in consumers for name in ids(rollouts_of(consumer.result()))]
    assert sorted(taken) == list(range(6))


# Bounds.


def test_a_full_tree_raises_or_waits():
    tree = RolloutTree(max_rollouts=1)
    tree.add([1])
    for arguments in ({"block": False}, {"timeout": 0.01}):
        with pytest.raises(WaitTimeoutError, match="at most 1 rollouts"):
            tree.add([2], **arguments)
    with pytest.raises(TimeoutError):
        tree.add([2], block=False)
    producer = Started(tree.add, [3])
    wait_until(lambda: producers_waiting(tree))
    assert len(tree.take(1, rows=1)) == 1
    assert producer.result() == 1
    assert (tree.stats.rejected, tree.stats.added) == (3, 2)


def test_shared_tokens_take_no_room():
    tree = RolloutTree(max_tokens=10)
    tree.add(list(range(9)))
    for n in range(9):
        tree.add(list(range(n)), block=False)
    tree.add([*range(8), 99], block=False)
    with pytest.raises(WaitTimeoutError):
        tree.add([*range(8), 98], block=False)
    assert (tree.stats.tree_tokens, tree.stats.tokens) == (10, 9 + sum(range(9)) + 9)


def test_waiting_producers_are_served_in_their_order():
    tree = RolloutTree(max_tokens=4)
    tree.add([1, 1, 1])
    producers = []
    for number, tokens in enumerate(([2, 2, 2, 2], [3], [4])):  # the first needs all the room, the others would fit
        producers.append(Started(tree.add, tokens))
        wait_until(lambda number=number: producers_waiting(tree) > number)
    with pytest.raises(WaitTimeoutError):
        tree.add([5], block=False)  # nor may anybody overtake them
    tree.take(1, rows=1)
    assert producers[0].result() == 1
    assert len(tree) == 1
    tree.take(1, rows=1)
    assert [producer.result() for producer in producers[1:]] == [2, 3]


def test_a_batch_is_due_when_a_producer_finds_no_room():
    tree = RolloutTree(max_rollouts=3)
    for n in range(3):
        tree.add([n])
    consumer = Started(tree.take, 1, rows=100)
    producer = Started(tree.add, [3])
    assert len(consumer.result()) == 3
    assert producer.result() == 3


def test_expired_rollouts_take_room_until_they_are_handed_out():
    tree = RolloutTree(max_staleness=0, max_tokens=10)
    tree.add([1] * 6, policy_version=0)
    tree.add([2], policy_version=1)
    with pytest.raises(WaitTimeoutError):
        tree.take(1, rows=2, policy_version=1, timeout=0)
    with pytest.raises(WaitTimeoutError):
        tree.add([3] * 4, policy_version=1, block=False)
    assert len(tree.take(1, rows=2, policy_version=1, timeout=0).expired) == 1, "due: nothing more fits"
    tree.add([3] * 4, policy_version=1, block=False)
    with pytest.raises(WaitTimeoutError):
        tree.take(1, rows=2, policy_version=1, timeout=0)


def test_memory_of_what_has_left_is_free():
    random = np.random.default_rng(0)
    prompt = random.integers(0, 1000, 20_000)
    tree = RolloutTree()
    tracemalloc.start()
    try:
        empty = tracemalloc.get_traced_memory()[0]
        for _ in range(50):
            tree.add(np.concatenate([prompt, random.integers(0, 1000, 2_000)]))
        full = tracemalloc.get_traced_memory()[0] - empty
        tree.take(1, rows=49)
        one = tracemalloc.get_traced_memory()[0] - empty
        tree.take(1, rows=1)
        none = tracemalloc.get_traced_memory()[0] - empty
    finally:
        tracemalloc.stop()
    stored = 4 * (20_000 + 50 * 2_000)
    assert stored <= full < 1.2 * stored
    assert 4 * 22_000 <= one < 1.5 * 4 * 22_000
    assert none < 0.1 * stored


def test_long_chains_of_short_segments_stay_linear():
    """Every insertion looks at its own tokens once, however many segments they are spread over."""
    base = np.arange(1500)
    tree = RolloutTree()
    for n in np.random.default_rng(0).permutation(1501):
        tree.add(base[:n])
    assert (tree.stats.waiting, tree.stats.tree_tokens) == (1501, 1500)
    assert len(tree.take(3, rows=1501)) == 1501
    assert tree.stats.tree_tokens == 0


def test_insertion_keeps_up_with_five_million_tokens_a_second():
    random = np.random.default_rng(0)
    prompts = random.integers(0, 150_000, (100, 1000), np.int32)
    answers = random.integers(0, 150_000, (1000, 1000), np.int32)
    rollouts = [np.concatenate([prompts[n % 100], answers[n]]) for n in range(1000)]
    tree = RolloutTree()
    began = time.thread_time()  # processor time, so that other work on the machine does not count
    for rollout in rollouts:
        tree.add(rollout)
    assert time.thread_time() - began < 2_000_000 / 5_000_000
    assert tree.stats.tree_tokens == 1_100_000


# The end, and failures.


def test_closing_ends_the_stream():
    tree = RolloutTree(max_rollouts=2, max_staleness=0)
    tree.add([1], policy_version=0)
    tree.add([2], policy_version=1)
    producer = Started(tree.add, [3])
    wait_until(lambda: producers_waiting(tree))
    tree.close()
    tree.close()
    assert isinstance(producer.result(), TreeClosedError)
    with pytest.raises(TreeClosedError):
        tree.add([4])
    batch = tree.take(1, rows=100, policy_version=1)
    assert (ids(rollouts_of(batch)), ids(batch.expired)) == ([1], [0])
    with pytest.raises(TreeClosedError):
        tree.take(1, rows=1, policy_version=1)
    assert (tree.stats.rejected, tree.stats.added) == (2, 2)


def test_closing_wakes_consumers():
    tree = RolloutTree()
    consumers = [Started(tree.take, 1, rows=2) for _ in range(2)]
    tree.add([1])
    wait_until(lambda: consumers_waiting(tree) == 2)
    tree.close()
    outcomes = [consumer.result() for consumer in consumers]
    assert sorted(isinstance(outcome, TreeClosedError) for outcome in outcomes) == [False, True]


@pytest.mark.parametrize("made", [0, 1])  # nodes: the one that a split adds, and the new end
def test_an_insertion_that_fails_changes_nothing(monkeypatch, made):
    tree = RolloutTree()
    tree.add([1, 2, 3])
    before = tree.stats

    nodes = iter(range(made))

    def until_out_of_memory(*args, node=trie.Node):
        if next(nodes, None) is None:
            raise MemoryError
        return node(*args)

    with monkeypatch.context() as patch:
        patch.setattr(trie, "Node", until_out_of_memory)
        with pytest.raises(MemoryError):
            tree.add([1, 2, 4])
    after = tree.stats
    assert (after.added, after.waiting, after.tree_tokens) == (before.added, before.waiting, before.tree_tokens)
    assert after.rejected == 1
    assert tree.add([1, 2, 4]) == 1
    assert [r.tokens.tolist() for r in rollouts_of(tree.take(1, rows=2))] == [[1, 2, 3], [1, 2, 4]]


def test_a_batch_that_fails_loses_nothing(monkeypatch):
    tree = RolloutTree(max_staleness=0)
    for version in (1, 1, 0):
        tree.add([version], policy_version=version)

    def fails(*_, **__):
        raise RuntimeError("no groups today")

    with monkeypatch.context() as patch:
        patch.setattr(pool, "balance", fails)
        with pytest.raises(RuntimeError, match="no groups today"):
            tree.take(1, rows=2, policy_version=1)
    assert (tree.stats.waiting, tree.stats.trained, tree.stats.batches) == (2, 0, 0)
    batch = tree.take(1, rows=2, policy_version=1)
    assert (ids(rollouts_of(batch)), ids(batch.expired)) == ([0, 1], [2])


def test_ages_and_versions():
    clock = Clock()
    tree = RolloutTree(clock=clock)
    assert (tree.stats.oldest_version, tree.stats.oldest_age, tree.stats.mean_age) == (None, 0, 0)
    for version, seconds in ((4, 6.0), (3, 2.0)):
        tree.add([version], policy_version=version)
        clock.now += seconds
    assert (tree.stats.oldest_version, tree.stats.oldest_age, tree.stats.mean_age) == (3, 8, 5)


def test_kinds_of_integers():
    tree = RolloutTree()
    for tokens in (
        [1, 2],
        (1, 2),
        range(1, 3),
        np.array([1, 2], np.uint64),
        np.array([0, 1, 0, 2])[1::2],
        np.int8([1]),
    ):
        tree.add(tokens)
    assert tree.stats.tree_tokens == 2
    wide = RolloutTree(dtype=np.int64)
    wide.add([2**40, -5])
    assert rollouts_of(wide.take(1, rows=1))[0].tokens.tolist() == [2**40, -5]


@pytest.mark.parametrize(
    "tokens, message",
    [
        ([1.5], "float64"),
        ([[1]], "shape"),
        ([True], "bool"),
        ([2**31], "dtype=numpy.int64"),
        (np.array([-(2**31) - 1]), "dtype=numpy.int64"),
        (range(11), "at most 10 tokens"),
        (None, "the rollout"),
    ],
)
def test_bad_tokens_are_rejected(tokens, message):
    tree = RolloutTree(max_tokens=10)
    with pytest.raises(PlanError, match=message):
        tree.add(tokens)
    assert (tree.stats.rejected, tree.stats.added) == (1, 0)


@pytest.mark.parametrize(
    "request_, message",
    [
        ({}, "rows, tokens or seconds"),
        ({"rows": 0}, "bad value for rows"),
        ({"tokens": 1.5}, "bad value for tokens"),
        ({"seconds": -1}, "bad value for seconds"),
        ({"seconds": "soon"}, "bad value for seconds"),
        ({"rows": 1, "policy_version": None}, "bad value for policy_version"),
        ({"rows": 1, "num_groups": 0}, "bad value for num_groups"),
        ({"rows": 1, "timeout": "soon"}, "bad value for timeout"),
    ],
)
def test_bad_requests(request_, message):
    tree = RolloutTree(max_staleness=1)
    tree.add([1])
    with pytest.raises(PlanError, match=message):
        tree.take(**{"num_groups": 1, "policy_version": 0} | request_)
    assert len(tree) == 1


@pytest.mark.parametrize(
    "arguments",
    [{"max_staleness": -1}, {"max_tokens": 0}, {"max_rollouts": np.bool_(True)}, {"patience": None}, {"dtype": float}],
)
def test_bad_settings(arguments):
    with pytest.raises(PlanError, match=f"bad value for {next(iter(arguments))}"):
        RolloutTree(**arguments)


def test_numbers_of_numpy():
    tree = RolloutTree(max_staleness=np.int64(1), max_rollouts=np.array(4), patience=np.uint8(2))
    tree.add([1], policy_version=np.int32(3), timeout=np.float32(1))
    batch = tree.take(np.int64(1), rows=np.int64(1), seconds=np.float32(5), policy_version=np.int64(3))
    assert len(batch.groups) == 1 and type(tree.max_rollouts) is int


def test_batches_are_in_lexicographic_order_of_balanced_groups():
    tree = RolloutTree()
    for n in np.random.default_rng(0).permutation(40).tolist():
        tree.add([n // 10] * 5 + [n])
    groups = tree.take(4, rows=40).groups
    order = [tuple(rollout.tokens) for group in groups for rollout in group]
    assert all(left < right for left, right in pairwise(order))
    assert [tree_tokens(rollout.tokens for rollout in group) for group in groups] == [15] * 4
