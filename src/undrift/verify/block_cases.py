"""FedVRA-U and others on a problem with a private block, against their long-hand loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from undrift import rules as r
from undrift.core.algorithm import Algorithm
from undrift.core.local import Sgd
from undrift.core.task import Task
from undrift.verify.bridge import away, local_of, started, task_of, trainer_of
from undrift.verify.cases import HEAVY, SGD, SIZES, SOME
from undrift.verify.longhand.local import Local
from undrift.verify.longhand.two_blocks import (
    Average,
    Dyn,
    Method,
    Objective,
    Scaffold,
    Vra,
    cluster_world,
    pseudo_label_world,
    two_blocks,
)
from undrift.verify.longhand.worlds import Array, Batches, World, epoch_batches, step_batches

RADIUS = 3.0
NUMBERS: dict[str, Any] = {"gamma": 0.3, "a": 1.2, "d": 2.0}
# small steps: no z reaches 0, where the entropy has no derivative and a floor would matter
MILD: dict[str, Any] = {"rate": 0.02, "steps": 4}


class Centres(nn.Module):
    """Half the squared distances to three shared centres."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.zeros(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        """Give [B, 3]."""
        return 0.5 * (x[:, None] - self.centres).square().sum(2)


def nearest(distances: Tensor, target: Tensor) -> Tensor:
    """Judge an example by its nearest centre."""
    return distances.amin(1)


def in_ball(w: Array) -> Array:
    """Bring a vector into the ball of RADIUS."""
    return w * min(1.0, RADIUS / float(np.linalg.norm(w)))


class BlockCase(NamedTuple):
    """One method, built twice; pseudo-labels unless `clusters`."""

    build: Callable[[Sgd], Algorithm]
    method: Callable[[], Method]
    clusters: bool = False
    ball: bool = False
    local: Local = SGD
    of: str = "fedvra_u"

    def problem(self) -> tuple[World, Objective, Task, Any]:
        """Give the world, its objective, and both once more for undrift."""
        if self.clusters:
            world, objective = cluster_world(3, SIZES, 3, 2)
            return world, objective, started(Centres(), world, nearest), r.Clusters(0.0, 3)
        world, labels = pseudo_label_world(2, SIZES)
        return world, labels, task_of(world), r.PseudoLabels(classes=3, every=3)

    def batches(self, world: World) -> Batches:
        """Batches of 6; all data where batches would weigh labelled examples otherwise."""
        if self.clusters:
            return epoch_batches(world, SOME, 6, epochs=2)
        return step_batches(world, SOME, {i: 3 + i for i in range(len(SIZES))})

    def difference(self) -> float:
        """Measure the largest difference of any parameter after any round."""
        world, objective, task, ours = self.problem()
        batches = self.batches(world)
        z: dict[str, Any] = {"rate": 1.0, "steps": 5} if self.clusters else MILD
        algorithm = r.two_blocks(self.build(local_of(self.local)), ours, **z)
        if self.ball:
            algorithm = with_rule(algorithm, r.Ball(RADIUS))
        theirs = two_blocks(
            world,
            SOME,
            batches,
            self.local,
            objective=objective,
            method=self.method(),
            eta_z=z["rate"],
            steps_z=z["steps"],
            project=in_ball if self.ball else None,
        )
        # undrift tells by an example's place whether it has a label, and wants a number there
        known = dataclasses.replace(world, data=[(x, np.maximum(y, 0)) for x, y in world.data])
        return away(trainer_of(task, known, SOME, batches, algorithm), theirs)


def with_rule(algorithm: Algorithm, rule: Any) -> Algorithm:
    """Put one more rule at the end of the sentence."""
    return Algorithm(
        (*algorithm.rules, rule), algorithm.local, algorithm.aggregate, algorithm.server
    )


def vra(local: Sgd) -> Algorithm:
    """FedVRA at the settings of these cases."""
    return r.fedvra(local=local, **NUMBERS)


BLOCK_CASES = [
    BlockCase(vra, partial(Vra, **NUMBERS)),
    BlockCase(vra, partial(Vra, **NUMBERS), local=HEAVY),
    BlockCase(vra, partial(Vra, **NUMBERS), clusters=True),
    BlockCase(vra, partial(Vra, **NUMBERS), clusters=True, ball=True),
    BlockCase(lambda local: r.fedavg(local=local), Average),
    BlockCase(lambda local: r.fedprox(mu=0.4, local=local), partial(Average, 0.4)),
    BlockCase(lambda local: r.scaffold(local=local), Scaffold),
    BlockCase(lambda local: r.feddyn(alpha=0.2, local=local), partial(Dyn, 0.2)),
]
