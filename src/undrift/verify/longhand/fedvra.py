"""FedVRA, written out."""

from collections.abc import Callable, Sequence

import numpy as np

from .local import Local, Trajectory, local_training, round_lr
from .steps import finite_only, moves, usable, zeros_for_all
from .worlds import Batches, World

# one number for everybody, one per client, or a function of (client, round, K_i, eta_r)
Setting = float | Sequence[float] | Callable[[int, int, int, float], float]


def setting(value: Setting, i: int, r: int, steps: int, eta: float) -> float:
    """Return a number, client i's entry, or what a function makes of the round."""
    if callable(value):
        return value(i, r, steps, eta)
    if isinstance(value, (int, float)):
        return float(value)
    return float(value[i])


def population_weights(world: World, omega: str) -> dict[int, float]:
    """Return omega_i over ALL clients: n_i / sum n_j ("size") or 1/N ("uniform")."""
    counts = [len(x) for x, _ in world.data]
    if omega == "uniform":
        return dict.fromkeys(range(len(counts)), 1.0 / len(counts))
    return {i: n / sum(counts) for i, n in enumerate(counts)}


def effective_steps(gamma: float, eta: float, steps: int) -> float:
    """Return Qtilde = (1 - (1 - gamma eta)^Q) / (gamma eta) = sum of the (1 - gamma eta)^t."""
    return sum((1.0 - gamma * eta) ** t for t in range(steps))


def default_a(gamma: float, eta: float, steps: int, d: float) -> float:
    """Remark 1: the largest a <= d with (a + d) eta gamma Qtilde <= 1."""
    if gamma == 0.0:
        return 0.0
    a = min(d, 1.0 / (eta * gamma * effective_steps(gamma, eta, steps)) - d)
    if a <= 0.0:
        raise ValueError(f"gamma {gamma} and eta {eta} leave no a > 0")
    return a


def fedvra(
    world: World,
    participants: list[list[int]],
    batches: Batches,
    local: Local,
    *,
    gamma: float | Sequence[float] = 0.1,
    a: Setting | None = None,
    d: Setting | str | None = None,
    omega: str = "size",
    chances: Sequence[float] | None = None,
) -> Trajectory:
    """beta = 1/sum omega_i gamma_i over the population.

    local   y <- y - eta (g - lambda_i + gamma_i (y - x))
            lambda_i <- lambda_i + a_i gamma_i (x - y_i)
    server  lambda <- lambda + sum_S omega_i a_i gamma_i (x - y_i)
            x <- x + beta sum_S omega_i d_i gamma_i (y_i - x) - beta lambda
    `d`: None = 1/Prob(i in S), "fedavg" = 1/sum_S omega_j. `a`: None = remark 1.
    gamma 0 for everybody: beta gamma_i := 1, a must be 0, lambda stays 0.
    """
    trajectory = Trajectory()
    x = world.w0.copy()
    weights = population_weights(world, omega)
    gammas = {i: setting(gamma, i, 0, 0, 0.0) for i in weights}
    pull = sum(weights[i] * gammas[i] for i in weights)
    lam = np.zeros_like(x)
    duals = zeros_for_all(world)
    for r, sampled in enumerate(participants):
        old, eta = x, round_lr(local, r)
        models = {}
        for i in usable(world, sampled):
            order, dual = batches[r, i], -duals[i]
            models[i] = local_training(world, i, x, order, local, r, mu=gammas[i], correction=dual)
        models = finite_only(models)
        present = sum(weights[i] for i in models)
        total = np.zeros_like(x)
        for i, y in models.items():
            steps = len(batches[r, i])
            d_i = _d(d, i, r, steps, eta, present, chances)
            a_i = (
                default_a(gammas[i], eta, steps, d_i) if a is None else setting(a, i, r, steps, eta)
            )
            if pull == 0.0 and a_i != 0.0:
                raise ValueError("gamma 0 needs a = 0")
            duals[i] = duals[i] + a_i * gammas[i] * (x - y)
            lam = lam + weights[i] * a_i * gammas[i] * (x - y)
            share = 1.0 if pull == 0.0 else gammas[i] / pull
            total = total + weights[i] * d_i * share * (y - x)
        if models:
            x = x + total - (lam / pull if pull > 0.0 else 0.0)
        states = {i: {"lambda": duals[i]} for i in duals}
        trajectory.record(x, moves(models, old), x - old, server={"lambda": lam}, clients=states)
    return trajectory


def _d(
    d: Setting | str | None,
    i: int,
    r: int,
    steps: int,
    eta: float,
    present: float,
    chances: Sequence[float] | None,
) -> float:
    if d is None:
        return 1.0 if chances is None else 1.0 / chances[i]
    if isinstance(d, str):
        if d != "fedavg":
            raise ValueError(f"unknown d {d!r}")
        return 1.0 / present
    return setting(d, i, r, steps, eta)
