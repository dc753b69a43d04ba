"""Contracts of passes: the fields of a `Program` that a pass declares to read, fill and rewrite, enforced as it runs.

A field is filled by one pass, and frozen from then on except for passes that declare to rewrite it. A pass sees the
program through a `View` that has only the declared fields.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterable
from typing import Any, cast

from dta_compile.passes.program import Program

FIELDS = frozenset(field.name for field in dataclasses.fields(Program)) - {"timings", "filled"}


class ContractError(AssertionError):
    """Raised if a pass touches a field that it does not declare, or leaves a program that breaks an invariant."""


@dataclasses.dataclass(frozen=True, eq=False)
class Pass:
    """A pass and its contract.

    Attributes:
        run: the function of the pass.
        reads: fields filled by earlier passes.
        fills: fields that no pass has filled before.
        rewrites: fields of earlier passes that the pass replaces, or whose graphs it changes.
        may_be_skipped: the program runs without the pass, only slower or with more memory.
    """

    run: Callable[[Program], None]
    reads: frozenset[str]
    fills: frozenset[str]
    rewrites: frozenset[str]
    may_be_skipped: bool

    def __post_init__(self) -> None:
        unknown = (self.reads | self.writes) - FIELDS
        if unknown:
            raise ContractError(f"{self.name}: a program has no {', '.join(sorted(unknown))}")

    @property
    def name(self) -> str:
        """Return the name in listings and in the option `skip_passes`."""
        return self.run.__name__

    @functools.cached_property
    def writes(self) -> frozenset[str]:
        """Return the fields that differ after the pass."""
        return self.fills | self.rewrites

    def __call__(self, program: Program) -> None:
        """Run the pass over a program as the passes before it left it.

        Raises:
            ContractError: the pass touches a field that it does not declare, or runs too early or twice.
        """
        if missing := (self.reads | self.rewrites) - program.filled:
            raise ContractError(f"{self.name} needs what no pass before it filled: {', '.join(sorted(missing))}")
        if twice := self.fills & program.filled:
            raise ContractError(f"{self.name} fills what is filled already: {', '.join(sorted(twice))}")
        view = View(program, self)
        self.run(cast(Program, view))
        for name in self.writes:
            setattr(program, name, frozen(getattr(program, name)))
        program.filled |= self.fills


def contract(
    *, reads: Iterable[str] = (), fills: Iterable[str] = (), rewrites: Iterable[str] = (), may_be_skipped: bool = False
) -> Callable[[Callable[[Program], None]], Pass]:
    """Return a decorator that makes a function over a `Program` a `Pass`; the arguments are those of `Pass`."""

    def declare(run: Callable[[Program], None]) -> Pass:
        return Pass(run, frozenset(reads), frozenset(fills), frozenset(rewrites), may_be_skipped)

    return declare


class View:
    """A program restricted to the declared fields of one pass; fields that the pass writes are written to both."""

    def __init__(self, program: Program, step: Pass) -> None:
        self.__dict__.update(_program=program, _pass=step)
        self.__dict__.update({name: getattr(program, name) for name in step.reads | step.writes})

    def __getattr__(self, name: str) -> Any:
        if name in FIELDS:
            raise ContractError(f"{self._pass.name} reads {name!r} without declaring it")
        member = _member(name)
        if not hasattr(member, "__get__"):
            raise ContractError(f"passes have no business with {name!r}")
        return member.__get__(self)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._pass.writes:
            raise ContractError(f"{name!r} is written by {self._pass.name}, who does not declare it")
        self.__dict__[name] = value
        setattr(self._program, name, value)


@functools.cache
def _member(name: str) -> Any:
    return inspect.getattr_static(Program, name, None)


def frozen(value: Any) -> Any:
    """Return a container as an immutable one; return anything else unchanged."""
    match value:
        case list():
            return tuple(value)
        case set():
            return frozenset(value)
        case dict():
            return types.MappingProxyType(value)
    return value
