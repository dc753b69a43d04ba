"""Operators on values by the distance of a query and a key, `q - k`, that lowered graphs contain.

`dta::by_depth` marks a dense value whose entry for a token is that of the number of tokens before it in its sequence,
whatever its column is. `dta::entries_by_distance` reads the entries of a table over pairs of tokens by their distance,
once it has tested that they depend on nothing else, and `dta::hidden_pairs` which pairs the table hides.
"""

from __future__ import annotations

import torch

from dta_compile.errors import RefusalError
from dta_compile.ops.library import define

MOST_PAIRS = 2**22  # entries that are compared at a time

BY_DEPTH = define("by_depth(Tensor value) -> Tensor", torch.empty_like, torch.clone)


def _entries_by_distance(table: torch.Tensor, query: int, key: int, rounding: float, where: str) -> torch.Tensor:
    """Return the entries of key 0, whose distance is the number of the query, with a key dimension of size one.

    Args:
        table: entries of pairs of tokens along the dimensions `query` and `key`, of which those with `key > query` are
            not looked at.
        rounding: if positive, the softmax of a query reads the table. It does not see what is added for all keys, such
            as the `slope * query` between a bias `slope * key` and one by distance: where the entries themselves are no
            function of the distance, they may be one less that of the query's own key, up to this share of the terms.

    Raises:
        RefusalError: pairs of one distance have different entries.
    """
    pairs = table.detach().movedim((query, key), (-2, -1))
    wrong = _pair_that_differs(pairs)
    if wrong is None:
        return table.narrow(key, 0, 1).clone()
    own = pairs.diagonal(dim1=-2, dim2=-1)
    if rounding > 0 and bool(own.isfinite().all()):
        wrong = _pair_that_differs(pairs, own, rounding)
        if wrong is None:
            return (pairs[..., :1] - own[..., None]).movedim((-2, -1), (query, key))
    first, last = wrong
    raise RefusalError(
        "a bias of attention is no function of the distance of query and key",
        where=where,
        expected=f"one entry for all pairs of tokens that are {first - last} apart, as a prefix tree needs",
        got=f"another entry for query {first} and key {last} than for query {first - last} and key 0",
        hint="add biases that depend on the distance alone, or leave them out",
    )


def _pair_that_differs(
    pairs: torch.Tensor, less: torch.Tensor | None = None, rounding: float = 0.0
) -> tuple[int, int] | None:
    """Return a query and a key whose entry is not that of key 0 and the query as far from it; None: there are none.

    Args:
        less: finite numbers by query `[..., S]` to subtract, after which entries are equal up to `rounding` of the
            terms.
    """
    leading, tokens = pairs.shape[:-2], pairs.shape[-1]
    numbers = torch.arange(tokens, device=pairs.device)
    rows = max(1, MOST_PAIRS // max(leading.numel() * tokens, 1))
    for queries in numbers.split(rows):
        distances = queries[:, None] - numbers
        alike = pairs[..., 0][..., distances.clamp(min=0)]
        own = pairs[..., queries, :]
        if less is None:
            wrong = (own != alike) & ((own == own) | (alike == alike))  # NaN is like NaN
        else:
            terms = own, less[..., queries, None], alike, less[..., distances.clamp(min=0)]
            bound = torch.stack(torch.broadcast_tensors(*terms)).abs().sum(0) * rounding
            is_near = ((own - terms[1]) - (alike - terms[3])).abs() <= bound
            wrong = ~torch.where(bound.isfinite(), is_near, own == alike)
        wrong &= distances >= 0
        if bool(wrong.any()):
            query, key = (int(number) for number in wrong.nonzero()[0, -2:])
            return int(queries[query]), key
    return None


def _entries_by_distance_fake(table: torch.Tensor, query: int, key: int, rounding: float, where: str) -> torch.Tensor:
    return table.new_empty([1 if dim == key else size for dim, size in enumerate(table.shape)])


def _hidden_pairs(table: torch.Tensor, query: int, key: int, forbidden: float, certain: float) -> torch.Tensor:
    """Return a mask `[S, S]` to be added: the largest entry of a pair if it hides the key, else 0.

    Args:
        forbidden, certain: largest numbers that hide keys after the query, and others, whose biases may be low, too.
    """
    pairs = table.detach().movedim((query, key), (-2, -1))
    largest = pairs.flatten(0, -3).amax(0) if pairs.dim() > 2 else pairs
    later = torch.ones_like(largest, dtype=torch.bool).triu(1)
    return largest.masked_fill(largest > torch.where(later, forbidden, certain), 0)


ENTRIES_BY_DISTANCE = define(
    "entries_by_distance(Tensor table, int query, int key, float rounding, str where) -> Tensor",
    _entries_by_distance_fake,
    _entries_by_distance,
)
HIDDEN_PAIRS = define(
    "hidden_pairs(Tensor table, int query, int key, float forbidden, float certain) -> Tensor",
    lambda table, query, key, *_: table.new_empty((table.shape[query], table.shape[key])),
    _hidden_pairs,
)
