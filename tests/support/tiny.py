"""Hand-written causal LM in float64, quick to compile, and batches that share prefixes.

model = TinyLM()
compiled = torch.compile(model, backend="dta", options=SMALL_CHUNKS)
assert_same(run(compiled, model), run(model, model))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import dta_compile

VOCABULARY, WIDTH, LONGEST = 31, 16, 64
SMALL_CHUNKS = {"chunk_size": 3}


class Block(nn.Module):
    """Pre-norm attention with grouped KV heads, and an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.RMSNorm(width), nn.LayerNorm(width)
        self.query, self.key_value = nn.Linear(width, width), nn.Linear(width, width)
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        batch, tokens, width = x.shape
        y = self.norm(x)
        query = self.query(y).view(batch, tokens, 4, -1).transpose(1, 2)
        key, value = self.key_value(y).view(batch, tokens, 2, 2, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.silu(self.up(self.mlp_norm(x))))


class TinyLM(nn.Module):
    """Causal LM: ids `[B, S]` to logits `[B, S, V]`; positions count real tokens of bool `mask` `[B, S]`, if any."""

    def __init__(self, seed: int = 0, width: int = WIDTH, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(LONGEST, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)
        self.double()

    def hidden(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        positions, pairs = torch.arange(ids.shape[1], device=ids.device), None
        if mask is not None:
            positions = (mask.long().cumsum(1) - 1).clamp(min=0)
            triangle = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril()
            pairs = triangle & mask[:, None, None, :]
        x = self.embedding(ids) + self.position(positions)
        return self.mix(x, pairs)

    def mix(self, x: torch.Tensor, pairs: torch.Tensor | None = None) -> torch.Tensor:
        """Apply everything between embeddings and head."""
        for block in self.blocks:
            x = block(x, pairs)
        return self.norm(x)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.head(self.hidden(ids, mask))


class TiedLM(TinyLM):
    """Its embedding is read by the first part and the last; one of its layers is trained, but gets no gradient."""

    def __init__(self, layers: int, detached: int) -> None:
        super().__init__(layers=layers)
        self.head.weight = self.embedding.weight
        self.blocks[detached].register_forward_hook(lambda block, inputs, output: output.detach())


class BareLM(TinyLM):
    """`TinyLM` with weightless attention instead of blocks: compiles in half the time, for tests outside of blocks."""

    def __init__(self, seed: int = 0, width: int = WIDTH) -> None:
        super().__init__(seed, width, layers=0)

    def mix(self, x: torch.Tensor, pairs: torch.Tensor | None = None) -> torch.Tensor:
        """Apply everything between embeddings and head."""
        heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
        y = F.scaled_dot_product_attention(heads, heads, heads, pairs, is_causal=pairs is None)
        return self.norm(x + y.transpose(1, 2).flatten(2))


class StatedLM(TinyLM):
    """`TinyLM` with `dta_compile.attention`, all of its options, and segments `[B, T]`."""

    def __init__(self) -> None:
        super().__init__(layers=2)
        self.sinks = nn.Parameter(torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64))

    def hidden(self, ids: torch.Tensor, segments: torch.Tensor, learned: str = "") -> torch.Tensor:  # type: ignore[override]
        index = torch.arange(ids.shape[1], device=ids.device)
        begins = F.pad(segments[:, 1:] != segments[:, :-1], (1, 0), value=True)
        x = self.embedding(ids) + self.position(index - (begins * index).cummax(1).values)
        if learned == "segments":
            segments = segments + (x.sum(-1) > 0)
        for i, block in enumerate(self.blocks):
            y = block.norm(x)
            query = block.query(y).unflatten(-1, (4, -1)).transpose(1, 2)
            key, value = block.key_value(y).unflatten(-1, (2, 2, -1)).permute(2, 0, 3, 1, 4)
            sinks = self.sinks if learned != "sinks" else self.sinks * x.mean((0, 1, 2))
            special = {"window": 3, "softcap": 0.5} if i else {"sinks": sinks}
            y = dta_compile.attention(query, key, value, segments=segments, **special)
            x = x + block.out(y.transpose(1, 2).flatten(2))
        return self.norm(x)

    def forward(self, ids: torch.Tensor, segments: torch.Tensor, learned: str = "") -> torch.Tensor:  # type: ignore[override]
        return self.head(self.hidden(ids, segments, learned))


class Clipped(torch.autograd.Function):
    """Identity with a clipped gradient, which is not linear in the gradient of its result."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.clamp(-0.05, 0.05)


PACKED_IDS = torch.tensor([[1, 2, 3, 4, 1, 2, 3, 5, 1, 0], [1, 2, 3, 4, 4, 1, 2, 0, 0, 0]])
SEGMENTS = torch.tensor([[7, 7, 7, 7, 2, 2, 2, 2, 5, 0], [1, 1, 1, 1, 1, 3, 3, 0, 0, 0]])


def shared_ids(batch: int = 5, tokens: int = 9, seed: int = 1) -> torch.Tensor:
    """Draw ids `[B, S]` with a common prompt, forks at several depths, and a duplicate (the last row)."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (batch, tokens), generator=generator)
    for row in range(1, batch):
        shared = max(1, tokens - 1 - row)
        ids[row, :shared] = ids[row - 1, :shared]
    ids[-1] = ids[0]
    return ids


def log_probs(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the log-probs `[B, S - 1]` of every next token."""
    return logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


def weights_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return fixed random weights, so that no errors cancel in `(tensor * weights).sum()`."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)


def weighted(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor * weights_like(tensor)).sum()


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Copy every parameter's `.grad`, None where there is none."""
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def after(model: nn.Module, step: Callable[[], Any]) -> tuple[Any, dict[str, torch.Tensor | None]]:
    """Run a step on a model without gradients; return its result and the gradients it left."""
    model.zero_grad()
    result = step()
    grads = gradients(model)
    model.zero_grad()
    return result, grads


def assert_same(actual: Any, expected: Any, tolerance: float = 1e-9) -> None:
    """Assert equal structures of tensors, each within `tolerance` of its largest entry; None matches only None."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for key in expected:
            try:
                assert_same(actual[key], expected[key], tolerance)
            except AssertionError as error:
                raise AssertionError(f"{key}: {error}") from None
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected)
        for mine, theirs in zip(actual, expected, strict=True):
            assert_same(mine, theirs, tolerance)
    elif isinstance(expected, torch.Tensor):
        assert isinstance(actual, torch.Tensor), f"expected a tensor, got {actual}"
        assert actual.shape == expected.shape and actual.dtype == expected.dtype
        if not (expected.is_floating_point() or expected.is_complex()):
            assert torch.equal(actual, expected)
            return
        # A gradient that is zero except for rounding has no scale; no other value here is smaller than 1e-6.
        size = max(float(expected.detach().abs().max()), 1e-6) if expected.numel() else 1.0
        error = float((actual - expected).detach().abs().max()) / size if expected.numel() else 0.0
        assert error <= tolerance, f"relative difference {error:.2g}"
    else:
        assert actual == expected
