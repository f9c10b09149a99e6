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
