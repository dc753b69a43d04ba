"""Calls of modules that put features at tokens themselves (`EncoderModule`) as opaque nodes of a captured graph."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from dta_compile.capture.dynamo.running import is_in_nested_graph, modules_at_hand
from dta_compile.capture.media.encoder_calls import constant, encode, guard_trained, handle_of, is_known
from dta_compile.integrations.tracing import traces_for_this_backend
from dta_compile.runtime.encoders.encoder import encoder_of
from dta_compile.runtime.encoders.modules import IDS, TOKENS, EncoderModule
from dta_compile.torch_compat import TAKES_MODULES, as_wrapper, frames, wrap_once
from dta_compile.torch_compat.dynamo import InstructionTranslator


def stand_in() -> None:
    """Wrap such modules as soon as a function that they are at hand in is traced."""
    if TAKES_MODULES:
        wrap_once(InstructionTranslator, "run", _with_modules)


def _putting(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the `forward` of a module that may put features at tokens itself: see `EncoderModule`."""

    names = tuple(inspect.signature(method).parameters)[1:]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() and traces_for_this_backend() and not is_in_nested_graph():
            given = dict(zip(names, args, strict=False)) | kwargs
            tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
            has_media = any(value.is_floating_point() for name, value in tensors.items() if name != TOKENS)
            if has_media and IDS in tensors and TOKENS in tensors and all(map(is_known, given.values())):
                return _with_features(self, method, given)
        return method(self, *args, **kwargs)

    return forward


def _with_features(self: Any, method: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Return tokens with features of media at their placeholders; Dynamo traces this."""
    ids, tokens = given[IDS], given[TOKENS]
    tensors: list[torch.Tensor] = []
    others = {**given, TOKENS: (int(tokens.shape[-1]), tokens.dtype)}
    keyword = tuple([(name, constant(value, tensors)) for name, value in others.items()])
    handle = handle_of("EncoderModule", self, method, (), keyword)
    features = encode(handle, *tensors)
    if _token(handle) is None:
        return method(self, **given)
    guard_trained(self, handle)
    return tokens.masked_scatter((ids == _token(handle))[..., None].expand_as(tokens), features[0])


@torch.compiler.assume_constant_result
def _token(handle: int) -> int | None:
    encoder = encoder_of(handle)
    assert isinstance(encoder, EncoderModule)
    return encoder.token


@as_wrapper
def _with_modules(run: Callable[[Any], None], self: Any) -> None:
    """Wrap modules that need both ids and embeddings, and have no such modules inside, before a function is traced."""
    if frames.is_ours(self.output.compiler_fn):
        parts: list[Any] = [part for module in modules_at_hand(self) for part in module.modules()]
        kinds: dict[Any, Any] = {part: type(part) for part in parts}
        taking = {part: kind for part, kind in kinds.items() if _takes_tokens(kind)}
        for part, kind in taking.items():
            if not any(other is not part and other in taking for other in part.modules()):
                wrap_once(kind, "forward", _putting)
    run(self)


@functools.cache
def _takes_tokens(kind: Any) -> bool:
    forward = inspect.getattr_static(kind, "forward", None)
    if not inspect.isfunction(forward):  # of a scripted module
        return False
    parameters = inspect.signature(forward).parameters
    return all(name in parameters and parameters[name].default is inspect.Parameter.empty for name in (IDS, TOKENS))
