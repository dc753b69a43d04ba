"""Dense training compiled by inductor: one sequence at a time, padded, and in packed rows.

While tracing, transformers (5.23, on torch before 2.14) builds explicit masks, which make attention compute all pairs
and rule out flash kernels. Right-padded rows and single sequences need no mask under causal attention: tokens at the
end of a row are seen by no others and have no weight. So models get an attention function whose mask is None and that
does not repeat key heads. Tracing reads no data of the batch, and sizes are symbolic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from benchmarks.batches.model import LogProbs, label_logprobs
from benchmarks.batches.workloads import Workload
from benchmarks.methods.baselines import one_by_one
from benchmarks.methods.steps import Prepare, Row, Step, concatenated, fill_rows, rectangle_of

CAUSAL, PER_SEQUENCE = "causal_without_mask", "causal_per_sequence"  # names that transformers gives no meaning to
aten = torch.ops.aten
_forward = aten._scaled_dot_product_flash_attention_for_cpu
_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward


def compiled_dense(model: PreTrainedModel) -> Prepare:
    """Run one sequence at a time."""
    return one_by_one(_compiled(model, CAUSAL, "compiled_dense"))


def compiled_padded(model: PreTrainedModel) -> Prepare:
    """Run the whole batch at once, padded on the right."""
    logprobs = _compiled(model, CAUSAL, "compiled_padded")

    def prepare(workload: Workload) -> Step:
        ids, labels, weights, mask = rectangle_of(workload)
        note = f"{1 - mask.float().mean().item():.0%} padding" if not mask.all() else ""
        return Step(lambda: (weights * logprobs(ids, labels)).sum().backward(), lambda: note)

    return prepare


def compiled_packed(model: PreTrainedModel) -> Prepare:
    """Concatenate sequences into rows of bounded size; attention is one opaque op that splits them."""
    logprobs = _compiled(model, PER_SEQUENCE, "compiled_packed")

    def prepare(workload: Workload) -> Step:
        rows = [_packed(workload, group) for group in fill_rows(workload.sequences)]

        def run() -> None:
            for (ids, labels, weights), keywords in rows:
                (weights * logprobs(ids, labels, **keywords)).sum().backward()

        return Step(run, lambda: f"{len(rows)} rows" if len(rows) > 1 else "")

    return prepare


def _packed(workload: Workload, group: list[int]) -> tuple[Row, dict[str, torch.Tensor]]:
    pairs = workload.pairs
    row, lengths = concatenated([pairs[index] for index in group])
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return row, {"position_ids": positions, "sequence_lengths": torch.tensor(lengths)}


def _compiled(model: PreTrainedModel, implementation: str, name: str) -> LogProbs:
    """Compile the log-probs of labels with inductor, with symbolic sizes."""
    _register()
    model.set_attn_implementation(implementation)

    def logprobs(ids: torch.Tensor, labels: torch.Tensor, **keywords: torch.Tensor) -> torch.Tensor:
        return label_logprobs(model(ids, **keywords).logits, labels)

    # Dynamo caches graphs, and limits their number, per code object, so every method needs its own.
    function: Any = logprobs
    function.__code__ = function.__code__.replace(co_name=name)
    compiled: LogProbs = torch.compile(function, dynamic=True)
    return compiled


def _register() -> None:
    for name, attention in ((CAUSAL, _causal), (PER_SEQUENCE, _per_sequence)):
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, lambda *_, **__: None)


def _causal(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention of `[B, heads, T, D]`; returns `[B, T, heads, D]` as transformers expects."""
    attend: Callable[..., torch.Tensor] = torch.nn.functional.scaled_dot_product_attention
    out = attend(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2), None


def _per_sequence(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    sequence_lengths: torch.Tensor,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention of `[1, heads, T, D]` within every sequence of a row; returns `[1, T, heads, D]`."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out, _logsumexp = attend_per_sequence(query, key, value, sequence_lengths, scale)
    return out.transpose(1, 2), None


@torch.library.custom_op("dta_benchmarks::attend_per_sequence", mutates_args=())
def attend_per_sequence(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return causal attention `[1, heads, T, D]` and log-sum-exp `[1, heads, T]` of concatenated sequences."""
    out, logsumexp = _outputs(query)
    parts = _parts(lengths, query, key, value, out, logsumexp)
    for q, k, v, part, logs in parts:
        result, result_logs = _forward(q, k, v, 0.0, True, scale=scale)
        part.copy_(result)
        logs.copy_(result_logs)
    return out, logsumexp


@attend_per_sequence.register_fake
def _(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return _outputs(query)


@torch.library.custom_op("dta_benchmarks::attend_per_sequence_backward", mutates_args=())
def attend_per_sequence_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of queries, keys and values."""
    gradients = tuple(torch.empty_like(tensor) for tensor in (query, key, value))
    for g, q, k, v, o, logs, *parts in _parts(lengths, grad, query, key, value, out, logsumexp, *gradients):
        for part, gradient in zip(parts, _backward(g, q, k, v, o, logs, 0.0, True, scale=scale), strict=True):
            part.copy_(gradient)
    return gradients


@attend_per_sequence_backward.register_fake
def _(grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> Any:
    return tuple(torch.empty_like(tensor) for tensor in (query, key, value))


def _outputs(query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, tokens, width = query.shape
    return query.new_empty(batch, tokens, heads, width).transpose(1, 2), query.new_empty(batch, heads, tokens)


def _parts(lengths: torch.Tensor, *tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield views of the tensors `[1, heads, T, ...]`, sequence by sequence."""
    return zip(*(tensor.split(lengths.tolist(), dim=2) for tensor in tensors), strict=True)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    query, key, value, lengths, out, logsumexp = ctx.saved_tensors
    gradients = attend_per_sequence_backward(grad, query, key, value, out, logsumexp, lengths, ctx.scale)
    return *gradients, None, None


attend_per_sequence.register_autograd(_differentiate, setup_context=_save)
