"""The last thing that a gradient does: it is stored, or it moves what it belongs to.

MOVE is 0, 1 or 2: stored; a step of plain SGD; a step of a linear chain of rules, which gives every
vector that moves a combination of what lies at its place (engines/linear_chain.py).  Value i of
weight p is then the sum over t of numbers[i, t] * vector t [p], where vectors are

    those that move (CARRIED: the weights, `more`), the gradient, SHARED ones, a client's OWN

and bit t of NEEDS >> 8 i says whether vector t is read: what is not read counts for nothing.
"""

import triton
import triton.language as tl


@triton.jit
def rates_of(lr, keep, client, MOVE: tl.constexpr, RATES: tl.constexpr, KEEPS: tl.constexpr):
    """Give a client's learning rate and what it keeps of its weights.

    RATES and KEEPS: one value per client, read from memory; else one number for everybody.
    """
    rate = 0.0
    kept = 1.0
    if MOVE:
        rate = tl.load(lr + client) if RATES else lr
        kept = tl.load(keep + client) if KEEPS else keep
    return rate, kept


@triton.jit
def step_of(
    lr, keep, more, shared, shared_more, own, own_more, table, live, client, each, table_next,
    table_client, more_client, shared_one, shared_more_one, own_client, own_more_client,
    MOVE: tl.constexpr, RATES: tl.constexpr, KEEPS: tl.constexpr, CARRIED: tl.constexpr,
    SHARED: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """Give what a client's step reads: its two rates or, of a chain, what lies where.

    That is what gradients are multiplied by, whether the client moves, the rows of its vectors, and
    its numbers.
    """
    if MOVE == 2:
        of = client // each
        step = (
            lr, tl.load(live + client) != 0, more + client * more_client, shared + of * shared_one,
            shared_more + of * shared_more_one, own + client * own_client,
            own_more + client * own_more_client,
        )  # fmt: skip
        for i in tl.static_range(CARRIED):
            for t in tl.static_range(CARRIED + 1 + SHARED + OWN):
                one = tl.load(table + i * table_next + client * table_client + t)
                step = step + (one,)  # type: ignore[assignment] # noqa: RUF005
        return step
    else:
        return rates_of(lr, keep, client, MOVE, RATES, KEEPS)


@triton.jit
def known_of(
    old, index, mask, step,
    CARRIED: tl.constexpr, SHARED: tl.constexpr, OWN: tl.constexpr, NEEDS: tl.constexpr,
):  # fmt: skip
    """Give what a step of a chain makes of all but the gradient: weights, and what else moves."""
    NUMBERS: tl.constexpr = 7
    WIDTH: tl.constexpr = CARRIED + 1 + SHARED + OWN
    ANY: tl.constexpr = NEEDS | (NEEDS >> 8)
    made = tl.zeros_like(old)
    made_more = tl.zeros_like(old)
    for t in tl.static_range(WIDTH):
        if t != CARRIED and (ANY >> t) & 1:
            if t == 0:
                vector = old
            elif t < CARRIED:
                vector = tl.load(step[2] + index, mask=mask, other=0.0)
            elif t <= CARRIED + SHARED:
                vector = tl.load(step[2 + t - CARRIED] + index, mask=mask, other=0.0)
            else:
                vector = tl.load(step[4 + t - CARRIED - SHARED] + index, mask=mask, other=0.0)
            if (NEEDS >> t) & 1:
                made += vector * step[NUMBERS + t]
            if (NEEDS >> (8 + t)) & 1:
                made_more += vector * step[NUMBERS + WIDTH + t]
    return made, made_more


@triton.jit
def stepped(
    made, made_more, index, gradient, mask, step,
    CARRIED: tl.constexpr, SHARED: tl.constexpr, OWN: tl.constexpr, NEEDS: tl.constexpr,
):  # fmt: skip
    """Give a client's weights after the step of a chain, and move what else of it moves.

    Of what is known and the gradient.
    """
    NUMBERS: tl.constexpr = 7
    WIDTH: tl.constexpr = CARRIED + 1 + SHARED + OWN
    if (NEEDS >> CARRIED) & 1:
        made += gradient * (step[0] * step[NUMBERS + CARRIED])
    if CARRIED > 1:
        if (NEEDS >> (8 + CARRIED)) & 1:
            made_more += gradient * (step[0] * step[NUMBERS + WIDTH + CARRIED])
        tl.store(step[2] + index, made_more, mask=mask & step[1])
    return made


@triton.jit
def settle(
    row, index, behind, gradient, mask, step, MOVE: tl.constexpr, CARRIED: tl.constexpr,
    SHARED: tl.constexpr, OWN: tl.constexpr, NEEDS: tl.constexpr,
):  # fmt: skip
    """Store a gradient at row + index or, MOVE, take the step w <- kept w - rate gradient there.

    Where the rate is 0 a client stands still, even if its gradient is not a number.  The other
    vectors of a chain have the same place `behind` further.
    """
    at = row + index
    value = gradient
    if MOVE == 1:
        old = tl.load(at, mask=mask, other=0.0)
        value = step[1] * old - tl.where(step[0] == 0, 0.0, step[0] * gradient)
    if MOVE == 2:
        old = tl.load(at, mask=mask, other=0.0)
        index += behind
        made, more = known_of(old, index, mask, step, CARRIED, SHARED, OWN, NEEDS)
        value = stepped(made, more, index, gradient, mask, step, CARRIED, SHARED, OWN, NEEDS)
        mask = mask & step[1]
    tl.store(at, value, mask=mask)


@triton.jit(do_not_specialize=["each"])
def take(
    gradient, w, lr, keep, more, shared, shared_more, own, own_more, table, live, size, w_client,
    each, behind, table_next, table_client, more_client, shared_one, shared_more_one, own_client,
    own_more_client,
    MOVE: tl.constexpr, RATES: tl.constexpr, KEEPS: tl.constexpr, CARRIED: tl.constexpr,
    SHARED: tl.constexpr, OWN: tl.constexpr, NEEDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Take the step of weights w[client, p] whose gradient[client, p] is known."""
    client = tl.program_id(0).to(tl.int64)
    p = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    step = step_of(
        lr, keep, more, shared, shared_more, own, own_more, table, live, client, each, table_next,
        table_client, more_client, shared_one, shared_more_one, own_client, own_more_client,
        MOVE, RATES, KEEPS, CARRIED, SHARED, OWN,
    )  # fmt: skip
    real = p < size
    found = tl.load(gradient + client * size + p, mask=real, other=0.0)
    settle(w + client * w_client, p, behind, found, real, step, MOVE, CARRIED, SHARED, OWN, NEEDS)
