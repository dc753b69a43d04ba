"""Properties of ATen operators that passes ask for, each declared once as a set of overloads.

The rule of a pass for an operator stays with the pass (`token_rules`, `elements`, `vocabulary`, `simplify`).
Properties that are nearly the same are written as unions or differences of each other.
"""

from __future__ import annotations

from typing import Any

import torch

from dta_compile.ops.library import is_random

aten = torch.ops.aten

# ---- Entries of the first argument

# The argument itself, in its storage; `detach` has no gradient.
ALIASES = frozenset({aten.alias.default, aten.detach.default})
# The same entries at the same indices.
COPIES = ALIASES | {aten.clone.default, aten.lift_fresh_copy.default}
# Copies that gradients flow through, so that a value may replace its copy.
DIFFERENTIABLE_COPIES = COPIES - {aten.detach.default}
# `not` of booleans.
NEGATIONS = frozenset({aten.logical_not.default, aten.bitwise_not.default})
# The same entries in another dtype (perhaps rounded) or on another device.
CASTS = frozenset({aten._to_copy.default})

# The same entries in the same order; the second argument is the shape of the result.
VIEWS_OF_ORDER = frozenset({aten.view.default, aten._unsafe_view.default})  # never copied
RESHAPES = VIEWS_OF_ORDER | {aten.reshape.default}
# The second argument is the shape of the result; `expand` repeats entries.
TAKE_A_SHAPE = RESHAPES | {aten.expand.default}
# Remove dimensions of size one.
SQUEEZES = frozenset({aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims})
# The same entries in the same order.
KEEP_ORDER = RESHAPES | SQUEEZES | {aten.unsqueeze.default}
# The ones that never copy: every view of the result is a view of the argument.
KEEP_ORDER_IN_PLACE = KEEP_ORDER - {aten.reshape.default}
# Exchange two dimensions; applied twice they give the argument.
EXCHANGES = frozenset({aten.t.default, aten.transpose.int})
# Permute dimensions; those of a matrix are exchanged or kept (`nodes.swaps`).
TRANSPOSITIONS = EXCHANGES | {aten.permute.default}
# Entries of the argument at other indices: all of the above, and slices.
MOVES = KEEP_ORDER | TAKE_A_SHAPE | TRANSPOSITIONS | {aten.select.int, aten.slice.Tensor}
# Every entry of the result is an entry of the first argument, perhaps rounded.
SAME_ENTRIES = MOVES | COPIES | CASTS
# Results in the storage of the first argument, although the schema does not declare it.
UNDECLARED_VIEWS = frozenset({aten._unsafe_view.default})
# The argument itself, or a copy if its strides are not as required.
MAYBE_COPIES = frozenset({aten.contiguous.default})

# Copy the entries of the arguments into parts of a larger result.
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

# ---- Constructors: entries that come from no argument

# Fill with one number: by operator, that number, or the position of the argument that gives it.
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
# Results with arbitrary entries.
UNINITIALIZED = frozenset({aten.empty.memory_format, aten.new_empty.default})
# Constructors of a given size that `aten.full` replaces. Derivatives scatter into them.
FULL_VARIANTS = UNINITIALIZED | {
    aten.new_full.default,
    aten.new_ones.default,
    aten.new_zeros.default,
    aten.ones.default,
    aten.zeros.default,
}
RANGES = frozenset({aten.arange.default, aten.arange.start, aten.arange.start_step})
# Cheaper to compute again than to read; lowering leaves no `FULL_VARIANTS`.
CONSTRUCTORS = RANGES | (FILLS - FULL_VARIANTS)

# ---- Arithmetic

DIFFERENCES = frozenset({aten.sub.Tensor, aten.sub.Scalar})
SUMS = DIFFERENCES | {aten.add.Tensor, aten.add.Scalar}
PRODUCTS = frozenset({aten.mul.Tensor, aten.mul.Scalar})
QUOTIENTS = frozenset({aten.div.Tensor, aten.div.Scalar})
# Products and quotients with a number; sums, products and quotients of two tensors.
SCALINGS = frozenset({aten.mul.Scalar, aten.div.Scalar})
OF_TWO_TENSORS = frozenset({aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor})
# Commutative, unless one argument is scaled (`alpha`).
COMMUTATIVE = frozenset({aten.add.Tensor, aten.mul.Tensor})

MASKED_FILLS = frozenset({aten.masked_fill.Scalar, aten.masked_fill.Tensor})
# Pointwise, but not tagged so by every version of torch.
UNTAGGED_POINTWISE = MASKED_FILLS | {aten.where.self, aten.floor_divide.default}
# Zero (of either sign) everywhere if the first argument is.
ZERO_OF_ZERO = SAME_ENTRIES | {aten.neg.default, aten.abs.default, aten.sum.dim_IntList, aten.mean.dim}

# Operators in Python loops over sequences, on one row: pointwise on one tensor,
UNARY = CASTS | {aten.detach.default, aten.exp.default, aten.neg.default}
# and along the dimensions that the second argument names.
ALONG_DIMENSIONS = frozenset(
    {aten._log_softmax.default, aten._softmax.default, aten.gather.default, aten.logsumexp.default, aten.squeeze.dim}
)

# ---- What an operator costs

# Read and write each entry once, like pointwise operators.
ONE_PASS = COPIES | CASTS | ASSEMBLIES | CONSTRUCTORS
# Read only as many entries of a table as they write.
LOOKUPS = frozenset({aten.embedding.default, aten.gather.default, aten.index_select.default})
# Read every row twice, or take as long.
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
# Reductions that one generated kernel can compute: also softmax (too expensive to recompute), totals and gradients.
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
# A matrix times a weight `[k, n]`, the last argument, perhaps plus a bias.
LINEAR_LAYERS = frozenset({aten.mm.default, aten.addmm.default})
MATRIX_PRODUCTS = LINEAR_LAYERS | {aten.bmm.default, aten.baddbmm.default}

# ---- Random numbers

DROPOUTS = frozenset({aten.native_dropout.default, aten.bernoulli.p})

# ---- Indices. These are packets (all overloads), since captured graphs may have any overload.

# Read or write one axis, the second argument, at the indices of the third.
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
# Read or write each axis at the indices of its item of the second argument.
INDEX_EVERY_AXIS = frozenset({aten._unsafe_index, aten._unsafe_index_put, aten.index, aten.index_put})
# Read or write entries by their number in the flattened tensor.
INDEX_ENTRIES = frozenset({aten.put, aten.take})

# ---- In place

# By operator, the variant that writes its result over the first argument.
IN_PLACE_VARIANTS = {
    getattr(getattr(aten, name), overload): getattr(getattr(aten, f"{name}_"), overload)
    for overload, names in {
        "Tensor": ("add", "sub", "mul", "div"),
        "Scalar": ("add", "mul", "div", "masked_fill"),
        "default": ("exp", "neg", "scatter_add"),
    }.items()
    for name in names
}
FUNCTIONAL_VARIANTS = {variant: operator for operator, variant in IN_PLACE_VARIANTS.items()}


def is_tagged_pointwise(operator: Any) -> bool:
    """Return whether torch tags an operator as pointwise, in place or not, and it is deterministic."""
    return torch.Tag.pointwise in getattr(operator, "tags", ()) and not is_random(operator)


# Operators (packets: all overloads) with finite values and derivatives for all finite arguments, none of them indices.
FINITE = frozenset(
    getattr(aten, name)
    for name in """
    _prelu_kernel abs add addmm addmv all amax amin any argmax argmin baddbmm bitwise_and bitwise_not bitwise_or bmm
    clamp clamp_max clamp_min cos cumsum elu eq erf flip ge gelu glu gt hardswish hardtanh le leaky_relu lerp
    logical_and logical_not logical_or lt max maximum mean min minimum mm mul mv ne neg relu rsub sigmoid sign silu sin
    softplus sort split split_with_sizes square sub sum tanh topk unbind
    """.split()  # noqa: SIM905
)
