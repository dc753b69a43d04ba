"""The generated code of a program's pieces: looked up in the code cache, or generated in calls or in the background."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Iterable, Sequence
from types import MappingProxyType
from typing import Any

from dta_compile.codegen import code_cache, inductor
from dta_compile.codegen.background import BackgroundCompile
from dta_compile.codegen.inductor import generate
from dta_compile.codegen.worker import reason
from dta_compile.executable.code import AnySource
from dta_compile.executable.pieces import NO_CODES, AnyCode, Codes, Piece, TreeAttention

AnyPiece = Piece | TreeAttention
INTERVAL = 10.0  # seconds between two lines about generation that a call waits for

logger = logging.getLogger("dta_compile")


@dataclasses.dataclass
class GeneratedCode:
    """The pieces of a program and their generated code; `str` gives the report.

    Attributes:
        pieces: the pieces, by the graph that calls them.
        native: C++ functions for mixers, which every graph calls.
        in_background: whether code is generated in the background; otherwise a call waits for the code that it needs.
        codes: the code for calls that start now; replaced by a new mapping when code is added.
        swaps: how often code from the background replaced ATen operators.
        found: number of pieces whose code was in the code cache.
        seconds: time spent on generating code, in calls and in the background.
        failures: one reason for each piece that runs as ATen operators.
    """

    pieces: dict[str, list[Piece]]
    native: Sequence[TreeAttention] = ()
    in_background: bool = False
    codes: Codes = dataclasses.field(default_factory=lambda: NO_CODES)
    swaps: int = 0
    found: int = 0
    seconds: float = 0.0
    failures: list[str] = dataclasses.field(default_factory=list)
    _tried: set[AnyPiece] = dataclasses.field(default_factory=set)
    _pending: dict[str, AnyPiece] = dataclasses.field(default_factory=dict)  # by key; their code is not generated yet
    _job: BackgroundCompile | None = None
    _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the state before any call."""
        return GeneratedCode, (self.pieces, self.native, self.in_background)

    @property
    def compiled(self) -> int:
        """Return the number of pieces that have code."""
        return len(self.codes)

    @property
    def is_used(self) -> bool:
        """Return whether calls that start now run generated code."""
        return not self.in_background or bool(self.codes)

    def prepare(self, graphs: Iterable[str], wait: bool = False) -> Codes:
        """Return the code for a call of these graphs that starts now.

        Args:
            wait: generate missing code before the call, for instance because all ranks must run the same code.
        """
        with self._lock:
            pieces = dict.fromkeys(piece for graph in graphs for piece in (*self.pieces.get(graph, ()), *self.native))
            self._find([piece for piece in pieces if piece not in self._tried])
            if not self.in_background or wait:
                self._generate_now()
            elif self._pending:
                self._generate_in_background()
            return self.codes

    def _find(self, pieces: list[AnyPiece]) -> None:
        """Load code from the code cache; the other pieces become pending, or fail if there is no compiler."""
        if not pieces:
            return
        self._tried.update(pieces)
        started, codes = time.perf_counter(), dict[AnyPiece, AnyCode]()
        for key, piece in zip(code_cache.keys(piece.source for piece in pieces), pieces, strict=True):
            if inductor.is_cached() and (code := code_cache.find(key)) is not None:
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
        first = told = 0.0  # seconds of the first piece, which starts the compiler, and at the latest line
        if self._pending:
            logger.warning(
                "dta: generating code for %d pieces before this call goes on, 1 to 15 s each (with codegen='auto' calls"
                " go on meanwhile)",
                len(self._pending),
            )
        for number, (key, piece) in enumerate(self._pending.items(), 1):
            try:
                codes[piece] = _generated(key, piece.source)
            except Exception as error:
                self._fail(reason(error))
            elapsed, left = time.perf_counter() - started, len(self._pending) - number
            first = first or elapsed
            if number > 1 and left and elapsed - told >= INTERVAL:
                more, told = (elapsed - first) / (number - 1) * left, elapsed
                logger.warning("dta: code for %d of %d pieces, about %.0f s more", number, number + left, more)
        self._pending.clear()
        self._add(codes)
        self.seconds += time.perf_counter() - started

    def _generate_in_background(self) -> None:
        """Start a process for the pending pieces, or load their code once it has ended."""
        if self._job is None:
            if not BackgroundCompile.is_busy():
                try:
                    self._job = BackgroundCompile({key: piece.source for key, piece in self._pending.items()})
                except Exception as error:
                    self._give_up(f"no process beside the steps: {reason(error)}", list(self._pending))
            return
        if not self._job.poll():
            return
        job, self._job, codes = self._job, None, dict[AnyPiece, AnyCode]()
        self.seconds += sum(result.seconds for result in job.results)
        for result in job.results:
            piece = self._pending.pop(result.key)
            code = None if result.error else code_cache.find(result.key)
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
        # The piece runs as ATen operators; a reason that all pieces share is logged once.
        if why not in self.failures:
            _warn(why)
        self.failures.append(why)

    def __str__(self) -> str:
        cached = f", {self.found} of them from its cache" if self.found else ""
        failed = f"; {len(self.failures)} failed and run as ATen operators" if self.failures else ""
        if failed and len(set(self.failures)) == 1:
            failed += f" ({self.failures[0]})"
        if not self.in_background:
            return f"inductor: {self.compiled} pieces compiled once each, {self.seconds:.1f} s{cached}{failed}"
        done = self._job.results if self._job is not None else []
        seconds = self.seconds + sum(result.seconds for result in done)
        text = f"inductor: {self.compiled} of {self.compiled + len(self._pending) + len(self.failures)} pieces in use"
        text += f" ({len(self._pending) - len(done)} being generated)" if self._pending else ""
        return f"{text}{cached}, {seconds:.1f} s{' beside the steps' if done or self.swaps else ''}{failed}"


@functools.cache
def _warn(why: str) -> None:
    logger.warning("dta: code could not be generated or compiled, so part of the model runs as ATen operators: %s", why)


def _generated(key: str, source: AnySource) -> AnyCode:
    """Generate code in this process; store it in the code cache if possible."""
    with contextlib.suppress(OSError):
        code_cache.path()  # raises if other users could have put code there that inductor would run
    compiled = generate(source)
    try:
        code_cache.store(key, compiled)
    except (OSError, TypeError) as error:
        logger.info("dta: generated code is not kept: %s", error)
    return inductor.load(compiled)
