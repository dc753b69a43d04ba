"""What a pass declares of the program it works on, and how that is held against what it does.

A field of a `Program` is filled by one pass, and from then on frozen but for passes that declare to rewrite it. A pass
sees the program through a `View`, which gives it what it declares and nothing else.
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
    """A pass did what it does not declare, or left the program in a state that breaks an invariant."""


@dataclasses.dataclass(frozen=True, eq=False)
class Pass:
    """A pass and its contract.

    Attributes:
        run: the pass itself.
        reads: fields that earlier passes filled.
        fills: fields that nobody filled before.
        rewrites: fields of earlier passes that it replaces, or whose graphs it changes.
        may_be_skipped: the program runs without it, only slower or with more memory.
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
        """As in `PASSES`, listings and the option `skip_passes`."""
        return self.run.__name__

    @functools.cached_property
    def writes(self) -> frozenset[str]:
        """What is different after the pass."""
        return self.fills | self.rewrites

    def __call__(self, program: Program) -> None:
        """Run over a program whose fields are what the passes before it left.

        Raises:
            ContractError: the pass touches what it does not declare, or runs too early or twice.
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
    """Makes a function over a `Program` a `Pass`; the arguments are those of `Pass`."""

    def declare(run: Callable[[Program], None]) -> Pass:
        return Pass(run, frozenset(reads), frozenset(fills), frozenset(rewrites), may_be_skipped)

    return declare


class View:
    """A program as one pass may see it: with the fields that it only reads, and those that it writes in `_program`."""

    def __init__(self, program: Program, step: Pass) -> None:
        self.__dict__.update(_program=program, _pass=step)
        self.__dict__.update({name: getattr(program, name) for name in step.reads - step.writes})

    def __getattr__(self, name: str) -> Any:
        if name in self._pass.writes:
            return getattr(self._program, name)
        if name in FIELDS:
            raise ContractError(f"{self._pass.name} reads {name!r} without declaring it")
        member = _member(name)
        if not hasattr(member, "__get__"):
            raise ContractError(f"passes have no business with {name!r}")
        return member.__get__(self)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._pass.writes:
            raise ContractError(f"{name!r} is written by {self._pass.name}, who does not declare it")
        setattr(self._program, name, value)


@functools.cache
def _member(name: str) -> Any:
    return inspect.getattr_static(Program, name, None)


def frozen(value: Any) -> Any:
    """A container that cannot be changed; anything else as it is."""
    match value:
        case list():
            return tuple(value)
        case set():
            return frozenset(value)
        case dict():
            return types.MappingProxyType(value)
    return value
