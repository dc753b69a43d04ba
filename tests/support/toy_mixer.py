"""Small mixer other than attention: every token gets the decayed sum of its own value and those above it.

    out[t] = sum over s <= t of decay ** (t - s) * value[s]

The path keeps the value `[B, S, D]` of each token. Importing the module registers the mixer:

    torch.ops.toy.decayed_sum(value, 0.9)
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from dta_compile.ops.mixer import BATCH, TOKENS, Mixer, Operand, register_mixer
from dta_compile.runtime.calls import mixers

LIBRARY = torch.library.Library("toy", "DEF")
LIBRARY.define("decayed_sum(Tensor value, float decay) -> Tensor")  # called by a model
LIBRARY.define("decayed_sum_of_grads(Tensor grad, float decay) -> Tensor")  # its derivative, on the whole batch
LIBRARY.define("decayed_sum_chunk(int layer, Tensor value, float decay) -> Tensor")
LIBRARY.define("decayed_sum_chunk_backward(int layer, Tensor grad, Tensor value, Tensor out, float decay) -> Tensor")
OPS = torch.ops.toy

TOY = register_mixer(
    Mixer(
        name="toy",
        functions=(OPS.decayed_sum, OPS.decayed_sum.default),
        call=OPS.decayed_sum.default,
        chunk=OPS.decayed_sum_chunk.default,
        backward=OPS.decayed_sum_chunk_backward.default,
        operands=(Operand("value", "values", is_state=True),),
        dims=(BATCH, TOKENS, "features"),
        constants=(1,),  # the decay
    )
)


def weights(tokens: int, decay: float, like: torch.Tensor) -> torch.Tensor:
    """Return `[tokens, tokens]`: the weight of each token's value (column) in each token's result (row)."""
    number = torch.arange(tokens, device=like.device)
    distance = number[:, None] - number
    return torch.where(distance >= 0, torch.as_tensor(decay, dtype=like.dtype) ** distance, 0.0)


@torch.library.impl("toy::decayed_sum", "CompositeExplicitAutograd", lib=LIBRARY)
def _decayed_sum(value: torch.Tensor, decay: float) -> torch.Tensor:
    return weights(value.shape[1], decay, value) @ value


@torch.library.impl("toy::decayed_sum_of_grads", "CompositeExplicitAutograd", lib=LIBRARY)
def _decayed_sum_of_grads(grad: torch.Tensor, decay: float) -> torch.Tensor:
    return weights(grad.shape[1], decay, grad).mT @ grad


def _like_first_tensor(*arguments: Any) -> torch.Tensor:
    return next(torch.empty_like(value) for value in arguments if isinstance(value, torch.Tensor))


for _name in ("decayed_sum", "decayed_sum_of_grads", "decayed_sum_chunk", "decayed_sum_chunk_backward"):
    torch.library.register_fake(f"toy::{_name}", _like_first_tensor, lib=LIBRARY)


def _keep_decay(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.decay = inputs[1]


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    return OPS.decayed_sum_of_grads(grad, ctx.decay), None


def _keep_chunk(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.layer, value, ctx.decay = inputs
    ctx.save_for_backward(value, output)


def _chunk_backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor, None]:
    return None, OPS.decayed_sum_chunk_backward(ctx.layer, grad, *ctx.saved_tensors, ctx.decay), None


torch.library.register_autograd("toy::decayed_sum", _backward, setup_context=_keep_decay, lib=LIBRARY)
torch.library.register_autograd("toy::decayed_sum_chunk", _chunk_backward, setup_context=_keep_chunk, lib=LIBRARY)


@dataclasses.dataclass(frozen=True)
class ToyRuntime:
    """Runtime of a layer: over chunk and path, a matrix product with the weights of all pairs of the tree."""

    replayable = True
    key = None

    def forward(self, x):
        (value,), (above,) = x.operands, x.above
        return (self._weights(x) @ torch.cat([_defined(above, x), value], 1),)

    def backward(self, grad, results, x, above_grads):
        total = self._weights(x).mT @ grad
        count = x.above[0].shape[1]
        above_grads[0].add_(total[:, :count])
        return (total[:, count:].clone(),)

    def _weights(self, x):
        """Return the weights `[c, p + c]`; zero where a token does not read another."""
        table, (decay,), (value,) = x.table(), x.constants, x.operands
        above = torch.arange(x.above[0].shape[1], device=value.device)
        number = torch.arange(table.tokens, device=value.device)
        prefix = (above < table.start).expand(table.tokens, -1)
        own = (number <= number[:, None]) & (number[:, None] < table.ends)
        distance = table.depths[:, None] - torch.cat([above, table.depths])
        return torch.where(torch.cat([prefix, own], 1), torch.full_like(value[:, :1, :1], decay)[0] ** distance, 0.0)


def _defined(above: torch.Tensor, x: Any) -> torch.Tensor:
    """Zero the values beyond the chunk's start, which may be NaN: 0 * NaN is NaN."""
    beyond = torch.arange(above.shape[1], device=above.device) >= x.table().start
    return above.masked_fill(beyond[:, None], 0)


mixers.RUNTIMES[TOY.name] = lambda layer, context: ToyRuntime()
