"""Have Dynamo skip a function that it cannot trace for as long as the reason may hold, instead of for good.

Dynamo marks the code of such a function, without a guard: what a debugging line in one call ends would stay apart in
all later calls. It is skipped here
* inside a dispatch mode, such as a counter of operations, for the calls inside;
* where the trace fails without gradients, for calls without gradients, until one with gradients is traced;
* where the call fails in the end, for this call.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from dta_compile.torch_compat import as_wrapper, frames, wrap_once
from dta_compile.torch_compat.dynamo import ConvertFrameReturn, input_codes, reset_code
from dta_compile.torch_compat.tensors import dispatch_modes, inside_dispatch_mode

SKIPPED = "_dta_skipped"  # attribute of Dynamo's callback: codes that cannot be traced without gradients
SAID = "_dta_said_mode"  # attribute of a compiled function: the warning has been logged

logger = logging.getLogger("dta_compile")
# Codes whose trace failed in the running conversion.
_failed: set[types.CodeType] = set()


def note_trace(code: types.CodeType) -> None:
    """Note that a function is traced in the running call: nothing is kept of it if the call fails."""
    _failed.discard(code)
    frames.call_when_left(functools.partial(_forget_if_failed, code, sys.exc_info()[1]))


def note_failure(code: types.CodeType) -> None:
    """Note that the trace of a function failed."""
    _failed.add(code)


def _forget_if_failed(code: types.CodeType, handled: BaseException | None) -> None:
    """Drop what Dynamo has kept of a function if its call raises another error than the one that is being handled."""
    if sys.exc_info()[1] not in (None, handled):
        reset_code(code)


@as_wrapper
def _skipping_while_it_fails(convert: Callable[..., Any], self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
    code, with_gradients = frame.f_code, torch.is_grad_enabled()
    skipped: set[types.CodeType] = vars(self).setdefault(SKIPPED, set())
    if code in skipped and not with_gradients and code in input_codes:  # else Dynamo has been reset
        return ConvertFrameReturn(apply_to_code=False)
    result = convert(self, frame, *args, **kwargs)
    failed = code in _failed
    _failed.discard(code)
    if result.guarded_code is not None:
        if with_gradients:
            skipped.discard(code)
        return result
    if inside_dispatch_mode() and frames.is_ours(self):
        _say_dense(self)
    elif failed and not with_gradients:
        skipped.add(code)
    else:
        return result
    return dataclasses.replace(result, apply_to_code=False)


def _say_dense(callback: Any) -> None:
    """Warn once per compiled function."""
    wrapper = frames.compile_wrapper_of(callback)
    if not hasattr(wrapper, SAID):
        setattr(wrapper, SAID, True)
        logger.warning(
            "dta: a compiled call shares no prefixes: inside a dispatch mode (%s) torch.compile runs functions as they"
            " are; calls after it share prefixes again",
            ", ".join(dict.fromkeys(type(mode).__name__ for mode in dispatch_modes())),
        )


wrap_once(frames.CatchErrorsWrapper, "__call__", _skipping_while_it_fails)
