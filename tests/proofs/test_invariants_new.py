"""I-14 to I-30: duals, variates, AdaBest, FedVRA, q-FFL and SlowMo."""

import dataclasses

import numpy as np
import pytest
import torch

import undrift as fl
from crossed import crossed
from longhand.cases import HEAVY, KINDS, LINEAR, SGD, SIZES, above, below
from proofs.bridge import gap, local_of, run, trainer_of
from proofs.common import ALL5, SOME5, equal, even, unequal, uniform
from undrift.core.tree import replace
from undrift.rules import FedDc, FedDyn, FedVra
from undrift.rules.duals import DriftState, VrlState, deviation
from undrift.rules.observe import LastModel
from undrift.verify.longhand.worlds import World, step_batches

SHARES = np.array(SIZES) / sum(SIZES)
N, M = len(SIZES), len(SOME5[0])


# ---- VRL-SGD -------------------------------------------------------------------------------------
@pytest.mark.parametrize("local", LINEAR)
def test_i14_vrl_sgd_is_scaffold_two(mlp, local):
    b = equal(mlp, ALL5)
    found = run(mlp, ALL5, b, fl.vrlsgd(local=local_of(local)))
    below("I-14", gap(found, run(mlp, ALL5, b, fl.scaffold(local=local_of(local)))), 1e-12)
    for r, (x, rows) in enumerate(zip(found.x, found.clients, strict=True), 1):
        states = [VrlState(*(torch.tensor(v) for v in row.values())) for row in rows]
        total = sum(deviation(state, torch.tensor(x), torch.tensor(r)) for state in states)
        below("I-14 sum of d_i", float(total.abs().max()), 1e-12)
    b = unequal(mlp, ALL5)
    found = run(mlp, ALL5, b, fl.vrlsgd(local=local_of(local)))
    above("I-14 unequal K", gap(found, run(mlp, ALL5, b, fl.scaffold(local=local_of(local)))), 1e-6)


# ---- AdaBest -------------------------------------------------------------------------------------
@pytest.mark.parametrize(("world", "local"), crossed(KINDS, [SGD, HEAVY]), indirect=["world"])
def test_i15_adabest_without_both_is_uniform_fedavg(world, local):
    b = unequal(world)
    found = run(world, SOME5, b, fl.adabest(mu=0.0, beta=0.0, local=local_of(local)))
    below("I-15", gap(found, run(world, SOME5, b, uniform(local))), 1e-12)
    other = run(world, SOME5, b, fl.adabest(mu=0.1, beta=0.5, local=local_of(local)))
    above("I-15 both", gap(found, other), 1e-4)


def test_i16_h_is_a_fading_sum_of_pseudo_gradients(mlp):
    beta = 0.7
    found = run(mlp, SOME5, unequal(mlp), fl.adabest(mu=0.1, beta=beta, local=local_of(SGD)))
    averages = [mlp.w0, *(s["0.AdaBest.average"] for s in found.server)]
    models = [mlp.w0, *found.x]
    pseudo = [x - a for x, a in zip(models[:-1], averages[1:], strict=True)]
    h = [a - x for a, x in zip(averages, models, strict=True)]
    for t in range(1, 6):
        moved = averages[t - 1] - averages[t]
        below("I-16 identity", np.abs(moved - (h[t - 1] + pseudo[t - 1])).max(), 1e-12)
        fading = sum(beta ** (t - s + 1) * pseudo[s - 1] for s in range(1, t + 1))
        below("I-16 sum", np.abs(h[t] - fading).max(), 1e-12)


def test_i17_adabest_with_beta_one_is_feddyn_but_for_the_pull(world):
    b = unequal(world, ALL5)
    bare = run(world, ALL5, b, fl.adabest(mu=0.0, beta=1.0, local=local_of(SGD)))
    below("I-17", gap(bare, run(world, ALL5, b, fl.feddyn(alpha=0.0, local=local_of(SGD)))), 1e-12)
    ada = fl.adabest(mu=0.3, beta=1.0, local=local_of(SGD))
    dyn = run(world, ALL5, b, fl.feddyn(alpha=0.3, local=local_of(SGD)))
    above("I-17 without the pull", gap(run(world, ALL5, b, ada), dyn), 1e-4)
    pulled = replace(ada, rules=(*ada.rules, fl.Prox(0.3)))
    below("I-17 with it", gap(run(world, ALL5, b, pulled), dyn), 1e-12)


def test_i18_an_old_estimate_counts_less(mlp):
    rounds = [[0, 1], [1], [1], [0, 1], [1]]
    still = fl.Milestones(starts=(1,), factors=(0.0,))  # from the second round on nothing moves
    algo = fl.adabest(local=fl.Sgd(lr=0.1, schedule=still))
    found = run(mlp, rounds, equal(mlp, rounds), algo)
    first = found.clients[0][0]["0.AdaBest.h"]
    assert np.abs(first).max() > 1e-3
    assert np.array_equal(found.clients[2][0]["0.AdaBest.h"], first)
    below("I-18", np.abs(found.clients[3][0]["0.AdaBest.h"] - first / 3).max(), 0.0)
    assert found.clients[3][0]["0.AdaBest.last"] == 4
    assert np.array_equal(found.clients[3][1]["0.AdaBest.h"], found.clients[0][1]["0.AdaBest.h"])


# ---- FedDyn, FedADMM, FedPD, FedDC ---------------------------------------------------------------
@pytest.mark.parametrize("by_size", [False, True])
@pytest.mark.parametrize("local", LINEAR)
def test_i19_h_is_the_mean_of_all_h_i(mlp, local, by_size):
    algo = fl.feddyn(alpha=0.2, by_size=by_size, local=local_of(local))
    found = run(mlp, SOME5, unequal(mlp), algo)
    for server, clients in zip(found.server, found.clients, strict=True):
        mean = sum(state["0.FedDyn"] for state in clients) / N
        below("I-19", np.abs(0.2 * server["0.FedDyn"] - mean).max(), 1e-12)


def test_i19_the_mean_is_over_those_who_are_enrolled(mlp):
    rounds = [[0, 1, 2], [0, 1, 2, 3, 4, 5], [3, 4, 5]]
    algo = fl.feddyn(0.1, alpha=0.2)
    trainer = trainer_of(mlp, rounds, equal(mlp, rounds), algo, enrolled=[0, 1, 2])

    def error() -> float:
        rows = [trainer.client_state(i)["0.FedDyn"] for i in trainer.enrolled]
        wanted = sum(rows) / len(rows) / 0.2
        return float((trainer.server_state()["0.FedDyn"] - wanted).abs().max())

    trainer.round()
    trainer.enroll([3, 4, 5])
    below("I-19 some joined", error(), 1e-12)
    trainer.round()
    trainer.leave([0, 1, 2])
    below("I-19 some left", error(), 1e-12)


def test_i27_four_names_for_one_algorithm(world):
    b, rho, local = unequal(world, ALL5), 0.3, local_of(SGD)
    dyn = run(world, ALL5, b, fl.feddyn(alpha=rho, local=local))
    vra = fl.fedvra(gamma=rho, a=1.0, d=1.0, by_size=False, local=local)
    for other in (fl.fedadmm(rho=rho, local=local), fl.fedpd(rho=rho, local=local), vra):
        below(f"I-27 {other.rules}", gap(run(world, ALL5, b, other), dyn), 1e-12)
    b = unequal(world)
    dyn = run(world, SOME5, b, fl.feddyn(alpha=rho, local=local))
    admm = run(world, SOME5, b, fl.fedadmm(rho=rho, local=local))
    above("I-27 partial participation", gap(admm, dyn), 1e-4)


@fl.record
class NoVariates(FedDc):
    """FedDC whose control variates stay zero."""

    def finish(self, delta, view):
        zero = torch.zeros_like(delta)
        return delta, DriftState(view.mine.h - delta, zero), zero


@fl.record
class NoDrift(FedDc):
    """FedDC whose drifts stay zero."""

    def finish(self, delta, view):
        delta, state, upload = FedDc.finish(self, delta, view)
        return delta, state._replace(h=torch.zeros_like(delta)), upload

    def server(self, update, state, view):
        _, moved = FedDc.server(self, update, state, view)
        return update, moved._replace(h=torch.zeros_like(update))


@pytest.mark.parametrize("rounds", [SOME5, ALL5])
def test_i28_the_halves_of_feddc(mlp, rounds):
    local, b = local_of(SGD), unequal(mlp, rounds)
    found = run(mlp, rounds, b, fl.Algorithm((NoVariates(0.3),), local, fl.Mean(False)))
    dyn = fl.feddyn(alpha=0.3, by_size=True, local=local)
    below("I-28 FedDyn", gap(found, run(mlp, rounds, b, dyn)), 1e-12)
    above("I-28", gap(found, run(mlp, rounds, b, fl.feddc(alpha=0.3, local=local))), 1e-4)
    same = even(mlp)
    for mine in LINEAR:
        b, local = unequal(same, rounds), local_of(mine)
        bare = fl.Algorithm((NoDrift(0.0),), local, fl.Mean(False))
        scaffold = run(same, rounds, b, fl.scaffold(local=local))
        below("I-28 SCAFFOLD", gap(run(same, rounds, b, bare), scaffold), 1e-12)


# ---- FedVRA --------------------------------------------------------------------------------------
def test_i20_fedvra_without_gamma_is_fedavg(world):
    b, local = unequal(world), local_of(HEAVY)
    plain = run(world, SOME5, b, fl.fedavg(local=local))
    vra = fl.fedvra(gamma=0.0, a=0.0, d="cohort", local=local)
    below("I-20", gap(run(world, SOME5, b, vra), plain), 1e-12)
    scaled = fl.fedvra(gamma=0.0, a=0.0, d=N / M, local=local)
    above("I-20 d = N/m", gap(run(world, SOME5, b, scaled), plain), 1e-3)
    same, b = even(world), unequal(even(world))
    plain = run(same, SOME5, b, fl.fedavg(local=local))
    below("I-20 d = N/m, equal n_i", gap(run(same, SOME5, b, scaled), plain), 1e-12)


def test_i21_fedvra_without_duals_is_fedprox(world):
    b, local = unequal(world), local_of(HEAVY)
    vra = fl.fedvra(gamma=0.4, a=0.0, d="cohort", local=local)
    prox = fl.fedprox(mu=0.4, local=local)
    below("I-21", gap(run(world, SOME5, b, vra), run(world, SOME5, b, prox)), 1e-12)


@pytest.mark.parametrize("local", LINEAR)
def test_i22_fedvra_before_nova_is_fednova(mlp, local):
    b = unequal(mlp)
    vra = fl.Algorithm((FedVra(gamma=0.0, a=0.0, d=1.0),), local_of(local), fl.Nova())
    nova = fl.fednova(local=local_of(local))
    below("I-22", gap(run(mlp, SOME5, b, vra), run(mlp, SOME5, b, nova)), 1e-12)


def test_i22_by_its_own_coefficients(mlp):
    """d_i = Q_eff / (Q_i sum_S omega), written out for every round."""
    b, rows = unequal(mlp), []
    for r, ids in enumerate(SOME5):
        steps, weight = {i: len(b[r, i]) for i in ids}, sum(SHARES[i] for i in ids)
        mean = sum(SHARES[i] / weight * steps[i] for i in ids)
        rows.append([mean / steps[i] / weight if i in steps else 1.0 for i in range(N)])
    vra = fl.fedvra(gamma=0.0, a=0.0, d=rows, local=local_of(SGD))
    nova = fl.fednova(local=local_of(SGD))
    below("I-22 d_i", gap(run(mlp, SOME5, b, vra), run(mlp, SOME5, b, nova)), 1e-12)


@pytest.mark.parametrize(("world", "rounds"), crossed(KINDS, [SOME5, ALL5]), indirect=["world"])
def test_i23_fedvra_with_full_duals_is_feddyn(world, rounds):
    b, local = unequal(world, rounds), local_of(HEAVY)
    settings = {"gamma": 0.3, "a": 1.0, "d": N / len(rounds[0]), "local": local}
    dyn = run(world, rounds, b, fl.feddyn(alpha=0.3, local=local))
    vra = run(world, rounds, b, fl.fedvra(by_size=False, **settings))
    below("I-23", gap(vra, dyn), 1e-12)
    above("I-23 by size", gap(run(world, rounds, b, fl.fedvra(**settings)), dyn), 1e-3)


@pytest.mark.parametrize("gamma", [0.05, 0.5, 5.0])
def test_i24_local_steps_reduce_the_clients_variance(mlp, gamma):
    """x = average - beta lambda; both forms of the local step, and of the next lambda_i."""
    a, eta = 0.8, 0.1
    algo = fl.fedvra(eta, gamma=gamma, a=a, d=N / M, by_size=False)
    spied = replace(algo, rules=(LastModel(), *algo.rules))
    b = unequal(mlp)
    found = run(mlp, SOME5, b, spied)
    keep = 1 - gamma * eta
    for r in range(1, 5):
        x, dual = found.x[r - 1], found.server[r - 1]["1.FedVra"]
        average = x + dual / gamma
        for i in SOME5[r]:
            mine, y, grads = found.clients[r - 1][i]["1.FedVra"], x.copy(), []
            for batch in b[r, i]:
                grads.append(mlp.gradient(y, *(part[batch] for part in mlp.data[i])))
                pure = grads[-1] + gamma * dual / gamma - mine
                y = keep * (y - eta / keep * pure) + gamma * eta * average
            below("I-24 step", np.abs(y - found.clients[r][i]["0.LastModel"]).max(), 1e-12)
            weights = np.array([keep ** (len(grads) - 1 - k) for k in range(len(grads))])
            mean = weights @ np.array(grads) / weights.sum()
            part = a * gamma * eta * weights.sum()
            wanted = part * mean + (1 - part) * mine
            below("I-24 dual", np.abs(found.clients[r][i]["1.FedVra"] - wanted).max(), 1e-12)


def mean_gradient(world: World, i: int, batches, dual: float, eta: float) -> np.ndarray:
    """Mean of client i's gradients on its way through a first round pulled by `dual`."""
    y, grads = world.w0.copy(), []
    for batch in batches:
        grads.append(world.gradient(y, *(part[batch] for part in world.data[i])))
        y = y - eta * (grads[-1] + dual * (y - world.w0))
    return np.mean(grads, axis=0)


def test_i25_duals_of_a_small_gamma_are_mean_gradients(mlp):
    b, eta, steps = equal(mlp, ALL5[:1]), 0.1, 4
    scaffold = run(mlp, ALL5[:1], b, fl.scaffold(eta)).clients[0]
    own, variates = [], []
    for gamma in (0.5, 0.25, 0.1, 0.01, 0.001):
        algo = fl.fedvra(eta, gamma=gamma, a=1 / (gamma * eta * steps), d=1.0)
        duals = [state["0.FedVra"] for state in run(mlp, ALL5[:1], b, algo).clients[0]]
        means = [mean_gradient(mlp, i, b[0, i], gamma, eta) for i in range(N)]
        own.append(max(np.abs(d - g).max() for d, g in zip(duals, means, strict=True)))
        pairs = zip(duals, scaffold, strict=True)
        variates.append(max(np.abs(d - c["0.Scaffold"]).max() for d, c in pairs))
    for name, found in (("mean gradient", own), ("SCAFFOLD's c_i", variates)):
        below(f"I-25 {name}, halves with gamma", abs(found[0] / found[1] - 2), 0.1)
        below(f"I-25 {name}, linear", abs(found[3] / found[4] - 10), 0.5)
        below(f"I-25 {name}, gamma .001", found[4], 1e-3)


@pytest.mark.parametrize("by_size", [True, False])
@pytest.mark.parametrize("local", LINEAR)
def test_i26_lambda_is_the_weighted_sum_of_all_lambda_i(mlp, local, by_size):
    algo = fl.fedvra(gamma=0.3, a=0.7, d=2.0, by_size=by_size, local=local_of(local))
    found = run(mlp, SOME5, unequal(mlp), algo)
    weights = SHARES if by_size else np.full(N, 1 / N)
    for server, clients in zip(found.server, found.clients, strict=True):
        total = sum(w * state["0.FedVra"] for w, state in zip(weights, clients, strict=True))
        below("I-26", np.abs(server["0.FedVra"] - total).max(), 1e-12)


def by_mean_size(client):
    return 0.3 * client.mean_size / client.size


def test_a_gamma_for_every_client(mlp):
    """One number for all is the same as the same number for each; beta follows the mean."""
    b, rounds = unequal(mlp), SOME5
    one = run(mlp, rounds, b, fl.fedvra(0.1, gamma=0.3, a=0.5, d=2.0))
    each = run(mlp, rounds, b, fl.fedvra(0.1, gamma=[0.3] * N, a=[0.5] * N, d=[2.0] * N))
    below("FedVRA gamma for each", gap(one, each), 1e-12)
    own = [0.3 * np.mean(SIZES) / n for n in SIZES]
    listed = run(mlp, rounds, b, fl.fedvra(0.1, gamma=own, a=0.5, d=2.0))
    asked = run(mlp, rounds, b, fl.fedvra(0.1, gamma=by_mean_size, a=0.5, d=2.0))
    below("FedVRA gamma by a function", gap(listed, asked), 1e-12)
    above("FedVRA gamma by client", gap(listed, one), 1e-4)
    beta = 1 / (SHARES @ np.array(own))
    ids, batches = rounds[0], b
    ends = []
    for i in ids:
        y = mlp.w0.copy()
        for batch in batches[0, i]:
            g = mlp.gradient(y, *(part[batch] for part in mlp.data[i]))
            y = y - 0.1 * (g + own[i] * (y - mlp.w0))
        ends.append(y - mlp.w0)
    moved = sum(SHARES[i] * own[i] * (2.0 + 0.5) * e for i, e in zip(ids, ends, strict=True))
    below("FedVRA by hand", np.abs(listed.x[0] - (mlp.w0 + beta * moved)).max(), 1e-12)


def test_the_defaults_of_remark_1(mlp):
    """d_i = 1 / Prob(i in S), a_i = min(d_i, 1 / (eta gamma Q~_i) - d_i)."""
    rounds, chances = SOME5[:1], [0.5, 0.4, 0.6, 0.5, 0.7, 0.8]
    b, eta, gamma = unequal(mlp, rounds), 0.1, 0.4
    sampler = fl.Explicit(rounds, chances)
    algo = fl.fedvra(eta, gamma=gamma)
    trainer = trainer_of(mlp, rounds, b, replace(algo, rules=(LastModel(), *algo.rules)))
    trainer.roster.sampler = sampler
    trainer.round()
    w0 = torch.tensor(mlp.w0)
    for i in rounds[0]:
        length = (1 - (1 - gamma * eta) ** len(b[0, i])) / (gamma * eta)
        a = min(1 / chances[i], 1 / (eta * gamma * length) - 1 / chances[i])
        state = trainer.client_state(i)
        wanted = a * gamma * (w0 - state["0.LastModel"])
        below("remark 1", float((state["1.FedVra"] - wanted).abs().max()), 1e-12)


# ---- q-FFL, SlowMo -------------------------------------------------------------------------------
@pytest.mark.parametrize(("world", "lipschitz"), crossed(KINDS, [None, 3.0]), indirect=["world"])
def test_i29_q_fedavg_without_q_is_uniform_fedavg(world, lipschitz):
    b, local = unequal(world), local_of(SGD)
    found = run(world, SOME5, b, fl.qfedavg(q=0.0, lipschitz=lipschitz, local=local))
    below("I-29", gap(found, run(world, SOME5, b, uniform(SGD))), 1e-12)
    other = run(world, SOME5, b, fl.qfedavg(q=2.0, lipschitz=lipschitz, local=local))
    above("I-29 q 2", gap(found, other), 1e-4)


def test_q_fedsgd_is_q_fedavg_with_one_full_step(world):
    b, local = step_batches(world, SOME5, 1), local_of(SGD)
    found = run(world, SOME5, b, fl.qfedsgd(q=1.5, local=local))
    below("q-FedSGD", gap(found, run(world, SOME5, b, fl.qfedavg(q=1.5, local=local))), 0.0)


@pytest.mark.parametrize(("world", "local"), crossed(KINDS, [SGD, HEAVY]), indirect=["world"])
def test_i30_slowmo(world, local):
    b, mine = unequal(world), local_of(local)
    bare = run(world, SOME5, b, fl.slowmo(beta=0.0, local=mine))
    below("I-30 beta 0", gap(bare, run(world, SOME5, b, uniform(local))), 1e-12)
    steady = replace(mine, schedule=fl.rules.Schedule())
    momentum = fl.Algorithm((), steady, fl.Mean(False), fl.ServerMomentum(0.8, 0.6))
    slow = run(world, SOME5, b, fl.slowmo(beta=0.6, server_lr=0.8, local=steady))
    below("I-30 FedAvgM", gap(slow, run(world, SOME5, b, momentum)), 1e-12)
    falling = replace(mine, schedule=fl.Exponential(0.7))
    momentum = dataclasses.replace(momentum, local=falling)
    slow = run(world, SOME5, b, fl.slowmo(beta=0.6, server_lr=0.8, local=falling))
    above("I-30 falling rate", gap(slow, run(world, SOME5, b, momentum)), 1e-4)


def test_feddyn_by_size_pulls_small_clients_more(mlp):
    b, local = unequal(mlp), local_of(SGD)
    plain, sized = (
        run(mlp, SOME5, b, fl.Algorithm((FedDyn(0.3, by_size),), local, fl.Mean(False)))
        for by_size in (False, True)
    )
    above("FedDyn by size", gap(plain, sized), 1e-4)
    same, b = even(mlp), unequal(even(mlp))
    plain, sized = (
        run(same, SOME5, b, fl.Algorithm((FedDyn(0.3, by_size),), local, fl.Mean(False)))
        for by_size in (False, True)
    )
    below("FedDyn by size, equal sizes", gap(plain, sized), 1e-12)
