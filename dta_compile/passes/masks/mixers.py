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
from dta_compile.ops.feature_tables import TABLE_ROWS
from dta_compile.ops.library import is_random
from dta_compile.ops.mixer import MIXERS, Mixer
from dta_compile.passes.axes.layouts import mixer_calls
from dta_compile.passes.axes.token_axis import LEARNED_PROMPT, own_mixer_calls
from dta_compile.passes.contracts import ContractError, contract
from dta_compile.passes.graphs.nodes import First, is_float, is_uniform, repeated_from
from dta_compile.passes.graphs.operators import CASTS, MATRIX_PRODUCTS, RESHAPES, aten
from dta_compile.passes.masks.derivation import MaskPrograms, Silencers, forced_scores, padding_mask_of
from dta_compile.passes.masks.entries import leaf_of
from dta_compile.passes.program import Mixed, Program, ancestors, where
from dta_compile.passes.symbols import sizes
from dta_compile.proofs.mask_class import MaskClass
from dta_compile.proofs.terms import Terms

# Operators that choose experts for tokens, or tokens for experts; and operators that count the tokens of an expert.
CHOICES = (aten.topk.default, aten.sort.default, aten.sort.stable, aten.argmax.default, aten.max.dim)
SORTS = (aten.sort.default, aten.sort.stable, aten.argsort.default, aten.argsort.stable)
COUNTS = (aten.cumsum.default, aten.sum.dim_IntList, aten.sum.default, aten.bincount.default, aten.histc.default)


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
        layers.append(AttentionLayer(index, mixer, states, line, mask, masking.scoring, *of_choice))
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


NEIGHBOURS = (
    "let tokens see others through attention, or the last few through dta_compile.short_convolution (a mean has the"
    " weights 1/k), F.conv1d of F.pad(x.mT, (k - 1, 0)), F.pad(x, (0, 0, k - 1, 0)).unfold(1, k, 1), or shifts such as"
    " F.pad(x, (0, 0, 1, -1)); what is the same for a whole row can be computed outside and passed for each token"
)


def mixing_refusal(mixed: Mixed) -> RefusalError:
    """Return the error for a value before the last attention that is not computed token by token."""
    if (unrecognised := mixed.node.meta.get("unrecognised")) is not None:
        return unrecognised
    hint = NEIGHBOURS
    if "has no token-wise rule" in mixed.reason and mixed.node.op == "call_function":
        hint = "declare a rule with dta_compile.register_token_rule if the operator treats every token by itself"
    if "one value per sequence" in mixed.reason and mixed.node.target in MATRIX_PRODUCTS:
        hint = (
            "weights chosen for each row (an adapter per row) are chosen for each token: dta_compile.expert_linear(x,"
            " adapter[:, None, None].expand(*x.shape[:2], 1), weight, transposed=True)[..., 0, :] in place of"
            " torch.bmm(x, weight[adapter])"
        )
    name = str(mixed.node.target)
    if "requires a gradient" in mixed.reason:
        hint = (
            "compute it inside the compiled function (a learned prompt: torch.cat([prompt.expand(B, -1, -1),"
            " embed(ids)], 1)), since tokens that rows share have one gradient, and not one for each row; if the model"
            " broke into several graphs, remove the graph break (stages of a pipeline cannot run over a tree)"
        )
        if "of another batch" in mixed.reason:
            hint = (
                "further layers run over all tokens, or over all but one if they pair each token with the next,"
                " h[:, :-1] with ids[:, 1:], and attend causally (is_causal=True, no mask)"
            )
    elif LEARNED_PROMPT in mixed.reason:
        return RefusalError(
            "a learned prompt stands among the tokens, and it is not proven that every row has the same one",
            where=where(mixed.node),
            expected="torch.cat([prompt.expand(B, -1, -1), embed(ids)], 1), without dropout",
            got=mixed.reason,
            hint="expand the prompt last, or give it ids of its own at the end of the embedding table and put those in"
            " front of each row",
        )
    elif mixed.node.target is TABLE_ROWS:
        hint = (
            "pass input_ids in place of inputs_embeds, so that placeholders of images are found among ids, not by"
            " comparing embeddings"
        )
    elif "not linear in the gradients" in mixed.reason:
        hint = (
            "clip or normalise gradients where they are whole: those of parameters after backward (clip_grad_norm_), or"
            " of what the compiled function returns (output.register_hook); scaling by a factor is linear"
        )
    elif mixed.node.op == "call_module":
        hint = (
            "write its forward with torch's operators: `x + (y - x).detach()` has the value of y and the gradient of x"
            " (torch.autograd.Function runs as it is after the last attention, on weights alone if its backward is"
            " linear in the gradients, and elsewhere if both directions are pointwise as well)"
        )
    elif any(word in name for word in ("dropout", "bernoulli")):
        return RefusalError(
            "dropout cannot run over a prefix tree: every rollout would need its own random mask",
            where=where(mixed.node),
            expected="dropout p = 0",
            got=mixed.reason,
            hint="set the model's dropout to 0, or call model.eval()",
        )
    elif is_random(mixed.node.target):
        return RefusalError(
            "random numbers for every token (router noise, jitter) cannot be drawn over a prefix tree: rollouts that"
            " share a token would need different ones",
            where=where(mixed.node),
            expected="a model without noise before its last attention",
            got=mixed.reason,
            hint="switch router noise or jitter off, or call model.eval()",
        )
    elif any(node.target in SORTS and not is_float(node.args[0]) for node in (mixed.node, *mixed.node.users)):
        return RefusalError(
            "tokens are sorted by the experts that they chose, which hides that each is computed by itself",
            where=where(mixed.node),
            expected="a loop over experts with torch.where(chosen == expert), or dta_compile.expert_linear",
            got=mixed.reason,
            hint="write the mixture of experts so; transformers: experts_implementation='dta'",
        )
    elif _is_capacity(mixed.node):
        return RefusalError(
            "tokens look at each other where experts are chosen, as for an expert capacity: which tokens are dropped"
            " depends on all of the batch",
            where=where(mixed.node),
            expected="experts without a capacity, which take every token that is routed to them",
            got=mixed.reason,
            hint="switch the expert capacity (token dropping) off, or set its factor so that none is set",
        )
    elif "batch_norm" in str(mixed.node.target):
        hint = "batch norm takes its statistics of all tokens: call .eval() on that module"
    elif "scale_grad_by_freq" in mixed.reason:
        hint = "a chunk does not know the counts of the batch: set scale_grad_by_freq=False"
    elif "sparse=True" in mixed.reason:
        hint = "gradients are summed over the tree: set sparse=False"
    elif "expert" in where(mixed.node).rpartition('", line')[2]:  # not in the name of a folder
        hint = "let each token choose its experts with dta_compile.expert_linear and expert_sum"
    elif _leads_to_softmax(mixed.node):
        hint = (
            "write attention as torch.nn.functional.scaled_dot_product_attention"
            " (transformers: attn_implementation='sdpa')"
        )
    elif name.startswith(("aten.select.", "aten.cumsum.", "aten.cumprod.", "aten.logcumsumexp.")):
        hint = (
            "a recurrence over tokens runs over the tree if it calls dta_compile.linear_recurrence, linear_attention,"
            " gated_delta_rule, selective_scan or short_convolution in place of a loop or a cumulative sum"
        )
    elif mixed.reason.endswith("along the batch axis"):
        hint = (
            "rows see each other before the last attention, where what they share is computed once: combine rows behind"
            " it, or outside of the compiled function"
        )
    elif name.startswith("aten.split"):
        hint = "streams one after the other along the token axis (ProphetNet's n-grams) belong on an axis of their own"
    elif name.startswith(("aten.max.", "aten.amax.", "aten.aminmax.")):
        hint = (
            "a largest entry over all tokens, such as the scale of a tensor in float8 or int8 training, changes with"
            " the batch: leave the layers before the last attention unquantised, or take a scale per token"
        )
    return RefusalError(
        "tokens are mixed before the last attention by something other than attention",
        where=where(mixed.node),
        expected="operators that treat every token by itself, and scaled_dot_product_attention",
        got=mixed.reason,
        hint=hint,
    )


def _is_capacity(node: fx.Node) -> bool:
    """Return whether an operator sorts tokens by their chosen experts, or counts the tokens of an expert."""
    if node.target in RESHAPES:  # e.g. slots and tokens merged into one dimension, along which they are counted
        return any(map(_is_capacity, node.users))
    if node.target in COUNTS:
        counted = node.args[0].args[0] if node.args[0].target in CASTS else node.args[0]
        if is_float(counted):
            return False
    elif node.target not in CHOICES:
        return False
    sources = ancestors(node.all_input_nodes, stop=lambda source: source.target in MIXERS)
    return any(source.target in CHOICES or source.target is aten._softmax.default for source in sources)


def _leads_to_softmax(node: fx.Node, steps: int = 12) -> bool:
    """Return whether a softmax follows within `steps` operators, as in attention that is written out."""
    level = {node}
    for _ in range(steps):
        if any(follower.target is aten._softmax.default for follower in level):
            return True
        level = {user for follower in level for user in follower.users}
    return False


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
