"""The mixer layers of a program: which operator each is, what it keeps of a token, and what masks of attention are."""

from __future__ import annotations

import dataclasses
import math
from typing import Protocol

import sympy
import torch
from torch import fx

from dta_compile.ops.mixer import Mixer
from dta_compile.passes.terms import Term, shown


@dataclasses.dataclass(frozen=True)
class MaskClass:
    """What an attention mask was proven to be: causal, within `window` tokens or by chunks if one is not None.

    The terms are over "row" and "key". What is said of them is what the proof takes for granted; every call checks it.

    Attributes:
        chunk: tokens attend to those of their own chunk of so many tokens of the sequence.
        counted: with `chunk`: a multiple of it at the first token of a sequence, one more from each real token to the
            next. Chunks are where this number, divided by `chunk` and rounded down, is the same.
        valid: which tokens are real (None: all); the others are padding, which no real token attends to.
        segments: two tokens of a row are of one sequence if they have all of these in common; the tokens of a sequence
            are next to each other.
        positions: grow by one from token to token between the real tokens of a sequence.
        binary: zero or one.
        bias: zero or at most -1e4.
        bounded: integers less than 2**31, of either sign.
    """

    window: int | None = None
    chunk: int | None = None
    counted: Term | None = None
    valid: Term | None = None
    segments: tuple[Term, ...] = ()
    positions: tuple[Term, ...] = ()
    binary: tuple[Term, ...] = ()
    bias: tuple[Term, ...] = ()
    bounded: tuple[Term, ...] = ()

    def __str__(self) -> str:
        parts = ["causal" if self.window is None else f"causal, window {self.window}"]
        if self.counted is not None:
            parts.append(f"chunks of {self.chunk} by {shown(self.counted)}")
        if self.valid is not None:
            parts.append(f"real tokens where {shown(self.valid)}")
        parts += [f"a sequence for each {shown(term)}" for term in self.segments]
        parts += [f"consecutive {shown(term)}" for term in self.positions]
        return ", ".join(parts)


class AttentionMask(Protocol):
    """A mask, as far as it is known before any call; printed, its class or what it computes. See `masks.proof`.

    Attributes:
        constant: its class, if that is the same for every call.
        numbers, scalars, tables: what has to be known of a call to say the class otherwise.
        items: tensors that numbers are read from, by the symbol that Dynamo knows the number by.
        leaves: tensors that the class is read from.
    """

    constant: MaskClass | None
    numbers: list[sympy.Expr]
    scalars: set[fx.Node]
    tables: set[fx.Node]
    items: dict[sympy.Symbol, fx.Node]
    leaves: set[fx.Node]


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
    node: fx.Node
    mixer: Mixer
    states: tuple[StateSpec, ...]
    where: str

    @property
    def leaves(self) -> set[fx.Node]:
        """Tensors that have to be known of a call to tell which tokens are padding and where sequences begin."""
        return set()


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
    mask: AttentionMask | None
    silencers: frozenset[fx.Node]
    padding: frozenset[tuple[fx.Node, fx.Node]]

    @property
    def leaves(self) -> set[fx.Node]:
        """See `MixerLayer.leaves`."""
        return set(self.silencers) | (self.mask.leaves if self.mask else set())


@dataclasses.dataclass(frozen=True)
class AttentionLayer(MixerLayer):
    """One attention call: `q [B, Hq, S, D]`, `k [B, Hkv, S, D]`, `v [B, Hkv, S, Dv]`; without a mask it is causal.

    `softcap`: see `ops.attention.Masking`.
    """

    mask: AttentionMask | None
    softcap: float = 0.0

    @property
    def leaves(self) -> set[fx.Node]:
        """See `MixerLayer.leaves`."""
        return self.mask.leaves if self.mask else set()

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
