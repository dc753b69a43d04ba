"""Path of a piece: states of the tokens above it, most of which other ranks have computed.

Mixer operators of a chunk's graphs call it, as they call `PathStack`. All other operators are token-wise, so a piece
runs as one chunk; its mixers run part by part, since its branches hang from the path at several depths. States of
tokens are sent as soon as a graph has computed them, in the middle of it; their gradients come back in the middle of
its backward. Where they are many, they travel by heads: some while attention of the heads before runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from dta_compile.distributed.group import Group
from dta_compile.executable.layers import AttentionLayer, MixerLayer, StateSpec
from dta_compile.ops.dtypes import statistics_dtype
from dta_compile.plan import one_tree
from dta_compile.runtime.attention.layer import AttentionRuntime
from dta_compile.runtime.one_tree.routes import Piece, StateRoutes
from dta_compile.runtime.one_tree.running import RunningRows
from dta_compile.runtime.one_tree.shape import Part, PieceShape
from dta_compile.runtime.one_tree.tokens import ALL, TokenStates
from dta_compile.runtime.path.mixer_runtime import AnyRuntime, LayerInputs, RecurrentInputs, Tensors
from dta_compile.runtime.path.stack import PathStack, as_returned, in_dtype_of


class Heads(NamedTuple):
    """Heads of attention whose keys and values travel together: of queries, and of keys."""

    queries: slice = ALL
    keys: slice = ALL


class PiecePath(PathStack):
    """States above the pieces of a rank, and of its own tokens that other pieces read, for the layers of one part.

    Attributes:
        tokens: exchange of states of tokens.
        rows: exchange of running states.
        above: by round and layer, states of the tokens above the piece, of the latest forward, by `Heads`.
        running_above: by round and layer, running states after rows, which parts of the piece begin with.
    """

    def __init__(
        self,
        layers: Sequence[MixerLayer],
        runtimes: Sequence[AnyRuntime],
        device: torch.device,
        group: Group,
        routes: StateRoutes,
    ) -> None:
        super().__init__(layers, runtimes, 0, device)
        self.routes = routes
        self.tokens = TokenStates([layer.states for layer in layers], device, group, routes)
        self.rows = RunningRows({layer: states.spec for layer, states in self.running.items()}, device, group, routes)
        self.above: dict[tuple[int, int], list[Tensors]] = {}
        self.running_above: dict[tuple[int, int], dict[int, torch.Tensor]] = {}

    def finish(self) -> None:
        """Forget the states above the piece, which no backward of it reads again."""
        for layer in range(len(self.layers)):
            self.above.pop((self._number, layer), None)
            self.running_above.pop((self._number, layer), None)

    def write(self, layer: int, *states: torch.Tensor) -> None:
        """Keep the states of the piece's tokens that later rounds read."""
        self._measure_keys(layer, states)
        self.tokens.write(layer, self._number, states)

    def mix(self, layer: int, *arguments: Any) -> torch.Tensor | Tensors:
        """Run a mixer's `chunk` operator over the piece and the path above; exchange states with other ranks.

        The keys and values of some heads are on their way while attention of those before them runs.
        """
        mixer = self.layers[layer].mixer
        operands = mixer.operands_of(arguments)
        constants = arguments[len(operands) :]
        if layer in self.running:
            return self._run(layer, operands, constants)
        states = mixer.states_of(operands)
        self.write(layer, *states)
        self._measure_queries(layer, operands, constants)
        results, blocks = self.results.pop(layer, None), self._blocks(layer, operands)
        above = self.above[self._number, layer] = []
        of_blocks: list[Tensors] = []
        arriving: list[Callable[[], Tensors]] = []
        for number, heads in enumerate(blocks):
            for following in blocks[len(arriving) : number + 2]:
                arriving.append(self.tokens.begin(layer, self._number, states, following.keys))
            above.append(arriving[number]())
            if results is None:
                own = _of_heads(operands, heads)
                of_parts = [
                    self._runtime(layer).forward(self._inputs_of(part, layer, own, constants, above[-1]))
                    for part in self._parts
                ]
                of_blocks.append(tuple(_joined(values, mixer.token_dim) for values in zip(*of_parts, strict=True)))
        self.tokens.wait()
        if results is None:
            results = tuple(map(_joined_heads, zip(*of_blocks, strict=True)))
        self._record(layer, results)
        return as_returned(results)

    def mix_backward(self, layer: int, grad: torch.Tensor, *arguments: Any) -> torch.Tensor | Tensors:
        """Run a mixer's `backward` operator; send gradients of states above to the ranks that computed these.

        Adds the gradients that other pieces have for this one's tokens.
        """
        mixer = self.layers[layer].mixer
        operands, results, constants = mixer.backward_arguments(arguments)
        if layer in self.running:
            grads = self._run_backward(layer, grad, operands, constants)
            return as_returned(tuple(map(in_dtype_of, operands, grads)))
        above, of_blocks = self.above.pop((self._number, layer)), list[Tensors]()
        arriving: Callable[[Tensors], None] | None = None
        for heads in self._blocks(layer, operands):
            of_block, of_above = self._backward_of(layer, heads, grad, operands, results, constants, above.pop(0))
            if arriving is not None:  # those of the heads before have travelled meanwhile, and their memory is freed
                arriving(mixer.states_of(of_blocks[-1]))
                self.tokens.wait()
            arriving = self.tokens.begin_return(layer, self._number, of_above, heads.keys)
            of_blocks.append(of_block)
            del of_above
        assert arriving is not None
        arriving(mixer.states_of(of_blocks[-1]))
        grads = tuple(map(_joined_heads, zip(*of_blocks, strict=True)))
        self.tokens.settle(layer, self._number, mixer.states_of(grads))
        self.tokens.wait()
        return as_returned(tuple(map(in_dtype_of, operands, grads)))

    def _backward_of(
        self,
        layer: int,
        heads: Heads,
        grad: torch.Tensor,
        operands: Tensors,
        results: Tensors,
        constants: tuple[Any, ...],
        above: Tensors,
    ) -> tuple[Tensors, Tensors]:
        """Return the gradients of the operands of some heads, and of the states above, which are sums in float32."""
        specs, dim, of_parts = self.layers[layer].states, self.layers[layer].mixer.token_dim, list[Tensors]()
        own, out, grad = (
            _of_heads(operands, heads),
            [value[:, heads.queries] for value in results],
            grad[:, heads.queries],
        )
        of_above = tuple(value.new_zeros(value.shape, dtype=statistics_dtype(value.dtype)) for value in above)
        for part in self._parts:
            inputs = self._inputs_of(part, layer, own, constants, above)
            of_part = tuple(
                part.of(result, dim).contiguous() if i else part.of(result, dim) for i, result in enumerate(out)
            )
            visible = _visible(of_above, specs, part)
            of_parts.append(self._runtime(layer).backward(part.of(grad, dim), of_part, inputs, visible))
        return self._joined_gradients(layer, of_parts), of_above

    def _blocks(self, layer: int, operands: Tensors) -> list[Heads]:
        """Return the heads whose states travel together, alike on all ranks: all, unless those are many bytes."""
        spec, runtime = self.layers[layer], self.runtimes[layer]
        if not isinstance(spec, AttentionLayer) or type(runtime) is not AttentionRuntime or len(operands) > 3:
            return [Heads()]
        width = sum(state.dtype.itemsize * int(np.prod(state.of_tokens(1))) for state in spec.states)
        most = min(one_tree.blocks(self.routes.most_read[self._number] * width), spec.kv_heads)
        count = next((count for count in range(most, 1, -1) if spec.kv_heads % count == 0), 1)
        if count == 1:
            return [Heads()]
        totals = (value.shape[1] for value in operands[:2])
        ranges = [[slice(i * n // count, (i + 1) * n // count) for i in range(count)] for n in totals]
        return [Heads(*pair) for pair in zip(*ranges, strict=True)]

    @property
    def _number(self) -> int:
        return self._piece_shape.number

    @property
    def _parts(self) -> tuple[Part, ...]:
        return self._piece_shape.parts

    @property
    def _piece_shape(self) -> PieceShape:
        assert isinstance(self.chunk, PieceShape)
        return self.chunk

    @property
    def _piece(self) -> Piece:
        return self.routes.pieces[self._number]

    def _inputs_of(
        self, part: Part, layer: int, operands: Tensors, constants: tuple[Any, ...], above: Tensors
    ) -> LayerInputs:
        visible = _visible(above, self.layers[layer].states, part)
        own = self._operands_of(part, layer, operands)
        return LayerInputs(own, constants, visible, part.shape, lambda: part.shape.table(self.device))

    def _operands_of(self, part: Part, layer: int, operands: Tensors) -> Tensors:
        mixer = self.layers[layer].mixer
        pairs = zip(mixer.operands, operands, strict=True)
        return tuple(part.of(value, mixer.token_dim) if operand.has_tokens else value for operand, value in pairs)

    def _joined_gradients(self, layer: int, of_parts: Sequence[Tensors]) -> Tensors:
        """Join the gradients of the parts' tokens, and add those of operands without tokens."""
        mixer = self.layers[layer].mixer
        return tuple(
            _joined(grads, mixer.token_dim)
            if operand.has_tokens
            else torch.stack(grads).sum(0)
            if len(grads) > 1
            else grads[0]
            for operand, grads in zip(mixer.operands, zip(*of_parts, strict=True), strict=False)
        )

    def _run(self, layer: int, operands: Tensors, constants: tuple[Any, ...]) -> torch.Tensor:
        """Run a recurrence over the parts of the piece, each from the running state above it."""
        above = self.running_above[self._number, layer] = self.rows.receive(layer, self._number)
        outs = []
        for part in self._parts:
            rows = self._kept_rows(part)
            inputs = self._recurrent_inputs(part, layer, operands, constants, above)
            out, states = self._recurrence(layer).forward(inputs, self._depths_of(part, rows))
            self.rows.kept[layer].update(zip(rows, states, strict=True))
            outs.append(out)
        self.rows.send(layer, self._number)
        return _joined(outs, self.layers[layer].mixer.token_dim)

    def _run_backward(self, layer: int, grad: torch.Tensor, operands: Tensors, constants: tuple[Any, ...]) -> Tensors:
        above, dim = self.running_above[self._number, layer], self.layers[layer].mixer.token_dim
        self.rows.receive_gradients(layer, self._number)
        of_parts, owed = list[Tensors](), self.rows.owed[layer]
        of_above: dict[int, torch.Tensor] = {}
        for part in self._parts:
            rows = [row for row in self._kept_rows(part) if row in owed]
            pending = dict(zip(self._depths_of(part, rows), map(owed.pop, rows), strict=True))
            inputs = self._recurrent_inputs(part, layer, operands, constants, above)
            grads, of_state = self._recurrence(layer).backward(part.of(grad, dim).contiguous(), inputs, pending)
            of_parts.append(grads)
            if part.shape.start:
                of_above[int(self._piece.above[part.shape.start - 1])] = of_state
        self.rows.send_gradients(layer, self._number, of_above)
        return self._joined_gradients(layer, of_parts)

    def _recurrent_inputs(
        self, part: Part, layer: int, operands: Tensors, constants: tuple[Any, ...], above: Mapping[int, torch.Tensor]
    ) -> RecurrentInputs:
        start, own = part.shape.start, self._operands_of(part, layer, operands)
        state = above[int(self._piece.above[start - 1])] if start else self.running[layer].at(0)
        return RecurrentInputs(own, constants, state, part.shape)

    def _kept_rows(self, part: Part) -> list[int]:
        """Return the rows of a part after which a running state is read by other parts, ascending."""
        rows, first = self.routes.exported_states[self._number], self._piece.start + part.first
        kept: list[int] = rows[slice(*np.searchsorted(rows, (first, first + part.shape.tokens)))].tolist()
        return kept

    def _depths_of(self, part: Part, rows: Sequence[int]) -> list[int]:
        """Return the rows of a part as runtimes count them: as if its tokens were a single run."""
        return [row - self._piece.start - part.first + 1 + part.shape.start for row in rows]


def _of_heads(operands: Tensors, heads: Heads) -> Tensors:
    """Return the views of some heads of queries, keys and values; of all heads, the operands as they are."""
    if heads.keys == ALL:
        return operands
    return tuple(value[:, heads.keys if i else heads.queries] for i, value in enumerate(operands))


def _joined_heads(of_blocks: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join values of several heads, those of a token adjacent in memory; log-sum-exps have no features."""
    if len(of_blocks) == 1:
        return of_blocks[0]
    if of_blocks[0].dim() == 3:
        return torch.cat(list(of_blocks), 1)
    return torch.cat([value.transpose(1, 2) for value in of_blocks], 2).transpose(1, 2)


def _joined(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Join values of the parts of a piece along their tokens, in the memory order of one run over all of them.

    Values with features (all but log-sum-exps) have all of a token's adjacent in memory, see `by_tokens`.
    """
    if len(parts) == 1:
        return parts[0]
    if dim == 1 or parts[0].dim() == dim + 1:
        return torch.cat(list(parts), dim)
    return torch.cat([part.movedim(dim, 1) for part in parts], 1).movedim(1, dim)


def _visible(above: Tensors, specs: Sequence[StateSpec], part: Part) -> Tensors:
    """Return the views of values of the tokens above a piece that a part of it reads."""
    pairs = zip(above, specs, strict=True)
    return tuple(value.narrow(spec.token_dim, 0, part.shape.start) for value, spec in pairs)
