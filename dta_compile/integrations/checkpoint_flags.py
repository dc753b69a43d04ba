"""transformers' gradient checkpointing around what is compiled: a plan says itself what is computed again.

Trainers switch it off to generate and to score, and on again to train. Dynamo's guards read its flags and the hooks
that come with it before any code of a graph runs, and would have each setting compiled by itself. So a compiled
callable hides both as it is entered, and puts them back as it is left.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable

from torch import nn

FLAG = "gradient_checkpointing"
HOOK = "make_inputs_require_grad"  # so begin the names of hooks by which checkpoints see an input that needs a gradient


class _OfThread(threading.local):
    """By call of a compiled callable that this thread runs, the innermost last, whether there were flags to hide."""

    def __init__(self) -> None:
        self.hidden: list[bool] = []


_of_thread = _OfThread()


def is_hidden() -> bool:
    """Whether gradient checkpointing is on outside of the compiled call that is running."""
    return any(_of_thread.hidden)


class CheckpointFlags:
    """The flags and hooks of the modules that a compiled callable runs; called as it is entered, returns what to call
    as it is left."""

    def __init__(self) -> None:
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def add(self, modules: Iterable[nn.Module]) -> bool:
        """Add what has flags or hooks in some modules; whether there was anything new."""
        known = len(self._modules)
        for part in (part for module in modules for part in module.modules()):
            if hasattr(part, FLAG) or isinstance(part, nn.Embedding):
                self._modules.add(part)
        return len(self._modules) > known

    def __call__(self) -> Callable[[], None]:
        flagged = [module for module in self._modules if module.__dict__.get(FLAG)]
        hooked = [(module, dict(module._forward_hooks)) for module in self._modules if module._forward_hooks]
        for module in flagged:
            module.__dict__[FLAG] = False
        for module, hooks in hooked:
            for key, hook in hooks.items():
                if getattr(hook, "__name__", "").startswith(HOOK):
                    del module._forward_hooks[key]
        _of_thread.hidden.append(bool(flagged))

        def leave() -> None:
            _of_thread.hidden.pop()
            for module in flagged:
                module.__dict__[FLAG] = True
            for module, hooks in hooked:
                added = {key: hook for key, hook in module._forward_hooks.items() if key not in hooks}
                module._forward_hooks.clear()
                module._forward_hooks.update({**hooks, **added})

        return leave
