"""Loops that look into the model or carry momentum into the round (I-30, I-35 to I-39, I-45).

No line of the library takes part, torch's gradients check the hand-written ones. Measured:

 I-30  6.7e-16                                I-35  0, and centralised 6.7e-16 (Mime's Adam too)
 I-36  6.7e-16, linear 2.8e-14                I-37  0 bitwise; first rounds of both agree, 1.1e-16
 I-38  3.3e-16, trace 2.2e-16, include self 6.7e-16
 I-39  0 and 1.1e-16                          I-45  0 bitwise
 gradients: rFedAvg against central differences 2.8e-10, MOON against torch 8.3e-17
"""

import dataclasses

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from undrift.verify.longhand.averaging import fedavg
from undrift.verify.longhand.comfed import CLIENTS, SERVERS, comfed
from undrift.verify.longhand.contrast import contrast_to_z, contrast_value, moon
from undrift.verify.longhand.features import (
    Net,
    centred_gradient,
    centred_value,
    mean_phi,
    pairwise_gradient,
    pairwise_value,
    rfedavg,
    rfedavg_plus,
)
from undrift.verify.longhand.local import Local
from undrift.verify.longhand.mime import Adam, SGDm, mime
from undrift.verify.longhand.momentum import comfed_momentum, fedadc, slowmo
from undrift.verify.longhand.servers import fedavgm
from undrift.verify.longhand.servers import slowmo as first_slowmo
from undrift.verify.longhand.steps import slopes
from undrift.verify.longhand.worlds import World, epoch_batches, step_batches

from .cases import ALL, CLIPPED, HEAVY, LINEAR, SGD, SIZES, SOME, WORLDS, above, below, gap

N = len(SIZES)
ADAPT = {"eta_g": 0.05, "b1": 0.9, "b2": 0.99, "tau": 1e-3}


@pytest.fixture
def mlp() -> World:
    return WORLDS["mlp"]()


def unequal(world, rounds=SOME):
    return epoch_batches(world, rounds, 4, epochs=2)


def constant_world() -> World:
    """Client i's gradient is always b_i."""
    b = np.random.default_rng(3).standard_normal((N, 5))
    data = [(np.full((n, 1), float(i)), np.zeros((n, 1))) for i, n in enumerate(SIZES)]
    return World(data, lambda w, x, y: b[int(x[0, 0])], lambda w, x, y: 1.0, np.ones(5))


# ---- rFedAvg -------------------------------------------------------------------------------------


@pytest.mark.parametrize("local", [*LINEAR, CLIPPED])
def test_i37_rfedavg_without_strength_is_fedavg(mlp, local):
    b = unequal(mlp)
    plain = fedavg(mlp, SOME, b, local)
    for algorithm in (rfedavg, rfedavg_plus):
        below("I-37", gap(algorithm(mlp, SOME, b, local, strength=0.0), plain), 0.0)
        above("I-37 strength", gap(algorithm(mlp, SOME, b, local, strength=0.5), plain), 1e-3)
    one = rfedavg(mlp, SOME, b, local, strength=0.5)
    two = rfedavg_plus(mlp, SOME, b, local, strength=0.5)
    below("rFedAvg = rFedAvg+ in the first round", np.abs(one.x[0] - two.x[0]).max(), 1e-12)
    above("rFedAvg, rFedAvg+ later", gap(one, two), 1e-6)


def test_i38_regularisers_have_one_gradient(mlp):
    net, x = Net.of(mlp), mlp.data[2][0]
    deltas = [mean_phi(net, mlp.w0, mlp.data[j][0]) for j in range(N)]
    others = deltas[:2] + deltas[3:]
    centre = np.mean(others, axis=0)
    covariance = sum(float(((d - centre) ** 2).sum()) for d in others) / len(others)
    rng = np.random.default_rng(0)
    for _ in range(3):
        w = mlp.w0 + 0.3 * rng.standard_normal(mlp.w0.shape)
        pair, mean = pairwise_gradient(net, w, x, others), centred_gradient(net, w, x, centre)
        below("I-38", np.abs(pair - mean).max(), 1e-12)
        extra = pairwise_value(net, w, x, others) - centred_value(net, w, x, centre)
        below("I-38 trace", abs(extra - covariance), 1e-12)
        numbers = slopes(lambda v: pairwise_value(net, v, x, others), w)
        below("rFedAvg, central differences", np.abs(pair - numbers).max(), 1e-8)
        clip = float(np.median(np.linalg.norm(net.phi(w, x), axis=1)))
        pair = pairwise_gradient(net, w, x, others, clip)
        mean = centred_gradient(net, w, x, centre, clip)
        below("I-38 clipped", np.abs(pair - mean).max(), 1e-12)
        numbers = slopes(lambda v, c=clip: pairwise_value(net, v, x, others, c), w)
        below("rFedAvg clipped, central differences", np.abs(pair - numbers).max(), 1e-8)
    including = np.mean(deltas, axis=0)
    alone = centred_gradient(net, mlp.w0, x, centre) * (N - 1) / N
    here = centred_gradient(net, mlp.w0, x, including)
    below("I-38 include self", np.abs(here - alone).max(), 1e-12)


def test_rfedavg_tables_hold_what_they_should(mlp):
    net, b = Net.of(mlp), unequal(mlp)
    run = rfedavg(mlp, SOME, b, SGD, strength=0.3)
    plus = rfedavg_plus(mlp, SOME, b, SGD, strength=0.3)
    everyone = rfedavg_plus(mlp, SOME, b, SGD, strength=0.3, refresh="all")
    before = mlp.w0
    table = np.array([mean_phi(net, before, mlp.data[i][0]) for i in range(N)])
    for r, sampled in enumerate(SOME):
        for i in sampled:
            table[i] = mean_phi(net, before + run.updates[r][i], mlp.data[i][0])
        below("rFedAvg table", np.abs(run.server_states[r]["delta"] - table).max(), 1e-12)
        before = run.x[r]
        for i in range(N):
            new = mean_phi(net, everyone.x[r], mlp.data[i][0])
            assert np.array_equal(everyone.server_states[r]["delta"][i], new)
    seen = mean_phi(net, plus.x[-1], mlp.data[SOME[-1][0]][0])
    assert np.array_equal(plus.server_states[-1]["delta"][SOME[-1][0]], seen)
    below("clipped phi", np.linalg.norm(mean_phi(net, mlp.w0, mlp.data[0][0], clip=0.1)), 0.1)
    free = mean_phi(net, mlp.w0, mlp.data[0][0], clip=1e9)
    assert np.array_equal(free, mean_phi(net, mlp.w0, mlp.data[0][0]))


# ---- MOON ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("local", [*LINEAR, CLIPPED])
def test_i39_moon_begins_as_fedavg(mlp, local):
    b = unequal(mlp)
    plain = fedavg(mlp, SOME, b, local)
    below("I-39 mu 0", gap(moon(mlp, SOME, b, local, mu=0.0), plain), 0.0)
    for stored, fill in [(1, True), (3, True), (3, False)]:
        run = moon(mlp, SOME, b, local, mu=5.0, stored=stored, fill=fill)
        below("I-39 first round", np.abs(run.x[0] - plain.x[0]).max(), 1e-12)
        above("I-39 later", gap(run, plain), 1e-3)
    value = contrast_value(*[np.ones((2, 3))] * 2, [np.ones((2, 3))], 0.5)
    below("I-39 log 2", abs(value - np.log(2)), 1e-15)


def test_moon_gradient_is_torchs():
    rng = np.random.default_rng(1)
    z, good, *bad = rng.standard_normal((4, 5, 6))
    for temperature in (0.5, 2.0):
        mine = contrast_to_z(z, good, bad, temperature)
        at = torch.tensor(z, requires_grad=True)
        scores = [F.cosine_similarity(at, torch.tensor(v)) / temperature for v in [good, *bad]]
        value = F.cross_entropy(torch.stack(scores, 1), torch.zeros(5, dtype=torch.long))
        value.backward()
        below("MOON value", abs(value.item() - contrast_value(z, good, bad, temperature)), 1e-12)
        below("MOON gradient", np.abs(mine - at.grad.numpy()).max(), 1e-12)


def test_backward_through_the_net_is_torchs(mlp):
    net, x = Net.of(mlp), mlp.data[1][0]
    module = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))
    module.double()
    torch.nn.utils.vector_to_parameters(torch.tensor(mlp.w0), module.parameters())
    phi = module[:2](torch.tensor(x))
    logits = module[2](phi)
    rng = np.random.default_rng(2)
    to_phi, to_logits = rng.standard_normal(phi.shape), rng.standard_normal(logits.shape)
    ((phi * torch.tensor(to_phi)).sum() + (logits * torch.tensor(to_logits)).sum()).backward()
    wanted = torch.cat([p.grad.ravel() for p in module.parameters()]).numpy()
    found = net.backward(mlp.w0, x, to_phi, to_logits)
    below("backward", np.abs(found - wanted).max(), 1e-12)


# ---- Mime ----------------------------------------------------------------------------------------


def test_i35_mimelite_without_momentum_is_fedavg(world):
    b = unequal(world)
    run = mime(world, SOME, b, SGD, base=SGDm(beta=0.0), lite=True)
    below("I-35 MimeLite", gap(run, fedavg(world, SOME, b, SGD)), 0.0)


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("kind", ["sgdm", "adam"])
def test_i35_one_full_step_is_centralised(world, kind, corrected):
    b = step_batches(world, ALL, steps=1)
    inputs = np.concatenate([x for x, _ in world.data])
    labels = np.concatenate([y for _, y in world.data])
    w, m, v = world.w0.copy(), np.zeros_like(world.w0), np.zeros_like(world.w0)
    path = []
    for r in range(len(ALL)):
        g = world.gradient(w, inputs, labels) + SGD.weight_decay * w
        m, v = 0.1 * g + 0.9 * m, 0.01 * g * g + 0.99 * v
        step = m
        if kind == "adam":
            scale = (1 - 0.9 ** (r + 1), 1 - 0.99 ** (r + 1)) if corrected else (1.0, 1.0)
            step = (m / scale[0]) / (np.sqrt(v / scale[1]) + 1e-3)
        w = w - SGD.lr * SGD.lr_decay**r * step
        path.append(w)
    # MimeLite's Adam sees the clients' own gradients, whose squares do not average
    for lite in (False, True) if kind == "sgdm" else (False,):
        base = SGDm(0.9) if kind == "sgdm" else Adam(0.9, 0.99, 1e-3, corrected)
        run = mime(world, ALL, b, SGD, base=base, lite=lite)
        worst = max(float(np.abs(p - q).max()) for p, q in zip(run.x, path, strict=True))
        below(f"I-35 centralised {kind}", worst, 1e-12)


def test_mime_and_mimelite_part_and_weight_decay_belongs_inside(world):
    b = unequal(world)
    runs = [mime(world, SOME, b, SGD, base=SGDm(0.9), lite=lite) for lite in (False, True)]
    above("Mime, MimeLite", gap(*runs), 1e-3)
    # at rest m = c = g + wd x; outside, (1-beta) g + beta m + wd x has wd / (1 - beta) in it
    one = step_batches(world, ALL, steps=1)
    heavy = dataclasses.replace(SGD, weight_decay=0.1)
    inside = mime(world, ALL, one, heavy, base=SGDm(0.9), lite=True)
    outside = mime(world, ALL, one, heavy, base=SGDm(0.9), lite=True, decay="outside")
    above("weight decay outside", gap(inside, outside), 1e-3)


# ---- SlowMo, FedADC ------------------------------------------------------------------------------


def test_i30_slowmo(world):
    b = unequal(world)
    constant = Local(lr=0.1, weight_decay=1e-3)
    uniform = fedavg(world, SOME, b, SGD, weighting="uniform")
    below("I-30 beta 0", gap(slowmo(world, SOME, b, SGD, beta=0.0), uniform), 1e-12)
    momentum = fedavgm(world, SOME, b, constant, beta=0.7, weighting="uniform")
    below("I-30 FedAvgM", gap(slowmo(world, SOME, b, constant, beta=0.7), momentum), 1e-12)
    for local in (SGD, HEAVY, CLIPPED):
        first = first_slowmo(world, SOME, b, local, beta=0.7, alpha=0.8)
        below("SlowMo twice", gap(slowmo(world, SOME, b, local, beta=0.7, alpha=0.8), first), 1e-12)
    runs = [
        slowmo(world, ALL, unequal(world, ALL), HEAVY, buffers=x)
        for x in ("reset", "keep", "average")
    ]
    for at in range(3):
        above("SlowMo buffers", gap(runs[at], runs[at - 1]), 1e-3)


@pytest.mark.parametrize("form", ["heavy_ball", "nesterov"])
def test_i36_fedadc(world, form):
    b = unequal(world)
    for local in [SGD, *([HEAVY, CLIPPED] if form == "heavy_ball" else [])]:
        bare = fedadc(world, SOME, b, local, beta_local=0.0, beta_global=0.0, form=form)
        below("I-36 FedAvg", gap(bare, fedavg(world, SOME, b, local, weighting="uniform")), 1e-12)
        slow = slowmo(world, SOME, b, local, beta=0.7, alpha=0.8)
        run = fedadc(world, SOME, b, local, beta_local=0.0, beta_global=0.7, alpha=0.8, form=form)
        below("I-36 SlowMo", gap(run, slow), 1e-12)
        above("I-36 beta_l", gap(fedadc(world, SOME, b, local, form=form), slow), 1e-3)
    both = [fedadc(world, SOME, b, SGD, form=x) for x in ("heavy_ball", "nesterov")]
    above("FedADC forms", gap(*both), 1e-4)


@pytest.mark.parametrize("form", ["heavy_ball", "nesterov"])
def test_i36_momentum_does_not_depend_on_the_local_share(form):
    """Also for unequal K_i, because every client divides by its own."""
    world = constant_world()
    b = unequal(world)
    for local in [SGD, *([HEAVY] if form == "heavy_ball" else [])]:
        local = dataclasses.replace(local, weight_decay=0.0)
        runs = [fedadc(world, SOME, b, local, beta_local=beta, form=form) for beta in (0, 0.5, 0.9)]
        for run in runs[1:]:
            for one, other in zip(runs[0].server_states, run.server_states, strict=True):
                below("I-36 linear", np.abs(one["m"] - other["m"]).max(), 1e-12)


# ---- ComFed with local momentum ------------------------------------------------------------------


@pytest.mark.parametrize("style", ["mimelite", "fedadc"])
@pytest.mark.parametrize("server", SERVERS)
def test_i45_no_local_momentum_is_comfed(mlp, server, style):
    world, b = mlp, unequal(mlp)
    adapt = {} if server == "sgd" else ADAPT
    for client in CLIENTS:
        cell = {"client": client, "server": server, **adapt}
        plain = comfed(world, SOME, b, HEAVY, **cell)
        run = comfed_momentum(world, SOME, b, HEAVY, style=style, b=0.0, **cell)
        below("I-45", gap(run, plain), 0.0)
        moved = comfed_momentum(world, SOME, b, HEAVY, style=style, b=0.9, **cell)
        above("I-45 b .9", gap(moved, plain), 1e-5)


@pytest.mark.parametrize("client", ["sgd", "prox", "nova"])
def test_fedadc_style_leaves_an_average_of_pure_gradients(client):
    """Constant gradients: m must not depend on b, for unequal K_i too. It holds for a Kbar weighted
    by size; a uniform one takes out something else than what was put in.
    """
    world = constant_world()
    b = unequal(world)
    for local in (SGD, HEAVY):
        local = dataclasses.replace(local, weight_decay=0.0)
        cell = {"client": client, "server": "adam", "style": "fedadc", "mu": 0.5, **ADAPT}
        runs = [comfed_momentum(world, SOME, b, local, b=v, **cell) for v in (0.0, 0.5, 0.9)]
        uneven = comfed_momentum(world, SOME, b, local, b=0.9, weights="uniform", **cell)
        worst = max(_m_gap(runs[0], run) for run in runs[1:])
        below(f"fedadc style, pure m, {client}", worst, 1e-12)
        above(f"fedadc style, uniform Kbar, {client}", _m_gap(runs[0], uneven), 1e-4)


def _m_gap(a, b) -> float:
    pairs = zip(a.server_states, b.server_states, strict=True)
    return max(float(np.abs(p["m"] - q["m"]).max()) for p, q in pairs)


def test_mimelite_style_follows_its_recursion():
    """Constant gradients: D = -eta K ((1-b) g + b M) and M = -m/(eta K), so that
    m <- (b1 + (1-b1) b) m - (1-b1)(1-b) eta K g, which comes to rest at M = g.
    """
    world = constant_world()
    rounds = [list(range(N))] * 12
    batches = step_batches(world, rounds, steps=5)
    gradients = np.array([world.gradient(world.w0, *data) for data in world.data])
    mean = np.array(SIZES) / sum(SIZES) @ gradients
    for b in (0.5, 0.9):
        cell = {"client": "sgd", "server": "sgd", "style": "mimelite", "b": b}
        run = comfed_momentum(world, rounds, batches, Local(lr=0.1), **cell)
        m = np.zeros(5)
        for state in run.server_states:
            m = (0.9 + 0.1 * b) * m - 0.1 * (1 - b) * 0.5 * mean
            below("mimelite style, m", np.abs(state["m"] - m).max(), 1e-12)
