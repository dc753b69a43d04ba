"""States before and after blocks: where they are read and written, for recurrences with any kind of state."""

from __future__ import annotations

import torch

from dta_compile.ops.recurrences.blocks import Blocks, Step

__all__ = ["add_at_entries", "at_entries", "by_block", "by_exit", "kept_grads", "kept_states", "new_states"]


def new_states(initial: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """States `[1 + E, ...]`, of which the exits are to be written."""
    states = initial.new_empty((1 + blocks.exits, *initial.shape))
    states[0] = initial
    return states


def kept_states(states: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """Those of `[1 + E, ...]` that are wanted as results."""
    return states.index_select(0, blocks.on(states.device).kept)


def kept_grads(grads: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """Gradients `[1 + E, ...]` of all states from those of the kept ones."""
    total = grads.new_zeros((1 + blocks.exits, *grads.shape[1:]))
    if blocks.kept:
        total.index_copy_(0, blocks.on(grads.device).kept, grads)
    return total


def at_entries(states: torch.Tensor, step: Step, blocks: Blocks) -> torch.Tensor:
    """The states with which a step's blocks begin: `[m, ...]`, or `[1, ...]` if they share one."""
    if step.entries is not None:
        return states[step.entries]
    return states.index_select(0, blocks.on(states.device).entries[step.blocks])


def add_at_entries(grads: torch.Tensor, added: torch.Tensor, step: Step, blocks: Blocks) -> None:
    """Add to gradients of states what comes from a step's blocks: `[m, ...]`, or their sum `[1, ...]` if they share."""
    if step.entries is not None:
        grads[step.entries] += added
    else:
        grads.index_add_(0, blocks.on(grads.device).entries[step.blocks], added)


def by_exit(tensor: torch.Tensor, step: Step, blocks: Blocks) -> torch.Tensor:
    """`[m, ...]` by block of a step as `[e, ...]` by exit of it; `[1, ...]` stays."""
    if step.one_exit_each or tensor.shape[0] == 1:
        return tensor
    return tensor.index_select(0, blocks.on(tensor.device).sources[step.counted] - step.blocks.start)


def by_block(tensor: torch.Tensor, step: Step, blocks: Blocks) -> torch.Tensor:
    """`[e, ...]` by exit of a step, added up to `[m, ...]` by block of it."""
    if step.one_exit_each:
        return tensor
    total = tensor.new_zeros((step.blocks.stop - step.blocks.start, *tensor.shape[1:]))
    return total.index_add_(0, blocks.on(tensor.device).sources[step.counted] - step.blocks.start, tensor)
