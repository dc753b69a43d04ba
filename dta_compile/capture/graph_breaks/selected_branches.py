"""Trace branches that a model skips where it has selected no rows, as experts do that no token has chosen.

    if mask.any():                    y[mask] += f(x[mask])
    rows, k = torch.where(chosen == 3)
    if rows.numel() == 0: continue    y.index_add_(0, rows, f(x[rows]))

Dynamo would end the graph at such a condition, since it depends on data. Over no rows the branch does nothing, so the
graph always takes it. That is proven where the branch ends: what it writes to values from before it, it writes at
positions of the selection, no other variable that is read later has changed, and what it computes of no rows is neither
an error nor a gradient of NaN (`empty_selections`). Otherwise the call is traced again, and the graph ends at the
condition, unless it is about an input (`questions`). Parameters that a skipped branch would have used get gradients of
zero, not none.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import fx

from dta_compile.capture.dynamo import restarts
from dta_compile.capture.graph_breaks import empty_selections, hit_loops, questions, selections
from dta_compile.ops.library import is_random
from dta_compile.passes.program import memory, name_of
from dta_compile.torch_compat import as_wrapper
from dta_compile.torch_compat.dynamo import (
    BaseListVariable,
    ConstantVariable,
    ContextWrappingVariable,
    LazyVariableTracker,
    SymNodeVariable,
    TensorVariable,
    VariableTracker,
)

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
CONDITIONS = (TensorVariable, SymNodeVariable)


@dataclasses.dataclass
class _Branch:
    """A branch that is being traced.

    Attributes:
        selection: what it works on; the model skips the branch where it is empty.
        condition: what the model skips it by; None in a loop.
        begin: the instruction that it begins behind.
        end: where the branch ends, and where the model goes on that skips it (see `_place`).
        last: the last node before the branch.
        stack, variables, effects: of the translator before the branch; iterators of loops are on the stack.
        known: by id, all values of Python's that can be reached before the branch.
    """

    selection: Hashable
    condition: fx.Node | None
    begin: Any
    end: Any
    last: fx.Node
    stack: list[Any]
    variables: dict[str, Any]
    effects: Any
    known: dict[int, Any]


def taking_branches(step: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Wrap Dynamo's step over one instruction: begin a branch at a condition, and prove it at its end."""

    def step_taking_branches(self: Any) -> bool:
        if self.instruction_pointer is not None:
            instruction, branches = self.instructions[self.instruction_pointer], self.__dict__.get("_dta_branches")
            while branches and branches[-1].end == _place(self, instruction):
                if not _does_nothing_over_no_rows(self, branches.pop()):
                    restarts.trace_again_without(restarts.BRANCHES)
                _open(self.output).pop()
            if instruction.opname in STEPS and self.stack and restarts.takes_branches(self.output):
                STEPS[instruction.opname](self, instruction)
            if instruction.opname in JUMPS and self.stack and isinstance(self.stack[-1], TensorVariable):
                question = questions.asked(self, self.stack[-1].as_proxy().node)
                if question is not None:
                    self.stack[-1] = ConstantVariable.create(question.guarded(self))
        return step(self)

    return step_taking_branches


@as_wrapper
def refusing_open_branches(compile_subgraph: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap Dynamo's end of a graph: it must not be within a branch, which would then be taken whatever is selected."""
    if _open(self):
        restarts.trace_again_without(restarts.BRANCHES)
    return compile_subgraph(self, *args, **kwargs)


@as_wrapper
def noting_mutations(mutation: Callable[..., None], self: Any, var: Any) -> None:
    """Wrap what Dynamo calls where a list, a dictionary or the like changes, to note it for open branches."""
    for branch in _open(self.output_graph_weakref()):
        if id(var) in branch.known and not isinstance(var, hit_loops.HitIterator):
            restarts.trace_again_without(restarts.BRANCHES)
    mutation(self, var)


def _open(output: Any) -> list[_Branch]:
    """Return the branches of all functions of a graph that are being traced."""
    return output.__dict__.setdefault("_dta_open_branches", [])


def _at_jump(translator: Any, jump: Any) -> None:
    """Begin a branch at a jump that depends on whether a selection is empty: replace the condition by a constant."""
    if not isinstance(translator.stack[-1], CONDITIONS):
        return
    condition = translator.stack[-1].as_proxy().node
    if (is_true := selections.known(condition)) is not None:
        translator.stack[-1] = ConstantVariable.create(is_true)
    elif (emptiness := selections.emptiness(condition)) is not None:
        selection, is_true = emptiness  # and whether the condition is true if something is selected
        question = questions.asked(translator, condition)
        if question is not None and question.answer != is_true:
            return  # nothing is selected in this call: what the branch does then may not even be defined
        if any(branch.begin is jump for branch in translator.__dict__.get("_dta_branches", ())):
            restarts.trace_again_without(restarts.BRANCHES)  # it is a loop, such as `while running.any()`
        following = translator.instructions[translator.instruction_pointer + 1]
        end = jump.target if JUMPS[jump.opname] != is_true else following
        _begin(translator, selection, condition, jump, end, translator.stack[:-1])
        translator.stack[-1] = ConstantVariable.create(is_true)


def _at_loop(translator: Any, _: Any) -> None:
    """Let a loop over the experts that tokens have chosen run over all of them."""
    if isinstance(translator.stack[-1], TensorVariable):
        translator.stack[-1] = hit_loops.hit_iterator(translator, translator.stack[-1]) or translator.stack[-1]


def _at_turn(translator: Any, instruction: Any) -> None:
    """Begin a turn of such a loop, a branch that ends where the next one begins."""
    iterator = translator.stack[-1]
    if isinstance(iterator, hit_loops.HitIterator) and iterator.index < len(iterator.items):
        selection = iterator.selection_of(iterator.index)
        if selection is None:
            restarts.trace_again_without(restarts.BRANCHES)
        _begin(translator, selection, None, instruction, instruction, [*translator.stack])


def _at_with(translator: Any, instruction: Any) -> None:
    """Note which instructions handle exceptions within a block of one of torch's contexts: they raise them again."""
    if isinstance(translator.stack[-1], ContextWrappingVariable):
        entry = getattr(translator.instructions[translator.instruction_pointer + 1], "exn_tab_entry", None)
        handler = instruction.target if entry is None else entry.target
        translator.__dict__.setdefault("_dta_raising_again", set()).add(handler)


def _at_yield(translator: Any, _: Any) -> None:
    """Let no other function run within a branch of a generator."""
    if translator.__dict__.get("_dta_branches"):
        restarts.trace_again_without(restarts.BRANCHES)


STEPS: dict[str, Callable[[Any, Any], None]] = {
    **dict.fromkeys(JUMPS, _at_jump),
    "GET_ITER": _at_loop,
    "FOR_ITER": _at_turn,
    "YIELD_VALUE": _at_yield,
    **dict.fromkeys(("BEFORE_WITH", "SETUP_WITH"), _at_with),
    "BINARY_SUBSCR": hit_loops.specialise_subscript,
}


def _begin(
    translator: Any, selection: Hashable, condition: fx.Node | None, begin: Any, end: Any, stack: list[Any]
) -> None:
    """Begin a branch that the model skips where a selection is empty, to go on at an instruction."""
    nodes = translator.output.graph.nodes
    for _ in range(len(translator.instructions)):
        if end.opname in ALWAYS:
            end = end.target
        elif end.opname in IDLE:
            end = translator.instructions[translator.indexof[end] + 1]
        else:
            break
    variables = {name: _state(value) for name, value in translator.symbolic_locals.items()}
    last = next(iter(reversed(nodes)))
    known, place, effects = _reachable(translator), _place(translator, end), _effects(translator.output)
    branch = _Branch(selection, condition, begin, place, last, stack, variables, effects, known)
    translator.__dict__.setdefault("_dta_branches", []).append(branch)  # the innermost last
    _open(translator.output).append(branch)


def _reachable(translator: Any) -> dict[int, Any]:
    """Return, by id, all values that frames hold, on their stacks or in variables, and what these consist of."""
    roots, reached = [translator.output.side_effects.store_attr_mutations], dict[int, Any]()
    roots.append(translator.output.side_effects.id_to_variable)
    while translator is not None:
        roots += [translator.symbolic_locals, translator.stack]
        translator = translator.parent
    for root in roots:
        VariableTracker.visit(lambda _: None, root, reached)
    return reached


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
    """Return what Dynamo knows of changes to attributes and cells; see `noting_mutations` for lists and the like."""
    return [
        (id(owner), sorted((name, id(value)) for name, value in values.items()))
        for owner, values in output.side_effects.store_attr_mutations.items()
    ]


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
        if _draws(node):
            return False
        for written in selections.written_by(node):
            if written is None or not (_is_new(written, own) or _writes_selected(node, branch.selection)):
                return False
    if not empty_selections.are_harmless(nodes, branch.selection, branch.condition):
        return False
    returns = isinstance(branch.end, tuple)
    for name, value in translator.symbolic_locals.items():
        before, after = branch.variables.get(name), _state(value)
        while isinstance(after, fx.Node) and after in own and _writes_selected(after, branch.selection):
            after = after.args[0]
        if before is not after and before != after and not returns and _is_read(translator, name):
            return False
    return True


def _draws(node: fx.Node) -> bool:
    """Return whether a node draws random numbers although nothing is selected; dropout of no rows draws none."""
    name = name_of(node)
    if not name or "dropout" in name or name == "scaled_dot_product_attention":
        return False
    packet = getattr(torch.ops.aten, name, None)
    return packet is not None and any(is_random(getattr(packet, overload)) for overload in packet.overloads())


def _is_read(translator: Any, name: str) -> bool:
    """Return whether a variable may be read from the current instruction on, before it is assigned again."""
    pending, seen = [translator.instruction_pointer], set[int]()
    raising_again = translator.__dict__.get("_dta_raising_again", ())
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
        targets = [target for target in targets if target is not None and target not in raising_again]
        pending += [translator.indexof[target] for target in targets]
        if instruction.opname not in ALWAYS | ENDS:
            pending.append(number + 1)
    return False


def _is_new(node: fx.Node, own: set[fx.Node]) -> bool:
    """Return whether a value was made in a branch, in memory of its own."""
    if node not in own:
        return False
    same = [source for source in node.all_input_nodes if memory(source) & memory(node)]
    return node not in memory(node) and all(_is_new(source, own) for source in same)


def _writes_selected(node: fx.Node, selection: Hashable) -> bool:
    """Return whether a node writes to its first argument at positions of a selection."""
    name = name_of(node).removesuffix("_")
    place = 1 if name in ("setitem", "index_put") else 2  # behind a dimension
    if name not in WRITES or len(node.args) <= place or not isinstance(node.args[0], fx.Node):
        return False
    index = node.args[place]
    indices = index if isinstance(index, (tuple, list)) else (index,)
    return any(isinstance(part, fx.Node) and selections.selection_of(part) == selection for part in indices)
