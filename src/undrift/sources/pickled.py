"""Data out of a pickle without running it.

A pickle is a program.  This reader knows the few instructions that build numbers, strings, lists,
dictionaries and arrays of bytes, and refuses every other one: no class is looked up, nothing is
called.  An array appears as `PickledArray`.
"""

from __future__ import annotations

import math
import pickletools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from undrift.guarded.binary import BROKEN
from undrift.guarded.limits import limit
from undrift.sources.examples import Unreadable

# Any below is what a pickle may hold: numbers, strings, lists, dictionaries, the records here.
ARRAYS = {"numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct"}
BYTE_TYPES = {"u1", "|u1"}


class PickledArray(NamedTuple):
    """An array of unsigned bytes."""

    shape: tuple[int, ...]
    data: bytes


class _Name(NamedTuple):
    """A name of a class or function that the pickle mentions; it is never looked up."""

    text: str


class _Made:
    """What the pickle would have made by calling a named thing."""

    def __init__(self, name: str, args: tuple[Any, ...]) -> None:
        self.name, self.args, self.state = name, args, None


class _Mark:
    """Where a list of items begins on the stack."""


Argument = Any


class _Reader:
    """A stack and a memory, as pickle has them."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memory: dict[int, Any] = {}

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def items(self) -> list[Any]:
        """Take everything above the last mark."""
        at = max(i for i, v in enumerate(self.stack) if isinstance(v, _Mark))
        found = self.stack[at + 1 :]
        del self.stack[at:]
        return found

    def tuple_of(self, count: int) -> None:
        taken = self.stack[len(self.stack) - count :]
        if len(taken) != count:
            raise IndexError("the stack is too short")
        self.stack[len(self.stack) - count :] = [tuple(taken)]

    def append(self, values: list[Any]) -> None:
        _of_type(self.stack[-1], list).extend(values)

    def set_items(self, values: list[Any]) -> None:
        for key in values[::2]:
            # a tuple's hash is computed through all that it holds, without a limit on depth
            if type(key) not in (str, bytes, int):
                raise TypeError(f"a {type(key).__name__} stands where a key belongs")
        _of_type(self.stack[-1], dict).update(zip(values[::2], values[1::2], strict=True))

    def reduce(self) -> None:
        args, name = self.stack.pop(), self.stack.pop()
        self.push(_Made(_of_type(name, _Name).text, _of_type(args, tuple)))

    def build(self) -> None:
        state = self.stack.pop()
        _of_type(self.stack[-1], _Made).state = state

    def pair(self) -> list[Any]:
        value, key = self.stack.pop(), self.stack.pop()
        return [key, value]


def _of_type(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"a {type(value).__name__} stands where a {kind.__name__} belongs")
    return value


def _ignore(reader: _Reader, argument: Argument) -> None:
    """Pass over an instruction that builds nothing."""


INSTRUCTIONS: dict[str, Callable[[_Reader, Argument], object]] = {
    **dict.fromkeys(("PROTO", "STOP", "FRAME"), _ignore),
    **dict.fromkeys(
        (
            *("BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1"),
            *("SHORT_BINSTRING", "BINSTRING", "BINUNICODE", "SHORT_BINUNICODE"),
            *("SHORT_BINBYTES", "BINBYTES", "BINBYTES8"),
        ),
        lambda r, a: r.push(a),
    ),
    "NONE": lambda r, a: r.push(None),
    "NEWTRUE": lambda r, a: r.push(True),
    "NEWFALSE": lambda r, a: r.push(False),
    "MARK": lambda r, a: r.push(_Mark()),
    "EMPTY_DICT": lambda r, a: r.push({}),
    "EMPTY_LIST": lambda r, a: r.push([]),
    "EMPTY_TUPLE": lambda r, a: r.push(()),
    "TUPLE": lambda r, a: r.push(tuple(r.items())),
    "TUPLE1": lambda r, a: r.tuple_of(1),
    "TUPLE2": lambda r, a: r.tuple_of(2),
    "TUPLE3": lambda r, a: r.tuple_of(3),
    "APPEND": lambda r, a: r.append([r.stack.pop()]),
    "APPENDS": lambda r, a: r.append(r.items()),
    "SETITEM": lambda r, a: r.set_items(r.pair()),
    "SETITEMS": lambda r, a: r.set_items(r.items()),
    **dict.fromkeys(
        ("PUT", "BINPUT", "LONG_BINPUT"), lambda r, a: r.memory.update({int(a): r.stack[-1]})
    ),
    "MEMOIZE": lambda r, a: r.memory.update({len(r.memory): r.stack[-1]}),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), lambda r, a: r.push(r.memory[int(a)])),
    "GLOBAL": lambda r, a: r.push(_Name(a)),
    "STACK_GLOBAL": lambda r, a: r.push(_Name(" ".join(reversed([r.stack.pop(), r.stack.pop()])))),
    "REDUCE": lambda r, a: r.reduce(),
    "BUILD": lambda r, a: r.build(),
}


def read_pickle(data: bytes, name: str) -> Any:
    """Give the data of a pickle, or refuse it; no code of it runs.

    >>> import pickle
    >>> read_pickle(pickle.dumps({"labels": [6, 9]}), "batch")
    {'labels': [6, 9]}
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # strange escapes in strings that we refuse anyway
            value = _interpret(data, name)
    except Unreadable:
        raise
    except BROKEN as error:
        told = str(error)[:200]
        raise Unreadable(f"{name} is no complete pickle ({told})") from error
    return _Plain(name).of(value, limit("depth"))


def _interpret(data: bytes, name: str) -> Any:
    reader = _Reader()
    for instruction, argument, _ in pickletools.genops(data):
        if instruction.name not in INSTRUCTIONS:
            raise Unreadable(f"{name}: the pickle instruction {instruction.name} is refused")
        INSTRUCTIONS[instruction.name](reader, argument)
    (value,) = reader.stack
    return value


class _Plain:
    """Puts arrays in place of what would have been made; refuses anything else made."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.done: dict[int, Any] = {}  # dictionaries that stand at several places are read once

    def of(self, value: Any, depth: int) -> Any:
        """Give the plain form of a value."""
        if isinstance(value, dict):
            if not depth:
                raise Unreadable(f"{self.name}: its dictionaries are nested too deep")
            if id(value) not in self.done:
                self.done[id(value)] = {k: self.of(v, depth - 1) for k, v in value.items()}
            return self.done[id(value)]
        if isinstance(value, _Made):
            return _array(value, self.name)
        if isinstance(value, _Name | _Mark):
            told = str(value)[:99]
            raise Unreadable(f"{self.name}: a pickle of {told} is refused, only data are read")
        return value


def _array(made: _Made, name: str) -> PickledArray:
    if made.name not in ARRAYS:
        raise Unreadable(f"{name}: the pickle wants to call {made.name[:99]!r}, which is refused")
    match made.state:
        case (int(), tuple(shape), _Made(name="numpy dtype", args=(str(kind), *_)), False, data):
            whole = all(type(n) is int and n >= 0 for n in shape)
            raw = data.encode("latin-1") if isinstance(data, str) else data
            if kind in BYTE_TYPES and whole and isinstance(raw, bytes):
                if len(raw) == math.prod(shape):
                    return PickledArray(shape, raw)
                raise Unreadable(f"{name}: an array {shape} has {len(raw)} bytes")
    raise Unreadable(f"{name}: an array of another kind than unsigned bytes is refused")
