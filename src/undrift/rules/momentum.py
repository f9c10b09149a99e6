"""Momentum of the server: SlowMo's steps, and momentum that is taken along in local steps."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from undrift.core.local import Sgd
from undrift.core.rule import ClientView, Rule, ServerView, Sizes
from undrift.core.task import Vec
from undrift.core.tree import EMPTY, Tree, number, record, static
from undrift.errors import ConfigError
from undrift.rules.claims import MOMENTUM
from undrift.rules.server import SECOND_MOMENTS, no_decay


@record
class SlowMo(Rule):
    """SlowMo (Wang et al. 2020, eq. 2): u <- beta u + update / eta;  x <- x - lr eta u.

    eta is the round's local learning rate; a constant one: FedAvgM.  beta = 0, lr = 1: FedAvg.
    """

    beta: float = number(default=0.5, low=0, high=1, ends="[)")
    lr: float = number(default=1.0, low=0)

    def init_server(self, w: Vec, sizes: Sizes) -> Tree:
        return torch.zeros_like(w)  # u

    def server(self, update: Vec, state: Tree, view: ServerView) -> tuple[Vec, Tree]:
        u = self.beta * state + update / view.lr
        return self.lr * view.lr * u, u


@record
class FedAdc(Rule):
    """FedADC (Ozfatura et al. 2021, alg. 3): beta_local m, spread over a client's K_i local steps.

    What that adds to the update is taken out again, so m is beta_global m plus pure gradients.
    `nesterov` takes the gradient after the momentum's part of the step.
    beta_local = 0: SlowMo(beta_global).
    """

    claims: ClassVar[tuple[str, ...]] = (MOMENTUM,)
    reads: ClassVar[str] = "deltas"
    changes: ClassVar[str] = "update"

    beta_local: float = number(default=0.9, low=0, high=1)
    beta_global: float = number(default=0.9, low=0, high=1)
    lr: float = number(default=1.0, low=0)
    nesterov: bool = static(default=False)

    def check_beside(self, algorithm: Any) -> None:
        need_plain_steps(self, algorithm.local)

    def init_server(self, w: Vec, sizes: Sizes) -> Tree:
        return torch.zeros_like(w)  # m

    def broadcast(self, state: Tree) -> Tree:
        return state

    def look_at(self, w: Vec, view: ClientView) -> Vec:
        share = self.beta_local * view.broadcast / view.steps
        return w - view.lr * share if self.nesterov else w

    def direction(self, g: Vec, view: ClientView) -> Vec:
        return g + self.beta_local * view.broadcast / view.steps

    def server(self, update: Vec, state: Tree, view: ServerView) -> tuple[Vec, Tree]:
        m = update / view.lr + (self.beta_global - self.beta_local) * state
        return self.lr * view.lr * m, m


def need_plain_steps(rule: FedAdc, local: Sgd) -> None:
    """Refuse a local optimizer that adds beta_local m up to more than itself: m would explode."""
    spreads = not (isinstance(rule.beta_local, int | float) and rule.beta_local == 0)
    if spreads and type(local) is not Sgd:
        raise ConfigError(
            "FedAdc spreads its momentum over plain steps and takes it out of the update again, "
            f"but {type(local).__name__} would not leave it as it is: use Sgd(lr=...)"
        )


class Going(NamedTuple):
    """The server's average of updates, and what one unit of gradient is worth in it."""

    m: Vec
    unit: Tensor  # lr times mean ||a_i||_1 of the last cohort, by size


@record
class MomentumMix(Rule):
    """ComFed's future work, in MimeLite's style: u = (1 - b) g + b M, M the server's momentum.

    M = m / (lr K) is the server's average of updates (decay `beta`) in units of a gradient, K the
    cohort's mean ||a_i||_1 by size, pulls of other rules among it.  b = 0: ComFed.
    """

    needs_path: ClassVar[bool] = True
    claims: ClassVar[tuple[str, ...]] = (MOMENTUM,)
    reads: ClassVar[str] = "steps"

    b: float = number(default=0.9, low=0, high=1)
    beta: float = number(default=0.9, low=0, high=1)

    def init_server(self, w: Vec, sizes: Sizes) -> Tree:
        return Going(torch.zeros_like(w), w.new_ones(()))

    def broadcast(self, state: Tree) -> Tree:
        return state.m / state.unit  # M

    def direction(self, g: Vec, view: ClientView) -> Vec:
        # what decays belongs to g: M, an average of whole steps, holds its share of it already
        return (1 - self.b) * g + self.b * (view.broadcast - view.decay(view.w))

    def counted(self, g: Vec, view: ClientView) -> Vec:
        # K is that of whole gradients; what rules before add, such as a pull, is mixed as they are
        return 1 + (1 - self.b) * (g - 1)

    def finish(self, delta: Vec, view: ClientView) -> tuple[Vec, Tree, Tree]:
        return delta, EMPTY, (view.size * view.path, view.size)

    def server(self, update: Vec, state: Tree, view: ServerView) -> tuple[Vec, Tree]:
        m = self.beta * state.m + (1 - self.beta) * update
        return update, Going(m, unit_of(view))


class Scaled(NamedTuple):
    """`Going`, and the second moment of updates."""

    m: Vec
    unit: Tensor
    v: Vec


@record
class MomentumScaled(MomentumMix):
    """`MomentumMix` with M scaled as the server scales it: by 1 / (sqrt(v) + tau), mean 1.

    v is the server's second moment of updates; kind, beta2, tau and v0 are those of `Adaptive`.
    """

    kind: str = static(default="adam", choices=("adam", "adagrad", "yogi"))
    beta2: float = number(default=0.99, low=0, high=1)
    tau: float = number(default=1e-3, low=0, ends="()")
    v0: float = number(default=0.0, low=0)

    def __post_init__(self) -> None:
        if self.kind == "adagrad":
            no_decay(self)

    def init_server(self, w: Vec, sizes: Sizes) -> Tree:
        return Scaled(torch.zeros_like(w), w.new_ones(()), torch.zeros_like(w) + self.v0)

    def broadcast(self, state: Tree) -> Tree:
        scale = 1 / (state.v.sqrt() + self.tau)
        return state.m / state.unit * (scale / scale.mean())  # M

    def server(self, update: Vec, state: Tree, view: ServerView) -> tuple[Vec, Tree]:
        m = self.beta * state.m + (1 - self.beta) * update
        v = SECOND_MOMENTS[self.kind](state.v, update * update, self.beta2)
        return update, Scaled(m, unit_of(view), v)


@record
class MomentumAdd(Rule):
    """ComFed's future work, in FedADC's style: u = g + b M, and b M leaves the update again.

    M as in `MomentumMix`.  b = 0: ComFed.
    """

    needs_path: ClassVar[bool] = True
    exact_path: ClassVar[bool] = True  # else something of b M would stay in the update
    claims: ClassVar[tuple[str, ...]] = (MOMENTUM,)
    reads: ClassVar[str] = "steps"
    changes: ClassVar[str] = "update"

    b: float = number(default=0.9, low=0, high=1)
    beta: float = number(default=0.9, low=0, high=1)

    def check_beside(self, algorithm: Any) -> None:
        need_sizes(self, algorithm.aggregate)

    def init_server(self, w: Vec, sizes: Sizes) -> Tree:
        return Going(torch.zeros_like(w), w.new_ones(()))

    def broadcast(self, state: Tree) -> Tree:
        return state.m / state.unit  # M

    def direction(self, g: Vec, view: ClientView) -> Vec:
        return g + self.b * view.broadcast

    def finish(self, delta: Vec, view: ClientView) -> tuple[Vec, Tree, Tree]:
        return delta, EMPTY, (view.size * view.path, view.size)

    def server(self, update: Vec, state: Tree, view: ServerView) -> tuple[Vec, Tree]:
        unit = unit_of(view)
        pure = update - self.b * unit * (state.m / state.unit)
        return pure, Going(self.beta * state.m + (1 - self.beta) * pure, unit)


def need_sizes(rule: Rule, aggregate: Any) -> None:
    """Refuse other weights than those of K, with which something of b M would stay."""
    if not getattr(aggregate, "by_size", False):
        raise ConfigError(
            f"{type(rule).__name__} takes b M out of the update again, by size, but "
            f"{aggregate!r} has other weights: use Mean() or Nova()"
        )


def unit_of(view: ServerView) -> Tensor:
    """Give lr times the cohort's mean ||a_i||_1: by size, for so the update is weighted."""
    length, size = view.upload
    unit: Tensor = view.lr * length / size
    return unit
