"""Graphs as modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule


def graph_module(root: torch.nn.Module | dict[str, Any], graph: fx.Graph) -> fx.GraphModule:
    """A module that generates its code when it is first called: most graphs are only read, or rewritten before that."""
    return _LazyGraphModule(root, graph)
