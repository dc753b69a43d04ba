"""Recorded graphs, what tells them apart, and how they are recorded."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

SHARE = 0.1  # of the device's memory that graphs may hold

Record = Callable[[Callable[[], Sequence[torch.Tensor]]], tuple[Sequence[torch.Tensor], Callable[[], None]]]


@dataclasses.dataclass(frozen=True)
class GraphKey:
    """What a recorded graph depends on.

    Attributes:
        graph: the identity of the function that was recorded.
        tokens, bound: of the chunk, and of the prefix that it may have.
        layers: what its mixer layers depend on besides sizes.
        shapes: of the inputs that are copied to it.
    """

    graph: int
    tokens: int
    bound: int
    layers: tuple[Hashable, ...]
    shapes: tuple[torch.Size, ...]


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A recorded graph, and where it reads and writes; None stands for inputs that stay where they are."""

    inputs: Sequence[torch.Tensor | None]
    outputs: Sequence[torch.Tensor]
    replay: Callable[[], None]

    @classmethod
    def of(
        cls,
        record: Record,
        run: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
        tensors: Sequence[torch.Tensor],
        copied: Sequence[bool],
    ) -> Recorded:
        """The graph of `run`; of its `tensors`, those that are `copied` have other addresses at every replay."""
        inputs = [torch.empty_like(tensor) if copy else None for tensor, copy in zip(tensors, copied, strict=True)]
        given = [tensor if place is None else place for place, tensor in zip(inputs, tensors, strict=True)]
        return cls(inputs, *record(lambda: run(given)))

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs for these inputs, in memory of their own."""
        for place, tensor in zip(self.inputs, tensors, strict=True):
            if place is not None:
                place.copy_(tensor, non_blocking=True)
        self.replay()
        return [output.clone() for output in self.outputs]

    @property
    def bytes(self) -> int:
        """What stays allocated for it, besides what all graphs share."""
        held = [*(tensor for tensor in self.inputs if tensor is not None), *self.outputs]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)


class GraphTable:
    """The graphs of one arena.

    Attributes:
        graphs: by key; None: run once, not recorded.
        bytes: that they hold.
    """

    def __init__(self) -> None:
        self.graphs: dict[GraphKey, Recorded | None] = {}
        self.bytes = 0

    def is_due(self, key: GraphKey) -> bool:
        """Whether a graph is to be recorded now: it has been run once, and is not there yet."""
        if key not in self.graphs:
            self.graphs[key] = None
            return False
        return self.graphs[key] is None

    def add(self, key: GraphKey, recorded: Recorded) -> None:
        """Keep a graph."""
        self.graphs[key] = recorded
        self.bytes += recorded.bytes

    def has_room(self, device: torch.device) -> bool:
        """Whether graphs hold less than their share of the device's memory."""
        return self.bytes <= _most_bytes(device)


class CudaRecorder:
    """Records CUDA graphs into one memory pool: only one of them is under way at a time."""

    def __init__(self) -> None:
        self.pool: Any = None

    def __call__(
        self, function: Callable[[], Sequence[torch.Tensor]]
    ) -> tuple[Sequence[torch.Tensor], Callable[[], None]]:
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            outputs = function()
        return outputs, graph.replay


@functools.cache
def _most_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 1 << 40
    return int(torch.cuda.get_device_properties(device).total_memory * SHARE)
