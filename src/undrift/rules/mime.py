"""Mime: the server's optimizer state steers every local step and changes only between rounds."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from undrift.core.rule import ClientView, Rule, ServerView, Sizes
from undrift.core.task import Vec
from undrift.core.tree import EMPTY, Tree, number, part, record, static
from undrift.rules.claims import MOMENTUM, VARIATES


@record
class Ema:
    """SGD with momentum as an average: m <- (1 - beta) g + beta m, and m is the direction."""

    linear: ClassVar[bool] = True

    beta: float = number(default=0.9, low=0, high=1, ends="[)")

    def init(self, w: Vec) -> Tree:
        """Give the first state."""
        return torch.zeros_like(w)

    def next(self, g: Vec, state: Tree) -> Tree:
        """Take a gradient in."""
        return (1 - self.beta) * g + self.beta * state

    def use(self, state: Tree, round: Tensor) -> Vec:
        """Turn a state into a direction."""
        direction: Vec = state
        return direction


@record
class Trace:
    """SGD with momentum as a sum, m <- g + beta m (optax's trace, so fedjax's Mime)."""

    linear: ClassVar[bool] = True

    beta: float = number(default=0.9, low=0, high=1, ends="[)")

    def init(self, w: Vec) -> Tree:
        """Give the first state."""
        return torch.zeros_like(w)

    def next(self, g: Vec, state: Tree) -> Tree:
        """Take a gradient in."""
        return g + self.beta * state

    def use(self, state: Tree, round: Tensor) -> Vec:
        """Turn a state into a direction."""
        direction: Vec = state
        return direction


class Moments(NamedTuple):
    """First and second moment of the gradient."""

    m: Vec
    v: Vec


@record
class EmaAdam:
    """Adam's moments; `bias_correction` as in fedjax, whose Adam is optax's."""

    linear: ClassVar[bool] = False

    beta1: float = number(default=0.9, low=0, high=1, ends="[)")
    beta2: float = number(default=0.99, low=0, high=1, ends="[)")
    eps: float = number(default=1e-3, low=0, ends="()")
    bias_correction: bool = static(default=False)

    def init(self, w: Vec) -> Tree:
        """Give the first state."""
        return Moments(torch.zeros_like(w), torch.zeros_like(w))

    def next(self, g: Vec, state: Tree) -> Tree:
        """Take a gradient in."""
        m = (1 - self.beta1) * g + self.beta1 * state.m
        return Moments(m, (1 - self.beta2) * g * g + self.beta2 * state.v)

    def use(self, state: Tree, round: Tensor) -> Vec:
        """Turn a state into a direction."""
        m, v = state
        if self.bias_correction:
            m, v = m / (1 - self.beta1 ** (round + 1)), v / (1 - self.beta2 ** (round + 1))
        return m / (v.sqrt() + self.eps)


@record
class MimeLite(Rule):
    """MimeLite (Karimireddy et al. 2021, alg. 1): local steps with the server's fixed state s.

    beta = 0: FedAvg.
    """

    claims: ClassVar[tuple[str, ...]] = (MOMENTUM,)

    base: Any = part(default_factory=Ema)

    @property
    def linear(self) -> bool:
        return bool(self.base.linear)

    def init_server(self, w: Vec, sizes: Sizes) -> Tree:
        return self.base.init(w)  # s

    def broadcast(self, state: Tree) -> Tree:
        return state

    def probe(self, view: ClientView) -> Tree:
        return view.grad_at(view.w0)

    def direction(self, g: Vec, view: ClientView) -> Vec:
        return steered(self.base, g, view)

    def finish(self, delta: Vec, view: ClientView) -> tuple[Vec, Tree, Tree]:
        return delta, EMPTY, (view.size * view.probe, view.size)

    def server(self, update: Vec, state: Tree, view: ServerView) -> tuple[Vec, Tree]:
        return update, self.base.next(view.upload[0] / view.upload[1], state)


@record
class Mime(MimeLite):
    """Mime (Karimireddy et al. 2021, alg. 1): MimeLite whose gradients are corrected.

    g(y) - g(x) + c, both on the same batch; c is the cohort's gradient at x (one more exchange).
    """

    shares_probe: ClassVar[bool] = True
    claims: ClassVar[tuple[str, ...]] = (MOMENTUM, VARIATES)

    def direction(self, g: Vec, view: ClientView) -> Vec:
        return steered(self.base, g - view.grad_at(view.w0) + view.cohort, view)

    def sent(self, upload: Tree) -> Tree:
        return EMPTY  # the server has the probes from the first exchange


def steered(base: Any, g: Vec, view: ClientView) -> Vec:
    """Pass a gradient, decay included, through the server's state; decay is added again later."""
    decay = view.decay(view.w)
    moved: Vec = base.use(base.next(g + decay, view.broadcast), view.round)
    return moved - decay
