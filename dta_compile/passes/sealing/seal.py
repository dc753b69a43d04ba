"""seal: what the passes found out, as an `Executable`: nodes become slots, graphs code, symbolic sizes expressions."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from dta_compile.executable.code import Code
from dta_compile.executable.executable import (
    ChunkInput,
    Condition,
    Executable,
    FrontierValue,
    NoRowEpilogue,
    NumberSpec,
    Output,
    RowEpilogue,
    TensorSpec,
    Use,
)
from dta_compile.passes.chunk.chunk_inputs import chunk_device
from dta_compile.passes.cuts.row_epilogue import row_dim, row_layout
from dta_compile.passes.masks.entries import leaves_of_masks
from dta_compile.passes.program import ChunkInput as LoweredInput
from dta_compile.passes.program import Condition as LoweredCondition
from dta_compile.passes.program import FrontierValue as LoweredValue
from dta_compile.passes.program import Mixed, Program, ancestors, has_tensor, where
from dta_compile.passes.sealing.comparison import choices, comparison
from dta_compile.passes.symbols import expression, free_symbols, sizes, symbolic


def seal(program: Program) -> Executable:
    """The executable of a program that all passes have run on."""
    slots = {node: slot for slot, node in enumerate(program.prologue_nodes)}

    def chunk_inputs(items: Iterable[LoweredInput]) -> tuple[ChunkInput, ...]:
        return tuple(_chunk_input(program, item, slots[item.node]) for item in items)

    return Executable(
        training=program.training,
        codegen=program.codegen,
        device=chunk_device(program).type,
        inputs=tuple(program.inputs),
        values=_values(program),
        symbols=program.input_symbols,
        batch=program.batch,
        tokens=program.tokens,
        prologue=Code.of(program.prologue),
        mixers=tuple(program.mixers),
        mask_slots={node.name: slots[node] for node in leaves_of_masks(program)},
        frontier=tuple(_frontier_value(value, slots) for value in program.frontier),
        trunk_inputs=chunk_inputs(program.trunk_inputs),
        head_inputs=chunk_inputs(program.head_inputs),
        constant_inputs=tuple(slots[node] for node in program.constant_inputs),
        trunk_keys=chunk_inputs(program.trunk_keys),
        head_keys=chunk_inputs(program.head_keys),
        region_parameters=tuple(program.region_parameters),
        joint=program.joint,
        epilogue=Code.of(program.epilogue) if program.rest is None else None,
        epilogue_slots=tuple(slots[node] for node in program.epilogue_dense_inputs),
        row_epilogue=_row_epilogue(program),
        outputs=_outputs(program, slots),
        rest=None if program.rest is None else seal(program.rest),
        comparison=comparison(program),
        regions=_regions(program),
        chunk_digest=hashlib.sha256(program.chunk.code.encode()).hexdigest(),
        seconds=dict(program.timings),
    )


def _values(program: Program) -> tuple[TensorSpec | NumberSpec | None, ...]:
    """Of the inputs; one object for all that are alike, as those of layers are."""
    known: dict[Any, Any] = {}
    specs = (spec(node.meta["val"]) for node in program.placeholders)
    return tuple(known.setdefault(one, one) for one in specs)


def spec(value: Any) -> TensorSpec | NumberSpec | None:
    """What is known of a traced value before any call; None: nothing."""
    if isinstance(value, torch.Tensor):
        return TensorSpec(tuple(map(expression, value.shape)), value.dtype, value.device)
    if (expr := symbolic(value)) is not None:
        return NumberSpec(expr, isinstance(value, torch.SymBool))
    return None


def _chunk_input(program: Program, item: LoweredInput, slot: int) -> ChunkInput:
    node = item.node
    is_input = node.op == "placeholder"
    name = program.inputs[program.placeholders.index(node)].name if is_input else f"{node.name} = {node.target}"
    return ChunkInput(slot, item.layout, name, node.meta.get("source") or node.name, is_input)


def _frontier_value(value: LoweredValue, slots: Mapping[fx.Node, int]) -> FrontierValue:
    uses = [
        Use(use.frame, tuple(Condition(slots[c.node], c.layout, c.holds) for c in _in_order(use.conditions)))
        for use in value.uses
    ]
    return FrontierValue(
        value.node.name,
        value.layout,
        sizes(value.node),
        value.features,
        value.dtype,
        value.differentiable,
        value.memory_order,
        value.is_cache,
        tuple(uses),
    )


def _in_order(conditions: Iterable[LoweredCondition]) -> list[LoweredCondition]:
    return sorted(conditions, key=lambda condition: (condition.node.name, condition.holds))


def _row_epilogue(program: Program) -> RowEpilogue | NoRowEpilogue | None:
    epilogue = program.row_epilogue
    if epilogue is None:
        return None
    if isinstance(epilogue, Mixed):
        return NoRowEpilogue(epilogue.reason, where(epilogue.node))

    def dim(node: fx.Node) -> int | None:
        return row_dim(row_layout(program, node)) if has_tensor(node) else None

    return RowEpilogue(
        Code.of(epilogue), tuple(map(dim, program.placeholders)), tuple(map(dim, program.epilogue_dense_inputs))
    )


def _outputs(program: Program, slots: Mapping[fx.Node, int]) -> tuple[Output, ...]:
    chosen, caches = choices(program), {value.node for value in program.frontier if value.is_cache}
    positions = {node: i for i, node in enumerate(program.placeholders)}

    def output(node: Any) -> Output:
        if not isinstance(node, fx.Node):
            return Output(str(node), "", node)
        value = spec(node.meta["val"])
        shape = value.shape if isinstance(value, TensorSpec) else ()
        tokens = program.tokens.free_symbols if program.tokens is not None else set()
        return Output(
            str(node),
            where(node),
            node.meta["val"] if value is None else value,
            positions.get(node),
            slots.get(node),
            node in caches,
            not tokens.isdisjoint(free_symbols(shape)),
            bool(chosen) and not chosen.isdisjoint(ancestors([node])),
        )

    return tuple(map(output, program.outputs))


def _regions(program: Program) -> dict[str, int]:
    operators = [node for node in program.graph.nodes if node.op not in ("placeholder", "output") and has_tensor(node)]
    dense = [node for node in operators if node not in program.parameter_dependent]
    return {
        "prologue": len(dense),
        "trunk": len(program.trunk),
        "head": len(program.region) - len(program.trunk),
        "epilogue": len(operators) - len(dense) - len(program.region),
    }
