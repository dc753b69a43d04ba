"""The model, and three ways to compute what the loss needs of a batch: log-probs and entropies of its tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

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


Values = tuple[torch.Tensor, torch.Tensor]
"""Log-probs of the labels and entropies, `[B, S]` each."""


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


def values_of(logits: torch.Tensor, labels: torch.Tensor) -> Values:
    """Log-probs and entropies from logits `[B, S, V]`."""
    logprobs = logits.float().log_softmax(-1)
    return logprobs.gather(-1, labels[..., None])[..., 0], -(logprobs.exp() * logprobs).sum(-1)


def make_values(model: Qwen3ForCausalLM, way: str) -> Callable[[Rows], Values]:
    """A function from rows to values, by `way` (see `Settings.way`)."""
    if way == "compiled":
        return _packed_values(model)

    def values(ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> Values:
        return values_of(model(ids, attention_mask=attention_mask).logits, labels)

    if way == "dta":
        values = torch.compile(values, backend="dta")

    def of_rows(rows: Rows) -> Values:
        return values(rows.ids, rows.attention_mask, rows.labels)

    of_rows.compiled = values if way == "dta" else None
    return of_rows


def parts(samples: Sequence[Sample], way: str) -> Iterator[Rows]:
    """The samples of a batch as one call computes them: all at once over their tree, or in micro-batches."""
    if way == "dta":
        yield pad(samples)
        return
    ordered = sorted(samples, key=lambda sample: len(sample.tokens))
    start = 0
    for stop in range(1, len(ordered) + 1):
        if stop == len(ordered) or len(ordered[stop].tokens) * (stop + 1 - start) > MICRO_TOKENS:
            yield pad(ordered[start:stop])
            start = stop


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


def _packed_values(model: Qwen3ForCausalLM) -> Callable[[Rows], Values]:
    """Without padding: all tokens in one row; attention alone sees rows, as no kernel for CPUs takes lengths."""
    AttentionInterface.register("packed_rows", _attention_by_row)
    AttentionMaskInterface.register("packed_rows", lambda *args, **kwargs: None)
    model.set_attn_implementation("packed_rows")

    @torch.compile(dynamic=True)
    def values(ids: torch.Tensor, labels: torch.Tensor, **places: torch.Tensor) -> Values:
        return values_of(model(ids, **places).logits, labels)

    def of_rows(rows: Rows) -> Values:
        real = rows.attention_mask.bool()
        to_packed = real.flatten().nonzero()[:, 0]
        to_rows = (rows.attention_mask.flatten().cumsum(0) - 1).clamp(min=0).view(real.shape)
        positions = torch.arange(real.shape[1]).expand_as(real)[real][None]
        found = values(
            rows.ids[real][None],
            rows.labels[real][None],
            position_ids=positions,
            to_rows=to_rows,
            to_packed=to_packed,
        )
        return tuple(torch.zeros(real.shape).masked_scatter(real, value[0]) for value in found)

    return of_rows


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
