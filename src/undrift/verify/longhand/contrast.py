"""MOON, written out; z is the tanh layer of `mlp_world`'s network."""

import numpy as np

from .features import Net
from .local import Local, Trajectory
from .steps import Direction, finite_only, moves, size_mean, usable, walk
from .worlds import Array, Batches, World


def _unit(z: Array) -> tuple[Array, Array]:
    norm = np.linalg.norm(z, axis=1, keepdims=True)
    return z / norm, norm


def contrast_value(z: Array, good: Array, bad: list[Array], temperature: float) -> float:
    """Mean over the batch of -log( e^{s(z,good)/T} / (e^{s(z,good)/T} + sum e^{s(z,bad)/T}) )."""
    unit, _ = _unit(z)
    scores = np.array([(unit * _unit(v)[0]).sum(axis=1) / temperature for v in [good, *bad]])
    return float(np.mean(np.log(np.exp(scores - scores[0]).sum(axis=0))))


def contrast_to_z(z: Array, good: Array, bad: list[Array], temperature: float) -> Array:
    """Differentiate `contrast_value` by z; d cos(z, v)/dz = (v/|v| - cos z/|z|) / |z|."""
    unit, norm = _unit(z)
    targets = [_unit(v)[0] for v in [good, *bad]]
    cosines = np.array([(unit * v).sum(axis=1) for v in targets])  # [1 + k, n]
    weights = np.exp(cosines / temperature - (cosines / temperature).max(axis=0))
    weights = weights / weights.sum(axis=0)
    weights[0] -= 1.0  # cross-entropy with target 0: softmax minus one-hot
    to_z = np.zeros_like(z)
    for weight, cosine, v in zip(weights, cosines, targets, strict=True):
        to_z = to_z + weight[:, None] * (v - cosine[:, None] * unit) / norm
    return to_z / (temperature * len(z))


def moon(
    world: World,
    participants: list[list[int]],
    batches: Batches,
    local: Local,
    *,
    mu: float = 1.0,
    temperature: float = 0.5,
    stored: int = 1,
    fill: bool = True,
) -> Trajectory:
    """local   CE + mu * contrast(z(y); z(x) against z of the own last `stored` final models)
    server  size-weighted mean
    Every client starts with x_0 in all `stored` places (`fill`) or in one of them.
    """
    net = Net.of(world)
    trajectory = Trajectory()
    x = world.w0.copy()
    start = [x.copy()] * (stored if fill else 1)
    pools = {i: list(start) for i in range(len(world.data))}  # newest first
    for r, sampled in enumerate(participants):
        old = x
        models = {}
        for i in usable(world, sampled):
            direction = _direction(world, net, i, x, pools[i], mu, temperature)
            models[i] = walk(x, batches[r, i], local, r, direction)
        models = finite_only(models)
        for i, y in models.items():
            pools[i] = [y, *pools[i]][:stored]
        if models:
            x = x + size_mean(world, moves(models, x))
        states = {i: {"previous": np.array(pools[i])} for i in pools}
        trajectory.record(x, moves(models, old), x - old, clients=states)
    return trajectory


def _direction(
    world: World, net: Net, i: int, x: Array, pool: list[Array], mu: float, temperature: float
) -> Direction:
    inputs, labels = world.data[i]

    def direction(y: Array, batch: Array) -> Array:
        some = inputs[batch]
        plain = world.gradient(y, some, labels[batch])
        if mu == 0.0:
            return plain
        bad = [net.phi(old, some) for old in pool]
        to_z = contrast_to_z(net.phi(y, some), net.phi(x, some), bad, temperature)
        return plain + mu * net.backward(y, some, to_z)

    return direction
