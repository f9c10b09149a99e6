"""AdaBest as printed, and as fedsim runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from undrift.core.rule import ClientView, Lineup, ServerView, Sizes
from undrift.core.task import Vec
from undrift.core.transfer import table
from undrift.core.tree import EMPTY, Tree, number, record, refuse_unused, static
from undrift.errors import ConfigError
from undrift.rules.adabest import AdaBest, Course, Drift, first_course
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


class Turns(NamedTuple):
    """What the server keeps: AdaBest's course, and the ids that a count of everybody is made by."""

    average: Vec
    examples: Tensor  # sum of what is counted for n_i
    reports: Tensor
    plateau: Tree
    ids: Tensor  # [N]


class Before(NamedTuple):
    """What all clients hear."""

    examples: Tensor
    reports: Tensor
    ids: Tensor


class CountsInTurn:
    """Lets whoever is served later in a round hear of the counts before."""

    order: tuple[tuple[int, ...], ...]
    epochs: float

    def broadcast(self, state: Tree) -> Tree:
        """Tell everybody the counts of earlier rounds."""
        return Before(state.examples, state.reports, state.ids)

    def probe(self, view: ClientView) -> Tree:
        """Tell the own count, before the local steps."""
        own = view.broadcast.ids == view.client.id
        batch = view.size / view.steps.clamp(min=1)
        return torch.stack([own * batch, own + 0 * batch]) / view.size

    def nbar(self, view: ClientView) -> Tensor:
        """Average over all participations before this one, 0 where there is none."""
        batches, there = view.cohort  # both divided by the cohort's examples
        places, own = self.places(view), view.broadcast.ids == view.client.id
        before = (there > 0) & (places < (own * places).sum())
        told = torch.where(before, batches / torch.where(before, there, 1.0), 0.0)
        examples = view.broadcast.examples + self.epochs * self.epochs * told.sum()
        return examples / (view.broadcast.reports + before.sum()).clamp(min=1)

    def places(self, view: ClientView) -> Tensor:
        """Give everybody's place in this round's order."""
        ids = view.broadcast.ids
        if not self.order:
            return ids
        n = len(ids)
        rows = tuple(
            tuple(served.index(i) if i in served else n for i in range(n)) for served in self.order
        )
        return table(rows, torch.int64, ids.device)[view.round.long()]


@record
class AdaBestFedsim(CountsInTurn, AdaBest):
    """AdaBest in fedsim 0.9.0: nbar is epochs times the mean batch, and moves within a round.

    A regression there: it counts processed examples over steps, times epochs, for n_i.  Who is
    served later in a round hears of those before; that is by ascending id, or by `order`: the ids
    of each round as they are served.  Counts are exchanged before the local steps.
    """

    shares_probe: ClassVar[bool] = True
    in_turn: ClassVar[bool] = True

    unbalanced: bool = static(default=True)
    epochs: float = number(default=5.0, low=0, ends="()")
    order: Any = static(default=())

    def __post_init__(self) -> None:
        check_unbalanced(self)
        object.__setattr__(self, "order", tuple(tuple(int(i) for i in ids) for ids in self.order))

    def check(self, lineup: Lineup) -> None:
        check_places(self.order, lineup)

    def init_server(self, w: Vec, sizes: Sizes) -> Tree:
        ids = torch.arange(sizes.clients, device=w.device)
        return Turns(**first_course(w, self.patience)._asdict(), ids=ids)

    def direction(self, g: Vec, view: ClientView) -> Vec:
        return g - self.mu * self.nbar(view) / view.size * view.mine.h

    def finish(self, delta: Vec, view: ClientView) -> tuple[Vec, Tree, Tree]:
        t = view.round + 1
        h_i = view.mine.h / (t - view.mine.last) + delta
        count = self.epochs * view.size / view.steps.clamp(min=1) * self.epochs  # for n_i
        return delta, Drift(h_i, t), count

    def server(self, update: Vec, state: Tree, view: ServerView) -> tuple[Vec, Tree]:
        moved, course = AdaBest.server(self, update, Course(*state[:-1]), view)
        return moved, Turns(**course._asdict(), ids=state.ids)


def check_unbalanced(rule: AdaBestFedsim) -> None:
    """Refuse a copy without the mean size that it is about."""
    if not rule.unbalanced:
        raise ConfigError(
            "AdaBestFedsim.unbalanced = False: without a mean size it is AdaBest, use that"
        )


def check_places(order: Sequence[Sequence[int]], lineup: Lineup) -> None:
    """Refuse an order that leaves out somebody who takes part."""
    if not order:
        return
    served = order[lineup.round] if lineup.round < len(order) else ()
    missing = sorted(set(lineup.info.id.tolist()) - set(served))
    if missing:
        raise ConfigError(
            f"AdaBestFedsim.order names no place for client {missing[0]} in round "
            f"{lineup.round}: list all who take part, rounds and ids from 0"
        )


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
