"""Train a hand-written module eagerly and over the prefix tree of its batch; needs only torch.

python examples/hand_written.py
"""

import copy

import torch
from torch import nn
from torch.nn import functional as F

import dta_compile


class TinyLM(nn.Module):
    """One block of causal attention between an embedding and a head; learned positions."""

    def __init__(self, vocabulary: int = 256, width: int = 64, heads: int = 4, longest: int = 512) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(longest, width)
        self.norm, self.heads = nn.LayerNorm(width), heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        split = (*ids.shape, self.heads, -1)
        q, k, v = (part.reshape(split).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        return self.head(x + self.out(attended))


def train(model: nn.Module, forward, ids: torch.Tensor, steps: int = 3) -> list[float]:
    """Train next-token prediction; return the loss of every step."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for _ in range(steps):
        loss = F.cross_entropy(forward(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


torch.manual_seed(0)
batch = torch.randint(256, (1, 400)).repeat(8, 1)  # one prompt of 300 tokens, eight answers of 100
batch[:, 300:] = torch.randint(256, (8, 100))
eager = TinyLM().double()
twin = copy.deepcopy(eager)
compiled = torch.compile(twin, backend="dta")

print(dta_compile.explain(compiled, batch), end="\n\n")
print("eager", train(eager, eager, batch))
print("dta  ", train(twin, compiled, batch))
difference = max((a - b).abs().max().item() for a, b in zip(eager.parameters(), twin.parameters(), strict=True))
print(f"largest difference of a weight: {difference:.1e}\n")
print(dta_compile.last_plan(compiled).schedule)
