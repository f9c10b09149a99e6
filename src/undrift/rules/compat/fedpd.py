"""FedPD as its authors run it: rounds without an exchange, local steps from the own model."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from undrift.core.random import fold, uniform
from undrift.core.rule import ClientView, ServerView, Sizes
from undrift.core.task import Vec
from undrift.core.transfer import table
from undrift.core.tree import EMPTY, Tree, number, record, refuse_unused, static
from undrift.rules.duals import FedPd, need_own_steps


class PdState(NamedTuple):
    """What a client of FedPD keeps when it may be alone."""

    y: Vec  # its last model
    x0: Vec  # its own centre
    dual: Vec
    alone: Tensor  # 1 where the last round exchanged nothing


@record
class FedPdAlone(FedPd):
    """FedPD (Zhang et al. 2021, alg. 1) that exchanges with the chance 1 - skip, as its code does.

    `exchanges` lists the rounds (0 first) that exchange, in the place of chance.  Local steps go
    on from the own last model, or with own_start = False from the centre.
    """

    skip: float = number(default=0.0, low=0, high=1)
    exchanges: tuple[int, ...] | None = static(default=None)
    own_start: bool = static(default=True)

    def __post_init__(self) -> None:
        if self.exchanges is not None:
            refuse_unused(type(self), "exchanges lists the rounds that exchange", skip=self.skip)

    def init_client(self, w: Vec, sizes: Sizes) -> Tree:
        return PdState(w.clone(), w.clone(), torch.zeros_like(w), w.new_zeros(()))

    def check_beside(self, algorithm: Any) -> None:
        need_own_steps(self, algorithm, "starts elsewhere than at the model that was sent")

    def look_at(self, w: Vec, view: ClientView) -> Vec:
        return torch.where(is_first(view), first_model(self, view), w)

    def direction(self, g: Vec, view: ClientView) -> Vec:
        y = self.look_at(view.w, view)
        return g + view.mine.dual + self.rho * (y - centre(view))

    def after_step(self, w: Vec, view: ClientView) -> Vec:
        return w + (self.look_at(view.w, view) - view.w)

    def finish(self, delta: Vec, view: ClientView) -> tuple[Vec, Tree, Tree]:
        dual, together = view.mine.dual + self.rho * (view.w - centre(view)), exchanged(self, view)
        x0 = view.w + dual / self.rho
        return view.w0 - x0, PdState(view.w, x0, dual, 1 - together), together

    def server(self, update: Vec, state: Tree, view: ServerView) -> tuple[Vec, Tree]:
        return update * (view.upload / view.count), EMPTY


def is_first(view: ClientView) -> Tensor:
    """Whether this is the first local step: nothing has moved the model that was received."""
    return (view.w == view.w0).all()


def centre(view: ClientView) -> Vec:
    """Give x0_i: the model that was received, or the own one after a round alone."""
    return torch.where(view.mine.alone > 0, view.mine.x0, view.w0)


def first_model(rule: FedPdAlone, view: ClientView) -> Vec:
    """Give the model that local steps start from."""
    return view.mine.y if rule.own_start else centre(view)


def exchanged(rule: FedPdAlone, view: ClientView) -> Tensor:
    """Tell by 1 or 0 whether this round exchanges: the same for everybody."""
    round = view.round.long()
    if rule.exchanges is not None:
        listed = table(rule.exchanges, torch.int64, round.device)
        return (round == listed).any().to(view.w.dtype)
    drawn = uniform(fold(view.seed, "exchange", round), torch.zeros_like(round))
    return (drawn >= rule.skip).to(view.w.dtype)
