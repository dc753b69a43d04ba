"""Record the guards on sizes that passes add to Dynamo's shape environment, and add them again on a cache hit."""

from __future__ import annotations

import dataclasses

import sympy
import torch
from torch import fx

from dta_compile.torch_compat.sizes import ShapeEnv, SymNode


def shape_env_of(captured: fx.GraphModule) -> ShapeEnv | None:
    """Return Dynamo's shape environment of a captured graph; None if all sizes are constants."""
    values = (node.meta.get("example_value") for node in captured.graph.nodes if node.op == "placeholder")
    return next((value.fake_mode.shape_env for value in values if hasattr(value, "fake_mode")), None)


def known_of_sizes(env: ShapeEnv) -> list[str]:
    """Return the knowledge of sizes as lines of text, without the sizes of the first call."""
    ranges = sorted((str(symbol), str(facts)) for symbol, facts in env.var_to_range.items())
    symbols = sorted({*env.var_to_range, *env.replacements}, key=str)
    return [
        *(f"guard {guard.expr}" for guard in env.guards),
        *(f"range {symbol} {facts}" for symbol, facts in ranges),
        *(f"same {symbol} {env.replace(symbol)}" for symbol in symbols),
        *(
            f"later {symbol} {[str(check.expr) for check in facts]}"
            for symbol, facts in env.deferred_runtime_asserts.items()
        ),
    ]


@dataclasses.dataclass(frozen=True)
class Assumptions:
    """Guards that passes added.

    Attributes:
        guards: conditions on sizes, in order.
        known: all knowledge of sizes after the passes.
    """

    guards: tuple[sympy.Basic, ...]
    known: tuple[str, ...]

    def hold(self, env: ShapeEnv) -> bool:
        """Return whether the sizes of this first call satisfy the guards."""
        return all(_truth(env, guard).node.hint is True for guard in self.guards)

    def assume(self, env: ShapeEnv) -> bool:
        """Add the guards; return whether the knowledge of sizes then equals that after the passes."""
        return all(bool(_truth(env, guard)) for guard in self.guards) and tuple(known_of_sizes(env)) == self.known


def assumptions_of(env: ShapeEnv, before: int, later: int) -> Assumptions:
    """Return the guards after the first `before`.

    Raises `ValueError` if there are more than `later` checks of sizes that depend on data, which are no guards.
    """
    if env.num_deferred_runtime_asserts != later:
        raise ValueError("checks of numbers that depend on data")
    return Assumptions(tuple(guard.expr for guard in env.guards[before:]), tuple(known_of_sizes(env)))


def first_size(env: ShapeEnv, size: sympy.Expr | None) -> int:
    """Return a size in the first call; 0 if unknown, 1 for None."""
    return 1 if size is None else torch.SymInt(SymNode(size, env, int, None)).node.hint or 0


def _truth(env: ShapeEnv, guard: sympy.Basic) -> torch.SymBool:
    return torch.SymBool(SymNode(guard, env, bool, None))
