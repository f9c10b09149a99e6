"""What local steps read: everybody's batches, keys and numbers, from what was drawn for the round.

Letters: S experiments, C clients of a cohort, K local steps, B batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from undrift.core.task import Batch
from undrift.core.tree import EMPTY, Tree, tree_map
from undrift.engines.examples import Examples, Table, look_up
from undrift.engines.fused import Fused
from undrift.engines.graphs import Buffers, shelf_for, write_over

Read = tuple[Batch, Tensor, Tensor]  # of a step: its batch, its keys [S, C], its number [S]

FEW = 4
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

    def at(self, k: int) -> Read:
        """Give what step k reads."""
        return self._batch(*tree_map(lambda v: v[k], self._buffers["steps"]))

    def next(self) -> Read:
        """Give what the next step reads."""
        drawn = (self._buffers[name] for name in ("k", "order", "rows", "keys"))
        return self._batch(*self._pick(*drawn, self._labels))

    def _batch(
        self, rows: Tensor, keys: Tensor, number: Tensor, order: Tensor, mask: Tensor, labels: Any
    ) -> Read:
        y = labels[0] if labels else look_up(self._data.y, rows)
        return Batch(look_up(self._data.x, rows), y, mask, order), keys, number

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
