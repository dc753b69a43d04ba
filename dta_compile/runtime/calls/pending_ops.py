"""What a backward phase is yet to put on the path: done when a chunk with a gradient needs it, or never."""

from __future__ import annotations

from dta_compile.plan.schedule import Anchor, Restore
from dta_compile.plan.tree.chunk import Slice


class PendingOps:
    """Ops that put something on the path, by depth: anchors without outputs, and restores."""

    def __init__(self) -> None:
        self._ops: list[Anchor | Restore] = []

    def add(self, op: Anchor | Restore) -> None:
        """To be done later; what was to be put at its depth or below is not needed any more."""
        self.cut(_spine(op).start)
        self._ops.append(op)

    def cut(self, depth: int) -> None:
        """The path ends at `depth`: what was to be put there is not needed any more."""
        while self._ops and _spine(self._ops[-1]).start >= depth:
            self._ops.pop()

    def taken(self) -> list[Anchor | Restore]:
        """All of them, in order; the caller does them now."""
        ops, self._ops = self._ops, []
        return ops


def _spine(op: Anchor | Restore) -> Slice:
    part = op.part if isinstance(op, Restore) else op.chunk.spine
    assert part is not None
    return part
