"""What a run warns of before it starts, and that it is so."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import undrift as fl
from undrift.rules import compat
from undrift.testing.world import World, tiny_world

STEPS, LR = 10, 0.1


def world(steps: int = STEPS) -> World:
    return tiny_world()._replace(work=fl.Work(steps=steps), sampler=fl.Everyone())


def told(algorithm: fl.Algorithm, caplog: pytest.LogCaptureFixture, steps: int = STEPS) -> str:
    caplog.clear()
    with caplog.at_level("WARNING", "undrift"):
        world(steps).trainer(algorithm)
    return caplog.text


def heavy(steps: int, rho: float) -> float:
    """||a||_1 of heavy ball, step by step."""
    count = total = 0.0
    for _ in range(steps):
        count = rho * count + 1
        total += count
    return total


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("steps", [3, 10])
def test_adabest_warns_above_two(rho: float, steps: int, caplog: pytest.LogCaptureFixture) -> None:
    edge = 2 / (LR * heavy(steps, rho))
    local = fl.sgd(LR, rho)
    assert not told(fl.adabest(mu=0.99 * edge, local=local), caplog, steps)
    assert "above 2 the estimate h_i" in told(
        fl.adabest(mu=1.01 * edge, local=local), caplog, steps
    )


def test_adabest_warns_of_the_smallest_client_where_sizes_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """mu_i = mu nbar / n_i: client 4 has one example of a mean of 5.2."""
    assert not told(fl.adabest(mu=0.5, lr=LR), caplog)
    assert "for client 4" in told(fl.adabest(mu=0.5, lr=LR, unbalanced=True), caplog)
    fedsim = fl.Algorithm((compat.AdaBestFedsim(mu=0.5),), fl.Sgd(LR))
    assert "AdaBestFedsim: mu eta" in told(fedsim, caplog)


def largest(algorithm: fl.Algorithm, rounds: int = 100) -> float:
    """Softmax regression, everybody."""
    made = world()
    torch.manual_seed(0)
    task = fl.Task(nn.Linear(4, 3), dtype=torch.float64)
    trainer = made._replace(task=task).trainer(algorithm)
    trainer.run(rounds)
    return float(trainer.server.w.abs().max())


def test_adabest_explodes_where_it_says() -> None:
    """At mu eta K = 3, whatever beta is; FedDyn with the same strength stays."""
    mu = 3 / (LR * STEPS)
    for beta in (0.0, 0.96):
        assert largest(fl.adabest(mu=mu, beta=beta, lr=LR)) > 1e12
    assert largest(fl.feddyn(alpha=mu, lr=LR)) < 10
    assert largest(fl.adabest(mu=0.02, beta=0.96, lr=LR)) < 10
