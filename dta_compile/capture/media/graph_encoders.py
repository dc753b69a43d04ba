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
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from dta_compile.capture.media.feature_cut import Cut
from dta_compile.capture.media.insertions import insertions_of
from dta_compile.integrations.fully_shard_by_layer import gather_all
from dta_compile.passes.graphs.source_lines import where
from dta_compile.passes.program import all_nodes, name_of, output_node
from dta_compile.passes.symbols import depends_on_data, expression, free_symbols, symbol_sources, symbolic
from dta_compile.runtime.encoders.distinct_media import Features, Kept, dependence, encode_distinct, least
from dta_compile.runtime.measure.budget import default_budget


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
        media = [values[i] for i in self.media]
        return encode_distinct(encode, media, look, works_for, bytes_each, budget, are_counted=self._are_counted)

    def bytes_each(self, args: Sequence[Any]) -> float:
        """Run it on copies of one medium, as few as it takes; return about the bytes that autograd keeps for each."""
        values = [args[number] for number in self.inputs]
        media = [values[i] for i in self.media]
        if not self._are_counted or not len(media[0]) or any(len(value) != len(media[0]) for value in media):
            return 0.0
        few = least(functools.partial(self._works_for, values), len(media[0]))
        weights = [v for i, v in enumerate(values) if isinstance(v, torch.Tensor) and i not in self.media]
        with (kept := Kept(weights)):
            features = self._encode(values, *(value[:1].repeat(few, *[1] * (value.dim() - 1)) for value in media))
        del features
        return kept.bytes / few

    @functools.cached_property
    def _are_counted(self) -> bool:
        """Whether the first size of its tensors counts media, of which each has as many features, whatever they hold.

        A constant size may be that of anything, such as the channels of an image, unless each entry is read by itself.
        """
        media = [self._placeholders[i] for i in self.media]
        counts = {medium: _shape(medium)[0] for medium in media}
        reads = (read for medium, count in counts.items() if count.is_number for read in medium.users)
        if not all(read.target is operator.getitem and isinstance(read.args[1], int) for read in reads):
            return False
        numbers = [sympy.Mul(*_shape(node)[:-1]) for node in output_node(self.module.graph).args[0]]
        ratios = [sympy.cancel(number / count) for number in numbers for count in counts.values()]
        return all(ratio.is_Integer or _is_of_others(ratio, counts.values()) for ratio in ratios)

    @functools.cached_property
    def _traced(self) -> list[Any]:
        return [node.meta["example_value"] for node in self._placeholders]

    @property
    def _placeholders(self) -> list[fx.Node]:
        return list(self.module.graph.find_nodes(op="placeholder"))

    def _encode(self, values: Sequence[Any], *media: torch.Tensor) -> Sequence[torch.Tensor]:
        """Run the encoder on other media than those of the call, and so with other sizes."""
        own = dict(zip(self.media, media, strict=True))
        inputs = [own.get(i, value) for i, value in enumerate(values)]
        sizes = self._sizes(media)
        for i, traced in enumerate(self._traced):
            if (expr := symbolic(traced)) is not None and expr.free_symbols <= sizes.keys():
                inputs[i] = int(expr.subs(sizes))
        return self.module(*inputs)

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


def _shape(node: fx.Node) -> tuple[sympy.Expr, ...]:
    return tuple(map(expression, node.meta["example_value"].shape))


def _is_of_others(ratio: sympy.Expr, counts: Iterable[sympy.Expr]) -> bool:
    """Return whether a number of features per medium depends on sizes of media alone, not on how many there are."""
    symbols = ratio.free_symbols
    return bool(symbols) and not depends_on_data(ratio) and symbols.isdisjoint(free_symbols(counts))


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
        proven: encoders of which different media were compared with themselves alone.
        kept: by encoder and sizes of its media, bytes that autograd keeps for each of them.
    """

    module: fx.GraphModule
    encoders: Sequence[GraphEncoder]
    proven: set[GraphEncoder] = dataclasses.field(default_factory=set)
    kept: dict[Any, float] = dataclasses.field(default_factory=dict)

    def call(
        self, run: Callable[..., Sequence[Any]], note: Callable[[str, float, int], None], budget: int | None, *args: Any
    ) -> Sequence[Any]:
        """Call a callable of the remaining graph with the inputs of the captured graph.

        Args:
            note: is given a sentence on what each encoder ran, the bytes that it keeps and its groups, after each call.
            budget: bytes of activations that each encoder may keep; None: by the device's free memory.
        """
        gather_all()
        made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        notes = []
        for encoder in self.encoders:
            bytes_each, most = 0.0, math.inf
            if encoder.is_trained:
                media = [args[encoder.inputs[i]] for i in encoder.media]
                key = (encoder, *(value.shape[1:] for value in media))
                if key not in self.kept:
                    self.kept[key] = encoder.bytes_each(args)
                bytes_each = self.kept[key]
                most = default_budget(media[0].device) if budget is None else budget
            encoded = encoder.encode(args, encoder not in self.proven, bytes_each, most)
            if encoded.is_proof:
                self.proven.add(encoder)
            made |= zip(encoder.tables, zip(encoded.tables, encoded.rows, strict=True), strict=True)
            notes.append((encoded.note, encoded.kept_bytes, encoded.groups))
        results = run(*args, *(value for number in sorted(made) for value in made[number]))
        for values in notes:
            note(*values)
        return results


def without_encoders(module: fx.GraphModule) -> EncodedMedia | None:
    """Cut the encoders out of a captured graph; return None if it has none.

    Raises:
        RefusalError: features are put at entries instead of at whole tokens.
    """
    insertions = list(insertions_of(module.graph))
    if not insertions:
        return None
    cut = Cut(module, insertions)
    placeholders = list(module.graph.find_nodes(op="placeholder"))
    of_media: dict[frozenset[fx.Node], list[int]] = {}
    for insertion in insertions:
        numbers = of_media.setdefault(insertion.media, [])
        if (number := cut.features.index(insertion.features)) not in numbers:
            numbers.append(number)
    encoders = []
    for media, tables in of_media.items():
        features = [cut.features[number] for number in tables]
        before, inputs, _ = cut.before({node: cut.reads[node] for node in features})
        _refuse_batch_norm(before)
        own = [i for i, number in enumerate(inputs) if placeholders[number] in media]
        encoders.append(GraphEncoder(before, inputs, own, tables))
    return EncodedMedia(cut.remaining()[0], encoders)


def _refuse_batch_norm(encoder: fx.GraphModule) -> None:
    """Refuse statistics of a batch. Equal images have those of one, but another unbiased variance is written."""
    for node in all_nodes(encoder):
        is_told = True in (*node.args[5:6], node.kwargs.get("training"), node.kwargs.get("use_input_stats"))
        if is_told and (name_of(node) == "batch_norm" or (name_of(node) == "instance_norm" and any(node.args[1:2]))):
            raise dependence(where(node), "batch norm in training mode, which reads all images of a batch")
