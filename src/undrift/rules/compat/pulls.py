"""Pulls and duals as other people write them: FedProx, FedDyn, FedDC, FedADMM, VRL-SGD."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from undrift.core.local import Sgd
from undrift.core.rule import ClientView, Rule, ServerView, Sizes
from undrift.core.task import Vec
from undrift.core.tree import EMPTY, Tree, number, record, static
from undrift.errors import ConfigError
from undrift.rules.claims import DUALS, MOMENTUM
from undrift.rules.client import Prox, mean_after
from undrift.rules.compat.scaffold import check_length, length_of
from undrift.rules.duals import (
    AdmmState,
    DriftState,
    FedAdmm,
    FedDc,
    FedDyn,
    VrlSgd,
    VrlState,
    deviation,
)


def prox_of_rfedavg(strength: float) -> Prox:
    """FedProx in rFedAvg's code adds strength ||y - x||^2, not half of it: mu = 2 strength."""
    return Prox(2 * strength)


def prox_of_fedsim(mu: float) -> Prox:
    """FedProx in fedsim 0.9 halves once more, mu / 4 ||y - x||^2: half the mu."""
    return Prox(mu / 2)


@record
class ProxAfterMomentum(Rule):
    """FedProx whose pull is added after momentum, as FedNova's code does under Nesterov momentum.

    With heavy ball that code adds it in place to the buffer, which is then the same as adding it
    to the gradient: use `Prox`.
    """

    mu: float = number(default=0.01, low=0)

    def after_step(self, w: Vec, view: ClientView) -> Vec:
        return w - view.lr * self.mu * (view.w - view.w0)


@record
class FedDynHalf(FedDyn):
    """FedDyn with half the pull, alpha / 2 (y - x), and h_i as it is (fedsim)."""

    def direction(self, g: Vec, view: ClientView) -> Vec:
        pull = 0.5 * self.alpha * (view.w - view.w0) - view.mine
        return g + (pull * view.client.mean_size / view.size if self.by_size else pull)


@record
class FedDynUnclipped(Rule):
    """FedDyn whose alpha y is added after clipping, as weight decay is (FedDyn's code).

    A step is clip(g - h_i - alpha x) + alpha y: without clipping it is FedDyn.  For plain SGD, as
    there.  `half_pull` halves the pull alone, as fedsim does.
    """

    claims: ClassVar[tuple[str, ...]] = (DUALS,)
    reads: ClassVar[str] = "deltas"
    changes: ClassVar[str] = "update"

    alpha: float = number(default=0.01, low=0)
    by_size: bool = static(default=False)
    half_pull: bool = static(default=False)

    def check_beside(self, algorithm: Any) -> None:
        need_constant_steps(self, algorithm)

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


def need_constant_steps(rule: FedDynUnclipped, algorithm: Any) -> None:
    """Refuse what would scale alpha x, a gradient here, and not alpha y, which is none."""
    local, zero = algorithm.local, torch.zeros(())
    scaling = [type(r).__name__ for r in algorithm.rules if MOMENTUM in r.claims]
    scaling += [] if type(local) is Sgd else [type(local).__name__]
    if local.schedule.factor(zero, zero) != local.schedule.factor(zero, zero + 1):
        scaling.append(type(local.schedule).__name__)
    if scaling:
        raise ConfigError(
            f"FedDynUnclipped adds alpha y outside the local optimizer, so that {scaling[0]} would "
            "scale alpha x alone: use plain Sgd, or FedDyn"
        )


def alpha_of(rule: FedDynUnclipped, view: ClientView) -> Any:
    """Give alpha, or alpha mean(n) / n_i."""
    return rule.alpha * view.client.mean_size / view.size if rule.by_size else rule.alpha


def pull_of(rule: FedDynUnclipped, view: ClientView) -> Any:
    """Give the coefficient of the pull towards x."""
    return alpha_of(rule, view) * (0.5 if rule.half_pull else 1.0)


@record
class FedDcConstant(FedDc):
    """FedDC that divides by a constant `steps` times the undecayed `lr` (its code).

    There K is E ceil(mean(n) / B) for everybody, whatever a client really takes; None is the
    client's own K_i, and the round's lr.
    """

    lr: float | None = number(default=None, low=0, ends="()")
    steps: float | None = number(default=None, low=0, ends="()")
    by_path: bool = static(default=True)

    def __post_init__(self) -> None:
        check_length(self)

    def finish(self, delta: Vec, view: ClientView) -> tuple[Vec, Tree, Tree]:
        r = view.size / view.client.mean_size
        change = delta / length_of(self, view) - view.broadcast / r
        return delta, DriftState(view.mine.h - delta, view.mine.c + change), r * change


@record
class FedAdmmRestart(FedAdmm):
    """FedADMM whose y_prev is x (the authors' code): every message is twice y_i - x."""

    def finish(self, delta: Vec, view: ClientView) -> tuple[Vec, Tree, Tree]:
        return 2 * delta, AdmmState(view.w, view.mine.a - self.rho * delta), EMPTY


@record
class VrlPostStep(VrlSgd):
    """VRL-SGD that corrects after momentum and divides by K lr (the authors' code).

    That code averages the momentum buffers too: `AverageOptimizer` beside it.
    """

    needs_path: ClassVar[bool] = False

    def direction(self, g: Vec, view: ClientView) -> Vec:
        return g

    def after_step(self, w: Vec, view: ClientView) -> Vec:
        return w + view.lr * deviation(view.mine, view.w0, view.round)

    def finish(self, delta: Vec, view: ClientView) -> tuple[Vec, Tree, Tree]:
        per, d = 1 / (view.steps * view.lr), deviation(view.mine, view.w0, view.round)
        return delta, VrlState(d, view.w, per, view.round), EMPTY
