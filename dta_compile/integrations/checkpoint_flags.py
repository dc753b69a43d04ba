"""Hide transformers' gradient checkpointing from compiled callables, whose plans decide about recomputation themselves.

Trainers switch it off to generate and score, and on again to train. Dynamo's guards read its flags and hooks before any
code of a graph runs, and would compile each setting separately. So a compiled callable hides both when it is entered,
and restores them when it returns. `capture.dynamo` installs this.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator

from torch import nn

FLAG = "gradient_checkpointing"
HOOK = "make_inputs_require_grad"  # prefix of hooks that make embeddings require a gradient, for checkpoints


class _OfThread(threading.local):
    """For each running call of a compiled callable in this thread, innermost last: modules whose flags it hides."""

    def __init__(self) -> None:
        self.hidden: list[list[nn.Module]] = []


_of_thread = _OfThread()


def is_hidden() -> bool:
    """Return whether gradient checkpointing is on outside the running compiled calls."""
    return any(_of_thread.hidden)


@contextlib.contextmanager
def shown(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore hidden flags of modules that run as they are inside of a call, such as encoders of images."""
    hidden = {module for of_call in _of_thread.hidden for module in of_call}
    flagged = [part for module in modules for part in module.modules() if part in hidden]
    for part in flagged:
        part.__dict__[FLAG] = True
    try:
        yield
    finally:
        for part in flagged:
            part.__dict__[FLAG] = False


class CheckpointFlags:
    """Flags and hooks of the modules of a compiled callable.

    The callable calls this when it is entered; the result restores them when it returns.
    """

    def __init__(self) -> None:
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def add(self, modules: Iterable[nn.Module]) -> bool:
        """Add the submodules that may have flags or hooks; return whether any is new."""
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
        _of_thread.hidden.append(flagged)

        def leave() -> None:
            _of_thread.hidden.pop()
            for module in flagged:
                module.__dict__[FLAG] = True
            for module, hooks in hooked:
                added = {key: hook for key, hook in module._forward_hooks.items() if key not in hooks}
                module._forward_hooks.clear()
                module._forward_hooks.update({**hooks, **added})

        return leave
