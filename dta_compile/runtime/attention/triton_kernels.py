# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN202  (arguments of kernels are pointers, numbers and constants, which have no types)
"""Triton kernels of `attention.triton`: forward, and the gradients of queries, of own keys and of the stack's keys.

Token i of the chunk reads the first `start` tokens of the stack, and the chunk's token j if `j <= i < ends[j]`, with
units if `begins[j] <= i < ends[j]`; with a limit, none above `_first_key`, see `Limit`. `table` holds start, ends,
depths, begins and lists of blocks, see `ChunkTable`.
Blocks that every query reads whole, most of the work, run without masks, which cost more than the arithmetic around
them. The softmax is computed in base 2; stored log-sum-exps are natural.

Products of blocks multiply masked pairs by zero, and 0 * NaN is NaN. So a program with a non-finite result computes it
again, key by key or query by query, over the pairs that are read.
"""

import triton
import triton.language as tl

from dta_compile.ops.triton_use.math import tanh
from dta_compile.runtime.path.chunk_shape import LISTED_KEYS, LISTED_QUERIES

# Arguments that differ from chunk to chunk: one compilation must serve all values.
UNSPECIALIZED = ("tokens",)
LOG2E = tl.constexpr(1.4426950408889634)
LIST_ROWS, LIST_COLUMNS = tl.constexpr(LISTED_QUERIES), tl.constexpr(LISTED_KEYS)
# Readers from which on several programs share a block of the chunk's own keys: one alone would end last by far.
LONG_REACH = tl.constexpr(2048)


@triton.jit
def _addresses(pointer, head_stride, row_stride, head, rows, WIDTH: tl.constexpr):
    """Return the addresses `[rows, WIDTH]` of one head; offsets may exceed 32 bits."""
    of_head = pointer + head.to(tl.int64) * head_stride
    return of_head + rows.to(tl.int64)[:, None] * row_stride + tl.arange(0, WIDTH)[None, :]


@triton.jit
def _rows(pointer, head_stride, row_stride, head, rows, exists, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Load `[rows, WIDTH]` of one head, zeros where `exists` is false; `exists` None: no mask."""
    address = _addresses(pointer, head_stride, row_stride, head, rows, WIDTH)
    real = (tl.arange(0, WIDTH) < DIM)[None, :]
    if exists is not None:
        values = tl.load(address, mask=exists[:, None] & real, other=0.0)
    elif DIM == WIDTH:
        values = tl.load(address)
    else:
        values = tl.load(address, mask=real, other=0.0)
    return values


@triton.jit
def _store(pointer, head_stride, row_stride, head, rows, exists, values, DIM: tl.constexpr, WIDTH: tl.constexpr):
    address = _addresses(pointer, head_stride, row_stride, head, rows, WIDTH)
    real = (tl.arange(0, WIDTH) < DIM)[None, :]
    tl.store(address, values.to(pointer.dtype.element_ty), mask=exists[:, None] & real)


@triton.jit
def _add(pointer, head_stride, row_stride, head, rows, exists, values, DIM: tl.constexpr, WIDTH: tl.constexpr):
    before = _rows(pointer, head_stride, row_stride, head, rows, exists, DIM, WIDTH)
    _store(pointer, head_stride, row_stride, head, rows, exists, before + values, DIM, WIDTH)


@triton.jit
def _put(
    pointer, head_stride, row_stride, head, rows, exists, values, splits, STORES: tl.constexpr, SHARED: tl.constexpr,
    DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Store values, or add them to what is there; add atomically to rows that `splits` programs share."""
    if SHARED and splits > 1:
        address = _addresses(pointer, head_stride, row_stride, head, rows, WIDTH)
        real = (tl.arange(0, WIDTH) < DIM)[None, :]
        tl.atomic_add(address, values, mask=exists[:, None] & real, sem="relaxed")
    elif STORES:
        _store(pointer, head_stride, row_stride, head, rows, exists, values, DIM, WIDTH)
    else:
        _add(pointer, head_stride, row_stride, head, rows, exists, values, DIM, WIDTH)


@triton.jit
def _share(first, last, split, splits, QUERIES: tl.constexpr):
    """Return one of `splits` parts of a range of queries."""
    each = tl.cdiv(tl.cdiv(tl.maximum(last - first, 0), QUERIES), splits) * QUERIES
    return first + split * each, tl.minimum(first + split * each + each, last)


@triton.jit
def _last_first(tokens, QUERIES: tl.constexpr):
    """Return the block of queries of a program. The last ones read most keys, and long programs must not begin last."""
    return tl.cdiv(tokens, QUERIES) - 1 - tl.program_id(1)


@triton.jit
def _first_key(depth, limit, CHUNKED: tl.constexpr):
    """Return the depth of the first key in a query's window, or in its chunk of the sequence."""
    return depth // limit * limit if CHUNKED else depth - limit + 1


@triton.jit
def _lowest(first_key, exists, KEYS: tl.constexpr):
    """Return the first stack token, rounded down to KEYS, that a block of queries reads under a limit."""
    return tl.maximum(tl.min(tl.where(exists, first_key, 2147483647), 0), 0) // KEYS * KEYS


@triton.jit
def _runs(table, tokens, block, QUERIES: tl.constexpr):
    """Return the runs of the chunk's own keys that a block of queries reads whole: their address and number."""
    row, columns = block * QUERIES // LIST_ROWS, tl.cdiv(tokens, LIST_COLUMNS)
    counts = table + 1 + 3 * tokens
    return counts + 2 * tl.cdiv(tokens, LIST_ROWS) + row * 2 * (columns + 1), tl.load(counts + 2 * row)


@triton.jit
def _run(runs, number):
    """Return the first key of a run and one past its last."""
    return tl.load(runs + 2 * number) * LIST_COLUMNS, tl.load(runs + 2 * number + 1) * LIST_COLUMNS


@triton.jit
def _parts(table, tokens, block, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """Return the blocks of keys that a block of queries reads in part: the address of their list and their number."""
    row, columns = block * QUERIES // LIST_ROWS, tl.cdiv(tokens, LIST_COLUMNS)
    counts = table + 1 + 3 * tokens
    lists = counts + 2 * tl.cdiv(tokens, LIST_ROWS) * (columns + 2)
    return lists + row * columns, tl.load(counts + 2 * row + 1) * (LIST_COLUMNS // KEYS)


@triton.jit
def _columns_of(parts, number, KEYS: tl.constexpr):
    """Return the columns of the `number`-th block of a list."""
    each = LIST_COLUMNS // KEYS
    return tl.load(parts + number // each) * LIST_COLUMNS + number % each * KEYS + tl.arange(0, KEYS)


@triton.jit
def _reads(table, tokens, rows, columns, inside, first_key, LIMITED: tl.constexpr, UNITS: tl.constexpr):
    """Return the mask `[rows, columns]` over the chunk's own tokens."""
    ends = tl.load(table + 1 + columns, mask=inside, other=0)
    begins = columns
    if UNITS:
        begins = tl.load(table + 1 + 2 * tokens + columns, mask=inside, other=0)
    allowed = (begins[None, :] <= rows[:, None]) & (rows[:, None] < ends[None, :])
    if LIMITED:
        above = tl.load(table + 1 + tokens + columns, mask=inside, other=0)
        allowed = allowed & (above[None, :] >= first_key[:, None])
    return allowed


@triton.jit
def _reads_stack(rows, columns, first_key, LIMITED: tl.constexpr):
    """Return the mask `[rows, columns]` over existing tokens of the stack."""
    allowed = (columns >= 0)[None, :] & (rows >= 0)[:, None]
    if LIMITED:
        allowed = columns[None, :] >= first_key[:, None]
    return allowed


@triton.jit
def _has_others(values, exists):
    """Return whether a number in the existing rows is not finite."""
    others = (tl.abs(values) < float("inf")) == 0
    return tl.max(tl.max((others & exists[:, None]).to(tl.int32), 1), 0) > 0


@triton.jit
def _products(rows, columns, PRECISION: tl.constexpr):
    """Return `rows @ columns.T`."""
    if columns.shape[0] == 1:
        products = tl.sum(rows.to(tl.float32) * columns.to(tl.float32), 1)[:, None]
    else:
        products = tl.dot(rows, tl.trans(columns), input_precision=PRECISION)
    return products


@triton.jit
def _weighted(weights, values, allowed, PRECISION: tl.constexpr):
    """Return `weights @ values`; a single row of values counts only where it is allowed."""
    if values.shape[0] == 1:
        result = tl.where(allowed, weights * values.to(tl.float32), 0.0)
    else:
        result = tl.dot(weights.to(values.dtype), values, input_precision=PRECISION)
    return result


@triton.jit
def _attend(q, k, v, allowed, scale, softcap, top, total, out, CAPPED: tl.constexpr, PRECISION: tl.constexpr):
    """Run one step of the online softmax; `top` is the running maximum of the scores. `allowed` None: no mask."""
    scores = _products(q, k, PRECISION)
    if CAPPED:
        scores = tanh(scores * (scale / softcap))
        scale = softcap
    if allowed is None:
        new_top = tl.maximum(top, tl.max(scores, 1) * (scale * LOG2E))
        base = new_top
    else:
        scores = tl.where(allowed, scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * (scale * LOG2E))
        base = tl.where(new_top == -float("inf"), 0.0, new_top)  # nothing read yet
    weights = tl.exp2(scores * (scale * LOG2E) - base[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(weights, 1)
    out = out * shrink[:, None] + _weighted(weights, v, allowed, PRECISION)
    return new_top, total, out


@triton.jit
def _begin(
    out, logsumexp, o_head, o_row, head, tokens, rows, exists,
    VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr, QUERIES: tl.constexpr, GOES_ON: tl.constexpr,
):  # fmt: skip
    """Return the state of the online softmax before the first key."""
    top = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, VALUE_WIDTH], tl.float32)
    if GOES_ON:
        top = tl.load(logsumexp + head * tokens + rows, mask=exists, other=0.0) * LOG2E
        total = tl.full([QUERIES], 1.0, tl.float32)
        acc = _rows(out, o_head, o_row, head, rows, exists, VALUE_DIM, VALUE_WIDTH).to(tl.float32)
    return top, total, acc


@triton.jit(do_not_specialize=(*UNSPECIALIZED, "splits"))
def forward_kernel(
    query, key, value, prefix_key, prefix_value, table, out, logsumexp,
    q_head, q_row, k_head, k_row, v_head, v_row, pk_head, pk_row, pv_head, pv_row, o_head, o_row,
    splits, tokens, scale, limit, softcap,
    GROUPS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, LIMITED: tl.constexpr, UNITS: tl.constexpr,
    CHUNKED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    GOES_ON: tl.constexpr,
):  # fmt: skip
    """Compute output and log-sum-exp of a block of queries over one of `splits` parts of the stack; the last part
    includes the chunk's own keys. `GOES_ON`: add keys to the output and log-sum-exp that are there already."""
    head, block, split = tl.program_id(0), _last_first(tokens, QUERIES), tl.program_id(2)
    kv_head = head // GROUPS
    rows = block * QUERIES + tl.arange(0, QUERIES)
    exists = rows < tokens
    start = tl.load(table)
    first_key = _first_key(tl.load(table + 1 + tokens + rows, mask=exists, other=0), limit, CHUNKED)
    q = _rows(query, q_head, q_row, head, rows, exists, KEY_DIM, KEY_WIDTH)
    top, total, acc = _begin(
        out, logsumexp, o_head, o_row, head, tokens, rows, exists, VALUE_DIM, VALUE_WIDTH, QUERIES, GOES_ON
    )

    share = tl.cdiv(tl.cdiv(start, KEYS), splits) * KEYS
    first, last = split * share, tl.minimum(split * share + share, start)
    if LIMITED:
        first = tl.maximum(first, _lowest(first_key, exists, KEYS))
    whole = first
    if not LIMITED:
        whole = tl.maximum(last // KEYS * KEYS, first)
        for begin in range(first, whole, KEYS):
            columns = begin + tl.arange(0, KEYS)
            k = _rows(prefix_key, pk_head, pk_row, kv_head, columns, None, KEY_DIM, KEY_WIDTH)
            v = _rows(prefix_value, pv_head, pv_row, kv_head, columns, None, VALUE_DIM, VALUE_WIDTH)
            top, total, acc = _attend(q, k, v, None, scale, softcap, top, total, acc, CAPPED, PRECISION)
    for begin in range(whole, last, KEYS):
        columns = begin + tl.arange(0, KEYS)
        inside = columns < last
        k = _rows(prefix_key, pk_head, pk_row, kv_head, columns, inside, KEY_DIM, KEY_WIDTH)
        v = _rows(prefix_value, pv_head, pv_row, kv_head, columns, inside, VALUE_DIM, VALUE_WIDTH)
        allowed = inside[None, :] & _reads_stack(rows, columns, first_key, LIMITED)
        top, total, acc = _attend(q, k, v, allowed, scale, softcap, top, total, acc, CAPPED, PRECISION)

    if split == splits - 1:
        runs, count = _runs(table, tokens, block, QUERIES)
        for number in range(count):
            first_own, last_own = _run(runs, number)
            for begin in range(first_own, last_own, KEYS):
                columns = begin + tl.arange(0, KEYS)
                allowed = None
                if LIMITED:
                    allowed = _reads(table, tokens, rows, columns, columns < tokens, first_key, LIMITED, UNITS)
                k = _rows(key, k_head, k_row, kv_head, columns, None, KEY_DIM, KEY_WIDTH)
                v = _rows(value, v_head, v_row, kv_head, columns, None, VALUE_DIM, VALUE_WIDTH)
                top, total, acc = _attend(q, k, v, allowed, scale, softcap, top, total, acc, CAPPED, PRECISION)
        parts, count = _parts(table, tokens, block, QUERIES, KEYS)
        for number in range(count):
            columns = _columns_of(parts, number, KEYS)
            inside = columns < tokens
            k = _rows(key, k_head, k_row, kv_head, columns, inside, KEY_DIM, KEY_WIDTH)
            v = _rows(value, v_head, v_row, kv_head, columns, inside, VALUE_DIM, VALUE_WIDTH)
            allowed = _reads(table, tokens, rows, columns, inside, first_key, LIMITED, UNITS)
            top, total, acc = _attend(q, k, v, allowed, scale, softcap, top, total, acc, CAPPED, PRECISION)

    if _has_others(acc, exists):
        q = _rows(
            query, q_head, q_row, head, rows, exists, KEY_DIM, KEY_WIDTH
        )  # read again: no register waits for this
        top, total, acc = _begin(
            out, logsumexp, o_head, o_row, head, tokens, rows, exists, VALUE_DIM, VALUE_WIDTH, QUERIES, GOES_ON
        )
        for number in range(first, last):
            columns = number + tl.arange(0, 1)
            k = _rows(prefix_key, pk_head, pk_row, kv_head, columns, None, KEY_DIM, KEY_WIDTH)
            v = _rows(prefix_value, pv_head, pv_row, kv_head, columns, None, VALUE_DIM, VALUE_WIDTH)
            allowed = _reads_stack(rows, columns, first_key, LIMITED)
            top, total, acc = _attend(q, k, v, allowed, scale, softcap, top, total, acc, CAPPED, PRECISION)
        if split == splits - 1:
            for number in range(tokens):
                columns = number + tl.arange(0, 1)
                k = _rows(key, k_head, k_row, kv_head, columns, None, KEY_DIM, KEY_WIDTH)
                v = _rows(value, v_head, v_row, kv_head, columns, None, VALUE_DIM, VALUE_WIDTH)
                allowed = _reads(table, tokens, rows, columns, columns < tokens, first_key, LIMITED, UNITS)
                top, total, acc = _attend(q, k, v, allowed, scale, softcap, top, total, acc, CAPPED, PRECISION)

    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    out += split.to(tl.int64) * tokens * o_row  # parts follow one another, tokens outermost
    _store(out, o_head, o_row, head, rows, exists, acc, VALUE_DIM, VALUE_WIDTH)
    heads = tl.num_programs(0)
    statistics = tl.where(total > 0, (top + tl.log2(total)) / LOG2E, -float("inf"))
    tl.store(logsumexp + (split * heads + head) * tokens + rows, statistics, mask=exists)


@triton.jit
def _weights(scores, grad_weights, allowed, scale, softcap, statistics, delta, CAPPED: tl.constexpr):
    """Return attention weights and the gradients of the scores divided by `scale`, from query-key products and
    gradient-value products. All may be transposed. `allowed` None: no mask, or masked entries are not used."""
    if CAPPED:
        capped = tanh(scores * (scale / softcap))
        weights = tl.exp2(capped * (softcap * LOG2E) - statistics)
    else:
        weights = tl.exp2(scores * (scale * LOG2E) - statistics)
    if allowed is not None:
        weights = tl.where(allowed, weights, 0.0)
    grads = weights * (grad_weights - delta)
    if CAPPED:
        grads = grads * (1.0 - capped * capped)
    return weights, grads


@triton.jit
def _add_to_queries(
    acc, q, do, k, v, allowed, scale, softcap, statistics, delta, CAPPED: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Add the contribution of a block of keys to the gradient of a block of queries, divided by `scale`."""
    scores = _products(q, k, PRECISION)
    grad_weights = _products(do, v, PRECISION)
    _, grads = _weights(scores, grad_weights, allowed, scale, softcap, statistics[:, None], delta[:, None], CAPPED)
    return acc + _weighted(grads, k, allowed, PRECISION)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def queries_kernel(
    query, key, value, prefix_key, prefix_value, table, out, logsumexp, grad, delta, grad_query,
    q_head, q_row, k_head, k_row, v_head, v_row, pk_head, pk_row, pv_head, pv_row, o_head, o_row, g_head, g_row,
    gq_head, gq_row,
    tokens, scale, limit, softcap,
    GROUPS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, LIMITED: tl.constexpr, UNITS: tl.constexpr,
    CHUNKED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    GOES_ON: tl.constexpr,
):  # fmt: skip
    """Compute gradients of a block of queries, and the `delta` that the other kernels read. `GOES_ON`: add to the
    gradients that are there already."""
    head, block = tl.program_id(0), _last_first(tokens, QUERIES)
    kv_head = head // GROUPS
    rows = block * QUERIES + tl.arange(0, QUERIES)
    exists = rows < tokens
    start = tl.load(table)
    first_key = _first_key(tl.load(table + 1 + tokens + rows, mask=exists, other=0), limit, CHUNKED)
    q = _rows(query, q_head, q_row, head, rows, exists, KEY_DIM, KEY_WIDTH)
    do = _rows(grad, g_head, g_row, head, rows, exists, VALUE_DIM, VALUE_WIDTH)
    o = _rows(out, o_head, o_row, head, rows, exists, VALUE_DIM, VALUE_WIDTH)
    statistics = tl.load(logsumexp + head * tokens + rows, mask=exists, other=0.0) * LOG2E
    own_delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(delta + head * tokens + rows, own_delta, mask=exists)
    acc = tl.zeros([QUERIES, KEY_WIDTH], tl.float32)
    if GOES_ON:
        acc = _rows(grad_query, gq_head, gq_row, head, rows, exists, KEY_DIM, KEY_WIDTH).to(tl.float32) / scale

    whole = 0
    if LIMITED:
        whole = _lowest(first_key, exists, KEYS)
    else:
        whole = start // KEYS * KEYS
        for begin in range(0, whole, KEYS):
            columns = begin + tl.arange(0, KEYS)
            k = _rows(prefix_key, pk_head, pk_row, kv_head, columns, None, KEY_DIM, KEY_WIDTH)
            v = _rows(prefix_value, pv_head, pv_row, kv_head, columns, None, VALUE_DIM, VALUE_WIDTH)
            acc = _add_to_queries(acc, q, do, k, v, None, scale, softcap, statistics, own_delta, CAPPED, PRECISION)
    for begin in range(whole, start, KEYS):
        columns = begin + tl.arange(0, KEYS)
        inside = columns < start
        k = _rows(prefix_key, pk_head, pk_row, kv_head, columns, inside, KEY_DIM, KEY_WIDTH)
        v = _rows(prefix_value, pv_head, pv_row, kv_head, columns, inside, VALUE_DIM, VALUE_WIDTH)
        allowed = inside[None, :] & _reads_stack(rows, columns, first_key, LIMITED)
        acc = _add_to_queries(acc, q, do, k, v, allowed, scale, softcap, statistics, own_delta, CAPPED, PRECISION)

    runs, count = _runs(table, tokens, block, QUERIES)
    for number in range(count):
        first_own, last_own = _run(runs, number)
        for begin in range(first_own, last_own, KEYS):
            columns = begin + tl.arange(0, KEYS)
            allowed = None
            if LIMITED:
                allowed = _reads(table, tokens, rows, columns, columns < tokens, first_key, LIMITED, UNITS)
            k = _rows(key, k_head, k_row, kv_head, columns, None, KEY_DIM, KEY_WIDTH)
            v = _rows(value, v_head, v_row, kv_head, columns, None, VALUE_DIM, VALUE_WIDTH)
            acc = _add_to_queries(acc, q, do, k, v, allowed, scale, softcap, statistics, own_delta, CAPPED, PRECISION)
    parts, count = _parts(table, tokens, block, QUERIES, KEYS)
    for number in range(count):
        columns = _columns_of(parts, number, KEYS)
        inside = columns < tokens
        k = _rows(key, k_head, k_row, kv_head, columns, inside, KEY_DIM, KEY_WIDTH)
        v = _rows(value, v_head, v_row, kv_head, columns, inside, VALUE_DIM, VALUE_WIDTH)
        allowed = _reads(table, tokens, rows, columns, inside, first_key, LIMITED, UNITS)
        acc = _add_to_queries(acc, q, do, k, v, allowed, scale, softcap, statistics, own_delta, CAPPED, PRECISION)

    if _has_others(acc, exists):
        q = _rows(query, q_head, q_row, head, rows, exists, KEY_DIM, KEY_WIDTH)
        do = _rows(grad, g_head, g_row, head, rows, exists, VALUE_DIM, VALUE_WIDTH)
        acc = tl.zeros([QUERIES, KEY_WIDTH], tl.float32)
        if GOES_ON:
            acc = _rows(grad_query, gq_head, gq_row, head, rows, exists, KEY_DIM, KEY_WIDTH).to(tl.float32) / scale
        for number in range(start):
            columns = number + tl.arange(0, 1)
            k = _rows(prefix_key, pk_head, pk_row, kv_head, columns, None, KEY_DIM, KEY_WIDTH)
            v = _rows(prefix_value, pv_head, pv_row, kv_head, columns, None, VALUE_DIM, VALUE_WIDTH)
            allowed = _reads_stack(rows, columns, first_key, LIMITED)
            acc = _add_to_queries(acc, q, do, k, v, allowed, scale, softcap, statistics, own_delta, CAPPED, PRECISION)
        for number in range(tokens):
            columns = number + tl.arange(0, 1)
            k = _rows(key, k_head, k_row, kv_head, columns, None, KEY_DIM, KEY_WIDTH)
            v = _rows(value, v_head, v_row, kv_head, columns, None, VALUE_DIM, VALUE_WIDTH)
            allowed = _reads(table, tokens, rows, columns, columns < tokens, first_key, LIMITED, UNITS)
            acc = _add_to_queries(acc, q, do, k, v, allowed, scale, softcap, statistics, own_delta, CAPPED, PRECISION)
    _store(grad_query, gq_head, gq_row, head, rows, exists, acc * scale, KEY_DIM, KEY_WIDTH)


@triton.jit
def _add_to_keys(
    key_acc, value_acc, k, v, query, grad, logsumexp, delta, table, columns, first, last,
    q_head, q_row, g_head, g_row, head, tokens, scale, limit, softcap,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    OWN: tl.constexpr, MASKED: tl.constexpr, LIMITED: tl.constexpr, UNITS: tl.constexpr, CHUNKED: tl.constexpr,
    CAPPED: tl.constexpr, PRECISION: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """Add contributions of queries from `first` to `last` to the gradients of keys, divided by `scale`, and of values.

    Scores have keys in rows, so that they are the left operand of the next product without a transpose. Queries beyond
    the chunk have a gradient of zero, and keys beyond it are not stored: neither needs a mask.
    """
    for begin in range(first, last, QUERIES):
        rows = begin + tl.arange(0, QUERIES)
        exists = rows < tokens
        if MASKED:
            q = _rows(query, q_head, q_row, head, rows, exists, KEY_DIM, KEY_WIDTH)
            do = _rows(grad, g_head, g_row, head, rows, exists, VALUE_DIM, VALUE_WIDTH)
            statistics = tl.load(logsumexp + head * tokens + rows, mask=exists, other=0.0) * LOG2E
            own_delta = tl.load(delta + head * tokens + rows, mask=exists, other=0.0)
        else:
            q = _rows(query, q_head, q_row, head, rows, None, KEY_DIM, KEY_WIDTH)
            do = _rows(grad, g_head, g_row, head, rows, None, VALUE_DIM, VALUE_WIDTH)
            statistics = tl.load(logsumexp + head * tokens + rows) * LOG2E
            own_delta = tl.load(delta + head * tokens + rows)
        allowed = None
        if MASKED and (OWN or LIMITED):
            first_key = rows
            if LIMITED:
                first_key = _first_key(tl.load(table + 1 + tokens + rows, mask=exists, other=0), limit, CHUNKED)
            if OWN:
                allowed = tl.trans(_reads(table, tokens, rows, columns, columns < tokens, first_key, LIMITED, UNITS))
            else:
                allowed = columns[:, None] >= first_key[None, :]
        scores = _products(k, q, PRECISION)
        grad_weights = _products(v, do, PRECISION)
        weights, grads = _weights(
            scores, grad_weights, allowed, scale, softcap, statistics[None, :], own_delta[None, :], CAPPED
        )
        value_acc += _weighted(weights, do, allowed, PRECISION)
        key_acc += _weighted(grads, q, allowed, PRECISION)
    return key_acc, value_acc


@triton.jit(do_not_specialize=UNSPECIALIZED)
def own_keys_kernel(
    query, key, value, prefix_key, prefix_value, table, out, logsumexp, grad, delta, grad_key, grad_value,
    q_head, q_row, k_head, k_row, v_head, v_row, pk_head, pk_row, pv_head, pv_row, o_head, o_row, g_head, g_row,
    gk_head, gk_row, gv_head, gv_row,
    tokens, scale, limit, softcap,
    GROUPS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, LIMITED: tl.constexpr, UNITS: tl.constexpr,
    CHUNKED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    SHARED: tl.constexpr,
):  # fmt: skip
    """Compute gradients of a block of the chunk's own keys and values. `SHARED`: several programs share a block that
    many queries read."""
    kv_head, block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    columns = block * KEYS + tl.arange(0, KEYS)
    inside = columns < tokens
    ends = tl.load(table + 1 + columns, mask=inside, other=0)
    # From `first` on a key is read; before `below` it may come after a query; from `whole` on a key may have no
    # descendants left.
    first, last = block * KEYS // QUERIES * QUERIES, tl.max(ends, 0)
    if UNITS:
        first = tl.load(table + 1 + 2 * tokens + block * KEYS) // QUERIES * QUERIES
    splits = 1
    if SHARED:
        splits = tl.where(last - first >= LONG_REACH, tl.num_programs(2), 1)
        if split >= splits:
            return
    k = _rows(key, k_head, k_row, kv_head, columns, inside, KEY_DIM, KEY_WIDTH)
    v = _rows(value, v_head, v_row, kv_head, columns, inside, VALUE_DIM, VALUE_WIDTH)
    key_acc = tl.zeros([KEYS, KEY_WIDTH], tl.float32)
    value_acc = tl.zeros([KEYS, VALUE_WIDTH], tl.float32)
    if SHARED:
        first, last = _share(first, last, split, splits, QUERIES)
    below = tl.minimum(tl.maximum(tl.cdiv(block * KEYS + KEYS, QUERIES) * QUERIES, first), last)
    whole = below
    if not LIMITED:
        whole = tl.minimum(tl.maximum(tl.min(tl.where(inside, ends, 0), 0) // QUERIES * QUERIES, below), last)
    for member in range(GROUPS):
        head = kv_head * GROUPS + member
        if not LIMITED:
            key_acc, value_acc = _add_to_keys(
                key_acc, value_acc, k, v, query, grad, logsumexp, delta, table, columns, below, whole,
                q_head, q_row, g_head, g_row, head, tokens, scale, limit, softcap, KEY_DIM, VALUE_DIM,
                KEY_WIDTH, VALUE_WIDTH, True, False, LIMITED, UNITS, CHUNKED, CAPPED, PRECISION, QUERIES,
            )  # fmt: skip
        for part in range(2):
            key_acc, value_acc = _add_to_keys(
                key_acc, value_acc, k, v, query, grad, logsumexp, delta, table, columns,
                first if part == 0 else whole, below if part == 0 else last,
                q_head, q_row, g_head, g_row, head, tokens, scale, limit, softcap, KEY_DIM, VALUE_DIM,
                KEY_WIDTH, VALUE_WIDTH, True, True, LIMITED, UNITS, CHUNKED, CAPPED, PRECISION, QUERIES,
            )  # fmt: skip
    if _has_others(key_acc, inside) or _has_others(value_acc, inside):
        key_acc = tl.zeros([KEYS, KEY_WIDTH], tl.float32)
        value_acc = tl.zeros([KEYS, VALUE_WIDTH], tl.float32)
        for member in range(GROUPS):
            head = kv_head * GROUPS + member
            key_acc, value_acc = _add_to_keys(
                key_acc, value_acc, k, v, query, grad, logsumexp, delta, table, columns, first, last,
                q_head, q_row, g_head, g_row, head, tokens, scale, limit, softcap, KEY_DIM, VALUE_DIM,
                KEY_WIDTH, VALUE_WIDTH, True, True, LIMITED, UNITS, CHUNKED, CAPPED, PRECISION, 1,
            )  # fmt: skip
    _put(grad_key, gk_head, gk_row, kv_head, columns, inside, key_acc * scale, splits, True, SHARED, KEY_DIM, KEY_WIDTH)
    _put(grad_value, gv_head, gv_row, kv_head, columns, inside, value_acc, splits, True, SHARED, VALUE_DIM, VALUE_WIDTH)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def stack_keys_kernel(
    query, key, value, prefix_key, prefix_value, table, out, logsumexp, grad, delta, grad_key, grad_value,
    q_head, q_row, k_head, k_row, v_head, v_row, pk_head, pk_row, pv_head, pv_row, o_head, o_row, g_head, g_row,
    gk_head, gk_row, gv_head, gv_row,
    tokens, scale, limit, softcap,
    GROUPS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, LIMITED: tl.constexpr, UNITS: tl.constexpr,
    CHUNKED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    SHARED: tl.constexpr,
):  # fmt: skip
    """Add the gradients of a block of the stack's keys and values to its gradient buffers. `SHARED`: several programs
    share a block."""
    kv_head, block, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(2)
    start = tl.load(table)
    if block * KEYS >= start:
        return
    columns = block * KEYS + tl.arange(0, KEYS)
    inside = columns < start
    k = _rows(prefix_key, pk_head, pk_row, kv_head, columns, inside, KEY_DIM, KEY_WIDTH)
    v = _rows(prefix_value, pv_head, pv_row, kv_head, columns, inside, VALUE_DIM, VALUE_WIDTH)
    key_acc = tl.zeros([KEYS, KEY_WIDTH], tl.float32)
    value_acc = tl.zeros([KEYS, VALUE_WIDTH], tl.float32)
    first, last = 0, tokens
    if SHARED:
        first, last = _share(first, last, tl.program_id(2), splits, QUERIES)
    for member in range(GROUPS):
        head = kv_head * GROUPS + member
        key_acc, value_acc = _add_to_keys(
            key_acc, value_acc, k, v, query, grad, logsumexp, delta, table, columns, first, last,
            q_head, q_row, g_head, g_row, head, tokens, scale, limit, softcap, KEY_DIM, VALUE_DIM,
            KEY_WIDTH, VALUE_WIDTH, False, True, LIMITED, UNITS, CHUNKED, CAPPED, PRECISION, QUERIES,
        )  # fmt: skip
    if LIMITED:  # noqa: SIM102 (static); else every query reads the whole stack
        if _has_others(key_acc, inside) or _has_others(value_acc, inside):
            k = _rows(prefix_key, pk_head, pk_row, kv_head, columns, inside, KEY_DIM, KEY_WIDTH)
            v = _rows(prefix_value, pv_head, pv_row, kv_head, columns, inside, VALUE_DIM, VALUE_WIDTH)
            key_acc = tl.zeros([KEYS, KEY_WIDTH], tl.float32)
            value_acc = tl.zeros([KEYS, VALUE_WIDTH], tl.float32)
            for member in range(GROUPS):
                head = kv_head * GROUPS + member
                key_acc, value_acc = _add_to_keys(
                    key_acc, value_acc, k, v, query, grad, logsumexp, delta, table, columns, first, last,
                    q_head, q_row, g_head, g_row, head, tokens, scale, limit, softcap, KEY_DIM, VALUE_DIM,
                    KEY_WIDTH, VALUE_WIDTH, False, True, LIMITED, UNITS, CHUNKED, CAPPED, PRECISION, 1,
                )  # fmt: skip
    _put(
        grad_key, gk_head, gk_row, kv_head, columns, inside, key_acc * scale, splits, False, SHARED, KEY_DIM, KEY_WIDTH
    )
    _put(
        grad_value, gv_head, gv_row, kv_head, columns, inside, value_acc, splits, False, SHARED, VALUE_DIM, VALUE_WIDTH
    )
