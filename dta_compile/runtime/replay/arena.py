"""The memory at fixed addresses that graphs of one set of parameters read and write, and those graphs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dta_compile.executable.pieces import NO_CODES, Codes
from dta_compile.ops.dtypes import statistics_dtype
from dta_compile.runtime.path.interface import AnyRuntime
from dta_compile.runtime.replay.graphs import GraphTable
from dta_compile.runtime.replay.stack import ReplayStack


class Arena:
    """What graphs read and write besides the parameters, and the graphs; one call at a time has it.

    Attributes:
        path: the stack.
        codes: the generated code that the graphs were recorded with.
        sums: accumulators of the gradients, once a backward has asked for them.
        is_leased: a call is using it.
    """

    def __init__(self, path: ReplayStack) -> None:
        self.path, self.table = path, GraphTable()
        self.codes: Codes = NO_CODES
        self.sums: list[torch.Tensor] = []
        self.is_leased = False

    def begin(self, runtimes: Sequence[AnyRuntime], codes: Codes) -> None:
        """A call takes it: as new, whatever a call left that ended half-way; graphs of other code are forgotten."""
        if codes is not self.codes:
            self.table, self.codes = GraphTable(), codes
        self.path.runtimes = runtimes
        self.path.pending = 0
        for states in self.path.states:
            states.zero_gradients()
        self.is_leased = True

    def release(self) -> None:
        """The call that had it has ended."""
        self.is_leased = False

    def zeroed_sums(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Sums for the gradients of these parameters; the same tensors in every call."""
        if not self.sums:
            self.sums = [torch.empty_like(p, dtype=statistics_dtype(p.dtype)).detach() for p in parameters]
        for tensor in self.sums:
            tensor.zero_()
        return list(self.sums)
