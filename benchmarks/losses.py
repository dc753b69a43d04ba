"""Losses over large vocabularies: equal to eager mode one row at a time in float64, and their peak memory.

    python -m benchmarks.losses [--tokens 65536] [--vocabulary 131072] [--only NAME...]

The model is as narrow as it can be (16 features), so that memory is what tokens times vocabulary would need. Every peak
is the growth of resident memory in forward and backward, in a process of its own, float32, after a small batch has
compiled the code. Rows share 16 tokens only, so that nearly all tokens go through the head. Freed pages go back to the
system (`DTA_KEEP_PAGES=0`): how many malloc keeps otherwise is chance, up to ten times what is in use.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

import dta_compile
from benchmarks.measuring.memory import growth

Tensors = dict[str, torch.Tensor]
Loss = Callable[["Models", torch.Tensor, Tensors], torch.Tensor]
WIDTH, ROW, COMMON, K = 16, 1024, 16, 8
LEAST = 32_768  # the vocabulary from which a chunk has no logits
EXACT = 1e-9


class LM(nn.Module):
    """Embedding, one attention without weights, and a head: `[B, S]` to logits `[B, S, V]`."""

    def __init__(self, vocabulary: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding, self.norm = nn.Embedding(vocabulary, WIDTH), nn.RMSNorm(WIDTH)
        self.head, self.value = nn.Linear(WIDTH, vocabulary, bias=False), nn.Linear(WIDTH, 1)

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
        y = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return self.norm(x + y.transpose(1, 2).flatten(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(ids))[:, :-1]


class Models(nn.Module):
    """A policy, and a frozen reference or teacher."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.policy, self.other = LM(vocabulary, 0), LM(vocabulary, 1).requires_grad_(False)


def chosen(log: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return log.gather(-1, ids[:, 1:, None])[..., 0]


def log_probs(model: LM, ids: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    return chosen((model(ids) / temperature).log_softmax(-1), ids)


def of_other(models: Models, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return log_probs(models.other, ids)


def critic(models: Models, ids: torch.Tensor, inputs: Tensors) -> torch.Tensor:
    return (models.policy.value(models.policy.hidden(ids))[:, :-1, 0] - inputs["old"]) ** 2


def clipped_ratio(models: Models, ids: torch.Tensor, inputs: Tensors) -> torch.Tensor:
    ratio = (log_probs(models.policy, ids, 0.7) - inputs["old"]).exp()
    return -torch.min(ratio * inputs["advantages"], ratio.clamp(0.8, 1.2) * inputs["advantages"])


def sequence_ratio(models: Models, ids: torch.Tensor, inputs: Tensors) -> torch.Tensor:
    ratio = (log_probs(models.policy, ids) - inputs["old"]).mean(1).exp()
    return -torch.min(ratio * inputs["advantages"][:, 0], ratio.clamp(0.8, 1.2) * inputs["advantages"][:, 0])


def truncated_importance_sampling(models: Models, ids: torch.Tensor, inputs: Tensors) -> torch.Tensor:
    mine = log_probs(models.policy, ids)
    return -(mine.detach() - inputs["old"]).exp().clamp(max=2) * mine * inputs["advantages"]


def divergence_by_samples(models: Models, ids: torch.Tensor, inputs: Tensors) -> torch.Tensor:
    """On-policy distillation by samples, or the penalty of a reference model (k3)."""
    apart = of_other(models, ids) - log_probs(models.policy, ids)
    return apart.exp() - apart - 1


def top_k_forward(models: Models, ids: torch.Tensor, inputs: Tensors) -> torch.Tensor:
    mine = models.policy(ids).log_softmax(-1).gather(-1, inputs["teacher_ids"])
    return (inputs["teacher"].exp() * (inputs["teacher"] - mine)).sum(-1)


def top_k_reverse(models: Models, ids: torch.Tensor, inputs: Tensors) -> torch.Tensor:
    mine = models.policy(ids).gather(-1, inputs["teacher_ids"]).log_softmax(-1)
    return (mine.exp() * (mine - inputs["teacher"])).sum(-1)


def top_k_jensen_shannon(models: Models, ids: torch.Tensor, inputs: Tensors) -> torch.Tensor:
    mine = models.policy(ids).gather(-1, inputs["teacher_ids"]).log_softmax(-1)
    middle = torch.logaddexp(mine, inputs["teacher"]) - 0.6931471805599453
    theirs = inputs["teacher"].exp() * (inputs["teacher"] - middle)
    return (theirs + mine.exp() * (mine - middle)).sum(-1) / 2


def top_k_of_a_teacher(models: Models, ids: torch.Tensor, inputs: Tensors) -> torch.Tensor:
    with torch.no_grad():
        top = models.other(ids).log_softmax(-1).topk(K, -1)
    mine = models.policy(ids).log_softmax(-1).gather(-1, top.indices)
    return (top.values.exp() * (top.values - mine)).sum(-1)


def full_forward_divergence(models: Models, ids: torch.Tensor, inputs: Tensors) -> torch.Tensor:
    mine, theirs = (one(ids).log_softmax(-1) for one in (models.policy, models.other))
    return F.kl_div(mine, theirs, log_target=True, reduction="none").sum(-1)


def full_reverse_divergence(models: Models, ids: torch.Tensor, inputs: Tensors) -> torch.Tensor:
    mine, theirs = (one(ids).log_softmax(-1) for one in (models.policy, models.other))
    return (mine.exp() * (mine - theirs)).sum(-1)


def replayed_truncation(models: Models, ids: torch.Tensor, inputs: Tensors) -> torch.Tensor:
    """Top-p or top-k of a sampler, as the ids that it kept, of which -1 is none, under its temperature."""
    hot, kept = models.policy(ids) / 0.7, inputs["kept"]
    among = hot.gather(-1, kept.clamp(min=0)).masked_fill(kept < 0, -torch.inf).logsumexp(-1)
    return (among - chosen(hot, ids)) * inputs["advantages"]


def soft_cap(models: Models, ids: torch.Tensor, inputs: Tensors) -> torch.Tensor:
    return -chosen((30 * (models.policy(ids) / 30).tanh()).log_softmax(-1), ids) * inputs["advantages"]


def label_smoothing(models: Models, ids: torch.Tensor, inputs: Tensors) -> torch.Tensor:
    logits = models.policy(ids).transpose(1, 2)
    return F.cross_entropy(logits, ids[:, 1:], reduction="none", label_smoothing=0.1)


def z_loss(models: Models, ids: torch.Tensor, inputs: Tensors) -> torch.Tensor:
    logits = models.policy(ids)
    return 0.01 * logits.logsumexp(-1) ** 2 - chosen(logits.log_softmax(-1), ids)


def entropy_bonus(models: Models, ids: torch.Tensor, inputs: Tensors) -> torch.Tensor:
    log = models.policy(ids).log_softmax(-1)
    return 0.1 * (log.exp() * log).sum(-1) - chosen(log, ids) * inputs["advantages"]


def accuracy(models: Models, ids: torch.Tensor, inputs: Tensors) -> torch.Tensor:
    logits = models.policy(ids)
    return (logits.argmax(-1) == ids[:, 1:]).float() - chosen(logits.log_softmax(-1), ids)


def squared_probabilities(models: Models, ids: torch.Tensor, inputs: Tensors) -> torch.Tensor:
    logits = models.policy(ids)
    return ((2 * logits).logsumexp(-1) - 2 * logits.logsumexp(-1)).exp() * 100


LOSSES: dict[str, Loss] = {
    function.__name__.replace("_", " "): function
    for function in (
        critic, clipped_ratio, sequence_ratio, truncated_importance_sampling, divergence_by_samples, top_k_forward,
        top_k_reverse, top_k_jensen_shannon, top_k_of_a_teacher, full_forward_divergence, full_reverse_divergence,
        replayed_truncation, soft_cap, label_smoothing, z_loss, entropy_bonus, accuracy, squared_probabilities,
    )
}  # fmt: skip


def batch(rows: int, tokens: int, common: int, vocabulary: int, dtype: torch.dtype) -> tuple[torch.Tensor, Tensors]:
    """Draw ids `[B, S]` that begin alike, and what losses take beside them, `[B, S - 1]` and `[B, S - 1, K]`."""
    draw = torch.Generator().manual_seed(rows)
    ids = torch.randint(vocabulary, (rows, tokens), generator=draw)
    ids[:, :common] = ids[0, :common]
    shape = (rows, tokens - 1)
    named = torch.randint(vocabulary // K, (*shape, K), generator=draw) * K + torch.arange(K)
    inputs = {
        "old": torch.randn(shape, generator=draw, dtype=dtype) - 10,
        "advantages": torch.randn(shape, generator=draw, dtype=dtype),
        "teacher_ids": named,
        "teacher": torch.randn(*shape, K, generator=draw, dtype=dtype).log_softmax(-1),
        "kept": named.masked_fill(torch.arange(K) > named[..., :1] % K, -1),
    }
    return ids, inputs


def compiled_of(models: Models, name: str, **options: int) -> Callable[[torch.Tensor, Tensors], torch.Tensor]:
    def function(ids: torch.Tensor, inputs: Tensors) -> torch.Tensor:
        return LOSSES[name](models, ids, inputs)

    return torch.compile(function, backend="dta", options=options)


def difference(name: str) -> float:
    """Return the largest difference of values and of gradients to eager mode, of the largest entry of each."""
    torch._dynamo.reset()
    models = Models(LEAST).double()
    ids, inputs = batch(5, 12, 7, LEAST, torch.float64)
    ids[3:, 7:10] = ids[3, 7:10]
    ids[4] = ids[3]
    found = []
    compiled = compiled_of(models, name, chunk_size=5)
    for of_rows in (
        compiled,
        lambda *args: torch.cat(
            [
                LOSSES[name](models, ids[i : i + 1], {key: value[i : i + 1] for key, value in inputs.items()})
                for i in range(len(ids))
            ]
        ),
    ):
        models.zero_grad()
        values = of_rows(ids, inputs)
        (values * torch.arange(1, values.numel() + 1).view(values.shape) / values.numel()).sum().backward()
        grads = [one.grad for one in models.policy.parameters() if one.grad is not None]
        found.append([values.detach(), *(grad.clone() for grad in grads)])
    assert len(found[0]) == len(found[1])
    assert dta_compile.last_plan(compiled).stats.compression > 1.5
    pairs = zip(*found, strict=True)
    return max(float((mine - theirs).abs().max() / theirs.abs().max()) for mine, theirs in pairs)


def _measure(name: str, tokens: int, vocabulary: int, threads: int, results: multiprocessing.Queue) -> None:
    torch.set_num_threads(threads)
    os.environ["DTA_KEEP_PAGES"] = "0"
    models = Models(vocabulary)
    compiled = compiled_of(models, name)

    def step(rows: int, length: int) -> None:
        compiled(*batch(rows, length, COMMON, vocabulary, torch.float32)).sum().backward()

    for _ in range(2):
        step(2, 64)
    started = time.perf_counter()
    peak = growth(models, lambda: step(tokens // ROW, ROW), steps=1)
    results.put((peak, time.perf_counter() - started, dta_compile.last_plan(compiled).stats.tree_tokens))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--vocabulary", type=int, default=131_072)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=LOSSES, default=list(LOSSES))
    options = parser.parse_args()
    logits = options.tokens * options.vocabulary * 4 / 1e9
    print(f"{options.tokens:,} tokens, vocabulary {options.vocabulary:,}: logits would be {logits:.1f} GB\n")
    print("| loss | difference, float64 | peak | seconds | tokens of the tree |\n|---|---|---|---|---|", flush=True)
    for name in options.only:
        apart = difference(name)
        assert apart < EXACT, (name, apart)
        results: multiprocessing.Queue = multiprocessing.get_context("spawn").Queue()
        arguments = (name, options.tokens, options.vocabulary, options.threads, results)
        process = multiprocessing.get_context("spawn").Process(target=_measure, args=arguments)
        process.start()
        process.join()
        peak, seconds, tree = results.get(timeout=5)
        print(f"| {name} | {apart:.0e} | {peak / 1e6:,.0f} MB | {seconds:.0f} s | {tree:,} |", flush=True)


if __name__ == "__main__":
    main()
