"""worker: a process that generates code beside the steps of another one, and ends with it.

`python -m dta_compile.codegen.worker PARENT` runs in a folder with the file `job`; see `beside`. It keeps what
it generates where its parent finds it (`kept`), and writes a line for every piece into the file `results`.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import pickle
import shutil
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from dta_compile.executable.code import AnySource

# What follows imports torch, which takes seconds, only once somebody watches the parent.
POLL_SECONDS = 0.5  # between two looks at whether the parent is there


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
    """Do the job in the current folder."""
    if hasattr(os, "setpgid"):
        # A group of processes, which all end with this one and which interrupts from the keyboard do not reach. No
        # session: Linux gives sessions equal shares of the processor, whatever the priorities in them.
        os.setpgid(0, 0)
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    import torch

    from dta_compile.codegen.inductor import apply
    from dta_compile.executable.code import Source

    job: Job = pickle.loads(pathlib.Path("job").read_bytes())
    apply(job.settings)
    for source in job.sources.values():
        for value in source.inputs if isinstance(source, Source) else ():
            if value.device.type == "cuda":
                torch.cuda.set_device(value.device)  # no memory on the first GPU for what another one runs
    with open("results", "a", buffering=1) as results:
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


def _end_with(parent: int) -> None:
    """End this process, the compiler that it may be waiting for, and its folder, once its parent has ended."""
    folder = os.getcwd()
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]))
