"""`attn_implementation="dta"` for transformers: our own attention function and mask function.

The operator gets padding, packed sequences and window directly, so that no `[S, S]` mask is traced and none has to be
proven. Without the backend the functions compute exact attention, also with a KV cache, by torch's own attention where
that suffices. Importing this module registers both functions; `registration` imports it with transformers.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from dta_compile.errors import OptionError
from dta_compile.integrations.keywords import EAGER, refuse_unknown
from dta_compile.ops.attention import Masking
from dta_compile.ops.causal_attention import call, segments_by_ends
from dta_compile.ops.dense_attention import dense_mask
from dta_compile.ops.dtypes import autocast
from dta_compile.ops.library import REFUSED
from dta_compile.ops.scoring import Scoring

NAME = "dta"
FUNCTION = 'attn_implementation="dta"'


class CausalMask(NamedTuple):
    """Declared causal mask, which the mask function returns and models pass to the attention function.

    Attributes:
        segments, window: as in `dta_compile.attention`.
        is_told: the mask was created from a padding mask or for packed rows, so that no other argument defines
            sequences.
    """

    segments: torch.Tensor | None
    window: int | None
    is_told: bool = False

    def __getitem__(self, key: Any) -> Any:
        """Return a field by number; raise `OptionError` for models that take it for a tensor."""
        if isinstance(key, tuple):
            raise OptionError(
                f"a model that reads the entries of its mask does not support {FUNCTION}",
                expected="a model that hands its mask on to the attention function",
                got="entries that are read, as by learned sparse attention",
                hint="leave attn_implementation out: backend='dta' says whether it can run what the model has",
            )
        return tuple.__getitem__(self, key)

    def contiguous(self) -> CausalMask:
        """Return a contiguous copy; transformers calls this for a static cache."""
        return self._replace(segments=None if self.segments is None else self.segments.contiguous())


def _declared_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., torch.Tensor] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: Any = None,
    **kwargs: Any,
) -> Any:
    """Declare the mask for a model's layers of one kind; arguments as in `transformers.masking_utils.sdpa_mask`.

    Returns:
        a `CausalMask` for compositions of causality, padding, packed sequences and a sliding window, None for causality
        alone; `NotImplemented` for all other masks, including those of queries with a KV cache.
    """
    is_square = isinstance(q_offset, int) and q_offset == kv_offset == 0 and q_length == kv_length
    is_plain = mask_function.__name__ == causal_mask_function.__name__
    # A mask may not be skipped for packed rows, or because the model reads it itself.
    is_packed = not allow_is_causal_skip and attention_mask is None and not is_plain
    is_causal = "allow_is_bidirectional_skip" not in kwargs  # bidirectional masks have a composition of the same name
    understood = is_causal and _is_understood(mask_function, use_vmap, local_size, config)
    if not is_square or not understood or not (allow_is_causal_skip or is_packed):
        return NotImplemented
    segments = attention_mask
    if is_packed:
        # A window is at least two: a token sees its predecessor unless that is in another sequence.
        rows = torch.arange(batch_size, device=device)[:, None]
        columns = torch.arange(q_length, device=device)[None]
        continues = mask_function(rows, 0, columns, (columns - 1).clamp(min=0))
        segments = (~continues).cumsum(-1).expand(batch_size, -1) + 1
    segments, is_told = _unless_one(segments), attention_mask is not None or is_packed
    if segments is None and local_size is None and not is_told:
        return None
    return CausalMask(segments, local_size, is_told)


@functools.wraps(_declared_mask)
def mask_of_layers(*args: Any, **kwargs: Any) -> Any:
    """Build the mask for a model's layers of one kind: a tensor for torch's attention, if it cannot be declared."""
    mask = _declared_mask(*args, **kwargs)
    return sdpa_mask(*args, **kwargs) if mask is NotImplemented else mask


def _unless_one(segments: torch.Tensor | None) -> torch.Tensor | None:
    """Return None for segments of one sequence without padding, except in a graph, which serves other calls, too."""
    if segments is None or torch.compiler.is_compiling():
        return segments
    return None if bool((segments == 1).all()) else segments


def _is_understood(mask_function: Callable[..., Any], use_vmap: bool, local_size: int | None, config: Any) -> bool:
    """Return whether a mask is composed as in `create_causal_mask` or `create_sliding_window_causal_mask`.

    A model's own mask functions set `use_vmap`; bidirectional blocks are a union, which `_naming_unions` reveals.
    """
    if use_vmap or mask_function.__name__ not in (causal_mask_function.__name__, "and_mask"):
        return False
    if local_size is None:
        return True
    is_window = local_size == getattr(config, "sliding_window", None)
    return is_window and local_size > 1 and getattr(config, "attention_chunk_size", None) is None


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: CausalMask | torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    sliding_window: int | None = None,
    indices: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention of a layer: query `[B, Hq, S, D]`, key `[B, Hkv, K, D]` and value `[B, Hkv, K, Dv]`.

    Args:
        attention_mask: result of the mask function, or a mask `[B, 1, S, K]` of the model's own.
        softcap, s_aux: soft cap and sinks of the layer.
        cu_seq_lens_q: `[n + 1]` boundaries of the sequences in a packed row, from transformers' collators.
        position_ids: `[B, S]`, restarting with every sequence of a packed row. Boundaries and positions are only used
            if the mask has no sequences or padding, because some models do not pass these to their masks.
        sliding_window: window of the layer; refused unless it is the mask's, which is used, as by "eager".
        indices: `[B, S, count]`, the keys that the model chooses for each query, of those that its mask allows.

    Returns:
        `[B, S, Hq, Dv]`, and None.

    Raises:
        RefusalError: an argument is unknown or contradicts the mask.
        OptionError: dropout, `position_bias` or `cache` together with a feature that torch's attention lacks.
    """
    query = refuse_unknown(query, FUNCTION, kwargs, _OF_TORCH)
    if indices is not None:
        query, attention_mask = _with_chosen(query, key, attention_mask, indices)
    if isinstance(attention_mask, CausalMask):
        (segments, window, is_told), mask, causal = attention_mask, None, True
    else:
        segments, window, is_told, mask = None, None, attention_mask is not None, attention_mask
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    is_square = query.shape[2] == key.shape[2]
    ends = None if is_told else cu_seq_lens_q
    query = _refuse_contradictions(query, attention_mask, is_square, causal, is_causal, window, sliding_window, ends)
    if causal and segments is None and not is_told and is_square:
        segments = _segments_of_row(query, ends, position_ids)
    is_special = softcap is not None or s_aux is not None
    for name in _OF_TORCH:
        if kwargs.get(name) is not None:
            if is_special:
                raise OptionError(f'{name} with a soft cap or sinks is not supported by attn_implementation="dta"')
            if segments is not None or window is not None:
                mask = dense_mask(query.shape[2], query.device, segments, window or 0)
                segments = window = None
    if segments is None and window is None and not is_special:
        out_of_torch: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
        return out_of_torch
    if dropout:
        raise OptionError(
            'attention dropout is not supported by attn_implementation="dta"',
            expected="dropout 0, as it has to be over a prefix tree",
            got=f"{dropout}, with a window, padding, packed rows, a soft cap or sinks",
            hint="set the model's attention dropout to 0, or call model.eval()",
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    queries = query.shape[2]
    causal = bool(causal) and mask is None and queries > 1
    if causal and key.shape[2] > queries:  # a static cache that is still empty
        key, value = key[:, :, :queries], value[:, :, :queries]
    query, key, value = autocast(query, key, value)
    masking = Masking(mask, causal, segments, window or 0, Scoring(scale, float(softcap or 0)))
    out = call(query, key, value, s_aux, masking)
    return out.transpose(1, 2).contiguous(), None


def _with_chosen(
    query: torch.Tensor, key: torch.Tensor, mask: CausalMask | torch.Tensor | None, indices: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the query, and the mask for the keys that the model chooses; see `passes.lowering.attention.choices`."""
    if not isinstance(mask, torch.Tensor):
        argument, against = "indices", "of chosen keys without a mask of the keys that they are chosen from"
        what = f"{FUNCTION} is handed {argument} {against}"
        return REFUSED(query, what, "a tensor as the mask", argument, EAGER), None
    others = torch.ones((*indices.shape[:2], key.shape[2]), dtype=torch.bool, device=indices.device)
    others = others.scatter(-1, indices.long(), False)[:, None]
    if mask.dtype is torch.bool:
        return query, mask & ~others
    return query, mask.masked_fill(others, torch.finfo(mask.dtype).min)


def _refuse_contradictions(
    query: torch.Tensor,
    attention_mask: CausalMask | torch.Tensor | None,
    is_square: bool,
    causal: bool,
    is_causal: bool | None,
    window: int | None,
    sliding_window: int | None,
    ends: torch.Tensor | None,
) -> torch.Tensor:
    """Return the query, or refuse arguments that contradict the mask.

    Some models add keys to those of the tokens (DeepSeek-V4's compressed ones), and can extend tensor masks only.
    """
    is_ours = isinstance(attention_mask, CausalMask)
    has_window = is_ours or (attention_mask is None and causal and is_square)
    for is_wrong, argument, against in (
        (is_ours and is_causal is False, "is_causal=False", "with a causal mask"),
        (is_ours and not is_square, "key", "of other tokens than the mask has, such as compressed ones"),
        (has_window and sliding_window not in (None, window), "sliding_window", "that is not the window of the mask"),
        (ends is not None and not (causal and is_square), "cu_seq_lens_q", "without causal attention over itself"),
    ):
        if is_wrong:
            what = f"{FUNCTION} is handed {argument} {against}"
            query = REFUSED(query, what, "arguments that agree", argument, EAGER)
    return query


# Arguments of torch's attention function that our operator lacks.
_OF_TORCH = ("position_bias", "cache")


def _segments_of_row(
    query: torch.Tensor, ends: torch.Tensor | None, positions: torch.Tensor | None
) -> torch.Tensor | None:
    """Number the sequences of packed rows from 1, `[B, S]`, by their boundaries or by restarts of positions."""
    batch, _, tokens, _ = query.shape
    if ends is not None:
        return _unless_one(segments_by_ends(ends, batch, tokens))
    if positions is None or positions.dim() != 2 or positions.shape[1] != tokens:
        return None
    if torch.compiler.is_compiling():
        return _restarts(positions).expand(batch, -1)
    if positions.is_inference():  # without a version
        segments = _unless_one(_restarts(positions))
        return None if segments is None else segments.expand(batch, -1)
    cached = getattr(positions, _KNOWN, None)  # cached for all layers, since the test synchronises with the device
    if cached is None or cached[0] != positions._version:
        with torch.inference_mode(False):  # a later call may save them for its backward
            cached = positions._version, _unless_one(_restarts(positions))
        setattr(positions, _KNOWN, cached)
    return None if cached[1] is None else cached[1].expand(batch, -1)


_KNOWN = "_dta_segments"


def _restarts(positions: torch.Tensor) -> torch.Tensor:
    """Number packed sequences: a new one starts wherever positions do not grow; they may leave out some."""
    return (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) <= 0).cumsum(-1) + 1


def _naming_unions(and_masks: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap transformers' `and_masks` to return functions of another name if they contain a union.

    Else packed rows with bidirectional blocks would look like packed rows, since traced code cannot read closures.
    """

    @functools.wraps(and_masks)
    def and_masks_by_name(*mask_functions: Callable[..., Any]) -> Callable[..., Any]:
        composed: Callable[..., Any] = and_masks(*mask_functions)
        if not any(function.__name__ in ("or_mask", "and_mask_of_unions") for function in mask_functions):
            return composed

        def and_mask_of_unions(batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any) -> Any:
            return composed(batch_idx, head_idx, q_idx, kv_idx)

        return and_mask_of_unions

    return and_masks_by_name


def _refusing_attention_of_its_own(check: Callable[..., str]) -> Callable[..., str]:
    """Wrap transformers' check of a model's attention implementation to raise for models with attention of their own.

    transformers accepts registered implementations for all models, and such models would take our masks for tensors.
    """

    @functools.wraps(check)
    def check_ours(model: PreTrainedModel, name: str | None, *args: Any, **kwargs: Any) -> str:
        implementation = check(model, name, *args, **kwargs)
        own = next((base for base in type(model).__mro__ if implementation == NAME and _attends_itself(base)), None)
        if own is not None:
            raise OptionError(
                f"{own.__name__} does not support {FUNCTION}",
                expected="a model that calls transformers' attention functions",
                got=f"attention of its own in {own.__module__}",
                hint="leave attn_implementation out: backend='dta' says whether it can run what the model has",
            )
        return implementation

    return check_ours


def _attends_itself(kind: Any) -> bool:
    """Return whether a model class passes transformers' causal masks to attention code in its own module."""
    names = vars(sys.modules.get(kind.__module__, masking_utils))
    if kind is PreTrainedModel or not issubclass(kind, PreTrainedModel) or "create_causal_mask" not in names:
        return False
    classes = [member for member in names.values() if isinstance(member, type) and member.__module__ == kind.__module__]
    has_attention = any("Attention" in member.__name__ and issubclass(member, torch.nn.Module) for member in classes)
    is_supported = kind._supports_sdpa or kind._supports_attention_backend
    return has_attention and not (is_supported and "ALL_ATTENTION_FUNCTIONS" in names)


masking_utils.and_masks = _naming_unions(masking_utils.and_masks)
if not hasattr(PreTrainedModel._check_and_adjust_attn_implementation, "__wrapped__"):
    PreTrainedModel._check_and_adjust_attn_implementation = _refusing_attention_of_its_own(
        PreTrainedModel._check_and_adjust_attn_implementation
    )
AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, mask_of_layers)
