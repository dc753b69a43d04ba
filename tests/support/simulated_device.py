"""Simulated device: Dynamo sees tensors on it, values are computed on the CPU, and GPU failures and waits are noticed.

with simulated() as device:
    out = compiled(*inputs)  # CPU tensors; out is on the device
    with device:  # tensors can be created on it
        out.sum().backward()
    device.put(parameter).grad.host
    device.waits  # ops that made the host wait, inside and outside of schedules

For torch it is "meta", the one device type that every build knows and none computes on.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch._subclasses import fake_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from dta_compile.runtime import engine
from dta_compile.runtime.calls.executor import Executor
from dta_compile.runtime.engine import Engine
from dta_compile.runtime.streaming import Stream

DEVICE, CPU = torch.device("meta"), torch.device("cpu")
aten = torch.ops.aten
COPIES = (aten._to_copy.default, aten.copy_.default)
# Ops for which a GPU has to hand a number to the host.
WAITING = (aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten._unique2.default)


@contextlib.contextmanager
def captured_on_device() -> Iterator[None]:
    """Make Dynamo, and the compiled code, see parameters and inputs on the device."""
    convert, create = fake_tensor.FakeTensorConverter.from_real_tensor, fake_tensor.FakeTensor.__new__
    is_input = False

    def convert_input(self: Any, fake_mode: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal is_input
        before, is_input = is_input, kwargs.get("source") is not None
        try:
            return convert(self, fake_mode, tensor, *args, **kwargs)
        finally:
            is_input = before

    def create_on_device(cls: Any, fake_mode: Any, elem: Any, device: Any, *args: Any, **kwargs: Any) -> Any:
        return create(cls, fake_mode, elem, DEVICE if is_input else device, *args, **kwargs)

    with (
        mock.patch.object(fake_tensor.FakeTensorConverter, "from_real_tensor", convert_input),
        mock.patch.object(fake_tensor.FakeTensor, "__new__", create_on_device),
    ):
        yield


class OnDevice(torch.Tensor):
    """Tensor on the device; `host` has its values."""

    host: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> OnDevice:
        where = {"strides": host.stride(), "storage_offset": host.storage_offset(), "device": DEVICE}
        tensor = torch.Tensor._make_wrapper_subclass(cls, host.shape, dtype=host.dtype, **where)
        tensor.host = host
        return tensor

    def __repr__(self) -> str:
        return f"OnDevice({self.host})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return Device.current.run(func, args, kwargs or {})


class Device(TorchDispatchMode):
    """Mode that runs operators on tensors of the device and creates such tensors.

    Attributes:
        waits: operators for which a GPU would make the host wait, and whether each ran inside a schedule.
    """

    current: Device

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[tuple[str, bool]] = []
        self.in_schedule = False
        self.leaves: dict[torch.Tensor, OnDevice] = {}

    def put(self, value: Any) -> Any:
        """Put a tensor on the device; a tensor that requires gradients always maps to the same autograd leaf."""
        if not isinstance(value, torch.Tensor) or isinstance(value, OnDevice):
            return value
        if value.requires_grad and value in self.leaves:
            return self.leaves[value]
        tensor = OnDevice(value.detach().as_subclass(torch.Tensor)).requires_grad_(value.requires_grad)
        if value.requires_grad:
            self.leaves[value] = tensor
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        here = [tensor for tensor in tensors if isinstance(tensor, OnDevice)]
        if not here and kwargs.get("device") != DEVICE:
            return func(*args, **kwargs)
        numbers = [tensor for tensor in tensors if tensor.dim() == 0]
        if func not in COPIES and len(here) + len(numbers) < len(tensors):
            raise RuntimeError(f"{func} got tensors of the CPU and of the device")
        self._note(func, args, kwargs, len(here) < len(tensors))
        host_arguments = tree_map(_on_host, (args, kwargs))
        results = func(*host_arguments[0], **host_arguments[1])
        if func is aten._to_copy.default and kwargs.get("device") == CPU:
            return results
        if func._schema.is_mutable:
            return kwargs.get("out", args[0]) if func._schema.returns else None
        return tree_map_only(torch.Tensor, OnDevice, results)

    def _note(self, func: Any, args: Any, kwargs: Any, mixed: bool) -> None:
        by_mask = func is aten.index.Tensor and any(i is not None and i.dtype is torch.bool for i in args[1])
        to_host = func is aten._to_copy.default and kwargs.get("device") == CPU
        from_host = func in COPIES and mixed and not _is_called_by("upload")  # `upload` uses pinned memory
        if func in WAITING or by_mask or to_host or from_host:
            self.waits.append((str(func), self.in_schedule))


def _on_host(value: Any) -> Any:
    return value.host if isinstance(value, OnDevice) else CPU if value == DEVICE else value


def _is_called_by(name: str) -> bool:
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_name != name:
        frame = frame.f_back
    return frame is not None


@contextlib.contextmanager
def simulated() -> Iterator[Device]:
    """Run compiled functions on a new simulated device, whatever the device of their inputs."""
    device = Device.current = Device()
    call, run, stream = Engine.__call__, Executor.run, Stream.run

    def call_on_device(self: Engine, *args: Any) -> Any:
        with device:
            return call(self, *map(device.put, args))

    def stream_on_device(self: Stream, *args: Any) -> Any:
        with device:
            return stream(self, *args)

    def run_schedule(self: Executor, *args: Any, **kwargs: Any) -> int:
        before, device.in_schedule = device.in_schedule, True
        try:
            return run(self, *args, **kwargs)
        finally:
            device.in_schedule = before

    with (
        captured_on_device(),
        mock.patch.object(Engine, "__call__", call_on_device),
        mock.patch.object(engine, "is_without_values", lambda arg: False),  # "meta" tensors have values here
        mock.patch.object(Executor, "run", run_schedule),
        mock.patch.object(Stream, "run", stream_on_device),
    ):
        yield device
