"""Operator `dta::table_rows`: the row of a table of features that each placeholder token reads.

Encoders (of images, audio) make one feature per placeholder token of the batch; equal inputs give equal features, which
are rows of a table. The table is a computed weight, and the row number an integer of the token like its id.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager

import torch

from dta_compile.attributes import attribute_set
from dta_compile.errors import RuntimeContractError
from dta_compile.ops.library import define


class _OfThread(threading.local):
    """Whether calls are of a part of a batch, with all of its features."""

    is_part = False


_of_thread = _OfThread()


def part_of_batch() -> AbstractContextManager[None]:
    """Allow fewer placeholders than features, as in some rows and columns of a batch (the self-check's small call)."""
    return attribute_set(_of_thread, "is_part", True)


def _table_rows(mask: torch.Tensor, rows: torch.Tensor, exact: bool = False) -> torch.Tensor:
    """Return `rows[k]` at the k-th true entry of `mask` in row-major order, and 0 elsewhere.

    Args:
        mask: bool, of any shape: whether a token is a placeholder.
        rows: int64 `[N]`: the row of the table that holds the k-th feature.
        exact: fewer placeholders than features are an error, too, except in a `part_of_batch`.

    Raises:
        RuntimeContractError: there are more placeholders than features.
    """
    placeholders = int(mask.sum())
    if placeholders > len(rows) or (exact and placeholders < len(rows) and not _of_thread.is_part):
        raise unequal_counts(f"{len(rows)}, one per feature", str(placeholders))
    index = torch.zeros(mask.shape, dtype=torch.int64, device=mask.device)
    return index.masked_scatter_(mask, rows.to(mask.device))


TABLE_ROWS = define(
    "table_rows(Tensor mask, Tensor rows, bool exact=False) -> Tensor",
    lambda mask, *_, **__: torch.empty(mask.shape, dtype=torch.int64, device=mask.device),
    _table_rows,
)


def unequal_counts(expected: str, got: str) -> RuntimeContractError:
    """Return the error for placeholder tokens and features that do not belong together."""
    return RuntimeContractError(
        "there are not as many placeholder tokens as features of images (or other media)",
        expected=expected,
        got=got,
        hint="check that input ids and pixel values belong together, and that no row was cut inside of an image",
    )
