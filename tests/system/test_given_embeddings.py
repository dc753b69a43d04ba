"""Embeddings that are given with a gradient: each row has its own, also where rows are equal."""

import logging

import pytest
import torch

import dta_compile
from tests.support.tiny import WIDTH, BareLM, TinyLM, after, assert_same, shared_ids, weighted

IDS = shared_ids()
REAL = torch.arange(9) >= torch.tensor([0, 2, 0, 3, 0])[:, None]  # padded on the left
TREE = 18  # tokens of the ids, of 45
PROMPT = torch.linspace(-1, 1, 3 * WIDTH, dtype=torch.float64).view(3, WIDTH)


class Given(TinyLM):
    """Reads embeddings `[B, S, D]`, behind a prompt `[P, D]` or `[B, P, D]` if there is one."""

    def forward(self, x, mask=None, prompt=None):
        positions, pairs = torch.arange(x.shape[1]), None
        if mask is not None:
            positions = (mask.long().cumsum(1) - 1).clamp(min=0)
            pairs = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril() & mask[:, None, None]
        x = x + self.position(positions)
        if prompt is not None:
            x = torch.cat([prompt.expand(len(x), -1, -1), x], 1)
        return self.head(self.mix(x, pairs))


def step(model, function, make):
    """Outputs, gradients of weights, and those of the leaves and the retained tensors that `make` returns."""

    def run():
        args, read = make(model)
        out = function(*args)
        weighted(out if len(args) == 1 or args[1] is None else out * args[1][..., None]).backward()
        return out.detach() if len(args) == 1 or args[1] is None else None, [value.grad for value in read]

    return after(model, run)


def leaf(model):
    x = model.embedding(IDS).detach().requires_grad_()
    return (x,), [x]


def retained(model):
    x = model.embedding(IDS)
    x.retain_grad()
    return (x,), [x]


def hooked(model):
    x, seen = model.embedding(IDS), torch.zeros(*IDS.shape, WIDTH, dtype=torch.float64).requires_grad_()
    x.register_hook(lambda grad: setattr(seen, "grad", grad.clone()))
    return (x,), [seen]


def through_its_node(model):
    x, seen = model.embedding(IDS), torch.zeros(*IDS.shape, WIDTH, dtype=torch.float64).requires_grad_()
    x.grad_fn.register_prehook(lambda grads: (grads[0].clamp(-0.1, 0.1),))
    x.grad_fn.register_hook(lambda _, grads: setattr(seen, "grad", grads[0].clone()))
    return (x,), [seen]


def joined(model):
    prompt = PROMPT.clone().requires_grad_()
    behind = model.embedding(IDS)
    behind.retain_grad()
    return (torch.cat([prompt.expand(len(IDS), -1, -1), behind], 1),), [prompt, behind]


def padded(model):
    x = model.embedding(IDS).detach().requires_grad_()
    return (x, REAL), [x]


@pytest.mark.parametrize(
    "make", [leaf, retained, hooked, through_its_node, joined, padded], ids=lambda make: make.__name__
)
@pytest.mark.parametrize("options", [{"chunk_size": 3}, {"sweep": "stages", "memory_budget": 0}], ids=["dfs", "stages"])
@pytest.mark.sample(1)
def test_rows_have_gradients_of_their_own(make, options):
    model = Given()
    compiled = torch.compile(model, backend="dta", options=options)
    for _ in range(2):
        assert_same(step(model, compiled, make), step(model, model, make))
    plan = dta_compile.last_plan(compiled)
    assert plan.stats.compression == 1 and "each row has of its own" in str(plan)


class Prompted(TinyLM):
    """Reads a prompt `[P, D]`, the same for all rows, in front of ids."""

    def forward(self, ids, prompt):
        x = torch.cat([prompt.expand(len(ids), -1, -1), self.embedding(ids)], 1)
        return self.head(self.mix(x + self.position(torch.arange(x.shape[1]))))


@pytest.mark.sample(1)
@pytest.mark.parametrize("tokens", [3, len(IDS)], ids=["a few", "as many as rows"])
def test_a_prompt_of_all_rows_is_shared(tokens):
    model = Prompted()
    compiled = torch.compile(model, backend="dta", options={"chunk_size": 3})

    def run(function):
        prompt = torch.cat([PROMPT, PROMPT])[:tokens].requires_grad_()
        out = function(IDS, 2 * prompt)
        weighted(out).backward()
        return out.detach(), prompt.grad

    assert_same(after(model, lambda: run(compiled)), after(model, lambda: run(model)))
    plan = dta_compile.last_plan(compiled)
    assert plan.prefix_tree.num_rows == TREE + tokens and not plan.estimates.notes


class GivenBare(BareLM):
    def forward(self, x, bias=None):
        x = x if bias is None else x * bias[:, None]
        return self.head(self.mix(x)) + x.mean(-1, keepdim=True)


@pytest.mark.parametrize("is_leaf", [True, False])
def test_vectors_of_rows_and_adapters(is_leaf):
    """A vector per row, with frozen weights but for one: rows share nothing, since it belongs to their first token."""
    model = GivenBare()
    model.requires_grad_(False)
    model.head.requires_grad_()
    compiled = torch.compile(model, backend="dta", options={"chunk_size": 4})
    scale = torch.linspace(0.5, 2, len(IDS) * WIDTH, dtype=torch.float64).view(len(IDS), WIDTH)

    def run(function, rows):
        given = scale[:rows].clone().requires_grad_()
        out = function(model.embedding(IDS[:rows]), given if is_leaf else 2 * given)
        weighted(out).backward()
        return out.detach(), given.grad

    for rows in (len(IDS), 3):
        assert_same(*(after(model, lambda f=f, rows=rows: run(f, rows)) for f in (compiled, model)))
        assert dta_compile.last_plan(compiled).stats.compression == 1


def test_a_number_per_token_with_a_gradient_beside_ids():
    """A leaf `[B, S]`, which might be a weight, has the tokens of other inputs: its sizes are no constants then."""
    torch.compiler.reset()
    model = BareLM()

    def scaled(ids, each):
        return model.head(model.mix(model.embedding(ids) * each[..., None]))

    compiled = torch.compile(scaled, backend="dta", options={"codegen": "eager"})

    def run(function, ids):
        each = torch.linspace(0.5, 2, ids.numel(), dtype=torch.float64).view(ids.shape).requires_grad_()
        out = function(ids, each)
        weighted(out).backward()
        return out.detach(), each.grad

    for ids in (IDS, IDS[:3, :5]):
        assert_same(*(after(model, lambda f=f, ids=ids: run(f, ids)) for f in (compiled, scaled)))


def test_equal_embeddings_have_gradients_of_their_own(caplog):
    """Rows that are equal in content alone share nothing, which is said once."""
    torch.compiler.reset()
    model = GivenBare()
    compiled = torch.compile(model, backend="dta")
    row = torch.randn(1, 6, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = []
    for function in (compiled, compiled, model):
        x = row.repeat(3, 1, 1).requires_grad_()
        with caplog.at_level(logging.WARNING, "dta_compile"):
            weighted(function(x)).backward()
        found.append(x.grad)
        model.zero_grad()
    assert_same(found[:2], found[2:] * 2)
    assert not torch.allclose(found[0][0], found[0][1])
    assert caplog.text.count("each row has of its own") == 1
