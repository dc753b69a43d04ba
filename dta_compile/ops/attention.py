"""Attention as a mixer: operators over a batch, which compute, and operators over a chunk, which are only traced.

Over a batch (`attention_call`, or `sink_attention_call` with sinks) an operator takes all arguments of `Masking`, and
`ops.dense_attention` computes it. Over a chunk it takes the layer's number, and the `joint` pass turns it into a call
on the runtime's path stack, which holds the keys and values of the tokens before the chunk.

A *sink* is, for each head, the score of an additional key in the softmax, whose value is zero; *sinks by token*
`[B, H, S, 1]` have one for each query. A *choice* is, for each query, the keys that it reads of those that it may read
(`chosen_keys`). A *bias by distance* `[B, H, S, n]` has, for each head and query, what is added to the score of the key
`d` tokens before it: entry `min(d, n - 1)`. A *table by distance* `[B, H, S, 1]` has, for each head, what is added to
the score of every key `d` tokens before its query: the entry of the token with `d` tokens of its sequence before it. On
the path it is a state, like keys: a query finds the entries of all its distances, and gradients for them, at the tokens
above it.

With *compressed keys* (DeepSeek-V4) a query also reads, in the same softmax, the compressed keys and values of the last
tokens of whole windows of `stride` tokens, up to its own token, however far above; those of other tokens are not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from dta_compile.ops.chosen_keys import MASKING
from dta_compile.ops.compressed_keys import to_compressed, with_compressed
from dta_compile.ops.dense_attention import attend, attend_backward
from dta_compile.ops.dtypes import statistics_dtype
from dta_compile.ops.library import LIBRARY, define
from dta_compile.ops.mixer import BATCH, TOKENS, Mixer, Operand, register_mixer
from dta_compile.ops.scoring import SCORING, Scoring

OPERANDS = "Tensor query, Tensor key, Tensor value"


class Masking(NamedTuple):
    """The arguments of an operator over a batch after its operands.

    Attributes:
        mask: broadcastable to `[B, 1, S, S]`: bool, True where attention is allowed, or a bias added to the scores.
        is_causal: tokens attend to no later token.
        segments: `[B, S]` integers or bool: tokens attend only to tokens of their own number, and to none of number 0.
        window: number of tokens attended to, including the token itself; 0: unlimited.
        scoring: how scores come from products.
    """

    mask: Any
    is_causal: Any
    segments: Any
    window: Any
    scoring: Scoring

    @classmethod
    def of(cls, mixer: Mixer, arguments: Sequence[Any]) -> Masking:
        """Return the masking among the arguments of a mixer's `call`."""
        own = arguments[len(mixer.operands) :]
        mask, is_causal, segments, window = own[:4]
        return cls(mask, is_causal, segments, window, Scoring(*own[4:][: len(Scoring._fields)]))

    @classmethod
    def causal(cls, scoring: Scoring) -> Masking:
        """Return the masking of plain causal attention."""
        return cls(None, True, None, 0, scoring)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Return it as arguments of an operator."""
        return (*self[:4], *self.scoring)


SINKS, TOKEN_SINKS = Operand("sinks", "sinks", has_tokens=False), Operand("sinks", "sinks by token")
CHOICE = Operand("choice", "choices of keys")
BIAS, TABLE = Operand("bias", "biases by distance"), Operand("table", "tables by distance", True)
COMPRESSED = Operand("compressed_key", "compressed keys", True), Operand("compressed_value", "their values", True)


def _mixer(prefix: str, name: str, *further: Operand) -> Mixer:
    """Define the three operators of a kind of attention with these operands, and register them as a mixer."""
    operands = ", ".join([OPERANDS, *(f"Tensor {operand.name}" for operand in further)])
    has_stride, with_gradient = COMPRESSED[0] in further, 3 + len(further) - further.count(CHOICE)
    grads, results = ", ".join(["Tensor"] * with_gradient), "Tensor out, Tensor logsumexp"
    attention, stride = f"{prefix}attention", ", int stride" * has_stride
    LIBRARY.define(f"{attention}_call({operands}, {MASKING}{stride}) -> Tensor")
    LIBRARY.define(f"{attention}(int layer, {operands}, {SCORING}{stride}) -> (Tensor, Tensor)")
    arguments = f"int layer, Tensor grad, {operands}, {results}, {SCORING}{stride}"
    LIBRARY.define(f"{attention}_backward({arguments}) -> ({grads})")
    call, chunk, backward = (getattr(torch.ops.dta, attention + part) for part in ("_call", "", "_backward"))
    sdpa = () if further else (F.scaled_dot_product_attention,)
    count = 3 + len(further)
    return register_mixer(
        Mixer(
            name=name,
            functions=(*sdpa, call, call.default),
            call=call.default,
            chunk=chunk.default,
            backward=backward.default,
            operands=(
                Operand("query", "queries"),
                Operand("key", "keys", True),
                Operand("value", "values", True),
                *further,
            ),
            dims=(BATCH, "heads", TOKENS, "head_dim"),
            constants=tuple(range(count + 4, count + 4 + len(Scoring._fields) + has_stride)),
        )
    )


ATTENTION_MIXER = _mixer("", "attention")
SINK_ATTENTION_MIXER = _mixer("sink_", "attention with sinks", SINKS)
TOKEN_SINK_MIXER = _mixer("token_sink_", "attention with sinks by token", TOKEN_SINKS)
BY_DISTANCE = (
    _mixer("biased_", "attention with a bias by distance", BIAS),
    _mixer("tabled_", "attention with a table by distance", TABLE),
    _mixer("biased_sink_", "attention with sinks by token and a bias by distance", TOKEN_SINKS, BIAS),
    _mixer("tabled_sink_", "attention with sinks by token and a table by distance", TOKEN_SINKS, TABLE),
)
# By kind of attention, the same over chosen keys.
OVER_CHOSEN = {
    ATTENTION_MIXER: _mixer("chosen_", "attention over chosen keys", CHOICE),
    SINK_ATTENTION_MIXER: _mixer("chosen_sink_", "attention with sinks over chosen keys", SINKS, CHOICE),
    TOKEN_SINK_MIXER: _mixer(
        "chosen_token_sink_", "attention with sinks by token over chosen keys", TOKEN_SINKS, CHOICE
    ),
}
COMPRESSED_MIXER = _mixer("compressed_", "attention with compressed keys", SINKS, *COMPRESSED)
CHOSEN_COMPRESSED_MIXER = _mixer(
    "chosen_compressed_", "attention with chosen compressed keys", SINKS, *COMPRESSED, CHOICE
)
WITH_COMPRESSED = (COMPRESSED_MIXER, CHOSEN_COMPRESSED_MIXER)
ATTENTION_MIXERS = (*OVER_CHOSEN, *BY_DISTANCE, *OVER_CHOSEN.values(), *WITH_COMPRESSED)
ATTENTION_CALL, SINK_ATTENTION_CALL = ATTENTION_MIXER.call, SINK_ATTENTION_MIXER.call
CALLS = {mixer.operands[3:]: mixer.call for mixer in ATTENTION_MIXERS}  # by operands after queries, keys and values
COMPRESSED_CALL, CHOSEN_COMPRESSED_CALL = COMPRESSED_MIXER.call, CHOSEN_COMPRESSED_MIXER.call


# Over a batch


def _attend(mixer: Mixer, arguments: tuple[Any, ...]) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None, Masking]:
    """Return query, key and value, the sinks, and the masking of a call; compressed keys follow those of tokens."""
    operands, masking = len(mixer.operands), Masking.of(mixer, arguments)
    states, sinks = arguments[:3], arguments[3] if operands > 3 else None
    if mixer not in WITH_COMPRESSED:
        return states, sinks, masking
    choice = arguments[6] if mixer is CHOSEN_COMPRESSED_MIXER else None
    states, mask = with_compressed(states, arguments[4:6], choice, masking, arguments[-1])
    return states, sinks, masking._replace(mask=mask, is_causal=False, segments=None, window=0)


def _call_fake(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any) -> torch.Tensor:
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


def _dense_backward_fake(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    *masking: Any,
) -> tuple[torch.Tensor, ...]:
    of_sinks = query.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return (*(tensor.new_empty(tensor.shape) for tensor in (query, key, value)), of_sinks)


DENSE_ATTENTION_BACKWARD = define(
    f"dense_attention_backward(Tensor grad, {OPERANDS}, Tensor? sinks, {MASKING}) -> (Tensor, Tensor, Tensor, Tensor)",
    _dense_backward_fake,
    attend_backward,
)


# Over a chunk


def empty_by_tokens(like: torch.Tensor, width: Any = None, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Allocate a tensor in the layout of `by_tokens`, with the sizes and dtype of `like` or those given."""
    batch, heads, tokens, features = like.shape
    shape = (batch, tokens, heads, features if width is None else width)
    return like.new_empty(shape, dtype=dtype or like.dtype).transpose(1, 2)


def by_tokens(tensor: torch.Tensor) -> torch.Tensor:
    """Return `[1, H, c, D]` with the heads of a token adjacent in memory, copied if necessary.

    Attention of a chunk returns all tensors in this layout, since products around it take `[c, H * D]`.
    """
    (_, heads, _, width), (_, of_head, of_token, of_feature) = tensor.shape, tensor.stride()
    if of_feature == 1 and of_head == width and of_token == heads * width:
        return tensor
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _chunk_fake(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any) -> Any:
    out = empty_by_tokens(query, value.shape[-1])
    return out, query.new_empty(query.shape[:-1], dtype=statistics_dtype(query.dtype))


def _implement(mixer: Mixer) -> None:
    """Implement the operators of a kind of attention."""
    operands, passes_make_it = len(mixer.operands), mixer in (TOKEN_SINK_MIXER, *BY_DISTANCE, *OVER_CHOSEN.values())
    without_gradient = [None] * mixer.operands.count(CHOICE)

    def run_call(*arguments: Any) -> torch.Tensor:
        states, own_sinks, masking = _attend(mixer, arguments)
        return attend(*states, own_sinks, *masking.arguments)

    def save_call(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*(value if isinstance(value, torch.Tensor) else None for value in inputs))
        ctx.numbers = [None if isinstance(value, torch.Tensor) else value for value in inputs]

    def call_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        pairs = zip(ctx.saved_tensors, ctx.numbers, strict=True)
        arguments = tuple(n if tensor is None else tensor for tensor, n in pairs)
        states, own_sinks, masking = _attend(mixer, arguments)
        grads = DENSE_ATTENTION_BACKWARD(grad, *states, own_sinks, *masking.arguments)
        if mixer in WITH_COMPRESSED:
            of_query, of_key, of_value, of_sinks = grads
            parts = [to_compressed(grad, arguments[4], arguments[-1]) for grad in (of_key, of_value)]
            (of_key, of_ends), (of_value, of_values) = parts
            grads = of_query, of_key, of_value, of_sinks, of_ends, of_values
        grads = grads[:operands]
        return (*grads, *[None] * (len(arguments) - len(grads)))

    def backward_fake(layer: int, grad: torch.Tensor, *arguments: Any) -> Any:
        with_gradient = zip(mixer.operands[: operands - len(without_gradient)], arguments, strict=False)
        return tuple(
            (empty_by_tokens if operand.has_tokens else torch.empty_like)(value) for operand, value in with_gradient
        )

    def save_chunk(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
        ctx.layer, ctx.constants = inputs[0], inputs[1 + operands :]
        ctx.save_for_backward(*inputs[1 : 1 + operands], *output)
        ctx.mark_non_differentiable(output[1])

    def chunk_backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[Any, ...]:
        assert mixer.backward is not None
        grads = mixer.backward(ctx.layer, grad, *ctx.saved_tensors, *ctx.constants)
        return (None, *grads, *without_gradient, *[None] * len(ctx.constants))

    call, chunk, backward = (
        operator._schema.name for operator in (mixer.call, mixer.chunk, mixer.backward) if operator is not None
    )
    torch.library.register_fake(call, _call_fake, lib=LIBRARY)
    if not passes_make_it:  # else none runs over a batch
        LIBRARY.impl(call, run_call, "CompositeExplicitAutograd")
        torch.library.register_autograd(call, call_backward, setup_context=save_call, lib=LIBRARY)
    torch.library.register_fake(chunk, _chunk_fake, lib=LIBRARY)
    torch.library.register_fake(backward, backward_fake, lib=LIBRARY)
    torch.library.register_autograd(chunk, chunk_backward, setup_context=save_chunk, lib=LIBRARY)


for _kind in ATTENTION_MIXERS:
    _implement(_kind)
