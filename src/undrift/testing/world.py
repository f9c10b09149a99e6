"""A federation so small that a round takes milliseconds, with everything unequal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from undrift.core.algorithm import Algorithm
from undrift.core.losses import LOSSES
from undrift.core.task import Task
from undrift.core.tree import named_leaves
from undrift.data import Explicit, ExplicitWork, Federation, LocalWork, Sampler, Uniform, Work
from undrift.trainer import Trainer

FEATURES, CLASSES = 4, 3
SIZES = (5, 9, 3, 7, 1, 6)  # unequal, the last step of an epoch is short, one client has one


class World(NamedTuple):
    """A task, a federation, who takes part and what they do."""

    task: Task
    federation: Federation
    work: LocalWork
    sampler: Sampler

    def trainer(self, algorithm: Algorithm, **options: Any) -> Trainer:
        """Make a trainer for this world."""
        return Trainer(
            self.task, self.federation, algorithm, work=self.work, sampler=self.sampler, **options
        )


def tiny_task(dtype: torch.dtype = torch.float64) -> Task:
    """Make a small smooth network: 4 features in, 3 classes out, layer "1" is its feature layer.

    >>> tiny_task().size
    43
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        net = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES))
    return Task(net, feature="1", dtype=dtype)


def tiny_world(task: Task | None = None, sizes: Sequence[int] = SIZES) -> World:
    """Make a world of few examples, in which four of six clients take part.

    >>> tiny_world().federation
    Federation(6 clients, 31 examples, x [4] float64, y [] int64, cpu)
    """
    draw = torch.Generator().manual_seed(3)
    clients = []
    for size in sizes:
        shift = torch.randn(FEATURES, generator=draw, dtype=torch.float64)
        x = torch.randn(size, FEATURES, generator=draw, dtype=torch.float64) + shift
        clients.append((x, torch.randint(0, CLASSES, (size,), generator=draw)))
    task, federation = tiny_task() if task is None else task, Federation.of(clients)
    return World(task, federation, Work(epochs=(1, 2), batch=4), _two_thirds(federation))


def world_of(task: Task | None, federation: Federation | None) -> World:
    """Make the tiny world, with a task or data of somebody else in it."""
    world = tiny_world(None if task is None else in_dtype(task, torch.float64))
    if federation is None:
        return world
    return world._replace(federation=federation, sampler=_two_thirds(federation))


def _two_thirds(federation: Federation) -> Sampler:
    return Uniform(count=max(1, 2 * int((federation.sizes > 0).sum()) // 3))


def in_dtype(task: Task, dtype: torch.dtype) -> Task:
    """Make the same task in another precision."""
    loss = task.loss_name if task.loss_name in LOSSES else task.loss
    metrics, feature = task.metrics, task.feature
    return Task(
        task.original, loss, metrics=metrics, feature=feature, dtype=dtype, augment=task.augment
    )


def run(world: World, algorithm: Algorithm, rounds: int, **options: Any) -> dict[str, Tensor]:
    """Train some rounds and give every number there is then, by name."""
    trainer = world.trainer(algorithm, **options)
    trainer.run(rounds)
    return numbers(trainer)


def numbers(trainer: Trainer) -> dict[str, Tensor]:
    """Every number of a trainer, by name."""
    found = {f"server.{n}": v for n, v in named_leaves(trainer.server).items()}
    states = trainer.store.gather(range(trainer.federation.num_clients))
    return found | {f"clients.{n}": v for n, v in named_leaves(states).items()}


def renumbered(world: World, rounds: int, new: list[int]) -> World:
    """Write down who trains on what, then call client i new[i]."""
    roster = world.trainer(Algorithm()).roster
    orders: dict[tuple[int, int], list[list[int]]] = {}
    cohorts, chances = [], [1.0] * len(new)
    for r in range(rounds):
        cohort = roster.cohort(r)
        cohorts.append([new[i] for i in cohort.ids])
        for i, chance in zip(cohort.ids, cohort.info.probability.tolist(), strict=True):
            chances[new[i]] = chance
        for i, order, steps in zip(cohort.ids, cohort.order, cohort.steps, strict=True):
            orders[r, new[i]] = [row[row >= 0].tolist() for row in order[: int(steps)]]
    clients = [world.federation.client(new.index(i)) for i in range(len(new))]
    turned = Federation.of(clients, arrival=world.federation.arrival)
    return World(world.task, turned, ExplicitWork(orders), Explicit(cohorts, chances))
