"""FSDP2 (`fully_shard`) around and inside of what is compiled.

FSDP2 gathers the parameters of a wrapped module in a hook before its forward, frees them in one after it, and gathers
them again before its backward. A compiled callable shows Dynamo, as it is entered and before guards read a parameter,
the parameters as they are when they are together, without memory. Graphs have of the hooks only the casts of mixed
precision. What runs layer by layer gathers itself (`layer_groups`); whatever else reads parameters gathers all of them
first, and when a gradient arrives at a graph's outputs, FSDP2's own `_pre_backward` of every group is called, whose
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

__all__ = [
    "Gathered",
    "Sharded",
    "bytes_of_running",
    "free",
    "groups_of",
    "held",
    "keeping",
    "running",
    "show_unsharded",
]

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
    """Parameters of FSDP2 modules, together for as long as this exists, once it is `complete`.

    Before, those of layers only look as if: their memory is empty.

    The call that gathered them refers to it, and so does its graph for autograd. What has no graph lets go of the
    parameters at the end of the call, a backward in FSDP2's final callback, and outputs without a backward as they are
    deleted. What `reshard_after_forward=False` says stays together, as it does without us.
    """

    def __init__(self, modules: Modules) -> None:
        self.modules, self.runs_layer_by_layer = modules, False
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
            show_unsharded(state)
        _alive.add(self)
        weakref.finalize(self, _let_go, tuple(modules)).atexit = False

    @property
    def bytes_of_parameters(self) -> int:
        """Bytes of all parameters on this rank once they are together."""
        parameters = (one for group in groups_of(self.modules) for one in group.fsdp_params)
        return sum(_bytes(one._unsharded_param) for one in parameters)

    def complete(self) -> None:
        """Gather all that is not."""
        if not self.is_complete:
            self.is_complete, self.runs_layer_by_layer = True, False
            _gather(self.layers)

    def before_backward(self, _: Any = None) -> None:
        """Called by autograd before it goes through a graph of the call, once for each of its outputs."""
        left = {
            state: module
            for state, module in self.modules.items()
            if not self.runs_layer_by_layer or state not in self.layers
        }
        _gather(left)
        for state in left:
            state._pre_backward(None)
        for state in self.modules:
            state._register_root_post_backward_final_callback()

    def leave(self) -> None:
        """The call returns: layers that are not together look like it no more."""
        for group in groups_of(self.layers):
            if not group.is_unsharded:
                for parameter in group.fsdp_params:
                    parameter._setattr_on_modules(parameter.sharded_param)


class _OfThread(threading.local):
    """What the compiled calls of this thread that have not returned yet have gathered, the outermost first; where
    somebody asked for it, what those have gathered that have returned."""

    def __init__(self) -> None:
        self.running: list[Gathered] = []
        self.held: list[Gathered] | None = None


_of_thread = _OfThread()
_alive: weakref.WeakSet[Gathered] = weakref.WeakSet()


def keeping(run: Callable[..., Sequence[Any]], reads_all: bool = True) -> Callable[..., Sequence[Any]]:
    """A graph whose outputs keep together, for their backward, what the calls now running have gathered.

    Args:
        reads_all: it does not gather what it reads itself.
    """

    def run_and_keep(*args: Any) -> Sequence[Any]:
        for call in running() if reads_all else ():
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
    """What calls within the block gather stays together in it; yields what reduces gradients that autograd did not see
    through the outputs of these calls."""
    calls: list[Gathered] = []
    _of_thread.held = calls
    try:
        yield functools.partial(_reduce, calls)
    finally:
        _of_thread.held = None


def bytes_of_running() -> tuple[int, int]:
    """Bytes on this rank of what the calls now running have gathered, layer by layer those of two layers: of whole
    parameters, with their gradients that wait for a reduction; and the most that is in flight on the way there."""
    together, by_layer, waiting = [0, 0], [0, 0], 0
    for call in running():
        for state in call.modules:
            for group in groups_of([state]):
                sizes = by_layer if call.runs_layer_by_layer and state in call.layers else together
                sizes.append(sum(_bytes(parameter._unsharded_param) for parameter in group.fsdp_params))
                for parameter in group.fsdp_params:
                    waiting += _bytes(parameter.unsharded_accumulated_grad) + _bytes(parameter._unsharded_param.grad)
    largest = sum(sorted(by_layer)[-2:])
    return sum(together) + largest + waiting, sum(sorted(together + by_layer)[-2:])


def _bytes(tensor: torch.Tensor | None) -> int:
    own = getattr(tensor, "_local_tensor", tensor)  # with tensor parallelism a rank gathers its part only
    return 0 if own is None else own.numel() * own.itemsize


def _leave() -> None:
    call = _of_thread.running.pop()
    _mark(call, False)
    call.leave()
    if _of_thread.held is not None:
        _of_thread.held.append(call)


def running() -> Sequence[Gathered]:
    """Of the compiled calls of this thread that have not returned yet, the outermost first."""
    return _of_thread.running


def _is_of_a_layer(state: Any) -> bool:
    """Whether all groups of a state are freed after a forward: they are wanted for a part of it only."""
    groups = groups_of([state])
    return bool(groups) and all(group._reshard_after_forward for group in groups)


def show_unsharded(state: Any) -> None:
    """Let modules have the whole parameters, whether there is memory behind them or not."""
    for group in groups_of([state]):
        for parameter in group.fsdp_params:
            parameter._unsharded_param.requires_grad_(parameter.sharded_param.requires_grad)
            parameter._setattr_on_modules(parameter._unsharded_param)


def _make_unsharded(state: Any, module: Any) -> None:
    """Make the whole parameters, which FSDP2 does as it gathers them for the first time."""
    parameters = [parameter for group in groups_of([state]) for parameter in group.fsdp_params]
    if not all(hasattr(parameter, "_unsharded_param") for parameter in parameters):
        _gather({state: module})
        for group in groups_of([state]):
            free(group, "FORWARD")


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
    for group in groups_of(state for state in states if state not in others):
        if group.is_unsharded and group._training_state.name == "IDLE":
            free(group, "FORWARD")


def free(group: Any, training_state: str) -> None:
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
            for group in groups_of(context.all_states):
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


def groups_of(states: Iterable[Any]) -> list[Any]:
    """The groups of parameters of some states, in order."""
    found: list[Any] = []
    for state in states:
        if hasattr(state, "_fsdp_param_groups"):
            found += state._fsdp_param_groups
        elif state._fsdp_param_group is not None:  # torch 2.11 has one at most
            found.append(state._fsdp_param_group)
    return found


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
        if not torch.compiler.is_compiling():
            _complete(state)
        return hook(module, args, kwargs)

    return _standing_in(before_forward)


def _complete(state: Any) -> None:
    """A module runs by itself, between graphs of a call: FSDP2 would take what it gathers for it away from them."""
    for call in running():
        if state in call.layers:
            call.complete()


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
