"""Products of the keys and queries of a block with its keys, each with the decay between the two tokens.

`sum over channels d of k_i[d] k_j[d] exp(G_i[d] - G_j[d])` for tokens j up to i, where G is the decay since the block's
beginning. Only differences that are not positive are exponentiated: all others may overflow.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["ByChannel", "ByHead", "sum_heads", "times"]

DIRECT = 8  # tokens between which decays by channel are written out


def times(shared: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """`[n, G, ...]` times `[n, H, ...]`, where each of the G goes with H // G consecutive heads: `[n, H, ...]`."""
    if shared.shape[1] == own.shape[1]:
        return shared * own
    return (shared[:, :, None] * own.unflatten(1, (shared.shape[1], -1))).flatten(1, 2)


def sum_heads(tensor: torch.Tensor, groups: int) -> torch.Tensor:
    """`[n, H, ...]` as `[n, G, ...]`, added up over the heads that share one."""
    return tensor if tensor.shape[1] == groups else tensor.unflatten(1, (groups, -1)).sum(2)


class ByHead(NamedTuple):
    """Decay of whole heads. Products `[n, H, L, L]`; `keys` is None where it is not asked for."""

    query: torch.Tensor
    key: torch.Tensor
    decay: torch.Tensor
    keys: torch.Tensor | None
    queries: torch.Tensor

    @classmethod
    def of(cls, query: torch.Tensor, key: torch.Tensor, total: torch.Tensor, with_keys: bool) -> ByHead:
        """From query and key `[n, G, L, K]`, and decays `[n, H, L, 1]` since the beginning."""
        decay = total - total.mT
        length = decay.shape[-1]
        above = torch.ones(length, length, dtype=torch.bool, device=decay.device).triu_(1)
        decay.masked_fill_(above, float("-inf")).exp_()
        keys = times(key @ key.mT, decay) if with_keys else None
        return cls(query, key, decay, keys, times(query @ key.mT, decay))

    def backward(self, of_keys: torch.Tensor | None, of_queries: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Gradients of query, key and decay from those of the products, which are overwritten."""
        groups = self.key.shape[1]
        of_decay = of_queries * self.queries
        of_products = sum_heads(of_queries.mul_(self.decay), groups)
        of_query, of_key = of_products @ self.key, of_products.mT @ self.query
        if of_keys is not None and self.keys is not None:
            of_decay.addcmul_(of_keys, self.keys)
            of_products = sum_heads(of_keys.mul_(self.decay), groups)
            of_key += (of_products + of_products.mT) @ self.key
        of_total = of_decay.sum(-1) - of_decay.sum(-2)
        return of_query, of_key, of_total[..., None]


class ByChannel(NamedTuple):
    """Decay by channel of the keys, differentiated by autograd."""

    leaves: tuple[torch.Tensor, ...]
    keys: torch.Tensor | None
    queries: torch.Tensor

    @classmethod
    def of(cls, query: torch.Tensor, key: torch.Tensor, total: torch.Tensor, with_keys: bool) -> ByChannel:
        """From query and key `[n, G, L, K]`, and decays `[n, H, L, K]` since the beginning."""
        leaves = tuple(tensor.detach().requires_grad_() for tensor in (query, key, total))
        with torch.enable_grad():
            q, k = (one.repeat_interleave(total.shape[1] // key.shape[1], 1) for one in leaves[:2])
            left = torch.cat([k, q], 1) if with_keys else q
            g = torch.cat([leaves[2]] * 2, 1) if with_keys else leaves[2]
            products = _decayed(left, torch.cat([k] * 2, 1) if with_keys else k, g)
            keys, queries = products.chunk(2, 1) if with_keys else (None, products)
        return cls(leaves, keys, queries)

    def backward(self, of_keys: torch.Tensor | None, of_queries: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Gradients of query, key and decay from those of the products."""
        if self.keys is None or of_keys is None:
            return torch.autograd.grad(self.queries, self.leaves, of_queries)
        return torch.autograd.grad([self.keys, self.queries], self.leaves, [of_keys, of_queries])


def _decayed(left: torch.Tensor, right: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Products `[n, H, L, L]`: those of the second half of the tokens with the first go through the token between."""
    length = total.shape[-2]
    if length <= DIRECT:
        decay = total[..., :, None, :] - total[..., None, :, :]
        above = torch.ones(length, length, dtype=torch.bool, device=total.device).triu(1)
        decay = decay.masked_fill(above[..., None], float("-inf")).exp()
        return torch.einsum("nhik,nhjk,nhijk->nhij", left, right, decay)
    half = -(-length // (2 * DIRECT)) * DIRECT
    first, second = ((one[..., :half, :], one[..., half:, :]) for one in (left, right)), total[..., half:, :]
    (left_1, left_2), (right_1, right_2) = first
    total_1, middle = total[..., :half, :], total[..., half - 1 : half, :]
    across = (left_2 * (second - middle).exp()) @ (right_1 * (middle - total_1).exp()).mT
    upper = torch.cat([_decayed(left_1, right_1, total_1), left.new_zeros(across.mT.shape)], -1)
    return torch.cat([upper, torch.cat([across, _decayed(left_2, right_2, second)], -1)], -2)
