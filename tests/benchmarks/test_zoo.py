"""The toy models of `benchmarks/zoo.py`: what their types do besides plain attention happens at their size."""

import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.zoo import LENGTH, idle, toy_config


def test_no_mechanism_is_idle():
    found = {}
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            config = toy_config(model_type)
        except Exception:
            continue  # types without a toy model, which the page lists as skipped
        found[model_type] = idle(config)
    assert len(found) > 100
    assert not {model_type: what for model_type, what in found.items() if what}


def test_what_is_idle_is_told():
    config = transformers.MistralConfig(sliding_window=LENGTH)
    assert idle(config) == [f"sliding_window={LENGTH} for {LENGTH} tokens"]
    config = transformers.Qwen3NextConfig(num_hidden_layers=2, layer_types=["linear_attention"] * 2)
    assert idle(config) == ["no layer of layer_types full_attention"]
    config = transformers.MixtralConfig(num_local_experts=2, num_experts_per_tok=2)
    assert "all of 2 experts are chosen" in idle(config)


SWITCHED_OFF = {
    "mistral": {"sliding_window": 100},
    "deepseek_v32": {"index_topk": 100},
    "deepseek_v4": {"index_topk": 100},
    "hy_v4": {"index_topk": 100},
    "minimax_m3_vl_text": {"index_topk_blocks": 100},
    "qwen4_exp_text": {"indexer_budget": 100},
}


@pytest.mark.parametrize("model_type", SWITCHED_OFF)
def test_a_mechanism_changes_outputs(model_type):
    outputs = []
    ids = torch.arange(1, LENGTH + 1)[None]
    for changes in ({}, SWITCHED_OFF[model_type]):
        config = toy_config(model_type)
        vars(config).update(changes)
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        with torch.no_grad():
            outputs.append(model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits)
    assert (outputs[0] - outputs[1]).abs().max() > 1e-4
