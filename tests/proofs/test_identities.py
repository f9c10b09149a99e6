"""Invariants of undrift itself: what must be equal, and what must differ.

Here I-1 to I-13, I-42 and I-48; the others are in test_invariants_*.py and test_quadratics.py.
docs/invariants.md lists them all.
"""

import dataclasses
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import undrift as fl
from crossed import crossed
from longhand.cases import (
    ADAMW,
    CLIPPED,
    HEAVY,
    KINDS,
    LINEAR,
    RMSPROP,
    SGD,
    SIZES,
    WORLDS,
    above,
    below,
)
from proofs.bridge import gap, local_of, run, task_of, trainer_of
from proofs.common import ALL5, SOME5, PathSpy, equal, pooled, unequal
from undrift.rules import compat
from undrift.verify.longhand.worlds import (
    World,
    quadratic_world,
    sample_participants,
    step_batches,
)

# ---- FedProx, FedNova ----------------------------------------------------------------------------


@pytest.mark.parametrize("local", [SGD, HEAVY, RMSPROP, CLIPPED])
def test_i1_prox_without_mu_is_fedavg(mlp, local):
    b, mine = unequal(mlp), local_of(local)
    # the general path for both: the in-place one of plain SGD rounds differently
    plain = run(mlp, SOME5, b, fl.fedavg(local=mine), in_place=False)
    below("I-1", gap(run(mlp, SOME5, b, fl.fedprox(mu=0.0, local=mine)), plain), 0.0)
    above("I-1 mu .5", gap(run(mlp, SOME5, b, fl.fedprox(mu=0.5, local=mine)), plain), 1e-4)


@pytest.mark.parametrize(("kind", "local"), list(zip(WORLDS, LINEAR, strict=False)))
def test_i2_fednova_is_fedavg_for_equal_steps_only(kind, local):
    world = WORLDS[kind]()
    nova, plain = fl.fednova(local=local_of(local)), fl.fedavg(local=local_of(local))
    b = equal(world)
    below("I-2", gap(run(world, SOME5, b, nova), run(world, SOME5, b, plain)), 1e-12)
    b = unequal(world)
    above("I-2 unequal", gap(run(world, SOME5, b, nova), run(world, SOME5, b, plain)), 1e-3)


def paths(local: fl.Sgd, *rules: fl.Rule, rounds: int = 3) -> list[list[float]]:
    """||a_i||_1 by round and client, client i taking i + 1 steps."""
    world = quadratic_world(1, clients=9, dim=2)
    everyone = [list(range(9))] * rounds
    b = step_batches(world, everyone, {i: i + 1 for i in range(9)})
    found = run(world, everyone, b, fl.Algorithm((*rules, PathSpy()), local))
    name = f"{len(rules)}.PathSpy.path"
    return [[float(state[name]) for state in states] for states in found.clients]


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9, 0.99])
def test_i3_heavy_ball_path_is_the_closed_form(rho):
    found = paths(fl.HeavyBall(lr=0.05, momentum=rho, schedule=fl.Exponential(0.9)))
    for k in range(1, 10):
        closed = (k - rho * (1 - rho**k) / (1 - rho)) / (1 - rho)
        for of_round in found:
            # the closed form itself cancels as rho goes to 1
            below("I-3", abs(of_round[k - 1] / closed - 1), 1e-12)
    if rho == 0.9:
        below("I-3 K = 7", abs(found[0][6] / 23.046721 - 1), 1e-12)


def test_i3_paths_of_sgd_prox_and_falling_rates():
    for k, found in enumerate(paths(fl.Sgd(lr=0.1, weight_decay=0.1), rounds=1)[0], 1):
        below("I-3 sgd", abs(found / k - 1), 1e-12)
    for k, found in enumerate(paths(fl.Sgd(lr=0.1), fl.Prox(mu=0.4), rounds=1)[0], 1):
        below("I-3 prox", abs(found / ((1 - 0.96**k) / 0.04) - 1), 1e-12)
    falling = fl.Sgd(lr=0.1, schedule=fl.InverseTime(0.5, steps=9))
    for r, of_round in enumerate(paths(falling)):
        rates = [1 / (1 + 0.5 * (9 * r + k)) for k in range(9)]
        for k, found in enumerate(of_round, 1):
            below("I-3 rates", abs(found / (sum(rates[:k]) / rates[0]) - 1), 1e-12)


@pytest.mark.parametrize("rule", [fl.Scaffold(), fl.ScaffoldGradient(), fl.ScaffoldFresh()])
def test_i3_corrections_do_not_change_the_path(rule):
    local = fl.HeavyBall(lr=0.05, momentum=0.9)
    for plain, corrected in zip(paths(local), paths(local, rule), strict=True):
        assert plain == corrected


@pytest.mark.parametrize("local", LINEAR)
def test_i4_fednova_with_prox_is_fedprox_for_equal_steps(mlp, local):
    b, mine = equal(mlp), local_of(local)
    prox = run(mlp, SOME5, b, fl.fedprox(mu=0.4, local=mine))
    below("I-4", gap(run(mlp, SOME5, b, fl.fednova(mu=0.4, local=mine)), prox), 1e-12)
    b = unequal(mlp)
    prox = run(mlp, SOME5, b, fl.fedprox(mu=0.4, local=mine))
    above("I-4 unequal", gap(run(mlp, SOME5, b, fl.fednova(mu=0.4, local=mine)), prox), 1e-3)


def fixed_point(world, batches, algorithm) -> np.ndarray:
    """Where a round leads to itself: on quadratics a round is affine, x -> M x + b."""
    dim = len(world.w0)
    starts = [np.zeros(dim), *np.eye(dim)]
    everyone = [list(range(len(world.data)))]
    worlds = [dataclasses.replace(world, w0=start) for start in starts]
    b, *columns = [run(w, everyone, batches, algorithm).x[0] for w in worlds]
    return np.linalg.solve(np.eye(dim) - np.stack([c - b for c in columns], axis=1), b)


def test_i5_fednova_is_consistent_and_fedavg_is_not():
    steps, p = {0: 2, 1: 4, 2: 6, 3: 9}, [0.3, 0.1, 0.2, 0.4]
    world = quadratic_world(7, clients=4, dim=3, sizes=[3, 1, 2, 4])
    truth, skewed = world.optimum(p), world.optimum([p[i] * steps[i] for i in range(4)])
    b = step_batches(world, [list(range(4))], steps)
    nova, plain = [], []
    for eta in (2e-3, 1e-3):
        nova.append(np.abs(fixed_point(world, b, fl.fednova(eta)) - truth).max())
        x = fixed_point(world, b, fl.fedavg(eta))
        plain.append(np.abs(x - skewed).max())
        above("I-5 FedAvg to the true optimum", np.abs(x - truth).max(), 5e-2)
    below("I-5 FedNova at eta 1e-3", nova[1], 5e-3)
    below("I-5 FedAvg to the skewed optimum at eta 1e-3", plain[1], 5e-3)
    for name, found in (("FedNova", nova), ("FedAvg to the skewed optimum", plain)):
        below(f"I-5 {name}: half the rate, half the distance", abs(found[0] / found[1] - 2), 0.05)


# ---- FedAvg --------------------------------------------------------------------------------------


def test_i6_one_full_step_is_centralised_gradient_descent(world):
    b = step_batches(world, ALL5, steps=1)
    found = run(world, ALL5, b, fl.fedavg(local=local_of(SGD)))
    w = world.w0.copy()
    for r, x in enumerate(found.x):
        eta = SGD.lr * SGD.lr_decay**r
        w = w - eta * (world.gradient(w, *pooled(world)) + SGD.weight_decay * w)
        below("I-6", np.abs(x - w).max(), 1e-12)
    by_count = run(world, ALL5, b, fl.fedavg(local=local_of(SGD), by_size=False))
    above("I-6 uniform", gap(by_count, found), 1e-4)


def test_i7_one_client_is_plain_torch_sgd(mlp):
    alone = World(mlp.data[:1], mlp.gradient, mlp.loss, mlp.w0)
    rounds = [[0]] * 5
    b = unequal(alone, rounds)
    found = run(alone, rounds, b, fl.fedavg(local=fl.Sgd(lr=0.1, weight_decay=1e-3)))
    module = task_of(alone).original
    optim = torch.optim.SGD(module.parameters(), lr=0.1, weight_decay=1e-3)
    x, y = (torch.tensor(part) for part in alone.data[0])
    for r in range(5):
        for batch in b[r, 0]:
            optim.zero_grad()
            F.cross_entropy(module(x[batch]), y[batch]).backward()
            optim.step()
        w = torch.nn.utils.parameters_to_vector(module.parameters()).detach().numpy()
        below("I-7", np.abs(found.x[r] - w).max(), 1e-12)


def test_i42_splitting_a_client_changes_nothing_for_one_full_step(world):
    x, y = world.data[0]
    double = (np.concatenate([x, x]), np.concatenate([y, y]))
    whole = World([double, *world.data[1:]], world.gradient, world.loss, world.w0)
    halves = World([(x, y), *world.data[1:], (x, y)], world.gradient, world.loss, world.w0)
    apart = [list(range(7))] * 5
    one = run(whole, ALL5, step_batches(whole, ALL5, 1), fl.fedavg())
    two = run(halves, apart, step_batches(halves, apart, 1), fl.fedavg())
    below("I-42", gap(one, two), 1e-12)
    one = run(whole, ALL5, step_batches(whole, ALL5, 1), fl.fedavg(by_size=False))
    two = run(halves, apart, step_batches(halves, apart, 1), fl.fedavg(by_size=False))
    above("I-42 uniform", gap(one, two), 1e-4)


def test_i48_full_steps_never_raise_the_pooled_loss(world):
    b = step_batches(world, ALL5, steps=1)
    models = [world.w0, *run(world, ALL5, b, fl.fedavg(0.05)).x]
    losses = [world.loss(w, *pooled(world)) for w in models]
    below("I-48", max(later - earlier for earlier, later in pairwise(losses)), 0.0)
    assert losses[-1] < losses[0]


# ---- SCAFFOLD ------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["I", "II"])
@pytest.mark.parametrize("local", LINEAR)
def test_i8_c_is_the_population_mean_of_the_c_i(mlp, option, local):
    algo = fl.scaffold(option=option, server_lr=0.8, local=local_of(local))
    found = run(mlp, SOME5, unequal(mlp), algo)
    (name,) = found.clients[0][0]
    for server, clients in zip(found.server, found.clients, strict=True):
        mean = sum(state[name] for state in clients) / len(SIZES)
        below("I-8", np.abs(server[name] - mean).max(), 1e-12)


@pytest.mark.parametrize("build", [fl.scaffold, partial(fl.scaffold, option="I"), fl.scaffold_m])
def test_i8_the_mean_is_over_those_who_are_enrolled(mlp, build):
    rounds = [[0, 1, 2], [0, 1, 2, 3, 4, 5], [3, 4, 5]]
    trainer = trainer_of(mlp, rounds, equal(mlp, rounds), build(0.1), enrolled=[0, 1, 2])
    (name,) = trainer.server_state()

    def error() -> float:
        rows = [trainer.client_state(i)[name] for i in trainer.enrolled]
        return float((trainer.server_state()[name] - sum(rows) / len(rows)).abs().max())

    trainer.round()
    below("I-8 at first", error(), 1e-12)
    trainer.enroll([3, 4, 5])
    below("I-8 some joined", error(), 1e-12)
    trainer.round()
    below("I-8 all trained", error(), 1e-12)
    trainer.leave([0, 1, 2])
    below("I-8 some left", error(), 1e-12)


@fl.record
class Shifted(fl.Scaffold):
    """SCAFFOLD whose variates start at a common vector."""

    def init_client(self, w, sizes):
        return torch.zeros_like(w) + 2.5

    def init_server(self, w, sizes):
        return torch.zeros_like(w) + 2.5


@pytest.mark.parametrize(("world", "rounds"), crossed(KINDS, [ALL5, SOME5]), indirect=["world"])
def test_i9_a_common_offset_cancels_under_full_participation_only(world, rounds):
    b, algo = unequal(world, rounds), fl.scaffold(local=local_of(SGD))
    shifted = dataclasses.replace(algo, rules=(Shifted(),))
    found = gap(run(world, rounds, b, algo), run(world, rounds, b, shifted))
    (below if rounds is ALL5 else above)("I-9", found, 1e-12 if rounds is ALL5 else 1e-2)


@pytest.mark.parametrize(("world", "option"), crossed(KINDS, ["I", "II"]), indirect=["world"])
def test_i10_one_step_with_everybody_is_uniform_fedavg(world, option):
    b = step_batches(world, ALL5, steps=1, batch_size=4)
    plain = run(world, ALL5, b, fl.fedavg(local=local_of(SGD), by_size=False))
    found = run(world, ALL5, b, fl.scaffold(option=option, local=local_of(SGD)))
    below("I-10", gap(found, plain), 1e-12)
    b = step_batches(world, SOME5, steps=1, batch_size=4)
    plain = run(world, SOME5, b, fl.fedavg(local=local_of(SGD), by_size=False))
    found = run(world, SOME5, b, fl.scaffold(option=option, local=local_of(SGD)))
    above("I-10 partial participation", gap(found, plain), 1e-4)


@pytest.mark.parametrize("local", LINEAR)
def test_i11_options_agree_for_one_full_step_only(mlp, local):
    one, two = (fl.scaffold(option=o, local=local_of(local)) for o in ("I", "II"))
    b = step_batches(mlp, SOME5, steps=1)
    below("I-11", gap(run(mlp, SOME5, b, one), run(mlp, SOME5, b, two)), 1e-12)
    b = step_batches(mlp, SOME5, steps=2)
    above("I-11 two steps", gap(run(mlp, SOME5, b, one), run(mlp, SOME5, b, two)), 1e-6)


@pytest.mark.parametrize(
    ("local", "option"), [(SGD, "I"), (SGD, "II"), (HEAVY, "II"), (RMSPROP, "I"), (ADAMW, "I")]
)
def test_i12_first_round_is_uniform_fedavg(mlp, local, option):
    b = unequal(mlp)
    found = run(mlp, SOME5, b, fl.scaffold(option=option, local=local_of(local)))
    algo = fl.fedavg(local=local_of(local), by_size=False)
    plain = run(mlp, SOME5, b, algo, in_place=False)
    below("I-12", np.abs(found.x[0] - plain.x[0]).max(), 0.0)
    above("I-12 later", gap(found, plain), 1e-4)


@pytest.mark.parametrize(("per_round", "local"), list(zip([1, 3, 6], LINEAR, strict=True)))
def test_i13_scaffold_m_is_scaffold_two(mlp, per_round, local):
    rounds = sample_participants(9, 6, per_round, 5)
    b = equal(mlp, rounds)
    original = run(mlp, rounds, b, fl.scaffold(local=local_of(local)))
    right = fl.scaffold_m(local=local_of(local))
    printed = dataclasses.replace(right, rules=(compat.ScaffoldMPrinted(),))
    below("I-13", gap(run(mlp, rounds, b, right), original), 1e-12)
    found = gap(run(mlp, rounds, b, printed), original)
    if per_round == 1:
        below("I-13 printed, m = 1", found, 1e-12)
    else:
        above(f"I-13 printed, m = {per_round}", found, 1e-4)
