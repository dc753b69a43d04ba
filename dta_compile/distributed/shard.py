"""`scatter`: redistribute the rows of all ranks, a balanced prefix tree to each (see `dta_compile.balance`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Literal

import numpy as np
import torch

from dta_compile.distributed.group import Group, GroupLike, IntArray, RowLocations, transfer
from dta_compile.errors import OptionError, RuntimeContractError
from dta_compile.plan import CostModel, PrefixTree, balance

PADDING = {"labels": -100}  # padding other than 0, by field; losses ignore this label

# Smallest shard. Few models run without rows, and torch.compile specialises sizes 0 and 1, also those of slices such as
# `ids[:, 1:]`. Packed shards always have one row, on all ranks.
LEAST_ROWS, LEAST_COLUMNS = 2, 8

PER_SEQUENCE_HINT = "a packed row has no value of its own: give every token the value of its sequence"


@dataclasses.dataclass(frozen=True)
class Shard:
    """Batch that a rank trains after `scatter`.

    Attributes:
        batch: the fields of this rank's rows: `[B', ...]`, or `[B', S', ...]` padded on the right, with rows in
            lexicographic order. B' is at least 2 and S' at least 8: a rank with fewer gets empty rows and columns at
            the end, which are ordinary padding. Packed: one row `[1, T', ...]` of the sequences in lexicographic order,
            with padding only if T' would be less than 8.
        rows: number of this rank's real rows, which come first; 0 on some ranks if there are fewer rows than ranks.
            Packed: number of sequences in the row.
        costs: number of tree tokens of every rank.
    """

    batch: dict[str, torch.Tensor]
    rows: int
    costs: list[int]
    _group: Group = dataclasses.field(repr=False)
    _origin: RowLocations = dataclasses.field(repr=False)
    _here: RowLocations = dataclasses.field(repr=False)
    _lengths: IntArray = dataclasses.field(repr=False)
    _packed: bool = dataclasses.field(repr=False)

    @property
    def imbalance(self) -> float:
        """Largest cost over mean cost: 1.0 if all ranks have equal work."""
        return max(self.costs) * len(self.costs) / max(sum(self.costs), 1)

    def to_owners(self, values: torch.Tensor, fill: float = 0.0, *, per_token: bool | None = None) -> torch.Tensor:
        """Send results back to the ranks that owned the rows before `scatter`; a collective of all ranks.

        Args:
            values: `[B', ...]` one entry per row of `batch`, or `[B', S', ...]` one per token, with S' as in `batch`.
                Packed: only per token, `[1, T', ...]`.
            fill: value at padding.
            per_token: which of the two; None: `[B']` is per row, `[B', S', ...]` per token, anything else an error.

        Returns:
            `[B, ...]` or `[B, S, ...]` for the rows that this rank passed to `scatter`, in their order and with their
            padding. Gradients do not flow back.

        Raises:
            RuntimeContractError: on all ranks, if values do not fit a rank's batch or differ between ranks.
            OptionError: `fill` is no value of this dtype, or packed rows have values per row.
        """
        rows, columns = self._here.shapes[self._group.rank]
        named = {} if per_token is None else {"values": per_token}
        if self._packed:
            _require_tokens(named)
            named = {"values": True}
        field = _agree(self._group, {"values": values}, rows, columns, named)["values"]
        field.require_fill("values", fill)
        return transfer(
            field.fitted(values, rows, columns),
            self._here,
            self._origin,
            self._lengths,
            self._group,
            field.per_token,
            fill,
        )


@dataclasses.dataclass(frozen=True)
class _Field:
    """Type of a field that all ranks agree on: whether it has a token axis, the sizes after it, and its dtype."""

    per_token: bool
    features: tuple[int, ...]
    dtype: torch.dtype

    def require_fill(self, name: str, fill: float) -> None:
        """Raise `OptionError` unless the dtype can hold the padding value."""
        try:
            held = torch.tensor(fill).to(self.dtype).item()
        except (TypeError, ValueError, RuntimeError):
            held = None
        exact = self.dtype.is_floating_point or self.dtype.is_complex
        if held is None or (held != fill and not exact):
            raise OptionError(
                f"field {name!r} cannot be padded with this value", expected=f"a value of {self.dtype}", got=repr(fill)
            )

    def fitted(self, values: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """Return the values, detached; on a rank without rows, an empty tensor of the common type."""
        shape = (rows, columns) if self.per_token else (rows,)
        return values.detach() if rows else values.new_empty((*shape, *self.features), dtype=self.dtype)


@dataclasses.dataclass(frozen=True)
class _Local:
    """Facts about a rank's batch that it sends to the others."""

    shape: tuple[int, int]
    rows: IntArray  # [n] row of each sequence; several per row if packed
    starts: IntArray  # [n] column of its first token
    lengths: IntArray  # [n]


def scatter(
    batch: Mapping[str, torch.Tensor],
    group: GroupLike = None,
    *,
    tokens: str = "input_ids",
    mask: str | None = "attention_mask",
    packed: str | None = None,
    per_row: str | Iterable[str] = (),
    per_token: str | Iterable[str] = (),
    padding: Mapping[str, float] | None = None,
    cost: Literal["tree_tokens"] | CostModel = "tree_tokens",
) -> Shard:
    """Redistribute the rows of all ranks so that every rank gets a prefix tree of nearly equal cost.

    A collective: every rank of the group calls it with its own rows, possibly none. The first rank plans
    (`dta_compile.balance`) so that rows with long common prefixes meet on one rank and the largest cost is small. Then
    each field is moved by one `all_to_all`.

    Packed rows contain several sequences each; then sequences are redistributed, and every rank gets its own as one
    packed row. Padding in packed rows counts as sequences, by the rule for `packed`.

    Args:
        batch: tensors by name, with the same names on every rank: `[B, S, ...]` one entry per token, or `[B]` one per
            row; `[B, K, ...]` per row if `per_row` names it. Widths S and paddings of the ranks may differ.
        group: the ranks; a process group, a one-dimensional mesh, or None for all.
        tokens: name of the token ids `[B, S]`.
        mask: name of the padding mask `[B, S]`, non-zero at real tokens, if the batch has it. A row's tokens span from
            its first to its last real token. None: all columns are tokens.
        packed: name of the numbers `[B, T]` that delimit sequences in packed rows, such as "position_ids": a sequence
            begins wherever the number is not its predecessor plus one, as in transformers. All must begin at 0, since
            any other number could continue the preceding sequence. There is no mask then, and all fields are per token,
            `[B, T, ...]`. Leave out fields that describe positions of sequences in a row (`cu_seq_lens_q`, `seq_idx`),
            since these change.
        per_row: names of fields `[B, K, ...]` without a token axis. These must be named, because by its sizes alone
            such a field would count as per token in any batch where K equals S.
        per_token: names of fields with a token axis; unnamed fields have one if their second size is S.
        padding: padding value by field; by default -100 for "labels" and 0 for all others.
        cost: quantity to balance: "tree_tokens", or seconds by a cost model.

    Raises:
        RuntimeContractError: on all ranks, if a batch is malformed, or batches of two ranks do not fit.
        OptionError: the group is unusable, or the arguments about fields or padding are invalid.
    """
    ranks = Group(group)
    fills = PADDING | dict(padding or {})
    named = _named(tokens, per_row, per_token)
    if packed is not None:
        _require_tokens(named)
        if fills.get(packed, 0) != 0:  # any other number could continue a row's last sequence
            expected = "0, where another one begins"
            raise OptionError(f"padding of {packed!r} tells no sequences", expected=expected, got=repr(fills[packed]))
    batches = ranks.gather_checked(lambda: _read(batch, tokens, mask, packed))
    rows, columns = batches[ranks.rank].shape
    fields = _agree(ranks, batch, rows, columns, named)
    origin, lengths = _origin(batches)
    values = {name: field.fitted(batch[name], rows, columns) for name, field in fields.items()}
    here, costs = _deal(ranks, values[tokens], origin, lengths, cost, packed is not None)
    if unknown := sorted(set(padding or {}) - set(fields)):
        raise OptionError(
            "padding names fields that the batch does not have",
            expected=", ".join(map(repr, fields)),
            got=", ".join(map(repr, unknown)),
        )
    for name in fields.keys() & fills.keys():
        fields[name].require_fill(name, fills[name])
    moved = {
        name: transfer(values[name], origin, here, lengths, ranks, field.per_token, fills.get(name, 0))
        for name, field in fields.items()
    }
    count = int((here.rank == ranks.rank).sum())
    return Shard(moved, count, costs, ranks, origin, here, lengths, packed is not None)


def _read(batch: Mapping[str, torch.Tensor], tokens: str, mask: str | None, packed: str | None) -> _Local:
    ids = batch.get(tokens)
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.is_floating_point():
        got = "nothing" if ids is None else f"{type(ids).__name__} {tuple(getattr(ids, 'shape', ()))}"
        raise RuntimeContractError(
            f"the batch has no token ids {tokens!r}", expected="an integer tensor [rows, tokens]", got=got
        )
    unit, sizes = ("row", ids.shape[:1]) if packed is None else ("token", ids.shape)
    for name, values in batch.items():
        if not isinstance(values, torch.Tensor) or values.shape[: len(sizes)] != sizes:
            raise RuntimeContractError(
                f"field {name!r} is not one entry per {unit}",
                expected=f"a tensor [{', '.join(map(str, sizes))}, ...]",
                got=f"{tuple(values.shape)}" if isinstance(values, torch.Tensor) else type(values).__name__,
                hint=("" if packed is None else f"{PER_SEQUENCE_HINT}; ")
                + f"keep what belongs to no {unit} out of the batch",
            )
    if packed is not None:
        return _packed_sequences(batch, mask, packed)
    return _real_tokens(ids, None if mask is None else batch.get(mask), mask)


def _real_tokens(ids: torch.Tensor, mask: torch.Tensor | None, name: str | None) -> _Local:
    """Return one sequence per row, from its first to its last real token."""
    rows, columns = ids.shape
    real = np.ones((rows, columns), bool)
    if mask is not None:
        if mask.shape != ids.shape:
            raise RuntimeContractError(
                f"the mask {name!r} does not fit the token ids",
                expected=str(tuple(ids.shape)),
                got=str(tuple(mask.shape)),
            )
        real = (mask != 0).cpu().numpy()
    some = real.any(1)
    starts = np.where(some, real.argmax(1) if columns else 0, 0)
    ends = np.where(some, columns - real[:, ::-1].argmax(1) if columns else 0, 0)
    return _Local((rows, columns), np.arange(rows), starts.astype(np.int64), (ends - starts).astype(np.int64))


def _packed_sequences(batch: Mapping[str, torch.Tensor], mask: str | None, packed: str) -> _Local:
    """Return the sequences of packed rows, row by row; together they cover all tokens."""
    if mask is not None and mask in batch:
        raise RuntimeContractError(
            f"packed rows have a mask {mask!r}",
            expected=f"sequences told by {packed!r} alone",
            hint="leave the mask out; or say mask=None, and it is a field like any other",
        )
    numbers = batch.get(packed)
    if numbers is None or numbers.dim() != 2 or numbers.is_floating_point():
        raise RuntimeContractError(
            f"the batch has no {packed!r} that tells sequences",
            expected="an integer tensor [rows, tokens]",
            got="nothing" if numbers is None else f"{numbers.dtype} {tuple(numbers.shape)}",
        )
    values = numbers.cpu().numpy().astype(np.int64)
    begins = np.diff(values, axis=1, prepend=values[:, :1]) != 1
    rows, starts = begins.nonzero()
    if len(late := values[begins].nonzero()[0]):
        row, column = rows[late[0]], starts[late[0]]
        raise RuntimeContractError(
            "a sequence of a packed row does not begin at 0",
            where=f"{packed!r} at row {row}, token {column}",
            expected="0, and one more from each token of a sequence to the next",
            got=f"{values[row, column]}",
            hint="count every sequence from 0, padding too",
        )
    lengths = np.diff(np.flatnonzero(begins), append=begins.size)
    return _Local((values.shape[0], values.shape[1]), rows, starts, lengths)


def _named(tokens: str, per_row: str | Iterable[str], per_token: str | Iterable[str]) -> dict[str, bool]:
    """Return whether a field has a token axis, for the fields that the caller names."""
    rows, columns = ({names} if isinstance(names, str) else set(names) for names in (per_row, per_token))
    columns |= {tokens}
    if both := sorted(rows & columns):
        raise OptionError("a field is per row or per token, not both", got=", ".join(map(repr, both)))
    return dict.fromkeys(rows, False) | dict.fromkeys(columns, True)


def _require_tokens(named: Mapping[str, bool]) -> None:
    """Raise `OptionError` if a field of packed rows is named as per row."""
    if rows := sorted(name for name, per_token in named.items() if not per_token):
        raise OptionError(
            "fields of packed rows are per token", got=f"{', '.join(map(repr, rows))} per row", hint=PER_SEQUENCE_HINT
        )


def _require_clear(name: str, values: torch.Tensor, columns: int, named: Mapping[str, bool]) -> None:
    """Raise unless a field is named or has an unambiguous shape: `[B, S, ...]` per token, or `[B]` per row."""
    fits = values.shape[1:2] == (columns,)
    if named.get(name, fits) and not fits:
        raise RuntimeContractError(
            f"field {name!r} is not one entry per token",
            expected=f"[rows, {columns}, ...]",
            got=f"{tuple(values.shape)}",
        )
    if not fits and values.dim() > 1 and name not in named:
        raise RuntimeContractError(
            f"it is not clear whether {name!r} has one entry per row or one per token",
            expected=f"[rows] or [rows, {columns}, ...]",
            got=f"{tuple(values.shape)}",
            hint=f"scatter(..., per_row=[{name!r}]) says that its second axis does not count tokens (in to_owners: "
            "per_token=False); values per token need all columns, also where there is nothing to predict",
        )


def _agree(
    group: Group, batch: Mapping[str, torch.Tensor], rows: int, columns: int, named: Mapping[str, bool]
) -> dict[str, _Field]:
    """Agree on the fields of the batch with all ranks, in one order; `named` says which have a token axis."""

    def describe() -> tuple[int, dict[str, tuple[bool, tuple[int, ...], torch.dtype]]]:
        if rows and any(len(values) != rows for values in batch.values()):
            raise RuntimeContractError("values do not fit the batch", expected=f"[{rows}, ...]")
        fields_here = {}
        for name, values in batch.items():
            per_token = named.get(name, values.shape[1:2] == (columns,))
            if rows:
                _require_clear(name, values, columns, named)
            fields_here[name] = per_token, tuple(values.shape[1:]), values.dtype
        return rows, fields_here

    described = group.gather_checked(describe)
    with_rows = [of_rank for count, of_rank in described if count] or [described[0][1]]
    fields = {}
    for name, (_, sizes, dtype) in with_rows[0].items():
        same = [of_rank[name] for of_rank in with_rows if name in of_rank]
        per_token = all(field[0] for field in same)
        features = sizes[1:] if per_token else sizes
        if len(same) < len(with_rows) or any((field[1][per_token:], field[2]) != (features, dtype) for field in same):
            raise RuntimeContractError(
                f"the ranks disagree about field {name!r}",
                expected="the same names, dtypes and sizes (but for rows and tokens) on all ranks",
                got=", ".join(sorted({f"{field[2]} {list(field[1])}" for field in same}))
                + f" on {len(same)} of {len(with_rows)}",
            )
        fields[name] = _Field(per_token, tuple(features), dtype)
    if unknown := {name for of_rank in with_rows for name in of_rank} - set(fields):
        raise RuntimeContractError(f"only some ranks have the fields {sorted(unknown)}")
    return fields


def _origin(batches: list[_Local]) -> tuple[RowLocations, IntArray]:
    """Return the locations of all sequences, by rank and then by row, and their numbers of tokens."""
    rank = np.repeat(np.arange(len(batches)), [len(local.lengths) for local in batches])
    rows, starts, lengths = (
        np.concatenate([getattr(local, name) for local in batches]) for name in ("rows", "starts", "lengths")
    )
    return RowLocations(rank, rows, starts, [local.shape for local in batches]), lengths


def _deal(
    group: Group,
    ids: torch.Tensor,
    origin: RowLocations,
    lengths: IntArray,
    cost: Literal["tree_tokens"] | CostModel,
    packed: bool,
) -> tuple[RowLocations, list[int]]:
    """Plan on the first rank; return the new locations of all sequences and the tree tokens of every rank."""
    count = len(lengths)
    rows, starts, shape = _in_one_row(lengths)
    on_first = RowLocations(np.zeros(count, np.int64), rows, starts, [shape, *([(0, 0)] * (group.size - 1))])
    gathered = transfer(ids, origin, on_first, lengths, group, True, 0)

    def plan() -> tuple[list[list[int]], list[int]]:
        sequences = np.split(gathered[0, : lengths.sum()].cpu().numpy(), np.cumsum(lengths)[:-1]) if count else []
        groups = balance(sequences, group.size, cost)
        return groups, [PrefixTree.build([sequences[i] for i in chosen]).num_rows for chosen in groups]

    groups, costs = group.from_first(plan)
    rank, row, start = np.zeros((3, count), np.int64)
    shapes = []
    for number, chosen in enumerate(groups):
        rank[chosen] = number
        row[chosen], start[chosen], shape = (_in_one_row if packed else _in_rows)(lengths[chosen])
        shapes.append(shape)
    return RowLocations(rank, row, start, shapes), costs


def _in_rows(lengths: IntArray) -> tuple[IntArray, IntArray, tuple[int, int]]:
    """Place each sequence of a rank in its own row; return rows, starts and the shape of the batch."""
    count, longest = len(lengths), int(lengths.max(initial=0))
    shape = max(count, LEAST_ROWS), max(longest, LEAST_COLUMNS)
    return np.arange(count), np.zeros_like(lengths), shape


def _in_one_row(lengths: IntArray) -> tuple[IntArray, IntArray, tuple[int, int]]:
    """Place all sequences of a rank in one row; return rows, starts and the shape of the batch."""
    return np.zeros_like(lengths), np.cumsum(lengths) - lengths, (1, max(int(lengths.sum()), LEAST_COLUMNS))
