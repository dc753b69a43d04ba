"""What a chunk keeps for its backward, and what its graphs allocate: toy transformers models, run chunk by chunk."""

import dataclasses
import itertools
import operator
import weakref

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from dta_compile.passes import joint
from dta_compile.passes.gradients import partition
from tests.support.chunk_graphs import Run, allocations, nodes_of, operators, peak, program_of, targets

aten = torch.ops.aten
WIDTH, VOCABULARY, HEADS = 16, 37, 4

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


@pytest.fixture(scope="module", params=TOYS)
def toy(request):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(TOYS[request.param], attn_implementation="sdpa")
    return program_of(model.train(), 96)


@pytest.mark.sample(1)
def test_the_forward_computes_nothing_that_only_derivatives_need(toy):
    more = operators(nodes_of(toy, "forward")) - operators(nodes_of(toy, "forward_only"))
    assert set(more) <= {str(operator.getitem)}, "every saved value is on the way to the outputs"


def test_cheap_operators_alone_are_repeated(toy):
    forward, backward = targets(nodes_of(toy, "forward")), targets(nodes_of(toy, "backward"))
    assert forward["aten._log_softmax.default"] == 1
    assert not any(name.startswith(("aten._log_softmax.", "aten.addmm.", "mix.")) for name in backward)
    products = forward["aten.mm.default"] + forward["aten.addmm.default"]
    assert backward["aten.mm.default"] == backward["aten.addmm_.default"] == products
    assert backward["aten.silu.default"] + backward["aten.native_layer_norm.default"] > 0


def test_a_recomputed_value_is_made_right_before_it_is_read(toy):
    order = [node.target for node in nodes_of(toy, "backward")]
    repeated = aten.silu.default if aten.silu.default in order else aten.native_layer_norm.default
    assert order.index(repeated) < order.index("mix_backward") < len(order) - order[::-1].index(repeated)


def test_less_is_kept_than_all_that_the_backward_reads(toy, monkeypatch):
    everything = dataclasses.replace(toy, filled=toy.filled - joint.fills)
    monkeypatch.setattr(partition, "TOUCHED_PER_SAVED", 0)
    joint(everything)
    ours, all_bytes = toy.stages.kept_bytes(), everything.stages.kept_bytes()
    assert ours.per_token < 0.7 * all_bytes.per_token
    assert [kind.state_bytes for kind in toy.stages.kinds] == [kind.state_bytes for kind in everything.stages.kinds]
    assert toy.joint.saved_bytes_per_token == ours.per_token + ours.per_head_row


@pytest.mark.parametrize(("tokens", "head_rows"), [(8, 3), (5, 11)])
def test_kept_bytes_are_those_of_the_storages(toy, tokens, head_rows):
    run, joint = Run(toy, tokens, head_rows), toy.joint
    assert run.kept_bytes() == joint.token_bytes * tokens + joint.head_bytes * head_rows
    assert sum(run.kept[i].nbytes for pair in joint.saved_states for i in pair) == joint.kv_bytes * tokens


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
    logprobs = [weakref.ref(kept) for kept in run.kept if kept.shape == (1, 5, 96)][-1]
    run.path.on_backward = lambda layer: alive.setdefault(layer, logprobs() is not None)
    arguments = run.hand_over()
    toy.joint.run_backward(arguments)
    assert arguments == [] and not any(alive.values())


@pytest.mark.parametrize("name", ["cache_only", "forward_only", "forward", "backward"])
@pytest.mark.parametrize(("tokens", "head_rows"), [(300, 20), (150, 300)])
def test_the_working_memory_is_what_a_profiler_counts(toy, name, tokens, head_rows):
    joint = toy.joint
    assert all(joint.working.values()) and getattr(joint, f"run_{name}")  # not while the profiler counts
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
        value = run.kept[position]
        assert value.untyped_storage().nbytes() == value.nbytes
