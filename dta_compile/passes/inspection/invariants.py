"""Invariants of a `Program` between passes: one table of rules, `INVARIANTS`.

A rule is checked once all its fields are filled, after every pass that writes one of them.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import fx

from dta_compile.executable.layers import AttentionLayer
from dta_compile.executable.layouts import Layout
from dta_compile.ops.attention import Masking
from dta_compile.ops.mixer import MIXERS
from dta_compile.passes.contracts import ContractError, Pass
from dta_compile.passes.graphs.storage import owner, storages, view_source
from dta_compile.passes.inspection.listing import field_of, graphs
from dta_compile.passes.program import Mixed, Program, has_tensor, is_mutable, output_node, writes_in_place
from dta_compile.torch_compat.operators import OpOverload

Violations = Callable[[Program], Iterable[object]]


@dataclasses.dataclass(frozen=True)
class Invariant:
    """One rule of the table.

    Attributes:
        text: the rule in words, for the error.
        fields: the fields of a program that the rule is about.
        violations: yields every violation, in words, for the error.
    """

    text: str
    fields: frozenset[str]
    violations: Violations


INVARIANTS: list[Invariant] = []


def _rule(text: str, *fields: str) -> Callable[[Violations], Violations]:
    def add(violations: Violations) -> Violations:
        INVARIANTS.append(Invariant(text, frozenset(fields), violations))
        return violations

    return add


def check(program: Program, step: Pass) -> None:
    """Raise `ContractError` for the first rule that `step` broke."""
    for rule in INVARIANTS:
        if rule.fields <= program.filled and rule.fields & step.writes:
            for violation in rule.violations(program):
                raise ContractError(f"after {step.name}: {rule.text}; not so: {violation}")


class Snapshot:
    """Copies of the nodes of a program's graphs, by which changes that passes do not declare are detected.

    A graph is compared with its copy before a pass that writes it, and after the last pass: most passes write few.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.copies = {name: _nodes(graph) for name, graph in graphs(program).items()}
        self.passes: dict[str, list[str]] = {name: [] for name in self.copies}  # run since the copy was taken

    def compare(self, step: Pass | None = None) -> None:
        """Raise `ContractError` if a graph that `step` writes (None: any graph) is no longer as the last pass that
        writes it left it."""
        for name, graph in graphs(self.program).items():
            is_concerned = name in self.copies and (step is None or field_of(name) in step.writes)
            if is_concerned and self.copies[name] != _nodes(graph):
                raise ContractError(f"{' or '.join(self.passes[name])} changed the graph {name!r} without declaring it")

    def take(self, step: Pass) -> None:
        """Copy the graphs that `step`, which has just run, writes."""
        for name, graph in graphs(self.program).items():
            if name not in self.copies or field_of(name) in step.writes:
                self.copies[name], self.passes[name] = _nodes(graph), []
            else:
                self.passes[name].append(step.name)


def _nodes(graph: fx.Graph) -> tuple[list[Any], list[Any]]:
    nodes = list(graph.nodes)
    return nodes, list(map(operator.attrgetter("target", "args", "kwargs"), nodes))


@_rule("every input of the call is a placeholder of the lowered graph, in order", "inputs", "placeholders", "module")
def _inputs(program: Program) -> Iterator[object]:
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    if placeholders != list(program.placeholders) or len(placeholders) != len(program.inputs):
        yield f"{len(program.inputs)} inputs, {len(program.placeholders)} of {len(placeholders)} placeholders"


@_rule("the lowered graph is functional, and each of its nodes knows its value", "module")
def _functional(program: Program) -> Iterator[object]:
    yield from (node.format_node() for node in program.graph.nodes if "val" not in node.meta and _has_value(node))
    if any(map(is_mutable, {node.target for node in program.graph.nodes})):
        yield from (node.format_node() for node in program.graph.nodes if writes_in_place(node))


def _has_value(node: fx.Node) -> bool:
    """Return whether a node must have a value: calls do, except assertions, which return nothing."""
    return node.op == "call_function" and (not isinstance(node.target, OpOverload) or bool(node.target._schema.returns))


@_rule("every value of the lowered graph has been interpreted, with an axis for each dimension", "module", "values")
def _interpreted(program: Program) -> Iterator[object]:
    values = program.values
    for node in program.graph.nodes:
        value = values.get(node)
        if value is None and node not in values and node.op != "output":
            yield f"{node.name} has no layout"
        if isinstance(value, Layout):
            result = node.meta["val"]
            if isinstance(result, torch.Tensor) and len(value.dims) != result.dim():
                yield f"{node.name}: {value} of {result.dim()} dimensions"


@_rule("every mixer of this batch is a layer, and has no mask", "module", "mixers", "mixer_nodes", "other_batches")
def _layers(program: Program) -> Iterator[object]:
    calls = [node for node in program.graph.nodes if node.target in MIXERS and node not in program.other_batches]
    if calls != list(program.mixer_nodes) or len(calls) != len(program.mixers):
        yield f"{len(calls)} calls, {len(program.mixers)} layers"
    yield from (f"layer {layer.index} in place {i}" for i, layer in enumerate(program.mixers) if layer.index != i)
    for layer, node in zip(program.mixers, program.mixer_nodes, strict=True):
        if isinstance(layer, AttentionLayer):
            masking = Masking.of(layer.mixer, node.args)
            has_mask = masking != Masking.causal(masking.scoring)
        else:
            has_mask = layer.mixer.segments is not None and node.args[layer.mixer.segments] is not None
        if has_mask:
            yield node.format_node()


@_rule("the token region reads itself, inputs, and what does not depend on parameters", "module", "region")
def _closed_region(program: Program) -> Iterator[object]:
    region, dependent = program.region, program.parameter_dependent
    for node in region:
        for arg in node.all_input_nodes:
            if arg not in region and arg.op != "placeholder" and arg in dependent:
                yield f"{node.name} reads {arg.name}"


@_rule("all mixers lie in the token region, and frontier values leave it token by token", "region", "frontier")
def _frontier(program: Program) -> Iterator[object]:
    yield from (f"{node.name} is outside" for node in program.mixer_nodes if node not in program.region)
    for value in program.frontier:
        if value.node not in program.region or isinstance(program.values[value.node], Mixed):
            yield value.node.name


@_rule("the trunk has all mixers, and reads nothing of the head", "trunk", "region", "mixer_nodes")
def _closed_trunk(program: Program) -> Iterator[object]:
    for node in program.mixer_nodes:
        if node not in program.trunk and any(user in program.trunk for user in node.users):
            yield f"{node.name} is in the head"
    head = program.region - program.trunk
    for node in program.trunk:
        if not head.isdisjoint(node.all_input_nodes):
            yield f"{node.name} reads {', '.join(arg.name for arg in node.all_input_nodes if arg in head)}"


@_rule(
    "the chunk graph takes parameters, constants, trunk inputs, head rows and head inputs, and gives frontier values",
    *("chunk", "region_parameters", "constant_inputs", "trunk_inputs", "head_inputs", "frontier"),
)
def _chunk(program: Program) -> Iterator[object]:
    inputs = sum(node.op == "placeholder" for node in program.chunk.graph.nodes)
    parts = program.region_parameters, program.constant_inputs, program.trunk_inputs, program.head_inputs
    outputs = len(output_node(program.chunk.graph).args[0])
    if inputs != sum(map(len, parts)) + 1 or outputs != len(program.frontier):
        yield f"{inputs} inputs for {' + '.join(str(len(part)) for part in parts)} + 1, {outputs} outputs"


@_rule("executable graphs take the path, then what the stages before them hand over", "stages")
def _stages(program: Program) -> Iterator[object]:
    stages, signature_of = program.stages, functools.cache(_signature)
    known = set(range(stages.inputs))
    for stage, kind in stages.of_kinds():
        yield from (f"slot {slot} is read before it is written" for slot in stage.reads if slot not in known)
        known |= set(stage.writes)
        own = sum(value.place[0] == "saved" for value in kind.kept)
        expected = {"cache_only": (len(stage.reads), 0), "forward_only": (len(stage.reads), len(stage.writes))}
        expected["forward"] = len(stage.reads), len(stage.writes) + own
        if kind.backward is not None:
            inputs, outputs = signature_of(kind.backward)
            handed = len(kind.kept) + len(kind.differentiated)
            if inputs + outputs != handed + len(kind.gradients):  # `accumulate` turns outputs into inputs
                yield f"backward: {inputs} inputs and {outputs} outputs for {handed} and {len(kind.gradients)}"
        for name, signature in expected.items():
            if (actual := signature_of(getattr(kind, name))) != signature:
                yield f"{name}: {actual} inputs and outputs for {signature}"
    if missing := set(stages.outputs) - known:
        yield f"nothing writes slots {missing}"


def _signature(module: fx.GraphModule) -> tuple[int, int]:
    """Return the numbers of inputs, without the path, and of outputs."""
    return len(module.graph.find_nodes(op="placeholder")) - 1, len(output_node(module.graph).args[0])


@_rule("what has been written over is read as the result of the writing only", "stages")
def _written_over(program: Program) -> Iterator[object]:
    for module in program.stages.modules:
        if any(map(_written, module.graph.nodes)):
            yield from _stale_reads(module.graph)


def _stale_reads(graph: fx.Graph) -> Iterator[str]:
    """Yield the reads of a storage through a value that is older than the last write over the storage."""
    version: dict[Any, fx.Node] = {}  # by storage: the last node that wrote over it
    seen: dict[fx.Node, dict[Any, fx.Node | None]] = {}  # by value: the versions of its storages when it was computed
    for node in graph.nodes:
        for arg in node.all_input_nodes:
            for storage, writer in seen.get(arg, {}).items():
                if version.get(storage) is not writer:
                    yield f"{node.name} reads {arg.name}, which {version[storage].name} wrote over"
        written = {storage for arg in _written(node) for storage in storages(arg)}
        version |= dict.fromkeys(written, node)
        source = view_source(node)
        older = seen.get(source, {}) if source is not None and not written else {}
        if has_tensor(node):
            seen[node] = {storage: older.get(storage, version.get(storage)) for storage in storages(node)}


def _written(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that a node writes over, except (views of) accumulators, which are meant to be written."""
    if not writes_in_place(node):
        return []
    pairs = zip(node.args, node.target._schema.arguments, strict=False)
    written = (arg for arg, formal in pairs if formal.alias_info is not None and formal.alias_info.is_write)
    owners = ((arg, owner(arg)) for arg in written if isinstance(arg, fx.Node))
    return [arg for arg, node in owners if node.op != "placeholder" or "memory" in node.meta]
