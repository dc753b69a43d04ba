"""Weights on their way: the newest policy for the workers, snapshots for evaluation, checkpoints for the trainer.

Every file appears as a whole or not at all.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

POLICY, CHECKPOINT, SNAPSHOTS = "policy.pt", "checkpoint.pt", "snapshots"


def write(path: Path, content: Any) -> None:
    """Save to a file that no reader sees half of."""
    path.parent.mkdir(exist_ok=True)
    new = path.with_suffix(".new")
    torch.save(content, new)
    os.replace(new, path)


def read(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def publish(folder: Path, version: int, model: nn.Module, snapshot: bool) -> None:
    """Hand the weights to whoever follows them."""
    content = {"version": version, "weights": model.state_dict()}
    if snapshot:
        write(folder / SNAPSHOTS / f"{version:06d}.pt", content)
    write(folder / POLICY, content)


def snapshots(folder: Path) -> dict[int, Path]:
    """Files by version."""
    return {int(path.stem): path for path in sorted((folder / SNAPSHOTS).glob("*.pt"))}


class Follower:
    """Keeps a model at the newest published weights."""

    def __init__(self, folder: Path, model: nn.Module) -> None:
        self._path, self._model, self._seen = folder / POLICY, model, (0, 0)
        self.version: int | None = None

    def refresh(self) -> int | None:
        """Load what is new; the version, None before the first one."""
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return None
        if (status.st_ino, status.st_mtime_ns) != self._seen:
            content = read(self._path)
            self._model.load_state_dict(content["weights"])
            self.version, self._seen = content["version"], (status.st_ino, status.st_mtime_ns)
        return self.version
