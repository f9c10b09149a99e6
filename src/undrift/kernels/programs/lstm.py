"""One step of a cohort's LSTM: the product with the state before and the gates, in one kernel.

Rows of states are stored for T + 1 moments, the first of which is the start, so that step t reads
moment t and writes moment t + 1.  Gates lie in torch's order: input, forget, cell, output.
"""

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """Give tanh by the one function that is at hand everywhere."""
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def place(client, moment, row, MOMENTS: tl.constexpr, B: tl.constexpr, WIDTH: tl.constexpr):
    """Tell where a row of one moment begins, in [C, MOMENTS, B, WIDTH]."""
    return ((client * MOMENTS + moment) * B + row) * WIDTH


@triton.jit(do_not_specialize=["t"])
def forward(
    inner, recurrent, outputs, cells, gates, t,
    T: tl.constexpr, B: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr,
    DEPTH: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take step t: gates from inner [C, T, B, 4H] and recurrent [C, 4H, H]; cell and output."""
    client = tl.program_id(1).to(tl.int64)
    unit = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    here = (row < B)[:, None] & (unit < H)[None, :]
    before = place(client, t, row, T + 1, B, H)[:, None]
    i = tl.zeros((ROWS, UNITS), tl.float32)
    f = tl.zeros((ROWS, UNITS), tl.float32)
    g = tl.zeros((ROWS, UNITS), tl.float32)
    o = tl.zeros((ROWS, UNITS), tl.float32)
    for start in range(0, H, DEPTH):
        k = start + tl.arange(0, DEPTH)
        h = tl.load(outputs + before + k[None, :], (row < B)[:, None] & (k < H)[None, :], 0.0)
        at = recurrent + client * (4 * H * H) + unit[None, :] * H + k[:, None]
        real = (k < H)[:, None] & (unit < H)[None, :]
        h = h.to(KIND)
        i = tl.dot(h, tl.load(at, real, 0.0), i, input_precision=PRECISION)
        f = tl.dot(h, tl.load(at + H * H, real, 0.0), f, input_precision=PRECISION)
        g = tl.dot(h, tl.load(at + 2 * H * H, real, 0.0), g, input_precision=PRECISION)
        o = tl.dot(h, tl.load(at + 3 * H * H, real, 0.0), o, input_precision=PRECISION)
    at = place(client, t, row, T, B, 4 * H)[:, None] + unit[None, :]
    i = tl.sigmoid(i + tl.load(inner + at, here, 0.0).to(tl.float32))
    f = tl.sigmoid(f + tl.load(inner + at + H, here, 0.0).to(tl.float32))
    g = tanh(g + tl.load(inner + at + 2 * H, here, 0.0).to(tl.float32))
    o = tl.sigmoid(o + tl.load(inner + at + 3 * H, here, 0.0).to(tl.float32))
    c = f * tl.load(cells + before + unit[None, :], here, 0.0) + i * g
    after = place(client, t + 1, row, T + 1, B, H)[:, None] + unit[None, :]
    tl.store(cells + after, c, here)
    tl.store(outputs + after, (o * tanh(c)).to(outputs.dtype.element_ty), here)
    tl.store(gates + at, i.to(gates.dtype.element_ty), here)
    tl.store(gates + at + H, f.to(gates.dtype.element_ty), here)
    tl.store(gates + at + 2 * H, g.to(gates.dtype.element_ty), here)
    tl.store(gates + at + 3 * H, o.to(gates.dtype.element_ty), here)


@triton.jit(do_not_specialize=["t"])
def backward(
    by_output, recurrent, cells, gates, by_gates, by_cell, t,
    T: tl.constexpr, B: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr,
    DEPTH: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Go back through step t: gradients of its gates from those of step t + 1.

    by_cell [C, B, H] goes from moment t + 1 to moment t.
    """
    client = tl.program_id(1).to(tl.int64)
    unit = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    here = (row < B)[:, None] & (unit < H)[None, :]
    at = place(client, t, row, T, B, H)[:, None] + unit[None, :]
    dh = tl.load(by_output + at, here, 0.0).to(tl.float32)
    if t < T - 1:
        later = place(client, t + 1, row, T, B, 4 * H)[:, None]
        for start in range(0, 4 * H, DEPTH):
            k = start + tl.arange(0, DEPTH)
            slopes = tl.load(
                by_gates + later + k[None, :], (row < B)[:, None] & (k < 4 * H)[None, :], 0.0
            )
            weights = tl.load(
                recurrent + client * (4 * H * H) + k[:, None] * H + unit[None, :],
                (k < 4 * H)[:, None] & (unit < H)[None, :], 0.0,
            )  # fmt: skip
            dh = tl.dot(slopes.to(KIND), weights, dh, input_precision=PRECISION)
    now = place(client, t, row, T, B, 4 * H)[:, None] + unit[None, :]
    i = tl.load(gates + now, here, 0.0).to(tl.float32)
    f = tl.load(gates + now + H, here, 0.0).to(tl.float32)
    g = tl.load(gates + now + 2 * H, here, 0.0).to(tl.float32)
    o = tl.load(gates + now + 3 * H, here, 0.0).to(tl.float32)
    before = tl.load(cells + place(client, t, row, T + 1, B, H)[:, None] + unit[None, :], here, 0.0)
    bent = tanh(
        tl.load(cells + place(client, t + 1, row, T + 1, B, H)[:, None] + unit[None, :], here, 0.0)
    )
    cell = by_cell + (client * B + row)[:, None] * H + unit[None, :]
    dc = tl.load(cell, here, 0.0) + dh * o * (1 - bent * bent)
    tl.store(cell, dc * f, here)
    kind = by_gates.dtype.element_ty
    tl.store(by_gates + now, (dc * g * i * (1 - i)).to(kind), here)
    tl.store(by_gates + now + H, (dc * before * f * (1 - f)).to(kind), here)
    tl.store(by_gates + now + 2 * H, (dc * i * (1 - g * g)).to(kind), here)
    tl.store(by_gates + now + 3 * H, (dh * bent * o * (1 - o)).to(kind), here)
