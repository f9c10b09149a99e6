"""The works' models in torch, and a round as anybody would write it."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from works import LR, Conv, Job, Layer, Linear, Weights, start

Client = tuple[Tensor, Tensor]


def _module(layer: Layer) -> nn.Module:
    if isinstance(layer, Linear):
        return nn.Linear(layer.inputs, layer.outputs)
    if isinstance(layer, Conv):
        return nn.Conv2d(layer.inputs, layer.outputs, layer.kernel)
    return {"relu": nn.ReLU(), "pool": nn.MaxPool2d(2), "flatten": nn.Flatten()}[layer]


def build(job: Job) -> nn.Sequential:
    """Make the model with the first weights."""
    net = nn.Sequential(*(_module(layer) for layer in job.work.layers))
    net.load_state_dict({n: torch.from_numpy(v) for n, v in start(job.work).items()})
    return net


def arrays(net: nn.Module) -> Weights:
    return {n: v.detach().cpu().numpy().copy() for n, v in net.state_dict().items()}


def clients(job: Job) -> list[Client]:
    return [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in job.clients()]


@lru_cache(maxsize=1)
def held(job: Job) -> tuple[nn.Sequential, list[Client]]:
    """Give what a worker process keeps from one client to the next."""
    torch.set_num_threads(job.threads)
    return build(job), clients(job)


def batches(job: Job, x: Tensor, y: Tensor) -> list[Client]:
    """Deal a client's examples: shuffled, or in stored order for a check."""
    size = job.work.batch
    if job.check:
        return list(zip(x.split(size), y.split(size), strict=True))
    return [(x[rows], y[rows]) for rows in torch.randperm(len(x)).split(size)]


def train(net: nn.Module, job: Job, x: Tensor, y: Tensor) -> None:
    """Take one client's local steps."""
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    for some, target in batches(job, x, y):
        optimizer.zero_grad()
        F.cross_entropy(net(some), target).backward()
        optimizer.step()


def cohort(job: Job, round: int) -> list[int]:
    """Draw who takes part."""
    maker = np.random.default_rng((2, round))
    return np.sort(maker.choice(job.work.clients, job.work.cohort, replace=False)).tolist()
