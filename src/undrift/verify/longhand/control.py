"""SCAFFOLD and AdaBest's SCAFFOLD/m, written out."""

import numpy as np

from .local import (
    Local,
    Trajectory,
    client_weights,
    finite,
    full_gradient,
    has_samples,
    impulse_norm,
    local_training,
    round_lr,
    step_lr,
)
from .worlds import Array, Batches, World


def option_two_divisor(
    local: Local, r: int, steps: int, correction: str = "gradient", base_lr: bool = False
) -> float:
    """Return what option II divides x - y_i by: ||a_i||_1 * eta_r, which is K_i * eta_r for SGD.

    With correction "post_step" the correction enters once per step with that step's lr, outside
    momentum, so the divisor is the plain sum of the learning rates.
    `base_lr` repeats the FedDyn repository's slip: the undecayed eta (C5).
    """
    eta = local.lr if base_lr else round_lr(local, r)
    if correction == "post_step":
        total = 0.0
        for k in range(steps):
            total += step_lr(local, r, k) * (eta / round_lr(local, r))
        return total
    if local.optimizer == "sgd" and local.step_factor is None:
        return steps * eta  # 1.3 as printed; also what public code does under clipping
    return impulse_norm(local, r, steps) * eta


def _scaffold_client(
    world: World,
    i: int,
    x: Array,
    c: Array,
    c_i: Array,
    steps: list[Array],
    local: Local,
    r: int,
    option: str,
    correction: str,
    base_lr: bool,
) -> tuple[Array, Array]:
    """Return (y_i, c_i+) of one client."""
    difference = c - c_i  # formed first, so that equal variates cancel exactly
    if correction == "gradient":
        y = local_training(world, i, x, steps, local, r, correction=difference)
    elif correction == "post_step":
        y = local_training(world, i, x, steps, local, r, after_step=difference)
    else:
        raise ValueError(f"unknown correction {correction!r}")

    if option == "I":
        return y, full_gradient(world, i, x, local)
    if option == "II":
        divisor = option_two_divisor(local, r, len(steps), correction, base_lr)
        return y, c_i - c + (x - y) / divisor
    raise ValueError(f"unknown option {option!r}")


def scaffold(
    world: World,
    participants: list[list[int]],
    batches: Batches,
    local: Local,
    *,
    option: str = "II",
    weighting: str = "uniform",
    c_update: str = "population",
    eta_g: float = 1.0,
    correction: str = "gradient",
    base_lr: bool = False,
    offset: Array | None = None,
) -> Trajectory:
    """Local y <- y - eta (g - c_i + c); server x <- x + eta_g D, c <- c + (1/N) sum_S dc_i.

    `c_update`: "population" = the line above, "size" = c + sum_S q_i dc_i.
    `offset` starts c and every c_i at the same vector instead of zero (I-9).
    """
    trajectory = Trajectory()
    x = world.w0.copy()
    population = len(world.data)
    start = np.zeros_like(x) if offset is None else offset
    c = start.copy()
    variates = {i: start.copy() for i in range(population)}

    for r, sampled in enumerate(participants):
        updates: dict[int, Array] = {}
        new_variates: dict[int, Array] = {}
        for i in sorted(sampled):
            if not has_samples(world, i):
                continue
            y, c_plus = _scaffold_client(
                world, i, x, c, variates[i], batches[r, i], local, r, option, correction, base_lr
            )
            if finite(y - x, c_plus):
                updates[i] = y - x
                new_variates[i] = c_plus

        total = np.zeros_like(x)
        if updates:
            weights = client_weights(world, list(updates), weighting)
            for i in updates:
                total = total + weights[i] * updates[i]
            x = x + eta_g * total
            c = _scaffold_c(world, c, variates, new_variates, c_update, population)
        for i, c_plus in new_variates.items():
            variates[i] = c_plus
        states = {i: {"c": variates[i]} for i in variates}
        trajectory.record(x, updates, total, server={"c": c}, clients=states)
    return trajectory


def _scaffold_c(
    world: World,
    c: Array,
    variates: dict[int, Array],
    new_variates: dict[int, Array],
    c_update: str,
    population: int,
) -> Array:
    """Return the server's new c. The 1/N counts everybody enrolled, not the m that came."""
    if c_update == "population":
        total = np.zeros_like(c)
        for i in new_variates:
            total = total + (new_variates[i] - variates[i])
        return c + total / population
    if c_update == "size":
        q = client_weights(world, list(new_variates), "size")
        total = np.zeros_like(c)
        for i in new_variates:
            total = total + q[i] * (new_variates[i] - variates[i])
        return c + total
    raise ValueError(f"unknown c_update {c_update!r}")


def scaffold_m(
    world: World,
    participants: list[list[int]],
    batches: Batches,
    local: Local,
    *,
    printed_decay: bool = False,
) -> Trajectory:
    """SCAFFOLD in which clients upload only y_i; every client of a round must do the same K steps.

    client: h_i <- h_i - h + (x - y_i)/(K eta)
    server: h <- (1 - m/N) h + (m/N)(x - xbar)/(K eta), x <- xbar
    `printed_decay` puts (N-1)/N, as AdaBest prints it, for (1 - m/N).
    """
    trajectory = Trajectory()
    x = world.w0.copy()
    population = len(world.data)
    h = np.zeros_like(x)
    variates = {i: np.zeros_like(x) for i in range(population)}

    for r, sampled in enumerate(participants):
        models: dict[int, Array] = {}
        divisors: dict[int, float] = {}
        for i in sorted(sampled):
            if not has_samples(world, i):
                continue
            y = local_training(world, i, x, batches[r, i], local, r, correction=h - variates[i])
            if finite(y - x):
                models[i] = y
                divisors[i] = option_two_divisor(local, r, len(batches[r, i]))

        old = x
        if models:
            divisor = _common(divisors)
            mean = np.zeros_like(x)
            for i, y in models.items():
                variates[i] = variates[i] - h + (x - y) / divisor
                mean = mean + y / len(models)
            share = len(models) / population
            decay = (population - 1) / population if printed_decay else 1.0 - share
            h = decay * h + share * (x - mean) / divisor
            x = mean
        updates = {i: y - old for i, y in models.items()}
        states = {i: {"h": variates[i]} for i in variates}
        trajectory.record(x, updates, x - old, server={"h": h}, clients=states)
    return trajectory


def _common(divisors: dict[int, float]) -> float:
    """Return the one value of K eta: the server's line has a single K in it."""
    first = next(iter(divisors.values()))
    if any(other != first for other in divisors.values()):
        raise ValueError("SCAFFOLD/m is defined for equal K only")
    return first
