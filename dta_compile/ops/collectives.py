"""Differentiable collectives for tensor parallelism, in which ranks split a model's features.

A value is either replicated on all ranks, or sharded, or a partial sum. As in Megatron-LM (Shoeybi et al. 2019, section
3) the gradient of a replicated value is replicated, and the gradient of a shard is the shard of the gradient:

    sum_over_ranks    partial sums -> their sum, replicated       backward: the identity
    same_on_ranks     the identity, before a sharded product      backward: the sum over ranks
    gather_features   shards of the last dimension -> all of it   backward: the own shard
    own_features      the last dimension -> its own shard         backward: gathers
    embedding_part    rows of a table sharded by rows; zeros for ids on other ranks

All of them are token-wise. A process group is passed by its name, after `known_as` has registered it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from dta_compile.ops.library import define

_groups: dict[str, Any] = {}


def known_as(group: Any) -> str:
    """Register a process group; return the name that operators take."""
    name = str(group.group_name)
    _groups[name] = group
    return name


def _sum_over_ranks(value: torch.Tensor, group: str) -> torch.Tensor:
    total = value.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=_groups[group])
    return total


def _gather_features(value: torch.Tensor, group: str) -> torch.Tensor:
    value = value.contiguous()
    parts = [torch.empty_like(value) for _ in range(dist.get_world_size(_groups[group]))]
    dist.all_gather(parts, value, group=_groups[group])
    return torch.cat(parts, -1)


def _own_features(value: torch.Tensor, group: str) -> torch.Tensor:
    ranks = _groups[group]
    width = value.shape[-1] // dist.get_world_size(ranks)
    return value.narrow(-1, dist.get_rank(ranks) * width, width).clone(memory_format=torch.contiguous_format)


def _embedding_part(weight: torch.Tensor, ids: torch.Tensor, first: int, padding: int) -> torch.Tensor:
    rows, is_other = _rows_of_part(ids, first, weight.shape[0])
    return torch.nn.functional.embedding(rows, weight).masked_fill_(is_other[..., None], 0)


def _rows_of_part(ids: torch.Tensor, first: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of ids in this rank's shard, and a mask of the ids on other ranks."""
    is_other = (ids < first) | (ids >= first + size)
    return (ids - first).masked_fill(is_other, 0), is_other


def _gather_fake(value: torch.Tensor, group: str) -> torch.Tensor:
    return value.new_empty((*value.shape[:-1], value.shape[-1] * dist.get_world_size(_groups[group])))


def _own_fake(value: torch.Tensor, group: str) -> torch.Tensor:
    return value.new_empty((*value.shape[:-1], value.shape[-1] // dist.get_world_size(_groups[group])))


def _save_group(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.group = inputs[1]


def _save_embedding(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    weight, ids, ctx.first, ctx.padding = inputs
    ctx.rows = weight.shape[0]
    ctx.save_for_backward(ids)


def _embedding_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    (ids,) = ctx.saved_tensors
    rows, is_other = _rows_of_part(ids, ctx.first, ctx.rows)
    grad = grad.masked_fill(is_other[..., None], 0)
    padding = ctx.padding - ctx.first if ctx.first <= ctx.padding < ctx.first + ctx.rows else -1
    return torch.ops.aten.embedding_dense_backward(grad, rows, ctx.rows, padding, False), None, None, None


SUM_OVER_RANKS = define(
    "sum_over_ranks(Tensor value, str group) -> Tensor",
    lambda value, _: torch.empty_like(value, memory_format=torch.contiguous_format),
    _sum_over_ranks,
    _save_group,
    lambda _, grad: (grad, None),
)
SAME_ON_RANKS = define(
    "same_on_ranks(Tensor value, str group) -> Tensor",
    lambda value, _: torch.empty_like(value),
    lambda value, _: value.clone(),
    _save_group,
    lambda ctx, grad: (SUM_OVER_RANKS(grad, ctx.group), None),
)
GATHER_FEATURES = define(
    "gather_features(Tensor value, str group) -> Tensor",
    _gather_fake,
    _gather_features,
    _save_group,
    lambda ctx, grad: (OWN_FEATURES(grad, ctx.group), None),
)
OWN_FEATURES: Any = define(
    "own_features(Tensor value, str group) -> Tensor",
    _own_fake,
    _own_features,
    _save_group,
    lambda ctx, grad: (GATHER_FEATURES(grad, ctx.group), None),
)
EMBEDDING_PART = define(
    "embedding_part(Tensor weight, Tensor ids, int first, int padding) -> Tensor",
    lambda weight, ids, *_: weight.new_empty((*ids.shape, weight.shape[1])),
    _embedding_part,
    _save_embedding,
    _embedding_backward,
)
# Operators that communicate in the forward or in the backward.
COLLECTIVES = frozenset({SUM_OVER_RANKS, SAME_ON_RANKS, GATHER_FEATURES, OWN_FEATURES})
# Operators that are pointwise, or pointwise except along the last dimension.
ENTRY_BY_ENTRY = frozenset({SUM_OVER_RANKS, SAME_ON_RANKS})
ALONG_THE_LAST = frozenset({GATHER_FEATURES, OWN_FEATURES})
