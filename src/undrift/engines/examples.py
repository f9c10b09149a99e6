"""The examples of several experiments, looked up together.

Letters: S experiments, C clients, B slots of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from undrift.core.task import Batch
from undrift.data.federation import rows_of
from undrift.engines.engine import Engine

Table = tuple[Tensor, Tensor]  # offsets and members of a federation


class Examples:
    """The examples of some experiments as one pair of tensors."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.federations = [engine.federation for engine in engines]
        pools: list[tuple[Any, Any]] = []
        self.firsts: list[int] = []  # where each experiment's examples begin
        for f in self.federations:
            known = next((i for i, (x, y) in enumerate(pools) if x is f.x and y is f.y), None)
            if known is None:
                pools.append((f.x, f.y))
            before = pools[: len(pools) - 1 if known is None else known]
            self.firsts.append(sum(len(x) for x, _ in before))
        self.x, self.y = pools[0]
        if len(pools) > 1:
            self.x, self.y = (torch.cat(v) for v in zip(*pools, strict=True))

    def rows(self, ids: Tensor, positions: Tensor, part: slice = slice(None)) -> Tensor:
        """Look up rows: ids [S, C], positions [S, C, ...]."""
        return self.rows_by(self.tables[part], ids, positions, part)

    def rows_by(
        self, tables: Sequence[Table], ids: Tensor, positions: Tensor, part: slice = slice(None)
    ) -> Tensor:
        """Look up rows in tables of the experiments.  A pure function of tensors."""
        firsts = self.firsts[part]
        if self.shared:
            found = rows_of(*tables[0], ids.reshape(-1), positions.flatten(0, 1))
            return found.view_as(positions) + firsts[0]
        own = zip(tables, firsts, ids, positions, strict=True)
        return torch.stack([rows_of(*t, i, p) + first for t, first, i, p in own])

    @property
    def shared(self) -> bool:
        """Whether all experiments have the same clients with the same examples."""
        return all(f is self.federations[0] for f in self.federations)

    @property
    def tables(self) -> list[Table]:
        """Give what says where each experiment's clients have their examples."""
        return [(f.offsets, f.members) for f in self.federations]

    def batch(self, rows: Tensor, positions: Tensor) -> Batch:
        """Fetch examples: [S, C, B] in, a batch with these axes out."""
        x, y = (look_up(v, rows) for v in (self.x, self.y))
        return Batch(x, y, positions >= 0, positions)


def look_up(values: Tensor, rows: Tensor) -> Tensor:
    """Give the values of rows, in the shape that these have."""
    return values.index_select(0, rows.reshape(-1)).unflatten(0, rows.shape)
