"""Numbers of a run in TensorBoard's files, and in those of wandb (offline) where it is installed."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import TracebackType


class Metrics:
    """Scalars by version of the policy.

    Args:
        after: the version from which a resumed run goes on; TensorBoard drops what came after it.
    """

    def __init__(self, folder: Path, name: str, after: int | None = None) -> None:
        self._writer = self._wandb = None
        if importlib.util.find_spec("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter

            purge = None if after is None else after + 1
            self._writer = SummaryWriter(str(folder / "tensorboard" / name), purge_step=purge)
        if importlib.util.find_spec("wandb"):
            import wandb

            os.environ.setdefault("WANDB_SILENT", "true")
            self._wandb = wandb.init(
                project="async_grpo", name=f"{folder.name} {name}", dir=str(folder), mode="offline"
            )

    def add(self, version: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            if self._writer is not None:
                self._writer.add_scalar(name, value, version)
        if self._wandb is not None:
            self._wandb.log(values, step=version)

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._writer is not None:
            self._writer.close()
        if self._wandb is not None:
            self._wandb.finish()
