"""The order of sums: by virtual shard (client id mod 64), ascending id within it (spec C7).

Accumulated in float64, so that a sum depends on the ids alone: not on who finished first, on the
size of a chunk or on the number of workers that own whole shards.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from undrift.core.tree import Tree, leaves, rebuild, structure

SHARDS = 64


def summing_order(ids: Sequence[int]) -> list[int]:
    """Sort client ids into the order in which they are summed.

    >>> summing_order([65, 3, 64, 1])
    [64, 1, 65, 3]
    """
    return sorted(ids, key=lambda i: (i % SHARDS, i))


class OrderedSum:
    """Adds trees with a leading client axis, given in summing order, in one pass.

    Two accumulators per leaf: the shard at hand, and the shards that are complete.
    """

    def __init__(self) -> None:
        self._structure = None
        self._shard: int | None = None
        self._dtypes: list[torch.dtype] = []
        self._open: list[Tensor] = []
        self._closed: list[Tensor] = []

    def add(self, ids: Sequence[int], rows: Tree) -> None:
        """Add the rows of these clients."""
        values = leaves(rows)
        if self._structure is None:
            self._start(rows, values)
        for c, client in enumerate(ids):
            if client % SHARDS != self._shard:
                self._close()
                self._shard = client % SHARDS
            for held, value in zip(self._open, values, strict=True):
                held.add_(value[c])

    def _start(self, rows: Tree, values: list[Tensor]) -> None:
        self._structure = structure(rows)
        self._open = [torch.zeros_like(v[0], dtype=torch.float64) for v in values]
        self._closed = [torch.zeros_like(v) for v in self._open]

    def _close(self) -> None:
        if self._shard is not None:
            for total, held in zip(self._closed, self._open, strict=True):
                total.add_(held)
                held.zero_()

    def result(self) -> Tree:
        """Give the sum, in float64."""
        self._close()
        self._shard = None
        return rebuild(self._structure, self._closed)
