"""The worker process of a background compile; it ends with its parent.

`python worker.py PARENT` reads a `Job` from stdin; see `background`. It stores generated code in the code cache
(`code_cache`), and writes one line for every source to stdout.

The worker is two processes. One of them only watches the parent and imports nothing, not even the package. A thread
could not watch, since importing torch holds the GIL for seconds. PR_SET_PDEATHSIG would not do either: it fires when
the thread that started the process ends, and does not reach the compiler's processes.
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

POLL_SECONDS = 0.2  # between two checks that the parent is alive


class Job(NamedTuple):
    """The sources to generate code for.

    Attributes:
        sources: the sources, by cache key.
        threads: number of CPU threads that the code is for.
        settings: inductor's settings.
    """

    sources: dict[str, AnySource]
    threads: int
    settings: dict[str, Any]


class Result(NamedTuple):
    """The outcome for one source and the seconds it took; `error` is "" if code was generated."""

    key: str
    seconds: float
    error: str


def main(parent: int) -> None:
    """Run the job in a child process, and kill it if the parent ends."""
    # A process group, so that all of it can be killed and keyboard interrupts do not reach it. Not a session: Linux
    # gives sessions equal shares of the CPU, whatever the priorities in them.
    os.setpgid(0, 0)
    if worker := os.fork():
        sys.exit(_watched(parent, worker))
    _work()


def _work() -> None:
    import torch

    from dta_compile.codegen.inductor import apply
    from dta_compile.executable.code import Source

    output = os.dup(1)
    os.dup2(2, 1)  # output of inductor and of compilers must not mix with the results
    job: Job = pickle.load(sys.stdin.buffer)
    apply(job.settings)
    for source in job.sources.values():
        for value in source.inputs if isinstance(source, Source) else ():
            if value.device.type == "cuda":
                torch.cuda.set_device(value.device)  # so that no context is created on the first GPU
    with open(output, "w", buffering=1) as results:
        for key, source in job.sources.items():
            started = time.perf_counter()
            error = _generated(key, source, job.threads)
            results.write(json.dumps(Result(key, time.perf_counter() - started, error)) + "\n")


def _generated(key: str, source: AnySource, threads: int) -> str:
    """Generate and store code, unless another process did; return why it failed, or ""."""
    from dta_compile.codegen import code_cache, inductor

    try:
        code_cache.path()  # raises if other users could have put code there that inductor would run
        if code_cache.find(key) is None:
            code_cache.store(key, inductor.generate(source, threads))
    except Exception as error:
        return reason(error)
    return ""


def reason(error: Exception) -> str:
    """Return an error as one line."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:200] if text else ''}"


def _watched(parent: int, worker: int) -> int:
    """Wait for the working process and return its exit code; if the parent ends first, kill the process group."""
    while os.getppid() == parent:
        ended, status = os.waitpid(worker, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code  # the shell convention for signals
        time.sleep(POLL_SECONDS)
    os.killpg(0, signal.SIGKILL)
    return 1


if __name__ == "__main__":
    del sys.path[0]  # the folder of this file, whose modules would shadow top-level ones
    main(int(sys.argv[1]))
