"""Defer ops of the backward half that put states on the path until a chunk with a gradient needs them."""

from __future__ import annotations

from dta_compile.plan.schedule import Anchor, Restore
from dta_compile.plan.tree.chunk import Slice


class PendingOps:
    """Stack of deferred anchors (without outputs) and restores, ordered by depth."""

    def __init__(self) -> None:
        self._ops: list[Anchor | Restore] = []

    def add(self, op: Anchor | Restore) -> None:
        """Defer an op; deferred ops at its depth or below are dropped."""
        self.cut(_spine(op).start)
        self._ops.append(op)

    def cut(self, depth: int) -> None:
        """Drop the deferred ops at `depth` or below, because the path is cut there."""
        while self._ops and _spine(self._ops[-1]).start >= depth:
            self._ops.pop()

    def taken(self) -> list[Anchor | Restore]:
        """Return and forget all deferred ops, in order; the caller runs them."""
        ops, self._ops = self._ops, []
        return ops


def _spine(op: Anchor | Restore) -> Slice:
    part = op.part if isinstance(op, Restore) else op.chunk.spine
    assert part is not None
    return part
