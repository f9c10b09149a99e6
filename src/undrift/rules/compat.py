"""Other people's behaviours, kept apart so that the real rules stay short.

Each says whose it is, what it deviates from, and why somebody may want it: to reproduce numbers
that were published with it.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from undrift.core.algorithm import Algorithm
from undrift.core.local import HeavyBall
from undrift.core.rule import Aggregate, ClientView, Rule, ServerView, Sizes
from undrift.core.task import Output, Vec, masked_mean
from undrift.core.tree import (
    EMPTY,
    Tree,
    number,
    part,
    record,
    replace,
    static,
    structure,
    tree_map,
)
from undrift.errors import ConfigError
from undrift.rules.adabest import AdaBest, Drift
from undrift.rules.client import Prox, Scaffold, ScaffoldM, mean_after, weighed
from undrift.rules.contrast import Pool, check_counts, contrast, features_of, need_features
from undrift.rules.duals import AdmmState, FedAdmm
from undrift.rules.fair import QFair, lipschitz_of


# ----------------------------------------------------------------------------------- SCAFFOLD
@record
class ScaffoldMPrinted(ScaffoldM):
    """SCAFFOLD/m with the decay (N-1)/N that the AdaBest paper prints; right only for m = 1."""

    def server(self, update: Vec, state: Tree, view: ServerView) -> tuple[Vec, Tree]:
        n, fraction = view.population, view.count / view.population
        return update, (n - 1) / n * state + fraction * update / (view.path * view.lr)


@record
class ScaffoldBaseLr(Scaffold):
    """SCAFFOLD option II that divides by the undecayed `lr` (FedDyn's and FedDC's code).

    Under a falling learning rate c_i is then too small by the factor that it fell.
    """

    lr: float = number(default=0.1, low=0, ends="()")

    def finish(self, delta: Vec, view: ClientView) -> tuple[Vec, Tree, Tree]:
        change = delta / (view.path * self.lr) - view.broadcast
        return delta, view.mine + change, weighed(change, view, self.c_by_size)


@record
class ScaffoldPostStep(Rule):
    """SCAFFOLD that corrects after the optimizer's step, outside momentum (NIID-Bench's code).

    It divides by K lr; self-consistent, and defined for RMSProp and Adam too.
    """

    def init_client(self, w: Vec, sizes: Sizes) -> Tree:
        return torch.zeros_like(w)  # c_i

    def init_server(self, w: Vec, sizes: Sizes) -> Tree:
        return torch.zeros_like(w)  # c

    def resize(self, state: Tree, before: int, after: int, joined: Tree, left: Tree) -> Tree:
        return mean_after(state, before, after, joined, left)

    def broadcast(self, state: Tree) -> Tree:
        return state

    def after_step(self, w: Vec, view: ClientView) -> Vec:
        return w - view.lr * (view.broadcast - view.mine)

    def finish(self, delta: Vec, view: ClientView) -> tuple[Vec, Tree, Tree]:
        change = delta / (view.steps * view.lr) - view.broadcast
        return delta, view.mine + change, change

    def server(self, update: Vec, state: Tree, view: ServerView) -> tuple[Vec, Tree]:
        return update, state + view.upload / view.population


@record
class ScaffoldUnbalanced(Scaffold):
    """SCAFFOLD for unequal sizes, r_i = n_i / mean(n), as in FedDyn's code.

    Steps use c / r_i, option II subtracts c itself: inconsistent, and kept as it is.
    """

    def direction(self, g: Vec, view: ClientView) -> Vec:
        return g + (view.broadcast * view.client.mean_size / view.size - view.mine)

    def finish(self, delta: Vec, view: ClientView) -> tuple[Vec, Tree, Tree]:
        change = delta / (view.path * view.lr) - view.broadcast
        return delta, view.mine + change, change * view.size / view.client.mean_size

    def server(self, update: Vec, state: Tree, view: ServerView) -> tuple[Vec, Tree]:
        return update, state + view.upload / view.population


# -------------------------------------------------------------------------------------- pulls
def prox_of_rfedavg(strength: float) -> Prox:
    """FedProx in rFedAvg's code adds strength ||y - x||^2, not half of it: mu = 2 strength."""
    return Prox(2 * strength)


def prox_of_fedsim(mu: float) -> Prox:
    """FedProx in fedsim 0.9 halves once more, mu / 4 ||y - x||^2: half the mu."""
    return Prox(mu / 2)


@record
class FedDynUnclipped(Rule):
    """FedDyn whose alpha y is added after clipping, as weight decay is (FedDyn's code).

    A step is clip(g - h_i - alpha x) + alpha y: without clipping it is FedDyn.  For plain SGD, as
    there.  `half_pull` halves the pull alone, as fedsim does.
    """

    alpha: float = number(default=0.01, low=0)
    by_size: bool = static(default=False)
    half_pull: bool = static(default=False)

    def init_client(self, w: Vec, sizes: Sizes) -> Tree:
        return torch.zeros_like(w)  # h_i / alpha

    def init_server(self, w: Vec, sizes: Sizes) -> Tree:
        return torch.zeros_like(w)  # h

    def resize(self, state: Tree, before: int, after: int, joined: Tree, left: Tree) -> Tree:
        return mean_after(state, before, after, joined, left)

    def direction(self, g: Vec, view: ClientView) -> Vec:
        return g - pull_of(self, view) * view.w0 - alpha_of(self, view) * view.mine

    def after_step(self, w: Vec, view: ClientView) -> Vec:
        return w - view.lr * pull_of(self, view) * view.w

    def finish(self, delta: Vec, view: ClientView) -> tuple[Vec, Tree, Tree]:
        return delta, view.mine + delta, EMPTY

    def server(self, update: Vec, state: Tree, view: ServerView) -> tuple[Vec, Tree]:
        h = state + (view.count / view.population) * update
        return update + h, h


def alpha_of(rule: FedDynUnclipped, view: ClientView) -> Any:
    """Give alpha, or alpha mean(n) / n_i."""
    return rule.alpha * view.client.mean_size / view.size if rule.by_size else rule.alpha


def pull_of(rule: FedDynUnclipped, view: ClientView) -> Any:
    """Give the coefficient of the pull towards x."""
    return alpha_of(rule, view) * (0.5 if rule.half_pull else 1.0)


@record
class FedAdmmRestart(FedAdmm):
    """FedADMM whose y_prev is x (the authors' code): every message is twice y_i - x."""

    def finish(self, delta: Vec, view: ClientView) -> tuple[Vec, Tree, Tree]:
        return 2 * delta, AdmmState(view.w, view.mine.a - self.rho * delta), EMPTY


# ------------------------------------------------------------------------------------ AdaBest
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

    def finish(self, delta: Vec, view: ClientView) -> tuple[Vec, Tree, Tree]:
        t, processed = view.round + 1, self.epochs * view.size
        h_i = view.mine.h / (t - view.mine.last) + delta
        counted = processed / view.steps * self.epochs
        return delta, Drift(h_i, t), counted if self.unbalanced else EMPTY


# --------------------------------------------------------------------------------- aggregates
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


# ----------------------------------------------------------------------------------- features
@record
class RFedAvgPlusAtStart(Rule):
    """rFedAvg+ in its code: the mean over ALL sampled clients, taken when a round starts.

    `batch` examples of each client make its feature mean (None: all of them); the next `batch`
    ones in the next round.
    """

    shares_probe: ClassVar[bool] = True

    strength: float = number(default=1e-4, low=0)
    batch: int | None = static(default=None)

    def init_server(self, w: Vec, sizes: Sizes) -> Tree:
        need_features(self, sizes)
        return EMPTY

    def probe(self, view: ClientView) -> Tree:
        features = features_of(view.output_at(view.w0))
        return masked_mean(features * in_turn(view, self.batch)[:, None], view.batch.mask)

    def penalty(self, out: Output, view: ClientView) -> Tensor:
        mean = masked_mean(features_of(out), view.batch.mask)
        return self.strength * (mean - view.cohort).square().sum()


def in_turn(view: ClientView, batch: int | None) -> Tensor:
    """Weigh own examples so that the mean over all of them is that over this round's batch."""
    n, at = view.size, view.batch.index.to(view.size.dtype)
    if batch is None:
        return torch.ones_like(at)
    chosen = torch.remainder(at - batch * view.round, n) < batch
    return chosen.to(at.dtype) * n / n.clamp(max=batch)


@record
class MoonRounds(Rule):
    """MOON's code with more than one stored model: a pool of the last ROUNDS, not participations.

    A client that was not asked is in the pool with its last model once for every round.
    """

    mu: float = number(default=1.0, low=0)
    temperature: float = number(default=0.5, low=0, ends="()")
    stored: int = static(default=2)

    def __post_init__(self) -> None:
        check_counts(self, stored=1)

    def init_client(self, w: Vec, sizes: Sizes) -> Tree:
        need_features(self, sizes)
        return Pool(w.repeat(self.stored, 1), w.new_full((self.stored,), -1.0))

    def penalty(self, out: Output, view: ClientView) -> Tensor:
        back = torch.arange(1, self.stored + 1, device=view.w.device)
        rounds = view.round - back  # the pool's
        # `trained` holds the rounds in which the models were trained, -1 where x_0 stands in
        chosen = (view.mine.trained <= rounds[:, None]).to(torch.int64).argmax(1)
        known = (rounds >= 0) | (back == 1)
        models = view.mine.models[chosen]
        return self.mu * contrast(out, view, models, known, self.temperature)

    def finish(self, delta: Vec, view: ClientView) -> tuple[Vec, Tree, Tree]:
        models = torch.cat([view.w[None], view.mine.models[:-1]])
        return delta, Pool(models, torch.cat([view.round[None], view.mine.trained[:-1]])), EMPTY


# -------------------------------------------------------------------- local optimizers' states
@record
class KeepOptimizer(Rule):
    """A client's momentum and moments live on from round to round (rFedAvg's code; C3)."""

    local: Any = part(default_factory=HeavyBall)

    def init_client(self, w: Vec, sizes: Sizes) -> Tree:
        return self.local.init(w)

    def start(self, optimizer: Tree, view: ClientView) -> Tree:
        return same_kind(self, view.mine, optimizer)

    def finish(self, delta: Vec, view: ClientView) -> tuple[Vec, Tree, Tree]:
        return delta, view.optimizer, EMPTY


@record
class AverageOptimizer(Rule):
    """The cohort's momentum and moments are averaged and start the next round (SlowMo)."""

    local: Any = part(default_factory=HeavyBall)

    def init_server(self, w: Vec, sizes: Sizes) -> Tree:
        return self.local.init(w)

    def broadcast(self, state: Tree) -> Tree:
        return state

    def start(self, optimizer: Tree, view: ClientView) -> Tree:
        return same_kind(self, view.broadcast, optimizer)

    def finish(self, delta: Vec, view: ClientView) -> tuple[Vec, Tree, Tree]:
        return delta, EMPTY, view.optimizer

    def server(self, update: Vec, state: Tree, view: ServerView) -> tuple[Vec, Tree]:
        return update, tree_map(lambda v: v / view.count, view.upload)


def same_kind(rule: Any, kept: Tree, fresh: Tree) -> Tree:
    """Refuse a state that belongs to another local optimizer."""
    if structure(kept) != structure(fresh):
        name = type(rule).__name__
        raise ConfigError(f"{name}.local = {rule.local!r} must be the algorithm's local optimizer")
    return kept


def keep_client_opt(algorithm: Algorithm) -> Algorithm:
    """Let the clients' optimizer states live on from round to round."""
    return replace(algorithm, rules=(*algorithm.rules, KeepOptimizer(algorithm.local)))
