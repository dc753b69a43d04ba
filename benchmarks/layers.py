"""Memory, gathers and seconds of a step of a deep model: layer by layer, and rivals with checkpointed layers.

    python -m benchmarks.layers [--methods ours,packed,eager] [--layers 24,64] [--dtypes bfloat16] [--repetitions 1]
    python -m benchmarks.layers --ranks 4       # gloo, FSDP2 on every layer; "whole" gathers all of it at once
    python -m benchmarks.layers --ranks 2 --methods ours,whole --in-turns --repetitions 9       # seconds alone

A line each: growth of resident memory, bytes that are allocated at their peak, what the plan predicted,
gathers and reductions a step, median seconds. Every method runs in a process of its own, after a step on another batch
of the same sizes; weights and (unless `--optimizer`, an SGD step in each parameter's hook) gradients are there before.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups
from transformers import AutoModelForCausalLM, Qwen3Config

import dta_compile
from benchmarks.batches.trees import build
from benchmarks.batches.workloads import Workload
from benchmarks.measuring.allocations import allocated_at_the_peak, counting
from benchmarks.methods.baselines import checkpoint, sparse_checkpoint
from benchmarks.methods.ours import compile_logprobs
from benchmarks.methods.steps import Step, rectangle_of

SHAPE = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 4}
VOCABULARY = 2048


def workload(seed: int, rows: int | None) -> Workload:
    """Return rollouts of a seed: rows of 256 tokens that share none, or 16 rollouts of 1,024 tree tokens."""
    tree = ((1, 512), (16, 32)) if rows is None else ((rows, 256),)
    return Workload("layers", "layers", "", VOCABULARY, build(tree, VOCABULARY, seed))


def prepared(
    method: str,
    layers: int,
    dtype: torch.dtype,
    sharding: dict[str, Any],
    options: dict[str, Any],
    workloads: list[Workload],
) -> Any:
    """Return the model, its steps and a function that says what the plan of the last one predicted."""
    torch.manual_seed(0)
    config = Qwen3Config(**SHAPE, head_dim=64, num_hidden_layers=layers, vocab_size=VOCABULARY, use_cache=False)
    config.tie_word_embeddings = False
    model = AutoModelForCausalLM.from_config(config).train().to(dtype)
    if dist.is_initialized():
        for module in [*model.model.layers, model]:
            fully_shard(module, **sharding)
    if method in ("packed", "eager"):
        prepare = (sparse_checkpoint if method == "packed" else checkpoint)(model)
        return model, [prepare(batch) for batch in workloads], lambda: 0
    options = {"memory_budget": 0, "sweep": "chunks" if method == "whole" else "auto", **options}
    function, _ = compile_logprobs(model, method, "dta", options)

    def step(batch: Workload) -> Step:
        ids, labels, weights, mask = rectangle_of(batch)
        return Step(lambda: (weights * function(ids, labels, mask)).sum().backward())

    return model, list(map(step, workloads)), lambda: dta_compile.last_plan(function)


def status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def grown(run: Callable[[], None]) -> int:
    """Return by how many bytes resident memory grows during a run."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM is now VmRSS
    before = status_bytes("VmRSS")
    run()
    return status_bytes("VmHWM") - before


class Counted:
    """Counts calls of a function of FSDP2."""

    def __init__(self, name: str) -> None:
        self.calls, self.function = 0, getattr(groups, name)
        setattr(groups, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.function(*args, **kwargs)


def sharding_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return keyword arguments of `fully_shard`."""
    sharding: dict[str, Any] = {"reshard_after_forward": False} if arguments.keep_gathered else {}
    if arguments.policy:
        sharding["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return sharding


def measure_in_turns(arguments: argparse.Namespace) -> None:
    """Time steps of several methods in turns in this process, each with a model of its own, and print the medians."""
    names = arguments.methods.split(",")
    options, dtype = json.loads(arguments.options), getattr(torch, arguments.dtypes)
    rank, batches = batches_of(arguments)
    prepared_methods = [
        prepared(name, int(arguments.layers), dtype, sharding_of(arguments), options, batches) for name in names
    ]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for repetition in range(-2, arguments.repetitions):
        for name, (model, (warm_up, step), _) in zip(names, prepared_methods, strict=True):
            model.zero_grad(set_to_none=False)
            if dist.is_initialized():
                dist.barrier()
            started = time.perf_counter()
            (step if repetition >= 0 else warm_up).run()
            if repetition >= 0:
                seconds[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    if rank == 0:
        for name, median in medians.items():
            print(f"{name:8} {median:.2f} s, {median / medians[names[-1]]:.3f} of {names[-1]}", flush=True)


def batches_of(arguments: argparse.Namespace) -> tuple[int, list[Workload]]:
    """Return the rank of this process, and two batches of one shape."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    rows = arguments.rows if arguments.ranks > 1 else None
    return rank, [workload(10 * seed + rank, rows) for seed in range(2)]


def measure(arguments: argparse.Namespace) -> None:
    """Measure one method in this process and print its line, on the first rank."""
    rank, batches = batches_of(arguments)
    dtype = getattr(torch, arguments.dtypes)
    model, (warm_up, step), plan_of = prepared(
        arguments.methods, int(arguments.layers), dtype, sharding_of(arguments), json.loads(arguments.options), batches
    )
    if arguments.optimizer:

        def update(parameter: torch.Tensor) -> None:
            with torch.no_grad():
                parameter -= 1e-6 * parameter.grad
            parameter.grad = None

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)
    for _ in range(2):  # FSDP2 gathers all in the first call, which is compared with eager mode
        warm_up.run()
    model.zero_grad(set_to_none=arguments.optimizer)
    seconds = []
    counters = [Counted(name) for name in ("foreach_all_gather", "foreach_reduce")]

    def timed() -> None:
        started = time.perf_counter()
        step.run()
        seconds.append(time.perf_counter() - started)

    growth = grown(timed)
    collectives = " and ".join(str(counter.calls) for counter in counters)
    model.zero_grad(set_to_none=arguments.optimizer)
    peak = allocated_at_the_peak(step.run)
    for _ in range(arguments.repetitions - 1):
        model.zero_grad(set_to_none=arguments.optimizer)
        timed()
    plan = plan_of()
    predicted = plan.estimates.peak_bytes if plan else 0
    facts = [growth, peak, predicted, statistics.median(seconds)]
    everyone: list[Any] = [facts]
    if dist.is_initialized():
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, facts)
    if rank == 0:
        growth, peak, predicted, median = map(max, zip(*everyone, strict=True))
        sizes = " ".join(f"{size / 2**20:8,.1f}" for size in (growth, peak, predicted))
        what = f"{arguments.methods:8} {arguments.layers:>3} layers {arguments.dtypes:8} {arguments.policy:5}"
        sweep = plan.schedule.sweep if plan else "-"
        print(f"{what} {sizes} MiB, {collectives} gathers and reductions, {median:.2f} s, {sweep}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", default="ours,packed,eager", help="of ours, whole, packed, eager; %(default)s")
    parser.add_argument("--layers", default="24", help="default: %(default)s")
    parser.add_argument("--dtypes", default="float32", help="of the model; default: %(default)s")
    parser.add_argument("--policy", default="", help="'mixed': FSDP2 computes in bfloat16")
    parser.add_argument("--keep-gathered", action="store_true", help="FSDP2 with reshard_after_forward=False")
    parser.add_argument("--options", default="{}", help="further options of ours, such as '{\"groups\": 4}'")
    parser.add_argument("--optimizer", action="store_true", help="update each parameter as its gradient arrives")
    parser.add_argument("--ranks", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--rows", type=int, default=4, help="of 256 tokens, on each of several ranks; default: 4")
    parser.add_argument("--repetitions", type=int, default=1, help="timed steps; default: %(default)s")
    parser.add_argument("--in-turns", action="store_true", help="compare times: all methods in the same processes")
    parser.add_argument("--threads", type=int, default=2, help="of each process; default: %(default)s")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        torch.set_num_threads(arguments.threads)
        counting()
        if arguments.ranks > 1:
            dist.init_process_group("gloo")
        (measure_in_turns if arguments.in_turns else measure)(arguments)
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        return 0
    layers, dtypes = arguments.layers.split(","), arguments.dtypes.split(",")
    lists = ([arguments.methods] if arguments.in_turns else arguments.methods.split(",")), layers, dtypes
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(arguments.ranks)]
    failed = 0
    for method, layers, dtype in itertools.product(*lists):
        command = [sys.executable, *(launcher if arguments.ranks > 1 else []), "-m", "benchmarks.layers", "--here"]
        command += [*sys.argv[1:], "--methods", method, "--layers", layers, "--dtypes", dtype]
        failed |= subprocess.run(command).returncode
    return failed


if __name__ == "__main__":
    sys.exit(main())
