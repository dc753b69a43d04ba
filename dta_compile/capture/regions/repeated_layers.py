"""Have Dynamo trace equal layers of a model once, by making them torch's regions (`nested_compile_region`).

If a module has several children of one class, such as the layers of a decoder, each call of their `forward` becomes a
region. Dynamo traces the first call; for each further one it evaluates the guards of the first on the other layer and
copies the nodes. The regions are inlined before a backend sees the graph.

torch leaves it to the user of a region to ensure that the other layer would be traced alike. `region_reuse` checks it,
and adds the guards of the first layer for the others. This module compares the properties that Dynamo does not guard:
the types of all modules inside a layer, their hooks, shared weights, and the settings of torch's own modules.

A model whose layers cannot be regions (because they write to a cache, for example) is traced once more without regions,
after `NoRegion` or any error of torch. This patches private parts of torch, which has such regions since 2.12.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import types
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from dta_compile.capture.regions.guards import add_guard
from dta_compile.torch_compat import as_wrapper, regions, wrap_once
from dta_compile.torch_compat.dynamo import AttributeMutationNew, ChainedSource, SideEffects, UserFunctionVariable
from dta_compile.torch_compat.dynamo import config as dynamo_config

if regions.WHY_NONE:
    logging.getLogger("dta_compile").info("dta: equal layers are traced one by one: %s", regions.WHY_NONE)
else:
    from dta_compile.capture.regions.region_reuse import NoRegion, OtherCall, Traced, fingerprint_of, may_be_region

LEAST_COPIES = 2
# Attributes that every module has. Copies may differ in them: parameters and buffers are inputs of a region.
OF_MODULES = frozenset(nn.Module().__dict__) - {"training"}
HOOKS = tuple(name for name in sorted(OF_MODULES) if name.endswith("_hooks") and "state_dict" not in name)
VALUE = "_dta_value"  # name of a value in the expression of what is looked up in it
PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device)

# Functions whose calls are regions of the running trace; empty inside a region, since regions are not nested.
_regions: set[Any] = set()
# The function of the region being traced, if any.
_inside: list[Any] = []


@contextlib.contextmanager
def traced_once(roots: Iterable[nn.Module]) -> Iterator[bool]:
    """Make calls of equal layers regions while Dynamo traces; yield whether there are any."""
    functions = set() if regions.WHY_NONE else set(_forwards(roots))
    before = set(_regions)
    _regions.update(functions)
    try:
        with dynamo_config.patch(inline_invoke_subgraph=True) if functions else contextlib.nullcontext():
            yield bool(functions)
    finally:
        _regions.clear()
        _regions.update(before)


def _forwards(roots: Iterable[nn.Module]) -> list[types.FunctionType]:
    """Return the `forward` functions of repeated layers; repeated modules inside a layer belong to its region."""
    pending, seen = list(roots), set()
    groups: dict[type, list[nn.Module]] = {}
    while pending:
        module = pending.pop()
        if module in seen:
            continue
        seen.add(module)
        of_class: dict[type, list[nn.Module]] = {}
        for child in module.children():
            of_class.setdefault(type(child), []).append(child)
        for kind, members in of_class.items():
            if len(members) >= LEAST_COPIES and all(any(True for _ in member.children()) for member in members):
                groups.setdefault(kind, []).extend(members)
            else:
                pending += members
    forwards: dict[Any, types.FunctionType] = {}  # Dynamo identifies regions by the code of their function
    for kind, members in groups.items():
        forward = getattr(kind, "forward", None)
        if isinstance(forward, types.FunctionType) and len(set(map(_kind, members))) == 1:
            forwards.setdefault(forward.__code__, forward)
    return list(forwards.values())


def _kind(layer: nn.Module) -> Hashable:
    """Return a key that is equal for layers whose other differences Dynamo guards.

    A layer with hooks, a `forward` of its own or weights of other types gets a unique key, so it is never a region.
    """
    rows: list[Hashable] = []
    seen: dict[int, int] = {}  # by id of a module or weight, its first occurrence
    for name, module in layer.named_modules(remove_duplicate=False):
        if any(getattr(module, hooks, None) for hooks in HOOKS) or "forward" in module.__dict__:
            return object()
        weights = {**module._parameters, **module._buffers}
        if any(type(value) not in (nn.Parameter, torch.Tensor, type(None)) for value in weights.values()):
            return object()
        parts = [module, *(value for value in weights.values() if value is not None)]
        shared = tuple(seen.setdefault(id(part), len(seen)) for part in parts)
        there = tuple((key, value is not None) for key, value in weights.items())
        rows.append((name, type(module), there, shared, _settings(module)))
    return tuple(rows)


def _settings(module: nn.Module) -> Hashable:
    """Return the settings of one of torch's own modules, because Dynamo does not guard them; None for other modules."""
    if not type(module).__module__.startswith("torch."):
        return None
    settings = {key: value for key, value in module.__dict__.items() if key not in OF_MODULES}
    return tuple(sorted((key, repr(value) if _is_plain(value) else id(value)) for key, value in settings.items()))


def _is_plain(value: Any) -> bool:
    return isinstance(value, PLAIN) or (isinstance(value, tuple) and all(map(_is_plain, value)))


@as_wrapper
def _or_pytree(build: Callable[..., Any], tx: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Flatten a region's arguments by `fingerprint_of`, or by torch where that returns None."""
    return (fingerprint_of(args, kwargs) if _inside else None) or build(tx, args, kwargs)


@as_wrapper
def _with_our_condition(build: Callable[..., Any], tx: Any, fingerprint: Any, traced_sources: Any) -> Any:
    """Add our condition for reusing a traced region to torch's."""
    condition = build(tx, fingerprint, traced_sources)
    if condition is not None and _inside:
        condition.of_dta = Traced.of(tx, fingerprint, condition)
    return condition


@as_wrapper
def _if_ours_holds(is_reusable: Callable[..., bool], tx: Any, condition: Any, fingerprint: Any, cached: Any) -> bool:
    """Check torch's conditions on arguments and written values, then our condition, which includes torch's guards."""
    if not hasattr(condition, "of_dta"):
        return is_reusable(tx, condition, fingerprint, cached)
    call = OtherCall(tx, fingerprint, cached)
    if not condition.of_dta.has_arguments_of(call):
        return False
    read = type(condition.traced_sources)(map(call.moved, condition.of_dta.traced))
    if regions.has_mutated_vars(tx, read):
        return False
    of_arguments = dataclasses.replace(condition, guards=[], traced_sources=type(read)())
    cached.of_dta = condition.of_dta, call
    return is_reusable(tx, of_arguments, fingerprint, cached) and condition.of_dta.holds(call)


@as_wrapper
def _with_guards(stamp_out: Callable[..., Any], tx: Any, fingerprint: Any, cached: Any) -> Any:
    """Copy a region's nodes to another call, and add the guards under which it was traced."""
    if hasattr(cached, "of_dta"):
        traced, call = cached.of_dta
        for guard in traced.guards_of(call):
            add_guard(tx.output.guards, guard)
    return stamp_out(tx, fingerprint, cached)


@functools.lru_cache(maxsize=2**12)
def _code(template: str) -> types.CodeType:
    return compile(template.format(VALUE), "<source>", "eval")


def _compiled_once(get_value: Callable[..., Any]) -> Callable[..., Any]:
    """Look up the value of a source by code that is compiled once for all sources with the same expression."""

    def get_value_by_code(
        self: Any, names: dict[str, Any], local: dict[str, Any], known: dict[Any, Any], **on_error: Any
    ) -> Any:
        if self in known:
            return known[self]
        if VALUE in local:
            return get_value(self, names, local, known, **on_error)
        local[VALUE] = self.base.get_value(names, local, known, **on_error)
        try:
            known[self] = eval(_code(self._name_template), names, local)
        except Exception:
            return get_value(self, names, local, known, **on_error)  # reports the error as this version of torch does
        finally:
            local.pop(VALUE, None)
        return known[self]

    return get_value_by_code


@as_wrapper
def _refusing_written(load: Callable[..., Any], self: Any, item: Any, *args: Any, **kwargs: Any) -> Any:
    """Raise `NoRegion` for a read of an attribute that the trace has written, because no guard covers its value."""
    if _inside and not isinstance(item.mutation_type, AttributeMutationNew):
        raise NoRegion
    return load(self, item, *args, **kwargs)


@as_wrapper
def _raising_no_region(is_eligible: Callable[..., bool], tx: Any, *args: Any, **kwargs: Any) -> bool:
    """Raise `NoRegion` where a region cannot be reused: torch would trace each call as a region, which is slow."""
    is_reusable = is_eligible(tx, *args, **kwargs)
    if not is_reusable and _inside:
        raise NoRegion
    return is_reusable


def _as_region(call: Callable[..., Any]) -> Callable[..., Any]:
    """Trace calls of the functions in `_regions` as regions instead of inlining them."""

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        is_region = type(self) is UserFunctionVariable and self.fn in _regions
        if not is_region or not may_be_region(tx, tuple(args), kwargs):
            return call(self, tx, args, kwargs)
        outside = set(_regions)
        _regions.clear()
        _inside.append(self.fn)
        try:
            return regions.build_invoke_subgraph_variable().call_function(tx, [self, *args], kwargs)
        finally:
            _inside.pop()
            _regions.update(outside)

    return call_function


if not regions.WHY_NONE:
    for owner, name, wrapper in (
        (regions.reuse, "build_fingerprint_with_pytree", _or_pytree),
        (regions.reuse, "build_reuse_condition", _with_our_condition),
        (regions.reuse, "is_reusable", _if_ours_holds),
        (regions.reuse, "stamp_out_subgraph", _with_guards),
        (regions.reuse, "is_reuse_eligible", _raising_no_region),
        (ChainedSource, "get_value", _compiled_once),
        (SideEffects, "load_attr", _refusing_written),
        (UserFunctionVariable, "call_function", _as_region),
    ):
        wrap_once(owner, name, wrapper)
