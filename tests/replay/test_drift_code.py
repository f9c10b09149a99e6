"""AdaBest, FedVRA and FedVRA-U as papers and other people write them, replayed to 1e-10."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import undrift as fl
from replay.world import (
    CLIP,
    CLIPPED,
    DATA,
    FALL,
    HEAVY,
    LR,
    SGD,
    SIZES,
    SOME,
    N,
    Told,
    add_to_grads,
    batches,
    check,
    mean_of,
    model_at,
    net,
    torch_sgd,
    train,
    vec,
)
from undrift.errors import ConfigError
from undrift.replay import replay
from undrift.rules import compat
from undrift.rules.compat import means_in_turn

ZERO = torch.zeros_like(vec(net()))


# ---- AdaBest -------------------------------------------------------------------------------------
def adabest(kind: str, mu: float, beta: float, server_lr: float = 1.0) -> list[Told]:
    """kind: balanced | frozen (nbar as of the round's start) | in turn | printed."""
    order, cloud, told = batches(SOME), vec(net()), []
    average, last_models = cloud.clone(), {i: cloud.clone() for i in range(N)}
    h, last, counted = dict.fromkeys(range(N), ZERO), dict.fromkeys(range(N), -1), []
    for t, ids in enumerate(SOME):
        models, nbar = {}, sum(counted) / len(counted) if counted else 0.0
        for i in ids:
            if kind == "in turn":
                nbar = sum(counted) / len(counted) if counted else 0.0
            adaptive = mu if kind == "balanced" else mu / SIZES[i] * nbar
            model = model_at(cloud)

            def change(m: nn.Module, i: int = i, a: float = adaptive) -> None:
                add_to_grads(m, (-1.0 if kind == "printed" else -a) * h[i])

            optimizer = torch_sgd(model, t)
            train(model, i, order[t, i], optimizer, change=change, clip=CLIP)
            models[i] = last_models[i] = vec(model)
            scale = adaptive if kind == "printed" else 1.0
            h[i] = 1 / (t - last[i]) * h[i] + scale * (cloud - models[i])
            last[i] = t
            if kind == "in turn":
                counted.append(SIZES[i])
        if kind != "in turn":
            counted += [SIZES[i] for i in ids]
        new = mean_of(models, by_size=False)
        drift = beta * (average - new)
        cloud = cloud - server_lr * (cloud - (new - drift))
        average = new
        letters = {"xbar": average, "reports": torch.tensor(float(len(counted))).double()}
        if server_lr == 1:
            letters["h"] = drift
        own = {i: {"h_i": h[i], "t_i'": torch.tensor(last[i] + 1.0).double()} for i in ids}
        everybody = sum(last_models.values()) / N
        told.append(Told(cloud, models, average, letters, own, everybody))
    return told


def test_adabest_of_the_paper() -> None:
    """Cloud, average and all: what the paper and FedDyn deploy."""
    told = adabest("balanced", 0.3, 0.8)
    check(fl.adabest(mu=0.3, beta=0.8, local=CLIPPED), told, SOME, batches(SOME))


def test_adabest_with_a_server_optimizer() -> None:
    told = adabest("balanced", 0.3, 0.8, server_lr=0.6)
    algorithm = fl.adabest(mu=0.3, beta=0.8, server_lr=0.6, local=CLIPPED)
    check(algorithm, told, SOME, batches(SOME))


def test_adabest_for_unequal_sizes() -> None:
    told = adabest("frozen", 0.3, 0.8)
    algorithm = fl.adabest(mu=0.3, beta=0.8, unbalanced=True, local=CLIPPED)
    check(algorithm, told, SOME, batches(SOME))


def test_adabest_of_fedsim() -> None:
    """The mean size moves from client to client, in the order in which they are served."""
    told = adabest("in turn", 0.3, 0.8)
    nbar = means_in_turn(SIZES, SOME, N)
    rule = compat.AdaBestInTurn(mu=0.3, beta=0.8, nbar=nbar)
    algorithm = replace(fl.adabest(local=CLIPPED), rules=(rule,))
    check(algorithm, told, SOME, batches(SOME))
    frozen = fl.adabest(mu=0.3, beta=0.8, unbalanced=True, local=CLIPPED)
    with pytest.raises(AssertionError, match="round 1"):
        check(frozen, told, SOME, batches(SOME))


def fedsim_0_9(cohorts: list[list[int]], epochs: float, frozen: bool = False) -> list[Told]:
    """Processed examples over steps, times epochs: batches, not sizes, are averaged, in turn."""
    order, cloud, told = batches(cohorts), vec(net()), []
    total, count = 0.0, 0
    average, h, last = cloud.clone(), dict.fromkeys(range(N), ZERO), dict.fromkeys(range(N), -1)
    for t, ids in enumerate(cohorts):
        models, start = {}, (total, count)
        for i in ids:
            model = model_at(cloud)
            seen, reports = start if frozen else (total, count)
            nbar = seen / reports if reports else 0.0

            def change(m: nn.Module, i: int = i, nbar: float = nbar) -> None:
                add_to_grads(m, -0.3 / SIZES[i] * nbar * h[i])

            train(model, i, order[t, i], torch_sgd(model, t), change=change)
            models[i] = vec(model)
            h[i] = h[i] / (t - last[i]) + cloud - models[i]
            last[i] = t
            total, count = total + epochs * SIZES[i] / len(order[t, i]) * epochs, count + 1
        new = mean_of(models, by_size=False)
        cloud, average = new - 0.8 * (average - new), new
        own = {i: {"h_i": h[i]} for i in ids}
        letters = {"sum n_i": torch.tensor(total, dtype=torch.float64)}
        told.append(Told(cloud, models, average, letters, own))
    return told


def test_adabest_of_fedsim_0_9() -> None:
    """In the order in which clients are served: as listed, or by id."""
    rule = compat.AdaBestFedsim(mu=0.3, beta=0.8, epochs=2.0)
    by_id = [sorted(ids) for ids in SOME]
    for cohorts, order in ((SOME, tuple(SOME)), (by_id, ())):
        algorithm = replace(fl.adabest(local=SGD), rules=(replace(rule, order=order),))
        check(algorithm, fedsim_0_9(cohorts, 2.0), cohorts, batches(cohorts))
        check(algorithm, fedsim_0_9(cohorts, 2.0), cohorts, batches(cohorts), engine="vectorised")
        with pytest.raises(AssertionError, match="round 1"):
            check(algorithm, fedsim_0_9(cohorts, 2.0, frozen=True), cohorts, batches(cohorts))


def test_an_order_names_all_who_take_part() -> None:
    rule = compat.AdaBestFedsim(order=[[2, 0], [3, 1]])
    algorithm = replace(fl.adabest(local=SGD), rules=(rule,))
    with pytest.raises(ConfigError, match="order names no place for client 2 in round 1"):
        replay(net(), DATA, algorithm, SOME, steps=1)


def test_adabest_as_printed() -> None:
    """mu_i goes into h_i when it is stored."""
    told = adabest("printed", 0.3, 0.8)
    rule = compat.AdaBestPrinted(mu=0.3, beta=0.8, unbalanced=True)
    check(replace(fl.adabest(local=CLIPPED), rules=(rule,)), told, SOME, batches(SOME))


# ---- FedVRA --------------------------------------------------------------------------------------
def fedvra(
    gamma: list[float], a: list[list[float]], d: list[list[float]], omega: list[float]
) -> list[Told]:
    """Algorithm 1 with a_i and d_i of every round; beta over everybody."""
    order, x, dual, told = batches(SOME), vec(net()), ZERO, []
    dual_i, beta = (
        dict.fromkeys(range(N), ZERO),
        1 / sum(w * g for w, g in zip(omega, gamma, strict=True)),
    )
    for r, ids in enumerate(SOME):
        models, moved = {}, ZERO
        for i in ids:
            model = model_at(x)

            def change(m: nn.Module, i: int = i, x: Tensor = x) -> None:
                add_to_grads(m, gamma[i] * (vec(m) - x) - dual_i[i])

            train(model, i, order[r, i], torch_sgd(model, r, 0.8), change=change)
            models[i] = vec(model)
            dual_i[i] = dual_i[i] + a[r][i] * gamma[i] * (x - models[i])
            dual = dual + omega[i] * a[r][i] * gamma[i] * (x - models[i])
            moved = moved + omega[i] * d[r][i] * gamma[i] * (models[i] - x)
        x = x + beta * moved - beta * dual
        average = mean_of(models, by_size=omega[0] != omega[1])
        own = {i: {"lambda_i": dual_i[i]} for i in ids}
        told.append(Told(x, models, average, {"lambda": dual}, own))
    return told


SHARES = [n / sum(SIZES) for n in SIZES]
EQUAL = [1 / N] * N
A = [[0.5, 0.6, 0.7, 0.4], [0.3, 0.3, 0.9, 0.2], [0.5, 0.5, 0.5, 0.5], [0.1, 0.2, 0.3, 0.4]]
D = [[1.5, 1.2, 1.1, 1.4], [1.3, 1.3, 1.9, 1.2], [3.5, 3.5, 3.5, 3.5], [1.1, 1.2, 1.3, 1.4]]


@pytest.mark.parametrize("by_size", [True, False])
def test_fedvra_with_numbers(by_size: bool) -> None:
    told = fedvra([0.3] * N, [[0.7] * N] * 4, [[1.6] * N] * 4, SHARES if by_size else EQUAL)
    algorithm = fl.fedvra(gamma=0.3, a=0.7, d=1.6, by_size=by_size, local=HEAVY)
    check(algorithm, told, SOME, batches(SOME))


def test_fedvra_with_numbers_of_every_round_and_client() -> None:
    told = fedvra([0.3] * N, A, D, SHARES)
    check(fl.fedvra(gamma=0.3, a=A, d=D, local=HEAVY), told, SOME, batches(SOME))


def test_fedvra_with_a_gamma_of_every_client() -> None:
    gamma = [0.3, 0.1, 0.4, 0.2]
    told = fedvra(gamma, A, D, SHARES)
    check(fl.fedvra(gamma=gamma, a=A, d=D, local=HEAVY), told, SOME, batches(SOME))


def test_fedvra_by_remark_1() -> None:
    """d = 1 / Prob(i in S), a the largest that (a + d) eta gamma Q~ <= 1 allows, d at most."""
    gamma, chances, order = 0.3, [0.5, 0.8, 0.6, 0.9], batches(SOME)
    a, d = [[0.0] * N for _ in SOME], [[1 / p for p in chances] for _ in SOME]
    for r, ids in enumerate(SOME):
        for i in ids:
            eta, steps = LR * FALL**r, len(order[r, i])
            reach = (1 - (1 - gamma * eta) ** steps) / (gamma * eta)
            a[r][i] = min(d[r][i], 1 / (eta * gamma * reach) - d[r][i])
    told = fedvra([gamma] * N, a, d, SHARES)
    check(fl.fedvra(gamma=gamma, local=HEAVY), told, SOME, order, chances=chances)


# ---- FedVRA-U ------------------------------------------------------------------------------------
def projected(z: Tensor) -> Tensor:
    """On the probability simplex, by bisection of the level."""
    low, high = z.min(1).values - 1, z.max(1).values
    for _ in range(200):
        level = (low + high) / 2
        over = (z - level[:, None]).clamp(min=0).sum(1) > 1
        low, high = torch.where(over, level, low), torch.where(over, high, level)
    return (z - low[:, None]).clamp(min=0)


EVERY, HEAT = 3, 0.5  # one example in three has a label; weight of the entropy


def judged(m: nn.Module, i: int, z: Tensor, at: Tensor) -> Tensor:
    """Each kind of examples counts by its own number in the client's data."""
    few = -(-SIZES[i] // EVERY)
    log_p = m(DATA[i][0][at]).log_softmax(1)
    known = -log_p[torch.arange(len(at)), DATA[i][1][at]]
    soft = -(z * log_p).sum(1) + HEAT * (z * z.clamp(min=1e-8).log()).sum(1)
    return SIZES[i] * torch.where(at % EVERY == 0, known / few, soft / (SIZES[i] - few))


def test_fedvra_u() -> None:
    """Soft labels of unlabelled examples take their steps at x; then the model, z fixed."""
    gamma, a, d, rate, steps_z = 0.3, 0.7, 1.6, 0.6, 4
    order, x, dual, told = batches(SOME), vec(net()), ZERO, []
    z = {i: torch.full((n, 3), 1 / 3).double() for i, n in enumerate(SIZES)}
    dual_i = dict.fromkeys(range(N), ZERO)
    for r, ids in enumerate(SOME):
        models, moved = {}, ZERO
        for i in ids:
            place = torch.arange(SIZES[i])
            for _ in range(steps_z):
                free = z[i].clone().requires_grad_()
                (g,) = torch.autograd.grad(judged(model_at(x), i, free, place).mean(), free)
                z[i] = projected(z[i] - rate * g)
            model = model_at(x)
            optimizer = torch_sgd(model, r, 0.8)
            for batch in order[r, i]:
                at = torch.tensor(batch)
                optimizer.zero_grad()
                judged(model, i, z[i][at], at).mean().backward()
                add_to_grads(model, gamma * (vec(model) - x) - dual_i[i])
                optimizer.step()
            models[i] = vec(model)
            dual_i[i] = dual_i[i] + a * gamma * (x - models[i])
            dual = dual + SHARES[i] * a * gamma * (x - models[i])
            moved = moved + SHARES[i] * d * (models[i] - x)
        x = x + moved - dual / gamma
        own = {
            i: {
                "lambda_i": dual_i[i],
                "z_i": F.pad(z[i], (0, 0, 0, max(SIZES) - SIZES[i]), value=1 / 3),
            }
            for i in ids
        }
        told.append(Told(x, models, mean_of(models, by_size=True), {"lambda": dual}, own))
    algorithm = fl.fedvra_u(
        objective=fl.PseudoLabels(classes=3, every=EVERY, temperature=HEAT),
        rate=rate,
        steps=steps_z,
        gamma=gamma,
        a=a,
        d=d,
        local=HEAVY,
    )
    check(algorithm, told, SOME, order)
