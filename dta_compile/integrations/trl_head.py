"""TRL's fused LM head in graphs for this backend.

The head's kernel breaks the graph, and would score the tokens that rows share once per row. In graphs for this backend
plain operators replace it. They are computed only for tokens whose label counts, once where rows share them, and for a
large vocabulary in blocks again (pass `lm_head`). Elsewhere TRL's own kernel runs. Importing this module installs the
replacement; `registration` imports it with TRL.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from trl.trainer import utils

from dta_compile.integrations.tracing import in_our_graphs

# Columns of the vocabulary per block in the search for the most likely token, so that a metric keeps no [tokens, V]
# tensor alive. Less than the smallest vocabulary that the pass `lm_head` takes for a head.
BLOCK = 2**14
# Supported number of arguments of the kernel, and supported results.
ARGUMENTS = 9
RESULTS = {"log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1"}

Results = tuple[torch.Tensor | None, ...]


def results(*args: Any) -> Any:
    """Compute the per-token values of TRL's head by `head`; `NotImplemented` for arguments of another kernel."""
    is_known = len(args) == ARGUMENTS and RESULTS.issuperset(args[-1])
    return head(*args) if is_known else NotImplemented


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
    """Compute the results of TRL's kernel by plain operators, with statistics in float32 as there.

    Args:
        hidden: `[N, H]`.
        weight, bias: `[V, H]` and `[V]` or None, of the head.
        targets: `[N]` tokens.
        temperature, softcap, scale: logits are `softcap * tanh(scale * product / softcap) / temperature`.
        chunk_size: an argument of the kernel; ignored.
        wanted: names of the results to compute.

    Returns:
        `[N]` each: log-probs of the targets, entropies, `log sum p^2`, mean logits and whether the target is the most
        likely token; None for results that are not wanted. Only the first two have gradients.
    """
    weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)  # as in the kernel
    logits = functional.linear(hidden, weight, bias).float()
    if scale != 1.0:
        logits = logits * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if temperature != 1.0:
        logits = logits / temperature
    logp = logits.log_softmax(-1)
    target_logp = logp.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    entropy = -(logp.exp() * logp).sum(-1) if "entropy" in wanted else None
    squares = (2 * logp.detach()).logsumexp(-1) if "log_sum_sq_probs" in wanted else None
    mean = None
    if "mean_logits" in wanted and softcap is not None:
        mean = logits.detach().mean(-1)
    elif "mean_logits" in wanted:
        mean = _mean_product(hidden, weight, bias) * (scale / temperature)
    is_top = _most_likely(hidden, weight, bias) == targets if "is_top1" in wanted else None
    return target_logp, entropy, squares, mean, is_top


def _mean_product(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the mean logits over the vocabulary `[N]`, as the product with the mean row of the weight."""
    column = weight.detach().mean(0, keepdim=True)
    shift = None if bias is None else bias.detach().mean(0, keepdim=True)
    return functional.linear(hidden.detach(), column, shift).float().squeeze(-1)


def _most_likely(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the first token with the largest product `[N]`; scale, soft cap and temperature keep the order."""
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


def selects_rows(device: torch.device) -> bool:
    """Return whether TRL selects the rows whose label counts before its kernel; our graphs skip the others anyway."""
    return False


if hasattr(utils, "_ChunkedLogProbFunction") and hasattr(utils, "_use_triton"):  # missing in older releases

    class ChunkedLogProb:
        """Replacement for TRL's autograd function."""

        apply = staticmethod(in_our_graphs(results, utils._ChunkedLogProbFunction.apply))

    utils._ChunkedLogProbFunction = ChunkedLogProb
    utils._use_triton = in_our_graphs(selects_rows, utils._use_triton)
