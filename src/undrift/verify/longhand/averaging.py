"""FedAvg, FedProx and FedNova, written out."""

import numpy as np

from .local import (
    Local,
    Trajectory,
    client_weights,
    closed_form_norm,
    finite,
    has_samples,
    impulse_norm,
    local_training,
    round_lr,
)
from .worlds import Array, Batches, World


def fedavg(
    world: World,
    participants: list[list[int]],
    batches: Batches,
    local: Local,
    *,
    weighting: str = "size",
) -> Trajectory:
    """Every round: x <- x + sum_S q_i D_i."""
    trajectory = Trajectory()
    x = world.w0.copy()
    for r, sampled in enumerate(participants):
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
        x = x + total
        trajectory.record(x, updates, total)
    return trajectory


def fedprox(
    world: World,
    participants: list[list[int]],
    batches: Batches,
    local: Local,
    *,
    mu: float,
    weighting: str = "size",
) -> Trajectory:
    """Run FedAvg whose local gradient is g + mu (y - x), x the model the client received."""
    trajectory = Trajectory()
    x = world.w0.copy()
    for r, sampled in enumerate(participants):
        updates: dict[int, Array] = {}
        for i in sorted(sampled):
            if not has_samples(world, i):
                continue
            y = local_training(world, i, x, batches[r, i], local, r, mu=mu)
            if finite(y - x):
                updates[i] = y - x

        total = np.zeros_like(x)
        if updates:
            q = client_weights(world, list(updates), weighting)
            for i in updates:
                total = total + q[i] * updates[i]
        x = x + total
        trajectory.record(x, updates, total)
    return trajectory


def fednova_norm(local: Local, r: int, steps: int, mu: float, method: str) -> float:
    """Return ||a_i||_1, by an impulse or by its closed form."""
    if method == "impulse":
        return impulse_norm(local, r, steps, mu)
    if method == "closed":
        return closed_form_norm(local, r, steps, mu)
    raise ValueError(f"unknown norm method {method!r}")


def fednova(
    world: World,
    participants: list[list[int]],
    batches: Batches,
    local: Local,
    *,
    mu: float = 0.0,
    norm: str = "impulse",
    tau_eff: str = "norms",
    gmf: float = 0.0,
    weighting: str = "size",
) -> Trajectory:
    """Every round: x <- x + tau_eff * sum_S q_i D_i / ||a_i||_1.

    `norm`: "impulse" (any linear optimiser) or "closed" (the printed formulas).
    `tau_eff`: "norms" = sum q_i ||a_i||_1 (paper), "steps" = sum q_i K_i.
    `gmf`: slow momentum, u <- gmf*u - update/eta_r and x <- x - eta_r*u.
    """
    trajectory = Trajectory()
    x = world.w0.copy()
    slow = np.zeros_like(x)
    for r, sampled in enumerate(participants):
        updates: dict[int, Array] = {}
        norms: dict[int, float] = {}
        for i in sorted(sampled):
            if not has_samples(world, i):
                continue
            y = local_training(world, i, x, batches[r, i], local, r, mu=mu)
            if finite(y - x):
                updates[i] = y - x
                norms[i] = fednova_norm(local, r, len(batches[r, i]), mu, norm)

        total = np.zeros_like(x)
        if updates:
            q = client_weights(world, list(updates), weighting)
            effective_steps = 0.0
            mean_direction = np.zeros_like(x)
            for i in updates:
                steps = norms[i] if tau_eff == "norms" else float(len(batches[r, i]))
                effective_steps += q[i] * steps
                mean_direction = mean_direction + q[i] * (updates[i] / norms[i])
            total = effective_steps * mean_direction
            x, slow = _fednova_server(x, slow, total, round_lr(local, r), gmf)
        trajectory.record(x, updates, total, server={"u": slow}, norms=norms)
    return trajectory


def _fednova_server(
    x: Array, slow: Array, total: Array, eta: float, gmf: float
) -> tuple[Array, Array]:
    if gmf == 0.0:
        return x + total, slow
    slow = gmf * slow - total / eta
    return x - eta * slow, slow
