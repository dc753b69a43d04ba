"""Programs whose sequence and token axes are easily mistaken: equal to eager, all gradients, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dta_compile.errors import RefusalError
from tests.support.tiny import SMALL_CHUNKS, WIDTH, BareLM, after, assert_same, shared_ids, weighted

Program = Callable[..., tuple[torch.Tensor, ...]]


class Odd(BareLM):
    """One attention, a position table that is used as it is, one that is a buffer, and attention of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(64, WIDTH, dtype=torch.float64))
        self.register_buffer("waves", torch.randn(64, WIDTH, dtype=torch.float64))

    def block(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.mix(x, mask)


def compare(program: Program, *calls: tuple[Any, ...], model: nn.Module | None = None) -> None:
    """Outputs and all gradients of a program, compiled once for all calls, against eager on the whole batch."""
    model = model or Odd()
    compiled = torch.compile(program, backend="dta", options=SMALL_CHUNKS)
    for args in calls:

        def step(function: Program, args: tuple[Any, ...] = args) -> list[torch.Tensor]:
            outputs = function(model, *args)
            sum(weighted(one) for one in outputs if one.requires_grad).backward()
            return [one.detach() for one in outputs]

        assert_same(after(model, lambda: step(compiled)), after(model, lambda: step(program)))


def test_rows_of_position_tables_may_come_in_any_order() -> None:
    def program(m: Odd, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tokens, table = ids.shape[1], m.table
        x = m.embedding(ids) + table[0 : 2 * tokens : 2] + table[:tokens].flip(0) * 2 + table[-tokens:].cos()
        x = x + table[None][:, 1 : 3 * tokens : 3][0].sin() + table.flip(0)[:tokens] + table[tokens : 2 * tokens].exp()
        x = x + table.roll(3, 0)[:tokens].abs() + table[:tokens].roll(2, 0) * 3 + table[: tokens + 1][1:].tanh()
        x = x + m.position(torch.arange(tokens)).flip(0) + table[tokens - 1 - torch.arange(tokens)].sigmoid()
        return (m.head(m.block(x)),)

    compare(program, (shared_ids(5, 9),), (shared_ids(4, 4),), (shared_ids(3, 2),))


def test_values_of_one_entry_per_sequence_reach_its_tokens() -> None:
    def program(m: Odd, ids: torch.Tensor, kind: torch.Tensor, factor: torch.Tensor, flag: torch.Tensor) -> Any:
        time_first = m.embedding(ids.t()) * factor[:, None] + m.position(kind)
        gate = m.table[kind].mean(-1, keepdim=True).squeeze().sigmoid()
        x = time_first.transpose(0, 1) * gate[:, None, None]
        features = F.linear(factor[:, None] * m.table[:3, 0], m.table[:WIDTH, :3])
        wide = torch.cat([x, features[:, None].expand(-1, ids.shape[1], -1)], -1)
        x = wide @ m.table.t()[:, :].reshape(-1, WIDTH)[: 2 * WIDTH]
        h = m.block(torch.where(flag[:, None, None], x, -x)) * features[:, None]
        return m.head(h).masked_fill(flag[:, None, None], 0), (h.sum(1) * features).cumsum(0), features

    def call(batch: int, tokens: int) -> tuple[Any, ...]:
        rows = torch.arange(batch)
        return shared_ids(batch, tokens), rows % 3, 0.5 + rows.double() % 2, rows % 2 == 0

    compare(program, call(5, 9), call(4, 4))


def test_axes_of_size_one_in_a_chunk_are_not_squeezed() -> None:
    def program(m: Odd, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gate = F.linear(m.embedding(ids), m.table[:1]).squeeze().sigmoid()
        h = m.block((m.embedding(ids) * gate[..., None]).squeeze(0).squeeze(1))
        full = torch.full((*ids.shape, 1), ids.shape[1], dtype=torch.float64)
        return h * full, F.linear(h, m.table[:1]).squeeze(), F.linear(h, m.table[:1]).squeeze(0)

    compare(program, (shared_ids(5, 9),), (shared_ids(3, 2),))


def test_the_epilogue_finds_values_in_the_memory_it_was_traced_with() -> None:
    def program(m: Odd, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        batch, tokens = ids.shape
        h = m.block(m.embedding(ids))
        time_first, channels_first = m.norm(h).transpose(0, 1), h.sigmoid().transpose(1, 2)
        kernel = m.table[:48].view(WIDTH, 3, WIDTH).transpose(1, 2)
        flat = torch.as_strided(h.tanh().permute(1, 2, 0), (batch * tokens * WIDTH,), (1,))
        return (
            time_first.cumsum(0),
            time_first.transpose(0, 1).view(-1).cumsum(0),
            F.conv1d(channels_first, kernel, padding=1),
            F.conv2d(channels_first[:, :, None], kernel[:, :, None], stride=(1, 2)),
            F.avg_pool1d(channels_first, 2),
            flat.cumsum(0),
        )

    compare(program, (shared_ids(5, 9),), (shared_ids(4, 4),))


def test_rows_are_told_apart_from_their_transpose() -> None:
    def program(m: Odd, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        batch, tokens = ids.shape
        x = m.embedding(ids.reshape(-1)).view(batch, tokens, WIDTH)
        h = m.block(x + m.embedding(ids.t().reshape(-1, batch).t()))
        rows = h.view(batch * tokens, WIDTH)
        shifted = torch.addmm(h[:, 1:].reshape(-1, WIDTH), h[:, :-1].reshape(-1, WIDTH), m.table[:WIDTH])
        return m.head(rows).view(tokens, batch, -1).log_softmax(-1), shifted

    def other_ids(m: Odd, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = m.embedding(ids.reshape(-1).view(ids.shape[1], ids.shape[0]))
        return (m.head(m.block(x.transpose(0, 1))),)

    compare(program, (shared_ids(5, 9),), (shared_ids(4, 4),), (shared_ids(WIDTH, 3),), (shared_ids(3, WIDTH),))
    compare(other_ids, (shared_ids(5, 9),), (shared_ids(4, 4),))


def test_time_first_values_may_be_flattened_token_by_token() -> None:
    def program(m: Odd, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tokens, batch = ids.t().shape
        x = m.embedding(ids.t())
        x = x + (x.reshape(tokens * batch, WIDTH) @ m.table[:WIDTH]).view(tokens, batch, WIDTH).sin()
        hidden = m.block(x.transpose(0, 1)).transpose(0, 1)
        logits = m.head(hidden)
        rows = logits.flatten(0, 1)
        picked = rows.log_softmax(-1).gather(-1, ids.t().reshape(-1, 1))[:, 0]
        return logits, m.head(hidden.reshape(-1, WIDTH)).cos(), picked, rows.logsumexp(-1).view(tokens, batch).sum(0)

    compare(program, (shared_ids(5, 9),), (shared_ids(4, 4),), (shared_ids(1, 6),))


def test_what_is_written_where_a_mask_says_may_be_trained() -> None:
    def program(m: Odd, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        number, entry, rare = m.table[0, 0], m.table[1, :1], ids > 20
        x = m.embedding(ids) * 1.0
        x[rare] = m.table[2]
        x[ids < 3] = number
        x[ids[:, 0] > 9] = entry
        x[..., 1:4][ids == 5] = m.table[3:4, :3]
        x = x.index_put([rare], number, accumulate=True).index_put([rare], m.table[4], accumulate=True)
        x[x > 0.3] = entry
        h = m.block(x)
        h[rare] = number
        h[h < -1] = 0
        return (m.head(h).index_put([ids > 9], entry, accumulate=True),)

    compare(program, (shared_ids(5, 9),), (shared_ids(4, 4),))


def test_tokens_may_be_counted_where_no_chunk_needs_the_counts() -> None:
    def program(m: Odd, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = F.embedding(ids, m.embedding.weight, scale_grad_by_freq=True)
        return (m.block(x) + F.embedding(ids, m.table, scale_grad_by_freq=True),)

    model = Odd()
    model.embedding.requires_grad_(False)
    compare(program, (shared_ids(5, 9),), model=model)


def test_tables_at_columns_where_rows_are_padded() -> None:
    """Rows that start at other columns read other rows of a table; values of columns exist where all are padded."""

    def program(m: Odd, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tokens = ids.shape[1]
        pairs = torch.ones(tokens, tokens, dtype=torch.bool).tril() & mask[:, None, None, :]
        places = F.linear(m.position(torch.arange(tokens)), m.table[:WIDTH])
        h = m.block(m.embedding(ids) + m.waves[:tokens] + places, pairs)
        return m.head(h).masked_fill(~mask[..., None], 0), places, places.cumsum(0) * places

    ids, mask = shared_ids(5, 9), torch.ones(5, 9, dtype=torch.bool)
    ids[1, 3:], ids[2, 1:] = ids[0, :-3].clone(), ids[0, :-1].clone()
    mask[1, :3], mask[2, :1], mask[:, -2:] = False, False, False
    compare(program, (ids, mask), (ids[:1], mask[:1]))


def test_a_buffer_alone_tells_columns_apart() -> None:
    def program(m: Odd, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tokens = ids.shape[1]
        pairs = torch.ones(tokens, tokens, dtype=torch.bool).tril() & mask[:, None, None, :]
        h = m.block(m.embedding(ids) + m.waves[:tokens], pairs)
        return (m.head(h).masked_fill(~mask[..., None], 0),)

    ids, mask = shared_ids(3, 9), torch.ones(3, 9, dtype=torch.bool)
    ids[1, 3:], mask[1, :3] = ids[0, :-3].clone(), False
    compare(program, (ids, mask))


def heads(m: Odd, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(F.linear(x, m.table[i : i + WIDTH]).unflatten(-1, (2, -1)) for i in (0, 16, 32))


def test_gradients_of_means_are_expanded_where_they_are_viewed() -> None:
    def program(m: Odd, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = m.block(m.embedding(ids))
        parts = hidden.sin().unflatten(-1, (2, 8)).mean(-1)
        query, key, value = (one.transpose(1, 2) for one in heads(m, hidden))
        return parts, F.scaled_dot_product_attention(query, key, value, is_causal=True).mean(1).mean(-1)

    compare(program, (shared_ids(5, 9),))


def test_attention_without_a_batch_axis() -> None:
    def program(m: Odd, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value = (one.transpose(0, 1) for one in heads(m, m.embedding(ids)))
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return (m.head(y.transpose(0, 1).flatten(1)),)

    compare(program, (shared_ids(2, 9)[0],), (shared_ids(2, 4)[0],))
    compare(lambda m, ids: program(m, ids[0]), (shared_ids(5, 9),))


@pytest.mark.slow
def test_attention_broadcasts_heads_and_sequences() -> None:
    """Every way in which query, key and value may differ in sizes; value heads may be wider, too."""
    numbers = [(2, 1, 2), (1, 2, 2), (4, 1, 1)]
    grouped = [(4, 2, 1), (6, 2, 3)]

    def program(m: Odd, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sources = {"tokens": m.embedding(ids), "places": m.position(torch.arange(ids.shape[1]))[None]}
        projections: dict[tuple[str, int, int], torch.Tensor] = {}

        def project(source: str, count: int, width: int = 4) -> torch.Tensor:
            """Heads of a source; each is computed once, since it is the number of operators that takes time."""
            if (source, count, width) not in projections:
                heads = F.linear(sources[source], m.table[: count * width]).unflatten(-1, (count, width))
                projections[source, count, width] = heads.transpose(1, 2)
            return projections[source, count, width]

        found = []
        for counts in numbers:
            query, key, value = (project("tokens", count) for count in counts)
            found.append(F.scaled_dot_product_attention(query, key, value, is_causal=True))
        for counts in grouped:
            query, key, value = (project("tokens", count, 4 + i // 2) for i, count in enumerate(counts))
            found.append(F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True))
        query, key, value = (project("tokens", count) for count in (4, 2, 1))
        found.append(
            F.scaled_dot_product_attention(query, repeated(key, 2), repeated(value, 4).contiguous(), is_causal=True)
        )
        for names in (("tokens", "places", "tokens"), ("places", "tokens", "tokens")):
            query, key, value = (project(name, 2) for name in names)
            found.append(F.scaled_dot_product_attention(query, key, value, is_causal=True))
            found.append(
                F.scaled_dot_product_attention(*(y[:, 0] for y in (query, key, value)), is_causal=True)[:, None]
            )
        return tuple(one.mean(1).mean(-1) for one in found)

    compare(program, (shared_ids(5, 9),), (shared_ids(4, 4),))


def repeated(x: torch.Tensor, times: int) -> torch.Tensor:
    """`repeat_kv`, as models have it."""
    batch, count, tokens, width = x.shape
    return x[:, :, None].expand(batch, count, times, tokens, width).reshape(batch, count * times, tokens, width)


def test_scales_of_attention_may_be_negative_or_zero() -> None:
    def program(m: Odd, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        query, key, value = (one.transpose(1, 2) for one in heads(m, m.embedding(ids)))
        found = []
        for scale in (-0.7, 0.0, -2):  # causal in three dimensions: in four, torch's kernel gives no numbers
            first = query[:, 0], key[:, 0], value[:, 0]
            found.append(F.scaled_dot_product_attention(*first, is_causal=True, scale=scale))
            found.append(F.scaled_dot_product_attention(query, key, value, mask, scale=scale).mean(1))
        return tuple(found)

    compare(program, (shared_ids(5, 9),), (shared_ids(4, 4),))


def test_attention_of_other_ranks_is_refused() -> None:
    def program(m: Odd, ids: torch.Tensor) -> torch.Tensor:
        query, key, value = (one.transpose(1, 2)[:, None] for one in heads(m, m.embedding(ids)))
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    with pytest.raises(RefusalError, match="ranks 5, 5 and 5"):
        torch.compile(program, backend="dta", options=SMALL_CHUNKS)(Odd(), shared_ids(5, 9))


def transposed_rows(m: Odd, ids: torch.Tensor) -> Any:
    x = m.embedding(ids).view(-1, WIDTH).view(ids.shape[1], ids.shape[0], WIDTH)
    return m.block(x.transpose(0, 1))


def cumulative_table(m: Odd, ids: torch.Tensor) -> Any:
    return m.block(m.embedding(ids) + m.table[: ids.shape[1]].cumsum(0))


def matrix_per_sequence(m: Odd, ids: torch.Tensor) -> Any:
    return m.block(torch.bmm(m.embedding(ids), m.table[None, :WIDTH] * ids[:, :1, None]))


def features_per_token(m: Odd, ids: torch.Tensor) -> Any:
    x = m.embedding(ids)
    return m.block(x + x[..., : ids.shape[1]].sum(-1, keepdim=True))


def counted_tokens(m: Odd, ids: torch.Tensor) -> Any:
    return m.block(F.embedding(ids, m.embedding.weight, scale_grad_by_freq=True))


def sparse_gradient(m: Odd, ids: torch.Tensor) -> Any:
    return m.block(F.embedding(ids, m.embedding.weight, sparse=True))


def strided_slice(m: Odd, ids: torch.Tensor) -> Any:
    h = F.linear(m.block(m.embedding(ids)), m.table[:WIDTH])[..., :4]
    return torch.as_strided(h, (ids.numel() * 4,), (1,)).cumsum(0)


REFUSED: list[tuple[Callable[..., Any], str, str]] = [
    (transposed_rows, "across the token axis", ".view(ids.shape[1], ids.shape[0], WIDTH)"),
    (cumulative_table, "accumulates along the token axis", ".cumsum(0)"),
    (matrix_per_sequence, "one value per sequence", "torch.bmm"),
    (features_per_token, "a feature dimension", "x[..., : ids.shape[1]]"),
    (counted_tokens, "how often tokens occur in the batch", "F.embedding"),
    (sparse_gradient, "set sparse=False", "F.embedding"),
    (strided_slice, "a part or repetition", "torch.as_strided"),
]


@pytest.mark.parametrize(("program", "reason", "line"), REFUSED, ids=[program.__name__ for program, *_ in REFUSED])
def test_refusals_name_the_axis_and_the_line(program: Callable[..., Any], reason: str, line: str) -> None:
    model = Odd()
    with pytest.raises(RefusalError) as caught:
        torch.compile(program, backend="dta", options=SMALL_CHUNKS)(model, shared_ids(5, 9))
    assert reason in str(caught.value) and line in str(caught.value)


@pytest.mark.parametrize("groups", [1, 4])
def test_convolutions_of_single_tokens_run_also_where_a_chunk_has_no_head_row(groups: int) -> None:
    kernel = nn.Conv1d(WIDTH, WIDTH, 1, groups=groups, dtype=torch.float64)

    def program(m: Odd, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = m.block(kernel(m.embedding(ids).transpose(1, 2)).view(len(ids), WIDTH, -1).transpose(1, 2))
        return (kernel(h.transpose(1, 2)).transpose(1, 2)[:, -2:],)

    compare(program, (shared_ids(5, 9),), (shared_ids(4, 4),))
