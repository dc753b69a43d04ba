"""Toy models of transformers' model families.

model = build("qwen3", dtype=torch.float64)
"""

from __future__ import annotations

import torch
import transformers

from tests.support.helpers import EXACT, FLOAT32_ISLANDS

V = 96
TOY = {
    "vocab_size": V,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
GQA = {**TOY, "num_key_value_heads": 2}
ONE = {"num_hidden_layers": 1}  # where other families cover what a second layer would test
# name: configuration class, its arguments, tolerance, chunk size
FAMILIES = {
    "qwen2": (transformers.Qwen2Config, {**GQA, **ONE}, FLOAT32_ISLANDS, 4),
    "qwen3": (transformers.Qwen3Config, {**GQA, "head_dim": 16}, FLOAT32_ISLANDS, 3),
    "llama": (transformers.LlamaConfig, {**GQA, **ONE}, FLOAT32_ISLANDS, 2048),
    "mistral": (transformers.MistralConfig, {**GQA, "sliding_window": 5}, FLOAT32_ISLANDS, 4),
    "mistral_wide": (transformers.MistralConfig, {**GQA, **ONE, "sliding_window": 40}, FLOAT32_ISLANDS, 5),
    "phi3": (transformers.Phi3Config, {**GQA, **ONE, "sliding_window": 6}, FLOAT32_ISLANDS, 7),
    "gpt2": (transformers.GPT2Config, {**TOY, "attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0}, EXACT, 4),
    "gpt_neox": (transformers.GPTNeoXConfig, {**TOY, **ONE}, EXACT, 1),
    "gemma3": (transformers.Gemma3TextConfig, {**GQA, "head_dim": 16, "sliding_window": 5}, FLOAT32_ISLANDS, 4),
    "llama4": (  # one layer with chunked attention and rotary positions, one with neither; no experts
        transformers.Llama4TextConfig,
        {**GQA, "head_dim": 16, "intermediate_size_mlp": 96, "moe_layers": [], "no_rope_layers": [1, 0]}
        | {"attention_chunk_size": 6},
        FLOAT32_ISLANDS,
        4,
    ),
    "cohere": (transformers.CohereConfig, {**GQA, **ONE}, FLOAT32_ISLANDS, 4),
    "falcon": (transformers.FalconConfig, {**TOY, **ONE, "new_decoder_architecture": False}, EXACT, 6),
    "olmo2": (transformers.Olmo2Config, {**TOY, **ONE}, FLOAT32_ISLANDS, 4),
    "deepseek_v3": (
        transformers.DeepseekV3Config,
        {
            **TOY,
            **ONE,
            "num_key_value_heads": 4,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 12,
        },
        FLOAT32_ISLANDS,
        4,
    ),
}


def build(name, dtype=torch.float64, **changes):
    config, arguments, _, _ = FAMILIES[name]
    config = config(**{**arguments, **changes})
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return model.to(dtype).train()
