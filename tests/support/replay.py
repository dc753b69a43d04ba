"""Simulate CUDA graphs on a CPU: operators are recorded, and computed when the recording is replayed."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten


class Recording(TorchDispatchMode):
    """Mode that records operators with their tensors and numbers; nothing is computed until `replay`."""

    def __init__(self):
        super().__init__()
        self.steps = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            self.steps.append((func, args, kwargs, ()))
            return kwargs.get("out", args[0]) if func._schema.returns else None
        if any(result.alias_info for result in func._schema.returns):
            return func(*args, **kwargs)  # a view
        with FakeTensorMode(allow_non_fake_inputs=True):
            results, structure = tree_flatten(func(*args, **kwargs))
        if not any(isinstance(result, torch.Tensor) for result in results):
            return func(*args, **kwargs)  # a size
        results = [torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype) for fake in results]
        self.steps.append((func, args, kwargs, results))
        return tree_unflatten(results, structure)

    def replay(self):
        for func, args, kwargs, results in self.steps:
            for result, value in zip(results, tree_leaves(func(*args, **kwargs)), strict=bool(results)):
                result.copy_(value)


class Recorder:
    """Stand-in for a CUDA graph recorder."""

    def __call__(self, function):
        with Recording() as recording:
            outputs = function()
        return outputs, recording.replay
