"""Find copies of one layer, or of one group of layers, in a captured graph, and leave out all but a few of them.

Passes then take as long for 64 layers as for some; `unroll` puts the stages of the others in. A run of copies is a
stretch of nodes that equals itself, moved by one period: the same calls with the same constants, which read

* the same values from before, such as tables of positions; or
* values that lie one period apart, at most one period back: the hidden state; or
* parameters or buffers that are alike, of which the n-th copy reads the n-th.

Where a period begins is arbitrary: it is a layer, or the second half of one with the first half of the next. What a
period computes from values with equal properties has equal properties, so what holds for two neighbouring copies with
equal inputs holds for all that follow. `unroll` checks that there are such two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

import torch
from torch import fx

from dta_compile.passes.graphs.subgraph import graph_module
from dta_compile.passes.lowering.repeated_calls import facts_of, key_of
from dta_compile.passes.program import Folding, Program

KEPT = 5  # copies: the first and the last two may be special (by what they read last), and two neighbours are compared
LEAST_LEFT_OUT = 2


def fold(program: Program) -> Program | None:
    """Return a program of the captured graph with few of its copies; None if it has few, or no known length."""
    if program.length is not None:
        return None
    folded = _Copies(program.captured).folded()
    if folded is None:
        return None
    module, folding = folded
    return dataclasses.replace(program, captured=module, folding=folding, timings={})


class _Copies:
    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self.nodes = [node for node in module.graph.nodes if node.op not in ("placeholder", "output")]
        self.position = {node: i for i, node in enumerate(self.nodes)}
        self.inputs = {node: i for i, node in enumerate(module.graph.find_nodes(op="placeholder"))}
        self.reads: list[list[fx.Node]] = []
        self.calls = [self._call(node) for node in self.nodes]
        self.weights = {node: _weight(node) for node in self.inputs}

    def folded(self) -> tuple[fx.GraphModule, Folding] | None:
        """Leave copies out of the longest run around the middle of the graph, if that is most of it."""
        half, most = len(self.nodes) // 2, len(self.nodes) // (KEPT + LEAST_LEFT_OUT)
        periods = [i for i in range(1, most + 1) if self.calls[half] == self.calls[half + i]]
        runs = ((period, *self._run(half, period)) for period in periods)
        period, first, stop = max(runs, key=lambda run: run[2] - run[1], default=(1, 0, 0))  # the first of equal ones
        left_out = (stop - first) // period - KEPT
        if left_out < LEAST_LEFT_OUT or stop - first < half:
            return None
        return self._folded(period, first, stop, left_out)

    def _run(self, middle: int, period: int) -> tuple[int, int]:
        """Return the stretch around the middle that equals itself, moved by a period."""
        first = stop = middle
        while first > 0 and self._is_alike(first - 1, period):
            first -= 1
        while stop + period < len(self.nodes) and self._is_alike(stop, period):
            stop += 1
        return first, stop + period

    def _is_alike(self, i: int, period: int) -> bool:
        own, others = self.reads[i], self.reads[i + period]
        return self.calls[i] == self.calls[i + period] and all(
            node is later
            or (node in self.inputs and self.weights[node] == self.weights.get(later) is not None)
            or (node in self.position and self.position[node] + period == self.position.get(later, -1) >= i)
            for node, later in zip(own, others, strict=True)
        )

    def _folded(self, period: int, first: int, stop: int, left_out: int) -> tuple[fx.GraphModule, Folding] | None:
        chains = self._chains(period, first, stop)
        if chains is None or not chains or any(len(chain) < left_out + KEPT - 1 for chain in chains):
            return None
        moved: dict[fx.Node, fx.Node | None] = {}  # what readers behind the run read in place of a node
        moved |= dict.fromkeys(self.nodes[first : stop - period])
        moved |= {
            node: self.nodes[i - left_out * period] for i, node in enumerate(self.nodes[:stop]) if i >= stop - period
        }
        for chain in chains:
            moved |= {node: chain[i - left_out] if i >= left_out else None for i, node in enumerate(chain)}
        known: dict[fx.Node, fx.Node] = {}
        graph = fx.Graph()

        def behind(node: fx.Node) -> fx.Node:
            other = moved.get(node, node)
            if other is None:
                raise _ReadElsewhere
            return known[other]

        left = {node for chain in chains for node in chain[len(chain) - left_out :]}
        try:
            for node in self.module.graph.nodes:
                at = self.position.get(node, -1)
                if node.op == "output" or at >= stop:
                    known[node] = graph.node_copy(node, behind)
                elif at < stop - left_out * period:
                    if not left.isdisjoint(node.all_input_nodes):
                        raise _ReadElsewhere
                    known[node] = graph.node_copy(node, known.__getitem__)
        except _ReadElsewhere:
            return None
        module = graph_module(self.module, graph)
        module.meta = self.module.meta
        return module, Folding(tuple(tuple(map(self.inputs.__getitem__, chain)) for chain in chains), left_out)

    def _chains(self, period: int, first: int, stop: int) -> list[list[fx.Node]] | None:
        """Return the weights that copies read one after the other; None if copies share some in another way."""
        following: dict[fx.Node, fx.Node] = {}
        for i in range(first, stop - period):
            for node, later in zip(self.reads[i], self.reads[i + period], strict=True):
                if node in self.inputs and following.setdefault(node, later) is not later:
                    return None
        following = {node: later for node, later in following.items() if node is not later}
        if len(set(following.values())) < len(following):
            return None
        chains = [[node] for node in following if node not in set(following.values())]
        for chain in chains:
            while chain[-1] in following:
                chain.append(following[chain[-1]])
        learned = {node for node in self.inputs if _is_parameter(node)}
        for node in self.nodes:
            if not learned.isdisjoint(node.all_input_nodes):
                learned.add(node)
        buffers = (node for chain in chains for node in chain if not _is_parameter(node))
        # Chunks read such buffers themselves. What is computed from others is computed before, for each copy anew.
        return chains if all(learned.issuperset(node.users) for node in buffers) else None

    def _call(self, node: fx.Node) -> Hashable:
        """Return a key of a node's call, equal for equal calls; append the nodes that it reads to `reads`."""
        read: list[fx.Node] = []
        arguments = _facts((node.args, node.kwargs), read)
        self.reads.append(read)
        return node.op, _body(self.module, node) if node.op == "get_attr" else node.target, arguments


class _ReadElsewhere(Exception):
    """A node outside of the run reads a value of one of its copies."""


def _facts(value: Any, read: list[Any]) -> Hashable:
    """Return all of an argument but its nodes, which are appended to `read`."""

    def key(leaf: Any) -> Hashable:
        if not isinstance(leaf, fx.Node):
            return type(leaf), id(leaf)
        read.append(leaf)
        return fx.Node

    return key_of(value, key)


def _body(module: fx.GraphModule, node: fx.Node) -> Hashable:
    """Return all of a region, such as an activation checkpoint's: those of copies are equal, but not the same."""
    body = getattr(module, str(node.target), None)
    if not isinstance(body, fx.GraphModule):
        return node.target
    number = {inside: i for i, inside in enumerate(body.graph.nodes)}
    rows = []
    for inside in number:
        read: list[fx.Node] = []
        target = (
            _body(body, inside) if inside.op == "get_attr" else None if inside.op == "placeholder" else inside.target
        )
        if inside.op == "get_attr" and target == inside.target:
            target = id(getattr(body, str(target), None))
        rows.append((inside.op, target, _facts((inside.args, inside.kwargs), read), tuple(map(number.get, read))))
    return tuple(rows), tuple(sorted((key, id(value)) for key, value in body.meta.items() if key.startswith("_")))


def _weight(node: fx.Node) -> Hashable:
    """Return the properties of a parameter or buffer; None for other inputs."""
    value, is_parameter = node.meta.get("example_value"), _is_parameter(node)
    if not isinstance(value, torch.Tensor) or (value.requires_grad and not is_parameter):
        return None
    return (is_parameter, type(value), facts_of(value)) if all(isinstance(size, int) for size in value.shape) else None


def _is_parameter(node: fx.Node) -> bool:
    example = getattr(node.meta.get("grapharg"), "example", None)
    return isinstance(node.meta.get("example_value") if example is None else example, torch.nn.Parameter)
