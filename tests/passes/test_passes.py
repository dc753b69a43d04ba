"""The passes one by one: axes, masks, cuts, and what the joint graphs contain."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dta_compile
from dta_compile.errors import OptionError
from dta_compile.passes import PASSES, accumulate
from tests.support.chunk_graphs import Run, nodes_of, program_of, targets
from tests.support.inside import inside

aten = torch.ops.aten
LAYERS, WIDTH, VOCABULARY, HEADS, KV_HEADS = 2, 16, 37, 4, 2


class Attention(nn.Module):
    def __init__(self, window):
        super().__init__()
        self.window = window
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, WIDTH // 2, bias=False) for _ in range(2))
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x, valid):
        batch, tokens, _ = x.shape
        q, k, v = (t.view(batch, tokens, -1, WIDTH // HEADS).transpose(1, 2) for t in (self.q(x), self.k(x), self.v(x)))
        k, v = (
            t[:, :, None].expand(-1, -1, HEADS // KV_HEADS, -1, -1).reshape(batch, HEADS, tokens, -1) for t in (k, v)
        )
        distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
        mask = (distance >= 0) & (distance < self.window) & valid[:, None, None, :]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o(y.transpose(1, 2).reshape(batch, tokens, -1))


class Model(nn.Module):
    def __init__(self, window):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Attention(window) for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids, valid):
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + layer(x, valid)
        return self.head(x)


@pytest.fixture(scope="module")
def program():
    """The program of a group-normalised loss over a two-layer model with grouped KV heads and a window."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model(window=5).double()

    def loss(ids, valid, advantages):
        logprobs = model(ids, valid)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        normalised = (advantages - advantages.mean()) / advantages.std()
        real = valid[:, 1:]
        return -((logprobs * normalised[:, None] * real).sum(1) / real.sum(1)).mean()

    ids, valid = torch.randint(0, VOCABULARY, (4, 11)), torch.ones(4, 11, dtype=torch.bool)
    valid[1, 8:] = False
    compiled = torch.compile(loss, backend="dta", options={"chunk_size": 4})
    value = compiled(ids, valid, torch.randn(4).double())
    value.backward()
    return inside(compiled).only.program


def test_passes_run_in_their_listed_order(program):
    assert list(program.timings) == [step.name for step in PASSES]


def test_masks_are_classified_and_gone(program):
    classes = [layer.mask.constant for layer in program.attention]
    assert all(one.window == 5 and one.valid is not None for one in classes)
    assert all(node.args[3] is None for node in program.mixer_nodes)
    assert not any("tril" in str(t) or "logical_and" in str(t) for t in targets(program.chunk))


def test_the_cache_holds_true_kv_heads(program):
    assert [(layer.kv_heads, layer.key_dim) for layer in program.attention] == [(KV_HEADS, WIDTH // HEADS)] * LAYERS


def test_only_log_probs_leave_the_token_region(program):
    assert [value.features for value in program.frontier] == [(1,)]
    epilogue = targets(program.epilogue)
    assert not any(name.startswith(("aten.mm", "aten._log_softmax")) for name in epilogue)
    assert epilogue["aten.mean.default"] >= 1


def test_labels_are_no_part_of_the_prefix_key(program):
    assert len(program.trunk_keys) == 1, "token ids alone decide what later tokens see"
    assert len(program.head_inputs) == 1, "the labels are read by the head only"


def test_no_attention_or_matrix_product_of_the_forward_is_repeated_in_the_backward(program):
    forward, backward = targets(nodes_of(program, "forward")), targets(nodes_of(program, "backward"))
    linear_layers = 4 * LAYERS + 1
    assert forward["mix"] == backward["mix_backward"] == LAYERS
    assert forward["mix_backward"] == backward["mix"] == 0
    assert forward["aten.mm.default"] == linear_layers
    # One product per linear layer for its input, one (accumulated in place) for its weight.
    assert backward["aten.mm.default"] == linear_layers
    assert backward["aten.addmm_.default"] == linear_layers


def test_no_gradient_of_the_size_of_a_weight_is_materialised(program):
    sizes = {(WIDTH, WIDTH), (WIDTH // 2, WIDTH), (WIDTH, WIDTH // 2), (VOCABULARY, WIDTH), (WIDTH, VOCABULARY)}
    for node in nodes_of(program, "backward"):
        value = node.meta.get("val")
        allocates = node.op == "call_function" and node.target not in (aten.t.default, aten.addmm_.default)
        if isinstance(value, torch.Tensor) and allocates:
            assert not any(tuple(value.shape) == size for size in sizes), node
    assert targets(nodes_of(program, "backward"))["aten.index_add_.default"] == 1


@pytest.mark.parametrize("kind", ["bfloat16", "autocast"])
def test_products_of_low_precision_are_added_to_float32_sums_without_a_temporary(kind):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model(window=50).to(torch.bfloat16 if kind == "bfloat16" else torch.float32)
    compiled = torch.compile(model, backend="dta", options={"chunk_size": 4})
    ids, valid = torch.randint(0, VOCABULARY, (4, 11)), torch.ones(4, 11, dtype=torch.bool)
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        compiled(ids, valid).float().pow(2).sum().backward()
    backward = nodes_of(inside(compiled).only.program, "backward")
    assert targets(backward)["dta.add_product_.default"] == 4 * LAYERS + 1
    added = [node.args[0] for node in backward if node.target is aten.add_.Tensor]
    assert not [node for node in added if node.op == "placeholder"]


def test_an_anchor_computes_no_more_than_the_cache_needs(program):
    cache, forward = targets(nodes_of(program, "cache_only")), targets(nodes_of(program, "forward_only"))
    assert cache["mix"] == LAYERS - 1 and cache["write"] == 1
    # The last layer's query and output projections and the head are not computed.
    assert cache["aten.mm.default"] == forward["aten.mm.default"] - 3


def test_saved_values_hold_no_weights(program):
    for _, kind in program.stages.of_kinds():
        assert all(value.bytes.per_token or value.bytes.per_head_row for value in kind.kept if value.place[0] != "read")
    run = Run(program, 5, 3)
    for key, value in program.joint.saved_states:
        assert run.kept[key].shape[1] == run.kept[value].shape[1] == KV_HEADS


def test_graphs_can_be_dumped(tmp_path, monkeypatch):
    monkeypatch.setenv("DTA_DEBUG", str(tmp_path))
    torch._dynamo.reset()
    model = Model(window=99)
    compiled = torch.compile(model, backend="dta")
    inputs = torch.randint(0, VOCABULARY, (2, 7)), torch.ones(2, 7, dtype=torch.bool)
    compiled(*inputs)
    with torch.no_grad():
        compiled(*inputs)
    folders = sorted(tmp_path.iterdir())
    assert [folder.name for folder in folders] == ["graph_000", "graph_001"]
    names = [f"{i:02d}_{step.name}.txt" for i, step in enumerate(PASSES)]
    assert all(sorted(path.name for path in folder.iterdir()) == sorted(names) == names for folder in folders)
    assert "addmm_" in (folders[0] / names[PASSES.index(accumulate)]).read_text()


def test_a_token_rule_needs_an_operator():
    with pytest.raises(OptionError, match="operator overload"):
        dta_compile.register_token_rule(torch.sin, None)


@pytest.mark.parametrize("padding_id", [0, 36])
def test_a_padding_mask_made_from_the_ids_is_understood(padding_id):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model(window=99).double()

    def logits(ids):
        return model(ids, ids != padding_id)

    ids = torch.randint(1, VOCABULARY - 1, (4, 11))
    ids[1:, :5] = ids[0, :5]
    ids[1, 7:] = ids[2, 3:] = padding_id
    real = (ids != padding_id)[..., None]
    compiled = torch.compile(logits, backend="dta")
    results = []
    for run in (logits, compiled):
        model.zero_grad()
        out = run(ids) * real
        out.pow(2).sum().backward()
        results.append([out.detach(), *(p.grad for p in model.parameters())])
    for theirs, mine in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)
    assert inside(compiled).only.program.attention[0].mask.constant.valid is not None
    assert dta_compile.last_plan(compiled).stats.tokens == int(real.sum())


def test_a_tied_weight_gets_its_gradients_one_by_one():
    model = Model(window=99)
    model.head.weight = model.embedding.weight
    program = program_of(lambda ids: model(ids, torch.ones_like(ids, dtype=torch.bool)), VOCABULARY)
    backward = targets(nodes_of(program, "backward"))
    assert backward["aten.embedding_dense_backward.default"] == 0 and backward["aten.index_add_.default"] == 1
