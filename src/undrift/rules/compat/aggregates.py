"""Aggregates as other people write them: FedNova's lengths, q-FFL's h_i, weights by hand."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from undrift.core.rule import Aggregate, ClientView, Lineup
from undrift.core.task import Vec
from undrift.core.tree import Tree, number, record
from undrift.rules.fair import QFair, lipschitz_of
from undrift.rules.vra import at, check_lists


@record
class MeanBy(Aggregate):
    """The mean with given weights, one for each client or for each round and client.

    For code that weighs by something of its own: examples processed, a list in a file.
    """

    means: ClassVar[tuple[str, ...]] = ("deltas", "steps")

    weights: Any = 1.0

    def check(self, lineup: Lineup) -> None:
        check_lists(self, lineup, "weights")

    def weight(self, view: ClientView) -> Tensor:
        return view.size * 0 + at(self.weights, view.client, view.round)

    def lift(self, delta: Vec, view: ClientView) -> Tree:
        weight = self.weight(view)
        return weight * delta, weight

    def finish(self, total: Tree) -> Vec:
        weighted, weight = total
        update: Vec = weighted / weight
        return update


@record
class NovaBySteps(Aggregate):
    """FedNova whose effective length is the mean of K_i, not of ||a_i||_1 (its code, with prox)."""

    needs_path: ClassVar[bool] = True
    exact_path: ClassVar[bool] = True

    def lift(self, delta: Vec, view: ClientView) -> Tree:
        n = view.size
        return n * (delta / view.path), n * view.steps, n

    def finish(self, total: Tree) -> Vec:
        direction, length, n = total
        update: Vec = (length / n) * (direction / n)
        return update


@record
class NovaCounted(Aggregate):
    """FedNova with the lengths that its code counts, which holds one rule for every optimizer.

    With momentum and a pull each step adds both recursions, a <- (a + c)(1 - lr mu) + 1, which is
    no length of anything; Nesterov's is counted as heavy ball's.  With a pull the effective length
    is the mean of K_i.
    """

    momentum: float = number(default=0.0, low=0, high=1, ends="[)")
    mu: float = number(default=0.0, low=0)

    def lift(self, delta: Vec, view: ClientView) -> Tree:
        n, k = view.size, view.size * 0 + view.steps
        a = counted_length(self.momentum, view.lr * self.mu, k)
        return n * (delta / a), n * torch.where(0 * k + self.mu > 0, k, a), n

    def finish(self, total: Tree) -> Vec:
        direction, length, n = total
        update: Vec = (length / n) * (direction / n)
        return update


def counted_length(rho: Any, shrink: Any, steps: Tensor) -> Tensor:
    """Give the sum over k = 1..K of s^(K-k) t_k, s = 1 - shrink.

    t_k is s c_k + 1 with momentum and a pull, c_k with momentum alone, 1 otherwise; momentum's
    counter is c_k = (1 - rho^k) / (1 - rho).
    """
    s, rho, k = 1 - (0 * steps + shrink), 0 * steps + rho, steps
    geometric = torch.where(s == 1, k, (1 - s**k) / torch.where(s == 1, 1.0, 1 - s))
    apart = torch.where(s == rho, 1.0, s - rho)
    mixed = torch.where(s == rho, k * s ** (k - 1), (s**k - rho**k) / apart)
    counter = (geometric - rho * mixed) / (1 - rho)  # sum of s^(K-k) c_k
    with_momentum = torch.where(s == 1, counter, s * counter + geometric)
    return torch.where(rho > 0, with_momentum, geometric)


@record
class NovaHarmonic(Aggregate):
    """FedNova in fedsim: weights n_i / K_i, so the effective length is their harmonic mean."""

    def lift(self, delta: Vec, view: ClientView) -> Tree:
        weight = view.size / view.steps
        return weight * delta, weight

    def finish(self, total: Tree) -> Vec:
        weighted, weight = total
        update: Vec = weighted / weight
        return update


@record
class QFairFree(QFair):
    """q-FedAvg in rFedAvg's code: h_i takes ||F^q dw||^2, L is any number, no 1e-10."""

    lipschitz: float | None = number(default=1.0, low=0, ends="()")

    def lift(self, delta: Vec, view: ClientView) -> Tree:
        L, f = lipschitz_of(self.lipschitz, view), view.probe
        dw = f**self.q * L * delta
        return dw, self.q * f ** (self.q - 1) * dw.square().sum() + L * f**self.q
