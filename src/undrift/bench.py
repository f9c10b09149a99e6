"""How long a round takes on this machine, against a straightforward PyTorch loop."""

from __future__ import annotations

import copy
import statistics
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from undrift import models
from undrift.core.algorithm import Algorithm
from undrift.core.task import Task
from undrift.data import Federation, Uniform, Work
from undrift.errors import unknown_name
from undrift.rules import fedavg, scaffold, sgd
from undrift.trainer import Trainer

LR = 0.1


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
ALGORITHMS = ("fedavg", "scaffold")  # one without states, one with, and client momentum


class Measured(NamedTuple):
    """Seconds per round, medians."""

    load: str
    algorithm: str
    loop: float
    undrift: float

    @property
    def faster(self) -> float:
        """Tell how many rounds of ours fit into one of the loop's."""
        return self.loop / self.undrift


def bench(
    name: str,
    algorithm: str = "fedavg",
    *,
    device: str = "cpu",
    precision: str | None = None,
    rounds: int = 3,
    tiny: bool = False,
) -> Measured:
    """Measure a loop of FedAvg and us in turns; the first round of each is not counted.

    >>> bench("emnist_mlp", tiny=True).faster > 0
    True
    """
    if name not in LOADS:
        raise unknown_name("work", name, list(LOADS), "bench")
    if algorithm not in ALGORITHMS:
        raise unknown_name("algorithm", algorithm, list(ALGORITHMS), "bench")
    load = LOADS[name]
    if tiny:
        load = load._replace(clients=8, cohort=4, steps=2, batch=5)
    data = _examples(load)
    loop = HandLoop(load, data, device)
    trainer = Trainer(
        Task(models.build(load.model, 0)),
        data,
        _built(algorithm),
        work=Work(steps=load.steps, batch=load.batch),
        sampler=Uniform(count=load.cohort),
        device=device,
        precision=precision,
    )
    block = 1 if device == "cpu" else 10  # a device is fast, and does not wait between rounds
    loop.round()
    trainer.run(3)
    times = [
        (_timed(loop.round, device), _timed(lambda: trainer.run(block), device) / block)
        for _ in range(rounds)
    ]
    ours = statistics.median(b for _, b in times)
    return Measured(name, algorithm, statistics.median(a for a, _ in times), ours)


def _built(algorithm: str) -> Algorithm:
    return fedavg(LR) if algorithm == "fedavg" else scaffold(local=sgd(LR / 10, momentum=0.9))


def _examples(load: Load) -> Federation:
    maker, size = torch.Generator().manual_seed(0), load.steps * load.batch
    x = torch.randn(load.clients * size, *load.shape, generator=maker)
    y = torch.randint(0, 10, (len(x),), generator=maker)
    return Federation.split(x, y, torch.arange(len(x)).split(size))


def _timed(action: Any, device: str) -> float:
    if device != "cpu":
        torch.cuda.synchronize()
    started = time.perf_counter()
    action()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - started


class HandLoop:
    """FedAvg as one writes it: a client after the other, `torch.optim.SGD`, a weighted mean."""

    def __init__(self, load: Load, data: Federation, device: str) -> None:
        self.load, self.server = load, models.build(load.model, 0).to(device)
        self.clients = [tuple(v.to(device) for v in data.client(i)) for i in range(load.cohort)]

    def round(self) -> None:
        """Train every client of the cohort, then average."""
        states = [self._trained(x, y).state_dict() for x, y in self.clients]
        mean = {n: torch.stack([s[n].float() for s in states]).mean(0) for n in states[0]}
        self.server.load_state_dict(mean)

    def _trained(self, x: Tensor, y: Tensor) -> nn.Module:
        model = copy.deepcopy(self.server).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        for step in range(self.load.steps):
            part = slice(step * self.load.batch, (step + 1) * self.load.batch)
            optimizer.zero_grad()
            F.cross_entropy(model(x[part]), y[part]).backward()
            optimizer.step()
        return model
