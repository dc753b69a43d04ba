"""Minimum cuts of graphs."""

import torch
from torch import fx

from dta_compile.passes.graphs.subgraph import cheapest_cut


def test_the_cheapest_cut_is_taken_and_the_smallest_of_equals():
    graph = fx.Graph()
    nodes = [graph.placeholder("x")]
    for name in ("wide", "narrow", "also_narrow", "last"):
        nodes.append(graph.call_function(torch.neg, (nodes[-1],), name=name))
    graph.output(nodes[-1])
    cost = dict(zip(nodes, (5, 100, 1, 1, 3), strict=True))
    part = cheapest_cut(nodes, cost.__getitem__, first={nodes[1]}, last={nodes[4]}, leaving=set())
    assert part == set(nodes[:3])
