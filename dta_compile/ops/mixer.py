"""Token mixers: the operators by which tokens see those above them, and what stays on the path for that.

All else in a model treats every token by itself. A mixer is three operators: `call` over the whole batch, in lowered
graphs; `chunk` and `backward` over one chunk, in executable graphs, where they become calls on the runtime's path. What
stays on the path is either what some operands hold of each token, the mixer's *states*, which can be sliced: those of
attention; or one *running state*, which every token changes, and which is kept at chosen depths: that of a recurrence.
The chunks below read it there, and leave gradients for it. How a layer is computed is said in the runtime, see
`runtime.calls.mixers`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

BATCH, TOKENS = "batch", "tokens"


class Operand(NamedTuple):
    """A tensor argument of a mixer: its name, the word for several of it, and whether it stays on the path.

    One that does not have tokens is the same for all of them, a parameter for instance.
    """

    name: str
    plural: str
    is_state: bool = False
    has_tokens: bool = True


class BackwardArguments(NamedTuple):
    """What `backward` of a mixer takes besides the layer and the gradient of the output.

    Attributes:
        results: what `chunk` gave: the output, then the residuals.
    """

    operands: tuple[Any, ...]
    results: tuple[Any, ...]
    constants: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Mixer:
    """One way of mixing tokens. The arguments of its operators, none of which has a default:

        call(*operands, ...) -> out                                          of the whole batch
        chunk(int layer, *operands, *constants) -> (out, *residuals)         of a chunk
        backward(int layer, grad, *operands, out, *residuals, *constants) -> gradients of the operands

    `out` and the operands, as far as they have tokens, have the dimensions `dims`, perhaps fewer features; the first
    ones do, and the batch has size one in a chunk. `backward` may leave out all results. `chunk` has a derivative
    (`register_autograd`) that calls `backward`; neither has an implementation. An operator with one result returns it
    as such, not a tuple.

    Attributes:
        functions: what a user's graph calls, as Dynamo captures it; they take the operands first.
        dims: what each dimension counts: "batch", "tokens", and names of features.
        constants: the arguments of `call`, by position, that `chunk` takes after the operands.
        running_state: of the operands of a call, `[shape]` and dtype of the state after a token; None: it has none. It
            is zero before the first token.
        silent: operands, by position, each of which leaves a state of zero alone at the tokens where it is zero.
        segments: the argument of `call`, by position, that numbers the sequences of packed rows `[B, S]`, if it is not
            None; 0 is padding. Only where there is a running state.
        may_restart: whether its state may start anew with each sequence of a packed row where no argument says so.
        scratch: of the operands of a chunk, what running a layer forward and backward allocates besides its results, in
            bytes per token; None: as much again as `out` and as the gradients.
    """

    name: str
    functions: tuple[Callable[..., Any], ...]
    call: torch._ops.OpOverload
    chunk: torch._ops.OpOverload
    backward: torch._ops.OpOverload
    operands: tuple[Operand, ...]
    dims: tuple[str, ...]
    constants: tuple[int, ...] = ()
    running_state: Callable[[Sequence[torch.Tensor]], tuple[Sequence[int], torch.dtype]] | None = None
    silent: tuple[int, ...] = ()
    segments: int | None = None
    may_restart: bool = True
    scratch: Callable[[Sequence[torch.Tensor]], tuple[float, float]] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _registered, (str(self.call),)

    @property
    def batch_dim(self) -> int:
        """Which dimension of an operand counts sequences."""
        return self.dims.index(BATCH)

    @property
    def token_dim(self) -> int:
        """Which dimension of an operand counts tokens."""
        return self.dims.index(TOKENS)

    @functools.cached_property
    def states(self) -> tuple[int, ...]:
        """Which of the operands stay on the path."""
        return tuple(i for i, operand in enumerate(self.operands) if operand.is_state)

    def operands_of(self, arguments: Sequence[Any]) -> tuple[Any, ...]:
        """The operands among the arguments of `call`, or of `chunk` after the layer."""
        return tuple(arguments[: len(self.operands)])

    def over_tokens(self, arguments: Sequence[Any]) -> list[tuple[Operand, Any]]:
        """Those of the operands that have tokens, among the arguments of `call`."""
        return [
            (operand, value)
            for operand, value in zip(self.operands, self.operands_of(arguments), strict=True)
            if operand.has_tokens
        ]

    def states_of(self, arguments: Sequence[Any]) -> tuple[Any, ...]:
        """Those of the operands that stay on the path."""
        return tuple(arguments[i] for i in self.states)

    def chunk_arguments(self, operands: Sequence[Any], arguments: Sequence[Any]) -> tuple[Any, ...]:
        """The arguments of `chunk` after the layer, for a chunk's operands and the `arguments` of `call`."""
        return (*operands, *(arguments[i] for i in self.constants))

    def backward_arguments(self, arguments: Sequence[Any]) -> BackwardArguments:
        """The arguments of `backward` after the layer and the gradient, taken apart."""
        first, last = len(self.operands), len(arguments) - len(self.constants)
        return BackwardArguments(self.operands_of(arguments), tuple(arguments[first:last]), tuple(arguments[last:]))


MIXERS: dict[Any, Mixer] = {}  # by the operator `call`; filled while modules are imported


def register_mixer(mixer: Mixer) -> Mixer:
    """Let graphs that call a mixer run over a tree; `runtime.calls.mixers.RUNTIMES` says how it is computed there."""
    MIXERS[mixer.call] = mixer
    return mixer


def _registered(call: str) -> Mixer:
    """The mixer whose `call` has this name."""
    return next(mixer for operator, mixer in MIXERS.items() if str(operator) == call)


def mixer_of_chunk(target: object) -> Mixer | None:
    """The mixer whose `chunk` an operator is."""
    return next((mixer for mixer in MIXERS.values() if mixer.chunk is target), None)


def mixer_of_backward(target: object) -> Mixer | None:
    """The mixer whose `backward` an operator is."""
    return next((mixer for mixer in MIXERS.values() if mixer.backward is target), None)


def has_several_results(operator: torch._ops.OpOverload) -> bool:
    """Whether an operator returns a tuple."""
    return len(operator._schema.returns) > 1
