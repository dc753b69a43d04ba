"""Refuse values whose tokens depend on each other, and say what to do instead.

Who finds the cause gives `Mixed` its advice: a token rule (`MixesTokens`), or `without_rule` for operators without one.
Only what mixtures of experts do to tokens is seen from the operators around.
"""

from __future__ import annotations

from torch import fx

from dta_compile.errors import RefusalError
from dta_compile.ops.feature_tables import TABLE_ROWS
from dta_compile.ops.library import is_random
from dta_compile.ops.mixer import MIXERS
from dta_compile.passes.graphs.nodes import is_float
from dta_compile.passes.graphs.operators import CASTS, DROPOUTS, RESHAPES, aten
from dta_compile.passes.graphs.source_lines import where
from dta_compile.passes.program import Advice, Mixed, ancestors
from dta_compile.torch_compat.operators import OpOverload

NEIGHBOURS = Advice(
    "let tokens see others through attention, or the last few through dta_compile.short_convolution (a mean has the"
    " weights 1/k), F.conv1d of F.pad(x.mT, (k - 1, 0)), F.pad(x, (0, 0, k - 1, 0)).unfold(1, k, 1), or shifts such as"
    " F.pad(x, (0, 0, 1, -1)); what is the same for a whole row can be computed outside and passed for each token",
    "tokens are mixed before the last attention by something other than attention",
    "operators that treat every token by itself, and scaled_dot_product_attention",
)
REGISTER = Advice("declare a rule with dta_compile.register_token_rule if the operator treats every token by itself")
RECURRENCE = Advice(
    "a recurrence over tokens runs over the tree if it calls dta_compile.linear_recurrence, linear_attention,"
    " gated_delta_rule, selective_scan or short_convolution in place of a loop or a scan, or x.cumsum(1) for floats"
    " [B, S, ...]"
)
OTHER_TOKENS = Advice(f"{NEIGHBOURS.hint}; {RECURRENCE.hint}")
WRITES = Advice("write to some tokens by a condition: torch.where((torch.arange(x.shape[1]) == 0)[:, None], 0, x)")
MATRIX_OF_TOKENS = Advice(
    "weights of earlier tokens that are no attention are a recurrence: the mean of all of them is"
    " x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]"
)
SCORES = Advice(
    "attention runs over the tree if it is a softmax of scores: torch.nn.functional.scaled_dot_product_attention or"
    " dta_compile.attention (transformers: attn_implementation='sdpa' or 'dta'), and linear attention,"
    " (q @ k.mT).tril() @ v, by dta_compile.linear_attention; sigmoid, ReLU or clamp of scores and sums of weights with"
    " other values, 1 - s, do not",
    "attention is written out with another function of scores than a softmax",
    "scaled_dot_product_attention, or scores that are scaled, soft-capped, masked, and weigh values by their softmax",
)
ROWS = Advice(
    "rows see each other before the last attention, where what they share is computed once: combine rows behind"
    " it, or outside of the compiled function; weights for each row (adapters) by torch.bmm(x, weights[index])"
)
STREAMS = Advice(
    "compute all tokens at once, as chunks of the tree bound the memory (x.chunk(8, 1) is for the head and the loss);"
    " streams one after the other along the token axis (ProphetNet's n-grams) belong on an axis of their own"
)
LARGEST = Advice(
    "a largest entry over all tokens, such as the scale of a tensor in float8 or int8 training, changes with"
    " the batch: leave the layers before the last attention unquantised, or take a scale per token"
)
ROW_WEIGHTS = Advice(
    "weights chosen for each row (an adapter per row) are chosen for each token: dta_compile.expert_linear(x,"
    " adapter[:, None, None].expand(*x.shape[:2], 1), weight, transposed=True)[..., 0, :] in place of"
    " torch.bmm(x, weight[adapter])"
)
GIVEN_VALUES = Advice(
    "compute it inside the compiled function (a learned prompt: torch.cat([prompt.expand(B, -1, -1),"
    " embed(ids)], 1)), since tokens that rows share have one gradient, and not one for each row; if the model"
    " broke into several graphs, remove the graph break (stages of a pipeline cannot run over a tree)"
)
FURTHER_LAYERS = Advice(
    "further layers run over all tokens, or over all but one if they pair each token with the next,"
    " h[:, :-1] with ids[:, 1:], and attend causally (is_causal=True, no mask)"
)
LEARNED_PROMPT = Advice(
    "expand the prompt last, or give it ids of its own at the end of the embedding table and put those in front of each"
    " row",
    "a learned prompt stands among the tokens, and it is not proven that every row has the same one",
    "torch.cat([prompt.expand(B, -1, -1), embed(ids)], 1), without dropout",
)
LINEAR_BACKWARD = Advice(
    "clip or normalise gradients where they are whole: those of parameters after backward (clip_grad_norm_), or"
    " of what the compiled function returns and computes nothing else from (output.register_hook); scaling by a factor"
    " is linear"
)
POINTWISE_FUNCTION = Advice(
    "write its forward with torch's operators: `x + (y - x).detach()` has the value of y and the gradient of x"
    " (torch.autograd.Function runs as it is after the last attention, on weights alone if its backward is linear in"
    " the gradients, and elsewhere if both directions also work entry by entry, or along features with keepdim=True;"
    " the gradient of a weight is the sum over all tokens)"
)
COUNTED = Advice("a chunk does not know the counts of the batch: set scale_grad_by_freq=False")
SPARSE = Advice("gradients are summed over the tree: set sparse=False")
SELECTED = Advice(
    "compute all tokens and choose by torch.where(mask, ...); let each token choose its experts with"
    " dta_compile.expert_linear and expert_sum"
)
DROPOUT = Advice(
    "set the model's dropout to 0, or call model.eval() (F.dropout drops in eval mode, too, without"
    " training=self.training)",
    "dropout cannot run over a prefix tree: every rollout would need its own random mask",
    "dropout p = 0",
)
NOISE = Advice(
    "switch router noise or jitter off, or call model.eval()",
    "random numbers for every token (router noise, jitter) cannot be drawn over a prefix tree: rollouts that"
    " share a token would need different ones",
    "a model without noise before its last attention",
)
SORTED_EXPERTS = Advice(
    "write the mixture of experts so; transformers: experts_implementation='dta'",
    "tokens are sorted by the experts that they chose, which hides that each is computed by itself",
    "a loop over experts with torch.where(chosen == expert), or dta_compile.expert_linear",
)
CAPACITY = Advice(
    "switch the expert capacity (token dropping) off, or set its factor so that none is set",
    "tokens look at each other where experts are chosen, as for an expert capacity: which tokens are dropped"
    " depends on all of the batch",
    "experts without a capacity, which take every token that is routed to them",
)
BATCH_NORM = Advice("batch norm takes its statistics of all tokens: call .eval() on that module")
PLACEHOLDERS = Advice(
    "pass input_ids in place of inputs_embeds, so that placeholders of images are found among ids, not by"
    " comparing embeddings"
)

OF_OPERATORS = {
    **dict.fromkeys((aten.native_batch_norm.default, aten._native_batch_norm_legit_functional.default), BATCH_NORM),
    **dict.fromkeys((aten._native_batch_norm_legit.no_stats, aten.cudnn_batch_norm.default), BATCH_NORM),
    **dict.fromkeys((aten.max.default, aten.aminmax.default), LARGEST),
    **dict.fromkeys((aten.nonzero.default, aten.masked_select.default), SELECTED),
    **dict.fromkeys(DROPOUTS, DROPOUT),
    TABLE_ROWS: PLACEHOLDERS,
}

# Operators that choose experts for tokens, or tokens for experts; and operators that count the tokens of an expert.
CHOICES = (aten.topk.default, aten.sort.default, aten.sort.stable, aten.argmax.default, aten.max.dim)
SORTS = (aten.sort.default, aten.sort.stable, aten.argsort.default, aten.argsort.stable)
COUNTS = (aten.cumsum.default, aten.sum.dim_IntList, aten.sum.default, aten.bincount.default, aten.histc.default)


def without_rule(node: fx.Node) -> Advice:
    """Return what to do about an operator without a token rule; one of higher order is a scan or another loop."""
    if is_random(node.target) and node.target not in DROPOUTS:
        return NOISE
    return OF_OPERATORS.get(node.target, REGISTER if isinstance(node.target, OpOverload) else RECURRENCE)


def mixing_refusal(mixed: Mixed) -> RefusalError:
    """Return the error for a value before the last attention that is not computed token by token."""
    if (unrecognised := mixed.node.meta.get("unrecognised")) is not None:
        return unrecognised
    hint, what, expected = _of_experts(mixed.node) or mixed.advice or NEIGHBOURS
    return RefusalError(
        what or NEIGHBOURS.what,
        where=where(mixed.node),
        expected=expected or NEIGHBOURS.expected,
        got=mixed.reason,
        hint=hint,
    )


def _of_experts(node: fx.Node) -> Advice | None:
    if any(other.target in SORTS and not is_float(other.args[0]) for other in (node, *node.users)):
        return SORTED_EXPERTS
    return CAPACITY if _is_capacity(node) else None


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
