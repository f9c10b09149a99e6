"""Vectors of clients: rows of a matrix, or float32 at addresses in a table."""

import triton
import triton.language as tl


@triton.jit
def place_of(vectors, client, stride, PLACED: tl.constexpr):
    """Tell where a client's vector is: which number of a matrix, or PLACED what a table says."""
    if PLACED:
        return tl.load(vectors + client)
    else:
        return client * stride


@triton.jit
def vector_at(
    vectors, place, PLACED: tl.constexpr, ALIGNED: tl.constexpr, COLUMN: tl.constexpr
):  # fmt: skip
    """Give the vector at a place: of a matrix, or PLACED at an address, from COLUMN on."""
    if PLACED:
        row = place.to(tl.pointer_type(tl.float32))
        if ALIGNED:
            row = tl.multiple_of(row, 16)
        return row + COLUMN
    else:
        return vectors + place
