"""Avoid the graph break where transformers starts to record outputs of layers (router logits, hidden states).

The first call that requests such outputs installs hooks on the layers under a lock, at which Dynamo breaks the graph.
When Dynamo traces for this backend, the hooks are installed during the trace instead, so that the rest of it sees them.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.utils import output_capturing

from dta_compile.integrations.tracing import traces_for_this_backend
from dta_compile.torch_compat import TAKES_MODULES

# Before torch 2.13, or without this function of transformers, the graph breaks.
_install = getattr(output_capturing, "maybe_install_capturing_hooks", None)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _install_while_tracing(model: Any) -> None:
    assert _install is not None
    _install(model)


def maybe_install_capturing_hooks(model: Any) -> None:
    """Install the hooks of a model that has none yet, during the trace if Dynamo traces for this backend."""
    if torch.compiler.is_compiling() and traces_for_this_backend():
        _install_while_tracing(model)
    else:
        assert _install is not None
        _install(model)


if _install is not None and TAKES_MODULES:
    output_capturing.maybe_install_capturing_hooks = maybe_install_capturing_hooks
