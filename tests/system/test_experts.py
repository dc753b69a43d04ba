"""Mixtures of experts of transformers over the tree, against transformers' loop over experts one sequence at a time."""

import pytest
import torch
import torch.nn.functional as F
import transformers

import dta_compile
from dta_compile.errors import RefusalError
from dta_compile.ops.experts.operators import EXPERT_PRODUCTS, EXPERT_PRODUCTS_
from tests.support.chunk_graphs import nodes_of
from tests.support.families import TOY, V
from tests.support.helpers import (
    FLOAT32_ISLANDS,
    assert_equal,
    assert_within_rounding,
    logits_at_positions,
    make_batch,
    measure,
    random_loss,
    reference,
    rollouts,
)
from tests.support.inside import inside
from tests.support.mixtures import EXPERTS as FEW
from tests.support.mixtures import HIDDEN, Mixture, Once, assert_exact
from tests.support.tiny import WIDTH

EXPERTS = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
ROUTED = {**TOY, **EXPERTS, "num_key_value_heads": 2, "num_hidden_layers": 2}
GROUPED = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
slow = pytest.mark.slow
# name: configuration class, its arguments
MIXTURES = {
    "qwen3_moe": (transformers.Qwen3MoeConfig, {**ROUTED, "head_dim": 16}),
    "qwen2_moe": (transformers.Qwen2MoeConfig, {**ROUTED, "shared_expert_intermediate_size": 24}),
    "mixtral": (transformers.MixtralConfig, {**ROUTED, "num_local_experts": 4}),
    "gpt_oss": (transformers.GptOssConfig, {**ROUTED, "num_local_experts": 4, "head_dim": 16, "sliding_window": 5}),
    "glm4_moe": (transformers.Glm4MoeConfig, {**ROUTED, **GROUPED, "head_dim": 16, "n_shared_experts": 1}),
    "deepseek_v3": (
        transformers.DeepseekV3Config,
        {**ROUTED, **GROUPED, **LATENT, "num_key_value_heads": 4, "n_shared_experts": 1},
    ),
}


def build(name="qwen3_moe", experts=None, dtype=torch.float64, **changes):
    config, arguments = MIXTURES[name]
    config = config(**{**arguments, **changes})
    torch.manual_seed(1)
    attention = "eager" if name == "gpt_oss" and experts == "eager" else "dta" if name == "gpt_oss" else "sdpa"
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=attention, experts_implementation=experts
    )
    return model.to(dtype).train()


def compiled(model, **options):
    return torch.compile(model, backend="dta", options={"chunk_size": 4, **options})


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


@pytest.fixture
def batch():
    return make_batch(rollouts(V))


@pytest.fixture
def loss(batch):
    return random_loss(batch, V)


@pytest.mark.parametrize(
    "name",
    [
        "qwen3_moe",
        *(pytest.param(name, marks=slow) for name in MIXTURES if name != "qwen3_moe"),
    ],
)
def test_models(name, batch, loss):
    expected = reference(build(name, "eager"), batch, loss)
    model = build(name)
    function = compiled(model)
    assert_equal(measure(function, model, batch, loss), expected, FLOAT32_ISLANDS)
    # Gradients are added to those experts that were hit: no operator has a result of the size of all experts.
    operators = [node.target for node in nodes_of(inside(function).newest.program, "backward")]
    assert EXPERT_PRODUCTS_ in operators and EXPERT_PRODUCTS not in operators


class OfLongcat(Mixture):
    """Experts that declare nothing; some of them compute nothing and return their tokens."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        module = pytest.importorskip("transformers.models.longcat_flash.modeling_longcat_flash")
        sizes = {"expert_ffn_hidden_size": HIDDEN, "n_routed_experts": FEW - 1, "zero_expert_num": 1}
        self.inner = self.initialised(module.LongcatFlashExperts(config(hidden_act="silu", **sizes)))

    def initialised(self, inner):
        for parameter in inner.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        return inner

    def mix(self, x, weights, chosen):
        return self.inner(x, chosen, weights)


class OfStep(OfLongcat):
    """A gate of their own, and slots of no expert."""

    def __init__(self, **arguments):
        Mixture.__init__(self, **arguments)
        module = pytest.importorskip("transformers.models.step3p7.modeling_step3p7")
        sizes = {"moe_intermediate_size": HIDDEN, "num_local_experts": FEW - 1}
        self.inner = self.initialised(module.Step3p7Experts(config(hidden_act="silu", **sizes), swiglu_limit=0.1))


def config(**values):
    return transformers.PreTrainedConfig(hidden_size=WIDTH, **values)


@pytest.mark.parametrize("mixture", [OfLongcat, pytest.param(OfStep, marks=slow)])
def test_experts_that_declare_nothing(mixture):
    assert_exact(Once(mixture))


@pytest.mark.slow
@pytest.mark.parametrize("experts", ["eager", pytest.param("batched_mm", marks=slow), pytest.param("dta", marks=slow)])
def test_every_implementation_becomes_the_same_program(experts, batch, loss):
    expected = reference(build(experts="eager", num_hidden_layers=1), batch, loss)
    model = build(experts=experts, num_hidden_layers=1)
    assert_equal(measure(compiled(model), model, batch, loss), expected, FLOAT32_ISLANDS)


@slow
def test_without_the_backend_the_implementation_computes_the_same(batch, loss):
    expected = reference(build(experts="eager"), batch, loss)
    assert_equal(reference(build(experts="dta"), batch, loss), expected, FLOAT32_ISLANDS)
    other = torch.compile(build(experts="grouped_mm", dtype=torch.float32), backend="eager", fullgraph=True)
    assert other(batch.ids[:2]).logits.dtype is torch.float32


def test_other_backends_trace_what_they_would_without_us(batch):
    graphs = []

    def backend(module, inputs):
        graphs.append(module)
        return module.forward

    torch.compile(build(dtype=torch.float32), backend=backend)(batch.ids[:2])
    operators = {str(node.target) for graph in graphs for node in graph.graph.nodes}
    assert not any("dta" in name or "expert_linear" in name for name in operators)


@pytest.mark.slow
@pytest.mark.parametrize(
    "biased",
    [1e3, pytest.param(-1e3, marks=pytest.mark.slow)],
    ids=["all tokens to two experts", "two experts get none"],
)
def test_routes_that_leave_experts_empty(biased, batch, loss):
    def routed(model):
        gate = model.model.layers[0].mlp.gate
        with torch.no_grad():
            gate.weight.zero_()
            gate.weight[:2] = biased * model.model.embed_tokens.weight.mean(0)
            gate.weight += 1e-3 * torch.randn(gate.weight.shape, generator=torch.Generator().manual_seed(0))
        return model

    expected = reference(routed(build(experts="eager", num_hidden_layers=1)), batch, loss)
    model = routed(build(num_hidden_layers=1))
    assert_equal(measure(compiled(model), model, batch, loss), expected, FLOAT32_ISLANDS)


@slow
def test_padding_packing_and_routes_need_one_graph():
    model = build(num_hidden_layers=1)
    function = compiled(model)
    for seed, padding in enumerate(("right", "left", "left", "right")):
        batch = make_batch(rollouts(V, seed=seed, length=12 + 3 * seed), padding)
        loss = random_loss(batch, V)
        expected = reference(build(experts="eager", num_hidden_layers=1), batch, loss)
        assert_equal(measure(function, model, batch, loss, logits_at_positions), expected, FLOAT32_ISLANDS)
    assert inside(function).only


@pytest.mark.slow
def test_packed_rows(batch, loss):
    def in_one_row(function, batch):
        ids, positions = batch.ids[batch.valid][None], batch.positions[batch.valid][None]
        row = function(input_ids=ids, position_ids=positions, use_cache=False).logits[0]
        return row.new_zeros(*batch.ids.shape, V).index_put(tuple(batch.valid.nonzero().T), row)

    expected = reference(build(experts="eager", num_hidden_layers=1), batch, loss)
    model = build(num_hidden_layers=1)
    assert_equal(measure(compiled(model), model, batch, loss, in_one_row), expected, FLOAT32_ISLANDS)


def with_balancing(batch, loss):
    """A forward and a loss that has the model's load-balancing loss in it."""
    found = []

    def forward(function, batch):
        out = function(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False, output_router_logits=True)
        z_loss = sum(one.logsumexp(-1)[batch.valid.flatten()].square().mean() for one in out.router_logits)
        found.append(out.aux_loss + 1e-2 * z_loss)
        return out.logits

    return forward, lambda outputs: loss(outputs) + 10 * found.pop()


@slow
def test_balancing_losses_count_tokens_as_often_as_the_batch_has_them(batch, loss):
    forward, total = with_balancing(batch, loss)
    eager, model = build(experts="eager"), build()
    expected = measure(eager, eager, batch, total, forward)  # a mean over the batch: not one sequence at a time
    # One graph, though transformers installs hooks for router logits as it runs.
    whole = torch.__version__ >= "2.13"
    function = torch.compile(model, backend="dta", options={"chunk_size": 4}, fullgraph=whole)
    assert_equal(measure(function, model, batch, total, forward), expected, FLOAT32_ISLANDS)


def replaying(model):
    """As trainers replay what was recorded: routers of the model are told which experts to take."""
    for number, layer in enumerate(model.model.layers):
        gate = layer.mlp.gate
        gate.number, gate.recorded = number, None

        def forward(hidden, gate=gate):
            scores = F.linear(hidden, gate.weight).softmax(-1)
            chosen = gate.recorded[:, :, gate.number].reshape(-1, 2)
            weights = scores.gather(-1, chosen)
            return scores, weights / weights.sum(-1, keepdim=True), chosen

        gate.forward = forward

    def function(ids, mask, routes):
        for layer in model.model.layers:
            layer.mlp.gate.recorded = routes
        return model(input_ids=ids, attention_mask=mask, use_cache=False).logits

    return function


def test_routes_that_are_replayed(batch, loss):
    def forward(function, batch):
        return function(batch.ids, batch.mask, batch.extras["routes"])

    generator = torch.Generator().manual_seed(5)
    routes = torch.rand(V, 2, 8, generator=generator).topk(2).indices[batch.ids]
    same = batch.with_extras(routes=routes.clone())
    routes[1, 3, 0] = (routes[1, 3, 0] + 1) % 8  # the second row shares its first tokens with the first
    forked = batch.with_extras(routes=routes)
    eager, model = build(experts="eager"), build()
    function, replayed = compiled(replaying(model)), replaying(eager)
    lost = []
    for one in (same, forked):
        rows = [forward(replayed, one.row(i))[0] for i in range(len(one.ids))]
        outputs = torch.zeros(*one.ids.shape, V, dtype=torch.float64)
        expected = outputs.index_put(tuple(one.valid.nonzero().T), torch.cat(rows))
        found = torch.where(one.valid[..., None], forward(function, one), 0)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
        gradients = (
            torch.autograd.grad(loss(out), list(of.parameters())) for out, of in ((found, model), (expected, eager))
        )
        for mine, theirs in zip(*gradients, strict=True):
            assert float((mine - theirs).abs().max()) <= FLOAT32_ISLANDS * float(theirs.abs().max())
        lost.append(sum(dta_compile.last_plan(function).tokens_lost.values()))
    assert lost[0] == 0 < lost[1]
    assert f"{lost[1]} tokens more because of" in str(dta_compile.last_plan(function))


@pytest.mark.slow
def test_experts_that_are_frozen_get_no_gradient(batch, loss):
    def frozen(model):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("experts" not in name)
        return model

    expected = reference(frozen(build(experts="eager", num_hidden_layers=1)), batch, loss)
    model = frozen(build(num_hidden_layers=1))
    function = compiled(model)
    assert_equal(measure(function, model, batch, loss), expected, FLOAT32_ISLANDS)
    operators = {node.target for node in nodes_of(inside(function).newest.program, "backward")}
    assert not operators & {EXPERT_PRODUCTS, EXPERT_PRODUCTS_}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=slow)])
def test_adapters_of_experts(dtype, batch, loss):
    peft = pytest.importorskip("peft")
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]

    def adapted(experts, dtype=torch.float64):
        config = peft.LoraConfig(
            r=4, target_modules=["q_proj"], target_parameters=targets, init_lora_weights=False, lora_alpha=3
        )
        model = build(experts=experts, dtype=torch.float32, num_hidden_layers=1)
        return peft.get_peft_model(model, config).to(dtype).train()

    expected = reference(adapted("eager"), batch, loss)
    model = adapted(None, dtype)
    function = compiled(model)
    found = measure(function, model, batch, loss)
    assert_equal(found, expected, FLOAT32_ISLANDS if dtype is torch.float64 else 1e-4)
    # No weight is made of base and adapter: no gradient is as large as one.
    large = model.base_model.model.model.layers[0].mlp.experts.get_base_layer().down_proj.numel()
    for node in nodes_of(inside(function).newest.program, "backward"):
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, torch.Tensor) and value.dim() == 3:
            assert not all(isinstance(size, int) for size in value.shape) or value.numel() < large


@slow
@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
def test_autocast_rounds_like_eager(experts, batch, loss):
    exact = reference(build(experts="eager", num_hidden_layers=1), batch, loss)
    eager, model = (build(experts=experts, dtype=torch.float32, num_hidden_layers=1) for _ in range(2))
    function = compiled(model)
    with torch.autocast("cpu", torch.bfloat16):
        found, rounded = measure(function, model, batch, loss), reference(eager, batch, loss)
    assert_within_rounding(found, rounded, exact)


@pytest.mark.slow
def test_router_noise_is_refused_by_name():
    model = build("mixtral", router_jitter_noise=0.1)
    with pytest.raises(RefusalError, match="router noise"):
        compiled(model)(input_ids=torch.randint(1, V, (3, 7)))


@pytest.mark.slow
def test_gates_of_other_packages_are_given_rows():
    """As transformers gives them; a gate may count on two dimensions."""

    class Experts(type(build(num_hidden_layers=1).model.layers[0].mlp.experts)):
        def _apply_gate(self, gate_up):
            assert gate_up.dim() == 2
            return gate_up[:, :32].tanh() * gate_up[:, 32:]

    def gated(experts):
        model = build(experts=experts, num_hidden_layers=1, dtype=torch.float32)
        model.model.layers[0].mlp.experts.__class__ = Experts
        return model

    batch = make_batch(rollouts(V))
    loss = random_loss(batch, V)
    model = gated("batched_mm")
    assert_equal(measure(compiled(model), model, batch, loss), reference(gated("batched_mm"), batch, loss), 1e-4)
