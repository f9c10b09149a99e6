"""Server optimizers: rules with only a server half."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from undrift.core.local import Listed, Schedule
from undrift.core.rule import Rule, ServerView, Sizes
from undrift.core.task import Vec
from undrift.core.tree import EMPTY, Tree, number, part, record, refuse_unused, static


@record
class Step(Rule):
    """x <- x - lr * update; lr = 1: FedAvg.  `schedule` is a factor by round."""

    lr: float = number(default=1.0, low=0)
    schedule: Schedule = part(default_factory=Schedule)

    def __post_init__(self) -> None:
        if isinstance(self.schedule, Listed):
            refuse_unused(Listed, "a server takes one step a round", steps=self.schedule.steps)

    def server(self, update: Vec, state: Tree, view: ServerView) -> tuple[Vec, Tree]:
        lr = self.lr * self.schedule.factor(view.round, torch.zeros_like(view.round))
        return lr * update, state


@record
class ServerMomentum(Rule):
    """FedAvgM (Hsu et al. 2019): v <- beta * v + update;  x <- x - lr * v.  beta = 0: FedAvg.

    `dampening` gives v <- beta * v + (1 - beta) * update, as in MOON's published code.
    """

    lr: float = number(default=1.0, low=0)
    beta: float = number(default=0.9, low=0, high=1)
    dampening: bool = static(default=False)

    def init_server(self, w: Vec, sizes: Sizes) -> Tree:
        return torch.zeros_like(w)  # v

    def server(self, update: Vec, state: Tree, view: ServerView) -> tuple[Vec, Tree]:
        v = self.beta * state + ((1 - self.beta) * update if self.dampening else update)
        return self.lr * v, v


class Moments(NamedTuple):
    """First and second moment of the update, and how many steps made them."""

    m: Vec
    v: Vec
    steps: Tensor
    top: Tree = EMPTY  # the largest v so far, where it is used


def adam(v: Vec, square: Vec, beta2: Any) -> Vec:
    """FedAdam's second moment."""
    return beta2 * v + (1 - beta2) * square


def adagrad(v: Vec, square: Vec, beta2: Any) -> Vec:
    """FedAdagrad's second moment."""
    return v + square


def yogi(v: Vec, square: Vec, beta2: Any) -> Vec:
    """FedYogi's second moment."""
    return v - (1 - beta2) * square * torch.sign(v - square)


def no_correction(t: Any, beta1: Any, beta2: Any) -> tuple[Any, Any]:
    """Factors on m and on v at step t = 1, 2, ..."""
    return 1.0, 1.0


def flower_correction(t: Any, beta1: Any, beta2: Any) -> tuple[Any, Any]:
    """Flower >= 1.13 uses t + 1."""
    return (1 - beta2 ** (t + 1)).sqrt() / (1 - beta1 ** (t + 1)), 1.0


def standard_correction(t: Any, beta1: Any, beta2: Any) -> tuple[Any, Any]:
    """Kingma & Ba 2015."""
    return 1 / (1 - beta1**t), 1 / (1 - beta2**t)


def no_decay(rule: Any, **settings: Any) -> None:
    """Refuse what acts on a second moment that fades."""
    why = f"with kind = {rule.kind!r} v is a sum, which does not fade and has no bias"
    refuse_unused(type(rule), why, beta2=rule.beta2, **settings)


SECOND_MOMENTS = {"adam": adam, "adagrad": adagrad, "yogi": yogi, "amsgrad": adam}
CORRECTIONS = {
    "none": no_correction,
    "flower": flower_correction,
    "standard": standard_correction,
}


@record
class Adaptive(Rule):
    """FedAdam, FedAdagrad, FedYogi (Reddi et al. 2021, alg. 2), and AMSGrad in their place.

    AMSGrad (Reddi, Kale & Kumar 2018) is Adam with the largest v so far.  `bias_correction`
    "flower" scales lr as Flower >= 1.13 does, "standard" as torch does; `eps_inside` takes
    sqrt(v + tau) as ComFed prints it.
    """

    kind: str = static(default="adam", choices=tuple(SECOND_MOMENTS))
    lr: float = number(default=0.01, low=0)
    beta1: float = number(default=0.9, low=0, high=1, ends="[)")
    beta2: float = number(default=0.99, low=0, high=1, ends="[)")
    tau: float = number(default=1e-3, low=0, ends="()")  # 0 / 0 where nothing moves
    v0: float = number(default=0.0, low=0)
    bias_correction: str = static(default="none", choices=tuple(CORRECTIONS))
    eps_inside: bool = static(default=False)

    def __post_init__(self) -> None:
        if self.kind == "adagrad":
            no_decay(self, bias_correction=self.bias_correction)

    def init_server(self, w: Vec, sizes: Sizes) -> Tree:
        m, v = torch.zeros_like(w), torch.zeros_like(w) + self.v0
        return Moments(m, v, w.new_zeros(()), v.clone() if self.kind == "amsgrad" else EMPTY)

    def server(self, update: Vec, state: Tree, view: ServerView) -> tuple[Vec, Tree]:
        m = self.beta1 * state.m + (1 - self.beta1) * update
        v = SECOND_MOMENTS[self.kind](state.v, update * update, self.beta2)
        t = state.steps + 1
        up, down = CORRECTIONS[self.bias_correction](t, self.beta1, self.beta2)
        top = torch.maximum(state.top, v) if self.kind == "amsgrad" else EMPTY
        used = down * (top if self.kind == "amsgrad" else v)
        root = (used + self.tau).sqrt() if self.eps_inside else used.sqrt() + self.tau
        return self.lr * up * m / root, Moments(m, v, t, top)
