"""The selective scan of Mamba over a forest of runs.

The recurrence of each of D channels with state h `[N]`, for x, dt `[c, D]`, A `[D, N]` and B, C `[c, N]`:

    h = exp(dt_t A) h + dt_t x_t B_t    y_t = h C_t

All blocks process their first token at once, then their second one, and so on. A first pass from zero states gives the
contribution of each block to its exits; then the states are propagated from block to block; a second pass computes all
tokens from these. Decays over several tokens are exponentials of sums, which are at most zero. Channels are the last
dimension, `[N, D]`, and are processed in slices.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch

from dta_compile.ops.recurrences.blocks import Blocks

MOST_ELEMENTS = 2**21  # most elements of the states after all tokens in a slice of channels
LEAST_CHANNELS = 16  # fewest channels of a slice


def forward(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    initial: torch.Tensor,
    blocks: Blocks,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output `[c, D]` and the kept states `[kept, D, N]`; `initial` is `[D, N]`."""
    with torch.no_grad():
        call = _Call(x, dt, A, B, C, initial, blocks)
        call.run()
        out = torch.empty_like(call.x)
        for part in call.slices():
            states = part.run(part.decay())
            out[..., part.channels] = (call.C.mT @ states[1:])[:, :, 0]
        return blocks.tokens_first(out).to(x.dtype), blocks.kept_states(call.states).mT


def backward(grad_out: torch.Tensor, grad_kept: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, ...]:
    """Return gradients of x, dt, A, B, C and the initial state, in at least float32.

    Args:
        grad_out, grad_kept: gradients of the results of `forward`.
        arguments: the arguments of `forward`.
    """
    with torch.no_grad():
        call = _Call(*arguments)
        call.run()
        return call.backward(grad_out, grad_kept)


class _Slice:
    """A slice of d channels: dt and x dt are `[L, n, 1, d]`, states `[n, N, d]`."""

    def __init__(self, call: _Call, channels: slice) -> None:
        self.call, self.channels = call, channels
        self.A, self.dt, self.x = call.A[:, channels], call.dt[..., None, channels], call.x[..., None, channels]
        self.dtx = self.dt * self.x

    def decay(self) -> torch.Tensor:
        """Return the decay factors by token, `[L, n, N, d]`."""
        return (self.dt * self.A).exp_()

    def run(self, decay: torch.Tensor) -> torch.Tensor:
        """Return states `[L + 1, n, N, d]`: the entry states, then those after each token."""
        call = self.call
        states = decay.new_empty((decay.shape[0] + 1, *decay.shape[1:]))
        states[0] = call.states[..., self.channels].index_select(0, call.blocks.on(decay.device).entries)
        for place in range(decay.shape[0]):
            torch.mul(call.B[place], self.dtx[place], out=states[place + 1])
            states[place + 1].addcmul_(decay[place], states[place])
        return states

    def run_to_exits(self) -> torch.Tensor:
        """Return the contributions of each block's tokens to its exits, `[E, N, d]`."""
        call, blocks = self.call, self.call.blocks
        tables = blocks.on(self.dt.device)
        state = self.A.new_zeros((blocks.count, *self.A.shape))
        exits = self.A.new_empty((blocks.exits, *self.A.shape))
        for place, (low, high) in enumerate(pairwise(blocks.place_bounds)):
            state.mul_((self.dt[place] * self.A).exp_()).addcmul_(call.B[place], self.dtx[place])
            if blocks.in_order and high - low == blocks.exits:
                exits.copy_(state[: blocks.exits])
            elif high > low:
                which = tables.by_place[low:high]
                exits.index_copy_(0, which, state.index_select(0, tables.sources[which]))
        return exits

    def back_to_entries(self, of_states: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
        """Return gradients `[n, N, d]` of the entry states.

        `of_states` `[L, n, N, d]` has the gradients of the states after each token that come from the token's own
        output; those from later tokens are added in place.
        """
        for place in reversed(range(len(decay) - 1)):
            of_states[place].addcmul_(of_states[place + 1], decay[place + 1])
        return of_states[0] * decay[0]


class _Call:
    """One call. Tensors with tokens are `[L, n, ...]`: place within the block, then block. States: `[1 + E, N, D]`."""

    def __init__(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        initial: torch.Tensor,
        blocks: Blocks,
    ) -> None:
        self.blocks, self.dtype = blocks, torch.promote_types(x.dtype, torch.float32)
        self.x, self.dt, *both = (blocks.places_first(one, self.dtype) for one in (x, dt, B, C))
        self.B, self.C = (one[..., None] for one in both)  # [L, n, N, 1]
        self.A = A.to(self.dtype).t().contiguous()
        self.states = blocks.new_states(initial.to(self.dtype).t()).contiguous()
        tables = blocks.on(x.device)
        self.until = self.dt.cumsum(0)[tables.lasts, tables.sources]  # [E, D]

    def slices(self) -> Iterator[_Slice]:
        """Yield slices of channels with at most `MOST_ELEMENTS` elements of states each."""
        channels = self.x.shape[-1]
        per_channel = max(self.blocks.length * self.blocks.count * self.A.shape[0], 1)
        width = min(channels, max(LEAST_CHANNELS, MOST_ELEMENTS // per_channel))
        for first in range(0, channels, width):
            yield _Slice(self, slice(first, min(first + width, channels)))

    def run(self) -> None:
        """Compute `states`."""
        through, added = self._exits()
        self.blocks.propagate(self.states, through, added)

    def _exits(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the decays from a block's beginning to each exit, and its tokens' contributions: `[E, N, D]`."""
        added = self.states.new_empty((self.blocks.exits, *self.A.shape))
        if self.blocks.exits:
            for part in self.slices():
                added[..., part.channels] = part.run_to_exits()
        return (self.until[:, None] * self.A).exp_(), added

    def backward(self, grad_out: torch.Tensor, grad_kept: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the gradients of the function `backward`; `run` comes first."""
        grad = self.blocks.places_first(grad_out, self.dtype)[:, :, None]  # [L, n, 1, D]
        grads = self._state_grads(grad, grad_kept)
        of_x, of_dt = torch.empty_like(self.x), torch.empty_like(self.dt)
        of_A, of_B, of_C = (torch.zeros_like(tensor) for tensor in (self.A, self.B, self.C))
        tables = self.blocks.on(grad.device)
        for part in self.slices():
            channels, own = part.channels, grad[..., part.channels]
            decay = part.decay()
            states = part.run(decay)
            of_C += states[1:] @ own.mT
            of_states = self.C * own
            of_states[tables.lasts, tables.sources] += grads[1:, :, channels]
            part.back_to_entries(of_states, decay)
            of_B += of_states @ part.dtx.mT
            of_dtx = (self.B.mT @ of_states)[:, :, 0]
            of_exponent = of_states.mul_(decay).mul_(states[:-1])
            of_x[..., channels] = of_dtx * part.dt[:, :, 0]
            of_dt[..., channels] = (of_exponent * part.A).sum(2).addcmul_(of_dtx, part.x[:, :, 0])
            of_A[:, channels] = of_exponent.mul_(part.dt).sum((0, 1))
        x, dt, B, C = (self.blocks.tokens_first(tensor) for tensor in (of_x, of_dt, of_B[..., 0], of_C[..., 0]))
        return x, dt, of_A.t(), B, C, grads[0].t()

    def _state_grads(self, grad: torch.Tensor, grad_kept: torch.Tensor) -> torch.Tensor:
        """Return the gradients of the states, `[1 + E, N, D]`."""
        grads = self.blocks.kept_grads(grad_kept.to(self.dtype).mT)
        at_entry = grads.new_empty((self.blocks.count, *self.A.shape))
        for part in self.slices():
            at_entry[..., part.channels] = part.back_to_entries(self.C * grad[..., part.channels], part.decay())
        through = (self.until[:, None] * self.A).exp_()
        self.blocks.propagate_back(grads, through, at_entry)
        return grads
