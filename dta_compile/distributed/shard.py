"""scatter: the rows of all ranks dealt out anew, a balanced prefix tree to each (see `dta_compile.balance`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Literal

import numpy as np
import torch

from dta_compile.distributed.group import Group, GroupLike, IntArray, RowLocations, to_first, transfer
from dta_compile.errors import OptionError, RuntimeContractError
from dta_compile.plan import CostModel, PrefixTree, balance

PADDING = {"labels": -100}  # of the fields that are not padded with zeros; the value that losses ignore

# Of a shard. Few models run without rows, and torch.compile traces sizes of 0 and 1 by themselves, also those of slices
# such as `ids[:, 1:]`. Packed shards are one row everywhere, and always.
LEAST_ROWS, LEAST_COLUMNS = 2, 8

PER_SEQUENCE_HINT = "a packed row has no value of its own: give every token the value of its sequence"


@dataclasses.dataclass(frozen=True)
class Shard:
    """What a rank trains after `scatter`.

    Attributes:
        batch: the fields of the batch, of this rank's rows: `[B', ...]`, or `[B', S', ...]` padded on the right. Rows
            are in lexicographic order. B' is at least 2 and S' at least 8: a rank with less has empty rows and columns
            at the end, which are padding like any other. Of packed rows: one row `[1, T', ...]` of the sequences, in
            lexicographic order one after the other, and padding only where T' would be less than 8.
        rows: this rank's real rows, the first ones of B'; 0 on some ranks if there are fewer rows than ranks. Of packed
            rows: the sequences in the one row.
        costs: tree tokens of every rank.
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
        """Largest over mean cost: 1.0 where all ranks have the same work."""
        return max(self.costs) * len(self.costs) / max(sum(self.costs), 1)

    def to_owners(self, values: torch.Tensor, fill: float = 0.0, *, per_token: bool | None = None) -> torch.Tensor:
        """Results of rows, sent back to the ranks that brought the rows; all ranks of the group must call it.

        Args:
            values: `[B', ...]` one entry per row of `batch`, or `[B', S', ...]` one per token, with S' as in `batch`.
                Of packed rows only per token, `[1, T', ...]`.
            fill: what stands at padding.
            per_token: which of the two; None: `[B']` is per row, `[B', S', ...]` per token, anything else an error.

        Returns:
            `[B, ...]` or `[B, S, ...]` for the rows that this rank gave to `scatter`, in their order and with their
            padding. No gradient flows back.

        Raises:
            RuntimeContractError: on all ranks, if the values of one do not fit its batch, or those of two each other.
            OptionError: padding of values of this dtype cannot be `fill`, or packed rows are to have values per row.
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
    """What all ranks know of a tensor of the batch: whether it has a token axis, the sizes after it, and its dtype."""

    per_token: bool
    features: tuple[int, ...]
    dtype: torch.dtype

    def require_fill(self, name: str, fill: float) -> None:
        """Raise unless padding of this value is possible."""
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
        """The values, detached; of a rank without rows none, but of the right kind."""
        shape = (rows, columns) if self.per_token else (rows,)
        return values.detach() if rows else values.new_empty((*shape, *self.features), dtype=self.dtype)


@dataclasses.dataclass(frozen=True)
class _Local:
    """What a rank tells the others of its batch."""

    shape: tuple[int, int]
    rows: IntArray  # [n] the row of every sequence: one each, or several where rows are packed
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
    """Deal the rows of all ranks out anew: every rank gets a prefix tree of nearly equal cost.

    Every rank of the group calls it with rows of its own, of which there may be none. The first rank plans
    (`dta_compile.balance`), so that rows with long common prefixes meet on one rank and the slowest has little to do.
    Then the rows travel with one `all_to_all` per field.

    Packed rows hold several sequences each, and their sequences are dealt out instead: every rank gets its own as one
    packed row. Padding that the rows have is sequences like any other, as the rule for `packed` has it.

    Args:
        batch: tensors by name, with the same names on every rank: `[B, S, ...]` one entry per token, or `[B]` one per
            row; `[B, K, ...]` per row if `per_row` names it. Widths S and paddings of the ranks may differ.
        group: the ranks; a process group, a one-dimensional mesh, or None for all.
        tokens: name of the token ids `[B, S]`.
        mask: name of the padding mask `[B, S]`, not 0 at real tokens, if the batch has it. A row's tokens are those
            from the first to the last of them. Without the name all columns are tokens.
        packed: name of the numbers `[B, T]` that tell the sequences of packed rows, such as "position_ids": another one
            begins wherever the number is not the one before plus one, as in transformers. All have to begin at 0: any
            other number could continue the sequence that it is put after. There is no mask then, and all fields are per
            token, `[B, T, ...]`. What says where sequences are in a row (`cu_seq_lens_q`, `seq_idx`) is not true of the
            shard: leave it out.
        per_row: names of fields `[B, K, ...]` that have no token axis. They have to be named: by its size alone such a
            field would be taken for one per token in every batch where K happens to be S.
        per_token: names of fields that do have one; the others with S as their second size are taken to have one, too.
        padding: by name what a field is padded with; by default -100 for "labels" and 0 for all others.
        cost: what is to be nearly equal: "tree_tokens", or seconds by a cost model.

    Raises:
        RuntimeContractError: on all ranks, if the batch of one is malformed, or two do not fit.
        OptionError: the group is of no use, or what is said of fields or their padding cannot be.
    """
    ranks = Group(group)
    fills = PADDING | dict(padding or {})
    named = _named(tokens, per_row, per_token)
    if packed is not None:
        _require_tokens(named)
        _require_restart(packed, fills)
    told = ranks.gather_checked(lambda: _read(batch, tokens, mask, packed))
    rows, columns = told[ranks.rank].shape
    fields = _agree(ranks, batch, rows, columns, named)
    origin, lengths = _origin(told)
    rectangles = {name: field.fitted(batch[name], rows, columns) for name, field in fields.items()}
    here, costs = _deal(ranks, rectangles[tokens], origin, lengths, cost, packed is not None)
    _require_known("padding", padding or {}, fields)
    for name in fields.keys() & fills.keys():
        fields[name].require_fill(name, fills[name])
    moved = {
        name: transfer(rectangles[name], origin, here, lengths, ranks, field.per_token, fills.get(name, 0))
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
    """A sequence for every row, of the tokens that the mask has."""
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
    """The sequences of packed rows, row by row; together they are all tokens."""
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
    """By name whether a field has a token axis, as far as the caller says so."""
    rows, columns = ({names} if isinstance(names, str) else set(names) for names in (per_row, per_token))
    columns |= {tokens}
    if both := sorted(rows & columns):
        raise OptionError("a field is per row or per token, not both", got=", ".join(map(repr, both)))
    return dict.fromkeys(rows, False) | dict.fromkeys(columns, True)


def _require_tokens(named: Mapping[str, bool]) -> None:
    """Raise if a field of packed rows is named as one without a token axis."""
    if rows := sorted(name for name, per_token in named.items() if not per_token):
        raise OptionError(
            "fields of packed rows are per token", got=f"{', '.join(map(repr, rows))} per row", hint=PER_SEQUENCE_HINT
        )


def _require_restart(packed: str, fills: Mapping[str, float]) -> None:
    """Raise if padding could go on with a row's last sequence: all begin at 0, so that no 0 can."""
    if fills.get(packed, 0) != 0:
        raise OptionError(
            f"padding of {packed!r} tells no sequences", expected="0, where another one begins", got=repr(fills[packed])
        )


def _require_known(what: str, names: Iterable[str], fields: Mapping[str, object]) -> None:
    if unknown := sorted(set(names) - set(fields)):
        raise OptionError(
            f"{what} names fields that the batch does not have",
            expected=", ".join(map(repr, fields)),
            got=", ".join(map(repr, unknown)),
        )


def _require_clear(name: str, values: torch.Tensor, columns: int, named: Mapping[str, bool]) -> None:
    """Raise unless a field is named, or known by its shape: `[B, S, ...]` has a token axis and `[B]` has none."""
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
    """The fields of the batch, the same on all ranks, in one order; `named` says which of them have a token axis."""

    def describe() -> tuple[int, dict[str, tuple[bool, tuple[int, ...], torch.dtype]]]:
        if rows and any(len(values) != rows for values in batch.values()):
            raise RuntimeContractError("values do not fit the batch", expected=f"[{rows}, ...]")
        found = {}
        for name, values in batch.items():
            per_token = named.get(name, values.shape[1:2] == (columns,))
            if rows:
                _require_clear(name, values, columns, named)
            found[name] = per_token, tuple(values.shape[1:]), values.dtype
        return rows, found

    told = group.gather_checked(describe)
    speaking = [found for count, found in told if count] or [told[0][1]]
    fields = {}
    for name, (_, sizes, dtype) in speaking[0].items():
        same = [found[name] for found in speaking if name in found]
        per_token = all(one[0] for one in same)
        features = sizes[1:] if per_token else sizes
        if len(same) < len(speaking) or any((one[1][per_token:], one[2]) != (features, dtype) for one in same):
            raise RuntimeContractError(
                f"the ranks disagree about field {name!r}",
                expected="the same names, dtypes and sizes (but for rows and tokens) on all ranks",
                got=", ".join(sorted({f"{one[2]} {list(one[1])}" for one in same}))
                + f" on {len(same)} of {len(speaking)}",
            )
        fields[name] = _Field(per_token, tuple(features), dtype)
    if unknown := {name for found in speaking for name in found} - set(fields):
        raise RuntimeContractError(f"only some ranks have the fields {sorted(unknown)}")
    return fields


def _origin(told: list[_Local]) -> tuple[RowLocations, IntArray]:
    """Where all sequences are, and how many tokens they have: by rank, then by row."""
    rank = np.repeat(np.arange(len(told)), [len(local.lengths) for local in told])
    rows, starts, lengths = (
        np.concatenate([getattr(local, name) for local in told]) for name in ("rows", "starts", "lengths")
    )
    return RowLocations(rank, rows, starts, [local.shape for local in told]), lengths


def _deal(
    group: Group,
    ids: torch.Tensor,
    origin: RowLocations,
    lengths: IntArray,
    cost: Literal["tree_tokens"] | CostModel,
    packed: bool,
) -> tuple[RowLocations, list[int]]:
    """Where all sequences shall be, and the tree tokens of every rank; planned by the first rank."""
    count = len(lengths)
    gathered = to_first(ids, origin, lengths, group)

    def plan() -> tuple[list[list[int]], list[int]]:
        sequences = np.split(gathered.cpu().numpy(), np.cumsum(lengths)[:-1]) if count else []
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
    """Row and start of a rank's sequences, and its rectangle: a row each."""
    count, longest = len(lengths), int(lengths.max(initial=0))
    shape = max(count, LEAST_ROWS), max(longest, LEAST_COLUMNS)
    return np.arange(count), np.zeros_like(lengths), shape


def _in_one_row(lengths: IntArray) -> tuple[IntArray, IntArray, tuple[int, int]]:
    """Row and start of a rank's sequences, and its rectangle: one after the other."""
    return np.zeros_like(lengths), np.cumsum(lengths) - lengths, (1, max(int(lengths.sum()), LEAST_COLUMNS))
