"""Flash attention by its packages' functions, for which there are stand-ins: as in eager, or refused by name."""

import pathlib
import sys

import pytest
import torch
from torch import nn
from torch.nn.attention import varlen

import dta_compile
from dta_compile.errors import RefusalError
from tests.support.tiny import VOCABULARY, after, assert_same, shared_ids, weighted

PACKAGES = pathlib.Path(__file__).parents[1] / "support" / "packages"
IDS = shared_ids()  # 5 rows of 9
ROW, ENDS = IDS.view(1, -1), torch.arange(0, 46, 9, dtype=torch.int32)


@pytest.fixture(scope="module")
def package():
    """The package flash-attn, imported as any other, and gone again afterwards."""
    sys.path.insert(0, str(PACKAGES))
    import flash_attn

    yield flash_attn
    sys.path.remove(str(PACKAGES))
    for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def varlen_on_cpu(package):
    """torch's function of packed rows, with kernels for CPUs."""
    dense = sys.modules["flash_attn.flash_attn_interface"].packed

    def forward(q, k, v, ends, _, longest, longest_k, causal, scale, window, *others):
        found = dense(q, k, v, ends, scale or q.shape[-1] ** -0.5, causal, *window, 0.0)
        return found.forward()[0], found.logsumexp[0].float(), torch.zeros(2, dtype=torch.uint64)

    def backward(grad, q, k, v, out, lse, ends, _, longest, longest_k, causal, state, scale, window):
        found = dense(q, k, v, ends, scale or q.shape[-1] ** -0.5, causal, *window, 0.0)
        return tuple(one[0] for one in found.backward(grad[None]))

    varlen._varlen_attn.register_kernel("cpu")(forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(backward)
    return varlen.varlen_attn


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


class Model(nn.Module):
    """One layer of attention by `attend(q, k, v, *others)` over `[B, S, H, D]`, with others over `[S, H, D]`."""

    def __init__(self, attend, width=16):
        super().__init__()
        torch.manual_seed(0)
        self.attend = attend
        self.embedding, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY)
        self.query, self.key_value = nn.Linear(width, width), nn.Linear(width, width)
        self.double()

    def forward(self, ids, *others):
        x = self.embedding(ids)
        q, k, v = self.query(x).unflatten(-1, (4, -1)), *self.key_value(x).unflatten(-1, (2, 2, -1)).unbind(2)
        if others:
            q, k, v = (t.reshape(-1, *t.shape[2:]) for t in (q, k, v))
        return self.head(x + self.attend(q, k, v, *others).reshape(x.shape))


def check(attend, *inputs):
    """Outputs and gradients of a compiled model and of the eager one; returns the plan."""
    model = Model(attend)
    compiled = torch.compile(model, backend="dta", options={"chunk_size": 4, "verify": "first"})

    def step(run):
        out = run(*inputs)
        weighted(out).backward()
        return out.detach()

    assert_same(after(model, lambda: step(compiled)), after(model, lambda: step(model)))
    return dta_compile.last_plan(compiled)


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"causal": True, "window_size": (2, 2), "softcap": 0.5, "softmax_scale": 0.7},
        {"window_size": (3, 0)},
    ],
    ids=str,
)
def test_batch(package, options):
    plan = check(lambda q, k, v: package.flash_attn_func(q, k, v, **options), IDS)
    assert plan.stats.compression > 1


def test_packed_row(package):
    def attend(q, k, v, ends, longest):
        return package.flash_attn_varlen_func(
            q, k, v, ends, ends, longest, longest, causal=True, window_size=(4, -1), softcap=0.5
        )

    plan = check(attend, ROW, ENDS, 9)
    assert plan.stats.compression > 1 and plan.stats.sequences == len(IDS)


@pytest.mark.parametrize("window", [(-1, 0), (2, 0)])
def test_packed_row_by_torch(varlen_on_cpu, window):
    def attend(q, k, v, ends, longest):
        return varlen_on_cpu(q, k, v, ends, ends, longest, longest, window_size=window, enable_gqa=True)

    assert check(attend, ROW, ENDS, 9).stats.compression > 1


REFUSED = {
    "bidirectional": {},
    "dropout_p": {"causal": True, "dropout_p": 0.1},
    "alibi_slopes": {"causal": True, "alibi_slopes": torch.ones(4)},
    "return_attn_probs": {"causal": True, "return_attn_probs": True},
    "scale": {"causal": True, "softmax_scale": -1.0},
}


def refusal(attend, *inputs):
    torch._dynamo.reset()
    compiled = torch.compile(Model(attend), backend="dta")
    with pytest.raises(RefusalError) as caught:
        compiled(*inputs)
    assert "test_flash_attention.py" in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(package, name):
    def attend(q, k, v):
        out = package.flash_attn_func(q, k, v, **REFUSED[name])
        return out[0] if isinstance(out, tuple) else out

    message = refusal(attend, IDS)
    assert message.startswith("flash_attn_func") and name in message


def test_refusals_of_packed_rows(package):
    def attend(q, k, v, ends, ends_of_keys=None, block_table=None):
        others = {"causal": True, "block_table": block_table}
        return package.flash_attn_varlen_func(q, k, v, ends, ends_of_keys, 9, 9, **others)

    assert "cu_seqlens" in refusal(attend, ROW, ENDS, ENDS.clone())
    same = lambda q, k, v, ends, table: attend(q, k, v, ends, ends, table)  # noqa: E731
    assert "block_table" in refusal(same, ROW, ENDS, torch.zeros(5, 1, dtype=torch.int32))
    assert "flattened" in refusal(same, IDS, ENDS, None)


def test_other_backends_trace_what_they_did(package):
    """Also after a graph for this backend: the functions' own code."""
    attend = lambda q, k, v: package.flash_attn_func(q, k, v, causal=True)  # noqa: E731
    check(attend, IDS)
    graphs = []
    model = Model(attend)
    torch.compile(model, backend=lambda module, _: graphs.append(module) or module.forward)(IDS)
    names = {node.name for node in graphs[0].graph.nodes}
    assert "autograd_function_apply" in names and not [name for name in names if "flash" in name]


def test_what_runs_as_captured_runs_the_function_itself(package):
    """Keys from a cache, without gradients: as in generation."""
    cached = torch.randn(5, 3, 2, 4, dtype=torch.float64)

    def attend(q, k, v):
        return package.flash_attn_func(q, torch.cat([cached, k], 1), torch.cat([cached, v], 1))

    model = Model(attend)
    compiled = torch.compile(model, backend="dta")
    with torch.no_grad():
        assert_same(compiled(IDS), model(IDS))


@pytest.fixture(scope="module")
def model(package):
    """A model of transformers with attn_implementation="flash_attention_2"."""
    transformers = pytest.importorskip("transformers")
    from transformers import modeling_flash_attention_utils as utils

    sizes = {"vocab_size": 31, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    torch.manual_seed(0)
    config = transformers.MistralConfig(**sizes, **heads, sliding_window=5)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").double()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "is_flash_attn_2_available", lambda: True)
        patch.setattr(utils, "_loaded_implementation", None)
        utils.lazy_import_flash_attention("flash_attention_2")
        model.config._attn_implementation = "flash_attention_2"  # a model on a CPU is not asked for it
        yield model


def test_model(model):
    check_model(model, input_ids=IDS)


def test_model_with_padding(model):
    lengths = torch.tensor([9, 6, 9, 7, 9])
    check_model(model, input_ids=IDS, attention_mask=(torch.arange(9) < lengths[:, None]).long())


@pytest.mark.slow
def test_model_on_positions_of_a_packed_row(model):
    check_model(model, input_ids=ROW, position_ids=torch.arange(9).repeat(5)[None])


def test_model_on_ends_of_a_packed_row(model):
    ends = {"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS.clone(), "max_length_q": 9, "max_length_k": 9}
    check_model(model, input_ids=ROW, position_ids=torch.arange(9).repeat(5)[None], **ends)


def check_model(model, **inputs):
    compiled = torch.compile(model, backend="dta", options={"chunk_size": 4})

    def step(run):
        out = run(**inputs, use_cache=False).logits
        if "attention_mask" in inputs:
            out = torch.where(inputs["attention_mask"].bool()[..., None], out, 0)
        weighted(out).backward()
        return out.detach()

    assert_same(after(model, lambda: step(compiled)), after(model, lambda: step(model)), 2e-6)
    assert dta_compile.last_plan(compiled).stats.compression > 1
