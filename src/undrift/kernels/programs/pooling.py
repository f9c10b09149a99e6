"""The maximum of a square, and NaN if there is one in it."""

import triton
import triton.language as tl


@triton.jit
def larger(a, b):
    """Give the larger of two; a client that diverged must not be hidden by its neighbours."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
