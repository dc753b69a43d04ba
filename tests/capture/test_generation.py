"""One compiled module that generates and trains: generation runs as captured, training over the tree."""

import copy
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dta_compile
from dta_compile.errors import RefusalError, RuntimeContractError
from tests.support.inside import inside

transformers = pytest.importorskip("transformers")

PADDING, EOS = 0, 1


def build() -> torch.nn.Module:
    """A Qwen3 with use_cache=True, as transformers has it by default."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    sizes = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    config = transformers.Qwen3Config(**sizes, **heads, pad_token_id=PADDING, eos_token_id=EOS)
    return transformers.Qwen3ForCausalLM(config).double()


@pytest.fixture
def model() -> torch.nn.Module:
    torch._dynamo.reset()
    return build()


def prompts() -> tuple[torch.Tensor, torch.Tensor]:
    """Two groups of two equal prompts, the second group padded on the left."""
    ids = torch.randint(2, 48, (2, 9), generator=torch.Generator().manual_seed(1)).repeat_interleave(2, 0)
    ids[2:, :3] = PADDING
    return ids, (ids != PADDING).long()


def generate(model: torch.nn.Module) -> torch.Tensor:
    ids, mask = prompts()
    return model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=7, do_sample=False)


def fork(tokens: torch.Tensor) -> torch.Tensor:
    """Greedy completions of equal prompts are equal: make the last two tokens differ."""
    tokens = tokens.clone()
    tokens[:, -2:] = torch.arange(2, 2 + 2 * len(tokens)).reshape(-1, 2)
    return tokens


def gradients(model: torch.nn.Module, tokens: torch.Tensor) -> list[torch.Tensor]:
    output = model(input_ids=tokens, attention_mask=(tokens != PADDING).long())
    logprobs = output.logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    loss = (logprobs * (tokens[:, :-1] != PADDING) * (tokens[:, 1:] != PADDING)).mean()
    return list(torch.autograd.grad(loss, list(model.parameters())))


def assert_close(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for left, right in zip(actual, expected, strict=True):
        assert (left - right).abs().max() <= 2e-6 * right.abs().max()


@pytest.mark.parametrize("where", ["model", pytest.param("backbone", marks=pytest.mark.slow)])
def test_generates_as_eager_then_trains_over_the_tree(model, where, caplog):
    eager = copy.deepcopy(model)
    compiled = model if where == "model" else model.model
    compiled.compile(backend="dta")
    # As few graphs as Dynamo keeps are not enough for generation alone, and training must not fall back to eager.
    with torch._dynamo.config.patch(recompile_limit=2), caplog.at_level(logging.INFO, "dta_compile"):
        expected = generate(eager)
        assert torch.equal(generate(model), expected)
        assert [record for record in caplog.records if record.name == "dta_compile"] == caplog.records[:1]
        assert "KV cache" in caplog.text
        with pytest.raises(dta_compile.errors.OptionError, match=r"(?s)no plan yet.*reads or fills a KV") as raised:
            dta_compile.last_plan(compiled)
        assert "call it first" not in str(raised.value) and "use_cache" not in str(raised.value)

        tokens = fork(expected)
        assert_close(gradients(model, tokens), gradients(eager, tokens))
        plan = dta_compile.last_plan(compiled)
        assert plan.stats.compression > 1.5
        assert torch.equal(generate(model), expected)
        assert_close(gradients(model, tokens), gradients(eager, tokens))
        assert dta_compile.last_plan(compiled) is not plan
        assert len(caplog.records) == 1


@pytest.mark.slow
@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.inference_mode])
def test_scoring_shares_prefixes_although_the_model_makes_a_cache(model, grad_mode):
    eager, ids = copy.deepcopy(model), fork(prompts()[0])[:2]
    model.compile(backend="dta")
    with grad_mode():
        output, expected = model(input_ids=ids), eager(input_ids=ids)
        assert dta_compile.last_plan(model).stats.compression > 1.5
        more = [
            one(input_ids=ids[:, :1], past_key_values=out.past_key_values).logits
            for one, out in ((model, output), (eager, expected))
        ]
        assert_close([output.logits, more[0]], [expected.logits, more[1]])
        said = dta_compile.explain(eager, input_ids=ids[:, :1], past_key_values=expected.past_key_values)
    assert "rows share nothing" in str(said) and "KV cache" in str(said)


@pytest.mark.sample(1)
@pytest.mark.parametrize("new_tokens", [1, 3])
def test_a_cache_under_gradients_is_refused(model, new_tokens):
    ids, _ = prompts()
    with torch.no_grad():
        cache = model(input_ids=ids[:2], use_cache=True).past_key_values
    model.compile(backend="dta")
    with pytest.raises(RefusalError, match="KV cache") as caught:
        model(input_ids=ids[:2, :new_tokens], past_key_values=cache)
    assert "pass no past_key_values while training" in str(caught.value)


def test_gradients_through_the_returned_cache_are_refused(model):
    eager = copy.deepcopy(model)
    model.compile(backend="dta")
    ids, _ = prompts()
    ids = ids[:2]
    output = model(input_ids=ids)
    keys = output.past_key_values.layers[0].keys
    assert torch.allclose(keys, eager(input_ids=ids).past_key_values.layers[0].keys, atol=1e-6)
    with pytest.raises(RuntimeContractError, match="KV cache"):
        keys.sum().backward()


@pytest.mark.slow
def test_a_cache_that_nobody_reads_is_not_computed(analysed_anew, model):
    eager = copy.deepcopy(model)
    model.compile(backend="dta", options={"verify": "off"})
    ids = fork(prompts()[0])
    output = model(input_ids=ids)
    (executed,) = inside(model).engines
    assert any(value.is_cache for value in executed.program.frontier)
    expected = eager(input_ids=ids).past_key_values
    for mine, theirs in zip(output.past_key_values.layers, expected.layers, strict=True):
        assert type(mine.keys) is not torch.Tensor and mine.keys.shape == theirs.keys.shape
        assert mine.keys.stride() == mine.keys.detach().stride()
        assert_close([mine.keys.detach(), copy.deepcopy(mine.values)], [theirs.keys, theirs.values])
    with torch.no_grad():
        more = eager(input_ids=ids[:, :2], past_key_values=copy.deepcopy(output.past_key_values)).logits
        again = model(input_ids=ids[:, :2], past_key_values=output.past_key_values).logits  # generation, compiled
        wanted = eager(input_ids=ids[:, :2], past_key_values=expected).logits
        assert_close([more, again], [wanted, wanted])
    output.logits.sum().backward()
    eager(input_ids=ids).logits.sum().backward()
    for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert_close([mine.grad], [theirs.grad])


CHANGES = {
    "the mask": lambda model, mask, output: mask.fill_(1),
    "a parameter": lambda model, mask, output: next(model.parameters()).detach().add_(1),
    "another place": lambda model, mask, output: setattr(model.lm_head.weight, "data", model.lm_head.weight + 1),
    "backward": lambda model, mask, output: (output.logits * mask[..., None]).sum().backward(),
}


@pytest.mark.slow
def test_a_cache_cannot_be_read_once_what_it_is_computed_from_may_have_changed(model):
    model.compile(backend="dta", options={"verify": "off"})
    for change in CHANGES.values():
        ids, mask = prompts()
        output = model(input_ids=ids, attention_mask=mask)
        change(model, mask, output)
        with pytest.raises(RuntimeContractError, match="KV cache is computed when it is read"):
            output.past_key_values.layers[0].keys.detach()


def test_a_cache_of_inference_tensors_is_read_as_numbers_and_not_once_these_have_changed(model):
    """Inference tensors count no writes, and `numpy` and `tolist` are no operators."""
    eager = copy.deepcopy(model)
    model.compile(backend="dta", options={"verify": "off"})
    with torch.inference_mode():
        ids = fork(prompts()[0])
        layer, expected = (one(input_ids=ids).past_key_values.layers[0] for one in (model, eager))
        assert_close(
            [torch.from_numpy(layer.keys.cpu().numpy()), torch.tensor(layer.values.tolist())],
            [expected.keys, expected.values],
        )
        late = model(input_ids=ids).past_key_values.layers[0]
        ids.copy_(ids.flip(1))
        with pytest.raises(RuntimeContractError, match="KV cache is computed when it is read"):
            late.keys.numpy()
        for parameter in model.parameters():
            parameter.data = parameter.detach().clone()  # an inference tensor
        layer = model(input_ids=ids).past_key_values.layers[0]
        assert type(layer.keys) is torch.Tensor


def test_scoring_without_a_cache_runs_over_the_tree(model):
    eager = copy.deepcopy(model)
    model.compile(backend="dta")
    ids, _ = prompts()
    with torch.no_grad():
        actual = model(input_ids=fork(ids[:2]), use_cache=False).logits
        assert torch.allclose(actual, eager(input_ids=fork(ids[:2]), use_cache=False).logits, atol=1e-6)
    assert dta_compile.last_plan(model).stats.compression > 1.5


def test_many_models_of_one_class_all_run_over_the_tree():
    """Dynamo counts the graphs of a function whoever compiled it, and runs it eagerly from the ninth on."""
    torch._dynamo.reset()
    ids = torch.randint(0, 20, (3, 5))
    with torch._dynamo.config.patch(recompile_limit=2):
        for width in (4, 8, 12, 16):
            compiled = torch.compile(OneLayer(width), backend="dta", options={"verify": "off"})
            with torch.no_grad():
                compiled(ids)
            assert dta_compile.last_plan(compiled).stats.tokens == ids.numel()


def test_the_recompile_limit_of_other_backends_is_as_the_user_set_it():
    torch._dynamo.reset()
    ids, graphs = torch.randint(0, 20, (3, 5)), []

    def other(module, example_inputs):
        graphs.append(module)
        return module.forward

    with torch._dynamo.config.patch(recompile_limit=3, accumulated_recompile_limit=100), torch.no_grad():
        for width in (4, 8, 12, 16):
            torch.compile(OneLayer(width), backend="dta", options={"verify": "off"})(ids)
        assert (torch._dynamo.config.recompile_limit, torch._dynamo.config.accumulated_recompile_limit) == (3, 100)
        for width in (4, 8, 12, 16, 20):
            torch.compile(OneLayer(width), backend=other)(ids)
    assert len(graphs) == 3


def test_more_graphs_than_dynamo_ever_keeps_of_a_function_run_over_the_tree():
    torch._dynamo.reset()
    ids = torch.randint(0, 20, (3, 5))
    with torch._dynamo.config.patch(accumulated_recompile_limit=2), torch.no_grad():
        for width in (4, 8, 12, 16):
            compiled = torch.compile(OneLayer(width), backend="dta", options={"verify": "off"})
            compiled(ids)
            assert dta_compile.last_plan(compiled).stats.tokens == ids.numel()


class OneLayer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embedding, self.project = nn.Embedding(20, width), nn.Linear(width, 3 * width)

    def forward(self, ids):
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.project(self.embedding(ids)).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
