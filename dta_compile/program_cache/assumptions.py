"""What passes assume of sizes while they run, as guards that Dynamo checks at every call: recorded, and made again."""

from __future__ import annotations

import dataclasses

import sympy
import torch
from torch import fx
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv


def shape_env_of(captured: fx.GraphModule) -> ShapeEnv | None:
    """What Dynamo knows of the sizes of a captured graph."""
    values = (node.meta.get("example_value") for node in captured.graph.nodes if node.op == "placeholder")
    return next((value.fake_mode.shape_env for value in values if hasattr(value, "fake_mode")), None)


def known_of_sizes(env: ShapeEnv) -> list[str]:
    """All that is known of sizes, but for the numbers that they have at the first call."""
    ranges = sorted((str(symbol), str(found)) for symbol, found in env.var_to_range.items())
    symbols = sorted({*env.var_to_range, *env.replacements}, key=str)
    return [
        *(f"guard {guard.expr}" for guard in env.guards),
        *(f"range {symbol} {found}" for symbol, found in ranges),
        *(f"same {symbol} {env.replace(symbol)}" for symbol in symbols),
        *(
            f"later {symbol} {[str(one.expr) for one in found]}"
            for symbol, found in env.deferred_runtime_asserts.items()
        ),
    ]


@dataclasses.dataclass(frozen=True)
class Assumptions:
    """What passes added to the knowledge of sizes.

    Attributes:
        guards: in order.
        known: all that is known once they have run.
    """

    guards: tuple[sympy.Basic, ...]
    known: tuple[str, ...]

    def hold(self, env: ShapeEnv) -> bool:
        """Whether the sizes of this first call are such."""
        return all(_truth(env, guard).node.hint is True for guard in self.guards)

    def assume(self, env: ShapeEnv) -> bool:
        """Make the guards; whether then the same is known as after the passes."""
        return all(bool(_truth(env, guard)) for guard in self.guards) and tuple(known_of_sizes(env)) == self.known


class Recorder:
    """Of the guards that are made from now on."""

    def __init__(self, env: ShapeEnv) -> None:
        self.env, self.before = env, len(env.guards)
        self.later = env.num_deferred_runtime_asserts

    def assumptions(self) -> Assumptions:
        """What was added; raises `ValueError` if it is of numbers that depend on data, which no guard is about."""
        if self.env.num_deferred_runtime_asserts != self.later:
            raise ValueError("checks of numbers that depend on data")
        guards = tuple(guard.expr for guard in self.env.guards[self.before :])
        return Assumptions(guards, tuple(known_of_sizes(self.env)))


def first_size(env: ShapeEnv, size: sympy.Expr | None) -> int:
    """What a size is in the first call; 0 if that is not known, 1 if there is no such size."""
    return 1 if size is None else torch.SymInt(SymNode(size, env, int, None)).node.hint or 0


def _truth(env: ShapeEnv, guard: sympy.Basic) -> torch.SymBool:
    return torch.SymBool(SymNode(guard, env, bool, None))
