"""On-policy distillation by verl's worker, its engine and its loss, on ranks that torchrun starts.

Rollouts stand in for those of an inference engine, and a model of other weights is the teacher.
"""

from __future__ import annotations

import functools
import json
import tempfile
import types
from typing import Any

import torch
import torch.distributed as dist
from transformers import Qwen3ForCausalLM
from verl.trainer.distillation import distillation_ppo_loss
from verl.utils import tensordict_utils
from verl.workers.config import DistillationLossConfig, TrainingWorkerConfig
from verl.workers.engine_workers import TrainingWorker

from dta_compile import last_plan
from tests.support import verl_cpu

UPDATES, K = 3, 5
SETTINGS = verl_cpu.Settings(rows=3, temperature=0.9)


def rollout(step: int) -> list[Any]:
    """Return this rank's rows of a step, neighbours of a tree on different ranks."""
    rows = verl_cpu.nested_rollouts(verl_cpu.VOCABULARY, seed=step)
    ranks = dist.get_world_size()
    return [one for i, one in enumerate(rows) if (i + i // 2) % ranks == dist.get_rank()]


@torch.no_grad()
def batch(step: int, teacher: Any) -> Any:
    """Return a mini-batch of verl's layout with the teacher's largest log-probs at each token."""
    rows = rollout(step)
    log_probs = [teacher(torch.from_numpy(row.tokens.astype("int64"))[None]).logits[0].log_softmax(-1) for row in rows]
    largest = [one.topk(K) for one in log_probs]
    data = verl_cpu.data_of(rows, SETTINGS)
    for name, entry in (("teacher_ids", "indices"), ("teacher_logprobs", "values")):
        data[name] = torch.nested.as_nested_tensor([getattr(one, entry) for one in largest], layout=torch.jagged)
    tensordict_utils.assign_non_tensor(data, distillation_use_topk=True, distillation_only=True, num_mini_batch=1)
    return data


def trained(strategy: str, student: str, teacher: Any) -> tuple[dict[str, torch.Tensor], Any, list[float]]:
    """Return the weights, the engine, and the losses of the updates of verl's worker."""
    worker = TrainingWorker(TrainingWorkerConfig(**verl_cpu.parts_of(strategy, student, SETTINGS)))
    how = DistillationLossConfig(
        loss_mode="forward_kl_topk", topk=K, use_policy_gradient=False, use_task_rewards=False, log_prob_min_clamp=-4.0
    )
    config = types.SimpleNamespace(distillation_loss=how)
    actor = verl_cpu.actor_of(verl_cpu.REFERENCE, SETTINGS)
    worker.set_loss_fn(functools.partial(distillation_ppo_loss, config=actor, distillation_config=config))
    worker.reset()
    metrics = [
        tensordict_utils.get(worker.train_mini_batch(batch(step, teacher)), "metrics") for step in range(UPDATES)
    ]
    named = worker.engine.module.named_parameters()
    weights = {name: verl_cpu.full(parameter.detach()).clone() for name, parameter in named}
    return weights, worker.engine, [float(torch.tensor(one["loss"]).sum()) for one in metrics]


def main() -> None:
    torch.set_num_threads(1)
    torch.cpu.max_memory_allocated = torch.cpu.max_memory_reserved = lambda: 0  # type: ignore[attr-defined]
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as folder, verl_cpu.verl_on_cpu():
        student, other = f"{folder}/student", f"{folder}/teacher"
        verl_cpu.save_model(student, verl_cpu.VOCABULARY)
        verl_cpu.save_model(other, verl_cpu.VOCABULARY, seed=1)
        teacher = Qwen3ForCausalLM.from_pretrained(other)
        start = dict(Qwen3ForCausalLM.from_pretrained(student).named_parameters())
        expected, _, losses = trained(verl_cpu.REFERENCE, student, teacher)
        weights, engine, ours = trained("dta", student, teacher)
        found = {
            "moved": min(float((expected[name] - start[name]).detach().abs().max()) for name in expected),
            "difference": max(float((value - expected[name]).abs().max()) for name, value in weights.items()),
            "losses": [losses, ours],
            "compression": last_plan(engine.token_values).stats.compression,
        }
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
