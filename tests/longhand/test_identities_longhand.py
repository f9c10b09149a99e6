"""The newer long-hand loops against the older ones and each other: spec section 4, I-14 to I-45.

No line of the library takes part. Measured on the softmax, mlp and regression worlds, all settings
of a test together (`pytest -s` prints every value); "differ" is the smallest difference seen.

 I-14  1.6e-15, sum d_i 5.1e-15               I-15  4.4e-16; mu, beta differ by .54
 I-16  2.2e-16, series 2.8e-16                I-17  2.7e-15; partial participation differs by .43
 I-18  0                                      I-19  3.0e-16, by size 2.8e-16
 I-20  2.2e-16; d = N/m differs by 3.3e-2, equal n 0
 I-21  4.4e-16                                I-22  3.3e-16
 I-23  1.1e-15; unequal omega differs by 8.2e-2
 I-24  2.2e-16 and 4.4e-16                    I-25  .08, .018, 1.8e-3, 1.8e-4 (mlp)
 I-26  8.9e-16                                I-27  2.0e-15; FedPD too, 1.3e-15
 I-28  1.1e-15 and 6.7e-16; with r_i for unequal n it is not SCAFFOLD, .057
 I-29  4.4e-16                                I-31  AMSGrad 3.4e-10 at T = 1e8
 I-43  FedDyn 2e-11; AdaBest rests where the mean gradient is mu (1 - beta)(x_0 - x)
"""

import numpy as np
import pytest

from undrift.verify.longhand.adaptive import fedamsgrad
from undrift.verify.longhand.averaging import fedavg, fednova, fedprox
from undrift.verify.longhand.control import scaffold
from undrift.verify.longhand.duals import adabest, fedadmm, feddc, feddyn, fedpd, vrlsgd
from undrift.verify.longhand.fair import qfedavg, qfedsgd
from undrift.verify.longhand.fedvra import effective_steps, fedvra
from undrift.verify.longhand.local import Local
from undrift.verify.longhand.servers import fedavgm, fedopt
from undrift.verify.longhand.worlds import World, epoch_batches, quadratic_world, step_batches

from .cases import ALL, CLIPPED, HEAVY, LINEAR, SGD, SIZES, SOME, WORLDS, above, below, gap

N, M = len(SIZES), len(SOME[0])
CHANCES = [M / N] * N
UNIFORM = {"weighting": "uniform"}


def equal_sizes() -> World:
    world = WORLDS["softmax"]()
    data = [(x[:7], y[:7]) for x, y in world.data]
    return World(data, world.gradient, world.loss, world.w0)


def unequal(world, rounds=SOME):
    return epoch_batches(world, rounds, 4, epochs=2)


def state_gap(run, value, name) -> float:
    """Largest |run's server state - value(round)| over the rounds."""
    states = run.server_states
    return max(float(np.abs(s[name] - value(r)).max()) for r, s in enumerate(states))


def mean_state(run, r, name, weights=None):
    states = run.client_states[r]
    share = {i: 1.0 / len(states) for i in states} if weights is None else weights
    return sum(share[i] * states[i][name] for i in states)


# ---- VRL-SGD -------------------------------------------------------------------------------------


@pytest.mark.parametrize("local", LINEAR)
def test_i14_vrlsgd_is_scaffold_two(world, local):
    b = step_batches(world, ALL, steps=5, batch_size=4)
    run, other = vrlsgd(world, ALL, b, local), scaffold(world, ALL, b, local)
    below("I-14", gap(run, other), 1e-12)
    for r in range(len(ALL)):
        below("I-14 sum d_i", np.abs(mean_state(run, r, "d")).max() * N, 1e-12)
        for i, state in run.client_states[r].items():
            variate = other.client_states[r][i]["c"] - other.server_states[r]["c"]
            below("I-14 d_i = c_i - c", np.abs(state["d"] - variate).max(), 1e-12)


def test_vrlsgd_is_refused_where_it_is_not_defined(world):
    with pytest.raises(ValueError, match="full participation"):
        vrlsgd(world, SOME, unequal(world), SGD)
    with pytest.raises(ValueError, match="equal K"):
        vrlsgd(world, ALL, unequal(world, ALL), SGD)


# ---- AdaBest -------------------------------------------------------------------------------------


@pytest.mark.parametrize("local", [*LINEAR, CLIPPED])
def test_i15_adabest_without_memory_is_uniform_fedavg(world, local):
    b = unequal(world)
    plain = fedavg(world, SOME, b, local, **UNIFORM)
    below("I-15", gap(adabest(world, SOME, b, local, mu=0.0, beta=0.0), plain), 1e-12)
    above("I-15 mu, beta", gap(adabest(world, SOME, b, local), plain), 1e-3)


@pytest.mark.parametrize("unbalanced", [False, True])
def test_i16_adabest_h_is_a_weighted_sum_of_mean_updates(world, unbalanced):
    run = adabest(world, SOME, unequal(world), SGD, mu=0.1, beta=0.8, unbalanced=unbalanced)
    means = [-sum(d.values()) / len(d) for d in run.updates]
    before = [{"xbar": world.w0, "h": np.zeros_like(world.w0)}, *run.server_states]
    for r, now in enumerate(run.server_states):
        moved = before[r]["xbar"] - now["xbar"]
        below("I-16", np.abs(moved - before[r]["h"] - means[r]).max(), 1e-12)
        series = sum(0.8 ** (r - s + 1) * means[s] for s in range(r + 1))
        below("I-16 series", np.abs(now["h"] - series).max(), 1e-12)


def test_i17_adabest_with_beta_one_is_feddyn(world):
    for mu, alpha in [(0.0, 0.0), (0.3, 0.3)]:
        for local in (SGD, HEAVY):
            b = unequal(world, ALL)
            dyn = feddyn(world, ALL, b, local, alpha=alpha)
            best = adabest(world, ALL, b, local, mu=mu, beta=1.0, prox=mu)
            below(f"I-17 mu {mu}", gap(best, dyn), 1e-12)
    b = unequal(world)
    best = adabest(world, SOME, b, SGD, mu=0.3, beta=1.0, prox=0.3)
    above("I-17 partial", gap(best, feddyn(world, SOME, b, SGD, alpha=0.3)), 1e-4)


def test_i18_memory_fades_by_the_rounds_that_were_missed(world):
    """From the second round on eta is 0, so g_i = 0 and only the old memory is left."""
    rounds = [[0, 1, 2, 3, 4, 5], [1], [2], [1], [5], [0, 2]]
    run = adabest(world, rounds, unequal(world, rounds), Local(lr=0.1, lr_decay=0.0))
    first = {i: s["h"] for i, s in run.client_states[0].items()}
    last = {i: s["h"] for i, s in run.client_states[-1].items()}
    assert np.array_equal(last[0], first[0] / 5)
    assert np.array_equal(last[1], first[1] / 1 / 2)
    assert np.array_equal(last[2], first[2] / 2 / 3)
    assert np.array_equal(last[5], first[5] / 4)
    assert np.array_equal(last[3], first[3])


def test_adabest_mean_size_counts_every_participation(world):
    run = adabest(world, SOME, unequal(world), SGD, unbalanced=True)
    seen: list[int] = []
    for sampled, state in zip(SOME, run.server_states, strict=True):
        assert state["nbar"] == (np.mean(seen) if seen else 0.0)
        seen += [SIZES[i] for i in sampled]


# ---- FedDyn, FedADMM, FedPD, FedDC ---------------------------------------------------------------


@pytest.mark.parametrize("local", [*LINEAR, CLIPPED])
def test_i19_feddyn_h_is_the_mean_dual(world, local):
    run = feddyn(world, SOME, unequal(world), local, alpha=0.2)
    below("I-19", state_gap(run, lambda r: mean_state(run, r, "h") / 0.2, "h"), 1e-12)
    run = feddyn(world, SOME, unequal(world), local, alpha=0.2, by_size=True)
    share = {i: n / np.mean(SIZES) / 0.2 / N for i, n in enumerate(SIZES)}
    below("I-19 by size", state_gap(run, lambda r: mean_state(run, r, "h", share), "h"), 1e-12)


@pytest.mark.parametrize("local", [*LINEAR, CLIPPED])
def test_i27_admm_dyn_vra_and_pd_are_one_under_full_participation(world, local):
    b = unequal(world, ALL)
    dyn = feddyn(world, ALL, b, local, alpha=0.3)
    admm = fedadmm(world, ALL, b, local, rho=0.3)
    below("I-27 FedADMM", gap(admm, dyn), 1e-12)
    vra = fedvra(world, ALL, b, local, gamma=0.3, a=1.0, d=1.0, omega="uniform")
    below("I-27 FedVRA", gap(vra, dyn), 1e-12)
    below("FedPD", gap(fedpd(world, ALL, b, local, rho=0.3), dyn), 1e-12)
    for i in range(N):
        below(
            "I-27 a_i = -lambda_i",
            np.abs(admm.client_states[-1][i]["a"] + vra.client_states[-1][i]["lambda"]).max(),
            1e-12,
        )
    above(
        "FedPD from the own model",
        gap(fedpd(world, ALL, b, local, rho=0.3, start="own"), dyn),
        1e-4,
    )
    b = unequal(world)
    partial = gap(fedadmm(world, SOME, b, local, rho=0.3), feddyn(world, SOME, b, local, alpha=0.3))
    above("I-27 partial", partial, 1e-3)


def test_fedpd_without_communication_minimises_alone(world):
    b = unequal(world, ALL)
    silent = fedpd(world, ALL, b, SGD, rho=0.5, communicate=[False, True, False, False, True, True])
    assert np.array_equal(silent.x[0], world.w0)
    assert np.array_equal(silent.x[3], silent.x[1])
    centres = [silent.client_states[1][i]["x0"] for i in range(N)]
    assert all(np.array_equal(c, silent.x[1]) for c in centres)
    assert not np.array_equal(silent.client_states[2][0]["x0"], silent.client_states[2][1]["x0"])


@pytest.mark.parametrize("local", [*LINEAR, CLIPPED])
def test_i28_feddc_without_control_is_feddyn(world, local):
    b = unequal(world)
    for by_size in (False, True):
        dc = feddc(world, SOME, b, local, alpha=0.2, by_size=by_size, control=False)
        dyn = feddyn(world, SOME, b, local, alpha=0.2, by_size=by_size)
        below(f"I-28 FedDyn, by size {by_size}", gap(dc, dyn), 1e-12)
        above("I-28 control", gap(feddc(world, SOME, b, local, by_size=by_size), dc), 1e-4)


@pytest.mark.parametrize("local", LINEAR)
def test_i28_feddc_without_drift_is_scaffold(world, local):
    b = unequal(world)
    bare = {"alpha": 0.0, "drift": False}
    plain = scaffold(world, SOME, b, local)
    below("I-28", gap(feddc(world, SOME, b, local, by_size=False, **bare), plain), 1e-12)
    above("I-28 unequal n", gap(feddc(world, SOME, b, local, **bare), plain), 1e-3)
    same, b = equal_sizes(), unequal(equal_sizes())
    below(
        "I-28 equal n",
        gap(feddc(same, SOME, b, local, **bare), scaffold(same, SOME, b, local)),
        1e-12,
    )


# ---- FedVRA --------------------------------------------------------------------------------------


@pytest.mark.parametrize("local", [*LINEAR, CLIPPED])
def test_i20_i21_fedvra_without_duals(world, local):
    b = unequal(world)
    bare = {"a": 0.0, "d": "fedavg"}
    plain = fedavg(world, SOME, b, local)
    below("I-20", gap(fedvra(world, SOME, b, local, gamma=0.0, **bare), plain), 1e-12)
    literal = gap(fedvra(world, SOME, b, local, gamma=0.0, a=0.0, d=N / M), plain)
    above("I-20 d = N/m, unequal n", literal, 1e-3)
    prox = fedprox(world, SOME, b, local, mu=0.4)
    below("I-21", gap(fedvra(world, SOME, b, local, gamma=0.4, **bare), prox), 1e-12)
    same, b = equal_sizes(), unequal(equal_sizes())
    literal = gap(
        fedvra(same, SOME, b, local, gamma=0.0, a=0.0, d=N / M), fedavg(same, SOME, b, local)
    )
    below("I-20 d = N/m, equal n", literal, 1e-12)


def test_i22_fedvra_is_fednova(world):
    b = unequal(world)
    p = np.array(SIZES) / sum(SIZES)

    def d(i: int, r: int, steps: int, eta: float) -> float:
        present = sum(p[j] for j in SOME[r])
        effective = sum(p[j] / present * len(b[r, j]) for j in SOME[r])
        return effective / (steps * present)

    run = fedvra(world, SOME, b, SGD, gamma=0.0, a=0.0, d=d)
    below("I-22", gap(run, fednova(world, SOME, b, SGD)), 1e-12)


@pytest.mark.parametrize("local", [*LINEAR, CLIPPED])
def test_i23_fedvra_is_feddyn_for_equal_weights(world, local):
    b = unequal(world)
    dyn = feddyn(world, SOME, b, local, alpha=0.2)
    same = {"gamma": 0.2, "a": 1.0, "d": N / M}
    below("I-23", gap(fedvra(world, SOME, b, local, omega="uniform", **same), dyn), 1e-12)
    above("I-23 unequal omega", gap(fedvra(world, SOME, b, local, **same), dyn), 1e-3)


def test_i24_fedvra_steps_and_duals_have_the_printed_form(world):
    gamma, a, local = 0.7, 1.4, Local(lr=0.1)
    b = unequal(world)
    run = fedvra(world, SOME, b, local, gamma=gamma, a=a, d=2.0)
    step, dual = 0.0, 0.0
    for r in range(1, len(SOME)):
        x, lam = run.x[r - 1], run.server_states[r - 1]["lambda"]
        xbar = x + lam / gamma
        for i in SOME[r]:
            own = run.client_states[r - 1][i]["lambda"]
            y, gradients, keep = x.copy(), [], 1 - gamma * local.lr
            for batch in b[r, i]:
                g = world.gradient(y, world.data[i][0][batch], world.data[i][1][batch])
                gradients.append(g)
                printed = y - local.lr / keep * (g + gamma * (lam / gamma) - own)
                printed = keep * printed + gamma * local.lr * xbar
                y = y - local.lr * (g - own + gamma * (y - x))
                step = max(step, float(np.abs(printed - y).max()))
            total = effective_steps(gamma, local.lr, len(gradients))
            weights = [keep**t / total for t in reversed(range(len(gradients)))]
            mean = sum(w * g for w, g in zip(weights, gradients, strict=True))
            share = a * gamma * local.lr * total
            new = share * mean + (1 - share) * own
            dual = max(dual, float(np.abs(new - run.client_states[r][i]["lambda"]).max()))
    below("I-24 step", step, 1e-12)
    below("I-24 dual", dual, 1e-12)


def test_i25_small_gamma_makes_the_first_dual_a_mean_gradient(world):
    local = Local(lr=0.1)
    b = unequal(world)
    c = scaffold(world, SOME, b, local).client_states[0]
    away = []
    for gamma in (0.5, 0.1, 0.01, 0.005, 0.001):
        run = fedvra(
            world,
            SOME,
            b,
            local,
            gamma=gamma,
            d=1.0,
            a=lambda i, r, q, eta, gamma=gamma: 1 / (gamma * eta * q),
        )
        duals = run.client_states[0]
        away.append(max(float(np.abs(duals[i]["lambda"] - c[i]["c"]).max()) for i in SOME[0]))
    print("I-25", away)
    below("I-25 half the gamma, half the distance", abs(away[2] / away[3] - 2), 0.02)
    below("I-25 gamma .001", away[-1], 2e-3)


@pytest.mark.parametrize("omega", ["size", "uniform"])
def test_i26_lambda_is_the_weighted_sum_of_the_lambda_i(world, omega):
    settings = {"gamma": [0.1, 0.3, 0.2, 0.0, 0.5, 0.4], "omega": omega, "chances": CHANCES}
    for local in (SGD, HEAVY):
        run = fedvra(world, SOME, unequal(world), local, **settings)
        p = {i: n / sum(SIZES) if omega == "size" else 1 / N for i, n in enumerate(SIZES)}
        gaps = state_gap(run, lambda r, run=run, p=p: mean_state(run, r, "lambda", p), "lambda")
        below("I-26", gaps, 1e-12)


# ---- q-FedAvg, servers ---------------------------------------------------------------------------


@pytest.mark.parametrize("local", [*LINEAR, CLIPPED])
def test_i29_qfedavg_without_q_is_uniform_fedavg(world, local):
    b = unequal(world)
    plain = fedavg(world, SOME, b, local, **UNIFORM)
    for lipschitz in (None, 0.3, 40.0):
        below("I-29", gap(qfedavg(world, SOME, b, local, q=0.0, lipschitz=lipschitz), plain), 1e-12)
    above("I-29 q 1", gap(qfedavg(world, SOME, b, local, q=1.0), plain), 1e-3)


def test_qfedsgd_is_qfedavg_with_one_full_step(world):
    b = step_batches(world, SOME, steps=1)
    for q in (0.0, 0.5, 2.0):
        below(
            "q-FedSGD",
            gap(qfedsgd(world, SOME, b, SGD, q=q), qfedavg(world, SOME, b, SGD, q=q)),
            1e-12,
        )


def test_qfedavg_step_is_newtons_for_the_fair_objective():
    """One client, q: x - F^q dw / (q F^(q-1) |dw|^2 + L F^q) = x - F dw / (q |dw|^2 + L F)."""
    world = quadratic_world(4, clients=1, dim=4)
    run = qfedsgd(world, [[0]], {}, Local(lr=0.2), q=3.0)
    g, f = world.gradient(world.w0, *world.data[0]), world.loss(world.w0, *world.data[0])
    wanted = world.w0 - f * g / (3.0 * (g @ g) + 5.0 * f)
    below("q-FedSGD by hand", np.abs(run.x[0] - wanted).max(), 1e-9)


def test_amsgrad_is_adam_while_v_grows(world):
    b = unequal(world)
    settings = {"eta_g": 0.05, "b1": 0.9, "tau": 1e-3}
    ams = fedamsgrad(world, SOME, b, SGD, b2=0.6, **settings)
    adam = fedopt(world, SOME, b, SGD, server="adam", b2=0.6, **settings)
    below("AMSGrad first round", np.abs(ams.x[0] - adam.x[0]).max(), 0.0)
    above("AMSGrad later", gap(ams, adam), 1e-6)
    largest = np.zeros_like(world.w0)
    for state in ams.server_states:
        largest = np.maximum(largest, state["v"])
        assert np.array_equal(state["vmax"], largest)
    start = fedamsgrad(world, SOME, b, SGD, b2=0.6, v0=1e9, **settings).server_states[-1]
    assert np.array_equal(start["vmax"], np.full_like(world.w0, 1e9))
    for size in (1e8, 1e9):
        momentum = fedavgm(world, SOME, b, SGD, beta=0.6, eta_g=0.4)
        large = fedamsgrad(world, SOME, b, SGD, eta_g=size, tau=size, b1=0.6)
        below("I-31 AMSGrad", gap(large, momentum), 1 / size)


# ---- quadratics ----------------------------------------------------------------------------------


def test_i43_feddyn_reaches_the_optimum_and_adabest_comes_closer_with_beta():
    """AdaBest stops where the mean gradient is mu (1 - beta)(x_0 - x): sum h_t = beta/(1-beta)
    times the sum of gbar, and at rest every own gradient equals mu h_i. After 4000 rounds mu .02
    gives 2.3e-2, 1.1e-2, 2.3e-3 for beta 0, .5, .9; a larger mu rests earlier.
    """
    world = quadratic_world(11, clients=5, dim=4)
    everyone = [list(range(5))] * 320
    b = step_batches(world, everyone, steps=5)
    truth = world.optimum([0.2] * 5)
    local, mu = Local(lr=0.05), 0.3
    dyn = feddyn(world, everyone, b, local, alpha=0.3).server_states[-1]["xbar"]
    below("I-43 FedDyn", np.abs(dyn - truth).max(), 1e-10)
    biases = []
    for beta in (0.0, 0.5, 0.9):
        x = adabest(world, everyone, b, local, mu=mu, beta=beta).server_states[-1]["xbar"]
        gradient = sum(world.gradient(x, *data) for data in world.data) / 5
        rest = gradient - mu * (1 - beta) * (world.w0 - x)
        below("I-43 AdaBest's point of rest", np.abs(rest).max(), 1e-10)
        biases.append(float(np.abs(x - truth).max()))
    print("I-43 AdaBest", biases)
    assert biases[0] > biases[1] > biases[2] > 1e-3
