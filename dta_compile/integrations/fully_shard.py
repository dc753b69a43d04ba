"""FSDP2 (`fully_shard`) around and inside of what is compiled: gathered once a call, reduced once a backward.

FSDP2 gathers the parameters of a wrapped module in a hook before its forward, frees them in one after it, and gathers
them again before its backward. A schedule needs all parameters all the time. So a compiled callable gathers all groups
that it runs as it is entered, before Dynamo's guards read a parameter; graphs have of the hooks only the casts of mixed
precision; and when a gradient arrives at a graph's outputs, FSDP2's own `_pre_backward` of every group is called, whose
final callback reduces each once. Outside of such calls the hooks do what they always did.

All that touches private parts of FSDP2 is here. Supported torch: 2.11 to 2.15.
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
import torch._dynamo
from torch import nn

from dta_compile.integrations.tracing import traces_for_this_backend

__all__ = ["Sharded", "bytes_of_running", "held", "keeping"]

logger = logging.getLogger("dta_compile")

# By state of FSDP2, one of the modules that share it, in the order of the model.
Modules = Mapping[Any, Any]
Hook = Callable[..., Any]


class Sharded:
    """The FSDP2 modules that a compiled callable runs; called as it is entered, returns what to call as it is left."""

    def __init__(self) -> None:
        self._modules: dict[Any, Any] = {}

    def add(self, modules: Iterable[nn.Module]) -> bool:
        """Add what `fully_shard` was applied to in some modules; whether there was anything new."""
        known = len(self._modules)
        for part in (part for module in modules for part in module.modules()):
            if (get_state := getattr(part, "_get_fsdp_state", None)) and (state := get_state()) not in self._modules:
                self._modules[state] = part
                state._dta_gathered = getattr(state, "_dta_gathered", False)
                _let_graphs_pass_by(state)
        return len(self._modules) > known

    def __call__(self) -> Callable[[], None]:
        call = Gathered({state: part for state, part in self._modules.items() if not state._dta_gathered})
        _mark(call, True)
        _of_thread.running.append(call)
        return _leave


class Gathered:
    """Parameters of FSDP2 modules, together for as long as this exists.

    The call that gathered them refers to it, and so does its graph for autograd. What has no graph lets go of the
    parameters at the end of the call, a backward in FSDP2's final callback, and outputs without a backward as they are
    deleted. What `reshard_after_forward=False` says stays together, as it does without us.
    """

    def __init__(self, modules: Modules) -> None:
        self.modules = modules
        for state in modules:
            state._lazy_init()
        _recover(modules)
        for group in _groups(modules):
            if _is_out_of_date(group):
                _free(group, "IDLE")
        _gather(modules)
        _alive.add(self)
        weakref.finalize(self, _let_go, tuple(modules)).atexit = False

    def before_backward(self, _: Any = None) -> None:
        """Called by autograd before it goes through a graph of the call, once for each of its outputs."""
        _gather(self.modules)
        for state in self.modules:
            state._pre_backward(None)


class _OfThread(threading.local):
    """What the compiled calls of this thread that have not returned yet have gathered, the outermost first; where
    somebody asked for it, what those have gathered that have returned."""

    def __init__(self) -> None:
        self.running: list[Gathered] = []
        self.held: list[Gathered] | None = None


_of_thread = _OfThread()
_alive: weakref.WeakSet[Gathered] = weakref.WeakSet()


def keeping(run: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
    """A graph whose outputs keep together, for their backward, what the calls now running have gathered."""

    def run_and_keep(*args: Any) -> Sequence[Any]:
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
    """What calls within the block gather stays together in it; yields what reduces gradients that autograd did not see
    through the outputs of these calls."""
    calls: list[Gathered] = []
    _of_thread.held = calls
    try:
        yield functools.partial(_reduce, calls)
    finally:
        _of_thread.held = None


def bytes_of_running() -> tuple[int, int]:
    """Bytes on this rank of what the calls now running have gathered: of whole parameters, with their gradients that
    wait for a reduction; and the most that was in flight on the way there."""
    sizes, waiting = [0, 0], 0
    for group in _groups(state for call in _of_thread.running for state in call.modules):
        sizes.append(sum(_bytes(parameter._unsharded_param) for parameter in group.fsdp_params))
        for parameter in group.fsdp_params:
            waiting += _bytes(parameter.unsharded_accumulated_grad) + _bytes(parameter._unsharded_param.grad)
    return sum(sizes) + waiting, sum(sorted(sizes)[-2:])


def _bytes(tensor: torch.Tensor | None) -> int:
    own = getattr(tensor, "_local_tensor", tensor)  # with tensor parallelism a rank gathers its part only
    return 0 if own is None else own.numel() * own.itemsize


def _leave() -> None:
    call = _of_thread.running.pop()
    _mark(call, False)
    if _of_thread.held is not None:
        _of_thread.held.append(call)


def _mark(call: Gathered, is_running: bool) -> None:
    for state in call.modules:
        state._dta_gathered = is_running  # by a compiled call that has not returned yet


def _gather(modules: Modules) -> None:
    """Gather in order, the next one while one is copied to its place: two are in flight at most."""
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


def _let_go(states: Sequence[Any]) -> None:
    """Free, as FSDP2 does after a forward, what no other call has gathered and no module is using."""
    others = {state for call in _alive for state in call.modules}
    for group in _groups(state for state in states if state not in others):
        if group.is_unsharded and group._training_state.name == "IDLE":
            _free(group, "FORWARD")


def _free(group: Any, training_state: str) -> None:
    """Free a group as FSDP2 does in a training state; after a forward, it keeps what it was told to keep."""
    with group.use_training_state(type(group._training_state)[training_state]):
        group.reshard()


def _is_out_of_date(group: Any) -> bool:
    """Whether a call gathers a group anew that still is together.

    All ranks must say the same, whatever of their earlier calls is garbage by now: every call gathers a group that is
    freed after a forward, and another one if an optimiser has written to it since the last.
    """
    shards = [parameter.sharded_param for parameter in group.fsdp_params]
    versions = [(shard._version, shard._local_tensor._version) for shard in shards]
    before, group._dta_versions = getattr(group, "_dta_versions", None), versions
    return bool(group._reshard_after_forward) or versions != before


def _recover(states: Iterable[Any]) -> None:
    """After a backward that failed: FSDP2 waits for its end, and would never reduce again."""
    if torch._C._current_graph_task_id() != -1:
        return
    for context in _contexts(states):
        if context.post_backward_final_callback_queued:
            logger.warning("dta: a backward failed: gradients of the model that were not reduced yet are dropped")
            context.post_backward_final_callback_queued = False
            for state in context.all_states:
                state._training_state = type(state._training_state).IDLE
                state._comm_ctx.post_forward_order.clear()
            for group in _groups(context.all_states):
                _start_anew(group)


def _start_anew(group: Any) -> None:
    group._post_forward_indices.clear()
    group._training_state = type(group._training_state).IDLE
    group.reshard()
    for parameter in group.fsdp_params:
        parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):  # not before the first gathering
            parameter._unsharded_param.grad = None


def _contexts(states: Iterable[Any]) -> list[Any]:
    """What the states of a model share, once a model."""
    return list({id(state._state_ctx): state._state_ctx for state in states}.values())


def _groups(states: Iterable[Any]) -> Iterator[Any]:
    for state in states:
        if hasattr(state, "_fsdp_param_groups"):
            yield from state._fsdp_param_groups
        elif state._fsdp_param_group is not None:  # torch 2.11 has one at most
            yield state._fsdp_param_group


def _let_graphs_pass_by(state: Any) -> None:
    """Put in the place of a state's hooks some that do the same, but in graphs for this backend."""
    handles = state._pre_forward_hook_handle, state._post_forward_hook_handle
    numbers = {one.id for handle in handles for one in getattr(handle, "handles", (handle,))}
    for module in state._modules:
        for hooks, stand_in in ((module._forward_pre_hooks, _before), (module._forward_hooks, _after)):
            for number in numbers & hooks.keys():
                if not hasattr(hooks[number], "_dta_stands_in"):
                    hooks[number] = stand_in(hooks[number], state)


def _before(hook: Hook, state: Any) -> Hook:
    dtype = state._mp_policy.param_dtype if state._mp_policy.cast_forward_inputs else None

    def before_forward(module: nn.Module, args: Any, kwargs: Any) -> Any:
        # Dynamo guards what it reads of the state: without a call that gathered it, such a graph does not run.
        if torch.compiler.is_compiling() and traces_for_this_backend() and state._dta_gathered:
            return _cast(args, dtype), _cast(kwargs, dtype)
        return hook(module, args, kwargs)

    return _standing_in(before_forward)


def _after(hook: Hook, state: Any) -> Hook:
    dtype = state._mp_policy.output_dtype

    def after_forward(module: nn.Module, args: Any, output: Any) -> Any:
        if torch.compiler.is_compiling() and traces_for_this_backend() and state._dta_gathered:
            return _cast(output, dtype)
        return hook(module, args, output)

    return _standing_in(after_forward)


def _standing_in(hook: Any) -> Hook:
    """Dynamo inlines the function in graphs, and leaves it alone where it is called by itself, outside of them."""
    hook._dta_stands_in = True
    torch._dynamo.eval_frame.skip_code(hook.__code__)
    return hook  # type: ignore[no-any-return]


def _cast(values: Any, dtype: torch.dtype | None) -> Any:
    """What FSDP2 makes of a module's inputs and outputs in mixed precision."""
    from torch.distributed.utils import _apply_to_tensors  # not in every build of torch

    def cast(value: torch.Tensor) -> torch.Tensor:
        return value.to(dtype) if value.is_floating_point() else value

    return values if dtype is None else _apply_to_tensors(cast, values)
