"""Path of a piece: states of the tokens above it, most of which other ranks have computed.

Mixer operators of a chunk's graphs call it, as they call `PathStack`. All other operators are token-wise, so a piece
runs as one chunk; its mixers run part by part, since its branches hang from the path at several depths. States of
tokens are sent as soon as a graph has computed them, in the middle of it; their gradients come back in the middle of
its backward. Running states go from rank to rank, each of which needs the one before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from dta_compile.distributed.group import Group, Work
from dta_compile.executable.layers import MixerLayer, StateSpec
from dta_compile.ops.dtypes import statistics_dtype
from dta_compile.plan.tree.segments import Segment
from dta_compile.runtime.one_tree.routes import Piece, Read, StateRoutes
from dta_compile.runtime.path.chunk_shape import ChunkShape
from dta_compile.runtime.path.interface import AnyRuntime, LayerInputs, RecurrentInputs, Tensors
from dta_compile.runtime.path.stack import PathStack, as_returned, in_dtype_of
from dta_compile.runtime.rows.batch_rows import Integers
from dta_compile.runtime.rows.upload import upload


class Part(NamedTuple):
    """Consecutive tokens of a piece that hang from one depth of the path.

    Attributes:
        first: number of the first of them in the piece.
        shape: them as a chunk of their own.
    """

    first: int
    shape: ChunkShape

    def of(self, value: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the view of these tokens of a value of the piece."""
        return value.narrow(dim, self.first, self.shape.tokens)


@dataclasses.dataclass(frozen=True)
class PieceShape(ChunkShape):
    """Shape of a piece: segments without parent hang from several depths of the path above.

    Attributes:
        number: round of the piece.
        parts: the piece cut where the depth changes.
    """

    number: int = 0
    parts: tuple[Part, ...] = ()

    @classmethod
    def of_piece(cls, number: int, segments: Sequence[Segment], units: Sequence[tuple[int, int]]) -> PieceShape:
        """Return the shape of the piece of a round, given its segments and units in token numbers of the piece."""
        begins: list[int] = []
        for index, segment in enumerate(segments):
            if segment.parent < 0 and not (begins and segments[begins[-1]].depth == segment.depth):
                begins.append(index)
        parts = [_part(segments, units, *bounds) for bounds in pairwise([*begins, len(segments)])]
        return cls(segments[0].depth, 0, tuple(segments), (), tuple(units), number, tuple(parts))


def _part(segments: Sequence[Segment], units: Sequence[tuple[int, int]], begin: int, end: int) -> Part:
    """Return the segments `[begin, end)` as a chunk of their own."""
    first, last = segments[begin].first, segments[end - 1].last
    own = [
        Segment(s.first - first, s.last - first, s.end - first, s.depth, s.parent - begin if s.parent >= 0 else -1)
        for s in segments[begin:end]
    ]
    of_part = [(a - first, b - first) for a, b in units if first <= a < last]
    return Part(first, ChunkShape.of(segments[begin].depth, 0, own, of_part))


class PiecePath(PathStack):
    """States above the pieces of a rank, and of its own tokens that other pieces read, for the layers of one part.

    Attributes:
        above: by round and layer, states of the tokens above the piece, of the latest forward.
        exported: by layer, states of this rank's tokens that later rounds read, of the rounds so far.
        owed: by layer, gradients of these.
        running_above: by round and layer, running states after rows, which parts of the piece begin with.
        running_kept: by layer and row, running states after own tokens that later rounds read.
        running_owed: by layer and row, gradients of running states after own tokens.
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
        self.group, self.routes = group, routes
        self.above: dict[tuple[int, int], Tensors] = {}
        self.exported: dict[int, list[Tensors]] = {}
        self.owed: dict[int, list[Tensors]] = {}
        self.running_above: dict[tuple[int, int], dict[int, torch.Tensor]] = {}
        self.running_kept: dict[int, dict[int, torch.Tensor]] = {}
        self.running_owed: dict[int, dict[int, torch.Tensor]] = {}

    def finish(self) -> None:
        """Forget the states above the piece, which no backward of it reads again."""
        for layer in range(len(self.layers)):
            self.above.pop((self._number, layer), None)
            self.running_above.pop((self._number, layer), None)

    def write(self, layer: int, *states: torch.Tensor) -> None:
        """Keep the states of the piece's tokens that later rounds read."""
        self._measure_keys(layer, states)
        specs, exported = self.layers[layer].states, self.exported.setdefault(layer, [])
        if self._number < len(exported):  # of an earlier forward of the same round
            del exported[self._number :]
        rows = self._numbers(self.routes.exported[self._number])
        exported.append(tuple(s.index_select(spec.token_dim, rows) for s, spec in zip(states, specs, strict=True)))

    def mix(self, layer: int, *arguments: Any) -> torch.Tensor | Tensors:
        """Run a mixer's `chunk` operator over the piece and the path above; exchange states with other ranks."""
        mixer = self.layers[layer].mixer
        operands = mixer.operands_of(arguments)
        constants = arguments[len(operands) :]
        if layer in self.running:
            return self._run(layer, operands, constants)
        states = mixer.states_of(operands)
        self.write(layer, *states)
        self._measure_queries(layer, operands, constants)
        above = self.above[self._number, layer] = self._exchange(layer, states)
        results = self.results.pop(layer, None)
        if results is None:
            of_parts = [
                self._runtime(layer).forward(self._inputs_of(part, layer, operands, constants, above))
                for part in self._parts
            ]
            results = tuple(_joined(values, mixer.token_dim) for values in zip(*of_parts, strict=True))
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
        specs, dim = self.layers[layer].states, mixer.token_dim
        above = self.above[self._number, layer]
        of_above = tuple(value.new_zeros(value.shape, dtype=statistics_dtype(value.dtype)) for value in above)
        of_parts = []
        for part in self._parts:
            inputs = self._inputs_of(part, layer, operands, constants, above)
            own = tuple(
                part.of(result, dim).contiguous() if i else part.of(result, dim) for i, result in enumerate(results)
            )
            visible = _visible(of_above, specs, part)
            of_parts.append(self._runtime(layer).backward(part.of(grad, dim), own, inputs, visible))
        grads = self._joined_gradients(layer, of_parts)
        self._return_gradients(layer, of_above, mixer.states_of(grads))
        return as_returned(tuple(map(in_dtype_of, operands, grads)))

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

    def _numbers(self, rows: Integers) -> torch.Tensor:
        """Return the numbers in the piece of rows of the tree."""
        return upload(rows - self._piece.start, self.device)

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

    # States of tokens.

    def _exchange(self, layer: int, states: Tensors) -> Tensors:
        """Send states of this rank's tokens to the ranks whose pieces of this round they are above, and get theirs."""
        specs, rank, first = self.layers[layer].states, self.group.rank, self._piece.of_top
        sent, received = self.routes.sent[self._number], self.routes.received[self._number]

        def empty(count: int) -> Tensors:
            pairs = zip(states, specs, strict=True)
            return tuple(value.new_empty(_sized(value, spec, count)) for value, spec in pairs)

        shared = [
            (read, [self.group.broadcast(value, source) for value in values])
            for source, read in self.routes.shared[self._number].items()
            for values in (self._taken(layer, states, read) if source == rank else empty(read.number),)
        ]
        arrived = self._swapped(
            {reader: self._taken(layer, states, read) for reader, read in sent.items()},
            {source: read.number for source, read in received.items() if source != rank},
            states,
            specs,
        )
        if rank in received:
            arrived[rank] = self._taken(layer, states, received[rank])
        above = empty(len(self._piece.above))
        reads = [(received[source].positions, values) for source, values in arrived.items()]
        reads += [(read.positions[read.positions < first], tuple(work() for work in works)) for read, works in shared]
        for numbers, values in reads:
            positions = upload(numbers, self.device)
            for value, target, spec in zip(values, above, specs, strict=True):
                target.index_copy_(spec.token_dim, positions, value.narrow(spec.token_dim, 0, len(numbers)))
        return above

    def _taken(self, layer: int, states: Tensors, read: Read) -> Tensors:
        """Return the states that a read takes: exported ones of earlier rounds, then those of this round."""
        specs = self.layers[layer].states
        of_round = self._numbers(read.rows)
        own = tuple(value.index_select(spec.token_dim, of_round) for value, spec in zip(states, specs, strict=True))
        if not len(read.earlier):
            return own
        rounds = self.routes.dealing.owners(read.earlier) // self.routes.dealing.ranks
        parts = [own]
        for number in np.unique(rounds)[::-1].tolist():
            places = np.searchsorted(self.routes.exported[number], read.earlier[rounds == number])
            index = upload(places, self.device)
            pairs = zip(self.exported[layer][number], specs, strict=True)
            parts.append(tuple(value.index_select(spec.token_dim, index) for value, spec in pairs))
        columns = zip(*reversed(parts), strict=True)
        return tuple(torch.cat(values, spec.token_dim) for values, spec in zip(columns, specs, strict=True))

    def _return_gradients(self, layer: int, of_above: Tensors, of_states: Tensors) -> None:
        """Send the gradients of states above to their ranks; add those that arrive, and those of later rounds."""
        specs, rank = self.layers[layer].states, self.group.rank
        sent, received = self.routes.sent[self._number], self.routes.received[self._number]

        def of_rows(numbers: Integers) -> Tensors:
            positions = upload(numbers, self.device)
            pairs = zip(of_above, specs, strict=True)
            return tuple(value.index_select(spec.token_dim, positions) for value, spec in pairs)

        shared = []
        for source, read in self.routes.shared[self._number].items():
            works = []
            for value, spec in zip(of_rows(read.positions[read.positions < self._piece.of_top]), specs, strict=True):
                total = value.new_zeros(_sized(value, spec, read.number))
                total.narrow(spec.token_dim, 0, value.shape[spec.token_dim]).copy_(value)
                works.append(self.group.reduce(total, source))
            shared.append((source, read, works))
        own = {source: of_rows(read.positions) for source, read in received.items()}
        of_self = own.pop(rank, None)
        arrived = self._swapped(own, {reader: read.number for reader, read in sent.items()}, of_above, specs)
        if of_self is not None:
            self._add(layer, received[rank], of_self, of_states)
        for reader, values in arrived.items():
            self._add(layer, sent[reader], values, of_states)
        for source, read, works in shared:
            totals = tuple(work() for work in works)
            if source == rank:
                self._add(layer, read, totals, of_states)
        self._settle(layer, of_states)

    def _add(self, layer: int, read: Read, values: Tensors, of_states: Tensors) -> None:
        """Add gradients of a read's rows: those of this round to the piece's, earlier ones to what is owed."""
        specs, earlier = self.layers[layer].states, len(read.earlier)
        of_round = self._numbers(read.rows)
        for value, total, spec in zip(values, of_states, specs, strict=True):
            part = value.narrow(spec.token_dim, earlier, read.number - earlier)
            total.index_add_(spec.token_dim, of_round, part.to(total.dtype))
        if not earlier:
            return
        rounds = self.routes.dealing.owners(read.earlier) // self.routes.dealing.ranks
        if layer not in self.owed:
            self.owed[layer] = [
                tuple(v.new_zeros(v.shape, dtype=statistics_dtype(v.dtype)) for v in exported)
                for exported in self.exported[layer]
            ]
        for number in np.unique(rounds).tolist():
            chosen = np.flatnonzero(rounds == number)
            places = upload(np.searchsorted(self.routes.exported[number], read.earlier[chosen]), self.device)
            taken = upload(chosen, self.device)
            for value, total, spec in zip(values, self.owed[layer][number], specs, strict=True):
                total.index_add_(spec.token_dim, places, value.index_select(spec.token_dim, taken))

    def _settle(self, layer: int, of_states: Tensors) -> None:
        """Add what later rounds owe this piece's tokens; no round before it owes them anything."""
        if layer not in self.owed:
            return
        rows = self._numbers(self.routes.exported[self._number])
        owed = self.owed[layer][self._number]
        for value, total, spec in zip(owed, of_states, self.layers[layer].states, strict=True):
            total.index_add_(spec.token_dim, rows, value.to(total.dtype))

    def _swapped(
        self, sent: Mapping[int, Tensors], counts: Mapping[int, int], like: Tensors, specs: Sequence[StateSpec]
    ) -> dict[int, Tensors]:
        """Exchange states like the given ones with other ranks, in one message to each; `counts`: tokens from each."""
        shapes = [value.movedim(spec.token_dim, 0).shape[1:] for value, spec in zip(like, specs, strict=True)]
        widths = [value.itemsize * shape.numel() for value, shape in zip(like, shapes, strict=True)]
        kinds = {source: ((count, sum(widths)), torch.uint8) for source, count in counts.items()}
        raw = self.group.swap({rank: _packed(states, specs) for rank, states in sent.items()}, kinds, self.device)
        return {
            source: tuple(
                part.contiguous().view(value.dtype).reshape(len(part), *shape).movedim(0, spec.token_dim)
                for part, value, shape, spec in zip(message.split(widths, 1), like, shapes, specs, strict=True)
            )
            for source, message in raw.items()
        }

    # Running states.

    def _run(self, layer: int, operands: Tensors, constants: tuple[Any, ...]) -> torch.Tensor:
        """Run a recurrence over the parts of the piece, each from the running state above it.

        States of earlier rounds are sent before, those of this round after the run. So a rank waits for lower ones.
        """
        number, kept = self._number, self.running_kept.setdefault(layer, {})
        sent, received = self.routes.sent_states[number], self.routes.received_states[number]
        works = [self._post_states(kept, rows, reader) for reader, rows in sent.items() if reader < self.group.rank]
        above = self.running_above[number, layer] = self._receive_states(layer, kept, received)
        outs = []
        for part in self._parts:
            rows = self._kept_rows(part)
            inputs = self._recurrent_inputs(part, layer, operands, constants, above)
            out, states = self._recurrence(layer).forward(inputs, self._depths_of(part, rows))
            kept.update(zip(rows, states, strict=True))
            outs.append(out)
        works += [self._post_states(kept, rows, reader) for reader, rows in sent.items() if reader > self.group.rank]
        _wait(works)
        return _joined(outs, self.layers[layer].mixer.token_dim)

    def _run_backward(self, layer: int, grad: torch.Tensor, operands: Tensors, constants: tuple[Any, ...]) -> Tensors:
        number, owed = self._number, self.running_owed.setdefault(layer, {})
        sent, received = self.routes.sent_states[number], self.routes.received_states[number]
        above, dim = self.running_above[number, layer], self.layers[layer].mixer.token_dim
        for reader, rows in sent.items():
            if reader > self.group.rank:
                self._receive_gradients(layer, rows, reader)
        of_parts: list[Tensors] = []
        of_above: dict[int, torch.Tensor] = {}
        for part in self._parts:
            rows = [row for row in self._kept_rows(part) if row in owed]
            pending = dict(zip(self._depths_of(part, rows), map(owed.pop, rows), strict=True))
            inputs = self._recurrent_inputs(part, layer, operands, constants, above)
            grads, of_state = self._recurrence(layer).backward(part.of(grad, dim).contiguous(), inputs, pending)
            of_parts.append(grads)
            if part.shape.start:
                of_above[int(self._piece.above[part.shape.start - 1])] = of_state
        works = [
            self._post_states(of_above, rows, source) for source, rows in received.items() if source != self.group.rank
        ]
        for row in received.get(self.group.rank, ()):
            self._owe(layer, row, of_above[row])
        for reader, rows in sent.items():
            if reader < self.group.rank:
                self._receive_gradients(layer, rows, reader)
        _wait(works)
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

    def _post_states(self, states: Mapping[int, torch.Tensor], rows: Sequence[int], rank: int) -> Work:
        return self.group.post(torch.stack([states[row] for row in rows]), rank)

    def _receive_states(
        self, layer: int, kept: Mapping[int, torch.Tensor], received: Mapping[int, Sequence[int]]
    ) -> dict[int, torch.Tensor]:
        """Return the running states after some rows, own ones and those of other ranks."""
        spec, states = self.running[layer].spec, dict[int, torch.Tensor]()
        for source, rows in received.items():
            if source == self.group.rank:
                states |= {row: kept[row] for row in rows}
            else:
                states |= zip(rows, self._receive(source, len(rows), spec.shape, spec.dtype), strict=True)
        return states

    def _receive_gradients(self, layer: int, rows: Sequence[int], reader: int) -> None:
        spec = self.running[layer].spec
        for row, gradient in zip(
            rows, self._receive(reader, len(rows), spec.shape, statistics_dtype(spec.dtype)), strict=True
        ):
            self._owe(layer, row, gradient)

    def _owe(self, layer: int, row: int, gradient: torch.Tensor) -> None:
        owed = self.running_owed.setdefault(layer, {})
        owed[row] = owed[row] + gradient if row in owed else gradient.clone()

    def _receive(self, source: int, count: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self.group.receive(source, (count, *shape), dtype, self.device)


def _joined(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Join values of the parts of a piece along their tokens, in the memory order of one run over all of them.

    Values with features (all but log-sum-exps) have all of a token's adjacent in memory, see `by_tokens`.
    """
    if len(parts) == 1:
        return parts[0]
    if dim == 1 or parts[0].dim() == dim + 1:
        return torch.cat(list(parts), dim)
    return torch.cat([part.movedim(dim, 1) for part in parts], 1).movedim(1, dim)


def _sized(value: torch.Tensor, spec: StateSpec, count: int) -> tuple[int, ...]:
    """Return the shape of a state for a number of tokens."""
    return (*value.shape[: spec.token_dim], count, *value.shape[spec.token_dim + 1 :])


def _visible(above: Tensors, specs: Sequence[StateSpec], part: Part) -> Tensors:
    """Return the views of values of the tokens above a piece that a part of it reads."""
    pairs = zip(above, specs, strict=True)
    return tuple(value.narrow(spec.token_dim, 0, part.shape.start) for value, spec in pairs)


def _packed(states: Tensors, specs: Sequence[StateSpec]) -> torch.Tensor:
    """Pack states of some tokens into one message: bytes, token by token."""
    rows = [value.movedim(spec.token_dim, 0).flatten(1).contiguous() for value, spec in zip(states, specs, strict=True)]
    return torch.cat([row.view(torch.uint8) for row in rows], 1)


def _wait(works: Sequence[Work]) -> None:
    for work in works:
        work.wait()
