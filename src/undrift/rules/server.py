"""Server optimizers: rules with only a server half."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch

from undrift.core.rule import Rule, ServerView
from undrift.core.task import Vec
from undrift.core.tree import Tree, number, record, static
from undrift.errors import unknown_name


@record
class Step(Rule):
    """x <- x - lr * update; lr = 1: FedAvg."""

    lr: float = number(default=1.0, low=0)

    def server(self, update: Vec, state: Tree, view: ServerView) -> tuple[Vec, Tree]:
        return self.lr * update, state


@record
class ServerMomentum(Rule):
    """FedAvgM (Hsu et al. 2019): v <- beta * v + update;  x <- x - lr * v.  beta = 0: FedAvg.

    `dampening` gives v <- beta * v + (1 - beta) * update, as in MOON's published code.
    """

    lr: float = number(default=1.0, low=0)
    beta: float = number(default=0.9, low=0, high=1)
    dampening: bool = static(default=False)

    def init_server(self, w: Vec, clients: int) -> Tree:
        return torch.zeros_like(w)  # v

    def server(self, update: Vec, state: Tree, view: ServerView) -> tuple[Vec, Tree]:
        v = self.beta * state + ((1 - self.beta) * update if self.dampening else update)
        return self.lr * v, v


class Moments(NamedTuple):
    """First and second moment of the update."""

    m: Vec
    v: Vec


def adam(v: Vec, square: Vec, beta2: Any) -> Vec:
    """FedAdam's second moment."""
    return beta2 * v + (1 - beta2) * square


def adagrad(v: Vec, square: Vec, beta2: Any) -> Vec:
    """FedAdagrad's second moment."""
    return v + square


def yogi(v: Vec, square: Vec, beta2: Any) -> Vec:
    """FedYogi's second moment."""
    return v - (1 - beta2) * square * torch.sign(v - square)


SECOND_MOMENTS = {"adam": adam, "adagrad": adagrad, "yogi": yogi}


@record
class Adaptive(Rule):
    """FedAdam, FedAdagrad, FedYogi (Reddi et al. 2021, alg. 2); spec 1.6 has the rulings.

    `bias_correction` "flower" scales lr as Flower >= 1.13 does, "standard" as torch does;
    `eps_inside` takes sqrt(v + tau) as ComFed prints it.
    """

    kind: Literal["adam", "adagrad", "yogi"] = static(default="adam")
    lr: float = number(default=0.01, low=0)
    beta1: float = number(default=0.9, low=0, high=1)
    beta2: float = number(default=0.99, low=0, high=1)
    tau: float = number(default=1e-3, low=0)
    v0: float = number(default=0.0, low=0)
    bias_correction: Literal["none", "flower", "standard"] = static(default="none")
    eps_inside: bool = static(default=False)

    def __post_init__(self) -> None:
        corrections = ["none", "flower", "standard"]
        if self.kind not in SECOND_MOMENTS:
            raise unknown_name("server optimizer", self.kind, list(SECOND_MOMENTS), "Adaptive")
        if self.bias_correction not in corrections:
            raise unknown_name("bias correction", self.bias_correction, corrections, "Adaptive")

    def init_server(self, w: Vec, clients: int) -> Tree:
        return Moments(torch.zeros_like(w), torch.zeros_like(w) + self.v0)

    def server(self, update: Vec, state: Tree, view: ServerView) -> tuple[Vec, Tree]:
        m = self.beta1 * state.m + (1 - self.beta1) * update
        v = SECOND_MOMENTS[self.kind](state.v, update * update, self.beta2)
        up, down = self._correction(view.round)
        root = (down * v + self.tau).sqrt() if self.eps_inside else (down * v).sqrt() + self.tau
        return self.lr * up * m / root, Moments(m, v)

    def _correction(self, round: Any) -> tuple[Any, Any]:
        """Factors on m and on v; `round` is 0 in the first round."""
        if self.bias_correction == "flower":  # Flower counts t = 1, 2, ... and uses t + 1
            t = round + 2
            return (1 - self.beta2**t).sqrt() / (1 - self.beta1**t), 1.0
        if self.bias_correction == "standard":
            t = round + 1
            return 1 / (1 - self.beta1**t), 1 / (1 - self.beta2**t)
        return 1.0, 1.0
