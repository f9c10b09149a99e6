"""Copies of many pieces of memory in one launch."""

import triton
import triton.language as tl

from undrift.kernels.programs.placed import place_of, vector_at


@triton.jit
def move(table, BLOCK: tl.constexpr):
    """Copy part program_id(0) of row program_id(1): the table says to, from, and how many words."""
    row, start = table + 3 * tl.program_id(1), tl.program_id(0) * BLOCK
    words = tl.load(row + 2)
    if start < words:
        at = start + tl.arange(0, BLOCK)
        to = tl.load(row).to(tl.pointer_type(tl.int32))
        source = tl.load(row + 1).to(tl.pointer_type(tl.int32))
        tl.store(to + at, tl.load(source + at, mask=at < words), mask=at < words)


@triton.jit(do_not_specialize=["WORDS"])
def clear(to, flag, WORDS, BLOCK: tl.constexpr):
    """Write zeros into so many words, if the flag is set."""
    if tl.load(flag) != 0:
        step = tl.num_programs(0).to(tl.int64) * BLOCK
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK, WORDS, step):
            at = start + tl.arange(0, BLOCK)
            tl.store(to + at, tl.zeros((BLOCK,), tl.int32), mask=at < WORDS)


@triton.jit
def narrow(
    at, to, to_client, COLUMN: tl.constexpr, SIZE: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Convert part program_id(1) of client program_id(0)'s vector: SIZE numbers from COLUMN on."""
    client = tl.program_id(0).to(tl.int64)
    vector = vector_at(at, place_of(at, client, 0, True), True, ALIGNED, COLUMN)
    here = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(vector + here, mask=here < SIZE)
    tl.store(to + client * to_client + here, values.to(to.dtype.element_ty), mask=here < SIZE)


@triton.jit
def exchange(at, slices, OUT: tl.constexpr, BLOCK: tl.constexpr):
    """Copy part program_id(1) of slice program_id(2) of client program_id(0)."""
    client, one = tl.program_id(0).to(tl.int64), slices + 4 * tl.program_id(2)
    words, start = tl.load(one + 3), tl.program_id(1) * BLOCK
    if start < words:
        here = start + tl.arange(0, BLOCK)
        row = (tl.load(at + client) + tl.load(one)).to(tl.pointer_type(tl.int32))
        elsewhere = tl.load(one + 1) + client * tl.load(one + 2)
        other = elsewhere.to(tl.pointer_type(tl.int32))
        source, to = (other, row) if OUT else (row, other)
        tl.store(to + here, tl.load(source + here, mask=here < words), mask=here < words)
