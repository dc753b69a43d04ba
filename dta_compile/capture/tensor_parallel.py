"""Tensor parallelism: rewrite a captured graph over DTensors as one over this rank's local tensors with collectives.

`parallelize_module` and transformers' tensor-parallel plans convert a layer's input to a DTensor, run the layer on
DTensor weights, and convert the result back. In Dynamo's graph these are calls on DTensors, whose collectives DTensor
adds only as it runs, in the backward by placements that arise there. The passes differentiate a graph without DTensors.
So each call is replaced by this rank's local operators and those of `ops.collectives`, with the same derivative:

    replicated   the whole value; where a sharded layer reads it, its gradients are summed over ranks
    sharded      a shard of the last dimension, or of a weight
    partial      a term of a sum over ranks; a replicated bias is added after the sum

Unlisted operations are refused by name, also where another torch spells these calls in another way (tested with 2.13).
All other nodes are copied unchanged. `classify` calls this.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import fx, nn

from dta_compile.errors import RefusalError
from dta_compile.ops import collectives
from dta_compile.passes.graphs.source_lines import where
from dta_compile.torch_compat.tensors import DTensor

# Operators that Dynamo captures for `dist.all_reduce`; their namespace is private to torch.
ALL_REDUCE = torch.ops._c10d_functional.all_reduce
WAIT_TENSOR = torch.ops._c10d_functional.wait_tensor
VALUES = (torch.Tensor, torch.SymInt, torch.SymFloat, int, float)  # what inputs are, other than meshes


@dataclasses.dataclass(frozen=True)
class LocalGraph:
    """Graph over this rank's local tensors.

    Attributes:
        module: the graph.
        inputs: by input of this graph, its number among those of the captured graph.
        group: the ranks that run it together.
    """

    module: fx.GraphModule
    inputs: list[int]
    group: Any

    def call(self, run: Callable[..., Sequence[Any]], *args: Any) -> Sequence[Any]:
        """Call a callable over local tensors with the inputs of the captured graph."""
        own = (args[i] for i in self.inputs)
        return run(*(arg.to_local() if is_distributed(arg) else arg for arg in own))


@dataclasses.dataclass
class _Part:
    """Local part of a DTensor of the captured graph on this rank.

    Attributes:
        node: the local tensor in the new graph.
        kind: "replicated", "sharded" or "partial".
        dim: the sharded dimension.
        bias: a bias to add after the sum over ranks.
    """

    node: fx.Node
    kind: str
    dim: int | None = None
    bias: fx.Node | None = None


def is_distributed(value: Any) -> bool:
    """Return whether a value is a DTensor."""
    return isinstance(value, DTensor)


def on_own_tensors(module: fx.GraphModule) -> LocalGraph | None:
    """Rewrite a captured graph without DTensors; return None if it has none.

    Raises:
        RefusalError: an operation on DTensors, or a placement, is not supported.
    """
    if not any(is_distributed(value) for node in module.graph.nodes for value in _values(node)):
        return None
    return _Localiser(module).run()


def _values(node: fx.Node) -> tuple[Any, ...]:
    value = node.meta.get("example_value")
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


class _Localiser:
    """Copies a graph node by node, with a rule for each operation on DTensors."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module, self.graph = module, fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        self.parts: dict[fx.Node, _Part] = {}
        self.group: Any = None
        self.ranks: list[int] = []  # of the group
        self.here: fx.Node | None = None  # the node being copied

    def run(self) -> LocalGraph:
        for node in self.module.graph.nodes:
            self.here = node
            rule = self._rule(node)
            if rule is None:
                self.copies[node] = self.graph.node_copy(node, self._copy_of)
            elif isinstance(replacement := rule(node), _Part):
                self._check(node, replacement)
                self.parts[node] = replacement
            else:
                self.copies[node] = replacement
        placeholders = [node for node in self.module.graph.nodes if node.op == "placeholder"]
        inputs = []
        for i, node in enumerate(placeholders):
            copy = self.parts[node].node if node in self.parts else self.copies[node]
            if copy.users or isinstance(node.meta.get("example_value"), VALUES):
                inputs.append(i)
            else:
                self.graph.erase_node(copy)  # a mesh
        return LocalGraph(fx.GraphModule(self.module, self.graph), inputs, self.group)

    def _rule(self, node: fx.Node) -> Callable[[fx.Node], Any] | None:
        """Return the rule that replaces a node; None: copy the node."""
        summed = node.args[0] if node.target is WAIT_TENSOR else node
        if summed.target is ALL_REDUCE and not torch.is_grad_enabled():
            return self._all_reduce
        if not (
            is_distributed(node.meta.get("example_value")) or any(arg in self.parts for arg in node.all_input_nodes)
        ):
            return None
        if node.op == "placeholder":
            return self._weight
        if node.op == "call_method":
            return {"redistribute": self._redistributed, "to_local": self._to_local}.get(node.target, self._refuse_op)
        if getattr(node.target, "__qualname__", "") == "DTensor.from_local":
            return self._from_local
        return {F.linear: self._linear, F.embedding: self._embedding}.get(node.target, self._refuse_op)

    # ---- The rules

    def _weight(self, node: fx.Node) -> _Part:
        example = getattr(node.meta.get("grapharg"), "example", None)
        if not isinstance(example, nn.Parameter):
            what = "an input of the model is a DTensor, as in context parallelism"
            self._refuse(node, what, self._placements(node), "pass the whole input, which is not a DTensor")
        copy = self.graph.node_copy(node)
        whole = node.meta["example_value"]
        copy.meta["example_value"] = whole.to_local().detach().requires_grad_(whole.requires_grad)
        return self._placed(node, copy)

    def _from_local(self, node: fx.Node) -> _Part:
        names = ("local_tensor", "device_mesh", "placements")
        arguments = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        self._require_known(node, "DTensor.from_local", arguments, (*names, "shape", "stride"))
        return self._placed(node, self._copy_of(arguments["local_tensor"]))

    def _redistributed(self, node: fx.Node) -> _Part:
        self._require_known(node, "DTensor.redistribute", node.kwargs, ("device_mesh", "placements", "async_op"))
        source, target = self.parts[node.args[0]], self._placed(node, self.parts[node.args[0]].node)
        last = node.meta["example_value"].dim() - 1
        if (source.kind, source.dim) == (target.kind, target.dim):
            return source
        if source.kind == "partial":
            source = _Part(self._summed(source), "replicated")
        elif source.kind == "sharded" and source.dim == last:
            source = _Part(self._call(collectives.GATHER_FEATURES, source.node, self._group_name()), "replicated")
        if source.kind == "replicated" and target.kind == "sharded" and target.dim == last:
            source = _Part(self._call(collectives.OWN_FEATURES, source.node, self._group_name()), "sharded", last)
        if (source.kind, source.dim) != (target.kind, target.dim):
            self._refuse(node, "a DTensor is redistributed in a way that is not supported", self._placements(node))
        return source

    def _to_local(self, node: fx.Node) -> fx.Node:
        part = self.parts[node.args[0]]
        if part.bias is not None:
            self._refuse(node, "a sum over ranks is read before it is summed", "a bias that is yet to be added")
        self._require_known(node, "DTensor.to_local", node.kwargs, ("grad_placements",))
        chosen = node.kwargs.get("grad_placements", node.args[1] if len(node.args) > 1 else None)
        if chosen is None:
            return part.node
        (grad,) = chosen
        if part.kind == "replicated" and grad.is_partial() and grad.reduce_op == "sum":
            return self._same_on_ranks(part.node)
        if self._kind(grad, part.node.meta["example_value"].dim()) == (part.kind, part.dim):
            return part.node
        self._refuse(node, "DTensor.to_local with other placements of gradients", f"{part.kind}, and {grad}")

    def _linear(self, node: fx.Node) -> _Part:
        arguments = {"bias": None, **dict(zip(("input", "weight", "bias"), node.args, strict=False)), **node.kwargs}
        value, weight = (self._part(arguments[name], node) for name in ("input", "weight"))
        bias = None if arguments["bias"] is None else self._part(arguments["bias"], node)
        last, own_bias = value.node.meta["example_value"].dim() - 1, None if bias is None else bias.node
        match (value.kind, value.dim), (weight.kind, weight.dim), None if bias is None else (bias.kind, bias.dim):
            case ("replicated", _), ("replicated", _), None | ("replicated", _):
                return _Part(self._call(F.linear, value.node, weight.node, own_bias), "replicated")
            case ("replicated", _), ("sharded", 0), None | ("sharded", 0):
                product = self._call(F.linear, self._same_on_ranks(value.node), weight.node, own_bias)
                return _Part(product, "sharded", last)
            case ("sharded", dim), ("sharded", 1), None | ("replicated", _) if dim == last:
                return _Part(self._call(F.linear, value.node, weight.node), "partial", bias=own_bias)
        self._refuse(node, "a linear layer whose input and weight are not split to match", self._all_placements(node))

    def _embedding(self, node: fx.Node) -> _Part:
        bound = inspect.signature(F.embedding).bind(*node.args, **node.kwargs)
        bound.apply_defaults()
        ids, weight = self._part(bound.arguments["input"], node), self._part(bound.arguments["weight"], node)
        padding, *others = (
            bound.arguments[name] for name in ("padding_idx", "max_norm", "scale_grad_by_freq", "sparse")
        )
        if any(others) or ids.kind != "replicated" or weight.kind == "partial":
            self._refuse(node, "an embedding that is split in a way that is not supported", self._all_placements(node))
        if weight.kind == "replicated" or weight.dim == 1:
            return self._placed(node, self._call(F.embedding, ids.node, weight.node, padding))
        rows = node.meta["example_value"].device_mesh.get_local_rank() * weight.node.meta["example_value"].shape[0]
        count = bound.arguments["weight"].meta["example_value"].shape[0]
        padding = -1 if padding is None else padding % count
        return _Part(self._call(collectives.EMBEDDING_PART, weight.node, ids.node, rows, padding), "partial")

    def _all_reduce(self, node: fx.Node) -> fx.Node:
        """Replace `dist.all_reduce`, which transformers uses for sums without gradients."""
        value, *how = node.args
        if node.target is WAIT_TENSOR:
            return self._copy_of(value)
        if how != ["sum", self.group.group_name]:
            self._refuse(node, "a reduction that is not a sum over the ranks of the model's DTensors", f"{how}")
        return self._call(collectives.SUM_OVER_RANKS, self._copy_of(value), self._group_name())

    def _refuse_op(self, node: fx.Node) -> NoReturn:
        name = getattr(node.target, "__name__", str(node.target))
        self._refuse(node, "an operation on a DTensor that is not supported", name)

    # ---- Parts

    def _part(self, arg: Any, node: fx.Node) -> _Part:
        if arg not in self.parts:
            self._refuse(node, "DTensors together with other tensors", f"{arg}")
        part = self.parts[arg]
        if part.bias is not None:
            self._refuse(node, "a sum over ranks is read before it is summed", f"{arg}")
        return part

    def _placed(self, node: fx.Node, own: fx.Node) -> _Part:
        """Describe the local tensor `own` by the placement of the DTensor that `node` computes."""
        value = node.meta["example_value"]
        self._enter(node, value.device_mesh)
        kind, dim = self._kind(value.placements[0], value.dim())
        if not kind:
            self._refuse(node, "a DTensor that is placed in a way that is not supported", self._placements(node))
        return _Part(own, kind, dim)

    def _kind(self, placement: Any, rank: int) -> tuple[str, int | None]:
        if type(placement).__name__ == "Shard":
            return "sharded", placement.dim % rank
        if placement.is_replicate():
            return "replicated", None
        return ("partial" if placement.is_partial() and placement.reduce_op == "sum" else ""), None

    def _enter(self, node: fx.Node, mesh: Any) -> None:
        if mesh.ndim != 1:
            self._refuse(node, "a model is split over a mesh of several dimensions", f"{tuple(mesh.shape)}")
        # DTensor takes equal meshes for one another, so that a value may name an earlier one, with a group of its own.
        ranks = mesh.mesh.tolist()
        if self.group is None:
            self.group, self.ranks = mesh.get_group(), ranks
        if self.ranks != ranks:
            self._refuse(node, "a model is split over several groups of ranks", f"{ranks} and {self.ranks}")

    def _check(self, node: fx.Node, part: _Part) -> None:
        """Raise `RefusalError` unless a part agrees with DTensor's own propagation and all ranks have equal sizes."""
        value, own = node.meta["example_value"], part.node.meta["example_value"]
        expected = self._placed(node, part.node)
        if (expected.kind, expected.dim) != (part.kind, part.dim):
            self._refuse(node, "a DTensor is placed in a way that is not supported", self._placements(node))
        if part.dim is None:
            return
        whole, size = value.shape[part.dim], own.shape[part.dim]
        if not isinstance(whole, int) or not isinstance(size, int):
            self._refuse(
                node,
                "sequence parallelism: tokens are split over ranks",
                self._placements(node),
                "split features only (layouts Replicate() and Shard(-1))",
            )
        if whole != size * value.device_mesh.size():
            self._refuse(
                node,
                "ranks have parts of different sizes",
                f"{whole} entries over {value.device_mesh.size()} ranks",
                "choose sizes that the number of ranks divides (pad the vocabulary)",
            )

    # ---- Nodes

    def _summed(self, part: _Part) -> fx.Node:
        total = self._call(collectives.SUM_OVER_RANKS, part.node, self._group_name())
        return total if part.bias is None else self._call(torch.add, total, part.bias)

    def _same_on_ranks(self, value: fx.Node) -> fx.Node:
        if not value.meta["example_value"].is_floating_point():
            return value
        return self._call(collectives.SAME_ON_RANKS, value, self._group_name())

    def _call(self, target: Any, *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        assert self.here is not None
        node.meta = {name: entry for name, entry in self.here.meta.items() if name != "example_value"}
        values = fx.node.map_arg(args, lambda arg: arg.meta["example_value"])
        mode = next(arg.fake_mode for arg in values if hasattr(arg, "fake_mode"))
        with mode, torch.no_grad():
            node.meta["example_value"] = target(*values)
        return node

    def _copy_of(self, node: fx.Node) -> fx.Node:
        if node in self.parts:
            assert self.here is not None
            self._refuse(self.here, "DTensors together with other tensors", f"{node}")
        return self.copies[node]

    def _group_name(self) -> str:
        return collectives.known_as(self.group)

    # ---- Refusals

    def _require_known(self, node: fx.Node, function: str, arguments: Mapping[str, Any], known: Sequence[str]) -> None:
        """Raise `RefusalError` for arguments that are set but not `known`.

        Known ones may be ignored: sizes and placements are read from DTensor's own result, and graphs have no waiting.
        """
        for name, value in arguments.items():
            if name not in known and value is not None and value is not False:
                self._refuse(node, f"{function} with {name}", f"{name}={value}")

    def _placements(self, node: fx.Node) -> str:
        value: Any = node.meta["example_value"]
        return f"{node.name}: sizes {tuple(value.shape)}, placed {value.placements}"

    def _all_placements(self, node: fx.Node) -> str:
        return "; ".join(self._placements(arg) for arg in node.all_input_nodes if arg in self.parts)

    def _refuse(self, node: fx.Node, what: str, got: str, hint: str = "") -> NoReturn:
        raise RefusalError(
            f"tensor parallelism: {what}",
            where=where(node) if node.op != "placeholder" else node.name,
            expected="linear layers and embeddings split by column or row (ColwiseParallel, RowwiseParallel)",
            got=got,
            hint=hint or "split it in one of these ways, or keep it whole on every rank",
        )
