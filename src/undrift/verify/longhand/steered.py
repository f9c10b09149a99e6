"""FedRL's server, written out; its direction by numpy's singular value decomposition."""

import numpy as np

from .local import Local, Trajectory
from .servers import client_round
from .worlds import Array, Batches, World

Layers = list[tuple[Array, Array]]


def first_direction(rows: Array) -> tuple[Array, Array]:
    """Return (mean, first right singular vector), the largest |component| positive."""
    mean = rows.mean(axis=0)
    direction = np.linalg.svd(rows - mean, full_matrices=False)[2][0]
    if direction[np.argmax(np.abs(direction))] < 0:
        direction = -direction
    return mean, direction


def mean_action(layers: Layers, seen: list[float]) -> Array:
    """Return the actor's mean action, cut off at -1 and 1."""
    h = np.array(seen)
    for weight, bias in layers[:-1]:
        h = np.tanh(weight @ h + bias)
    weight, bias = layers[-1]
    return np.clip(weight @ h + bias, -1.0, 1.0)


def fedrl(
    world: World,
    participants: list[list[int]],
    batches: Batches,
    local: Local,
    *,
    layers: Layers,
    eta_g: float,
    tau: float = 1e-3,
    pca: str = "clients",
    reach: float = 0.1,
    sees_alphas: bool = False,
) -> Trajectory:
    """s = standardised PCA_1(D * D), alphas moved by the actor's reach * action, FedAdam's step.

    An actor of ours sees where the alphas stand before it moves them, beside s.

    The direction is fitted on the first round's D_i * D_i, or on D * D of the first 10 rounds,
    without an action before.  The state is standardised by the states so far, its own included.
    """
    trajectory = Trajectory()
    x = world.w0.copy()
    m, v = np.zeros_like(x), np.zeros_like(x)
    alpha1, alpha2 = 0.9, 0.99
    mean, direction = np.zeros_like(x), np.zeros_like(x)
    squares: list[Array] = []
    states: list[float] = []
    for r, sampled in enumerate(participants):
        updates, total = client_round(world, sampled, batches, local, r, x, "uniform")
        squares.append(total * total)
        if pca == "clients" and r == 0:
            mean, direction = first_direction(np.array([d * d for d in updates.values()]))
        if pca == "rounds" and r == 9:
            mean, direction = first_direction(np.array(squares))
        if pca == "clients" or r >= 9:
            states.append(float((total * total - mean) @ direction))
            deviation = float(np.std(states))
            seen = (states[-1] - float(np.mean(states))) / (deviation if deviation > 0 else 1.0)
            sight = [float(np.clip(seen, -10.0, 10.0)), alpha1, alpha2]
            u = mean_action(layers, sight if sees_alphas else sight[:1])
            alpha1 = float(np.clip(alpha1 + reach * u[0], 0.0, 0.999))
            alpha2 = float(np.clip(alpha2 + reach * u[1], 0.0, 0.9999))
        m = alpha1 * m + (1.0 - alpha1) * total
        v = alpha2 * v + (1.0 - alpha2) * (total * total)
        x = x + eta_g * m / (np.sqrt(v) + tau)
        trajectory.record(x, updates, total, server={"m": m, "v": v})
    return trajectory
