"""Cut a captured graph in two: what makes features, and what reads them from a table with a row for each."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import fx

from dta_compile.capture.flex_attention import eliminate_dead_code
from dta_compile.capture.media.insertions import SCATTERS, SUMS, Insertion
from dta_compile.errors import RefusalError
from dta_compile.ops.feature_tables import TABLE_ROWS
from dta_compile.passes.graphs.source_lines import inherit_line, where
from dta_compile.passes.program import memory, name_of, with_writes, writes_of

# Rows of a table in the trace. Nothing in the remaining graph depends on the number: gradients of an embedding are
# added to the rows of an accumulator, which has the table's size at run time.
TRACED_ROWS = 4099


class Cut:
    """The two graphs that a captured graph is cut into where features are put at tokens."""

    def __init__(self, module: fx.GraphModule, insertions: Sequence[Insertion]) -> None:
        self.module, self.insertions = module, insertions
        self.reads: dict[fx.Node, list[fx.Node]] = {}  # by feature tensor, its insertions in order
        for insertion in insertions:
            self.reads.setdefault(insertion.features, []).append(insertion.node)
        self.features = list(self.reads)

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
        tables = {node: _table(graph, node) for node in self.features}
        for insertion in self.insertions:
            self._read_table(graph, insertion, copies, *tables[insertion.features])
        eliminate_dead_code(graph)
        module.recompile()
        return module, copies

    def _read_table(
        self, graph: fx.Graph, insertion: Insertion, copies: Mapping[fx.Node, fx.Node], table: fx.Node, rows: fx.Node
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
                result.meta = dict(node.meta)
                if name in ("masked_scatter", "index_put"):
                    node.replace_all_uses_with(result)
                else:
                    written = graph.call_function(operator.setitem, (node.args[0], ..., result))
                    written.meta = dict(node.meta)
                    node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)
        for added in (index, features):
            inherit_line(added, insertion.node)

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


def _table(graph: fx.Graph, features: fx.Node) -> tuple[fx.Node, fx.Node]:
    value = features.meta["example_value"]
    with value.fake_mode:
        rows = torch.empty((TRACED_ROWS,), dtype=torch.int64, device=value.device)
    return table_inputs(graph, value, int(value.shape[-1]), rows)


def table_inputs(graph: fx.Graph, features: torch.Tensor, width: int, rows: torch.Tensor) -> tuple[fx.Node, fx.Node]:
    """Add inputs for a table of vectors, and for the numbers of its rows that are read; `rows` are as traced."""
    inputs = list(graph.find_nodes(op="placeholder"))
    with features.fake_mode, graph.inserting_before(inputs[-1].next):  # type: ignore[attr-defined]
        table, numbers = (graph.placeholder(f"{kind}_{len(inputs)}") for kind in ("features", "rows_of_features"))
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
