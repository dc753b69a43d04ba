"""The passes, unless some process has run them on the same graph."""

from __future__ import annotations

import dataclasses
import logging
import os
import pickle
import time
from typing import Any

from dta_compile.options import Options
from dta_compile.passes import Program, run_passes
from dta_compile.passes.cuts.other_batches import programs_of
from dta_compile.passes.fusion.codegen import choice
from dta_compile.program_cache.assumptions import Assumptions, Recorder, fake_mode_of
from dta_compile.program_cache.description import NotDescribed, description
from dta_compile.program_cache.encoding import decoded, encoded
from dta_compile.program_cache.files import ProgramFile, open_folder

FOUND = "found in the cache"  # in `Program.timings`, beside the seconds of the passes when they ran

logger = logging.getLogger("dta_compile")


def analysed(program: Program, options: Options) -> Program:
    """A program after all passes: that of the cache if it holds what the passes would make of this graph.

    Raises whatever `run_passes` raises; nothing is kept of such programs.
    """
    started = time.perf_counter()
    entry = _entry(program, options)
    if entry is None:
        return run_passes(program, skip=options.skip_passes)
    found = entry.load(program)
    if found is not None:
        found.timings[FOUND] = time.perf_counter() - started
        logger.debug("passes: %s, %.2f s", FOUND, found.timings[FOUND])
        return found
    run_passes(program, skip=options.skip_passes)
    entry.save(program)
    return program


def _entry(program: Program, options: Options) -> _Entry | None:
    """Where a program is kept; None: nowhere."""
    cache = options.cache_folder
    mode = fake_mode_of(program.captured)
    if cache is None or os.environ.get("DTA_DEBUG") or mode is None or mode.shape_env is None:
        return None
    folder = open_folder(cache)
    if folder is None:
        return None
    try:
        text, recorder = description(program, options.skip_passes), Recorder(mode.shape_env)
    except Exception as reason:
        is_known = isinstance(reason, NotDescribed)
        logger.debug("the program is not looked up in the cache: %s", reason, exc_info=not is_known)
        return None
    may_choose = program.codegen == "auto" and "codegen" not in options.skip_passes
    return _Entry(ProgramFile(folder, text), text, mode, recorder, may_choose)


@dataclasses.dataclass(frozen=True)
class _Entry:
    """A place of the cache.

    Attributes:
        text: the description of the program; the file has all of it.
        mode: of the fake tensors of the captured graph.
        recorder: of the guards that are made from here on.
        may_choose: whether code is generated depends on the first batch.
    """

    file: ProgramFile
    text: str
    mode: Any
    recorder: Recorder
    may_choose: bool

    def load(self, program: Program) -> Program | None:
        """The program if it is there, and right for this first call. A file that cannot be used is removed."""
        try:
            parts = self.file.read()
            if parts is None:
                return None
            text, assumed, rest = parts
            if text != self.text.encode():
                raise ValueError("it is of another program")
            assumptions: Assumptions = pickle.loads(assumed)
            if not assumptions.hold(self.mode.shape_env):
                return None
            found = decoded(rest, program.captured, self.mode)
            if not assumptions.assume(self.mode.shape_env):
                raise ValueError("its sizes are others")
        except Exception as error:
            logger.info("dta: the program in %s is not used: %s: %s", self.file.path, type(error).__name__, error)
            self.file.remove()
            return None
        if self.may_choose and any(one.codegen != choice(one) for one in programs_of(found)):
            return None
        self.file.touch()
        return found

    def save(self, program: Program) -> None:
        """Keep a program for other processes; failing is no error."""
        try:
            assumed = pickle.dumps(self.recorder.assumptions())
            self.file.write([self.text.encode(), assumed, encoded(program, self.recorder.symbols)])
        except Exception as error:
            logger.debug("the program is not kept: %s: %s", type(error).__name__, error)
