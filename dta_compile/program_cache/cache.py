"""What the passes make of a graph, unless some process has compiled the same graph before."""

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
from dta_compile.passes.sealing.seal import seal
from dta_compile.program_cache.assumptions import Assumptions, Recorder, first_size, shape_env_of
from dta_compile.program_cache.description import NotDescribed, description
from dta_compile.program_cache.files import ProgramFile, open_folder
from dta_compile.program_cache.pickles import from_bytes, to_bytes

try:
    import lzma as codec
except ImportError:  # a Python that was built without it
    import zlib as codec  # type: ignore[no-redef]

FOUND = "found in the cache"  # in `Executable.seconds`, beside the seconds of the passes when they ran

logger = logging.getLogger("dta_compile")


def analysed(program: Program, options: Options) -> Executable:
    """The executable of a program: that of the cache if it holds what the passes would make of this graph.

    Raises whatever `run_passes` raises; nothing is kept of such programs.
    """
    started = time.perf_counter()
    entry = _entry(program, options)
    if entry is not None and (found := entry.load()) is not None:
        seconds = time.perf_counter() - started
        logger.debug("passes: %s, %.2f s", FOUND, seconds)
        return dataclasses.replace(found, seconds={**found.seconds, FOUND: seconds})
    made = seal(run_passes(program, skip=options.skip_passes))
    if entry is not None:
        entry.save(made)
    return made


def _entry(program: Program, options: Options) -> _Entry | None:
    """Where an executable is kept; None: nowhere."""
    cache, env = options.cache_folder, shape_env_of(program.captured)
    if cache is None or os.environ.get("DTA_DEBUG") or env is None:
        return None
    folder = open_folder(cache)
    if folder is None:
        return None
    try:
        text, recorder = description(program, options.skip_passes), Recorder(env)
    except Exception as reason:
        is_known = isinstance(reason, NotDescribed)
        logger.debug("the program is not looked up in the cache: %s", reason, exc_info=not is_known)
        return None
    may_choose = program.codegen == "auto" and "codegen" not in options.skip_passes
    return _Entry(ProgramFile(folder, text), env, recorder, may_choose)


@dataclasses.dataclass(frozen=True)
class _Entry:
    """A place of the cache.

    Attributes:
        env: what Dynamo knows of the sizes of the captured graph.
        recorder: of the guards that are made from here on.
        may_choose: whether code is generated depends on the first batch.
    """

    file: ProgramFile
    env: Any
    recorder: Recorder
    may_choose: bool

    def load(self) -> Executable | None:
        """The executable if it is there, and right for this first call. A file that cannot be used is removed."""
        try:
            data = self.file.read()
            if data is None:
                return None
            assumptions, found = from_bytes(codec.decompress(data))
            if not isinstance(assumptions, Assumptions) or not isinstance(found, Executable):
                raise ValueError("it holds something else")
            if not assumptions.hold(self.env):
                return None
            if not assumptions.assume(self.env):
                raise ValueError("its sizes are others")
        except Exception as error:
            logger.info("dta: the program in %s is not used: %s: %s", self.file.path, type(error).__name__, error)
            self.file.remove()
            return None
        if self.may_choose and any(one.codegen != self._choice(one) for one in (found, *found.further)):
            return None
        self.file.touch()
        return found

    def _choice(self, found: Executable) -> str:
        """What `codegen="auto"` stands for with the first batch of this process."""
        batch, tokens = (first_size(self.env, size) for size in (found.batch, found.tokens))
        return choice_for(found.device, found.joint.saved_bytes_per_token * batch * tokens)

    def save(self, made: Executable) -> None:
        """Keep an executable for other processes; failing is no error."""
        try:
            self.file.write(codec.compress(to_bytes((self.recorder.assumptions(), made))))
        except Exception as error:
            logger.debug("the program is not kept: %s: %s", type(error).__name__, error)
