"""q-FedAvg and q-FedSGD, written out."""

import numpy as np

from .local import Local, Trajectory, finite, full_gradient, local_training, round_lr
from .steps import moves, usable
from .worlds import Array, Batches, World

SMALL = 1e-10  # keeps F^(q-1) finite at F = 0


def qfedavg(
    world: World,
    participants: list[list[int]],
    batches: Batches,
    local: Local,
    *,
    q: float = 1.0,
    lipschitz: float | None = None,
    decayed: bool = False,
) -> Trajectory:
    """F_i = the client's whole training loss at x, dw_i = L (x - y_i).

    client  Delta_i = F_i^q dw_i, h_i = q F_i^(q-1) ||dw_i||^2 + L F_i^q
    server  x <- x - sum Delta_i / sum h_i; no weights
    `lipschitz` None: L = 1/eta_r. `decayed` counts wd ||x||^2 / 2 as part of F_i.
    """
    trajectory = Trajectory()
    x = world.w0.copy()
    for r, sampled in enumerate(participants):
        old = x
        L = 1.0 / round_lr(local, r) if lipschitz is None else lipschitz
        models = {}
        changes = {}
        for i in usable(world, sampled):
            y = local_training(world, i, x, batches[r, i], local, r)
            if finite(y, np.array(world.loss(x, *world.data[i]))):
                models[i] = y
                changes[i] = L * (x - y)
        if changes:
            extra = local.weight_decay * float(x @ x) / 2.0 if decayed else 0.0
            x = x - _fair_step(world, x, changes, q, L, extra)
        trajectory.record(x, moves(models, old), x - old)
    return trajectory


def qfedsgd(
    world: World,
    participants: list[list[int]],
    batches: Batches,
    local: Local,
    *,
    q: float = 1.0,
    lipschitz: float | None = None,
) -> Trajectory:
    """Run q-FedAvg with dw_i = grad f_i(x) over all own data; the batches are not looked at."""
    trajectory = Trajectory()
    x = world.w0.copy()
    for r, sampled in enumerate(participants):
        old = x
        L = 1.0 / round_lr(local, r) if lipschitz is None else lipschitz
        changes = {i: full_gradient(world, i, x, local) for i in usable(world, sampled)}
        changes = {i: g for i, g in changes.items() if finite(g)}
        if changes:
            x = x - _fair_step(world, x, changes, q, L)
        updates = {i: -g / L for i, g in changes.items()}
        trajectory.record(x, updates, x - old)
    return trajectory


def _fair_step(
    world: World, x: Array, changes: dict[int, Array], q: float, L: float, extra: float = 0.0
) -> Array:
    """Return sum F_i^q dw_i / sum (q F_i^(q-1) ||dw_i||^2 + L F_i^q)."""
    above = np.zeros_like(x)
    below = 0.0
    for i, change in changes.items():
        loss = world.loss(x, *world.data[i]) + extra + SMALL
        above = above + loss**q * change
        below += q * loss ** (q - 1.0) * float(change @ change) + L * loss**q
    return above / below
