"""Tensor parallelism in tests: ranks that hold parts of each layer, with and without FSDP2."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import dta_compile
from dta_compile import distributed
from dta_compile.errors import RefusalError, RuntimeContractError
from dta_compile.runtime.calls import planned_call
from tests.support.per_layer import gradients
from tests.support.ranks import EXACT, STEPS, Trained, assert_equal, loss_of, predicted, reference, rows_of
from tests.support.tiny import SMALL_CHUNKS, assert_same, weighted

VOCABULARY, WIDTH, HEAD = 32, 16, 4


class Block(nn.Module):
    """Attention whose head count follows from the projections' outputs, and an MLP; with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        heads = [project(y).unflatten(-1, (-1, HEAD)).transpose(1, 2) for project in (self.query, self.key, self.value)]
        y = F.scaled_dot_product_attention(*heads, mask)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(self.mlp_norm(x))))


class ParallelLM(nn.Module):
    """Causal LM: ids and mask `[B, S]` to logits `[B, S, V]`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.position = nn.Embedding(VOCABULARY, WIDTH, padding_idx=3), nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList([Block()])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.double()

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        positions = (mask.long().cumsum(1) - 1).clamp(min=0)
        triangle = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        x = self.embedding(ids) + self.position(positions)
        for block in self.blocks:
            x = block(x, triangle & mask[:, None, None, :])
        return self.head(self.norm(x))


def build() -> nn.Module:
    return Trained(ParallelLM())


def qwen() -> nn.Module:
    """Return a toy qwen3 with norms in float64, unlike transformers' own.

    `no_float32_islands` conflicts with the hooks that transformers puts on norms.
    """
    import transformers
    from transformers.models.qwen3 import modeling_qwen3

    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=HEAD,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config).double()
    for module in list(model.modules()):
        for name, norm in list(module.named_children()):
            if isinstance(norm, modeling_qwen3.Qwen3RMSNorm):
                setattr(module, name, nn.RMSNorm(norm.weight.shape[0], norm.variance_epsilon, dtype=torch.float64))
    return Trained(model)


def by_torch(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split every layer with features: projections, MLP, embedding and head."""
    column, row = ColwiseParallel, RowwiseParallel
    plan = {
        "embedding": row(input_layouts=Replicate()),
        "position": column(output_layouts=Replicate()),
        "blocks.*.query": column(),
        "blocks.*.key": column(),
        "blocks.*.value": column(),
        "blocks.*.out": row(),
        "blocks.*.up": column(),
        "blocks.*.down": row(),
        "head": column(output_layouts=Replicate()),
    }
    parallelize_module(model.model, mesh, plan)


def by_transformers(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split like `tp_plan="auto"` of `from_pretrained`, and also the embedding."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    causal = model.model
    styles = {
        "self_attn.q_proj": "colwise",
        "self_attn.k_proj": "colwise",
        "self_attn.v_proj": "colwise",
        "self_attn.q_norm": "replicated_with_grad_allreduce",
        "self_attn.k_norm": "replicated_with_grad_allreduce",
        "self_attn.o_proj": "rowwise",
        "mlp.gate_proj": "colwise",
        "mlp.up_proj": "colwise",
        "mlp.down_proj": "rowwise",
    }
    plan = {f"model.layers.0.{name}": style for name, style in styles.items()}
    plan |= {"model.embed_tokens": "embedding_rowwise", "lm_head": "colwise_gather_output"}
    weights = {f"{name}.weight": style for name, style in plan.items() if "norm" not in name}
    apply_tensor_parallelism(causal, mesh, plan | weights)


def train(
    parallelize: Callable[[nn.Module, DeviceMesh], None],
    make: Callable[[], nn.Module] = build,
    copies: int = 1,
    shard: Callable[[nn.Module, DeviceMesh], None] | None = None,
    options: Any = SMALL_CHUNKS,
    mesh: DeviceMesh | None = None,
) -> None:
    """Train five steps on `copies` groups of ranks, each holding a model in parts; compare with one process."""
    size = dist.get_world_size() // copies
    mesh = mesh or init_device_mesh("cpu", (copies, size), mesh_dim_names=("dp", "tp"))
    model = make()
    parallelize(model, mesh["tp"])
    if shard is not None:
        shard(model, mesh["dp"])
    model.compile(backend="dta", options=options)
    optimiser = torch.optim.AdamW(model.parameters(), 1e-2)
    first = mesh["dp"].get_local_rank() * size
    for step in range(STEPS):
        parts = [rows_of(step, rank) for rank in range(first, first + size)]
        batch = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        shared = distributed.scatter(batch, group=mesh["dp"]).batch
        counts = torch.ones(int(predicted(shared)))
        total = distributed.global_count(counts, group=mesh["dp"])
        loss_of(model, shared, total, mesh["dp"]).backward()
        optimiser.step()
        optimiser.zero_grad()
    compare_scores(model, make)
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert_equal(weights, reference("ddp", build=make), EXACT)


def compare_scores(model: nn.Module, make: Callable[[], nn.Module]) -> None:
    """Compare calls without gradients, for which transformers has separate code."""
    whole = make()
    whole.load_state_dict(reference("ddp", build=make))
    ids, mask = inputs()
    with torch.no_grad():
        assert torch.allclose(model(ids, mask.long()), whole(ids, mask.long()), rtol=1e-9, atol=1e-9)
    plan = dta_compile.last_plan(model)
    assert plan.schedule.mode == "score" and plan.stats.tree_tokens < ids.numel()


def per_layer(model: nn.Module, mesh: DeviceMesh) -> None:
    for block in model.model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def pair(plan: dict[str, Any], make: Callable[[], nn.Module] = ParallelLM) -> tuple[nn.Module, nn.Module]:
    """Return an eager model in parts, and a compiled one."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    models = tuple(parallelize_module(make(), mesh, plan) for _ in range(2))
    models[1].compile(backend="dta", options=SMALL_CHUNKS)
    return models


SEQUENCE_PARALLEL = {
    "blocks.*.mlp_norm": SequenceParallel(),
    "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
    "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
}
MLP = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}


def inputs(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (3, 8), generator=random)
    ids[:, :4] = ids[0, :4]
    return ids, torch.ones_like(ids, dtype=torch.bool)


def ranks_that_differ() -> None:
    """Check other batches, gradients and free memory on one rank: all ranks raise an error or run the same schedule."""
    _, model = pair(MLP)
    rank = dist.get_rank()
    try:
        model(*inputs(seed=rank))
    except RuntimeContractError as error:
        assert "the tokens of a batch are not the same on all ranks" in str(error), error
    else:
        raise AssertionError("no error")
    ids, mask = inputs()
    try:  # refused on one rank before any collective
        model(ids, mask if rank == 0 else torch.tensor([[True, False] * 4] * 3))
    except RuntimeContractError as error:
        assert "rank 1" in str(error) or "not the same on all ranks" in str(error), error
    else:
        raise AssertionError("no error")
    eager, model = pair(MLP)
    for lm in (eager, model):
        logits = lm(ids, mask)
        # On the first rank only some rows have a gradient, so replicated parameters get different gradients on each
        # rank. This tests only that no rank waits for another.
        (weighted(logits[:1]) if rank == 0 else weighted(logits)).backward()
    for lm in (eager, model):
        lm.zero_grad()
    with mock.patch.object(planned_call, "default_budget", return_value=0 if rank == 1 else 2**30):
        weighted(model(ids, mask)).backward()
    weighted(eager(ids, mask)).backward()
    plan = dta_compile.last_plan(model)
    assert plan.stats.tokens_forwarded_twice > 0, plan
    assert_same(gradients(model), gradients(eager))


def refusals() -> None:
    """Check that unsupported cases are refused by name."""

    class Scaled(ParallelLM):
        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            logits = super().forward(ids, mask)
            return (logits * 2).to_local() if isinstance(logits, DTensor) else logits

    cases: list[tuple[dict[str, Any], str, Callable[[], nn.Module]]] = [
        (SEQUENCE_PARALLEL, "sequence parallelism", ParallelLM),
        ({"head": ColwiseParallel(use_local_output=False)}, "mul", Scaled),
        ({"blocks.*.up": ColwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())}, "", ParallelLM),
    ]
    for plan, reason, make in cases:
        torch.compiler.reset()
        _, model = pair(plan, make)
        try:
            model(*inputs())
        except RefusalError as error:
            assert reason and reason in str(error) and "tensor parallelism" in str(error), error
        else:
            assert not reason, f"no error: {reason}"


SCENARIOS = {
    "tensor parallel": ((4,), functools.partial(train, by_torch)),
    "tensor parallel, qwen3 by transformers": ((4,), functools.partial(train, by_transformers, qwen)),
    "tensor parallel, ranks that differ": ((4,), ranks_that_differ),
    "tensor parallel, refusals": ((4,), refusals),
    "tensor parallel with fsdp2": ((4,), functools.partial(train, by_torch, copies=2, shard=per_layer)),
}
