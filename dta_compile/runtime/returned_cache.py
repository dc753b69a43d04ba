"""Compute the KV cache among a training call's outputs (transformers' default) lazily.

Reading it runs another forward over the tree for keys and values of the whole batch. It can be read until the backward
of the call, or until a parameter or an input changes; until then it holds the inputs of the call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dta_compile.errors import RuntimeContractError
from dta_compile.executable.executable import Executable, FrontierValue
from dta_compile.executable.layouts import InputKind
from dta_compile.runtime.calls.planned_call import PlannedCall, plan_call
from dta_compile.runtime.transparent import dense_frontier, gradient_of_cache, no_autocast
from dta_compile.torch_compat.tensors import make_wrapper_subclass, no_torch_function, pytree, without_modes


def can_wait(executable: Executable, args: Sequence[Any]) -> bool:
    """Return whether a cache may be computed when it is read: writes to weights will be noticed until then."""
    return not any(args[spec.index].is_inference() for spec in executable.region_parameters)


class ReturnedCache:
    """Keys and values of a call by frontier value; reading one computes all of them."""

    def __init__(self, call: PlannedCall) -> None:
        self.call: PlannedCall | None = call
        read = [value for value in (*call.args, *call.dense) if isinstance(value, torch.Tensor)]
        self.state = [(value, _state(value)) for value in read]
        # Inference tensors do not count writes.
        data = [call.args[i] for i, spec in enumerate(call.executable.inputs) if spec.kind is InputKind.DATA]
        self.copies = [(value, value.clone()) for value in data if value.is_inference()]
        self.values: list[torch.Tensor | None] | None = None

    def expire(self) -> None:
        """Drop the call before its backward: an optimizer may then change parameters undetected."""
        self.call, self.state, self.copies = None, [], []

    def tensor(self, index: int) -> OnDemand:
        """Return a lazy tensor for a frontier value."""
        assert self.call is not None
        value = self.call.executable.frontier[index]
        sizes = self.call.context.sizes.shape(value.shape, self.call.args)
        return OnDemand(self, index, value, sizes, self.call.device)

    def value(self, index: int) -> torch.Tensor:
        """Return a dense frontier value."""
        if self.values is None:
            self.values = self._computed()
        value = self.values[index]
        assert value is not None
        return value

    @torch.compiler.disable
    def _computed(self) -> list[torch.Tensor | None]:
        call = self.call
        is_sharded = call is not None and call.context.layers is not None  # other ranks would have to gather, too
        is_changed = any(_state(value) != state for value, state in self.state)
        if call is None or is_sharded or is_changed or not all(itertools.starmap(torch.equal, self.copies)):
            raise RuntimeContractError(
                "the returned KV cache is computed when it is read, and it is too late for that",
                expected="a read before the call's backward, with its parameters and inputs as they were",
                got=(
                    "parameters that are gathered from other ranks, layer by layer"
                    if is_sharded
                    else "one after the backward"
                    if call is None
                    else "others, changed in place or freed"
                ),
                hint="read past_key_values before, or call the model under torch.no_grad() for a KV cache",
            )
        wanted = [value.is_cache for value in call.executable.frontier]
        with without_modes(), torch.no_grad(), no_autocast():
            rerun = plan_call(call, "score", wanted)
            return dense_frontier(rerun)


def _state(value: torch.Tensor) -> tuple[int, int, int]:
    """Return a state that changes when a tensor is written to, moved or freed (like sharded parameters)."""
    version = 0 if value.is_inference() else value._version
    return version, value.data_ptr(), value.untyped_storage().size()


class OnDemand(torch.Tensor):
    """Lazy tensor of a returned KV cache: any operator on it, or a look at its memory, computes the cache first."""

    cache: ReturnedCache
    number: int  # index of the frontier value

    @staticmethod
    def __new__(
        cls: type[OnDemand],
        cache: ReturnedCache,
        index: int,
        value: FrontierValue,
        sizes: Sequence[int],
        device: torch.device,
    ) -> OnDemand:
        """Return a lazy tensor for `value`, of the given sizes, without storage."""
        strides, step = [0] * len(sizes), 1
        for dim in reversed(value.memory_order):
            strides[dim], step = step, step * max(sizes[dim], 1)
        tensor = make_wrapper_subclass(cls, tuple(sizes), strides=tuple(strides), dtype=value.dtype, device=device)
        tensor.cache, tensor.number = cache, index
        if value.differentiable and torch.is_grad_enabled():
            tensor.requires_grad_()

            def refuse(grad: torch.Tensor) -> None:
                raise gradient_of_cache(value)

            tensor.register_hook(refuse)
        return tensor

    __torch_function__ = no_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = pytree.tree_map_only(cls, lambda tensor: tensor.cache.value(tensor.number), (args, kwargs or {}))
        return func(*args, **kwargs)

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """Return the computed tensor."""
        return self.cache.value(self.number)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"OnDemand(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.cache.value(self.number).clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.cache.value(self.number).__reduce_ex__(protocol)


def _of_computed(name: str) -> Callable[..., Any]:
    def method(tensor: OnDemand, *args: Any, **kwargs: Any) -> Any:
        return getattr(tensor.data, name)(*args, **kwargs)

    return method


for _name in ("numpy", "tolist", "data_ptr", "untyped_storage", "__dlpack__"):  # no operators
    setattr(OnDemand, _name, _of_computed(_name))
