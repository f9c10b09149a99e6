"""Small worlds in float64 on which algorithms are measured."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from undrift.core.algorithm import Algorithm
from undrift.core.task import Task
from undrift.data import Everyone, Federation, LocalWork, Sampler, Uniform, Work
from undrift.testing.world import tiny_task
from undrift.trainer import Trainer

SIZES, EQUAL = (5, 9, 3, 7, 1, 6), (6, 6, 6, 6, 6, 6)


class Setting(NamedTuple):
    """Who holds what, who takes part, and how much they train."""

    everybody: bool = False
    equal_sizes: bool = False
    equal_steps: bool = True
    full_batch: bool = False
    steps: int = 4
    pooled: bool = False  # one client holds everything

    @property
    def work(self) -> LocalWork:
        """Steps on batches of 4, or on everything."""
        amount = self.steps if self.equal_steps else (2, 2 + self.steps)
        return Work(steps=amount, batch=None if self.full_batch else 4)

    @property
    def sampler(self) -> Sampler:
        """Everybody, or four of six."""
        return Everyone() if self.everybody else Uniform(count=4)


def trainer(algorithm: Algorithm, setting: Setting, engine: str = "vectorised") -> Trainer:
    """Put an algorithm into a world of six clients that differ."""
    draw = torch.Generator().manual_seed(3)
    clients = []
    for size in EQUAL if setting.equal_sizes else SIZES:
        shift = torch.randn(4, generator=draw, dtype=torch.float64)
        x = torch.randn(size, 4, generator=draw, dtype=torch.float64) + shift
        clients.append((x, torch.randint(0, 3, (size,), generator=draw)))
    if setting.pooled:
        xs, ys = zip(*clients, strict=True)
        clients = [(torch.cat(xs), torch.cat(ys))]
    return Trainer(
        tiny_task(),
        Federation.of(clients),
        algorithm,
        work=setting.work,
        sampler=setting.sampler,
        engine=engine,
    )


def path(algorithm: Algorithm, setting: Setting, rounds: int = 5) -> Tensor:
    """Give the server's model after every round: [rounds, P]."""
    made = trainer(algorithm, setting)
    models = []
    for _ in range(rounds):
        made.round()
        models.append(made.server.w)
    return torch.stack(models)


# ---------------------------------------------------------------------------------- quadratics
class Point(nn.Module):
    """A model that is one vector: every example sees all of it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(dim, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """Give A_i^(1/2) (w - b_i), whose half squared length is f_i."""
        root, centre = x[:, :-1], x[:, -1]
        return torch.einsum("bij,bj->bi", root, self.w - centre)


def half_square(output: Tensor, target: Tensor) -> Tensor:
    """Half the squared length of each row."""
    return 0.5 * output.square().sum(1) + 0 * target


class Quadratics(NamedTuple):
    """Six clients that pull elsewhere, and where they would meet."""

    federation: Federation
    optimum: Tensor  # of the uniform mean of their problems


def quadratics(clients: int = 6, dim: int = 4) -> Quadratics:
    """Make f_i(w) = (w - b_i)' A_i (w - b_i) / 2, A_i between 0.5 and 3."""
    draw = torch.Generator().manual_seed(11)
    data, curvature, pull = [], [], []
    for _ in range(clients):
        q, _ = torch.linalg.qr(torch.randn(dim, dim, generator=draw, dtype=torch.float64))
        values = 0.5 + 2.5 * torch.rand(dim, generator=draw, dtype=torch.float64)
        centre = 2 * torch.randn(dim, generator=draw, dtype=torch.float64)
        root = values.sqrt()[:, None] * q.T
        data.append((torch.cat([root, centre[None]]).unsqueeze(0), torch.zeros(1).double()))
        curvature.append(root.T @ root)
        pull.append(root.T @ root @ centre)
    return Quadratics(
        Federation.of(data),
        torch.linalg.solve(sum(curvature), sum(pull)),
    )


def distance(
    algorithm: Algorithm, rounds: int, sampler: Sampler | None = None, steps: int = 5
) -> float:
    """Train 5 full-batch steps a round on the quadratics: how far from the optimum it ends."""
    made = quadratics()
    runner = Trainer(
        Task(Point(4), half_square, dtype=torch.float64),
        made.federation,
        algorithm,
        work=Work(steps=5, batch=None),
        sampler=sampler,
    )
    runner.run(rounds)
    return float((runner.server.w - made.optimum).abs().max())
