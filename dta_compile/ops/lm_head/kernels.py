# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN202  (arguments of kernels are pointers, numbers and constants, which have no types)
"""Triton kernels of `by_kernels`: each program handles one row of a block of logits and loops over its columns once.

Logits are read in the dtype of the matrix product; everything else is computed in float32. All tensors but the logits
are contiguous. `start` is the block's first column in the vocabulary, which is subtracted from labels.
"""

import triton
import triton.language as tl

# One compilation must serve chunks of all sizes and all blocks, so values and alignment of these arguments must not
# specialise it. The stride of logits does: alignment to 16 decides how wide their long rows are loaded.
UNSPECIALIZED = (
    "temperature", "labels", "logit", "largest", "exps", "products",
    "of_labels", "log_sum", "mean", "of_log_sum", "of_mean", "start", "temperature_row",
)  # fmt: skip


@triton.jit
def _divided(value, temperature, SCALED: tl.constexpr):
    value = value.to(tl.float32)
    if SCALED:
        value = tl.div_rn(value, temperature)
    return value


@triton.jit
def _labels_here(labels, row, start, columns, CHOSEN: tl.constexpr, LABELS: tl.constexpr):
    """Return offsets of a row's labels in tensors `[rows, K]`, their columns, and which of them are in this block."""
    numbers = tl.arange(0, LABELS)
    exists = numbers < CHOSEN
    offsets = row * CHOSEN + numbers
    label_columns = tl.load(labels + offsets, mask=exists, other=-1).to(tl.int64) - start
    return offsets, label_columns, exists & (label_columns >= 0) & (label_columns < columns)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def update_kernel(
    logits, temperature, labels, logit, largest, exps, products, logits_row, columns, start, temperature_row,
    SCALED: tl.constexpr, MEAN: tl.constexpr, CHOSEN: tl.constexpr, LABELS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Update the online softmax of `blocks` with one block, and store the logits of the labels in it."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_row
    by = tl.load(temperature + row * temperature_row) if SCALED else 1.0
    old, total, total_products = tl.load(largest + row), tl.load(exps + row), tl.load(products + row)
    for begin in range(0, columns, COLUMNS):
        positions = begin + tl.arange(0, COLUMNS)
        inside = positions < columns
        z = _divided(tl.load(logits + positions, mask=inside, other=0.0), by, SCALED)
        z = tl.where(inside, z, float("-inf"))
        new = tl.maximum(old, tl.max(z, 0))
        base = tl.where(tl.abs(new) == float("inf"), 0.0, new)
        drop = old - base
        rescale = tl.exp(drop)
        z -= base
        shifted_exps = tl.exp(z)
        if MEAN:
            rescaled = total_products * rescale + total * (drop * rescale)
            total_products = tl.where(total > 0, rescaled, total_products)
            total_products += tl.sum(tl.where(inside, z * shifted_exps, 0.0), 0)
        total = total * rescale + tl.sum(shifted_exps, 0)
        old = new
    tl.store(largest + row, old)
    tl.store(exps + row, total)
    if MEAN:
        tl.store(products + row, total_products)
    if LABELS > 0:
        offsets, label_columns, here = _labels_here(labels, row, start, columns, CHOSEN, LABELS)
        z = _divided(tl.load(logits + label_columns, mask=here, other=0.0), by, SCALED)
        tl.store(logit + offsets, z, mask=here)


@triton.jit
def _gradient(z, largest, log_sum, mean, of_log_sum, of_mean, MEAN: tl.constexpr):
    """Return the gradient of logits without the contribution of labels."""
    z -= largest
    probs = tl.exp(z - log_sum)
    if MEAN:
        return ((z - mean) * of_mean + of_log_sum) * probs
    else:
        return probs * of_log_sum


@triton.jit(do_not_specialize=UNSPECIALIZED)
def gradient_kernel(
    logits, temperature, labels, of_labels, log_sum, mean, largest, of_log_sum, of_mean,
    logits_row, columns, start, temperature_row,
    SCALED: tl.constexpr, MEAN: tl.constexpr, CHOSEN: tl.constexpr, LABELS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Overwrite a block of logits with its gradient."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_row
    by = tl.load(temperature + row * temperature_row) if SCALED else 1.0
    top, total, of_total = tl.load(largest + row), tl.load(log_sum + row), tl.load(of_log_sum + row)
    center = tl.load(mean + row) if MEAN else 0.0
    of_center = tl.load(of_mean + row) if MEAN else 0.0
    if LABELS > 0:
        # The label columns are read before the loop and written after it, with barriers, since the loop overwrites them
        # in other threads.
        _, label_columns, here = _labels_here(labels, row, start, columns, CHOSEN, LABELS)
        at_labels = _divided(tl.load(logits + label_columns, mask=here, other=0.0), by, SCALED)
        at_labels = _gradient(at_labels, top, total, center, of_total, of_center, MEAN)
        for number in range(CHOSEN):  # several labels may be the same column
            label = tl.load(labels + row * CHOSEN + number).to(tl.int64) - start
            at_labels += tl.where(label_columns == label, tl.load(of_labels + row * CHOSEN + number), 0.0)
        at_labels = _divided(at_labels, by, SCALED).to(logits.dtype.element_ty)
        tl.debug_barrier()
    for begin in range(0, columns, COLUMNS):
        positions = begin + tl.arange(0, COLUMNS)
        inside = positions < columns
        z = _divided(tl.load(logits + positions, mask=inside, other=0.0), by, SCALED)
        grad = _divided(_gradient(z, top, total, center, of_total, of_center, MEAN), by, SCALED)
        tl.store(logits + positions, grad.to(logits.dtype.element_ty), mask=inside)
    if LABELS > 0:
        tl.debug_barrier()
        tl.store(logits + label_columns, at_labels, mask=here)
