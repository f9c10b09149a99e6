"""AdaBest as printed, and as fedsim runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from undrift.core.rule import ClientView, Lineup
from undrift.core.task import Vec
from undrift.core.tree import EMPTY, Tree, number, record, refuse_unused
from undrift.rules.adabest import AdaBest, Drift
from undrift.rules.vra import PerRound, at, check_lists


@record
class AdaBestPrinted(AdaBest):
    """AdaBest as algorithm 1 prints it: mu_i inside h_i; the same while mu_i is constant."""

    def direction(self, g: Vec, view: ClientView) -> Vec:
        return g - view.mine.h

    def finish(self, delta: Vec, view: ClientView) -> tuple[Vec, Tree, Tree]:
        mu_i = self.mu * view.broadcast / view.size if self.unbalanced else self.mu
        t = view.round + 1
        h_i = view.mine.h / (t - view.mine.last) + mu_i * delta
        return delta, Drift(h_i, t), view.size if self.unbalanced else EMPTY


@record
class AdaBestFedsim(AdaBest):
    """AdaBest in fedsim 0.9.0: nbar is epochs times the mean batch, not the mean size.

    A regression there (processed examples over steps, times epochs); use it with
    unbalanced=True.
    """

    epochs: float = number(default=5.0, low=0, ends="()")

    def __post_init__(self) -> None:
        if not self.unbalanced:
            refuse_unused(type(self), "nbar is read with unbalanced=True", epochs=self.epochs)

    def finish(self, delta: Vec, view: ClientView) -> tuple[Vec, Tree, Tree]:
        t, processed = view.round + 1, self.epochs * view.size
        h_i = view.mine.h / (t - view.mine.last) + delta
        counted = processed / view.steps * self.epochs
        return delta, Drift(h_i, t), counted if self.unbalanced else EMPTY


@record
class AdaBestInTurn(AdaBest):
    """AdaBest with a given nbar for every round and client (fedsim).

    fedsim moves nbar from client to client within a round, so that mu_i depends on who was served
    before; `means_in_turn` gives those numbers.  Leave `unbalanced` out.
    """

    nbar: Any = 1.0

    def __post_init__(self) -> None:
        refuse_unused(type(self), "nbar is given", unbalanced=self.unbalanced)

    def check(self, lineup: Lineup) -> None:
        check_lists(self, lineup, "nbar")

    def direction(self, g: Vec, view: ClientView) -> Vec:
        nbar = at(self.nbar, view.client, view.round)
        return g - self.mu * nbar / view.size * view.mine.h


def means_in_turn(
    counts: Sequence[float] | Mapping[tuple[int, int], float],
    participants: Sequence[Sequence[int]],
    clients: int,
) -> PerRound:
    """Give the mean count over all participations before each, in the order of `participants`.

    `counts` are n_i by client, or by (round, client) what that code counts in their place.

    >>> means_in_turn([4, 6, 5], [[2, 0], [1]], 3).values
    ((5.0, 0.0, 0.0), (0.0, 4.5, 0.0))
    """
    total, number, table = 0.0, 0, []
    for round, ids in enumerate(participants):
        row = [0.0] * clients
        for i in ids:
            row[i] = total / number if number else 0.0
            total += counts[round, i] if isinstance(counts, Mapping) else counts[i]
            number += 1
        table.append(tuple(row))
    return PerRound(tuple(table))
