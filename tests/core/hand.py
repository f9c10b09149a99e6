"""A small federation and federated averaging as a loop that anybody can read.

Sizes: 3 inputs, 2 features, 1 output.
"""

import torch
from torch import nn

from undrift import Explicit, ExplicitWork, Federation, Task, Trainer
from undrift.core.tree import named_leaves

F64 = torch.float64
LR, ROUNDS = 0.05, 4
SIZES = [5, 9, 3, 1]
COHORTS = [[0, 1, 2], [1, 3], [0, 2, 3], [0, 1, 2]]


# ---- the world, and the loop ---------------------------------------------------------------------
def _data():
    draw = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    return [(normal(n, 3) + normal(3), normal(n, 1)) for n in SIZES]


def _orders():
    """Two passes over the own examples in batches of 4; everybody has some in every round."""
    orders = {}
    for r in range(ROUNDS):
        for i, n in enumerate(SIZES):
            draw = torch.Generator().manual_seed(100 * r + i)
            passes = [torch.randperm(n, generator=draw) for _ in range(2)]
            orders[r, i] = [b.tolist() for p in passes for b in p.split(4)]
    return orders


DATA, ORDERS = _data(), _orders()


def task():
    torch.manual_seed(5)
    return Task(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)), "mse", feature="0", dtype=F64)


def features(w, x):
    return x @ w[:6].view(2, 3).T + w[6:8]


def predict(w, x):
    return features(w, x) @ w[8:10].view(1, 2).T + w[10:11]


def loss(w, x, y):
    return (predict(w, x) - y).square().mean()


def gradient(function, w):
    w = w.detach().requires_grad_()
    return torch.autograd.grad(function(w), w)[0]


def by_hand(objective, *, direction=lambda g, y, i, b: g, weights=None, x0=None, round=0):
    """One round: (local models, mean of them); `objective` is f(y, client, batch)."""
    x0 = task().initial()[0] if x0 is None else x0
    models = {}
    for i in COHORTS[round]:
        y = x0
        for b in ORDERS[round, i]:
            g = gradient(lambda v, i=i, b=b: objective(v, i, b), y)
            y = y - LR * direction(g, y, i, b)
        models[i] = y
    weight = {i: float(SIZES[i]) if weights is None else weights for i in models}
    total = sum(weight.values())
    return models, sum(weight[i] * y for i, y in models.items()) / total


def plain(y, i, b):
    return loss(y, DATA[i][0][b], DATA[i][1][b])


# ---- the same with a rule ------------------------------------------------------------------------
def trained(algorithm, **options):
    trainer = Trainer(
        task(),
        Federation.of(DATA),
        algorithm,
        work=ExplicitWork(ORDERS),
        sampler=Explicit(COHORTS),
        **options,
    )
    trainer.run(ROUNDS)
    return trainer


def numbers(trainer):
    """Every number of a trainer, by name."""
    states = trainer.store.gather(range(len(SIZES)))
    return {**named_leaves(trainer.server), **named_leaves({"clients": states})}


def close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
