"""codegen: generated code for what lies between the matrix products and the attention calls of a chunk.

Each executable graph is cut at the calls that a library runs best; the operators between two of them become one piece
(`clusters`, `piece`), and every distinct piece is compiled once by inductor, for all numbers of tokens and head rows.
Layers that are alike have the same pieces. What is saved between forward and backward was chosen before and stays.
Attention of a chunk on a CPU, which is written in C++ (`native`), is compiled with them and counted as one of them.

This comes before `in_place`: pieces are functions without side effects, and inductor places their values by itself.

What `codegen="auto"` generates, it generates beside the steps (`beside`): they run on ATen until all code that was
asked for is there. A call runs what there was when it began, to its end, its backward included.

On a CPU, generated code saves passes over memory and calls of operators: 3% to 7% of a step without sharing, of a
model of 4 layers with hidden size 256 (medians of 7, two threads), and compiled attention 10% or more, for 15 to 30
seconds of one core, once: what was generated is found by later processes (`kept`). So "auto" leaves it out of small
steps only.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Iterable, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from dta_compile.passes.contracts import contract
from dta_compile.passes.fusion import inductor, kept
from dta_compile.passes.fusion.beside import Beside
from dta_compile.passes.fusion.inductor import AnyCode, generate
from dta_compile.passes.fusion.native import TreeAttention
from dta_compile.passes.fusion.piece import NO_CODES, Codes, Piece, outlined
from dta_compile.passes.fusion.source import AnySource, Source
from dta_compile.passes.fusion.worker import reason
from dta_compile.passes.symbols import hint

if TYPE_CHECKING:
    from torch import fx

    from dta_compile.passes.program import Program

# "auto": by device type, the bytes that the chunks of a first batch without sharing keep for the backward from which on
# code is generated; what is kept grows as what generated code saves. To be measured on CUDA.
WORTHWHILE = {"cuda": 0, "cpu": 2**28}
AnyPiece = Piece | TreeAttention
GRAPHS = ("cache_only", "forward_only", "forward", "backward")

logger = logging.getLogger("dta_compile")


@dataclasses.dataclass
class GeneratedCode:
    """The pieces of a program, and the code that there is for them; `str` of it is the report.

    Attributes:
        pieces: by the graph that calls them.
        native: what is compiled besides for mixers, which every graph calls.
        beside: generate code beside the steps; else a call waits for what it needs.
        codes: what calls that begin now run; another mapping whenever there is more.
        swaps: how often code that was generated beside the steps took the place of ATen.
        found: how many pieces there was code for on disk.
        seconds: spent on generating, here or beside the steps.
        failures: why pieces run as ATen operators, a piece each.
    """

    pieces: dict[str, list[Piece]]
    native: Sequence[TreeAttention] = ()
    beside: bool = False
    codes: Codes = dataclasses.field(default_factory=lambda: NO_CODES)
    swaps: int = 0
    found: int = 0
    seconds: float = 0.0
    failures: list[str] = dataclasses.field(default_factory=list)
    _tried: set[AnyPiece] = dataclasses.field(default_factory=set)
    _pending: dict[str, AnyPiece] = dataclasses.field(default_factory=dict)  # by key, to be generated beside the steps
    _job: Beside | None = None
    _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def __reduce__(self) -> tuple[Any, ...]:
        """As it was before any call."""
        return GeneratedCode, (self.pieces, self.native, self.beside)

    @property
    def compiled(self) -> int:
        """How many pieces there is code for."""
        return len(self.codes)

    @property
    def is_used(self) -> bool:
        """Whether calls that begin now run generated code."""
        return not self.beside or bool(self.codes)

    def prepare(self, graphs: Iterable[str], wait: bool = False) -> Codes:
        """The code that a call of these graphs runs which begins now.

        Args:
            wait: generate what is missing before the call, as for ranks that must run the same code.
        """
        with self._lock:
            asked = dict.fromkeys(piece for graph in graphs for piece in (*self.pieces.get(graph, ()), *self.native))
            self._find([piece for piece in asked if piece not in self._tried])
            if not self.beside or wait:
                self._generate_now()
            elif self._pending:
                self._generate_beside()
            return self.codes

    def _find(self, pieces: list[AnyPiece]) -> None:
        """Take what is on disk; the other pieces are pending, unless nothing could compile them."""
        if not pieces:
            return
        self._tried.update(pieces)
        started, codes = time.perf_counter(), dict[AnyPiece, AnyCode]()
        for key, piece in zip(kept.keys(piece.source for piece in pieces), pieces, strict=True):
            if inductor.is_cached() and (code := kept.find(key)) is not None:
                codes[piece] = code
            elif missing := inductor.why_no_compiler(piece.source.devices):
                self._fail(missing)
            else:
                self._pending[key] = piece
        self.found += len(codes)
        self._add(codes)
        self.seconds += time.perf_counter() - started

    def _generate_now(self) -> None:
        codes, started, self._job = dict[AnyPiece, AnyCode](), time.perf_counter(), None
        for key, piece in self._pending.items():
            try:
                codes[piece] = _made(key, piece.source)
            except Exception as error:
                self._fail(reason(error))
        self._pending.clear()
        self._add(codes)
        self.seconds += time.perf_counter() - started

    def _generate_beside(self) -> None:
        """Start a process for the pending pieces, or take what it made once it has ended."""
        if self._job is None:
            if not Beside.is_busy():
                try:
                    self._job = Beside({key: piece.source for key, piece in self._pending.items()})
                except Exception as error:
                    self._give_up(f"no process beside the steps: {reason(error)}", list(self._pending))
            return
        if not self._job.poll():
            return
        job, self._job, codes = self._job, None, dict[AnyPiece, AnyCode]()
        self.seconds += sum(result.seconds for result in job.results)
        for result in job.results:
            piece = self._pending.pop(result.key)
            code = None if result.error else kept.find(result.key)
            if code is None:
                self._fail(result.error or "the code that was generated is gone")
            else:
                codes[piece] = code
        self._give_up(job.failure, list(job.missing))
        self.swaps += bool(codes)
        self._add(codes)

    def _add(self, codes: Codes) -> None:
        if codes:
            self.codes = MappingProxyType({**self.codes, **codes})

    def _give_up(self, why: str, keys: Iterable[str]) -> None:
        for key in keys:
            del self._pending[key]
            self._fail(why)

    def _fail(self, why: str) -> None:
        # Its operators run one by one, as without this pass; a reason that all pieces share is given once.
        if why not in self.failures:
            _warn(why)
        self.failures.append(why)

    def __str__(self) -> str:
        found = f", {self.found} of them from its cache" if self.found else ""
        failed = f"; {len(self.failures)} failed and run as ATen operators" if self.failures else ""
        if failed and len(set(self.failures)) == 1:
            failed += f" ({self.failures[0]})"
        if not self.beside:
            return f"inductor: {self.compiled} pieces compiled once each, {self.seconds:.1f} s{found}{failed}"
        done = self._job.results if self._job is not None else []
        seconds = self.seconds + sum(result.seconds for result in done)
        text = f"inductor: {self.compiled} of {self.compiled + len(self._pending) + len(self.failures)} pieces in use"
        text += f" ({len(self._pending) - len(done)} being generated)" if self._pending else ""
        return f"{text}{found}, {seconds:.1f} s{' beside the steps' if done or self.swaps else ''}{failed}"


@functools.cache
def _warn(why: str) -> None:
    logger.warning("dta: code could not be generated or compiled, so part of the model runs as ATen operators: %s", why)


def _made(key: str, source: AnySource) -> AnyCode:
    """Code that is generated in this process, and kept for others if that works."""
    compiled = generate(source)
    try:
        kept.keep(key, compiled)
    except (OSError, TypeError) as error:
        logger.info("dta: generated code is not kept: %s", error)
    return inductor.load(compiled)


@contract(reads=["mixers", "mixer_nodes"], rewrites=["codegen", "joint"], may_be_skipped=True)
def codegen(program: Program) -> None:
    """Set `program.codegen` to what is done, "eager" or "inductor", and rewrite the executable graphs."""
    beside = program.codegen == "auto"
    if beside:
        program.codegen = choice(program)
    if program.codegen == "eager":
        return
    joint, known = program.joint, dict[Source, Piece]()
    native = [TreeAttention()] if any(TreeAttention.takes(one, device_of(program)) for one in program.mixers) else []
    modules: dict[str, fx.GraphModule] = {name: getattr(joint, name) for name in GRAPHS if getattr(joint, name)}
    for module in dict.fromkeys(modules.values()):
        module.graph = outlined(module.graph, joint.sizes, known)
        module.graph.lint()
    generated = GeneratedCode({name: pieces_of(module) for name, module in modules.items()}, native, beside)
    program.joint = dataclasses.replace(joint, generated=generated)


def choice(program: Program) -> str:
    """What "auto" stands for: generated code where it pays, as far as the first batch tells."""
    mixer, value = program.mixers[0].mixer, program.mixer_nodes[0].meta["val"]
    batch, tokens = (hint(value.shape[dim]) or 0 for dim in (mixer.batch_dim, mixer.token_dim))
    return choice_for(device_of(program), program.joint.saved_bytes_per_token * batch * tokens)


def choice_for(device: str, kept: float) -> str:
    """The same, by what a first batch without sharing keeps for the backward."""
    least = WORTHWHILE.get(device)
    return "inductor" if least is not None and kept >= least else "eager"


def device_of(program: Program) -> str:
    """The type of the device that the layers were traced on."""
    value: torch.Tensor = program.mixer_nodes[0].meta["val"]
    return value.device.type


def pieces_of(module: fx.GraphModule) -> list[Piece]:
    """The pieces that a graph calls, each once."""
    targets = (node.target for node in module.graph.nodes)
    return list(dict.fromkeys(target for target in targets if isinstance(target, Piece)))
