"""The end of a round, for columns that no layer remembers: see kernels/columns.py.

Masks and values are those of programs/closing.py, but vector 0 is the model that a client ended
with.
"""

import triton
import triton.language as tl

from undrift.kernels.programs.closing import combined


@triton.jit(do_not_specialize=["EACH"])
def close_columns(
    model, shared, shared_1, shared_2, own, own_more, table, taken, state, state_more, before,
    before_more, total, total_more, parts, again, blocks, EACH, model_client, shared_one,
    shared_1_one, shared_2_one, own_client, own_more_client, state_client, state_more_client,
    before_client, before_more_client, total_one, total_more_one,
    SHARED: tl.constexpr, OWN: tl.constexpr, SUMMED: tl.constexpr, STATES: tl.constexpr,
    SUMS: tl.constexpr, FIRST: tl.constexpr, NEEDS: tl.constexpr, SQUARES: tl.constexpr,
    AGAIN: tl.constexpr, PLACED: tl.constexpr, ALIGNED: tl.constexpr, BC: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Write states, sums over clients, and sums over at most BN columns of each client.

    The latter are parts[j, client, program].  A program's columns begin and end where blocks says.
    BC clients are looked at together.  PLACED: states go to addresses in a table.
    ALIGNED: every four columns begin at a multiple of 16 bytes.
    """
    if AGAIN:  # noqa: SIM102 (the compiler knows one of the two)
        if tl.load(again) == 0:
            return
    experiment = tl.program_id(1).to(tl.int64)
    clients, programs = tl.num_programs(1) * EACH, tl.num_programs(0)
    first = tl.load(blocks + 2 * tl.program_id(0))
    stop = tl.load(blocks + 2 * tl.program_id(0) + 1)
    if ALIGNED:
        first, stop = tl.multiple_of(first, 4), tl.multiple_of(stop, 4)
    n = first + tl.arange(0, BN)
    real = n < stop
    nothing = tl.zeros((BC, BN), tl.float32)
    common = ()  # (tuples grow by + alone here)
    if SHARED > 0:
        base = tl.load(shared + experiment * shared_one + n, mask=real, other=0.0)
        common = common + (nothing + base[None, :],)  # type: ignore[assignment] # noqa: RUF005
    if SHARED > 1:
        base = tl.load(shared_1 + experiment * shared_1_one + n, mask=real, other=0.0)
        common = common + (nothing + base[None, :],)  # type: ignore[assignment] # noqa: RUF005
    if SHARED > 2:
        base = tl.load(shared_2 + experiment * shared_2_one + n, mask=real, other=0.0)
        common = common + (nothing + base[None, :],)  # type: ignore[assignment] # noqa: RUF005
    WIDTH: tl.constexpr = 1 + SHARED + OWN
    VALUES: tl.constexpr = SUMMED + STATES + SUMS
    made = tl.zeros((BC, BN), tl.float64)
    made_more = tl.zeros((BC, BN), tl.float64)
    for begin in range(0, EACH, BC):
        c = begin + tl.arange(0, BC)
        there = c < EACH
        client = experiment * EACH + c
        take = tl.load(taken + client, mask=there, other=0) != 0
        whole = take[:, None] & real[None, :]
        left = (there & (take == 0))[:, None] & real[None, :]
        # Also of who does not count, or it would be waited for; that need not be finite.
        loads = there[:, None] & real[None, :]
        theirs = tl.where(whole, at(model, client, model_client, n, loads), 0.0)
        read = (theirs,) + common  # noqa: RUF005
        if OWN > 0:
            theirs = tl.where(whole, at(own, client, own_client, n, loads), 0.0)
            read = read + (theirs,)  # type: ignore[assignment] # noqa: RUF005
        if OWN > 1:
            theirs = tl.where(whole, at(own_more, client, own_more_client, n, loads), 0.0)
            read = read + (theirs,)  # type: ignore[assignment] # noqa: RUF005
        # nothing is written before all is loaded: what comes behind a store waits for memory anew
        found = ()
        for j in tl.static_range(VALUES):
            row = j if j < SUMMED + STATES else FIRST + j - SUMMED - STATES
            often = ()
            for t in tl.static_range(WIDTH):
                one = tl.load(table + (row * clients + client) * WIDTH + t, mask=there, other=0.0)
                often = often + (tl.where(take, one, 0.0)[:, None],)  # type: ignore[assignment] # noqa: RUF005
            value = combined(read, often, nothing, 0, NEEDS >> (8 * j), WIDTH)
            value = tl.where(whole, value, 0.0)
            if j < SUMMED:
                if (SQUARES >> j) & 1:
                    value *= value
                found = found + (tl.sum(value, 1),)  # type: ignore[assignment] # noqa: RUF005
            elif j < SUMMED + STATES:
                found = found + (value,)  # type: ignore[assignment] # noqa: RUF005
            elif j == SUMMED + STATES:
                made += value.to(tl.float64)
            else:
                made_more += value.to(tl.float64)
        for j in tl.static_range(SUMMED + STATES):
            if j < SUMMED:
                if not AGAIN:
                    to = parts + (j * clients + client) * programs + tl.program_id(0)
                    tl.store(to, found[j], mask=there)
            elif j == SUMMED:
                to = rows_of(state, client, state_client, there, PLACED, ALIGNED)
                put(to, before, before_client, client, n, found[j], whole, left)
            else:
                to = rows_of(state_more, client, state_more_client, there, PLACED, ALIGNED)
                put(to, before_more, before_more_client, client, n, found[j], whole, left)
    if SUMS > 0:
        tl.store(total + experiment * total_one + n, tl.sum(made, 0), mask=real)
    if SUMS > 1:
        tl.store(total_more + experiment * total_more_one + n, tl.sum(made_more, 0), mask=real)


@triton.jit
def at(vectors, client, stride, n, here):
    """Load columns of some clients' vectors."""
    return tl.load(vectors + client[:, None] * stride + n[None, :], mask=here, other=0.0)


@triton.jit
def rows_of(state, client, stride, there, PLACED: tl.constexpr, ALIGNED: tl.constexpr):
    """Tell where some clients' states go: to rows of a matrix, or PLACED to addresses."""
    if PLACED:
        rows = tl.load(state + client, mask=there, other=0).to(tl.pointer_type(tl.float32))
        return tl.multiple_of(rows, 16) if ALIGNED else rows
    else:
        return state + client * stride


@triton.jit
def put(rows, before, before_stride, client, n, value, taken, left):
    """Write states: a value of who counts, the state before of who does not."""
    to = rows[:, None] + n[None, :]
    tl.store(to, value, mask=taken)
    tl.store(to, at(before, client, before_stride, n, left), mask=left)
