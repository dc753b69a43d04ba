"""lm_head: compute log-probs and entropies over a large vocabulary without materialising a chunk's logits.

A linear layer whose logits are used only in reductions over the vocabulary (`logit_uses` follows them) becomes one
`dta::linear_log_prob`, which goes over the vocabulary block by block. With `log_softmax` a chunk would hold several
values `[h, V]`: logits, their cast to float32, log-probs until the backward, and their gradients.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import fx

from dta_compile.ops.dtypes import statistics_dtype
from dta_compile.ops.lm_head.operators import LINEAR_CROSS, LINEAR_LOG_PROB, LINEAR_TOP, Further, Head, Results
from dta_compile.ops.mixer import mixer_of_chunk
from dta_compile.passes.chunk.chunk_graph import fake_inputs, free_sizes
from dta_compile.passes.chunk.logit_uses import CAST, TOPS, Kind, Reading, Reduction, Scaling, Step
from dta_compile.passes.contracts import contract
from dta_compile.passes.graphs.arguments import dim_of
from dta_compile.passes.graphs.nodes import descendants, erase_unused, swaps
from dta_compile.passes.graphs.operators import LINEAR_LAYERS, TRANSPOSITIONS, aten
from dta_compile.passes.graphs.source_lines import inherit_line
from dta_compile.passes.program import Program, ancestors
from dta_compile.torch_compat.sizes import ShapeEnv
from dta_compile.torch_compat.tensors import (
    DisableAutocast,
    FakeTensor,
    FakeTensorMode,
    enable_python_dispatcher,
    pytree,
)

# The backward recomputes the logits, a fourth matrix product beside three. From about this size on that costs less than
# moving logits through memory, whose rows are then several times as long as those of any other value.
LEAST_VOCABULARY = 2**15


@contract(
    reads=[
        *("training", "placeholders", "mixer_nodes"),
        *("region_parameters", "constant_inputs", "trunk_inputs", "head_inputs"),
    ],
    rewrites=["chunk"],
    may_be_skipped=True,
)
def lm_head(program: Program) -> None:
    """Fuse the LM heads of `program.chunk` with the reductions of their logits."""
    graph = program.chunk.graph
    layers = [node for node in graph.nodes if _is_large(node)]
    if not layers:
        return
    _propagate(program)
    trained = _trained(program)
    readings = _without_halves({linear: Reading(linear, trained).reductions for linear in layers})
    _replace_crosses(readings)
    for linear in layers:
        reductions = Reading(linear, trained).reductions if readings[linear] else []
        if linear in ancestors(_operands(reductions)):
            continue
        while tops := [reduction for reduction in reductions if reduction.node.target in TOPS]:
            _Fusion(linear, tops[0].meaning.scaling, tops[:1]).replace_top()
            reductions = Reading(linear, trained).reductions
        if reductions:
            for scaling in dict.fromkeys(reduction.meaning.scaling for reduction in reductions):
                own = [reduction for reduction in reductions if reduction.meaning.scaling == scaling]
                _Fusion(linear, scaling, own).replace()
    erase_unused(graph)
    program.chunk.recompile()


Readings = dict[fx.Node, list[Reduction]]
# Sums over two layers as both read them: the one with probabilities, the one with log-probs alone.
CROSSES = ((Kind.FROM, Kind.TO), (Kind.WEIGHTED_PROBS, Kind.WEIGHTED_LOG_PROBS))
HALVES = tuple(kind for kinds in CROSSES for kind in kinds)
Halves = dict[Kind, tuple[fx.Node, Reduction]]


def _crosses(readings: Readings) -> dict[fx.Node, Halves]:
    """Return the layer and the reduction of each half of sums over two layers, by the node of the sum."""
    crosses: dict[fx.Node, Halves] = {}
    for linear, reductions in readings.items():
        for reduction in reductions:
            if reduction.meaning.kind in HALVES:
                crosses.setdefault(reduction.node, {})[reduction.meaning.kind] = linear, reduction
    return crosses


def _without_halves(readings: Readings) -> Readings:
    """Drop the readings of layers that are in a product with what is not read itself."""
    while True:
        crosses = _crosses(readings)
        lonely = {
            linear
            for halves in crosses.values()
            for linear, _ in halves.values()
            if not any(halves.keys() == set(kinds) for kinds in CROSSES)
        }
        if not lonely:
            return readings
        readings = {linear: [] if linear in lonely else own for linear, own in readings.items()}


def _replace_crosses(readings: Readings) -> None:
    """Replace sums over two layers by one operator."""
    for halves in _crosses(readings).values():
        kinds = next(kinds for kinds in CROSSES if kinds[0] in halves)
        first, second = (_Fusion(halves[k][0], halves[k][1].meaning.scaling, [halves[k][1]]) for k in kinds)
        first.replace_cross(second)


def _is_large(node: fx.Node) -> bool:
    if node.target not in LINEAR_LAYERS or node.kwargs:
        return False
    vocabulary = node.meta["val"].shape[-1]
    return isinstance(vocabulary, int) and vocabulary >= LEAST_VOCABULARY


def _propagate(program: Program) -> None:
    """Give the nodes of the chunk graph fake tensors of a chunk; those that they have are over the whole batch.

    Tensors that are alike are one, so that the values of layers that are copies are computed once.
    """
    shape_env = ShapeEnv()
    mode = FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)
    known: dict[Hashable, Any] = {}  # results stay alive, so that their ids are unique
    firsts: dict[Hashable, torch.Tensor] = {}

    def first_like(value: torch.Tensor) -> torch.Tensor:
        fake = value if isinstance(value, FakeTensor) else mode.from_tensor(value, static_shapes=True)
        facts = str(fake.shape), str(fake.stride()), fake.dtype, fake.device, id(getattr(fake, "constant", None))
        return firsts.setdefault(facts, fake)

    with mode, enable_python_dispatcher(), DisableAutocast(), torch.no_grad():
        inputs = iter(fake_inputs(program, *free_sizes(shape_env)))
        for node in program.chunk.graph.nodes:
            match node.op:
                case "placeholder":
                    node.meta["val"] = next(inputs)
                case "get_attr":
                    attribute = operator.attrgetter(str(node.target))(program.chunk)
                    node.meta["val"] = pytree.tree_map_only(torch.Tensor, first_like, attribute)
                case "call_function":
                    args = node.args[1:] if mixer_of_chunk(node.target) else node.args  # without the layer's number
                    named = fx.node.map_arg((args, node.kwargs), lambda arg: f"\0{id(arg.meta['val'])}")
                    key = node.target, repr(named)
                    if key not in known:
                        known[key] = pytree.tree_map_only(torch.Tensor, first_like, _computed(node))
                    node.meta["val"] = known[key]


def _computed(node: fx.Node) -> Any:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"])
    return node.target(*args, **kwargs)


def _trained(program: Program) -> set[fx.Node]:
    """Return the nodes of the chunk graph that depend on trained parameters."""
    parameters = program.chunk.graph.find_nodes(op="placeholder")
    pairs = zip(program.region_parameters, parameters, strict=False)  # parameters come first
    trained = (node for spec, node in pairs if spec.requires_grad and program.training)
    return descendants(program.chunk.graph, trained)


def _operands(reductions: Sequence[Reduction]) -> list[fx.Node]:
    """Return the operands of the fused operator besides the linear layer's input and weight."""
    scalings = [reduction.meaning.scaling for reduction in reductions]
    operands = [reduction.labels for reduction in reductions] + [scaling.bias for scaling in scalings]
    operands += [by for scaling in scalings for by in scaling.scales]
    return [value for value in dict.fromkeys(operands) if isinstance(value, fx.Node)]


# By reduction and what it reduces: an operator and the results of `dta::linear_log_prob` that it takes. Sums are
# relative to the largest logit, so that they take the other result once per entry of the vocabulary.
SUMS = {
    Kind.LOGITS: (aten.add.Tensor, "total", "largest"),
    Kind.LOG_PROBS: (aten.sub.Tensor, "total", "log_sum"),
    Kind.PROBS_LOGITS: (aten.add.Tensor, "largest", "mean"),
    Kind.PROBS_LOG_PROBS: (aten.sub.Tensor, "mean", "log_sum"),
}
REDUCTIONS: dict[tuple[Any, Kind], tuple[Any, ...]] = {
    (aten.logsumexp.default, Kind.LOGITS): (aten.add.Tensor, "largest", "log_sum"),
    **{(target, kind): sums for target in (aten.sum.dim_IntList, aten.mean.dim) for kind, sums in SUMS.items()},
    **{(aten.argmax.default, kind): (None, "best") for kind in (Kind.LOGITS, Kind.LOG_PROBS, Kind.PROBS)},
}


class _Fusion:
    """Replacement of all reductions of the same scaled logits by one operator."""

    def __init__(self, linear: fx.Node, scaling: Scaling, reductions: list[Reduction]) -> None:
        self.graph, self.linear, self.scaling, self.reductions = linear.graph, linear, scaling, reductions
        dtypes = [reduction.node.args[0].meta["val"].dtype for reduction in reductions]
        self.dtype = torch.float32
        for dtype in dtypes:
            self.dtype = torch.promote_types(self.dtype, statistics_dtype(dtype))

    def replace(self) -> None:
        self._move_operands_before()
        with self.graph.inserting_before(self.linear):
            head, columns = self._head()
            whole = [reduction for reduction in self.reductions if reduction.labels is None]
            needed = {name for each in whole for name in REDUCTIONS[each.node.target, each.meaning.kind][1:]}
            further = list(Further(*(name in needed for name in Further._fields)))
            fused = self._call(LINEAR_LOG_PROB, *head, further, self.dtype)
            results = Results(*(self._call(operator.getitem, fused, i) for i in range(len(Results._fields))))
            for reduction in self.reductions:
                value = self._result(reduction, results, columns)
                inherit_line(value, reduction.node)
                value.meta["val"] = reduction.node.meta["val"]  # for the reading of other heads
                reduction.node.replace_all_uses_with(value)
        fused.meta["stack_trace"] = self.linear.meta.get("stack_trace")

    def replace_cross(self, other: _Fusion) -> None:
        """Replace the sum of this layer's probabilities times the other's log-probs, or the ratio of both."""
        (half,), (others,) = self.reductions, other.reductions
        node, dtype = half.node, torch.promote_types(self.dtype, other.dtype)
        self.dtype = other.dtype = dtype
        with self.graph.inserting_before(node):
            heads = [fusion._detached_head(each.meaning.detached) for fusion, each in ((self, half), (other, others))]
            is_ratio = half.meaning.kind is Kind.FROM
            cross = self._call(LINEAR_CROSS, *heads[0], *heads[1], is_ratio, dtype)
            mean = self._call(
                aten.reshape.default, self._call(operator.getitem, cross, 0), self._shape(node.meta["val"].shape)
            )
            factor = half.meaning.factor if is_ratio else -half.meaning.factor
            mean = mean if factor == 1 else self._call(aten.mul.Tensor, mean, factor)
            result = self._cast(mean, dtype, node.meta["val"].dtype)
        cross.meta["stack_trace"] = result.meta["stack_trace"] = node.meta.get("stack_trace")
        result.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(result)
        self.graph.erase_node(node)

    def _detached_head(self, detached: bool) -> Head:
        head = self._head()[0]
        return Head(
            *(self._call(aten.detach.default, value) if detached and value is not None else value for value in head)
        )

    def replace_top(self) -> None:
        """Replace `topk` or `max` by an operator for the indices and a gather, which is read as any other."""
        node = self.reductions[0].node
        source, dim, (values, indices) = node.args[0], dim_of(node), node.meta["val"]
        self._move_operands_before()
        with self.graph.inserting_before(self.linear):
            count = node.args[1] if node.target is aten.topk.default else 1
            top = self._call(LINEAR_TOP, *self._head()[0], count, self.dtype)
            others = [size for i, size in enumerate(source.meta["val"].shape) if i != dim]
            kept = self._call(
                aten.movedim.int, self._call(aten.reshape.default, top, self._shape([*others, count])), -1, dim
            )
        with self.graph.inserting_before(node):
            kept.meta["val"] = indices if indices.dim() == len(others) + 1 else indices.unsqueeze(dim)
            picked = self._call(aten.gather.default, source, dim, kept)
            picked.meta["val"] = values if values.dim() == len(others) + 1 else values.unsqueeze(dim)
            results = [picked, kept]
            if values.dim() == len(others):
                results = [self._call(aten.squeeze.dim, result, dim) for result in results]
        for result, value in zip(results, (values, indices), strict=True):
            result.meta["val"] = value
        for item in list(node.users):
            item.replace_all_uses_with(results[item.args[1]])
            self.graph.erase_node(item)
        self.graph.erase_node(node)

    def _head(self) -> tuple[Head, dict[fx.Node, tuple[int, int]]]:
        """Return the operands of the head, and the columns of each gather's labels."""
        hidden, weight = self.linear.args[-2:]
        self.rows = self._call(aten.sym_size.int, hidden, 0)
        (labels, columns), scaling = self._labels(), self.scaling
        temperature = self._divisor(scaling.steps) if scaling.steps else None
        outer = self._finite(self._divisor(scaling.outer)) if scaling.outer is not None else None
        bias = None if scaling.bias is None else self._before_cast(scaling.bias)
        return Head(hidden, self._weight(weight), bias, temperature, labels, outer), columns

    def _move_operands_before(self) -> None:
        needed, later = ancestors(_operands(self.reductions)), self.linear.next
        while later.op != "root":
            node, later = later, later.next
            if node in needed:
                self.linear.prepend(node)

    def _divisor(self, steps: Sequence[Step]) -> fx.Node:
        """Return the divisor that some steps amount to: a tensor `[]` or `[rows, 1]`."""
        number, tensors = 1.0, []
        for divides, by in steps:
            if isinstance(by, fx.Node):
                tensors.append((divides, self._per_row(by)))
            else:
                number = number * by if divides else number / by
        device = self.linear.meta["val"].device
        result = self._call(aten.full.default, [], number, dtype=self.dtype, device=device)
        for divides, value in tensors:
            result = self._call(aten.mul.Tensor if divides else aten.div.Tensor, result, value)
        return result

    def _finite(self, divisor: fx.Node) -> fx.Node:
        """Replace an infinite divisor, which a product with zero amounts to, by the largest number: inf * 0 is NaN."""
        most = torch.finfo(self.dtype).max
        return self._call(aten.clamp.default, divisor, -most, most)

    def _per_row(self, scale: fx.Node) -> fx.Node:
        is_one = all(isinstance(size, int) for size in scale.meta["val"].shape)
        flat = self._call(aten.reshape.default, scale, [] if is_one else [self.rows, 1])
        return self._cast(flat, scale.meta["val"].dtype, self.dtype)

    def _labels(self) -> tuple[fx.Node | None, dict[fx.Node, tuple[int, int]]]:
        """Return all labels concatenated, `[rows, K]`, and the columns of each gather's labels."""
        columns: dict[fx.Node, tuple[int, int]] = {}
        parts, stop = [], 0
        for reduction in self.reductions:
            labels = reduction.labels
            if labels is None or labels in columns:
                continue
            dim = reduction.node.args[1]
            count = int(labels.meta["val"].shape[dim])
            last = self._call(aten.movedim.int, labels, dim, -1)
            parts.append(self._call(aten.reshape.default, last, [self.rows, count]))
            columns[labels], stop = (stop, stop + count), stop + count
        return (self._call(aten.cat.default, parts, 1) if len(parts) > 1 else next(iter(parts), None)), columns

    def _weight(self, transposed: fx.Node) -> fx.Node:
        """Return the layer's weight `[V, H]` without casts to the product's dtype, which the operator does itself."""
        node, is_transposed = self._before_cast(transposed), True
        while node.target in TRANSPOSITIONS and swaps(node):
            node, is_transposed = self._before_cast(node.args[0]), not is_transposed
        return self._call(aten.t.default, node) if is_transposed else node

    def _before_cast(self, node: fx.Node) -> fx.Node:
        """Return the source of a cast to the linear layer's dtype; return any other node unchanged."""
        if node.target is not aten._to_copy.default or node.kwargs.keys() - CAST:
            return node
        value, source = node.meta["val"], node.args[0].meta["val"]
        to_layer = value.dtype == self.linear.meta["val"].dtype and source.is_floating_point()
        return node.args[0] if to_layer and value.device == source.device else node

    def _result(self, reduction: Reduction, results: Results, columns: dict[fx.Node, tuple[int, int]]) -> fx.Node:
        """Compute the value of a reduction from the operator's results, in its shape and dtype."""
        meaning, value = reduction.meaning, reduction.node.meta["val"]
        if reduction.labels is not None:
            source = results.logit if meaning.kind is Kind.LOGITS else results.log_prob
            result = self._picked(reduction, source, *columns[reduction.labels])
            result = self._call(aten.exp.default, result) if meaning.kind is Kind.PROBS else result
        else:
            target, *terms = REDUCTIONS[reduction.node.target, meaning.kind]
            values = [getattr(results, name) for name in terms]
            vocabulary = self.linear.meta["val"].shape[-1]
            times = {"alpha": vocabulary} if "total" in terms else {}
            result = values[0] if target is None else self._call(target, *values, **times)
            result = self._call(aten.reshape.default, result, self._shape(value.shape))
            if reduction.node.target is aten.argmax.default:
                return result
            if reduction.node.target is aten.mean.dim:
                result = self._call(aten.div.Tensor, result, vocabulary)
        if meaning.factor != 1:
            result = self._call(aten.mul.Tensor, result, meaning.factor)
        result = self._cast(result, self.dtype, value.dtype)
        return self._call(aten.detach.default, result) if meaning.detached else result

    def _picked(self, gather: Reduction, source: fx.Node, start: int, stop: int) -> fx.Node:
        """Return columns of `[rows, K]` in the shape of a gather's result."""
        value, dim = gather.node.meta["val"], gather.node.args[1] % gather.node.meta["val"].dim()
        part = self._call(aten.slice.Tensor, source, 1, start, stop)
        others = [size for i, size in enumerate(value.shape) if i != dim]
        last = self._call(aten.reshape.default, part, self._shape([*others, stop - start]))
        return self._call(aten.movedim.int, last, -1, dim)

    def _shape(self, sizes: Sequence[Any]) -> list[Any]:
        return [size if isinstance(size, int) else self.rows for size in sizes]

    def _cast(self, node: fx.Node, before: torch.dtype, after: torch.dtype) -> fx.Node:
        return node if before == after else self._call(aten._to_copy.default, node, dtype=after)

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.graph.call_function(target, args, kwargs)
