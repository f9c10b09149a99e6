"""How long a round takes on this machine, against the same algorithm as a plain PyTorch loop."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from undrift import models
from undrift.core.algorithm import Algorithm
from undrift.core.task import Task
from undrift.data import Federation, Uniform, Work
from undrift.data.checks import check_whole
from undrift.engines.workers import limited
from undrift.errors import unknown_name
from undrift.hand_loops import HAND_LOOPS, FedAvg, Setting
from undrift.rules import catalogue, sgd
from undrift.trainer import Trainer

LR = 0.1
HAND, REFERENCE = "hand-written loop", "reference engine"


class Load(NamedTuple):
    """Work that is measured, on random examples."""

    model: str
    shape: tuple[int, ...]
    clients: int
    cohort: int
    steps: int
    batch: int


LOADS = {
    "emnist_mlp": Load("emnist_mlp", (784,), 1000, 100, 10, 45),
    "feddyn_cnn": Load("feddyn_cnn", (3, 32, 32), 100, 10, 10, 50),
    "simple_cnn": Load("simple_cnn", (3, 32, 32), 1000, 50, 5, 10),
}
USUAL = ("fedavg", "scaffold")  # one without states, one with, and client momentum
ALGORITHMS = tuple(name for name, entry in catalogue().items() if not entry.needs)


class Spread(NamedTuple):
    """Several measurements of one thing."""

    least: float
    median: float
    most: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """Sum measurements up."""
        return cls(min(values), statistics.median(values), max(values))


class Seconds(NamedTuple):
    """Time of one round."""

    cpu: float  # of all threads of this process: other processes do not count
    wall: float


class Measured(NamedTuple):
    """Rounds of one algorithm, in turns: a plain loop's and undrift's."""

    load: str
    algorithm: str
    against: str  # HAND or REFERENCE
    clock: str  # "cpu", or "wall" where a device computes: what `loop` and `undrift` are
    loop: Spread  # seconds a round
    undrift: Spread
    faster: Spread  # by turn: how many rounds of undrift's fit into one of the loop's
    wall_faster: Spread  # the same by wall time, in which other processes count too


def bench(
    name: str,
    algorithm: str = "fedavg",
    *,
    device: str = "cpu",
    precision: str | None = None,
    rounds: int = 5,
    threads: int = 1,
    tiny: bool = False,
) -> Measured:
    """Measure a plain loop of an algorithm and undrift in turns, both on `threads` CPU threads.

    The first round of the loop and the first three of undrift, which plans in them, do not count.
    Where no loop is written by hand (`HAND_LOOPS`), undrift's reference engine takes its place: the
    same formulas, one client and one step at a time.

    >>> bench("emnist_mlp", tiny=True, rounds=1).loop.median > 0
    True
    """
    if name not in LOADS:
        raise unknown_name("work", name, list(LOADS), "bench")
    if algorithm not in ALGORITHMS:
        raise unknown_name("algorithm", algorithm, list(ALGORITHMS), "bench")
    for setting, value in (("rounds", rounds), ("threads", threads)):
        check_whole(setting, value)
    load = LOADS[name]
    if tiny:
        load = load._replace(clients=8, cohort=4, steps=2, batch=5)
    with limited(threads):
        return _measured(load, name, algorithm, device, precision, rounds)


def _measured(
    load: Load, name: str, algorithm: str, device: str, precision: str | None, rounds: int
) -> Measured:
    data = examples(load)
    trainer = trainer_of(load, data, algorithm, device=device, precision=precision)
    block = 1 if device == "cpu" else 10  # a device is fast, and does not wait between rounds
    loop: Callable[[], Any]
    if algorithm in HAND_LOOPS:
        against, loop = HAND, loop_of(load, data, algorithm, device).round
    else:
        slow = trainer_of(load, data, algorithm, device=device, engine="reference")
        against, loop = REFERENCE, slow.round
    loop()
    trainer.run(3)
    turns = []
    for turn in range(rounds):  # whoever goes first changes, for machines slow down with heat
        sides = (("loop", loop, 1), ("undrift", lambda: trainer.run(block), block))
        times = {
            side: _timed(action, device, count)
            for side, action, count in (sides if turn % 2 == 0 else sides[::-1])
        }
        turns.append((times["loop"], times["undrift"]))
    clock = "cpu" if device == "cpu" else "wall"
    theirs, ours = ([getattr(side, clock) for side in sides] for sides in zip(*turns, strict=True))
    return Measured(
        name, algorithm, against, clock,
        Spread.of(theirs),
        Spread.of(ours),
        Spread.of([a / b for a, b in zip(theirs, ours, strict=True)]),
        Spread.of([a.wall / b.wall for a, b in turns]),
    )  # fmt: skip


def setting_of(load: Load, algorithm: str) -> Setting:
    """Give the numbers of an algorithm: SCAFFOLD has momentum on its clients."""
    heavy = algorithm == "scaffold"
    return Setting(load.cohort, load.batch, LR / 10 if heavy else LR, 0.9 if heavy else 0.0)


def algorithm_of(load: Load, algorithm: str) -> Algorithm:
    """Build an algorithm with these numbers."""
    setting = setting_of(load, algorithm)
    return catalogue()[algorithm].build(local=sgd(setting.lr, momentum=setting.momentum))


def trainer_of(
    load: Load, data: Federation, algorithm: str, *, engine: str = "vectorised", **options: Any
) -> Trainer:
    """Build undrift's side."""
    if engine == "reference":
        options = {name: value for name, value in options.items() if name == "device"}
    return Trainer(
        Task(models.build(load.model, 0)),
        data,
        algorithm_of(load, algorithm),
        work=Work(steps=load.steps, batch=load.batch),
        sampler=Uniform(count=load.cohort),
        engine=engine,
        **options,
    )


def loop_of(load: Load, data: Federation, algorithm: str, device: str) -> FedAvg:
    """Build the side that is written by hand."""
    clients = [data.client(i) for i in range(load.clients)]
    moved = [(x.to(device), y.to(device)) for x, y in clients]
    model = models.build(load.model, 0).to(device, moved[0][0].dtype)
    return HAND_LOOPS[algorithm](model, moved, setting_of(load, algorithm))


def examples(load: Load) -> Federation:
    """Draw random examples, of each client as many as it takes in a round."""
    maker, size = torch.Generator().manual_seed(0), load.steps * load.batch
    x = torch.randn(load.clients * size, *load.shape, generator=maker)
    y = torch.randint(0, 10, (len(x),), generator=maker)
    return Federation.split(x, y, torch.arange(len(x)).split(size))


def _timed(action: Callable[[], Any], device: str, rounds: int) -> Seconds:
    if device != "cpu":
        torch.cuda.synchronize()
    cpu, wall = time.process_time(), time.perf_counter()
    action()
    if device != "cpu":
        torch.cuda.synchronize()
    return Seconds((time.process_time() - cpu) / rounds, (time.perf_counter() - wall) / rounds)
