"""The end of a round, for a layer that remembers its steps: see core/ending.py.

Bit t of a mask says whether a value reads vector t: 0 the sum over steps, then what clients share,
then their own.
"""

import triton
import triton.language as tl


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
    s = begin + tl.arange(0, BS)
    here = (s < ROWS)[:, None]
    slopes = tl.load(g + s[:, None] * OUT + o[None, :], mask=here & (o < OUT)[None, :], other=0.0)
    inputs = tl.load(x + s[:, None] * IN + i[None, :], mask=here & (i < IN)[None, :], other=0.0)
    return tl.dot(tl.trans(slopes), inputs, total)


@triton.jit(do_not_specialize=["ROWS", "EACH"])
def close_clients(
    g, x, shared, own, own_more, table, taken, state, state_more, before, before_more, parts, again,
    scale, ROWS, EACH, g_client, x_client, shared_one, shared_next, own_client, own_more_client,
    state_client, state_more_client, before_client, before_more_client,
    IN: tl.constexpr, OUT: tl.constexpr, SHARED: tl.constexpr, OWN: tl.constexpr,
    SUMMED: tl.constexpr, STATES: tl.constexpr, NEEDS: tl.constexpr, SQUARES: tl.constexpr,
    AGAIN: tl.constexpr, ONE: tl.constexpr, BS: tl.constexpr, BI: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """Write a client's states, and the sums over a tile of its weights: parts[j, client, tile].

    The mask of value j is NEEDS >> 8 j.  AGAIN: states alone, and only if the flag is set.
    """
    if AGAIN:
        if tl.load(again) == 0:
            return
    client = tl.program_id(1).to(tl.int64)
    clients = tl.num_programs(1)
    tile = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    tiles = tl.num_programs(0) * tl.num_programs(2)
    i = tl.program_id(0) * BI + tl.arange(0, BI)
    o = tl.program_id(2) * BO + tl.arange(0, BO)
    at = o[:, None] * IN + i[None, :]
    real = (o < OUT)[:, None] & (i < IN)[None, :]
    take = tl.load(taken + client) != 0
    here = real & take
    # loaded before the product, which goes on meanwhile
    vectors = shared + (client // EACH) * shared_one + at
    if SHARED > 0:
        base = tl.load(vectors, mask=here, other=0.0)
    if SHARED > 1:
        base_1 = tl.load(vectors + shared_next, mask=here, other=0.0)
    if SHARED > 2:
        base_2 = tl.load(vectors + 2 * shared_next, mask=here, other=0.0)
    if OWN > 0:
        mine = tl.load(own + client * own_client + at, mask=here, other=0.0)
    if OWN > 1:
        mine_1 = tl.load(own_more + client * own_more_client + at, mask=here, other=0.0)
    one = (g + client * g_client, x + client * x_client)
    moved = moved_by(one[0], one[1], ROWS, o, i, IN, OUT, ONE, BS, BI, BO) * scale
    for j in tl.static_range(SUMMED + STATES):
        row = table + (j * clients + client) * (1 + SHARED + OWN)
        # what was loaded first, the product last: the two lie differently among threads
        value = tl.zeros((BO, BI), tl.float32)
        if SHARED > 0 and (NEEDS >> (8 * j + 1)) & 1:
            value += base * tl.load(row + 1)
        if SHARED > 1 and (NEEDS >> (8 * j + 2)) & 1:
            value += base_1 * tl.load(row + 2)
        if SHARED > 2 and (NEEDS >> (8 * j + 3)) & 1:
            value += base_2 * tl.load(row + 3)
        if OWN > 0 and (NEEDS >> (8 * j + 1 + SHARED)) & 1:
            value += mine * tl.load(row + 1 + SHARED)
        if OWN > 1 and (NEEDS >> (8 * j + 2 + SHARED)) & 1:
            value += mine_1 * tl.load(row + 2 + SHARED)
        if (NEEDS >> (8 * j)) & 1:
            value += moved * tl.load(row)
        if j < SUMMED:
            if not AGAIN:
                if (SQUARES >> j) & 1:
                    value = value * value
                kept = tl.where(here, value, 0.0)
                added = tl.sum(tl.reshape(kept, (BO * BI,), can_reorder=True), 0)
                tl.store(parts + (j * clients + client) * tiles + tile, added)
        else:
            if j == SUMMED:
                old, new = before + client * before_client, state + client * state_client
            else:
                old = before_more + client * before_more_client
                new = state_more + client * state_more_client
            tl.store(new + at, value, mask=here)
            stays = real & (take == 0)
            tl.store(new + at, tl.load(old + at, mask=stays, other=0.0), mask=stays)


@triton.jit(do_not_specialize=["ROWS", "EACH"])
def add_clients(
    g, x, shared, own, own_more, table, taken, total, scale, ROWS, EACH, g_client, x_client,
    shared_one, shared_next, own_client, own_more_client, total_one,
    IN: tl.constexpr, OUT: tl.constexpr, SHARED: tl.constexpr, OWN: tl.constexpr,
    MASK: tl.constexpr, ONE: tl.constexpr, BC: tl.constexpr, BS: tl.constexpr, BI: tl.constexpr,
    BO: tl.constexpr,
):  # fmt: skip
    """Add up a value of all clients of an experiment, in their order: total[experiment, o, i]."""
    WIDTH: tl.constexpr = 1 + SHARED + OWN
    FIRST: tl.constexpr = (OWN > 0) and ((MASK >> (1 + SHARED)) & 1)
    SECOND: tl.constexpr = (OWN > 1) and ((MASK >> (2 + SHARED)) & 1)
    experiment = tl.program_id(2).to(tl.int64)
    i = tl.program_id(0) * BI + tl.arange(0, BI)
    o = tl.program_id(1) * BO + tl.arange(0, BO)
    at = o[:, None] * IN + i[None, :]
    real = (o < OUT)[:, None] & (i < IN)[None, :]
    first = experiment * EACH
    made = tl.zeros((BO, BI), tl.float64)
    # a client's own vectors are loaded while the one before it is added
    if FIRST:
        mine = tl.load(own + first * own_client + at, mask=real, other=0.0)
    if SECOND:
        mine_1 = tl.load(own_more + first * own_more_client + at, mask=real, other=0.0)
    for c in range(EACH):
        client = first + c
        take = tl.load(taken + client) != 0
        row = table + client * WIDTH
        there = real & (c + 1 < EACH)
        value = tl.zeros((BO, BI), tl.float32)
        if FIRST:
            value += mine * tl.load(row + 1 + SHARED)
            mine = tl.load(own + (client + 1) * own_client + at, mask=there, other=0.0)
        if SECOND:
            value += mine_1 * tl.load(row + 2 + SHARED)
            mine_1 = tl.load(own_more + (client + 1) * own_more_client + at, mask=there, other=0.0)
        if MASK & 1:
            one = (g + client * g_client, x + client * x_client)
            moved = moved_by(one[0], one[1], ROWS, o, i, IN, OUT, ONE, BS, BI, BO)
            value += moved * (scale * tl.load(row))
        made += tl.where(take, value, 0.0).to(tl.float64)
    c = tl.arange(0, BC)
    some = c < EACH
    some = some & (tl.load(taken + first + c, mask=some, other=0) != 0)
    for s in tl.static_range(SHARED):
        if (MASK >> (1 + s)) & 1:
            weights = tl.load(table + (first + c) * WIDTH + 1 + s, mask=some, other=0.0)
            vector = shared + experiment * shared_one + s * shared_next
            held = tl.load(vector + at, mask=real, other=0.0)
            made += held.to(tl.float64) * tl.sum(weights.to(tl.float64), 0)
    tl.store(total + experiment * total_one + at, made, mask=real)
