"""The end of a round, for columns that no layer remembers: see kernels/columns.py.

Masks and values are those of programs/closing.py, but vector 0 is the model that a client ended
with.  A program looks at one client: the vectors of clients lie in pages of memory of their own,
and who goes through all of them waits for one page after the other.
"""

import triton
import triton.language as tl

from undrift.kernels.programs.closing import combined
from undrift.kernels.programs.placed import place_of, vector_at


@triton.jit(do_not_specialize=["EACH"])
def close_columns(
    model, shared, shared_1, shared_2, own, own_more, table, taken, state, state_more, before,
    before_more, each, parts, again, blocks, EACH, model_client, shared_one, shared_1_one,
    shared_2_one, own_client, own_more_client, state_client, state_more_client, before_client,
    before_more_client,
    SHARED: tl.constexpr, OWN: tl.constexpr, SUMMED: tl.constexpr, STATES: tl.constexpr,
    SUMS: tl.constexpr, FIRST: tl.constexpr, NEEDS: tl.constexpr, SQUARES: tl.constexpr,
    AGAIN: tl.constexpr, PLACED: tl.constexpr, ALIGNED: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Write states of at most BN columns, what is to be added up over clients, and over columns.

    The latter are each[j, client, program * BN + n] and parts[j, client, program].  A program's
    columns begin and end where blocks says.  PLACED: states go to addresses in a table.  ALIGNED:
    every four columns begin at a multiple of 16 bytes.
    """
    if AGAIN:  # noqa: SIM102 (the compiler knows one of the two)
        if tl.load(again) == 0:
            return
    program, programs = tl.program_id(0), tl.num_programs(0)
    client, clients = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    experiment = client // EACH
    n, real = columns_of(blocks, program, 0, ALIGNED, BN)
    # All is loaded before anything is written: what comes behind a store waits for memory anew.
    # Also of who does not count, or it would be waited for; that need not be finite.
    take = tl.load(taken + client) != 0
    here = real & take
    theirs = tl.load(model + client * model_client + n, mask=real, other=0.0)
    read = (tl.where(here, theirs, 0.0),)
    if SHARED > 0:
        base = tl.load(shared + experiment * shared_one + n, mask=real, other=0.0)
        read = read + (base,)  # type: ignore[assignment] # noqa: RUF005 (tuples grow by +)
    if SHARED > 1:
        base = tl.load(shared_1 + experiment * shared_1_one + n, mask=real, other=0.0)
        read = read + (base,)  # type: ignore[assignment] # noqa: RUF005
    if SHARED > 2:
        base = tl.load(shared_2 + experiment * shared_2_one + n, mask=real, other=0.0)
        read = read + (base,)  # type: ignore[assignment] # noqa: RUF005
    if OWN > 0:
        theirs = tl.load(own + client * own_client + n, mask=real, other=0.0)
        read = read + (tl.where(here, theirs, 0.0),)  # type: ignore[assignment] # noqa: RUF005
    if OWN > 1:
        theirs = tl.load(own_more + client * own_more_client + n, mask=real, other=0.0)
        read = read + (tl.where(here, theirs, 0.0),)  # type: ignore[assignment] # noqa: RUF005
    WIDTH: tl.constexpr = 1 + SHARED + OWN
    VALUES: tl.constexpr = SUMMED + STATES + SUMS
    nothing = tl.zeros((BN,), tl.float32)
    found = ()
    for j in tl.static_range(VALUES):
        row = j if j < SUMMED + STATES else FIRST + j - SUMMED - STATES
        often = ()
        for t in tl.static_range(WIDTH):
            one = tl.load(table + (row * clients + client) * WIDTH + t)
            often = often + (tl.where(take, one, 0.0),)  # type: ignore[assignment] # noqa: RUF005
        value = combined(read, often, nothing, 0, NEEDS >> (8 * j), WIDTH)
        value = tl.where(here, value, 0.0)
        if j < SUMMED:
            if (SQUARES >> j) & 1:
                value *= value
            found = found + (tl.sum(value, 0),)  # type: ignore[assignment] # noqa: RUF005
        else:
            found = found + (value,)  # type: ignore[assignment] # noqa: RUF005
    for j in tl.static_range(VALUES):
        if j < SUMMED:
            if not AGAIN:
                tl.store(parts + (j * clients + client) * programs + program, found[j])
        elif j < SUMMED + STATES:
            if j == SUMMED:
                place = place_of(state, client, state_client, PLACED)
                to = vector_at(state, place, PLACED, ALIGNED, 0)
            else:
                place = place_of(state_more, client, state_more_client, PLACED)
                to = vector_at(state_more, place, PLACED, ALIGNED, 0)
            tl.store(to + n, found[j], mask=here)
            if take == 0:
                if j == SUMMED:
                    old = tl.load(before + client * before_client + n, mask=real)
                else:
                    old = tl.load(before_more + client * before_more_client + n, mask=real)
                tl.store(to + n, old, mask=real)
        else:
            to = each + ((j - SUMMED - STATES) * clients + client) * (programs * BN)
            tl.store(to + program * BN + tl.arange(0, BN), found[j])


@triton.jit(do_not_specialize=["EACH"])
def add_clients(
    each, total, total_more, again, blocks, EACH, total_one, total_more_one,
    SUMS: tl.constexpr, AGAIN: tl.constexpr, ALIGNED: tl.constexpr, BC: tl.constexpr,
    BN: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    """Add up what `close_columns` has left over the clients of each experiment: SOME columns."""
    if AGAIN:  # noqa: SIM102
        if tl.load(again) == 0:
            return
    MOST: tl.constexpr = BN // SOME
    program, part = tl.program_id(0) // MOST, tl.program_id(0) % MOST
    experiment = tl.program_id(1).to(tl.int64)
    size = tl.num_programs(0) // MOST * BN
    n, real = columns_of(blocks, program, part * SOME, ALIGNED, SOME)
    place = program * BN + part * SOME + tl.arange(0, SOME)
    for j in tl.static_range(SUMS):
        made = tl.zeros((BC, SOME), tl.float64)
        for begin in range(0, EACH, BC):
            c = begin + tl.arange(0, BC)
            client = j * tl.num_programs(1) * EACH + experiment * EACH + c
            at = client[:, None] * size + place[None, :]
            made += tl.load(each + at, mask=(c < EACH)[:, None], other=0.0).to(tl.float64)
        to = total + experiment * total_one if j == 0 else total_more + experiment * total_more_one
        tl.store(to + n, tl.sum(made, 0), mask=real)


@triton.jit
def columns_of(blocks, program, begin, ALIGNED: tl.constexpr, BN: tl.constexpr):
    """Give BN columns of a program from number `begin` on, and which of them there are."""
    first = tl.load(blocks + 2 * program)
    stop = tl.load(blocks + 2 * program + 1)
    if ALIGNED:
        first = tl.multiple_of(first, 4)
        stop = tl.multiple_of(stop, 4)
    n = first + begin + tl.arange(0, BN)
    return n, n < stop
