"""Copies of many pieces of memory in one launch."""

import triton
import triton.language as tl


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
