"""The mixer layers of a model: which operator each is, what it keeps of a token, and what masks of attention are."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from dta_compile.executable.masks import MaskProgram
from dta_compile.ops.mixer import Mixer
from dta_compile.proofs.terms import Leaf


@dataclasses.dataclass(frozen=True)
class StateSpec:
    """What a layer keeps of a token: a tensor of `shape`, with batch and token dimensions of size one."""

    shape: tuple[int, ...]
    token_dim: int
    dtype: torch.dtype

    def of_tokens(self, count: int) -> tuple[int, ...]:
        """The shape for so many tokens."""
        return (*self.shape[: self.token_dim], count, *self.shape[self.token_dim + 1 :])


@dataclasses.dataclass(frozen=True)
class MixerLayer:
    """One call of a mixer; `states` are those of its operands that stay on the path."""

    index: int
    mixer: Mixer
    states: tuple[StateSpec, ...]
    where: str

    @property
    def leaves(self) -> frozenset[Leaf]:
        """Tensors that have to be known of a call to tell which tokens are padding and where sequences begin."""
        return frozenset()


@dataclasses.dataclass(frozen=True)
class RunningSpec:
    """What a recurrence keeps of all tokens so far: a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Of one such state."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class RecurrentLayer(MixerLayer):
    """A call of a mixer with a running state.

    Attributes:
        running: the state.
        mask: which tokens are of which sequence, where the call says so.
        silencers: tensors of one number a token; at tokens where one of them is zero, a state of zero stays zero.
        padding: those of them that are padding masks, each after the input that it is.
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
    """One attention call: `q [B, Hq, S, D]`, `k [B, Hkv, S, D]`, `v [B, Hkv, S, Dv]`; without a mask it is causal.

    `softcap`: see `ops.attention.Masking`.
    """

    mask: MaskProgram | None
    softcap: float = 0.0

    @property
    def leaves(self) -> frozenset[Leaf]:
        """See `MixerLayer.leaves`."""
        return self.mask.leaves if self.mask else frozenset()

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.states[0].shape[1]

    @property
    def key_dim(self) -> int:
        """Width of a head of queries and keys."""
        return self.states[0].shape[3]

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and values."""
        return self.states[0].dtype


class HasMixers:
    """What has mixer layers: a program, and what it is compiled to."""

    mixers: Sequence[MixerLayer]

    @property
    def attention(self) -> list[AttentionLayer]:
        """Those of the mixer layers that are attention."""
        return [layer for layer in self.mixers if isinstance(layer, AttentionLayer)]

    @property
    def recurrent(self) -> list[RecurrentLayer]:
        """Those of the mixer layers that have a running state."""
        return [layer for layer in self.mixers if isinstance(layer, RecurrentLayer)]
