"""Copy the nodes of calls that were traced before, and merge common subexpressions that depend on no parameter.

Layers that are copies of one another make the same calls. Tracing one takes torch a millisecond or more, most of it for
arithmetic with symbolic sizes; copying the nodes that the first call was traced to takes a twentieth of that. The key
of a call has all that these nodes depend on: the function, arguments that are no tensors, metadata of those that are,
and autocast. Calls with side effects are traced each time: those that draw random numbers, write to an argument,
create unbacked symbols, run a region of their own, or run inside of `torch.func.vmap`.

`merge_equal_values` runs at the end of `lower`: positions, rotary tables and masks are often computed in every layer,
and each such value would be an input of chunks, whose rows are gathered for every chunk.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from dta_compile.ops.library import is_random
from dta_compile.passes.graphs.nodes import First, descendants
from dta_compile.passes.graphs.storage import owner
from dta_compile.passes.graphs.subgraph import add_call
from dta_compile.passes.program import has_tensor, output_node, writes_in_place
from dta_compile.passes.symbols import SYMBOLIC, depends_on_data
from dta_compile.torch_compat.autograd import get_dynamic_layer_stack_depth
from dta_compile.torch_compat.operators import OpOverload
from dta_compile.torch_compat.tensors import DisableTorchFunction, FakeTensor, pytree
from dta_compile.torch_compat.tracing import get_proxy_mode, get_proxy_slot, snapshot_fake, track_tensor

# Types of arguments whose text says all of them.
NUMBERS = (int, float, complex, bool, str, type(None), type(Ellipsis))
PLAIN = (*NUMBERS, torch.dtype, torch.device, torch.layout, torch.memory_format)


class _NotForCopies(Exception):
    """An argument may decide the operators of a call by more than `_Arguments.facts` can describe."""


@dataclasses.dataclass(frozen=True)
class _Traced:
    """Trace of one call.

    Attributes:
        arguments: the nodes of its tensor arguments.
        nodes: the nodes that it was traced to, in order.
        results: for each tensor of the result, the index of the argument that it is, or its node.
        structure: the pytree structure of the result.
    """

    arguments: list[fx.Node]
    nodes: list[fx.Node]
    results: list[int | fx.Node]
    structure: pytree.TreeSpec


class RepeatedCalls:
    """Cache of the calls of one trace, used while `make_fx` traces."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Traced] = {}

    def run(self, call: Callable[..., Any], target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Trace `call(target, args, kwargs)`, or copy the trace of an equal call, and return the result."""
        mode = get_proxy_mode()
        if mode is None or get_dynamic_layer_stack_depth():
            return call(target, args, kwargs)
        arguments = _Arguments(mode.tracer)
        with DisableTorchFunction():  # reading a tensor's sizes is no call of the model
            try:
                key = target, arguments.facts(args), arguments.facts(kwargs), _autocast(arguments.tensors)
            except _NotForCopies:
                key = None
            if key in self._known:
                return _copied(self._known[key], arguments)
        before = next(iter(reversed(mode.tracer.graph.nodes)))
        result = call(target, args, kwargs)
        if key is not None and (traced := _traced(before, arguments, result)) is not None:
            self._known[key] = traced
        return result


class _Arguments:
    """Arguments of a call.

    Attributes:
        nodes: the nodes of its tensor arguments, without repetition.
        tensors: the tensors of these nodes.
    """

    def __init__(self, tracer: Any) -> None:
        self.tracer = tracer
        self.nodes: list[fx.Node] = []
        self.tensors: list[torch.Tensor] = []

    def facts(self, value: Any) -> Hashable:
        """Return all that operators may depend on of an argument, as part of a key."""
        return key_of(value, self._key)

    def _key(self, value: Any) -> Hashable:
        if isinstance(value, torch.Tensor):
            return self._of_tensor(value)
        if isinstance(value, SYMBOLIC):
            return type(value), value.node.expr
        raise _NotForCopies

    def _of_tensor(self, value: torch.Tensor) -> Hashable:
        slot = get_proxy_slot(value, self.tracer, None)
        if type(value) is not FakeTensor or value.constant is not None or slot is None or slot.constant is not None:
            raise _NotForCopies
        node = slot.proxy.node
        if node not in self.nodes:  # a call may read a tensor twice
            self.nodes.append(node)
            self.tensors.append(value)
        return self.nodes.index(node), facts_of(value)


def key_of(value: Any, key: Callable[[Any], Hashable]) -> Hashable:
    """Return a key that is equal for equal arguments; `key` gives that of leaves which are not `PLAIN`."""
    if isinstance(value, PLAIN):
        return type(value), repr(value)  # -0.0 == 0.0
    if isinstance(value, (tuple, list)):
        return type(value), *(key_of(item, key) for item in value)
    if isinstance(value, Mapping):
        return type(value), *((name, key_of(item, key)) for name, item in value.items())
    if isinstance(value, slice):
        return slice, *(key_of(bound, key) for bound in (value.start, value.stop, value.step))
    return key(value)


def facts_of(value: torch.Tensor) -> Hashable:
    sizes = (*value.shape, *value.stride(), value.storage_offset())
    numbers = tuple(size if isinstance(size, int) else size.node.expr for size in sizes)
    flags = value.requires_grad, value.is_conj(), value.is_neg(), isinstance(value, torch.nn.Parameter)
    return numbers, value.dtype, value.device, value.layout, flags


def _autocast(tensors: Sequence[torch.Tensor]) -> Hashable:
    devices = filter(torch.amp.is_autocast_available, dict.fromkeys(value.device.type for value in tensors))
    return tuple((torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in devices)


def _traced(before: fx.Node, arguments: _Arguments, result: Any) -> _Traced | None:
    """Return the trace of a call, all nodes after `before`; None: it cannot be copied."""
    nodes, node = list[fx.Node](), before.next
    while node.op != "root":
        nodes.append(node)
        node = node.next
    outside = set(arguments.nodes)
    if not outside or not all(_is_for_copies(node, outside | set(nodes), outside) for node in nodes):
        return None
    leaves, structure = pytree.tree_flatten(result)
    origins = [_origin(leaf, nodes, arguments) for leaf in leaves]
    results = [origin for origin in origins if origin is not None]
    return _Traced(arguments.nodes, nodes, results, structure) if origins and len(results) == len(origins) else None


def _origin(leaf: Any, nodes: Sequence[fx.Node], arguments: _Arguments) -> int | fx.Node | None:
    """Return the index of the argument that a result is, or its node; None: it is neither."""
    for i, tensor in enumerate(arguments.tensors):
        if tensor is leaf:
            return i
    slot = get_proxy_slot(leaf, arguments.tracer, None) if type(leaf) is FakeTensor else None
    if slot is None or slot.constant is not None or slot.proxy.node not in nodes:
        return None
    return slot.proxy.node


def _is_for_copies(node: fx.Node, inside: set[fx.Node], arguments: set[fx.Node]) -> bool:
    """Return whether a copy of a node computes the same; nodes outside the call may be read only if they are sizes."""
    if node.op != "call_function" or is_random(node.target):
        return False
    if writes_in_place(node) and not arguments.isdisjoint(node.all_input_nodes):
        return False
    if "unbacked_bindings" in node.meta or _selects(node):  # each call needs unbacked symbols of its own
        return False
    return all(arg in inside or not has_tensor(arg) for arg in node.all_input_nodes)


def _selects(node: fx.Node) -> bool:
    """Return whether an operator selects as many entries as data say: a second one on a mask binds no new symbol."""
    is_of_data = torch.Tag.dynamic_output_shape in getattr(node.target, "tags", ())
    return is_of_data and any(map(depends_on_data, node.meta["val"].shape))


def _copied(known: _Traced, arguments: _Arguments) -> Any:
    copies, tracer = dict(zip(known.arguments, arguments.nodes, strict=True)), arguments.tracer
    line = fx.traceback.get_current_meta().get("stack_trace")
    for node in known.nodes:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda arg: copies.get(arg, arg))
        copies[node] = copy = add_call(tracer.graph, node.target, args, kwargs)
        copy.meta.update(node.meta)
        if line:
            copy.meta["stack_trace"] = line

    def result(origin: int | fx.Node) -> torch.Tensor:
        if isinstance(origin, int):
            return arguments.tensors[origin]
        value = snapshot_fake(origin.meta["val"])
        assert value is not None
        track_tensor(value, tracer.proxy(copies[origin]), constant=None, tracer=tracer)
        return value

    return pytree.tree_unflatten(list(map(result, known.results)), known.structure)


def merge_equal_values(graph: fx.Graph, parameters: Iterable[fx.Node]) -> None:
    """Merge common subexpressions, except values that depend on `parameters` and owners of the graph's results, whose
    memory is the caller's."""
    excluded = descendants(graph, parameters) | {owner(value) for value in output_node(graph).all_input_nodes}
    constants: dict[Hashable, fx.Node] = {}
    for node in graph.find_nodes(op="get_attr"):
        node.replace_all_uses_with(constants.setdefault(_constant(node), node))
    first = First(excluded | {node for node in graph.nodes if not _is_pure(node)})
    for node in list(graph.nodes):
        if node.op == "call_function" and (same := first.like(node)) is not node:
            node.replace_all_uses_with(same)
            graph.erase_node(node)


def _constant(node: fx.Node) -> Hashable:
    """Return a key that is equal for constants with the same number: layers make their own."""
    value = getattr(node.graph.owning_module, str(node.target), None)
    if type(value) is not torch.Tensor or value.numel() != 1 or value.device.type != "cpu":
        return node
    return value.dtype, value.shape, value.stride(), repr(value.item())


def _is_pure(node: fx.Node) -> bool:
    """Return whether a node is a pure function of its arguments."""
    target = node.target
    is_torchs_own = not isinstance(target, OpOverload) or target.namespace in ("aten", "prims")
    return is_torchs_own and not is_random(target) and not node.is_impure()
