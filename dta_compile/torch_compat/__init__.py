"""The only place that imports private parts of torch: everything else imports them from the modules in here.

Attributes of FSDP2's states and parameter groups are read in `integrations/fully_shard*.py`.

Importing it imports these modules: a torch that lacks a part gets a `MissingTorchPartError`, which names all that is
missing, and what it was needed for. `regions` is what we can do without; `inductor` and `compiler` are imported where
code is generated, without which the reference steps run.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dta_compile.errors import MissingTorchPartError

MODULES = ("autograd", "dynamo", "frames", "operators", "sizes", "tensors", "tracing")
# Functions that Dynamo calls while tracing may take modules.
TAKES_MODULES = torch.__version__ >= "2.13"
MARK = "_dta_wrappers"  # attribute of a wrapped function: the names of our wrappers around it


@contextlib.contextmanager
def needed_for(purpose: str) -> Iterator[None]:
    """Turn a failing import of private parts of torch into a `MissingTorchPartError` that says what they are for."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise _missing(str(error), purpose) from error


def wrap_once(owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
    """Replace a function or method of torch by `wrapper` of it, once, however often the caller's module is loaded.

    Raises `MissingTorchPartError` if `owner`, a class or module, has no such function.
    """
    original = getattr(owner, name, None)
    if original is None:
        raise _missing(f"{owner.__name__} has no {name}", f"{wrapper.__module__.removeprefix('dta_compile.')}")
    own, known = f"{wrapper.__module__}.{wrapper.__qualname__}", getattr(original, MARK, ())
    if own not in known:
        wrapped = functools.wraps(original)(wrapper(original))
        setattr(wrapped, MARK, (*known, own))
        setattr(owner, name, wrapped)
        for method in getattr(owner, "tp_methods", {}).values():  # how Dynamo finds methods since torch 2.15
            if method.handler is original:
                method.handler = wrapped


def as_wrapper(replacement: Callable[..., Any]) -> Callable[[Any], Any]:
    """Make a wrapper for `wrap_once` of a function that is given the original, then the arguments of a call.

    Each call takes a Python frame more than with a wrapper that is written out, which recursive functions have.
    """

    @functools.wraps(replacement)
    def wrapper(original: Any) -> Any:
        return lambda *args, **kwargs: replacement(original, *args, **kwargs)

    return wrapper


def _probe() -> None:
    """Import the modules; raise one `MissingTorchPartError` that lists all that torch lacks."""
    missing: list[MissingTorchPartError] = []
    for name in MODULES:
        try:
            importlib.import_module(f"{__name__}.{name}")
        except MissingTorchPartError as error:
            missing.append(error)
    if missing:
        raise _missing("; ".join(error.got for error in missing), "; ".join(error.where for error in missing))


def _missing(got: str, purpose: str) -> MissingTorchPartError:
    return MissingTorchPartError(
        f"torch {torch.__version__} lacks a part that dta_compile builds on",
        where=purpose,
        expected="torch 2.11 to 2.15, which the tests are run with",
        got=got,
        hint="install one of these versions of torch, or a newer dta_compile",
    )


_probe()
