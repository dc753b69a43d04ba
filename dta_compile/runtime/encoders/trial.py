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
    """Run without gradients; the random state is kept, and `is_random` tells whether it was read.

    (Operators cannot be asked: torch's attention counts as random, though it draws nothing without dropout.)
    """

    def __init__(self, module: nn.Module) -> None:
        devices = {weight.device for weight in module.parameters()}
        self.devices = [device for device in devices if device.type not in ("cpu", "meta")]
        self.is_random = False

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
def training_without_batch_norm(module: nn.Module) -> Iterator[None]:
    """Keep running statistics from a trial run."""
    parts = [part for part in module.modules() if part.training and is_batch_norm(part)]
    for part in parts:
        part.training = False
    try:
        yield
    finally:
        for part in parts:
            part.training = True


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
