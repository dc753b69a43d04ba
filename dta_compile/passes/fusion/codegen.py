"""codegen: replace the operators between matrix products and attention calls of a chunk by generated code.

Each executable graph is cut at the calls that a library runs best. The operators between two of these become one piece
(`outline`), and inductor compiles every distinct piece once, for all numbers of tokens and head rows. Equal layers have
the same pieces. The saved values of the backward were chosen before and stay. Attention of a chunk on a CPU, which is
written in C++ (`executable.native`), is compiled with the pieces and counts as one.

The pass runs before `in_place`: pieces are functional, and inductor plans the memory inside them itself.

With `codegen="auto"` a background process compiles (`codegen.background`), and steps run on ATen until all code is
there. A call runs with the code that existed when it began, its backward included.

On a CPU, generated code saves passes over memory and operator calls. It costs some seconds of one core, once, since
later processes find the code (`codegen.code_cache`). So "auto" skips only small steps.
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

# "auto" generates code if a first batch without sharing keeps at least so many bytes for the backward, by device type:
# these bytes grow like the time that generated code saves. To be measured on CUDA.
WORTHWHILE = {"cuda": 0, "cpu": 2**28}


@contract(reads=["mixers", "mixer_nodes"], rewrites=["codegen", "stages"], may_be_skipped=True)
def codegen(program: Program) -> None:
    """Resolve `program.codegen` to "eager" or "inductor"; for the latter, outline pieces in the executable graphs."""
    in_background = program.codegen == "auto"
    if in_background:
        program.codegen = choice(program)
    if program.codegen == "eager":
        return
    stages, known, device = program.stages, Known(), device_of(program)
    native = [TreeAttention()] if any(TreeAttention.takes(layer, device) for layer in program.mixers) else []
    for module in stages.modules:
        module.graph = outlined(module.graph, stages.sizes, known)
        module.graph.lint()
    pieces = {name: pieces_of(kind.graphs[name] for kind in stages.kinds if name in kind.graphs) for name in GRAPHS}
    # An anchor runs `cache_only` for some stages and `forward_only` for others.
    pieces["cache_only"] = list(dict.fromkeys([*pieces["cache_only"], *pieces["forward_only"]]))
    program.stages = dataclasses.replace(
        stages, generated=GeneratedCode(pieces, native, in_background), bodies=dict(known.values())
    )


def choice(program: Program) -> str:
    """Resolve "auto" by the sizes of the first batch."""
    mixer, value = program.mixers[0].mixer, program.mixer_nodes[0].meta["val"]
    kept = program.stages.kept_bytes()
    batch, tokens = (hint(value.shape[dim]) or 0 for dim in (mixer.batch_dim, mixer.token_dim))
    return choice_for(device_of(program), (kept.per_token + kept.per_head_row) * batch * tokens)


def choice_for(device: str, kept: float) -> str:
    """Resolve "auto" by the bytes that a first batch without sharing keeps for the backward."""
    least = WORTHWHILE.get(device)
    return "inductor" if least is not None and kept >= least else "eager"


def device_of(program: Program) -> str:
    """Return the type of the device that the layers were traced on."""
    value: torch.Tensor = program.mixer_nodes[0].meta["val"]
    return value.device.type


def pieces_of(modules: Iterable[fx.GraphModule]) -> list[Piece]:
    """Return the distinct pieces that some graphs call."""
    targets = (node.target for module in modules for node in module.graph.nodes)
    return list(dict.fromkeys(target for target in targets if isinstance(target, Piece)))
