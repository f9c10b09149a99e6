"""The last thing that a gradient does: it is stored, or it moves what it belongs to."""

import triton
import triton.language as tl


@triton.jit
def step_of(lr, keep, client, MOVE: tl.constexpr, RATES: tl.constexpr, KEEPS: tl.constexpr):
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
def settle(at, gradient, mask, rate, kept, MOVE: tl.constexpr):
    """Store a gradient or, MOVE, take the step w <- kept w - rate gradient.

    Where the rate is 0 a client stands still, even if its gradient is not a number.
    """
    value = gradient
    if MOVE:
        old = tl.load(at, mask=mask, other=0.0)
        value = kept * old - tl.where(rate == 0, 0.0, rate * gradient)
    tl.store(at, value, mask=mask)


@triton.jit
def combine(
    at, old, gradient, place, mask, numbers, m, first, second, own, MOMENTUM: tl.constexpr,
    SHARED: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """Move weights that were `old`, and their momentum, to combinations of what lies at `place`.

    numbers [2, 6]: how much of weight, momentum, gradient, two vectors that are shared and one of
    the client is in weight and momentum.  None of a gradient is none, even if that is no number.
    """
    much = tl.load(numbers + 2)
    after = tl.load(numbers) * old + tl.where(much == 0, 0.0, much * gradient)
    if SHARED > 0:
        a = tl.load(first + place, mask=mask, other=0.0)
        after += tl.load(numbers + 3) * a
    if SHARED > 1:
        b = tl.load(second + place, mask=mask, other=0.0)
        after += tl.load(numbers + 4) * b
    if OWN:
        c = tl.load(own + place, mask=mask, other=0.0)
        after += tl.load(numbers + 5) * c
    if MOMENTUM:
        held = tl.load(m + place, mask=mask, other=0.0)
        after += tl.load(numbers + 1) * held
        much = tl.load(numbers + 8)
        next = tl.load(numbers + 6) * old + tl.where(much == 0, 0.0, much * gradient)
        next += tl.load(numbers + 7) * held
        if SHARED > 0:
            next += tl.load(numbers + 9) * a
        if SHARED > 1:
            next += tl.load(numbers + 10) * b
        if OWN:
            next += tl.load(numbers + 11) * c
        tl.store(m + place, next, mask=mask)
    tl.store(at, after, mask=mask)
