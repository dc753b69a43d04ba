"""Attention masks: what is derived of them holds for all pairs of tokens, or they are refused by name."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
import z3

from dta_compile.errors import RefusalError, RuntimeContractError
from tests.support.masks import calls

IDS = torch.tensor([[5, 3, 7, 7, 2, 9, 4, 0, 0], [5, 3, 7, 1, 2, 2, 8, 6, 1], [3, 3, 65, 66, 2, 0, 0, 0, 0]])
LONGER = torch.cat([IDS, IDS], dim=1).clamp(min=1)[:2]
MASK = (IDS != 0).long()
LEFT = MASK.flip(1)
LAST = torch.tensor([[3, 3, 3, 3, 8, 8, 8, 8, 8]]).expand(3, 9)  # columns of the sequences of two
FIRST = torch.tensor([[0, 0, 0, 0, 4, 4, 4, 4, 4]]).expand(3, 9)
RESTARTING = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]).expand(3, 9)
IN_ORDER = torch.arange(9).expand(3, 9) + torch.tensor([[0], [3], [1]])
TABLES = {
    "tril": torch.ones(32, 32, dtype=torch.bool).tril(),
    "negative": torch.full((1, 1, 32, 32), float("-inf")).triu(1),
    "near": torch.arange(32) < 5,
    "odd": torch.ones(32, 32, dtype=torch.bool).tril()
    & ((torch.arange(32) % 2 == 0) | torch.eye(32, dtype=torch.bool)),
    "padding_ids": torch.arange(100) != 0,
}


def positions(ids):
    place = torch.arange(ids.shape[1])
    return place[:, None], place[None]


def near(ids, window):
    query, key = positions(ids)
    return (key <= query) & (query - key < window)


def causal(ids):
    query, key = positions(ids)
    return key <= query


def pairs(values, compare):
    return compare(values[:, None, :, None], values[:, None, None, :])


def packed(ids, position_ids):
    starts = torch.cat([position_ids[:, :1] - 1, position_ids], 1).diff(dim=1) != 1
    return causal(ids) & pairs(starts.cumsum(1), torch.eq)


def additive(ids, padding, dtype=torch.float64):
    least = torch.finfo(dtype).min
    bias = torch.full((ids.shape[1],) * 2, least, dtype=dtype).triu(1)[None, None].expand(len(ids), 1, -1, -1).clone()
    hidden = (bias == 0) & (padding[:, None, None, :] == 0)
    return bias.masked_fill(hidden, least)


def expanded(ids, padding):
    """A sum of a causal mask and an inverted padding mask that is filled where it is not zero, as OPT and BLOOM had."""
    least = torch.finfo(torch.float64).min
    inverted = 1.0 - padding[:, None, None, :].expand(len(ids), 1, *(2 * ids.shape[1:])).double()
    return inverted.masked_fill(inverted.bool(), least) + torch.full((ids.shape[1],) * 2, least).triu(1).double()


def kept_finite(ids, padding):
    """A sum of both masks, of which what is minus infinity is raised, as OLMo and MPT have it."""
    least = torch.finfo(torch.float32).min
    bias = torch.full((ids.shape[1],) * 2, least).triu(1) + (1.0 - padding.float())[:, None, None, :] * least
    return bias.masked_fill(bias == float("-inf"), least).double()


def opened(mask, more):
    return mask | more(mask)


DISTANCE = positions(IDS)[0] - positions(IDS)[1]
GIVEN = causal(IDS) & (MASK[:, None] > 0)  # a mask for every row
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [0] * 9, [0, 1, 1, 1, 1, 1, 1, 1, 2]])
BLOCKS = causal(IDS) & (DOCUMENTS[:, :, None] == DOCUMENTS[:, None])
LEAST = torch.zeros(3, 9, 9).masked_fill(~GIVEN, torch.finfo(torch.float32).min)
SEVERAL = torch.where(DISTANCE < 0, float("-inf"), LEAST)

CLASSES = {
    # name: (mask, inputs of one or two calls, what the class says, windows or sizes of chunks by call)
    "causal": (causal, [(IDS,)], "causal", [0]),
    "a triangle": (
        lambda ids: torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril(),
        [(IDS,)],
        "causal",
        [0],
    ),
    "a triangle and its diagonal": (
        lambda ids: causal(ids).tril(-1) | torch.eye(ids.shape[1], dtype=torch.bool),
        [(IDS,)],
        "causal",
        [0],
    ),
    "minus infinity above": (
        lambda ids: torch.full((ids.shape[1],) * 2, float("-inf"), dtype=torch.float64).triu(1),
        [(IDS,)],
        "causal",
        [0],
    ),
    "a window": (lambda ids: near(ids, 4), [(IDS,)], "window 4", [4]),
    "a window by a fraction": (
        lambda ids: causal(ids) & (positions(ids)[0] - positions(ids)[1] <= 7 / 2),
        [(IDS,)],
        "window 4",
        [4],
    ),
    "a window by a remainder": (
        lambda ids: causal(ids) & ((positions(ids)[0] - positions(ids)[1]).clamp(max=5) % 5 < 4) & near(ids, 4),
        [(IDS,)],
        "window 4",
        [4],
    ),
    "a window by a multiple of the distance": (
        lambda ids: causal(ids) & (torch.rsub(positions(ids)[0] - positions(ids)[1], 6, alpha=2) >= 0),
        [(IDS,)],
        "window 4",
        [4],
    ),
    "half of the tokens": (lambda ids: near(ids, ids.shape[1] // 2), [(IDS,), (LONGER,)], "", [4, 9]),
    "an integer argument": (near, [(IDS, 3), (IDS, 5), (LONGER, 7)], "", [3, 5, 7]),
    "a tensor argument": (near, [(IDS, torch.tensor(3)), (IDS, torch.tensor(6))], "", [3, 6]),
    "a tensor argument that is a fraction": (
        near,
        [(IDS, torch.tensor(2.5)), (IDS, torch.tensor(1.0)), (IDS, torch.tensor(4.0))],
        "",
        [3, 1, 4],
    ),
    "a fraction argument": (near, [(IDS, 2.5), (IDS, 4.0)], "", [3, 4]),
    "a switch": (
        lambda ids, wide: causal(ids) & (wide | near(ids, 3)),
        [(IDS, torch.tensor(False)), (IDS, torch.tensor(True))],
        "",
        [3, 0],
    ),
    "padding": (
        lambda ids, mask: causal(ids) & mask.bool()[:, None, None, :],
        [(IDS, MASK), (IDS, LEFT)],
        "real tokens",
        [0, 0],
    ),
    "padding, kept finite": (kept_finite, [(IDS, MASK), (IDS, LEFT)], "real tokens", [0, 0]),
    "padding of queries too": (
        lambda ids, mask: causal(ids) & pairs(mask > 0, torch.logical_and),
        [(IDS, MASK)],
        "real tokens",
        [0],
    ),
    "padding, and every token itself": (
        lambda ids, mask: causal(ids) & mask.bool()[:, None, None, :] | torch.eye(ids.shape[1], dtype=torch.bool),
        [(IDS, MASK), (IDS, LEFT)],
        "real tokens where",
        [0, 0],
    ),
    "hidden padding, and every token itself": (
        lambda ids, mask: torch.zeros(()).masked_fill(
            (~causal(ids) | (mask == 0)[:, None, None, :]) & ~torch.eye(ids.shape[1], dtype=torch.bool), float("-inf")
        ),
        [(IDS, MASK), (IDS, LEFT)],
        "real tokens where",
        [0, 0],
    ),
    "padding, and queries that see nothing see all": (
        lambda ids, mask: opened(causal(ids) & mask.bool()[:, None, None, :], lambda m: ~m.any(-1, keepdim=True)),
        [(IDS, MASK), (IDS, LEFT)],
        "real tokens where",
        [0, 0],
    ),
    "padding, and queries all of whose keys are hidden see themselves": (
        lambda ids, mask: opened(
            causal(ids) & (mask == 1)[:, None, None, :],
            lambda m: (~m).all(-1)[..., None] & torch.eye(ids.shape[1], dtype=torch.bool),
        ),
        [(IDS, MASK), (IDS, LEFT)],
        "real tokens where",
        [0, 0],
    ),
    "padding that is one": (
        lambda ids, mask: causal(ids) & (mask == 1)[:, None, None],
        [(IDS, 2 * MASK - (IDS == 5).long())],
        "== 1",
        [0],
    ),
    "documents that end with a separator": (
        lambda ids: causal(ids) & pairs((ids == 7).long().cumsum(1) - (ids == 7).long(), torch.eq),
        [(IDS,)],
        "a sequence for each",
        [0],
    ),
    "separators of documents before this token": (
        lambda ids: (~causal(ids) | pairs(F.pad((ids == 7).cumsum(1)[:, :-1], (1, 0)), torch.ne)).double() * -1e9,
        [(IDS,)],
        "a sequence for each",
        [0],
    ),
    "padding from ids": (lambda ids: causal(ids) & (ids != 0)[:, None, None], [(IDS,)], r"ids\[row, key\] != 0", [0]),
    "padding from two ids": (
        lambda ids: causal(ids) & ~((ids == 0) | (ids == 1))[:, None, None],
        [(IDS,)],
        "real tokens",
        [0],
    ),
    "padding from a table": (
        lambda ids, table: causal(ids) & table[ids][:, None, None],
        [(IDS, TABLES["padding_ids"])],
        "real",
        [0],
    ),
    "lengths": (
        lambda ids, lengths: causal(ids) & (torch.arange(ids.shape[1]) < lengths[:, None])[:, None, None],
        [(IDS, torch.tensor([7, 9, 5])), (LONGER, torch.tensor([3, 14]))],
        "real tokens",
        [0, 0],
    ),
    "one minus, times": (
        lambda ids, mask: (1 - causal(ids).double() * mask[:, None, None]) * -1e9,
        [(IDS, MASK.double())],
        "real tokens",
        [0],
    ),
    "one minus, times, of integers": (
        lambda ids, mask: (1.0 - (causal(ids) * mask[:, None, None]).double()) * -1e9,
        [(IDS, MASK)],
        "real tokens",
        [0],
    ),
    "two biases": (
        lambda ids, bias: (
            torch.zeros(1, 1, *(2 * ids.shape[1:]), dtype=torch.float64).masked_fill(~causal(ids), -1e9)
            + bias[:, None, None]
        ),
        [(IDS, (MASK - 1) * 1e6), (IDS, torch.log(LEFT))],
        "real tokens",
        [0, 0],
    ),
    "as transformers once had it": (additive, [(IDS, MASK), (IDS, LEFT)], "real tokens", [0, 0]),
    "expanded": (expanded, [(IDS, MASK), (IDS, LEFT)], "real tokens", [0, 0]),
    "low precision": (lambda ids, mask: additive(ids, mask, torch.float16).double(), [(IDS, MASK)], "real tokens", [0]),
    "a buffer": (lambda ids, table: table[: ids.shape[1], : ids.shape[1]], [(IDS, TABLES["tril"])], "", [0]),
    "a buffer of -inf": (
        lambda ids, table: table[:, :, : ids.shape[1], : ids.shape[1]].double(),
        [(IDS, TABLES["negative"])],
        "",
        [0],
    ),
    "a buffer that is the wrong way round": (
        lambda ids, table: ~table[: ids.shape[1], : ids.shape[1]].mT,
        [(IDS, ~TABLES["tril"].mT)],
        "",
        [0],
    ),
    "distances looked up": (
        lambda ids, table: causal(ids) & table[(positions(ids)[0] - positions(ids)[1]).clamp(0, 31)],
        [(IDS, TABLES["near"]), (IDS, torch.arange(32) < 2)],
        "",
        [5, 2],
    ),
    "packed, one sequence a row": (packed, [(IDS, IN_ORDER)], "a sequence for each", [0]),
    "positions": (lambda ids, place: pairs(place, torch.ge), [(IDS, IN_ORDER)], "consecutive", [0]),
    "positions and a window": (
        lambda ids, place: pairs(place, torch.ge) & pairs(place, lambda q, k: q - k < 3),
        [(IDS, IN_ORDER)],
        "window 3",
        [3],
    ),
    "packed rows": (packed, [(IDS, RESTARTING), (IDS, IN_ORDER)], "a sequence for each", [0, 0]),
    "packed rows with a window by position": (
        lambda ids, place: packed(ids, place) & pairs(place, lambda query, key: (key <= query) & (query - key < 3)),
        [(IDS, RESTARTING)],
        "a sequence for each .*, consecutive",
        [3],
    ),
    "packed rows with a window and padding between": (
        lambda ids, segments: near(ids, 3) & pairs(segments, torch.eq) & (segments != 0)[:, None, None],
        [(IDS, torch.tensor([[0, 7, 7, 7, 0, 0, -2, -2, 0]]).expand(3, 9))],
        "real tokens where .* a sequence for each",
        [3],
    ),
    "documents": (
        lambda ids: causal(ids) & pairs((ids == 2).cumsum(1), torch.eq),
        [(IDS,)],
        "a sequence for each",
        [0],
    ),
    "sequences by two numbers": (
        lambda ids, segments: causal(ids) & pairs(segments // 2, torch.eq) & pairs(segments % 2, torch.eq),
        [(IDS, torch.tensor([[5, 5, 4, 4, 4, 1, 1, 7, 8]]).expand(3, 9))],
        "a sequence for each",
        [0],
    ),
    "no documents": (
        lambda ids: causal(ids) & pairs((ids == 77).cumsum(1), torch.eq),
        [(IDS,)],
        "a sequence for each",
        [0],
    ),
    "documents counted for each side": (
        lambda ids: causal(ids) & ((ids == 77).cumsum(1)[:, None, :, None] == (ids == 77).cumsum(1)[:, None, None, :]),
        [(IDS,)],
        "a sequence for each",
        [0],
    ),
    "segments that are padding, too": (
        lambda ids, mask: causal(ids) & pairs(mask, torch.eq) & (mask > 0)[:, None, None],
        [(IDS, MASK * 3)],
        "a sequence for each",
        [0],
    ),
    "segments of any number": (
        lambda ids, segments: causal(ids) & pairs(segments, torch.eq),
        [(IDS, (IDS * 0).add(2**62))],
        "a sequence for each",
        [0],
    ),
    "the last of few rows": (
        lambda ids: causal(ids) & (torch.arange(ids.shape[1])[-16:, None] - positions(ids)[1] < 3),
        [(IDS,)],
        "window 3",
        [3],
    ),
    "the last of few rows, written": (
        lambda ids: causal(ids) & (positions(ids)[0] - positions(ids)[1] < _last_written(ids)),
        [(IDS,)],
        "",
        [3],
    ),
    "any fraction": (
        lambda ids: causal(ids) & (~_full(ids, 0.5).any(1)[:, None] | near(ids, 3)),
        [(IDS,)],
        "window 3",
        [3],
    ),
    "all infinite": (lambda ids: causal(ids) & _full(ids, -torch.inf).all(1)[:, None], [(IDS,)], "causal", [0]),
    "any of bytes": (
        lambda ids: causal(ids) & (_full(ids, 7).to(torch.uint8).any(1)[:, None] * 3 > near_by(ids)),
        [(IDS,)],
        "window 3",
        [3],
    ),
    "a number for a truth value": (
        lambda ids: causal(ids) & (near_by(ids) < 3 * torch.full(ids.shape[1:], ids.shape[1], dtype=torch.bool).long()),
        [(IDS,)],
        "",
        [3],
    ),
    "an argument for every token": (
        lambda ids, window: causal(ids) & (near_by(ids).float() <= window.expand(ids.shape[1])[:, None]),
        [(IDS, torch.tensor(2.5, dtype=torch.float64))],
        "",
        [3],
    ),
    "written over behind whole dimensions": (lambda ids: _future_hidden(ids), [(IDS,)], "causal", [0]),
    "written over": (lambda ids, mask: _written_over(ids, mask), [(IDS, MASK)], "real tokens", [0]),
    "rolled and cut": (
        lambda ids: torch.cat([causal(ids)[-1:], causal(ids)])[1:].flip(0).flip(0),
        [(IDS,)],
        "causal",
        [0],
    ),
    "flattened and back": (lambda ids: causal(ids).reshape(-1).view(1, 1, ids.shape[1], -1), [(IDS,)], "causal", [0]),
    "sums of what is zero for zeros and ones": (
        lambda ids, mask: causal(ids) & ((mask * (1 - mask)).cumsum(1) == 0)[:, None, None],
        [(IDS, MASK / 1.0), (IDS, MASK * 1.0 + (IDS == 9))],
        "real tokens",
        [0, 0],
    ),
    "chunks": (
        lambda ids: causal(ids) & (positions(ids)[0] // 4 == positions(ids)[1] // 4),
        [(IDS,), (LONGER,)],
        "causal, chunks of 4 by key$",
        [4, 4],
    ),
    "chunks by their first tokens": (
        lambda ids: causal(ids) & (positions(ids)[1] >= positions(ids)[0] - positions(ids)[0] % 3),
        [(IDS,)],
        "chunks of 3 by key",
        [3],
    ),
    "chunks by a fraction that is rounded": (
        lambda ids: causal(ids) & torch.eq(*(place.div(4, rounding_mode="floor") for place in positions(ids))),
        [(IDS,)],
        "chunks of 4",
        [4],
    ),
    "chunks of one token": (
        lambda ids: causal(ids) & (positions(ids)[0] // 1 == positions(ids)[1] // 1),
        [(IDS,)],
        "window 1",
        [1],
    ),
    "chunks of a tensor argument": (
        lambda ids, size: causal(ids) & torch.eq(*((place - place % size) for place in positions(ids))),
        [(IDS, torch.tensor(3)), (IDS, torch.tensor(5))],
        "",
        [3, 5],
    ),
    "chunks of an integer argument": (
        lambda ids, size: causal(ids) & torch.eq(*(place // size for place in positions(ids))),
        [(IDS, 3), (IDS, 5), (LONGER, 4)],
        "",
        [3, 5, 4],
    ),
    "chunks and padding": (
        lambda ids, mask: causal(ids) & chunks_after_padding(ids, mask) & mask.bool()[:, None, None, :],
        [(IDS, MASK), (IDS, LEFT), (IDS, MASK * 0)],
        r"chunks of 3 by key - .*\[row\], real tokens",
        [3, 3, 3],
    ),
    "chunks of packed rows": (
        lambda ids, place: (
            packed(ids, place) & pairs(place, lambda query, key: (key <= query) & (query // 2 == key // 2))
        ),
        [(IDS, RESTARTING), (IDS, RESTARTING + 4), (IDS, RESTARTING[:, :4].repeat(1, 3)[:, :9])],
        r"chunks of 2 by rest\S*\[row, key\], a sequence for each .*, consecutive",
        [2, 2, 2],
    ),
    "first tokens beside a window": (
        lambda ids: causal(ids) & (near(ids, 3) | (positions(ids)[1] < 2)),
        [(IDS,), (LONGER,), (IDS[:, :2],)],
        "window 3, and all keys where key < 2",
        [3, 3, 3],
    ),
    "every fourth token beside a window, by what is hidden": (
        lambda ids: ~((positions(ids)[1] > positions(ids)[0]) | ~near(ids, 2) & (positions(ids)[1] % 4 != 3)),
        [(LONGER,)],
        "window 2, and all keys where",
        [2],
    ),
    "one row": (
        lambda ids, mask: causal(ids) & mask.bool()[:, None, None, :],
        [(IDS[:1], MASK[:1])],
        "real tokens",
        [0],
    ),
    "values with padding": (lambda ids, mask: mask, [(IDS, GIVEN[:, None])], r"causal, real .*key, key\]$", [0]),
    "values with padding in front": (
        lambda ids, mask: mask[:, None] & causal(ids),
        [(IDS, causal(IDS) & (LEFT[:, None] > 0))],
        "real tokens",
        [0],
    ),
    "values with a window": (lambda ids, mask: mask[:, None], [(IDS, GIVEN & (DISTANCE < 4))], "window 4", [4]),
    "values of packed rows": (lambda ids, mask: mask[:, None], [(IDS, BLOCKS)], "a sequence for each", [0]),
    "values of packed rows with a window": (
        lambda ids, mask: ~mask[:, None],
        [(IDS, ~(BLOCKS & (DISTANCE < 3)))],
        "window 3.*a sequence for each",
        [3],
    ),
    "values of packed rows, and padding": (
        lambda ids, mask, padding: mask[:, None] & padding[:, None, None, :],
        [(IDS, BLOCKS, MASK > 0)],
        r"real tokens where .*\[row, key\], a sequence",
        [0],
    ),
    "values of documents": (
        lambda ids, mask: (causal(ids) & mask)[:, None],
        [(IDS, DOCUMENTS[:, :, None] == DOCUMENTS[:, None]), (IDS, torch.ones(3, 9, 9, dtype=torch.bool))],
        "causal",
        [0, 0],
    ),
    "values for all rows": (lambda ids, mask: mask, [(IDS, BLOCKS[0])], "a sequence for each", [0]),
    "values of a bias": (lambda ids, mask: mask.double()[:, None], [(IDS, LEAST)], "real tokens", [0]),
    "values of a bias, several": (lambda ids, mask: mask.double()[:, None], [(IDS, SEVERAL)], "real tokens", [0]),
    "values of a bias, compared": (lambda ids, mask: (mask == 0)[:, None], [(IDS, LEAST)], "real tokens", [0]),
    "values of zero and one": (
        lambda ids, mask: torch.where(mask[:, None] == 0, float("-inf"), 0.0).double(),
        [(IDS, GIVEN.float())],
        "real tokens",
        [0],
    ),
    "values of a longer mask": (
        lambda ids, mask: mask[:, None, : ids.shape[1], : ids.shape[1]],
        [(IDS, TABLES["tril"].expand(3, 32, 32).clone())],
        "causal",
        [0],
    ),
    "the last column of a sequence": (
        lambda ids, last: causal(ids) & at(ids, last[:, None, None], torch.le),
        [(IDS, LAST), (IDS, LAST[:, -1:].expand(3, 9) + 2)],
        "the last column in rest",
        [0, 0],
    ),
    "before the end of a sequence, near, with padding": (
        lambda ids, end, mask: near(ids, 3) & at(ids, end[:, None, None], torch.lt) & (mask[:, None, None] != 0),
        [(IDS, LAST + 1, MASK)],
        "window 3, real tokens.*the last column",
        [3],
    ),
    "a last column of each row, padded at either end": (
        lambda ids, last, mask: causal(ids) & at(ids, last[:, None, None], torch.le) & (mask[:, None, None] != 0),
        [
            (
                IDS,
                torch.tensor([[7], [8], [9]]).expand(3, 9),
                torch.tensor([[1] * 3 + [0] * 6, [0] * 5 + [1] * 4, [1] * 9]),
            )
        ],
        "the last column in rest",
        [0],
    ),
    "from the first column of a sequence": (
        lambda ids, first: causal(ids) & (torch.arange(ids.shape[1]) >= first[:, None, :, None]),
        [(IDS, FIRST)],
        "the first column in rest",
        [0],
    ),
    "values that are computed": (
        lambda ids, padding: ((padding[:, :, None] @ padding[:, None]) > 0)[:, None] & causal(ids),
        [(IDS, MASK)],
        "real tokens",
        [0],
    ),
}


def at(ids, bound, compare):
    """`[B, S, S]` the column of a query compared with a bound of each key."""
    return compare(torch.arange(ids.shape[1])[:, None], bound)


def chunks_after_padding(ids, mask):
    left = (mask.cumsum(-1) == 0).sum(-1)[:, None, None, None]
    query, key = positions(ids)
    return (query - left) // 3 == (key - left) // 3


def near_by(ids):
    query, key = positions(ids)
    return query - key


def _full(ids, number):
    return torch.full((ids.shape[1],) * 2, number)


def _last_written(ids):
    width = torch.full((ids.shape[1],), 5)
    width[-100:] = 3
    return width[:, None]


def _future_hidden(ids):
    allowed = torch.ones(len(ids), 1, ids.shape[1], ids.shape[1], dtype=torch.bool)
    allowed[:, :, ~causal(ids)] = False
    return allowed


def _written_over(ids, mask):
    allowed = torch.zeros(len(ids), 1, ids.shape[1], ids.shape[1], dtype=torch.bool)
    allowed[:, :, :, :] = causal(ids)
    allowed[mask[:, None, None].expand_as(allowed) == 0] = False
    return allowed


def reach(found):
    """The window of a mask, or the size of its chunks; 0: it has neither."""
    (limit,) = found.limits
    return 0 if limit is None else limit.tokens


SHOWN_BY_OTHERS = {
    "a window by a fraction",
    "a tensor argument",
    "padding from two ids",
    "one minus, times, of integers",
    "packed, one sequence a row",
    "positions",
    "no documents",
    "documents counted for each side",
    "chunks of a tensor argument",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SHOWN_BY_OTHERS else name for name in CLASSES]
)
@pytest.mark.sample(17)
def test_masks_that_are_understood(name):
    make_mask, inputs, text, reaches = CLASSES[name]
    traced = calls(make_mask, inputs)
    found = [one.check() for one in traced]
    assert [reach(one) for one in found] == reaches
    assert all(re.search(text, str(one.classes[0])) for one in found)
    again = [one.pickled().check() for one in traced]
    assert [str(one.classes[0]) for one in again] == [str(one.classes[0]) for one in found]


def test_documents_whose_padding_reads_itself_are_no_positions():
    """A number of the document that grew from token to token would give a window of one token, too."""

    def mask(ids, real):
        same = pairs((ids == 7).cumsum(1), torch.eq) & real.bool()[:, None, None]
        return causal(ids) & same | torch.eye(ids.shape[1], dtype=torch.bool)

    (one,) = calls(mask, [(IDS, MASK)])
    assert re.search(
        "real tokens where.*a sequence for each|a sequence for each.*real tokens", str(one.check().classes[0])
    )


def hidden_by(number):
    return torch.zeros(3, 9, 9).masked_fill(~GIVEN, number)


@pytest.mark.parametrize(
    "mask, given, filler",
    [
        (causal, (), -math.inf),
        (lambda ids: torch.where(causal(ids), 0.0, -1e9), (), -1e9),
        (lambda ids, pad: torch.where(causal(ids), 0.0, -math.inf) - (1 - pad[:, None, None]) * 2e4, (MASK,), -2e4),
        (lambda ids, bias: torch.where(causal(ids), 0.0, -1e9) + bias[:, None, None], (-3e4 * (1 - MASK),), -3e4),
        (lambda ids, given: given[:, None], (hidden_by(-5e4),), -5e4),
        (lambda ids, given: given[:, None], (torch.where(DISTANCE < 0, -math.inf, hidden_by(-6e4)),), -6e4),
    ],
)
def test_the_largest_number_that_hides_a_key_is_known(mask, given, filler):
    (traced,) = calls(lambda ids, *given: mask(ids, *given).double() if given else mask(ids), [(IDS, *given)])
    assert traced.check().fillers == [filler]


WRITES = {
    "in place": lambda table, new: table.copy_(new),
    "behind autograd": lambda table, new: table.data.copy_(new),
    "in numpy": lambda table, new: table.numpy().__setitem__(slice(None), new.numpy()),
    "other storage": lambda table, new: setattr(table, "data", new),
}


def test_tables_are_read_as_they_are_at_each_call():
    table = TABLES["near"].clone()
    (traced,) = calls(lambda ids, table: causal(ids) & table[near_by(ids).clamp(0, 31)], [(IDS, table)])
    for width, (name, write) in enumerate(WRITES.items(), 1):
        assert reach(traced.check()) == (5 if width == 1 else width - 1)
        write(table, torch.arange(32) < width)
        assert reach(traced.check()) == width, name


def test_tables_may_lie_anywhere_in_memory():
    table = torch.zeros(4 + 32, dtype=torch.bool)[4:].copy_(TABLES["near"])
    (traced,) = calls(lambda ids, table: causal(ids) & table[near_by(ids).clamp(0, 31)], [(IDS, table)])
    assert [reach(traced.check()) for _ in range(2)] == [5, 5]


@pytest.mark.parametrize("factor", [1, 2])
def test_numbers_are_read_from_tensors(factor):
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        (traced,) = calls(lambda ids, half: near(ids, half.item() * factor), [(IDS, torch.tensor(2))])
    assert reach(traced.check()) == 2 * factor


REFUSED = {
    # name: (mask, inputs, error, what it says)
    "blocks": (
        lambda ids: causal(ids) & (positions(ids)[0] // 4 - positions(ids)[1] // 4 < 3),
        (IDS,),
        RefusalError,
        "hides earlier tokens",
    ),
    "padding that its neighbours read": (
        lambda ids, mask: near(ids, 2) & causal(ids) | causal(ids) & mask.bool()[:, None, None, :],
        (IDS, MASK),
        RuntimeContractError,
        "the tokens that stay visible beside a sliding window are others",
    ),
    "a window for each row, beside padding of queries and keys": (  # not: padding is real, and attends to nothing
        lambda ids, mask, windows: (
            causal(ids)
            & (positions(ids)[0] - positions(ids)[1] < windows[:, None, None, None])
            & (mask.bool()[:, None, :, None] & mask.bool()[:, None, None])
        ),
        (IDS, MASK, torch.tensor([3, 1, 2])),
        RefusalError,
        "hides earlier tokens",
    ),
    "chunks that begin elsewhere": (
        lambda ids: causal(ids) & ((positions(ids)[0] + 1) // 4 == (positions(ids)[1] + 1) // 4),
        (IDS,),
        RuntimeContractError,
        "key \\+ 1 to be a multiple of 4[^$]*1 at row 0, token 0, which has 0 tokens",
    ),
    "chunks that count padding": (
        lambda ids, mask: causal(ids) & (positions(ids)[0] // 4 == positions(ids)[1] // 4) & mask.bool()[:, None, None],
        (IDS, LEFT),
        RuntimeContractError,
        "multiple of 4[^$]*2 at row 0, token 2",
    ),
    "chunks with padding within": (
        lambda ids, mask: causal(ids) & chunks_after_padding(ids, mask) & mask.bool()[:, None, None],
        (IDS, MASK.index_fill(1, torch.tensor([2]), 0)),
        RuntimeContractError,
        "grow by one[^$]*3 at row 0, token 3, which has 2 tokens",
    ),
    "chunks of packed rows that begin elsewhere": (
        lambda ids, place: (
            packed(ids, place) & pairs(place, lambda query, key: (key <= query) & (query // 3 == key // 3))
        ),
        (IDS, torch.tensor([[0, 1, 2, 3, 1, 2, 3, 4, 5]]).expand(3, 9)),
        RuntimeContractError,
        "multiple of 3[^$]*1 at row 0, token 4, which has 0 tokens",
    ),
    "chunks of other sizes": (
        lambda ids: causal(ids) & torch.eq(*(12 // (place + 1) for place in positions(ids))),
        (IDS,),
        RefusalError,
        "in another way than padding, a sliding window or chunks",
    ),
    "chunks of a fraction": (
        lambda ids: causal(ids) & torch.eq(*(place // 2.5 for place in positions(ids))),
        (IDS,),
        RefusalError,
        "cannot be decided",
    ),
    "chunks within a window": (
        lambda ids: causal(ids) & (positions(ids)[0] // 4 == positions(ids)[1] // 4) & near(ids, 3),
        (IDS,),
        RefusalError,
        "in another way than padding, a sliding window or chunks",
    ),
    "every second": (
        lambda ids: causal(ids) & ((positions(ids)[0] - positions(ids)[1]) % 2 == 0),
        (IDS,),
        RefusalError,
        "query 2 and key 0",
    ),
    "images": (
        lambda ids: causal(ids) | pairs(ids > 60, torch.logical_and),
        (IDS,),
        RefusalError,
        r"ids\[row, query\] > 60",
    ),
    "a prefix": (
        lambda ids, prefix: causal(ids) | (positions(ids)[1] < prefix),
        (IDS, 3),
        RefusalError,
        "attend to later ones",
    ),
    "strictly earlier": (
        lambda ids: positions(ids)[1] < positions(ids)[0],
        (IDS,),
        RefusalError,
        "hides every token 0 from itself",
    ),
    "other tokens of each row beside a window": (
        lambda ids: causal(ids) & (near(ids, 3) | (ids == 5)[:, None, None, :]),
        (IDS,),
        RuntimeContractError,
        "stay visible beside a sliding window are others in each sequence",
    ),
    "no first tokens": (
        lambda ids: causal(ids) & (positions(ids)[1] > 1),
        (IDS,),
        RefusalError,
        "hides every token 0 from itself",
    ),
    "a far window": (
        lambda ids: causal(ids) & ((positions(ids)[0] - positions(ids)[1]) != 700),
        (IDS,),
        RefusalError,
        r"query 7\d\d and key",
    ),
    "no window": (near, (IDS, 0), RefusalError, "from itself"),
    "a window for each row": (
        lambda ids, width: causal(ids) & (positions(ids)[0] - positions(ids)[1] < width[:, None, None, None]),
        (IDS, torch.tensor([3, 4, 5])),
        RefusalError,
        "hides earlier tokens",
    ),
    "a switch for each row": (
        lambda ids, wide: causal(ids) & (wide[:, None, None, None] | near(ids, 3)),
        (IDS, torch.tensor([True, False, True])),
        RefusalError,
        "hides earlier tokens",
    ),
    "a table with holes": (
        lambda ids, table: table[: ids.shape[1], : ids.shape[1]],
        (IDS, TABLES["odd"]),
        RefusalError,
        "sliding window: row 0, query 2 and key 1",
    ),
    "heads": (
        lambda ids: torch.stack([causal(ids), near(ids, 2)])[None],
        (IDS,),
        RefusalError,
        "differs between heads",
    ),
    "values that let tokens attend to later ones": (
        lambda ids, mask: mask,
        (IDS, (GIVEN | (torch.arange(9) == 3) & (MASK[:, :, None] > 0))[:, None]),
        RefusalError,
        "attend to later ones: row 0, query 0 and key 3",
    ),
    "values that hide an earlier token": (
        lambda ids, mask: mask[:, None],
        (IDS, GIVEN & ((DISTANCE != 2) | (torch.arange(3) != 1)[:, None, None])),
        RefusalError,
        "another way than padding, sequences or a sliding window: row 1, query 3 and key 1",
    ),
    "values of two windows": (
        lambda ids, mask: mask[:, None],
        (IDS, GIVEN & (torch.tensor([3, 4, 3])[:, None, None] > DISTANCE)),
        RefusalError,
        "a window other than of 4 tokens: row 0, query 3 and key 0",
    ),
    "values of a slope": (
        lambda ids, mask: mask[:, None],
        (IDS, torch.where(GIVEN, -DISTANCE.double(), float("-inf"))),
        RefusalError,
        "a bias of -1.0: row 0, query 1 and key 0",
    ),
    "values of blocks alone": (
        lambda ids, mask: mask[:, None],
        (IDS, pairs(MASK, torch.eq)[:, 0]),
        RefusalError,
        "lets tokens attend to later ones",
    ),
    "a square of a sum": (
        lambda ids: torch.where(causal(ids), -((positions(ids)[1] + positions(ids)[0]).double() ** 2), float("-inf")),
        (IDS,),
        RefusalError,
        "values other than 0 and -inf",
    ),
    "a small bias": (
        lambda ids: torch.where(causal(ids), 0.0, -10.0).double(),
        (IDS,),
        RefusalError,
        "values other than 0 and -inf: -10",
    ),
    "a rounded range": (
        lambda ids: (
            torch.arange(ids.shape[1], dtype=torch.bfloat16)[:, None] >= torch.arange(ids.shape[1]).bfloat16()[None]
        ),
        (IDS,),
        RefusalError,
        "cannot be decided|later ones",
    ),
    "a narrow range": (
        lambda ids: torch.arange(ids.shape[1]).to(torch.int8)[:, None] >= torch.arange(ids.shape[1])[None],
        (IDS,),
        RefusalError,
        "cannot be decided|later ones|itself",
    ),
    "wrapping padding": (
        lambda ids, mask: (
            causal(ids) & (mask.to(torch.uint8)[:, None, :, None] - mask.to(torch.uint8)[:, None, None] == 0)
        ),
        (IDS, MASK),
        RefusalError,
        "cannot be decided",
    ),
    "a rounded quotient": (
        lambda ids: causal(ids) & ((near_by(ids) / 4).bfloat16() <= 1),
        (IDS,),
        RefusalError,
        "a quotient that is rounded",
    ),
    "a quotient of nothing": (
        lambda ids: causal(ids) & (near_by(ids) / 2.0**127 <= 0),
        (IDS,),
        RefusalError,
        "a quotient that is rounded",
    ),
    "steps of a half": (
        lambda ids: (
            causal(ids) & (torch.full(ids.shape[1:], 0.5).cumsum(0)[:, None] - positions(ids)[1].float() * 0.5 < 1.5)
        ),
        (IDS,),
        RefusalError,
        "cannot be decided|itself",
    ),
    "rounded by promotion": (
        lambda ids: (
            torch.where(positions(ids)[1] >= 0, positions(ids)[1], torch.zeros(1, dtype=torch.bfloat16)).long()
            <= positions(ids)[0]
        ),
        (IDS,),
        RefusalError,
        "cannot be decided|later ones|itself",
    ),
    "beyond 64 bits": (
        lambda ids: causal(ids) & (positions(ids)[0] < positions(ids)[1] + (2**63 - 1)),
        (IDS,),
        RefusalError,
        "from itself|cannot be decided",
    ),
    "both beyond 64 bits": (
        lambda ids: positions(ids)[1] + (2**63 - 1) <= positions(ids)[0] + (2**63 - 1),
        (IDS,),
        RuntimeContractError,
        "between -2147483648 and",
    ),
    "positions beyond 64 bits": (
        lambda ids, place: pairs(place, torch.ge),
        (IDS, IN_ORDER + (2**63 - 5)),
        RuntimeContractError,
        "no arithmetic with it overflows",
    ),
    "differences beyond 64 bits": (
        lambda ids, place: causal(ids) & (pairs(place, torch.sub) >= 0),
        (IDS, IN_ORDER * 2**61),
        RuntimeContractError,
        "no arithmetic with it overflows",
    ),
    "no bound": (
        lambda ids: causal(ids) & (near_by(ids).clamp(min=-torch.inf) < 3),
        (IDS,),
        RefusalError,
        "cannot be decided",
    ),
    "a bound that wraps": (
        lambda ids: causal(ids) & (near_by(ids).clamp(0, 255).to(torch.uint8) < 300),
        (IDS,),
        RefusalError,
        "uint8 may not hold its numbers",
    ),
    "sequences in pieces": (
        lambda ids, segments: causal(ids) & pairs(segments, torch.eq),
        (IDS, torch.tensor([[1, 1, 2, 2, 2, 1, 1, 3, 3]]).expand(3, 9)),
        RuntimeContractError,
        "several pieces[^$]*rest[^$]*row 2, where one goes on at token 5",
    ),
    "sequences in pieces, by two numbers": (
        lambda ids, segments: causal(ids) & pairs(segments // 2, torch.eq) & pairs(segments % 2, torch.eq),
        (IDS, torch.tensor([[0, 0, 1, 1, 0, 0, 2, 2, 3]]).expand(3, 9)),
        RuntimeContractError,
        "several pieces",
    ),
    "the last column of another sequence": (
        lambda ids, last: causal(ids) & at(ids, last[:, None, None], torch.le),
        (IDS, LAST.index_fill(1, torch.tensor([0, 1, 2, 3]), 5)),
        RuntimeContractError,
        "the last column[^$]*rest[^$]*5 at row 0, token 3",
    ),
    "the first column of another sequence": (
        lambda ids, first: causal(ids) & (torch.arange(ids.shape[1]) >= first[:, None, :, None]),
        (IDS, FIRST.index_fill(1, torch.tensor([4, 5, 6, 7, 8]), 2)),
        RuntimeContractError,
        "the first column",
    ),
    "a token before its sequence": (
        lambda ids, first: causal(ids) & (torch.arange(ids.shape[1]) >= first[:, None, :, None]),
        (IDS, FIRST + 1),
        RuntimeContractError,
        "at most its column",
    ),
    "positions that restart": (
        lambda ids, place: pairs(place, lambda query, key: (key <= query) & (query - key < 3)),
        (IDS, RESTARTING),
        RuntimeContractError,
        "several packed sequences, or leave out some",
    ),
    "padding within a sequence and a window": (
        lambda ids, segments: near(ids, 3) & pairs(segments, torch.eq) & (ids != 0)[:, None, None],
        (IDS.clamp(1).index_fill(1, torch.tensor([5]), 0), RESTARTING.new_tensor([[1] * 4 + [2] * 5]).expand(3, 9)),
        RuntimeContractError,
        "padding between real tokens",
    ),
    "jumping positions": (
        lambda ids, place: pairs(place, torch.ge),
        (IDS, RESTARTING),
        RuntimeContractError,
        "input rest",
    ),
    "fractions of padding": (
        lambda ids, mask: (1 - causal(ids).double() * mask[:, None, None]) * -1e9,
        (IDS, MASK / 2),
        RuntimeContractError,
        "to be zero or one",
    ),
    "another bias": (
        lambda ids, bias: torch.where(causal(ids), 0.0, -1e9).double() + bias[:, None, None],
        (IDS, MASK - 3.0),
        RuntimeContractError,
        "to be zero",
    ),
}


LIKE_OTHERS = {
    "chunks of other sizes",
    "chunks that count padding",
    "a quotient of nothing",
    "both beyond 64 bits",
    "positions beyond 64 bits",
    "rounded by promotion",
    "steps of a half",
    "a far window",
    "sequences in pieces, by two numbers",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LIKE_OTHERS else name for name in REFUSED]
)
@pytest.mark.sample(11)
def test_masks_that_are_refused(name):
    make_mask, inputs, error, message = REFUSED[name]
    with pytest.raises(error) as caught:
        calls(make_mask, [inputs])[0].check()
    assert re.search(message, str(caught.value)), caught.value


@pytest.mark.parametrize(
    "name",
    [
        "blocks",
        "no window",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("a window for each row", "a small bias")),
    ],
)
def test_the_question_of_a_refused_proof_is_written_to_the_debug_folder(name, tmp_path, monkeypatch):
    """Also if a call refuses, as it does where there is no window; a model of the question is a counterexample."""
    make_mask, inputs, error, message = REFUSED[name]
    monkeypatch.setenv("DTA_DEBUG", str(tmp_path / "new"))
    with pytest.raises(error):
        calls(make_mask, [inputs])[0].check()
    (written,) = (tmp_path / "new").glob("mask_*.smt2")
    text = written.read_text()
    assert re.search(message, text)
    solver = z3.Solver()
    solver.from_string(text)
    assert solver.check() == z3.sat
