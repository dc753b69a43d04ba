"""TRL's fused LM head, where Dynamo traces for this backend.

The head's kernel ends a graph, and scores rows one by one. In a graph for the tree it is spelled out as what it
computes: only tokens whose label counts are scored, those that rollouts share once, and for a large vocabulary the
pass `lm_head` makes blocks again. Elsewhere TRL's own kernel runs. Importing the module puts the stand-in in place;
`registration` does when TRL is there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from trl.trainer import utils

from dta_compile.integrations.tracing import traces_for_this_backend

__all__: list[str] = []

# Columns of the vocabulary that the most likely token is looked for in at a time, so that nothing of [tokens, V] is
# alive because of a metric. Less than the pass `lm_head` takes for a head.
BLOCK = 2**14
# The arguments of the kernel, and its results, that are understood.
ARGUMENTS = 9
RESULTS = {"log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1"}

Results = tuple[torch.Tensor | None, ...]

_kernel_of_trl = getattr(utils, "_ChunkedLogProbFunction", None)
_use_triton_of_trl = getattr(utils, "_use_triton", None)


class ChunkedLogProb:
    """Has the place of TRL's autograd function."""

    @staticmethod
    def apply(*args: Any) -> Any:
        """The per-token values of TRL's head, see `head`."""
        if (
            torch.compiler.is_compiling()
            and traces_for_this_backend()
            and len(args) == ARGUMENTS
            and RESULTS.issuperset(args[-1])
        ):
            return head(*args)
        assert _kernel_of_trl is not None
        return _kernel_of_trl.apply(*args)


def head(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    temperature: float,
    chunk_size: int,
    softcap: float | None,
    scale: float,
    wanted: tuple[str, ...],
) -> Results:
    """What TRL's kernel computes, with statistics in float32 as there.

    Args:
        hidden: `[N, H]`.
        weight, bias: `[V, H]` and perhaps `[V]`, of the head.
        targets: `[N]` tokens.
        temperature, softcap, scale: logits are `softcap * tanh(scale * product / softcap) / temperature`.
        chunk_size: of the kernel; has no meaning here.
        wanted: names of the results that are computed.

    Returns:
        `[N]` each: log-probs of the targets, entropies, `log sum p^2`, mean logits and whether the target is the most
        likely token; None for what is not wanted. Only the first two have gradients.
    """
    logits = functional.linear(hidden, weight, bias).float()
    if scale != 1.0:
        logits = logits * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if temperature != 1.0:
        logits = logits / temperature
    logp = logits.log_softmax(-1)
    found = logp.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    entropy = -(logp.exp() * logp).sum(-1) if "entropy" in wanted else None
    squares = (2 * logp.detach()).logsumexp(-1) if "log_sum_sq_probs" in wanted else None
    mean = None
    if "mean_logits" in wanted and softcap is not None:
        mean = logits.detach().mean(-1)
    elif "mean_logits" in wanted:
        mean = _mean_product(hidden, weight, bias) * (scale / temperature)
    is_top = _most_likely(hidden, weight, bias) == targets if "is_top1" in wanted else None
    return found, entropy, squares, mean, is_top


def _mean_product(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`[N]`: the mean over the vocabulary of the products, without these: the product with the mean row."""
    column = weight.detach().mean(0, keepdim=True)
    shift = None if bias is None else bias.detach().mean(0, keepdim=True)
    return functional.linear(hidden.detach(), column, shift).float().squeeze(-1)


def _most_likely(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`[N]`: the token with the largest product, the first of several; scale, soft cap and temperature keep order."""
    hidden, weight = hidden.detach(), weight.detach()
    best: torch.Tensor | None = None
    token = None
    for start in range(0, weight.shape[0], BLOCK):
        shift = None if bias is None else bias.detach()[start : start + BLOCK]
        largest, place = functional.linear(hidden, weight[start : start + BLOCK], shift).max(-1)
        if best is None or token is None:
            best, token = largest, place
        else:
            token = torch.where(largest > best, place + start, token)
            best = torch.maximum(best, largest)
    assert token is not None
    return token


def use_triton(device: torch.device) -> bool:
    """Whether TRL selects the rows whose label counts before its kernel: not in a graph of ours, which skips the
    others itself."""
    assert _use_triton_of_trl is not None
    if torch.compiler.is_compiling() and traces_for_this_backend():
        return False
    selects: bool = _use_triton_of_trl(device)
    return selects


if _kernel_of_trl is not None and _use_triton_of_trl is not None:  # older releases have none
    utils._ChunkedLogProbFunction = ChunkedLogProb
    utils._use_triton = use_triton
