"""What all processes of a run have in common: how they begin, and how they know that they should end."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import torch

STOP = "stop"


class Role:
    """A process of a run, under its name. Ends when the run is stopped, or when whoever started it is gone."""

    def __init__(self, folder: Path, name: str, threads: int) -> None:
        self.folder, self.name = folder, name
        self._parent = os.getppid()
        torch.set_num_threads(threads)
        with contextlib.suppress(ValueError):  # Ray calls it beside the main thread
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one who started it is interrupted, and stops all
        pids = folder / "pids"
        pids.mkdir(exist_ok=True)
        (pids / name).write_text(str(os.getpid()))

    @property
    def stops(self) -> bool:
        return (self.folder / STOP).exists() or os.getppid() != self._parent
