"""The long-hand loops against themselves: the equivalences of spec section 4.

Measured on the softmax, mlp and regression worlds, all settings of a test together (`pytest -s`
prints every value). Limits are the spec's; "differ" is the smallest difference seen.

 I-1   0 bitwise; mu .5 differs by 6e-3         I-2   2.2e-16; unequal K_i differ by 3e-2
 I-4   3.3e-16                                  I-5   linear in eta: ratio 2 to 5e-3; FedAvg .47 off
 I-6   2.2e-16                                  I-7   5.6e-17
 I-8   3.3e-16                                  I-9   2.1e-15 full; 0.40 partial, m = 3 of 6
 I-10  2.2e-16                                  I-11  2.2e-16
 I-12  0 bitwise                                I-13  1.4e-15; printed: 9e-16 m=1, .19 m=3, 1.9 m=6
 I-30  0 / 1.1e-16 / 4.4e-16                    I-31  9.5e-9 at T = 1e8, a tenth of it at 1e9
 I-32  0 bitwise                                I-33  0
 I-43  SCAFFOLD 1e-15, FedAvg stays 3.5e-2 off
 FedNova impulse = closed forms 8.9e-16; FedNova gmf = FedAvgM 2.8e-16; FedAvgM dampening 6.1e-16
"""

import numpy as np
import pytest

from undrift.verify.longhand.averaging import fedavg, fednova, fedprox
from undrift.verify.longhand.control import scaffold, scaffold_m
from undrift.verify.longhand.local import Local
from undrift.verify.longhand.servers import fedavgm, fedopt, slowmo
from undrift.verify.longhand.worlds import (
    World,
    epoch_batches,
    quadratic_world,
    sample_participants,
    step_batches,
)

from .cases import ADAMW, ALL, CLIPPED, HEAVY, LINEAR, RMSPROP, SGD, SIZES, SOME, above, below, gap

# ---- FedProx, FedNova ----------------------------------------------------------------------------


@pytest.mark.parametrize("local", [*LINEAR, RMSPROP, ADAMW, CLIPPED])
def test_i1_fedprox_without_mu_is_fedavg(world, local):
    b = epoch_batches(world, SOME, 4, epochs=2)
    below("I-1", gap(fedprox(world, SOME, b, local, mu=0.0), fedavg(world, SOME, b, local)), 0.0)
    above(
        "I-1 mu .5",
        gap(fedprox(world, SOME, b, local, mu=0.5), fedavg(world, SOME, b, local)),
        1e-4,
    )


@pytest.mark.parametrize("local", LINEAR)
def test_i2_fednova_with_equal_steps_is_fedavg(world, local):
    b = step_batches(world, SOME, steps=5, batch_size=4)
    below("I-2", gap(fednova(world, SOME, b, local), fedavg(world, SOME, b, local)), 1e-12)
    b = epoch_batches(world, SOME, 4, epochs=2)
    above("I-2 unequal K", gap(fednova(world, SOME, b, local), fedavg(world, SOME, b, local)), 1e-3)


def test_i4_fednova_prox_with_equal_steps_is_fedprox(world):
    b = step_batches(world, SOME, steps=5, batch_size=4)
    for local in LINEAR:
        prox = fedprox(world, SOME, b, local, mu=0.4)
        below("I-4", gap(fednova(world, SOME, b, local, mu=0.4), prox), 1e-12)


def test_fednova_closed_forms_give_the_same_trajectory(world):
    b = epoch_batches(world, SOME, 4, epochs=2)
    for local, mu in [(SGD, 0.0), (HEAVY, 0.0), (SGD, 0.4)]:
        impulse = fednova(world, SOME, b, local, mu=mu)
        closed = fednova(world, SOME, b, local, mu=mu, norm="closed")
        below("FedNova impulse = closed", gap(impulse, closed), 1e-12)


def test_i5_fixed_points_on_quadratics():
    steps = {0: 2, 1: 4, 2: 6, 3: 9}
    world = quadratic_world(7, clients=4, dim=3, sizes=[3, 1, 2, 4])
    p = [0.3, 0.1, 0.2, 0.4]
    truth = world.optimum(p)
    skewed = world.optimum([p[i] * steps[i] for i in range(4)])
    everyone = [list(range(4))] * 1200
    b = step_batches(world, everyone, steps)
    nova, plain = [], []
    for eta in (8e-3, 4e-3):
        nova.append(np.abs(fednova(world, everyone, b, Local(lr=eta)).x[-1] - truth).max())
        x = fedavg(world, everyone, b, Local(lr=eta)).x[-1]
        plain.append(np.abs(x - skewed).max())
        above(f"I-5 FedAvg to the true optimum, eta {eta}", np.abs(x - truth).max(), 5e-2)
    print("I-5 FedNova to the optimum", nova, "FedAvg to the skewed optimum", plain)
    # The distance is linear in eta: half the eta, half the distance.
    below("I-5 FedNova, ratio - 2", abs(nova[0] / nova[1] - 2), 0.1)
    below("I-5 FedAvg, ratio - 2", abs(plain[0] / plain[1] - 2), 0.1)


def test_fednova_slow_momentum_is_server_momentum(world):
    b = step_batches(world, SOME, steps=5, batch_size=4)
    constant = Local(lr=0.1)
    slow = fednova(world, SOME, b, constant, gmf=0.7)
    below("FedNova gmf", gap(slow, fedavgm(world, SOME, b, constant, beta=0.7)), 1e-12)


# ---- FedAvg --------------------------------------------------------------------------------------


def test_i6_one_full_step_is_centralised_gradient_descent(world):
    b = step_batches(world, ALL, steps=1)
    inputs = np.concatenate([x for x, _ in world.data])
    labels = np.concatenate([y for _, y in world.data])
    w, worst = world.w0.copy(), 0.0
    run = fedavg(world, ALL, b, SGD)
    for r in range(len(ALL)):
        eta = SGD.lr * SGD.lr_decay**r
        w = w - eta * (world.gradient(w, inputs, labels) + SGD.weight_decay * w)
        worst = max(worst, float(np.abs(run.x[r] - w).max()))
    below("I-6", worst, 1e-12)


def test_i7_one_client_is_plain_local_sgd(world):
    alone = World(world.data[:1], world.gradient, world.loss, world.w0)
    rounds = [[0]] * 6
    b = epoch_batches(alone, rounds, 4, epochs=2)
    inputs, labels = alone.data[0]
    w = alone.w0.copy()
    for r in range(6):
        for batch in b[r, 0]:
            gradient = alone.gradient(w, inputs[batch], labels[batch])
            w = w - SGD.lr * SGD.lr_decay**r * (gradient + SGD.weight_decay * w)
    below("I-7", np.abs(fedavg(alone, rounds, b, SGD).x[-1] - w).max(), 1e-12)


# ---- SCAFFOLD ------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["I", "II"])
@pytest.mark.parametrize("local", LINEAR)
def test_i8_c_is_the_population_mean_of_the_c_i(world, option, local):
    b = epoch_batches(world, SOME, 4, epochs=2)
    run = scaffold(world, SOME, b, local, option=option, eta_g=0.8)
    worst = 0.0
    for server, clients in zip(run.server_states, run.client_states, strict=True):
        mean = sum(state["c"] for state in clients.values()) / len(SIZES)
        worst = max(worst, float(np.abs(server["c"] - mean).max()))
    below("I-8", worst, 1e-12)


def test_i9_a_common_offset_cancels_under_full_participation_only(world):
    offset = np.full_like(world.w0, 2.5)
    for rounds in (ALL, SOME):
        b = epoch_batches(world, rounds, 4, epochs=2)
        plain = scaffold(world, rounds, b, SGD)
        shifted = scaffold(world, rounds, b, SGD, offset=offset)
        if rounds is ALL:
            below("I-9 full", gap(plain, shifted), 1e-12)
        else:
            above("I-9 partial", gap(plain, shifted), 1e-2)


@pytest.mark.parametrize("option", ["I", "II"])
def test_i10_one_step_with_everybody_is_uniform_fedavg(world, option):
    b = step_batches(world, ALL, steps=1, batch_size=4)
    plain = fedavg(world, ALL, b, SGD, weighting="uniform")
    below("I-10", gap(scaffold(world, ALL, b, SGD, option=option), plain), 1e-12)


def test_i11_options_agree_for_one_full_step(world):
    b = step_batches(world, SOME, steps=1)
    for local in (SGD, HEAVY):
        one = scaffold(world, SOME, b, local, option="I")
        below("I-11", gap(one, scaffold(world, SOME, b, local, option="II")), 1e-12)


def test_i12_first_round_is_uniform_fedavg(world):
    b = epoch_batches(world, SOME, 4, epochs=2)
    for local, option in [(SGD, "I"), (SGD, "II"), (HEAVY, "II"), (RMSPROP, "I"), (ADAMW, "I")]:
        run = scaffold(world, SOME, b, local, option=option)
        plain = fedavg(world, SOME, b, local, weighting="uniform")
        below("I-12", np.abs(run.x[0] - plain.x[0]).max(), 0.0)
        above("I-12 later", gap(run, plain), 1e-4)


def test_i13_scaffold_m_is_scaffold_two(world):
    for per_round in (1, 3, 6):
        rounds = sample_participants(9, 6, per_round, 6)
        b = step_batches(world, rounds, steps=5, batch_size=4)
        for local in LINEAR:
            original = scaffold(world, rounds, b, local)
            below("I-13", gap(scaffold_m(world, rounds, b, local), original), 1e-12)
            printed = gap(scaffold_m(world, rounds, b, local, printed_decay=True), original)
            if per_round == 1:
                below("I-13 printed factor, m=1", printed, 1e-12)
            else:
                above(f"I-13 printed factor, m={per_round}", printed, 1e-3)


def test_i43_scaffold_reaches_the_optimum_and_fedavg_does_not():
    world = quadratic_world(11, clients=5, dim=4)
    everyone = [list(range(5))] * 400
    b = step_batches(world, everyone, steps=5)
    truth = world.optimum([0.2] * 5)
    for option in ("I", "II"):
        x = scaffold(world, everyone, b, Local(lr=0.05), option=option).x[-1]
        below(f"I-43 SCAFFOLD {option}", np.abs(x - truth).max(), 1e-10)
    above(
        "I-43 FedAvg", np.abs(fedavg(world, everyone, b, Local(lr=0.05)).x[-1] - truth).max(), 1e-3
    )


# ---- servers -------------------------------------------------------------------------------------


def test_i30_server_momentum(world):
    b = epoch_batches(world, SOME, 4, epochs=2)
    constant = Local(lr=0.1, weight_decay=1e-3)
    plain, uniform = fedavg(world, SOME, b, SGD), fedavg(world, SOME, b, SGD, weighting="uniform")
    below("I-30 FedAvgM beta 0", gap(fedavgm(world, SOME, b, SGD, beta=0.0), plain), 0.0)
    below("I-30 SlowMo beta 0", gap(slowmo(world, SOME, b, SGD, beta=0.0), uniform), 1e-12)
    momentum = fedavgm(world, SOME, b, constant, beta=0.7, weighting="uniform")
    below("I-30 SlowMo = FedAvgM", gap(slowmo(world, SOME, b, constant, beta=0.7), momentum), 1e-12)
    decayed = fedavgm(world, SOME, b, SGD, beta=0.7, weighting="uniform")
    above("I-30 with lr decay", gap(slowmo(world, SOME, b, SGD, beta=0.7), decayed), 1e-4)
    damped = fedavgm(world, SOME, b, SGD, beta=0.7, eta_g=1 / 0.3, dampening=True)
    below(
        "FedAvgM dampening = rescaled", gap(damped, fedavgm(world, SOME, b, SGD, beta=0.7)), 1e-12
    )


@pytest.mark.parametrize("server", ["adam", "yogi", "adagrad"])
def test_i31_large_tau_turns_adaptivity_off(world, server):
    b = epoch_batches(world, SOME, 4, epochs=2)
    plain = fedavg(world, SOME, b, SGD)
    momentum = fedavgm(world, SOME, b, SGD, beta=0.6, eta_g=0.4)
    # D / (1 + sqrt(v)/T) = D - D sqrt(v)/T + ...: the difference is of order D^2 / T.
    for size in (1e8, 1e9):
        large = {"server": server, "b2": 0.99, "tau": size, "eta_g": size}
        no_momentum = gap(fedopt(world, SOME, b, SGD, b1=0.0, **large), plain)
        below(f"I-31 b1 0, T {size:.0e}", no_momentum, 1 / size)
        with_momentum = gap(fedopt(world, SOME, b, SGD, b1=0.6, **large), momentum)
        below(f"I-31 b1 .6, T {size:.0e}", with_momentum, 1 / size)


def test_i32_adam_and_yogi_agree_in_the_first_round(world):
    b = epoch_batches(world, SOME, 4, epochs=2)
    common = {"eta_g": 0.05, "b1": 0.9, "b2": 0.99, "tau": 1e-3}
    adam = fedopt(world, SOME, b, SGD, server="adam", **common)
    yogi = fedopt(world, SOME, b, SGD, server="yogi", **common)
    below("I-32 first round", np.abs(adam.x[0] - yogi.x[0]).max(), 0.0)
    above("I-32 later", gap(adam, yogi), 1e-6)
    v = np.zeros_like(world.w0)
    for state, total in zip(yogi.server_states, yogi.aggregate, strict=True):
        assert np.all(state["v"] - v <= (1 - 0.99) * total**2 * (1 + 1e-12))
        v = state["v"]


def test_i33_adagrad_sums_squares(world):
    b = epoch_batches(world, SOME, 4, epochs=2)
    run = fedopt(
        world, SOME, b, SGD, server="adagrad", eta_g=0.05, b1=0.0, b2=0.99, tau=1e-3, v0=1e-6
    )
    v = np.full_like(world.w0, 1e-6)
    for state, total in zip(run.server_states, run.aggregate, strict=True):
        assert np.all(state["v"] >= v)
        v = v + total**2
        below("I-33", np.abs(state["v"] - v).max(), 1e-12)
        v = state["v"]


def test_bias_corrections_differ_and_match_their_definitions(world):
    b = epoch_batches(world, SOME, 4, epochs=2)
    kwargs = {"server": "adam", "eta_g": 0.05, "b1": 0.9, "b2": 0.99, "tau": 1e-3}
    d = fedopt(world, SOME, b, SGD, **kwargs).aggregate[0]
    # First round, by hand: m = .1 D, v = .01 D^2, so m_hat = D and v_hat = D^2.
    standard = fedopt(world, SOME, b, SGD, bias_correction="standard", **kwargs).x[0]
    below("standard", np.abs(standard - world.w0 - 0.05 * d / (np.abs(d) + 1e-3)).max(), 1e-12)
    flower = fedopt(world, SOME, b, SGD, bias_correction="flower", **kwargs).x[0]
    eta = 0.05 * np.sqrt(1 - 0.99**2) / (1 - 0.9**2)
    below(
        "flower", np.abs(flower - world.w0 - eta * 0.1 * d / (0.1 * np.abs(d) + 1e-3)).max(), 1e-12
    )
    inside = fedopt(world, SOME, b, SGD, eps_inside=True, **kwargs).x[0]
    below(
        "inside", np.abs(inside - world.w0 - 0.005 * d / np.sqrt(0.01 * d**2 + 1e-3)).max(), 1e-12
    )
