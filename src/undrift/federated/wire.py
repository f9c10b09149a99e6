"""Trees of tensors as bytes: safetensors with a few plain words in front, read strictly.

Whoever reads knows beforehand what must come (a `Form`); anything else is refused before a tensor
is made of it.  Nothing is ever unpickled.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from undrift.core.tree import Tree, leaves, named_leaves, tree_map
from undrift.errors import UndriftError
from undrift.guarded.text import parse_json
from undrift.state.codes import CODES, DTYPES

MARK = "undrift"  # the key of our words in safetensors' own metadata
SLACK = 1024  # bytes: the words in front differ in length from message to message
NAME_ALONE = "tree"  # what the only leaf of a tree that is a leaf is called


About = dict[str, Any]


class Malformed(UndriftError, ValueError):
    """Bytes that are not the message that was expected."""


class Leaf(NamedTuple):
    """One tensor that must come."""

    code: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Count its bytes."""
        return math.prod(self.shape) * DTYPES[self.code].itemsize

    def __str__(self) -> str:
        return f"{self.code} {list(self.shape)}"


class Form:
    """What a message must look like: the tree, and the type and shape of every leaf.

    >>> form = Form({"w": torch.zeros(3)})
    >>> unpack(pack({"w": torch.ones(3)}, {"round": 2}), form)
    ({'round': 2}, {'w': tensor([1., 1., 1.])})
    """

    def __init__(self, like: Tree, slack: int = SLACK) -> None:
        self.slack = slack  # bytes for the words in front, which nobody knows beforehand
        self._like = tree_map(as_leaf, like)
        self.leaves = {
            name: Leaf(CODES[v.dtype], tuple(v.shape)) for name, v in _named(self._like).items()
        }
        self.num_bytes = sum(leaf.num_bytes for leaf in self.leaves.values())
        self._table = len(_encoded(self._like, {})) - self.num_bytes

    @property
    def most_bytes(self) -> int:
        """Tell how long a message may be at most: what is expected, and a tenth."""
        return int(1.1 * (self.num_bytes + self._table)) + self.slack

    @property
    def most_words(self) -> int:
        """Tell how long the part in front of the tensors may be."""
        return int(1.1 * self._table) + self.slack

    def rebuild(self, values: Mapping[str, Tensor]) -> Tree:
        """Put tensors by name back into the tree."""
        ordered = iter([values[name] for name in self.leaves])
        return tree_map(lambda _: next(ordered), self._like)

    def zeros(self, *axes: int) -> Tree:
        """Make a tree of zeros of this form, with more axes in front."""
        return tree_map(lambda v: v.new_zeros((*axes, *v.shape)), self._like)


def as_leaf(value: Any) -> Tensor:
    """Take a plain number for a tensor, float64 for a float: it keeps its value."""
    if isinstance(value, Tensor):
        return value.detach()
    return torch.as_tensor(value, dtype=torch.float64 if isinstance(value, float) else None)


def pack(tree: Tree, about: About) -> bytes:
    """Write a tree and some plain words about it."""
    return _encoded(tree_map(as_leaf, tree), about)


def unpack(data: bytes, form: Form) -> tuple[About, Tree]:
    """Read a message of one form; refuse everything else, before tensors are made."""
    if len(data) > form.most_bytes:
        raise Malformed(f"{len(data)} bytes where at most {form.most_bytes} are expected")
    about, table, start = _front(data, form.most_words)
    _check_names(table, form)
    places = {name: _place(name, entry, form.leaves[name]) for name, entry in table.items()}
    _check_tiles(places, len(data) - start)
    body = memoryview(data)[start:]
    values = {name: _tensor(form.leaves[name], body, at) for name, at in places.items()}
    return about, form.rebuild(values)


def words_of(data: bytes, most: int = 64 * SLACK) -> About:
    """Read the words in front of a message, and nothing else."""
    return _front(data, most)[0]


# -------------------------------------------------------------------------------------- writing
def _encoded(tree: Tree, about: About) -> bytes:
    """Write safetensors by hand: its own writer refuses tensors that share memory."""
    found = _named(tree)
    # wide types first: every tensor then starts at a multiple of its own width
    names = sorted(found, key=lambda n: (-found[n].dtype.itemsize, n))
    body, end = [_bytes(found[name]) for name in names], 0
    table: dict[str, Any] = {"__metadata__": {MARK: json.dumps(about, allow_nan=False)}}
    for name, data in zip(names, body, strict=True):
        leaf, start, end = found[name], end, end + data.nbytes
        shape, code = list(leaf.shape), CODES[leaf.dtype]
        table[name] = {"dtype": code, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *body])


def _bytes(leaf: Tensor) -> memoryview:
    plain = leaf.cpu().resolve_neg().contiguous()  # sync: for tensors on a device
    # one element counts as contiguous with any stride; a change of type wants the stride 1
    flat = plain.as_strided((plain.numel(),), (1,))
    data: memoryview = flat.view(torch.uint8).numpy().data
    return data


def _named(tree: Tree) -> dict[str, Tensor]:
    found = named_leaves(tree)
    if list(found) == [""]:
        return {NAME_ALONE: found[""]}
    assert len(found) == len(leaves(tree)), "two leaves of one name"
    return found


# -------------------------------------------------------------------------------------- reading
def _front(data: bytes, most: int) -> tuple[About, dict[str, Any], int]:
    """Read the table of names and our words; tell where the tensors start."""
    if len(data) < 8:
        raise Malformed(f"{len(data)} bytes are no message")
    length = int.from_bytes(data[:8], "little")
    if length > most:
        raise Malformed(f"a table of {length} bytes where at most {most} are expected")
    if length > len(data) - 8:
        raise Malformed(f"cut off: {len(data)} bytes, the table alone takes {length + 8}")
    try:
        table = _parsed(data[8 : 8 + length].decode())
        about = _parsed(table.pop("__metadata__")[MARK])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Malformed(f"its table makes no sense ({type(error).__name__})") from error
    return about, table, 8 + length


def _parsed(text: str) -> dict[str, Any]:
    found = parse_json(text, _once, _no_constant)
    if not isinstance(found, dict):
        raise ValueError("not a table")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a name stands twice")
    return made


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def _check_names(table: dict[str, Any], form: Form) -> None:
    missing, strange = form.leaves.keys() - table.keys(), table.keys() - form.leaves.keys()
    if missing:
        raise Malformed(f"{_few(missing)} missing")
    if strange:
        raise Malformed(f"{_few(strange)} nobody asked for")


def _few(names: set[str]) -> str:
    some = [repr(name[:40]) for name in sorted(names)[:3]]
    return ", ".join(some) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _place(name: str, entry: Any, leaf: Leaf) -> tuple[int, int]:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise Malformed(f"{name!r} is not described as a tensor")
    shape, at = entry["shape"], entry["data_offsets"]
    whole = [*shape, *at] if isinstance(shape, list) and isinstance(at, list) else [None]
    if len(whole) != len(leaf.shape) + 2 or not all(type(v) is int for v in whole):
        raise Malformed(f"{name!r} is {entry['dtype']} {_short(shape)}, expected {leaf}")
    if entry["dtype"] != leaf.code or tuple(shape) != leaf.shape:
        raise Malformed(f"{name!r} is {_short(entry['dtype'])} {_short(shape)}, expected {leaf}")
    start, end = at
    if start < 0 or end - start != leaf.num_bytes:
        raise Malformed(f"{name!r} takes the bytes {start} to {end}, expected {leaf.num_bytes}")
    return start, end


def _short(value: Any) -> str:
    return str(value)[:60]


def _check_tiles(places: dict[str, tuple[int, int]], length: int) -> None:
    """Refuse gaps, overlaps and what is cut off or hangs over."""
    end = 0
    for name, (start, stop) in sorted(places.items(), key=lambda item: item[1]):
        if start != end:
            raise Malformed(f"{name!r} starts at byte {start} instead of {end}")
        end = stop
    if end != length:
        raise Malformed(f"{length} bytes of tensors where {end} are described")


def _tensor(leaf: Leaf, body: memoryview, at: tuple[int, int]) -> Tensor:
    dtype = DTYPES[leaf.code]
    if at[0] == at[1]:
        return torch.empty(leaf.shape, dtype=dtype)
    if leaf.code == "BOOL" and max(body[at[0] : at[1]]) > 1:
        raise Malformed("a truth value that is neither true nor false")
    # a copy of its own: kernels may round differently on memory that is aligned differently
    return torch.frombuffer(bytearray(body[at[0] : at[1]]), dtype=dtype).clone().reshape(leaf.shape)
