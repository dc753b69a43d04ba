"""The linear cost model of schedules, and the limits of model and machine that the planner works within."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import numpy as np

from dta_compile.options import CHUNK_TOKENS, Options
from dta_compile.plan.interpret import Work, chunk_work
from dta_compile.plan.peak_memory import Footprint, PartBytes
from dta_compile.plan.simulate import Simulation
from dta_compile.plan.tree.chunk_tree import chunk_tree
from dta_compile.plan.tree.prefix_tree import IntArray, PrefixTree

_PACKED = Options(strategy="packed")
STATES_SHARE = 0.1  # share of a layer's forward that computes its states: a norm and the key and value projections
BUDGET_SHARE = 0.5  # default budget, as a share of the memory that is free when a call starts
SMALL_CHUNKS = (256, 512, 1024)  # tokens
FEW_CHUNKS = 4  # most small chunks of a tree: many of them took 1.25 times as long (`airline_tiny`, 10,267 tokens)
CHUNK_SIZES, CHUNK_SHARE = (CHUNK_TOKENS, *(2**n for n in range(12, 17))), 0.4  # tokens; share of the budget
BOUNDARY_SHARE = 0.25  # share of values passed between parts that activations of a chunk of one part may take as well
BY_CHUNKS, BY_STAGES = 2**14, 2**16  # most tokens of a chunk if activations of all layers, or of one layer, are held


class Rates(NamedTuple):
    """Seconds per unit of each entry of `Work`."""

    launch: float
    slice: float
    token: float
    pair: float
    head: float

    def seconds(self, work: Work) -> float:
        """Return the seconds that `work` takes."""
        return sum(rate * amount for rate, amount in zip(self, work, strict=True))


_FORWARD = Rates(2e-3, 2e-5, 8e-6, 8e-10, 2e-6)
_BACKWARD = Rates(4e-3, 4e-5, 1.6e-5, 1.6e-9, 4e-6)


@dataclasses.dataclass(frozen=True)
class CostModel:
    """Linear cost model: seconds as a linear function of a schedule's work.

    The defaults are derived from the arithmetic of a model of about 2B parameters on a current datacentre GPU
    (4 GFLOP a token, 0.2 MFLOP a query-key pair) and are meant as ratios. Their launch cost is the overhead per chunk
    where the host computes by itself.

    Attributes:
        forward, backward: rates of chunk runs.
        restore: seconds per token whose KV is copied back.
        source: origin of the rates, for messages.
    """

    forward: Rates = _FORWARD
    backward: Rates = _BACKWARD
    restore: float = 1e-7
    source: str = "not calibrated"

    @classmethod
    def of_gpu(cls) -> CostModel:
        """Return the defaults with a GPU's launch cost: about a thousand kernels a chunk, for which the GPU waits.

        Measured on an H100 with a model of 28 layers: a step with 16, 8 and 4 chunks took 2.1, 1.5 and 1.3 seconds.
        """
        return cls(_FORWARD._replace(launch=2e-2), _BACKWARD._replace(launch=3.5e-2))

    def tree_rates(self) -> tuple[float, float]:
        """Return seconds of forward and backward per tree token (with one head row) and per query-key pair.

        `balance` uses them. Groups are made before schedules, so launches are counted as if all chunks were full.
        """
        token = sum(rates.token + rates.head + rates.launch / CHUNK_TOKENS for rates in (self.forward, self.backward))
        return token, self.forward.pair + self.backward.pair

    def tree_seconds(self, tree: PrefixTree) -> float:
        """Return seconds of forward and backward of a tree in packed chunks of default size, all graphs kept."""
        chunks = chunk_tree(tree, _PACKED).chunks
        work = reduce(Work.plus, (chunk_work(tree, chunk) for chunk in chunks), Work())
        return self.forward.seconds(work) + self.backward.seconds(work)

    def estimate(self, simulation: Simulation) -> float:
        """Return the seconds that a schedule with these counts takes."""
        s = simulation
        again = STATES_SHARE * self.forward.seconds(s.rebuilt._replace(pairs=0))
        run = self.forward.seconds(s.forward) + self.backward.seconds(s.backward)
        return run + again + self.restore * s.restored_tokens


def chunk_sizes(
    budget: float, bytes_per_token: float, most: int = BY_CHUNKS, boundaries: float | None = None, tokens: int = 0
) -> tuple[int, ...]:
    """Return the chunk sizes to choose from if the user sets none, given a budget and activation bytes per token.

    Larger chunks amortise kernel launches, whose host time does not depend on the number of tokens: a step of a model
    of 1.7B parameters took 2.1 s on an H100 with chunks of 2,048 tokens, 1.5 s with 4,096 and 1.3 s with 8,192. On an
    H200 it took 1.04 s with 8,192, 0.99 s with 16,384 and no less with 32,768.

    Args:
        boundaries: of a sweep of stages, the bytes of values passed between parts, which are there with any budget.
            Where nothing was kept, chunks of 2,048 tokens took 6.0 s on an H200, of which the GPU worked 1.4; with few
            tokens, such chunks would take most of the memory. None: a sweep of chunks.
        tokens: tokens of the tree, which is not cut into many small chunks.
    """
    allowed = CHUNK_SHARE * budget if boundaries is None else max(CHUNK_SHARE * budget, BOUNDARY_SHARE * boundaries)
    usual, *larger = CHUNK_SIZES
    small = () if boundaries is None else SMALL_CHUNKS
    smaller = (size for size in small if 2 * size * bytes_per_token > allowed and size * FEW_CHUNKS >= tokens)
    return *smaller, usual, *(size for size in larger if size <= most and size * bytes_per_token <= allowed)


class OfMachine(NamedTuple):
    """Fields of `Limits` that ranks running a call together have to agree on."""

    budget: int | None
    cost: CostModel
    chunk_sizes: tuple[int, ...]
    by_stages: tuple[int, tuple[int, ...]] | None = None
    room: float = math.inf
    at_zero: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Limits:
    """Properties of the model and the machine that the planner uses.

    Attributes:
        budget: bytes that may be kept from the first to the second phase; None keeps all.
        footprint: bytes per token and chunk, and of running states if the model has any.
        cost: cost model.
        head_starts: head rows of the shared tree (see `simulate`); None: one head row per token.
        chunk_sizes: ascending sizes to choose from if the user sets none; multiples of the recurrences' block of 64.
        sums: bytes of the buffers in which gradients of all parameters are summed.
        parts: bytes of each part of a sweep of stages; empty: not known.
        is_asked_for: whether the user set the budget; otherwise it is a share of the free memory.
        by_stages: budget and chunk sizes of a sweep of stages, where they differ.
        room: bytes that values passed between parts may take; above that fewer of them are kept, or the tree is swept
            group by group.
        groups: number of groups of subtrees that ranks which gather parameters together agreed on; 1: as few as fit.
        stride: stride that these ranks agreed on (see `Schedule`); 1: the planner chooses.
        at_zero: chunk sizes of a sweep of stages with a budget of zero, if the user set another; empty: the smallest.
    """

    budget: int | None = None
    footprint: Footprint = dataclasses.field(default_factory=Footprint)
    cost: CostModel = dataclasses.field(default_factory=CostModel)
    head_starts: IntArray | None = None
    chunk_sizes: tuple[int, ...] = (CHUNK_TOKENS,)
    sums: float = 0.0
    parts: tuple[PartBytes, ...] = ()
    is_asked_for: bool = False
    by_stages: tuple[int, tuple[int, ...]] | None = None
    room: float = math.inf
    groups: int = 1
    stride: int = 1
    at_zero: tuple[int, ...] = ()

    def parts_of(self, sweep: str) -> Sequence[PartBytes]:
        """Return the parts that a sweep goes through; a sweep of chunks has one part with all layers."""
        return self.parts if sweep == "stages" else (PartBytes(self.footprint, self.sums),)

    def of_sweep(self, sweep: str) -> Limits:
        """Return these limits with the budget and the chunk sizes of a sweep, and what its chunks keep of all parts."""
        if sweep != "stages" or self.by_stages is None:
            return self
        budget, sizes = self.by_stages
        of_parts = [part.footprint for part in self.parts]
        footprint = dataclasses.replace(
            self.footprint,  # where values that pass between parts are kept with graphs
            graph_token=sum(part.graph_token for part in of_parts) or self.footprint.graph_token,
            graph_head=sum(part.graph_head for part in of_parts) or self.footprint.graph_head,
        )
        return dataclasses.replace(self, budget=budget, chunk_sizes=sizes, footprint=footprint)

    def with_nothing_kept(self) -> Limits:
        """Return these limits with a budget of zero, and the chunk sizes that it allows."""
        of_stages = self.at_zero or self.of_sweep("stages").chunk_sizes[:1]
        return dataclasses.replace(self, budget=0, chunk_sizes=self.chunk_sizes[:1], by_stages=(0, of_stages))

    @property
    def of_machine(self) -> OfMachine:
        """Fields that depend on the machine and its earlier runs, not on the model."""
        return OfMachine(self.budget, self.cost, self.chunk_sizes, self.by_stages, self.room, self.at_zero)

    def agreed(self, others: Sequence[OfMachine]) -> Limits:
        """Return the limits that several ranks agree on: the least memory, and the rates of the first rank."""
        budget = min((machine.budget for machine in others if machine.budget is not None), default=None)
        sizes = min((machine.chunk_sizes for machine in others), key=len)
        by_stages = min((machine.by_stages for machine in others if machine.by_stages is not None), default=None)
        room, at_zero = min(machine.room for machine in others), min(machine.at_zero for machine in others)
        agreed = OfMachine(budget, others[0].cost, sizes, by_stages, room, at_zero)
        return dataclasses.replace(self, **agreed._asdict())

    def unshared(self, shared: PrefixTree, unshared: PrefixTree) -> Limits:
        """Return the limits for the unshared tree, giving each token the shared tree's average number of head rows."""
        if self.head_starts is None:
            return self
        per_token = float(self.head_starts[-1]) / max(shared.num_rows, 1)
        return dataclasses.replace(self, head_starts=(np.arange(unshared.num_rows + 1) * per_token).astype(np.int64))
