"""Hide gradient checkpointing from compiled callables, whose plans decide about recomputation themselves.

Hidden are transformers' flags and hooks, and the hooks of `torch.distributed._composable.checkpoint`.

Trainers switch it off to generate and score, and on again to train. Dynamo's guards read its flags and hooks before any
code of a graph runs, and would compile each setting separately. So a compiled callable hides both when it is entered,
and restores them when it returns. `capture.dynamo.preparations` installs this.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping

from torch import nn

FLAG, FUNCTION = "gradient_checkpointing", "_gradient_checkpointing_func"  # the flag says whether the function is used
HOOK = "make_inputs_require_grad"  # prefix of hooks that make embeddings require a gradient, for checkpoints
COMPOSABLE = "torch.distributed._composable.checkpoint_activation"  # its hooks are checkpoints


class _OfThread(threading.local):
    """For each running call of a compiled callable in this thread, innermost last, what it hides.

    These are modules with the values of their flags, and whether it hides checkpoints that are hooks.
    """

    def __init__(self) -> None:
        self.hidden: list[tuple[Mapping[nn.Module, object], bool]] = []


_of_thread = _OfThread()


def is_hidden() -> bool:
    """Return whether gradient checkpointing is on outside the running compiled calls."""
    return any(flagged or has_checkpoints for flagged, has_checkpoints in _of_thread.hidden)


@contextlib.contextmanager
def shown(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore hidden flags of modules that run as they are inside of a call, such as encoders of images."""
    hidden = {module: value for of_call, _ in _of_thread.hidden for module, value in of_call.items()}
    flagged = [part for module in modules for part in module.modules() if part in hidden]
    for part in flagged:
        part.__dict__[FLAG] = hidden[part]
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
            if (
                hasattr(part, FLAG)
                or isinstance(part, nn.Embedding)
                or any(map(_is_hidden, part._forward_hooks.values()))
            ):
                self._modules.add(part)
        return len(self._modules) > known

    def __call__(self) -> Callable[[], None]:
        flagged = {part: value for part in self._modules if (value := part.__dict__.get(FLAG)) and _has_function(part)}
        hooks = [hooks for module in self._modules for hooks in (module._forward_pre_hooks, module._forward_hooks)]
        before = [(of_module, dict(of_module)) for of_module in hooks if any(map(_is_hidden, of_module.values()))]
        for module in flagged:
            module.__dict__[FLAG] = False
        for of_module, all_hooks in before:
            for key, hook in all_hooks.items():
                if _is_hidden(hook):
                    del of_module[key]
        has_checkpoints = any(_is_checkpoint(hook) for _, known in before for hook in known.values())
        _of_thread.hidden.append((flagged, has_checkpoints))

        def leave() -> None:
            _of_thread.hidden.pop()
            for module, value in flagged.items():
                module.__dict__[FLAG] = value
            for of_module, all_hooks in before:
                added = {key: hook for key, hook in of_module.items() if key not in all_hooks}
                of_module.clear()
                of_module.update({**all_hooks, **added})

        return leave


def _has_function(module: nn.Module) -> bool:
    """Return whether the flag of a module is transformers': one of the user's own may mean anything."""
    return getattr(module, FUNCTION, None) is not None


def _is_hidden(hook: object) -> bool:
    names = getattr(getattr(hook, "__code__", None), "co_names", None)
    only_requires_gradient = names == ("requires_grad_",) and getattr(hook, "__name__", "").startswith(HOOK)
    return only_requires_gradient or _is_checkpoint(hook)


def _is_checkpoint(hook: object) -> bool:
    return getattr(hook, "__module__", "") == COMPOSABLE
