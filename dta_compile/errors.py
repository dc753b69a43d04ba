"""Typed errors with five fields: what happened, where, what was expected, what was got, and what to do about it."""

from __future__ import annotations


class DTAError(Exception):
    """Base class of every error that dta_compile raises on purpose.

    Args:
        what: one sentence that names the problem.
        where: the user's source line, an input's name, or a row of a schedule.
        expected: the accepted value or condition.
        got: the actual one.
        hint: what to do instead.
    """

    def __init__(self, what: str, *, where: str = "", expected: str = "", got: str = "", hint: str = "") -> None:
        self.what, self.where, self.expected, self.got, self.hint = what, where, expected, got, hint
        labelled = (("where", where), ("expected", expected), ("got", got), ("what to do", hint))
        super().__init__("\n".join([what, *(f"  {label}: {text}" for label, text in labelled if text)]))


class MissingPackageError(DTAError, ImportError):
    """A feature needs a package that is not installed; `hint` says how to install it."""


class MissingTorchPartError(DTAError, ImportError):
    """The installed torch lacks a private part that this package builds on; `got` names it."""


class OptionError(DTAError, ValueError):
    """An option is unknown or has an unusable value."""


class PlanError(DTAError, ValueError):
    """The sequences given to the planner cannot be planned."""


class ScheduleError(DTAError, ValueError):
    """A schedule does not parse, or breaks a rule of legality."""


class RefusalError(DTAError, RuntimeError):
    """The captured program cannot be proven equivalent when it runs over a prefix tree."""


class FinalRefusal(RefusalError):
    """No other trace of the captured program would help."""


class RuntimeContractError(DTAError, RuntimeError):
    """A call broke an assumption of the compiled program (about inputs, padding or gradients)."""


class VerificationError(DTAError, RuntimeError):
    """`options={"verify": ...}` found a difference between the tree run and the captured program."""


class TreeClosedError(DTAError, RuntimeError):
    """A `RolloutTree` accepts no more rollouts, or has none left."""


class WaitTimeoutError(DTAError, TimeoutError):
    """A `RolloutTree` had no room for a rollout, or no batch was due, in the time allowed."""
