"""The one way by which tests get behind a compiled callable: to its engines, executables, options and stacks.

    executable = inside(compiled).newest.executable  # what runs
    program = inside(compiled).newest.program  # what the passes made it of; a chunk's graphs are program.joint
    inside(compiled).use(Options(chunk_size=3))  # for the next calls, with nothing compiled again

What a user may know of a call is in `dta_compile.last_plan` and `dta_compile.explain`; tests of that use these.
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
from dta_compile.passes.sealing.seal import seal
from dta_compile.program_cache import cache
from dta_compile.runtime.engine import Engine
from dta_compile.runtime.path.stack import PathStack
from dta_compile.runtime.replay.lease import ReplayCache

PROGRAMS: weakref.WeakKeyDictionary[Executable, Program] = weakref.WeakKeyDictionary()


def _sealed(program: Program) -> Executable:
    """Remember what an executable was made of, for as long as there is the executable."""
    made = seal(program)
    PROGRAMS[made] = program
    return made


backend.seal = cache.seal = _sealed


@dataclasses.dataclass(frozen=True)
class Inside:
    """What was compiled so far for one callable.

    Attributes:
        engines: of those of its graphs that ran over a tree, oldest first; empty before the first such call.
    """

    engines: tuple[Engine, ...]

    @property
    def newest(self) -> Engine:
        """The engine of the graph that was captured last."""
        return self.engines[-1]

    @property
    def only(self) -> Engine:
        """The engine, where one graph has to be all that was captured."""
        (engine,) = self.engines
        return engine

    def use(self, options: Options) -> None:
        """Plan and run the next calls by other options; the graphs stay as they were compiled."""
        for engine in self.engines:
            engine.options = options

    def forget_check(self) -> None:
        """Let the next call be the first one again, which the self-check precedes."""
        for engine in self.engines:
            engine.checked = False

    def forget_replays(self) -> None:
        """Let no chunk be recorded."""
        for engine in self.engines:
            engine.replays = ReplayCache()

    def recorded_stacks(self) -> Iterator[PathStack]:
        """The path stacks that recorded chunks read and write, which stay between calls."""
        for engine in self.engines:
            for arena in engine.replays.arenas.values():
                yield arena.path


def inside(compiled: Any) -> Inside:
    """Get behind what `torch.compile(..., backend="dta")` returned, or a module after `.compile(backend="dta")`."""
    engines = tuple(records.of(compiled).engines)
    for engine in engines:
        if engine.executable in PROGRAMS:  # and not from a file
            engine.program = PROGRAMS[engine.executable]
    return Inside(engines)
