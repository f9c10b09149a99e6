"""I-30 to I-33: server momentum, adaptive servers."""

import numpy as np
import pytest

import undrift as fl
from longhand.cases import HEAVY, RMSPROP, SGD, WORLDS, above, below
from proofs.bridge import gap, local_of, run
from proofs.common import ALL5, SOME5, unequal
from undrift.verify.longhand.local import Local
from undrift.verify.longhand.worlds import step_batches


def adaptive(kind: str, local: Local, **settings) -> fl.Algorithm:
    return fl.Algorithm(local=local_of(local), server=fl.Adaptive(kind, **settings))


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


def test_i31_the_rest_falls_with_tau_and_the_square_of_the_update(mlp):
    """lr D / (sqrt(v) + tau) with lr = tau = T is D - sqrt(1 - beta2) D |D| / T."""
    b, rounds = step_batches(mlp, ALL5[:1], steps=1), ALL5[:1]

    def rest(large: float, lr: float) -> float:
        plain = run(mlp, rounds, b, fl.fedavg(lr))
        server = fl.Adaptive("adam", lr=large, tau=large, beta1=0.0)
        return gap(run(mlp, rounds, b, fl.Algorithm(local=fl.Sgd(lr), server=server)), plain)

    below("I-31 ten times tau, a tenth", abs(rest(1e3, 0.1) / rest(1e4, 0.1) - 10), 1e-2)
    below("I-31 half the update, a quarter", abs(rest(1e3, 0.2) / rest(1e3, 0.1) - 4), 1e-2)


def test_i32_adam_and_yogi_agree_in_the_first_round_only(world):
    b, common = unequal(world), {"lr": 0.05, "tau": 1e-3}
    adam, yogi = (run(world, SOME5, b, adaptive(k, SGD, **common)) for k in ("adam", "yogi"))
    below("I-32", np.abs(adam.x[0] - yogi.x[0]).max(), 0.0)
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
        below("I-32 growth", (state["0.Adaptive.v"] - v - 0.1 * update**2).max(), 1e-12)
        v = state["0.Adaptive.v"]


def test_i33_adagrad_sums_squares(world):
    found = run(world, SOME5, unequal(world), adaptive("adagrad", SGD, beta1=0.0, v0=1e-6))
    v = before = np.full_like(world.w0, 1e-6)
    for state, update in zip(found.server, updates(found, 0.0), strict=True):
        assert np.all(state["0.Adaptive.v"] >= before)
        v, before = v + update**2, state["0.Adaptive.v"]
        below("I-33", np.abs(state["0.Adaptive.v"] - v).max(), 1e-12)
