"""Take writes to parameters out of a captured graph, to run once before each call: `self.weight.data.clamp_(-1, 1)`.

A graph over a tree runs in parts, some of them again, and is compared with the captured graph, so no part of it may
write to what others read. A write can come before all of that if nothing reads the parameter earlier, and if writing
again changes nothing: then each part reads what it reads in eager mode, also where eager mode repeats the write (a
layer that is called twice, a checkpoint that is computed again). Other writes stay in the graph, where the passes
refuse them.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from dta_compile.capture.tensor_parallel import is_distributed
from dta_compile.errors import RefusalError, RuntimeContractError
from dta_compile.executable.as_captured import TAG_ACTIVATION_CHECKPOINT
from dta_compile.integrations.fully_shard import running
from dta_compile.passes.graphs.source_lines import where
from dta_compile.passes.program import all_nodes, memory, name_of
from dta_compile.torch_compat.autograd import read_data

# Methods f with f(f(x)) = f(x) bit by bit, whatever numbers they are given.
IDEMPOTENT = frozenset(
    "abs_ ceil_ clamp_ clamp_max_ clamp_min_ clip_ fill_ floor_ relu_ tril_ triu_ trunc_ zero_".split()  # noqa: SIM905
)


@dataclasses.dataclass(frozen=True)
class Write:
    """Write to all of a parameter: a method of tensors with constant arguments.

    Attributes:
        counts: the write goes up the parameter's version, by which autograd notices it (not through `.data`).
    """

    method: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    counts: bool

    def __call__(self, parameter: torch.Tensor) -> None:
        """Write to a parameter."""
        getattr(parameter.detach() if self.counts else parameter.data, self.method)(*self.args, **dict(self.kwargs))


@dataclasses.dataclass(frozen=True)
class ParameterWrites:
    """Captured graph without its writes to parameters; `writes` in order, by number of an input."""

    module: fx.GraphModule
    writes: Mapping[int, Sequence[Write]]

    def call(self, run: Callable[..., Sequence[Any]], *args: Any) -> Sequence[Any]:
        """Write, and call a callable of the remaining graph."""
        owners = [arg.untyped_storage()._cdata if isinstance(arg, torch.Tensor) else None for arg in args]
        for number, writes in self.writes.items():
            if owners.count(owners[number]) > 1:
                raise RuntimeContractError(
                    "the model writes to a parameter that has memory in common with another input",
                    expected="tied weights that are one parameter",
                    got=f"two tensors over the memory of a parameter of shape {list(args[number].shape)}",
                    hint="assign one nn.Parameter to both modules, or write to it outside of the compiled function",
                )
            for write in writes:
                write(args[number])
        return run(*args)


@dataclasses.dataclass
class _Parameter:
    """What has been seen of a parameter so far, in the order in which the graph runs."""

    number: int
    writes: list[Write] = dataclasses.field(default_factory=list)
    reader: fx.Node | None = None

    def add(self, write: Write, node: fx.Node) -> None:
        """Note a write, which changes nothing if it comes after a read and all that was written before is the same."""
        if self.reader is None:
            self.writes.append(write)
        elif set(self.writes) != {write}:
            raise RefusalError(
                "the model writes to a parameter that it has used before",
                where=where(node),
                expected="reads that come after all writes to the parameter",
                got=f"{write.method}, and before that {where(self.reader)}",
                hint="write before the first read, with the same numbers in every layer that shares the parameter, or"
                " outside of the compiled function",
            )


def without_parameter_writes(module: fx.GraphModule) -> ParameterWrites | None:
    """Take the writes to parameters that can run first out of a copy of a graph; return None if it has none.

    Raises:
        RefusalError: such a write comes after a read of another value, or to a parameter that FSDP2 shards.
    """
    if not any(name_of(node) in IDEMPOTENT for node in all_nodes(module)):
        return None
    inputs = module.graph.find_nodes(op="placeholder")
    writes = _Writes({node: (_Parameter(i), True) for i, node in enumerate(inputs) if _is_parameter(node)})
    parameters = [parameter for parameter, _ in writes.whole.values()]
    writes.follow(module)
    if not writes.nodes:
        return None
    if running():
        raise RefusalError(
            "the model writes to a parameter that FSDP2 shards",
            where=where(writes.nodes[0]),
            expected="parameters that are whole between calls",
            got="fully_shard, which drops what a forward pass writes as it frees gathered parameters",
            hint="write outside of the compiled function, after the optimizer's step",
        )
    of_parameters = {parameter.number: parameter.writes for parameter in parameters if parameter.writes}
    return ParameterWrites(_without(module, set(writes.nodes)), of_parameters)


class _Writes:
    """Writes that can run first, found by following a graph and its checkpoints in the order in which they run.

    Attributes:
        whole: by node of an input, the parameter that it is, and whether writes to it count (`Write.counts`).
        owners: parameters by what names their memory.
        nodes: the writes.
    """

    def __init__(self, whole: dict[fx.Node, tuple[_Parameter, bool]]) -> None:
        self.whole = whole
        self.owners = {key: parameter for node, (parameter, _) in whole.items() for key in memory(node)}
        self.nodes: list[fx.Node] = []

    def follow(self, module: fx.GraphModule) -> None:
        """Follow a graph whose inputs are known."""
        for node in module.graph.nodes:
            read = [parameter for arg in node.all_input_nodes for parameter in self._owners_of(arg)]
            if not read or node.target is read_data or name_of(node) == "detach":
                continue
            if node.target is TAG_ACTIVATION_CHECKPOINT:
                self._enter(getattr(module, node.args[0].target), node.args[1:])
            elif name_of(node) in IDEMPOTENT and (written := self._whole_of(node.args[0])) and _has_constants(node):
                parameter, counts = written
                parameter.add(Write(name_of(node), node.args[1:], tuple(node.kwargs.items()), counts), node)
                self.nodes.append(node)
            else:
                for parameter in read:
                    parameter.reader = parameter.reader or node

    def _enter(self, body: fx.GraphModule, operands: Sequence[Any]) -> None:
        for node, operand in zip(body.graph.find_nodes(op="placeholder"), operands, strict=True):
            if isinstance(operand, fx.Node):
                for key, parameter in itertools.product(memory(node), self._owners_of(operand)):
                    self.owners[key] = parameter
                if whole := self._whole_of(operand):
                    self.whole[node] = whole
        self.follow(body)

    def _owners_of(self, node: fx.Node) -> list[_Parameter]:
        return [self.owners[key] for key in memory(node) if key in self.owners]

    def _whole_of(self, node: fx.Node) -> tuple[_Parameter, bool] | None:
        counts = True
        while node.target is read_data or name_of(node) == "detach" or node in self.nodes:
            counts, node = counts and node.target is not read_data, node.args[0]
        parameter, counted = self.whole.get(node, (None, True))
        return None if parameter is None else (parameter, counts and counted)


def _without(module: fx.GraphModule, writes: Collection[fx.Node]) -> fx.GraphModule:
    """Return a copy of a graph without some of its writes, also in checkpoints."""
    result = fx.GraphModule(module, copy.deepcopy(module.graph))
    result.meta = module.meta
    for node, copied in zip(list(module.graph.nodes), list(result.graph.nodes), strict=True):
        if node in writes:
            copied.replace_all_uses_with(copied.args[0])
            result.graph.erase_node(copied)
        elif node.op == "get_attr" and isinstance(body := getattr(module, node.target, None), fx.GraphModule):
            setattr(result, node.target, _without(body, writes))
    for node in reversed(result.graph.find_nodes(op="call_function", target=read_data)):
        if not node.users:
            result.graph.erase_node(node)
    result.recompile()
    return result


def _has_constants(node: fx.Node) -> bool:
    return node.all_input_nodes == [node.args[0]]


def _is_parameter(node: fx.Node) -> bool:
    values = node.meta["example_value"], getattr(node.meta.get("grapharg"), "example", None)
    return any(isinstance(value, torch.nn.Parameter) for value in values) and not any(map(is_distributed, values))
