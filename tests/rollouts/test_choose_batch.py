"""Which rollouts make up a batch: what shares most, but nobody waits too long, and nothing expires for it."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dta_compile import RolloutTree
from dta_compile.errors import WaitTimeoutError
from tests.support.rollouts import ids, rollouts_of


def test_a_batch_keeps_relatives_together():
    tree = RolloutTree()
    for n in range(4):
        for family in range(3):
            tree.add([family, family, n])
    for family in range(3):
        batch = tree.take(1, rows=4)
        assert {rollout.tokens[0] for rollout in rollouts_of(batch)} == {family}, "the family of the oldest first"
        assert batch.compression == 12 / 6


def test_closest_relatives_come_first():
    tree = RolloutTree()
    far, near, prefix = [1, 2, 9, 9], [1, 2, 3, 9], [1, 2, 3]
    for sequence in ([1, 2, 3, 4], [8], far, near, prefix):
        tree.add(sequence)
    for rows, expected in ((3, {0, 3, 4}), (1, {1}), (1, {2})):
        assert set(ids(rollouts_of(tree.take(1, rows=rows)))) == expected


def test_what_adds_no_tokens_fits_into_a_full_batch():
    tree = RolloutTree()
    for sequence in ([1, 2, 3], [4, 5, 6], [1, 2], [1, 2, 3], [1, 2, 4], []):
        tree.add(sequence)
    assert set(ids(rollouts_of(tree.take(1, tokens=3)))) == {0, 2, 3, 5}


def test_a_rollout_longer_than_a_batch_goes_alone():
    tree = RolloutTree()
    for sequence in ([1] * 9, [2], [3]):
        tree.add(sequence)
    assert ids(rollouts_of(tree.take(1, tokens=2))) == [0]
    assert ids(rollouts_of(tree.take(1, tokens=2))) == [1, 2]


@given(st.data())
def test_nobody_leaves_later_than_patience_after_first_come_first_served(data):
    patience, rows = data.draw(st.integers(0, 4)), data.draw(st.integers(1, 5))
    tree, batch_number = RolloutTree(patience=patience), 0
    for arriving in data.draw(st.lists(st.integers(0, 12), max_size=12)):
        for _ in range(arriving):
            # Family 0 is large, and attracts batches.
            tree.add([data.draw(st.sampled_from([0, 0, 0, 0, 1, 2, 3])), data.draw(st.integers(0, 3))])
        while len(tree) >= rows and data.draw(st.booleans()):
            for rollout in rollouts_of(tree.take(1, rows=rows)):
                assert batch_number <= rollout.id // rows + patience
                assert patience or batch_number == rollout.id // rows
            batch_number += 1


@pytest.mark.parametrize("patience, batches", [(0, 2), (1, 3), (3, 5), (100, 10)])
def test_patience_bounds_how_long_a_loner_waits_for_older_ones_with_relatives(patience, batches):
    tree = RolloutTree(patience=patience)
    loner = 10
    for first in [*range(10), loner, *range(10), *range(10), *range(10)]:
        tree.add([first, first])
    waited = {}
    for _ in range(10 + 1):
        waited |= {r.id: r.batches_waited for r in rollouts_of(tree.take(1, rows=4, seconds=0))}
    assert waited[loner] == batches


def test_the_last_chance_to_be_trained_comes_before_sharing():
    tree = RolloutTree(max_staleness=1)
    for version, tokens in ((5, [1, 1]), (5, [1, 2]), (4, [9, 9]), (5, [1, 3])):
        tree.add(tokens, policy_version=version)
    batch = tree.take(1, rows=1, policy_version=5)
    assert (ids(rollouts_of(batch)), batch.expired) == ([2], [])


@given(st.data())
def test_sharing_lets_nothing_expire_that_first_come_first_served_would_train(data):
    staleness, rows = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 4))
    settings = {"max_staleness": staleness}
    tree, in_turn, version = RolloutTree(patience=9, **settings), RolloutTree(patience=0, **settings), 0
    for arriving in data.draw(st.lists(st.integers(0, 9), max_size=12)):
        for _ in range(arriving):
            tokens = [data.draw(st.sampled_from([0, 0, 0, 1, 2])), data.draw(st.integers(0, 2))]
            for each in (tree, in_turn):
                each.add(tokens, policy_version=version)
        for each in (in_turn, tree):
            with contextlib.suppress(WaitTimeoutError):
                each.take(1, rows=rows, policy_version=version, timeout=0)
        if in_turn.stats.expired:
            return
        assert not tree.stats.expired
        version = tree.stats.batches


def test_of_too_many_that_expire_soon_the_first_to_expire_leave_first():
    tree = RolloutTree(max_staleness=1, patience=9)
    for tokens, version in (([0, 0], 0), ([0, 1], 0), ([0, 2], 1), ([0, 3], 1), ([0, 4], 1)):
        tree.add(tokens, policy_version=version)
    assert ids(rollouts_of(tree.take(1, rows=2, policy_version=1))) == [0, 1]


def test_expiry_is_seen_several_batches_ahead():
    tree = RolloutTree(max_staleness=2, patience=9)
    for tokens in ([1, 1], [2, 2], [3, 3], [4, 4], [5, 5], [6, 6]):
        tree.add(tokens, policy_version=0)
    for n in range(2):
        tree.add([1, n], policy_version=1)
    # Six of version 0 leave in three batches of two only if these take nothing else, however much that shares.
    for version, expected in ((0, 0), (1, 0), (2, 0), (3, 1)):
        batch = tree.take(1, rows=2, policy_version=version)
        assert ({r.policy_version for r in rollouts_of(batch)}, batch.expired) == ({expected}, [])
