"""Sweeps of stages over groups of subtrees, for batches that would fit into memory at once."""

from __future__ import annotations

import dataclasses
from typing import Any

from dta_compile.plan import Limits
from dta_compile.runtime.calls import planned_call

_limits = planned_call._limits


def in_groups(patch: Any, number: int = 3) -> None:
    """Let values between parts have room for a part of each tree, about 1 / `number` of it or its longest path."""

    def limits(call: Any, rows: Any, mode: str) -> Limits:
        known = _limits(call, rows, mode)
        tokens = -(-rows.tree.num_rows // number)
        return dataclasses.replace(known, room=tokens * sum(part.sent for part in known.parts))

    patch.setattr(planned_call, "_limits", limits)
