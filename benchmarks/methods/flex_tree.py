"""Packed trees on GPUs: FlexAttention skips blocks of 128 by 128 (query, key) pairs that the ancestor mask excludes.

In depth-first order an ancestor mask is one interval per token: token i reads token j if and only if
`j <= i < ends[j]`. So the mask of a row is stored as a vector, and only its block mask is built.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface

from benchmarks.batches.trees import IntArray
from benchmarks.batches.workloads import FloatArray
from benchmarks.methods.packed_tree import PackedTree, pack, split

IMPLEMENTATION = "tree_mask"  # name in transformers' registry of attention functions
BLOCK = 128
STATIC_SIZE = 1024  # rows are padded to multiples of this when every length is compiled separately


@dataclasses.dataclass(frozen=True, eq=False)
class Prepared:
    """A packed row of T tokens on a device, T padded to whole blocks; P of its tokens are predicted.

    Attributes:
        tokens, depths: `[1, T]`.
        mask: block mask; on CPUs, whose FlexAttention has no backward pass, bool `[1, 1, T, T]`.
        flex: compiled FlexAttention.
        parents: `[P]` row from which each token is predicted.
        labels, weights: `[P]` the predicted tokens and the weights of their log-probs.
    """

    tokens: torch.Tensor
    depths: torch.Tensor
    mask: BlockMask | torch.Tensor
    flex: Callable[..., torch.Tensor]
    parents: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor


def prepared_trees(
    sequences: Sequence[IntArray],
    weights: Sequence[FloatArray],
    limit: int,
    device: torch.device,
    static: bool = False,
    kernels: str = "AUTO",
) -> Iterator[Prepared]:
    """Yield the rows of a batch, of at most `limit` tokens each (or of one sequence)."""
    for group in split(sequences, limit):
        yield prepare(pack([sequences[i] for i in group], [weights[i] for i in group]), device, static, kernels)


def prepare(tree: PackedTree, device: torch.device, static: bool = False, kernels: str = "AUTO") -> Prepared:
    """Move a packed tree to a device and pad it. Padding reads only itself, and nothing is predicted from it.

    Args:
        static: compile FlexAttention for every length instead of once for all.
        kernels: FlexAttention's option `BACKEND`; "FLASH" needs the package flash-attn-4.
    """
    size = len(tree.ends)
    padding = -size % (STATIC_SIZE if static else BLOCK)
    tokens, depths = (torch.nn.functional.pad(tensor, (0, padding)).to(device) for tensor in (tree.tokens, tree.depths))
    ends = torch.cat([tree.ends, torch.arange(size, size + padding) + 1]).to(device, torch.int32)
    mask = block_mask(ends) if device.type == "cuda" else pair_mask(ends)
    rest = (tree.heads[tree.sources], tree.labels, tree.weights)
    flex = _compiled_flex_attention(static, kernels)
    return Prepared(tokens, depths, mask, flex, *(tensor.to(device) for tensor in rest))


def block_mask(ends: torch.Tensor) -> BlockMask:
    """Build the block mask of T tokens, T a multiple of `BLOCK`, without evaluating single pairs.

    The intervals of a block's tokens begin in that block. So the largest of their ends bounds the query blocks that
    read any of them, and the smallest bounds those that read all.
    """

    def allowed(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) & (query < ends[key])

    blocks = ends.view(-1, BLOCK)
    numbers = torch.arange(len(blocks), device=ends.device)
    queries, keys = numbers[:, None], numbers[None]
    read = (keys <= queries) & (queries * BLOCK < blocks.amax(1))
    full = (keys < queries) & ((queries + 1) * BLOCK <= blocks.amin(1))
    return BlockMask.from_kv_blocks(
        *_ordered(read & ~full), *_ordered(full), BLOCK_SIZE=BLOCK, mask_mod=allowed, seq_lengths=(len(ends), len(ends))
    )


def _ordered(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Count and list the set blocks of each row of `[n, n]`: int32 `[1, 1, n]` and `[1, 1, n, n]`, set ones first."""
    set_first = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], set_first.int()[None, None]


def pair_mask(ends: torch.Tensor) -> torch.Tensor:
    """Return the ancestor mask as bool `[1, 1, T, T]`."""
    rows = torch.arange(len(ends), device=ends.device)
    return ((rows <= rows[:, None]) & (rows[:, None] < ends))[None, None]


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    tree_mask: BlockMask | torch.Tensor,
    flex: Callable[..., torch.Tensor],
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention of query `[1, Hq, T, D]` over its ancestors; returns `[1, T, Hq, D]` for transformers."""
    if isinstance(tree_mask, torch.Tensor):
        dense = torch.nn.functional.scaled_dot_product_attention
        out = dense(query, key, value, attn_mask=tree_mask, scale=scaling, enable_gqa=True)
    else:
        out = flex(query, key, value, block_mask=tree_mask, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


@functools.cache
def _compiled_flex_attention(static: bool, kernels: str) -> Callable[..., torch.Tensor]:
    compiled = torch.compile(flex_attention, dynamic=False if static else None)
    return functools.partial(compiled, kernel_options={"BACKEND": kernels})


AttentionInterface.register(IMPLEMENTATION, attention)
