"""Sequences by which rows of a trainer's data set are told to share prefixes, before they are collated."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dta_compile.errors import OptionError

# Columns in order of their tokens; those after the first are what follows a prompt.
IDS = (("input_ids",), ("prompt_ids", "chosen_ids", "completion_ids"))
TEXTS = (("messages",), ("prompt", "chosen", "completion"), ("text",))


def prefix_keys(dataset: Any) -> list[NDArray[Any]]:
    """Return by row a sequence of integers that begins like that of another row as far as their tokens do.

    Token ids where the rows have them, or else the bytes of their texts or messages.

    Args:
        dataset: of the package `datasets`, or one whose items are dictionaries.

    Raises:
        OptionError: the rows have neither, or token ids that are no integers.
    """
    names = getattr(dataset, "column_names", None)
    names = names if names is not None else list(dataset[0]) if len(dataset) else []
    chosen = next(([name for name in group if name in names] for group in (*IDS, *TEXTS) if group[0] in names), [])
    if names and not chosen:
        columns = ", ".join(group[0] for group in (*IDS, *TEXTS))
        raise _no_tokens(f"a column of {columns}", ", ".join(map(str, names)))
    if hasattr(dataset, "column_names"):
        rows = zip(*(dataset[name] for name in chosen), strict=True)
    else:
        rows = (tuple(dataset[i][name] for name in chosen) for i in range(len(dataset)))  # type: ignore[assignment]
    return [np.concatenate([_key(value) for value in row]) for row in rows]


def _key(value: Any) -> NDArray[Any]:
    value = [] if value is None else value
    if isinstance(value, (str, Mapping)) or (len(value) and isinstance(value[0], Mapping)):  # messages
        text = value if isinstance(value, str) else json.dumps(value, default=_same_everywhere)
        return np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)
    ids = np.asarray(value) if len(value) else np.zeros(0, np.int32)
    if ids.dtype.kind not in "iu" or ids.ndim != 1:
        raise _no_tokens("integers", f"{ids.dtype} of shape {list(ids.shape)}")
    narrow = ids.astype(np.int32)  # a data set has many
    return narrow if np.array_equal(narrow, ids) else ids


def _same_everywhere(value: Any) -> str:
    """Return a text for an object in a message, such as an image, that equal ones have in every process."""
    contents = value if isinstance(value, bytes) else value.tobytes() if hasattr(value, "tobytes") else b""
    return f"{type(value).__name__} {hashlib.sha256(contents).hexdigest()}"


def _no_tokens(expected: str, got: str) -> OptionError:
    return OptionError(
        "rows without tokens cannot be grouped by their prefixes", where="data set", expected=expected, got=got
    )
