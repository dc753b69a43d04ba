"""Choose the runtime of every mixer layer for one call, by one table over mixers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dta_compile.errors import RefusalError, RuntimeContractError
from dta_compile.executable.executable import Executable
from dta_compile.executable.layers import AttentionLayer, MixerLayer
from dta_compile.ops.attention import BY_DISTANCE, OVER_CHOSEN, WITH_COMPRESSED
from dta_compile.ops.chosen_keys import CHOICE_MIXER
from dta_compile.ops.recurrences.operators import RECURRENCES
from dta_compile.proofs.mask_class import CERTAIN
from dta_compile.runtime.attention.choose import provider_of
from dta_compile.runtime.attention.chosen_keys import Blockwise, ChoiceRuntime
from dta_compile.runtime.attention.compressed_keys import CompressedRuntime
from dta_compile.runtime.attention.kept_keys import KeptKeys
from dta_compile.runtime.attention.layer import AttentionRuntime
from dta_compile.runtime.attention.provider import Provider
from dta_compile.runtime.calls.masks import ReadMasks
from dta_compile.runtime.path.chunk_shape import Limit
from dta_compile.runtime.path.mixer_runtime import AnyRuntime
from dta_compile.runtime.recurrent.choose import runtime_of


@dataclasses.dataclass(frozen=True)
class LayerContext:
    """Facts of a call that runtimes of layers depend on.

    Attributes:
        attention: name of the provider, see `Options`.
        limits: by attention layer, how far up a token reads in this call; see `ReadMasks.limits`.
        units: attention layers whose tokens also read later ones of their block.
        tokens: tokens of a row of the batch.
        from_first: whether every sequence begins at the first token of a row.
        providers: attention providers made so far, shared by layers with equal states and scoring.
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
    key = layer.states, layer.scoring
    if key not in context.providers:
        context.providers[key] = provider_of(layer, context.device, context.attention)
    if layer.has_bias_of_earlier_keys:
        _require_earlier_keys(layer, context)
    provider, limit = context.providers[key], context.limits[layer.index]
    if limit is not None and limit.kept:
        provider = KeptKeys(provider)
    return AttentionRuntime(provider, limit, layer.index in context.units)


def _over_chosen(layer: MixerLayer, context: LayerContext) -> AnyRuntime:
    assert isinstance(layer, AttentionLayer)
    return AttentionRuntime(Blockwise(layer.block), context.limits[layer.index], further="choice")


def _require_earlier_keys(layer: MixerLayer, context: LayerContext) -> None:
    if layer.index in context.units:
        raise RefusalError(
            "tokens attend to later ones of their block with a bias by distance, which is only read for earlier ones",
            where=layer.where,
            expected="causal attention",
            got="a mask with blocks that attend in both directions",
        )


def _biased(layer: MixerLayer, context: LayerContext) -> AnyRuntime:
    _require_earlier_keys(layer, context)
    return AttentionRuntime(Blockwise(), context.limits[layer.index], further=layer.mixer.operands[-1].name)


def _with_compressed(layer: MixerLayer, context: LayerContext) -> AnyRuntime:
    attention = _attention(layer, context)
    assert isinstance(attention, AttentionRuntime)
    if attention.units or not context.from_first:
        raise RefusalError(
            "attention to compressed keys counts the tokens of a row, which are not those of one causal sequence",
            where=layer.where,
            expected="one sequence a row, padded on the right, and causal attention",
            got="blocks that attend in both directions"
            if attention.units
            else "packed rows, or padding before or inside of a sequence",
            hint="pass one sequence per row, padded on the right",
        )
    _require_one_range(layer, context)
    return CompressedRuntime(attention.provider, attention.limit)


def _choice(layer: MixerLayer, context: LayerContext) -> AnyRuntime:
    assert isinstance(layer, AttentionLayer)
    if not context.from_first and (layer.block > 1 or layer.forced is not None):
        raise RuntimeContractError(
            "a learned index chooses keys by their numbers in a row, and a sequence begins elsewhere",
            where=layer.where,
            expected="sequences that begin at the first token of a row",
            got="padding before a sequence, or several sequences in a row",
            hint="pass one sequence per row, padded on the right",
        )
    _require_one_range(layer, context)
    limit = context.limits[layer.index]
    return ChoiceRuntime(limit, context.tokens, context.from_first, layer.where, layer.forced)


def _require_one_range(layer: MixerLayer, context: LayerContext) -> None:
    """Raise `RefusalError` if some tokens stay visible beyond the window of a layer."""
    limit = context.limits[layer.index]
    if limit is not None and limit.kept:
        raise RefusalError(
            "tokens stay visible beside the sliding window of a layer that chooses keys or compresses them",
            where=layer.where,
            expected="a window alone",
            got=f"a window of {limit.tokens}, and the keys at {len(limit.kept)} other depths",
        )


Make = Callable[[MixerLayer, LayerContext], AnyRuntime]

RUNTIMES: dict[str, Make] = {  # by mixer name
    **dict.fromkeys((mixer.name for mixer in OVER_CHOSEN), _attention),
    **dict.fromkeys((mixer.name for mixer in OVER_CHOSEN.values()), _over_chosen),
    **dict.fromkeys((mixer.name for mixer in BY_DISTANCE), _biased),
    **dict.fromkeys((mixer.name for mixer in WITH_COMPRESSED), _with_compressed),
    CHOICE_MIXER.name: _choice,
    **dict.fromkeys((mixer.name for mixer in RECURRENCES), lambda layer, context: runtime_of(layer, context.device)),
}


def runtimes_of(executable: Executable, masks: ReadMasks, device: torch.device, attention: str) -> list[AnyRuntime]:
    """Return the runtimes of all mixer layers for one call.

    Raises:
        OptionError: the chosen attention provider cannot run here.
        RefusalError: an index chooses among other keys than attention may read.
    """
    limits = {layer.index: limit for layer, limit in zip(executable.attention, masks.limits, strict=True)}
    _require_like_choices(executable, masks)
    layers = zip(executable.attention, masks.classes, strict=True)
    units = frozenset(layer.index for layer, mask_class in layers if mask_class.block is not None)
    context = LayerContext(device, attention, limits, units, masks.valid.shape[1], masks.from_first)
    return [RUNTIMES[layer.mixer.name](layer, context) for layer in executable.mixers]


def _require_like_choices(executable: Executable, masks: ReadMasks) -> None:
    """Raise `RefusalError` unless every index chooses among the keys that attention may read.

    An index of a narrower span runs out of keys, and `topk` goes on to hidden ones, which attention may read. One of a
    wider span may leave attention no key: it reads nothing if it hides keys by -inf, and by a finite number, all keys.
    """
    spans = zip(masks.limits, masks.fillers, strict=True)
    by_layer = dict(zip((layer.index for layer in executable.attention), spans, strict=True))
    for layer in executable.attention:
        if layer.chooser is None:
            continue
        (limit, filler), (limit_of_index, filler_of_index) = by_layer[layer.index], by_layer[layer.chooser]
        got = f"{_span(limit_of_index)} in the index, and {_span(limit)} in attention"
        if filler_of_index > CERTAIN:
            got = f"{filler_of_index:g} in the mask of the index, which scores may be below"
        elif limit == limit_of_index or (limit_of_index is None and filler == -math.inf):
            continue
        raise RefusalError(
            "a learned index chooses among other keys than attention may read",
            where=executable.mixers[layer.chooser].where,
            expected="scores of the index that are hidden where attention's are, by float('-inf')",
            got=got,
            hint="mask the scores of the index, before topk, by the mask of attention",
        )


def _span(limit: Limit | None) -> str:
    if limit is None:
        return "all keys"
    return f"{'chunks' if limit.by_chunks else 'a window'} of {limit.tokens}"
