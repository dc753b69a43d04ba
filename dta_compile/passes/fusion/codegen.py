"""codegen: generated code for what lies between the matrix products and the attention calls of a chunk.

Each executable graph is cut at the calls that a library runs best; the operators between two of them become one piece
(`clusters`, `piece`), and every distinct piece is compiled once by inductor, for all numbers of tokens and head rows.
Layers that are alike have the same pieces. What is saved between forward and backward was chosen before and stays.

This comes before `in_place`: pieces are functions without side effects, and inductor places their values by itself.

On a CPU, generated code saves passes over memory and calls of operators: 3% to 7% of a step without sharing, of a
model of 4 layers with hidden size 256 (medians of 7, two threads), for 15 to 30 seconds of compiling. So "auto"
generates it there for models and batches that are large enough to earn this back within 100 steps.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from dta_compile.passes.contracts import contract
from dta_compile.passes.fusion.inductor import generate
from dta_compile.passes.fusion.piece import Piece, outlined
from dta_compile.passes.symbols import hint

if TYPE_CHECKING:
    from torch import fx

    from dta_compile.passes.program import Program

# "auto": by device type, the bytes that the chunks of a first batch without sharing keep for the backward from which on
# code is generated; what is kept grows as what generated code saves. To be measured on CUDA.
WORTHWHILE = {"cuda": 0, "cpu": 2**30}
GRAPHS = ("cache_only", "forward_only", "forward", "backward")

logger = logging.getLogger("dta_compile")


@dataclasses.dataclass
class GeneratedCode:
    """The pieces of a program, compiled when a schedule first needs them; `str` of it is the report.

    Attributes:
        pieces: by the graph that calls them.
        compiled: how many there is code for.
        found: those of them that inductor had on disk.
        seconds: spent on compiling.
        failures: why pieces run as ATen operators, a piece each.
    """

    pieces: dict[str, list[Piece]]
    compiled: int = 0
    found: int = 0
    seconds: float = 0.0
    failures: list[str] = dataclasses.field(default_factory=list)
    _tried: set[Piece] = dataclasses.field(default_factory=set)

    def prepare(self, graphs: Iterable[str]) -> None:
        """Compile the pieces of these graphs that were not compiled before."""
        for graph in graphs:
            for piece in self.pieces.get(graph, ()):
                if piece not in self._tried:
                    self._tried.add(piece)
                    self._compile(piece)

    def _compile(self, piece: Piece) -> None:
        started = time.perf_counter()
        try:
            piece.code = generate(piece.body, piece.symbols, piece.inputs)
            self.compiled += 1
            self.found += piece.code.found
        except Exception as error:
            # Its operators run one by one, as without this pass; a reason that all pieces share is given once.
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200] if str(error).strip() else ''}"
            if reason not in self.failures:
                logger.warning("dta: inductor failed, so part of the model runs as ATen operators: %s", reason)
            self.failures.append(reason)
        self.seconds += time.perf_counter() - started

    def __str__(self) -> str:
        text = f"inductor: {self.compiled} pieces compiled once each, {self.seconds:.1f} s"
        text += f", {self.found} of them from its cache" if self.found else ""
        return text + (f"; {len(self.failures)} failed and run as ATen operators" if self.failures else "")


@contract(reads=["mixers"], rewrites=["codegen", "joint"], may_be_skipped=True)
def codegen(program: Program) -> None:
    """Set `program.codegen` to what is done, "eager" or "inductor", and rewrite the executable graphs."""
    if program.codegen == "auto":
        program.codegen = choice(program)
    if program.codegen == "eager":
        return
    joint, known = program.joint, dict[str, Piece]()
    modules: dict[str, fx.GraphModule] = {name: getattr(joint, name) for name in GRAPHS if getattr(joint, name)}
    for module in dict.fromkeys(modules.values()):
        module.graph = outlined(module.graph, joint.sizes, known)
        module.graph.lint()
    generated = GeneratedCode({name: pieces_of(module) for name, module in modules.items()})
    program.joint = dataclasses.replace(joint, generated=generated)


def choice(program: Program) -> str:
    """What "auto" stands for: generated code where it pays, as far as the first batch tells."""
    layer = program.mixers[0]
    value: torch.Tensor = layer.node.meta["val"]
    batch, tokens = (hint(value.shape[dim]) or 0 for dim in (layer.mixer.batch_dim, layer.mixer.token_dim))
    least = WORTHWHILE.get(value.device.type)
    pays = least is not None and program.joint.saved_bytes_per_token * batch * tokens >= least
    return "inductor" if pays else "eager"


def pieces_of(module: fx.GraphModule) -> list[Piece]:
    """The pieces that a graph calls, each once."""
    targets = (node.target for node in module.graph.nodes)
    return list(dict.fromkeys(target for target in targets if isinstance(target, Piece)))
