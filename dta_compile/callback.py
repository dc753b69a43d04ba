"""Public `DTACallback`: the callback in `integrations` that also adds figures of plans to the logs of trainers."""

from __future__ import annotations

import contextlib
from typing import Any

from dta_compile.api import last_plan
from dta_compile.errors import OptionError
from dta_compile.integrations import trainer_callback


class DTACallback(trainer_callback.DTACallback):
    __doc__ = f"""{trainer_callback.DTACallback.__doc__}
    The training logs of the trainer also get the figures of the last plan (`Plan.scalars`). Only callbacks after this
    one see them, and those of `report_to` come before those of `callbacks=`. To have TensorBoard and wandb draw them:

        trainer.callback_handler.callbacks.insert(0, DTACallback())  # in place of callbacks=
    """

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add the figures of the last plan to the training logs."""
        if self._compiled is None or logs is None or "loss" not in logs:
            return
        with contextlib.suppress(OptionError):  # nothing ran over a tree yet
            logs.update(last_plan(self._compiled).scalars())
