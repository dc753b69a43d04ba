"""Pairwise products of the keys and queries of a block with its keys, scaled by the decay between the two tokens.

`sum over channels d of k_i[d] k_j[d] exp(sum over j < s <= i of g_s[d])` for tokens j up to i, where g is the decay.
Decays and their gradients are summed token by token: differences of cumulative sums would lose precision where decays
are strong and gradients therefore small.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F


def times(shared: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Multiply `[n, G, ...]` by `[n, H, ...]`, where each of the G is shared by H // G consecutive heads."""
    if shared.shape[1] == own.shape[1]:
        return shared * own
    return (shared[:, :, None] * own.unflatten(1, (shared.shape[1], -1))).flatten(1, 2)


def sum_heads(tensor: torch.Tensor, groups: int) -> torch.Tensor:
    """Sum `[n, H, ...]` over the heads of each group: `[n, G, ...]`."""
    return tensor if tensor.shape[1] == groups else tensor.unflatten(1, (groups, -1)).sum(2)


def sum_before(tensor: torch.Tensor) -> torch.Tensor:
    """Return for each token of `[..., L, K]` the sum over the tokens before it."""
    return F.pad(tensor[..., :-1, :], (0, 0, 1, 0)).cumsum_(-2)


def sum_from(tensor: torch.Tensor) -> torch.Tensor:
    """Return for each token of `[..., L, K]` the sum over itself and the tokens after it."""
    return tensor.flip(-2).cumsum_(-2).flip(-2)


def sum_after(tensor: torch.Tensor) -> torch.Tensor:
    """Return for each token of `[..., L, K]` the sum over the tokens after it."""
    return sum_from(F.pad(tensor[..., 1:, :], (0, 0, 0, 1)))


class ByHead(NamedTuple):
    """Products `[n, H, L, L]` with one decay per head; `keys` is None if not requested."""

    query: torch.Tensor
    key: torch.Tensor
    between: torch.Tensor
    keys: torch.Tensor | None
    queries: torch.Tensor

    @classmethod
    def of(cls, query: torch.Tensor, key: torch.Tensor, decay: torch.Tensor, with_keys: bool) -> ByHead:
        """Compute them from query and key `[n, G, L, K]`, and the tokens' decays `[n, H, L, 1]`."""
        between = decay.expand(-1, -1, -1, decay.shape[2]).tril(-1).cumsum_(-2).exp_().tril_()
        keys = times(key @ key.mT, between) if with_keys else None
        return cls(query, key, between, keys, times(query @ key.mT, between))

    def backward(self, of_keys: torch.Tensor | None, of_queries: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return gradients of query, key and decay, given those of the products, which are overwritten."""
        groups = self.key.shape[1]
        of_between = of_queries * self.queries
        of_products = sum_heads(of_queries.mul_(self.between), groups)
        of_query, of_key = of_products @ self.key, of_products.mT @ self.query
        if of_keys is not None and self.keys is not None:
            of_between.addcmul_(of_keys, self.keys)
            of_products = sum_heads(of_keys.mul_(self.between), groups)
            of_key += (of_products + of_products.mT) @ self.key
        of_next = of_between.cumsum_(-1).tril_(-1).sum(-2)  # of the next token's decay: over tokens up to j and i > j
        return of_query, of_key, F.pad(of_next[..., :-1], (1, 0))[..., None]


class ByChannel(NamedTuple):
    """Products like those of `ByHead`, but with one decay per channel of the keys, and without the diagonal of `keys`.

    Recursive halving: for each two neighbouring ranges of 1, 2, 4, ... tokens, the products of the second range with
    the first are one matrix product, since the decay between two tokens splits at the boundary of the ranges.
    """

    query: torch.Tensor
    key: torch.Tensor
    decay: torch.Tensor
    keys: torch.Tensor | None
    queries: torch.Tensor

    @classmethod
    def of(cls, query: torch.Tensor, key: torch.Tensor, decay: torch.Tensor, with_keys: bool) -> ByChannel:
        """Compute them from query and key `[n, G, L, K]`, and the tokens' decays `[n, H, L, K]`."""
        count, heads, length, _ = decay.shape
        missing = (1 << (length - 1).bit_length()) - length
        query, key, decay = (_padded(tensor, 0, missing) for tensor in (query, key, decay))
        pairs = cls(query, key, decay, None, query)
        lefts = (query, key) if with_keys else (query,)
        products = [decay.new_zeros((count, heads, length + missing, length + missing)) for _ in lefts]
        own = (query * key).sum(-1).repeat_interleave(heads // key.shape[1], 1)
        products[0].diagonal(dim1=-2, dim2=-1).copy_(own)
        for width in pairs.widths():
            _, right, until = pairs.across(width)
            for left, product in zip(lefts, products, strict=True):
                _corners(product, width).copy_(times(_halves(left, width)[1], until) @ right.mT)
        queries, *keys = (tensor[..., :length, :length] for tensor in products)
        return pairs._replace(queries=queries, keys=keys[0] if keys else None)

    def widths(self) -> list[int]:
        """Return the widths of ranges: 1, 2, 4, ... up to half of the tokens."""
        return [1 << number for number in range((self.decay.shape[2] - 1).bit_length())]

    def across(self, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the decays from the tokens of first ranges to the boundary, their keys times these, and the decays
        from the boundary to the tokens of second ranges."""
        first, second = _halves(self.decay, width)
        after = sum_after(first).exp_()
        return after, times(_halves(self.key, width)[0], after), second.cumsum(-2).exp_()

    def backward(self, of_keys: torch.Tensor | None, of_queries: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return gradients of query, key and decay, given those of the products."""
        groups, length, missing = self.key.shape[1], of_queries.shape[-1], self.decay.shape[2] - of_queries.shape[-1]
        of_queries = _padded(of_queries, missing, missing)
        own = sum_heads(of_queries.diagonal(dim1=-2, dim2=-1), groups)[..., None]
        of_query, of_key, of_decay = own * self.key, own * self.query, torch.zeros_like(self.decay)
        sides = [(self.query, of_query, of_queries)]
        if of_keys is not None:
            sides.append((self.key, of_key, _padded(of_keys, missing, missing)))
        for width in self.widths():
            after, right, until = self.across(width)
            of_right, of_until = torch.zeros_like(right), torch.zeros_like(until)
            for left, of_left, of_product in sides:
                corner, decayed = _corners(of_product, width).contiguous(), times(_halves(left, width)[1], until)
                of_decayed = corner @ right
                of_right += corner.mT @ decayed
                of_until.addcmul_(of_decayed, decayed)
                _halves(of_left, width)[1].add_(sum_heads(of_decayed.mul_(until), groups))
            _halves(of_decay, width)[0].add_(sum_before(of_right * right))
            _halves(of_decay, width)[1].add_(sum_from(of_until))
            _halves(of_key, width)[0].add_(sum_heads(of_right.mul_(after), groups))
        return of_query[:, :, :length], of_key[:, :, :length], of_decay[:, :, :length]


def _padded(tensor: torch.Tensor, columns: int, rows: int) -> torch.Tensor:
    """Pad `[..., L, K]` with columns and rows of zeros; nothing if `rows` is 0."""
    return F.pad(tensor, (0, columns, 0, rows)) if rows else tensor


def _halves(tensor: torch.Tensor, width: int) -> tuple[torch.Tensor, ...]:
    """Return views of the first and second ranges of `width` tokens in `[n, H, L, K]`: two of `[n, H, m, width, K]`."""
    return tensor.unflatten(2, (-1, 2, width)).unbind(3)


def _corners(products: torch.Tensor, width: int) -> torch.Tensor:
    """Return a view of the products of second with first ranges in `[n, H, L, L]`: `[n, H, m, width, width]`."""
    pairs = products.unflatten(-1, (-1, 2 * width)).unflatten(-3, (-1, 2 * width))
    return pairs.diagonal(dim1=2, dim2=4).movedim(-1, 2)[..., width:, :width]
