"""other_batches: handle functions that run the model on batches of several sizes (chosen and rejected answers).

The regions found so far are those of the first batch; attention over the others is left in the epilogue. Such an
epilogue becomes a captured graph of its own, with the dense frontier values among its inputs: a `Program` over the next
batch, with its own prefix tree, whose epilogue may again be a program. Ordinary autograd connects them.
"""

from __future__ import annotations

from dta_compile.errors import RefusalError
from dta_compile.executable.layouts import Input, InputKind
from dta_compile.ops.library import is_random
from dta_compile.ops.mixer import MIXERS
from dta_compile.passes.axes.layouts import mixer_calls
from dta_compile.passes.contracts import contract
from dta_compile.passes.cuts.dense_graphs import graph_of, prologue_nodes
from dta_compile.passes.graphs.source_lines import where
from dta_compile.passes.program import Program


@contract(
    reads=[
        *("training", "codegen", "own_symbols", "inputs", "module", "placeholders", "written", "other_batches"),
        *("mixers", "frontier", "epilogue"),
        *("trunk_inputs", "head_inputs", "constant_inputs", "trunk_keys", "head_keys"),
    ],
    fills=["rest"],
    rewrites=["prologue_nodes", "prologue", "epilogue_dense_inputs"],
)
def other_batches(program: Program) -> None:
    """Fill `program.rest` if the epilogue has mixers: a program in the state that the pass `lower` leaves."""
    left = mixer_calls(program.epilogue.graph)
    if not left:
        return
    others = [node for node in program.other_batches if node.target in MIXERS]
    if len(left) > len(others):
        raise RefusalError(
            "what follows attention would compute it again for all sequences",
            where=program.mixers[-1].where,
            expected="outputs that are computed from values of tokens",
            got=f"{len(left)} {MIXERS[left[0].target].name} calls after the token region",
            hint="please report the model",
        )
    _refuse_random_operators(program)
    if program.written:
        raise RefusalError(
            "the model runs on batches of different sizes in one function, and writes to a buffer",
            where=where(program.placeholders[program.written[0]]),
            expected="one batch in a function that writes",
            got=f"a write to {program.inputs[program.written[0]].name}",
            hint="compile the model itself, and call it for each batch",
        )
    # Values without gradient are computed again, not received: masks are proven from the operators that compute them.
    received = [value.node for value in program.frontier]
    module = graph_of(program, received, program.outputs)
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    for node, source in zip(placeholders, (*program.placeholders, *received), strict=True):
        node.meta = dict(source.meta)
    inputs = list(program.inputs)
    for value in program.frontier:
        kind = InputKind.DIFFERENTIABLE_DATA if value.differentiable else InputKind.DATA
        inputs.append(Input(len(inputs), f"{value.node.name} of another batch", kind, value.differentiable))
    program.epilogue_dense_inputs = []
    program.prologue_nodes = prologue_nodes(program)
    program.prologue = graph_of(program, [], program.prologue_nodes)
    settings = program.training, program.codegen, program.own_symbols, True
    program.rest = rest = Program(module, *settings, inputs, module, placeholders)
    rest.filled |= {"inputs", "module", "placeholders", "draws", "asserted", "written", "traced"}


def _refuse_random_operators(program: Program) -> None:
    for node in program.graph.nodes:
        if is_random(node.target):
            raise RefusalError(
                "random numbers in a function that runs the model on batches of different sizes",
                where=where(node),
                expected="operators without random numbers",
                got=str(node.target),
                hint="draw them outside of the compiled function, or pad the batches to one size",
            )


def programs_of(program: Program) -> list[Program]:
    """Return a program and the programs of its further batches."""
    return [program] if program.rest is None else [program, *programs_of(program.rest)]
