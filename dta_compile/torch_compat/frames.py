"""What torch tells nobody, read from Python's frames: the compiled callable that runs, and what Dynamo is tracing."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeVar

import torch

from dta_compile.torch_compat import needed_for
from dta_compile.torch_compat.dynamo import OptimizedModule, innermost_fn

T = TypeVar("T")


def _code_with(function: Any, variables: Collection[str]) -> types.CodeType:
    """Return the code of a function, or of one inside of it, that has these variables."""
    pending = [function.__code__]
    while pending:
        code = pending.pop()
        if {*code.co_varnames, *code.co_cellvars, *code.co_freevars} >= {*variables}:
            return code
        pending += [part for part in code.co_consts if isinstance(part, types.CodeType)]
    raise AttributeError(f"{function.__qualname__} has no variables {', '.join(variables)}")


with needed_for("finding the compiled callable of a graph"):
    from torch import _TorchCompileWrapper as CompileWrapper
    from torch._dynamo.convert_frame import CatchErrorsWrapper, _compile
    from torch._dynamo.eval_frame import _TorchDynamoContext as Context

    CALL = _code_with(Context.__call__, ("self", "callback", "cleanups"))
    COMPILATION = _code_with(_compile, ("cache_size", "frame", "code"))


def compile_wrapper_of(compiled: Any) -> Any | None:
    """Return the private wrapper behind a compiled function or module (also one compiled in place), or None."""
    for candidate in _reachable(compiled, depth=8):
        if type(candidate) is CompileWrapper:
            return candidate
    return None


def is_ours(compiled: Any) -> bool:
    """Return whether an object of Dynamo's (a compiler or compiled callable) belongs to this backend."""
    backend = getattr(compile_wrapper_of(compiled), "compiler_fn", None)
    return getattr(backend, "__module__", "").partition(".")[0] == __name__.partition(".")[0]


def uncompiled(fn: Any) -> Any:
    """Return the function or module behind a result of `torch.compile`; anything else unchanged."""
    if isinstance(fn, OptimizedModule):
        return fn._orig_mod
    return innermost_fn(fn) if callable(fn) and not isinstance(fn, torch.nn.Module) else fn


def current_compile_wrapper() -> Any | None:
    """Return the private wrapper object of `torch.compile` for the callable being compiled."""
    return calling(CompileWrapper)


def calling_wrapper() -> Any | None:
    """Return the wrapper object of `torch.compile` for the callable whose call is running.

    A graph may have been compiled for another one: Dynamo serves equal compilations (the same function compiled twice,
    two models of one class) from one cache.
    """
    wrappers = (compile_wrapper_of(known.get("callback")) for known in _variables_of(CALL))
    return next((wrapper for wrapper in wrappers if wrapper is not None), None)


def calling_context() -> Any | None:
    """Return the Dynamo context of the running compiled callable, which lives as long as the callable."""
    return next((known["self"] for known in _variables_of(CALL) if "cleanups" in known), None)


def call_when_left(function: Callable[[], object]) -> None:
    """Call a function when the running compiled callable returns."""
    if (entered := hooks_of_running_call()) is not None:
        entered[1].append(function)


def hooks_of_running_call() -> tuple[list[Any], list[Any]] | None:
    """Return the running compiled callable's hooks for every entry, and the cleanups of this call; None outside one."""
    for known in _variables_of(CALL):
        if "cleanups" in known:
            return known["self"].enter_exit_hooks, known["cleanups"]
    return None


def running_compilation() -> dict[str, Any] | None:
    """Return the local variables of Dynamo's compilation of a function; None outside one."""
    return next(_variables_of(COMPILATION), None)


def _variables_of(code: types.CodeType) -> Iterator[dict[str, Any]]:
    """Yield the local variables of the frames that run a code, the innermost first."""
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code is code:
            yield frame.f_locals
        frame = frame.f_back


def calling(kind: type[T]) -> T | None:
    """Return `self` of the innermost calling method of a class."""
    frame: Any = sys._getframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if type(owner) is kind:
            return owner
        frame = frame.f_back
    return None


_LINKS = (
    "_compiled_call_impl",
    "dynamo_ctx",
    "callback",
    "_torchdynamo_orig_backend",
    "_torchdynamo_orig_callable",
    "_orig_callable",
    "compiler_fn",
    "_compiler_fn",
    "__wrapped__",
    "__func__",
)


def _reachable(start: Any, depth: int) -> Iterator[Any]:
    """Yield objects linked from a compiled callable by known attributes and closure cells, breadth first."""
    seen, level = {id(start)}, [start]
    for _ in range(depth):
        following = []
        for item in level:
            yield item
            for link in (*_attributes(item), *_cells(item)):
                if id(link) not in seen:
                    seen.add(id(link))
                    following.append(link)
        level = following


def own_attributes(item: Any) -> Mapping[str, Any]:
    """Return the attributes that an object holds itself, without running code of its class such as `__getattr__`."""
    try:
        known: Mapping[str, Any] = object.__getattribute__(item, "__dict__")
    except AttributeError:  # it has none, or slots
        return {}
    return known


def _attributes(item: Any) -> Iterator[Any]:
    own = own_attributes(item)
    for name in _LINKS:
        value = own.get(name) if name in own else getattr(type(item), name, None) and getattr(item, name, None)
        if value is not None:
            yield value


def _cells(item: Any) -> Iterator[Any]:
    for content in contents_of(item.__closure__ if isinstance(item, types.FunctionType) else None):
        if isinstance(content, Callable) or type(content).__module__.startswith("torch._dynamo"):  # type: ignore[arg-type]
            yield content


def contents_of(cells: Any) -> Iterator[Any]:
    """Yield the contents of the cells of a closure."""
    for cell in cells or ():
        with contextlib.suppress(ValueError):  # an empty cell
            yield cell.cell_contents
