"""The order of sums: by virtual shard (client id mod 64), ascending id within it (C7).

Accumulated in float64, so that a sum depends on the ids alone: not on who finished first, on the
size of a chunk or on the number of workers that own whole shards.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from undrift.core.tree import Tree, leaves, rebuild, structure, tree_map

SHARDS = 64


def summing_order(ids: Sequence[int]) -> list[int]:
    """Sort client ids into the order in which they are summed.

    >>> summing_order([65, 3, 64, 1])
    [64, 1, 65, 3]
    """
    return sorted(ids, key=lambda i: (i % SHARDS, i))


SMALL = 64  # leaves of at most so many numbers are added together, as one


class OrderedSum:
    """Adds trees with a leading client axis, given in summing order, in one pass.

    Two accumulators per leaf: the shard at hand, and the shards that are complete.
    """

    def __init__(self) -> None:
        self._like: Tree = None  # a tree of one row each
        self._shard: int | None = None
        self._open: list[Tensor] = []
        self._closed: list[Tensor] = []
        self._only: list[Tensor] | None = None  # the shard at hand, while it is one row

    def add(self, ids: Sequence[int], rows: Tree, accepted: Sequence[bool] | None = None) -> None:
        """Add the rows of these clients, those that are not accepted left out."""
        values = _packed(leaves(rows))
        if self._like is None:
            self._like = tree_map(lambda v: v[:0], rows)
            self._open = [torch.zeros_like(v[0], dtype=torch.float64) for v in values]
            self._closed = [torch.zeros_like(v) for v in self._open]
        for c, client in enumerate(ids):
            if accepted is None or accepted[c]:
                self._add_row(client % SHARDS, [v[c] for v in values])
        self._keep()  # rows may be written over

    def _add_row(self, shard: int, row: list[Tensor]) -> None:
        if shard != self._shard:
            self._close()
            self._shard, self._only = shard, row
            return
        self._keep()
        for held, value in zip(self._open, row, strict=True):
            held.add_(value)

    def _keep(self) -> None:
        """Copy the first row of a shard; most shards of a cohort have no other."""
        if self._only is not None:
            for held, value in zip(self._open, self._only, strict=True):
                held.copy_(value)
            self._only = None

    def _close(self) -> None:
        """Add the shard at hand to those that are complete."""
        if self._shard is not None:
            self._add_shard(self._open if self._only is None else self._only)
        self._shard = self._only = None

    def _add_shard(self, held: list[Tensor]) -> None:
        for total, value in zip(self._closed, held, strict=True):
            total.add_(value)

    def result(self) -> Tree:
        """Give the sum, in float64."""
        self._close()
        return rebuild(structure(self._like), unpacked(self._closed, leaves(self._like)))


def _packed(values: list[Tensor]) -> list[Tensor]:
    """Join the small leaves [C, ...] into one [C, s]; it stands last."""
    large = [v for v in values if v.shape[1:].numel() > SMALL]
    small = [v.reshape(len(v), -1).double() for v in values if v.shape[1:].numel() <= SMALL]
    return [*large, torch.cat(small, 1)] if small else large


def unpacked(sums: list[Tensor], like: list[Tensor]) -> list[Tensor]:
    """Undo `_packed` on the sums."""
    sizes = [v.shape[1:].numel() for v in like]
    large = iter(sums)
    kept = [n for n in sizes if n <= SMALL]
    small = iter(sums[-1].split(kept)) if kept else iter(())
    pairs = zip(sizes, like, strict=True)
    return [next(small if n <= SMALL else large).reshape(v.shape[1:]) for n, v in pairs]
