"""BatchNorm of a cohort, with ReLU and 2x2 max-pooling behind it, and its gradients.

A tile is some cells by some channels of one client.  A cell is a pixel or, where the output is
pooled, a square of four.  Activations lie in any order: each comes with its strides (client,
image, channel, pixel).  Rows of padding are never read, so that nothing in them can spread.  Sums
are taken in parts, which are added up in a fixed order: equal inputs give equal bits.  ReLU is
written so that NaN stays: a client that diverged must be seen.
"""

import triton
import triton.language as tl

NOWHERE: tl.constexpr = tl.constexpr(4)  # the place of a pooled value that has no gradient


@triton.jit
def located(tile, P: tl.constexpr, W: tl.constexpr, POOL: tl.constexpr, BP: tl.constexpr):
    """Give the cells of a tile: which, of which image, at which pixel (a square's first)."""
    CELLS: tl.constexpr = P // 4 if POOL else P
    cell = tile * BP + tl.arange(0, BP)
    image = cell // CELLS
    pixel = cell % CELLS
    if POOL:
        pixel = pixel // (W // 2) * (2 * W) + pixel % (W // 2) * 2
    return cell, image, pixel


@triton.jit
def real_rows(mask, client, image, B, MASKED: tl.constexpr):
    """Tell which cells belong to an example, and not to padding."""
    there = image < B
    if MASKED:
        there = there & (tl.load(mask + client * B + image, mask=there, other=0) != 0)
    return there


@triton.jit
def coefficients(
    mean, var, scale, shift, eps, client, c, scale_client, shift_client,
    F: tl.constexpr, SCALE: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Give mean, 1 / deviation, factor and shift of some channels, each [1, BC]."""
    known = c < F
    centre = tl.load(mean + client * F + c, mask=known, other=0.0)
    inverse = tl.rsqrt(tl.load(var + client * F + c, mask=known, other=1.0) + eps)
    factor = inverse
    offset = tl.zeros_like(inverse)
    if SCALE:
        factor = inverse * tl.load(scale + client * scale_client + c, mask=known, other=0.0)
    if SHIFT:
        offset = tl.load(shift + client * shift_client + c, mask=known, other=0.0)
    return centre[None, :], inverse[None, :], factor[None, :], offset[None, :]


@triton.jit
def first_real_row(mask, client, B, MASKED: tl.constexpr):
    """Give a client's first example that is not padding, or B."""
    first = B * 0
    if MASKED:
        first = B
        for start in range(0, B, 128):
            row = start + tl.arange(0, 128)
            real = tl.load(mask + client * B + row, mask=row < B, other=0) != 0
            first = tl.minimum(first, tl.min(tl.where(real, row, B), 0))
    return first


@triton.jit(do_not_specialize=["B", "splits"])
def moments(
    x, mask, parts, B, splits, x_client, x_image, x_channel, x_pixel,
    F: tl.constexpr, P: tl.constexpr, MASKED: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """parts[client, split, (count, level, mean above it, squares around the mean), channel].

    The level is a client's first value: above it a large mean costs no digits of a small variance.
    Each lane of the tile keeps its own mean (Welford 1962), and lanes are put together as Chan et
    al. (1979) do, so that a first value unlike the others does no harm.
    """
    client = (tl.program_id(0) // splits).to(tl.int64)
    split = tl.program_id(0) % splits
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    tiles = tl.cdiv(B * P, BP)
    each = tl.cdiv(tiles, splits)
    inputs = x + client * x_client + c * x_channel
    row = first_real_row(mask, client, B, MASKED)
    level = tl.load(inputs + row * x_image, mask=(c < F) & (row < B), other=0.0).to(tl.float32)
    count = tl.zeros((BP,), tl.float32)
    mean = tl.zeros((BP, BC), tl.float32)
    squares = tl.zeros((BP, BC), tl.float32)
    for tile in range(split * each, tl.minimum(split * each + each, tiles)):
        _, image, pixel = located(tile, P, 1, False, BP)
        real = real_rows(mask, client, image, B, MASKED)
        kept = real[:, None] & (c < F)[None, :]
        at = inputs[None, :] + (image * x_image + pixel * x_pixel)[:, None]
        value = tl.load(at, mask=kept, other=0.0).to(tl.float32) - level[None, :]
        value = tl.where(kept, value, mean)
        count += tl.where(real, 1.0, 0.0)
        apart = value - mean
        mean += apart * (1.0 / tl.maximum(count, 1.0))[:, None]
        squares += apart * (value - mean)
    total = tl.sum(count, 0)
    above = tl.sum(count[:, None] * mean, 0) / tl.maximum(total, 1.0)
    apart = mean - above[None, :]
    together = tl.sum(squares + count[:, None] * apart * apart, 0)
    to = parts + (client * splits + split) * (4 * F) + c
    tl.store(to, total + tl.zeros_like(above), mask=c < F)
    tl.store(to + F, level, mask=c < F)
    tl.store(to + 2 * F, above, mask=c < F)
    tl.store(to + 3 * F, together, mask=c < F)


@triton.jit(do_not_specialize=["splits"])
def join_moments(
    parts, mean, var, size, splits, F: tl.constexpr, BS: tl.constexpr, BC: tl.constexpr
):
    """Put parts together: mean and biased variance [client, channel], size [client].

    A batch of padding alone has variance 1: its gradients are zero and must stay so.
    """
    client = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    split = tl.arange(0, BS)
    kept = (split < splits)[:, None] & (c < F)[None, :]
    rows = parts + client * (splits * 4 * F) + c
    level = tl.load(rows + F, mask=c < F, other=0.0)
    at = rows[None, :] + split[:, None] * (4 * F)
    count = tl.load(at, mask=kept, other=0.0)
    means = tl.load(at + 2 * F, mask=kept, other=0.0)
    squares = tl.load(at + 3 * F, mask=kept, other=0.0)
    total = tl.sum(count, 0)
    among = tl.maximum(total, 1.0)
    above = tl.sum(count * means, 0) / among
    apart = means - above[None, :]
    spread = tl.sum(squares + count * apart * apart, 0) / among
    tl.store(mean + client * F + c, level + above, mask=c < F)
    tl.store(var + client * F + c, tl.where(total > 0, spread, 1.0), mask=c < F)
    tl.store(size + client + 0 * c, total, mask=c == 0)


@triton.jit(do_not_specialize=["B"])
def normalise(
    x, mask, mean, var, scale, shift, y, place, B, eps, scale_client, shift_client,
    x_client, x_image, x_channel, x_pixel, y_client, y_image, y_channel, y_pixel,
    F: tl.constexpr, P: tl.constexpr, W: tl.constexpr, MASKED: tl.constexpr,
    SCALE: tl.constexpr, SHIFT: tl.constexpr, RELU: tl.constexpr, POOL: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """y = pool(relu((x - mean) * factor + shift)), zeros in rows of padding.

    place[client, cell, channel]: where in its square a pooled value came from.
    """
    CELLS: tl.constexpr = P // 4 if POOL else P
    tiles = tl.cdiv(B * CELLS, BP)
    client = (tl.program_id(0) // tiles).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    cell, image, pixel = located(tl.program_id(0) % tiles, P, W, POOL, BP)
    real = real_rows(mask, client, image, B, MASKED)
    kept = real[:, None] & (c < F)[None, :]
    centre, _, factor, offset = coefficients(
        mean, var, scale, shift, eps, client, c, scale_client, shift_client, F, SCALE, SHIFT
    )
    inputs = x + client * x_client + (image * x_image + pixel * x_pixel)[:, None]
    inputs += (c * x_channel)[None, :]
    value = tl.load(inputs, mask=kept, other=0.0).to(tl.float32)
    value = (value - centre) * factor + offset
    stored = (image < B)[:, None] & (c < F)[None, :]
    if POOL:
        origin = tl.zeros((BP, BC), tl.int32)
        for quad in tl.static_range(1, 4):
            step = (quad // 2 * W + quad % 2) * x_pixel
            other = tl.load(inputs + step, mask=kept, other=0.0).to(tl.float32)
            other = (other - centre) * factor + offset
            # the first of equals, as torch does; NaN stays visible
            ahead = (other > value) | (other != other)
            value = tl.where(ahead, other, value)
            origin = tl.where(ahead, quad, origin)
        alive = kept
        if RELU:
            alive = kept & ~(value <= 0)
        at = client * (B * CELLS * F) + cell[:, None] * F + c[None, :]
        tl.store(place + at, tl.where(alive, origin, NOWHERE).to(tl.int8), mask=stored)
    if RELU:
        value = tl.where(value <= 0, 0.0, value)
    value = tl.where(kept, value, 0.0)
    to = y + client * y_client + (image * y_image + cell % CELLS * y_pixel)[:, None]
    tl.store(to + (c * y_channel)[None, :], value.to(y.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["B", "splits"])
def slopes(
    g, x, mask, mean, var, scale, shift, place, parts, splits, B, eps, scale_client, shift_client,
    g_client, g_image, g_channel, g_pixel, x_client, x_image, x_channel, x_pixel,
    F: tl.constexpr, P: tl.constexpr, W: tl.constexpr, MASKED: tl.constexpr,
    SCALE: tl.constexpr, SHIFT: tl.constexpr, RELU: tl.constexpr, POOL: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """parts[client, split, (by shift, by scale), channel]: sums of g, and of g times x normalised.

    Both behind ReLU and pooling.
    """
    CELLS: tl.constexpr = P // 4 if POOL else P
    client = (tl.program_id(0) // splits).to(tl.int64)
    split = tl.program_id(0) % splits
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    tiles = tl.cdiv(B * CELLS, BP)
    each = tl.cdiv(tiles, splits)
    centre, inverse, factor, offset = coefficients(
        mean, var, scale, shift, eps, client, c, scale_client, shift_client, F, SCALE, SHIFT
    )
    by_shift = tl.zeros((BP, BC), tl.float32)
    by_scale = tl.zeros((BP, BC), tl.float32)
    gradients = g + client * g_client + (c * g_channel)[None, :]
    inputs = x + client * x_client + (c * x_channel)[None, :]
    places = place + client * (B * CELLS * F) + c[None, :]
    for tile in range(split * each, tl.minimum(split * each + each, tiles)):
        cell, image, pixel = located(tile, P, W, POOL, BP)
        real = real_rows(mask, client, image, B, MASKED)
        alive = real[:, None] & (c < F)[None, :]
        at = (image * g_image + cell % CELLS * g_pixel)[:, None]
        slope = tl.load(gradients + at, mask=alive, other=0.0).to(tl.float32)
        at = (image * x_image + pixel * x_pixel)[:, None]
        value = tl.load(inputs + at, mask=alive, other=0.0).to(tl.float32)
        if POOL:
            origin = tl.load(places + cell[:, None] * F, mask=alive, other=NOWHERE).to(tl.int32)
            # all four and a choice: loads at chosen places would not be whole lines
            for quad in tl.static_range(1, 4):
                step = (quad // 2 * W + quad % 2) * x_pixel
                other = tl.load(inputs + at + step, mask=alive, other=0.0).to(tl.float32)
                value = tl.where(origin == quad, other, value)
            alive = alive & (origin < NOWHERE)
        value = value - centre
        if RELU and not POOL:
            alive = alive & ~(value * factor + offset <= 0)
        slope = tl.where(alive, slope, 0.0)
        by_shift += slope
        by_scale += tl.where(alive, slope * (value * inverse), 0.0)
    to = parts + (client * splits + split) * (2 * F) + c
    tl.store(to, tl.sum(by_shift, 0), mask=c < F)
    tl.store(to + F, tl.sum(by_scale, 0), mask=c < F)


@triton.jit(do_not_specialize=["splits"])
def join_slopes(
    parts, by_shift, by_scale, splits, F: tl.constexpr, BS: tl.constexpr, BC: tl.constexpr
):
    """Add parts up: gradients by shift and scale [client, channel]."""
    client = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    split = tl.arange(0, BS)
    kept = (split < splits)[:, None] & (c < F)[None, :]
    at = parts + (client * splits + split[:, None]) * (2 * F) + c[None, :]
    first = tl.sum(tl.load(at, mask=kept, other=0.0), 0)
    second = tl.sum(tl.load(at + F, mask=kept, other=0.0), 0)
    tl.store(by_shift + client * F + c, first, mask=c < F)
    tl.store(by_scale + client * F + c, second, mask=c < F)


@triton.jit(do_not_specialize=["B"])
def input_gradient(
    g, x, mask, mean, var, scale, shift, size, place, by_shift, by_scale, gx, B, eps,
    scale_client, shift_client, g_client, g_image, g_channel, g_pixel,
    x_client, x_image, x_channel, x_pixel, gx_client, gx_image, gx_channel, gx_pixel,
    F: tl.constexpr, P: tl.constexpr, W: tl.constexpr, MASKED: tl.constexpr, FIXED: tl.constexpr,
    SCALE: tl.constexpr, SHIFT: tl.constexpr, RELU: tl.constexpr, POOL: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """gx = factor * (g - mean of g - x normalised * mean of (g * x normalised)).

    FIXED: mean and variance do not depend on x, so gx = factor * g.
    """
    CELLS: tl.constexpr = P // 4 if POOL else P
    tiles = tl.cdiv(B * CELLS, BP)
    client = (tl.program_id(0) // tiles).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    cell, image, pixel = located(tl.program_id(0) % tiles, P, W, POOL, BP)
    real = real_rows(mask, client, image, B, MASKED)
    kept = real[:, None] & (c < F)[None, :]
    stored = (image < B)[:, None] & (c < F)[None, :]
    centre, inverse, factor, offset = coefficients(
        mean, var, scale, shift, eps, client, c, scale_client, shift_client, F, SCALE, SHIFT
    )
    level = tl.zeros_like(centre)
    tilt = tl.zeros_like(centre)
    if not FIXED:
        among = tl.maximum(tl.load(size + client), 1.0)
        level = tl.load(by_shift + client * F + c, mask=c < F, other=0.0)[None, :] / among
        tilt = tl.load(by_scale + client * F + c, mask=c < F, other=0.0)[None, :] / among
    at = g + client * g_client + (image * g_image + cell % CELLS * g_pixel)[:, None]
    slope = tl.load(at + (c * g_channel)[None, :], mask=kept, other=0.0).to(tl.float32)
    if POOL:
        at = place + client * (B * CELLS * F) + cell[:, None] * F + c[None, :]
        origin = tl.load(at, mask=kept, other=NOWHERE).to(tl.int32)
    inputs = x + client * x_client + (image * x_image + pixel * x_pixel)[:, None]
    inputs += (c * x_channel)[None, :]
    to = gx + client * gx_client + (image * gx_image + pixel * gx_pixel)[:, None]
    to += (c * gx_channel)[None, :]
    for quad in tl.static_range(4 if POOL else 1):
        step = quad // 2 * W + quad % 2
        value = tl.load(inputs + step * x_pixel, mask=kept, other=0.0).to(tl.float32) - centre
        own = slope
        if POOL:
            own = tl.where(origin == quad, slope, 0.0)
        elif RELU:
            own = tl.where(value * factor + offset <= 0, 0.0, slope)
        change = factor * (own - level - value * inverse * tilt)
        change = tl.where(kept, change, 0.0)
        tl.store(to + step * gx_pixel, change.to(gx.dtype.element_ty), mask=stored)
