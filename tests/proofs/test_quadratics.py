"""I-43: on heterogeneous strongly convex quadratics SCAFFOLD finds the optimum, FedAvg does not."""

import numpy as np
import pytest
import torch

import undrift as fl
from longhand.cases import above, below
from longhand.worlds import quadratic_world
from proofs.bridge import task_of

WORLD = quadratic_world(11, clients=6, dim=4)
TRUTH = torch.tensor(WORLD.optimum([1 / 6] * 6))


def trained(algorithm: fl.Algorithm, rounds: int, sampler=None) -> float:
    """Distance to the true optimum after some rounds of 5 full-batch steps."""
    trainer = fl.Trainer(
        task_of(WORLD),
        fl.Federation.of(WORLD.data),
        algorithm,
        work=fl.Work(steps=5, batch=None),
        sampler=sampler,
    )
    trainer.run(rounds)
    return float((trainer.server.w - TRUTH).abs().max())


def test_the_optimum_has_no_pooled_gradient():
    gradients = [WORLD.gradient(TRUTH.numpy(), x, y) for x, y in WORLD.data]
    below("pooled gradient", np.abs(sum(gradients)).max(), 1e-12)
    above("local gradients", min(np.abs(g).max() for g in gradients), 0.1)


@pytest.mark.parametrize("option", ["I", "II"])
def test_scaffold_with_everybody_reaches_the_optimum(option):
    below(f"I-43 {option}", trained(fl.scaffold(0.05, option=option), 90), 1e-10)


@pytest.mark.parametrize("option", ["I", "II"])
def test_scaffold_with_half_of_the_clients_reaches_the_optimum(option):
    found = trained(fl.scaffold(0.05, option=option), 110, fl.Uniform(count=3))
    below(f"I-43 {option}, 3 of 6", found, 1e-8)


def test_scaffold_m_reaches_the_optimum_too():
    below("I-43 /m", trained(fl.scaffold_m(0.05), 90), 1e-10)


@pytest.mark.parametrize("algorithm", [fl.fedavg(0.05), fl.fedprox(0.05, mu=0.1)])
def test_fedavg_and_fedprox_stay_away_from_it(algorithm):
    above("I-43 biased", trained(algorithm, 60), 1e-3)
