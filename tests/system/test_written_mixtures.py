"""Mixtures of experts written by hand, in the ways in which models have them, give eager's numbers over the tree."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from dta_compile.errors import RefusalError
from tests.support.helpers import EXACT, Batch, assert_equal, make_batch, measure, random_loss
from tests.support.inside import inside
from tests.support.mixtures import EXPERTS, HIDDEN, DeepSeek, Mixture, Model, assert_exact, call, one_by_one
from tests.support.tiny import (
    SMALL_CHUNKS,
    VOCABULARY,
    WIDTH,
    BareLM,
    after,
    assert_same,
    log_probs,
    shared_ids,
    weighted,
)


class Mixtral(Mixture):
    """As transformers had it, and remote code still has."""

    def mix(self, x, weights, chosen):
        out = torch.zeros((x.shape[0], x.shape[1]), dtype=x.dtype, device=x.device)
        mask = F.one_hot(chosen, num_classes=EXPERTS).permute(2, 1, 0)
        for number in range(EXPERTS):
            idx, top_x = torch.where(mask[number])
            rows = x[None, top_x].reshape(-1, x.shape[1])
            rows = self.experts[number](rows) * weights[top_x, idx, None]
            out.index_add_(0, top_x, rows.to(x.dtype))
        return out


class OneColumn(Mixture):
    """Dense routing weights, one condition a token."""

    def mix(self, x, weights, chosen):
        weights = torch.zeros(x.shape[0], EXPERTS, dtype=x.dtype).scatter_(1, chosen, weights)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (weights[:, number] > 0).nonzero().squeeze(-1)
            out = out.index_add(0, rows, expert(x[rows]) * weights[rows, number, None])
        return out


class Masked(Mixture):
    """A boolean mask, read and written."""

    def mix(self, x, weights, chosen):
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mask = (chosen == number).any(-1)
            out[mask] = out[mask] + expert(x[mask]) * (weights * (chosen == number)).sum(-1)[mask].unsqueeze(-1)
        return out


class TokensOfSequences(Mixture):
    """A mask over `[B, S]`, once flattened."""

    def forward(self, x):
        weights, chosen = self.route(x)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mask = (chosen == number).any(-1)
            y = expert(x.view(-1, WIDTH)[mask.flatten()])
            out[mask] = out[mask] + y * (weights * (chosen == number))[mask].sum(-1, keepdim=True)
        return out


class Columns(Mixture):
    """All columns of `nonzero`, `index_put` with two of them, and one hot numbers without gradient."""

    def forward(self, x):
        weights, chosen = self.route(x)
        out = torch.zeros_like(x)
        with torch.no_grad():
            mask = F.one_hot(chosen, EXPERTS + 1)
        for number, expert in enumerate(self.experts):
            batch, token, slot = mask[..., number].nonzero().t()
            y = expert(x[batch, token]) * weights[batch, token, slot, None]
            out = out.index_put((batch, token), y, accumulate=True)
        return out


class Slots(Mixture):
    """Written by place, and summed behind."""

    def mix(self, x, weights, chosen):
        out = x.new_zeros(x.shape[0], self.k, WIDTH)
        for number, expert in enumerate(self.experts):
            places = torch.nonzero(chosen == number)
            rows, slot = places[:, 0], places[:, 1]
            out[rows, slot] = expert(x[rows])
        return (out * weights[..., None]).sum(1)


class Scattered(Mixture):
    """`scatter_add`, einsum, and parameters in a stack."""

    def mix(self, x, weights, chosen):
        out = torch.zeros_like(x)
        for number in range(EXPERTS):
            rows, slot = torch.where(chosen == number)
            y = F.silu(torch.einsum("nd,hd->nh", x[rows], self.w1[number]))
            y = torch.einsum("nh,dh->nd", torch.cat([y[:, ::2], y[:, 1::2]], -1), self.w2[number])
            y = y * weights[rows, slot, None]
            out = out.scatter_add(0, rows[:, None].expand(-1, WIDTH), y)
        return out


class Dense(Mixture):
    """All experts on all tokens, weighted by a mask of the best."""

    def mix(self, x, weights, chosen):
        mask = torch.zeros(x.shape[0], EXPERTS, dtype=x.dtype).scatter(1, chosen, weights)
        y = torch.stack([expert(x) for expert in self.experts], 1)
        h = F.silu(torch.einsum("nd,ehd->neh", x, self.w1))
        return (y * mask[..., None]).sum(1) + torch.einsum("neh,edh,ne->nd", h, self.w2, mask)


class Repeated(Mixture):
    """Llama 4's: a copy of all tokens for each expert, scaled by scores that are zero for all but the best."""

    def mix(self, x, weights, chosen):
        scores = torch.zeros(x.shape[0], EXPERTS, dtype=x.dtype).scatter(1, chosen, weights)
        rows = x.repeat(EXPERTS, 1) * scores.transpose(0, 1).reshape(-1, 1)
        y = F.silu(torch.bmm(rows.view(EXPERTS, -1, x.shape[1]), self.w1.mT)) @ self.w2.mT
        return y.view(-1, x.shape[1]).reshape(EXPERTS, -1, x.shape[1]).sum(0)


class Gathered(Mixture):
    """A matrix for every place, by `bmm` and by einsum."""

    def mix(self, x, weights, chosen):
        y = torch.bmm(self.w1[chosen.flatten()], x.repeat_interleave(self.k, 0)[..., None])[..., 0]
        y = F.silu(y.view(-1, self.k, HIDDEN))
        return torch.einsum("nkh,nkdh,nk->nd", y, self.w2[chosen], weights)


class FlatPlaces(Mixture):
    """As DeepSeek's remote code trains: tokens repeated, and written by a mask over all places."""

    def mix(self, x, weights, chosen):
        flat, x = chosen.view(-1), x.repeat_interleave(self.k, dim=0)
        y = torch.empty_like(x)
        for number, expert in enumerate(self.experts):
            y[flat == number] = expert(x[flat == number])
        return (y.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(1)


class Checkpointed(Mixtral):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Twice(Mixture):
    """The places of a token may have the same expert: both count."""

    def route(self, x):
        scores = self.router(x)
        return torch.stack([scores.amax(-1).sigmoid(), scores.amin(-1).tanh()], -1), torch.stack(
            [scores.argmax(-1), (scores.argmax(-1) * (scores[:, 0] > 0)) % EXPERTS], -1
        )

    def mix(self, x, weights, chosen):
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, slot = torch.where(chosen == number)
            out.index_add_(0, rows, expert(x[rows]) * weights[rows, slot, None])
        return out


class Shared(Mixtral):
    """An expert of all tokens beside the others."""

    def mix(self, x, weights, chosen):
        return super().mix(x, weights, chosen) + self.experts[0](x) * torch.sigmoid(self.router(x)[:, :1])


class IfAny(Mixture):
    """Skips experts without tokens, by a mask of them, once for each slot."""

    def mix(self, x, weights, chosen):
        out = torch.zeros_like(x)
        for slot in range(self.k):
            for number, expert in enumerate(self.experts):
                mask = chosen[:, slot] == number
                if mask.any():
                    out[mask] += weights[mask, slot, None] * expert(x[mask])
        return out


class IfRows(Mixture):
    """By the size of a selection, in a function of its own that returns."""

    def mix(self, x, weights, chosen):
        out = torch.zeros_like(x)
        for number in range(EXPERTS):
            self.add(number, out, x, weights, chosen)
        return out

    def add(self, number, out, x, weights, chosen):
        rows, slot = torch.where(chosen == number)
        if rows.shape[0] == 0:
            return
        out.index_add_(0, rows, self.experts[number](x[rows]) * weights[rows, slot].unsqueeze(-1))


class IfCounted(Mixture):
    """By counts, as in DeepSeek-V3's file, and by a sum."""

    def mix(self, x, weights, chosen):
        out = torch.zeros_like(x)
        counts = torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist()
        for number in range(EXPERTS - 1):
            if counts[number] == 0:
                continue
            rows, slot = torch.where(chosen == number)
            out[rows] += self.experts[number](x[rows]) * weights[rows, slot, None]
        mask = chosen == EXPERTS - 1
        if mask.sum() > 0:
            rows, slot = mask.nonzero(as_tuple=True)
            out = out.index_add(0, rows, self.experts[-1](x[rows]) * weights[rows, slot, None])
        return out


class OnlyHit(Mixture):
    """As code of transformers loops: over the experts that have tokens, which are rows of `nonzero`."""

    def mix(self, x, weights, chosen):
        out = torch.zeros_like(x)
        with torch.no_grad():
            mask = F.one_hot(chosen, num_classes=EXPERTS + 1).permute(2, 1, 0)
            hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for number in hit:
            expert = self.experts[number]
            with torch.no_grad():
                slot, rows = torch.where(mask[number].squeeze(0))
            number = number[0]
            if number == EXPERTS:
                continue
            y = expert(x[rows]) + F.silu(x[rows] @ self.w1[number].T) @ self.w2[number].T
            out.index_add_(0, rows, y * weights[rows, slot, None])
        return out


class HitInLists(Mixture):
    """Integers of a histogram for the first slot, of what is distinct for the others."""

    def mix(self, x, weights, chosen):
        out, first = torch.zeros_like(x), chosen[:, 0]
        for number in torch.bincount(first, minlength=EXPERTS).nonzero(as_tuple=True)[0].tolist():
            mask = first == number
            out[mask] += self.experts[number](x[mask]) * weights[mask, 0, None]
        others = chosen[:, 1:]
        for number in others.unique():
            mask = (others == number).any(-1)
            y = self.experts[number.item()](x[mask])
            out[mask] += y * (weights[:, 1:] * (others == number)).sum(-1)[mask, None]
        return out


WAYS = [Mixtral, DeepSeek, OneColumn, Masked, TokensOfSequences, Columns, Slots, Scattered, Dense, Checkpointed]
WAYS += [Twice, Shared, Gathered, FlatPlaces, Repeated]


@pytest.mark.parametrize("mixture", one_by_one(WAYS, (DeepSeek, TokensOfSequences)))
@pytest.mark.sample(1)
def test_written_as(mixture):
    assert_exact(Model(mixture, layers=2 if mixture in (DeepSeek, Repeated) else 1))


@pytest.mark.parametrize("mixture", one_by_one([IfAny, IfRows, IfCounted, OnlyHit, HitInLists], [IfAny, OnlyHit]))
@pytest.mark.sample(1)
def test_experts_that_are_skipped_without_tokens(mixture):
    model = Model(mixture)
    assert_exact(model)
    for part in model.mixtures:
        part.router.weight.data.zero_()  # all tokens choose the same experts
    torch._dynamo.reset()
    batch = Batch(shared_ids(4, 7))
    loss, compiled = random_loss(batch, VOCABULARY), torch.compile(model, backend="dta", options=SMALL_CHUNKS)
    actual, expected = (measure(one, model, batch, loss, call) for one in (compiled, model))
    unused = actual.gradients.keys() - expected.gradients.keys()
    assert unused and not any(actual.gradients.pop(name).any() for name in unused)
    assert_equal(actual, expected, EXACT)
    assert inside(compiled).only


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["norm", "unsafe"])
def test_what_experts_do(kind):
    assert_exact(Model(Mixtral, kind=kind))


@pytest.mark.slow
def test_one_expert_a_token():
    assert_exact(Model(DeepSeek, k=1))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gated", "unsafe"])
def test_all_tokens_to_one_expert(kind):
    model = Model(Mixtral, k=1, kind=kind)
    for mixture in model.mixtures:
        mixture.router.weight.data.zero_()
    assert_exact(model)


@pytest.mark.slow
@pytest.mark.parametrize("padding", ["left", "right"])
def test_padding(padding):
    sequences = [row[: 7 - i] for i, row in enumerate((shared_ids(4, 7) % (VOCABULARY - 1) + 1).tolist())] + [[1]]
    assert_exact(Model(Mixtral), make_batch(sequences, padding))


# ---- What is refused, by name


class Loop(Mixture):
    """A loop over experts; subclasses change what is done of the tokens of each."""

    def mix(self, x, weights, chosen):
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, slot = torch.where(chosen == number)
            out = self.of_one(out, x, rows, weights[rows, slot, None], expert)
        return out

    def of_one(self, out, x, rows, weights, expert):
        return out.index_add(0, rows, expert(x[rows]) * weights)


class IfThereAre(Loop):
    def of_one(self, *arguments):
        return arguments[0] if arguments[2].numel() == 0 else super().of_one(*arguments)


class Branching(Loop):
    """Does something also where an expert has no tokens; subclasses say what."""

    def mix(self, x, weights, chosen):
        out, hits = x * 0.5, 0
        for number, expert in enumerate(self.experts):
            mask = (chosen == number).any(-1)
            if mask.any():
                out, hits = self.of_some(out, hits, x, mask, (chosen != number).any(-1), expert)
        return out * (1 + hits)


class Scaling(Branching):
    def of_some(self, out, hits, x, mask, others, expert):
        return out * 2, hits


class OfOthers(Branching):
    def of_some(self, out, hits, x, mask, others, expert):
        out[others] += expert(x[others])
        return out, hits


class Hits(Branching):
    def of_some(self, out, hits, x, mask, others, expert):
        out[mask] += expert(x[mask])
        return out, hits + 1


class OfAView(Branching):
    def of_some(self, out, hits, x, mask, others, expert):
        out[:2].add_(1)
        return out, hits


class Noting(Branching):
    """Counts in a dictionary."""

    def mix(self, x, weights, chosen):
        self.noted = {}
        return super().mix(x, weights, chosen) * len(self.noted)

    def of_some(self, out, hits, x, mask, others, expert):
        out[mask] += expert(x[mask])
        self.noted[expert] = 1
        return out, hits


class Yielding(Mixture):
    """What loops over the experts with tokens gives each to another function."""

    def mix(self, x, weights, chosen):
        return sum(part + 1 for part in self.parts(x, chosen))

    def parts(self, x, chosen):
        for number in chosen.unique():
            rows, _ = torch.where(chosen == number)
            yield torch.zeros_like(x).index_add(0, rows, self.experts[number](x[rows]))


class Else(Mixture):
    def mix(self, x, weights, chosen):
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mask = (chosen == number).any(-1)
            if mask.any():
                out[mask] += expert(x[mask])
            else:
                out = out + 1
        return out


class Breaking(Mixture):
    """Only the first expert with tokens of each slot."""

    def mix(self, x, weights, chosen):
        out = torch.zeros_like(x)
        for slot in range(self.k):
            for number, expert in enumerate(self.experts):
                mask = chosen[:, slot] == number
                if mask.any():
                    out[mask] += expert(x[mask])
                    break
        return out


class OfAnEarlierMask(Mixture):
    def mix(self, x, weights, chosen):
        out, which = torch.zeros_like(x), chosen.clone()
        mask = (which == 0).any(-1)
        which.view(-1).fill_(0)
        if mask.any():
            now = (which == 0).any(-1)
            out[now] += self.experts[0](x[now])
        return out


class OfAMaskThatChanges(Mixture):
    """What is asked about the mask is no longer true of it."""

    def mix(self, x, weights, chosen):
        out, mask = torch.zeros_like(x), (chosen == 7).any(-1)
        some = mask.any()
        mask[:] = True
        if some:
            out[mask] += self.experts[0](x[mask])
        return out + x


class WhileSome(Mixture):
    """Goes on for as long as any token does."""

    def mix(self, x, weights, chosen):
        out, step, running = x.clone(), 0, chosen[:, 0] >= 0
        while running.any():
            out[running] = out[running] + self.experts[0](out[running])
            step, running = step + 1, running & (chosen[:, 0] > step)
        return out


class LostByAll(Mixture):
    """Asks about one mask and works on another one, which consists of the same parts."""

    def mix(self, x, weights, chosen):
        kept = weights > 0.5
        out = x * (weights * kept).sum(-1, keepdim=True)
        if (~kept.any(-1)).any():
            some = (~kept).any(-1)
            out[some] += self.experts[0](x[some])
        return out


class OneMore(Mixture):
    """A last number, which is no expert: the counts are one more if a token has it."""

    def mix(self, x, weights, chosen):
        out, chosen = torch.zeros_like(x), chosen + 1
        for number, _ in enumerate(torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist()):
            rows, slot = torch.where(chosen == number)
            out.index_add_(0, rows, self.experts[number - 1](x[rows]) * weights[rows, slot, None])
        return out


class OfCountsByWeight(Mixture):
    """Leaves out experts that only tokens of no weight have chosen."""

    def mix(self, x, weights, chosen):
        out, valid = torch.zeros_like(x), (chosen != 2).to(x.dtype)
        for number in torch.bincount(chosen.flatten(), valid.flatten(), EXPERTS).nonzero():
            rows, slot = torch.where(chosen == number)
            out.index_add_(0, rows, self.experts[number](x[rows]) * weights[rows, slot, None])
        return out


class ByNumbers(Mixture):
    """A mask as numbers picks rows 0 and 1."""

    def mix(self, x, weights, chosen):
        out, mask = torch.zeros_like(x), (chosen == 7).any(-1)
        if mask.any():
            rows = mask.long()
            out[rows] = self.experts[0](x[rows])
        return out + x


class Tossing(Mixture):
    """Draws a random number for each expert that has tokens."""

    def mix(self, x, weights, chosen):
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mask = (chosen == number).any(-1)
            if mask.any():
                out[mask] += expert(x[mask]) * torch.rand(1, dtype=x.dtype)
        return out


class InPython(Loop):
    def of_one(self, out, x, rows, weights, expert):
        for row in rows.tolist():
            out[row] += expert(x[row])
        return out


class LastHit(Mixture):
    """Loops over the experts that have tokens, and uses of the last one what it leaves behind."""

    def mix(self, x, weights, chosen):
        out = torch.zeros_like(x)
        for number in chosen.unique():
            rows, slot = torch.where(chosen == number)
            out[rows] += self.experts[number](x[rows]) * weights[rows, slot, None]
        return out * x[rows].sum()


class Centred(Loop):
    def of_one(self, out, x, rows, weights, expert):
        y = expert(x[rows])
        return out.index_add(0, rows, y - y.mean(0))


class Numbered(Loop):
    def of_one(self, out, x, rows, weights, expert):
        return out.index_add(0, rows, expert(x[rows]) * torch.arange(rows.shape[0])[:, None])


class Counted(Loop):
    def of_one(self, out, x, rows, weights, expert):
        return out.index_add(0, rows, expert(x[rows]) / rows.shape[0])


class Shifted(Loop):
    def of_one(self, out, x, rows, weights, expert):
        return out.index_add(0, rows, expert(x[rows].flip(0)))


class Elsewhere(Loop):
    def of_one(self, out, x, rows, weights, expert):
        return out.index_add(0, (rows - 1).clamp(min=0), expert(x[rows]))


class Attending(Loop):
    def of_one(self, out, x, rows, weights, expert):
        y = expert(x[rows])[None, None]
        return out.index_add(0, rows, F.scaled_dot_product_attention(y, y, y, is_causal=True)[0, 0])


class Dropped(Loop):
    def of_one(self, out, x, rows, weights, expert):
        return out.index_add(0, rows, F.dropout(expert(x[rows]), 0.1))


class Capacity(OneColumn):
    def mix(self, x, weights, chosen):
        mask = F.one_hot(chosen, EXPERTS).sum(1)
        kept = (mask.cumsum(0) * mask <= 4)[:, 0]
        return super().mix(x, weights * kept[:, None], chosen)


class Noisy(Mixtral):
    def route(self, x):
        return super().route(x + torch.randn_like(x))


class Jittered(Mixtral):
    def route(self, x):
        return super().route(x * torch.empty_like(x).uniform_(0.9, 1.1))


REFUSED = {
    IfThereAre: r"graph break.*numel\(\) == 0.*drop the `if`",
    OfAMaskThatChanges: r"graph break.*if some",
    WhileSome: r"graph break.*while running\.any",
    LostByAll: r"graph break.*if \(~kept\.any",
    OneMore: r"graph break.*tolist",
    OfCountsByWeight: r"graph break.*for number in torch\.bincount",
    **dict.fromkeys(
        (Scaling, OfOthers, ByNumbers, Hits, Noting, OfAView, Else, Breaking, OfAnEarlierMask, Tossing),
        r"graph break.*if mask\.any",
    ),
    **dict.fromkeys((LastHit, Yielding), r"graph break.*for number in chosen\.unique.*loop over all of them"),
    InPython: r"graph break.*rows\.tolist\(\).*\.tolist\(\)",
    Centred: "selected by a condition.*y.mean.*along the token axis",
    Numbered: "selected by a condition.*arange",
    Counted: "selected by a condition.*how many rows",
    Shifted: "selected by a condition.*flip",
    Elsewhere: "selected by a condition.*numbers of the selected tokens",
    Attending: "graph break.*scaled_dot_product_attention",  # Dynamo's own
    Dropped: "selected by a condition.*random numbers",
    Capacity: "expert capacity.*cumsum",
    Noisy: "random numbers for every token.*randn_like.*router noise",
    Jittered: "random numbers for every token.*uniform.*router noise",
}


@pytest.mark.parametrize(
    "mixture", one_by_one(REFUSED, (IfThereAre, ByNumbers, Breaking, Capacity, WhileSome, LostByAll))
)
@pytest.mark.sample(1)
def test_refused(mixture):
    torch._dynamo.reset()
    before = torch._dynamo.config.capture_dynamic_output_shape_ops
    with pytest.raises(RefusalError) as caught:
        # Behind the last attention a mixture is no part of the tree, and nothing of it has to be proven.
        torch.compile(Model(mixture, layers=2), backend="dta", options=SMALL_CHUNKS)(shared_ids(4, 7))
    assert re.search(REFUSED[mixture], str(caught.value), re.DOTALL), caught.value
    assert torch._dynamo.config.capture_dynamic_output_shape_ops is before


# ---- Selections of other things than tokens of experts


def mean_of_selected(model, ids):
    found = log_probs(model(ids), ids)
    keep = ids[:, 1:] > 9
    return -found[keep].mean(), keep.nonzero().sum()


def selected_by_model(model, ids):
    found = log_probs(model(ids), ids)
    return -found[found > found.mean()].mean(), ids.sum()


def of_some_sequences(model, ids):
    rows = (ids[:, 5] > 3).nonzero()[:, 0]
    return -log_probs(model(ids[rows]), ids[rows]).mean(), rows.sum()


def in_python(model, ids):
    found, rows = log_probs(model(ids), ids), (ids[:, 5] > 3).nonzero()[:, 0]
    for row in rows.tolist():
        found = found + found[row]
    return -found.mean(), rows.sum() if rows.numel() > 1 else rows


STEPS = [mean_of_selected, selected_by_model, of_some_sequences, in_python]


@pytest.mark.parametrize("step", one_by_one(STEPS, [mean_of_selected, in_python]))
def test_selections_outside_of_the_model(step):
    torch._dynamo.reset()
    model, ids = BareLM(), shared_ids()
    compiled = torch.compile(lambda ids: step(model, ids), backend="dta", options=SMALL_CHUNKS)

    def run(step):
        loss, number = step(ids)
        loss.backward()
        return loss.detach(), number

    assert_same(after(model, lambda: run(compiled)), after(model, lambda: run(lambda ids: step(model, ids))))
    assert len(inside(compiled).engines) == 1


@pytest.mark.slow
def test_mixture_and_selection_in_the_loss():
    torch._dynamo.reset()
    model, ids = Model(DeepSeek), shared_ids(4, 7)
    compiled = torch.compile(lambda ids: mean_of_selected(model, ids)[0], backend="dta", options=SMALL_CHUNKS)

    def run(step):
        loss = step(ids)
        loss.backward()
        return loss.detach()

    assert_same(
        after(model, lambda: run(compiled)), after(model, lambda: run(lambda ids: mean_of_selected(model, ids)[0]))
    )
    assert inside(compiled).only


class Languages(BareLM):
    """A mixture whose conditions select whole sequences, as the adapters of X-MOD do."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 3), nn.GELU(), nn.Linear(3, WIDTH)) for _ in "abc")
        self.double()

    def forward(self, ids, language):
        x = self.mix(self.embedding(ids))
        y = torch.zeros_like(x)
        for number, adapter in enumerate(self.adapters):
            mask = language == number
            rows = torch.rsqrt(x[mask].pow(2).mean(-1, keepdim=True)) * x[mask]
            y[mask] = adapter(rows)
        return self.head(self.mix(x + y))


def test_conditions_on_sequences():
    torch._dynamo.reset()
    model, ids = Languages(), shared_ids(5, 7)
    compiled, language = torch.compile(model, backend="dta", options=SMALL_CHUNKS), torch.tensor([0, 1, 0, 2, 5])
    ids[1] = ids[0]

    def run(function):
        loss = weighted(function(ids, language))
        loss.backward()
        return loss.detach()

    assert_same(after(model, lambda: run(compiled)), after(model, lambda: run(model)))
    assert inside(compiled).only
