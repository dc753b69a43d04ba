"""FSDP2 (`fully_shard`) as it is meant: the parameters of a layer are together while the layer runs, and no longer.

Where a schedule sweeps stages, each part gathers the groups that it reads before it runs, with those of the next part
on their way, and frees them after it; likewise backward, where a group is reduced once all parts that read it are
through. Every rank gathers and reduces alike, however different the trees are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dta_compile.integrations.fully_shard import free, groups_of, running, show_unsharded


class LayerGroups:
    """The FSDP2 states whose groups each part of a call reads, of those that are freed after a forward.

    Attributes:
        modules: by state, one of the modules that share it.
        parts: for every part, the states.
    """

    def __init__(self, modules: Mapping[Any, Any], parts: Sequence[Sequence[Any]]) -> None:
        self.modules, self.parts = modules, parts
        self._first = {state: number for number, states in reversed([*enumerate(parts)]) for state in states}

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
            state._pre_backward(None)
        for state in self._of(part - 1):
            for group in groups_of([state]):
                with group.use_training_state(type(group._training_state).PRE_BACKWARD):
                    group.unshard(async_op=True)

    def any_rank(self, mine: bool) -> bool:
        """Whether this rank says so, or any that shares parameters with it."""
        (group, *_) = groups_of([next(iter(self.modules))])
        said = torch.tensor([float(mine)], device=group.device)
        mesh = group.mesh_info
        for name in ("shard_process_group", "replicate_process_group"):
            if (process_group := getattr(mesh, name, None)) is not None:
                dist.all_reduce(said, dist.ReduceOp.MAX, process_group)
        return bool(said.item())

    def _gather(self, part: int) -> None:
        for state in self._of(part):
            if (handle := self.modules[state].unshard(async_op=True)) is not None:
                handle.wait()

    def _of(self, part: int) -> Sequence[Any]:
        return self.parts[part] if 0 <= part < len(self.parts) else ()


MOST_CHECKED = 8 * 2**30  # bytes


def is_gathered_to_check() -> bool:
    """Whether the calls now running gather all, so that a self-check can read it: the first of a model, with gradients
    and without, unless that takes more than `MOST_CHECKED`.

    Ranks decide alike, whichever program each of them runs and whatever memory is free.
    """
    mode, is_first, size = torch.is_grad_enabled(), False, 0
    for call in running():
        for state in call.modules:
            seen = state.__dict__.setdefault("_dta_modes_seen", set())
            is_first |= mode not in seen
            seen.add(mode)
        size += call.bytes_of_parameters
    return is_first and size <= MOST_CHECKED


def layer_groups(parts: Sequence[Sequence[torch.Tensor]], others: Iterable[torch.Tensor]) -> LayerGroups | None:
    """The groups of the calls now running by the parameters of each part; None where all that these read is together
    already, or parameters that are read outside of the parts (`others`) would have to be."""
    calls = [call for call in running() if not call.is_complete]
    modules = {state: module for call in calls for state, module in call.layers.items()}
    owners = {
        _memory(parameter._unsharded_param): state
        for state in modules
        for group in groups_of([state])
        for parameter in group.fsdp_params
    }
    of_parts = [
        list(dict.fromkeys(owners[_memory(one)] for one in parameters if _memory(one) in owners))
        for parameters in parts
    ]
    if not any(of_parts) or any(_memory(one) in owners for one in others):
        return None
    for call in calls:
        call.runs_layer_by_layer = True
    return LayerGroups(modules, of_parts)


def gather_all() -> None:
    """Gather what the calls now running have not: for what reads parameters anywhere."""
    for call in running():
        call.complete()


def _memory(tensor: torch.Tensor) -> int:
    own = getattr(tensor, "_local_tensor", tensor)
    return int(own.untyped_storage()._cdata)
