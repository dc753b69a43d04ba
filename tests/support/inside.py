"""Access to the engines, executables, options and stacks behind a compiled callable, for tests only.

    executable = inside(compiled).newest.executable  # what runs
    program = inside(compiled).newest.program  # result of the passes; a chunk's graphs are program.joint
    inside(compiled).use(Options(chunk_size=3))  # for the next calls, without recompilation

Public facts about a call are in `dta_compile.last_plan` and `dta_compile.explain`; tests of those use them directly.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator
from typing import Any

from dta_compile import backend, records
from dta_compile.executable.executable import Executable
from dta_compile.options import Options
from dta_compile.passes import Program
from dta_compile.passes.to_executable.seal import seal
from dta_compile.program_cache import cache
from dta_compile.runtime.cuda_graphs.arenas import ReplayCache
from dta_compile.runtime.engine import Engine
from dta_compile.runtime.path.stack import PathStack

PROGRAMS: weakref.WeakKeyDictionary[Executable, Program] = weakref.WeakKeyDictionary()


def _sealed(program: Program) -> Executable:
    """Seal a program and remember it for as long as its executable exists."""
    executable = seal(program)
    PROGRAMS[executable] = program
    return executable


backend.seal = cache.seal = _sealed


@dataclasses.dataclass(frozen=True)
class Inside:
    """Engines that were compiled so far for one callable.

    Attributes:
        engines: engines of its graphs that ran over a tree, oldest first; empty before the first such call.
    """

    engines: tuple[Engine, ...]

    @property
    def newest(self) -> Engine:
        """Engine of the graph that was captured last."""
        return self.engines[-1]

    @property
    def only(self) -> Engine:
        """The single engine; fails if several graphs were captured."""
        (engine,) = self.engines
        return engine

    def use(self, options: Options) -> None:
        """Plan and run the next calls with other options; the compiled graphs stay. There has to be one already."""
        assert self.engines, "nothing has been compiled that options could be set on"
        for engine in self.engines:
            engine.options = options

    def forget_check(self) -> None:
        """Make the next call a first one again, so that the self-check precedes it."""
        for engine in self.engines:
            engine.checked = False

    def forget_replays(self) -> None:
        """Drop all recorded chunks."""
        for engine in self.engines:
            engine.replays = ReplayCache()

    def recorded_stacks(self) -> Iterator[PathStack]:
        """Yield the path stacks that recorded chunks read and write, which persist between calls."""
        for engine in self.engines:
            for arena in engine.replays.arenas.values():
                yield arena.path


def inside(compiled: Any) -> Inside:
    """Get behind a callable of `torch.compile(..., backend="dta")` or a module after `.compile(backend="dta")`."""
    engines = tuple(records.of(compiled).engines)
    for engine in engines:
        if engine.executable in PROGRAMS:  # not loaded from a file
            engine.program = PROGRAMS[engine.executable]
    return Inside(engines)
