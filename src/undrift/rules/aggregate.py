"""How the cohort's deltas become one update."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from undrift.core.rule import Aggregate, ClientView, Mean
from undrift.core.task import Vec
from undrift.core.tree import Tree, record, static

__all__ = ["Mean", "Nova"]


@record
class Nova(Aggregate):
    """FedNova (Wang et al. 2020, eq. 9): average directions, then one common effective length.

    Equal numbers of local steps: FedAvg.
    """

    needs_path: ClassVar[bool] = True
    exact_path: ClassVar[bool] = True
    means: ClassVar[tuple[str, ...]] = ("steps",)

    by_size: bool = static(default=True)

    def weight(self, view: ClientView) -> Tensor:
        return view.size if self.by_size else torch.ones_like(view.size)

    def lift(self, delta: Vec, view: ClientView) -> Tree:
        n, a = self.weight(view), view.path
        return n * (delta / a), n * a, n

    def finish(self, total: Tree) -> Vec:
        direction, length, n = total
        update: Vec = (length / n) * (direction / n)
        return update
