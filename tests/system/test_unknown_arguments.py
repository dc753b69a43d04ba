"""Arguments that a function of ours would ignore are refused by name: in eager mode, compiled, by other backends."""

from types import SimpleNamespace

import pytest
import torch
import transformers.modeling_utils
from torch import nn

from dta_compile.capture import flash_attention
from dta_compile.errors import OptionError, RefusalError
from dta_compile.integrations.transformers_attention import CausalMask, attention_forward
from dta_compile.integrations.transformers_flash_attention import flash_attention_forward
from tests.support.families import GQA, ONE, V
from tests.support.tiny import assert_same

IDS = torch.arange(1, 13).view(2, 6)
VALUE = torch.randn(1, 2, 6, 4)
LAYER = SimpleNamespace(is_causal=True)


def build(name, **changes):
    config = transformers.AutoConfig.for_model(name, **{**GQA, **ONE, **changes})
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="dta").train()


SPARSE = {"n_routed_experts": 4, "mlp_layer_types": ["dense"], "q_lora_rank": 16, "kv_lora_rank": 16} | {
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "index_topk": 2,
    "index_head_dim": 16,
    "index_n_heads": 2,
}


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_indices_of_learned_sparse_attention(is_compiled):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = build("deepseek_v32", **SPARSE).double()
    inputs = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "use_cache": False}
    found = (torch.compile(model, backend="dta") if is_compiled else model)(**inputs).logits
    model.set_attn_implementation("sdpa")
    assert_same(found, model(**inputs).logits, 2e-6)
    with pytest.raises(RefusalError, match="without a mask"):
        attention_forward(LAYER, VALUE, VALUE, VALUE, None, indices=torch.zeros(1, 6, 2, dtype=torch.int64))


def test_a_model_that_reads_the_entries_of_our_mask_is_told_so():
    mask = CausalMask(None, 3)
    assert mask[1] == 3
    with pytest.raises(OptionError, match="reads the entries of its mask"):
        mask[:, 0, :, :]


@pytest.mark.parametrize("is_compiled", [False, True])
def test_what_a_caller_hands_to_all_layers(is_compiled):
    torch._dynamo.reset()
    model = build("qwen3", head_dim=16)
    run = torch.compile(model, backend="dta") if is_compiled else model
    run(input_ids=IDS, use_cache=False, num_items_in_batch=3, output_attentions=False, unheard_of=None)
    with pytest.raises(RefusalError, match="unheard_of"):
        run(input_ids=IDS, use_cache=False, unheard_of=torch.ones(1))


@pytest.mark.parametrize(
    ("mask", "keys", "given", "named"),
    [
        (CausalMask(None, 3), 6, {"sliding_window": 4}, "sliding_window"),
        (None, 6, {"sliding_window": 4}, "sliding_window"),
        (CausalMask(None, 3), 9, {"sliding_window": 3}, "key"),  # DeepSeek-V4's compressed keys
        (CausalMask(None, 3), 6, {"is_causal": False}, "is_causal=False"),
        (None, 6, {"is_causal": False, "cu_seq_lens_q": torch.tensor([0, 2, 6])}, "cu_seq_lens_q"),
        (None, 6, {"sinks": torch.ones(2)}, "sinks"),
    ],
)
def test_arguments_that_contradict_the_mask(mask, keys, given, named):
    key = VALUE[:, :, :1].expand(1, 2, keys, 4)
    with pytest.raises(RefusalError) as caught:
        attention_forward(LAYER, VALUE, key, key, mask, **given)
    assert caught.value.got == named


def test_flash_attention_of_transformers():
    torch._dynamo.reset()
    weight = nn.Linear(4, 4)
    layer = nn.Module()
    layer.is_causal, layer.config, layer.linear = True, SimpleNamespace(), weight

    def attend(value):
        value = weight(value)
        return flash_attention_forward(layer, value, value, value, None, indices=torch.ones(1))[0]

    with pytest.raises(RefusalError, match=r"flash attention is handed .* indices"):
        torch.compile(attend, backend="dta")(VALUE)


def test_a_false_where_flash_attention_has_true():
    """What is left out is told by the function's own default, not by being false."""

    def function(q, k, v, causal=True, reads_all=True):
        return q

    graph = torch.fx.Graph()
    value = graph.placeholder("value")
    value.meta["example_value"] = VALUE
    call = graph.call_function(function, (value, value, value), {"reads_all": False})
    call.meta["example_value"] = VALUE
    none = flash_attention._Call(value, value, value, None, None, True, (-1, -1), None, 0.0, {"reads_all": False})
    with pytest.raises(RefusalError, match="reads_all is not supported"):
        flash_attention._require_nothing_else(call, none)
    flash_attention._require_nothing_else(call, none._replace(others={"reads_all": True}))


def test_what_a_recurrence_of_transformers_ignores():
    torch._dynamo.reset()
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    torch.manual_seed(0)
    embedding = nn.Embedding(V, 8)

    def run(ids):
        value = embedding(ids).unflatten(-1, (2, 4))
        gate = value[..., 0].sigmoid()
        return qwen.torch_chunk_gated_delta_rule(value, value, value, g=-gate, beta=gate, sees_later=True)[0]

    with pytest.raises(RefusalError, match=r"torch_chunk_gated_delta_rule is handed .* sees_later"):
        torch.compile(run, backend="dta")(IDS)


def test_what_models_pass_to_all_layers_alike_is_no_argument_of_a_convolution():
    """Bailing passes what its attention layers need, rotations too, to its convolutions, which read none of it."""
    torch._dynamo.reset()
    bailing = pytest.importorskip("transformers.models.bailing_hybrid.modeling_bailing_hybrid")

    torch.manual_seed(0)
    embedding, weight = nn.Embedding(V, 8).double(), nn.Parameter(torch.randn(8, 3, dtype=torch.float64))

    def run(ids):
        x = embedding(ids)
        x = bailing.causal_conv1d_fn(x.mT, weight=weight, activation="silu", position_embeddings=(x, x)).mT
        heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
        return torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2)

    out, expected = torch.compile(run, backend="dta", options={"chunk_size": 3})(IDS), run(IDS)
    assert_same(out, expected)
