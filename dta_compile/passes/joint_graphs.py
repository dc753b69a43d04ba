"""The executable graphs of a chunk, and what is known of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import fx
from torch.fx.graph import _BoxedCodeGen

from dta_compile.executable.code import Code
from dta_compile.passes.chunk_bytes import ChunkSizes, Peaks
from dta_compile.passes.graph_module import graph_module

Run = Callable[..., Sequence[torch.Tensor]]


class Generated(Protocol):
    """Code that the graphs call; `str` of it is the report. See `fusion.codegen.GeneratedCode`."""

    @property
    def pieces(self) -> Mapping[str, Sequence[Any]]:
        """The parts that code is generated for, by the graph that calls them; see `fusion.piece`."""

    @property
    def is_used(self) -> bool:
        """Whether calls that begin now run generated code."""

    @property
    def swaps(self) -> int:
        """How often code took the place of ATen between two calls."""

    def prepare(self, graphs: Iterable[str], wait: bool = False) -> Mapping[Any, Any]:
        """The code that a call of these graphs runs which begins now; `wait` for all of it."""


@dataclasses.dataclass(frozen=True)
class JointGraphs:
    """The executable graphs of a chunk. All take `path`, then the chunk graph's inputs, in the chunk graph's order.

    Attributes:
        cache_only: writes the states of the chunk's spine (KV) to the path; returns nothing (an anchor).
        forward_only: writes states, returns the frontier values (an anchor with outputs, or scoring).
        forward: writes states, returns the frontier values, then the saved values.
        backward: takes `path`, the `backward_inputs` of the chunk's inputs, the saved values, the gradients of the
            differentiable frontier values, and (after the accumulate pass) accumulators for `grad_parameters`.
        saved_states: for each mixer layer, where its states (key and value) are among the saved values.
        differentiated: positions of the frontier values whose gradients the backward takes.
        grad_parameters: positions among the chunk graph's parameters that receive a gradient.
        grad_sources: for each of `grad_parameters`, which frontier values its gradient comes from.
        token_bytes, head_bytes: what one chunk keeps for its backward, per token and per head row: saved values, and
            the inputs of trunk and head among `backward_inputs`.
        kv_bytes: the states of all layers, per token: keys and values, for attention.
        head_dims: for each of `backward_inputs` and then of the saved values, the dimension that runs over head rows.
        head_rows_separable: the backward may be run for some of the head rows, see `of_head_rows`.
        generated: the code that the graphs call, if any is generated for them.
        transposed: positions of inputs that the graphs but the backward take transposed, as products read
            them: see `taken`.
        working: per graph, the bytes that it allocates at its peak. The backward's includes the saved values that it is
            handed and frees.
    """

    cache_only: fx.GraphModule
    forward_only: fx.GraphModule
    forward: fx.GraphModule
    sizes: ChunkSizes
    backward: fx.GraphModule | None = None
    backward_inputs: list[int] = dataclasses.field(default_factory=list)
    saved_states: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    differentiated: list[int] = dataclasses.field(default_factory=list)
    grad_parameters: list[int] = dataclasses.field(default_factory=list)
    grad_sources: list[set[int]] = dataclasses.field(default_factory=list)
    token_bytes: float = 0.0
    head_bytes: float = 0.0
    kv_bytes: float = 0.0
    head_dims: list[int | None] = dataclasses.field(default_factory=list)
    head_rows_separable: bool = True
    generated: Generated | None = None
    transposed: frozenset[int] = frozenset()
    working: dict[str, Peaks] = dataclasses.field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        """With code in the place of graphs."""
        state: dict[str, Any] = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name in ("cache_only", "forward_only", "forward"):
            state[name] = _code(state[name])
        return {**state, "sizes": None, "backward": self.backward and _code(self.backward, boxed=True)}

    @property
    def modules(self) -> list[fx.GraphModule]:
        """The executable graphs, each once."""
        modules = (self.cache_only, self.forward_only, self.forward, self.backward)
        return list(dict.fromkeys(module for module in modules if module is not None))

    @property
    def saved_bytes_per_token(self) -> float:
        """Bytes kept per chunk token that has one head row."""
        return self.token_bytes + self.head_bytes

    def taken(self, inputs: Sequence[torch.Tensor], first: int = 0) -> list[torch.Tensor]:
        """Inputs from position `first` on as the graphs but the backward take them."""
        return [value.t() if i in self.transposed else value for i, value in enumerate(inputs, first)]

    @functools.cached_property
    def run_cache_only(self) -> Run:
        """`cache_only`, to be run."""
        return _code(self.cache_only).function

    @functools.cached_property
    def run_forward_only(self) -> Run:
        """`forward_only`, to be run."""
        return _code(self.forward_only).function

    @functools.cached_property
    def run_forward(self) -> Run:
        """`forward`, to be run."""
        return _code(self.forward).function

    @functools.cached_property
    def run_backward(self) -> Run:
        """`boxed_backward`, to be run."""
        return _code(self.backward, boxed=True).function

    @functools.cached_property
    def boxed_backward(self) -> fx.GraphModule:
        """The backward as a function of one list, which it empties: saved values are freed after their last use."""
        assert self.backward is not None
        graph = fx.Graph()
        graph.output(graph.graph_copy(self.backward.graph, {}))
        graph.set_codegen(_BoxedCodeGen())
        return graph_module(self.backward, graph)

    def of_head_rows(self, kept: Sequence[torch.Tensor], rows: torch.Tensor) -> list[torch.Tensor]:
        """The kept values (`backward_inputs`, then saved values) for some of the head rows, in the memory order that
        the backward expects. With the tangents of these rows it gives what all rows give with zeros elsewhere."""
        return [
            value if dim is None else _select(value, dim, rows) for value, dim in zip(kept, self.head_dims, strict=True)
        ]


def _code(graph: Any, boxed: bool = False) -> Code:
    return graph if isinstance(graph, Code) else Code.of(graph, boxed)


def _select(value: torch.Tensor, dim: int, rows: torch.Tensor) -> torch.Tensor:
    """`value.index_select(dim, rows)` with dimensions in the same order in memory, as views of it rely on that."""
    order = sorted(range(value.dim()), key=value.stride, reverse=True)
    inverse = [order.index(i) for i in range(value.dim())]
    return value.permute(order).index_select(order.index(dim), rows).permute(inverse)
