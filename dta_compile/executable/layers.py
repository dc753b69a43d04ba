"""The mixer layers of a model: the operator of each, the state it keeps per token, and the masks of attention."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from dta_compile.executable.masks import MaskProgram
from dta_compile.ops.mixer import Mixer
from dta_compile.ops.scoring import UNSCALED, Scoring
from dta_compile.proofs.terms import Leaf, Term


@dataclasses.dataclass(frozen=True)
class StateSpec:
    """State that a layer keeps per token: a tensor of `shape`, with batch and token dimensions of size one."""

    shape: tuple[int, ...]
    token_dim: int
    dtype: torch.dtype

    def of_tokens(self, count: int) -> tuple[int, ...]:
        """Return the shape for `count` tokens."""
        return (*self.shape[: self.token_dim], count, *self.shape[self.token_dim + 1 :])


@dataclasses.dataclass(frozen=True)
class MixerLayer:
    """One call of a mixer; `states` describe the operands that stay on the path, `where` is the user's source line."""

    index: int
    mixer: Mixer
    states: tuple[StateSpec, ...]
    where: str

    @property
    def leaves(self) -> frozenset[Leaf]:
        """Return the tensors of a call that tell which tokens are padding and where sequences begin."""
        return frozenset()


@dataclasses.dataclass(frozen=True)
class RunningSpec:
    """Running state of a recurrence: one tensor for all tokens so far."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Return the bytes of one state."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class RecurrentLayer(MixerLayer):
    """A call of a mixer with a running state.

    Attributes:
        running: its state.
        mask: the tokens of each sequence, if the call has segments.
        silencers: tensors of one number per token; a zero state stays zero at tokens where one of them is zero.
        padding: pairs (input, silencer) for the silencers that are a padding mask given by an input.
    """

    running: RunningSpec
    mask: MaskProgram | None
    silencers: frozenset[Leaf]
    padding: frozenset[tuple[Leaf, Leaf]]

    @property
    def leaves(self) -> frozenset[Leaf]:
        """See `MixerLayer.leaves`."""
        return self.silencers | (self.mask.leaves if self.mask else frozenset())


@dataclasses.dataclass(frozen=True)
class AttentionLayer(MixerLayer):
    """One attention call: `q [B, Hq, S, D]`, `k [B, Hkv, S, D]`, `v [B, Hkv, S, Dv]`; causal if it has no mask.

    Attributes:
        scoring: how its scores come from products.
        chooser: index of the layer that chose the keys it reads; None: it reads all that its mask allows.
        block: adjacent keys that are chosen together.
        forced: scores over "query" and "block" that replace those of the index, NaN elsewhere; None: there are none.
        has_bias_of_earlier_keys: a bias by distance, among the features of queries and keys, is right for keys that are
            no later than the query.
    """

    mask: MaskProgram | None
    scoring: Scoring = UNSCALED
    chooser: int | None = None
    block: int = 1
    forced: Term | None = None
    has_bias_of_earlier_keys: bool = False

    @property
    def leaves(self) -> frozenset[Leaf]:
        """See `MixerLayer.leaves`."""
        return self.mask.leaves if self.mask else frozenset()

    @property
    def kv_heads(self) -> int:
        """Return the number of heads of keys and values."""
        return self.states[0].shape[1]

    @property
    def key_dim(self) -> int:
        """Return the head dimension of queries and keys."""
        return self.states[0].shape[3]

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of keys and values."""
        return self.states[0].dtype


class HasMixers:
    """Mixin for objects with mixer layers: a program, and its executable."""

    mixers: Sequence[MixerLayer]

    @property
    def attention(self) -> list[AttentionLayer]:
        """Return the attention layers."""
        return [layer for layer in self.mixers if isinstance(layer, AttentionLayer)]

    @property
    def recurrent(self) -> list[RecurrentLayer]:
        """Return the layers with a running state."""
        return [layer for layer in self.mixers if isinstance(layer, RecurrentLayer)]
