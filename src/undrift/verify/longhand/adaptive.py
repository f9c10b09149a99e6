"""FedAMSGrad, written out."""

import numpy as np

from .local import Local, Trajectory
from .servers import client_round
from .worlds import Batches, World


def fedamsgrad(
    world: World,
    participants: list[list[int]],
    batches: Batches,
    local: Local,
    *,
    eta_g: float,
    b1: float = 0.9,
    b2: float = 0.99,
    tau: float = 1e-3,
    v0: float = 0.0,
    weighting: str = "size",
) -> Trajectory:
    """m <- b1 m + (1-b1) D, v <- b2 v + (1-b2) D^2, vmax <- max(vmax, v)
    x <- x + eta_g m / (sqrt(vmax) + tau); vmax starts at v0.
    """
    trajectory = Trajectory()
    x = world.w0.copy()
    m = np.zeros_like(x)
    v = np.full_like(x, v0)
    largest = v.copy()
    for r, sampled in enumerate(participants):
        updates, total = client_round(world, sampled, batches, local, r, x, weighting)
        if updates:
            m = b1 * m + (1.0 - b1) * total
            v = b2 * v + (1.0 - b2) * (total * total)
            largest = np.maximum(largest, v)
            x = x + eta_g * m / (np.sqrt(largest) + tau)
        trajectory.record(x, updates, total, server={"m": m, "v": v, "vmax": largest})
    return trajectory
