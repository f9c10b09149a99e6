"""Other people's behaviours, kept apart so that the real rules stay short.

Each names what it deviates from and why somebody may want it.
"""

from __future__ import annotations

from undrift.core.rule import ServerView
from undrift.core.task import Vec
from undrift.core.tree import Tree, record
from undrift.rules.client import ScaffoldM


@record
class ScaffoldMPrinted(ScaffoldM):
    """SCAFFOLD/m with the decay (N-1)/N that the AdaBest paper prints; right only for m = 1."""

    def server(self, update: Vec, state: Tree, view: ServerView) -> tuple[Vec, Tree]:
        n, fraction = view.population, view.count / view.population
        return update, (n - 1) / n * state + fraction * update / (view.path * view.lr)
