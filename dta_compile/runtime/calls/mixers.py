"""Choose the runtime of every mixer layer for one call, by one table over mixers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dta_compile.executable.executable import Executable
from dta_compile.executable.layers import AttentionLayer, MixerLayer
from dta_compile.ops.attention import OVER_CHOSEN
from dta_compile.ops.chosen_keys import CHOICE_MIXER
from dta_compile.ops.recurrences.operators import RECURRENCES
from dta_compile.runtime.attention.chosen_keys import ChoiceRuntime, ChosenKeys
from dta_compile.runtime.attention.interface import Provider
from dta_compile.runtime.attention.layer import AttentionRuntime, provider_of
from dta_compile.runtime.calls.masks import ReadMasks
from dta_compile.runtime.path.chunk_shape import Limit
from dta_compile.runtime.path.interface import AnyRuntime
from dta_compile.runtime.recurrent.providers import runtime_of


@dataclasses.dataclass(frozen=True)
class LayerContext:
    """Facts of a call that runtimes of layers depend on.

    Attributes:
        attention: name of the provider, see `Options`.
        limits: by attention layer, how far up a token reads in this call; see `ReadMasks.limits`.
        units: attention layers whose tokens also read later ones of their block.
        tokens: tokens of a row of the batch.
        from_first: whether every sequence begins at the first token of a row.
        providers: attention providers made so far, shared by layers with equal states and soft cap.
    """

    device: torch.device
    attention: str
    limits: Mapping[int, Limit | None]
    units: frozenset[int]
    tokens: int
    from_first: bool
    providers: dict[Any, Provider] = dataclasses.field(default_factory=dict)


def _attention(layer: MixerLayer, context: LayerContext) -> AnyRuntime:
    assert isinstance(layer, AttentionLayer)
    key = layer.states, layer.softcap
    if key not in context.providers:
        context.providers[key] = provider_of(layer, context.device, context.attention)
    return AttentionRuntime(context.providers[key], context.limits[layer.index], layer.index in context.units)


def _over_chosen(layer: MixerLayer, context: LayerContext) -> AnyRuntime:
    return AttentionRuntime(ChosenKeys(), context.limits[layer.index], has_choice=True)


def _choice(layer: MixerLayer, context: LayerContext) -> AnyRuntime:
    return ChoiceRuntime(context.limits[layer.index], context.tokens, context.from_first, layer.where)


def _recurrence(layer: MixerLayer, context: LayerContext) -> AnyRuntime:
    return runtime_of(layer, context.device)


Make = Callable[[MixerLayer, LayerContext], AnyRuntime]

RUNTIMES: dict[str, Make] = {  # by mixer name
    **dict.fromkeys((mixer.name for mixer in OVER_CHOSEN), _attention),
    **dict.fromkeys((mixer.name for mixer in OVER_CHOSEN.values()), _over_chosen),
    CHOICE_MIXER.name: _choice,
    **dict.fromkeys((mixer.name for mixer in RECURRENCES), _recurrence),
}


def runtimes_of(executable: Executable, masks: ReadMasks, device: torch.device, attention: str) -> list[AnyRuntime]:
    """Return the runtimes of all mixer layers for one call.

    Raises:
        OptionError: the chosen attention provider cannot run here.
    """
    limits = {layer.index: limit for layer, limit in zip(executable.attention, masks.limits, strict=True)}
    layers = zip(executable.attention, masks.classes, strict=True)
    units = frozenset(layer.index for layer, mask_class in layers if mask_class.block is not None)
    context = LayerContext(device, attention, limits, units, masks.valid.shape[1], masks.from_first)
    return [RUNTIMES[layer.mixer.name](layer, context) for layer in executable.mixers]
