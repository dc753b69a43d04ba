"""The properties of ATen operators that passes ask for: each is a set of overloads, stated once.

What a pass does with an operator, its rule, stays with the pass (`token_rules`, `elements`, `vocabulary`, `simplify`).
Where two passes mean nearly the same, the difference is written as one: a union or a difference of properties.
"""

from __future__ import annotations

from typing import Any

import torch

from dta_compile.ops.library import is_random

aten = torch.ops.aten

# ---- Entries of the first argument

# The argument itself, in its memory; `detach` has no gradient.
ALIASES = frozenset({aten.alias.default, aten.detach.default})
# The same entries in the same places.
COPIES = ALIASES | {aten.clone.default, aten.lift_fresh_copy.default}
# Those of them that the gradient goes through, so that a value may stand for its copy.
DIFFERENTIABLE_COPIES = COPIES - {aten.detach.default}
# The same in another dtype or on another device, which may round.
CASTS = frozenset({aten._to_copy.default})

# The same entries in the same order, in the shape that the second argument says.
VIEWS_OF_ORDER = frozenset({aten.view.default, aten._unsafe_view.default})  # never copied
RESHAPES = VIEWS_OF_ORDER | {aten.reshape.default}
# The second argument is the shape of the result; `expand` repeats entries.
TAKE_A_SHAPE = RESHAPES | {aten.expand.default}
# Without dimensions of one entry.
SQUEEZES = frozenset({aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims})
# The same entries in the same order.
KEEP_ORDER = RESHAPES | SQUEEZES | {aten.unsqueeze.default}
# Those that are never copied: so is any view of the result a view of the argument.
KEEP_ORDER_IN_PLACE = KEEP_ORDER - {aten.reshape.default}
# Two dimensions exchanged: the same done again is the argument.
EXCHANGES = frozenset({aten.t.default, aten.transpose.int})
# Dimensions in another order; of a matrix at most exchanged (`nodes.swaps`).
TRANSPOSITIONS = EXCHANGES | {aten.permute.default}
# All of these, and parts: entries of the argument in other places.
MOVES = KEEP_ORDER | TAKE_A_SHAPE | TRANSPOSITIONS | {aten.select.int, aten.slice.Tensor}
# Every entry of the result is one of the first argument, maybe rounded.
SAME_ENTRIES = MOVES | COPIES | CASTS
# Results in the memory of the first argument, although the schema does not say so.
UNDECLARED_VIEWS = frozenset({aten._unsafe_view.default})
# The argument itself, or new memory if it does not lie there as it should.
MAYBE_COPIES = frozenset({aten.contiguous.default})

# Entries of the arguments as parts of a larger result.
ASSEMBLIES = frozenset(
    {
        aten.cat.default,
        aten.constant_pad_nd.default,
        aten.repeat.default,
        aten.select_backward.default,
        aten.slice_backward.default,
        aten.stack.default,
    }
)

# ---- Constructors: entries that no argument has.

# One number everywhere: the number, by operator; or the argument that it is, by position.
FILL_NUMBERS = {
    aten.new_ones.default: 1,
    aten.new_zeros.default: 0,
    aten.ones.default: 1,
    aten.ones_like.default: 1,
    aten.zeros.default: 0,
    aten.zeros_like.default: 0,
}
FILL_ARGUMENTS = {
    aten.fill.Scalar: 1,
    aten.full.default: 1,
    aten.full_like.default: 1,
    aten.new_full.default: 2,
    aten.scalar_tensor.default: 0,
}
FILLS = frozenset({*FILL_NUMBERS, *FILL_ARGUMENTS})
# Any numbers.
UNINITIALIZED = frozenset({aten.empty.memory_format, aten.new_empty.default})
# Of a given size: `aten.full` in other words. Derivatives make them to scatter into.
FULL_VARIANTS = UNINITIALIZED | {
    aten.new_full.default,
    aten.new_ones.default,
    aten.new_zeros.default,
    aten.ones.default,
    aten.zeros.default,
}
RANGES = frozenset({aten.arange.default, aten.arange.start, aten.arange.start_step})
# Cheaper to make again than to read; lowering leaves no `FULL_VARIANTS`.
CONSTRUCTORS = RANGES | (FILLS - FULL_VARIANTS)

# ---- Arithmetic

SUMS = frozenset({aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar})
PRODUCTS = frozenset({aten.mul.Tensor, aten.mul.Scalar})
QUOTIENTS = frozenset({aten.div.Tensor, aten.div.Scalar})
# Products and quotients with a number; sums, products and quotients of any two tensors.
SCALINGS = frozenset({aten.mul.Scalar, aten.div.Scalar})
OF_TWO_TENSORS = frozenset({aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor})
# The same with both arguments exchanged, unless one is scaled (`alpha`).
COMMUTATIVE = frozenset({aten.add.Tensor, aten.mul.Tensor})

MASKED_FILLS = frozenset({aten.masked_fill.Scalar, aten.masked_fill.Tensor})
# Pointwise, but not tagged so by every torch.
UNTAGGED_POINTWISE = MASKED_FILLS | {aten.where.self, aten.floor_divide.default}
# Zeros (of either sign), if the first argument is zero everywhere.
ZERO_OF_ZERO = SAME_ENTRIES | {aten.neg.default, aten.abs.default, aten.sum.dim_IntList, aten.mean.dim}

# What loops over sequences do to a row. Entry by entry, to one tensor:
UNARY = CASTS | {aten.detach.default, aten.exp.default, aten.neg.default}
# and along dimensions that the second argument names:
ALONG_DIMENSIONS = frozenset(
    {
        aten._log_softmax.default,
        aten._softmax.default,
        aten.gather.default,
        aten.logsumexp.default,
        aten.squeeze.dim,
    }
)

# ---- What an operator costs

# Reads and writes each entry once, as pointwise operators do.
ONE_PASS = COPIES | CASTS | ASSEMBLIES | CONSTRUCTORS
# Reads of a table what it writes, and no more.
LOOKUPS = frozenset({aten.embedding.default, aten.gather.default, aten.index_select.default})
# Reads every row twice, or takes as long.
ROW_REDUCTIONS = frozenset(
    {
        aten.amax.default,
        aten.amin.default,
        aten.mean.dim,
        aten.native_layer_norm.default,
        aten.sum.dim_IntList,
        aten.var.correction,
        aten.var_mean.correction,
    }
)
# All that one generated kernel can reduce: also softmax, which is too dear to repeat, totals and gradients.
REDUCTIONS = ROW_REDUCTIONS | {
    aten._log_softmax.default,
    aten._log_softmax_backward_data.default,
    aten._softmax.default,
    aten._softmax_backward_data.default,
    aten.logsumexp.default,
    aten.mean.default,
    aten.native_layer_norm_backward.default,
    aten.sum.default,
}
# A matrix times a weight `[k, n]`, the last argument; plus a bias.
LINEAR_LAYERS = frozenset({aten.mm.default, aten.addmm.default})
MATRIX_PRODUCTS = LINEAR_LAYERS | {aten.bmm.default, aten.baddbmm.default}

# ---- Random numbers

DROPOUTS = frozenset({aten.native_dropout.default, aten.bernoulli.p})

# ---- Indices. These are packets, all overloads of an operator: what is captured may have any.

# One axis, the second argument, is read or written where the third argument says.
INDEX_ONE_AXIS = frozenset(
    {
        aten.gather,
        aten.index_add,
        aten.index_copy,
        aten.index_fill,
        aten.index_select,
        aten.scatter,
        aten.scatter_add,
        aten.scatter_reduce,
    }
)
# Each axis, where its item of the second argument says.
INDEX_EVERY_AXIS = frozenset({aten._unsafe_index, aten._unsafe_index_put, aten.index, aten.index_put})
# Entries by their number in the whole tensor.
INDEX_ENTRIES = frozenset({aten.put, aten.take})

# ---- In place

# By operator: the one that gives the same, written over its first argument.
IN_PLACE_VARIANTS = {
    aten.add.Tensor: aten.add_.Tensor,
    aten.add.Scalar: aten.add_.Scalar,
    aten.sub.Tensor: aten.sub_.Tensor,
    aten.mul.Tensor: aten.mul_.Tensor,
    aten.mul.Scalar: aten.mul_.Scalar,
    aten.div.Tensor: aten.div_.Tensor,
    aten.div.Scalar: aten.div_.Scalar,
    aten.exp.default: aten.exp_.default,
    aten.neg.default: aten.neg_.default,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.masked_fill.Scalar: aten.masked_fill_.Scalar,
}
FUNCTIONAL_VARIANTS = {variant: operator for operator, variant in IN_PLACE_VARIANTS.items()}


def is_tagged_pointwise(operator: Any) -> bool:
    """Whether torch says that an operator computes entry by entry, in place or not, and it is the same each time."""
    return torch.Tag.pointwise in getattr(operator, "tags", ()) and not is_random(operator)
