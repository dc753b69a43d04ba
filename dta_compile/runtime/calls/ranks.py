"""Ranks that run one call together (tensor parallelism): each runs the same schedule over its part of the model.

A collective of one chunk must meet that of the same chunk on the other ranks. What ranks decide by what only they know
(free memory, measured times, which gradients are zero) they agree on before; what they must have in common (tokens,
and with them the tree and the schedule) is compared. Both raise on all ranks, so that none waits for another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from dta_compile.distributed.group import Group
from dta_compile.errors import DTAError, RuntimeContractError
from dta_compile.plan import Limits

__all__ = ["Ranks"]

T = TypeVar("T")


class Ranks:
    """The ranks of a tensor-parallel group; by default this process alone, for which nothing here does anything."""

    def __init__(self, group: Any = None) -> None:
        self._group = None if group is None else Group(group)

    @property
    def several(self) -> bool:
        """Whether another rank waits for what this one does."""
        return self._group is not None

    def agreed(self, make: Callable[[], tuple[T, Limits]]) -> tuple[T, Limits]:
        """What `make` makes, with limits that are the same on all ranks: the least memory, and the first rank's times.

        An error of ours on one rank is raised on all of them.
        """
        if self._group is None:
            return make()
        failed: DTAError | None = None
        try:
            value, limits = make()
            told: list[Any] = self._group.gather(limits.of_machine)
        except DTAError as error:
            failed = error
            told = [*self._group.gather(str(error))]
        self._raise_together(failed, told)
        return value, limits.agreed(told)

    def _raise_together(self, failed: DTAError | None, told: Sequence[Any]) -> None:
        """Raise on all ranks if one has told of an error; where all have one, each its own."""
        problems = {rank: one for rank, one in enumerate(told) if isinstance(one, str)}
        if failed is not None and len(problems) == len(told):
            raise failed
        for rank, problem in problems.items():
            raise RuntimeContractError(f"tensor parallelism: rank {rank} of {len(told)}: {problem}") from failed

    def require_same(self, what: str, *parts: Any) -> None:
        """Raise on all ranks if something differs between them that decides what they run.

        Raises:
            RuntimeContractError: naming `what`, and the ranks that differ from the first.
        """
        if self._group is None:
            return
        digests = self._group.gather(_digest(parts))
        others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if others:
            raise RuntimeContractError(
                f"tensor parallelism: {what} are not the same on all ranks of the group",
                expected="the same batch on all ranks that have parts of one layer",
                got=f"others on ranks {others} than on rank 0 of {self._group.size}",
                hint="deal rows out over the data-parallel ranks only: distributed.scatter(batch, group=mesh['dp'])",
            )

    def with_gradient(self, active: npt.NDArray[np.bool_], given: Sequence[bool]) -> npt.NDArray[np.bool_]:
        """Rows that have a gradient on any rank; `given`, which values have one at all, must be the same."""
        if self._group is None:
            return active
        self.require_same("the outputs that have a gradient", tuple(given), len(active))
        told = self._group.gather(np.packbits(active).tobytes())
        bits = np.bitwise_or.reduce([np.frombuffer(one, np.uint8) for one in told])
        return np.unpackbits(bits, count=len(active)).astype(np.bool_)


def _digest(parts: Sequence[Any]) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(part.tobytes() if isinstance(part, np.ndarray) else repr(part).encode())
        found.update(b"|")
    return found.hexdigest()
