"""FSDP2 (`fully_shard`) around and inside compiled callables.

FSDP2 gathers the parameters of a wrapped module in a hook before its forward, frees them in one after it, and gathers
them again before its backward. When a compiled callable is entered, before guards read a parameter, it shows Dynamo the
unsharded parameters without memory. Of the hooks, graphs contain only the casts of mixed precision. A run layer by
layer gathers by itself (`fully_shard_by_layer`); all other readers of parameters gather all of them first. When a
gradient arrives at a graph's outputs, FSDP2's own `_pre_backward` of every group is called, whose final callback
reduces each group once. Outside of such calls the hooks are unchanged.

All uses of FSDP2's private parts are here and in `fully_shard_by_layer`. Supported torch: 2.11 to 2.15.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dta_compile.attributes import attribute_set
from dta_compile.errors import RuntimeContractError
from dta_compile.integrations.tracing import traces_for_this_backend
from dta_compile.torch_compat.autograd import current_backward
from dta_compile.torch_compat.dynamo import skip_code

logger = logging.getLogger("dta_compile")

# By FSDP2 state, one of the modules that share it, in the order of the model.
Modules = Mapping[Any, Any]
Hook = Callable[..., Any]


class Sharded:
    """FSDP2 modules of a compiled callable, which calls this when it is entered; the result is called on return."""

    def __init__(self) -> None:
        self._modules: dict[Any, Any] = {}

    def add(self, modules: Iterable[nn.Module]) -> bool:
        """Add the submodules that `fully_shard` was applied to; return whether any is new."""
        known = len(self._modules)
        for part in (part for module in modules for part in module.modules()):
            if (get_state := getattr(part, "_get_fsdp_state", None)) and (state := get_state()) not in self._modules:
                self._modules[state] = part
                state._dta_gathered = getattr(state, "_dta_gathered", False)
                _replace_hooks(state)
        return len(self._modules) > known

    def __call__(self) -> Callable[[], None]:
        modules = {state: part for state, part in self._modules.items() if not state._dta_gathered}
        if current_backward() != -1 and any(map(_is_of_a_layer, modules)):
            raise RuntimeContractError(
                "a compiled model that FSDP2 shards is called within a backward",
                expected="calls outside of a backward, which gathers, frees and reduces layers itself",
                got="torch.utils.checkpoint around the call, or a call in a hook on a gradient",
                hint="leave the checkpoint out: the plan says what is computed again, memory_budget how much",
            )
        call = Gathered(modules)
        _mark(call, True)
        _of_thread.running.append(call)
        return _leave


class Gathered:
    """FSDP2 parameters that stay gathered as long as this object lives.

    Until `complete` is called, the parameters of layers are unsharded tensors with empty storage.

    The call that gathered them refers to this object, and so does its autograd graph. The parameters are freed at the
    end of a call without a graph, in FSDP2's final callback after a backward, and when the outputs are deleted if there
    is no backward. Groups with `reshard_after_forward=False` stay gathered, as without this package.

    Attributes:
        modules: all modules, by FSDP2 state.
        layers: those of them that are freed after a forward.
        is_complete: all parameters have been gathered.
        runs_layer_by_layer: the run gathers and frees `layers` itself (`fully_shard_by_layer`).
        encode_alike: all ranks encode images (or other media) in the call, or none does; None: not known yet.
    """

    def __init__(self, modules: Modules) -> None:
        self.modules, self.runs_layer_by_layer = modules, False
        self.encode_alike: bool | None = None
        for state in modules:
            state._lazy_init()
        _recover(modules)
        for group in groups_of(modules):
            if _is_out_of_date(group):
                free(group, "IDLE")
        self.layers = {state: module for state, module in modules.items() if _is_of_a_layer(state)}
        self.is_complete = not self.layers
        _gather({state: module for state, module in modules.items() if state not in self.layers})
        for state, module in self.layers.items():
            _make_unsharded(state, module)
        for state in modules:
            show_unsharded(state)
        _alive.add(self)
        weakref.finalize(self, _free_unused, tuple(modules)).atexit = False

    @property
    def bytes_of_parameters(self) -> int:
        """Bytes on this rank of all parameters when they are gathered."""
        return sum(map(bytes_of_parameters, groups_of(self.modules)))

    def complete(self) -> None:
        """Gather all parameters that are not yet."""
        if not self.is_complete:
            self.is_complete, self.runs_layer_by_layer = True, False
            _gather(self.layers)

    def note_read(self, values: Iterable[Any]) -> None:
        """Note which groups a graph reads: with `set_reduce_scatter_unused_params`, those get gradients of zero."""
        groups = [group for group in groups_of(self.modules) if _is_unread(group)]
        if groups:
            read = {id(value) for value in values}
            for group in groups:
                group._dta_is_read = any(id(parameter._unsharded_param) in read for parameter in group.fsdp_params)

    def before_backward(self, _: Any = None) -> None:
        """Gather for a backward; autograd calls this for each output of a graph of the call that gets a gradient."""
        left = {
            state: module
            for state, module in self.modules.items()
            if not self.runs_layer_by_layer or state not in self.layers
        }
        _gather(left)
        for state in left:
            show_unsharded(state)
            state._pre_backward(None)
        for group in filter(_is_unread, groups_of(self.modules)):
            for parameter in group.fsdp_params:  # was gathered for the trace alone; the next call restores the flag
                parameter._unsharded_param.requires_grad_(False)
        for state in self.modules:
            state._register_root_post_backward_final_callback()

    def leave(self) -> None:
        """Show the sharded parameters of layers again as the call returns, also of those that stay gathered.

        They are what `model.parameters()` gives between forward and backward, as without this package.
        """
        for group in groups_of(self.layers):
            for parameter in group.fsdp_params:
                parameter._setattr_on_modules(parameter.sharded_param)


class _OfThread(threading.local):
    """Parameters that compiled calls of this thread gathered.

    Attributes:
        running: those of calls that have not returned, the outermost first.
        held: within `held()`, those of calls that have returned.
        reads_gathered: modules run eagerly within a call that has gathered their parameters, and keeps them.
    """

    def __init__(self) -> None:
        self.running: list[Gathered] = []
        self.held: list[Gathered] | None = None
        self.reads_gathered = False


_of_thread = _OfThread()
_alive: weakref.WeakSet[Gathered] = weakref.WeakSet()


def keeping(run: Callable[..., Sequence[Any]], reads_all: bool = True) -> Callable[..., Sequence[Any]]:
    """Wrap a graph so that its outputs keep the parameters of the running calls gathered until their backward.

    Args:
        reads_all: the graph gathers nothing itself, so that all parameters are gathered before it runs.
    """

    def run_and_keep(*args: Any) -> Sequence[Any]:
        for call in running():
            call.note_read(args)
            if reads_all:
                call.complete()
        outputs = run(*args)
        if _of_thread.running:
            nodes = {output.grad_fn for output in outputs if isinstance(output, torch.Tensor)} - {None}
            for node in nodes:
                for call in _of_thread.running:
                    node.register_prehook(call.before_backward)  # type: ignore[union-attr]
        return outputs

    return run_and_keep


@contextlib.contextmanager
def held() -> Iterator[Callable[[], None]]:
    """Keep parameters that calls within the block gather until its end.

    Yields a function that reduces gradients which autograd did not compute through the outputs of these calls.
    """
    calls: list[Gathered] = []
    with attribute_set(_of_thread, "held", calls):
        yield functools.partial(_reduce, calls)


def reading_gathered() -> contextlib.AbstractContextManager[None]:
    """Run modules on the parameters that calls keep gathered: ranks may do so different numbers of times."""
    return attribute_set(_of_thread, "reads_gathered", True)


def bytes_of_running() -> tuple[int, int]:
    """Return bytes on this rank for the running calls, without layers that are gathered one by one.

    The first number is of gathered parameters and of gradients that wait for a reduction; the second is the maximum
    during gathering, or during the reductions at the end of a backward.
    """
    gathered, waiting = [0, 0], 0
    for call in running():
        for state in call.modules:
            for group in groups_of([state]):
                if not (call.runs_layer_by_layer and state in call.layers):
                    gathered.append(bytes_of_parameters(group))
                for parameter in group.fsdp_params:
                    waiting += _bytes(parameter.unsharded_accumulated_grad) + _bytes(parameter._unsharded_param.grad)
    return sum(gathered) + waiting, sum(sorted(gathered)[-2:])


def bytes_of_parameters(group: Any) -> int:
    """Return the bytes on this rank of a group's parameters when they are gathered."""
    return sum(_bytes(parameter._unsharded_param) for parameter in group.fsdp_params)


def bytes_of_gradients(group: Any) -> int:
    """Return the bytes of a group's whole gradients in the dtype that they are reduced in."""
    trained = [parameter for parameter in group.fsdp_params if parameter.sharded_param.requires_grad]
    sizes = ((_own(parameter._unsharded_param), parameter.reduce_dtype) for parameter in trained)
    return sum(own.numel() * (dtype or own.dtype).itemsize for own, dtype in sizes)


def _bytes(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else _own(tensor).numel() * _own(tensor).itemsize


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """Return a rank's part of a tensor: with tensor parallelism it gathers no more."""
    return getattr(tensor, "_local_tensor", tensor)


def _leave() -> None:
    call = _of_thread.running.pop()
    _mark(call, False)
    call.leave()
    if _of_thread.held is not None:
        _of_thread.held.append(call)


def running() -> Sequence[Gathered]:
    """Return what the running compiled calls of this thread gathered, the outermost first."""
    return _of_thread.running


def _is_of_a_layer(state: Any) -> bool:
    """Return whether all groups of a state are freed after a forward, so that only one layer needs them at a time."""
    groups = groups_of([state])
    return bool(groups) and all(group._reshard_after_forward for group in groups)


def show_unsharded(state: Any) -> None:
    """Set the unsharded parameters on their modules, whether or not their storage is allocated."""
    for group in groups_of([state]):
        for parameter in group.fsdp_params:
            parameter._unsharded_param.requires_grad_(parameter.sharded_param.requires_grad)
            parameter._setattr_on_modules(parameter._unsharded_param)


def _make_unsharded(state: Any, module: Any) -> None:
    """Create the unsharded parameters, which FSDP2 does in the first gather; then free them again."""
    parameters = [parameter for group in groups_of([state]) for parameter in group.fsdp_params]
    if not all(hasattr(parameter, "_unsharded_param") for parameter in parameters):
        _gather({state: module})
        for group in groups_of([state]):
            free(group, "FORWARD")


def _is_unread(group: Any) -> bool:
    """Return whether gradients of zero are wanted for a group, and no module or graph has read it so far."""
    return getattr(group, "reduce_scatter_unused_params", False) and not getattr(group, "_dta_is_read", False)


def _mark(call: Gathered, is_running: bool) -> None:
    for state in call.modules:
        state._dta_gathered = is_running  # by a compiled call that has not returned yet


def _gather(modules: Modules) -> None:
    """Gather modules in order, starting the next gather while one is copied out, so that at most two are in flight."""
    handle = None
    for module in modules.values():
        following = module.unshard(async_op=True)
        if handle is not None:
            handle.wait()
        handle = following
    if handle is not None:
        handle.wait()


def _reduce(calls: Sequence[Gathered]) -> None:
    for context in _contexts(state for call in calls for state in call.modules):
        context.all_states[0]._root_post_backward_final_callback()


def _free_unused(states: Sequence[Any]) -> None:
    """Free groups that no other call has gathered and no module is using, as FSDP2 does after a forward."""
    others = {state for call in _alive for state in call.modules}
    for group in groups_of(state for state in states if state not in others):
        if group.is_unsharded and group._training_state.name == "IDLE":
            free(group, "FORWARD")


def start_gather(state: Any) -> None:
    """Start to gather a state's groups, also in a backward for which `set_unshard_in_backward(False)` was called.

    Chunks may run forward again there, unlike in eager mode.
    """
    for group in groups_of([state]):
        with group.use_training_state(type(group._training_state).IDLE):
            group.unshard(async_op=True)


def free(group: Any, training_state: str) -> None:
    """Free a group as FSDP2 does in a training state; "FORWARD" keeps groups with `reshard_after_forward=False`."""
    with group.use_training_state(type(group._training_state)[training_state]):
        group.reshard()


def _is_out_of_date(group: Any) -> bool:
    """Return whether a call has to gather a group again, even if it is still gathered.

    All ranks must decide alike, whichever of their earlier calls are garbage by now. So every call gathers a group that
    is freed after a forward, and another group if an optimiser has written to it since the last call.
    """
    shards = [parameter.sharded_param for parameter in group.fsdp_params]
    versions = [(shard._version, shard._local_tensor._version) for shard in shards]
    before, group._dta_versions = getattr(group, "_dta_versions", None), versions
    return bool(group._reshard_after_forward) or versions != before


def _recover(states: Iterable[Any]) -> None:
    """Reset FSDP2 after a failed backward, because it would wait for the end of that one and never reduce again."""
    if current_backward() != -1:
        return
    for context in _contexts(states):
        if context.post_backward_final_callback_queued:
            logger.warning("dta: a backward failed: gradients of the layers that it had not finished are dropped")
            context.post_backward_final_callback_queued = False
            for state in context.all_states:
                state._training_state = type(state._training_state).IDLE
                state._comm_ctx.post_forward_order.clear()
            for group in groups_of(context.all_states):
                _reset(group)


def _reset(group: Any) -> None:
    for parameter in group.fsdp_params:
        info = parameter._module_info
        if getattr(info.module, info.param_name) is not parameter.sharded_param:  # `model.zero_grad()` has not met it
            parameter.sharded_param.grad = None
    group._post_forward_indices.clear()
    group._training_state = type(group._training_state).IDLE
    group.reshard()
    for parameter in group.fsdp_params:
        parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):  # created by the first gather
            parameter._unsharded_param.grad = None


def _contexts(states: Iterable[Any]) -> list[Any]:
    """Return the distinct contexts that the states of each model share."""
    return list({id(state._state_ctx): state._state_ctx for state in states}.values())


def groups_of(states: Iterable[Any]) -> list[Any]:
    """Return the parameter groups of some states, in order."""
    groups: list[Any] = []
    for state in states:
        if hasattr(state, "_fsdp_param_groups"):
            groups += state._fsdp_param_groups
        elif state._fsdp_param_group is not None:  # torch 2.11 has one at most
            groups.append(state._fsdp_param_group)
    return groups


def _replace_hooks(state: Any) -> None:
    """Replace the hooks of a state by ones that differ only in graphs for this backend."""
    handles = state._pre_forward_hook_handle, state._post_forward_hook_handle
    numbers = {part.id for handle in handles for part in getattr(handle, "handles", (handle,))}
    for module in state._modules:
        for hooks, replacement in ((module._forward_pre_hooks, _before), (module._forward_hooks, _after)):
            for number in numbers & hooks.keys():
                if not hasattr(hooks[number], "_dta_stands_in"):
                    hooks[number] = replacement(hooks[number], state)


def _before(hook: Hook, state: Any) -> Hook:
    dtype = state._mp_policy.param_dtype if state._mp_policy.cast_forward_inputs else None

    def before_forward(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if _is_gathered(state):
            return _cast(args, dtype), _cast(kwargs, dtype)
        if not torch.compiler.is_compiling():
            _complete(state)
            if any(group.is_unsharded for group in groups_of([state])):  # FSDP2 expects these on the modules
                show_unsharded(state)
            for group in groups_of([state]):
                group._dta_is_read = True
        return hook(module, args, kwargs)

    return _as_replacement(before_forward)


def _is_gathered(state: Any) -> bool:
    """Return whether a call gathers a module's parameters, so that the module's hooks do not."""
    # Dynamo guards `_dta_gathered`, so that the graph only runs in a call that gathered the state.
    if torch.compiler.is_compiling():
        return traces_for_this_backend() and bool(state._dta_gathered)
    return _of_thread.reads_gathered and any(state in call.modules and call.is_complete for call in running())


def _complete(state: Any) -> None:
    """Gather all layers for a module that runs eagerly between graphs of a call: FSDP2 would free it after that."""
    for call in running():
        if state in call.layers:
            call.complete()


def _after(hook: Hook, state: Any) -> Hook:
    dtype = state._mp_policy.output_dtype

    def after_forward(module: nn.Module, args: Any, output: Any) -> Any:
        if _is_gathered(state):
            return _cast(output, dtype)
        return hook(module, args, output)

    return _as_replacement(after_forward)


def _as_replacement(hook: Any) -> Hook:
    """Mark a replacement hook: Dynamo inlines it in graphs, and does not compile it when it runs outside of them."""
    hook._dta_stands_in = True
    skip_code(hook.__code__)
    return hook  # type: ignore[no-any-return]


def _cast(values: Any, dtype: torch.dtype | None) -> Any:
    """Cast a module's inputs or outputs as FSDP2 does in mixed precision."""
    from dta_compile.torch_compat.autograd import apply_to_tensors

    def cast(value: torch.Tensor) -> torch.Tensor:
        return value.to(dtype) if value.is_floating_point() else value

    return values if dtype is None else apply_to_tensors(cast, values)
