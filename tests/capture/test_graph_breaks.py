"""What Dynamo would end a graph at runs over the tree, and a model or a call that does not is said to."""

import functools
import logging
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

import dta_compile
from dta_compile.capture.graph_breaks import selections
from dta_compile.errors import RefusalError
from tests.support.tiny import SMALL_CHUNKS, BareLM, Block, TinyLM, after, assert_same, shared_ids, weighted

logger = logging.getLogger("a_model")
OPTIONS = {**SMALL_CHUNKS, "codegen": "eager"}


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()


def check(model, **settings):
    compiled = torch.compile(model, backend="dta", options=OPTIONS, **settings)

    def step(run):
        logits = run(shared_ids())
        weighted(logits).backward()
        return (logits,)

    assert_same(after(model, lambda: step(compiled)), after(model, lambda: step(model)))
    assert dta_compile.last_plan(compiled)


class Quantised(TinyLM):
    """Asks of a weight, as PEFT does, whether it is quantised."""

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, None)
            x = x * 0.5 if type(block.up.weight).__module__.startswith("torchao.") else x * 0.9
        return self.head(self.norm(x))


def test_the_module_of_a_weights_class_is_known():
    check(Quantised())


class Comparing(TinyLM):
    """Attention is causal if `is_causal` says so of its operands."""

    def __init__(self, is_causal):
        super().__init__()
        for block in self.blocks:
            block.__class__ = type("ComparingBlock", (Block,), {"forward": self._forward(is_causal)})

    @staticmethod
    def _forward(is_causal):
        def forward(self, x, mask):
            query = self.query(self.norm(x)).unflatten(-1, (4, -1)).transpose(1, 2)
            key, value = self.key_value(self.norm(x)).unflatten(-1, (2, 4, -1)).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(query[..., :2], key, value, is_causal=is_causal(query, key))
            return x + self.out(y.transpose(1, 2).flatten(2).repeat(1, 1, 2))

        return forward


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(
    "is_causal", [lambda query, key: query.shape[2] == key.shape[2], lambda query, key: query.shape[2] > 1]
)
@pytest.mark.sample(2)
def test_attention_is_causal_by_a_comparison_of_sizes(is_causal, dynamic):
    check(Comparing(is_causal), dynamic=dynamic)


def test_embeddings_are_asked_for_gradients_by_a_hook():
    model = TinyLM()
    for module in (model.embedding, model.position, model.blocks[0]):
        module.requires_grad_(False)
    model.embedding.register_forward_hook(lambda module, inputs, output: output.requires_grad_())
    check(model)


def test_warnings_and_log_lines_end_no_graph(monkeypatch):
    class Tells(BareLM):
        def mix(self, x, pairs=None):  # behind the embeddings: a graph would end with tokens in it
            warnings.warn("of the model", FutureWarning, stacklevel=2)
            if logger.isEnabledFor(logging.INFO):
                logger.info("%s tokens", x.shape[1])
            logger.debug("and more")
            logger.warning_once("a method that a package adds")
            return super().mix(x, pairs)

    once = functools.lru_cache(logging.Logger.warning)
    monkeypatch.setattr(logging.Logger, "warning_once", once, raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        check(Tells())
    assert not torch._dynamo.config.ignore_logging_functions


def test_a_break_in_a_hook_is_named_though_a_function_fails_later():
    """Noise at embeddings (NEFTune). A comprehension of transformers that is traced by itself fails behind it."""
    transformers = pytest.importorskip("transformers")
    neftune = pytest.importorskip("transformers.integrations.neftune")
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = transformers.Qwen3Config(**sizes, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
    model = transformers.Qwen3ForCausalLM(config).train()
    model.model.embed_tokens.neftune_noise_alpha = 5.0
    model.model.embed_tokens.register_forward_hook(neftune.neftune_post_forward_hook)
    with pytest.raises(RefusalError, match="a graph break inside the model") as refused:
        torch.compile(model, backend="dta", options=OPTIONS)(input_ids=shared_ids(), use_cache=False)
    assert "neftune.py" in refused.value.where


def test_a_model_that_is_trained_without_a_tree_is_warned_of(caplog):
    model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9))
    compiled = torch.compile(model, backend="dta", options=OPTIONS)
    with caplog.at_level(logging.WARNING, "dta_compile"):
        for _ in range(2):
            compiled(shared_ids() % 9).sum().backward()
    assert [record.getMessage().count("rows share nothing") for record in caplog.records] == [1]


def test_calls_that_dynamo_hands_over_no_graph_of_are_said_to_share_nothing(caplog):
    model, ids = BareLM(), shared_ids()
    module = torch.compile(model, backend="dta", options=OPTIONS)
    function = torch.compile(lambda ids: model(ids), backend="dta", options=OPTIONS)

    def attends_after_a_break(ids):
        x = model.embedding(ids)
        for _ in range(1):
            torch._dynamo.graph_break()
            heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
            x = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return x

    def yields(ids):
        yield model(ids)

    given_up = torch.compile(attends_after_a_break, backend="dta", options=OPTIONS)
    generator = torch.compile(yields, backend="dta", options=OPTIONS)
    transformed = torch.compile(lambda table: model.mix(table[ids]).sum(), backend="dta", options=OPTIONS)
    calls = {
        "another backend's graph": lambda: torch.compile(lambda: module(ids), backend="eager")(),
        "another backend's graph, and runs": lambda: torch.compile(lambda: function(ids), backend="eager")(),
        "gave up on attends_after_a_break": lambda: given_up(ids),
        "gave up on yields": lambda: next(generator(ids)),
        "have to be inside of the compiled": lambda: torch.func.grad(transformed)(model.embedding.weight.detach()),
    }
    for said, call in calls.items():
        caplog.clear()
        with caplog.at_level("WARNING", logger="dta_compile"):
            call()
        assert said in caplog.text and "test_graph_breaks.py" in caplog.text
        assert caplog.text.count("dta: ") == 1


def test_a_backward_inside_is_not_traced():
    model = BareLM()

    def step(ids):
        weighted(model(ids)).backward()

    counters.clear()
    compiled = torch.compile(step, backend="dta", options=OPTIONS)
    assert_same(after(model, lambda: compiled(shared_ids())), after(model, lambda: step(shared_ids())))
    assert counters["stats"]["unique_graphs"] <= 3  # the function in two parts, and weights


def test_numpy_ids_are_traced_with_symbolic_sizes():
    model = BareLM()
    counters.clear()
    compiled = torch.compile(lambda ids: model(torch.from_numpy(ids)), backend="dta", options=OPTIONS)
    weighted(compiled(shared_ids().numpy())).backward()
    weighted(compiled(shared_ids(7, 8).numpy())).backward()
    assert dta_compile.last_plan(compiled) and counters["stats"]["unique_graphs"] == 1


class Asking(BareLM):
    """What it computes depends on the ids of a batch, and on the number of some."""

    def forward(self, ids, mask=None):
        x = self.embedding(ids)
        if (ids == 3).any() and not (ids[:, 1:] == 4).any():
            x = self.norm(x)
        if (ids == 5).sum() > 2:
            x = x * 2
        return self.head(self.mix(x))


def test_conditions_about_ids_are_answered_and_guarded():
    counters.clear()
    model = Asking()
    compiled = torch.compile(model, backend="dta", options=OPTIONS)
    common = [8, 9, 6, 7]
    calls = [[1, 2], [3, 2], [3, 4], [2, 1], [5, 3], [4, 3]]
    for some in (*calls, *calls):
        ids = torch.tensor([[*common, *some], [*common, *some[::-1]], [*common, *some]])
        step = lambda run: (run(ids).sin().sum().backward(),)  # noqa: B023, E731
        assert_same(after(model, lambda: step(compiled)), after(model, lambda: step(model)))  # noqa: B023
        assert dta_compile.last_plan(compiled).stats.compression > 1.5
    assert not counters["graph_break"] and counters["stats"]["unique_graphs"] == 4


def largest(scale, found, good, rewards):
    if good.any():
        found[good] = found[good] / rewards[good].max()
    return found


def averaged(scale, found, good, rewards):
    count = good.sum()
    if count > 0:
        found[good] = found[good] * (scale.sum() / count)
    return found


def behind_the_second(scale, found, good, rewards):
    rows = good.nonzero()[:, 0]
    if rows[2:].numel() > 0:
        found[rows] = found[rows] * 2
    return found


@pytest.mark.parametrize("branch", [largest, averaged, behind_the_second])
def test_a_branch_that_is_skipped_leaves_no_error_and_no_gradient(branch):
    model, ids = BareLM(), shared_ids()

    def step(ids, rewards):
        found = model(ids).logsumexp(-1).sum(1).clone()
        return branch(model.norm.weight, found, rewards > 0, rewards)

    compiled = torch.compile(step, backend="dta", options={**OPTIONS, "verify": "off"})
    rewards = torch.linspace(1, 2, len(ids), dtype=torch.float64)
    for some in (rewards, torch.cat([rewards[:2], -rewards[2:]]), -rewards):
        run = lambda step: (weighted(step(ids, some)).backward(),)  # noqa: B023, E731
        assert_same(after(model, lambda: run(compiled)), after(model, lambda: run(step)))  # noqa: B023
    assert dta_compile.last_plan(compiled)


def test_the_gradient_of_a_returned_value_is_its_own():
    """As in adversarial training; the graph ends there instead of returning a value without a gradient."""
    model = BareLM()

    def attacked(ids):
        x = model.embedding(ids).detach().requires_grad_()
        return x, model.head(model.mix(x))

    compiled, grads = torch.compile(attacked, backend="dta", options={**OPTIONS, "fallback": "dense"}), []
    for run in (compiled, attacked):
        x, logits = run(shared_ids())
        weighted(logits).backward()
        grads.append(x.grad)
    assert_same(*grads)


def test_operators_of_torch_stay_the_objects_that_they_are():
    """Tables are by operator: who asks whether one without an overload may write replaces none of its overloads."""
    graph, index = torch.fx.Graph(), torch.ops.aten.index.Tensor
    x = graph.placeholder("x")
    assert selections.written_by(graph.call_function(torch.ops.aten.index, (x, [x]))) == [None]
    assert torch.ops.aten.index.Tensor is index
