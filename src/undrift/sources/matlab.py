"""Reading MATLAB's level 5 MAT-files: arrays of numbers, and structures of them.

The format (The MathWorks, "MAT-File Format"): 128 bytes of header, then elements, each a tag of
type and length and its data, padded to 8 bytes.  An element may hold others (a matrix) or be a
zlib stream of one.  Arrays lie column after column.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from undrift.guarded.binary import BROKEN, inflate
from undrift.guarded.limits import limit
from undrift.sources.examples import Unreadable

HEADER = 128
MATRIX, COMPRESSED = 14, 15
NUMBERS = {
    1: "i1",
    2: "u1",
    3: "i2",
    4: "u2",
    5: "i4",
    6: "u4",
    7: "f4",
    9: "f8",
    12: "i8",
    13: "u8",
}
STRUCTURE = 2
ARRAYS = range(6, 16)  # classes: double, single, int8 ... uint64
DEPTH = 8  # of structures in structures

Value = Any  # an array, or a structure as a dict


class Element(NamedTuple):
    """A typed piece of a file."""

    kind: int
    data: memoryview


def read_matlab(data: bytes, name: str) -> dict[str, Value]:
    """Read the named arrays and structures of a file; other kinds of variables are left out."""
    if len(data) < HEADER or data[126:128] not in (b"IM", b"MI"):
        raise Unreadable(f"{name} is no MAT-file of level 5")
    order = "<" if data[126:128] == b"IM" else ">"
    if struct.unpack(f"{order}H", data[124:126])[0] != 0x0100:
        raise Unreadable(f"{name} is a MAT-file of another level than 5: save it with -v7")
    try:
        return dict(_variables(memoryview(data)[HEADER:], order))
    except BROKEN as error:
        raise Unreadable(f"{name} is no complete MAT-file ({error})") from error


def _variables(data: memoryview, order: str) -> Iterator[tuple[str, Value]]:
    left = limit("data_bytes")
    for element in _elements(data, order):
        whole = element
        if element.kind == COMPRESSED:
            plain = inflate(element.data, left)
            left -= len(plain)  # all variables together
            whole = _next(_elements(memoryview(plain), order))
        if whole.kind == MATRIX:
            label, value = _matrix(whole.data, order, 0)
            if value is not None:
                yield label, value


def _next(parts: Iterator[Element]) -> Element:
    found = next(parts, None)
    if found is None:
        raise ValueError("a variable ends before its data")
    return found


def _elements(data: memoryview, order: str) -> Iterator[Element]:
    start = 0
    while start < len(data):
        kind, size = struct.unpack_from(f"{order}II", data, start)
        if kind >> 16:  # a small one: the length lies beside the type, the data in the tag
            kind, size, begin, end = kind & 0xFFFF, kind >> 16, start + 4, start + 8
        else:
            begin = start + 8
            end = begin + size + (0 if kind == COMPRESSED else -size % 8)
        if begin + size > len(data) or size > end - begin:
            raise ValueError(f"an element of {size} bytes has {len(data) - begin}")
        yield Element(kind, data[begin : begin + size])
        start = end


def _matrix(data: memoryview, order: str, depth: int) -> tuple[str, Value]:
    if not len(data):
        return "", None
    parts = _elements(data, order)
    flags = _numbers(_next(parts), order)
    shape = tuple(int(n) for n in _numbers(_next(parts), order))
    label = bytes(_next(parts).data).decode("ascii")
    kind = int(flags[0]) & 0xFF
    if kind == STRUCTURE and math.prod(shape) == 1 and depth < DEPTH:
        return label, _structure(parts, order, depth)
    if kind in ARRAYS:
        return label, _numbers(_next(parts), order).reshape(shape, order="F")
    return label, None  # texts, cells, sparse arrays, objects


def _structure(parts: Iterator[Element], order: str, depth: int) -> dict[str, Value]:
    width = int(_numbers(_next(parts), order)[0])
    table = bytes(_next(parts).data)
    if width < 1:
        raise ValueError("a structure's names have no length")
    names = [table[i : i + width].split(b"\0")[0] for i in range(0, len(table), width)]
    fields = (_matrix(_next(parts).data, order, depth + 1)[1] for _ in names)
    return dict(zip((n.decode("ascii") for n in names), fields, strict=True))


def _numbers(element: Element, order: str) -> NDArray[Any]:
    if element.kind not in NUMBERS:
        raise ValueError(f"an element of type {element.kind} holds no numbers")
    return np.frombuffer(element.data, f"{order}{NUMBERS[element.kind]}")
