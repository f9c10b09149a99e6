"""I-43: on heterogeneous strongly convex quadratics SCAFFOLD finds the optimum, FedAvg does not.

Full batches, K = 5, eta = 0.05, equal weights.  A round is then affine in everything that is kept
from round to round, s -> A s + b: A and b are read off undrift's own rounds, one number at a time,
so that 4000 rounds cost no more than sixty; `test_a_round_is_affine` holds them against a trainer.
"""

from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import undrift as fl
from longhand.cases import above, below
from proofs.bridge import task_of
from undrift.core.algorithm import Server
from undrift.core.server import server_round
from undrift.core.tree import Tree, leaves, rebuild, replace, structure
from undrift.rules.observe import Watch
from undrift.verify.longhand.worlds import quadratic_world

DIM, CLIENTS, FAR = 4, 6, 4000
WORLD = quadratic_world(11, clients=CLIENTS, dim=DIM)
TRUTH = torch.tensor(WORLD.optimum([1 / CLIENTS] * CLIENTS))
ALGORITHMS = {
    "scaffold I": fl.scaffold(0.05, option="I"),
    "scaffold II": fl.scaffold(0.05),
    "scaffold_m": fl.scaffold_m(0.05),
    "feddyn": fl.feddyn(0.05, alpha=0.3),
    "fedadmm": fl.fedadmm(0.05, rho=0.3),
    "fedpd": fl.fedpd(0.05, rho=0.3),
    "fedvra": fl.fedvra(0.05, gamma=0.3, a=1.0, d=1.0),
    "vrlsgd": fl.vrlsgd(0.05),
    "feddc": fl.feddc(0.05, alpha=0.3),
    "fedavg": fl.fedavg(0.05),
    "fedprox": fl.fedprox(0.05, mu=0.1),
    **{f"adabest {b:g}": fl.adabest(0.05, mu=0.02, beta=b) for b in (0.0, 0.5, 0.9)},
}


def trainer_of(algorithm: fl.Algorithm, sampler=None) -> fl.Trainer:
    watched = replace(algorithm, rules=(Watch(by_size=False), *algorithm.rules))
    federation, work = fl.Federation.of(WORLD.data), fl.Work(steps=5, batch=None)
    return fl.Trainer(task_of(WORLD), federation, watched, work=work, sampler=sampler)


# ---- one round as a matrix -----------------------------------------------------------------------
class State(NamedTuple):
    """Everything that is kept from round to round."""

    server: Server
    clients: Tree

    @property
    def vector(self) -> Tensor:
        """The models and what is added to models; counters are left out, they do not move here."""
        return torch.cat([v.reshape(-1) for v in leaves(self) if is_vector(v)])

    def at(self, vector: Tensor) -> "State":
        """The same with other vectors."""
        pieces = iter(vector.split([v.numel() for v in leaves(self) if is_vector(v)]))
        made = [next(pieces).reshape(v.shape) if is_vector(v) else v for v in leaves(self)]
        return rebuild(structure(self), made)


def is_vector(value: Tensor) -> bool:
    return value.dim() > 0 and value.shape[-1] == DIM


def state_of(trainer: fl.Trainer) -> State:
    return State(trainer.server, trainer.store.gather(range(CLIENTS)))


def after_a_round(trainer: fl.Trainer, state: State) -> State:
    """Put a state in the place of the trainer's and run undrift's phases of a round on it."""
    store, cohort = trainer.store, trainer.roster.cohort(trainer.rounds_done)
    store.stage(list(range(CLIENTS)), state.clients)
    store.show(store.merged())
    found = trainer.engine.train(trainer.algorithm, state.server, cohort)
    store.show(store.merged())
    ids, algo = cohort.info.id, trainer.algorithm
    moved = server_round(algo, state.server, found.report, found.rows, ids, CLIENTS)
    return State(moved, store.gather(range(CLIENTS)))


@cache
def affine(name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Give A, b and the state after two rounds, from which on every round is the same map."""
    trainer = trainer_of(ALGORITHMS[name])
    trainer.run(2)
    start = state_of(trainer)
    s = start.vector
    here = after_a_round(trainer, start).vector
    columns = [
        after_a_round(trainer, start.at(s + one)).vector - here
        for one in torch.eye(len(s), dtype=s.dtype)
    ]
    matrix = torch.stack(columns, 1)
    return matrix, here - matrix @ s, s


def distance(name: str) -> float:
    """How far the mean of the clients' models is from the optimum after 4000 rounds."""
    matrix, b, s = affine(name)
    for _ in range(FAR - 2):
        s = matrix @ s + b
    trainer = trainer_of(ALGORITHMS[name])
    average = state_of(trainer).at(s).server.states[0].average
    return float((average - TRUTH).abs().max())


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_round_is_affine(name):
    matrix, b, s = affine(name)
    trainer = trainer_of(ALGORITHMS[name])
    trainer.run(12)
    for _ in range(10):
        s = matrix @ s + b
    below(f"I-43 {name}, as a map", float((state_of(trainer).vector - s).abs().max()), 1e-12)


# ---- where it leads ------------------------------------------------------------------------------
def test_the_optimum_has_no_pooled_gradient():
    gradients = [WORLD.gradient(TRUTH.numpy(), x, y) for x, y in WORLD.data]
    below("pooled gradient", np.abs(sum(gradients)).max(), 1e-12)
    above("local gradients", min(np.abs(g).max() for g in gradients), 0.1)


EXACT = ["scaffold I", "scaffold II", "scaffold_m", "feddyn", "fedadmm", "fedpd", "fedvra"]
EXACT += ["vrlsgd", "feddc"]


@pytest.mark.parametrize("name", EXACT)
def test_i43_duals_and_variates_find_the_optimum(name):
    below(f"I-43 {name}", distance(name), 1e-10)


@pytest.mark.parametrize("name", ["fedavg", "fedprox"])
def test_i43_fedavg_and_fedprox_stay_away_from_it(name):
    above(f"I-43 {name}", distance(name), 1e-3)


def test_i43_adabests_bias_falls_as_beta_grows():
    found = [distance(f"adabest {b:g}") for b in (0.0, 0.5, 0.9)]
    for b, value in zip((0.0, 0.5, 0.9), found, strict=True):
        above(f"I-43 AdaBest, beta {b:g}", value, 1e-5)
    below("I-43 AdaBest, beta .5 over beta 0", found[1] / found[0], 0.6)
    below("I-43 AdaBest, beta .9 over beta .5", found[2] / found[1], 0.3)


@pytest.mark.parametrize("option", [pytest.param("I", marks=pytest.mark.slow), "II"])
def test_scaffold_with_half_of_the_clients_reaches_the_optimum(option):
    trainer = trainer_of(fl.scaffold(0.05, option=option), fl.Uniform(count=3))
    trainer.run(110)
    found = float((trainer.server.w - TRUTH).abs().max())
    below(f"I-43 {option}, 3 of 6", found, 1e-8)
