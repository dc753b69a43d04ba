"""Agreement between tensor-parallel ranks, which all run the same schedule over their shards of the model.

A collective of a chunk must meet the collective of the same chunk on the other ranks. So ranks exchange local facts
before they decide by them (free memory, measured times, zero gradients), and compare what must be equal (tokens, and
with them tree and schedule). Errors are raised on all ranks, so that no rank waits for another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from dta_compile.distributed.group import Group, attempt, described
from dta_compile.errors import DTAError, RuntimeContractError
from dta_compile.plan import Limits

T = TypeVar("T")


class Ranks:
    """Ranks of a tensor-parallel group; by default this process alone, for which all methods are no-ops."""

    what = "tensor parallelism"  # for messages

    def __init__(self, group: Any = None) -> None:
        self._group = None if group is None else Group(group)

    @property
    def several(self) -> bool:
        """Whether the group has more than this process."""
        return self._group is not None

    def agreed(self, make: Callable[[], tuple[T, Limits]]) -> tuple[T, Limits]:
        """Call `make` and agree on its limits: the least memory of all ranks, the rates of the first rank.

        Raises:
            RuntimeContractError: `make` raised an error on another rank.
        """
        if self._group is None:
            return make()
        made, failed = attempt(make)
        answers: list[Any] = self._group.gather(described(failed) if made is None else made[1].of_machine)
        self._raise_together(failed, answers)
        assert made is not None
        return made[0], made[1].agreed(answers)

    def check(self, require: Callable[[], None]) -> None:
        """Call `require`; if it raises on any rank, raise on all."""
        if self._group is None:
            return require()
        _, failed = attempt(require)
        self._raise_together(failed, self._group.gather(described(failed) or None))

    def _raise_together(self, failed: Exception | None, answers: Sequence[Any]) -> None:
        """Raise on all ranks if any reported an error; each raises its own if all did, or if it is not one of ours."""
        problems = {rank: answer for rank, answer in enumerate(answers) if isinstance(answer, str)}
        if failed is not None and (len(problems) == len(answers) or not isinstance(failed, DTAError)):
            raise failed
        for rank, problem in problems.items():
            raise RuntimeContractError(f"{self.what}: rank {rank} of {len(answers)}: {problem}") from failed

    def require_same(self, what: str, *parts: Any) -> None:
        """Raise on all ranks if `parts` differ between them.

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
        """Return rows with a gradient on any rank; `given`, which values have one, must be equal on all ranks."""
        if self._group is None:
            return active
        self.require_same("the outputs that have a gradient", tuple(given), len(active))
        masks = self._group.gather(np.packbits(active).tobytes())
        bits = np.bitwise_or.reduce([np.frombuffer(mask, np.uint8) for mask in masks])
        return np.unpackbits(bits, count=len(active)).astype(np.bool_)


def _digest(parts: Sequence[Any]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.tobytes() if isinstance(part, np.ndarray) else repr(part).encode())
        digest.update(b"|")
    return digest.hexdigest()
