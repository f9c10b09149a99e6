"""Scaling by powers of two, so that fp16 holds what float32 held."""

import triton
import triton.language as tl


@triton.jit
def headroom(peak):
    """Give the power of two that brings a peak to between 2**14 and 2**15, and its inverse.

    fp16 ends just below 2**16.  Made from the exponent's bits, so that both are exact.
    """
    exponent = (peak.to(tl.float32).to(tl.int32, bitcast=True) >> 23) & 255
    wanted = tl.minimum(tl.maximum(268 - exponent, 2), 252)
    scale = (wanted << 23).to(tl.float32, bitcast=True)
    unscale = ((254 - wanted) << 23).to(tl.float32, bitcast=True)
    return scale, unscale
