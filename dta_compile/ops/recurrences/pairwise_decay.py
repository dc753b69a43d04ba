"""Products of the keys and queries of a block with its keys, each with the decay between the two tokens.

`sum over channels d of k_i[d] k_j[d] exp(sum over j < s <= i of g_s[d])` for tokens j up to i, where g is the decay.
Decays are added up token by token, and their gradients too: differences of sums since the block's beginning would be
inexact where decays are strong, and gradients then small.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F


def times(shared: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """`[n, G, ...]` times `[n, H, ...]`, where each of the G goes with H // G consecutive heads: `[n, H, ...]`."""
    if shared.shape[1] == own.shape[1]:
        return shared * own
    return (shared[:, :, None] * own.unflatten(1, (shared.shape[1], -1))).flatten(1, 2)


def sum_heads(tensor: torch.Tensor, groups: int) -> torch.Tensor:
    """`[n, H, ...]` as `[n, G, ...]`, added up over the heads that share one."""
    return tensor if tensor.shape[1] == groups else tensor.unflatten(1, (groups, -1)).sum(2)


def sum_before(tensor: torch.Tensor) -> torch.Tensor:
    """`[..., L, K]`: of each token, the sum over those before it."""
    return F.pad(tensor[..., :-1, :], (0, 0, 1, 0)).cumsum_(-2)


def sum_from(tensor: torch.Tensor) -> torch.Tensor:
    """`[..., L, K]`: of each token, the sum over itself and those after it."""
    return tensor.flip(-2).cumsum_(-2).flip(-2)


def sum_after(tensor: torch.Tensor) -> torch.Tensor:
    """`[..., L, K]`: of each token, the sum over those after it."""
    return sum_from(F.pad(tensor[..., 1:, :], (0, 0, 0, 1)))


class ByHead(NamedTuple):
    """Decay of whole heads. Products `[n, H, L, L]`; `keys` is None where it is not asked for."""

    query: torch.Tensor
    key: torch.Tensor
    between: torch.Tensor
    keys: torch.Tensor | None
    queries: torch.Tensor

    @classmethod
    def of(cls, query: torch.Tensor, key: torch.Tensor, decay: torch.Tensor, with_keys: bool) -> ByHead:
        """From query and key `[n, G, L, K]`, and decays `[n, H, L, 1]` of the tokens."""
        between = decay.expand(-1, -1, -1, decay.shape[2]).tril(-1).cumsum_(-2).exp_().tril_()
        keys = times(key @ key.mT, between) if with_keys else None
        return cls(query, key, between, keys, times(query @ key.mT, between))

    def backward(self, of_keys: torch.Tensor | None, of_queries: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Gradients of query, key and decay from those of the products, which are overwritten."""
        groups = self.key.shape[1]
        of_between = of_queries * self.queries
        of_products = sum_heads(of_queries.mul_(self.between), groups)
        of_query, of_key = of_products @ self.key, of_products.mT @ self.query
        if of_keys is not None and self.keys is not None:
            of_between.addcmul_(of_keys, self.keys)
            of_products = sum_heads(of_keys.mul_(self.between), groups)
            of_key += (of_products + of_products.mT) @ self.key
        of_next = of_between.cumsum_(-1).tril_(-1).sum(-2)  # of the next token's decay: between those up to j and i > j
        return of_query, of_key, F.pad(of_next[..., :-1], (1, 0))[..., None]


class ByChannel(NamedTuple):
    """Decay by channel of the keys. As for `ByHead`, but without the diagonal of `keys`.

    Of every two neighbours of 1, 2, 4, ... tokens, those of the second with those of the first go through the token
    between them: as a product of matrices.
    """

    query: torch.Tensor
    key: torch.Tensor
    decay: torch.Tensor
    keys: torch.Tensor | None
    queries: torch.Tensor

    @classmethod
    def of(cls, query: torch.Tensor, key: torch.Tensor, decay: torch.Tensor, with_keys: bool) -> ByChannel:
        """From query and key `[n, G, L, K]`, and decays `[n, H, L, K]` of the tokens."""
        count, heads, length, _ = decay.shape
        missing = (1 << (length - 1).bit_length()) - length
        query, key, decay = (_padded(one, 0, missing) for one in (query, key, decay))
        found = cls(query, key, decay, None, query)
        lefts = (query, key) if with_keys else (query,)
        products = [decay.new_zeros((count, heads, length + missing, length + missing)) for _ in lefts]
        own = (query * key).sum(-1).repeat_interleave(heads // key.shape[1], 1)
        products[0].diagonal(dim1=-2, dim2=-1).copy_(own)
        for width in found.widths():
            _, right, until = found.across(width)
            for left, product in zip(lefts, products, strict=True):
                _corners(product, width).copy_(times(_halves(left, width)[1], until) @ right.mT)
        queries, *keys = (one[..., :length, :length] for one in products)
        return found._replace(queries=queries, keys=keys[0] if keys else None)

    def widths(self) -> list[int]:
        """1, 2, 4, ... up to half of the tokens."""
        return [1 << number for number in range((self.decay.shape[2] - 1).bit_length())]

    def across(self, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Decays after the tokens of first neighbours, their keys with these, and decays up to those of second ones."""
        first, second = _halves(self.decay, width)
        after = sum_after(first).exp_()
        return after, times(_halves(self.key, width)[0], after), second.cumsum(-2).exp_()

    def backward(self, of_keys: torch.Tensor | None, of_queries: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Gradients of query, key and decay from those of the products."""
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
                given, decayed = _corners(of_product, width).contiguous(), times(_halves(left, width)[1], until)
                of_decayed = given @ right
                of_right += given.mT @ decayed
                of_until.addcmul_(of_decayed, decayed)
                _halves(of_left, width)[1].add_(sum_heads(of_decayed.mul_(until), groups))
            _halves(of_decay, width)[0].add_(sum_before(of_right * right))
            _halves(of_decay, width)[1].add_(sum_from(of_until))
            _halves(of_key, width)[0].add_(sum_heads(of_right.mul_(after), groups))
        return of_query[:, :, :length], of_key[:, :, :length], of_decay[:, :, :length]


def _padded(tensor: torch.Tensor, columns: int, rows: int) -> torch.Tensor:
    """`[..., L, K]` with so many more columns and rows of zeros."""
    return F.pad(tensor, (0, columns, 0, rows)) if rows else tensor


def _halves(tensor: torch.Tensor, width: int) -> tuple[torch.Tensor, ...]:
    """Of `[n, H, L, K]`, the first and second ones of neighbours of so many tokens: two views `[n, H, m, width, K]`."""
    return tensor.unflatten(2, (-1, 2, width)).unbind(3)


def _corners(products: torch.Tensor, width: int) -> torch.Tensor:
    """Of `[n, H, L, L]`, those of second with first neighbours: a view `[n, H, m, width, width]`."""
    pairs = products.unflatten(-1, (-1, 2 * width)).unflatten(-3, (-1, 2 * width))
    return pairs.diagonal(dim1=2, dim2=4).movedim(-1, 2)[..., width:, :width]
