"""Cut the encoders of images and other media out of a captured graph, so that each distinct image is encoded once.

A multimodal model encodes pixels by a tower of its own and puts the features at placeholder tokens, the k-th feature at
the k-th placeholder of the batch: `masked_scatter(x, mask, features)`, `x[mask] = features`, or `x[mask] + features`.
Here the features become a table with a row per *distinct* feature, which the rest of the graph reads as it reads the
table of an embedding:

    features [N, D] of all images        table [R, D] of distinct images, and rows [N] of the features in it
    masked_scatter(x, mask, features)    where(mask, embedding(dta::table_rows(mask, rows), table), x)

The encoder runs before the tree under ordinary autograd. The table is a computed weight of the remaining graph, so its
gradient is summed over tokens in float32 and handed to the encoder once; the row number is an integer of the token, so
it belongs to the prefix key: tokens of equal images share, those of different images fork.

`classify` calls this.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import sympy
import torch
import torch.nn.functional as F
from torch import fx

from dta_compile.capture.dynamo import is_data
from dta_compile.capture.flex_attention import eliminate_dead_code
from dta_compile.errors import RefusalError
from dta_compile.integrations.layer_groups import gather_all
from dta_compile.ops.feature_tables import TABLE_ROWS
from dta_compile.passes.program import memory, name_of, output_node, where, with_writes, writes_of
from dta_compile.passes.symbols import expression, hint, symbol_sources, symbolic
from dta_compile.runtime.encoders.distinct import Features, Kept, encode_distinct, least
from dta_compile.runtime.measure.budget import default_budget

# Rows of a table in the trace. Nothing in the remaining graph depends on the number: gradients of an embedding are
# added to the rows of an accumulator, which has the table's size at run time.
TRACED_ROWS = 4099
SCATTERS = ("masked_scatter", "masked_scatter_")
PUTS = ("index_put", "index_put_")
SUMS = ("add", "add_", "iadd", "__add__", "__iadd__")


@dataclasses.dataclass(frozen=True)
class Insertion:
    """Node that puts features at the tokens of a mask.

    Attributes:
        features: the argument that has the features `[N, D]`, or `[images, N / images, D]`.
        mask: `[B, S]` or, for `masked_scatter`, over the entries `[B, S, D]` of the tokens.
        media: the data that the features are computed from.
    """

    node: fx.Node
    features: fx.Node
    mask: fx.Node
    media: frozenset[fx.Node]


@dataclasses.dataclass(frozen=True, eq=False)
class GraphEncoder:
    """Encoder that is a part of a captured graph.

    Attributes:
        module: the graph of its feature tensors, over the `inputs` of the captured graph with these numbers.
        media: positions among `inputs` of the tensors that are encoded: data, and no weights or buffers.
        tables: numbers of its feature tensors among those of the captured graph.
    """

    module: fx.GraphModule
    inputs: Sequence[int]
    media: Sequence[int]
    tables: Sequence[int]

    @property
    def is_trained(self) -> bool:
        """Whether a gradient flows through it."""
        features = output_node(self.module.graph).args[0]
        return torch.is_grad_enabled() and any(node.meta["example_value"].requires_grad for node in features)

    def encode(self, args: Sequence[Any], look: bool, bytes_each: float, budget: float) -> Features:
        """Encode the distinct media among the inputs of the captured graph; arguments as in `encode_distinct`."""
        values = [args[number] for number in self.inputs]
        encode, works_for = functools.partial(self._encode, values), functools.partial(self._works_for, values)
        return encode_distinct(encode, [values[i] for i in self.media], look, works_for, bytes_each, budget)

    def bytes_each(self, args: Sequence[Any]) -> float:
        """Run it on copies of one medium, as few as it takes; return about the bytes that autograd keeps for each."""
        values = [args[number] for number in self.inputs]
        media = [values[i] for i in self.media]
        if not len(media[0]) or any(len(value) != len(media[0]) for value in media):
            return 0.0
        few = least(functools.partial(self._works_for, values), len(media[0]))
        weights = [v for i, v in enumerate(values) if isinstance(v, torch.Tensor) and i not in self.media]
        with (kept := Kept(weights)):
            features = self._encode(values, *(value[:1].repeat(few, *[1] * (value.dim() - 1)) for value in media))
        del features
        return kept.bytes / few

    @functools.cached_property
    def _traced(self) -> list[Any]:
        return [node.meta["example_value"] for node in self.module.graph.find_nodes(op="placeholder")]

    def _encode(self, values: Sequence[Any], *media: torch.Tensor) -> Sequence[torch.Tensor]:
        """Run the encoder on other media than those of the call, and so with other sizes."""
        own = dict(zip(self.media, media, strict=True))
        inputs = [own.get(i, value) for i, value in enumerate(values)]
        sizes = self._sizes(media)
        for i, traced in enumerate(self._traced):
            if (expr := symbolic(traced)) is not None and expr.free_symbols <= sizes.keys():
                inputs[i] = int(expr.subs(sizes))
        features: Sequence[torch.Tensor] = self.module(*inputs)
        return features

    def _sizes(self, media: Sequence[torch.Tensor]) -> dict[sympy.Symbol, int]:
        sources = symbol_sources([self._traced[i] for i in self.media])
        return {symbol: media[i].shape[dim] for symbol, (i, dim) in sources.items() if dim is not None}

    def _works_for(self, values: Sequence[Any], count: int) -> bool:
        """Return whether the trace holds for so many media."""
        sizes = self._sizes([values[i][:1].expand(count, *values[i].shape[1:]) for i in self.media])
        is_as_traced = all(expression(self._traced[i].shape[0]).subs(sizes) == count for i in self.media)
        env = next((size.node.shape_env for value in self._traced for size in _symbolic_sizes(value)), None)
        if env is None or not is_as_traced:
            return is_as_traced
        guards = [env.replace(guard.expr) for guard in env.guards]
        known = [guard for guard in guards if guard.free_symbols and guard.free_symbols <= sizes.keys()]
        least = all(size >= env.var_to_range[symbol].lower for symbol, size in sizes.items())
        return least and all(bool(guard.subs(sizes)) for guard in known)


def _symbolic_sizes(value: Any) -> list[torch.SymInt]:
    shape = value.shape if isinstance(value, torch.Tensor) else [value]
    return [size for size in shape if isinstance(size, torch.SymInt)]


@dataclasses.dataclass(frozen=True)
class EncodedMedia:
    """Captured graph that is cut in two: encoders, and what reads their features.

    Attributes:
        module: the remaining graph; its inputs are those of the captured graph, then a table and its rows for each
            feature tensor.
        encoders: one for each set of media that features are computed from.
    """

    module: fx.GraphModule
    encoders: Sequence[GraphEncoder]

    def calling(
        self, run: Callable[..., Sequence[Any]], note: Callable[[str, float, int], None], budget: int | None
    ) -> Callable[..., Sequence[Any]]:
        """Wrap a callable of the remaining graph as one over the inputs of the captured graph.

        Args:
            note: is given a sentence on what each encoder ran, the bytes that it keeps and its groups, after each call.
            budget: bytes of activations that each encoder may keep; None: by the device's free memory.
        """
        proven: set[GraphEncoder] = set()
        kept: dict[Any, float] = {}  # by encoder and sizes of its media, bytes for each of them

        def run_encoded(*args: Any) -> Sequence[Any]:
            gather_all()
            made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
            notes = []
            for encoder in self.encoders:
                bytes_each, most = 0.0, math.inf
                if encoder.is_trained:
                    media = [args[encoder.inputs[i]] for i in encoder.media]
                    key = (encoder, *(value.shape[1:] for value in media))
                    if key not in kept:
                        kept[key] = encoder.bytes_each(args)
                    bytes_each = kept[key]
                    most = default_budget(media[0].device) if budget is None else budget
                found = encoder.encode(args, encoder not in proven, bytes_each, most)
                if found.is_proof:
                    proven.add(encoder)
                made |= zip(encoder.tables, zip(found.tables, found.rows, strict=True), strict=True)
                notes.append((found.note, found.kept_bytes, found.groups))
            results = run(*args, *(value for number in sorted(made) for value in made[number]))
            for values in notes:
                note(*values)
            return results

        return run_encoded


def without_encoders(module: fx.GraphModule) -> EncodedMedia | None:
    """Cut the encoders out of a captured graph; return None if it has none.

    Raises:
        RefusalError: features are put at entries instead of at whole tokens.
    """
    insertions = list(insertions_of(module.graph))
    return Cut(module, insertions).run() if insertions else None


def insertions_of(graph: fx.Graph, ids: Set[fx.Node] = frozenset()) -> Iterator[Insertion]:
    """Yield the nodes that put features at placeholder tokens which are not computed from the media.

    Args:
        ids: inputs that encoders look tokens up in, and that features do not depend on.
    """
    media: dict[fx.Node, frozenset[fx.Node]] = {}  # the data that a value depends on
    written: dict[Any, frozenset[fx.Node]] = {}  # the data that was written to memory
    if not any(True for node in graph.nodes for _ in _candidates(node)):
        return
    writes = writes_of(graph)

    def now(node: fx.Node) -> frozenset[fx.Node]:
        return media[node].union(*(written.get(part, ()) for part in memory(node)))

    for node in graph.nodes:
        own = {node} if node.op == "placeholder" and is_data(node) else set()
        media[node] = frozenset(own.union(*map(now, node.all_input_nodes)))
        for features, mask in _candidates(node):
            of_features, of_mask = now(features) - ids, now(mask)
            is_of_media = of_features and of_mask and of_features.isdisjoint(of_mask)
            if is_of_media and _has_width_of(features, node.args[0]):
                yield Insertion(node, features, mask, of_features)
        for part in writes.get(node, ()):
            written[part] = written.get(part, frozenset()) | media[node]


def _has_width_of(features: fx.Node, tokens: fx.Node) -> bool:
    """Return whether features are vectors `[N, D]` or `[images, N / images, D]` as wide as the tokens `[..., D]`."""
    value, other = features.meta.get("example_value"), tokens.meta.get("example_value")
    if not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor) or value.dim() < 2:
        return False
    is_as_wide = hint(value.shape[-1]) == hint(other.shape[-1]) and bool(value.shape[-1] == other.shape[-1])
    return value.is_floating_point() and is_as_wide


def _candidates(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield pairs of a value and the mask of the tokens that it is put at, as far as the node's form tells."""
    name = name_of(node)
    args = node.args
    if name in SCATTERS and len(args) == 3 and isinstance(args[2], fx.Node):
        yield args[2], args[1]
    elif node.target is operator.setitem or (name in PUTS and len(args) == 3 and not node.kwargs):
        mask = _mask_of_index(args[1])
        if mask is not None and isinstance(args[2], fx.Node):
            yield args[2], mask
    elif name in SUMS and len(args) == 2:
        for selected, features in (args, args[::-1]):
            if isinstance(selected, fx.Node) and selected.target is operator.getitem and isinstance(features, fx.Node):
                mask = _mask_of_index(selected.args[1])
                if mask is not None:
                    yield features, mask


def _mask_of_index(index: Any) -> fx.Node | None:
    """Return the mask of `x[mask]` and `x[mask, :]`; None for other indices."""
    first, *rest = index if isinstance(index, (tuple, list)) else (index,)
    if not isinstance(first, fx.Node) or any(part not in (slice(None), Ellipsis) for part in rest):
        return None
    value = first.meta.get("example_value")
    return first if isinstance(value, torch.Tensor) and value.dtype is torch.bool and value.dim() > 1 else None


class Cut:
    """The two graphs of an `EncodedMedia`."""

    def __init__(self, module: fx.GraphModule, insertions: Sequence[Insertion]) -> None:
        self.module, self.insertions = module, insertions
        self.reads: dict[fx.Node, list[fx.Node]] = {}  # by feature tensor, its insertions in order
        for insertion in insertions:
            self.reads.setdefault(insertion.features, []).append(insertion.node)
        self.features = list(self.reads)

    def run(self) -> EncodedMedia:
        placeholders = list(self.module.graph.find_nodes(op="placeholder"))
        of_media: dict[frozenset[fx.Node], list[int]] = {}
        for insertion in self.insertions:
            numbers = of_media.setdefault(insertion.media, [])
            if (number := self.features.index(insertion.features)) not in numbers:
                numbers.append(number)
        encoders = []
        for media, tables in of_media.items():
            features = [self.features[number] for number in tables]
            module, inputs, _ = self.before({node: self.reads[node] for node in features})
            own = [i for i, number in enumerate(inputs) if placeholders[number] in media]
            encoders.append(GraphEncoder(module, inputs, own, tables))
        return EncodedMedia(self.remaining()[0], encoders)

    def before(
        self, reads: Mapping[fx.Node, Sequence[fx.Node]]
    ) -> tuple[fx.GraphModule, list[int], dict[fx.Node, fx.Node]]:
        """Return the graph of some nodes, the numbers of its inputs among those of the module, and its nodes.

        Args:
            reads: by node, what reads it in the module's graph, in order.

        Raises:
            RefusalError: a node is not the same in all reads, or an input is not the same afterwards.
        """
        needed, graph = self._needed(reads), fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        switches: set[fx.Node] = set()
        inputs: list[int] = []
        placeholders = list(self.module.graph.find_nodes(op="placeholder"))
        for node in self.module.graph.nodes:
            # Calls of nothing but one another switch modes of autograd and autocast.
            is_switch = node.op == "call_function" and node.is_impure() and switches.issuperset(node.all_input_nodes)
            if is_switch:
                switches.add(node)
            if node in needed or is_switch:
                copies[node] = graph.node_copy(node, copies.__getitem__)
                if node.op == "placeholder":
                    inputs.append(placeholders.index(node))
        graph.output(tuple(copies[node] for node in reads))
        return fx.GraphModule(self.module, graph), inputs, copies

    def _needed(self, reads: Mapping[fx.Node, Sequence[fx.Node]]) -> set[fx.Node]:
        """Return what nodes are computed from until they are read first."""
        order = {node: i for i, node in enumerate(self.module.graph.nodes)}
        writes = writes_of(self.module.graph)
        needed: set[fx.Node] = set()
        for node, places in reads.items():
            earlier = {write: written for write, written in writes.items() if order[write] < order[places[0]]}
            needed |= with_writes([node], earlier)
        inputs = frozenset().union(*map(memory, self.module.graph.find_nodes(op="placeholder")))
        for write, written in writes.items():
            if write in needed and not inputs.isdisjoint(written):
                raise _written_input(write)
            for node, places in reads.items():
                is_later = order[places[0]] < order[write] and not written.isdisjoint(memory(node))
                if is_later and (write in needed or order[write] < order[places[-1]]):
                    raise unknown_use(write)
        return needed

    def remaining(self) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
        """Return the graph that reads tables of features, and its nodes."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        graph.output(graph.graph_copy(self.module.graph, copies))
        module = fx.GraphModule(self.module, graph)
        module.meta = self.module.meta
        tables = {node: _table(graph, node, i) for i, node in enumerate(self.features)}
        for insertion in self.insertions:
            self._read_table(graph, insertion, copies, *tables[insertion.features])
        eliminate_dead_code(graph)
        module.recompile()
        return module, copies

    def _read_table(
        self,
        graph: fx.Graph,
        insertion: Insertion,
        copies: Mapping[fx.Node, fx.Node],
        table: fx.Node,
        rows: fx.Node,
    ) -> None:
        node = copies[insertion.node]
        name = name_of(node)
        with graph.inserting_before(node):
            mask = copies[insertion.mask]
            if name in SCATTERS:
                mask = self._tokens(graph, insertion, mask)
            # Other ways than `masked_scatter` take as many features as there are places, or one for all of them.
            index = graph.call_function(TABLE_ROWS, (mask, rows), {} if name in SCATTERS else {"exact": True})
            features = graph.call_function(F.embedding, (index, table))
            if name in SUMS:
                features = graph.call_function(operator.getitem, (features, mask))
                node.replace_input_with(copies[insertion.features], features)
            else:
                chosen = graph.call_function(operator.getitem, (mask, (..., None)))
                result = graph.call_function(torch.where, (chosen, features, node.args[0]))
                if name in ("masked_scatter", "index_put"):
                    node.replace_all_uses_with(result)
                else:
                    written = graph.call_function(operator.setitem, (node.args[0], ..., result))
                    written.meta = dict(node.meta)
                    node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)
        for added in (index, features):
            added.meta.setdefault("stack_trace", insertion.node.meta.get("stack_trace"))

    def _tokens(self, graph: fx.Graph, insertion: Insertion, mask: fx.Node) -> fx.Node:
        """Return the mask `[B, S]` of a mask over entries `[B, S, D]` that is the same for all entries of a token."""
        value = insertion.mask.meta["example_value"]
        if value.dim() == insertion.node.meta["example_value"].dim() and (
            value.stride()[-1] == 0 or value.shape[-1] == 1
        ):
            return graph.call_function(operator.getitem, (mask, (..., 0)))
        raise RefusalError(
            "features are put at entries, and it is not proven that these are whole tokens",
            where=where(insertion.node),
            expected="a mask over tokens, expanded over their features: mask[..., None].expand_as(x)",
            got=f"a mask of shape {list(value.shape)}",
            hint="make the mask from the ids of the placeholder tokens",
        )


def _table(graph: fx.Graph, features: fx.Node, number: int) -> tuple[fx.Node, fx.Node]:
    value = features.meta["example_value"]
    with value.fake_mode:
        rows = torch.empty((TRACED_ROWS,), dtype=torch.int64, device=value.device)
    return table_inputs(graph, value, int(value.shape[-1]), rows, str(number))


def table_inputs(
    graph: fx.Graph, features: torch.Tensor, width: int, rows: torch.Tensor, name: str
) -> tuple[fx.Node, fx.Node]:
    """Add inputs for a table of vectors, and for the numbers of its rows that are read; `rows` are as traced."""
    last = list(graph.find_nodes(op="placeholder"))[-1]
    with features.fake_mode, graph.inserting_before(last.next):  # type: ignore[attr-defined]
        table, numbers = (graph.placeholder(f"{kind}_{name}") for kind in ("features", "rows_of_features"))
        # A parameter, also of a frozen encoder: else its rows would be copied out for every token of the batch.
        made = torch.empty((TRACED_ROWS, width), dtype=features.dtype, device=features.device)
        table.meta["example_value"] = torch.nn.Parameter(made, requires_grad=features.requires_grad)
        numbers.meta["example_value"] = rows
    return table, numbers


def unknown_use(node: fx.Node) -> RefusalError:
    """Return the error for a call that reads features, or writes to them, in another way than is known."""
    return RefusalError(
        "features of images are read in a way that is not known to read each one at its token",
        where=where(node),
        expected="the k-th feature put at the k-th placeholder token by masked_scatter, x[mask] = features, or a sum",
        got=str(node.target),
        hint="put features at the tokens of a mask that is computed from ids, and write to them before that only",
    )


def _written_input(node: fx.Node) -> RefusalError:
    return RefusalError(
        "an input is written to in place before images are encoded, which is done once for equal images",
        where=where(node),
        expected="pixels, weights and buffers that stay as they are",
        got=str(node.target),
        hint="make a new value, such as pixels * 2, or write to the input outside of the function",
    )
