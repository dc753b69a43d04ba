"""Whether a compiled model obeys the relations that eager obeys: `make fuzz-relations N=500 SEED=7`."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from dta_compile.backend import BUG
from dta_compile.errors import RefusalError, RuntimeContractError
from tests.fuzz import oracle
from tests.fuzz.grammar import OPTIONS
from tests.fuzz.program import Program, load
from tests.fuzz.relations import Call, Values, Weighted, changes, gradients, relations, weigh

BAD, NOT_FINITE = ("wrong", "crashed"), "eager: not finite"
OTHER_OPTIONS, CHANGES = 2, 4  # tried on a program: each of them compiles anew


def verdict(program: Program) -> tuple[str, str]:
    """What a drawn program comes to, as in the oracle; a refusal of a variant alone is told apart by its detail."""
    module = load(program.source())
    return judge(module.Model, module.seen, module.CALLS[0], module.OPTIONS, seed=program.batches[0].seed)


def judge(
    make: Callable[[], Any],
    seen: Callable[..., tuple[torch.Tensor | None, ...]],
    call: Call,
    options: dict[str, Any],
    seed: int,
    tolerance: float = oracle.TOLERANCE,
    dtype: torch.dtype = torch.float64,
) -> tuple[str, str]:
    """The verdict on `make()` under every relation that it obeys in eager.

    Args:
        make: builds the module; called anew, from one seed, wherever its state must be fresh.
        seen: the arguments of a call -> for every output a bool mask of what counts, or None.
        call: keyword arguments; relations change them.
        options: those of the backend.
        seed: of what relations draw.
        tolerance: of gradients, relative to their largest entry.
        dtype: the default one; where it is float32, parts of the model round so, and what their rounding errors
            come to is added to the tolerance.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _Trial(make, seen, call, tolerance, dtype == torch.float32).run(options, seed)
    finally:
        torch.set_default_dtype(before)
        torch._dynamo.reset()


class _Wrong(Exception):
    """A relation that eager obeys and the compiled model does not."""


class _Discarded(Exception):
    """Eager gives nothing to compare with."""


class _Trial:
    def __init__(self, make: Any, seen: Any, call: Call, tolerance: float, islands: bool) -> None:
        self.make, self.seen, self.call, self.tolerance, self.islands = make, seen, call, tolerance, islands
        self.obeyed = list[str]()
        self.refused = dict[str, str]()

    def run(self, options: dict[str, Any], seed: int) -> tuple[str, str]:
        try:
            base, expected = self._eager()
        except _Discarded as reason:
            return "discarded", str(reason)
        try:
            self._run(base, expected, {"verify": "off", **options}, seed)
        except _Wrong as wrong:
            return "wrong", str(wrong)
        except (RefusalError, RuntimeContractError) as error:
            if not error.what or error.what == BUG:
                return "crashed", str(error) or "a typed error that names nothing"
            return "refused", str(error)
        except Exception as error:
            return "crashed", f"after {', '.join(self.obeyed)}: {type(error).__name__}: {error}"
        detail = "; ".join(self.obeyed)
        return "equal", detail + "".join(f"; {name} refused: {reason}" for name, reason in self.refused.items())

    def _eager(self) -> tuple[Weighted, Values]:
        self.exact = model = oracle.seeded(self.make)
        try:
            outputs = model(**self.call)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            self.base = base = Weighted(self.call, weigh(outputs, self.seen(**self.call)))
            expected = gradients(model, model, (base,))
        except Exception as error:
            raise _Discarded(f"eager: {type(error).__name__}: {error}") from error
        if not all(torch.isfinite(value).all() for value in expected.values()):
            raise _Discarded(NOT_FINITE)
        shaken = gradients(perturbed := oracle.perturbed(oracle.seeded(self.make)), perturbed, (base,))
        if not self._error(shaken, expected) <= max(oracle.PERTURBATION * oracle.STEEPEST, self.tolerance):
            raise _Discarded("eager: magnifies rounding")
        return base, expected

    def _run(self, base: Weighted, expected: Values, options: dict[str, Any], seed: int) -> None:
        model = oracle.seeded(self.make)
        compiled = torch.compile(model, backend="dta", options=options)
        self._compare("as drawn", gradients(compiled, model, (base,)), expected)
        for relation in relations(base, seed):
            if self._in_eager(model, relation.calls, expected):
                self._try(relation.name, lambda calls=relation.calls: gradients(compiled, model, calls), expected)
        self._compare("as drawn, once more", gradients(compiled, model, (base,)), expected)
        chance = random.Random(seed)
        for other in chance.sample([dict(one) for one in OPTIONS if dict(one) != options], OTHER_OPTIONS):
            torch._dynamo.reset()
            again = torch.compile(model, backend="dta", options={"verify": "off", **other})
            self._try(f"options {other}", lambda again=again: gradients(again, model, (base,)), expected)
        torch._dynamo.reset()
        self._with_changes(base, options, seed)

    def _with_changes(self, base: Weighted, options: dict[str, Any], seed: int) -> None:
        """One model through a history of changes, against eager after each; both begin with the same one."""
        model, exact = oracle.seeded(self.make), oracle.seeded(self.make)
        compiled = torch.compile(model, backend="dta", options=options)
        gradients(compiled, model, (base,))
        gradients(exact, exact, (base,))  # a call may write to the model
        pairs = zip(changes(seed), changes(seed), strict=True)
        for change, same in list(pairs)[:CHANGES]:
            change.apply(model)
            same.apply(exact)
            try:
                expected = gradients(exact, exact, (base,))
            except Exception:
                return  # such a change leaves nothing to differentiate
            if not all(torch.isfinite(value).all() for value in expected.values()):
                return
            self.exact = exact
            if not self._try(change.name, lambda: gradients(compiled, model, (base,)), expected):
                return

    def _rounded(self) -> list[Values]:
        """Eager's own gradients under other rounding errors, a call after the last change."""
        found = []
        for seed in range(3):
            with oracle.Rounded(seed), sdpa_kernel(SDPBackend.MATH):
                found.append(gradients(self.exact, self.exact, (self.base,)))
        return found

    def _beyond_rounding(self, beyond: dict[str, float], found: Values, expected: Values) -> dict[str, float]:
        """Of the errors those that rounding does not explain."""
        others = self._rounded()
        if not self.islands:
            return oracle._without_rounding(beyond, found, expected, others)
        errors = [self._errors(other, expected) for other in others]
        noise = {key: oracle.ROUNDINGS * max(error[key] for error in errors) for key in beyond}
        return {key: error for key, error in beyond.items() if not error <= self.tolerance + noise[key]}

    def _in_eager(self, model: Any, calls: tuple[Weighted, ...], expected: Values) -> bool:
        try:
            found = gradients(model, model, calls)
        except Exception:
            return False
        return found.keys() == expected.keys() and self._error(found, expected) <= self.tolerance

    def _try(self, name: str, run: Callable[[], Values], expected: Values) -> bool:
        """Whether it ran; refused, it is noted with the reason."""
        try:
            found = run()
        except (RefusalError, RuntimeContractError) as error:
            if not error.what or error.what == BUG:
                raise
            self.refused[name] = f"{error.what}; {error.got}"
            return False
        self._compare(name, found, expected)
        return True

    def _compare(self, name: str, found: Values, expected: Values) -> None:
        if found.keys() != expected.keys():
            raise _Wrong(f"{name}: on one side only: {sorted(found.keys() ^ expected.keys())}")
        errors = self._errors(found, expected)
        beyond = {key: error for key, error in errors.items() if not error <= self.tolerance}
        if beyond:
            beyond = self._beyond_rounding(beyond, found, expected)
        if beyond:
            raise _Wrong(f"{name}: " + ", ".join(f"{key} {error:.2g}" for key, error in beyond.items()))
        self.obeyed.append(name)

    def _error(self, found: Values, expected: Values) -> float:
        return max(self._errors(found, expected).values(), default=0.0)

    def _errors(self, found: Values, expected: Values) -> dict[str, float]:
        return {key: oracle.difference({key: found[key]}, {key: expected[key]}, expected) for key in expected}
