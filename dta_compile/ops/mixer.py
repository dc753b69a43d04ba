"""Token mixers: the operators by which tokens read tokens above them in the prefix tree, and the state that needs.

All other operators of a model are token-wise. A mixer is three operators: `call` over the whole batch, in lowered
graphs; `chunk` and `backward` over one chunk, in executable graphs, where they become calls on the runtime's path. The
path holds either *states*, operands with a row per token, which can be sliced (keys and values of attention); or one
*running state*, which every token updates and which is kept at chosen depths (a recurrence). Chunks below read them
there, and leave gradients for them. The runtime decides how a layer is computed, see `runtime.calls.mixers`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from dta_compile.torch_compat.operators import OpOverload

BATCH, TOKENS = "batch", "tokens"


class Operand(NamedTuple):
    """A tensor argument of a mixer: its name, the plural for messages, and whether it stays on the path.

    An operand without tokens is the same for all tokens, for instance a parameter.
    """

    name: str
    plural: str
    is_state: bool = False
    has_tokens: bool = True


class BackwardArguments(NamedTuple):
    """The arguments of a mixer's `backward` after the layer and the gradient of the output.

    Attributes:
        results: the results of `chunk`: the output, then the residuals.
    """

    operands: tuple[Any, ...]
    results: tuple[Any, ...]
    constants: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Mixer:
    """A kind of token mixer. The signatures of its operators, without default arguments:

        call(*operands, ...) -> out                                          over the whole batch
        chunk(int layer, *operands, *constants) -> (out, *residuals)         over a chunk
        backward(int layer, grad, *operands, out, *residuals, *constants) -> gradients of the operands

    `out` and the operands with tokens have the dimensions `dims`, or a prefix of them with fewer feature dimensions;
    the batch has size one in a chunk. `backward` may omit all results. `chunk` has a derivative (`register_autograd`)
    that calls `backward`; neither has an implementation. An operator with one result returns it as such, not a tuple.
    A mixer whose output has no gradient has no `backward`.

    Attributes:
        functions: the functions in a user's graph as Dynamo captures it; they take the operands first.
        dims: meaning of each dimension: "batch", "tokens", and names of features.
        constants: positions of the arguments of `call` that `chunk` takes after the operands.
        running_state: returns shape and dtype of the running state for the operands of a call; None if there is none.
            The state is zero before the first token.
        silent: positions of the operands that, where one of them is zero, leave a zero state unchanged.
        segments: position of the argument of `call` with the numbers of the sequences in packed rows `[B, S]` or None;
            0 is padding. Only for mixers with a running state.
        may_restart: whether the state may restart with each sequence of a packed row if there are no segments.
        scratch: returns, for the operands of a chunk, the bytes per token that forward and backward of a layer allocate
            besides their results; None: as much as `out`, and as much as the gradients.
    """

    name: str
    functions: tuple[Callable[..., Any], ...]
    call: OpOverload
    chunk: OpOverload
    backward: OpOverload | None
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
        """Return the dimension of an operand that runs over sequences."""
        return self.dims.index(BATCH)

    @property
    def token_dim(self) -> int:
        """Return the dimension of an operand that runs over tokens."""
        return self.dims.index(TOKENS)

    @functools.cached_property
    def states(self) -> tuple[int, ...]:
        """Return the positions of the operands that stay on the path."""
        return tuple(i for i, operand in enumerate(self.operands) if operand.is_state)

    def operands_of(self, arguments: Sequence[Any]) -> tuple[Any, ...]:
        """Return the operands among the arguments of `call`, or of `chunk` after the layer."""
        return tuple(arguments[: len(self.operands)])

    def over_tokens(self, arguments: Sequence[Any]) -> list[tuple[Operand, Any]]:
        """Return the operands with tokens among the arguments of `call`."""
        return [
            (operand, value)
            for operand, value in zip(self.operands, self.operands_of(arguments), strict=True)
            if operand.has_tokens
        ]

    def states_of(self, arguments: Sequence[Any]) -> tuple[Any, ...]:
        """Return the operands that stay on the path."""
        return tuple(arguments[i] for i in self.states)

    def chunk_arguments(self, operands: Sequence[Any], arguments: Sequence[Any]) -> tuple[Any, ...]:
        """Return the arguments of `chunk` after the layer, for a chunk's operands and the `arguments` of `call`."""
        return (*operands, *(arguments[i] for i in self.constants))

    def backward_arguments(self, arguments: Sequence[Any]) -> BackwardArguments:
        """Split the arguments of `backward` after the layer and the gradient."""
        first, last = len(self.operands), len(arguments) - len(self.constants)
        return BackwardArguments(self.operands_of(arguments), tuple(arguments[first:last]), tuple(arguments[last:]))


MIXERS: dict[Any, Mixer] = {}  # by the operator `call`; filled while modules are imported
_OF_CHUNK: dict[object, Mixer] = {}  # by the operator `chunk`
_OF_BACKWARD: dict[object, Mixer] = {}


def register_mixer(mixer: Mixer) -> Mixer:
    """Register a mixer, so that graphs with it run over a tree; `runtime.calls.mixers.RUNTIMES` computes it there."""
    MIXERS[mixer.call] = mixer
    _OF_CHUNK.setdefault(mixer.chunk, mixer)
    _OF_BACKWARD.setdefault(mixer.backward, mixer)
    return mixer


def _registered(call: str) -> Mixer:
    """Return the mixer whose `call` has this name."""
    return next(mixer for operator, mixer in MIXERS.items() if str(operator) == call)


def mixer_of_chunk(target: object) -> Mixer | None:
    """Return the mixer with this `chunk` operator, or None."""
    return _OF_CHUNK.get(target)


def mixer_of_backward(target: object) -> Mixer | None:
    """Return the mixer with this `backward` operator, or None."""
    return _OF_BACKWARD.get(target)


def has_several_results(operator: OpOverload) -> bool:
    """Return whether an operator returns a tuple."""
    return len(operator._schema.returns) > 1
