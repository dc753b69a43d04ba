"""The selective scan of Mamba over a forest.

Of each of D channels a state h `[N]` goes from token to token, with x, dt `[c, D]`, A `[D, N]` and B, C `[c, N]`:

    h = exp(dt_t A) h + dt_t x_t B_t    y_t = h C_t

All blocks take their first token at once, then their second one, and so on: first without what is before them, for
what they add to their exits; then, after the states have gone from block to block, with it. Decays of several tokens
are exponentiated as sums, which are not positive. Channels come last, `[N, D]`, and go through in slices.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch

from dta_compile.ops.recurrences.blocks import (
    Blocks,
    add_at_entries,
    at_entries,
    by_block,
    by_exit,
    kept_grads,
    kept_states,
    new_states,
)

MOST_ELEMENTS = 2**21  # of the states after all tokens, of one slice of channels
LEAST_CHANNELS = 16  # of a slice


def forward(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    initial: torch.Tensor,
    blocks: Blocks,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output `[c, D]` and the kept states `[kept, D, N]`, from the state `[D, N]` before the forest."""
    with torch.no_grad():
        call = _Call(x, dt, A, B, C, initial, blocks)
        call.run()
        out = torch.empty_like(call.x)
        for part in call.slices():
            states = part.run(part.decay())
            out[..., part.channels] = (call.C.mT @ states[1:])[:, :, 0]
        return call.tokens_first(out).to(x.dtype), kept_states(call.states, blocks).mT


def backward(grad_out: torch.Tensor, grad_kept: torch.Tensor, *given: Any) -> tuple[torch.Tensor, ...]:
    """Gradients of x, dt, A, B, C and the initial state, in the dtype that is computed in.

    Args:
        grad_out, grad_kept: of what `forward` returned.
        given: the arguments of `forward`.
    """
    with torch.no_grad():
        call = _Call(*given)
        call.run()
        return call.backward(grad_out, grad_kept)


class _Slice:
    """Some channels: x dt and dt are `[L, n, 1, d]`, states `[n, N, d]`."""

    def __init__(self, call: _Call, channels: slice) -> None:
        self.call, self.channels = call, channels
        self.A, self.dt, self.x = call.A[:, channels], call.dt[..., None, channels], call.x[..., None, channels]
        self.dtx = self.dt * self.x

    def decay(self) -> torch.Tensor:
        """By token, `[L, n, N, d]`."""
        return (self.dt * self.A).exp_()

    def run(self, decay: torch.Tensor) -> torch.Tensor:
        """States `[L + 1, n, N, d]`: before the blocks, and after each token."""
        call = self.call
        states = decay.new_empty((decay.shape[0] + 1, *decay.shape[1:]))
        states[0] = call.states[..., self.channels].index_select(0, call.blocks.on(decay.device).entries)
        for place in range(decay.shape[0]):
            torch.mul(call.B[place], self.dtx[place], out=states[place + 1])
            states[place + 1].addcmul_(decay[place], states[place])
        return states

    def run_to_exits(self) -> torch.Tensor:
        """What the tokens of a block add to its exits, `[E, N, d]`."""
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
        """Gradients `[n, N, d]` of the states before the blocks, from `[L, n, N, d]` of those after the tokens.

        The latter come as what the token's own output gives, and are completed by what comes from later tokens.
        """
        for place in reversed(range(len(decay) - 1)):
            of_states[place].addcmul_(of_states[place + 1], decay[place + 1])
        return of_states[0] * decay[0]


class _Call:
    """One call. Tokens are `[L, n, ...]`: by place in their block, then by block. States are `[1 + E, N, D]`."""

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
        self.x, self.dt = self.places_first(x), self.places_first(dt)
        self.B, self.C = self.places_first(B)[..., None], self.places_first(C)[..., None]  # [L, n, N, 1]
        self.A = A.to(self.dtype).t().contiguous()
        self.states = new_states(initial.to(self.dtype).t(), blocks).contiguous()
        tables = blocks.on(x.device)
        self.until = self.dt.cumsum(0)[tables.lasts, tables.sources]  # [E, D]

    def places_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """`[c, ...]` as `[L, n, ...]`."""
        return self.blocks.cut(tensor).transpose(0, 1).to(self.dtype).contiguous()

    def tokens_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """`[L, n, ...]` as `[c, ...]`."""
        return self.blocks.join(tensor.transpose(0, 1))

    def slices(self) -> Iterator[_Slice]:
        """Channels in slices of at most `MOST_ELEMENTS`."""
        channels = self.x.shape[-1]
        one = max(self.blocks.length * self.blocks.count * self.A.shape[0], 1)
        width = min(channels, max(LEAST_CHANNELS, MOST_ELEMENTS // one))
        for first in range(0, channels, width):
            yield _Slice(self, slice(first, min(first + width, channels)))

    def run(self) -> None:
        """Write `states`."""
        through, added = self._exits()
        for step in self.blocks.steps():
            if step.exits.stop > step.exits.start:
                entry = by_exit(at_entries(self.states, step, self.blocks), step, self.blocks)
                torch.addcmul(added[step.counted], through[step.counted], entry, out=self.states[step.exits])

    def _exits(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Decays from the beginning of the block to exits, and what its tokens add to them; `[E, N, D]`."""
        added = self.states.new_empty((self.blocks.exits, *self.A.shape))
        if self.blocks.exits:
            for part in self.slices():
                added[..., part.channels] = part.run_to_exits()
        return (self.until[:, None] * self.A).exp_(), added

    def backward(self, grad_out: torch.Tensor, grad_kept: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """After `run`; see the function."""
        grad = self.places_first(grad_out)[:, :, None]  # [L, n, 1, D]
        grads = self._state_grads(grad, grad_kept)
        of_x, of_dt = torch.empty_like(self.x), torch.empty_like(self.dt)
        of_A, of_B, of_C = (torch.zeros_like(one) for one in (self.A, self.B, self.C))
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
        found = (self.tokens_first(one) for one in (of_x, of_dt, of_B[..., 0], of_C[..., 0]))
        x, dt, B, C = found
        return x, dt, of_A.t(), B, C, grads[0].t()

    def _state_grads(self, grad: torch.Tensor, grad_kept: torch.Tensor) -> torch.Tensor:
        """Gradients `[1 + E, N, D]` of the states."""
        grads = kept_grads(grad_kept.to(self.dtype).mT, self.blocks)
        at_entry = grads.new_empty((self.blocks.count, *self.A.shape))
        for part in self.slices():
            at_entry[..., part.channels] = part.back_to_entries(self.C * grad[..., part.channels], part.decay())
        through = (self.until[:, None] * self.A).exp_()
        for step in reversed(self.blocks.steps()):
            added = at_entry[step.blocks]
            if step.exits.stop > step.exits.start:
                added += by_block(grads[step.exits] * through[step.counted], step, self.blocks)
            add_at_entries(grads, added.sum(0, keepdim=True) if step.shared else added, step, self.blocks)
        return grads
