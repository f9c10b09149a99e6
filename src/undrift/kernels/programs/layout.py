"""Copies between torch's layouts and those that the products read.

Weights are read where they lie: rows of one matrix [clients, parameters], as far apart as it says.
"""

import triton
import triton.language as tl

from undrift.kernels.programs.step import settle, step_of


@triton.jit
def pack_weights(
    w, packed, w_client, w_row, w_channel,
    N: tl.constexpr, K: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr,
    DEPTH: tl.constexpr, MIRROR: tl.constexpr, BK: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """packed[client, n, (tap, k)] = w[client, n, k, tap], zeros where there is no such weight.

    `w_row` and `w_channel` are the strides of n and k, so that either may be the outputs.
    """
    n = tl.program_id(0)
    client = tl.program_id(1).to(tl.int64)
    k = tl.program_id(2) * BK + tl.arange(0, BK)
    tap = tl.arange(0, BT)
    real = (k < K)[:, None] & (tap < TAPS)[None, :]
    source = w + client * w_client + n * w_row + (k * w_channel)[:, None] + tap[None, :]
    value = tl.load(source, mask=real & (n < N), other=0.0)
    to = TAPS - 1 - tap if MIRROR else tap
    row = packed + client * (ROWS * DEPTH) + n * DEPTH
    tl.store(row + (to * K)[None, :] + k[:, None], value.to(packed.dtype.element_ty), mask=real)
    if DEPTH > TAPS * K:
        end = TAPS * K + tl.arange(0, 64)
        zero = tl.zeros((64,), packed.dtype.element_ty)
        tl.store(row + end, zero, mask=(end < DEPTH) & (tl.program_id(2) == 0))


@triton.jit(do_not_specialize=["clients", "cells", "each"])
def sum_parts(
    parts, bias_parts, w, b, lr, keep, more, shared, shared_more, own, own_more, table, live,
    clients, cells, w_client, b_client, each, behind, table_next, table_client, more_client,
    shared_one, shared_more_one, own_client, own_more_client,
    CO: tl.constexpr, CI: tl.constexpr, TAPS: tl.constexpr, SPLIT: tl.constexpr,
    BIAS: tl.constexpr, MOVE: tl.constexpr, RATES: tl.constexpr, KEEPS: tl.constexpr,
    CARRIED: tl.constexpr, SHARED: tl.constexpr, OWN: tl.constexpr, NEEDS: tl.constexpr,
    BK: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Add parts[split, client, co, (tap, ci)] and bias_parts[client, cell, co] up.

    The sums go into w[client, co, ci, tap] and b[client, co], or, MOVE, these take a step.
    """
    co = tl.program_id(0)
    client = tl.program_id(1).to(tl.int64)
    k = tl.program_id(2) * BK + tl.arange(0, BK)
    tap = tl.arange(0, BT)
    real = (k < CI)[:, None] & (tap < TAPS)[None, :]
    step = step_of(
        lr, keep, more, shared, shared_more, own, own_more, table, live, client, each, table_next,
        table_client, more_client, shared_one, shared_more_one, own_client, own_more_client,
        MOVE, RATES, KEEPS, CARRIED, SHARED, OWN,
    )  # fmt: skip
    total = tl.zeros((BK, BT), tl.float32)
    for split in range(SPLIT):
        row = parts + ((split * clients + client) * CO + co) * (TAPS * CI)
        total += tl.load(row + (tap * CI)[None, :] + k[:, None], mask=real, other=0.0)
    to = (co * CI + k[:, None]) * TAPS + tap[None, :]
    settle(w + client * w_client, to, 0, total, real, step, MOVE, CARRIED, SHARED, OWN, NEEDS)
    if BIAS and tl.program_id(2) == 0:
        lane = tl.arange(0, 256)
        sums = tl.zeros((256,), tl.float32)
        for first in range(0, cells, 256):
            at = (client * cells + first + lane) * CO + co
            sums += tl.load(bias_parts + at, mask=first + lane < cells, other=0.0)
        one = co + tl.arange(0, 1)
        settle(b + client * b_client, one, behind, tl.sum(sums, 0) + tl.zeros((1,), tl.float32),
               one < CO, step, MOVE, CARRIED, SHARED, OWN, NEEDS)  # fmt: skip


@triton.jit
def pack_images(
    x, packed, x_client, x_image, x_channel, x_row, x_column,
    CI: tl.constexpr, HI: tl.constexpr, WI: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    BP: tl.constexpr,
):  # fmt: skip
    """Bring images of up to 3 channels to [.., rows, columns, 4], borders of zeros included.

    The fourth channel is one everywhere: its weights carry the bias.
    """
    HP: tl.constexpr = HI + 2 * PH
    WP: tl.constexpr = WI + 2 * PW
    image = tl.program_id(0)
    client = tl.program_id(1).to(tl.int64)
    pixel = tl.program_id(2) * BP + tl.arange(0, BP)
    channel = tl.arange(0, 4)
    row = pixel // WP - PH
    column = pixel % WP - PW
    inside = (row >= 0) & (row < HI) & (column >= 0) & (column < WI)
    start = x + client * x_client + image.to(tl.int64) * x_image
    at = (row * x_row + column * x_column)[:, None] + (channel * x_channel)[None, :]
    value = tl.load(start + at, mask=inside[:, None] & (channel < CI)[None, :], other=0.0)
    value = tl.where((channel == 3)[None, :], 1.0, value)
    images = tl.num_programs(0)
    to = packed + (client * images + image) * (HP * WP * 4) + pixel[:, None] * 4 + channel[None, :]
    tl.store(to, value.to(packed.dtype.element_ty), mask=(pixel < HP * WP)[:, None])
