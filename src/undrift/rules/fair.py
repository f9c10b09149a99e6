"""q-FFL: clients with a larger loss weigh more."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from undrift.core.rule import Aggregate, ClientView, Lineup
from undrift.core.task import Vec
from undrift.core.tree import Tree, number, record, static
from undrift.errors import ConfigError


@record
class QFair(Aggregate):
    """q-FedAvg (Li et al. 2020, Fair Resource Allocation, alg. 2); F_i is the loss at x.

    `lipschitz` None is 1 / lr.  `one_step` is q-FedSGD: delta must be lr times a gradient.
    q = 0: FedAvg, uniform.
    """

    q: float = number(default=1.0, low=0)
    lipschitz: float | None = number(default=None, low=0, ends="()")
    one_step: bool = static(default=False)

    def check(self, lineup: Lineup) -> None:
        if self.one_step and bool((lineup.steps != 1).any()):
            raise ConfigError(
                "q-FedSGD (one_step = True) takes one local step, but a client takes "
                f"{int(lineup.steps.max())}: use Work(steps=1, batch=None), or qfedavg"
            )

    def weight(self, view: ClientView) -> Tensor:
        return torch.ones_like(view.size)

    def probe(self, view: ClientView) -> Tree:
        return loss_at_start(view)

    def lift(self, delta: Vec, view: ClientView) -> Tree:
        L, f = lipschitz_of(self.lipschitz, view), view.probe + 1e-10
        dw = L * delta
        h = self.q * f ** (self.q - 1) * dw.square().sum() + L * f**self.q
        return f**self.q * dw, h

    def finish(self, total: Tree) -> Vec:
        weighted, h = total
        update: Vec = weighted / h
        return update


def loss_at_start(view: ClientView) -> Tensor:
    """Give the loss of the received model on the batch."""
    return view.task.mean_loss(view.output_at(view.w0), view.batch)


def lipschitz_of(lipschitz: Any, view: ClientView) -> Any:
    """Give L, which is 1 / lr unless it is known better."""
    return 1 / view.lr if lipschitz is None else lipschitz
