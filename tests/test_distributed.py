"""Data-parallel wrappers need nothing special: each rank has a tree of its own, gradients arrive once."""

import copy
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

import dta_compile
from tests.tiny import SMALL_CHUNKS, TinyLM, shared_ids

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs the gloo backend")
RANKS, TOKENS = 2, 9


def rows(rank):
    """Ranks have batches, and so schedules, of different size."""
    return 2 + 2 * rank


def expected_gradients():
    model = TinyLM()
    for rank in range(RANKS):
        (model(shared_ids(rows(rank), TOKENS)).pow(2).mean() / RANKS).backward()
    return [parameter.grad for parameter in model.parameters()]


def train_ddp(model):
    return DistributedDataParallel(torch.compile(model, backend="dta", options=SMALL_CHUNKS))


def train_fsdp2(model):
    from torch.distributed.fsdp import fully_shard

    model.forward = torch.compile(model.forward, backend="dta", options=SMALL_CHUNKS)
    return fully_shard(model, reshard_after_forward=False)


def run_rank(rank, port, wrap):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    model = TinyLM()
    reference = copy.deepcopy(model)
    wrapped = wrap(model)
    for _ in range(2):
        model.zero_grad()
        wrapped(shared_ids(rows(rank), TOKENS)).pow(2).mean().backward()
    names = [name for name, _ in reference.named_parameters()]
    for name, parameter, expected in zip(names, model.parameters(), expected_gradients(), strict=True):
        grad = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
        torch.testing.assert_close(grad, expected, rtol=1e-9, atol=1e-12, msg=name)
    compiled = wrapped.module if wrap is train_ddp else model.forward
    assert dta_compile.last_plan(compiled).stats.sequences == rows(rank)
    dist.destroy_process_group()


@pytest.mark.parametrize("wrap", [train_ddp, train_fsdp2])
def test_ranks_with_different_trees_get_the_gradients_of_the_whole_batch(wrap):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(run_rank, args=(port, wrap), nprocs=RANKS)
