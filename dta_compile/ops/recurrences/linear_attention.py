"""Chunkwise linear attention with decay, and the gated delta rule, over a forest of runs.

The recurrence of a head with state S `[K, V]`:

    S = exp(decay_t) S    u = beta_t (v_t - k_t^T S), or v_t without beta    S = S + k_t u^T    out_t = scale q_t^T S

The tokens of a block are computed in parallel [Yang et al., "Parallelizing linear transformers with the delta rule",
section 3; "Gated delta networks", section 3.3]: with G the cumulative decays since the block's beginning,
D_ij = exp(G_i - G_j) for j <= i, and A_ij = beta_i (k_i k_j) D_ij for j < i,

    U = (I + A)^-1 (beta v) - (I + A)^-1 (beta exp(G) k) S    out = (exp(G) q) S + (q k^T D) U
    S after r tokens = exp(G_r) S + sum over i < r of exp(G_r - G_i) k_i u_i^T

where S is the state before the block. Only U and S are computed block after block.

I + A is inverted by batched matrix products. A batched triangular solve would take the matrices one by one with all
threads each, and wait thousands of times for a core that is busy otherwise.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from dta_compile.ops.recurrences.blocks import Blocks, Step
from dta_compile.ops.recurrences.pairwise_decay import (
    ByChannel,
    ByHead,
    sum_after,
    sum_before,
    sum_from,
    sum_heads,
    times,
)

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]
MOST_STATES = 2**24  # most elements of states that a step reads


def longest_block(key: torch.Tensor, beta: torch.Tensor | None) -> int:
    """Return the longest block that is about as precise in float32 as computing token by token.

    With few key channels the delta rule overwrites the same entries of the state again and again; a block sums all
    writes of its tokens, and the cancellation costs precision.
    """
    return 64 if beta is None else min(64, max(8, 2 * key.shape[-1]))


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor | None,
    scale: float,
    initial: torch.Tensor,
    blocks: Blocks,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output `[c, H, V]` and the kept states `[kept, H, K, V]`.

    Args:
        query, key: `[c, G, K]`; each of the G is shared by H // G consecutive heads.
        value: `[c, H, V]`.
        decay: log decay, at most zero: `[c, H]`, or `[c, H, K]` by channel of the keys.
        beta: `[c, H]` for the delta rule, otherwise None.
        initial: `[H, K, V]`, the state before the forest.
    """
    with torch.no_grad():
        call = _Call(query, key, value, decay, beta, scale, initial, blocks)
        out = call.run(with_output=True)
        return blocks.join(out.transpose(1, 2)).to(value.dtype), blocks.kept_states(call.states)


def backward(grad_out: torch.Tensor, grad_kept: torch.Tensor, *arguments: Any) -> Gradients:
    """Return gradients of query, key, value, decay, beta and the initial state, in at least float32.

    Args:
        grad_out, grad_kept: gradients of the results of `forward`.
        arguments: the arguments of `forward`.
    """
    with torch.no_grad():
        call = _Call(*arguments)
        call.run(with_output=False)
        return call.backward(grad_out, grad_kept)


class _Call:
    """One call. Tensors with tokens are `[n, H, L, ...]`; query and key have G instead of H heads.

    Decays are `[n, H, L, 1]`, or `[n, H, L, K]` by channel.
    """

    def __init__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor | None,
        scale: float,
        initial: torch.Tensor,
        blocks: Blocks,
    ) -> None:
        self.blocks, self.scale = blocks, scale
        self.dtype = torch.promote_types(value.dtype, torch.float32)
        self.states = blocks.new_states(initial.to(self.dtype))
        self.query = self.heads_first(query) * scale
        self.key, self.value = self.heads_first(key), self.heads_first(value)
        self.by_channel = decay.dim() == 3
        decays = self.heads_first(decay if self.by_channel else decay[..., None])
        pairs = ByChannel if self.by_channel else ByHead
        self.pairs = pairs.of(self.query, self.key, decays, beta is not None)
        self.decay = decays.cumsum(2).exp_()
        self.read = times(self.query, self.decay)  # multiplies the state before the block in outputs
        self._prepare_updates(beta)
        self._prepare_exits(decays)

    def heads_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """Cut `[c, H, ...]` into blocks `[n, H, L, ...]`."""
        return self.blocks.cut(tensor).transpose(1, 2).to(self.dtype).contiguous()

    def heads_last(self, tensor: torch.Tensor) -> torch.Tensor:
        """Join blocks `[n, H, L, ...]` to `[c, H, ...]`."""
        return self.blocks.join(tensor.transpose(1, 2))

    def _prepare_updates(self, beta: torch.Tensor | None) -> None:
        """Compute the part of U that does not depend on the state before the block."""
        self.beta = None
        self.update = self.value  # U; with beta, `run` subtracts `erase` times the state
        if beta is not None:
            assert self.pairs.keys is not None
            self.beta = self.heads_first(beta[..., None])
            self.inverse = unit_inverse((self.pairs.keys * self.beta).flatten(0, 1)).view_as(self.pairs.keys)
            self.update = self.inverse @ (self.value * self.beta)
            self.base = self.update.clone()
            self.erase = self.inverse @ times(self.key, self.decay * self.beta)

    def _prepare_exits(self, decays: torch.Tensor) -> None:
        """Compute the factors of the entry state, `[E, H, 1 or K]`, and of tokens, `[E, H, L, K]`, in the exits."""
        tables = self.blocks.on(decays.device)
        self.later = (torch.arange(decays.shape[2], device=decays.device) > tables.lasts[:, None])[:, None, :, None]
        self.to_exit = sum_after(self.of_sources(decays).masked_fill(self.later, 0)).exp_().masked_fill_(self.later, 0)
        self.through = self.decay[tables.sources, :, tables.lasts]
        self.write = times(self.of_sources(self.key), self.to_exit)

    def of_sources(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gather `[n, ...]` by block to `[E, ...]` by exit."""
        if self.blocks.in_order:
            return tensor[: self.blocks.exits]
        return tensor.index_select(0, self.blocks.on(tensor.device).sources)

    def add_sources(self, total: torch.Tensor, added: torch.Tensor) -> None:
        """Add `[E, ...]` by exit into `[n, ...]` by block."""
        if self.blocks.in_order:
            total[: self.blocks.exits] += added
        else:
            total.index_add_(0, self.blocks.on(total.device).sources, added)

    def steps(self) -> tuple[Step, ...]:
        """Return steps that read at most `MOST_STATES` elements of states each, or one state."""
        return self.blocks.steps(max(1, MOST_STATES // max(self.states[0].numel(), 1)))

    def run(self, with_output: bool) -> torch.Tensor:
        """Compute `states` and `update`, and with `with_output` return the output `[n, H, L, V]`."""
        out = torch.empty_like(self.value) if with_output else self.value
        for step in self.steps():
            state = self.blocks.at_entries(self.states, step)
            update = self.update[step.blocks]
            if self.beta is not None:
                update -= _product(self.erase[step.blocks], state)
            if with_output:
                out[step.blocks] = _product(self.read[step.blocks], state)
            if step.exits.stop > step.exits.start:
                exits = self.states[step.exits]
                torch.matmul(self.write[step.counted].mT, self.blocks.by_exit(update, step), out=exits)
                exits.addcmul_(self.through[step.counted][..., None], self.blocks.by_exit(state, step))
        if with_output:
            out.flatten(0, 1).baddbmm_(self.pairs.queries.flatten(0, 1), self.update.flatten(0, 1))
        return out

    def backward(self, grad_out: torch.Tensor, grad_kept: torch.Tensor) -> Gradients:
        """Return the gradients of the function `backward`; `run` comes first."""
        grad, grads = self.heads_first(grad_out), self.blocks.kept_grads(grad_kept.to(self.dtype))
        of_update = self.pairs.queries.mT @ grad
        of_read, of_erase = torch.empty_like(self.read), None if self.beta is None else torch.empty_like(self.read)
        of_write, of_through = torch.empty_like(self.write), torch.empty_like(self.through)
        for step in reversed(self.steps()):
            state, own = self.blocks.at_entries(self.states, step), grad[step.blocks]
            update = of_update[step.blocks]
            of_state = _sum_of_products(self.read[step.blocks], own, step.shared)
            if step.exits.stop > step.exits.start:
                exits = grads[step.exits]
                update += self.blocks.by_block(self.write[step.counted] @ exits, step)
                of_write[step.counted] = self.blocks.by_exit(self.update[step.blocks], step) @ exits.mT
                product = (exits * self.blocks.by_exit(state, step)).sum(-1)
                of_through[step.counted] = product if self.by_channel else product.sum(-1, keepdim=True)
                added = self.blocks.by_block(exits * self.through[step.counted][..., None], step)
                of_state += added.sum(0, keepdim=True) if step.shared else added
            of_read[step.blocks] = _product(own, state.mT)
            if of_erase is not None:
                of_erase[step.blocks] = _product(update, state.mT)
                of_state -= _sum_of_products(self.erase[step.blocks], update, step.shared)
            self.blocks.add_at_entries(grads, of_state, step)
        return self._of_operands(grad, of_update, of_read, of_erase, of_write, of_through, grads[0])

    def _of_operands(
        self,
        grad: torch.Tensor,
        of_update: torch.Tensor,
        of_read: torch.Tensor,
        of_erase: torch.Tensor | None,
        of_write: torch.Tensor,
        of_through: torch.Tensor,
        of_initial: torch.Tensor,
    ) -> Gradients:
        groups, tables = self.key.shape[1], self.blocks.on(grad.device)
        of_products, of_keys, of_beta = grad @ self.update.mT, None, None
        of_total = self._to_decay(of_read * self.read)
        of_value, key = of_update, None
        if of_erase is not None and self.beta is not None and self.pairs.keys is not None:
            of_value = self.inverse.mT @ of_update  # of beta v
            right = self.inverse.mT @ of_erase  # of beta exp(G) k, negative
            of_keys = (right @ self.erase.mT).sub_(of_value @ self.base.mT).tril_(-1)
            of_beta = (of_value * self.value).sum(-1, keepdim=True) + (of_keys * self.pairs.keys).sum(-1, keepdim=True)
            of_keys.mul_(self.beta)
            right.mul_(self.decay)
            product = times(self.key, right)
            of_beta -= product.sum(-1, keepdim=True)
            of_total -= self._to_decay(product.mul_(self.beta))
            key = right.mul_(self.beta)
            of_value = of_value.mul_(self.beta)
        of_query, of_key, of_decays = self.pairs.backward(of_keys, of_products)
        of_query += sum_heads(of_read.mul_(self.decay), groups)
        if key is not None:
            of_key -= sum_heads(key, groups)
        self.add_sources(of_key, sum_heads(of_write * self.to_exit, groups))
        product = self._to_decay(of_write.mul_(self.write))
        of_total[tables.sources, :, tables.lasts] += of_through * self.through
        of_decays += sum_from(of_total)
        self.add_sources(of_decays, sum_before(product).masked_fill_(self.later, 0))
        of_decay = self.heads_last(of_decays)
        return (
            self.heads_last(of_query.mul_(self.scale)),
            self.heads_last(of_key),
            self.heads_last(of_value),
            of_decay if self.by_channel else of_decay[..., 0],
            None if of_beta is None else self.heads_last(of_beta)[..., 0],
            of_initial,
        )

    def _to_decay(self, product: torch.Tensor) -> torch.Tensor:
        """Reduce `[..., K]` to the shape of the decay: summed over channels unless decays are by channel."""
        return product if self.by_channel else product.sum(-1, keepdim=True)


def _product(left: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """Multiply `[m, H, L, K]` by states `[m or 1, H, K, V]`."""
    if left.shape[0] == states.shape[0]:
        return left @ states
    return (_joined(left) @ states[0]).unflatten(1, (left.shape[0], -1)).transpose(0, 1)


def _sum_of_products(left: torch.Tensor, right: torch.Tensor, shared: bool) -> torch.Tensor:
    """Contract `[m, H, L, K]` with `[m, H, L, V]` over tokens: `[m, H, K, V]`; if `shared`, over blocks too."""
    if not shared or left.shape[0] == 1:
        return left.mT @ right
    return (_joined(left).mT @ _joined(right))[None]


def _joined(tensor: torch.Tensor) -> torch.Tensor:
    """Reshape `[m, H, L, ...]` to `[H, m L, ...]`."""
    return tensor.transpose(0, 1).flatten(1, 2)


SMALLEST = 8  # size up to which the inverse is summed as a series: larger ones have terms much larger than the sum


def unit_inverse(lower: torch.Tensor) -> torch.Tensor:
    """Return `(I + lower)^-1` for `[B, L, L]`, of which only entries below the diagonal are used.

    By halves: with the inverses P of A and R of C, the inverse of `[[A, 0], [B, C]]` is `[[P, 0], [-R B P, R]]`.
    """
    length = lower.shape[-1]
    size = SMALLEST
    whole = max(SMALLEST, 1 << (length - 1).bit_length())
    if whole > length:
        lower = F.pad(lower, (0, whole - length) * 2)
    inverse = _by_series(_diagonal(lower, size))
    while size < whole:
        first, second = inverse[:, 0::2], inverse[:, 1::2]
        below = _diagonal(lower, 2 * size)[..., size:, :size]
        joined = lower.new_zeros((lower.shape[0], first.shape[1], 2 * size, 2 * size))
        joined[..., :size, :size] = first
        joined[..., size:, size:] = second
        joined[..., size:, :size] = (second @ below @ first).neg_()
        inverse, size = joined, 2 * size
    return inverse[:, 0, :length, :length].contiguous()


def _diagonal(matrices: torch.Tensor, size: int) -> torch.Tensor:
    """Return the blocks on the diagonal, `[B, n, size, size]`."""
    count = matrices.shape[-1] // size
    return matrices.view(-1, count, size, count, size).diagonal(dim1=1, dim2=3).movedim(-1, 1)


def _by_series(lower: torch.Tensor) -> torch.Tensor:
    """Return `(I + A)^-1 = (I - A) (I + A^2) (I + A^4)` for `A^8 = 0`."""
    negative = lower.tril(-1).neg_()
    square = negative @ negative
    unit = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
    total = negative + unit
    total = total + total @ square
    return total + total @ (square @ square)
