"""ComFed's grid, 4 client mechanisms x 4 server optimisers, cell by cell.

Nothing here calls the loops of averaging.py, control.py or servers.py: the sixteen cells are
written a second time, so that comparing them with those loops means something. (Only option II's
divisor is shared; the grid's default is option I.)
"""

import numpy as np

from .control import option_two_divisor
from .local import (
    Local,
    Trajectory,
    finite,
    full_gradient,
    has_samples,
    impulse_norm,
    local_training,
)
from .worlds import Array, Batches, World

CLIENTS = ("sgd", "prox", "scaf", "nova")
SERVERS = ("sgd", "adam", "adagrad", "yogi")


def comfed(
    world: World,
    participants: list[list[int]],
    batches: Batches,
    local: Local,
    *,
    client: str,
    server: str,
    mu: float = 0.005,
    scaf_mode: str = "persistent",
    scaf_option: str = "I",
    c_weights: str = "population",
    eta_g: float | None = None,
    b1: float = 0.9,
    b2: float = 0.99,
    tau: float = 1e-9,
    v0: float = 0.0,
) -> Trajectory:
    """Run one cell. `eta_g` None means 1 for the Sgd server and .005 for the others.

    `scaf_mode`: persistent | fresh | literal. `c_weights`: population = c + (1/N) sum
    dc_i, size = c + sum q_i dc_i; in fresh mode, the cohort's mean of c_i, equal or by size.
    """
    trajectory = Trajectory()
    x = world.w0.copy()
    server_state = {"m": np.zeros_like(x), "v": np.full_like(x, v0)}
    c = np.zeros_like(x)
    variates = {i: np.zeros_like(x) for i in range(len(world.data))}
    if eta_g is None:
        eta_g = 1.0 if server == "sgd" else 0.005

    for r, sampled in enumerate(participants):
        norms: dict[int, float] = {}
        if client == "sgd":
            updates = _sgd_clients(world, sampled, batches, local, r, x)
        elif client == "prox":
            updates = _prox_clients(world, sampled, batches, local, r, x, mu)
        elif client == "nova":
            updates, norms = _nova_clients(world, sampled, batches, local, r, x)
        elif client == "scaf":
            updates, c = _scaf_clients(
                world, sampled, batches, local, r, x, c, variates, scaf_mode, scaf_option, c_weights
            )
        else:
            raise ValueError(f"unknown client mechanism {client!r}")

        total = np.zeros_like(x)
        if updates:
            total = _aggregate(world, client, updates, norms)
            x = _server_step(server, x, total, server_state, eta_g, b1, b2, tau)
        states = {i: {"c": variates[i]} for i in variates} if client == "scaf" else {}
        recorded = dict(server_state, c=c)
        trajectory.record(x, updates, total, server=recorded, clients=states, norms=norms)
    return trajectory


# ---- client mechanisms ---------------------------------------------------------------------------


def _sgd_clients(
    world: World, sampled: list[int], batches: Batches, local: Local, r: int, x: Array
) -> dict[int, Array]:
    updates = {}
    for i in sorted(sampled):
        if has_samples(world, i):
            update = local_training(world, i, x, batches[r, i], local, r) - x
            if finite(update):
                updates[i] = update
    return updates


def _prox_clients(
    world: World, sampled: list[int], batches: Batches, local: Local, r: int, x: Array, mu: float
) -> dict[int, Array]:
    updates = {}
    for i in sorted(sampled):
        if has_samples(world, i):
            update = local_training(world, i, x, batches[r, i], local, r, mu=mu) - x
            if finite(update):
                updates[i] = update
    return updates


def _nova_clients(
    world: World, sampled: list[int], batches: Batches, local: Local, r: int, x: Array
) -> tuple[dict[int, Array], dict[int, float]]:
    updates, norms = {}, {}
    for i in sorted(sampled):
        if has_samples(world, i):
            update = local_training(world, i, x, batches[r, i], local, r) - x
            if finite(update):
                updates[i] = update
                norms[i] = impulse_norm(local, r, len(batches[r, i]))
    return updates, norms


def _scaf_clients(
    world: World,
    sampled: list[int],
    batches: Batches,
    local: Local,
    r: int,
    x: Array,
    c: Array,
    variates: dict[int, Array],
    mode: str,
    option: str,
    c_weights: str,
) -> tuple[dict[int, Array], Array]:
    """Return (D_i, the server's new c); in the persistent and literal modes variates change."""
    if mode == "fresh":
        return _scaf_fresh(world, sampled, batches, local, r, x, c, c_weights)
    if mode not in ("persistent", "literal"):
        raise ValueError(f"unknown scaf_mode {mode!r}")

    updates: dict[int, Array] = {}
    changes: dict[int, Array] = {}
    for i in sorted(sampled):
        if not has_samples(world, i):
            continue
        # Literal: alg. 2 line 4 overwrites c_i by c, which makes the correction below vanish.
        c_i = c if mode == "literal" else variates[i]
        y = local_training(world, i, x, batches[r, i], local, r, correction=c - c_i)
        if option == "I":
            c_plus = full_gradient(world, i, x, local)
        else:
            c_plus = c_i - c + (x - y) / option_two_divisor(local, r, len(batches[r, i]))
        if finite(y - x, c_plus):
            updates[i] = y - x
            changes[i] = c_plus - c_i
            variates[i] = c_plus
    return updates, _scaf_server(world, c, changes, c_weights)


def _scaf_server(world: World, c: Array, changes: dict[int, Array], c_weights: str) -> Array:
    if c_weights not in ("population", "size"):
        raise ValueError(f"unknown c_weights {c_weights!r}")
    examples = 0
    for i in changes:
        examples += len(world.data[i][0])
    new_c = c.copy()
    for i, change in changes.items():
        if c_weights == "population":
            new_c = new_c + change / len(world.data)
        else:
            new_c = new_c + (len(world.data[i][0]) / examples) * change
    return new_c


def _scaf_fresh(
    world: World,
    sampled: list[int],
    batches: Batches,
    local: Local,
    r: int,
    x: Array,
    c: Array,
    c_weights: str,
) -> tuple[dict[int, Array], Array]:
    """Stateless: c_i = grad f_i(x) now; the server's c is LAST round's mean of them."""
    updates: dict[int, Array] = {}
    gradients: dict[int, Array] = {}
    for i in sorted(sampled):
        if not has_samples(world, i):
            continue
        c_i = full_gradient(world, i, x, local)
        y = local_training(world, i, x, batches[r, i], local, r, correction=c - c_i)
        if finite(y - x, c_i):
            updates[i] = y - x
            gradients[i] = c_i
    if not updates:
        return updates, c
    if c_weights == "size":
        return updates, _size_mean(world, gradients)
    return updates, sum(gradients.values(), np.zeros_like(x)) / len(gradients)


# ---- aggregation ---------------------------------------------------------------------------------


def _aggregate(
    world: World, client: str, updates: dict[int, Array], norms: dict[int, float]
) -> Array:
    if client == "nova":
        return _nova_mean(world, updates, norms)
    return _size_mean(world, updates)


def _size_mean(world: World, vectors: dict[int, Array]) -> Array:
    """Return sum over the clients present of n_i v_i / sum n_j."""
    examples = 0
    for i in vectors:
        examples += len(world.data[i][0])
    mean = np.zeros_like(world.w0)
    for i, vector in vectors.items():
        mean = mean + (len(world.data[i][0]) / examples) * vector
    return mean


def _nova_mean(world: World, updates: dict[int, Array], norms: dict[int, float]) -> Array:
    examples = 0
    for i in updates:
        examples += len(world.data[i][0])
    tau_eff = 0.0
    direction = np.zeros_like(world.w0)
    for i, update in updates.items():
        q_i = len(world.data[i][0]) / examples
        tau_eff += q_i * norms[i]
        direction = direction + q_i * update / norms[i]
    return tau_eff * direction


# ---- server optimisers ---------------------------------------------------------------------------


def _server_step(
    server: str,
    x: Array,
    total: Array,
    state: dict[str, Array],
    eta_g: float,
    b1: float,
    b2: float,
    tau: float,
) -> Array:
    """Return the new x and change state["m"], state["v"]."""
    if server == "sgd":
        return x + eta_g * total
    state["m"] = b1 * state["m"] + (1 - b1) * total
    if server == "adam":
        state["v"] = b2 * state["v"] + (1 - b2) * total**2
    elif server == "adagrad":
        state["v"] = state["v"] + total**2
    elif server == "yogi":
        # v moves towards D^2 by a step that does not depend on how far away it is.
        too_large = np.sign(state["v"] - total**2)
        state["v"] = state["v"] - (1 - b2) * total**2 * too_large
    else:
        raise ValueError(f"unknown server optimiser {server!r}")
    return x + eta_g * state["m"] / (np.sqrt(state["v"]) + tau)
