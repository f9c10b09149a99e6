"""Algorithms as one writes them by hand in PyTorch: what `undrift bench` compares itself with.

One client after the other, `torch.optim.SGD`, whole models as lists of tensors.  Nothing of the
library takes part in a round.  Each loop computes what the recipe of its name computes.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Model = list[Tensor]  # one tensor per parameter
Drawn = Sequence[tuple[int, Sequence[Tensor]]]  # clients of a round, each with its batches


class Setting(NamedTuple):
    """The numbers of a loop."""

    cohort: int
    batch: int
    lr: float
    momentum: float


class FedAvg:
    """FedAvg, and the frame of the other loops."""

    by_size = True

    def __init__(
        self, model: nn.Module, clients: Sequence[tuple[Tensor, Tensor]], setting: Setting
    ) -> None:
        self.server, self.worker = model, copy.deepcopy(model)
        self.clients, self.setting = clients, setting
        self.generator = torch.Generator().manual_seed(0)

    def zeros(self) -> Model:
        """Give a model of zeros."""
        return [torch.zeros_like(p) for p in self.server.parameters()]

    def draw(self) -> Drawn:
        """Choose the clients of a round and shuffle their examples."""
        cohort = torch.randperm(len(self.clients), generator=self.generator)[: self.setting.cohort]
        device = self.clients[0][0].device
        return [(i, self._shuffled(len(self.clients[i][0]), device)) for i in cohort.tolist()]

    def _shuffled(self, count: int, device: torch.device) -> Sequence[Tensor]:
        order = torch.randperm(count, generator=self.generator)
        return order.to(device).split(self.setting.batch)

    def round(self, drawn: Drawn | None = None) -> None:
        """Train every client of a round, then take the server's step."""
        sums, total = self.zeros(), 0.0
        chosen = self.draw() if drawn is None else drawn
        for i, batches in chosen:
            self.train(i, batches)
            weight = float(len(self.clients[i][0])) if self.by_size else 1.0
            for mean, own in zip(sums, self.worker.parameters(), strict=True):
                mean += weight * own.detach()
            total += weight
        with torch.no_grad():
            self.step([mean / total for mean in sums], len(chosen))

    def train(self, i: int, batches: Sequence[Tensor]) -> None:
        """Train the worker's model on one client, from the server's."""
        self.worker.load_state_dict(self.server.state_dict())
        setting, (x, y) = self.setting, self.clients[i]
        optimizer = torch.optim.SGD(
            self.worker.parameters(), lr=setting.lr, momentum=setting.momentum
        )
        for rows in batches:
            optimizer.zero_grad()
            F.cross_entropy(self.worker(x[rows]), y[rows]).backward()
            with torch.no_grad():
                self.correct(i)
            optimizer.step()
        with torch.no_grad():
            self.finish(i, len(batches))

    def correct(self, i: int) -> None:
        """Change the gradients of a local step."""

    def finish(self, i: int, steps: int) -> None:
        """Take in the model that a client ends with."""

    def step(self, mean: Model, count: int) -> None:
        """Move the server to the mean of its clients' models."""
        for own, value in zip(self.server.parameters(), mean, strict=True):
            own.copy_(value)


class FedProx(FedAvg):
    """FedProx: a pull towards the model that was sent."""

    mu = 0.01

    def correct(self, i: int) -> None:
        for own, sent in zip(self.worker.parameters(), self.server.parameters(), strict=True):
            assert own.grad is not None
            own.grad.add_(own - sent, alpha=self.mu)


class Scaffold(FedAvg):
    """SCAFFOLD, option II: control variates of the server and of every client."""

    by_size = False

    def __init__(
        self, model: nn.Module, clients: Sequence[tuple[Tensor, Tensor]], setting: Setting
    ) -> None:
        super().__init__(model, clients, setting)
        self.c, self.change, self.own = self.zeros(), self.zeros(), dict[int, Model]()

    def correct(self, i: int) -> None:
        own = self.own.setdefault(i, self.zeros())
        for p, c, c_i in zip(self.worker.parameters(), self.c, own, strict=True):
            assert p.grad is not None
            p.grad.add_(c).sub_(c_i)

    def finish(self, i: int, steps: int) -> None:
        length = self.setting.lr * momentum_length(self.setting.momentum, steps)
        models = zip(self.server.parameters(), self.worker.parameters(), strict=True)
        for (x, y), c, c_i, sums in zip(models, self.c, self.own[i], self.change, strict=True):
            change = (x - y) / length - c
            c_i += change
            sums += change

    def step(self, mean: Model, count: int) -> None:
        super().step(mean, count)
        for c, sums in zip(self.c, self.change, strict=True):
            c += sums / len(self.clients)
            sums.zero_()


class FedDyn(FedAvg):
    """FedDyn: a pull and a dual on every client, the mean of all duals on the server."""

    alpha, by_size = 0.01, False

    def __init__(
        self, model: nn.Module, clients: Sequence[tuple[Tensor, Tensor]], setting: Setting
    ) -> None:
        super().__init__(model, clients, setting)
        self.h, self.own = self.zeros(), dict[int, Model]()

    def correct(self, i: int) -> None:
        own = self.own.setdefault(i, self.zeros())
        models = zip(self.worker.parameters(), self.server.parameters(), strict=True)
        for (y, x), h_i in zip(models, own, strict=True):
            assert y.grad is not None
            y.grad.add_(y - x, alpha=self.alpha).sub_(h_i)

    def finish(self, i: int, steps: int) -> None:
        models = zip(self.server.parameters(), self.worker.parameters(), strict=True)
        for (x, y), h_i in zip(models, self.own[i], strict=True):
            h_i.add_(x - y, alpha=self.alpha)

    def step(self, mean: Model, count: int) -> None:
        share = count / len(self.clients)
        for x, value, h in zip(self.server.parameters(), mean, self.h, strict=True):
            h.add_(x - value, alpha=share)
            x.copy_(value - h)


def momentum_length(momentum: float, steps: int) -> float:
    """Give the sum of the weights with which heavy ball has applied the gradients of `steps` steps.

    >>> momentum_length(0.0, 5), momentum_length(0.5, 2)
    (5.0, 2.5)
    """
    buffer = total = 0.0
    for _ in range(steps):
        buffer = momentum * buffer + 1
        total += buffer
    return total


HAND_LOOPS: dict[str, type[FedAvg]] = {
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "scaffold": Scaffold,
    "feddyn": FedDyn,
}
