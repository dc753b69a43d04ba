"""FSDP2 (`fully_shard`) as it is meant: the parameters of a layer are together while the layer runs, and no longer.

Where a schedule sweeps stages, each part gathers the groups that it reads before it runs, with those of the next part
on their way, and frees them after it; likewise backward, where a group is reduced once all parts that read it are
through. Every rank gathers and reduces alike, however different the trees are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from dta_compile.integrations.fully_shard import Gathered, free, groups_of, is_of_a_layer, running, show_unsharded

__all__ = ["LayerGroups", "gather_all", "layer_groups"]


class LayerGroups:
    """The groups that the parts of a call read, and those that stay together from the forward to the backward.

    Attributes:
        parts: for every part, the FSDP2 states whose groups it reads.
        gathers: how often a group was gathered for a part, forward and backward, for who wants to know.
    """

    def __init__(self, calls: Sequence[Gathered], parts: Sequence[Sequence[torch.Tensor]]) -> None:
        self.calls, self.gathers = list(calls), 0
        owners = {
            _memory(parameter._unsharded_param): state
            for call in calls
            for state in call.modules
            if is_of_a_layer(state)
            for group in groups_of([state])
            for parameter in group.fsdp_params
        }
        self.modules = {state: module for call in calls for state, module in call.modules.items()}
        self.parts = [
            list(dict.fromkeys(owners[_memory(one)] for one in parameters if _memory(one) in owners))
            for parameters in parts
        ]
        self._first = {state: number for number, states in reversed([*enumerate(self.parts)]) for state in states}
        for call in calls:
            call.runs_layer_by_layer = True

    def begin(self, part: int) -> None:
        """Gather what a part reads, and set off the next one's."""
        self._gather(part)
        for state in self._of(part + 1):
            self.modules[state].unshard(async_op=True)

    def end(self, part: int) -> None:
        """Free what a part has read, unless the next one reads it."""
        for state in self._of(part):
            if state not in self._of(part + 1):
                for group in groups_of([state]):
                    free(group, "FORWARD")
                show_unsharded(state)

    def begin_backward(self, part: int) -> None:
        """Reduce what the part after it was the first to read; gather what it reads itself, and set off what comes
        next."""
        for state in self._of(part + 1):
            if self._first[state] == part + 1:
                for group in reversed(groups_of([state])):
                    group.post_backward()
        for state in self._of(part):
            self.gathers += any(not group.is_unsharded for group in groups_of([state]))
            state._pre_backward(None)
        for state in self._of(part - 1):
            for group in groups_of([state]):
                with group.use_training_state(type(group._training_state).PRE_BACKWARD):
                    group.unshard(async_op=True)

    def _gather(self, part: int) -> None:
        for state in self._of(part):
            self.gathers += any(not group.is_unsharded for group in groups_of([state]))
            if (handle := self.modules[state].unshard(async_op=True)) is not None:
                handle.wait()

    def _of(self, part: int) -> list[Any]:
        return self.parts[part] if 0 <= part < len(self.parts) else []


def layer_groups(parts: Sequence[Sequence[torch.Tensor]], others: Iterable[torch.Tensor]) -> LayerGroups | None:
    """The groups of the calls now running by the parameters of each part; None where all that these read is together
    already, or parameters that are read outside of the parts (`others`) would have to be."""
    calls = [call for call in running() if not call.is_complete]
    if not calls:
        return None
    found = LayerGroups(calls, parts)
    owned = {
        _memory(parameter._unsharded_param)
        for states in found.parts
        for group in groups_of(states)
        for parameter in group.fsdp_params
    }
    if not any(found.parts) or any(_memory(one) in owned for one in others):
        for call in calls:
            call.runs_layer_by_layer = False
        return None
    return found


def gather_all() -> None:
    """Gather what the calls now running have not: for what reads parameters anywhere."""
    for call in running():
        call.complete()


def _memory(tensor: torch.Tensor) -> int:
    own = getattr(tensor, "_local_tensor", tensor)
    return int(own.untyped_storage()._cdata)
