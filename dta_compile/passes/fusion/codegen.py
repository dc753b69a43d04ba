"""codegen: generated code for what lies between the matrix products and the attention calls of a chunk.

Each executable graph is cut at the calls that a library runs best; the operators between two of them become one piece
(`outline`), and every distinct piece is compiled once by inductor, for all numbers of tokens and head rows.
Layers that are alike have the same pieces. What is saved between forward and backward was chosen before and stays.
Attention of a chunk on a CPU, which is written in C++ (`executable.native`), is compiled with them and counted as one.

This comes before `in_place`: pieces are functions without side effects, and inductor places their values by itself.

What `codegen="auto"` generates, it generates beside the steps (`codegen.background`): they run on ATen until all code
that was asked for is there. A call runs what there was when it began, to its end, its backward included.

On a CPU, generated code saves passes over memory and calls of operators: 3% to 7% of a step without sharing, of a
model of 4 layers with hidden size 256 (medians of 7, two threads), and compiled attention 10% or more, for 15 to 30
seconds of one core, once: what was generated is found by later processes (`codegen.code_cache`). So "auto" skips it in
small steps only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from dta_compile.codegen.generated import GeneratedCode
from dta_compile.executable.pieces import Piece, TreeAttention
from dta_compile.passes.contracts import contract
from dta_compile.passes.fusion.outline import Known, outlined
from dta_compile.passes.stage_graphs import GRAPHS
from dta_compile.passes.symbols import hint

if TYPE_CHECKING:
    from torch import fx

    from dta_compile.passes.program import Program

# "auto": by device type, the bytes that the chunks of a first batch without sharing keep for the backward from which on
# code is generated; what is kept grows as what generated code saves. To be measured on CUDA.
WORTHWHILE = {"cuda": 0, "cpu": 2**28}


@contract(reads=["mixers", "mixer_nodes"], rewrites=["codegen", "stages"], may_be_skipped=True)
def codegen(program: Program) -> None:
    """Set `program.codegen` to what is done, "eager" or "inductor", and rewrite the executable graphs."""
    beside = program.codegen == "auto"
    if beside:
        program.codegen = choice(program)
    if program.codegen == "eager":
        return
    stages, known = program.stages, Known()
    native = [TreeAttention()] if any(TreeAttention.takes(one, device_of(program)) for one in program.mixers) else []
    for module in stages.modules:
        module.graph = outlined(module.graph, stages.sizes, known)
        module.graph.lint()
    pieces = {name: pieces_of(kind.graphs[name] for kind in stages.kinds if name in kind.graphs) for name in GRAPHS}
    pieces["cache_only"] = list(dict.fromkeys([*pieces["cache_only"], *pieces["forward_only"]]))  # stages run either
    program.stages = dataclasses.replace(
        stages, generated=GeneratedCode(pieces, native, beside), bodies=dict(known.values())
    )


def choice(program: Program) -> str:
    """What "auto" stands for: generated code where it pays, as far as the first batch tells."""
    mixer, value = program.mixers[0].mixer, program.mixer_nodes[0].meta["val"]
    kept = program.stages.kept_bytes
    batch, tokens = (hint(value.shape[dim]) or 0 for dim in (mixer.batch_dim, mixer.token_dim))
    return choice_for(device_of(program), (kept.per_token + kept.per_head_row) * batch * tokens)


def choice_for(device: str, kept: float) -> str:
    """The same, by what a first batch without sharing keeps for the backward."""
    least = WORTHWHILE.get(device)
    return "inductor" if least is not None and kept >= least else "eager"


def device_of(program: Program) -> str:
    """The type of the device that the layers were traced on."""
    value: torch.Tensor = program.mixer_nodes[0].meta["val"]
    return value.device.type


def pieces_of(modules: Iterable[fx.GraphModule]) -> list[Piece]:
    """The pieces that some graphs call, each once."""
    targets = (node.target for module in modules for node in module.graph.nodes)
    return list(dict.fromkeys(target for target in targets if isinstance(target, Piece)))
