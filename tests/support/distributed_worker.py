"""Runs under torchrun: trains a model five steps on all ranks, and on the first rank alone, and compares.

    torchrun --nproc-per-node 4 -m tests.support.distributed_worker RESULTS.json [SCENARIO ...]

Rank 0 writes a JSON object: for every scenario "" or what went wrong.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import pathlib
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator

import torch
import torch._dynamo.config
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from dta_compile import distributed
from tests.support.tiny import SMALL_CHUNKS, VOCABULARY, TinyLM

STEPS, LONGEST = 5, 11
ROWS = [(0, 1, 7, 40), (40, 7, 1, 0), (0, 0, 1, 0), (3, 2, 4, 1), (0, 0, 0, 0)]  # per step, of the ranks
EXACT = {"rtol": 1e-9, "atol": 1e-12}


class Trained(torch.nn.Module):
    """Log-probs `[B, S]` of the next token: a wrapper that is trained as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.model = TinyLM(layers=1)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        labels = torch.nn.functional.pad(ids[:, 1:], (0, 1))
        return self.model(ids, mask.bool()).log_softmax(-1).gather(-1, labels[..., None])[..., 0]


def rows_of(step: int, rank: int) -> dict[str, torch.Tensor]:
    """A rank's rows: rollouts of a few prompts, some of them empty."""
    random = torch.Generator().manual_seed(100 * step + rank)
    count = ROWS[step % len(ROWS)][rank]
    lengths = torch.randint(0, LONGEST + 1, (count,), generator=random)
    mask = torch.arange(LONGEST)[None] < lengths[:, None]
    ids = torch.randint(0, VOCABULARY, (count, LONGEST), generator=random)
    ids[:, :5] = torch.arange(5) + torch.randint(0, 2, (count, 1), generator=random)
    advantages = torch.randn(count, generator=random, dtype=torch.float64)
    return {"input_ids": ids * mask, "attention_mask": mask.long(), "advantages": advantages}


def rows_of_all(step: int) -> dict[str, torch.Tensor]:
    parts = [rows_of(step, rank) for rank in range(dist.get_world_size())]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def loss_of(
    forward: torch.nn.Module, batch: dict[str, torch.Tensor], total: torch.Tensor, group: object
) -> torch.Tensor:
    logprobs = forward(batch["input_ids"], batch["attention_mask"])
    counted = batch["attention_mask"].clone()
    if counted.shape[1]:
        counted = torch.nn.functional.pad(counted[:, 1:], (0, 1))  # nothing follows the last token
    losses = -logprobs * batch["advantages"][:, None]
    return distributed.token_mean(losses, counted, total=total, group=group)


def predicted(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Tokens that another one precedes."""
    return (batch["attention_mask"].sum(1) - 1).clamp(min=0).sum()


def optimiser_of(model: torch.nn.Module, kind: str) -> torch.optim.Optimizer:
    """Adam turns rounding into full steps where a gradient is zero, which float32 cannot be compared by."""
    return torch.optim.SGD(model.parameters(), 0.1) if kind == "mixed" else torch.optim.AdamW(model.parameters(), 1e-2)


@functools.cache
def reference(kind: str, steps: int = STEPS, clip: float = 0.0) -> dict[str, torch.Tensor]:
    """Parameters after training on all rows in one process, eagerly and one sequence at a time."""
    model = Trained()
    optimiser = optimiser_of(model, kind)
    for step in range(steps):
        batch = rows_of_all(step)
        total = predicted(batch).clamp(min=1)
        for row in range(len(batch["input_ids"])):
            length = int(batch["attention_mask"][row].sum())
            if length < 2:
                continue
            one = {name: value[row : row + 1] for name, value in batch.items()}
            logprobs = model(one["input_ids"][:, :length], one["attention_mask"][:, :length])[:, :-1]
            (-(logprobs * one["advantages"][:, None]).sum() / total).backward()
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimiser.step()
        optimiser.zero_grad()
    return model.state_dict()


class Wrapped:
    """A model on its way through a data-parallel wrapper: what is called, and how reduction is put off."""

    def __init__(self, kind: str) -> None:
        self.kind, self.model = kind, Trained()
        if kind == "ddp":
            self.forward = DistributedDataParallel(torch.compile(self.model, backend="dta", options=SMALL_CHUNKS))
        else:
            self.model.forward = torch.compile(self.model.forward, backend="dta", options=SMALL_CHUNKS)
            options = {}
            if kind == "hsdp":
                options["mesh"] = init_device_mesh(
                    "cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("copy", "shard")
                )
            if kind == "mixed":
                options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
            self.forward = fully_shard(self.model, reshard_after_forward=False, **options)
        self.optimiser = optimiser_of(self.model, kind)

    @contextlib.contextmanager
    def without_reduction(self) -> Iterator[None]:
        if self.kind == "ddp":
            with self.forward.no_sync():
                yield
        else:
            self.forward.set_requires_gradient_sync(False)
            yield
            self.forward.set_requires_gradient_sync(True)

    def step(self, step: int, scatter: bool = True, micro_batches: int = 1, clip: float = 0.0) -> None:
        batch = rows_of(step, dist.get_rank())
        if scatter:
            batch = distributed.scatter(batch).batch
        elif not len(batch["input_ids"]):  # no model runs without rows: an empty one
            batch = {name: value.new_zeros((1, *value.shape[1:])) for name, value in batch.items()}
        total = distributed.global_count(torch.ones(int(predicted(batch))))
        size = -(-len(batch["input_ids"]) // micro_batches) or 1
        for number in range(micro_batches):
            part = {name: value[number * size : (number + 1) * size] for name, value in batch.items()}
            last = number + 1 == micro_batches
            with contextlib.nullcontext() if last else self.without_reduction():
                loss_of(self.forward, part, total, None).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        self.optimiser.step()
        self.optimiser.zero_grad()

    def parameters(self) -> dict[str, torch.Tensor]:
        return get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True))


def train(kind: str, steps: int = STEPS, tolerance: dict[str, float] = EXACT, clip: float = 0.0, **how: object) -> None:
    wrapped = Wrapped(kind)
    for step in range(steps):
        wrapped.step(step, clip=clip, **how)
    assert_equal(wrapped.parameters(), reference(kind, steps, clip), tolerance)


def assert_equal(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: dict[str, float]
) -> None:
    """Rank 0 alone has full parameters; all ranks have the same expectation."""
    if dist.get_rank() == 0:
        assert set(found) == set(expected), set(found) ^ set(expected)
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], **tolerance, msg=lambda text, name=name: f"{name}: {text}")


def resume(kind: str) -> None:
    """Two steps, a checkpoint, a fresh model that loads it, three steps more."""
    first = Wrapped(kind)
    for step in range(2):
        first.step(step)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    model, optimiser = get_state_dict(first.model, first.optimiser)
    dcp.save({"model": model, "optimiser": optimiser}, checkpoint_id=folder[0])
    second = Wrapped(kind)
    model, optimiser = get_state_dict(second.model, second.optimiser)
    dcp.load({"model": model, "optimiser": optimiser}, checkpoint_id=folder[0])
    set_state_dict(second.model, second.optimiser, model_state_dict=model, optim_state_dict=optimiser)
    for step in range(2, STEPS):
        second.step(step)
    assert_equal(second.parameters(), reference(kind), EXACT)


def rows_come_back() -> None:
    """Results of rows go to their owners, whatever the paddings and widths of the ranks."""
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
    """The first sequences of packed rows, each with its tokens of all fields."""
    tokens = zip(*(values.flatten().tolist() for values in batch.values()), strict=True)
    begins = list(batch).index("position_ids")
    found: list[tuple[object, ...]] = []
    for token in tokens:
        found = [*found, (token,)] if token[begins] == 0 else [*found[:-1], (*found[-1], token)]
    return found[:count]


def sequences_of_packed_rows_come_back() -> None:
    """Every sequence is dealt to one rank and whole, also where ranks bring nothing or are left without one."""
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


# By name: on how many ranks they run, and what they do.
SCENARIOS = {
    "rows come back": ((2, 4), rows_come_back),
    "packed rows come back": ((2, 4), sequences_of_packed_rows_come_back),
    "a bad batch": ((2, 4), a_bad_batch_is_an_error_everywhere),
    "ddp": ((2, 4), lambda: train("ddp", clip=0.05)),
    "ddp, rows as they are": ((4,), lambda: train("ddp", scatter=False)),
    "ddp, micro-batches": ((2,), lambda: train("ddp", micro_batches=2)),
    "ddp, resumed": ((2,), lambda: resume("ddp")),
    "fsdp2": ((2, 4), lambda: train("fsdp2", clip=0.05)),
    "fsdp2, rows as they are": ((2,), lambda: train("fsdp2", scatter=False)),
    "fsdp2, micro-batches": ((2,), lambda: train("fsdp2", micro_batches=2)),
    "fsdp2, resumed": ((2,), lambda: resume("fsdp2")),
    "fsdp2, mixed precision": ((2,), lambda: train("mixed", tolerance={"rtol": 1e-5, "atol": 1e-6})),
    "hsdp": ((4,), lambda: train("hsdp")),
}


def main() -> None:
    torch.set_num_threads(1)
    torch._dynamo.config.fake_tensor_cache_enabled = False  # as in conftest.py
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
    dist.barrier()  # a rank that exits while gloo lets go of the last transfer's tensors is aborted
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
