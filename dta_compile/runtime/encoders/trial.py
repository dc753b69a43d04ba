"""Runs without gradients, to learn what a method does: which modules and weights it uses, and whether it draws."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from dta_compile.torch_compat.tensors import TorchDispatchMode, tree_leaves


def is_batch_norm(part: nn.Module) -> bool:
    return isinstance(part, nn.modules.batchnorm._BatchNorm)


class Trial:
    """Run without gradients; the random state and buffers are kept.

    `is_random` tells whether the random state was read, `written` names a buffer that was changed, if any.
    (Operators cannot be asked: torch's attention counts as random, though it draws nothing without dropout.)
    """

    def __init__(self, module: nn.Module) -> None:
        devices = {weight.device for weight in module.parameters()}
        self.devices = [device for device in devices if device.type not in ("cpu", "meta")]
        self.module, self.is_random, self.written = module, False, ""

    def _state(self) -> list[torch.Tensor]:
        of_devices = (torch.get_device_module(device).get_rng_state(device) for device in self.devices)
        return [torch.get_rng_state(), *of_devices]

    @staticmethod
    def _state_of_numpy() -> tuple[bytes, Any]:
        state: Any = np.random.get_state()
        return state[1].tobytes(), state[2:]

    def __enter__(self) -> Trial:
        self._grad = torch.no_grad()
        self._grad.__enter__()
        self._before, self._of_numpy = self._state(), (np.random.get_state(), self._state_of_numpy())
        self._of_python = random.getstate()
        named = self.module.named_buffers(remove_duplicate=False)
        # Not by versions of tensors, which batch norm does not count.
        self._buffers = {name: (buffer, buffer.clone()) for name, buffer in named if not buffer.is_meta}
        return self

    def __exit__(self, *error: object) -> None:
        self._grad.__exit__(*error)
        before, of_numpy = self._of_numpy
        self.is_random = not all(map(torch.equal, self._before, self._state()))
        self.is_random |= (of_numpy, self._of_python) != (self._state_of_numpy(), random.getstate())
        random.setstate(self._of_python)
        np.random.set_state(before)
        torch.set_rng_state(self._before[0])
        for device, state in zip(self.devices, self._before[1:], strict=True):
            torch.get_device_module(device).set_rng_state(state, device)
        for name, (buffer, value) in self._buffers.items():
            owner, _, own = name.rpartition(".")
            buffers = self.module.get_submodule(owner)._buffers
            now, buffers[own] = buffers.get(own), buffer
            if now is None or not _is_same(now, value):
                self.written = name
            if not _is_same(buffer, value):
                with torch.no_grad():
                    buffer.copy_(value)


def _is_same(value: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are equal, NaN (of memory without values) as well."""
    if value.shape != other.shape:
        return False
    return bool(((value == other) | ((value != value) & (other != other))).all())


class WeightReads(TorchDispatchMode):
    """Collect parameters that operators read, and other tensors that require a gradient, by their `id`."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.weights: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, nn.Parameter) or (isinstance(value, torch.Tensor) and value.requires_grad):
                self.weights[id(value)] = value
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def modules_called(module: nn.Module) -> Iterator[dict[str, None]]:
    """Give the names of the submodules that are called, in order of their first calls."""
    names = {part: name for name, part in module.named_modules() if name}
    called: dict[str, None] = {}

    def note(part: nn.Module, _: Any) -> None:
        if part in names:
            called[names[part]] = None

    hook = nn.modules.module.register_module_forward_pre_hook(note)
    try:
        yield called
    finally:
        hook.remove()
