"""The model that every method runs, the function under test, and how gradients are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 2048

LogProbs = Callable[..., torch.Tensor]


def build_model(vocabulary: int = VOCABULARY) -> Qwen3ForCausalLM:
    """A Qwen3 of 4 layers and hidden size 256, always with the same random float32 weights, in training mode."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        use_cache=False,
    )
    return Qwen3ForCausalLM(config).train()


def flops(config: Qwen3Config) -> tuple[float, float]:
    """Forward operations per token (matrix products) and per (query, key) pair (attention); backward is twice both."""
    width = config.num_attention_heads * config.head_dim
    projections = config.hidden_size * (2 * width + 2 * config.num_key_value_heads * config.head_dim)
    layer = projections + 3 * config.hidden_size * config.intermediate_size
    weights = config.num_hidden_layers * layer + config.hidden_size * config.vocab_size
    return 2.0 * weights, 4.0 * config.num_hidden_layers * width


def label_logprobs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Log-probs `[B, S]` of `labels` under `logits` `[B, S, V]`."""
    return logits.float().log_softmax(-1).gather(-1, labels[..., None])[..., 0]


def token_logprobs(model: torch.nn.Module) -> LogProbs:
    """The function under test: `[B, S]` ids, labels and perhaps a padding mask to `[B, S]` log-probs."""

    def logprobs(
        input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        return label_logprobs(model(input_ids, attention_mask=attention_mask).logits, labels)

    return logprobs


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    """Copies of the gradients of all parameters."""
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def gradient_difference(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Largest |difference| over largest |expected gradient|, of the worst parameter."""
    return max(((got - want).abs().max() / want.abs().max()).item() for got, want in zip(actual, expected, strict=True))
