"""An actor of verl as its default configuration makes it, on ranks that torchrun starts: `strategy=fsdp2`, then `dta`.

    torchrun --standalone --nproc-per-node 2 -m tests.support.verl_defaults [--mixed] [--sgd] [--small] [--ulysses]

verl's own configuration files are composed, its `ActorRolloutRefWorker` scores and updates on the bundled rollouts (or
on `--small` ones), which its trainer's balancing divides among ranks. What is not verl's default: the model, one
mini-batch of all rows, the size of a micro-batch (which verl wants to be told), attention for CPUs in its own engine,
and float32 with SGD unless `--mixed`: AdamW makes whole steps of rounding where a gradient is almost zero. So with
`--mixed`, verl's AdamW unless `--sgd`, both engines are compared with verl's in float32 under the same optimizer.
With `--ulysses` two ranks have equal rows in ours, and one tree.
"""

from __future__ import annotations

import functools
import json
import pathlib
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import verl
from hydra import compose, initialize_config_dir
from verl.utils import tensordict_utils
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions
from verl.workers.engine_workers import ActorRolloutRefWorker

from dta_compile import last_plan
from dta_compile.data import bundled, load_rollouts, vocab_size
from dta_compile.plan import PrefixTree
from tests.support import verl_cpu

UPDATES = 3
SIZES = {**verl_cpu.HEADS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
CONFIGURATION = pathlib.Path(verl.__file__).parent / "trainer" / "config"


def configuration(strategy: str, model: str, rows: int, mixed: bool, sgd: bool, ulysses: int) -> Any:
    """Return verl's configuration of actor, rollout and reference with the strategy."""
    actor = "actor_rollout_ref.actor"
    changes = [
        f"{actor}.strategy={strategy}",
        f"{actor}.ppo_mini_batch_size={rows}",
        f"{actor}.ulysses_sequence_parallel_size={ulysses}",
        f"{actor}.ppo_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
        f"actor_rollout_ref.model.path={model}",
        "+actor_rollout_ref.model.load_tokenizer=false",
    ]
    if strategy != "dta":
        changes += ["+actor_rollout_ref.model.override_config.attn_implementation=sdpa"]
    if sgd:
        changes += [f"{actor}.optim.optimizer=SGD", f"{actor}.optim.lr=0.1"]
    if not mixed:
        changes += [f"+{actor}.fsdp_config.mixed_precision={{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}}"]
    with initialize_config_dir(str(CONFIGURATION), version_base=None):
        return compose("ppo_trainer", changes)


def own_rows(lengths: list[int], ranks: int) -> list[list[int]]:
    """Return the rows of each rank as verl's `_balance_batch` orders them."""
    work = calculate_workload(torch.tensor(lengths))
    parts = get_seqlen_balanced_partitions(work, k_partitions=ranks, equal_size=True)
    ordered = [sorted(part, key=lambda row: (work[row], row)) for part in parts]
    return [part[::2] + part[1::2][::-1] for part in ordered]


def batch(rollouts: list[Any], config: Any, total: int, old: torch.Tensor | None = None) -> Any:
    """Return a rank's rows with the settings that verl's trainer sends to its workers."""
    data = verl_cpu.data_of(rollouts, verl_cpu.Settings(), old)
    for name in ("use_remove_padding", "use_dynamic_bsz", "max_token_len_per_gpu", "micro_batch_size_per_gpu"):
        tensordict_utils.pop(data, name)
    tensordict_utils.assign_non_tensor(
        data,
        calculate_entropy=False,
        distillation_use_topk=False,
        distillation_only=False,
        global_batch_size=total,
        mini_batch_size=total,
        epochs=config.ppo_epochs,
        seed=config.data_loader_seed,
        dataloader_kwargs={"shuffle": config.shuffle},
        compute_loss=True,
    )
    return data


def trained(
    strategy: str, path: str, rollouts: list[Any], mixed: bool, sgd: bool, ulysses: int = 1
) -> tuple[dict[str, Any], Any]:
    """Return weights, log-probs before, and gradient norms of the updates; and the engine."""
    config = configuration(strategy, path, len(rollouts), mixed, sgd, ulysses).actor_rollout_ref
    worker = ActorRolloutRefWorker(config, role="actor")
    worker.init_model()
    rank, ranks = dist.get_rank() // ulysses, dist.get_world_size() // ulysses
    numbers = own_rows([len(one) for one in rollouts], ranks)[rank]
    mine = [rollouts[row] for row in numbers]
    make = functools.partial(batch, mine, config.actor, len(rollouts))
    data = make()
    tensordict_utils.assign_non_tensor(data, calculate_entropy=True, compute_loss=False)
    scores = worker.compute_log_prob(data)  # None but on the first of ranks with equal rows
    given = gathered(None if scores is None else [row.float() for row in scores["log_probs"].unbind()])[rank * ulysses]
    old = verl_cpu.response_values(torch.nested.as_nested_tensor(given, layout=torch.jagged), data)
    updates = (worker.update_actor(make(old)) for _ in range(UPDATES))
    metrics = [gathered(None if done is None else tensordict_utils.get(done, "metrics")) for done in updates]
    norms = [float(torch.tensor(of_ranks[rank * ulysses]["grad_norm"]).sum()) for of_ranks in metrics]
    named = worker.actor.engine.module.named_parameters()
    weights = {name: verl_cpu.full(parameter.detach()).float().clone() for name, parameter in named}
    rows = {number: row[:-1] for number, row in zip(numbers, given, strict=True)}
    return {"weights": weights, "scores": rows, "norms": norms, "given": mine}, worker.actor.engine


def gathered(own: Any) -> list[Any]:
    """Return the values of all ranks."""
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    return of_ranks


def main() -> None:
    mixed = "--mixed" in sys.argv
    sgd = not mixed or "--sgd" in sys.argv
    torch.set_num_threads(1)
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved", "empty_cache"):
        setattr(torch.cpu, name, lambda *_: 0)
    dist.init_process_group("gloo")
    small = "--small" in sys.argv
    rollouts = verl_cpu.nested_rollouts(verl_cpu.VOCABULARY) if small else load_rollouts(bundled(), dense=True)
    vocabulary = verl_cpu.VOCABULARY if small else vocab_size(bundled(), 64)
    with tempfile.TemporaryDirectory() as path, verl_cpu.verl_on_cpu():
        verl_cpu.save_model(path, vocabulary, **({} if small else SIZES))
        start = verl_cpu.Qwen3ForCausalLM.from_pretrained(path).state_dict()
        expected, _ = trained(verl_cpu.REFERENCE, path, rollouts, mixed, sgd)
        ours, engine = trained("dta", path, rollouts, mixed, sgd, 2 if "--ulysses" in sys.argv else 1)
        exact = trained(verl_cpu.REFERENCE, path, rollouts, False, sgd)[0] if mixed else expected
    tokens = sum(map(len, rollouts))
    plan = last_plan(engine.token_values)
    ran = gathered(plan.prefix_tree.num_rows if plan.dealing is None else plan.dealing.tokens[plan.rank])
    given = gathered(PrefixTree.build([one.tokens for one in expected["given"]]).num_rows)
    names = expected["weights"].keys()

    def apart(one: Any, other: Any) -> float:
        return max(float((one["weights"][name] - other["weights"][name]).abs().max()) for name in names)

    def from_exact(one: Any) -> float:
        apart = [(one["weights"][name] - exact["weights"][name]).flatten() for name in names]
        return float(
            torch.cat(apart).norm() / torch.cat([(exact["weights"][n] - start[n]).flatten() for n in names]).norm()
        )

    def off(scores: dict[int, torch.Tensor]) -> float:
        """Return the mean distance of log-probs from exact ones, over rows that this rank has in both."""
        both = scores.keys() & exact["scores"].keys()
        return float(torch.cat([(scores[row] - exact["scores"][row]).abs() for row in both]).mean()) if both else 0.0

    found = {
        "ranks": dist.get_world_size(),
        "moved": max(float((expected["weights"][name] - start[name]).abs().max()) for name in names),
        "difference": apart(ours, expected),
        "from_exact": [from_exact(one) for one in (ours, expected)],
        "scores": [off(one["scores"]) for one in (ours, expected)],
        "norms": [ours["norms"], expected["norms"], exact["norms"]],
        "all_rows": tokens / PrefixTree.build([one.tokens for one in rollouts]).num_rows,
        "compression": tokens / sum(ran),
        "slowest": tokens / len(ran) / max(ran),
        "compression_of_verls": tokens / sum(given),
    }
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
