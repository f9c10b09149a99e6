"""The idx format of MNIST: a magic number, the lengths of the axes, then unsigned bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from undrift.guarded.binary import gunzip
from undrift.sources.examples import Bytes8, Pixels, Unreadable

IDX_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def read_idx_files(files: Mapping[str, bytes]) -> Pixels:
    """Read the four files of MNIST, gzipped or not."""
    arrays = [parse_idx(files[name], name, 3 if "images" in name else 1) for name in IDX_FILES]
    train_x, train_y, test_x, test_y = arrays
    return Pixels(train_x[..., None], train_y, test_x[..., None], test_y)


def parse_idx(data: bytes, name: str, axes: int) -> Bytes8:
    """Read one array of unsigned bytes with so many axes."""
    data = _unzipped(data, name)
    start, magic = 4 + 4 * axes, bytes([0, 0, 8, axes])
    if data[:4] != magic:
        raise Unreadable(
            f"{name} begins with {data[:4].hex() or 'nothing'}, an idx file of {axes} axes of "
            f"bytes with {magic.hex()}"
        )
    shape = tuple(int(n) for n in np.frombuffer(data[4:start].ljust(4 * axes, b"\0"), ">u4"))
    if len(data) != start + math.prod(shape):
        raise Unreadable(
            f"{name} has {len(data)} bytes where its header asks for {start + math.prod(shape)}"
        )
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def _unzipped(data: bytes, name: str) -> bytes:
    if data[:2] != b"\x1f\x8b":
        return data
    try:
        return gunzip(data)
    except Unreadable as error:
        raise Unreadable(f"{name} is no complete gzip file ({error})") from error
