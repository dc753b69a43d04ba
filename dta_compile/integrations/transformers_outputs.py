"""Avoid the graph break where transformers starts to record outputs of layers (router logits, hidden states).

The first call that requests such outputs installs hooks on the layers under a lock, at which Dynamo breaks the graph.
When Dynamo traces for this backend, the hooks are installed during the trace instead, so that the rest of it sees them.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.utils import output_capturing

from dta_compile.integrations.tracing import in_our_graphs
from dta_compile.torch_compat import TAKES_MODULES

# Before torch 2.13, or without this function of transformers, the graph breaks.
_install = getattr(output_capturing, "maybe_install_capturing_hooks", None)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _install_while_tracing(model: Any) -> None:
    assert _install is not None
    _install(model)


if _install is not None and TAKES_MODULES:
    output_capturing.maybe_install_capturing_hooks = in_our_graphs(_install_while_tracing, _install)
