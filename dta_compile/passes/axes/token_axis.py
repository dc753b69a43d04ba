"""token_axis: infer for every value of the lowered graph which dimensions run over sequences and tokens.

This is an abstract interpretation by the rules of `token_rules`. A value whose tokens depend on each other is `Mixed`,
with the node and the reason, so that later refusals can name the operator and the user's line.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch import fx

from dta_compile.errors import RefusalError
from dta_compile.executable.layouts import Axis, Flat, Frame, Input, InputKind, Layout
from dta_compile.ops.autograd_function import custom_function
from dta_compile.ops.mixer import MIXERS
from dta_compile.passes.axes import refusals
from dta_compile.passes.axes.custom_functions import mark_custom_functions, over_tokens
from dta_compile.passes.axes.layouts import Arguments, MixesTokens, Rule, batch_and_tokens, mixer_calls
from dta_compile.passes.axes.position_tables import index_position_tables
from dta_compile.passes.axes.shape_rules import FLATTENED
from dta_compile.passes.axes.tokenwise_operators import pointwise, rule_for
from dta_compile.passes.contracts import contract
from dta_compile.passes.graphs.operators import MATRIX_PRODUCTS, aten
from dta_compile.passes.graphs.source_lines import where
from dta_compile.passes.program import (
    FEW_TOKENS,
    AmbiguousAxes,
    GraphWithoutAttention,
    Mixed,
    Program,
    Value,
    ancestors,
    has_tensor,
    items_of,
)
from dta_compile.passes.symbols import expression, sizes


@contract(
    reads=["is_rest", "inputs", "placeholders", "draws", "asserted"],
    fills=["batch", "tokens", "values", "input_layouts", "parameter_dependent", "roots", "other_batches"],
    rewrites=["module"],
)
def token_axis(program: Program) -> None:
    """Fill `program.batch`, `.tokens`, `.values`, `.parameter_dependent`, `.roots`,
    `.input_layouts` and `.other_batches`."""
    _find_axes(program)
    mark_custom_functions(program)
    index_position_tables(program)
    values: dict[fx.Node, Value] = {}
    roots: dict[fx.Node, frozenset[fx.Node]] = {}
    dependent: set[fx.Node] = set()
    # Rules read what has been found so far.
    program.values, program.roots, program.input_layouts, program.parameter_dependent = values, roots, {}, dependent
    inputs = dict(zip(program.placeholders, program.inputs, strict=True))
    trained = (InputKind.PARAMETER, InputKind.DIFFERENTIABLE_DATA)
    dependent |= {node for node, spec in inputs.items() if spec.kind in trained}
    for node in program.graph.nodes:
        if node.op != "output" and has_tensor(node) and not dependent.isdisjoint(node.all_input_nodes):
            dependent.add(node)
    closed = len(dependent)  # rules may add to it
    for node in program.graph.nodes:
        if node.op == "placeholder":
            values[node] = _of_input(program, node, inputs[node])
            if has_tensor(node):
                roots[node] = frozenset([node])
        elif node.op != "output":
            if len(dependent) > closed and has_tensor(node) and not dependent.isdisjoint(node.all_input_nodes):
                dependent.add(node)
            values[node] = _interpret(program, node)


def _find_axes(program: Program) -> None:
    """Read the batch and token sizes off the first mixer call.

    Calls over other sizes are for the program of the epilogue, see `other_batches`.
    """
    calls = mixer_calls(program.graph)
    if not calls:
        raise GraphWithoutAttention(None)
    _require_own_keys(calls)
    batch, tokens = batch_and_tokens(calls[0])
    batch = next((other for other, length in map(batch_and_tokens, calls) if length == tokens and other != 1), batch)
    if tokens in (0, 1, 2) or batch == 0:  # 2 as a constant: `ids[:, 1:]` has a size of 1, which torch specialises
        raise GraphWithoutAttention(FEW_TOKENS)
    if not tokens.free_symbols:
        refusal = RefusalError(
            "the token size became a constant while the model was traced",
            where=_line_of_constant(calls[0], tokens) or where(calls[0]),
            expected="a symbolic size, which serves every batch",
            got=f"{tokens} tokens",
            hint="let Python not depend on the number: all tokens at once instead of slices of so many,"
            " tables for the longest sequence so far instead of the latest; a recurrence over tokens (a loop,"
            " nn.GRUCell) by dta_compile.linear_recurrence or its like; if a tensor of so many tokens comes from"
            " outside of the arguments, pass dynamic=True to torch.compile",
        )
        raise AmbiguousAxes(refusal, int(tokens))  # it may have shared its symbol with a weight that is as wide
    if any(batch.free_symbols & batch_and_tokens(call)[1].free_symbols for call in calls):
        raise AmbiguousAxes()  # not only where they are equal: `s**2 // s` is not simplified
    # A loop over sequences makes the batch size a constant: Dynamo traces anew for another one.
    program.batch = batch if batch != 1 else None
    program.tokens = tokens
    needed = ancestors(call for call in calls if batch_and_tokens(call) == (batch, tokens))
    own = (batch, tokens), (1, tokens)  # a call over one row that others read stands for all of them
    others = [call for call in calls if call not in needed or batch_and_tokens(call) not in own]
    program.other_batches = ancestors(others)
    if others:
        program.other_batches -= ancestors(call for call in calls if call not in others)


def _line_of_constant(call: fx.Node, size: sympy.Expr) -> str | None:
    """Return the user's line of the guard that made a size of the inputs this number; None if there is none.

    Next come guards on inputs with one token less, such as log-probs of labels, to which a loss ties the others.
    """
    guards = call.args[0].meta["val"].fake_mode.shape_env.guards
    for own, guard in itertools.product((size, size - 1), guards):
        symbols = guard.expr.free_symbols
        if isinstance(guard.expr, sympy.Eq) and len(symbols) == 1:
            holds_for = [guard.expr.subs(dict.fromkeys(symbols, own * times)) == sympy.true for times in (1, 2, 3, 16)]
            if holds_for == [True, False, False, False]:
                return guard.sloc.maybe_user_loc
    return None


def own_mixer_calls(program: Program) -> list[fx.Node]:
    """Return the mixer calls over the program's own batch."""
    return [call for call in mixer_calls(program.graph) if call not in program.other_batches]


def _require_own_keys(calls: list[fx.Node]) -> None:
    for call in calls:
        mixer, (_, tokens) = MIXERS[call.target], batch_and_tokens(call)
        for operand, value in mixer.over_tokens(call.args):
            if (length := sizes(value)[mixer.token_dim]) != tokens:
                hint = (
                    "pass no past_key_values while training, and all queries at once (no q.chunk()); in place of"
                    " learned keys, train adapters (LoRA), or use sinks (dta_compile.attention), as a zero key is one"
                )
                if not length.free_symbols or not tokens.free_symbols:
                    hint += (
                        "; a loop over tokens (nn.GRUCell) makes values of one number of tokens: recurrences run by"
                        " dta_compile.linear_recurrence and its like"
                    )
                raise RefusalError(
                    f"{mixer.name} over other tokens than the ones being trained (a KV cache, cross-attention, learned "
                    "keys before the tokens' own)",
                    where=where(call),
                    expected=f"{tokens} {operand.plural}, as many as tokens",
                    got=f"{length} {operand.plural}",
                    hint=hint,
                )


def _of_input(program: Program, node: fx.Node, spec: Input) -> Value:
    if not has_tensor(node):
        return None
    if spec.kind is InputKind.PARAMETER:
        return _without_labels(node.meta["val"].dim())
    if spec.kind is InputKind.DIFFERENTIABLE_DATA:
        advice = refusals.FURTHER_LAYERS if program.is_rest else refusals.GIVEN_VALUES
        return Mixed(f"the input {spec.name} requires a gradient", node, advice)
    return layout_by_shape(program, node)


@functools.cache
def _without_labels(rank: int) -> Layout:
    """Return the layout of weights of a rank, one object for all."""
    return Layout((None,) * rank)


def _interpret(program: Program, node: fx.Node) -> Value:
    if not has_tensor(node):
        return None
    roots: Any = program.roots
    value = apply_rule(program, node, program.values, program.input_layouts)
    frame = value.frame if isinstance(value, Layout) and value.has_flat else None
    if frame is not None and frame.start is not None and _is_read_flat(program, node):
        program.parameter_dependent.add(node)  # type: ignore[attr-defined]  # no other region has such values
    if node in program.parameter_dependent:
        return _in_own_batch(program, node, value) if isinstance(value, Layout) else value
    # Outside the token region any operator may run: shapes say where the axes are, and token-wise ones pass on roots.
    # Not so what gives a value axes that its arguments lack (a slice of a buffer): nothing else tells its positions.
    arguments = [arg for arg in node.all_input_nodes if has_tensor(arg)]
    shaped = layout_by_shape(program, node)
    had_axes = any(is_labelled(program.values[arg]) for arg in arguments)
    keeps_positions = value == shaped and (had_axes or not is_labelled(shaped))
    inherited = frozenset().union(*(roots[arg] for arg in arguments))
    roots[node] = inherited if keeps_positions and arguments else frozenset([node])
    return shaped


def _is_read_flat(program: Program, node: fx.Node) -> bool:
    """Return whether parameters or a mixer meet a flattened value before it is taken apart again."""
    of_parameters, whole = program.parameter_dependent, {program.batch, program.tokens}
    pending = [node]
    for value in pending:
        for user in value.users:
            mixer = MIXERS.get(user.target)
            if value in mixer.operands_of(user.args) if mixer else user in of_parameters:
                return True
            is_tensor = isinstance(user.meta.get("val"), torch.Tensor) and user not in of_parameters
            is_flat = is_tensor and any(size.free_symbols and size not in whole for size in sizes(user))
            if is_flat and rule_for(user.target) is not None and user not in pending:
                pending.append(user)
    return False


def _in_own_batch(program: Program, node: fx.Node, value: Layout) -> Layout | Mixed:
    """Return the layout of a value with a gradient; `Mixed` if its tokens are not those of the program's mixers."""
    if not value.labelled:
        return value
    if node in program.other_batches:
        return Mixed("it belongs to a batch of other sizes", node)
    if value.frame is not None and value.frame.start is None:
        return Mixed(f"the positions of its {value.frame.length} tokens are unknown", node)
    for size, axis in zip(node.meta["val"].shape, value.dims, strict=True):
        if axis is None:
            int(size)  # a guard, if it is an argument of the function: `x[..., :k]`
    return value


def is_labelled(value: Value) -> bool:
    """Return whether a value, or an item of a tuple, has a batch or token axis."""
    return any(isinstance(item, Layout) and item.labelled for item in items_of(value))


def apply_rule(program: Program, node: fx.Node, values: Mapping[fx.Node, Value], adopted: Any) -> Value:
    """Return the value of a call given those of its arguments; record layouts of dense arguments in `adopted`."""
    mixer = MIXERS.get(node.target)  # of attention, masks have a proof of their own
    operands = mixer.operands_of(node.args) if mixer else node.all_input_nodes
    tensors = [arg for arg in operands if isinstance(arg, fx.Node) and has_tensor(arg)]
    for arg in tensors:
        if isinstance(values[arg], Mixed):
            return values[arg]
    if node.target is operator.getitem:
        source = values[node.args[0]]
        return source[node.args[1]] if isinstance(source, tuple) else source
    layouts = {arg: value for arg in tensors if isinstance(value := values[arg], Layout)}
    if repeated := _repeated_for_tokens(program, node, layouts):
        return repeated
    if not any(layout.labelled for layout in layouts.values()) and mixer is None:
        return _without_axes(program, node)
    function = custom_function(node)
    rule = rule_for(node.target)
    if function is not None:
        rule = pointwise if function.over_tokens is None else over_tokens
    if function is not None and not function.is_pointwise:
        advice = refusals.POINTWISE_FUNCTION if function.is_linear else refusals.LINEAR_BACKWARD
        return Mixed(f"{node.target}: {function.reason}", node, advice)
    if rule is None:
        return Mixed(f"{node.target} has no token-wise rule", node, refusals.without_rule(node))
    arguments = Arguments(layouts, dense=lambda arg: arg not in program.parameter_dependent)
    try:
        value = rule(node, arguments)
    except MixesTokens as error:
        return Mixed(f"{node.target}: {error}", node, error.advice)
    if adopted is None:
        return value
    adopted.update({(node, arg): layout for arg, layout in arguments.adopted.items()})
    if (reason := _contradiction(program, node, value)) is not None:
        return Mixed(f"{node.target}: {reason}", node)
    if (reason := _rows_of_no_token(rule, arguments, value)) is not None:
        is_product = node.target in MATRIX_PRODUCTS
        return Mixed(f"{node.target}: {reason}", node, refusals.ROW_WEIGHTS if is_product else None)
    return value


def _contradiction(program: Program, node: fx.Node, value: Value) -> str | None:
    """Return where sizes contradict a rule's layout: each axis has its own size, and features depend on no call's.

    `[B * S, D]` viewed as `[S, B, D]` has the right axes in the wrong places.
    """
    results = node.meta["val"]
    pairs = zip(value, results, strict=True) if isinstance(value, tuple) else [(value, results)]
    for layout, result in pairs:
        if not isinstance(layout, Layout) or not isinstance(result, torch.Tensor):
            continue
        length = layout.frame.length if layout.frame else None
        for axis, size in zip(layout.dims, map(expression, result.shape), strict=True):
            if axis is None:
                if size.free_symbols:
                    return f"a feature dimension of its result has the size {size}, which depends on the batch"
                continue
            both = [program.batch or 1, length]
            counts: dict[Any, Any] = {Axis.BATCH: program.batch, Axis.TOKEN: length}
            parts = axis.factors if isinstance(axis, Flat) else [axis]
            factors = both if axis in FLATTENED else [counts.get(part, part) for part in parts]
            expected = None if None in factors else sympy.Mul(*factors)
            if expected is None or (size != expected and sympy.simplify(size - expected) != 0):
                return f"its result {layout} has {size} entries along {axis.value}, not {expected}"
    return None


def _rows_of_no_token(rule: Rule, arguments: Arguments, value: Value) -> str | None:
    """Return why an operator cannot combine one value per sequence with tokens, which chunks have of several."""
    if rule is pointwise or not isinstance(value, Layout) or value.token_dim is None:
        return None
    for arg in arguments.layouts:
        layout = arguments[arg]  # a window of tokens of constant length is one only beside others
        if layout.batch_dim is not None and layout.token_dim is None:
            return f"it takes one value per sequence, {arg.name}, to tokens"
    return None


def _repeated_for_tokens(program: Program, node: fx.Node, layouts: dict[fx.Node, Layout]) -> Layout | None:
    """Return the layout of a value expanded along axes that it lacks (a weight, positions); None if unclear."""
    shaped = layout_by_shape(program, node) if node.target is aten.expand.default else None
    if not isinstance(shaped, Layout) or shaped.frame is None:
        return None
    source = node.args[0]
    own = layouts[source]
    given = zip(own.dims, sizes(source), shaped.dims[len(shaped.dims) - len(own.dims) :], strict=True)
    same = all(size == 1 or axis is wanted for axis, size, wanted in given)
    frame = shaped.frame if own.token_dim is None else own.frame
    return Layout(shaped.dims, frame) if same and frame is not None and frame.start is not None else None


def _without_axes(program: Program, node: fx.Node) -> Value:
    """Return the layout of an operator on values without batch or token axis; `Mixed` if a weight gets one."""
    shaped = layout_by_shape(program, node)
    function = custom_function(node)
    if node in program.parameter_dependent and function is not None and not function.is_linear:
        return Mixed(f"{node.target}: {function.reason}", node, refusals.LINEAR_BACKWARD)
    if node in program.parameter_dependent and is_labelled(shaped):
        reason = f"{node.target} gives a weight a batch or token axis, as for a learned prompt among the tokens"
        return Mixed(reason, node, refusals.LEARNED_PROMPT)
    return shaped


def layout_by_shape(program: Program, node: fx.Node) -> Value:
    """Return the axes that the sizes of a dense value show: B, S, B*S, or tokens at unknown positions."""
    value = node.meta["val"]
    if isinstance(value, (tuple, list)):
        return tuple(
            Layout(tuple(axis_of_size(program, size, i)[0] for i, size in enumerate(item.shape)))
            if isinstance(item, torch.Tensor)
            else Layout(())
            for item in value
        )
    axes = [axis_of_size(program, size, i) for i, size in enumerate(value.shape)]
    dims = tuple(axis for axis, _ in axes)
    frame = next((frame for axis, frame in axes if frame is not None), None)
    if sum(axis is not None and axis.is_over_tokens for axis in dims) > 1:
        used = next(iter(node.users), node) if node.op == "placeholder" else node  # an input has no line of its own
        return Mixed(f"{node.name} has two token axes: sizes {value.shape}", used, refusals.MATRIX_OF_TOKENS)
    return Layout(dims, frame)


def axis_of_size(program: Program, size: int | torch.SymInt, dim: int) -> tuple[Axis | None, Frame | None]:
    """Return the axis, and the frame of tokens, that dimension `dim` of a dense value counts, by its size."""
    expr = expression(size)
    if expr == program.batch and (expr.free_symbols or dim == 0):  # a constant counts sequences in front only
        return Axis.BATCH, None
    if not expr.free_symbols:
        return None, None
    axis, length = Axis.TOKEN, expr
    if program.batch is not None:
        quotient = sympy.cancel(expr / program.batch)
        if quotient.as_numer_denom()[1] == 1 and program.batch not in quotient.free_symbols:
            axis, length = Axis.ROWS, quotient
    return axis, Frame(sympy.Integer(0) if length == program.tokens else None, length)
