"""The examples of several experiments, looked up together.

Letters: S experiments, C clients, B slots of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from undrift.core.task import Batch
from undrift.engines.engine import Engine


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
        own = zip(self.federations[part], self.firsts[part], ids, positions, strict=True)
        return torch.stack([f.rows(i, p) + first for f, first, i, p in own])

    def batch(self, rows: Tensor, positions: Tensor) -> Batch:
        """Fetch examples: [S, C, B] in, a batch with these axes out."""
        x, y = (look_up(v, rows) for v in (self.x, self.y))
        return Batch(x, y, positions >= 0, positions)


def look_up(values: Tensor, rows: Tensor) -> Tensor:
    """Give the values of rows, in the shape that these have."""
    return values.index_select(0, rows.reshape(-1)).unflatten(0, rows.shape)
