"""Equivalences of spec section 4 on undrift itself: what must be equal, and what must differ.

I-14 to I-30 and I-35 to I-47 of the later rules are in test_invariants_*.py; I-43 of the first ones
has its own file.
"""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import undrift as fl
from longhand.cases import (
    ADAMW,
    ALL,
    CLIPPED,
    HEAVY,
    LINEAR,
    RMSPROP,
    SGD,
    SIZES,
    SOME,
    WORLDS,
    above,
    below,
)
from longhand.local import Local
from longhand.worlds import (
    World,
    epoch_batches,
    quadratic_world,
    sample_participants,
    step_batches,
)
from proofs.bridge import gap, local_of, run, task_of, trainer_of
from rules.needs import built
from undrift.rules import compat

SOME5, ALL5 = SOME[:5], ALL[:5]


@pytest.fixture(params=["softmax", "mlp", "regression"])
def world(request) -> World:
    return WORLDS[request.param]()


@pytest.fixture
def mlp() -> World:
    return WORLDS["mlp"]()


def unequal(world, rounds=SOME5):
    return epoch_batches(world, rounds, 6, epochs=2)


def equal(world, rounds=SOME5):
    return step_batches(world, rounds, steps=4, batch_size=6)


def adaptive(kind: str, local: Local, **settings) -> fl.Algorithm:
    return fl.Algorithm(local=local_of(local), server=fl.Adaptive(kind, **settings))


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


@fl.record
class PathSpy(fl.Rule):
    """Keep ||a_i||_1 and the delta where a test can read them."""

    needs_path = True

    def init_client(self, w, sizes):
        return {"path": w.new_zeros(()), "delta": torch.zeros_like(w)}

    def finish(self, delta, view):
        return delta, {"path": view.path, "delta": delta}, ()


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
    for name, found in (("FedNova", nova), ("FedAvg to the skewed optimum", plain)):
        below(f"I-5 {name}: half the rate, half the distance", abs(found[0] / found[1] - 2), 0.05)


# ---- FedAvg --------------------------------------------------------------------------------------


def pooled(world) -> tuple[np.ndarray, np.ndarray]:
    return tuple(np.concatenate(parts) for parts in zip(*world.data, strict=True))


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
    assert all(later <= earlier for earlier, later in pairwise(losses))
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


@pytest.mark.parametrize("build", [fl.scaffold, fl.scaffold_m])
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


@pytest.mark.parametrize("rounds", [ALL5, SOME5])
def test_i9_a_common_offset_cancels_under_full_participation_only(world, rounds):
    b, algo = unequal(world, rounds), fl.scaffold(local=local_of(SGD))
    shifted = dataclasses.replace(algo, rules=(Shifted(),))
    found = gap(run(world, rounds, b, algo), run(world, rounds, b, shifted))
    (below if rounds is ALL5 else above)("I-9", found, 1e-12 if rounds is ALL5 else 1e-2)


@pytest.mark.parametrize("option", ["I", "II"])
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
    assert np.array_equal(found.x[0], plain.x[0])
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


# ---- servers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("local", [SGD, HEAVY, RMSPROP])
def test_i30_server_momentum_without_beta_is_fedavg(mlp, local):
    b, mine = unequal(mlp), local_of(local)
    plain = run(mlp, SOME5, b, fl.fedavg(local=mine))
    below("I-30", gap(run(mlp, SOME5, b, fl.fedavgm(beta=0.0, local=mine)), plain), 0.0)
    step = fl.Algorithm(local=mine, server=fl.Step(1.0))
    below("Step(1)", gap(run(mlp, SOME5, b, step), plain), 0.0)
    momentum = run(mlp, SOME5, b, fl.fedavgm(beta=0.7, local=mine))
    above("I-30 beta .7", gap(momentum, plain), 1e-4)
    damped = fl.fedavgm(beta=0.7, server_lr=1 / 0.3, dampening=True, local=mine)
    below("I-30 dampening is a scale", gap(run(mlp, SOME5, b, damped), momentum), 1e-12)


@pytest.mark.parametrize(
    ("kind", "name"), [("adam", "softmax"), ("yogi", "mlp"), ("adagrad", "regression")]
)
def test_i31_a_large_tau_turns_adaptivity_off(kind, name):
    world = WORLDS[name]()
    b = unequal(world)
    plain = run(world, SOME5, b, fl.fedavg(local=local_of(SGD)))
    momentum = run(world, SOME5, b, fl.fedavgm(beta=0.6, server_lr=0.4, local=local_of(SGD)))
    for beta1, other in ((0.0, plain), (0.6, momentum)):
        algo = adaptive(kind, SGD, lr=1e8, tau=1e8, beta1=beta1)
        below("I-31 T 1e8", gap(run(world, SOME5, b, algo), other), 1e-8)
    algo = adaptive(kind, SGD, lr=1.0, tau=1.0, beta1=0.0)
    above("I-31 T 1", gap(run(world, SOME5, b, algo), plain), 1e-3)


def test_i32_adam_and_yogi_agree_in_the_first_round_only(world):
    b, common = unequal(world), {"lr": 0.05, "tau": 1e-3}
    adam, yogi = (run(world, SOME5, b, adaptive(k, SGD, **common)) for k in ("adam", "yogi"))
    assert np.array_equal(adam.x[0], yogi.x[0])
    above("I-32 later", gap(adam, yogi), 1e-6)
    with_v0 = run(world, SOME5, b, adaptive("yogi", SGD, v0=1.0, **common))
    adam_v0 = run(world, SOME5, b, adaptive("adam", SGD, v0=1.0, **common))
    above("I-32 v0", np.abs(with_v0.x[0] - adam_v0.x[0]).max(), 1e-9)


def updates(found, beta1: float) -> list[np.ndarray]:
    """The server's updates, read back from its first moment."""
    m = [s["0.Adaptive.m"] for s in found.server]
    before = [np.zeros_like(m[0]), *m[:-1]]
    return [(now - beta1 * old) / (1 - beta1) for now, old in zip(m, before, strict=True)]


def test_i32_yogi_never_grows_faster_than_the_square(world):
    found = run(world, SOME5, unequal(world), adaptive("yogi", SGD, beta1=0.5, beta2=0.9))
    v = np.zeros_like(world.w0)
    for state, update in zip(found.server, updates(found, 0.5), strict=True):
        assert np.all(state["0.Adaptive.v"] - v <= 0.1 * update**2 * (1 + 1e-9))
        v = state["0.Adaptive.v"]


def test_i33_adagrad_sums_squares(world):
    found = run(world, SOME5, unequal(world), adaptive("adagrad", SGD, beta1=0.0, v0=1e-6))
    v = np.full_like(world.w0, 1e-6)
    for state, update in zip(found.server, updates(found, 0.0), strict=True):
        assert np.all(state["0.Adaptive.v"] >= v)
        v = v + update**2
        below("I-33", np.abs(state["0.Adaptive.v"] - v).max(), 1e-12)
        v = state["0.Adaptive.v"]


# ---- who the clients are -------------------------------------------------------------------------

CATALOGUE = {name: entry.build for name, entry in fl.catalogue().items()}


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "fednova", "scaffold", "comfed:scaf-sgd"])
def test_i40_identical_clients_behave_as_one(mlp, name):
    alone = World(mlp.data[:1], mlp.gradient, mlp.loss, mlp.w0)
    many = World(mlp.data[:1] * 5, mlp.gradient, mlp.loss, mlp.w0)
    once, everyone = [[0]] * 5, [list(range(5))] * 5
    b = unequal(alone, once)
    algo = CATALOGUE[name](lr=0.05)
    spied = dataclasses.replace(algo, rules=(*algo.rules, PathSpy()))
    one = run(alone, once, b, spied)
    five = run(many, everyone, {(r, i): b[r, 0] for r in range(5) for i in range(5)}, spied)
    below(f"I-40 {name}", gap(one, five), 1e-12)
    for states in five.clients:
        for key, first in states[0].items():
            assert all(np.array_equal(first, other[key]) for other in states[1:]), key


@pytest.mark.parametrize("name", CATALOGUE)
def test_i41_numbering_the_clients_otherwise_changes_nothing(mlp, name):
    algo, order = built(name, lr=0.05), [3, 0, 5, 1, 4, 2]  # new number of each client
    needs = fl.catalogue()[name].needs
    asked = ALL5 if needs == "everybody" else SOME5
    batches = {"scaffold_m": equal, "qfedsgd": lambda *w: step_batches(*w, steps=1)}
    b = batches.get(name, unequal)(mlp, asked)
    data = [mlp.data[order.index(i)] for i in range(6)]
    other = World(data, mlp.gradient, mlp.loss, mlp.w0)
    rounds = [[order[i] for i in sampled] for sampled in asked]
    moved = {(r, order[i]): batches for (r, i), batches in b.items()}
    feature = "1" if needs == "features" else None
    found = run(other, rounds, moved, algo, feature=feature)
    below(f"I-41 {name}", gap(run(mlp, asked, b, algo, feature=feature), found), 1e-12)


# ---- ComFed --------------------------------------------------------------------------------------

SERVERS = ["sgd", "adam", "adagrad", "yogi"]
CLIENTS = ["sgd", "prox", "scaf", "nova"]


def cell(client: str, server: str, **more) -> fl.Algorithm:
    adaptive = {} if server == "sgd" else {"tau": 1e-3, "server_lr": 0.05}
    return fl.comfed(client, server, **adaptive, **more)


@pytest.mark.parametrize("server", SERVERS)
def test_i44_cells_that_must_agree(mlp, server):
    b, same = unequal(mlp), equal(mlp)
    plain = run(mlp, SOME5, b, cell("sgd", server))
    below("I-44 mu 0", gap(run(mlp, SOME5, b, cell("prox", server, mu=0.0)), plain), 0.0)
    literal = cell("scaf", server, mode="literal")
    below("I-44 literal", gap(run(mlp, SOME5, b, literal), plain), 0.0)
    nova, steady = (run(mlp, SOME5, same, cell(c, server)) for c in ("nova", "sgd"))
    below("I-44 nova, equal steps", gap(nova, steady), 1e-12)


@pytest.mark.parametrize("server", ["sgd", "yogi"])
def test_i44_every_other_pair_of_cells_differs(mlp, server):
    b = unequal(mlp)
    algos = [cell(c, server, mu=0.5) for c in CLIENTS]
    algos += [cell("scaf", server, mode="fresh"), cell("scaf", server, option="II")]
    algos += [cell("scaf", server, c_weights="size")]
    found = [run(mlp, SOME5, b, algo) for algo in algos]
    for at, first in enumerate(found):
        for second in found[at + 1 :]:
            above("I-44 different cells", gap(first, second), 1e-6)


def test_i44_the_grid_is_a_cross_product():
    for server in SERVERS:
        column = {c: fl.comfed(c, server) for c in CLIENTS}
        assert len({algo.server for algo in column.values()}) == 1
        assert len({algo.local for algo in column.values()}) == 1
    for client in CLIENTS:
        row = [fl.comfed(client, s) for s in SERVERS]
        assert len({(algo.rules, algo.aggregate) for algo in row}) == 1
        assert len({algo.server for algo in row}) == 4


@pytest.mark.parametrize(
    ("client", "alone"),
    [("sgd", fl.fedavg), ("prox", fl.fedprox), ("nova", fl.fednova), ("scaf", fl.scaffold)],
)
def test_i44_the_first_column_is_the_named_algorithms(mlp, client, alone):
    local = local_of(HEAVY)
    settings = {"prox": {"mu": 0.005}, "scaf": {"option": "I", "by_size": True}}.get(client, {})
    b = unequal(mlp)
    found = run(mlp, SOME5, b, fl.comfed(client, "sgd", local=local))
    below("I-44 alone", gap(found, run(mlp, SOME5, b, alone(local=local, **settings))), 0.0)


@pytest.mark.parametrize("option", ["I", "II"])
def test_comfed_scaf_is_scaffold_for_equal_sizes_only(mlp, option):
    local = local_of(HEAVY)
    same = World([(x[:7], y[:7]) for x, y in mlp.data], mlp.gradient, mlp.loss, mlp.w0)
    for world, compare in ((same, below), (mlp, above)):
        b = unequal(world)
        grid = run(world, SOME5, b, fl.comfed("scaf", "sgd", local=local, option=option))
        alone = run(world, SOME5, b, fl.scaffold(local=local, option=option))
        compare("scaf = scaffold", gap(grid, alone), 1e-12 if compare is below else 1e-4)
