"""The passes one by one: axes, masks, cuts, and what the joint graphs contain."""

import collections
import dataclasses
import itertools
import operator
import weakref

import pytest
import sympy
import torch
import torch.nn.functional as F
import transformers
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import dta_compile
from dta_compile import records
from dta_compile.errors import OptionError
from dta_compile.ops.dtypes import statistics_dtype
from dta_compile.passes import PASSES, accumulate, joint
from dta_compile.passes.axes.shape_rules import reshape_groups
from dta_compile.passes.gradients import saved_values
from dta_compile.passes.gradients.simplify import simplify
from dta_compile.passes.graphs.min_cut import cheapest_cut
from dta_compile.passes.graphs.new_values import write_to_new_values
from dta_compile.passes.memory.working_memory import peak
from dta_compile.passes.program import writes_in_place

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
    (engine,) = records.of(compiled).engines
    return engine.program


def targets(module):
    return collections.Counter(str(node.target) for node in module.graph.nodes if node.op.startswith("call"))


def test_passes_run_in_their_listed_order(program):
    assert list(program.timings) == [step.__name__ for step in PASSES]


def test_masks_are_classified_and_gone(program):
    classes = [layer.mask.constant for layer in program.attention]
    assert all(one.window == 5 and one.valid is not None for one in classes)
    assert all(layer.node.args[3] is None for layer in program.attention)
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
    forward, backward = targets(program.joint.forward), targets(program.joint.backward)
    linear_layers = 4 * LAYERS + 1
    assert forward["mix"] == backward["mix_backward"] == LAYERS
    assert forward["mix_backward"] == backward["mix"] == 0
    assert forward["aten.mm.default"] == linear_layers
    # One product per linear layer for its input, one (accumulated in place) for its weight.
    assert backward["aten.mm.default"] == linear_layers
    assert backward["aten.addmm_.default"] == linear_layers


def test_no_gradient_of_the_size_of_a_weight_is_materialised(program):
    sizes = {(WIDTH, WIDTH), (WIDTH // 2, WIDTH), (WIDTH, WIDTH // 2), (VOCABULARY, WIDTH), (WIDTH, VOCABULARY)}
    for node in program.joint.backward.graph.nodes:
        value = node.meta.get("val")
        allocates = node.op == "call_function" and node.target not in (aten.t.default, aten.addmm_.default)
        if isinstance(value, torch.Tensor) and allocates:
            assert not any(tuple(value.shape) == size for size in sizes), node
    assert targets(program.joint.backward)["aten.index_add_.default"] == 1


@pytest.mark.parametrize("kind", ["bfloat16", "autocast"])
def test_products_of_low_precision_are_added_to_float32_sums_without_a_temporary(kind):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model(window=50).to(torch.bfloat16 if kind == "bfloat16" else torch.float32)
    compiled = torch.compile(model, backend="dta", options={"chunk_size": 4})
    ids, valid = torch.randint(0, VOCABULARY, (4, 11)), torch.ones(4, 11, dtype=torch.bool)
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        compiled(ids, valid).float().pow(2).sum().backward()
    (engine,) = records.of(compiled).engines
    graph = engine.program.joint.backward.graph
    assert targets(engine.program.joint.backward)["dta.add_product_.default"] == 4 * LAYERS + 1
    added = [node.args[0] for node in graph.nodes if node.target is aten.add_.Tensor]
    assert not [node for node in added if node.op == "placeholder"]


def test_wide_sums_of_products():
    left, right = torch.randn(5, 7).bfloat16(), torch.randn(7, 3).bfloat16()
    for total in (torch.randn(5, 3), torch.randn(3, 5).t()):
        expected = total + (left @ right).float()
        torch.ops.dta.add_product_(total, left, right)
        torch.testing.assert_close(total, expected)
    total = torch.ones(5, 3, dtype=torch.bfloat16)
    torch.ops.dta.add_product_(total, left, right)
    torch.testing.assert_close(total, torch.addmm(torch.ones(5, 3).bfloat16(), left, right))


def test_an_anchor_computes_no_more_than_the_cache_needs(program):
    cache, forward = targets(program.joint.cache_only), targets(program.joint.forward_only)
    assert cache["mix"] == LAYERS - 1 and cache["write"] == 1
    # The last layer's query and output projections and the head are not computed.
    assert cache["aten.mm.default"] == forward["aten.mm.default"] - 3


def test_saved_values_hold_no_weights(program):
    outputs = list(program.joint.forward.graph.nodes)[-1].args[0]
    saved = outputs[len(program.frontier) :]
    assert all(any(not isinstance(size, int) for size in node.meta["val"].shape) for node in saved)
    for key, value in program.joint.saved_states:
        assert saved[key].meta["val"].shape[1] == saved[value].meta["val"].shape[1] == KV_HEADS


@pytest.mark.parametrize(
    ("before", "after", "groups"),
    [
        (("B", "T", 6), ("B*T", 6), [([0, 1], [0]), ([2], [1])]),
        (("B*T", 6), ("B", "T", 2, 3), [([0], [0, 1]), ([1], [2, 3])]),
        (("B", "T", 2, 3), ("B", "T", 6), [([0], [0]), ([1], [1]), ([2, 3], [2])]),
        ((1, "T", 4), ("T", 4), None),
    ],
)
def test_reshapes_are_understood_as_groups_of_dimensions(before, after, groups):
    b, t = sympy.symbols("B T", positive=True, integer=True)

    def sizes(shape):
        return tuple(sympy.sympify(size, locals={"B": b, "T": t}) for size in shape)

    found = reshape_groups(sizes(before), sizes(after))
    assert groups is None or found == groups
    assert sorted(i for group, _ in found for i in group) == list(range(len(before)))
    assert sorted(j for _, group in found for j in group) == list(range(len(after)))


def test_the_cheapest_cut_is_taken_and_the_smallest_of_equals():
    graph = fx.Graph()
    nodes = [graph.placeholder("x")]
    for name in ("wide", "narrow", "also_narrow", "last"):
        nodes.append(graph.call_function(torch.neg, (nodes[-1],), name=name))
    graph.output(nodes[-1])
    cost = dict(zip(nodes, (5, 100, 1, 1, 3), strict=True))
    part = cheapest_cut(nodes, cost.__getitem__, first={nodes[1]}, last={nodes[4]}, leaving=set())
    assert part == set(nodes[:3])


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
    names = [f"{i:02d}_{step.__name__}.txt" for i, step in enumerate(PASSES)]
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
    (engine,) = records.of(compiled).engines
    assert engine.program.attention[0].mask.constant.valid is not None
    assert dta_compile.last_plan(compiled).stats.tokens == int(real.sum())


# What a chunk keeps for its backward, and what its graphs allocate: toy transformers models, run chunk by chunk.

TOYS = {
    "qwen3": transformers.Qwen3Config(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, pad_token_id=0,
    ),
    "gpt2": transformers.GPT2Config(
        vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=64, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0,
        bos_token_id=None, eos_token_id=None,
    ),
}  # fmt: skip


def program_of(model, vocabulary):
    """The program of the log-probs that a model gives to labels."""
    torch._dynamo.reset()

    def logprobs(ids, labels):
        logits = model(ids)
        logits = getattr(logits, "logits", logits)
        return logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]

    compiled = torch.compile(logprobs, backend="dta")
    compiled(*torch.randint(1, vocabulary, (2, 3, 9))).sum().backward()
    (engine,) = records.of(compiled).engines
    return engine.program


@pytest.fixture(scope="module", params=TOYS)
def toy(request):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(TOYS[request.param], attn_implementation="sdpa")
    return program_of(model.train(), 96)


class LinearPath:
    """Stands for the path: something linear of attention's shapes, which allocates what attention is taken to."""

    def __init__(self):
        self.on_backward = lambda layer: None

    def write(self, layer, key, value):
        pass

    def mix(self, layer, query, key, value, scale):
        repeated = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
        return query + repeated, query.sum(-1)

    def mix_backward(self, layer, grad, query, key, value, out, logsumexp, scale):
        self.on_backward(layer)
        scratch = [torch.empty_like(value) for value in (query, key, value)]
        grads = [(grad.mean() * value).clone() for value in (query, key, value)]
        del scratch
        return tuple(grads)


def example(node, joint, tokens, head_rows):
    """A random value for a graph's input."""
    value = node.meta["val"]
    at = dict(zip(joint.sizes.symbols, (tokens, head_rows), strict=True))
    shape = [size if isinstance(size, int) else int(size.node.expr.subs(at)) for size in value.shape]
    if value.is_floating_point():
        return torch.randn(shape, dtype=value.dtype) / 8
    return torch.arange(torch.Size(shape).numel()).reshape(shape) % min(tokens, 31)


class Run:
    """A chunk's forward on random inputs: what it kept, and how to run its backward."""

    def __init__(self, program, tokens, head_rows, path=None):
        self.joint, self.path = program.joint, path or LinearPath()
        forward, backward = (
            list(g.graph.find_nodes(op="placeholder")) for g in (self.joint.forward, self.joint.backward)
        )
        torch.manual_seed(0)
        self.inputs = [example(node, self.joint, tokens, head_rows) for node in forward[1:]]
        self.outputs = self.joint.forward(self.path, *self.inputs)
        self.kept = [self.inputs[i] for i in self.joint.backward_inputs] + list(self.outputs[len(program.frontier) :])
        others = backward[1 + len(self.kept) :]
        self.tangents = [
            example(node, self.joint, tokens, head_rows) for node in others[: len(self.joint.differentiated)]
        ]
        self.parameters = [self.inputs[i] for i in self.joint.grad_parameters]

        whole = len(self.inputs) - len(program.trunk_inputs) - 1 - len(program.head_inputs)
        self.kept_whole = sum(i < whole for i in self.joint.backward_inputs)  # parameters and constants come first

    def kept_bytes(self, *others):
        """Of memory that belongs to the chunk alone."""
        memory = [value.untyped_storage() for value in (*self.kept[self.kept_whole :], *others)]
        return sum({piece.data_ptr(): piece.nbytes() for piece in memory}.values())

    def gradients(self):
        return [torch.zeros_like(value, dtype=statistics_dtype(value.dtype)) for value in self.parameters]

    def backward(self, kept, tangents):
        gradients = self.gradients()
        self.joint.boxed_backward([self.path, *kept, *tangents, *gradients])
        return gradients

    def hand_over(self):
        """The arguments of a backward, and nothing else that refers to what was kept."""
        arguments = [self.path, *self.kept, *self.tangents, *self.gradients()]
        self.inputs, self.outputs, self.kept, self.tangents = [], (), [], []
        return arguments


def test_the_forward_computes_nothing_that_only_derivatives_need(toy):
    more = operators(toy.joint.forward) - operators(toy.joint.forward_only)
    assert set(more) <= {str(operator.getitem)}, "every saved value is on the way to the outputs"


def operators(module):
    """As `targets`, whether an operator works in place or not."""
    counts = collections.Counter()
    for name, count in targets(module).items():
        counts[name.replace("_.", ".")] += count
    return counts


def test_cheap_operators_alone_are_repeated(toy):
    forward, backward = targets(toy.joint.forward), targets(toy.joint.backward)
    assert forward["aten._log_softmax.default"] == 1
    assert not any(name.startswith(("aten._log_softmax.", "aten.addmm.", "mix.")) for name in backward)
    products = forward["aten.mm.default"] + forward["aten.addmm.default"]
    assert backward["aten.mm.default"] == backward["aten.addmm_.default"] == products
    assert backward["aten.silu.default"] + backward["aten.native_layer_norm.default"] > 0


def test_a_recomputed_value_is_made_right_before_it_is_read(toy):
    order = [node.target for node in toy.joint.backward.graph.nodes]
    repeated = aten.silu.default if aten.silu.default in order else aten.native_layer_norm.default
    assert order.index(repeated) < order.index("mix_backward") < len(order) - order[::-1].index(repeated)


def test_less_is_kept_than_all_that_the_backward_reads(toy, monkeypatch):
    everything = dataclasses.replace(toy)
    monkeypatch.setattr(saved_values, "TOUCHED_PER_SAVED", 0)
    joint(everything)
    ours, all_bytes = toy.joint, everything.joint
    assert ours.token_bytes < 0.7 * all_bytes.token_bytes
    assert ours.kv_bytes == all_bytes.kv_bytes
    assert ours.saved_bytes_per_token == ours.token_bytes + ours.head_bytes


@pytest.mark.parametrize(("tokens", "head_rows"), [(8, 3), (5, 11)])
def test_kept_bytes_are_those_of_the_storages(toy, tokens, head_rows):
    run, joint = Run(toy, tokens, head_rows), toy.joint
    assert run.kept_bytes() == joint.token_bytes * tokens + joint.head_bytes * head_rows
    saved = run.kept[len(joint.backward_inputs) :]
    assert sum(saved[i].nbytes for pair in joint.saved_states for i in pair) == joint.kv_bytes * tokens


def test_head_dims_are_those_that_grow_with_the_head_rows(toy):
    few, many = Run(toy, 6, 3), Run(toy, 6, 4)
    for dim, a, b in zip(toy.joint.head_dims, few.kept, many.kept, strict=True):
        grown = [i for i in range(a.dim()) if a.shape[i] != b.shape[i]]
        assert grown == ([] if dim is None else [dim])
    assert toy.joint.head_rows_separable and any(dim is not None for dim in toy.joint.head_dims)


@pytest.mark.parametrize("rows", [[], [2], [4, 0, 3]])
def test_the_backward_of_some_head_rows_is_that_of_all_with_zero_gradients_elsewhere(toy, rows):
    run, rows = Run(toy, 7, 5), torch.tensor(rows, dtype=torch.int64)
    some = run.backward(toy.joint.of_head_rows(run.kept, rows), [tangent[rows] for tangent in run.tangents])
    masked = [torch.zeros_like(tangent).index_copy(0, rows, tangent[rows]) for tangent in run.tangents]
    for mine, expected in zip(some, run.backward(run.kept, masked), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)


def test_saved_values_are_freed_after_their_last_use(toy):
    run, alive = Run(toy, 7, 5), {}
    logprobs = weakref.ref(run.kept[-1])
    assert logprobs().shape == (1, 5, 96)
    run.path.on_backward = lambda layer: alive.setdefault(layer, logprobs() is not None)
    arguments = run.hand_over()
    toy.joint.boxed_backward(arguments)
    assert arguments == [] and not any(alive.values())


def allocations(program, name, tokens, head_rows):
    """Sizes of what a graph allocates (negative: frees), in order, and the bytes that it is handed."""
    joint, marker = program.joint, 1234567
    with torch.profiler.profile(profile_memory=True) as profiler:
        run = Run(program, tokens, head_rows)
        if name == "backward":
            graph, held, arguments = joint.boxed_backward, run.kept_bytes(*run.tangents), [run.hand_over()]
        else:
            graph, held, arguments = getattr(joint, name), 0, [run.path, *run.inputs]
        torch.empty(marker, dtype=torch.uint8)
        results = graph(*arguments)
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    del results
    return sizes[sizes.index(-marker) + 1 :], held


@pytest.mark.parametrize("name", ["cache_only", "forward_only", "forward", "backward"])
@pytest.mark.parametrize(("tokens", "head_rows"), [(300, 20), (150, 300)])
def test_the_working_memory_is_what_a_profiler_counts(toy, name, tokens, head_rows):
    joint = toy.joint
    assert all(joint.working.values()) and joint.boxed_backward  # not while the profiler counts
    sizes, held = allocations(toy, name, tokens, head_rows)
    expected = held + max(itertools.accumulate(sizes, initial=0))
    assert peak(joint.working[name], tokens, head_rows) == pytest.approx(expected, rel=0.15)


class FusedProjections(nn.Module):
    """Queries, keys and values from one product; the first two are rotated, so that only the last is a view of it."""

    def __init__(self):
        super().__init__()
        self.embedding, self.qkv = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        batch, tokens = ids.shape
        angles = torch.arange(tokens)[:, None] / 10
        fused = self.qkv(self.embedding(ids)).view(batch, tokens, 3 * HEADS, -1).transpose(1, 2)
        query, key, value = fused.split(HEADS, 1)
        y = F.scaled_dot_product_attention(query * angles.cos(), key * angles.cos(), value, is_causal=True)
        return self.head(y.transpose(1, 2).reshape(batch, tokens, WIDTH))


def test_a_view_of_a_part_does_not_keep_the_whole_alive():
    program = program_of(FusedProjections(), VOCABULARY)
    run = Run(program, 8, 8)
    for position in program.joint.saved_states[0]:
        value = run.kept[len(program.joint.backward_inputs) + position]
        assert value.untyped_storage().nbytes() == value.nbytes


def test_a_tied_weight_gets_its_gradients_one_by_one():
    model = Model(window=99)
    model.head.weight = model.embedding.weight
    program = program_of(lambda ids: model(ids, torch.ones_like(ids, dtype=torch.bool)), VOCABULARY)
    backward = targets(program.joint.backward)
    assert backward["aten.embedding_dense_backward.default"] == 0 and backward["aten.index_add_.default"] == 1


def test_simplifying_is_exact():
    def norm(x, w):
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        y = torch.cat([-y[..., 3:], y[..., :3]], -1)
        return torch.autograd.grad(y, x, w)

    inputs = torch.randn(4, 6, requires_grad=True), torch.randn(4, 6)
    module = make_fx(norm, tracing_mode="fake")(*inputs)
    expected, before = module(*inputs), sum(targets(module).values())
    simplify(module.graph)
    module.recompile()
    assert sum(targets(module).values()) <= before - 8
    names = targets(module)
    assert not names["aten.slice_backward.default"] and not names["aten.detach.default"]
    for mine, theirs in zip(module(*inputs), expected, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("function", "undone"),
    [
        (lambda x: x * x.pow(2).mean(-1, keepdim=True).add_(1e-6).rsqrt(), True),
        (lambda x: (x + 1).mul_(x).exp_().div_(2), True),
        (lambda x: (y := x * 2).mul_(y), True),
        (lambda x: (y := x * 2, y.add_(1), y * y), True),  # its result is read
        (lambda x: (y := x * 2, y.exp(), y.add_(1)), False),  # read before
        (lambda x: (y := x * 2, y.view(-1).add_(1), y * y), False),  # by a view
        (lambda x: x.add_(1) * 2, False),  # an input
        (lambda x: (x * 2).half().add_(x), False),  # rounded to half precision
        (lambda x: (x * 2).cumsum_(1), False),  # no operator with a twin
        (lambda x: (x * 2).pow_(2).add_(x, alpha=x.shape[1]), False),
    ],
)
def test_writes_over_what_nothing_else_reads_become_new_values(function, undone):
    x = torch.randn(3, 4)
    module = make_fx(function, tracing_mode="symbolic")(x)
    assert write_to_new_values(module.graph) == undone
    module.recompile()
    assert any(map(writes_in_place, module.graph.nodes)) != undone
    torch.testing.assert_close(module(x.clone()), function(x.clone()), rtol=0, atol=0)
