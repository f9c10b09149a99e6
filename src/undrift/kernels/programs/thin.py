"""A first layer: images of up to 3 channels, stored with 4 (see `pack_images`).

Outputs are taken in pairs of neighbours.  Both read the same KH x (KW + 1) pixels, so a pair is one
row of a product with 2 x CO columns, whose weights are the kernel twice, the second time one pixel
further: loads are twice as wide and half as many, and so are the columns.  A tile is R rows of
images by W pairs, W a power of two, so that no address needs a division.
"""

import triton
import triton.language as tl

from undrift.kernels.programs.half import headroom
from undrift.kernels.programs.pooling import larger
from undrift.kernels.programs.step import settle, step_of


@triton.jit
def pack_pairs(
    w, bias, packed, w_client, b_client,
    CI: tl.constexpr, CO: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    BIAS: tl.constexpr, BN: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """packed[client, block of BN channels, (left or right, channel), (row, pixel, 4)]."""
    LINE: tl.constexpr = (KW + 1) * 4
    block = tl.program_id(0)
    client = tl.program_id(1).to(tl.int64)
    n = tl.arange(0, 2 * BN)
    k = tl.arange(0, DEPTH)
    side = n // BN
    co = block * BN + n % BN
    kh = k // LINE
    ci = k % 4
    kw = (k % LINE // 4)[None, :] - side[:, None]
    tap = (co < CO)[:, None] & (kh < KH)[None, :] & (kw >= 0) & (kw < KW)
    at = (co * (CI * KH * KW))[:, None] + (ci * (KH * KW) + kh * KW)[None, :] + kw
    value = tl.load(w + client * w_client + at, mask=tap & (ci < CI)[None, :], other=0.0)
    if BIAS:
        one = tap & ((ci == 3) & (kh == 0))[None, :] & (kw == 0)
        shift = tl.load(bias + client * b_client + co, mask=co < CO, other=0.0)
        value = tl.where(one, shift[:, None], value)
    blocks = tl.num_programs(0)
    to = packed + (client * blocks + block) * (2 * BN * DEPTH) + n[:, None] * DEPTH + k[None, :]
    tl.store(to, value.to(packed.dtype.element_ty))


@triton.jit(do_not_specialize=["B"])
def thin_convolve(
    x, weights, y, place, B,
    HI: tl.constexpr, WI: tl.constexpr, CO: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, DEPTH: tl.constexpr, RELU: tl.constexpr,
    POOL: tl.constexpr, PRECISION: tl.constexpr, BN: tl.constexpr,
    EVEN: tl.constexpr, R: tl.constexpr, W: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y = pool(relu(x * weights)); the programs of a client share its tiles.

    EVEN: no tile reaches beyond the last line.
    """
    WG: tl.constexpr = (WI - KW + 1) // 2  # pairs in a row
    HG: tl.constexpr = (HI - KH + 1) // 2 if POOL else HI - KH + 1
    DOWN: tl.constexpr = 2 if POOL else 1  # rows of the convolution that a row of y stands for
    PAIRS: tl.constexpr = R * W
    LINE: tl.constexpr = (KW + 1) * 4
    tiles = tl.cdiv(B * HG, R)
    block = tl.program_id(2)
    client = tl.program_id(1).to(tl.int64)
    k = tl.arange(0, DEPTH)
    offset = tl.minimum(k // LINE, KH - 1) * (WI * 4) + k % LINE
    lane = tl.arange(0, DOWN * PAIRS)
    line = lane % PAIRS // W
    start = ((line * DOWN + lane // PAIRS) * WI + tl.minimum(lane % W, WG - 1) * 2) * 4
    n = tl.arange(0, 2 * BN)
    one = tl.arange(0, BN)
    images = x + client * (B * HI * WI * 4)
    kernel = weights + (client * tl.num_programs(2) + block) * (2 * BN * DEPTH)
    kernel = tl.trans(tl.load(kernel + n[:, None] * DEPTH + k[None, :]))
    pair = tl.arange(0, PAIRS)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        top = tile * R
        at = top % HG
        # lines that belong to the next image; a tile never reaches a third one
        window = start + tl.where(line >= HG - at, (HI - DOWN * HG) * WI * 4, 0)
        if not EVEN:
            window = tl.where(top + line < B * HG, window, 0)
        base = (top // HG * HI + DOWN * at) * (WI * 4)
        a = tl.load(images + base + window[:, None] + offset[None, :])
        total = tl.dot(a, kernel, input_precision=PRECISION)
        to = (top + pair // W) * WG + pair % W
        real = pair % W < WG
        if not EVEN:
            real = real & (top + pair // W < B * HG)
        if POOL:
            quads = tl.reshape(total, (2, PAIRS, 2, BN))
            value = tl.reduce(tl.reduce(quads, 2, larger), 0, larger)
            q = tl.arange(0, 2)
            number = q[:, None, None, None] * 2 + q[None, None, :, None]
            origin = tl.where(quads == value[None, :, None, :], number, 4)
            origin = tl.min(tl.min(origin, axis=2), axis=0)
            c = block * BN + one
            kept = real[:, None] & (c < CO)[None, :]
            spot = client * (B * HG * WG * CO) + to[:, None] * CO + c[None, :]
            if RELU:
                origin = tl.where(value > 0, origin, 4)
            tl.store(place + spot, origin.to(tl.int8), mask=kept)
        else:
            value = total
            c = block * BN + n % BN
            kept = real[:, None] & (c < CO)[None, :]
            spot = to[:, None] * (2 * CO) + ((n // BN) * CO + c)[None, :]
            spot = client * (B * HG * WG * 2 * CO) + spot
        if RELU:
            value = tl.where(value <= 0, 0.0, value)  # written so that NaN stays
        tl.store(y + spot, value.to(y.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=["clients", "B"])
def thin_weight_gradient(
    x, g, seen, peaks, parts, clients, B,
    HI: tl.constexpr, WI: tl.constexpr, CO: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, DEPTH: tl.constexpr, RELU: tl.constexpr,
    POOL: tl.constexpr, PRECISION: tl.constexpr, HALF: tl.constexpr, BN: tl.constexpr,
    EVEN: tl.constexpr, SPLIT: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """parts[split, client, block, (side, channel), (row, pixel, 4)]: sums over some of the rows.

    The gradient goes back through ReLU and pooling as it is loaded: `seen` is y or the places.
    HALF: see `weight_gradient`.  EVEN: no tile reaches beyond the last line.
    """
    WG: tl.constexpr = (WI - KW + 1) // 2
    HG: tl.constexpr = (HI - KH + 1) // 2 if POOL else HI - KH + 1
    DOWN: tl.constexpr = 2 if POOL else 1
    WIDTH: tl.constexpr = CO if POOL else 2 * CO  # values of g that belong to a pair
    LINE: tl.constexpr = (KW + 1) * 4
    tiles = tl.cdiv(B * HG, R)
    each = tl.cdiv(tiles, SPLIT)
    split = tl.program_id(0)
    block = tl.program_id(2)
    client = tl.program_id(1).to(tl.int64)
    k = tl.arange(0, DEPTH)
    offset = tl.minimum(k // LINE, KH - 1) * (WI * 4) + k % LINE
    n = tl.arange(0, 2 * BN)
    c = block * BN + n % BN
    lane = tl.arange(0, R * W)
    line = lane // W
    start = (line * DOWN * WI + tl.minimum(lane % W, WG - 1) * 2) * 4
    if POOL:
        column = c
    else:
        column = n // BN * CO + c
    spot = ((line * WG + lane % W) * WIDTH)[:, None] + column[None, :]
    images = x + client * (B * HI * WI * 4)
    gradients = g + client * (B * HG * WG * WIDTH)
    masks = seen + client * (B * HG * WG * WIDTH)
    x_scale = 1.0
    if HALF:
        scale, unscale = headroom(tl.load(peaks + 2 * client))
        x_scale, x_unscale = headroom(tl.load(peaks + 2 * client + 1))
    total = tl.zeros((2 * BN, DEPTH), tl.float32)
    for tile in range(split * each, tl.minimum(split * each + each, tiles)):
        top = tile * R
        at = top % HG
        window = start + tl.where(line >= HG - at, (HI - DOWN * HG) * WI * 4, 0)
        real = lane % W < WG
        if not EVEN:
            window = tl.where(top + line < B * HG, window, 0)
            real = real & (top + line < B * HG)
        kept = real[:, None] & (c < CO)[None, :]
        value = tl.load(gradients + top * (WG * WIDTH) + spot, mask=kept, other=0.0)
        if HALF:
            value = (value * scale).to(tl.float16)
        base = (top // HG * HI + DOWN * at) * (WI * 4)
        inputs = images + base + window[:, None] + offset[None, :]
        if POOL:
            origin = tl.load(masks + top * (WG * WIDTH) + spot, mask=kept, other=4)
            for down in tl.static_range(2):
                mine = origin == (n // BN)[None, :] + 2 * down
                part = tl.where(mine, value, 0.0).to(value.dtype)
                b = tl.load(inputs + down * WI * 4)
                b = (b * x_scale).to(value.dtype) if HALF else b.to(value.dtype)
                total = tl.dot(tl.trans(part), b, total, input_precision=PRECISION)
        else:
            if RELU:
                alive = tl.load(masks + top * (WG * WIDTH) + spot, mask=kept, other=0.0) > 0
                value = tl.where(alive, value, 0.0).to(value.dtype)
            b = tl.load(inputs)
            b = (b * x_scale).to(value.dtype) if HALF else b.to(value.dtype)
            total = tl.dot(tl.trans(value), b, total, input_precision=PRECISION)
    if HALF:
        total = total * unscale * x_unscale
    rows = (split * clients + client) * tl.num_programs(2) + block
    tl.store(parts + rows * (2 * BN * DEPTH) + n[:, None] * DEPTH + k[None, :], total)


@triton.jit(do_not_specialize=["clients", "each"])
def sum_pairs(
    parts, w, b, lr, keep, more, shared, shared_more, own, own_more, table, live, clients,
    w_client, b_client, each, behind, table_next, table_client, more_client, shared_one,
    shared_more_one, own_client, own_more_client,
    CI: tl.constexpr, CO: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    DEPTH: tl.constexpr, BIAS: tl.constexpr, MOVE: tl.constexpr, RATES: tl.constexpr,
    KEEPS: tl.constexpr, CARRIED: tl.constexpr, SHARED: tl.constexpr, OWN: tl.constexpr,
    NEEDS: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Add splits and sides up: w[client, co, ci, kh, kw] and, from the channel of ones, b.

    In the order in which parts lie, so that loads are whole lines; the few stores are scattered.
    MOVE: w and b take a step instead.
    """
    LINE: tl.constexpr = (KW + 1) * 4
    BLOCKS: tl.constexpr = (CO + BN - 1) // BN
    client = tl.program_id(1).to(tl.int64)
    co = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, DEPTH)
    kh = k // LINE
    kw = k % LINE // 4
    ci = k % 4
    tap = (co < CO)[:, None] & ((kh < KH) & (kw < KW))[None, :]
    left = (((co // BN) * (2 * BN) + co % BN) * DEPTH)[:, None] + k[None, :]
    total = tl.zeros((ROWS, DEPTH), tl.float32)
    for split in range(SPLIT):
        start = parts + (split * clients + client) * (BLOCKS * 2 * BN * DEPTH)
        total += tl.load(start + left, mask=tap, other=0.0)
        total += tl.load(start + left + BN * DEPTH + 4, mask=tap, other=0.0)
    step = step_of(
        lr, keep, more, shared, shared_more, own, own_more, table, live, client, each, table_next,
        table_client, more_client, shared_one, shared_more_one, own_client, own_more_client,
        MOVE, RATES, KEEPS, CARRIED, SHARED, OWN,
    )  # fmt: skip
    to = (co * (CI * KH * KW))[:, None] + (ci * (KH * KW) + kh * KW + kw)[None, :]
    settle(w + client * w_client, to, 0, total, tap & (ci < CI)[None, :], step, MOVE, CARRIED,
           SHARED, OWN, NEEDS)  # fmt: skip
    if BIAS:
        one = tap & ((ci == 3) & (kh == 0) & (kw == 0))[None, :]
        settle(b + client * b_client, co[:, None] + 0 * k[None, :], behind, total, one, step, MOVE,
               CARRIED, SHARED, OWN, NEEDS)  # fmt: skip
