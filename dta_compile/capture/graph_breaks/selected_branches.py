"""Trace branches that a model skips where it has selected no rows, as experts do that no token has chosen.

    if mask.any():                    y[mask] += f(x[mask])
    rows, k = torch.where(chosen == 3)
    if rows.numel() == 0: continue    y.index_add_(0, rows, f(x[rows]))

Dynamo would end the graph at such a condition, since it depends on data. Over no rows the branch does nothing, so the
graph always takes it. That is proven where the branch ends: what it writes to values from before it, it writes at
positions of the selection, and no other variable that is read later has changed. Otherwise the call is traced again,
and the graph ends at the condition. Parameters that a skipped branch would have used get gradients of zero, not none.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
import re
import types
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import fx

from dta_compile.capture import dynamo
from dta_compile.passes.program import name_of
from dta_compile.torch_compat.dynamo import (
    BaseListVariable,
    ConstantVariable,
    LazyVariableTracker,
    SymNodeVariable,
    TensorVariable,
)
from dta_compile.torch_compat.operators import HigherOrderOperator, OpOverload, OpOverloadPacket

# By name, whether a conditional jump jumps if its condition is true.
JUMPS = {
    f"POP_JUMP_{direction}IF_{truth}": truth == "TRUE"
    for direction in ("", "FORWARD_", "BACKWARD_")
    for truth in ("TRUE", "FALSE")
}
ALWAYS = {"JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_ABSOLUTE", "JUMP_BACKWARD_NO_INTERRUPT"}
ENDS = {"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"}
IDLE = {"NOP", "NOT_TAKEN", "EXTENDED_ARG", "CACHE"}
# Functions and methods that write at an index among their arguments; in place with an underscore behind.
WRITES = {"setitem", "index_add", "index_copy", "index_put", "index_fill", "scatter", "scatter_add"}
IN_PLACE = {operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.iand, operator.ior, operator.ixor}
# What has entries exactly where its first argument has some.
AS_MANY = {"squeeze", "unsqueeze", "flatten", "view", "reshape", "long", "to", "contiguous", "unbind", "clone", "cpu"}
CONDITIONS = (TensorVariable, SymNodeVariable)
COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    name: getattr(operator, name) for name in ("gt", "ge", "eq", "ne", "lt", "le")
}


@dataclasses.dataclass
class _Branch:
    """A branch that is being traced.

    Attributes:
        selection: what it works on; the model skips the branch where it is empty.
        end: where the branch ends, and where the model goes on that skips it (see `_place`).
        last: the last node before the branch.
        stack, variables, effects: of the translator before the branch; iterators of loops are on the stack.
    """

    selection: Hashable
    end: Any
    last: fx.Node
    stack: list[Any]
    variables: dict[str, Any]
    effects: Any


def taking_branches(step: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Wrap Dynamo's step over one instruction: begin a branch at a condition, and prove it at its end."""

    @functools.wraps(step)
    def step_taking_branches(self: Any) -> bool:
        if self.instruction_pointer is not None:
            instruction, branches = self.instructions[self.instruction_pointer], self.__dict__.get("_dta_branches")
            while branches and branches[-1].end == _place(self, instruction):
                if not _does_nothing_over_no_rows(self, branches.pop()):
                    dynamo.trace_without_branches()
                _open(self.output).pop()
            if instruction.opname in JUMPS and self.stack and isinstance(self.stack[-1], CONDITIONS):
                _begin(self, instruction)
        return step(self)

    return step_taking_branches


def refusing_open_branches(compile_subgraph: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Dynamo's end of a graph: it must not be within a branch, which would then be taken whatever is selected."""

    @functools.wraps(compile_subgraph)
    def compile_subgraph_outside(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _open(self):
            dynamo.trace_without_branches()
        return compile_subgraph(self, *args, **kwargs)

    return compile_subgraph_outside


def _open(output: Any) -> list[_Branch]:
    """Return the branches of all functions of a graph that are being traced."""
    return output.__dict__.setdefault("_dta_open_branches", [])


def _begin(translator: Any, jump: Any) -> None:
    """Begin a branch at a jump that depends on whether a selection is empty: replace the condition by a constant."""
    if not dynamo.takes_branches(translator.output):
        return
    found, nodes = _emptiness(translator.stack[-1].as_proxy().node), translator.output.graph.nodes
    if found is None:
        return
    selection, is_true = found  # and whether the condition is true if something is selected
    following = translator.instructions[translator.instruction_pointer + 1]
    end = jump.target if JUMPS[jump.opname] != is_true else following
    for _ in range(len(translator.instructions)):
        if end.opname in ALWAYS:
            end = end.target
        elif end.opname in IDLE:
            end = translator.instructions[translator.indexof[end] + 1]
        else:
            break
    variables = {name: _state(value) for name, value in translator.symbolic_locals.items()}
    stack, last = translator.stack[:-1], next(reversed(nodes))
    branch = _Branch(selection, _place(translator, end), last, stack, variables, _effects(translator.output))
    translator.__dict__.setdefault("_dta_branches", []).append(branch)  # the innermost last
    _open(translator.output).append(branch)
    translator.stack[-1] = ConstantVariable.create(is_true)


def _place(translator: Any, instruction: Any) -> Any:
    """Return an instruction, or what it returns if that is a constant: a function may do so at several places."""
    if instruction.opname == "RETURN_CONST":
        return "return", instruction.argval
    if instruction.opname == "LOAD_CONST":
        following = translator.instructions[translator.indexof[instruction] + 1]  # no function ends with a constant
        if following.opname == "RETURN_VALUE":
            return "return", instruction.argval
    return instruction


def _state(value: Any) -> Any:
    """Return what tells whether a variable has changed."""
    if isinstance(value, LazyVariableTracker):
        return value
    if isinstance(value, (TensorVariable, SymNodeVariable)):
        return value.as_proxy().node
    if isinstance(value, ConstantVariable):
        return type(value.value), value.value
    if isinstance(value, BaseListVariable):
        return (type(value), *map(_state, value.items))
    return value


def _effects(output: Any) -> Any:
    """Return what Dynamo knows of changes to objects: attributes, cells, lists and dictionaries."""
    effects = output.side_effects
    stored = [
        (id(owner), sorted((name, id(value)) for name, value in values.items()))
        for owner, values in effects.store_attr_mutations.items()
    ]
    changed = [key for key, one in effects.id_to_variable.items() if getattr(one.mutation_type, "is_modified", False)]
    return stored, changed


def _does_nothing_over_no_rows(translator: Any, branch: _Branch) -> bool:
    """Return whether a branch that ends here leaves everything as it was if its selection is empty."""
    if [*map(id, translator.stack)] != [*map(id, branch.stack)] or _effects(translator.output) != branch.effects:
        return False
    nodes, node = list[fx.Node](), branch.last.next
    while node.op != "root":
        nodes.append(node)
        node = node.next
    own = set(nodes)
    for node in nodes:
        for written in _written(node):
            if written is None or not (_is_new(written, own) or _writes_selected(node, branch.selection)):
                return False
    returns = isinstance(branch.end, tuple)
    for name, value in translator.symbolic_locals.items():
        before, after = branch.variables.get(name), _state(value)
        while isinstance(after, fx.Node) and after in own and _writes_selected(after, branch.selection):
            after = after.args[0]
        if before is not after and before != after and not returns and _is_read(translator, name):
            return False
    return True


def _is_read(translator: Any, name: str) -> bool:
    """Return whether a variable may be read from the current instruction on, before it is assigned again."""
    pending, seen = [translator.instruction_pointer], set[int]()
    while pending:
        number = pending.pop()
        if number in seen or number >= len(translator.instructions):
            continue
        seen.add(number)
        instruction = translator.instructions[number]
        names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
        uses = re.findall("(LOAD|STORE|DELETE)_(?:FAST|DEREF|CLOSURE)", instruction.opname)
        uses = [use for use, one in zip(uses, names, strict=False) if one == name]
        if uses and uses[0] == "LOAD":
            return True
        if uses:
            continue
        entry = getattr(instruction, "exn_tab_entry", None)
        targets = [instruction.target, entry.target if entry is not None else None]
        pending += [translator.indexof[target] for target in targets if target is not None]
        if instruction.opname not in ALWAYS | ENDS:
            pending.append(number + 1)
    return False


def _written(node: fx.Node) -> Iterator[fx.Node | None]:
    """Yield the values that a node writes to; None if it may be any."""
    name = name_of(node)
    if node.op == "call_module" or isinstance(node.target, HigherOrderOperator) or "out" in node.kwargs:
        yield None
    elif node.op in ("call_method", "call_function"):
        is_method = name.endswith("_") and not name.endswith("__")
        if is_method or node.target in (operator.setitem, *IN_PLACE) or _is_in_place(node):
            yield node.args[0] if isinstance(node.args[0], fx.Node) else None
        overloads = [node.target]
        if isinstance(node.target, OpOverloadPacket):
            overloads = [getattr(node.target, overload) for overload in node.target.overloads()]
        schemas = [one._schema for one in overloads if isinstance(one, OpOverload)]
        if name in ("batch_norm", "instance_norm") or any(schema.is_mutable for schema in schemas):
            yield None


def _is_in_place(node: fx.Node) -> bool:
    """Return whether a function is called with `inplace`, by name or by its place."""
    if "inplace" in node.kwargs or not isinstance(node.target, types.FunctionType):
        return bool(node.kwargs.get("inplace"))
    names = list(inspect.signature(node.target).parameters)
    return "inplace" in names and node.args[names.index("inplace") :][:1] not in ((), (False,))


def _is_new(node: fx.Node, own: set[fx.Node]) -> bool:
    """Return whether a value was made in a branch, in memory of its own."""
    if node not in own:
        return False
    memory = _memory(node)
    same = [source for source in node.all_input_nodes if _memory(source) & memory]
    return bool(memory) and all(_is_new(source, own) for source in same)


def _memory(node: fx.Node) -> set[int]:
    value = node.meta.get("example_value")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return {one.untyped_storage()._cdata for one in values if isinstance(one, torch.Tensor)}


def _writes_selected(node: fx.Node, selection: Hashable) -> bool:
    """Return whether a node writes to its first argument at positions of a selection."""
    name = name_of(node).removesuffix("_")
    place = 1 if name in ("setitem", "index_put") else 2  # behind a dimension
    if name not in WRITES or len(node.args) <= place or not isinstance(node.args[0], fx.Node):
        return False
    index = node.args[place]
    indices = index if isinstance(index, (tuple, list)) else (index,)
    return any(isinstance(part, fx.Node) and _selection(part) == selection for part in indices)


def _emptiness(node: fx.Node) -> tuple[Hashable, bool] | None:
    """Return the selection that a condition asks about, and whether the condition is true if it is not empty."""
    name = name_of(node)
    if name == "any" and len(node.args) == 1 and not node.kwargs:
        return _found(_mask(node.args[0]), True)
    if name in COMPARISONS and len(node.args) == 2 and isinstance(node.args[0], fx.Node):
        bound = node.args[1]
        if type(bound) is not int:
            return None
        none, one, many = (COMPARISONS[name](count, bound) for count in (0, 1, 1 << 40))
        return _found(_counted(node.args[0]), one) if none != one == many else None
    return _found(_counted(node), True)


def _found(selection: Hashable, is_true: bool) -> tuple[Hashable, bool] | None:
    return None if selection is None else (selection, is_true)


def _counted(node: Any) -> Hashable:
    """Return the selection that a number counts the entries of, or a multiple; None for other numbers."""
    name, source = name_of(node), node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return None
    if name == "sum" and len(node.args) == 1 and not node.kwargs and _is_bool(source):
        return _mask(source)
    if name == "count_nonzero" and len(node.args) == 1 and _is_bool(source):
        return _mask(source)
    if name == "numel" or (name in ("size", "sym_size") and node.args[1:] == (0,)):
        return _selection(source)
    if name in ("item", "int", "to", "cpu"):
        return _counted(source)
    if name == "getitem" and type(node.args[1]) is int:
        if name_of(source) in ("size", "shape") and node.args[1] == 0:
            return _selection(source.args[0])
        while name_of(source) in ("cpu", "to") or (name_of(source) == "getitem" and isinstance(source.args[1], slice)):
            if name_of(source) == "getitem" and source.args[1].start not in (0, None):
                return None
            source = source.args[0]
        is_count = name_of(source) == "bincount" and source.kwargs.get("weights") is None and len(source.args) == 1
        if is_count and not _is_written(source.args[0]):
            return "eq", _entries(source.args[0]), node.args[1]
    return None


def _selection(node: fx.Node) -> Hashable:
    """Return the selection without which an index has no entries; None if there is none."""
    name, source = name_of(node), node.args[0] if node.args else None
    if _is_bool(node):
        return _mask(node)
    if not isinstance(source, fx.Node):
        return None
    if name in ("where", "nonzero", "argwhere") and len(node.args) == 1:
        return _mask(source)
    if name == "getitem":
        index = node.args[1]
        parts = [part for part in (index if isinstance(index, tuple) else (index,)) if isinstance(part, fx.Node)]
        chosen = next((one for one in map(_selection, parts) if one is not None), None)
        return _selection(source) if chosen is None and not parts else chosen
    return _selection(source) if name in AS_MANY and not _is_bool(source) else None  # a mask as numbers picks no rows


def _mask(node: fx.Node) -> Hashable:
    """Return a name for the entries where a mask is true, the same for masks that are computed alike.

    The entries of `chosen == 3` are those that `bincount(chosen.flatten())[3]` counts. None if anything writes to the
    mask, or to what it is computed from: then it may be another one later.
    """
    if _is_written(node):
        return None
    if not _is_bool(node) or node.op not in ("call_function", "call_method") or node.kwargs:
        return node
    values = [arg for arg in node.args if isinstance(arg, fx.Node)]
    if any(_is_written(value) for value in values):
        return None
    if name_of(node) == "eq" and len(node.args) == 2 and len(values) == 1 and type(node.args[1]) is int:
        return "eq", _entries(values[0]), node.args[1]
    parts = [_mask(arg) if isinstance(arg, fx.Node) else repr(arg) for arg in node.args]
    return None if None in parts else (name_of(node), *parts)


def _is_written(node: fx.Node) -> bool:
    """Return whether anything writes to the memory of a value."""
    memory = _memory(node)
    while (base := next((one for one in node.all_input_nodes if _memory(one) & memory), None)) is not None:
        node = base
    pending, seen = [node], set[fx.Node]()
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            if any(written is None or written is node for user in node.users for written in _written(user)):
                return True
            pending += [user for user in node.users if _memory(user) & memory]
    return False


def _entries(node: fx.Node) -> fx.Node:
    """Return a value with the same entries in another shape, as far back as it goes."""
    while name_of(node) in ("flatten", "view", "reshape", "contiguous") and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _is_bool(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value.dtype == torch.bool
