"""A diagonal linear recurrence over a forest of runs: `h = factor_t h + value_t`, channel by channel, with output h.

All blocks process their first token at once, then their second one, and so on, from states of zero. The states are then
propagated from block to block, and add to every token what they contribute by the product of the factors until there.
"""

from __future__ import annotations

import torch

from dta_compile.ops.recurrences.blocks import Blocks


def forward(
    value: torch.Tensor, factor: torch.Tensor, initial: torch.Tensor, blocks: Blocks
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output `[c, D]` and the kept states `[kept, D]`; `initial` is `[D]`."""
    with torch.no_grad():
        call = _Call(value, factor, initial, blocks)
        return blocks.tokens_first(call.out).to(value.dtype), blocks.kept_states(call.states)


def backward(
    grad_out: torch.Tensor,
    grad_kept: torch.Tensor,
    value: torch.Tensor,
    factor: torch.Tensor,
    initial: torch.Tensor,
    blocks: Blocks,
) -> tuple[torch.Tensor, ...]:
    """Return gradients of value, factor and the initial state, in at least float32.

    Args:
        grad_out, grad_kept: gradients of the results of `forward`, whose arguments are the others.
    """
    with torch.no_grad():
        return _Call(value, factor, initial, blocks).backward(grad_out, grad_kept)


class _Call:
    """One call. Tensors with tokens are `[L, n, D]`: place within the block, then block. States: `[1 + E, D]`."""

    def __init__(self, value: torch.Tensor, factor: torch.Tensor, initial: torch.Tensor, blocks: Blocks) -> None:
        self.blocks, self.dtype = blocks, torch.promote_types(value.dtype, torch.float32)
        self.factor, self.out = self.places_first(factor), self.places_first(value)
        self.states = blocks.new_states(initial.to(self.dtype))
        self.tables = blocks.on(value.device)
        for place in range(1, blocks.length):
            self.out[place].addcmul_(self.factor[place], self.out[place - 1])
        through = self.factor.cumprod(0)
        self.through, added = (at_exits[self.tables.lasts, self.tables.sources] for at_exits in (through, self.out))
        blocks.propagate(self.states, self.through, added)
        self.entries = self.states.index_select(0, self.tables.entries)
        self.out += through.mul_(self.entries)

    def places_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy `[c, D]`, cut into `[L, n, D]`."""
        return self.blocks.cut(tensor).transpose(0, 1).to(self.dtype, copy=True, memory_format=torch.contiguous_format)

    def backward(self, grad_out: torch.Tensor, grad_kept: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the gradients of the function `backward`."""
        of_states, grads = self.places_first(grad_out), self.blocks.kept_grads(grad_kept.to(self.dtype))
        at_entry = self.back_to_entries(of_states.clone())
        self.blocks.propagate_back(grads, self.through, at_entry)
        of_states[self.tables.lasts, self.tables.sources] += grads[1:]
        self.back_to_entries(of_states)
        of_factor = of_states * torch.cat([self.entries[None], self.out[:-1]])
        return self.blocks.tokens_first(of_states), self.blocks.tokens_first(of_factor), grads[0]

    def back_to_entries(self, of_states: torch.Tensor) -> torch.Tensor:
        """Return gradients `[n, D]` of the entry states; those `[L, n, D]` of later tokens are added in place."""
        for place in reversed(range(self.blocks.length - 1)):
            of_states[place].addcmul_(self.factor[place + 1], of_states[place + 1])
        return of_states[0] * self.factor[0]
