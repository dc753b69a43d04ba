"""States of tokens between ranks: sent to the pieces below these tokens, and their gradients sent back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch

from dta_compile.distributed.group import Group, Swap
from dta_compile.executable.layers import StateSpec
from dta_compile.ops.dtypes import statistics_dtype
from dta_compile.runtime.one_tree.routes import Read, StateRoutes
from dta_compile.runtime.path.mixer_runtime import Tensors
from dta_compile.runtime.rows.batch_rows import Integers
from dta_compile.runtime.rows.upload import upload

ALL = slice(None)
"""All heads of states; other slices are ranges of their dimension 1."""


class TokenStates:
    """Exchange of the states of tokens in each round, for the layers of one part. `number` is that of a round.

    Ranks exchange together, for the same heads in the same order. Messages travel from the call of `begin` or
    `begin_return` until that of the function which it returns, so that ranks compute meanwhile.

    Attributes:
        exported: by layer, states of this rank's tokens that later rounds read, of the rounds so far.
        owed: by layer, gradients of these.
    """

    def __init__(
        self, specs: Sequence[Sequence[StateSpec]], device: torch.device, group: Group, routes: StateRoutes
    ) -> None:
        self.specs, self.device, self.group, self.routes = specs, device, group, routes
        self.exported: dict[int, list[Tensors]] = {}
        self.owed: dict[int, list[Tensors]] = {}
        self._sending: list[Swap] = []

    def write(self, layer: int, number: int, states: Tensors) -> None:
        """Keep the states of a piece's tokens that later rounds read."""
        exported = self.exported.setdefault(layer, [])
        if number < len(exported):  # of an earlier forward of the same round
            del exported[number:]
        rows = self._numbers(number, self.routes.exported[number])
        pairs = zip(states, self.specs[layer], strict=True)
        exported.append(tuple(value.index_select(spec.token_dim, rows) for value, spec in pairs))

    def begin(self, layer: int, number: int, states: Tensors, heads: slice = ALL) -> Callable[[], Tensors]:
        """Begin to send states of this rank's tokens to the ranks whose pieces of this round continue these tokens.

        Args:
            states: those of the whole piece, all heads.

        Returns:
            a function that waits for the states of the tokens above this rank's piece, by depth.
        """
        specs, rank, piece = self.specs[layer], self.group.rank, self.routes.pieces[number]
        sent, received = self.routes.sent[number], self.routes.received[number]
        states = tuple(value[:, heads] for value in states)

        def empty(count: int) -> Tensors:
            pairs = zip(states, specs, strict=True)
            return tuple(value.new_empty(_sized(value, spec, count)) for value, spec in pairs)

        def taken(read: Read) -> Tensors:
            return self._taken(layer, number, states, read, heads)

        shared = []
        for source, read in self.routes.shared[number].items():
            values = taken(read) if source == rank else empty(read.number)
            shared.append((read, [self.group.broadcast(value, source) for value in values]))
        messages = {reader: _packed(taken(read), specs) for reader, read in sent.items()}
        arriving = self._swapped(messages, received, states, specs)

        def above() -> Tensors:
            result = empty(len(piece.above))

            def put(numbers: Integers, values: Tensors) -> None:
                positions = upload(numbers, self.device)
                for value, target, spec in zip(values, result, specs, strict=True):
                    target.index_copy_(spec.token_dim, positions, value.narrow(spec.token_dim, 0, len(numbers)))

            if rank in received:
                put(received[rank].positions, taken(received[rank]))
            for read, works in shared:
                put(read.positions[read.positions < piece.of_top], tuple(work() for work in works))
            for source, values in arriving():
                put(received[source].positions, values)
            return result

        return above

    def begin_return(self, layer: int, number: int, of_above: Tensors, heads: slice = ALL) -> Callable[[Tensors], None]:
        """Begin to send the gradients of the states above a piece to the ranks of these tokens.

        Returns:
            a function that waits for those that arrive, and adds them to the given ones of the piece's own states, of
            these heads, or to what is owed to earlier rounds.
        """
        specs, rank, piece = self.specs[layer], self.group.rank, self.routes.pieces[number]
        sent, received = self.routes.sent[number], self.routes.received[number]

        def of_rows(numbers: Integers) -> Tensors:
            positions = upload(numbers, self.device)
            pairs = zip(of_above, specs, strict=True)
            return tuple(value.index_select(spec.token_dim, positions) for value, spec in pairs)

        shared = []
        for source, read in self.routes.shared[number].items():
            works = []
            for value, spec in zip(of_rows(read.positions[read.positions < piece.of_top]), specs, strict=True):
                total = value.new_zeros(_sized(value, spec, read.number))
                total.narrow(spec.token_dim, 0, value.shape[spec.token_dim]).copy_(value)
                works.append(self.group.reduce(total, source))
            shared.append((source, read, works))
        of_self = of_rows(received[rank].positions) if rank in received else None
        others = {source: read.positions for source, read in received.items() if source != rank}
        messages = {source: _packed(of_rows(numbers), specs) for source, numbers in others.items()}
        arriving = self._swapped(messages, sent, of_above, specs)

        def add(of_states: Tensors) -> None:
            if of_self is not None:
                self._add(layer, number, received[rank], of_self, of_states, heads)
            for reader, values in arriving():
                self._add(layer, number, sent[reader], values, of_states, heads)
            for source, read, works in shared:
                totals = tuple(work() for work in works)
                if source == rank:
                    self._add(layer, number, read, totals, of_states, heads)

        return add

    def settle(self, layer: int, number: int, of_states: Tensors) -> None:
        """Add what later rounds owe a piece's tokens to the gradients of its states; no earlier round owes them any."""
        if layer not in self.owed:
            return
        rows = self._numbers(number, self.routes.exported[number])
        for value, total, spec in zip(self.owed[layer][number], of_states, self.specs[layer], strict=True):
            total.index_add_(spec.token_dim, rows, value.to(total.dtype))

    def wait(self) -> None:
        """Wait until all messages are sent."""
        while self._sending:
            self._sending.pop().wait()

    def _numbers(self, number: int, rows: Integers) -> torch.Tensor:
        """Return the numbers in the piece of a round of rows of the tree."""
        return upload(rows - self.routes.pieces[number].start, self.device)

    def _taken(self, layer: int, number: int, states: Tensors, read: Read, heads: slice) -> Tensors:
        """Return the states that a read takes: exported ones of earlier rounds, then those of this round."""
        specs = self.specs[layer]
        of_round = self._numbers(number, read.rows)
        parts = [tuple(value.index_select(spec.token_dim, of_round) for value, spec in zip(states, specs, strict=True))]
        rounds = self.routes.dealing.rounds_of(read.earlier)
        for earlier in np.unique(rounds)[::-1].tolist():
            places = np.searchsorted(self.routes.exported[earlier], read.earlier[rounds == earlier])
            index = upload(places, self.device)
            pairs = zip(self.exported[layer][earlier], specs, strict=True)
            parts.append(tuple(value[:, heads].index_select(spec.token_dim, index) for value, spec in pairs))
        if len(parts) == 1:
            return parts[0]
        columns = zip(*reversed(parts), strict=True)
        return tuple(torch.cat(values, spec.token_dim) for values, spec in zip(columns, specs, strict=True))

    def _add(self, layer: int, number: int, read: Read, values: Tensors, of_states: Tensors, heads: slice) -> None:
        """Add gradients of a read's rows: those of this round to the piece's, earlier ones to what is owed."""
        specs, earlier = self.specs[layer], len(read.earlier)
        of_round = self._numbers(number, read.rows)
        for value, total, spec in zip(values, of_states, specs, strict=True):
            part = value.narrow(spec.token_dim, earlier, read.number - earlier)
            total.index_add_(spec.token_dim, of_round, part.to(total.dtype))
        if not earlier:
            return
        rounds = self.routes.dealing.rounds_of(read.earlier)
        if layer not in self.owed:
            self.owed[layer] = [
                tuple(v.new_zeros(v.shape, dtype=statistics_dtype(v.dtype)) for v in exported)
                for exported in self.exported[layer]
            ]
        for past in np.unique(rounds).tolist():
            chosen = np.flatnonzero(rounds == past)
            places = upload(np.searchsorted(self.routes.exported[past], read.earlier[chosen]), self.device)
            taken = upload(chosen, self.device)
            for value, total, spec in zip(values, self.owed[layer][past], specs, strict=True):
                total[:, heads].index_add_(spec.token_dim, places, value.index_select(spec.token_dim, taken))

    def _swapped(
        self, messages: Mapping[int, torch.Tensor], reads: Mapping[int, Read], like: Tensors, specs: Sequence[StateSpec]
    ) -> Callable[[], Iterator[tuple[int, Tensors]]]:
        """Begin to exchange states like the given ones with other ranks, in one message to each.

        Args:
            messages: see `_packed`.
            reads: rows of each rank that are received, this rank's own left out.
        """
        shapes = [value.movedim(spec.token_dim, 0).shape[1:] for value, spec in zip(like, specs, strict=True)]
        widths = [value.itemsize * shape.numel() for value, shape in zip(like, shapes, strict=True)]
        dtypes, dims = [value.dtype for value in like], [spec.token_dim for spec in specs]
        others = [rank for rank in reads if rank != self.group.rank]
        swap = self.group.swap(
            messages, {rank: ((reads[rank].number, sum(widths)), torch.uint8) for rank in others}, self.device
        )
        self._sending.append(swap)

        def arrived() -> Iterator[tuple[int, Tensors]]:
            for source, message in swap.received().items():
                parts = zip(message.split(widths, 1), dtypes, shapes, dims, strict=True)
                yield (
                    source,
                    tuple(
                        part.contiguous().view(dtype).reshape(len(part), *shape).movedim(0, dim)
                        for part, dtype, shape, dim in parts
                    ),
                )

        return arrived


def _sized(value: torch.Tensor, spec: StateSpec, count: int) -> tuple[int, ...]:
    """Return the shape of a state for a number of tokens."""
    return (*value.shape[: spec.token_dim], count, *value.shape[spec.token_dim + 1 :])


def _packed(states: Tensors, specs: Sequence[StateSpec]) -> torch.Tensor:
    """Pack states of some tokens into one message: bytes, token by token."""
    rows = [value.movedim(spec.token_dim, 0).flatten(1).contiguous() for value, spec in zip(states, specs, strict=True)]
    return torch.cat([row.view(torch.uint8) for row in rows], 1)
