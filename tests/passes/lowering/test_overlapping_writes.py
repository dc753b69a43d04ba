"""Writes from a part of the same tensor: refused where the order of the writes counts, else as in eager mode."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dta_compile.errors import RefusalError
from tests.support.tiny import VOCABULARY, WIDTH, after, assert_same, shared_ids


class Written(nn.Module):
    """One layer of attention whose keys `[B, S, WIDTH]` are written to in place."""

    def __init__(self, write):
        super().__init__()
        torch.manual_seed(0)
        self.write = write
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.double()

    def forward(self, ids):
        x = self.embedding(ids)
        key = self.key(x)
        self.write(key)
        heads = (value[:, None] for value in (self.query(x), key, x))
        return self.head(F.scaled_dot_product_attention(*heads, is_causal=True)[:, 0])


def earlier_tokens(key):
    key[:, 1:, 4:] = key[:, :-1, 4:]


def next_features(key):
    key[..., 1:].copy_(key[..., :-1])


def sums(key):
    key[..., 1:] += key[..., :-1]


def the_first_is_added_to_all(key):
    key[..., :] += key[..., :1]


def the_other_half(key):
    key[..., :4] = key[..., 4:8]


def every_other(key):
    key[..., ::2] = key[..., 1::2]


def the_first_for_all(key):
    key[..., :] = key[..., :1]


def a_copy_of_earlier_features(key):
    key[..., 1:] = key[..., :-1].clone()


def itself(key):
    key += key


def nothing(key):
    key[..., :0] = key[..., 3:3]


def listed(key):
    key[..., [3, 4]] = key[..., 1:3]


def step(model, run):
    ids = shared_ids(4, 9)
    return after(model, lambda: run(ids).square().sum().backward())


@pytest.mark.parametrize("write", [earlier_tokens, next_features, sums, the_first_is_added_to_all])
def test_what_the_write_changes_before_it_is_read_is_refused(write):
    torch._dynamo.reset()
    model = Written(write)
    with pytest.raises(RefusalError, match=r"overlapping part of itself[^!]*test_overlapping_writes[^!]*\.clone\(\)"):
        step(model, torch.compile(model, backend="dta"))


@pytest.mark.parametrize(
    "write", [the_other_half, every_other, the_first_for_all, a_copy_of_earlier_features, itself, nothing, listed]
)
def test_what_no_order_changes_is_as_in_eager_mode(write):
    torch._dynamo.reset()
    model = Written(write)
    expected = step(model, model)
    assert_same(step(model, torch.compile(model, backend="dta", options={"codegen": "eager"})), expected)
