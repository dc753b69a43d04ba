"""Calls of encoders and of positions as opaque nodes of a captured graph, in place of methods of transformers' models.

Methods that make features of images, videos and sounds, or positions of tokens in several axes (M-RoPE), read sizes
from tensors (`tolist`), which breaks the graph. In graphs for this backend each of their calls is one node, `encode` or
`token_positions`. `backend.py` has the methods of all models wrapped once, also of models that are defined later.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dta_compile.capture.dynamo.running import (
    examples,
    graph_being_traced,
    is_in_nested_graph,
    is_tracing,
    outside_of_trace,
)
from dta_compile.errors import RefusalError
from dta_compile.integrations.fully_shard_by_layer import FEATURES, gather_to_encode
from dta_compile.integrations.tracing import traces_for_this_backend
from dta_compile.ops.feature_tables import unequal_counts
from dta_compile.registration import when_loaded
from dta_compile.runtime.encoders.encoder import Encoder, encoder_of
from dta_compile.runtime.encoders.method_calls import TENSOR, Arguments, MethodCall, Positions, call_of, register
from dta_compile.runtime.encoders.modules import EncoderModule
from dta_compile.torch_compat import TAKES_MODULES, wrap_once
from dta_compile.torch_compat.dynamo import UserFunctionVariable, trace_rules
from dta_compile.torch_compat.tensors import FakeTensor

MODELS = "transformers.modeling_utils"
POSITIONS = "compute_3d_position_ids"
OF_TEXT = ("input_ids", "inputs_embeds", "attention_mask", "mm_token_type_ids")  # other arguments are about images


@torch.compiler.allow_in_graph
def encode(handle: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Run an encoder on all units of a call; in a captured graph, a node that stands for it.

    Args:
        handle: of the encoder.
        tensors: its tensor arguments.

    Returns:
        as `Encoder.__call__`; while tracing, tensors of an unknown number of features.
    """
    encoder = encoder_of(handle)
    if not _is_traced(tensors):
        return encoder(*tensors)
    _require_trace(encoder)
    with outside_of_trace():
        gather_to_encode(True, waits=True)
        encoder.learn(examples(tensors))
    per_entry = encoder.form.per_entry
    if per_entry > 1:  # which depends on the sizes of images
        for tensor in tensors:
            tuple(map(int, tensor.shape[1:]))
    mode = _mode_of(tensors)
    number = mode.shape_env.create_unbacked_symint() * per_entry
    is_trained = torch.is_grad_enabled() and (encoder.is_trained or any(tensor.requires_grad for tensor in tensors))
    with mode:
        return tuple(
            torch.empty(number, width, dtype=dtype, device=device, requires_grad=is_trained and dtype.is_floating_point)
            for width, dtype, device in encoder.form.widths or ((1, torch.float32, tensors[0].device),)
        )


@torch.compiler.allow_in_graph
def token_positions(handle: int, *tensors: torch.Tensor) -> torch.Tensor:
    """Compute positions `[axes, B, S]` as `Positions` do; in a captured graph, a node that stands for it."""
    call = call_of(Positions, handle)
    if not _is_traced(tensors):
        return call(*tensors)
    _require_trace(call)
    with outside_of_trace():
        positions = call(*examples(tensors))
    with _mode_of(tensors):
        shape = (len(positions), *tensors[0].shape)
        return torch.empty(shape, dtype=positions.dtype, device=positions.device)


def _is_traced(tensors: tuple[torch.Tensor, ...]) -> bool:
    return any(isinstance(tensor, FakeTensor) for tensor in tensors)


def _require_trace(call: MethodCall) -> None:
    """Refuse to stand in for a method where its result would be taken for real."""
    if not is_tracing():
        raise RefusalError(
            "a captured call of a method for images is given tensors without values",
            where=call.name,
            expected="real tensors, once the graph is captured",
            got="fake tensors",
            hint="run the compiled model outside of FakeTensorMode, on tensors of a real device",
        )


def _mode_of(tensors: tuple[torch.Tensor, ...]) -> Any:
    return next(tensor.fake_mode for tensor in tensors if isinstance(tensor, FakeTensor))


def _encoding(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method to be one node in graphs for this backend."""

    def features(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() and traces_for_this_backend():
            return _encoded(self, method, args, kwargs)
        return method(self, *args, **kwargs)

    return features


def _positioning(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the method that computes positions of tokens, and keeps an offset for generation in the model.

    Without images, and in generation, the method itself is traced.
    """

    def position_ids(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_ours = torch.compiler.is_dynamo_compiling() and traces_for_this_backend() and not is_in_nested_graph()
        media = [name for name, value in kwargs.items() if isinstance(value, torch.Tensor) and name not in OF_TEXT]
        is_known = kwargs.get("input_ids") is not None and kwargs.get("mm_token_type_ids", True) is not None
        if not is_ours or not media or not is_known or args or kwargs.get("cache") is not None:
            return method(self, *args, **kwargs)
        tensors: list[torch.Tensor] = []
        ids = ("input_ids", constant(kwargs.pop("input_ids"), tensors))
        if "inputs_embeds" in kwargs:
            kwargs["inputs_embeds"] = None  # which are read without ids only
        keyword = (ids, *[(name, constant(value, tensors)) for name, value in kwargs.items()])
        return token_positions(handle_of("Positions", self, method, (), keyword), *tensors)

    return position_ids


def _encoded(self: Any, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what a method returns, with the features of all units together; Dynamo traces this.

    A call in a checkpoint, or with arguments of other types, is left to run as it is between two graphs: the values
    that its tensors have in the call that is being compiled are not known. So is one that returns other tensors.
    """
    tensors: list[torch.Tensor] = []
    positional = tuple([constant(value, tensors) for value in args])
    keyword = tuple([(name, constant(value, tensors)) for name, value in kwargs.items()])
    if not tensors or is_in_nested_graph() or not all(map(is_known, (*args, *kwargs.values()))):
        return torch.compiler.disable(method)(self, *args, **kwargs)
    handle = handle_of("Encoder", self, method, positional, keyword)
    features = encode(handle, *tensors)
    if _of_form(handle, "has_others"):
        return torch.compiler.disable(method)(self, *args, **kwargs)
    guard_trained(self, handle)
    left = iter(features)
    fields = {name: _restored(form, left) for name, form in _of_form(handle, "fields")}
    return _of_form(handle, "returned")(**fields) if fields else method(self, *args, **kwargs)


def guard_trained(self: Any, handle: int) -> None:
    """Have a call with other trained weights traced anew: Dynamo guards what is read here."""
    for name in _of_form(handle, "modules"):
        for weight in self.get_submodule(name).parameters():
            weight.requires_grad  # noqa: B018
    for name in _of_form(handle, "weights"):
        self.get_parameter(name).requires_grad  # noqa: B018


def is_known(value: Any) -> bool:
    """Return whether an argument is a constant but for its tensors."""
    if isinstance(value, (list, tuple)):
        return all(map(is_known, value))
    return value is None or isinstance(value, (torch.Tensor, bool, int, float, str, torch.dtype))


def constant(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return an argument without its tensors, which are moved to a list."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return TENSOR
    if isinstance(value, (list, tuple)):
        return tuple([constant(item, tensors) for item in value])
    return value


def _restored(form: Any, features: Iterator[torch.Tensor]) -> Any:
    """Return features in the form that the method gives them; lists of one tensor per unit have one for all units.

    Of masked features there are those that are used alone, with a mask that is true for each.
    """
    if form[0] == "tensor":
        value = next(features)
        return value if form[1] == 0 else value.view(-1, form[1], value.shape[-1])
    if form[0] in ("masked", "mask"):
        return next(features).unsqueeze(0) if form[0] == "masked" else next(features).squeeze(-1).unsqueeze(0)
    if form[0] == "entries":
        return next(features).view(-1, form[1])
    if form[0] == "constant":
        return form[1]
    items = [_restored(inner, features) for inner in form[1:]] if len(form) > 1 else [next(features)]
    return items if form[0] == "list" else tuple(items)


@torch.compiler.assume_constant_result
def handle_of(kind: str, module: Any, method: Callable[..., Any], positional: Any, keyword: Any) -> int:
    kinds: dict[str, type[MethodCall]] = {"Encoder": Encoder, "EncoderModule": EncoderModule, "Positions": Positions}
    return register(kinds[kind], module, method, Arguments(positional, keyword))


@torch.compiler.assume_constant_result
def _of_form(handle: int, name: str) -> Any:
    """Return an attribute of the form of an encoder's results."""
    return getattr(encoder_of(handle).form, name)


def stand_in() -> None:
    """Wrap the methods of all models of transformers, now or as soon as it is imported."""
    if not TAKES_MODULES:
        return
    wrap_once(torch, "_check_tensor_all", _checking)
    # Dynamo looks its own function up by name, whenever its cache of rules is cleared: ours is traced like any other.
    trace_rules.manual_torch_name_rule_map["torch._check_tensor_all"] = UserFunctionVariable
    trace_rules.get_torch_obj_rule_map.cache_clear()
    when_loaded(MODELS, _wrap_models)


@torch.compiler.allow_in_graph
def check_counts(condition: torch.Tensor) -> torch.Tensor:
    """Check that there are as many features as placeholder tokens, as models do; without effect while tracing."""
    if not _is_traced((condition,)) and not bool(condition.all()):
        raise unequal_counts("one per feature", "another number")
    return condition


def _checking(check: Callable[..., None]) -> Callable[..., None]:
    """Wrap torch's check of a condition on values, which breaks the graph, for graphs with encoders.

    Models check so that there are as many placeholder tokens as features.
    """

    def check_tensor_all(cond: Any, message: Any = None) -> None:
        if torch.compiler.is_dynamo_compiling() and traces_for_this_backend() and _has_encoders():
            check_counts(cond)
        else:
            check(cond, message)

    return check_tensor_all


@torch.compiler.assume_constant_result
def _has_encoders() -> bool:
    return any(node.target is encode for node in graph_being_traced().nodes)


def _wrap_models(module: types.ModuleType) -> None:
    base: Any = module.PreTrainedModel
    of_subclass = base.__init_subclass__.__func__
    if hasattr(of_subclass, "of_dta"):
        return

    def __init_subclass__(cls: type, /, **kwargs: Any) -> None:
        of_subclass(cls, **kwargs)
        _wrap(cls)

    __init_subclass__.of_dta = True  # type: ignore[attr-defined]
    base.__init_subclass__ = classmethod(__init_subclass__)
    pending = [base]
    while pending:
        cls = pending.pop()
        _wrap(cls)
        pending += cls.__subclasses__()


def _wrap(cls: type) -> None:
    for name in (*FEATURES, POSITIONS):
        if callable(vars(cls).get(name)):
            wrap_once(cls, name, _positioning if name == POSITIONS else _encoding)
