"""A convolution with stride 1 as a matrix product whose left side is gathered on the fly.

Rows are output pixels, columns output channels, and the sum runs over the (tap, input channel)
pairs of the window.  The gradient by the input is the same product: the gradient convolved with the
mirrored kernel.
"""

import triton
import triton.language as tl

from undrift.kernels.programs.half import headroom
from undrift.kernels.programs.pooling import larger


@triton.jit(do_not_specialize=["B"])
def convolve(
    x, weights, bias, y, place, B, b_client,
    HI: tl.constexpr, WI: tl.constexpr, CI: tl.constexpr,
    HO: tl.constexpr, WO: tl.constexpr, CO: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
    BIAS: tl.constexpr, RELU: tl.constexpr, POOL: tl.constexpr, PLANES: tl.constexpr,
    PRECISION: tl.constexpr, BY_ROW: tl.constexpr, QUAD_FIRST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y = pool(relu(x * weights + bias)); weights are packed as [client, ROWS, DEPTH].

    BY_ROW: a program stays in one row of every image, so that taps outside of it are skipped
    instead of multiplied by zeros; needs CI to be a multiple of BK.  QUAD_FIRST: how the four
    members of a pooled cell are ordered in a tile, which decides in whose registers they meet.
    PLANES: pooled values are stored channel by channel, their places as ever.
    """
    COLUMNS: tl.constexpr = (CO + BN - 1) // BN
    PADDED: tl.constexpr = (PH > 0) or (PW > 0)
    WHOLE_TAPS: tl.constexpr = CI % BK == 0  # then a step of the sum stays within one tap
    tile = tl.program_id(0) // COLUMNS
    first = (tl.program_id(0) % COLUMNS) * BN
    client = tl.program_id(1).to(tl.int64)
    lane = tl.arange(0, BM)
    HY: tl.constexpr = HO // 2 if POOL else HO
    WY: tl.constexpr = WO // 2 if POOL else WO
    low = 0
    high = KH
    if POOL:
        cells = B * HY * WY
        if QUAD_FIRST:
            cell = tile * (BM // 4) + lane % (BM // 4)
            quad = lane // (BM // 4)
        else:
            cell = tile * (BM // 4) + lane // 4
            quad = lane % 4
        cell = tl.minimum(cell, cells - 1)
        image = cell // (HY * WY)
        row = (cell % (HY * WY)) // WY * 2 + quad // 2
        column = cell % WY * 2 + quad % 2
    elif BY_ROW:
        tiles = tl.cdiv(B * WO, BM)
        row = tile // tiles
        within = tl.minimum((tile % tiles) * BM + lane, B * WO - 1)
        image = within // WO
        column = within % WO
        low = tl.maximum((PH - row + DH - 1) // DH, 0)
        high = tl.minimum((HI - 1 + PH - row) // DH + 1, KH)
    else:
        pixel = tl.minimum(tile * BM + lane, B * HO * WO - 1)
        image = pixel // (HO * WO)
        row = (pixel % (HO * WO)) // WO
        column = pixel % WO

    n = first + tl.arange(0, BN)
    k = tl.arange(0, BK)
    corner = ((image * HI + row - PH) * WI + column - PW) * CI
    window = x + client * (B * HI * WI * CI) + corner[:, None]
    kernel = weights + client * (ROWS * DEPTH) + n[:, None] * DEPTH
    total = tl.zeros((BM, BN), tl.float32)
    if WHOLE_TAPS:
        start = low * (KW * CI // BK)
        stop = high * (KW * CI // BK)
    else:
        start = 0
        stop = (KH * KW * CI + BK - 1) // BK
    for step in range(start, stop):
        if WHOLE_TAPS:
            tap = step // (CI // BK)
            down = tap // KW * DH
            right = tap % KW * DW
            # a remainder before the multiplication: so the compiler sees that loads are aligned
            at = window + k[None, :] + ((down * WI + right) * CI + step % (CI // BK) * BK)
            r = row - PH + down
            s = column - PW + right
            inside = ((r >= 0) & (r < HI) & (s >= 0) & (s < WI))[:, None]
        else:
            # weights beyond the last tap are zero, so any of its inputs will do
            tap = tl.minimum((step * BK + k) // CI, KH * KW - 1)
            down = (tap // KW * DH)[None, :]
            right = (tap % KW * DW)[None, :]
            at = window + ((down * WI + right) * CI + ((step * BK + k) % CI)[None, :])
            r = row[:, None] - PH + down
            s = column[:, None] - PW + right
            inside = (r >= 0) & (r < HI) & (s >= 0) & (s < WI)
        a = tl.load(at, mask=inside, other=0.0) if PADDED else tl.load(at)
        b = tl.load(kernel + (step * BK + k)[None, :])
        total = tl.dot(a, tl.trans(b), total, input_precision=PRECISION)

    if BIAS:
        total += tl.load(bias + client * b_client + n, mask=n < CO, other=0.0)[None, :]
    if POOL:
        q = tl.arange(0, 4)
        if QUAD_FIRST:
            quads = tl.reshape(total, (4, BM // 4, BN))
            value = tl.reduce(quads, 0, larger)
            origin = tl.min(tl.where(quads == value[None, :, :], q[:, None, None], 4), axis=0)
        else:
            quads = tl.reshape(total, (BM // 4, 4, BN))
            value = tl.reduce(quads, 1, larger)
            origin = tl.min(tl.where(quads == value[:, None, :], q[None, :, None], 4), axis=1)
        if RELU:
            origin = tl.where(value > 0, origin, 4)
        to = tile * (BM // 4) + tl.arange(0, BM // 4)
        kept = (to < cells)[:, None] & (n < CO)[None, :]
        at = client * (cells * CO) + to[:, None] * CO + n[None, :]
        tl.store(place + at, origin.to(tl.int8), mask=kept)
        if PLANES:
            plane = to // (HY * WY) * CO
            at = (plane[:, None] + n[None, :]) * (HY * WY) + (to % (HY * WY))[:, None]
            at += client * (cells * CO)
    else:
        value = total
        if BY_ROW:
            whole = (tile % tiles) * BM + lane
            to = (image * HO + row) * WO + column
            kept = (whole < B * WO)[:, None] & (n < CO)[None, :]
        else:
            to = tile * BM + lane
            kept = (to < B * HO * WO)[:, None] & (n < CO)[None, :]
        at = client * (B * HO * WO * CO) + to[:, None] * CO + n[None, :]
    if RELU:
        value = tl.where(value <= 0, 0.0, value)  # written so that NaN stays
    tl.store(y + at, value.to(y.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=["B"])
def unfinish(
    g, seen, whole, bias_parts, peak_parts, g_client, g_image, g_channel, g_row, g_column, B,
    HO: tl.constexpr, WO: tl.constexpr, CO: tl.constexpr,
    POOL: tl.constexpr, BIAS: tl.constexpr, PEAK: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Bring a gradient back through ReLU and pooling; on the way sums for the bias, and peaks.

    `seen` is y itself, or the places that the pooled values came from; `g` may lie in any order.
    """
    HY: tl.constexpr = HO // 2 if POOL else HO
    WY: tl.constexpr = WO // 2 if POOL else WO
    cells = B * HY * WY
    client = tl.program_id(1).to(tl.int64)
    cell = tl.program_id(0) * BP + tl.arange(0, BP)
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    kept = (cell < cells)[:, None] & (c < CO)[None, :]
    image = cell // (HY * WY)
    row = (cell % (HY * WY)) // WY
    column = cell % WY
    source = image.to(tl.int64) * g_image + row * g_row + column * g_column
    value = tl.load(
        g + client * g_client + source[:, None] + (c * g_channel)[None, :], mask=kept, other=0.0
    ).to(tl.float32)
    at = client * (cells * CO) + cell[:, None] * CO + c[None, :]
    if POOL:
        origin = tl.load(seen + at, mask=kept, other=4)
        value = tl.where(origin < 4, value, 0.0)
        corner = ((image * HO + row * 2) * WO + column * 2) * CO
        to = whole + client * (B * HO * WO * CO) + corner[:, None] + c[None, :]
        for quad in tl.static_range(4):
            part = tl.where(origin == quad, value, 0.0).to(whole.dtype.element_ty)
            tl.store(to + ((quad // 2) * WO + quad % 2) * CO, part, mask=kept)
    else:
        alive = tl.load(seen + at, mask=kept, other=0.0) > 0
        value = tl.where(alive, value, 0.0)
        tl.store(whole + at, value.to(whole.dtype.element_ty), mask=kept)
    if BIAS:
        parts = bias_parts + (client * tl.num_programs(0) + tl.program_id(0)) * CO
        tl.store(parts + c, tl.sum(value, 0), mask=c < CO)
    if PEAK:
        program = tl.program_id(0) * tl.num_programs(2) + tl.program_id(2)
        peak = tl.max(tl.max(tl.abs(value), 1), 0)
        tl.store(peak_parts + client * (tl.num_programs(0) * tl.num_programs(2)) + program, peak)


@triton.jit(do_not_specialize=["clients", "B"])
def weight_gradient(
    x, g, peaks, parts, clients, B,
    HI: tl.constexpr, WI: tl.constexpr, CI: tl.constexpr,
    HO: tl.constexpr, WO: tl.constexpr, CO: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, PRECISION: tl.constexpr, HALF: tl.constexpr,
    SPLIT: tl.constexpr, BC: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """parts[split, client, output channel, (tap, input channel)]: sums over some of the pixels.

    HALF: round to fp16, which has the mantissa of tf32 (matrix units cannot read 32-bit operands
    transposed); both are brought into its range by powers of two, from peaks[client, (g, x)].
    """
    DEPTH: tl.constexpr = KH * KW * CI
    TILES: tl.constexpr = (DEPTH + BN - 1) // BN
    PADDED: tl.constexpr = (PH > 0) or (PW > 0)
    pixels = B * HO * WO
    steps = tl.cdiv(pixels, BP * SPLIT)
    split = tl.program_id(0) // TILES
    k = (tl.program_id(0) % TILES) * BN + tl.arange(0, BN)
    client = tl.program_id(1).to(tl.int64)
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    tap = tl.minimum(k // CI, KH * KW - 1)
    down = tap // KW * DH - PH
    right = tap % KW * DW - PW
    window = x + client * (B * HI * WI * CI) + ((down * WI + right) * CI + k % CI)[None, :]
    rows = g + client * (pixels * CO) + c[None, :]
    if HALF:
        scale, unscale = headroom(tl.load(peaks + 2 * client))
        x_scale, x_unscale = headroom(tl.load(peaks + 2 * client + 1))
    total = tl.zeros((BC, BN), tl.float32)
    for step in range(split * steps, split * steps + steps):
        pixel = step * BP + tl.arange(0, BP)
        there = pixel < pixels
        real = tl.minimum(pixel, pixels - 1)
        image = real // (HO * WO)
        row = (real % (HO * WO)) // WO
        column = real % WO
        a = tl.load(rows + pixel[:, None] * CO, mask=there[:, None] & (c < CO)[None, :], other=0.0)
        at = window + (((image * HI + row) * WI + column) * CI)[:, None]
        if PADDED:
            r = row[:, None] + down[None, :]
            s = column[:, None] + right[None, :]
            inside = (r >= 0) & (r < HI) & (s >= 0) & (s < WI)
            b = tl.load(at, mask=inside, other=0.0)
        else:
            b = tl.load(at)
        if HALF:
            a = (a * scale).to(tl.float16)
            b = (b * x_scale).to(tl.float16)
        total = tl.dot(tl.trans(a), b, total, input_precision=PRECISION)
    if HALF:
        total = total * unscale * x_unscale
    to = parts + ((split * clients + client) * CO + c[:, None]) * DEPTH + k[None, :]
    tl.store(to, total, mask=(c < CO)[:, None] & (k < DEPTH)[None, :])
