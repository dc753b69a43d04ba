"""Stand-ins for the inputs of a chunk graph: fake tensors with a free number of chunk tokens and head rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from dta_compile.passes.program import ChunkInput, Program


def free_sizes(shape_env: ShapeEnv) -> tuple[Any, Any]:
    """Symbols for the number of chunk tokens and of head rows."""
    tokens, head_rows = (_free_size(shape_env, name, hint) for name, hint in (("tokens", 61), ("head_rows", 53)))
    return tokens, head_rows


def _free_size(shape_env: ShapeEnv, name: str, hint: int) -> Any:
    symbol = shape_env.create_symbol(
        hint, source=ConstantSource(f"__dta_{name}"), dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None
    )
    return shape_env.create_symintnode(symbol, hint=hint)


def fake_inputs(program: Program, tokens: Any, head_rows: Any) -> list[torch.Tensor]:
    """The inputs of `program.chunk`, in its order; to be called under a `FakeTensorMode`."""

    def whole(node: fx.Node, requires_grad: bool = False) -> torch.Tensor:
        value = node.meta["val"]
        shape, stride = [int(s) for s in value.shape], [int(s) for s in value.stride()]
        fake = torch.empty_strided(
            shape, stride, dtype=value.dtype, device=chunk_device(program) if value.is_meta else value.device
        )
        return fake.requires_grad_(requires_grad)

    def rows(item: ChunkInput, count: Any) -> torch.Tensor:
        value = item.node.meta["val"]
        return torch.empty((count, *_feature_sizes(item)), dtype=value.dtype, device=value.device)

    parameters = [
        whole(program.placeholders[spec.index], spec.requires_grad and program.training)
        for spec in program.region_parameters
    ]
    constants = [whole(node) for node in program.constant_inputs]
    index = torch.empty((head_rows,), dtype=torch.int64, device=chunk_device(program))
    trunk = [rows(item, tokens) for item in program.trunk_inputs]
    head = [rows(item, head_rows) for item in program.head_inputs]
    return [*parameters, *constants, *trunk, index, *head]


def _feature_sizes(item: ChunkInput) -> tuple[int, ...]:
    """The sizes of a chunk input's feature dimensions."""
    shape = item.node.meta["val"].shape
    return tuple(int(size) for size, axis in zip(shape, item.layout.dims, strict=True) if axis is None)


def chunk_device(program: Program) -> torch.device:
    """Where the chunk graph runs."""
    return program.mixer_nodes[0].meta["val"].device
