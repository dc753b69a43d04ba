"""From a Python call to a graph with symbolic sizes: however it is called, right results and no second compilation."""

import copy
import functools
import gc
import re
import weakref

import pytest
import torch
from torch import nn
from torch._dynamo.exc import RestartAnalysis
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.fx.experimental import _config as symbolic_shape_config
from torch.utils.checkpoint import checkpoint

import dta_compile
from dta_compile.capture.dynamo import sizes
from dta_compile.errors import OptionError, RefusalError, VerificationError
from tests.support.inside import inside
from tests.support.tiny import (
    SMALL_CHUNKS,
    VOCABULARY,
    WIDTH,
    BareLM,
    TinyLM,
    after,
    assert_same,
    log_probs,
    shared_ids,
    weighted,
    weights_like,
)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()


@pytest.fixture
def model():
    return BareLM()


def dta(function, **options):
    return torch.compile(function, backend="dta", options={**SMALL_CHUNKS, **options})


def check(model, compiled, function, *args, tree=True, **kwargs):
    """Same outputs and gradients as the eager function, over a tree that shares."""

    def step(forward):
        out = forward(*args, **kwargs)
        weighted(out).backward()
        return out.detach()

    assert_same(after(model, lambda: step(compiled)), after(model, lambda: step(function)))
    if tree:
        plan = dta_compile.last_plan(compiled)
        assert plan.stats.compression > 1
        return plan
    return None


def engines(compiled):
    return len(inside(compiled).engines)


def test_one_compilation_serves_every_shape_and_tree(model):
    compiled = dta(model)
    for batch, tokens, seed in [(5, 9, 0), (3, 12, 1), (8, 8, 2), (2, 2, 3), (9, 5, 4), (20, 33, 5), (5, 9, 6)]:
        ids = shared_ids(batch, tokens, seed)
        plan = check(model, compiled, model, ids)
        assert plan.stats.tokens == ids.numel()
    assert engines(compiled) == 1 and counters["stats"]["unique_graphs"] == 1


def test_equal_sizes_at_the_first_call_are_told_apart(model):
    def function(ids, advantages):
        return log_probs(model(ids), ids) * advantages[:, None]

    compiled = dta(function)
    for batch, tokens in [(6, 6), (3, 8), (8, 3), (6, 6)]:
        check(model, compiled, function, shared_ids(batch, tokens), torch.rand(batch, dtype=torch.float64))
    assert engines(compiled) == 1


@pytest.mark.parametrize("size", [VOCABULARY, WIDTH, 2, 4])
def test_sizes_that_equal_a_width_of_the_model_are_no_constants(model, size):
    """Batch or token sizes like the vocabulary, the hidden size or the number of heads."""
    compiled = dta(model)
    check(model, compiled, model, shared_ids(size, size + 1))
    check(model, compiled, model, shared_ids(3, size))
    check(model, compiled, model, shared_ids(7, 11))
    assert engines(compiled) == 1


def test_equal_sizes_when_the_user_asks_for_symbolic_ones(model):
    def function(ids, mask):
        return model(ids, mask).log_softmax(-1)

    compiled = torch.compile(function, backend="dta", dynamic=True, options=SMALL_CHUNKS)
    for batch, tokens in [(5, 5), (3, 7)]:
        ids = shared_ids(batch, tokens)
        check(model, compiled, function, ids, torch.ones_like(ids, dtype=torch.bool))


@pytest.mark.parametrize("held_by", ["attribute", "closure", "dictionary"])
@pytest.mark.sample(1)
def test_sizes_of_tensors_that_submodules_and_hooks_hold_are_no_constants(held_by):
    """A mask `[B, S]` of the tokens to steer, which the user sets before each call."""
    model = TinyLM()
    block, held = model.blocks[0], {}

    def steer(module, inputs, output):
        mask = {
            "attribute": lambda: block.mask,
            "closure": lambda: held["mask"],
            "dictionary": lambda: block.held["mask"],
        }
        return output + 0.1 * mask[held_by]()[..., None]

    block.held = held
    block.register_forward_hook(steer)
    compiled = dta(model)
    for batch, tokens in ((4, 9), (3, 7), (6, 12)):
        block.mask = held["mask"] = (torch.arange(tokens) > 3).double().expand(batch, -1).clone()
        check(model, compiled, model, shared_ids(batch, tokens))
    assert engines(compiled) == 1


def test_a_tensor_of_more_dimensions_that_a_submodule_holds():
    """As the state of a convolution `[B, C, k]` that a recurrent model holds while it generates."""
    model = TinyLM()
    block = model.blocks[0]
    block.state = torch.arange(24.0).double().view(2, 3, 4) / 24
    block.register_forward_hook(lambda module, inputs, output: output * (1 + module.state.mean()))
    compiled = dta(model)
    for batch, tokens in ((4, 9), (2, 7)):
        check(model, compiled, model, shared_ids(batch, tokens))


@pytest.mark.parametrize("order", [[(1, 7), (4, 7)], [(4, 7), (1, 9), (1, 5)], [(3, 1), (3, 6)], [(1, 1), (2, 5)]])
@pytest.mark.sample(2)
def test_one_sequence_or_one_token(model, order):
    compiled = dta(model)
    for batch, tokens in order:
        check(model, compiled, model, shared_ids(batch, tokens), tree=batch > 1 and tokens > 1)
    assert engines(compiled) <= 2


@pytest.mark.parametrize("dynamic", [True, False])
def test_dynamic_given_by_the_user(model, dynamic):
    compiled = torch.compile(model, backend="dta", dynamic=dynamic, options=SMALL_CHUNKS)
    for batch, tokens in [(5, 9), (4, 6)]:
        check(model, compiled, model, shared_ids(batch, tokens))


def test_dimensions_marked_by_the_user(model):
    compiled, ids = dta(model), shared_ids(5, 9)
    torch._dynamo.mark_dynamic(ids, 0)
    torch._dynamo.mark_dynamic(ids, 1)
    check(model, compiled, model, ids)
    check(model, compiled, model, shared_ids(3, 4))
    assert engines(compiled) == 1


def test_arguments_in_any_form(model):
    def function(batch, *rest, scale=1.0, masks=None, names="logits"):
        logits = model(batch["ids"], masks[0]) * scale
        return {names: logits, "parts": [log_probs(logits, batch["ids"]) * rest[0]]}

    def picked(forward, ids, scale):
        advantages = torch.linspace(-1, 1, ids.numel() - len(ids), dtype=torch.float64).view(len(ids), -1)
        masks = [torch.ones_like(ids, dtype=torch.bool)]
        out = forward({"ids": ids, "unused": None}, advantages, scale=scale, masks=masks, names="out")
        return torch.cat([out["out"].flatten(), out["parts"][0].flatten()])

    compiled = dta(function)
    for batch, tokens, scale in [(4, 7, 0.5), (3, 9, 0.5), (3, 9, 0.7), (2, 8, 0.9)]:
        ids = shared_ids(batch, tokens)
        check(model, lambda i, s: picked(compiled, i, s), lambda i, s: picked(function, i, s), ids, scale, tree=False)
        assert dta_compile.last_plan(compiled).stats.compression > 1
    assert engines(compiled) <= 2  # a float that changes becomes an input once


class Attributes(dict):
    """A batch that raises KeyError for any attribute that is no key of it."""

    __getattr__ = dict.__getitem__


def test_a_batch_whose_keys_are_attributes(model):
    def function(batch):
        return model(batch.ids)

    check(model, dta(function), function, Attributes(ids=shared_ids()))


class Wrapped(nn.Module):
    """A model around a backbone, as transformers builds them."""

    def __init__(self):
        super().__init__()
        self.backbone = Backbone()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False).double()

    def forward(self, ids):
        return self.head(self.backbone(ids))


class Backbone(BareLM):
    def __init__(self):
        super().__init__()
        del self.head

    def forward(self, ids):
        return self.hidden(ids)


@pytest.mark.parametrize("part", ["whole", "backbone"])
def test_compiled_in_place(part):
    model, eager = Wrapped(), Wrapped()
    eager.load_state_dict(model.state_dict())
    target = model if part == "whole" else model.backbone
    target.compile(backend="dta", options=SMALL_CHUNKS)
    for ids in (shared_ids(5, 9), shared_ids(3, 7)):
        actual = after(model, lambda ids=ids: weighted(model(ids)).backward())
        assert_same(actual, after(eager, lambda ids=ids: weighted(eager(ids)).backward()))
        assert dta_compile.last_plan(target).stats.tokens == ids.numel()
    frontier = inside(target).engines[0].program.frontier
    assert [value.features for value in frontier] == [(VOCABULARY if part == "whole" else WIDTH,)]


def test_a_compiled_method(model):
    compiled = dta(model.hidden)
    check(model, compiled, model.hidden, shared_ids())


def test_graph_breaks_before_and_after_the_model(model):
    def function(ids):
        ids = ids + 1
        torch._dynamo.graph_break()
        logits = model(ids % VOCABULARY)
        torch._dynamo.graph_break()
        return logits.log_softmax(-1) * 2

    compiled = dta(function)
    for ids in (shared_ids(4, 6), shared_ids(5, 8)):
        check(model, compiled, function, ids)
    assert engines(compiled) == 1


def test_last_plan_needs_a_call_and_a_compiled_callable(model):
    with pytest.raises(OptionError, match="no plan yet"):
        dta_compile.last_plan(dta(model))
    with pytest.raises(OptionError, match="not a compiled function or module"):
        dta_compile.last_plan(model)


def test_every_callable_has_its_own_last_plan(model):
    """Dynamo compiles once for a model compiled twice, and for two models of one class."""
    again, other = dta(model), dta(BareLM(seed=4))
    callables = [dta(model), again, other]
    for batch, compiled in enumerate(callables, 3):
        compiled(shared_ids(batch, 6))
    assert [dta_compile.last_plan(compiled).stats.sequences for compiled in callables] == [3, 4, 5]
    assert counters["stats"]["unique_graphs"] <= 2


@pytest.mark.parametrize("compile_first", [True, False])
def test_explain_reports_the_call_without_running_it(model, compile_first):
    def scored(ids, labels):
        return model(ids).log_softmax(-1).gather(-1, labels[..., None])[..., 0]

    ids = shared_ids()
    function = dta(scored) if compile_first else scored
    report = dta_compile.explain(function, ids, labels=ids.roll(-1, 1))
    assert report.refusal is None and report.plan.stats.tree_tokens == dta_compile.plan(ids).stats.tree_tokens
    assert (report.plan.schedule.chunk_size == SMALL_CHUNKS["chunk_size"]) is compile_first
    assert set(report.regions) == {"prologue", "trunk", "head", "epilogue"} and all(report.regions.values())
    assert len(report.attention) == 1 and "1 layers: causal; 2 KV heads of 8, float64" in str(report)
    assert any("ids" in line for line in report.prefix_key) and not any("labels" in line for line in report.prefix_key)
    assert len(report.frontier) == 1 and "360 bytes dense, differentiable" in str(report)
    check(model, dta(scored), scored, ids, labels=ids.roll(-1, 1))


def test_explain_of_what_has_no_attention():
    report = str(dta_compile.explain(lambda x: x * 2, torch.ones(3)))
    assert "no graph with scaled_dot_product_attention" in report and "rows share nothing" in report


DIFFERS = r"(output 0|the gradient of) .*differs from the captured"


@pytest.mark.parametrize(
    "verify", ["auto", *(pytest.param(one, marks=pytest.mark.slow) for one in ("off", "first", "always"))]
)
def test_verify_finds_a_broken_runtime(model, monkeypatch, verify):
    """Gradients and outputs that are wrong are found by each call until one agrees, and by option in all calls."""
    from dta_compile.runtime.path.stack import PathStack

    def wrong_values(self, layer, key, value, write=PathStack.write):
        write(self, layer, key, value * 1.01)

    def wrong_gradients(self, *arguments, backward=PathStack.mix_backward):
        query, key, value = backward(self, *arguments)
        return query, key * 1.01, value

    def is_found(method, wrong):
        with monkeypatch.context() as patch:
            patch.setattr(PathStack, method, wrong)
            try:
                weighted(compiled(ids)).backward()
            except VerificationError as error:
                assert re.search(DIFFERS, str(error))
                return True
        return False

    ids = shared_ids()
    for broken in (("write", wrong_values), ("mix_backward", wrong_gradients)):
        torch._dynamo.reset()
        compiled = dta(model, verify=verify)
        before = [is_found(*broken), is_found(*broken)]
        weighted(compiled(ids)).backward()
        assert (before, is_found(*broken)) == ([verify != "off"] * 2, verify == "always")
    check(model, compiled, model, ids)


def test_verify_knows_gradients_that_are_zero_but_for_rounding(model):
    """A bias of all keys shifts every score of a query alike, which softmax does not see."""
    bias = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))

    def function(ids):
        x = model.hidden(ids)
        query, key = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in (x, x + bias))
        return nn.functional.scaled_dot_product_attention(query, key, query, is_causal=True)

    weighted(dta(function, verify="always")(shared_ids())).backward()
    assert bias.grad.abs().max() < 1e-12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunksize": 4}, "unknown option 'chunksize'(?s:.*)did you mean 'chunk_size'"),
        ({"chunk_size": 0}, "bad value for option 'chunk_size'"),
        ({"strategy": "dsf"}, "did you mean 'dfs'"),
    ],
)
def test_option_errors_come_unwrapped_at_the_first_call(model, options, message):
    with pytest.raises(OptionError, match=message) as caught:
        torch.compile(model, backend="dta", options=options)(shared_ids())
    assert type(caught.value) is OptionError


def test_a_mode_is_an_option_error(model):
    with pytest.raises(OptionError, match="mode has no meaning"):
        torch.compile(model, backend="dta", mode="max-autotune")(shared_ids())


class Smoothing(BareLM):
    """A model whose middle is an operator that the package has never heard of."""

    def __init__(self, operator):
        super().__init__()
        self.operator = operator

    def forward(self, ids):
        return self.mix(self.operator(self.mix(self.embedding(ids))))


def test_a_custom_operator_runs_once_it_has_a_rule():
    from dta_compile.passes.axes.tokenwise_operators import TOKEN_RULES
    from dta_compile.token_rules import pointwise

    @torch.library.custom_op("dta_test_capture::soften", mutates_args=())
    def soften(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)

    soften.register_fake(lambda x: torch.empty_like(x))
    soften.register_autograd(
        lambda ctx, grad: grad * (1 - ctx.saved_tensors[0] ** 2),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
    )
    overload = torch.ops.dta_test_capture.soften.default
    model, ids = Smoothing(soften), shared_ids()
    with pytest.raises(RefusalError, match=r"(?s)soften.default has no token-wise rule.*register_token_rule"):
        dta(model)(ids)
    with pytest.raises(OptionError, match="operator overload"):
        dta_compile.register_token_rule(soften, pointwise)
    dta_compile.register_token_rule(overload, pointwise)
    try:
        torch._dynamo.reset()
        check(model, dta(model), model, ids)
    finally:
        del TOKEN_RULES[overload]


def test_fallback_dense_gives_eagers_gradients_and_says_so(caplog):
    model, ids = Smoothing(lambda x: x.cumprod(1)), shared_ids()
    compiled = dta(model, fallback="dense")
    with caplog.at_level("WARNING", logger="dta_compile"):
        check(model, compiled, model, ids, tree=False)
    assert "running densely" in caplog.text and engines(compiled) == 0


def test_a_checkpointed_block():
    model = TinyLM(layers=1)

    def function(ids):
        x = model.embedding(ids) + model.position.weight[: ids.shape[1]]
        x = checkpoint(model.blocks[0], x, None, use_reentrant=False)
        return model.head(checkpoint(model.norm, x, use_reentrant=False))

    compiled = dta(function)
    check(model, compiled, function, shared_ids())
    check(model, compiled, function, shared_ids(3, 7))
    assert engines(compiled) == 1


@pytest.mark.parametrize("way", ["of transformers", "composable", "by wrappers"])
@pytest.mark.sample(1)
def test_gradient_checkpointing(way):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=32, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).double().train()
    layer = model.transformer.h[0]
    if way == "of transformers":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    elif way == "composable":
        torch.distributed._composable.checkpoint(layer)
    else:
        apply_activation_checkpointing(model, check_fn=lambda module: module is layer)
    function = lambda ids: model(input_ids=ids, use_cache=False).logits  # noqa: E731
    compiled = dta(function)
    check(model, compiled, function, shared_ids())
    notes = dta_compile.last_plan(compiled).estimates.notes
    assert notes == ["gradient checkpointing has no effect here: memory_budget decides what is computed again"]
    assert len(layer._forward_hooks) == len(layer._forward_pre_hooks) == (way == "composable")


@pytest.mark.slow
def test_gradient_checkpointing_that_comes_and_goes_compiles_nothing_anew():
    """As trainers have it: off to generate and score, on to train, with new hooks at the embedding each time."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    config = transformers.Qwen3Config(**sizes, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config).double().train()
    eager = copy.deepcopy(model)
    model.compile(backend="dta", options={"verify": "off"})
    for on in (True, False, True):
        for one in (model, eager):
            one._set_gradient_checkpointing(on, functools.partial(checkpoint, use_reentrant=False))
            if on:
                one.enable_input_require_grads()
            one.zero_grad()
            one(input_ids=shared_ids()).logits.logsumexp(-1).sum().backward()
            assert len(one.model.embed_tokens._forward_hooks) == on
            assert all(layer.gradient_checkpointing == on for layer in one.model.layers)
            if on:
                one.disable_input_require_grads()
        for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-5)  # positions rotate in float32
        notes = dta_compile.last_plan(model).estimates.notes
        assert notes == ["gradient checkpointing has no effect here: memory_budget decides what is computed again"] * on
    assert engines(model) == 1


def test_flags_and_hooks_of_the_users_own_are_not_taken_for_gradient_checkpointing():
    class Flagged(TinyLM):
        gradient_checkpointing = 0

        def forward(self, ids):
            return super().forward(ids) * (1 + self.gradient_checkpointing)

    def make_inputs_require_grad_and_scale(module, args, output):
        return output * 2

    model = Flagged(layers=1)
    compiled = dta(model)
    model.gradient_checkpointing = 2
    check(model, compiled, model, shared_ids())
    assert model.gradient_checkpointing == 2
    model.embedding.register_forward_hook(make_inputs_require_grad_and_scale)
    check(model, compiled, model, shared_ids())


@pytest.mark.parametrize("duck_shapes", [True, False])
def test_nothing_leaks_into_other_compilations(model, duck_shapes):
    """Telling B = S apart needs a setting that all of torch shares."""
    with symbolic_shape_config.patch(use_duck_shape=duck_shapes):
        dta(model)(shared_ids(6, 6))
        assert symbolic_shape_config.use_duck_shape is duck_shapes


def test_a_trace_that_fails_leaves_nothing_behind():
    with pytest.raises(RestartAnalysis):
        sizes.trace_again_without_duck_shapes(already=False)
    assert not symbolic_shape_config.use_duck_shape
    torch.compile(lambda x: x.sin(), backend="eager")(torch.ones(2))
    assert symbolic_shape_config.use_duck_shape


def test_a_compiled_model_can_be_copied():
    model = BareLM()
    compiled = torch.compile(model, backend="dta")
    compiled(shared_ids()).sum().backward()
    twin = copy.deepcopy(compiled)
    torch.testing.assert_close(twin(shared_ids()), model(shared_ids()))
    assert dta_compile.last_plan(twin) is not dta_compile.last_plan(compiled)


@pytest.mark.parametrize("lengths", [[0, 1, 7], [9, 7, 0]])
def test_a_batch_of_one_with_a_padding_mask(lengths):
    """Traced without a batch axis: the mask is still padding, never positions."""
    torch.compiler.reset()
    model = BareLM()
    compiled = torch.compile(model, backend="dta", options=SMALL_CHUNKS)
    for length in lengths:
        mask = torch.arange(9)[None] < length

        def step(forward, mask=mask):
            logits = forward(shared_ids(1), mask)
            ((logits * mask[..., None]).sin() * weights_like(logits)).sum().backward()
            return logits[mask]

        assert_same(after(model, lambda: step(compiled)), after(model, lambda: step(model)))


@pytest.mark.slow
def test_engines_of_models_that_are_gone_go_but_for_the_latest():
    engines_alive, times = weakref.WeakSet(), []
    for width in (16, 16, 20, 24, 28, 28):
        model = BareLM(width=width)
        compiled = dta(model, codegen="eager")
        weighted(compiled(shared_ids())).backward()
        engines_alive.update(inside(compiled).engines)
        times.append(len(engines_alive))
        del model, compiled
        gc.collect()
    assert times == [1, 1, 2, 3, 3, 2]
