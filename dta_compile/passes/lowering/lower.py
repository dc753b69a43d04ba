"""Pass `lower`: trace Dynamo's graph of Python-level calls to a functional ATen graph with one opaque attention op.

Every later pass sees a closed set of functional operators with fake tensors of symbolic shape in `meta["val"]`,
and in `meta["stack_trace"]` the user's line. In-place operations are functionalised, autocast is written out as
casts, and values that autograd must not track (no_grad regions, `.detach()`) are marked by `aten.detach`.

With the same seed a compiled call has eager's random numbers: each is drawn once, over the same shape, in order. The
prologue runs before the epilogue and both run once per call, so the order is eager's unless chunks need a random number
that is drawn after one that only the epilogue can draw. Chunks never draw: tokens that rollouts share are computed
once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import types
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.overrides import TorchFunctionMode

from dta_compile.attributes import attribute_set
from dta_compile.errors import FinalRefusal, RefusalError
from dta_compile.executable.layouts import Input, InputKind
from dta_compile.ops import autograd_function
from dta_compile.ops.collectives import SAME_ON_RANKS
from dta_compile.ops.library import STOP_GRADIENT, DrawCapture, is_random
from dta_compile.passes.axes.layouts import mixer_calls
from dta_compile.passes.contracts import contract
from dta_compile.passes.graphs.nodes import descendants, erase_unused, sizes_from_inputs
from dta_compile.passes.graphs.operators import aten
from dta_compile.passes.graphs.source_lines import where
from dta_compile.passes.graphs.storage import write_to_new_values
from dta_compile.passes.lowering import decompositions
from dta_compile.passes.lowering.attention.choices import recognise_choices
from dta_compile.passes.lowering.attention.recognise import recognise_attention
from dta_compile.passes.lowering.cumulative_sums import sums_to_recurrences
from dta_compile.passes.lowering.decompositions import capture_attention
from dta_compile.passes.lowering.experts.selected_rows import spread_selected_rows
from dta_compile.passes.lowering.experts.sorted_slots import unsort_slots
from dta_compile.passes.lowering.gradient_flow import (
    CapturedInterpreter,
    Flow,
    GradientFlow,
    gradient_flow,
    tensors,
    was_written,
    whole,
)
from dta_compile.passes.lowering.joined_tokens import join_tokens
from dta_compile.passes.lowering.next_tokens import pair_next_tokens
from dta_compile.passes.lowering.one_length import OneLength
from dta_compile.passes.lowering.overlapping_writes import refuse_overlapping_writes
from dta_compile.passes.lowering.repeated_calls import RepeatedCalls, merge_equal_values
from dta_compile.passes.lowering.row_loops import select_masked_writes, undo_row_loops
from dta_compile.passes.lowering.row_weights import multiply_by_experts, multiply_unrepeated
from dta_compile.passes.lowering.same_entries import replace_same_entries
from dta_compile.passes.lowering.shifts import shifts_to_mixers
from dta_compile.passes.program import Program, Traced, all_nodes, ancestors, name_of, output_node
from dta_compile.passes.symbols import depends_on_data, reads_number
from dta_compile.passes.tracing import tracing
from dta_compile.torch_compat import autograd
from dta_compile.torch_compat.autograd import from_fun, to_fun
from dta_compile.torch_compat.tensors import FunctionalTensorMode, is_traceable_wrapper_subclass, pytree
from dta_compile.torch_compat.tracing import make_fx

ASSERTIONS = (aten._assert_async.default, aten._assert_async.msg)
GRADIENT_MODES = (autograd.set_grad_enabled, autograd.enter_inference_mode, autograd.exit_inference_mode)


@contract(
    reads=["captured", "training", "length"],
    fills=["inputs", "module", "placeholders", "draws", "asserted", "written", "traced"],
)
def lower(program: Program) -> None:
    """Lower `program.captured`: fill `.inputs`, `.module`, `.placeholders`, `.draws`, `.asserted`, `.written` and
    `.traced`."""
    captured = program.captured
    placeholders = [node for node in captured.graph.nodes if node.op == "placeholder"]
    _refuse_assigned_data(captured)
    _refuse_settings(captured)
    refuse_overlapping_writes(captured)
    flow = gradient_flow(captured)
    _refuse_gradients_switched_on(captured, flow)
    program.inputs = [_describe(i, node, flow.needs_gradient(node)) for i, node in enumerate(placeholders)]
    with autograd_function.captured():
        written: list[int] = []
        module = _trace(program, flow, functional=False)
        if not write_to_new_values(module.graph):
            # For models that write in place: functionalisation takes half as long again.
            module = _trace(program, flow, functional=True, written=written)
        autograd_function.embed(module)
    graph = module.graph
    for node in graph.find_nodes(op="call_function", target=STOP_GRADIENT):
        node.target = aten.detach.default
    _flatten_output(graph)
    program.traced = Traced.of(graph)
    program.placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    kinds = {node: spec.kind for node, spec in zip(program.placeholders, program.inputs, strict=True)}
    weights = {node for node, kind in kinds.items() if kind is InputKind.PARAMETER}
    trained = [node for node, kind in kinds.items() if kind in (InputKind.PARAMETER, InputKind.DIFFERENTIABLE_DATA)]
    decompositions.spell_out_constructors(graph)
    _join_gradients_of_ranks(graph)
    replace_same_entries(graph, trained)
    multiply_unrepeated(graph)
    multiply_by_experts(graph)
    select_masked_writes(graph)
    unrecognised = recognise_attention(graph, weights)
    if unrecognised is not None and not mixer_calls(graph):
        raise unrecognised
    recognise_choices(graph, weights)
    undo_row_loops(graph)
    unsort_slots(graph)
    spread_selected_rows(graph, weights)
    _forget_counts(program, graph)
    join_tokens(graph, trained)
    pair_next_tokens(graph, trained)
    sums_to_recurrences(graph, trained)
    shifts_to_mixers(graph, trained)
    sizes_from_inputs(graph)
    merge_equal_values(graph, trained)
    erase_unused(graph)
    module.recompile()
    _refuse_numbers(program.captured, graph)
    program.module, program.written = module, written
    program.draws = [node for node in graph.nodes if _draws(node)]
    asserted = [node for node in graph.nodes if node.target in ASSERTIONS]
    program.asserted = [node for node in asserted if weights.isdisjoint(ancestors([node]))]
    for node, spec in zip(program.placeholders, program.inputs, strict=True):
        node.meta["source"] = _readable(spec.name)


SETTINGS = ("set_default_dtype", "set_float32_matmul_precision", "_set_deterministic_algorithms")
ASSIGNS_DATA = ("set_", "shallow_copy_data_")  # before torch 2.15, and since


def _refuse_assigned_data(captured: fx.GraphModule) -> None:
    """Raise RefusalError for `p.data = x`: no trace shows the new storage, so values and gradients would be lost."""
    for node in all_nodes(captured):
        if name_of(node) in ASSIGNS_DATA:
            raise RefusalError(
                "the model assigns to the .data of a tensor",
                where=where(node),
                expected="a forward pass that leaves its parameters, buffers and inputs as they are",
                got=f"{node.args[0]}.data = ..., or {node.args[0]}.set_(...)",
                hint="move the assignment out of the compiled function, or compute a new value and use that: "
                "torch.nn.utils.parametrize does so with weights",
            )


def _refuse_settings(captured: fx.GraphModule) -> None:
    """Raise RefusalError for a change of a setting of torch's, which operators that run later would not know of."""
    for node in all_nodes(captured):
        if name_of(node) in SETTINGS:
            raise RefusalError(
                "the compiled function changes a setting of torch",
                where=where(node),
                expected="settings that stay as they are within a call",
                got=f"{name_of(node)}({', '.join(map(str, node.args))})",
                hint="change it outside of the compiled function; instead of a default dtype, give dtype=",
            )


def _refuse_gradients_switched_on(captured: fx.GraphModule, flow: GradientFlow) -> None:
    """Raise RefusalError if a graph captured under `no_grad` returns tracked values: such a call has no backward."""
    if torch.is_grad_enabled():
        return
    for result in output_node(captured.graph).all_input_nodes:
        if result.op != "placeholder" and Flow.TRACKED in flow.flows[result]:
            raise RefusalError(
                "the compiled function switches gradients on while they are off for its caller",
                where=where(result),
                expected="one gradient mode, or gradients switched off inside",
                got="torch.enable_grad() inside of a call under torch.no_grad()",
                hint="put torch.enable_grad() around the call of the compiled function",
            )


def _refuse_numbers(captured: fx.GraphModule, graph: fx.Graph) -> None:
    """Raise RefusalError if the graph still reads numbers off a tensor.

    The lengths of experts' groups of slots, read by `.tolist()`, have no reader any more; other numbers have no value
    in a graph over a tree.
    """
    if not any(map(reads_number, all_nodes(captured))):
        return
    for node in graph.find_nodes(op="call_function", target=aten._local_scalar_dense.default):
        if isinstance(node.meta["val"], torch.SymInt) and depends_on_data(node.meta["val"]):
            raise RefusalError(
                "Python reads numbers off a tensor, which it uses for more than the lengths of groups of experts",
                where=where(node),
                expected="tokens sorted by expert, and counts of each expert's that split them",
                got=f"{node.args[0].name}.tolist()",
                hint="compute with the tensor itself",
            )


def _forget_counts(program: Program, graph: fx.Graph) -> None:
    """Drop `scale_grad_by_freq` from embeddings whose weight gets no gradient."""
    placeholders = zip(program.placeholders, program.inputs, strict=True)
    trained = {node for node, spec in placeholders if spec.requires_grad and program.training}
    for node in graph.find_nodes(op="call_function", target=aten.embedding.default):
        if node.args[0].op == "placeholder" and node.args[0] not in trained:
            node.args = node.args[:3]


def _join_gradients_of_ranks(graph: fx.Graph) -> None:
    """Merge the `same_on_ranks` calls on a value: its gradient is summed over ranks once, not once per layer."""
    known: dict[tuple[Any, ...], fx.Node] = {}
    for node in graph.find_nodes(op="call_function", target=SAME_ON_RANKS):
        if (first := known.setdefault(node.args, node)) is not node:
            node.replace_all_uses_with(first)


def _readable(source: str) -> str:
    """Return Dynamo's source of an input as the user writes it: `L['self']._buffers['tril']` is `self.tril`."""
    plain = re.sub(r"\._(?:parameters|buffers|modules)(?=\[)", "", source)
    return re.sub(r"\['(\w+)'\]", r".\1", plain).removeprefix("L.")


def _trace(program: Program, flow: GradientFlow, functional: bool, written: list[int] | None = None) -> fx.GraphModule:
    """Trace the captured graph to ATen operators.

    Args:
        functional: replace in-place writes by new values.
        written: is extended by the indices of inputs that are written to; their final values are appended to the
            results.
    """
    placeholders = [node for node in program.captured.graph.nodes if node.op == "placeholder"]
    fakes = [node.meta["example_value"] for node in placeholders]
    length = None if program.length is None else OneLength(program.length)
    if length is not None:
        fakes = length.inputs(fakes)
    mode = next((fake.fake_mode for fake in fakes if hasattr(fake, "fake_mode")), None)

    def run(*args: Any) -> Any:
        with _AttentionCapture(), torch.no_grad(), DrawCapture() as draws:
            return _DetachingInterpreter(program.captured, flow, RepeatedCalls(), length).run(*args), draws.results

    def run_functional(*args: Any) -> Any:
        with FunctionalTensorMode():
            wrapped = list(map(to_fun, args))
            results, draws = run(*wrapped)
            assert written is not None
            written.extend(i for i, arg in enumerate(wrapped) if was_written(arg))
            return pytree.tree_map(from_fun, ((*results, *(wrapped[i] for i in written)), draws))

    with tracing(mode):
        function = run_functional if functional else run
        module = make_fx(function, decomposition_table=decompositions.TABLE, _allow_non_fake_inputs=True)(*fakes)
    for index in written or ():
        if program.inputs[index].kind is not InputKind.DATA or program.inputs[index].requires_grad:
            raise _mutation_refusal(program.inputs[index], placeholders[index])
    return module


class _AttentionCapture(TorchFunctionMode):
    """Mode that replaces `scaled_dot_product_attention` by `dta::attention_call`, and skips dropout with p = 0."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return capture_attention(*args, **kwargs)
        if func in (F.dropout, torch.dropout) and _dropout_is_identity(*args, **kwargs):
            return args[0] if args else kwargs["input"]
        if func is F.multi_head_attention_forward:
            # It is in Python, and its calls of attention do not reach a mode that is handling it.
            with attribute_set(F, "scaled_dot_product_attention", capture_attention):
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _dropout_is_identity(input: Any, p: float = 0.5, train: Any = True, *args: Any, **kwargs: Any) -> bool:
    return p == 0 or not kwargs.get("training", train)


class _DetachingInterpreter(CapturedInterpreter):
    """Interpreter that traces Dynamo's graph and detaches each value that autograd does not track in eager mode.

    Args:
        length: rewrites a graph that Dynamo captured for one number of tokens; None for other graphs.
    """

    def __init__(
        self, module: fx.GraphModule, flow: GradientFlow, repeated: RepeatedCalls, length: OneLength | None
    ) -> None:
        super().__init__(module)
        self.flow, self.repeated, self.length = flow, repeated, length

    def inside(self, body: fx.GraphModule) -> _DetachingInterpreter:
        return _DetachingInterpreter(body, self.flow, self.repeated, self.length)

    def run_node(self, n: fx.Node) -> Any:
        followed = {arg: self.env[arg] for arg in self.flow.unseen.get(n, ())}
        self.env.update(pytree.tree_map_only(torch.Tensor, torch.detach, followed))
        is_python = isinstance(n.target, types.FunctionType) and self.flow.reads_tracked(n)
        with autograd_function.refused(where(n)) if is_python else contextlib.nullcontext():
            result = super().run_node(n)
        self.env.update(followed)
        if self.length is not None:
            self.length.check(n)
        if n.op not in ("call_function", "call_method") or not self.flow.reads_tracked(n):
            return result
        known = {id(value) for value in tensors([self.env[node] for node in n.all_input_nodes])}
        flows = iter(self.flow.flows[n])

        def marked(value: torch.Tensor) -> torch.Tensor:
            flow = next(flows)
            return value if id(whole(value)) in known else _marked(value, flow)

        return pytree.tree_map_only(torch.Tensor, marked, result)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target in GRADIENT_MODES:
            return None  # the flow of gradients is known already
        if target is torch.ops.higher_order.autograd_function_apply:
            return autograd_function.capture(args, kwargs)
        if self.length is not None:
            args, kwargs = self.length.rewritten(target, args, kwargs)
        return self.repeated.run(super().call_function, target, args, kwargs)

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.length is not None:
            args, kwargs = self.length.rewritten(target, args, kwargs)
        return self.repeated.run(super().call_method, target, args, kwargs)


def _marked(value: torch.Tensor, flow: Flow) -> torch.Tensor:
    if flow is Flow.TRACKED or not (value.is_floating_point() or value.is_complex()):
        return value
    # A value with storage of its own becomes a new value, not a detached alias: autograd has to see later writes to it.
    is_part = value is not whole(value)  # stop_gradient does not take values inside of vmap
    return value.detach() if flow is Flow.CUT_OFF or is_part else torch.ops.dta.stop_gradient(value)


def _describe(index: int, node: fx.Node, is_tracked: bool) -> Input:
    value = node.meta["example_value"]
    grapharg = node.meta.get("grapharg")
    source = getattr(grapharg, "source", None)
    name = source.name if source is not None else node.name
    name = name() if callable(name) else str(name)
    if not isinstance(value, torch.Tensor):
        return Input(index, name, InputKind.SIZE, False)
    if is_traceable_wrapper_subclass(value) and not type(value).__module__.startswith("torch."):
        raise RefusalError(
            "a parameter or input is a tensor subclass, whose operators may have a backward of their own",
            where=_readable(name),
            expected="tensors of torch",
            got=f"{type(value).__module__}.{type(value).__qualname__}",
            hint="leave the model unquantised, or quantise what is computed outside of the compiled function",
        )
    example = getattr(grapharg, "example", None)
    dynamic = any(not isinstance(size, int) for size in value.shape)
    if isinstance(value, torch.nn.Parameter) or isinstance(example, torch.nn.Parameter):
        kind = InputKind.PARAMETER
    elif value.requires_grad:
        data = InputKind.DIFFERENTIABLE_DATA if is_tracked else InputKind.DATA
        kind = data if dynamic else InputKind.PARAMETER
    else:
        kind = InputKind.DATA
    return Input(index, name, kind, value.requires_grad)


def _mutation_refusal(mutated: Input, placeholder: fx.Node) -> FinalRefusal:
    return FinalRefusal(
        f"the model writes to {mutated.name}, so running it over a tree would write different values",
        where=where(next(iter(placeholder.users), placeholder)),
        expected="a forward pass that leaves its parameters, and what gradients flow to, as they are",
        got=f"an in-place update of {mutated.name}",
        hint="move the update out of the compiled function (batch-norm statistics: call .eval() on that module; a cache"
        " of keys and values: pass none while training; nn.Embedding: leave max_norm off), or write to a buffer under"
        " torch.no_grad()",
    )


def _flatten_output(graph: fx.Graph) -> None:
    node = output_node(graph)
    results, _ = node.args[0]  # draws were outputs only to survive tracing: from here on their ops are impure
    node.args = (tuple(results) if isinstance(results, (tuple, list)) else (results,),)


def _draws(node: fx.Node) -> bool:
    """Return whether a node is a random op."""
    if node.op == "call_module":
        return bool(getattr(node.graph.owning_module.get_submodule(node.target), "draws", False))
    return is_random(node.target)


@dataclasses.dataclass(frozen=True)
class Draws:
    """Random ops by the graph they run in; `late`: nodes that read no parameter, but follow draws of the epilogue."""

    prologue: Sequence[fx.Node]
    epilogue: Sequence[fx.Node]
    late: set[fx.Node]


def place_draws(program: Program, chunks_need: Iterable[fx.Node]) -> Draws:
    """Divide the random ops between prologue and epilogue.

    Raises:
        RefusalError: the order or the number of draws would not be that of eager execution.
    """
    draws = program.draws
    for node in draws:
        if node in program.region:
            raise _refusal(node, "random numbers for a parameter, which every chunk would draw anew")
        if node.target is aten.rrelu_with_noise_functional.default:
            raise _refusal(node, "a randomised leaky ReLU, whose noise cannot be kept for its derivative")
    first = next((i for i, node in enumerate(draws) if node in program.parameter_dependent), len(draws))
    late = descendants(program.graph, draws[first:]) - program.parameter_dependent
    for node in program.graph.nodes:
        if node in late and _draws(node) and node in ancestors(list(chunks_need)):
            raise _refusal(node, f"{node.target}, needed before {draws[first].target}, which comes first")
    return Draws(draws[:first], draws[first:], late)


def _refusal(node: fx.Node, got: str) -> RefusalError:
    return RefusalError(
        "random numbers cannot be drawn here as eager execution draws them",
        where=where(node),
        expected="random numbers in the order in which eager execution draws them",
        got=got,
        hint="draw them outside of the compiled function and pass them in",
    )
