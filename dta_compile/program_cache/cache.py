"""Return the executable of a captured graph from the cache, or run the passes and save it."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from typing import Any

from dta_compile.executable.executable import Executable
from dta_compile.options import Options
from dta_compile.passes import Program, run_passes
from dta_compile.passes.fusion.codegen import choice_for
from dta_compile.passes.to_executable.seal import seal
from dta_compile.program_cache.files import ProgramFile, open_folder
from dta_compile.program_cache.key import NotDescribed, description
from dta_compile.program_cache.pickles import from_bytes, to_bytes
from dta_compile.program_cache.size_guards import Assumptions, assumptions_of, first_size, shape_env_of

try:
    import lzma as codec
except ImportError:  # a Python that was built without it
    import zlib as codec  # type: ignore[no-redef]

FOUND = "found in the cache"  # key in `Executable.seconds`, next to the seconds of the passes when they ran

logger = logging.getLogger("dta_compile")


def analysed(program: Program, options: Options) -> Executable:
    """Return the executable of a program, from the cache if it has one that is valid for this graph.

    Raises the errors of `run_passes`; such programs are not saved.
    """
    started = time.perf_counter()
    entry = _entry(program, options)
    if entry is not None and (cached := entry.load()) is not None:
        seconds = time.perf_counter() - started
        logger.debug("passes: %s, %.2f s", FOUND, seconds)
        return dataclasses.replace(cached, seconds={**cached.seconds, FOUND: seconds})
    executable = seal(run_passes(program, skip=options.skip_passes))
    if entry is not None:
        entry.save(executable)
    return executable


def _entry(program: Program, options: Options) -> _Entry | None:
    """Return the cache entry of a program; None if it cannot be cached."""
    cache, env = options.cache_folder, shape_env_of(program.captured)
    if cache is None or os.environ.get("DTA_DEBUG") or env is None:
        return None
    folder = open_folder(cache)
    if folder is None:
        return None
    try:
        text = description(program, options.skip_passes)
    except Exception as reason:
        is_known = isinstance(reason, NotDescribed)
        logger.debug("the program is not looked up in the cache: %s", reason, exc_info=not is_known)
        return None
    may_choose = program.codegen == "auto" and "codegen" not in options.skip_passes
    return _Entry(ProgramFile(folder, text), env, len(env.guards), env.num_deferred_runtime_asserts, may_choose)


@dataclasses.dataclass(frozen=True)
class _Entry:
    """Cache entry of one program.

    Attributes:
        file: its file.
        env: Dynamo's shape environment of the captured graph.
        guards, later: numbers of its guards, and of its checks that depend on data, before the passes.
        may_choose: the first batch decides whether code is generated.
    """

    file: ProgramFile
    env: Any
    guards: int
    later: int
    may_choose: bool

    def load(self) -> Executable | None:
        """Return the executable if there is one valid for this first call; remove a file that cannot be used."""
        try:
            data = self.file.read()
            if data is None:
                return None
            assumptions, executable = from_bytes(codec.decompress(data))
            if not isinstance(assumptions, Assumptions) or not isinstance(executable, Executable):
                raise ValueError("it holds something else")
            if not assumptions.hold(self.env):
                return None
            if not assumptions.assume(self.env):
                raise ValueError("its sizes are others")
        except Exception as error:
            logger.info("dta: the program in %s is not used: %s: %s", self.file.path, type(error).__name__, error)
            self.file.remove()
            return None
        if self.may_choose and any(each.codegen != self._choice(each) for each in (executable, *executable.further)):
            return None
        self.file.touch()
        return executable

    def _choice(self, executable: Executable) -> str:
        """Return the choice of `codegen="auto"` for the first batch of this process."""
        batch, tokens = (first_size(self.env, size) for size in (executable.batch, executable.tokens))
        return choice_for(executable.device, executable.joint.saved_bytes_per_token * batch * tokens)

    def save(self, executable: Executable) -> None:
        """Save an executable for other processes; failures are only logged."""
        try:
            self.file.write(codec.compress(to_bytes((assumptions_of(self.env, self.guards, self.later), executable))))
        except Exception as error:
            logger.debug("the program is not kept: %s: %s", type(error).__name__, error)
