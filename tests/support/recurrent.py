"""Toy models with transformers' recurrent layers, and a mode without their casts from float64 to float32.

model = build("qwen3_next", torch.float32)
with no_float32_islands():
    exact = reference(build("qwen3_next", torch.float64), batch, loss)
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch.overrides import TorchFunctionMode

V = 64
TOY = {
    "vocab_size": V,
    "hidden_size": 32,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
ATTENTION = {
    **TOY,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
BETWEEN = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
LINEAR = {
    **ATTENTION,
    **BETWEEN,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 16}
MAMBA2 = {**ATTENTION, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_chunk_size": 16}
GRANITE = {**MAMBA2, "mamba_n_heads": 8, "layer_types": ["mamba", "attention", "mamba"], "shared_intermediate_size": 48}
KIMI = {
    **ATTENTION,
    **BETWEEN,
    "num_key_value_heads": 4,
    "linear_num_heads": 4,
    "linear_head_dim": 8,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "first_k_dense_replace": 3,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
LAYERS = {"layers_block_type": ["mamba", "hybrid", "mamba"]}
MAMBA = {**TOY, "num_hidden_layers": 2, "state_size": 8, "expand": 2}
# name: configuration class, its arguments
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": (
        "Qwen3NextConfig",
        {**LINEAR, "head_dim": 8, "num_experts": 0, "mlp_only_layers": [0, 1, 2], "decoder_sparse_step": 1},
    ),
    "qwen3_next_experts": ("Qwen3NextConfig", {**LINEAR, "head_dim": 8, **SHARED}),
    "qwen3_5": ("Qwen3_5TextConfig", {**LINEAR, "head_dim": 8}),
    "qwen3_5_experts": ("Qwen3_5MoeTextConfig", {**LINEAR, "head_dim": 8, **SHARED}),
    "olmo_hybrid": ("OlmoHybridConfig", LINEAR),
    "kimi_linear": ("KimiLinearConfig", KIMI),
    "nemotron_h": (
        "NemotronHConfig",
        {
            **ATTENTION,
            "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
            "num_hidden_layers": 4,
            "head_dim": 8,
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "ssm_state_size": 8,
            "chunk_size": 16,
            "mamba_hidden_act": "silu",
        },
    ),
    "falcon_h1": ("FalconH1Config", {**MAMBA2, "mamba_d_ssm": 32, "mamba_n_heads": 4}),
    "bamba": ("BambaConfig", {**MAMBA2, "mamba_n_heads": 8, "attn_layer_indices": [1]}),
    "lfm2": ("Lfm2Config", {**ATTENTION, "layer_types": ["conv", "full_attention", "conv"]}),
    "lfm2_experts": (
        "Lfm2MoeConfig",
        {**ATTENTION, "layer_types": ["conv", "full_attention", "conv"], **EXPERTS, "num_dense_layers": 1},
    ),
    "granitemoehybrid": ("GraniteMoeHybridConfig", {**GRANITE, "num_local_experts": 0}),
    "granitemoehybrid_experts": (
        "GraniteMoeHybridConfig",
        {**GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "mamba2": ("Mamba2Config", {**MAMBA, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 16}),
    "mamba": ("MambaConfig", {**MAMBA, "time_step_rank": 4}),
    "falcon_mamba": ("FalconMambaConfig", {**MAMBA, "time_step_rank": 4}),
    "recurrent_gemma": (
        "RecurrentGemmaConfig",
        {**ATTENTION, "block_types": ["recurrent", "attention", "recurrent"]}
        | {"lru_width": 32, "head_dim": 8, "attention_window_size": 6},
    ),
    "inkling_experts": (
        "InklingTextConfig",
        {**ATTENTION, **EXPERTS, "layer_types": ["hybrid_sliding", "hybrid", "hybrid"], "head_dim": 8}
        | {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8, "sliding_window_size": 6}
        | {"d_rel": 3, "rel_extent": 9, "n_routed_experts": 4, "n_shared_experts": 1}
        | {"mlp_layer_types": ["dense", "sparse", "dense"]},
    ),
    "jamba": (
        "JambaConfig",
        {
            **ATTENTION,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "num_experts": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
        },
    ),
    "zamba2": (
        "Zamba2Config",
        {
            **ATTENTION,
            **LAYERS,
            "mamba_d_state": 8,
            "n_mamba_heads": 8,
            "mamba_ngroups": 2,
            "chunk_size": 16,
            "hybrid_layer_ids": [1],
            "num_mem_blocks": 1,
            "attention_hidden_size": 64,
            "attention_head_dim": 16,
        },
    ),
}
ATTENTION_FREE = ("mamba", "mamba2", "falcon_mamba")


def build(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """Build a model whose biases and skips differ from their constant initial values."""
    config, arguments = FAMILIES[name]
    torch.manual_seed(1)
    attention = {} if name in ATTENTION_FREE else {"attn_implementation": "sdpa"}
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**arguments), **attention)
    if "experts" in name or name == "kimi_linear":
        model.set_experts_implementation("eager")
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1 and "norm" not in key and "A_log" not in key:
                parameter += 0.1 * torch.randn_like(parameter)
    return model.to(dtype).train()


class _InFloat64(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.float and not args[0].is_complex():  # also of positions, which multiply frequencies
            return args[0].double()
        if function is torch.Tensor.to and args[0].dtype is torch.float64:
            args = tuple(torch.float64 if value is torch.float32 else value for value in args)
            kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in kwargs.items()}
        return function(*args, **kwargs)


def no_float32_islands() -> TorchFunctionMode:
    """Return a mode in which float64 tensors ignore a model's casts to float32, so that it computes exactly."""
    return _InFloat64()
