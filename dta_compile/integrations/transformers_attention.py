"""`attn_implementation="dta"` for transformers: an attention function and a mask function of our own.

What transformers' masks say of tokens goes to the operator as it is, so no `[S, S]` mask is traced and there is nothing
to be proven. Without the backend the operator computes, exactly, also for a KV cache; what torch's own attention can do
is left to that. Importing the module registers both functions; `registration` does when transformers is there.
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
from dta_compile.ops.dtypes import autocast
from dta_compile.ops.library import REFUSED

NAME = "dta"
FUNCTION = 'attn_implementation="dta"'


class CausalMask(NamedTuple):
    """A causal mask in few words: what the mask function returns, and models hand to the attention function.

    Attributes:
        segments, window: as in `dta_compile.attention`.
        is_told: the mask was made with a padding mask or for packed rows: nothing else says where sequences begin.
    """

    segments: torch.Tensor | None
    window: int | None
    is_told: bool = False

    def contiguous(self) -> CausalMask:
        """As transformers asks of the masks that it makes ahead for a static cache."""
        return self._replace(segments=None if self.segments is None else self.segments.contiguous())


def mask_of_layers(
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
) -> CausalMask | torch.Tensor | None:
    """The mask of a model's layers of one kind, see `transformers.masking_utils.sdpa_mask` for the arguments.

    Returns:
        a `CausalMask` for what transformers composes of order, padding, packed sequences and a sliding window; for
        anything else, queries that have a KV cache above them among it, the mask as torch's attention takes it.
    """
    is_square = isinstance(q_offset, int) and q_offset == kv_offset == 0 and q_length == kv_length
    is_plain = mask_function.__name__ == causal_mask_function.__name__
    # A mask that may not be skipped is one of packed rows, or the model reads it itself.
    is_packed = not allow_is_causal_skip and attention_mask is None and not is_plain
    is_causal = "allow_is_bidirectional_skip" not in kwargs  # both directions have a composition of the same name
    understood = is_causal and _is_understood(mask_function, use_vmap, local_size, config)
    if not is_square or not understood or not (allow_is_causal_skip or is_packed):
        mask: torch.Tensor | None = sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            local_size=local_size,
            allow_is_causal_skip=allow_is_causal_skip,
            use_vmap=use_vmap,
            device=device,
            config=config,
            **kwargs,
        )
        return mask
    segments = attention_mask
    if is_packed:
        # A window is two or more: a token sees the one before it, unless that is of another sequence.
        rows = torch.arange(batch_size, device=device)[:, None]
        columns = torch.arange(q_length, device=device)[None]
        continues = mask_function(rows, 0, columns, (columns - 1).clamp(min=0))
        segments = (~continues).cumsum(-1).expand(batch_size, -1) + 1
    segments, is_told = _unless_one(segments), attention_mask is not None or is_packed
    if segments is None and local_size is None and not is_told:
        return None
    return CausalMask(segments, local_size, is_told)


def _unless_one(segments: torch.Tensor | None) -> torch.Tensor | None:
    """The segments, if there are several or padding; a compiled program reads them in every call."""
    if segments is None or torch.compiler.is_compiling():
        return segments
    return None if bool((segments == 1).all()) else segments


def _is_understood(mask_function: Callable[..., Any], use_vmap: bool, local_size: int | None, config: Any) -> bool:
    """Whether a mask is composed as `create_causal_mask` and `create_sliding_window_causal_mask` do.

    Functions of the model's own come with `use_vmap`, blocks of both directions as a union (see `_naming_unions`).
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
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of a layer: query `[B, Hq, S, D]`, key `[B, Hkv, K, D]` and value `[B, Hkv, K, Dv]`.

    Args:
        attention_mask: what the mask function returned, or a mask `[B, 1, S, K]` of the model's own.
        softcap, s_aux: soft cap and sinks of the layer.
        cu_seq_lens_q: `[n + 1]` where the sequences of a packed row begin and end, as transformers' collators give it.
        position_ids: `[B, S]`, which start anew with every sequence of a packed row. Like the ends, they count where
            the mask says nothing of sequences and padding: some models tell their masks of neither.
        sliding_window: of the layer. As for "eager", the mask has it; another one than the mask's is refused.

    Returns:
        `[B, S, Hq, Dv]`, and None.

    Raises:
        RefusalError: an argument that is not known, or that says something else than the mask does.
        OptionError: dropout together with what torch's attention does not have.
    """
    query = refuse_unknown(query, FUNCTION, kwargs, _OF_TORCH)
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
                mask, segments, window = _dense(segments, window, query), None, None
    if segments is None and window is None and not is_special:
        found: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
        return found
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
    if causal and key.shape[2] > queries:  # a static cache that has nothing in it yet
        key, value = key[:, :, :queries], value[:, :, :queries]
    query, key, value = autocast(query, key, value)
    masking = Masking(mask, causal, segments, window or 0, scale, float(softcap or 0))
    out = call(query, key, value, s_aux, masking)
    return out.transpose(1, 2).contiguous(), None


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
    """Return the query, or refuse arguments that say something else than the mask, whichever is meant.

    Some models put keys beside those of the tokens (DeepSeek-V4's compressed ones), and extend tensors of masks only.
    """
    is_ours = isinstance(attention_mask, CausalMask)
    has_window = is_ours or (attention_mask is None and causal and is_square)
    for is_wrong, argument, against in (
        (is_ours and is_causal is False, "is_causal=False", "with a causal mask"),
        (is_ours and not is_square, "key", "of other tokens with a mask that has none of them"),
        (has_window and sliding_window not in (None, window), "sliding_window", "that is not the window of the mask"),
        (ends is not None and not (causal and is_square), "cu_seq_lens_q", "without causal attention over itself"),
    ):
        if is_wrong:
            what = f"{FUNCTION} is handed {argument} {against}"
            query = REFUSED(query, what, "arguments that agree", argument, EAGER)
    return query


# What torch's attention function knows of and our operator does not.
_OF_TORCH = ("position_bias", "cache")


def _dense(segments: torch.Tensor | None, window: int | None, query: torch.Tensor) -> torch.Tensor:
    """`[B or 1, 1, S, S]` bool: the mask in full."""
    index = torch.arange(query.shape[2], device=query.device)
    allowed = (index <= index[:, None])[None, None]
    if window is not None:
        allowed = allowed & (index[:, None] - index < window)
    if segments is not None:
        same = (segments[:, :, None] == segments[:, None]) & (segments != 0)[:, None]
        allowed = allowed & same[:, None]
    return allowed


def _segments_of_row(
    query: torch.Tensor, ends: torch.Tensor | None, positions: torch.Tensor | None
) -> torch.Tensor | None:
    """`[B, S]` numbers of the sequences, from 1 on: by where they end, or where positions start anew."""
    batch, _, tokens, _ = query.shape
    if ends is not None:
        return _unless_one(segments_by_ends(ends, batch, tokens))
    if positions is None or positions.dim() != 2 or positions.shape[1] != tokens:
        return None
    if torch.compiler.is_compiling():
        return _restarts(positions).expand(batch, -1)
    known = getattr(positions, _KNOWN, None)  # all layers ask, and asking waits for the device
    if known is None or known[0] != positions._version:
        known = positions._version, _unless_one(_restarts(positions))
        setattr(positions, _KNOWN, known)
    return None if known[1] is None else known[1].expand(batch, -1)


_KNOWN = "_dta_segments"


def _restarts(positions: torch.Tensor) -> torch.Tensor:
    """As transformers tells packed sequences: another one begins wherever positions do not grow by one."""
    return (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1) + 1


def _naming_unions(and_masks: Callable[..., Any]) -> Callable[..., Any]:
    """Transformers' `and_masks`, whose results have another name where a union is a part of them.

    Packed rows with blocks of both directions would look like packed rows: Dynamo lets nobody read a closure.
    """

    @functools.wraps(and_masks)
    def and_masks_by_name(*mask_functions: Callable[..., Any]) -> Callable[..., Any]:
        composed: Callable[..., Any] = and_masks(*mask_functions)
        if not any(one.__name__ in ("or_mask", "and_mask_of_unions") for one in mask_functions):
            return composed

        def and_mask_of_unions(batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any) -> Any:
            return composed(batch_idx, head_idx, q_idx, kv_idx)

        return and_mask_of_unions

    return and_masks_by_name


def _refusing_attention_of_its_own(check: Callable[..., str]) -> Callable[..., str]:
    """Transformers' check that a model has an implementation of attention: it takes registered ones for all models, and
    those that compute attention themselves would take our masks for tensors."""

    @functools.wraps(check)
    def check_ours(model: PreTrainedModel, name: str | None, *args: Any, **kwargs: Any) -> str:
        found = check(model, name, *args, **kwargs)
        own = next((one for one in type(model).__mro__ if found == NAME and _attends_itself(one)), None)
        if own is not None:
            raise OptionError(
                f"{own.__name__} does not support {FUNCTION}",
                expected="a model that calls transformers' attention functions",
                got=f"attention of its own in {own.__module__}",
                hint="leave attn_implementation out: backend='dta' says whether it can run what the model has",
            )
        return found

    return check_ours


def _attends_itself(kind: Any) -> bool:
    """Whether a class of models hands transformers' causal masks to attention that is written beside it."""
    names = vars(sys.modules.get(kind.__module__, masking_utils))
    if kind is PreTrainedModel or not issubclass(kind, PreTrainedModel) or "create_causal_mask" not in names:
        return False
    classes = [one for one in names.values() if isinstance(one, type) and one.__module__ == kind.__module__]
    has_attention = any("Attention" in one.__name__ and issubclass(one, torch.nn.Module) for one in classes)
    is_supported = kind._supports_sdpa or kind._supports_attention_backend
    return has_attention and not (is_supported and "ALL_ATTENTION_FUNCTIONS" in names)


masking_utils.and_masks = _naming_unions(masking_utils.and_masks)
if not hasattr(PreTrainedModel._check_and_adjust_attn_implementation, "__wrapped__"):
    PreTrainedModel._check_and_adjust_attn_implementation = _refusing_attention_of_its_own(
        PreTrainedModel._check_and_adjust_attn_implementation
    )
AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, mask_of_layers)
