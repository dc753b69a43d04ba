"""The model, and three ways to compute what the loss needs of a batch: log-probs and entropies of its tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, Qwen3Config, Qwen3ForCausalLM

from .samples import Sample
from .settings import Settings
from .text import PAD

MICRO_TOKENS = 8192  # of the dense ways; rows come sorted by length, so that hardly any of them are padding


@dataclasses.dataclass(frozen=True)
class Rows:
    """Samples side by side; entry p of a row speaks of the token that is predicted from p.

    Attributes:
        ids, labels, attention_mask: `[B, S]` int64, padded on the right.
        loss_mask: `[B, S]` bool, true at predictions of the sampled tokens.
        advantages: `[B, 1]`.
        behaviour: `[B, S]` log-probs of the sampled tokens when they were sampled, else 0.
    """

    ids: torch.Tensor
    labels: torch.Tensor
    attention_mask: torch.Tensor
    loss_mask: torch.Tensor
    advantages: torch.Tensor
    behaviour: torch.Tensor


class Values(NamedTuple):
    """Of the labels of some rows, `[B, S]` each: log-probs and entropies, and log-probs by the supervised start."""

    logprobs: torch.Tensor
    entropies: torch.Tensor
    start: torch.Tensor | None = None


Compute = Callable[[Rows, bool], Values]
"""Values of some rows; the second argument says whether those of the supervised start are wanted."""


def make_model(settings: Settings, vocabulary: int) -> Qwen3ForCausalLM:
    """A Qwen3 with random weights."""
    torch.manual_seed(settings.seed)
    config = Qwen3Config(
        vocab_size=-(-vocabulary // 64) * 64,
        hidden_size=settings.hidden,
        intermediate_size=3 * settings.hidden,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.heads // 2,
        head_dim=settings.hidden // settings.heads,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        use_cache=False,
    )
    return Qwen3ForCausalLM(config)


def values_of(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies `[B, S]` from logits `[B, S, V]`."""
    logprobs = logits.float().log_softmax(-1)
    return logprobs.gather(-1, labels[..., None])[..., 0], -(logprobs.exp() * logprobs).sum(-1)


def make_values(model: Qwen3ForCausalLM, way: str, start: Qwen3ForCausalLM | None = None) -> Compute:
    """A function from rows to values, by `way` (see `Settings.way`).

    Two functions are compiled, with and without the start: where it is wanted, both models run over one tree.
    """

    def alone(ids: torch.Tensor, labels: torch.Tensor, **places: torch.Tensor) -> Any:
        return values_of(model(ids, **places).logits, labels)

    def both(ids: torch.Tensor, labels: torch.Tensor, **places: torch.Tensor) -> Any:
        with torch.no_grad():
            expected, _ = values_of(start(ids, **places).logits, labels)
        return *alone(ids, labels, **places), expected

    if way == "compiled":
        for each in filter(None, (model, start)):
            _make_packed(each)
        alone, both = (torch.compile(function, dynamic=True) for function in (alone, both))
    elif way == "dta":
        alone, both = (torch.compile(function, backend="dta") for function in (alone, both))
    call = _call_packed if way == "compiled" else _call_padded

    def values(rows: Rows, with_start: bool = False) -> Values:
        wanted = with_start and start is not None
        if way == "dta":
            values.compiled = both if wanted else alone  # type: ignore[attr-defined]
        return Values(*call(both if wanted else alone, rows))

    values.compiled = None  # type: ignore[attr-defined]
    return values


def parts(samples: Sequence[Sample], way: str) -> Iterator[Rows]:
    """The samples of a batch as one call computes them: all at once over their tree, or in micro-batches."""
    if way == "dta":
        yield pad(samples)
        return
    ordered = sorted(samples, key=lambda sample: len(sample.tokens))
    ends = np.cumsum([len(sample.tokens) for sample in ordered])
    count = max(1, round(ends[-1] / MICRO_TOKENS))
    cuts = np.searchsorted(ends, ends[-1] * np.arange(1, count) / count).tolist()
    for start, stop in pairwise([0, *cuts, len(ordered)]):
        if start < stop:
            yield pad(ordered[start:stop])


def pad(samples: Sequence[Sample]) -> Rows:
    """Samples as rows of one length."""
    shape = len(samples), max(len(sample.tokens) for sample in samples)
    ids, labels, mask = (torch.full(shape, fill, dtype=torch.int64) for fill in (PAD, PAD, 0))
    loss_mask, behaviour = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape)
    for row, sample in enumerate(samples):
        tokens, length = torch.tensor(sample.tokens, dtype=torch.int64), len(sample.tokens)
        ids[row, :length], labels[row, : length - 1], mask[row, :length] = tokens, tokens[1:], 1
        first, last = sample.start - 1, sample.start - 1 + len(sample.logprobs)
        loss_mask[row, first:last] = True
        behaviour[row, first:last] = torch.tensor(sample.logprobs)
    advantages = torch.tensor([[sample.advantage] for sample in samples], dtype=torch.float32)
    return Rows(ids, labels, mask, loss_mask, advantages, behaviour)


def _call_padded(function: Callable[..., Any], rows: Rows) -> Iterable[torch.Tensor]:
    return function(rows.ids, rows.labels, attention_mask=rows.attention_mask)


def _make_packed(model: Qwen3ForCausalLM) -> None:
    """Without padding: all tokens in one row; attention alone sees rows, as no kernel for CPUs takes lengths."""
    AttentionInterface.register("packed_rows", _attention_by_row)
    AttentionMaskInterface.register("packed_rows", lambda *args, **kwargs: None)
    model.set_attn_implementation("packed_rows")


def _call_packed(function: Callable[..., Any], rows: Rows) -> Iterable[torch.Tensor]:
    real = rows.attention_mask.bool()
    places = {
        "position_ids": torch.arange(real.shape[1]).expand_as(real)[real][None],
        "to_rows": (rows.attention_mask.flatten().cumsum(0) - 1).clamp(min=0).view(real.shape),
        "to_packed": real.flatten().nonzero()[:, 0],
    }
    found = function(rows.ids[real][None], rows.labels[real][None], **places)
    return [torch.zeros(real.shape).masked_scatter(real, value[0]) for value in found]


def _attention_by_row(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    to_rows: torch.Tensor,
    to_packed: torch.Tensor,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention of packed `[1, heads, T, D]`; `to_rows` `[B, S]` and `to_packed` `[T]` say what is where."""
    rows, length = to_rows.shape

    def unpacked(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[0][:, to_rows.flatten()].unflatten(1, (rows, length)).transpose(0, 1)

    attended = F.scaled_dot_product_attention(
        unpacked(query), unpacked(key), unpacked(value), is_causal=True, scale=scaling, enable_gqa=True
    )
    return attended.permute(0, 2, 1, 3).flatten(0, 1)[to_packed][None], None
