"""Measure one tree over gloo ranks against own trees: steps of both in turns, and what `auto` takes.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.balancing.one_tree_measured

"Processor" is the time that the busiest rank's processor was busy, which other load on the machine barely lengthens;
one thread a rank; the bundled rollouts, Qwen3 of 4 layers and hidden size 256 in float32, DistributedDataParallel. A
step is forward and backward with the reduction of gradients, and the slowest rank's. Prints a table.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dta_compile
from benchmarks.batches.model import build_model
from dta_compile import distributed
from dta_compile.data import bundled, load_rollouts, vocab_size

Batch = dict[str, torch.Tensor]
HEAD = """\
| rows | way | processor, s | of own trees' | wall, s | least .. most | tokens run by ranks | predicted, s |
| --- | --- | --- | --- | --- | --- | --- | --- |"""


class LogProbs(nn.Module):
    """Log-probs `[B, S]` of the next tokens."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.model = build_model(vocabulary)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        logits = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
        labels = nn.functional.pad(input_ids[:, 1:], (0, 1))
        return logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]


def rows(deal: str) -> Batch:
    """Return this rank's rows of the bundled rollouts: "in order", "in turn" (one each), or "all on the first rank"."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rollouts = load_rollouts(bundled(), dense=True)
    share = -(-len(rollouts) // ranks)
    own = {"in order": rollouts[rank * share :][:share], "in turn": rollouts[rank::ranks]}.get(deal)
    if own is None:
        own = rollouts if rank == 0 else []
    width = max((len(one) for one in own), default=1)
    ids, mask = torch.zeros(2, max(len(own), 1), width, dtype=torch.long)
    for row, one in enumerate(own):
        ids[row, : len(one)], mask[row, : len(one)] = torch.from_numpy(one.tokens).long(), 1
    return {"input_ids": ids, "attention_mask": mask}


def step(model: nn.Module, batch: Batch) -> tuple[float, float]:
    """Run a step; return the seconds of the slowest rank, and the most that a rank's processor was busy."""
    dist.barrier()
    start, busy = time.perf_counter(), time.process_time()
    logprobs = model(**batch)
    (logprobs * batch["attention_mask"] * torch.linspace(0.5, 1, logprobs.shape[1])).sum().backward()
    seconds = torch.tensor([time.perf_counter() - start, time.process_time() - busy])
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    model.zero_grad()
    return tuple(seconds.tolist())


def ran(model: nn.Module) -> tuple[str, list[int], float]:
    """Return the strategy of the last call, the tokens that each rank ran, and the predicted seconds of the slowest."""
    plan = dta_compile.last_plan(model.module)
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, (plan.stats.tree_tokens, plan.estimates.seconds))
    tokens = [count for count, _ in of_ranks] if plan.dealing is None else plan.dealing.tokens
    return "own trees" if plan.dealing is None else "one tree", tokens, max(seconds for _, seconds in of_ranks)


def measure(
    deal: str, vocabulary: int, rounds: int, warm: int, say: Callable[..., None], chosen: Sequence[str] | None = None
) -> None:
    """Print the rows of the table for a division of the rows."""
    batch = rows(deal)
    made = distributed.scatter(batch).batch
    group = dist.group.WORLD
    ways: dict[str, tuple[dict[str, Any], Batch]] = {
        "own trees": ({}, batch),
        "own trees, after `scatter`": ({}, made),
        "one tree": ({"strategy": "one_tree", "mesh": group}, batch),
        "`auto`": ({"mesh": group}, batch),
        "`auto`, after `scatter`": ({"mesh": group}, made),
    }
    ways = {name: way for name, way in ways.items() if chosen is None or name in chosen}
    steps: dict[str, Callable[[], tuple[float, float]]] = {}
    models = {}
    for name, (options, own) in ways.items():
        torch.compiler.reset()
        compiled = torch.compile(LogProbs(vocabulary), backend="dta", options={"codegen": "inductor", **options})
        models[name] = DistributedDataParallel(compiled)
        steps[name] = functools.partial(step, models[name], own)
        for _ in range(warm):
            steps[name]()
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, run in steps.items():
            taken[name].append(run())
    medians = {name: [statistics.median(column) for column in zip(*taken[name], strict=True)] for name in ways}
    for name in ways:
        wall, busy = medians[name]
        strategy, tokens, predicted = ran(models[name])
        took = f" took {strategy}" if "auto" in name else ""
        counts = " + ".join(f"{count:,}" for count in tokens)
        reference = "own trees, after `scatter`" if "scatter" in name else "own trees"
        spread = [seconds for seconds, _ in taken[name]]
        say(
            f"| {deal} | {name}{took} | {busy:.2f} | {busy / medians[reference][1]:.2f} | {wall:.2f} | "
            f"{min(spread):.2f} .. {max(spread):.2f} | {counts} | {predicted:.2f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="steps of each way, in turns (default: %(default)s)")
    parser.add_argument("--warm", type=int, default=4, help="steps before them (default: %(default)s)")
    parser.add_argument("--deals", nargs="+", default=["in order", "in turn", "all on the first rank"])
    parser.add_argument("--ways", nargs="+", help="some of the table's, own trees among them (default: all)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    vocabulary = vocab_size(bundled(), 64)

    def say(*words: object) -> None:
        if dist.get_rank() == 0:
            print(*words, flush=True)

    say(HEAD)
    for deal in arguments.deals:
        measure(deal, vocabulary, arguments.rounds, arguments.warm, say, arguments.ways)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
