"""`Recorded`, a token sequence with its metadata, and `ReadOptions`, the options of all readers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dta_compile.errors import OptionError

TURNS, LOSSES = ("each", "whole"), ("last", "all")


@dataclasses.dataclass(frozen=True, eq=False)
class Recorded:
    """Token sequence read from a file, with its metadata.

    Attributes:
        tokens: `[n]` ids, a list or an array.
        routes: `[n, ...]` recorded values per token that are replayed, such as chosen experts; None: none were
            recorded.
        spans: half-open ranges of the positions of trained tokens; None: unknown.
        trajectory: identifies the conversation, shared by all of its sequences; None: unknown.
        turn: number of the sequence's last turn within its trajectory; None: unknown.
        reward: reward of the trajectory; None: unknown.
        name: display name; None: unnamed.
        images: `(start, stop, image)` of the placeholder tokens of each image, whose `image` says which are equal.
    """

    tokens: Any
    routes: Any | None = None
    spans: tuple[tuple[int, int], ...] | None = None
    trajectory: int | str | None = None
    turn: int | None = None
    reward: float | None = None
    name: str | None = None
    images: Sequence[tuple[int, int, int | str]] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    def loss_mask(self) -> NDArray[np.bool_]:
        """Return `[n]` bool, true at the positions of trained tokens; all true if the spans are unknown."""
        if self.spans is None:
            return np.ones(len(self.tokens), bool)
        return mask_of_spans(self.spans, len(self.tokens))


@dataclasses.dataclass(frozen=True)
class ReadOptions:
    """Options for files that contain text instead of token ids.

    Attributes:
        tokenizer: name or folder of a tokenizer of transformers, or a `tokenizer.json`; None: no tokenizer.
        chat_template: file with a chat template that replaces the tokenizer's, or the template itself.
        template_values: extra variables for the template, such as `enable_thinking`.
        turns: "each" makes every assistant turn of a transcript a sample, with all messages before it; "whole" makes
            the transcript one sample.
        loss: train on the "last" assistant turn of a sample or on "all" of them; None: "last" for "each", "all" for
            "whole".
        split: name of the split to read from a folder with several.

    Raises:
        OptionError: `turns` or `loss` is none of these.
    """

    tokenizer: str | None = None
    chat_template: str | None = None
    template_values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    turns: str = "each"
    loss: str | None = None
    split: str | None = None

    def __post_init__(self) -> None:
        for name, choices in (("turns", TURNS), ("loss", (*LOSSES, None))):
            if (value := getattr(self, name)) not in choices:
                expected = ", ".join(map(repr, choices))
                raise OptionError(f"bad value for {name}", expected=expected, got=repr(value))

    @property
    def trains_all(self) -> bool:
        """Whether all assistant turns of a sample are trained on."""
        return (self.loss or ("all" if self.turns == "whole" else "last")) == "all"


def mask_of_spans(spans: Iterable[tuple[int, int]], size: int) -> NDArray[np.bool_]:
    """Return `[size]` bool, true within half-open ranges."""
    mask = np.zeros(size, bool)
    for start, stop in spans:
        mask[start:stop] = True
    return mask


def spans_of_mask(mask: Any) -> tuple[tuple[int, int], ...]:
    """Return the half-open runs of true entries of a mask `[n]`."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], np.asarray(mask, bool), [False]])))
    return tuple(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
