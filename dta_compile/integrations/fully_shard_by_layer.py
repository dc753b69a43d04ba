"""FSDP2 (`fully_shard`) layer by layer: the parameters of a layer are gathered only while it runs.

In a sweep of stages each part gathers the groups that it reads before it runs, prefetches those of the next part, and
frees them afterwards. The backward does the same, and reduces a group after all parts that read it. All ranks gather
and reduce in the same order, however different their trees are. `runtime.engine` uses this.

On the host nothing is prefetched: gloo takes the cores that compute, and would hold the next group twice meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dta_compile.errors import RuntimeContractError
from dta_compile.integrations.fully_shard import (
    bytes_of_gradients,
    bytes_of_parameters,
    free,
    groups_of,
    running,
    show_unsharded,
    start_gather,
)
from dta_compile.ops.dtypes import statistics_dtype


class LayerGroups:
    """FSDP2 states that each part of a call reads, of those that are freed after a forward.

    Attributes:
        modules: one of the modules that share a state, by state.
        parts: states by part.
        waiting: by part, bytes of gradients that it is the first to compute, and that are reduced after all parts.
    """

    def __init__(
        self, modules: Mapping[Any, Any], parts: Sequence[Sequence[Any]], waiting: Sequence[int] | None = None
    ) -> None:
        self.modules, self.parts, self.waiting = modules, parts, waiting or [0] * len(parts)
        self._memories = {_memory(p._unsharded_param) for group in groups_of(modules) for p in group.fsdp_params}
        self._first = {state: number for number, states in reversed([*enumerate(parts)]) for state in states}
        self._is_on_host = any(group.device.type == "cpu" for group in groups_of(modules))

    def begin(self, part: int) -> None:
        """Gather the groups that a part reads, and prefetch those of the next part."""
        self._gather(self._of(part))
        for state in self._to_prefetch(part + 1):
            start_gather(state)

    def end(self, part: int) -> None:
        """Free the groups of a part unless the next one reads them."""
        for state in self._of(part):
            if state not in self._of(part + 1):
                for group in groups_of([state]):
                    free(group, "FORWARD")
                show_unsharded(state)

    def end_again(self, part: int) -> None:
        """Free the groups of the part before the one that goes backward next, unless they count as prefetched."""
        if not self._to_prefetch(part):
            self.end(part)

    def begin_backward(self, part: int, next_part: int) -> None:
        """Gather the groups of a part, and prefetch those of the part that runs after its backward."""
        self._gather(self._of(part))
        for state in self._of(part):
            state._pre_backward(None)
        for state in self._to_prefetch(next_part):
            start_gather(state)

    def bytes_of(self, part: int) -> tuple[int, int, int]:
        """Return the bytes on this rank of gathered parameters and whole gradients while a part goes forward and back,
        and while its gradients are reduced or, on the host, its parameters gathered.

        Forward these are the part's parameters, and those of the next part, which are on their way; backward likewise
        with the part before. Backward there are also gradients that are reduced after all parts, and on a GPU the input
        of the latest reduction, which FSDP2 holds until the next one. A reduction has its input and its output, and
        gloo a copy of what it gathers or reduces. What other collectives allocate themselves is not known.
        """
        own, on_host = set(self._of(part)), self._is_on_host
        forward, backward = (
            sum(map(bytes_of_parameters, groups_of(own | set(self._to_prefetch(neighbour)))))
            for neighbour in (part + 1, part - 1)
        )
        later = range(part + 1, len(self.parts))
        final = [[state for state in self._of(number) if self._first[state] == number] for number in later]
        waiting = sum(self.waiting[number] for number in later)
        reduced = [group for states in final for group in groups_of(states) if group.reduce_grads]
        waiting += sum(bytes_of_gradients(g) for states in final for g in groups_of(states) if not g.reduce_grads)
        before = bytes_of_gradients(reduced[0]) if reduced and not on_host else 0
        collecting = 2 * backward if on_host else 0
        for group in groups_of(state for state in own if self._first[state] == part):
            if group.reduce_grads:
                size = bytes_of_gradients(group)
                output = size // getattr(group.mesh_info, "shard_mesh_size", 1)
                collecting = max(collecting, backward - bytes_of_parameters(group) + size * (1 + on_host) + output)
        return forward, backward + waiting + before, collecting + waiting

    def bytes_of_sums(self, parameters: Sequence[torch.Tensor]) -> int:
        """Return the bytes of the sums of gradients of those parameters that belong to the groups."""
        own = [parameter for parameter in parameters if parameter.requires_grad and self.has(parameter)]
        return sum(parameter.numel() * statistics_dtype(parameter.dtype).itemsize for parameter in own)

    def has(self, parameter: torch.Tensor) -> bool:
        """Return whether a parameter belongs to one of the groups."""
        return _memory(parameter) in self._memories

    def end_backward(self, part: int) -> None:
        """Reduce the groups first read by a part, after its backward; nothing if there is no such part."""
        for state in self._of(part):
            if self._first[state] == part:
                for group in reversed(groups_of([state])):
                    group.post_backward()
                    if group.device.type == "cpu":  # has reduced when it returns, so that no stream reads the input
                        getattr(group.comm_ctx, "reduce_scatter_states", []).clear()

    @contextlib.contextmanager
    def without_parameter_hooks(self) -> Iterator[None]:
        """Reduce a share of the gradients: hooks of sharded parameters run after the last reduction alone."""
        parameters = [parameter.sharded_param for group in groups_of(self.modules) for parameter in group.fsdp_params]
        hooks = [parameter._post_accumulate_grad_hooks for parameter in parameters]
        for parameter in parameters:
            parameter._post_accumulate_grad_hooks = None
        try:
            yield
        finally:
            for parameter, hook in zip(parameters, hooks, strict=True):
                parameter._post_accumulate_grad_hooks = hook

    def most(self, *mine: int) -> list[int]:
        """Return the largest of each number over the ranks that share parameters with this one."""
        return _most(self.modules, *mine)

    def _gather(self, states: Iterable[Any]) -> None:
        for state in states:
            start_gather(state)
            for group in groups_of([state]):
                group.wait_for_unshard()

    def _to_prefetch(self, part: int) -> Sequence[Any]:
        return () if self._is_on_host else self._of(part)

    def _of(self, part: int) -> Sequence[Any]:
        return self.parts[part] if 0 <= part < len(self.parts) else ()


FEATURES = ("get_image_features", "get_video_features", "get_audio_features")  # methods of multimodal models
MOST_CHECKED = 8 * 2**30  # bytes


def is_gathered_to_check() -> bool:
    """Return whether the running calls gather all parameters, so that a self-check can read them.

    The first call of a model with gradients and the first without do, unless that takes more than `MOST_CHECKED`. All
    ranks decide alike, whichever programs they run and however much memory is free.
    """
    mode, is_first, size = torch.is_grad_enabled(), False, 0
    for call in running():
        for state in call.modules:
            seen = state.__dict__.setdefault("_dta_modes_seen", set())
            is_first |= mode not in seen
            seen.add(mode)
        size += call.bytes_of_parameters
    return is_first and size <= MOST_CHECKED


def gather_to_check_again() -> None:
    """Let the next call gather all parameters once more, because the self-check of the running one failed."""
    for call in running():
        for state in call.modules:
            state.__dict__.pop("_dta_modes_seen", None)


def layer_groups(parts: Sequence[Sequence[torch.Tensor]], others: Iterable[torch.Tensor]) -> LayerGroups | None:
    """Build the groups of the running calls from the parameters that each part reads.

    Returns None if all these are gathered already, or if parameters of layers are read outside the parts (`others`).
    """
    calls = [call for call in running() if not call.is_complete]
    modules = {state: module for call in calls for state, module in call.layers.items()}
    owners = {
        _memory(parameter._unsharded_param): state
        for state in modules
        for group in groups_of([state])
        for parameter in group.fsdp_params
    }
    of_parts = [
        list(dict.fromkeys(owners[_memory(parameter)] for parameter in parameters if _memory(parameter) in owners))
        for parameters in parts
    ]
    if not any(of_parts) or any(_memory(parameter) in owners for parameter in others):
        return None
    for call in calls:
        call.runs_layer_by_layer = True
    last = {_memory(parameter): number for number, parameters in enumerate(parts) for parameter in parameters}
    waiting = [0] * len(parts)
    for group in groups_of(state for call in calls for state in call.modules if state not in call.layers):
        for parameter in group.fsdp_params:
            unsharded = parameter._unsharded_param
            if unsharded.requires_grad and (number := last.get(_memory(unsharded))) is not None:
                waiting[number] += unsharded.numel() * unsharded.itemsize
    return LayerGroups(modules, of_parts, waiting)


def all_run_layer_by_layer(mine: bool) -> bool:
    """Return whether all ranks run this call layer by layer: those with rows too short for a tree cannot.

    A collective of the ranks that share parameters, unless all parameters are gathered.
    """
    modules = [state for call in running() if not call.is_complete for state in call.layers]
    return not (groups_of(modules) and _most(modules, not mine)[0]) and mine


def gather_all() -> None:
    """Gather all parameters of the running calls, for code that may read any of them."""
    for call in running():
        call.complete()


def gather_to_encode(encodes: bool, waits: bool = False) -> None:
    """Gather all parameters if this rank or another encodes media: FSDP2 reduces a parameter on all ranks or on none.

    Args:
        encodes: this rank does, and ranks that do not call this with False, once per call of a multimodal model.
        waits: leave the error to a later call, as while Dynamo traces.

    Raises:
        RuntimeContractError: some ranks do and others do not.
    """
    for call in running():
        is_multimodal = any(hasattr(module, name) for module in call.modules.values() for name in FEATURES)
        if call.encode_alike is None and is_multimodal and groups_of(call.modules):
            some, some_not = _most(call.modules, encodes, not encodes)
            call.encode_alike = not (some and some_not)
        if encodes or call.encode_alike is False:
            call.complete()
        if call.encode_alike is False and not waits:
            raise RuntimeContractError(
                "some ranks encode images (or other media) in this call, and others do not",
                expected="images on all ranks, or on none: FSDP2 gathers and reduces an encoder on all ranks together",
                got="a batch with images here" if encodes else "a batch without images here",
                hint="give every rank a row with an image, such as a copy that the loss does not count",
            )


def _most(states: Iterable[Any], *mine: int) -> list[int]:
    groups, names = groups_of(states), ("shard_process_group", "replicate_process_group")
    said = torch.tensor(mine, device=groups[0].device)
    ranks = (getattr(group.mesh_info, name, None) for group in groups for name in names)
    for process_group in dict.fromkeys(ranks):  # layers may be sharded over different meshes
        if process_group is not None:
            dist.all_reduce(said, dist.ReduceOp.MAX, process_group)
    return said.tolist()


def _memory(tensor: torch.Tensor) -> int:
    own = getattr(tensor, "_local_tensor", tensor)
    return int(own.untyped_storage()._cdata)
