"""Features flattened with tokens, `[B * S * H, D]`: equal to eager, or refused where rows of one token are mixed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dta_compile.errors import RefusalError
from tests.support.tiny import SMALL_CHUNKS, WIDTH, BareLM, after, assert_same, shared_ids, weighted

D = 4
OfHeads = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class WithTable(BareLM):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(64, WIDTH, dtype=torch.float64))


def compare(run: Callable[..., tuple[torch.Tensor, ...]], *batches: torch.Tensor) -> None:
    """Outputs and all gradients, compiled once for all batches, against eager on the whole batch."""
    model = WithTable()
    compiled = torch.compile(run, backend="dta", options=SMALL_CHUNKS)
    for ids in batches:

        def step(function: Callable[..., Any], ids: torch.Tensor = ids) -> list[torch.Tensor]:
            outputs = function(model, ids)
            sum(weighted(one) for one in outputs if one.requires_grad).backward()
            return [one.detach() for one in outputs]

        assert_same(after(model, lambda: step(compiled)), after(model, lambda: step(run)))


def gated_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As Qwen3-Next has it, on rows."""
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * F.silu(gate)


def split(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return gated_norm(x.reshape(-1, D), x.cos().flatten(2).reshape(-1, D), weight).reshape(x.shape).sin()


def everything(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Dimensions from the left and from the right."""
    y = x.reshape(-1, D)
    y = torch.where(y > 0, y, weight[None]) + torch.zeros_like(y) + torch.full(y.shape, 0.5, dtype=y.dtype)
    y = y.unsqueeze(1).expand(-1, 2, -1).transpose(1, 2) * weight[:2]  # [N * k, D, 2]
    y = torch.cat([y, y.softmax(1)], -1) + torch.stack([y.sum(2), y.amax(-1)] * 2, 2)  # [N * k, D, 4]
    y = F.layer_norm(y, (D,), weight) * y.var(1, keepdim=True) + y.mean((1, 2), keepdim=True)
    first, second = y.permute(0, 2, 1).split(2, 1)  # [N * k, 2, D]
    y = first.reshape(-1, 2 * D) + second.reshape(-1, 2 * D)[:, :1] + y.select(1, 0)[:, 1:2].squeeze(1)[:, None]
    y = y + y.reshape(-1, D).logsumexp(1).reshape(-1, 2).sum(1, keepdim=True)
    a, b = y.view(-1, 2, D).unbind(1)
    return (a - b).reshape(x.shape)


def merged_tokens(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    rows = x.flatten(0, 1).reshape(-1, D) * weight
    return (rows * x.cos().flatten(2).reshape(-1, D).sigmoid()).reshape(*x.shape[:2], -1).view(x.shape)


def groups_of_heads(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    rows = x.unflatten(2, (-1, 2)).reshape(-1, D)
    return (rows.sin() * x.cos().flatten(2).reshape(-1, D) + weight).reshape(x.shape)


def heads_first(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    rows = x.permute(2, 0, 1, 3).reshape(-1, D) * weight
    heads = x.transpose(1, 2).flatten(0, 1).softmax(-1)  # [B * H, S, D]
    return rows.tanh().view(x.shape[2], *x.shape[:2], D).permute(1, 2, 0, 3) + heads.view(
        x.shape[0], x.shape[2], -1, D
    ).transpose(1, 2)


def copies(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Copies of rows, of tokens and of sequences, one after the other, as for experts that all run over all tokens."""
    rows = x.reshape(-1, D)
    scales = torch.sigmoid(rows[:, :3])  # one for each copy
    y = torch.bmm((rows.repeat(3, 1) * scales.t().reshape(-1, 1)).view(3, -1, D), weight.repeat(3, D, 1)).sum(0)
    y = y + (torch.cat([rows.sin(), rows.cos(), rows * weight]) * scales.T.flatten()[:, None]).view(3, -1, D).prod(0)
    tokens = x.repeat(1, 2, 1, 1).view(x.shape[0], 2, -1, *x.shape[2:]) * weight[:2].view(2, 1, 1, 1)
    sequences = torch.cat([x.tile(2, 1, 1, 1), x.sin().tile(2, 1, 1, 1)]).view(4, *x.shape)
    return y.reshape(x.shape) + tokens.sum(1) + sequences.cumsum(0)[::2].tanh().sum(0)


def program(of_heads: OfHeads) -> Callable[..., Any]:
    def run(m: WithTable, ids: torch.Tensor) -> Any:
        x = m.embedding(ids).unflatten(-1, (-1, D))
        return (m.head(m.mix((x + of_heads(x, m.table[0, :D])).flatten(2))),)

    return run


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("of_heads", [split, everything, merged_tokens, groups_of_heads, heads_first, copies])
@pytest.mark.sample(4)
def test_rows_of_one_token_may_be_flattened_with_others(of_heads: OfHeads, batch: int) -> None:
    torch.compiler.reset()
    compare(program(of_heads), shared_ids(5, 9)[:batch], shared_ids(5, 4)[:batch])


def test_labels_of_several_heads_and_counts_of_choices() -> None:
    def run(m: WithTable, ids: torch.Tensor) -> Any:
        x = m.embedding(ids)
        chosen = x.topk(2, -1).indices.reshape(-1)
        x = x + m.table[chosen].view(*ids.shape, 2, WIDTH).sum(2)
        logits = F.linear(m.mix(x), m.table[:16]).reshape(-1, 8)
        labels = torch.stack([ids % 8, ids // 8], -1).reshape(-1, 1)
        log_probs = logits.log_softmax(-1).gather(-1, labels)[:, 0]
        return log_probs, log_probs.view(*ids.shape, 2).sum(-1), F.one_hot(chosen, WIDTH).double().mean(0)

    compare(run, shared_ids(5, 9), shared_ids(4, 4))


def test_copies_of_windows_of_the_same_tokens_and_of_others() -> None:
    def run(m: WithTable, ids: torch.Tensor) -> Any:
        hidden = m.mix(m.embedding(ids))
        later, sooner = hidden[:, 1:], hidden[:, :-1]
        joined = torch.cat([later, later.sin()], 1), torch.cat([later, sooner], 1), sooner.cos().repeat(2, 2, 1)
        return tuple(F.linear(rows, m.table[:8]) for rows in joined)

    compare(run, shared_ids(5, 9), shared_ids(4, 4))


def mixed_rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, D).cumsum(0).reshape(x.shape)


def other_tokens(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x + x.reshape(x.shape[0], -1).softmax(-1).reshape(x.shape)


def copies_for_tokens(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x + x.reshape(-1, D).repeat(2, 1).view(-1, 2, D).sum(1).view(x.shape)


@pytest.mark.parametrize("of_heads", [mixed_rows, other_tokens, copies_for_tokens])
def test_operators_along_flattened_rows_are_refused(of_heads: OfHeads) -> None:
    torch.compiler.reset()
    with pytest.raises(RefusalError, match=r"(along|across) the token axis"):
        torch.compile(program(of_heads), backend="dta", options=SMALL_CHUNKS)(WithTable(), shared_ids())
