"""Pickle executables as plain data that is valid in any process, and load them.

Operators, mixers and functions are stored by name, tensors by value. Only classes and functions of a closed list of
modules are loaded; other objects (functions of other packages, graphs, traced values) raise `NotKept`.
"""

from __future__ import annotations

import io
import pickle
import types
from collections.abc import Callable
from typing import Any

import torch

from dta_compile.program_cache.compression import WITH_TABLES, as_tables
from dta_compile.program_cache.key import C_FUNCTIONS, MOST_BYTES, NAMESPACES, is_known_function
from dta_compile.torch_compat.operators import OpOverload

# Modules (with submodules) whose classes may be loaded, and functions except for sympy's, some of which evaluate text.
MODULES = (
    "dta_compile.codegen.generated",
    "dta_compile.executable",
    "dta_compile.ops",
    "dta_compile.proofs",
    "dta_compile.program_cache.size_guards",
    "dta_compile.program_cache.compression",
    "sympy.core",
    "sympy.functions",
    "sympy.logic",
    "sympy.sets",
    "torch.utils._sympy",
    "_operator",
    "operator",
    "math",
)
NAMES = {
    "builtins": ("complex", "frozenset", "set", "slice", "range", "min", "max", "abs", "int", "float", "bool", "round"),
    "collections": ("OrderedDict",),
    "torch": ("Size", "device"),
}


class NotKept(Exception):
    """An object has no meaning in another process, or may not be loaded."""


def to_bytes(value: Any) -> bytes:
    """Pickle a value; raise an exception of any kind if that is impossible."""
    stream = io.BytesIO()
    _Pickler(stream, protocol=5).dump(value)
    return stream.getvalue()


def from_bytes(data: bytes) -> Any:
    """Load the value of `to_bytes`; raise an exception of any kind for other data."""
    return _Unpickler(io.BytesIO(data)).load()


def operator_named(namespace: str, name: str, overload: str) -> Any:
    """Return an operator of torch or ours by its name."""
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def of_torch(name: str) -> Any:
    """Return an attribute of torch, since pickle would search all imported modules for it."""
    return getattr(torch, name)


def tensor_of(
    data: bytes, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], device: torch.device
) -> torch.Tensor:
    """Rebuild a constant from the bytes of its entries in contiguous order."""
    entries = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return torch.empty_strided(shape, stride, dtype=dtype, device=device).copy_(entries.reshape(shape))


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """Reduce an object by `REDUCERS`; pickle calls this except for built-in containers, numbers and strings."""
        for kind, reduce in REDUCERS:
            if isinstance(value, kind):
                return reduce(value)
        return NotImplemented


def _operator(operator: OpOverload) -> Any:
    namespace, _, name = operator._schema.name.partition("::")
    if namespace not in NAMESPACES:
        raise NotKept(f"{operator}")
    return operator_named, (namespace, name, operator._overloadname)


def _tensor(value: torch.Tensor) -> Any:
    is_plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
    is_expanded = any(size > 1 and stride == 0 for size, stride in zip(value.shape, value.stride(), strict=True))
    if not is_plain or is_expanded or value.is_meta or value.nbytes > MOST_BYTES:
        raise NotKept(f"a tensor of type {type(value).__name__} of {tuple(value.shape)}")
    entries = value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
    data = entries.numpy().tobytes()
    return tensor_of, (data, value.dtype, tuple(value.shape), value.stride(), value.device)


def _function(function: Any) -> Any:
    if not is_known_function(function):
        raise NotKept(f"a call of {function}")
    name: str = function.__name__
    return (of_torch, (name,)) if getattr(torch, name, None) is function else NotImplemented


def _class(kind: type) -> Any:
    if not _may_be_read(kind.__module__, kind.__qualname__):
        raise NotKept(f"{kind}")
    return NotImplemented


# By kind of object; the most frequent kinds come first.
REDUCERS: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (WITH_TABLES, as_tables),
    (OpOverload, _operator),
    (torch.Tensor, _tensor),
    ((torch.dtype, torch.layout, torch.memory_format), lambda value: (of_torch, (str(value).removeprefix("torch."),))),
    (types.MappingProxyType, lambda mapping: (dict, (dict(mapping),))),
    ((types.FunctionType, *C_FUNCTIONS), _function),
    (type, _class),
)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == __name__ and name in ("operator_named", "of_torch", "tensor_of"):
            return globals()[name]
        loaded = super().find_class(module, name) if _may_be_read(module, name) else None
        if loaded is None or (module.startswith("sympy") and not isinstance(loaded, type)):
            raise NotKept(f"{module}.{name}")
        return loaded


def _may_be_read(module: str, name: str) -> bool:
    return name in NAMES.get(module, ()) or any(module == root or module.startswith(f"{root}.") for root in MODULES)
