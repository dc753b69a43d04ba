"""The captured graph as a callable, for what runs beside the tree or instead of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import checkpoint

TAG_ACTIVATION_CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint


def as_captured(module: fx.GraphModule) -> Callable[..., Any]:
    """Run a graph as it is, with eager's checkpoints: torch's operator for them leaves it to inductor that a region
    draws the same random numbers when it is computed again, and without that its gradients are wrong."""
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            for node in part.graph.find_nodes(op="call_function", target=TAG_ACTIVATION_CHECKPOINT):
                node.target = _checkpointed
                part.recompile()
    run: Callable[..., Any] = module.forward
    return run


def _checkpointed(region: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
    if "_checkpoint_context_fn" in region.meta:
        kwargs["context_fn"] = region.meta["_checkpoint_context_fn"]
    return checkpoint(region, *args, **{**kwargs, "use_reentrant": False})
