"""FSDP2 (`fully_shard`) around and inside of what is compiled: gathered once a call, reduced once a backward.

FSDP2 gathers the parameters of a wrapped module in a hook before its forward, frees them in one after it, and gathers
them again in one before its backward. A schedule needs all parameters all the time. So a compiled callable gathers all
groups that it runs as it is entered, before Dynamo's guards read a parameter; graphs have of the hooks only the casts of
mixed precision; and when a gradient arrives at a graph's outputs, FSDP2's own `_pre_backward` of every group is called,
whose final callback reduces each once. Outside of such calls the hooks do what they always did.

All that touches private parts of FSDP2 is here. Supported torch: 2.11 to 2.15.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch._dynamo
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState, _cast_fp_tensor
from torch.distributed.utils import _apply_to_tensors

from dta_compile.integrations.tracing import traces_for_this_backend

__all__ = ["Sharded", "keep_for_backward"]

logger = logging.getLogger("dta_compile")

Hook = Callable[..., Any]


class Sharded:
    """The FSDP2 modules that a compiled callable runs; called as it is entered, returns what is called as it is left."""

    def __init__(self) -> None:
        self._modules: dict[Any, FSDPModule] = {}  # by state, one of the modules that share it, in order of the model

    def add(self, modules: Iterable[nn.Module]) -> bool:
        """Add what `fully_shard` was applied to in some modules; whether there was anything new."""
        known = len(self._modules)
        for module in modules:
            for part in module.modules():
                if isinstance(part, FSDPModule) and (state := part._get_fsdp_state()) not in self._modules:
                    self._modules[state] = part
                    _let_graphs_pass_by(state)
        return len(self._modules) > known

    def __call__(self) -> Callable[[], None]:
        inside = {state for one in _running() for state in one.modules}
        _running().append(Gathered({state: part for state, part in self._modules.items() if state not in inside}))
        return _leave


class Gathered:
    """Parameters of FSDP2 modules, together as long as this exists.

    The call that gathered them refers to it, and so does its graph for autograd: what has no graph lets go of the
    parameters at the end of the call, a backward in its own final callback, and outputs that nobody wants as they are
    deleted. What `reshard_after_forward=False` says stays together, as it does without us.
    """

    def __init__(self, modules: dict[Any, FSDPModule]) -> None:
        self.modules = modules
        for state in modules:
            state._lazy_init()
        _recover(modules)
        for state, module in modules.items():
            if any(_is_out_of_date(group) for group in _groups(state)):
                module.reshard()
        _gather(modules)
        _gathered.add(self)
        weakref.finalize(self, _let_go, tuple(modules)).atexit = False

    def before_backward(self, _: Any = None) -> None:
        """Called by autograd before it goes through a graph of the call, once for each of its outputs."""
        _gather(self.modules)
        for state in self.modules:
            state._pre_backward(None)


_gathered: weakref.WeakSet[Gathered] = weakref.WeakSet()
_of_thread = threading.local()


def keep_for_backward(outputs: Iterable[Any]) -> None:
    """Keep together what the calls now running have gathered, for as long as a graph for autograd behind `outputs` is."""
    if not _running():
        return
    nodes = {output.grad_fn for output in outputs if isinstance(output, torch.Tensor) and output.grad_fn is not None}
    for node in nodes:
        for call in _running():
            node.register_prehook(call.before_backward)


def _running() -> list[Gathered]:
    """What the compiled calls of this thread that have not returned yet have gathered, the outermost first."""
    if not hasattr(_of_thread, "running"):
        _of_thread.running = []
    running: list[Gathered] = _of_thread.running
    return running


def _leave() -> None:
    _running().pop()


def _gather(modules: dict[Any, FSDPModule]) -> None:
    """Gather in order, the next one while one is copied to its place: two are in flight at most."""
    handle = None
    for module in modules.values():
        following = module.unshard(async_op=True)
        if handle is not None:
            handle.wait()
        handle = following
    if handle is not None:
        handle.wait()


def _let_go(states: Sequence[Any]) -> None:
    """Free, as FSDP2 does after a forward, what no other call has gathered and no module is using."""
    others = {state for one in _gathered for state in one.modules}
    for state in states:
        for group in _groups(state):
            if state not in others and group.is_unsharded and group._training_state == TrainingState.IDLE:
                with group.use_training_state(TrainingState.FORWARD):
                    group.reshard()


def _recover(states: Iterable[Any]) -> None:
    """After a backward that failed, without which FSDP2 would never reduce again."""
    context = {id(state._state_ctx): state._state_ctx for state in states}
    for one in context.values():
        if one.post_backward_final_callback_queued and torch._C._current_graph_task_id() == -1:
            logger.warning("dta: a backward failed: what it had not reduced yet of the model's gradients is dropped")
            for state in one.all_states:
                _reset(state)
            one.post_backward_final_callback_queued = False
            one.iter_forward_root = None


def _reset(state: Any) -> None:
    state._training_state = TrainingState.IDLE
    state._comm_ctx.post_forward_order.clear()
    for group in _groups(state):
        group._post_forward_indices.clear()
        group._training_state = TrainingState.IDLE
        group.reshard()
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


def _groups(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group else []  # torch 2.11 has one at most


def _is_out_of_date(group: Any) -> bool:
    """Whether a call gathers a group anew that still is together.

    All ranks say the same, whatever of their earlier calls is garbage by now: a group that is freed after a forward is
    gathered by every call, another one if an optimiser has written to it since then.
    """
    shards = [parameter.sharded_param for parameter in group.fsdp_params]
    versions = [(shard._version, shard._local_tensor._version) for shard in shards]
    before, group._dta_versions = getattr(group, "_dta_versions", None), versions
    return bool(group._reshard_after_forward) or versions != before


def _let_graphs_pass_by(state: Any) -> None:
    """Put in the place of a state's hooks some that do the same, but for graphs of ours."""
    handles = state._pre_forward_hook_handle, state._post_forward_hook_handle
    numbers = {one.id for handle in handles for one in getattr(handle, "handles", (handle,))}
    for module in state._modules:
        for hooks, stand_in in ((module._forward_pre_hooks, _before), (module._forward_hooks, _after)):
            for number in numbers & hooks.keys():
                if not hasattr(hooks[number], "_dta_stands_in"):
                    hooks[number] = stand_in(hooks[number], state._mp_policy)


def _before(hook: Hook, policy: Any) -> Hook:
    dtype = policy.param_dtype if policy.cast_forward_inputs else None

    def before_forward(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and traces_for_this_backend():
            return _cast(args, dtype), _cast(kwargs, dtype)
        return hook(module, args, kwargs)

    return _standing_in(before_forward)


def _after(hook: Hook, policy: Any) -> Hook:
    dtype = policy.output_dtype

    def after_forward(module: nn.Module, args: Any, output: Any) -> Any:
        if torch.compiler.is_compiling() and traces_for_this_backend():
            return _cast(output, dtype)
        return hook(module, args, output)

    return _standing_in(after_forward)


def _standing_in(hook: Any) -> Hook:
    """Dynamo inlines the function in graphs; as a frame of its own it is not compiled."""
    hook._dta_stands_in = True
    torch._dynamo.eval_frame.skip_code(hook.__code__)
    return hook


def _cast(values: Any, dtype: torch.dtype | None) -> Any:
    """What FSDP2 makes of a module's inputs and outputs in mixed precision."""
    return values if dtype is None else _apply_to_tensors(functools.partial(_cast_fp_tensor, dtype), values)
