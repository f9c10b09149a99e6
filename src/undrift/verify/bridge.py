"""From a long-hand world to an undrift trainer in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from undrift.core.algorithm import Algorithm
from undrift.core.local import AdamW, HeavyBall, Nesterov, RmsProp, Sgd
from undrift.core.task import Task
from undrift.data import Explicit, ExplicitWork, Federation
from undrift.rules import Exponential
from undrift.trainer import Trainer
from undrift.verify.longhand.local import Local, Trajectory
from undrift.verify.longhand.worlds import Batches, QuadraticWorld, World


class Quadratics(nn.Module):
    """An example is the number i of its client; its loss is 0.5 (w - b_i)^T A_i (w - b_i)."""

    def __init__(self, world: QuadraticWorld) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(len(world.w0)))
        self.register_buffer("matrices", torch.tensor(np.array(world.matrices)))
        self.register_buffer("centres", torch.tensor(np.array(world.centres)))

    def forward(self, x: Tensor) -> Tensor:
        """Give each example's loss."""
        i = x[:, 0].long()
        away = self.w - self.centres[i]  # type: ignore[index]
        return 0.5 * torch.einsum("bi,bij,bj->b", away, self.matrices[i], away)  # type: ignore[index]


def task_of(world: World, feature: str | None = None) -> Task:
    """Build the module that computes what the world computes, at the world's w0."""
    module, loss = _module_and_loss(world)
    return started(module, world, loss, feature)


def started(module: nn.Module, world: World, loss: Any, feature: str | None = None) -> Task:
    """Put the world's first parameters into a module."""
    module.double()
    nn.utils.vector_to_parameters(torch.tensor(world.w0), module.parameters())
    return Task(module, loss, metrics={}, feature=feature, dtype=torch.float64)


def _module_and_loss(world: World) -> tuple[nn.Module, Any]:
    if isinstance(world, QuadraticWorld):
        return Quadratics(world), lambda output, target: output
    x, y = world.data[0]
    features, size = x.shape[1], len(world.w0)
    if np.issubdtype(y.dtype, np.floating):
        return nn.Linear(features, 1), "mse"
    if size % (features + 1) == 0:
        return nn.Linear(features, size // (features + 1)), "cross_entropy"
    classes = 3
    hidden = (size - classes) // (features + 1 + classes)
    layers = nn.Linear(features, hidden), nn.Tanh(), nn.Linear(hidden, classes)
    return nn.Sequential(*layers), "cross_entropy"


def local_of(local: Local, schedule: Any = None) -> Sgd:
    """Translate long-hand local settings; the learning rate falls round by round."""
    common: dict[str, Any] = {
        "lr": local.lr,
        "weight_decay": local.weight_decay,
        "clip": local.clip,
        "schedule": Exponential(local.lr_decay) if schedule is None else schedule,
    }
    made: dict[str, Callable[[], Sgd]] = {
        "sgd": lambda: Sgd(**common),
        "heavy_ball": lambda: HeavyBall(momentum=local.rho, **common),
        "nesterov": lambda: Nesterov(momentum=local.rho, **common),
        "rmsprop": lambda: RmsProp(alpha=local.alpha, eps=local.eps, **common),
        "adamw": lambda: AdamW(beta1=local.b1, beta2=local.b2, eps=local.eps, **common),
    }
    return made[local.optimizer]()


def trainer_of(
    task: Task,
    world: World,
    participants: Sequence[Sequence[int]],
    batches: Batches,
    algorithm: Algorithm,
    chances: Sequence[float] | None = None,
    **options: Any,
) -> Trainer:
    """Train the world's clients on exactly these batches."""
    return Trainer(
        task,
        Federation.of(world.data),
        algorithm,
        work=ExplicitWork({key: [b.tolist() for b in order] for key, order in batches.items()}),
        sampler=Explicit(participants, chances),
        **options,
    )


def away(trainer: Trainer, theirs: Trajectory) -> float:
    """Train as many rounds as the loop did: the largest difference of any parameter."""
    worst = 0.0
    for x in theirs.x:
        trainer.round()
        gap = (trainer.server.w - torch.from_numpy(x)).abs().max()
        worst = max(worst, float(gap.nan_to_num(nan=torch.inf)))
    return worst
