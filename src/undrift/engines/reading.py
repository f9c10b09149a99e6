"""What local steps read: everybody's batches, keys and numbers, from what was drawn for the round.

Letters: S experiments, C clients of a cohort, K local steps, B batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from undrift.core.task import Batch
from undrift.core.tree import EMPTY, Tree, tree_map
from undrift.engines.examples import Examples, Table, look_up
from undrift.engines.fused import Fused
from undrift.engines.graphs import Buffers, shelf_for, write_over

Read = tuple[Batch, Tensor, Tensor]  # of a step: its batch, its keys [S, C], its number [S]

FEW = 4
MOST_AHEAD = 2**28  # bytes of examples that lie ready
DRAWN = ("keys", "order", "rows")  # of a round, as buffers


class Reading:
    """Gives steps what they read, one after the other or, where they lie `ready`, by number.

    A recorded step whose number is known has nothing to pick.
    """

    def __init__(
        self, data: Examples, buffers: Buffers, numbers: Tensor, *, ready: bool, compiled: bool
    ) -> None:
        self.ready, self._data, self._buffers = ready, data, buffers
        self._numbers = numbers  # of steps
        self._pick = Fused(picked, "what a step reads", compiled=compiled)
        # the compiler writes out every look-up of its own
        few = data.shared or len(data.federations) <= FEW
        self._lay = Fused(self._laid_out, "what steps read", compiled=compiled and few, proven=True)

    def lay_out(self, keys: Tensor, order: Tensor, ids: Tensor) -> None:
        """Lay out what the steps of a round read, once it is drawn; `at` gives it."""
        drawn = (self._numbers, keys, order, ids, self._data.tables, self._labels)
        if "steps" not in self._buffers:
            *whole, steps = self._of_round(*drawn)
            for name, value in zip(DRAWN, whole, strict=True):
                self._buffers.put(name, value)
            self._buffers.hold("steps", tree_map(shelf_for, steps))
        self._lay([self._buffers[name] for name in (*DRAWN, "steps")], *drawn)

    def _laid_out(self, to: Tree, *drawn: Any) -> Tree:
        write_over(to, self._of_round(*drawn))
        return EMPTY

    def _of_round(
        self, numbers: Tensor, keys: Tensor, order: Tensor, ids: Tensor, tables: Sequence[Table],
        y: tuple[Tensor, ...],
    ) -> tuple[Any, ...]:  # fmt: skip
        """Give keys, order and rows of a round, and what its steps read."""
        rows = self._data.rows_by(tables, ids, order)
        return keys, order, rows, _of_steps(numbers, order, rows, keys, y)

    def at(self, k: int, *, fetched: bool = False) -> Read:
        """Give what step k reads; `fetched`: all steps but the first have been asked for before."""
        found = tree_map(lambda v: v[k], self._buffers["steps"])
        x = self._buffers["ahead"][k - 1] if fetched and k else look_up(self._data.x, found[0])
        return self._batch(x, *found)

    def may_fetch(self) -> bool:
        """Whether inputs of all steps but the first have room: one launch for all of them."""
        rows = self._buffers["steps"][0]
        size = rows[1:].numel() * self._data.x[0].numel() * self._data.x.element_size()
        return 0 < size <= MOST_AHEAD

    def fetch(self) -> None:
        """Look up the inputs of all steps but the first."""
        rows, x = self._buffers["steps"][0][1:], self._data.x
        if "ahead" not in self._buffers:
            self._buffers.hold("ahead", x.new_empty((*rows.shape, *x.shape[1:])))
        room = self._buffers["ahead"].view(-1, *x.shape[1:])
        torch.index_select(x, 0, rows.reshape(-1), out=room)

    def next(self) -> Read:
        """Give what the next step reads."""
        drawn = (self._buffers[name] for name in ("k", "order", "rows", "keys"))
        found = self._pick(*drawn, self._labels)
        return self._batch(look_up(self._data.x, found[0]), *found)

    def _batch(
        self, x: Tensor, rows: Tensor, keys: Tensor, number: Tensor, order: Tensor, mask: Tensor,
        labels: Any,
    ) -> Read:  # fmt: skip
        y = labels[0] if labels else look_up(self._data.y, rows)
        return Batch(x, y, mask, order), keys, number

    @property
    def _labels(self) -> tuple[Tensor, ...]:
        """Give what is looked up in the same kernel; what is larger is not copied to be traced."""
        return (self._data.y,) if self._data.y.dim() == 1 else ()


def picked(
    k: Tensor, order: Tensor, rows: Tensor, keys: Tensor, y: tuple[Tensor, ...] = ()
) -> tuple[Any, ...]:
    """Give rows, keys, number, order, mask and values y of the batch of step k; k goes on."""
    at, number = k.long().reshape(1), k.repeat(len(keys))
    order, rows, keys = (v.index_select(2, at)[:, :, 0] for v in (order, rows, keys))
    k.add_(1)
    return rows, keys, number, order, order >= 0, tuple(look_up(v, rows) for v in y)


def _of_steps(
    numbers: Tensor, order: Tensor, rows: Tensor, keys: Tensor, y: tuple[Tensor, ...]
) -> tuple[Any, ...]:
    """Give the same of all steps, which come first: [K, S, C, ...]."""
    order, rows, keys = (v.movedim(2, 0) for v in (order, rows, keys))
    number = numbers[:, None].expand(keys.shape[:2])
    return rows, keys, number, order, order >= 0, tuple(look_up(v, rows) for v in y)
