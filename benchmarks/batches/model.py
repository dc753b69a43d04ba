"""Models of the benchmarks, the function under test, and the comparison of gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

VOCABULARY = 2048
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "use_cache": False,
}
MODELS: dict[str, Callable[..., PreTrainedConfig]] = {
    "dense": lambda **changes: Qwen3Config(**SHAPE, head_dim=64, **changes),
    "mixture": lambda **changes: Qwen2MoeConfig(  # 2 of 8 experts, and a shared expert
        **SHAPE,
        moe_intermediate_size=384,
        shared_expert_intermediate_size=384,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        **changes,
    ),
    "qwen3_moe": lambda **changes: Qwen3MoeConfig(  # 8 of 64 small experts
        **SHAPE, head_dim=64, moe_intermediate_size=96, num_experts=64, num_experts_per_tok=8, **changes
    ),
    "qwen3_next": lambda **changes: Qwen3NextConfig(  # three layers of the gated delta rule, one of attention
        **SHAPE,
        head_dim=64,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        num_experts=0,
        mlp_only_layers=[0, 1, 2, 3],
        **changes,
    ),
}

LogProbs = Callable[..., torch.Tensor]


def build_model(vocabulary: int = VOCABULARY, name: str = "dense") -> PreTrainedModel:
    """Build a model of 4 layers and hidden size 256 with fixed random float32 weights, in training mode."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(MODELS[name](vocab_size=vocabulary)).train()


def flops(config: PreTrainedConfig) -> tuple[float, float]:
    """Return forward FLOPs per token (matrix products) and per (query, key) pair (attention); backward takes twice."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = config.num_attention_heads * head_dim
    projections = config.hidden_size * (2 * width + 2 * config.num_key_value_heads * head_dim)
    features = config.intermediate_size
    if experts := getattr(config, "num_experts", 0):
        features = config.num_experts_per_tok * config.moe_intermediate_size
        features += getattr(config, "shared_expert_intermediate_size", 0)
        projections += config.hidden_size * experts
    recurrent = getattr(config, "layer_types", None) or []
    recurrent_layers = recurrent.count("linear_attention")
    attention_layers = config.num_hidden_layers - recurrent_layers
    weights = config.num_hidden_layers * 3 * config.hidden_size * features + attention_layers * projections
    weights += config.hidden_size * config.vocab_size
    if recurrent_layers:
        weights += recurrent_layers * _delta_rule(config)
    return 2.0 * weights, 4.0 * attention_layers * width


def _delta_rule(config: PreTrainedConfig, block: int = 64) -> int:
    """Count the multiplications per token of a layer of the gated delta rule, computed in blocks."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    heads, width, out = config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
    projections = config.hidden_size * (2 * keys + 3 * heads * out + 2 * heads)
    state = 3 * width * out  # two reads, for keys and queries, and a write
    pairs = block * (2 * width + width + 2 * out)  # products of keys and queries, the inverse, and the outputs
    return projections + heads * (state + pairs)


def label_logprobs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the log-probs `[B, S]` of `labels` under `logits` `[B, S, V]`."""
    return logits.float().log_softmax(-1).gather(-1, labels[..., None])[..., 0]


def token_logprobs(model: torch.nn.Module) -> LogProbs:
    """Return the function under test: `[B, S]` ids, labels and optional padding mask to `[B, S]` log-probs."""

    def logprobs(
        input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        return label_logprobs(model(input_ids, attention_mask=attention_mask).logits, labels)

    return logprobs


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    """Copy the gradients of all parameters."""
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def gradient_difference(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Return the largest max |difference| / max |expected gradient| over all parameters."""
    return max(((got - want).abs().max() / want.abs().max()).item() for got, want in zip(actual, expected, strict=True))
