"""Dropout whose decisions are a hash of a key and an element's number."""

import triton
import triton.language as tl


@triton.jit
def mixed(z):
    """Finish a state of splitmix64."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def absorbed(state, word, salt):
    """Mix a word into a state."""
    return mixed(mixed(state ^ salt) + word.to(tl.uint64) * 0x9E3779B97F4A7C15)


@triton.jit(do_not_specialize=["layer", "use", "threshold"])
def drop(
    x, key, y, layer, use, threshold, scale,
    SIZE: tl.constexpr, CHANNELS: tl.constexpr, PIXELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y = x * scale where draw number i of the layer's key is at least `threshold`, else 0.

    The layer's key is the client's, with the layer's number and its how-manieth use folded in.
    Elements are numbered in torch's order [examples, channels, pixels]; in memory channels may be
    last (CHANNELS > 1).
    """
    client = tl.program_id(1).to(tl.int64)
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    number = e
    if CHANNELS > 1:
        image = e // (CHANNELS * PIXELS)
        number = (image * CHANNELS + e % CHANNELS) * PIXELS + e // CHANNELS % PIXELS
    state = tl.load(key + client).to(tl.uint64, bitcast=True)
    state = absorbed(absorbed(state, layer, 0xD1B54A32D192ED03), use, 0xD1B54A32D192ED03)
    draw = absorbed(state, number, 0x8CB92BA72F3D8DD7) >> 1
    kept = draw >= threshold.to(tl.uint64)
    at = client * SIZE + e
    value = tl.load(x + at, mask=e < SIZE, other=0.0).to(tl.float32) * scale
    tl.store(y + at, tl.where(kept, value, 0.0).to(y.dtype.element_ty), mask=e < SIZE)
