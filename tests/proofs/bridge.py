"""From a long-hand world to an undrift trainer in float64, and what to compare afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import undrift as fl
from longhand.local import Local, Trajectory
from longhand.worlds import Array, Batches, QuadraticWorld, World
from undrift.rules import Schedule

# undrift's name of a state -> (the long-hand name, sign): moving a model is subtracted in undrift
Names = dict[str, tuple[str, int]]


class Run(NamedTuple):
    """One entry per round, taken after it."""

    x: list[Array]
    server: list[dict[str, Array]]
    clients: list[list[dict[str, Array]]]  # of every client, sampled or not
    results: list[fl.RoundResult]


# ---- the same problem in torch -------------------------------------------------------------------


class Quadratics(nn.Module):
    """An example is the number i of its client; its loss is 0.5 (w - b_i)^T A_i (w - b_i)."""

    def __init__(self, world: QuadraticWorld) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(len(world.w0)))
        self.register_buffer("matrices", torch.tensor(np.array(world.matrices)))
        self.register_buffer("centres", torch.tensor(np.array(world.centres)))

    def forward(self, x: Tensor) -> Tensor:
        i = x[:, 0].long()
        away = self.w - self.centres[i]
        return 0.5 * torch.einsum("bi,bij,bj->b", away, self.matrices[i], away)


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


def task_of(world: World, feature: str | None = None) -> fl.Task:
    """Build the module that computes what the world computes, at the world's w0."""
    module, loss = _module_and_loss(world)
    module.double()
    nn.utils.vector_to_parameters(torch.tensor(world.w0), module.parameters())
    return fl.Task(module, loss, metrics={}, feature=feature, dtype=torch.float64)


@fl.record
class Falling(Schedule):
    """Fall by `by_round` every round and by `by_step` every local step."""

    by_round: float = 1.0
    by_step: float = 1.0

    def factor(self, round: Tensor, step: Tensor) -> Any:
        return self.by_round**round * self.by_step**step


def local_of(local: Local) -> fl.Sgd:
    """Translate long-hand local settings; a step factor must be factor(1) to the power of k."""
    schedule = fl.Exponential(local.lr_decay)
    if local.step_factor is not None:
        schedule = Falling(local.lr_decay, local.step_factor(1))
    common = {
        "lr": local.lr,
        "weight_decay": local.weight_decay,
        "clip": local.clip,
        "schedule": schedule,
    }
    made: dict[str, Callable[[], fl.Sgd]] = {
        "sgd": lambda: fl.Sgd(**common),
        "heavy_ball": lambda: fl.HeavyBall(momentum=local.rho, **common),
        "nesterov": lambda: fl.Nesterov(momentum=local.rho, **common),
        "rmsprop": lambda: fl.RmsProp(alpha=local.alpha, eps=local.eps, **common),
        "adamw": lambda: fl.AdamW(beta1=local.b1, beta2=local.b2, eps=local.eps, **common),
    }
    return made[local.optimizer]()


# ---- running -------------------------------------------------------------------------------------


def trainer_of(
    world: World,
    participants: list[list[int]],
    batches: Batches,
    algorithm: fl.Algorithm,
    feature: str | None = None,
    **options: Any,
) -> fl.Trainer:
    """Train the world's clients on exactly these batches."""
    return fl.Trainer(
        task_of(world, feature),
        fl.Federation.of(world.data),
        algorithm,
        work=fl.ExplicitWork(batches),
        sampler=fl.Explicit(participants),
        **options,
    )


def run(
    world: World,
    participants: list[list[int]],
    batches: Batches,
    algorithm: fl.Algorithm,
    **options: Any,
) -> Run:
    """Train all rounds and keep everything that the long-hand loops keep."""
    trainer = trainer_of(world, participants, batches, algorithm, **options)
    kept = Run([], [], [], [])
    for _ in participants:
        kept.results.append(trainer.round())
        kept.x.append(trainer.server.w.numpy().copy())
        kept.server.append(_arrays(trainer.server_state()))
        kept.clients.append([_arrays(trainer.client_state(i)) for i in range(len(world.data))])
    return kept


def _arrays(state: dict[str, Tensor]) -> dict[str, Array]:
    return {name: value.numpy().copy() for name, value in state.items()}


# ---- comparing -----------------------------------------------------------------------------------


def away(a: Array, b: Array) -> float:
    """Largest difference; infinite where one is not a number."""
    assert a.shape == b.shape
    return float(np.nan_to_num(np.abs(a - b).max(), nan=np.inf))


def gap(a: Run, b: Run) -> float:
    """Largest difference of two runs' models over all rounds and parameters."""
    assert len(a.x) == len(b.x) > 0
    return max(away(p, q) for p, q in zip(a.x, b.x, strict=True))


def distance(ours: Run, theirs: Trajectory, server: Names, clients: Names) -> float:
    """Largest difference from a long-hand run: models, server states and client states."""
    assert len(ours.x) == len(theirs.x) >= 5
    counted = {n for n in ours.server[-1] if n.endswith(".steps")}  # not in the long-hand states
    assert set(ours.server[-1]) - counted == set(server)
    assert set(ours.clients[-1][0]) == set(clients)
    pairs = list(zip(ours.x, theirs.x, strict=True))
    for mine, other in zip(ours.server, theirs.server_states, strict=True):
        pairs += [(sign * mine[n], other[name]) for n, (name, sign) in server.items()]
    for rows, others in zip(ours.clients, theirs.client_states, strict=True):
        for i, mine in enumerate(rows):
            pairs += [(sign * mine[n], others[i][name]) for n, (name, sign) in clients.items()]
    return max(away(p, q) for p, q in pairs)
