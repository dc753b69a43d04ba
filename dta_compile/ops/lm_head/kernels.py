# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN202  (arguments of kernels are pointers, numbers and constants, which have no types)
"""Triton kernels of `by_kernels`: each program handles one row of a block of logits and loops over its columns once.

Logits are read in the dtype of the matrix product; everything else is computed in float32. All tensors but the logits
are contiguous. `start` is the block's first column in the vocabulary, which is subtracted from labels.
"""

import triton
import triton.language as tl

from dta_compile.ops.triton_use.math import tanh

# One compilation must serve chunks of all sizes and all blocks, so values and alignment of these arguments must not
# specialise it. The row stride of logits stays specialised: divisibility by 16 permits wide loads.
UNSPECIALIZED = (
    "temperature", "inverse_cap", "labels", "logit", "largest", "exps", "products", "total", "best",
    "of_labels", "log_sum", "mean", "of_log_sum", "of_mean", "of_total", "start", "temperature_row", "inverse_cap_row",
)  # fmt: skip


@triton.jit
def _divided(value, temperature, SCALED: tl.constexpr):
    value = value.to(tl.float32)
    if SCALED:
        value = tl.div_rn(value, temperature)
    return value


@triton.jit
def _scaled(value, temperature, inverse_cap, SCALED: tl.constexpr, CAPPED: tl.constexpr):
    """Return logits from what the matrix product returned."""
    value = _divided(value, temperature, SCALED)
    if CAPPED:
        value = tl.div_rn(tanh(value), inverse_cap)
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
    logits, temperature, inverse_cap, labels, logit, largest, exps, products, total, best,
    logits_row, columns, start, temperature_row, inverse_cap_row,
    SCALED: tl.constexpr, CAPPED: tl.constexpr, MEAN: tl.constexpr, TOTAL: tl.constexpr, BEST: tl.constexpr,
    CHOSEN: tl.constexpr, LABELS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Update the online softmax of `blocks` with one block, and store the logits of the labels in it."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_row
    by = tl.load(temperature + row * temperature_row) if SCALED else 1.0
    after = tl.load(inverse_cap + row * inverse_cap_row) if CAPPED else 1.0
    old, total_exps, total_products = tl.load(largest + row), tl.load(exps + row), tl.load(products + row)
    sum_of_z, place = tl.load(total + row), tl.load(best + row)
    for begin in range(0, columns, COLUMNS):
        positions = begin + tl.arange(0, COLUMNS)
        inside = positions < columns
        z = _scaled(tl.load(logits + positions, mask=inside, other=0.0), by, after, SCALED, CAPPED)
        if TOTAL:
            sum_of_z += tl.sum(tl.where(inside, z, 0.0), 0)
        z = tl.where(inside, z, float("-inf"))
        top = tl.max(z, 0)
        if BEST:
            first = tl.min(tl.where(z == top, positions, columns), 0)
            place = tl.where(top > old, start + first, place)
        new = tl.maximum(old, top)
        base = tl.where(tl.abs(new) == float("inf"), 0.0, new)
        drop = old - base
        rescale = tl.exp(drop)
        z -= base
        shifted_exps = tl.exp(z)
        if MEAN:
            rescaled = total_products * rescale + total_exps * (drop * rescale)
            total_products = tl.where(total_exps > 0, rescaled, total_products)
            total_products += tl.sum(tl.where(inside, z * shifted_exps, 0.0), 0)
        total_exps = total_exps * rescale + tl.sum(shifted_exps, 0)
        old = new
    tl.store(largest + row, old)
    tl.store(exps + row, total_exps)
    if TOTAL:
        tl.store(total + row, sum_of_z)
    if BEST:
        tl.store(best + row, place)
    if MEAN:
        tl.store(products + row, total_products)
    if LABELS > 0:
        offsets, label_columns, here = _labels_here(labels, row, start, columns, CHOSEN, LABELS)
        z = _scaled(tl.load(logits + label_columns, mask=here, other=0.0), by, after, SCALED, CAPPED)
        tl.store(logit + offsets, z, mask=here)


@triton.jit
def _gradient(z, largest, log_sum, mean, of_log_sum, of_mean, of_total, MEAN: tl.constexpr):
    """Return the gradient of logits without the contribution of labels."""
    z -= largest
    probs = tl.exp(z - log_sum)
    if MEAN:
        return ((z - mean) * of_mean + of_log_sum) * probs + of_total
    else:
        return probs * of_log_sum + of_total


@triton.jit
def _unscaled(gradient, z, temperature, inverse_cap, SCALED: tl.constexpr, CAPPED: tl.constexpr):
    """Return the gradient of what the matrix product returned, from that of logits `z`."""
    if CAPPED:
        capped = z * inverse_cap
        gradient = tl.div_rn(gradient * (1.0 - capped * capped), inverse_cap)
    return _divided(gradient, temperature, SCALED)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def gradient_kernel(
    logits, temperature, inverse_cap, labels, of_labels, log_sum, mean, largest, of_log_sum, of_mean, of_total,
    logits_row, columns, start, temperature_row, inverse_cap_row,
    SCALED: tl.constexpr, CAPPED: tl.constexpr, MEAN: tl.constexpr, TOTAL: tl.constexpr,
    CHOSEN: tl.constexpr, LABELS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Overwrite a block of logits with its gradient."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_row
    by = tl.load(temperature + row * temperature_row) if SCALED else 1.0
    after = tl.load(inverse_cap + row * inverse_cap_row) if CAPPED else 1.0
    top, norm, of_norm = tl.load(largest + row), tl.load(log_sum + row), tl.load(of_log_sum + row)
    of_sum = tl.load(of_total + row) if TOTAL else 0.0
    center = tl.load(mean + row) if MEAN else 0.0
    of_center = tl.load(of_mean + row) if MEAN else 0.0
    if LABELS > 0:
        # The label columns are read before the loop and written after it, with barriers, since the loop overwrites them
        # in other threads.
        _, label_columns, here = _labels_here(labels, row, start, columns, CHOSEN, LABELS)
        z_at_labels = _scaled(tl.load(logits + label_columns, mask=here, other=0.0), by, after, SCALED, CAPPED)
        at_labels = _gradient(z_at_labels, top, norm, center, of_norm, of_center, of_sum, MEAN)
        for number in range(CHOSEN):  # several labels may be the same column
            label = tl.load(labels + row * CHOSEN + number).to(tl.int64) - start
            at_labels += tl.where(label_columns == label, tl.load(of_labels + row * CHOSEN + number), 0.0)
        at_labels = _unscaled(at_labels, z_at_labels, by, after, SCALED, CAPPED).to(logits.dtype.element_ty)
        tl.debug_barrier()
    for begin in range(0, columns, COLUMNS):
        positions = begin + tl.arange(0, COLUMNS)
        inside = positions < columns
        z = _scaled(tl.load(logits + positions, mask=inside, other=0.0), by, after, SCALED, CAPPED)
        grad = _gradient(z, top, norm, center, of_norm, of_center, of_sum, MEAN)
        grad = _unscaled(grad, z, by, after, SCALED, CAPPED)
        tl.store(logits + positions, grad.to(logits.dtype.element_ty), mask=inside)
    if LABELS > 0:
        tl.debug_barrier()
        tl.store(logits + label_columns, at_labels, mask=here)
