"""How a client's state tree becomes a row of words, and where its leaves are in a table of rows.

Letters: C clients of a call, W words of 8 bytes in a row, n numbers of a leaf.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from undrift.core.tree import Tree, leaves, named_leaves, size_in_floats, structure, tree_map
from undrift.errors import ConfigError, DataError
from undrift.state.rows import Pairs


class Leaf(NamedTuple):
    """One tensor of the tree and its place in a row."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # in words
    num_words: int

    @property
    def is_whole(self) -> bool:
        """Whether its bytes fill its words."""
        return math.prod(self.shape) * self.dtype.itemsize == 8 * self.num_words

    def numbers(self, rows: Tensor) -> Tensor:
        """View its part of rows in its own type, [C, n]."""
        words = rows[:, self.start : self.start + self.num_words]
        return words.view(self.dtype)[:, : math.prod(self.shape)]


class Packing:
    """A row is the bytes of a tree, leaf after leaf; each starts at a multiple of 8 bytes."""

    def __init__(self, template: Tree, dtype: torch.dtype) -> None:
        self._template = tree_map(lambda v: None if v is None else _as_leaf(v, dtype), template)
        self._leaves: list[Leaf] = []
        self.num_words = 0
        for name, leaf in named_leaves(self._template).items():
            if leaf.dtype.itemsize > 8:
                raise ConfigError(f"client state {name!r} is {leaf.dtype}: too wide for a row")
            size = -(-leaf.numel() * leaf.dtype.itemsize // 8)
            spec = Leaf(name, leaf.dtype, tuple(leaf.shape), self.num_words, size)
            self._leaves.append(spec)
            self.num_words += size
        self.num_numbers = size_in_floats(self._template)
        first = [v[None] for v in leaves(self._template)]
        self.fresh = self.pack(first, 1)[0].cpu().clone()  # never a view of what the user holds

    @property
    def template(self) -> Tree:
        """The tree itself, its numbers as tensors."""
        return self._template

    @property
    def places(self) -> list[Leaf]:
        """List the leaves with their places in a row."""
        return self._leaves

    @property
    def layout(self) -> list[list[Any]]:
        """Describe the leaves, for a checkpoint."""
        return [[p.name, str(p.dtype), list(p.shape)] for p in self._leaves]

    def checked(self, states: Tree, count: int) -> list[Tensor]:
        """Give the leaves of a tree with a leading axis C; refuse another tree."""
        if structure(states) != structure(self._template):
            raise DataError(
                f"client states {structure(states)} do not have the structure of "
                f"their template {structure(self._template)}"
            )
        given = leaves(states)
        for part, leaf in zip(self._leaves, given, strict=True):
            if tuple(leaf.shape) != (count, *part.shape) or leaf.dtype != part.dtype:
                raise DataError(
                    f"client state {part.name!r} is {leaf.dtype} {tuple(leaf.shape)}, "
                    f"expected {part.dtype} {(count, *part.shape)}"
                )
        return [leaf.detach() for leaf in given]

    def empty(self, count: int, device: torch.device) -> Tree:
        """Make room for states, with a leading axis C."""

        def room(like: Any) -> Any:
            if like is None:
                return None
            return torch.empty((count, *like.shape), dtype=like.dtype, device=device)

        return tree_map(room, self._template)

    def pack(self, given: list[Tensor], count: int) -> Tensor:
        """[C, W] words of leaves; of a single leaf that fills its words, a view."""
        flat = [leaf.reshape(count, math.prod(leaf.shape[1:])) for leaf in given]
        if len(flat) == 1 and (words := as_words(flat[0])) is not None:
            return words
        device = flat[0].device if flat else torch.device("cpu")
        rows = torch.empty(count, self.num_words, dtype=torch.int64, device=device)
        for columns, values in self.written(rows, flat):
            columns.copy_(values)
        return rows

    def unpack_into(self, rows: Tensor, out: list[Tensor]) -> None:
        """Copy rows to leaves; of a single leaf that fills its words, in one piece."""
        if len(out) == 1 and out[0].is_contiguous() and self._leaves[0].is_whole:
            # whole and contiguous: from pinned memory a device copies it without being waited for
            words = as_words(out[0].view(len(rows), -1)) if out[0].numel() else None
            if words is not None:
                words.copy_(rows, non_blocking=True)
                return
        # Safe without waiting: the pinned source is not reused before the copy is done.
        sent = rows.to(out[0].device, non_blocking=True) if out else rows
        for part, leaf in zip(self._leaves, out, strict=True):
            leaf.copy_(part.numbers(sent).view(leaf.shape))

    def flat(self, given: list[Tensor], count: int) -> list[Tensor] | None:
        """View leaves as [C, n]; None if one of them cannot be viewed so."""
        if count and not all(leaf[0].is_contiguous() for leaf in given):
            return None
        return [v.view(count, math.prod(v.shape[1:])) for v in given]

    def pairs(self, table: Tensor, flat: list[Tensor]) -> Pairs:
        """Match columns of a table of rows with leaves [C, n], in words where they lie so."""
        found = []
        for part, values in zip(self._leaves, flat, strict=True):
            words = as_words(values) if part.is_whole else None
            if words is not None:
                found.append((table[:, part.start : part.start + part.num_words], words))
            elif part.num_words:
                found.append((part.numbers(table), values))
        return found

    def written(self, table: Tensor, flat: list[Tensor]) -> Pairs:
        """As `pairs`, with zeros for the bytes that no leaf fills: equal states are equal rows."""
        last = [p.start + p.num_words - 1 for p in self._leaves if not p.is_whole]
        found: Pairs = []
        if last:
            zeros = table.new_zeros(len(flat[0]), 1)
            found = [(table[:, word : word + 1], zeros) for word in last]
        return found + self.pairs(table, flat)


def as_words(values: Tensor) -> Tensor | None:
    """View [C, n] numbers as whole words; None where they do not lie so."""
    each = 8 // values.dtype.itemsize
    places = (values.shape[1], values.stride(0), values.storage_offset())
    if not values.numel() or values.stride(1) != 1 or any(place % each for place in places):
        return None
    return values.view(torch.int64)


def _as_leaf(value: Any, dtype: torch.dtype) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    return torch.as_tensor(value, dtype=dtype if isinstance(value, float) else None)
