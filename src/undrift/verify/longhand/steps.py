"""Local steps whose direction depends on the batch, and two small helpers of the newer loops."""

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from .local import (
    Local,
    clip_global_norm,
    finite,
    has_samples,
    impulse_norm,
    optimizer_step,
    step_lr,
)
from .worlds import Array, World

# direction(y, batch): the corrected gradient at y on these positions, weight decay left out
Direction = Callable[[Array, Array], Array]


def walk(
    start: Array,
    batches: list[Array],
    local: Local,
    r: int,
    direction: Direction,
    state: dict[str, Array] | None = None,
) -> Array:
    """Run u = clip(direction) + wd y and the optimiser on u, step after step (C4).

    `state` holds the optimiser's buffers; one that is handed over survives the round.
    """
    y = start.copy()
    state = {} if state is None else state
    with np.errstate(all="ignore"):
        for k, batch in enumerate(batches):
            lr = step_lr(local, r, k)
            u = clip_global_norm(direction(y, batch), local.clip)
            if local.optimizer == "adamw":
                y = y * (1.0 - lr * local.weight_decay)
            else:
                u = u + local.weight_decay * y
            y = optimizer_step(y, u, state, lr, local)
    return y


def batch_gradient(world: World, client: int) -> Direction:
    """Give the plain mini-batch gradient of a client as a direction."""
    inputs, labels = world.data[client]
    return lambda y, batch: world.gradient(y, inputs[batch], labels[batch])


def path(local: Local, r: int, steps: int, mu: float = 0.0) -> float:
    """Return ||a||_1, the unclipped one where the client clips."""
    return impulse_norm(dataclasses.replace(local, clip=None), r, steps, mu)


def usable(world: World, sampled: list[int]) -> list[int]:
    """Return who has examples, ids ascending."""
    return [i for i in sorted(sampled) if has_samples(world, i)]


def finite_only(models: dict[int, Array]) -> dict[int, Array]:
    """Leave out whoever diverged (C8)."""
    return {i: y for i, y in models.items() if finite(y)}


def uniform_mean(vectors: Mapping[int, Array]) -> Array:
    """Return the plain mean."""
    total = np.zeros_like(next(iter(vectors.values())))
    for vector in vectors.values():
        total = total + vector
    return total / len(vectors)


def size_mean(world: World, vectors: Mapping[int, Array]) -> Array:
    """Return sum n_i v_i / sum n_i over the clients that are there."""
    examples = sum(len(world.data[i][0]) for i in vectors)
    total = np.zeros_like(next(iter(vectors.values())))
    for i, vector in vectors.items():
        total = total + (len(world.data[i][0]) / examples) * vector
    return total


def relative_sizes(world: World) -> dict[int, float]:
    """Return r_i = n_i / mean(n) over the population."""
    counts = [len(x) for x, _ in world.data]
    return {i: n / (sum(counts) / len(counts)) for i, n in enumerate(counts)}


def zeros_for_all(world: World) -> dict[int, Array]:
    """Return a zero vector for every client."""
    return {i: np.zeros_like(world.w0) for i in range(len(world.data))}


def moves(models: Mapping[int, Array], x: Array) -> dict[int, Array]:
    """Return D_i = y_i - x."""
    return {i: y - x for i, y in models.items()}


def slopes(f: Callable[[Array], float], w: Array, step: float = 1e-5) -> Array:
    """Central differences of f, entry by entry."""
    found = np.zeros_like(w)
    for j in np.ndindex(w.shape):
        e = np.zeros_like(w)
        e[j] = step
        found[j] = (f(w + e) - f(w - e)) / (2 * step)
    return found
