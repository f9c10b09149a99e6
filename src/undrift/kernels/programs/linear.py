"""Linear layers of a cohort: every weight is read once, as float32, and rounded on the way.

With few rows per client these layers are bound by memory, and the weights are most of it.
"""

import triton
import triton.language as tl

from undrift.kernels.programs.half import headroom
from undrift.kernels.programs.placed import place_of, vector_at
from undrift.kernels.programs.step import known_of, rates_of, settle, step_of, stepped


@triton.jit(do_not_specialize=["clients", "R"])
def linear(
    x, w, bias, y, copy, clients, R, x_client, x_row, w_client, b_client, copy_client,
    IN: tl.constexpr, OUT: tl.constexpr, BIAS: tl.constexpr, RECTIFY: tl.constexpr,
    PLACED: tl.constexpr, ALIGNED: tl.constexpr, COLUMN: tl.constexpr, KIND: tl.constexpr,
    PRECISION: tl.constexpr, SPLIT: tl.constexpr, BR: tl.constexpr, BO: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """y[client, row, o] = x w^T + bias; SPLIT > 1: parts of the sum, [split, client, row, o].

    RECTIFY: of relu(x).  PLACED: w is a table of addresses of vectors in float32, in which weights
    begin at COLUMN; they are written into `copy`, in its type.
    """
    EVEN: tl.constexpr = (IN % (BK * SPLIT) == 0) and (OUT % BO == 0)
    STEPS: tl.constexpr = (IN + BK * SPLIT - 1) // (BK * SPLIT)
    split = tl.program_id(2)
    client = tl.program_id(1).to(tl.int64)
    o = tl.program_id(0) * BO + tl.arange(0, BO)
    r = tl.arange(0, BR)
    k = tl.arange(0, BK)
    inputs = x + client * x_client + r[:, None] * x_row
    place = place_of(w, client, w_client, PLACED)
    weights = vector_at(w, place, PLACED, ALIGNED, COLUMN) + o[:, None] * IN
    to = copy + client * copy_client + o[:, None] * IN
    total = tl.zeros((BO, BR), tl.float32)
    for step in range(split * STEPS, split * STEPS + STEPS):
        at = (step * BK + k)[None, :]
        if EVEN:
            a = tl.load(weights + at)
            b = tl.load(inputs + at, mask=(r < R)[:, None], other=0.0)
            if PLACED:
                tl.store(to + at, a.to(copy.dtype.element_ty))
        else:
            real = (o < OUT)[:, None] & (at < IN)
            a = tl.load(weights + at, mask=real, other=0.0)
            b = tl.load(inputs + at, mask=(r < R)[:, None] & (at < IN), other=0.0)
            if PLACED:
                tl.store(to + at, a.to(copy.dtype.element_ty), mask=real)
        if RECTIFY:
            b = tl.where(b <= 0, 0.0, b)  # written so that NaN stays
        total = tl.dot(a.to(KIND), tl.trans(b.to(KIND)), total, input_precision=PRECISION)
    if BIAS and SPLIT == 1:
        total += tl.load(bias + client * b_client + o, mask=o < OUT, other=0.0)[:, None]
    found = y + ((split * clients + client) * R + r[None, :]) * OUT + o[:, None]
    tl.store(found, total.to(y.dtype.element_ty), mask=(r < R)[None, :] & (o < OUT)[:, None])


@triton.jit(do_not_specialize=["clients", "R"])
def sum_splits(
    parts, bias, y, clients, R, b_client,
    OUT: tl.constexpr, BIAS: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y[client, row, o] = bias + the sum of parts[split, client, row, o]."""
    client = tl.program_id(1).to(tl.int64)
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = e < R * OUT
    total = tl.zeros((BLOCK,), tl.float32)
    for split in range(SPLIT):
        total += tl.load(parts + (split * clients + client) * (R * OUT) + e, mask=real, other=0.0)
    if BIAS:
        total += tl.load(bias + client * b_client + e % OUT, mask=real, other=0.0)
    tl.store(y + client * (R * OUT) + e, total.to(y.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["R"])
def linear_backward(
    g, x, w, b, gx, dw, lr, keep, peaks, R, x_client, x_row, w_client, b_client,
    IN: tl.constexpr, OUT: tl.constexpr, BY_INPUT: tl.constexpr, BY_WEIGHT: tl.constexpr,
    BIAS: tl.constexpr, MOVE: tl.constexpr, RATES: tl.constexpr, KEEPS: tl.constexpr,
    RECTIFY: tl.constexpr, KIND: tl.constexpr, HALF: tl.constexpr, PRECISION: tl.constexpr,
    BR: tl.constexpr, BI: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """One pass over w: gx = g w, and g^T x goes into dw or, MOVE, takes w an SGD step further.

    b is where the gradient by the bias goes, or what moves.  HALF: float32 operands are rounded to
    fp16, which has the mantissa of tf32 (matrix units cannot read 32-bit operands transposed); all
    are brought into its range by powers of two.  RECTIFY: what was multiplied is relu(x).
    """
    EVEN: tl.constexpr = (IN % BI == 0) and (OUT % BO == 0)
    tile = tl.program_id(0)
    client = tl.program_id(1).to(tl.int64)
    i = tile * BI + tl.arange(0, BI)
    r = tl.arange(0, BR)
    here = (r < R)[:, None]
    before = tl.load(
        x + client * x_client + r[:, None] * x_row + i[None, :], mask=here & (i < IN)[None, :],
        other=0.0,
    )  # fmt: skip
    inputs = tl.where(before <= 0, 0.0, before) if RECTIFY else before
    step = rates_of(lr, keep, client, MOVE, RATES, KEEPS)
    scale = 1.0
    unscale = 1.0
    x_unscale = 1.0
    if HALF:
        scale, unscale = headroom(tl.load(peaks + client))
        x_scale, x_unscale = headroom(tl.max(tl.max(tl.abs(inputs), 1), 0))
        inputs = inputs.to(tl.float32) * x_scale
    inputs = inputs.to(KIND)
    total = tl.zeros((BR, BI), tl.float32)
    for first in range(0, OUT, BO):
        o = first + tl.arange(0, BO)
        wide = tl.load(
            g + (client * R + r[:, None]) * OUT + o[None, :],
            mask=here & (o < OUT)[None, :],
            other=0.0,
        )
        rows = (wide.to(tl.float32) * scale).to(KIND) if HALF else wide.to(KIND)
        index = o[:, None] * IN + i[None, :]
        real = (o < OUT)[:, None] & (i < IN)[None, :]
        if BY_INPUT or MOVE:
            at = w + client * w_client + index
            weights = tl.load(at) if EVEN else tl.load(at, mask=real, other=0.0)
        if BY_INPUT:
            if HALF:
                w_scale, w_unscale = headroom(tl.max(tl.max(tl.abs(weights), 1), 0))
                narrow = (weights * w_scale).to(KIND)
                total += tl.dot(rows, narrow, input_precision=PRECISION) * w_unscale
            else:
                total = tl.dot(rows, weights.to(KIND), total, input_precision=PRECISION)
        if BY_WEIGHT:
            change = tl.dot(tl.trans(rows), inputs, input_precision=PRECISION)
            change = change * (unscale * x_unscale)
            if MOVE:
                moved = step[1] * weights - tl.where(step[0] == 0, 0.0, step[0] * change)
                tl.store(w + client * w_client + index, moved, mask=real)
            else:
                tl.store(dw + (client * OUT + o[:, None]) * IN + i[None, :], change, mask=real)
        if BIAS and tile == 0:
            slope = tl.sum(wide.to(tl.float32), 0)
            settle(b + client * b_client, o, 0, slope, o < OUT, step, MOVE, 0, 0, 0, 0)
    if BY_INPUT:
        to = gx + (client * R + r[:, None]) * IN + i[None, :]
        total = total * unscale
        if RECTIFY:
            total = tl.where(before <= 0, 0.0, total)
        tl.store(to, total.to(gx.dtype.element_ty), mask=here & (i < IN)[None, :])


@triton.jit(do_not_specialize=["R", "each"])
def linear_step(
    g, x, w, b, lr, keep, more, shared, shared_more, own, own_more, table, live, peaks, R,
    x_client, x_row, w_client, b_client, each, behind, table_next, table_client, more_client,
    shared_one, shared_more_one, own_client, own_more_client,
    IN: tl.constexpr, OUT: tl.constexpr, BIAS: tl.constexpr, MOVE: tl.constexpr,
    RATES: tl.constexpr, KEEPS: tl.constexpr, CARRIED: tl.constexpr, SHARED: tl.constexpr,
    OWN: tl.constexpr, NEEDS: tl.constexpr, RECTIFY: tl.constexpr, KIND: tl.constexpr,
    HALF: tl.constexpr, PRECISION: tl.constexpr, BR: tl.constexpr, BI: tl.constexpr,
    BO: tl.constexpr,
):  # fmt: skip
    """Take a tile of w, and what else moves with it, a step further by g^T x; and the bias b.

    Everything is read and written once.  The rest is as in `linear_backward`.
    """
    client = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BI + tl.arange(0, BI)
    o = tl.program_id(2) * BO + tl.arange(0, BO)
    r = tl.arange(0, BR)
    here = (r < R)[:, None]
    wide = tl.load(
        g + (client * R + r[:, None]) * OUT + o[None, :], mask=here & (o < OUT)[None, :], other=0.0
    )
    inputs = tl.load(
        x + client * x_client + r[:, None] * x_row + i[None, :], mask=here & (i < IN)[None, :],
        other=0.0,
    )  # fmt: skip
    step = step_of(
        lr, keep, more, shared, shared_more, own, own_more, table, live, client, each, table_next,
        table_client, more_client, shared_one, shared_more_one, own_client, own_more_client,
        MOVE, RATES, KEEPS, CARRIED, SHARED, OWN,
    )  # fmt: skip
    index = o[:, None] * IN + i[None, :]
    real = (o < OUT)[:, None] & (i < IN)[None, :]
    if RECTIFY:
        inputs = tl.where(inputs <= 0, 0.0, inputs)
    unscale = 1.0
    rows = wide
    if HALF:
        scale, g_unscale = headroom(tl.load(peaks + client))
        x_scale, x_unscale = headroom(tl.max(tl.max(tl.abs(inputs), 1), 0))
        inputs = inputs.to(tl.float32) * x_scale
        rows = wide.to(tl.float32) * scale
        unscale = g_unscale * x_unscale
    # before the product, for nothing is loaded ahead of its barriers
    at = w + client * w_client + index
    old = tl.load(at, mask=real, other=0.0)
    made, made_more = known_of(old, index, real, step, CARRIED, SHARED, OWN, NEEDS)
    change = tl.dot(tl.trans(rows.to(KIND)), inputs.to(KIND), input_precision=PRECISION) * unscale
    made = stepped(made, made_more, index, change, real, step, CARRIED, SHARED, OWN, NEEDS)
    tl.store(at, made, mask=real & step[1])
    if BIAS and tl.program_id(0) == 0:
        slope = tl.sum(wide.to(tl.float32), 0)
        settle(b + client * b_client, o, behind, slope, o < OUT, step, MOVE, CARRIED, SHARED, OWN,
               NEEDS)  # fmt: skip


@triton.jit(do_not_specialize=["R"])
def add_rows(
    g, w, y, scale, R, w_client,
    IN: tl.constexpr, OUT: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
    BR: tl.constexpr, BI: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """y[client, row, i] += scale * sum over o of g[client, row, o] w[client, o, i]."""
    client = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BI + tl.arange(0, BI)
    r = tl.arange(0, BR)
    here = (r < R)[:, None]
    total = tl.zeros((BR, BI), tl.float32)
    for first in range(0, OUT, BO):
        o = first + tl.arange(0, BO)
        rows = tl.load(
            g + (client * R + r[:, None]) * OUT + o[None, :],
            mask=here & (o < OUT)[None, :],
            other=0.0,
        )
        real = (o < OUT)[:, None] & (i < IN)[None, :]
        weights = tl.load(
            w + client * w_client + o[:, None] * IN + i[None, :], mask=real, other=0.0
        )
        total = tl.dot(rows.to(KIND), weights.to(KIND), total, input_precision=PRECISION)
    at = y + (client * R + r[:, None]) * IN + i[None, :]
    mask = here & (i < IN)[None, :]
    held = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, (held + scale * total).to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["ROWS", "EACH"])
def rebuild(
    g, x, shared, weights, own, own_weight, w, scale, ROWS, EACH, g_client, x_client, shared_one,
    shared_next, weights_client, own_client, own_weight_client, w_client,
    IN: tl.constexpr, OUT: tl.constexpr, SHARED: tl.constexpr, WEIGHTED: tl.constexpr,
    OWN: tl.constexpr, BS: tl.constexpr, BI: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """w[client, o, i] = scale * sum over rows of g[row, o] x[row, i] + what it is made of besides.

    That is the sum of all j of shared[client / EACH, j, o, i], WEIGHTED: weights[client, j] of
    each; OWN: plus own_weight[client] of own[client, o, i].  w is written once and never read.
    """
    client = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BI + tl.arange(0, BI)
    o = tl.program_id(2) * BO + tl.arange(0, BO)
    total = tl.zeros((BO, BI), tl.float32)
    for first in range(0, ROWS, BS):
        s = first + tl.arange(0, BS)
        here = (s < ROWS)[:, None]
        slopes = tl.load(
            g + client * g_client + s[:, None] * OUT + o[None, :],
            mask=here & (o < OUT)[None, :],
            other=0.0,
        )
        inputs = tl.load(
            x + client * x_client + s[:, None] * IN + i[None, :],
            mask=here & (i < IN)[None, :],
            other=0.0,
        )
        total = tl.dot(tl.trans(slopes), inputs, total)
    at = o[:, None] * IN + i[None, :]
    real = (o < OUT)[:, None] & (i < IN)[None, :]
    total = total * scale
    for j in tl.static_range(SHARED):
        held = tl.load(
            shared + (client // EACH) * shared_one + j * shared_next + at, mask=real, other=0.0
        )
        if WEIGHTED:
            held = held * tl.load(weights + client * weights_client + j)
        total += held
    if OWN:
        held = tl.load(own + client * own_client + at, mask=real, other=0.0)
        total += held * tl.load(own_weight + client * own_weight_client)
    tl.store(w + client * w_client + at, total, mask=real)
