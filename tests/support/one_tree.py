"""Scenarios of `distributed_worker` with one prefix tree over all ranks."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import dta_compile
from dta_compile.errors import DTAError, RuntimeContractError
from dta_compile.plan import one_tree
from dta_compile.runtime.one_tree import call
from tests.support import mixtures, per_layer, recurrent, tensor_parallel
from tests.support.ranks import EXACT, Trained, Wrapped, assert_equal, reference, trained
from tests.support.recurrent import no_float32_islands
from tests.support.tiny import TinyLM, assert_same, weighted

EXACTLY, ISLANDS = 1e-9, 2e-6  # of float64, and of models that compute norms or scans in float32
# Of models that `no_float32_islands` computes in float64, but for the softmax of routers.
IN_FLOAT64 = {"qwen3_next": EXACTLY, "mamba": EXACTLY, "qwen3_next_experts": 1e-8}
Batch = tuple[torch.Tensor, torch.Tensor]


def over(mesh: Any = None, **options: Any) -> dict[str, Any]:
    """Return the options for one tree over all ranks, or those of a mesh."""
    return {"strategy": "one_tree", "mesh": mesh or dist.group.WORLD, "chunk_size": 3, **options}


def ddp(**options: Any) -> None:
    """Train five steps on rows as they are, some ranks without any."""
    model = Trained()
    forward = DistributedDataParallel(torch.compile(model, backend="dta", options=over(**options)))
    ranks = trained(Wrapped("ddp", model, forward, forward), scatter=False, clip=0.05)
    assert_equal(ranks.parameters(), reference("ddp", clip=0.05), EXACT)


def sharded(
    build: Callable[[], nn.Module], shard: Callable[[nn.Module], nn.Module] = per_layer.by_hand, **options: Any
) -> None:
    """Train five steps with FSDP2 around each layer."""
    expected = reference("fsdp2", build=lambda: Trained(build()))
    ranks = per_layer.wrapped(shard(build()), options=over(**options))
    assert_equal(trained(ranks, scatter=False).parameters(), expected, EXACT)
    assert per_layer.is_sharded(ranks.wrapped)
    plan = dta_compile.last_plan(ranks.wrapped)
    assert sum(plan.dealing.tokens) == plan.stats.tree_tokens


def hybrid() -> None:
    """Train with two copies of a sharded model, each with a tree of its own over its ranks."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("copy", "shard"))
    sharded(per_layer.tiny, functools.partial(per_layer.by_hand, mesh=mesh), mesh=mesh["shard"])


def with_tensor_parallelism() -> None:
    """Train two copies of a model whose layers are split over two ranks each, one tree over the copies."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    tensor_parallel.train(
        tensor_parallel.by_torch, copies=2, shard=tensor_parallel.per_layer, options=over(mesh["dp"]), mesh=mesh
    )


def drawn_batches(seed: int, left: bool = False) -> list[Batch]:
    """Draw rows for every rank from one tree: branches at any depth, prefixes, duplicates, empty rows, or very few."""
    draw, world, sequences = random.Random(seed), dist.get_world_size(), list[list[int]]()
    for _ in range(draw.choice([0, 1, 1, 3, 5, 8])):
        base = list(draw.choice(sequences)) if sequences and draw.random() < 0.8 else []
        base = base[: draw.randint(0, len(base))]
        sequences.append(base + [draw.randrange(5) for _ in range(draw.choice([0, 1, 2, 6, 15]))])
    line = [draw.randrange(5) for _ in range(30)]
    # The first are one path, a single token, prefixes of each other: on one rank, or on several.
    sequences = ([line], [line[:1]], [line[:length] for length in (1, 30, 12, 12, 29)], *[sequences] * (seed + 1))[seed]
    rows: list[list[list[int]]] = [[] for _ in range(world)]
    for sequence in sequences:
        draw.choice(rows).append(sequence)
    batches = []
    for own in rows:
        own += [[] for _ in range(2 - len(own))]
        width = max(8, *map(len, own)) + draw.randrange(3)
        ids, mask = torch.zeros(2, len(own), width, dtype=torch.long)
        for row, sequence in enumerate(own):
            columns = slice(width - len(sequence), None) if left else slice(len(sequence))
            ids[row, columns], mask[row, columns] = torch.tensor(sequence, dtype=torch.long), 1
        batches.append((ids, mask))
    return batches


def drawn(
    build: Callable[[], nn.Module],
    seeds: range,
    left: bool = False,
    tolerance: float = EXACTLY,
    ranks: int = 0,
    **options: Any,
) -> None:
    """Compare outputs of this rank's rows, and gradients summed over ranks, with one process run eagerly.

    An optimiser step follows every batch.

    Args:
        ranks: how many run one tree; 0: all.
    """
    model, eager, rank = build(), build(), dist.get_rank()
    optimizers = [torch.optim.SGD(one.parameters(), lr=1e-2, momentum=0.5) for one in (model, eager)]
    compiled = torch.compile(model, backend="dta", options=over(codegen="eager", **options))
    for seed in seeds:
        batches = drawn_batches(seed, left)
        for number, (ids, mask) in enumerate(batches):
            expected = logprobs(eager, ids, mask)
            weighted(expected * mask).backward()
            if number == rank:
                actual = logprobs(compiled, ids, mask)
                weighted(actual * mask).backward()
                torch.testing.assert_close(actual * mask, expected * mask, rtol=tolerance, atol=tolerance)
                with torch.no_grad():
                    scored = logprobs(compiled, ids, mask)
                torch.testing.assert_close(scored * mask, actual * mask, rtol=tolerance, atol=tolerance)
        for (name, parameter), other in zip(model.named_parameters(), eager.parameters(), strict=True):
            total = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(total)
            wanted = torch.zeros_like(other) if other.grad is None else other.grad
            scale = max(1.0, wanted.abs().max().item())
            assert (total - wanted).abs().max() <= tolerance * scale, (seed, name, (total - wanted).abs().max())
            parameter.grad = total
        for one, optimizer in zip((model, eager), optimizers, strict=True):
            torch.nn.utils.clip_grad_norm_(one.parameters(), 1.0)
            optimizer.step()
            one.zero_grad()
        plan = dta_compile.last_plan(compiled)
        assert sum(plan.dealing.tokens) == plan.stats.tree_tokens, str(plan)
        assert plan.dealing.ranks == (ranks or dist.get_world_size())


def logprobs(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return Trained.forward(_Holder(model), ids, mask)  # type: ignore[arg-type]


class _Holder:
    def __init__(self, model: Any) -> None:
        self.model = lambda ids, mask: model(ids, mask)


class _Toy(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> Any:
        return self.model(input_ids=ids, attention_mask=mask, use_cache=False)


def toys() -> Iterator[tuple[str, Callable[[], None]]]:
    builds = {name: functools.partial(per_layer.toy, name) for name in ("mistral", "gemma3")}
    builds |= {name: functools.partial(recurrent.build, name, torch.float64) for name in (*IN_FLOAT64, "mamba2")}
    for name, build in builds.items():

        def run(name: str = name, build: Callable[[], nn.Module] = build) -> None:
            of_attention = patch.object(one_tree, "BLOCK_BYTES", 1)  # keys and values travel by heads
            with no_float32_islands() if name in IN_FLOAT64 else of_attention:
                drawn(lambda: _Toy(build()), range(5), tolerance=IN_FLOAT64.get(name, ISLANDS))

        yield f"one tree, {name}", run


def two_backwards() -> None:
    """Check a second backward of the same outputs, after the graphs that were kept are gone."""
    model, eager, rank = TinyLM(), TinyLM(), dist.get_rank()
    compiled = torch.compile(model, backend="dta", options=over())
    ids = torch.arange(2 * dist.get_world_size() * 8).reshape(-1, 2, 8) % 5
    outputs = compiled(ids[rank])
    for _ in range(2):
        weighted(outputs).backward(retain_graph=True)
        for own in ids:
            weighted(eager(own)).backward()
    for (name, parameter), other in zip(model.named_parameters(), eager.parameters(), strict=True):
        dist.all_reduce(parameter.grad)
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-9, atol=1e-12, msg=name)


def packed_rows() -> None:
    """Compare packed rows, whose sequences share prefixes with those of other ranks."""
    with no_float32_islands(), patch.object(one_tree, "BLOCK_BYTES", 1):  # keys and values travel by heads
        _packed_rows()


def _packed_rows() -> None:
    model, eager, rank = per_layer.toy("llama"), per_layer.toy("llama"), dist.get_rank()
    compiled = torch.compile(model, backend="dta", options=over())
    for step in range(3):
        for number in range(dist.get_world_size()):
            draw = torch.Generator().manual_seed(10 * step + number)
            lengths = [1 + int(torch.randint(1, 9, (), generator=draw)) for _ in range(4)]
            ids = torch.cat([torch.arange(length) % (3 + (length > 5)) for length in lengths])[None]
            positions = torch.cat([torch.arange(length) for length in lengths])[None]
            expected = eager(input_ids=ids, position_ids=positions, use_cache=False).logits
            weighted(expected).backward()
            if number == rank:
                actual = compiled(input_ids=ids, position_ids=positions, use_cache=False).logits
                weighted(actual).backward()
                torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
        for (name, parameter), other in zip(model.named_parameters(), eager.parameters(), strict=True):
            dist.all_reduce(parameter.grad)
            torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-9, atol=1e-9, msg=name)
        model.zero_grad()
        eager.zero_grad()


def cheaper_or_not() -> None:
    """Check that "auto" takes the tree of each rank or one tree, all ranks alike, and says why."""
    model = TinyLM()
    compiled = torch.compile(model, backend="dta", options={"mesh": dist.group.WORLD})
    ids = torch.arange(40)[None].repeat(2, 1) % 29
    weighted(compiled(ids)).backward()
    plan = dta_compile.last_plan(compiled)
    chosen: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(chosen, plan.dealing is None)
    assert len(set(chosen)) == 1 and "one tree takes" in str(plan), str(plan)


def in_parts() -> None:
    """Check that ranks run a tree in each of two parts where that takes least time."""

    plain = call._way

    def way(*arguments: Any) -> Any:
        made = plain(*arguments)
        made.plan.estimates.seconds -= 1e9 * (made.size == 2)
        return made

    with patch.object(call, "_way", way):
        drawn(TinyLM, range(8), strategy="auto", ranks=2)


class Scaled(TinyLM):
    def forward(self, ids: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (super().forward(ids) * scale[..., None]).logsumexp(-1)


def kinds_that_differ() -> None:
    """Check that inputs of another dtype on one rank are refused on all: their values move between ranks."""
    compiled, ids = torch.compile(Scaled(), backend="dta", options=over()), torch.arange(12).reshape(2, 6)
    for dtypes in (torch.float32, torch.float64), (torch.float64, torch.float64):
        scale, problem = (1 + ids % 2).to(dtypes[dist.get_rank()]), ""
        try:
            weighted(compiled(ids, scale)).backward()
        except RuntimeContractError as error:
            problem = str(error)
        assert ("differ in the dtypes" in problem) == (dtypes[0] != dtypes[1]), problem


class Mirrored(TinyLM):
    def forward(self, ids: torch.Tensor, is_mirrored: bool) -> torch.Tensor:
        x = self.embedding(ids)
        return self.head(self.mix(x + x.flip(1) if is_mirrored else x))


def a_refused_program() -> None:
    """Check that a program that is refused on one rank alone is an error on all."""
    compiled, rank = torch.compile(Mirrored(), backend="dta", options=over()), dist.get_rank()
    try:
        compiled(torch.arange(12).reshape(2, 6), rank == 1)
    except RuntimeContractError as error:
        assert "rank 1 of 2" in str(error), error
    else:
        raise AssertionError("no error")


def failures() -> None:
    """Check that a rank whose call is refused stops all ranks, and that the next call works."""
    model, rank = TinyLM(), dist.get_rank()
    compiled = torch.compile(model, backend="dta", options=over(), dynamic=True)
    ids = torch.arange(12).reshape(2, 6) + rank
    weighted(compiled(ids)).backward()
    try:
        compiled(ids + 100 * (rank == 1))  # out of bounds on one rank
    except DTAError as error:
        assert rank != 1 or "out of bounds" in str(error), error
    else:
        raise AssertionError("no error")
    weighted(compiled(ids)).backward()
    try:
        dta_compile.streaming_step(compiled, lambda logits, row: logits.sum(), ids)
    except RuntimeContractError as error:
        assert "mesh" in str(error), error
    else:
        raise AssertionError("no error")
    try:
        compiled(ids[:, : 1 if rank == 1 else 6])
    except DTAError as error:
        assert "without rows" in str(error), error
    else:
        raise AssertionError("no error")
    compiled(ids[:, :1])  # there is no tree on any rank
    weighted(compiled(ids)).backward()
    one_row = ids[: 2 - rank % 2]  # for which Dynamo has another program
    assert_same(compiled(one_row), model(one_row))
    if dist.get_world_size() == 2:
        kinds_that_differ()
        a_refused_program()


SCENARIOS: dict[str, tuple[tuple[int, ...], Callable[[], None]]] = {
    "one tree, ddp": ((2, 3, 4), ddp),
    "one tree, ddp, nothing kept": ((4,), lambda: ddp(memory_budget=0)),
    "one tree, drawn": ((2, 3, 4), lambda: drawn(TinyLM, range(20))),
    "one tree, drawn, experts": ((2, 3, 4), lambda: drawn(lambda: mixtures.Model(mixtures.Split), range(5))),
    "one tree, drawn, left padding, whole pieces": (
        (3,),
        lambda: drawn(TinyLM, range(20), left=True, chunk_size=None, memory_budget=0),
    ),
    "one tree, drawn, results of attention kept": ((2, 3), lambda: drawn(TinyLM, range(1, 13), memory_budget=20_000)),
    "one tree, per layer": ((2, 4), lambda: sharded(per_layer.tiny)),
    "one tree, hybrid": ((4,), hybrid),
    "one tree, tensor parallel": ((4,), with_tensor_parallelism),
    "one tree, packed rows": ((2, 3, 4), packed_rows),
    "one tree, two backwards": ((2, 3), two_backwards),
    "one tree, auto": ((2,), cheaper_or_not),
    "one tree, in parts": ((4,), in_parts),
    "one tree, failures": ((2, 3), failures),
    **{name: ((2, 3, 4), run) for name, run in toys()},
}
