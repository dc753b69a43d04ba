"""dense_graphs: build prologue and epilogue as executable graphs over the whole batch.

The prologue takes all inputs of the call and returns the values that chunks and the epilogue need. The epilogue takes
all inputs, the dense frontier values and prologue values, and returns the outputs of the call under ordinary autograd.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import fx

from dta_compile.passes.contracts import contract
from dta_compile.passes.cuts.row_epilogue import row_epilogue
from dta_compile.passes.graphs.subgraph import Subgraph
from dta_compile.passes.lowering.lower import Draws, place_draws
from dta_compile.passes.masks.entries import leaves_of_masks
from dta_compile.passes.program import Mixed, Program, ancestors, has_tensor


@contract(
    reads=[
        *("training", "module", "placeholders", "draws", "asserted", "written"),
        *("batch", "tokens", "values", "parameter_dependent"),
        *("mixers", "region", "frontier", "trunk_inputs", "head_inputs", "constant_inputs", "trunk_keys", "head_keys"),
    ],
    fills=["prologue_nodes", "prologue", "epilogue", "epilogue_dense_inputs", "row_epilogue"],
)
def dense_graphs(program: Program) -> None:
    """Fill `program.prologue`, `.epilogue`, the values that pass between them, and `.row_epilogue`."""
    frontier = {value.node for value in program.frontier}
    outputs = [node for node in program.outputs if isinstance(node, fx.Node)]
    draws = place_draws(program, _read_by_chunks(program))

    def is_dense(node: fx.Node) -> bool:
        return has_tensor(node) and node not in program.parameter_dependent and node not in draws.late

    needed = ancestors([*outputs, *draws.epilogue], stop=lambda node: node in frontier or is_dense(node))
    program.epilogue_dense_inputs = [
        node for node in program.graph.nodes if node in needed and is_dense(node) and node.op != "placeholder"
    ]
    program.prologue_nodes = prologue_nodes(program)
    program.prologue = graph_of(program, [], program.prologue_nodes, [*draws.prologue, *program.asserted])
    received = [*(value.node for value in program.frontier), *program.epilogue_dense_inputs]
    program.epilogue = graph_of(program, received, program.outputs, draws.epilogue)
    if program.training:
        outside = frontier | set(program.epilogue_dense_inputs)
        nodes = [node for node in program.graph.nodes if node in needed - outside]
        program.row_epilogue = _of_whole_batch(program, draws) or row_epilogue(program, nodes, received)


def _of_whole_batch(program: Program, draws: Draws) -> Mixed | None:
    """Return why the epilogue is one for all sequences; None if nothing in it is."""
    if draws.epilogue:
        drawn = draws.epilogue[0]
        return Mixed(f"{drawn.target} draws random numbers for all sequences at once", drawn)
    if program.written:
        return Mixed("an input is written to once for all sequences", program.outputs[-1])
    return None


def prologue_nodes(program: Program) -> list[fx.Node]:
    """Return the nodes that the prologue computes for chunks and for the epilogue."""
    return list(dict.fromkeys([*_read_by_chunks(program), *program.epilogue_dense_inputs]))


def _read_by_chunks(program: Program) -> list[fx.Node]:
    chunk_inputs = [*program.trunk_inputs, *program.head_inputs, *program.trunk_keys, *program.head_keys]
    nodes = [*(item.node for item in chunk_inputs), *program.constant_inputs]
    nodes += [*(condition.source for condition in program.conditions), *leaves_of_masks(program)]
    return list(dict.fromkeys(nodes))


def graph_of(
    program: Program, received: list[fx.Node], outputs: Iterable[Any], draws: Sequence[fx.Node] = ()
) -> fx.GraphModule:
    """Build a graph from the call's inputs and `received` values to `outputs`, in which `draws` run: random operators
    and assertions."""
    outputs, subgraph = list(outputs), Subgraph()
    subgraph.add_inputs(program.placeholders)
    subgraph.add_inputs(received, "received_")
    wanted = [*draws, *(node for node in outputs if isinstance(node, fx.Node))]
    needed = ancestors(wanted, stop=subgraph.copies.__contains__)
    for node in program.graph.nodes:
        if node in needed and node not in subgraph.copies:
            subgraph.copied(node)
    return subgraph.module(program.module, outputs)
