"""Server optimisers on top of FedAvg's clients: FedAvgM, SlowMo, FedOpt."""

import numpy as np

from .local import (
    Local,
    Trajectory,
    client_weights,
    finite,
    has_samples,
    local_training,
    round_lr,
)
from .worlds import Array, Batches, World


def client_round(
    world: World,
    sampled: list[int],
    batches: Batches,
    local: Local,
    r: int,
    x: Array,
    weighting: str,
) -> tuple[dict[int, Array], Array]:
    """Return (D_i of the usable clients, D = sum q_i D_i) of plain FedAvg clients."""
    updates: dict[int, Array] = {}
    for i in sorted(sampled):
        if not has_samples(world, i):
            continue
        y = local_training(world, i, x, batches[r, i], local, r)
        if finite(y - x):
            updates[i] = y - x
    total = np.zeros_like(x)
    if updates:
        q = client_weights(world, list(updates), weighting)
        for i in updates:
            total = total + q[i] * updates[i]
    return updates, total


def fedavgm(
    world: World,
    participants: list[list[int]],
    batches: Batches,
    local: Local,
    *,
    beta: float = 0.9,
    eta_g: float = 1.0,
    dampening: bool = False,
    weighting: str = "size",
) -> Trajectory:
    """Server: v <- beta v + D, x <- x + eta_g v; with dampening (1-beta) D in place of D."""
    trajectory = Trajectory()
    x = world.w0.copy()
    v = np.zeros_like(x)
    for r, sampled in enumerate(participants):
        updates, total = client_round(world, sampled, batches, local, r, x, weighting)
        if updates:  # a round in which nobody could be used leaves the server untouched
            v = beta * v + (1.0 - beta) * total if dampening else beta * v + total
            x = x + eta_g * v
        trajectory.record(x, updates, total, server={"v": v})
    return trajectory


def slowmo(
    world: World,
    participants: list[list[int]],
    batches: Batches,
    local: Local,
    *,
    beta: float = 0.5,
    alpha: float = 1.0,
) -> Trajectory:
    """Server: u <- beta u + (x - xbar)/eta_r, x <- x - alpha eta_r u; xbar the uniform mean."""
    trajectory = Trajectory()
    x = world.w0.copy()
    u = np.zeros_like(x)
    for r, sampled in enumerate(participants):
        eta = round_lr(local, r)
        updates, total = client_round(world, sampled, batches, local, r, x, "uniform")
        if updates:
            u = beta * u - total / eta
            x = x - alpha * eta * u
        trajectory.record(x, updates, total, server={"u": u})
    return trajectory


def fedopt(
    world: World,
    participants: list[list[int]],
    batches: Batches,
    local: Local,
    *,
    server: str,
    eta_g: float,
    b1: float,
    b2: float,
    tau: float,
    v0: float = 0.0,
    bias_correction: str = "none",
    eps_inside: bool = False,
    weighting: str = "size",
) -> Trajectory:
    """FedAdam, FedYogi, FedAdagrad: m, v from D, then x <- x + eta_g m / (sqrt(v) + tau).

    `bias_correction`: none | flower | standard (adam and yogi only: Adagrad's v is a sum).
    `eps_inside` puts sqrt(v + tau) for sqrt(v) + tau.
    """
    if bias_correction != "none" and server == "adagrad":
        raise ValueError("Adagrad's v is a sum and has no bias to correct")
    trajectory = Trajectory()
    x = world.w0.copy()
    m = np.zeros_like(x)
    v = np.full_like(x, v0)
    completed = 0  # server steps taken so far
    for r, sampled in enumerate(participants):
        updates, total = client_round(world, sampled, batches, local, r, x, weighting)
        if updates:
            completed += 1
            m = b1 * m + (1.0 - b1) * total
            v = second_moment(server, v, total, b2)
            x = x + fedopt_step(m, v, eta_g, b1, b2, tau, completed, bias_correction, eps_inside)
        trajectory.record(x, updates, total, server={"m": m, "v": v})
    return trajectory


def second_moment(server: str, v: Array, total: Array, b2: float) -> Array:
    """Return the new v of an adaptive server."""
    square = total * total
    if server == "adam":
        return b2 * v + (1.0 - b2) * square
    if server == "yogi":
        return v - (1.0 - b2) * square * np.sign(v - square)
    if server == "adagrad":
        return v + square
    raise ValueError(f"unknown server optimiser {server!r}")


def fedopt_step(
    m: Array,
    v: Array,
    eta_g: float,
    b1: float,
    b2: float,
    tau: float,
    t: int,
    bias_correction: str | None,
    eps_inside: bool,
) -> Array:
    """Return the step the server adds to x; t = 1 in the first round."""
    if bias_correction == "flower":
        # Flower raises to server_round + 1, and its first server_round is 1: exponent 2 at first.
        eta_g = eta_g * np.sqrt(1.0 - b2 ** (t + 1)) / (1.0 - b1 ** (t + 1))
    elif bias_correction == "standard":
        m = m / (1.0 - b1**t)
        v = v / (1.0 - b2**t)
    elif bias_correction != "none":
        raise ValueError(f"unknown bias_correction {bias_correction!r}")
    if eps_inside:
        return eta_g * m / np.sqrt(v + tau)
    return eta_g * m / (np.sqrt(v) + tau)
