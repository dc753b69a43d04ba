"""Decide whether the trace of one layer is valid for another: the conditions that torch leaves to the user of a region.

torch copies the nodes of a traced region to another call if the arguments look alike and the guards of the trace hold
with the new layer in place of the old one. A trace depends on more:

* **Aliasing.** An argument that is passed twice, or that is also a weight of the layer, is one input of the region; two
  different values of the next call would share it. Of an object with two sources, only one is guarded.
* **Side effects of the trace.** They are applied after the graph, so that guards see the values before them.
* **Lookups without a source or before the region**, such as items of a list, and whether an attribute exists.
* **Numbers.** torch compares them by value, so that `True` equals 1, and `0.0` equals `-0.0`.
* **The state of torch**: modes, autocast, default dtype.

A call that is passed other modules, some of which may belong to the layer, is no region (`may_be_region`), nor is one
after a write to a container. For all other calls, `Traced` holds these conditions. Used by `repeated_layers`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from typing import Any

import torch

from dta_compile.capture.regions.guards import guards_of_hooks, is_of_hooks
from dta_compile.passes.symbols import expression
from dta_compile.torch_compat.dynamo import (
    AttributeMutationNew,
    DeviceContext,
    ListVariable,
    NewGlobalVariable,
    Source,
    TupleVariable,
    TypeSource,
    UnspecializedNNModuleVariable,
    UserDefinedObjectVariable,
    ValueMutationNew,
    VariableTracker,
    has_written_contents,
)
from dta_compile.torch_compat.regions import (
    GUARD_VALUE_DISPATCH,
    IS_ONE,
    OF_CONSTANT,
    OF_TENSOR,
    OF_TYPE,
    SKIP_GUARD,
    GuardCheckSpec,
    InputFingerprint,
    InputTag,
    LiftedCapturedSource,
    classify_vt,
)


class NoRegion(Exception):
    """A function cannot be a region, so that its calls have to be traced each time."""


def may_be_region(tx: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call of a layer, `args[0]`, may be traced for other layers or reuse the trace of another."""
    layer = args[0].realize() if args else None
    if not isinstance(layer, UnspecializedNNModuleVariable) or layer.source is None or _has_written_to_containers(tx):
        return False
    modes = tx.symbolic_torch_function_state.mode_stack
    if any(type(mode.realize().value) is not DeviceContext for mode in modes):  # would see a region as one call
        return False
    objects: list[Any] = []

    def note(value: Any) -> None:
        value = value.realize()
        if isinstance(value, UserDefinedObjectVariable):  # modules are among them
            objects.append(value)

    VariableTracker.visit(note, [*args[1:], *kwargs.values()])
    return not objects


def fingerprint_of(args: Iterable[Any], kwargs: dict[str, Any]) -> InputFingerprint | None:
    """Build torch's fingerprint of a call's arguments directly: torch traces `pytree` for it, half the time of a copy.

    Returns None for containers other than tuples and lists, or leaves that torch has no tag for.
    """
    leaves: list[Any] = []

    def structure(value: Any) -> Hashable:
        value = value.realize()
        if type(value) in (TupleVariable, ListVariable):
            return type(value), tuple(map(structure, value.items))
        leaves.append(value)
        return None

    # torch only compares it with another structure made here.
    structures: Any = tuple(map(structure, args)), tuple((name, structure(value)) for name, value in kwargs.items())
    tagged = [(tag, leaf) for leaf in leaves if (tag := classify_vt(leaf)) is not None]
    if len(tagged) < len(leaves):
        return None
    return InputFingerprint(tagged, [leaf.source for leaf in leaves], False, structures)


def _has_written_to_containers(tx: Any) -> bool:
    """Return whether the trace has written to globals, lists, dicts or the like: guards see their old contents."""
    effects = tx.output.side_effects
    if effects.ignore_mutation_on_these_variables:  # temporary writes, as by `functional_call`
        return True
    if any(isinstance(value, NewGlobalVariable) for value, stores in effects.store_attr_mutations.items() if stores):
        return True
    for value in effects.id_to_variable.values():
        if isinstance(value.mutation_type, (AttributeMutationNew, ValueMutationNew)):
            continue
        if isinstance(value, UserDefinedObjectVariable):
            if has_written_contents(value, effects):
                return True
        elif not effects.is_attribute_mutation(value) and effects.is_modified(value):
            return True
    return False


def _written(effects: Any) -> set[int]:
    """Return the ids of objects whose attributes the trace has written."""
    written = {value for value, stores in effects.store_attr_mutations.items() if stores}
    return {name for name, value in effects.id_to_variable.items() if value in written}


@dataclasses.dataclass(frozen=True)
class Traced:
    """Conditions for reusing the trace of a call, beyond those of torch.

    Attributes:
        arguments: sizes of arguments, aliasing among them, which of them are graph inputs, and exact constants.
        state: global state of torch.
        names: pairs of sources of one object.
        asked: (source, handler, expected value) of the guards in torch's own condition.
        checks: the same for guards of the layer that torch's condition lacks.
        hooks: (source, names) of modules, and those of their attributes that hold hooks, which have none.
        constants: sources of constants, which torch compares by value only, with their exact values.
        traced: sources whose values torch built variables for.
        read: sources that the trace read, and those that it looked up to reach them, without those read of types.
        of_types: what the trace read of types, and on the way there.
        tensors: sources of tensors beside the arguments, which are guarded if they are inputs of the graph.
        guards: guards that another layer needs, too, whenever the graph runs.
    """

    arguments: Hashable
    state: Hashable
    names: tuple[tuple[Source, Source], ...]
    asked: tuple[tuple[Source, Any, Any], ...]
    checks: tuple[tuple[Source, Any, Any], ...]
    hooks: tuple[tuple[Source, tuple[str, ...]], ...]
    constants: tuple[tuple[Source, Hashable], ...]
    traced: tuple[Source, ...]
    read: tuple[Source, ...]
    of_types: tuple[Any, ...]
    tensors: frozenset[Source]
    guards: tuple[Any, ...]

    @classmethod
    def of(cls, tx: Any, fingerprint: Any, condition: Any) -> Traced:
        """Record the conditions of a call that has just been traced, with torch's own `condition`.

        Raises:
            NoRegion: the trace reads one of its arguments by another source, or an object that has been written to.
        """
        resolve, layer = _Resolver(tx), set(fingerprint.arg_sources) - {None}
        asked = [guard for *_, guard in condition.guards]
        others = [guard for guard in tx.output.guards if not layer.isdisjoint(_parts(guard))]
        guards = dict.fromkeys([*asked, *others])
        read = [*condition.traced_sources, *(guard.originating_source for guard in guards)]
        way = {part for source in layer for part in _with_bases(source)} - layer  # looked up before the region
        on_the_way = (part for source in read for part in _with_bases(source) if part not in way)
        values = dict(_values_of(resolve, dict.fromkeys([*read, *on_the_way])))
        foreign = {*map(id, _inputs_of_graph(fingerprint)), *_written(tx.output.side_effects)}
        if any(id(value) in foreign for value in values.values()):
            raise NoRegion
        typed = {guard.originating_source for guard in guards if guard.create_fn_name() == OF_TYPE}
        own, one, hooks = dict.fromkeys(_not_implied(guards, typed)), _one_object_each(), [*guards_of_hooks(guards)]
        more = [guard for guard in own.keys() - set(asked) if guard.create_fn_name() != IS_ONE]
        constants = dict.fromkeys(guard.originating_source for guard in own if guard.create_fn_name() in OF_CONSTANT)
        return cls(
            arguments=_arguments(fingerprint),
            state=_state(tx),
            names=tuple((one(first), one(other)) for first, other in _names(tx.output.side_effects, values)),
            asked=tuple((one(source), *rest) for source, *rest, guard in condition.guards if guard in own),
            checks=tuple((one(source), *rest) for source, *rest in _checks(resolve, more)),
            hooks=tuple((one(guard.originating_source), guard.create_fn.keywords["names"]) for guard in hooks),
            traced=tuple(map(one, condition.traced_sources)),
            read=tuple(one(source) for source in values if not _is_of_a_type(source, typed)),
            of_types=tuple(value for source, value in values.items() if _is_of_a_type(source, typed)),
            constants=tuple((one(source), _exact(resolve(source))) for source in constants),
            tensors=frozenset(guard.originating_source for guard in own if guard.create_fn_name() == OF_TENSOR) - layer,
            guards=tuple(_moved(guard, one) for guard in (*own, *hooks) if guard.create_fn_name() != OF_TENSOR),
        )

    def has_arguments_of(self, call: OtherCall) -> bool:
        """Return whether the arguments are alike, their sizes by symbols.

        torch compares sizes by their values, so that `[S, S]` and `[B, 1, S, S]` would differ by a guard that B != S.
        """
        return self.arguments == _arguments(call.fingerprint)

    def holds(self, call: OtherCall) -> bool:
        """Return whether the trace is valid for this call, whose arguments are alike.

        Raises:
            NoRegion: it is valid for no other call.
        """
        tx, resolve, moved = call.tx, call.resolve, call.moved
        if not _hold(call, (check for check in self.asked if moved(check[0]) is not check[0])):
            return False
        if not all(isinstance(value, torch.Tensor) for _, value in _values_of(resolve, call.captured)):
            raise NoRegion  # a number that is a tensor input of the graph
        if self.state != _state(tx) or not self.tensors.issubset(call.captured):  # the metadata of one alone is read
            return False
        written = _written(tx.output.side_effects)
        try:
            return (
                not (written and any(id(value) in written for value in self.of_types))
                and not (written and any(id(resolve(moved(source))) in written for source in self.read))
                and all(resolve(moved(first)) is resolve(moved(other)) for first, other in self.names)
                and not any(getattr(resolve(moved(source)), name) for source, names in self.hooks for name in names)
                and _hold(call, self.checks)
                and all(_exact(resolve(moved(source))) == value for source, value in self.constants)
            )
        except (AttributeError, LookupError, TypeError):  # the new layer lacks an attribute or item
            return False

    def guards_of(self, call: OtherCall) -> Iterator[Any]:
        """Yield the guards under which the trace stays valid for the layer of another call."""
        resolve = call.resolve
        for guard in self.guards:
            new = _moved(guard, call.moved)
            is_of_one = guard.create_fn_name() == IS_ONE
            if not is_of_one or resolve(new.originating_source) is resolve(new.create_fn.keywords["source_b"]):
                yield new


class OtherCall:
    """A call that may reuse a traced region (`cached`)."""

    def __init__(self, tx: Any, fingerprint: Any, cached: Any) -> None:
        self.tx, self.fingerprint = tx, fingerprint
        self.captured = [arg.source for arg in cached.subgraph_input_mapping if isinstance(arg, LiftedCapturedSource)]
        self.resolve = _Resolver(tx)
        self._sources = dict(zip(cached.arg_sources, fingerprint.arg_sources, strict=True))
        self._moved: dict[int, Source] = {}  # by id, since sources are slow to compare

    def moved(self, source: Source) -> Source:
        """Map a source that `Traced` holds to this call; like `Source.clone`, but each part is mapped once."""
        known = self._moved.get(id(source))
        if known is None:
            new = _with_parts(source, self.moved)
            known = self._moved[id(source)] = self._sources.get(new) or new
        return known


class _Resolver:
    """Look up values by source, each one once."""

    def __init__(self, tx: Any) -> None:
        self._scopes = {"G": tx.output.root_tx.f_globals, "L": tx.output.root_tx.f_locals}
        self._locals: dict[str, Any] = {}
        self._cache: dict[Source, Any] = {}

    def __call__(self, source: Source) -> Any:
        return source.get_value(self._scopes, self._locals, self._cache)


def _values_of(resolve: _Resolver, sources: Iterable[Source]) -> Iterator[tuple[Source, Any]]:
    """Yield the sources that have a value outside the trace, with it."""
    for source in sources:
        try:
            yield source, resolve(source)
        except Exception:
            continue


def _inputs_of_graph(fingerprint: Any) -> Iterator[Any]:
    """Yield the tensors among a call's arguments that are inputs of the whole graph."""
    for tag, value in fingerprint.flat_vts:
        if tag is InputTag.TENSOR and (argument := value.as_proxy().node.meta.get("grapharg")) is not None:
            yield argument.example


def _arguments(fingerprint: Any) -> Hashable:
    numbers: dict[torch.fx.Node, int] = {}
    rows: list[Hashable] = []
    for tag, value in fingerprint.flat_vts:
        if tag in (InputTag.TENSOR, InputTag.SYMNODE):
            node = value.as_proxy().node
            sizes = tuple(map(expression, getattr(node.meta.get("example_value"), "shape", ())))
            rows.append((numbers.setdefault(node, len(numbers)), node if node.op == "placeholder" else None, sizes))
        else:
            rows.append(_exact(value.value) if tag is InputTag.CONSTANT else None)
    return tuple(rows)


def _exact(value: Any) -> Hashable:
    return type(value), repr(value)


def _state(tx: Any) -> Hashable:
    """Return the global state on which operators of torch depend."""
    modes = tx.symbolic_torch_function_state
    kinds = {"cpu", getattr(torch.accelerator.current_accelerator(), "type", "cpu")}
    casts = {
        kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in sorted(kinds)
        if torch.amp.is_autocast_available(kind)
    }
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        tuple(casts.items()),
        modes.torch_function_subclass_enabled,
        modes.torch_function_mode_enabled,
        tuple(map(id, modes.mode_stack)),
    )


def _names(effects: Any, values: dict[Source, Any]) -> Iterator[tuple[Source, Source]]:
    """Yield pairs of sources of one object, of which Dynamo used and guarded one."""
    first: dict[int, Source] = {}
    for source, value in values.items():
        if value in effects:
            known = {effects[value].source or source, first.setdefault(id(value), source)}
            yield from ((source, other) for other in known if other != source)


def _checks(resolve: _Resolver, guards: Iterable[Any]) -> Iterator[tuple[Source, Any, Any]]:
    """Yield guards in the form that torch can evaluate while tracing; raise `NoRegion` for one that it cannot."""
    for guard in guards:
        handler = GUARD_VALUE_DISPATCH.get(guard.create_fn_name())
        if handler is SKIP_GUARD:
            continue
        if not isinstance(handler, GuardCheckSpec):
            raise NoRegion
        source = guard.originating_source
        yield source, handler, handler.get_metadata_fn(guard, resolve(source))


def _hold(call: OtherCall, checks: Iterable[tuple[Source, Any, Any]]) -> bool:
    """Return whether guards hold with the sources of this call; False if a source cannot be looked up."""
    try:
        return all(handler.eval_fn(call.resolve(call.moved(source)), expected) for source, handler, expected in checks)
    except Exception:
        return False


def _is_of_a_type(source: Source, typed: Collection[Source]) -> bool:
    """Return whether a value is read of nothing but types of objects whose types are guarded.

    Objects of two layers for which these guards hold have the same types, so that it is one object for both.
    """
    if isinstance(source, TypeSource) and source.base in typed:
        return True
    parts = _looked_up_in(source).values()
    return bool(parts) and all(_is_of_a_type(part, typed) for part in parts)


def _not_implied(guards: Iterable[Any], typed: Collection[Source]) -> Iterator[Any]:
    """Yield one of each kind of the guards of a layer that have to hold for another layer as well.

    What is read of types is guarded once. That modules have no hooks is guarded by itself (`guards_of_hooks`).
    """
    seen: set[Hashable] = set()
    for guard in guards:
        create, source, name = guard.create_fn, guard.originating_source, guard.create_fn_name()
        given = create.keywords.items() if isinstance(create, functools.partial) else ()
        keywords = tuple((key, value if isinstance(value, (Source, str)) else id(value)) for key, value in given)
        is_implied = is_of_hooks(guard) or (name != IS_ONE and _is_of_a_type(source, typed))
        if not is_implied and (source, name, keywords) not in seen:
            seen.add((source, name, keywords))
            yield guard


def _parts(guard: Any) -> set[Source]:
    """Return all sources of a guard, with the sources that these are looked up in."""
    sources = [guard.originating_source]
    if isinstance(guard.create_fn, functools.partial):
        sources += [value for value in guard.create_fn.keywords.values() if isinstance(value, Source)]
    return {part for source in sources for part in _with_bases(source)}


def _with_bases(source: Source) -> list[Source]:
    """Return a source and all sources that it is looked up in."""
    return [*(part for base in _looked_up_in(source).values() for part in _with_bases(base)), source]


def _looked_up_in(source: Source) -> dict[str, Source]:
    """Return the fields of a source that are sources."""
    kind: Any = type(source)
    fields = {name: getattr(source, name) for name in _fields(kind)}
    return {name: value for name, value in fields.items() if isinstance(value, Source)}


@functools.cache
def _fields(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


def _with_parts(source: Source, of: Callable[[Source], Source]) -> Source:
    """Map the sources that a source is looked up in; return the source itself if these stay."""
    parts = {name: (part, of(part)) for name, part in _looked_up_in(source).items()}
    if all(new is part for part, new in parts.values()):
        return source
    return dataclasses.replace(source, **{name: new for name, (_, new) in parts.items()})


def _one_object_each() -> Callable[[Source], Source]:
    """Return a function that maps equal sources, and parts of sources, to one object."""
    known: dict[Source, Source] = {}

    def one(source: Source) -> Source:
        if source not in known:
            new = _with_parts(source, one)
            known[source] = known.setdefault(new, new)
        return known[source]

    return one


def _moved(guard: Any, of: Callable[[Source], Source]) -> Any:
    """Map the sources of a guard; that of a duplicate input has two."""
    create = guard.create_fn
    if isinstance(create, functools.partial):
        keywords = {key: of(value) if isinstance(value, Source) else value for key, value in create.keywords.items()}
        create = functools.partial(create.func, *create.args, **keywords)
    return of(guard.originating_source).make_guard(create)
