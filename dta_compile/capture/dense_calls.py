"""Warn about calls of a compiled function that run densely because Dynamo hands this backend no graph of them.

There are two causes. A compiled function that is called while Dynamo traces for another backend becomes part of that
backend's graph. And a function that Dynamo cannot trace, for example inside a `torch.func` transform, runs in Python,
as does the body of a generator, which begins when the compiled call has returned.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from dta_compile.capture.dynamo import breaks
from dta_compile.torch_compat import as_wrapper, frames, wrap_once
from dta_compile.torch_compat.autograd import peek_interpreter_stack
from dta_compile.torch_compat.dynamo import (
    InstructionTranslator,
    OptimizedModule,
    UnspecializedNNModuleVariable,
    Unsupported,
    VariableBuilder,
    WrapperUserFunctionVariable,
)

COMPILED = "_dta_compiled"  # attribute of an `OutputGraph`: ids of modules that are compiled for this backend
LATER = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
SAID = "_dta_said"  # attribute of a compiled function: the warning has been logged

logger = logging.getLogger("dta_compile")


def warn(has_graphs: Callable[[Any], bool]) -> None:
    """Patch Dynamo to log the warnings.

    Args:
        has_graphs: returns whether the compiled function of a compiler of Dynamo's got any graph with attention.
    """

    def warn_when_left(compiler: Any, code: types.CodeType, cause: str) -> None:
        if frames.is_ours(compiler) and torch.is_grad_enabled():
            function = f"{code.co_name} at {code.co_filename}:{code.co_firstlineno}"
            frames.call_when_left(functools.partial(_say_if_dense, compiler, has_graphs, function, cause))

    @as_wrapper
    def noticing_failures(trace: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            trace(self, *args, **kwargs)
        except Unsupported as error:
            warn_when_left(self.output.compiler_fn, self.f_code, breaks.cause(error))
            raise

    @as_wrapper
    def noticing_generators(convert: Callable[..., Any], self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        if frame.f_code.co_flags & LATER:
            warn_when_left(self, frame.f_code, "generators and coroutines run after the call (call a function in them)")
        return convert(self, frame, *args, **kwargs)

    wrap_once(VariableBuilder, "_wrap", _noting_wrappers)
    wrap_once(UnspecializedNNModuleVariable, "call_function", _noticing_other_backends)
    wrap_once(WrapperUserFunctionVariable, "call_function", _noticing_other_backends)
    wrap_once(InstructionTranslator, "__init__", noticing_failures)  # raises inside torch.func
    wrap_once(InstructionTranslator, "run", noticing_failures)
    wrap_once(frames.CatchErrorsWrapper, "__call__", noticing_generators)


@as_wrapper
def _noting_wrappers(wrap: Callable[..., Any], self: Any, value: Any) -> Any:
    """Note the module inside a compiled one, because Dynamo unwraps compiled modules."""
    if type(value) is OptimizedModule and frames.is_ours(value):
        vars(self.tx.output).setdefault(COMPILED, set()).add(id(value._orig_mod))
    return wrap(self, value)


def _noticing_other_backends(call: Callable[..., Any]) -> Callable[..., Any]:
    def call_function(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        called = getattr(self, "wrapper_obj", None) or self.value
        is_noted = id(called) in getattr(tx.output, COMPILED, ())
        if not frames.is_ours(tx.output.compiler_fn) and (is_noted or _is_compiled(called)):
            at = tx.frame_summary()
            _say_inlined(f"{at.filename}:{at.lineno}: {at.line}")
        return call(self, tx, *args, **kwargs)

    return call_function


def _is_compiled(called: Any) -> bool:
    compiled = getattr(called, "_compiled_call_impl", called)  # set by `module.compile()`
    return hasattr(compiled, "_torchdynamo_inline") and frames.is_ours(compiled)


def _say_if_dense(compiler: Any, has_graphs: Callable[[Any], bool], function: str, cause: str) -> None:
    """Warn once per compiled function, unless the call raises an error that explains itself."""
    wrapper = frames.compile_wrapper_of(compiler)
    if sys.exc_info()[0] is None and not hasattr(wrapper, SAID) and not has_graphs(compiler):
        setattr(wrapper, SAID, True)
        hint = " (torch.func.grad, vmap and others have to be inside of the compiled function)"
        is_of_transforms = peek_interpreter_stack() is not None
        logger.warning(
            "dta: a compiled call shares no prefixes: torch.compile gave up on %s, which runs as it is: %s%s",
            function,
            cause,
            hint if is_of_transforms else "",
        )


@functools.cache
def _say_inlined(line: str) -> None:
    logger.warning(
        "dta: a function compiled for backend='dta' becomes part of another backend's graph, and runs densely there: %s"
        " (compile the outer function for dta, or call the compiled one outside of it)",
        line,
    )
