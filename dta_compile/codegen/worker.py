"""worker: a process that generates code beside the steps of another one, and ends with it.

`python worker.py PARENT` reads a `Job` from its input; see `background`. It keeps what it generates
where its parent finds it (`kept`), and writes a line for every piece to its output.

It is two processes. One imports nothing, not even the package, and watches: a thread could not, since importing torch
holds Python's lock for seconds. Nor can the kernel be asked (PR_SET_PDEATHSIG): it takes the end of the thread that
started a process for the end of the parent, and would leave the compiler.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import time
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from dta_compile.executable.code import AnySource

POLL_SECONDS = 0.2  # between two looks at whether the parent is there


class Job(NamedTuple):
    """What is to be generated.

    Attributes:
        sources: by the name of the file that is to keep the code.
        threads: of the CPU that the code is for.
        settings: of inductor.
    """

    sources: dict[str, AnySource]
    threads: int
    settings: dict[str, Any]


class Result(NamedTuple):
    """What became of a source, and how long it took; `error` is empty if there is code."""

    key: str
    seconds: float
    error: str


def main(parent: int) -> None:
    """Do the job, unless the parent ends before."""
    # A group of processes, which all end with this one and which interrupts from the keyboard do not reach. No
    # session: Linux gives sessions equal shares of the processor, whatever the priorities in them.
    os.setpgid(0, 0)
    if worker := os.fork():
        sys.exit(_watched(parent, worker))
    _work()


def _work() -> None:
    import torch

    from dta_compile.codegen.inductor import apply
    from dta_compile.executable.code import Source

    output = os.dup(1)
    os.dup2(2, 1)  # whatever inductor and compilers print is no result
    job: Job = pickle.load(sys.stdin.buffer)
    apply(job.settings)
    for source in job.sources.values():
        for value in source.inputs if isinstance(source, Source) else ():
            if value.device.type == "cuda":
                torch.cuda.set_device(value.device)  # no memory on the first GPU for what another one runs
    with open(output, "w", buffering=1) as results:
        for key, source in job.sources.items():
            started = time.perf_counter()
            error = _generated(key, source, job.threads)
            results.write(json.dumps(Result(key, time.perf_counter() - started, error)) + "\n")


def _generated(key: str, source: AnySource, threads: int) -> str:
    """Generate and keep code, unless a worker of another process did; why it failed, or nothing."""
    from dta_compile.codegen import inductor, kept

    try:
        kept.place()  # inductor runs what lies in its folder
        if kept.find(key) is None:
            kept.keep(key, inductor.generate(source, threads))
    except Exception as error:
        return reason(error)
    return ""


def reason(error: Exception) -> str:
    """An error in one line."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:200] if text else ''}"


def _watched(parent: int, worker: int) -> int:
    """Wait for the process that works, and return how it ended; if the parent ends before, end all of the group."""
    while os.getppid() == parent:
        ended, status = os.waitpid(worker, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code  # as shells say which signal it was
        time.sleep(POLL_SECONDS)
    os.killpg(0, signal.SIGKILL)
    return 1


if __name__ == "__main__":
    del sys.path[0]  # the folder of this file, where names of modules are those of a package
    main(int(sys.argv[1]))
