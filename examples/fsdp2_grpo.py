"""GRPO on many ranks: rollouts are distributed as balanced prefix trees, and FSDP2 shards the model.

    torchrun --nproc-per-node 2 examples/fsdp2_grpo.py [--steps 3] [--one-tree] [--check]

Every rank "generates" every K-th of the bundled rollouts, as asynchronous rollout workers would hand them over.
`scatter` redistributes them, so that rollouts with long common prefixes meet on one rank and all ranks have nearly
equal work. Then each rank runs its own schedule, and FSDP2 reduces the gradients. With `--one-tree` rollouts stay where
they are, and all ranks run one tree of them: no token is computed twice. Runs on CPU with gloo or on GPUs with NCCL.
`--check` also trains everything eagerly in one process and compares the weights. Without torchrun there is one rank.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import Qwen3Config, Qwen3ForCausalLM

import dta_compile
from dta_compile import distributed
from dta_compile.data import bundled, load_rollouts, pad_batch, vocab_size


@dataclasses.dataclass(frozen=True)
class Settings:
    """Training data and model: the first `turns` turns of each bundled rollout, and a Qwen3 of this size in float64."""

    steps: int = 3
    turns: int = 2
    hidden: int = 64
    layers: int = 2
    learning_rate: float = 1e-2
    one_tree: bool = False
    check: bool = False


class TokenLogProbs(torch.nn.Module):
    """Module for the log-probs `[B, S]` of the labels. FSDP2 wraps the same module that is compiled."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=vocab_size(bundled(), multiple=64),
            hidden_size=settings.hidden,
            intermediate_size=2 * settings.hidden,
            num_hidden_layers=settings.layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=settings.hidden // 4,
            use_cache=False,
        )
        self.model = Qwen3ForCausalLM(config).double().train()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.model(input_ids, attention_mask=attention_mask).logits
        return logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]


def generated(rank: int, ranks: int, settings: Settings) -> dict[str, torch.Tensor]:
    """Return the rollouts of this rank: every `ranks`-th one."""
    rollouts = [rollout for rollout in load_rollouts(bundled(), dense=True) if rollout.turn < settings.turns]
    batch = pad_batch(rollouts[rank::ranks])
    return {name: torch.from_numpy(value) for name, value in vars(batch).items()}


def loss_of(policy: Any, batch: dict[str, torch.Tensor], group: Any = None) -> torch.Tensor:
    """Return GRPO's loss as a mean over all ranks' tokens; on policy, the ratio's gradient is that of the log-prob."""
    logprobs = policy(batch["input_ids"], batch["attention_mask"], batch["labels"])
    return distributed.token_mean(-logprobs * batch["advantages"][:, None], batch["loss_mask"], group=group)


def train(settings: Settings, report: Any = print) -> dict[str, torch.Tensor]:
    """Train on the ranks of the initialised process group; return the full weights, on rank 0 only."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    policy = TokenLogProbs(settings).to(device)
    over_ranks = {"strategy": "one_tree", "mesh": dist.group.WORLD} if settings.one_tree else {}
    policy.forward = torch.compile(policy.forward, backend="dta", options={"chunk_size": 512, **over_ranks})
    # The compiled graph reads all parameters at once, so they stay gathered from forward to backward.
    fully_shard(policy, reshard_after_forward=False)
    optimizer = torch.optim.SGD(policy.parameters(), lr=settings.learning_rate)
    for step in range(settings.steps):
        started = time.perf_counter()
        rollouts = {name: value.to(device) for name, value in generated(rank, ranks, settings).items()}
        tokens = ""
        if settings.one_tree:
            rollouts["labels"] = rollouts["labels"].clamp(min=0)  # gather() reads all labels, also masked ones
        else:
            shard = distributed.scatter(rollouts, padding={"labels": 0})
            rollouts, tokens = shard.batch, f"tree tokens {shard.costs}, imbalance {shard.imbalance:.2f}, "
        loss = loss_of(policy, rollouts)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)  # gradients are averaged over ranks, so the loss is as well
        total /= ranks
        if rank == 0:
            report(
                f"step {step}: loss {total:+.6f}, gradient norm {float(norm):.4f}, {tokens}"
                f"{time.perf_counter() - started:.1f} s"
            )
    if rank == 0:
        report(str(dta_compile.last_plan(policy.forward)))
    return get_model_state_dict(policy, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def train_alone(settings: Settings) -> dict[str, torch.Tensor]:
    """Run the same steps on all rollouts in one process, eagerly and one rollout at a time."""
    policy = TokenLogProbs(settings)
    optimizer = torch.optim.SGD(policy.parameters(), lr=settings.learning_rate)
    batch = generated(0, 1, settings)
    total = int(batch["loss_mask"].sum())
    for _ in range(settings.steps):
        for row in range(len(batch["input_ids"])):
            rollout = {name: value[row : row + 1] for name, value in batch.items()}
            length = int(rollout["attention_mask"].sum())
            logprobs = policy(*(rollout[name][:, :length] for name in ("input_ids", "attention_mask", "labels")))
            (-(logprobs * rollout["advantages"])[rollout["loss_mask"][:, :length]].sum() / total).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return policy.state_dict()


def difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the largest max |difference| / max |weight| over all tensors."""
    return max(
        float((found[name] - value).abs().max() / value.abs().max().clamp(min=1e-6)) for name, value in expected.items()
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--turns", type=int, default=Settings.turns, help="of each bundled rollout")
    parser.add_argument("--layers", type=int, default=Settings.layers)
    parser.add_argument("--one-tree", action="store_true", help="over all ranks")
    parser.add_argument("--check", action="store_true", help="compare with one process")
    settings = Settings(**vars(parser.parse_args()))
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" not in os.environ:  # not under torchrun
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    dist.init_process_group()
    error = 0.0
    try:
        weights = train(settings)
        if settings.check and dist.get_rank() == 0:
            error = difference(weights, train_alone(settings))
            print(f"largest difference of the weights to those of one eager process: {error:.1e}")
        # Gloo's threads may still release tensors of the last transfer after the wait for it; a rank that exits at that
        # moment is aborted by Python's shutdown.
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return 0 if error < 1e-5 else 1  # transformers computes norms in float32


if __name__ == "__main__":
    raise SystemExit(main())
