"""Slots sorted by expert, as code for training dispatches them, give eager's numbers over the tree."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dta_compile.errors import RefusalError
from dta_compile.ops.experts.operators import EXPERT_LINEAR
from tests.support.chunk_graphs import nodes_of
from tests.support.helpers import Batch, assert_equal, make_batch, measure, random_loss, reference
from tests.support.inside import inside
from tests.support.mixtures import EXPERTS, HIDDEN, Mixture, Model, Once, Split, assert_exact, call, one_by_one
from tests.support.tiny import SMALL_CHUNKS, VOCABULARY, WIDTH, assert_same, shared_ids

ROUNDING = 2e-2  # of bfloat16, which is all that grouped products take on CPUs


class ScoresBefore(Split):
    before = True


class Slices(Mixture):
    """DeepSeek's: slices of sorted rows, written back where they came from, and weighted there."""

    def mix(self, x, weights, chosen):
        counts = chosen.new_zeros((chosen.shape[0], EXPERTS)).scatter_(1, chosen, 1).sum(dim=0).tolist()
        order = chosen.view(-1).argsort()
        rows, outs, start = x[order // chosen.shape[1]], [], 0
        for number, count in enumerate(counts):
            outs.append(self.experts[number](rows[start : start + count]))
            start = start + count
        outs = torch.cat(outs, dim=0)
        back = torch.empty_like(outs)
        back[order] = outs
        return back.view(*chosen.shape, -1).mul(weights.unsqueeze(-1)).sum(dim=1)


class Ends(Mixture):
    """Where experts end, and rows repeated before they are sorted; back by a second sort."""

    def mix(self, x, weights, chosen):
        order = chosen.flatten().argsort()
        ones = torch.ones_like(chosen.flatten())
        ends = torch.zeros(EXPERTS, dtype=torch.long).scatter_add(0, chosen.flatten(), ones).cumsum(0).tolist()
        rows = x.repeat_interleave(self.k, dim=0)[order]
        parts = [self.experts[i](rows[(ends[i - 1] if i else 0) : ends[i]]) for i in range(EXPERTS)]
        return (torch.cat(parts)[order.argsort()].view(*chosen.shape, -1) * weights[..., None]).sum(1)


class Inverse(Mixture):
    """What sort returns counted by `one_hot`; back by an inverse that is written out."""

    def mix(self, x, weights, chosen):
        keys, order = chosen.reshape(-1).sort(stable=True)
        counts = F.one_hot(keys, EXPERTS).sum(0)
        rows = x.index_select(0, torch.div(order, self.k, rounding_mode="floor"))
        outs = torch.cat([f(part) for f, part in zip(self.experts, rows.split(counts.tolist()), strict=True)])
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel())
        return (outs[inverse].view(-1, self.k, WIDTH) * weights.unsqueeze(-1)).sum(1)


class Added(Mixture):
    """Numbers of tokens split as rows are, each group added by itself."""

    def mix(self, x, weights, chosen):
        flat = chosen.view(-1)
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=EXPERTS)[:EXPERTS].tolist()
        tokens, scores = (order // self.k).split(counts), weights.view(-1)[order].split(counts)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            out = out.index_add(0, tokens[number], expert(x[tokens[number]]) * scores[number][:, None])
        return out


class Minimind(Mixture):
    """Slices of numbers of slots and tokens, scattered into one result."""

    def mix(self, x, weights, chosen):
        flat, scores, out = chosen.view(-1), weights.view(-1, 1), torch.zeros_like(x)
        order = flat.argsort()
        ends, tokens = flat.bincount(minlength=EXPERTS)[:EXPERTS].cumsum(0).tolist(), order // self.k
        for number, end in enumerate(ends):
            start = 0 if number == 0 else ends[number - 1]
            chosen_by = tokens[start:end]
            y = self.experts[number](x[chosen_by]).to(out.dtype) * scores[order[start:end]]
            out.scatter_add_(0, chosen_by.view(-1, 1).repeat(1, x.shape[-1]), y)
        return out


class Written(Mixture):
    """Back by `scatter`."""

    def mix(self, x, weights, chosen):
        order = chosen.view(-1).argsort(stable=True)
        counts = torch.bincount(chosen.view(-1), minlength=EXPERTS)[:EXPERTS]
        y = torch.cat([f(r) for f, r in zip(self.experts, x[order // self.k].split(counts.tolist()), strict=True)])
        y = torch.zeros_like(y).scatter(0, order[:, None].expand(-1, WIDTH), y).view(-1, self.k, WIDTH)
        return torch.einsum("nkd,nk->nd", y, weights)


class Gathered(Mixture):
    """Weights gathered by sorted numbers of experts."""

    def mix(self, x, weights, chosen):
        flat = chosen.view(-1)
        order = flat.argsort(stable=True)
        y = torch.bmm(self.w1[flat[order]], x[order // self.k][..., None])
        y = torch.bmm(self.w2[flat[order]], F.silu(y))[..., 0] * weights.view(-1)[order][:, None]
        return torch.zeros_like(x).index_add(0, order // self.k, y)


class Parallel(Mixture):
    """JetMoE's: the rows of every product joined, halved, put back by slot, and sorted again for the next product."""

    def of_all(self, rows, weights, counts):
        return torch.cat([F.linear(part, w) for part, w in zip(rows.split(counts), weights, strict=True)])

    def mix(self, x, weights, chosen):
        gates = torch.zeros(x.shape[0], EXPERTS, dtype=x.dtype).scatter(1, chosen, 1)
        counts = gates.long().sum(0).tolist()
        _, order = chosen.flatten().sort(0)
        tokens = order.div(self.k, rounding_mode="trunc")
        gate, up = self.of_all(x[tokens], self.w1, counts).chunk(2, -1)
        slots = torch.zeros(chosen.numel(), HIDDEN // 2, dtype=x.dtype).index_add(0, order, F.silu(gate) * up)
        y = self.of_all(slots.tanh()[order], self.w2[..., ::2], counts) * weights.flatten()[order][:, None]
        return torch.zeros_like(x).index_add(0, tokens, y)


class Groups(Added):
    """Routes of DeepSeek-V3: sigmoid scores, a bias for the choice alone, groups of experts, a shared expert."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.register_buffer("bias", torch.tensor([0.0, 0.1, -0.1]))

    def route(self, x):
        scores = self.router(x).sigmoid()
        choice = scores + self.bias
        best = choice.argmax(-1, keepdim=True)
        choice = choice.masked_fill(torch.zeros_like(choice).scatter_(1, best, 1).bool(), 0.0)
        chosen = choice.topk(self.k, -1, sorted=False)[1]
        weights = scores.gather(1, chosen)
        return weights / (weights.sum(-1, keepdim=True) + 1e-20) * 1.5, chosen

    def mix(self, x, weights, chosen):
        return super().mix(x, weights, chosen) + self.experts[0](x)


WAYS = [Split, ScoresBefore, Slices, Ends, Inverse, Added, Minimind, Written, Gathered, Parallel, Groups]


@pytest.mark.sample(1)
@pytest.mark.parametrize("mixture", one_by_one(WAYS, (Split, Parallel)))
def test_sorted_as(mixture):
    assert_exact(Once(mixture))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["norm", "unsafe"])
def test_what_experts_do(kind):
    assert_exact(Once(Slices, kind=kind))


@pytest.mark.slow
def test_one_expert_a_token():
    assert_exact(Once(Split, k=1))


@pytest.mark.slow
def test_all_tokens_to_one_expert():
    model = Once(Split, k=1)
    model.mixtures[0].router.weight.data.zero_()
    assert_exact(model)


@pytest.mark.slow
def test_behind_the_last_attention():
    assert_exact(Model(Split))


@pytest.mark.slow
@pytest.mark.parametrize("padding", ["left", "right"])
def test_padding(padding):
    sequences = [row[: 7 - i] for i, row in enumerate((shared_ids(4, 7) % (VOCABULARY - 1) + 1).tolist())] + [[1]]
    assert_exact(Once(Split), make_batch(sequences, padding))


# ---- Grouped products, in bfloat16


class Grouped(Split):
    """torchtitan's grouped products."""

    product = staticmethod(torch._grouped_mm)

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.w1 = nn.Parameter(torch.randn(EXPERTS, 8, WIDTH) / 4)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, WIDTH, 8) / 4)

    def grouped(self, rows, counts):
        ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
        w1, w2 = self.w1.bfloat16().transpose(-2, -1), self.w2.bfloat16().transpose(-2, -1)
        y = self.product(rows.bfloat16(), w1, offs=ends)
        return self.product(F.silu(y), w2, offs=ends).type_as(rows)


class Public(Grouped):
    product = staticmethod(F.grouped_mm) if hasattr(F, "grouped_mm") else staticmethod(torch._grouped_mm)


class Megablocks(Grouped):
    """Narrow numbers, ends as they come of a histogram, an inverse by sorting."""

    def mix(self, x, weights, chosen):
        flat = chosen.flatten().int()
        _, order = torch.sort(flat)
        counts = torch.histc(flat.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        rows = x.repeat_interleave(self.k, 0)[order]
        return (self.grouped(rows, counts)[order.argsort()].view(-1, self.k, WIDTH) * weights[..., None]).sum(1)


class OfTransformers(Grouped):
    """`grouped_mm_experts_forward` in code of one's own: rows by numbers of tokens, then sorted."""

    def mix(self, x, weights, chosen):
        tokens = torch.arange(x.size(0)).unsqueeze(1).expand(-1, chosen.size(-1)).reshape(-1)
        order = torch.argsort(chosen.reshape(-1))
        counts = torch.bincount(chosen.reshape(-1)[order], minlength=EXPERTS)
        out = self.grouped(x[tokens][order], counts) * weights.reshape(-1)[order].unsqueeze(-1)
        return out[torch.argsort(order)].view(*chosen.shape, -1).sum(1)


@pytest.mark.slow
@pytest.mark.parametrize("mixture", one_by_one([Grouped, Public, Megablocks, OfTransformers], (Grouped,)))
def test_grouped_products(mixture):
    torch._dynamo.reset()
    model, batch = Once(mixture), Batch(shared_ids(4, 7))
    loss, compiled = random_loss(batch, VOCABULARY), torch.compile(model, backend="dta", options=SMALL_CHUNKS)
    assert_equal(measure(compiled, model, batch, loss, call), reference(model, batch, loss, call), ROUNDING)
    products = [node for node in nodes_of(inside(compiled).newest.program, "forward") if node.target is EXPERT_LINEAR]
    assert len(products) == 2  # each for all slots of a token


# ---- What is refused, by name


class Sorted(Mixture):
    """Sorted rows; subclasses do with them what is not for each row by itself, or not for its expert."""

    def mix(self, x, weights, chosen):
        order = chosen.view(-1).argsort(stable=True, descending=self.descending)
        y = torch.cat(
            [
                self.of_one(f, r)
                for f, r in zip(self.experts, x[order // self.k].split(self.counts(chosen)), strict=True)
            ]
        )
        return torch.zeros_like(x).index_add(0, order // self.k, y)

    descending = False

    def counts(self, chosen):
        return F.one_hot(chosen.view(-1), EXPERTS).sum(0).tolist()

    def of_one(self, expert, rows):
        return expert(rows)


class Centred(Sorted):
    def of_one(self, expert, rows):
        return expert(rows - rows.mean(0))


class OfOthers(Sorted):
    def counts(self, chosen):
        return F.one_hot(EXPERTS - 1 - chosen.view(-1), EXPERTS).sum(0).tolist()


class Descending(Sorted):
    descending = True


class Elsewhere(Mixture):
    """Sorted rows that are brought back in another way than by their order."""

    def mix(self, x, weights, chosen):
        flat = chosen.view(-1)
        order = flat.argsort(stable=True)
        parts = x[order // self.k].split(torch.bincount(flat, minlength=EXPERTS)[:EXPERTS].tolist())
        return self.back(x, weights, order, [f(part) for f, part in zip(self.experts, parts, strict=True)])

    def back(self, x, weights, order, parts):
        tokens = torch.arange(x.shape[0]).repeat_interleave(self.k)
        return torch.zeros_like(x).index_add(0, tokens, torch.cat(parts))


class Backwards(Elsewhere):
    def back(self, x, weights, order, parts):
        return torch.zeros_like(x).index_add(0, order // self.k, torch.cat(parts[::-1]))


class ByInverse(Elsewhere):
    def back(self, x, weights, order, parts):
        y = torch.cat(parts)
        return torch.zeros_like(y).index_put((order.argsort(),), y).view(-1, self.k, WIDTH).sum(1)


class WeightsAsTheyWere(Elsewhere):
    def back(self, x, weights, order, parts):
        return torch.zeros_like(x).index_add(0, order // self.k, torch.cat(parts) * weights.view(-1)[:, None])


class NotBack(Mixture):
    def mix(self, x, weights, chosen):
        return self.experts[0](x[chosen[:, 0].argsort(stable=True)])


class Accumulated(Mixture):
    def mix(self, x, weights, chosen):
        order = chosen[:, 0].argsort(stable=True)
        return torch.zeros_like(x).index_add(0, order, x[order].cumsum(0))


class Numbers(Mixture):
    def mix(self, x, weights, chosen):
        return x * torch.bincount(chosen.view(-1), minlength=EXPERTS)[:EXPERTS].tolist()[0]


class NanoMoE(Mixture):
    """Tokens beyond a capacity are dropped."""

    def mix(self, x, weights, chosen):
        mask = F.one_hot(chosen, EXPERTS).permute(1, 0, 2).reshape(-1, EXPERTS)
        mask = mask * (mask.cumsum(0) - 1 < 4)
        used = mask.view(self.k, -1, EXPERTS).permute(1, 0, 2)
        return torch.einsum("ne,end->nd", (used * weights[..., None]).sum(1), torch.stack([f(x) for f in self.experts]))


class ExpertChoice(Mixture):
    def mix(self, x, weights, chosen):
        scores, rows = F.softmax(self.router(x), -1).t().topk(3, -1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            out = out.index_add(0, rows[number], expert(x[rows[number]]) * scores[number][:, None])
        return out


REFUSED = {
    Centred: "selected by a condition.*along the token axis",
    OfOthers: "graph break.*tolist",
    Descending: "graph break.*tolist",
    Elsewhere: "selected by a condition",
    Backwards: "selected by a condition",
    ByInverse: "selected by a condition",
    WeightsAsTheyWere: "selected by a condition",
    NotBack: "sorted by the experts.*expert_linear",
    Accumulated: "sorted by the experts.*expert_linear",
    Numbers: "graph break.*tolist",
    NanoMoE: "expert capacity.*cumsum|expert capacity.*one_hot",
    ExpertChoice: "expert capacity.*topk",
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("mixture", one_by_one(REFUSED, (OfOthers, NotBack)))
def test_refused(mixture):
    torch._dynamo.reset()
    with pytest.raises(RefusalError) as caught:
        torch.compile(Once(mixture), backend="dta", options=SMALL_CHUNKS)(shared_ids(4, 7))
    assert re.search(REFUSED[mixture], str(caught.value), re.DOTALL), caught.value


class Summed(Sorted):
    """What a slot gets depends on the order of the slots of its expert."""

    stable = False

    def mix(self, x, weights, chosen):
        order = chosen.view(-1).argsort(stable=self.stable)
        parts = x[order // self.k].split(self.counts(chosen))
        y = torch.cat([expert(part.cumsum(0)) for expert, part in zip(self.experts, parts, strict=True)])
        return self.back(x, order, y)

    def back(self, x, order, y):
        return torch.zeros_like(x).index_add(0, order // self.k, y)


class SummedInOrder(Summed):
    stable = True


class SortedByOne(SummedInOrder):
    """A sort of columns of one number each is no inverse."""

    def back(self, x, order, y):
        return y[order[:, None].argsort(dim=1).view(-1)].view(-1, self.k, WIDTH).sum(1)


class OneFeature(SummedInOrder):
    def back(self, x, order, y):
        return x * torch.gather(y, 0, order.argsort()[:, None]).view(-1, self.k, 1).sum(1)


BEHIND = [SummedInOrder, SortedByOne, OneFeature]


@pytest.mark.sample(1)
@pytest.mark.parametrize("mixture", one_by_one(BEHIND, (SortedByOne, OneFeature)))
def test_left_as_it_is_behind_the_last_attention(mixture):
    torch._dynamo.reset()
    model, ids = Model(mixture), shared_ids(4, 7)
    assert_same(torch.compile(model, backend="dta", options=SMALL_CHUNKS)(ids), model(ids))


def test_an_order_that_no_sort_promises_is_refused_behind_the_last_attention():
    torch._dynamo.reset()
    with pytest.raises(RefusalError, match=r"unstable(.|\n)*stable=True"):
        torch.compile(Model(Summed), backend="dta", options=SMALL_CHUNKS)(shared_ids(6, 12))


@pytest.mark.slow
def test_numbers_of_tensors_in_a_loss_end_the_graph_as_ever():
    torch._dynamo.reset()
    model, ids = Once(lambda: nn.Linear(WIDTH, WIDTH)), shared_ids(4, 7)

    def step(model):
        lengths = (ids > 3).sum(1)
        loss = model(ids).square().mean()
        return loss * sum(lengths.tolist()), lengths.tolist()

    compiled = torch.compile(model, backend="dta", options=SMALL_CHUNKS)
    (loss, lengths), (expected, others) = step(compiled), step(model)
    torch.testing.assert_close(loss, expected)
    assert lengths == others
    whole = torch.compile(lambda: step(model), backend="dta", options=SMALL_CHUNKS)
    loss, lengths = whole()
    torch.testing.assert_close(loss, expected)
    assert lengths == others
