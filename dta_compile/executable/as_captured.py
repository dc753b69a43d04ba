"""The captured graph as a callable, for the self-check and `fallback="dense"`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import checkpoint

TAG_ACTIVATION_CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint


def as_captured(module: fx.GraphModule) -> Callable[..., Any]:
    """Return the forward of a captured graph, with activation checkpoints run as in eager mode.

    Torch's checkpoint operator relies on inductor to restore the random state for recomputation; outside of inductor
    its gradients would be wrong.
    """
    for part, node in _checkpoints(module, TAG_ACTIVATION_CHECKPOINT):
        node.target = _checkpointed
        part.recompile()
    run: Callable[..., Any] = module.forward
    return run


def has_checkpoints(module: fx.GraphModule) -> bool:
    """Return whether a captured graph, or what `as_captured` made of it, has activation checkpoints."""
    return any(_checkpoints(module, TAG_ACTIVATION_CHECKPOINT, _checkpointed))


def _checkpoints(module: fx.GraphModule, *targets: Any) -> list[tuple[fx.GraphModule, fx.Node]]:
    parts = [part for part in module.modules() if isinstance(part, fx.GraphModule)]
    return [(part, node) for part in parts for node in part.graph.nodes if node.target in targets]


def _checkpointed(region: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
    if "_checkpoint_context_fn" in region.meta:
        kwargs["context_fn"] = region.meta["_checkpoint_context_fn"]
    return checkpoint(region, *args, **{**kwargs, "use_reentrant": False})
