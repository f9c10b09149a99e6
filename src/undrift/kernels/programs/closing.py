"""The end of a round, for a layer that remembers its steps: see kernels/ending.py.

Bit t of a mask says whether a value reads vector t: 0 the sum over steps, then what clients share,
then their own.
"""

import triton
import triton.language as tl

from undrift.kernels.programs.placed import place_of, vector_at


@triton.jit
def moved_by(
    g, x, ROWS, o, i, IN: tl.constexpr, OUT: tl.constexpr, ONE: tl.constexpr, BS: tl.constexpr,
    BI: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """Give the sum over rows of g[row, o] x[row, i]; ONE: all rows are one tile."""
    total = tl.zeros((BO, BI), tl.float32)
    if ONE:
        return add_rows(g, x, total, 0, ROWS, o, i, IN, OUT, BS)
    for begin in range(0, ROWS, BS):
        total = add_rows(g, x, total, begin, ROWS, o, i, IN, OUT, BS)
    return total


@triton.jit
def add_rows(g, x, total, begin, ROWS, o, i, IN: tl.constexpr, OUT: tl.constexpr, BS: tl.constexpr):
    """Add a tile of rows."""
    s = begin + tl.arange(0, BS)
    here = (s < ROWS)[:, None]
    slopes = tl.load(g + s[:, None] * OUT + o[None, :], mask=here & (o < OUT)[None, :], other=0.0)
    inputs = tl.load(x + s[:, None] * IN + i[None, :], mask=here & (i < IN)[None, :], other=0.0)
    return tl.dot(tl.trans(slopes), inputs, total)


ROWS_OF_WARP = tl.constexpr(16)  # of a product


# A product lies otherwise among threads than what is loaded: a thread has two neighbours of a row,
# and two of the row eight below.  The compiler brings one to the other through shared memory, where
# all threads wait.  Or each reads and writes its own two numbers, of which four threads make up the
# 32 bytes that memory gives at once; that takes a few instructions that the language has not.
@triton.jit
def loaded(source, at, real, like, DIRECT: tl.constexpr):
    """Load a tile where it is real, or DIRECT as a product lies."""
    if DIRECT:
        return tl.inline_asm_elementwise(
            """{
            .reg .b64 place;
            mul.wide.s32 place, $4, 4;
            add.s64 place, place, $2;
            ld.global.v2.b32 {$0, $1}, [place];
            }""",
            "=r,=r,l,l,r,r,r,r",
            [source.to(tl.int64), at, like],
            dtype=tl.float32,
            is_pure=False,
            pack=2,
        )
    else:
        return tl.load(source + at, mask=real, other=0.0)


@triton.jit
def held_as(vector, product, DIRECT: tl.constexpr):
    """Bring what was loaded to where a product lies, if it does not lie there.

    Added to one, a vector is brought over once; left to itself the compiler brings every multiple.
    """
    if DIRECT:
        return vector
    else:
        return product + vector


@triton.jit
def as_product(source, at, real, there, like, DIRECT: tl.constexpr):
    """Load a tile and give it as a product lies; 0 if it is not there."""
    if DIRECT:
        return tl.where(there, loaded(source, at, real, like, True), 0.0)
    else:
        return like + loaded(source, at, real & there, like, False)


@triton.jit
def put(to, at, value, take):
    """Write a tile from where a product lies, if the client counts."""
    tl.inline_asm_elementwise(
        """{
        .reg .b64 place;
        .reg .pred take;
        mul.wide.s32 place, $4, 4;
        add.s64 place, place, $2;
        setp.ne.s32 take, $8, 0;
        @take st.global.v2.b32 [place], {$6, $7};
        mov.b32 $0, 0;
        mov.b32 $1, 0;
        }""",
        "=r,=r,l,l,r,r,r,r,r,r",
        [to.to(tl.int64), at, value, take.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=2,
    )


@triton.jit
def put_parts(to, at, value):
    """Write one number of some rows each from where a product's rows lie."""
    tl.inline_asm_elementwise(
        """{
        .reg .b64 place;
        mul.wide.s32 place, $2, 4;
        add.s64 place, place, $1;
        st.global.b32 [place], $3;
        mov.b32 $0, 0;
        }""",
        "=r,l,r,r",
        [to.to(tl.int64), at, value],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["ROWS", "EACH"])
def close_clients(
    g, x, shared, shared_1, shared_2, used, own, own_more, table, taken, state, state_more, before,
    before_more, total, total_more, parts, again, scale, ROWS, EACH, g_client, x_client,
    shared_one, shared_1_one, shared_2_one, own_client, own_more_client, state_client,
    state_more_client, before_client, before_more_client, total_one, total_more_one, total_piece,
    IN: tl.constexpr, OUT: tl.constexpr, SHARED: tl.constexpr, OWN: tl.constexpr,
    SUMMED: tl.constexpr, STATES: tl.constexpr, SUMS: tl.constexpr, FIRST: tl.constexpr,
    NEEDS: tl.constexpr, SQUARES: tl.constexpr, AGAIN: tl.constexpr, ONE: tl.constexpr,
    PLACED: tl.constexpr, ALIGNED: tl.constexpr, COLUMN: tl.constexpr,
    BC: tl.constexpr, BS: tl.constexpr, BI: tl.constexpr, BO: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    """Write the states of BC clients, the sums over a tile of their weights, and over clients.

    The former sums are parts[j, client, tile, some rows], the latter of this piece of the clients.
    The mask of value j is NEEDS >> 8 j, first what is summed, then states, then the sums, whose
    numbers begin at row FIRST of the table.  Of what is shared, only what is `used` at all is
    loaded.  AGAIN: states and sums over clients alone, and only if the flag is set.  PLACED: own
    vectors, states and those before are tables of addresses of whole vectors, in which this layer
    begins at COLUMN.  DIRECT: threads read and write what they hold of a product, two numbers at a
    time, without bringing it to where neighbours hold what lies together; tiles are whole.
    """
    if AGAIN:  # noqa: SIM102 (the compiler knows one of the two)
        if tl.load(again) == 0:
            return
    pieces = tl.cdiv(EACH, BC)
    experiment = (tl.program_id(1) // pieces).to(tl.int64)
    piece = (tl.program_id(1) % pieces).to(tl.int64)
    first = tl.program_id(1) % pieces * BC
    clients = (tl.num_programs(1) // pieces) * EACH
    tile = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    tiles = tl.num_programs(0) * tl.num_programs(2)
    i = tl.program_id(2) * BI + tl.arange(0, BI)
    o = tl.program_id(0) * BO + tl.arange(0, BO)  # inputs, of which there are more, are read once
    at = o[:, None] * IN + i[None, :]
    real = (o < OUT)[:, None] & (i < IN)[None, :]
    kind = x.dtype.element_ty
    nothing = tl.dot(tl.zeros((BO, BS), kind), tl.zeros((BS, BI), kind))  # lies as products do
    common = ()  # (tuples grow by + alone here)
    if SHARED > 0:
        base = shared + experiment * shared_one
        known = tl.load(used) != 0
        common = common + (as_product(base, at, real, known, nothing, DIRECT),)  # type: ignore[assignment] # noqa: RUF005
    if SHARED > 1:
        base = shared_1 + experiment * shared_1_one
        known = tl.load(used + 1) != 0
        common = common + (as_product(base, at, real, known, nothing, DIRECT),)  # type: ignore[assignment] # noqa: RUF005
    if SHARED > 2:
        base = shared_2 + experiment * shared_2_one
        known = tl.load(used + 2) != 0
        common = common + (as_product(base, at, real, known, nothing, DIRECT),)  # type: ignore[assignment] # noqa: RUF005
    WIDTH: tl.constexpr = 1 + SHARED + OWN
    VALUES: tl.constexpr = SUMMED + STATES + SUMS
    PARTS: tl.constexpr = BO // ROWS_OF_WARP
    last = tl.minimum(first + BC, EACH)
    # a client's own vectors are loaded while the one before it is closed, and where they are before
    if OWN > 0:
        place = place_of(own, experiment * EACH + first, own_client, PLACED)
        source = vector_at(own, place, PLACED, ALIGNED, COLUMN)
        next_own = loaded(source, at, real, nothing, DIRECT)
        place = place_of(
            own, experiment * EACH + tl.minimum(first + 1, last - 1), own_client, PLACED
        )
    if OWN > 1:
        more = place_of(own_more, experiment * EACH + first, own_more_client, PLACED)
        source = vector_at(own_more, more, PLACED, ALIGNED, COLUMN)
        next_more = loaded(source, at, real, nothing, DIRECT)
        begin = experiment * EACH + tl.minimum(first + 1, last - 1)
        more = place_of(own_more, begin, own_more_client, PLACED)
    made = tl.zeros((BO, BI), tl.float32)
    made_more = tl.zeros((BO, BI), tl.float32)
    for c in range(first, last):
        client = experiment * EACH + c
        there = real & (c + 1 < last)
        behind = experiment * EACH + tl.minimum(c + 2, last - 1)
        # All is loaded before anything is written: what comes behind a store waits for memory anew.
        take = tl.load(taken + client) != 0
        n = ()
        for j in tl.static_range(VALUES):
            row = j if j < SUMMED + STATES else FIRST + j - SUMMED - STATES
            for t in tl.static_range(WIDTH):
                # who takes no step has divided by none: its numbers need not be finite
                one = tl.load(table + (row * clients + client) * WIDTH + t, mask=take, other=0.0)
                if t == 0:
                    one *= scale
                n = n + (one,)  # type: ignore[assignment] # noqa: RUF005
        if OWN > 0:
            mine = next_own
            source = vector_at(own, place, PLACED, ALIGNED, COLUMN)
            next_own = loaded(source, at, there, nothing, DIRECT)
            place = place_of(own, behind, own_client, PLACED)
        if OWN > 1:
            mine_1 = next_more
            source = vector_at(own_more, more, PLACED, ALIGNED, COLUMN)
            next_more = loaded(source, at, there, nothing, DIRECT)
            more = place_of(own_more, behind, own_more_client, PLACED)
        if STATES > 0:
            to_state = place_of(state, client, state_client, PLACED)
        if STATES > 1:
            to_more = place_of(state_more, client, state_more_client, PLACED)
        slopes, inputs = g + client * g_client, x + client * x_client
        moved = moved_by(slopes, inputs, ROWS, o, i, IN, OUT, ONE, BS, BI, BO)
        # who does not count is 0 wherever it differs from others
        read = (tl.where(take, moved, 0.0),) + common  # noqa: RUF005
        if OWN > 0:
            theirs = tl.where(take, held_as(mine, nothing, DIRECT), 0.0)
            read = read + (theirs,)  # type: ignore[assignment] # noqa: RUF005
        if OWN > 1:
            theirs = tl.where(take, held_as(mine_1, nothing, DIRECT), 0.0)
            read = read + (theirs,)  # type: ignore[assignment] # noqa: RUF005
        for j in tl.static_range(VALUES):
            if j < SUMMED:
                if not AGAIN:
                    value = combined(read, n, nothing, j * WIDTH, NEEDS >> (8 * j), WIDTH)
                    if (SQUARES >> j) & 1:
                        value *= value
                    # some rows at a time: warps need not wait for each other
                    added = tl.sum(tl.reshape(tl.sum(value, 1), (PARTS, ROWS_OF_WARP)), 1)
                    added = tl.where(take, added, 0.0)
                    to = parts + ((j * clients + client) * tiles + tile) * PARTS
                    if DIRECT:
                        put_parts(to, tl.arange(0, PARTS), added)
                    else:
                        tl.store(to + tl.arange(0, PARTS), added)
            elif j < SUMMED + STATES:
                value = combined(read, n, nothing, j * WIDTH, NEEDS >> (8 * j), WIDTH)
                if j == SUMMED:
                    new = vector_at(state, to_state, PLACED, ALIGNED, COLUMN)
                else:
                    new = vector_at(state_more, to_more, PLACED, ALIGNED, COLUMN)
                if DIRECT:
                    put(new, at, value, take)
                else:
                    tl.store(new + at, value, mask=real & take)
                if take == 0:
                    if j == SUMMED:
                        kept = place_of(before, client, before_client, PLACED)
                        old = vector_at(before, kept, PLACED, ALIGNED, COLUMN)
                    else:
                        kept = place_of(before_more, client, before_more_client, PLACED)
                        old = vector_at(before_more, kept, PLACED, ALIGNED, COLUMN)
                    tl.store(new + at, tl.load(old + at, mask=real, other=0.0), mask=real)
            else:
                # what clients share is added once, below
                alone = (NEEDS >> (8 * j)) & ~(((1 << SHARED) - 1) << 1)
                if j == SUMMED + STATES:
                    made = added_to(made, read, n, j * WIDTH, alone, WIDTH)
                else:
                    made_more = added_to(made_more, read, n, j * WIDTH, alone, WIDTH)
    begin = experiment * EACH + first
    end = experiment * EACH + last
    made = made.to(tl.float64)
    made_more = made_more.to(tl.float64)
    for t in tl.static_range(SHARED):
        if SUMS > 0 and (NEEDS >> (8 * (VALUES - SUMS) + 1 + t)) & 1:
            often = added_up(table + FIRST * clients * WIDTH + 1 + t, taken, begin, end, WIDTH)
            made += times(common[t], often)
        if SUMS > 1 and (NEEDS >> (8 * (VALUES - 1) + 1 + t)) & 1:
            row = FIRST + 1
            often = added_up(table + row * clients * WIDTH + 1 + t, taken, begin, end, WIDTH)
            made_more += times(common[t], often)
    if SUMS > 0:
        to = total + experiment * total_one + piece * total_piece
        tl.store(to + at, made, mask=real)
    if SUMS > 1:
        to = total_more + experiment * total_more_one + piece * total_piece
        tl.store(to + at, made_more, mask=real)


@triton.jit
def combined(read, n, none, FIRST: tl.constexpr, NEEDS: tl.constexpr, WIDTH: tl.constexpr):
    """Add up what is read as often as the numbers from FIRST on say."""
    value = none
    for t in tl.static_range(WIDTH):
        if (NEEDS >> t) & 1:
            if NEEDS & ((1 << t) - 1):
                value += read[t] * n[FIRST + t]
            else:
                value = read[t] * n[FIRST + t]
    return value


@triton.jit
def added_to(made, read, n, FIRST: tl.constexpr, NEEDS: tl.constexpr, WIDTH: tl.constexpr):
    """Add what is read as often as the numbers from FIRST on say."""
    for t in tl.static_range(WIDTH):
        if (NEEDS >> t) & 1:
            made += read[t] * n[FIRST + t]
    return made


@triton.jit
def added_up(numbers, taken, begin, end, WIDTH: tl.constexpr):
    """Add up a column of the table over those clients who count."""
    made = tl.zeros((64,), tl.float64)
    for piece in range(begin, end, 64):
        client = piece + tl.arange(0, 64)
        here = client < end
        here &= tl.load(taken + client, mask=here, other=0) != 0
        made += tl.load(numbers + client * WIDTH, mask=here, other=0.0).to(tl.float64)
    return tl.sum(made, 0)


@triton.jit
def times(vector, often):
    """Multiply by a number; 0 times whatever it is is 0."""
    return tl.where(often != 0, vector.to(tl.float64) * often, 0.0)


@triton.jit(do_not_specialize=["PIECES"])
def add_pieces(
    parts, total, again, PIECES, piece, parts_one, total_one,
    SIZE: tl.constexpr, AGAIN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add up the sums of all pieces of an experiment's clients, in their order."""
    if AGAIN:  # noqa: SIM102
        if tl.load(again) == 0:
            return
    experiment = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = at < SIZE
    made = tl.zeros((BLOCK,), tl.float64)
    source = parts + experiment * parts_one + at
    for _ in range(PIECES):
        made += tl.load(source, mask=real, other=0.0)
        source += piece
    tl.store(total + experiment * total_one + at, made, mask=real)


@triton.jit(do_not_specialize=["PARTS"])
def add_parts(parts, total, PARTS, BLOCK: tl.constexpr):
    """Add up row program_id(0) of parts."""
    source = parts + tl.program_id(0).to(tl.int64) * PARTS
    made = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, PARTS, BLOCK):
        here = begin + tl.arange(0, BLOCK)
        made += tl.load(source + here, mask=here < PARTS, other=0.0)
    tl.store(total + tl.program_id(0), tl.sum(made, 0))
