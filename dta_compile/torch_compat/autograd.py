"""Autograd: its switches in captured graphs, functional tensors' writes, and transforms of `torch.func`.

Correctness depends on the switches: a graph's calls are compared with them by identity.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from dta_compile.torch_compat import needed_for

with needed_for("following gradients through a graph"):
    from torch import _functionalize_has_data_mutation as has_data_mutation  # type: ignore[attr-defined]
    from torch import _sync as sync  # type: ignore[attr-defined]
    from torch._C import _log_api_usage_once as log_usage
    from torch._C import _set_grad_enabled as set_grad_enabled
    from torch._C._autograd import _get_data_attr as read_data  # type: ignore[attr-defined]
    from torch._functorch._aot_autograd.functional_utils import from_fun, to_fun
    from torch.amp.autocast_mode import _enter_autocast as enter_autocast
    from torch.autograd.grad_mode import _enter_inference_mode as enter_inference_mode
    from torch.autograd.grad_mode import _exit_inference_mode as exit_inference_mode

with needed_for("noticing torch.func"):
    from torch._C._functorch import (
        _grad_increment_nesting,
        _jvp_increment_nesting,
        get_dynamic_layer_stack_depth,
        get_inplace_requires_grad_allowed,
        get_unwrapped,
        is_batchedtensor,
        is_functorch_wrapped_tensor,
        is_legacy_batchedtensor,
        peek_interpreter_stack,
        pop_dynamic_layer_stack_and_undo_to_depth,
        set_inplace_requires_grad_allowed,
    )
    from torch._functorch import predispatch

    # Before torch 2.12, graphs have the function in C.
    begin_jvp = getattr(predispatch, _jvp_increment_nesting.__name__, _jvp_increment_nesting)
    BEGIN_DERIVATIVES = (_grad_increment_nesting, begin_jvp)

with needed_for("the order of gradients in a backward pass"):
    from torch._C import _current_graph_task_id as current_backward
    from torch._C import _will_engine_execute_node as will_run
    from torch.autograd import _get_sequence_nr as sequence_number  # type: ignore[attr-defined]
    from torch.distributed.utils import _apply_to_tensors as apply_to_tensors

with needed_for("noticing hooks on results"):
    from torch._C import _FunctionBase

    register_hooks: Any = _FunctionBase._register_hook_dict

Note = Callable[[Any, Mapping[int, Any]], None]


def note_hooks(function: type[torch.autograd.Function]) -> Callable[[Note], Note]:
    """Decorate what is called with the context of a function, an autograd node, and the hooks by number that it or its
    output has, when the first of these comes."""

    def decorator(note: Note) -> Note:
        node: Any = function._backward_cls

        def register(ctx: Any, output: torch.Tensor) -> None:
            note(ctx, output._backward_hooks)  # type: ignore[arg-type]
            register_hooks(ctx, output)

        def noting(register: Callable[..., Any]) -> Callable[..., Any]:
            def register_on_node(ctx: Any, hook: Callable[..., Any]) -> Any:
                handle = register(ctx, hook)
                note(ctx, handle.hooks_dict_ref())
                return handle

            return register_on_node

        node._register_hook_dict = register
        node.register_hook, node.register_prehook = noting(node.register_hook), noting(node.register_prehook)
        return note

    return decorator
