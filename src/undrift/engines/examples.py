"""The examples of several experiments, looked up together.

Letters: S experiments, C clients, B slots of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from undrift.core.task import Batch
from undrift.core.transfer import send
from undrift.data.federation import Federation, rows_of
from undrift.data.spool import Streamed
from undrift.engines.engine import Engine

Table = tuple[Tensor, Tensor]  # offsets and members of a federation


class Window:
    """Memory for the examples of one cohort, whose federation keeps its examples in a file.

    The tensors keep their place, because recorded work reads them by address.
    """

    def __init__(self, federation: Federation, clients: int) -> None:
        self._source, device = federation, federation.device
        self._members, self._offsets = federation.members.cpu(), federation.offsets.tolist()
        count = most_rows(federation, clients)
        x, y = (
            torch.zeros((count, *v.shape[1:]), dtype=v.dtype, device=device)
            for v in (federation.x, federation.y)
        )
        members = torch.arange(count, device=device)
        starts = torch.zeros_like(federation.offsets)
        self.federation = replace(federation, x=x, y=y, members=members, offsets=starts)

    def load(self, ids: Sequence[int]) -> None:
        """Fetch the examples of these clients."""
        spans = [slice(self._offsets[i], self._offsets[i + 1]) for i in ids]
        rows = torch.cat([self._members[span] for span in spans])
        sizes = [span.stop - span.start for span in spans]
        starts = torch.zeros(len(self._offsets), dtype=torch.int64)
        starts[list(ids)] = torch.tensor([0, *accumulate(sizes)][: len(sizes)])
        here, there = self.federation, self._source
        for to, values in ((here.x, there.x), (here.y, there.y)):
            to[: len(rows)].copy_(values.index_select(0, rows))
        here.offsets.copy_(send(starts, here.device))


def most_rows(federation: Federation, clients: int) -> int:
    """Count the examples that so many clients hold at most."""
    return int(federation.sizes.sort(descending=True).values[:clients].sum())


class Examples:
    """The examples of some experiments as one pair of tensors; `clients` of each take part."""

    def __init__(self, engines: Sequence[Engine], clients: int) -> None:
        self.federations = [engine.federation for engine in engines]
        self._window: Window | None = None
        if isinstance(self.federations[0].x, Streamed):  # then it is the only one: see fleet.py
            self._window = Window(self.federations[0], clients)
            self.federations = [self._window.federation]
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

    def load(self, cohort: Sequence[int]) -> None:
        """Fetch the examples of a cohort, where they lie in a file."""
        if self._window is not None:
            self._window.load(cohort)

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
