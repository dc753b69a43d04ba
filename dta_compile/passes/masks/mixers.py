"""mixers: find the mixer layers, classify the masks of attention, and undo the repetition of KV heads."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx

from dta_compile.errors import RefusalError
from dta_compile.executable.layers import AttentionLayer, MixerLayer, RecurrentLayer, RunningSpec, StateSpec
from dta_compile.executable.layouts import Layout
from dta_compile.executable.masks import MaskProgram, refusal
from dta_compile.ops.attention import ATTENTION_MIXERS, OVER_CHOSEN, TABLE, Masking
from dta_compile.ops.chosen_keys import CHOICE_MIXER, choosing_of
from dta_compile.ops.distances import BY_DEPTH
from dta_compile.ops.mixer import MIXERS, Mixer
from dta_compile.passes.axes.layouts import mixer_calls
from dta_compile.passes.axes.refusals import mixing_refusal
from dta_compile.passes.axes.token_axis import own_mixer_calls
from dta_compile.passes.contracts import ContractError, contract
from dta_compile.passes.graphs.nodes import First, is_uniform, repeated_from
from dta_compile.passes.graphs.operators import aten
from dta_compile.passes.graphs.source_lines import where
from dta_compile.passes.lowering.attention.distances import EARLIER_KEYS
from dta_compile.passes.masks.derivation import MaskPrograms, Silencers, forced_scores, padding_mask_of
from dta_compile.passes.masks.entries import leaf_of
from dta_compile.passes.program import Mixed, Program, ancestors
from dta_compile.passes.symbols import sizes
from dta_compile.proofs.mask_class import MaskClass
from dta_compile.proofs.terms import Terms


@contract(
    reads=["placeholders", "inputs", "draws", "batch", "tokens", "other_batches", "length"],
    fills=["mixers", "mixer_nodes"],
    rewrites=["module", "values", "parameter_dependent"],
)
def mixers(program: Program) -> None:
    """Fill `program.mixers` and `.mixer_nodes`; calls lose their mask, and keys and values their repeated heads."""
    masks, first, silent = _Masks(program), First(program.draws), Silencers(program)
    layers: list[MixerLayer] = []
    program.mixer_nodes = own_mixer_calls(program)
    for index, node in enumerate(program.mixer_nodes):
        if isinstance(mixed := program.values[node], Mixed):
            raise mixing_refusal(mixed)
        mixer = MIXERS[node.target]
        if mixer.running_state is not None:
            layers.append(_recurrent(program, index, node, masks, first, silent))
            continue
        if mixer not in (*ATTENTION_MIXERS, CHOICE_MIXER):
            layers.append(MixerLayer(index, mixer, _states(mixer, node), where(node)))
            continue
        masking, operands = Masking.of(mixer, node.args), mixer.operands_of(node.args)
        rest = node.args[len(operands) + len(masking.arguments) :]
        if masking.segments is not None:
            masking = masking._replace(segments=first.like(masking.segments))
        mask, choice = masks.of(node, masking)
        if TABLE in mixer.operands:
            _require_by_depth(program, operands[-1])
        if mixer is not CHOICE_MIXER:
            query, key, value, *others = operands
            operands = query, *_with_true_heads(program, key, value), *others
        chooser, block, forced = None, 1, None
        if choice is not None:
            mixer, operands = OVER_CHOSEN[mixer], (*operands, choice)
            chooser, block = program.mixer_nodes.index(choice), choosing_of(choice.args).block
        elif mixer is CHOICE_MIXER:
            block, forced = choosing_of(node.args).block, rest[-1]
            forced, rest = None if forced is None else forced_scores(program, forced), (*rest[:-1], None)
        node.target, node.args = mixer.call, (*operands, *Masking.causal(masking.scoring).arguments, *rest)
        of_choice = chooser, block, forced
        states, line = _states(mixer, node), where(node)
        is_of_earlier_keys = node.meta.get(EARLIER_KEYS, False)
        layers.append(AttentionLayer(index, mixer, states, line, mask, masking.scoring, *of_choice, is_of_earlier_keys))
    program.mixers = layers


def _require_by_depth(program: Program, table: fx.Node) -> None:
    """Check that no entry of a table by distance is that of a column: rows may begin at different ones."""
    for node in ancestors([table], stop=lambda node: node not in program.parameter_dependent):
        value, is_dense = program.values[node], node not in program.parameter_dependent and not is_uniform(node)
        is_by_token = is_dense and isinstance(value, Layout) and value.token_dim is not None
        if is_by_token and node.target is not BY_DEPTH:
            raise ContractError(f"a table by distance is made of {node.name} = {node.target}, read by column")


def _recurrent(
    program: Program, index: int, node: fx.Node, masks: _Masks, first: First, silent: Silencers
) -> RecurrentLayer:
    mixer, mask = MIXERS[node.target], None
    assert mixer.running_state is not None
    if mixer.segments is not None and node.args[mixer.segments] is not None:
        segments = first.like(node.args[mixer.segments])
        mask = masks.declared(node, segments, 0)
        node.args = (*node.args[: mixer.segments], None, *node.args[mixer.segments + 1 :])
    shape, dtype = mixer.running_state([operand.meta["val"] for operand in mixer.operands_of(node.args)])
    running = RunningSpec(tuple(int(size) for size in shape), dtype)
    leaves = {silencer: leaf_of(program, silencer) for silencer in silent.of_call(node)}
    inputs = ((padding_mask_of(silencer), leaf) for silencer, leaf in leaves.items())
    padding = frozenset((leaf_of(program, source), leaf) for source, leaf in inputs if source is not None)
    silencers = frozenset(leaves.values())
    return RecurrentLayer(index, mixer, _states(mixer, node), where(node), running, mask, silencers, padding)


def cache_outputs(program: Program) -> set[fx.Node]:
    """Return the graph's outputs that are states of a mixer layer, that is, a KV cache returned to the caller."""
    states: set[fx.Node] = set()
    for node in mixer_calls(program.graph):
        for operand in MIXERS[node.target].states_of(node.args):
            states |= {operand, _true_heads(program, operand)}
    return {node for node in program.outputs if node in states}


class _Masks:
    """The masks of a program's layers, one object for all layers with the same."""

    def __init__(self, program: Program) -> None:
        self.program, self._derived = program, functools.cache(MaskPrograms(program).of)
        self._known: dict[Any, MaskProgram] = {}

    def of(self, node: fx.Node, masking: Masking) -> tuple[MaskProgram | None, fx.Node | None]:
        """Return the mask of a call, None if it is plainly causal, and the choice of keys that is part of it."""
        is_declared = masking.segments is not None or masking.window
        if masking.mask is None and not masking.is_causal:
            raise RefusalError(
                "this attention is bidirectional: it has no mask and is_causal=False",
                where=where(node),
                expected="is_causal=True, or a causal mask",
                got="every token attends to every other",
                hint="prefix sharing needs causal attention; compile the causal model only",
            )
        if masking.mask is not None and (masking.is_causal or is_declared):
            both = "is_causal=True" if masking.is_causal else "segments or a window"
            raise RefusalError(f"attention has both a mask and {both}", where=where(node), expected="one of the two")
        if masking.mask is not None:
            mask, choice = self._derived(masking.mask)
            if choice is not None and MIXERS[node.target] not in OVER_CHOSEN:
                again = MIXERS[node.target] is CHOICE_MIXER
                got = "among those that were chosen" if again else "for scores with a learned bias by distance"
                raise refusal(where(node), f"a choice of keys {got}", "choose keys once a layer, without a bias")
            return mask, choice
        return self.declared(node, masking.segments, masking.window) if is_declared else None, None

    def declared(self, node: fx.Node, segments: fx.Node | None, window: int) -> MaskProgram:
        """Return the mask of a call that declares segments or a window."""
        if (segments, window) not in self._known:
            self._known[segments, window] = declared_mask(self.program, node, segments, window)
        return self._known[segments, window]


def _with_true_heads(program: Program, key: fx.Node, value: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Return keys and values before the repetition of their heads, if both then have equal numbers of heads."""
    true_key, true_value = _true_heads(program, key), _true_heads(program, value)
    return (true_key, true_value) if sizes(true_key)[1] == sizes(true_value)[1] else (key, value)


def _true_heads(program: Program, node: fx.Node) -> fx.Node:
    """Undo repeat_kv: return the `x` of `x[:, :, None].expand(B, Hkv, g, S, D).reshape(B, Hkv * g, S, D)`."""
    if node.target is aten._to_copy.default:  # autocast casts the result of repeat_kv
        source = _true_heads(program, node.args[0])
        return node if source is node.args[0] else _cast_like(program, source, node)
    return node if len(sizes(node)) != 4 else repeated_from(node, 1) or node


def _cast_like(program: Program, source: fx.Node, cast: fx.Node) -> fx.Node:
    """Add a node that casts `source` like `cast` casts its argument."""
    with program.graph.inserting_after(cast):
        moved = program.graph.call_function(cast.target, (source,), cast.kwargs)
    moved.meta = dict(cast.meta)
    moved.meta["val"] = source.meta["val"].to(cast.meta["val"].dtype)
    program.values = {**program.values, moved: program.values[source]}
    program.parameter_dependent = program.parameter_dependent | {moved}
    return moved


def _states(mixer: Mixer, node: fx.Node) -> tuple[StateSpec, ...]:
    """Return the states that the layer keeps per token."""
    states = []
    for operand in mixer.states_of(node.args):
        shape = [1 if dim in (mixer.batch_dim, mixer.token_dim) else int(s) for dim, s in enumerate(sizes(operand))]
        states.append(StateSpec(tuple(shape), mixer.token_dim, operand.meta["val"].dtype))
    return tuple(states)


def declared_mask(program: Program, call: fx.Node, segments: fx.Node | None, window: int) -> MaskProgram:
    """Return the mask of a causal call with `segments` `[B, S]` (see `ops.attention.Masking`) and a window.

    Raises:
        RefusalError: the segments depend on parameters, or are not one number per token.
    """
    if segments is None:
        return MaskProgram(MaskClass(window=window or None), frozenset())
    if segments in program.parameter_dependent:
        raise _refusal(call, "segments that are computed from parameters")
    shape = sizes(segments)
    if len(shape) != 2 or shape[1] != program.tokens or shape[0] not in (1, program.batch):
        raise _refusal(call, f"segments {list(shape)}")
    terms, leaf = Terms(), leaf_of(program, segments)
    row = terms.const(0) if shape[0] == 1 else terms.index("row")
    number = terms.entry(leaf, (row, terms.index("key")))
    if number.dtype is torch.bool:
        return MaskProgram(MaskClass(window=window or None, valid=number), frozenset([leaf]))
    valid = terms.apply(aten.ne.Scalar, number, 0)
    return MaskProgram(MaskClass(window=window or None, valid=valid, segments=(number,)), frozenset([leaf]))


def _refusal(call: fx.Node, got: str) -> RefusalError:
    return RefusalError(
        "the segments of attention are not numbers of the batch's tokens",
        where=where(call),
        expected="a tensor [batch, tokens] of integers, computed from inputs",
        got=got,
    )
