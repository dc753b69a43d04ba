"""Cut the calls of encoders and of positions out of a captured graph, to run before the tree.

Encoders (`encoder_calls.encode`) run once per distinct unit; their features become tables that the remaining graph
reads as `graph_encoders` describes, and positions become inputs. Features that the graph returns come from the tables.
`classify` calls this.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from dta_compile.capture.dynamo import restarts
from dta_compile.capture.flex_attention import eliminate_dead_code
from dta_compile.capture.media.encoder_calls import check_counts, encode, token_positions
from dta_compile.capture.media.feature_cut import Cut, unknown_use
from dta_compile.capture.media.insertions import Insertion, insertions_of
from dta_compile.capture.media.unit_wise import CASTS_AND_COPIES, SHAPES, call_of
from dta_compile.errors import RefusalError, RuntimeContractError
from dta_compile.integrations.fully_shard_by_layer import gather_to_encode
from dta_compile.ops.feature_tables import TABLE_ROWS
from dta_compile.passes.program import ancestors, is_boolean, name_of, output_node, writes_of
from dta_compile.runtime.encoders.distinct_media import as_table
from dta_compile.runtime.encoders.encoder import Encoder, encoder_of
from dta_compile.runtime.encoders.modules import EncoderModule

EMBEDDED = {
    "embedding",
    "mul",
    "getitem",
    *CASTS_AND_COPIES,
    *SHAPES,
}  # between tables and embeddings that are compared


@dataclasses.dataclass(frozen=True)
class EncoderCalls:
    """Captured graph that is cut in two: calls of encoders and positions, and what reads their results.

    Attributes:
        module: the remaining graph; its inputs are those of the captured graph, then a table and its rows for each
            of the feature tensors that it reads, then positions, and masks of tokens found by their embeddings.
        before: the graph of feature tensors, positions and masks, over the `inputs` of the captured graph with these
            numbers.
        calls: by feature tensor, the node in `before` of the encoder that made it.
        read: how many feature tensors the remaining graph reads.
        returned: by number of an output of the captured graph that is a feature tensor, which one, and its shape.
    """

    module: fx.GraphModule
    before: fx.GraphModule
    inputs: Sequence[int]
    calls: Sequence[fx.Node]
    read: int
    returned: Mapping[int, tuple[int, tuple[int, ...]]]

    def call(
        self, run: Callable[..., Sequence[Any]], note: Callable[[str, float, int], None], budget: int | None, *args: Any
    ) -> Sequence[Any]:
        """Call a callable of the remaining graph with the inputs of the captured graph.

        Args:
            note: is given a sentence on what was encoded, the bytes that it keeps and the groups, after each call.
            budget: bytes of activations that each encoder may keep; None: by the device's free memory.
        """
        gather_to_encode(bool(self.calls))
        encoders = _Distinct(self.before, budget)
        with torch.set_grad_enabled(torch.is_grad_enabled()):  # which a graph may have switched when an encoder fails
            results = encoders.run(*(args[number] for number in self.inputs))
        features, computed = results[: len(self.calls)], results[len(self.calls) :]
        rows = [encoders.rows_of(call, made) for call, made in zip(self.calls, features, strict=True)]
        pairs = zip(map(as_table, features[: self.read]), rows, strict=False)
        outputs = list(run(*args, *(value for pair in pairs for value in pair), *computed))
        for number, (i, shape) in self.returned.items():
            made = features[i].flatten()[:, None] if features[i].dtype is torch.bool else features[i]
            outputs[number] = as_table(made)[rows[i]].reshape(shape)
        for encoder in encoders.ran:
            note(encoder.note, encoder.kept_bytes, encoder.groups)
        return outputs


class _Distinct(fx.Interpreter):
    """Runs encoders once per distinct unit.

    Attributes:
        rows: by call, the rows of the whole batch's features, and how many features there are.
    """

    def __init__(self, module: fx.GraphModule, budget: int | None) -> None:
        super().__init__(module)
        self.budget = budget
        self.rows: dict[fx.Node, tuple[torch.Tensor, int]] = {}
        self.ran: list[Encoder] = []

    def run_node(self, n: fx.Node) -> Any:
        if n.target is not encode:
            return super().run_node(n)
        (handle, *tensors), _ = self.fetch_args_kwargs_from_env(n)
        encoder = encoder_of(handle)
        features, rows = encoder.distinct(*tensors, budget=self.budget)
        self.rows[n] = rows, len(features[0])
        if any(value.requires_grad for value in features) and not n.meta["example_value"][0].requires_grad:
            raise RuntimeContractError(
                "features of images require a gradient, which they did not when the call was compiled",
                expected="trained parameters that belong to the model",
                got=f"others, which {encoder.name} reads",
                hint="register them in the model, or call torch.compiler.reset() after requires_grad_()",
            )
        self.ran.append(encoder)
        return features

    def rows_of(self, call: fx.Node, made: torch.Tensor) -> torch.Tensor:
        """Return the rows of a value that is made of the features of a call, each entry by itself."""
        rows, count = self.rows[call]
        number = made.numel() // made.shape[-1] if made.dtype is not torch.bool else made.numel()
        if number == count:
            return rows
        each = encoder_of(call.args[0]).form.per_entry
        entries, length = rows[::each] // each, number * each // count
        return (entries[:, None] * length + torch.arange(length, device=rows.device)).flatten()


def without_encoder_calls(module: fx.GraphModule) -> EncoderCalls | None:
    """Cut calls of encoders and positions out of a captured graph; return None if it has none.

    Has Dynamo trace again where not only the features that a mask of an encoder's output selects are read.

    Raises:
        RefusalError: features are read in a way that is not known to read each at its placeholder token, or those of
            an image are not the same in every batch.
    """
    calls = [node for node in module.graph.find_nodes(op="call_function", target=encode) if node.users]
    try:
        return _without(module, calls)
    except RefusalError:
        encoders = (encoder_of(call.args[0]) for call in calls)
        if selecting := [encoder for encoder in encoders if encoder.form.is_selected]:
            for encoder in selecting:
                encoder.selects = False
            restarts.trace_again_with("all features that encoders return")
        raise


def _without(module: fx.GraphModule, calls: Sequence[fx.Node]) -> EncoderCalls | None:
    positions = [*module.graph.find_nodes(op="call_function", target=token_positions)]
    if not calls and not positions:
        return None
    for refusal in (encoder_of(call.args[0]).refusal for call in calls):
        if refusal is not None:
            raise refusal
    modules = {call: made for call in calls if isinstance(made := encoder_of(call.args[0]), EncoderModule)}
    ids = ancestors([call.args[1 + made.number_of_ids] for call, made in modules.items()])
    insertions = [
        found for found in insertions_of(module.graph, ids) if not ancestors([found.features]).isdisjoint(calls)
    ]
    computed = [*positions, *_masks_of_floats(insertions)]
    cut = Cut(module, insertions)
    remaining, copies = cut.remaining()
    graph = remaining.graph
    _replace_by_inputs(graph, [copies[node] for node in computed])
    copied_calls = {copies[call] for call in calls}
    returned = _take_outputs(graph, copied_calls)
    _erase_assertions(graph, copied_calls)
    eliminate_dead_code(graph)
    if modules or module.graph.find_nodes(op="call_function", target=check_counts):
        for index in graph.find_nodes(op="call_function", target=TABLE_ROWS):
            index.kwargs = {"exact": True}
    remaining.recompile()
    if left := [node for node in graph.nodes if node.target in (encode, token_positions)]:
        raise unknown_use(next(iter(left[0].users), left[0]))
    originals = output_node(module.graph).args[0]
    reads = {node: list(insertions) for node, insertions in cut.reads.items()}
    for number in returned:
        reads.setdefault(originals[number], []).append(output_node(module.graph))
    features = list(reads)
    # Writes to positions stay in the remaining graph.
    before, inputs, copied = cut.before(reads | {node: [node] for node in computed})
    _refuse_writes(module.graph, copied)
    return EncoderCalls(
        remaining,
        before,
        inputs,
        [copied[call_of(node)] for node in features],
        len(cut.features),
        {number: (features.index(originals[number]), _shape(originals[number])) for number in returned},
    )


def _masks_of_floats(insertions: Sequence[Insertion]) -> list[fx.Node]:
    """Return the masks of tokens that are found by comparing embeddings (`inputs_embeds == embed(image)`), not ids."""
    masks: dict[fx.Node, None] = {}
    for insertion in insertions:
        reached = ancestors([insertion.mask])
        of_tokens = [node for node in insertion.node.graph.nodes if node in reached and is_boolean(node)]
        mask = [node for node in of_tokens if node.meta["example_value"].dim() == 2][-1:]
        floats = [node for node in ancestors(mask) if _is_of_floats(node)]
        # Embeddings as they are given or looked up, and no hidden states, for which layers would run before the tree.
        if floats and all(node.op == "placeholder" or name_of(node) in EMBEDDED for node in floats):
            masks |= dict.fromkeys(mask)
    return list(masks)


def _replace_by_inputs(graph: fx.Graph, computed: Sequence[fx.Node]) -> None:
    for i, node in enumerate(computed):
        last = list(graph.find_nodes(op="placeholder"))[-1]
        with graph.inserting_after(last):
            replacement = graph.placeholder(f"computed_{i}")
        replacement.meta = dict(node.meta)
        node.replace_all_uses_with(replacement)
        graph.erase_node(node)


def _take_outputs(graph: fx.Graph, calls: set[fx.Node]) -> list[int]:
    """Take features out of the outputs of a graph; return the numbers of these outputs."""
    output = output_node(graph)
    outputs = list(output.args[0])
    taken = [
        number
        for number, node in enumerate(outputs)
        if isinstance(node, fx.Node) and not ancestors([node]).isdisjoint(calls)
    ]
    for number in taken:
        outputs[number] = None
    output.args = (tuple(outputs),)
    return taken


def _erase_assertions(graph: fx.Graph, calls: set[fx.Node]) -> None:
    """Erase Dynamo's assertions that numbers of features are sizes of tensors."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten._assert_scalar.default):
        if not ancestors([node]).isdisjoint(calls):
            graph.erase_node(node)


def _refuse_writes(graph: fx.Graph, before: Collection[fx.Node]) -> None:
    """Refuse writes to features, of which each is there once, that do not treat each of them by itself."""
    for write in writes_of(graph):
        if write in before and any(node.target is encode for node in ancestors([write])):
            call_of(write)


def _is_of_floats(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _shape(node: fx.Node) -> tuple[int, ...]:
    """Return the shape of features in the outputs, with -1 for the size that depends on their number."""
    return tuple(size if isinstance(size, int) else -1 for size in node.meta["example_value"].shape)
