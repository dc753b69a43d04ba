"""How the mixer layers of a program are computed in one call: the table of what does it, by mixer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dta_compile.executable.executable import Executable
from dta_compile.executable.layers import AttentionLayer, MixerLayer
from dta_compile.ops.attention import ATTENTION_MIXERS
from dta_compile.ops.recurrences.operators import RECURRENCES
from dta_compile.runtime.attention.interface import Provider
from dta_compile.runtime.attention.layer import AttentionRuntime, provider_of
from dta_compile.runtime.calls.masks import ReadMasks
from dta_compile.runtime.path.chunk_shape import Limit
from dta_compile.runtime.path.interface import AnyRuntime
from dta_compile.runtime.recurrent.providers import runtime_of

__all__ = ["RUNTIMES", "LayerContext", "runtimes_of"]


@dataclasses.dataclass(frozen=True)
class LayerContext:
    """What a call tells its layers.

    Attributes:
        attention: the chosen provider, see `Options`.
        limits: how far attention layers reach in this call, by the number of the layer; see `ReadMasks.limits`.
        providers: of attention, made so far, by the states and the soft cap of a layer: equal layers share one.
    """

    device: torch.device
    attention: str
    limits: Mapping[int, Limit | None]
    providers: dict[Any, Provider] = dataclasses.field(default_factory=dict)


def _attention(layer: MixerLayer, context: LayerContext) -> AnyRuntime:
    assert isinstance(layer, AttentionLayer)
    like = layer.states, layer.softcap
    if like not in context.providers:
        context.providers[like] = provider_of(layer, context.device, context.attention)
    return AttentionRuntime(context.providers[like], context.limits[layer.index])


def _recurrence(layer: MixerLayer, context: LayerContext) -> AnyRuntime:
    return runtime_of(layer, context.device)


Make = Callable[[MixerLayer, LayerContext], AnyRuntime]

RUNTIMES: dict[str, Make] = {  # by the name of the mixer
    **dict.fromkeys((mixer.name for mixer in ATTENTION_MIXERS), _attention),
    **dict.fromkeys((mixer.name for mixer in RECURRENCES), _recurrence),
}


def runtimes_of(executable: Executable, masks: ReadMasks, device: torch.device, attention: str) -> list[AnyRuntime]:
    """The mixer layers, for one call.

    Raises:
        OptionError: the provider of attention that was chosen cannot run here.
    """
    limits = {layer.index: one for layer, one in zip(executable.attention, masks.limits, strict=True)}
    context = LayerContext(device, attention, limits)
    return [RUNTIMES[layer.mixer.name](layer, context) for layer in executable.mixers]
