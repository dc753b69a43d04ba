"""Worker for torchrun: train a model for five steps on all ranks and on the first rank alone, and compare.

    torchrun --nproc-per-node 4 -m tests.support.distributed_worker RESULTS.json [SCENARIO ...]

Rank 0 writes a JSON object with an entry per scenario: "" or the error.
"""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import sys
import tempfile
import time
import traceback
from typing import Any

import torch
import torch._dynamo.config
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import dta_compile
from dta_compile import distributed
from tests.support import one_tree, per_layer, tensor_parallel
from tests.support.ranks import (
    EXACT,
    LONGEST,
    ROWS,
    Trained,
    Wrapped,
    assert_equal,
    reference,
    resume,
    rows_of,
    trained,
)
from tests.support.tiny import SMALL_CHUNKS


def wrap(kind: str) -> Wrapped:
    """Build a model with a data-parallel wrapper around the whole of it."""
    model = Trained()
    if kind == "ddp":
        forward = DistributedDataParallel(torch.compile(model, backend="dta", options=SMALL_CHUNKS))
        return Wrapped(kind, model, forward, forward)
    model.forward = torch.compile(model.forward, backend="dta", options=SMALL_CHUNKS)
    options = {}
    if kind == "hsdp":
        options["mesh"] = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("copy", "shard"))
    if kind == "mixed":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    fully_shard(model, reshard_after_forward=False, **options)
    return Wrapped(kind, model, model, model)


def train(kind: str, tolerance: dict[str, float] = EXACT, clip: float = 0.0, **how: Any) -> None:
    expected = reference(kind, clip=clip)
    assert_equal(trained(wrap(kind), clip=clip, **how).parameters(), expected, tolerance)


def rows_come_back() -> None:
    """Check that results of rows return to their owners, whatever the paddings and widths of the ranks."""
    rank = dist.get_rank()
    batch = rows_of(0, rank)
    if rank % 2:  # padded on the left, and wider
        lengths = batch["attention_mask"].sum(1)
        for name in ("input_ids", "attention_mask"):
            rows = [
                torch.nn.functional.pad(row[:n], (LONGEST + 3 - n, 0))
                for row, n in zip(batch[name], lengths.tolist(), strict=True)
            ]
            batch[name] = torch.stack(rows) if rows else batch[name].new_zeros((0, LONGEST + 3))
    shard = distributed.scatter(batch)
    counts = [None] * dist.get_world_size()
    dist.all_gather_object(counts, (shard.rows, shard.costs))
    assert sum(count for count, _ in counts) == sum(ROWS[0][: dist.get_world_size()])
    assert all(costs == shard.costs for _, costs in counts)
    assert torch.equal(shard.to_owners(shard.batch["advantages"]), batch["advantages"])
    assert torch.equal(shard.to_owners(shard.batch["input_ids"]), batch["input_ids"])
    per_head = shard.batch["input_ids"][..., None] * torch.tensor([1, 10])
    assert torch.equal(shard.to_owners(per_head)[..., 1], 10 * batch["input_ids"])


def sequences_of(batch: dict[str, torch.Tensor], count: int | None = None) -> list[tuple[object, ...]]:
    """Split packed rows into sequences, each with its tokens of all fields; return the first `count`."""
    tokens = zip(*(values.flatten().tolist() for values in batch.values()), strict=True)
    begins = list(batch).index("position_ids")
    sequences: list[tuple[object, ...]] = []
    for token in tokens:
        sequences = [*sequences, (token,)] if token[begins] == 0 else [*sequences[:-1], (*sequences[-1], token)]
    return sequences[:count]


def sequences_of_packed_rows_come_back() -> None:
    """Check that every sequence is dealt whole to one rank, even if ranks bring none or receive none."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for step, packed in enumerate([(2, 12), (0, 5), (1, 0), (1, 3)]):
        random = torch.Generator().manual_seed(100 * step + rank)
        shape = packed if step == 0 or rank == 0 else (1, 0)
        ids = torch.randint(0, 3, shape, generator=random)
        positions = torch.arange(shape[1]).expand(shape) % (3 + rank)
        batch = {"input_ids": ids, "position_ids": positions, "advantages": torch.randn(shape, generator=random)}
        shard = distributed.scatter(batch, packed="position_ids")
        dealt, everything = sequences_of(shard.batch, shard.rows), [None] * world
        assert shard.batch["input_ids"].shape[0] == 1 and shard.batch["input_ids"].shape[1] >= 8
        assert [[token[0] for token in one] for one in dealt] == sorted([token[0] for token in one] for one in dealt)
        dist.all_gather_object(everything, (sequences_of(batch), dealt))
        brought, after = ([one for part in parts for one in part] for parts in zip(*everything, strict=True))
        assert sorted(brought) == sorted(after)
        assert all(torch.equal(shard.to_owners(shard.batch[name]), values) for name, values in batch.items())
        assert step or all(part for _, part in everything)


def a_bad_batch_is_an_error_everywhere() -> None:
    from dta_compile.errors import RuntimeContractError

    batch = rows_of(3, dist.get_rank())
    if dist.get_rank() == 1:
        batch["advantages"] = batch["advantages"][:-1]
    try:
        distributed.scatter(batch)
    except RuntimeContractError as error:
        assert "rank 1" in str(error) and "'advantages'" in str(error), error
    else:
        raise AssertionError("no error")


def a_trace_of_all_ranks(path: pathlib.Path | None = None) -> None:
    """Check that one trace file has every rank's planned and measured runs, with their plans' seconds and tokens."""
    compiled = torch.compile(Trained(), backend="dta", options=SMALL_CHUNKS)
    shard = distributed.scatter(rows_of(1, dist.get_rank()))
    mask = shard.batch["attention_mask"]
    (compiled(shard.batch["input_ids"], mask) * mask).sum().backward()
    plan = dta_compile.last_plan(compiled)
    facts = [None] * dist.get_world_size()
    work = plan.simulation.forward.plus(plan.simulation.backward)
    dist.all_gather_object(facts, (plan.estimates.seconds, plan.estimates.measured_seconds, work.tokens))
    with tempfile.TemporaryDirectory() as folder:
        file = path or pathlib.Path(folder) / "trace.json"
        distributed.to_chrome_trace(plan, file)
        if dist.get_rank():
            return
        events = json.loads(file.read_text())["traceEvents"]
    names = {one["pid"]: one["args"]["name"] for one in events if one["name"] == "process_name"}
    spent = {name: [one for one in events if one["ph"] == "X" and one["pid"] == pid] for pid, name in names.items()}
    assert len(names) == 2 * dist.get_world_size()
    for name, runs in spent.items():
        predicted, measured, tokens = facts[int(name.split()[1].rstrip(":"))]
        seconds, expected = sum(one["dur"] for one in runs) / 1e6, predicted if "predicted" in name else measured
        assert abs(seconds - expected) <= 1e-7 * len(runs), (name, seconds, expected)
        assert sum(one["args"].get("tokens", 0) for one in runs) == tokens, name


# By name: the numbers of ranks on which a scenario runs, and its function.
SCENARIOS = {
    "rows come back": ((2, 4), rows_come_back),
    "packed rows come back": ((2, 4), sequences_of_packed_rows_come_back),
    "a bad batch": ((2, 4), a_bad_batch_is_an_error_everywhere),
    "ddp": ((2, 4), lambda: train("ddp", clip=0.05)),
    "ddp, rows as they are": ((4,), lambda: train("ddp", scatter=False)),
    "ddp, micro-batches": ((4,), lambda: train("ddp", micro_batches=2)),
    "ddp, resumed": ((4,), lambda: resume(lambda: wrap("ddp"))),
    "fsdp2": ((2, 4), lambda: train("fsdp2", clip=0.05)),
    "a trace of all ranks": ((4,), a_trace_of_all_ranks),
    "fsdp2, rows as they are": ((4,), lambda: train("fsdp2", scatter=False)),
    "fsdp2, micro-batches": ((4,), lambda: train("fsdp2", micro_batches=2)),
    "fsdp2, resumed": ((4,), lambda: resume(lambda: wrap("fsdp2"))),
    "fsdp2, mixed precision": ((4,), lambda: train("mixed", tolerance={"rtol": 1e-5, "atol": 1e-6})),
    "hsdp": ((4,), lambda: train("hsdp")),
    **per_layer.SCENARIOS,
    **tensor_parallel.SCENARIOS,
    **one_tree.SCENARIOS,
}


def main() -> None:
    torch.set_num_threads(1)
    torch._dynamo.config.fake_tensor_cache_enabled = False  # like conftest.py
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    results = {}
    for name, (ranks, scenario) in SCENARIOS.items():
        if dist.get_world_size() not in ranks or (sys.argv[2:] and name not in sys.argv[2:]):
            continue
        torch.compiler.reset()
        problem, started = "", time.monotonic()
        try:
            scenario()
        except Exception:
            problem = traceback.format_exc()
            print(problem, file=sys.stderr, flush=True)
        if dist.get_rank() == 0:
            print(f"{name}: {time.monotonic() - started:.1f} s", flush=True)
        problems = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
        results[name] = "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(problems) if text)
    if dist.get_rank() == 0:
        pathlib.Path(sys.argv[1]).write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    # A thread of gloo that releases the last transfer's tensors while the interpreter ends aborts the process.
    os._exit(0)


if __name__ == "__main__":
    main()
