"""`PrefixSampler`: every row once an epoch, rows that share prefixes in one step, and neighbours on one rank."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dta_compile.errors import OptionError, PlanError
from dta_compile.plan import PrefixTree
from dta_compile.rollouts import PrefixSampler

# Eight prompts of four answers each, of which pairs begin alike; arrival takes turns between the prompts.
ROWS = [[7, 8, *range(10 * p, 10 * p + 9), a // 2, 100 + a] for a in range(4) for p in range(8)]


def steps(sampler, rows):
    order = list(sampler)
    return [order[i : i + rows] for i in range(0, len(order), rows)]


@given(
    st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=20),
    st.integers(1, 7),
    st.integers(1, 3),
    st.integers(-2, 2),
)
def test_every_row_comes_once_an_epoch(sequences, batches, ranks, seed):
    sampler = PrefixSampler(sequences, 2 * batches * ranks, 2, ranks, seed)
    for sampler.epoch in (0, 1):
        assert sorted(sampler) == list(range(len(sampler))) == list(range(len(sequences)))


def test_epochs_differ_and_seeds_tell_them():
    sampler, again, other = (PrefixSampler(ROWS, 4, seed=seed) for seed in (3, 3, 4))
    epochs = []
    for sampler.epoch in range(3):
        epochs.append(list(sampler))
    again.epoch = 2
    assert list(again) == list(again) == epochs[2]
    assert not any(a == b for a, b in itertools.combinations([*epochs, list(other)], 2))


def test_what_shares_is_in_one_step():
    sampler, trees = PrefixSampler(ROWS, 4), []
    for sampler.epoch in range(3):
        trees += [PrefixTree.build([ROWS[i] for i in step]).num_rows for step in steps(sampler, 4)]
        groups = [{i % 8 for i in step} for step in steps(sampler, 4)]
        assert all(len(group) == 1 for group in groups) and groups != [{p} for p in range(8)]
    assert set(trees) == {11 + 2 + 4}


@pytest.mark.parametrize("splits", [False, True])
def test_a_rank_gets_neighbours_from_accelerate(splits):
    """Two ranks with two batches of two rows each a step: answers to one prompt, and so all of them on one rank."""
    accelerate = pytest.importorskip("accelerate.data_loader")
    data = pytest.importorskip("torch.utils.data")
    sampler = PrefixSampler(ROWS, 8, 2, 2)
    batches = data.BatchSampler(sampler, 4 if splits else 2, drop_last=False)
    for rank in range(2):
        of_rank = list(accelerate.BatchSamplerShard(batches, 2, rank, split_batches=splits))
        for first, second in zip(of_rank[::2], of_rank[1::2], strict=True):
            assert len({i % 8 for i in first + second}) == 1


def test_steps_that_cannot_be_divided_are_errors():
    for rows, batch, ranks in ((0, None, 1), (6, 4, 1), (6, 2, 2), (4, 1, 0)):
        with pytest.raises(PlanError, match="a step cannot be divided into batches"):
            PrefixSampler(ROWS, rows, batch, ranks)
    for sizes in ((4.0,), ("4",), (4, 2.0), (4, 2, True), (4, 2, 1, 0.5)):
        with pytest.raises(PlanError, match=r"bad value for (rows|batch|ranks|seed)"):
            PrefixSampler(ROWS, *sizes)
    assert [*PrefixSampler(ROWS, np.int64(4), seed=np.int64(3))] == [*PrefixSampler(ROWS, 4, seed=3)]


def test_rows_of_a_data_set_are_read_by_their_columns():
    from dta_compile.rollouts.prefix_keys import prefix_keys

    talk = [{"role": "user", "content": "é"}, {"role": "assistant", "content": "b"}]
    short, long = prefix_keys([{"messages": talk[:1]}, {"messages": talk}])
    assert np.array_equal(short[:-1], long[: len(short) - 1])
    pair, texts = {"chosen_ids": [3], "prompt_ids": [1, 2], "prompt": "a"}, {"text": "b", "prompt": "a"}
    assert [key.tolist() for key in prefix_keys([pair])] == [[1, 2, 3]]
    assert [key.tolist() for key in prefix_keys([texts, {"prompt": ""}])] == [[97], []]
    unusual = {"prompt_ids": [1], "chosen_ids": None, "completion_ids": [2**40]}
    assert [key.tolist() for key in prefix_keys([unusual])] == [[1, 2**40]]
    assert not prefix_keys([])
    with pytest.raises(OptionError, match="rows without tokens"):
        prefix_keys([{"pixels": 1}])
    with pytest.raises(OptionError, match="rows without tokens"):
        prefix_keys([{"input_ids": [1.5]}])


class Picture:
    """Like an image of PIL: its text has its address, its bytes are its contents."""

    def __init__(self, contents):
        self.contents = contents

    def tobytes(self):
        return self.contents


def test_rows_with_images_have_the_same_keys_on_all_ranks():
    from dta_compile.rollouts.prefix_keys import prefix_keys

    def rows():
        return [{"messages": [{"role": "user", "content": [{"image": Picture(name)}]}]} for name in (b"a", b"b")]

    of_ranks = rows(), rows()  # both are kept, at other addresses
    keys, others = map(prefix_keys, of_ranks)
    assert all(map(np.array_equal, keys, others)) and not np.array_equal(*keys)
