"""AdaBest: estimates of drift that fade, and need not know how many clients there are."""

from __future__ import annotations

import math
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from undrift.core.rule import ClientView, Lineup, Rule, ServerView, Sizes
from undrift.core.task import Vec
from undrift.core.tree import EMPTY, Tree, number, record, static
from undrift.rules.claims import DUALS


class Drift(NamedTuple):
    """What a client keeps."""

    h: Vec  # its estimate, without mu
    last: Tensor  # the round of its last participation, 1 is the first; 0: none


class Course(NamedTuple):
    """What the server keeps."""

    average: Vec  # the mean of the last cohort's models
    examples: Tensor  # sum of n_i over all participations,
    reports: Tensor  # and their number
    plateau: Tree  # of ||h||; EMPTY if nobody watches it


class Plateau(NamedTuple):
    """Since when a value has not fallen, and what that has done to beta."""

    best: Tensor
    waited: Tensor  # rounds without a better value
    rest: Tensor  # rounds of cooldown left
    factor: Tensor  # on beta


def growing(rule: Any, lineup: Lineup) -> str:
    """Tell of local work so long that estimates of clients in rounds in a row grow.

    The pull mu h_i alone moves a client by eta ||a||_1 mu h_i, and h_i <- h_i + (x - y_i).
    """
    rho, steps = getattr(lineup.algorithm.local, "momentum", 0.0), lineup.steps
    length = (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
    ratio = lineup.info.mean_size / lineup.info.size if rule.unbalanced else 1.0
    most, client = (rule.mu * ratio * lineup.lr * length).max(0)
    if not most > 2:
        return ""
    return (
        f"{type(rule).__name__}: mu eta ||a||_1 is {float(most):.3g} for client "
        f"{int(lineup.info.id[client])} ({int(steps[client])} steps): above 2 the estimate h_i of "
        "a client that takes part in rounds in a row grows without bound, and the model with it. "
        "Lower mu, the learning rate or the local work"
    )


@record
class AdaBest(Rule):
    """AdaBest (Varno et al. 2022, alg. 1, read as R15): h = beta (average before - average now).

    `unbalanced`: mu_i = mu nbar / n_i, nbar the mean size over the participations of all rounds
    before.  `patience`: rounds without progress of ||h|| after which beta falls by a tenth.
    mu = beta = 0: FedAvg with the same weights, uniform in the paper.  beta = 1 beside Prox(mu),
    everybody: FedDyn(mu).
    """

    claims: ClassVar[tuple[str, ...]] = (DUALS,)
    changes: ClassVar[str] = "update"
    may_be_infinite: ClassVar[tuple[str, ...]] = ("best",)  # before anything is watched

    mu: float = number(default=0.02, low=0)
    beta: float = number(default=0.96, low=0, high=1)
    unbalanced: bool = static(default=False)
    patience: float | None = number(default=None, low=1)

    caution = growing

    def init_client(self, w: Vec, sizes: Sizes) -> Tree:
        return Drift(torch.zeros_like(w), w.new_zeros(()))

    def init_server(self, w: Vec, sizes: Sizes) -> Tree:
        return first_course(w, self.patience)

    def broadcast(self, state: Tree) -> Tree:
        return state.examples / state.reports.clamp(min=1) if self.unbalanced else EMPTY

    def direction(self, g: Vec, view: ClientView) -> Vec:
        mu_i = self.mu * view.broadcast / view.size if self.unbalanced else self.mu
        return g - mu_i * view.mine.h

    def finish(self, delta: Vec, view: ClientView) -> tuple[Vec, Tree, Tree]:
        t = view.round + 1
        h_i = view.mine.h / (t - view.mine.last) + delta
        return delta, Drift(h_i, t), view.size if self.unbalanced else EMPTY

    def server(self, update: Vec, state: Tree, view: ServerView) -> tuple[Vec, Tree]:
        average = view.w - update
        beta = self.beta if self.patience is None else self.beta * state.plateau.factor
        h = beta * (state.average - average)
        return update + h, next_course(self, state, average, h, view)


def first_course(w: Vec, patience: float | None) -> Course:
    """Start at x_0, nobody counted."""
    zero = w.new_zeros(())
    still = Plateau(zero + math.inf, zero, zero, zero + 1)
    return Course(w.clone(), zero, zero, EMPTY if patience is None else still)


def next_course(rule: AdaBest, state: Course, average: Vec, h: Vec, view: ServerView) -> Course:
    """Remember the average, count sizes, watch ||h||."""
    examples = state.examples + (view.upload if rule.unbalanced else 0)
    plateau = watched(state.plateau, h.norm(), rule.patience)
    return Course(average, examples, state.reports + view.count, plateau)


def watched(plateau: Tree, value: Tensor, patience: float | None) -> Tree:
    """Take in one value, if somebody watches: a better one is smaller by more than 1 %."""
    if patience is None:
        return EMPTY
    better = value < 0.99 * plateau.best
    best = torch.where(better, value, plateau.best)
    resting = plateau.rest > 0
    waited = torch.where(better | resting, 0 * plateau.waited, plateau.waited + 1)
    falls = waited >= patience
    return Plateau(
        torch.where(falls, torch.full_like(best, math.inf), best),
        torch.where(falls, 0 * waited, waited),
        torch.where(falls, 0 * waited + patience, (plateau.rest - 1).clamp(min=0)),
        plateau.factor * torch.where(falls, 0.9 + 0 * waited, 1 + 0 * waited),
    )
