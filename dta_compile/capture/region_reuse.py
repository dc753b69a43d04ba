"""When what Dynamo traced of one layer is what it would trace of another: what torch leaves to the user of a region.

Torch puts the nodes of a traced region where it is called again if its arguments look alike and the guards of the trace
hold, with the new layer in place of the old one. A trace depends on more:

* **Which values are one.** An argument that is given twice, or that is a weight of the layer, too, is one input of the
  region, and so would be two values of the next call. Of an object with two names only one is guarded.
* **What the trace has written.** It is carried out after the graph, so that guards see what was there before.
* **What had been looked up before the region**, and without a name: items of a list, whether there is an attribute.
* **Numbers**, which torch compares by value: `True` is 1, and `0.0` is `-0.0`.
* **The state of torch**: modes, autocast, default dtype.

And a region may be called with other modules, of which some belong to the layer and others do not: such calls are not
to be regions (`may_be_region`), nor are those after a write. For the others, `Traced` is all this of a traced call.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import torch
from torch._dynamo.guards import GUARD_VALUE_DISPATCH, SKIP_GUARD, GuardCheckSpec
from torch._dynamo.variables import (
    ListVariable,
    NewGlobalVariable,
    TupleVariable,
    UnspecializedNNModuleVariable,
    UserDefinedObjectVariable,
)
from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew, VariableTracker
from torch._dynamo.variables.invoke_subgraph import InputFingerprint, InputTag, LiftedCapturedSource, classify_vt
from torch._guards import Source

IS_ONE = "DUPLICATE_INPUT"  # of two names
OF_TENSOR = "TENSOR_MATCH"  # not copied: a tensor gets one of its own
OF_CONSTANT = frozenset({"EQUALS_MATCH", "CONSTANT_MATCH"})


class NoRegion(Exception):
    """Calls of a function that was to be a region have to be traced each time."""


def may_be_region(tx: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of a layer, the first of `args`, may be traced for others, or be what was traced of another."""
    layer = args[0].realize() if args else None
    if not isinstance(layer, UnspecializedNNModuleVariable) or layer.source is None or _has_written_to_containers(tx):
        return False
    objects: list[Any] = []

    def note(value: Any) -> None:
        value = value.realize()
        if isinstance(value, UserDefinedObjectVariable):  # modules are among them
            objects.append(value)

    VariableTracker.visit(note, [*args[1:], *kwargs.values()])
    return not objects


def fingerprint_of(args: Iterable[Any], kwargs: dict[str, Any]) -> InputFingerprint | None:
    """What torch compares of a call's arguments, for which it has Dynamo trace `pytree`: half the time of a copy.

    None: there are other containers than tuples and lists, or other things in them.
    """
    leaves: list[Any] = []

    def structure(value: Any) -> Hashable:
        value = value.realize()
        if type(value) in (TupleVariable, ListVariable):
            return type(value), tuple(map(structure, value.items))
        leaves.append(value)
        return None

    structures = tuple(map(structure, args)), tuple((name, structure(value)) for name, value in kwargs.items())
    tags = [tag for tag in map(classify_vt, leaves) if tag is not None]
    if len(tags) < len(leaves):
        return None
    sources = [leaf.source for leaf in leaves]
    return InputFingerprint(list(zip(tags, leaves, strict=True)), sources, treespec=structures)  # type: ignore[arg-type]


def _has_written_to_containers(tx: Any) -> bool:
    """Whether globals, lists, dicts and the like hold what they did not before the trace, which readers do not tell."""
    effects = tx.output.side_effects
    if effects.ignore_mutation_on_these_variables:  # for a while, as by `functional_call`
        return True
    if any(isinstance(value, NewGlobalVariable) for value, stores in effects.store_attr_mutations.items() if stores):
        return True
    for value in effects.id_to_variable.values():
        if isinstance(value.mutation_type, (AttributeMutationNew, ValueMutationNew)):
            continue
        if isinstance(value, UserDefinedObjectVariable):
            if value.is_base_vt_modified(effects):
                return True
        elif not effects.is_attribute_mutation(value) and effects.is_modified(value):
            return True
    return False


def _written(effects: Any) -> set[int]:
    """Ids of the objects whose attributes the trace has written."""
    written = {value for value, stores in effects.store_attr_mutations.items() if stores}
    return {name for name, value in effects.id_to_variable.items() if value in written}


@dataclasses.dataclass(frozen=True)
class Traced:
    """What a traced call and another one must have in common, besides what torch asks for.

    Attributes:
        arguments: which of them are one, which are inputs of the graph, and constants to the letter.
        state: of torch.
        names: two sources each of one object.
        asked: source, handler, what it expects: of torch's own condition.
        checks: the same of guards of the layer that are none of torch's own condition.
        constants: sources of what torch compares by value.
        sources: of all that has been looked up on the way to what the trace has read.
        guards: what has to hold of any other layer, too, whenever the graph runs.
    """

    arguments: Hashable
    state: Hashable
    names: tuple[tuple[Source, Source], ...]
    asked: tuple[tuple[Source, Any, Any], ...]
    checks: tuple[tuple[Source, Any, Any], ...]
    constants: tuple[Source, ...]
    sources: tuple[Source, ...]
    guards: tuple[Any, ...]

    @classmethod
    def of(cls, tx: Any, fingerprint: Any, condition: Any) -> Traced:
        """Of a call that has just been traced, for which torch's own condition is `condition`.

        Raises:
            NoRegion: it reads one of its arguments under another name, or of an object that has been written to.
        """
        resolve, layer = _Resolver(tx), set(fingerprint.arg_sources) - {None}
        asked = [guard for *_, guard in condition.guards]
        others = [guard for guard in tx.output.guards if not layer.isdisjoint(_parts(guard))]
        guards = dict.fromkeys([*asked, *others])
        read = [*condition.traced_sources, *(guard.originating_source for guard in guards)]
        way = {part for source in layer for part in _bases(source)} - layer  # to the layer itself, before the region
        on_the_way = (part for source in read for part in _bases(source) if part not in way)
        values = dict(_found(resolve, dict.fromkeys([*read, *on_the_way])))
        foreign = {*map(id, _inputs_of_graph(fingerprint)), *_written(tx.output.side_effects)}
        if any(id(value) in foreign for value in values.values()):
            raise NoRegion
        more = [guard for guard in guards.keys() - set(asked) if guard.create_fn_name() != IS_ONE]
        return cls(
            arguments=_arguments(fingerprint),
            state=_state(tx),
            names=tuple(_names(tx.output.side_effects, values)),
            asked=tuple(rest for *rest, _ in condition.guards),
            checks=tuple(_checks(resolve, more)),
            sources=tuple(values),
            constants=tuple(guard.originating_source for guard in guards if guard.create_fn_name() in OF_CONSTANT),
            guards=tuple(guard for guard in guards if guard.create_fn_name() != OF_TENSOR),
        )

    def holds(self, call: OtherCall) -> bool:
        """Whether what was traced is what would be traced of this call.

        Raises:
            NoRegion: it would be of none.
        """
        tx, resolve, moved = call.tx, call.resolve, call.moved
        if not _hold(call, (check for check in self.asked if moved(check[0]) != check[0])):
            return False
        if not all(isinstance(value, torch.Tensor) for _, value in _found(resolve, call.captured)):
            raise NoRegion  # a number that the graph takes as a tensor
        if self.arguments != _arguments(call.fingerprint) or self.state != _state(tx):
            return False
        written = _written(tx.output.side_effects)
        try:
            return (
                not (written and any(id(resolve(moved(source))) in written for source in self.sources))
                and all(resolve(moved(one)) is resolve(moved(other)) for one, other in self.names)
                and _hold(call, self.checks)
                and all(_exact(resolve(moved(source))) == _exact(resolve(source)) for source in self.constants)
            )
        except (AttributeError, LookupError, TypeError):  # the new layer has nothing of that name
            return False

    def guards_of(self, call: OtherCall) -> Iterator[Any]:
        """The guards that another layer needs for what was traced to stay what would be traced of it."""
        resolve = call.resolve
        for guard in self.guards:
            new = _moved(guard, call.moved)
            if guard.create_fn_name() != IS_ONE or resolve(new.originating_source) is resolve(_other_name(new)):
                yield new


class OtherCall:
    """A call that may be what was traced (`cached`)."""

    def __init__(self, tx: Any, fingerprint: Any, cached: Any) -> None:
        self.tx, self.fingerprint = tx, fingerprint
        self.captured = [one.source for one in cached.subgraph_input_mapping if isinstance(one, LiftedCapturedSource)]
        self.resolve = _Resolver(tx)
        self._sources = dict(zip(cached.arg_sources, fingerprint.arg_sources, strict=True))
        self._moved: dict[Source, Source] = {}

    def moved(self, source: Source) -> Source:
        """What stands for a source here; as `Source.clone` finds it, but each part is asked for once."""
        if source not in self._moved:
            parts = {name: self.moved(part) for name, part in _looked_up_in(source).items()}
            new = dataclasses.replace(source, **parts) if parts else source
            self._moved[source] = self._sources.get(new) or new
        return self._moved[source]


class _Resolver:
    """Values by source; each is looked up once."""

    def __init__(self, tx: Any) -> None:
        self._scopes = {"G": tx.output.root_tx.f_globals, "L": tx.output.root_tx.f_locals}
        self._locals: dict[str, Any] = {}
        self._cache: dict[Source, Any] = {}

    def __call__(self, source: Source) -> Any:
        return source.get_value(self._scopes, self._locals, self._cache)


def _found(resolve: _Resolver, sources: Iterable[Source]) -> Iterator[tuple[Source, Any]]:
    """Values of the sources that have any outside of the trace."""
    for source in sources:
        try:
            yield source, resolve(source)
        except Exception:
            continue


def _inputs_of_graph(fingerprint: Any) -> Iterator[Any]:
    """The tensors among a call's arguments that are inputs of the whole graph."""
    for tag, value in fingerprint.flat_vts:
        if tag is InputTag.TENSOR and (argument := value.as_proxy().node.meta.get("grapharg")) is not None:
            yield argument.example


def _arguments(fingerprint: Any) -> Hashable:
    places: dict[torch.fx.Node, int] = {}
    rows: list[Hashable] = []
    for tag, value in fingerprint.flat_vts:
        if tag in (InputTag.TENSOR, InputTag.SYMNODE):
            node = value.as_proxy().node
            rows.append((places.setdefault(node, len(places)), node if node.op == "placeholder" else None))
        else:
            rows.append(_exact(value.value) if tag is InputTag.CONSTANT else None)
    return tuple(rows)


def _exact(value: Any) -> Hashable:
    return type(value), repr(value)


def _state(tx: Any) -> Hashable:
    """What operators of torch go by that is no argument."""
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
    """Pairs of sources of one object, of which Dynamo went by one."""
    first: dict[int, Source] = {}
    for source, value in values.items():
        if value in effects:
            known = {effects[value].source or source, first.setdefault(id(value), source)}
            yield from ((source, other) for other in known if other != source)


def _checks(resolve: _Resolver, guards: Iterable[Any]) -> Iterator[tuple[Source, Any, Any]]:
    """Guards as torch evaluates them while it traces; `NoRegion` if it cannot."""
    for guard in guards:
        handler = GUARD_VALUE_DISPATCH.get(guard.create_fn_name())
        if handler is SKIP_GUARD:
            continue
        if not isinstance(handler, GuardCheckSpec):
            raise NoRegion
        source = guard.originating_source
        yield source, handler, handler.get_metadata_fn(guard, resolve(source))


def _hold(call: OtherCall, checks: Iterable[tuple[Source, Any, Any]]) -> bool:
    """Whether guards hold of what stands for their sources; what cannot be looked up is no layer of the kind."""
    try:
        return all(handler.eval_fn(call.resolve(call.moved(source)), expected) for source, handler, expected in checks)
    except Exception:
        return False


def _parts(guard: Any) -> set[Source]:
    """All sources that a guard is about."""
    sources = [guard.originating_source]
    if isinstance(guard.create_fn, functools.partial):
        sources += [value for value in guard.create_fn.keywords.values() if isinstance(value, Source)]
    return {part for source in sources for part in _bases(source)}


def _bases(source: Source) -> list[Source]:
    """A source, and all that it is looked up in."""
    return [*(part for one in _looked_up_in(source).values() for part in _bases(one)), source]


def _looked_up_in(source: Source) -> dict[str, Source]:
    """The fields of a source that are sources."""
    fields = {field.name: getattr(source, field.name) for field in dataclasses.fields(source)}
    return {name: value for name, value in fields.items() if isinstance(value, Source)}


def _moved(guard: Any, of: Callable[[Source], Source]) -> Any:
    """A guard of what stands for its sources; a guard of two names being one has two."""
    create = guard.create_fn
    if isinstance(create, functools.partial):
        keywords = {key: of(value) if isinstance(value, Source) else value for key, value in create.keywords.items()}
        create = functools.partial(create.func, *create.args, **keywords)
    return of(guard.originating_source).make_guard(create)


def _other_name(guard: Any) -> Source:
    source: Source = guard.create_fn.keywords["source_b"]
    return source
