"""A token sequence with what is known of it, and what readers are told."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["LOSSES", "TURNS", "ReadOptions", "Recorded", "spans_of_mask"]

TURNS, LOSSES = ("each", "whole"), ("last", "all")


@dataclasses.dataclass(frozen=True, eq=False)
class Recorded:
    """A token sequence of a file.

    Attributes:
        tokens: `[n]` ids, a list or an array.
        routes: `[n, ...]` what was recorded of its tokens and is replayed; None: nothing.
        spans: half-open ranges of the positions of the tokens that are trained on; None: not known.
        trajectory: what has the same one is of one conversation; None: not known.
        turn: number of the turn that it ends with, in its trajectory; None: not known.
        reward: of its trajectory; None: not known.
        name: for people; None: it has none.
    """

    tokens: Any
    routes: Any | None = None
    spans: tuple[tuple[int, int], ...] | None = None
    trajectory: int | str | None = None
    turn: int | None = None
    reward: float | None = None
    name: str | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def loss_mask(self) -> NDArray[np.bool_]:
        """`[n]`, true at the positions of the tokens that are trained on; all of them if that is not known."""
        if self.spans is None:
            return np.ones(len(self.tokens), bool)
        mask = np.zeros(len(self.tokens), bool)
        for start, stop in self.spans:
            mask[start:stop] = True
        return mask


@dataclasses.dataclass(frozen=True)
class ReadOptions:
    """How files are read that have no token ids.

    Attributes:
        tokenizer: name or folder of a tokenizer of transformers, or a `tokenizer.json`; None: there is none.
        chat_template: file with another chat template than the tokenizer's, or the template itself.
        template_values: further values that the template is given, such as `enable_thinking`.
        turns: "each" assistant turn of a transcript is a sample of its own, with all messages before it, or the "whole"
            transcript is one sample.
        loss: the "last" assistant turn of a sample is trained on, or "all" of them; None: the last for "each", all for
            "whole".
        split: which split of a folder of several.
    """

    tokenizer: str | None = None
    chat_template: str | None = None
    template_values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    turns: str = "each"
    loss: str | None = None
    split: str | None = None

    @property
    def trains_all(self) -> bool:
        """Whether all assistant turns of a sample are trained on."""
        return (self.loss or ("all" if self.turns == "whole" else "last")) == "all"


def spans_of_mask(mask: Any) -> tuple[tuple[int, int], ...]:
    """The half-open runs of true entries of a mask `[n]`."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], np.asarray(mask, bool), [False]])))
    return tuple(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
