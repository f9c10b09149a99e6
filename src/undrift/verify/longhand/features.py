"""rFedAvg and rFedAvg+, written out.

They look inside the model: the small tanh network of `mlp_world`, forward and backward by hand.
"""

import numpy as np

from .local import Local, Trajectory
from .steps import Direction, finite_only, moves, size_mean, usable, walk
from .worlds import Array, Batches, World

Rounds = list[list[int]]


class Net:
    """Linear - Tanh - Linear on one flat vector, as `mlp_world` lays it out; phi = tanh output."""

    def __init__(self, features: int, hidden: int, classes: int) -> None:
        self.features, self.hidden, self.classes = features, hidden, classes
        self.ends = np.cumsum([hidden * features, hidden, classes * hidden])

    @classmethod
    def of(cls, world: World, classes: int = 3) -> "Net":
        """Read the widths off a world: P = hidden (features + 1 + classes) + classes."""
        features = world.data[0][0].shape[1]
        hidden, rest = divmod(len(world.w0) - classes, features + 1 + classes)
        if rest:
            raise ValueError(f"{len(world.w0)} parameters do not make this network")
        return cls(features, hidden, classes)

    def split(self, w: Array) -> tuple[Array, Array, Array, Array]:
        weight1, bias1, weight2, bias2 = np.split(w, self.ends)
        into = weight1.reshape(self.hidden, self.features)
        return into, bias1, weight2.reshape(self.classes, self.hidden), bias2

    def phi(self, w: Array, x: Array) -> Array:
        weight1, bias1, _, _ = self.split(w)
        return np.tanh(x @ weight1.T + bias1)

    def log_probabilities(self, w: Array, x: Array) -> Array:
        _, _, weight2, bias2 = self.split(w)
        logits = self.phi(w, x) @ weight2.T + bias2
        top = logits.max(axis=1, keepdims=True)
        return logits - top - np.log(np.exp(logits - top).sum(axis=1, keepdims=True))

    def backward(self, w: Array, x: Array, to_phi: Array, to_logits: Array | None = None) -> Array:
        """Return d loss/dw when the loss depends on phi ([n, hidden]) and on the logits."""
        _, _, weight2, _ = self.split(w)
        phi = self.phi(w, x)
        if to_logits is None:
            to_logits = np.zeros((len(x), self.classes))
        to_sum = (to_phi + to_logits @ weight2) * (1.0 - phi * phi)
        parts = [to_sum.T @ x, to_sum.sum(axis=0), to_logits.T @ phi, to_logits.sum(axis=0)]
        return np.concatenate([part.ravel() for part in parts])


# ---- the regulariser -----------------------------------------------------------------------------


MARGIN = 1 - 1e-6  # what is clipped ends below the bound, whatever is rounded


def mean_phi(net: Net, w: Array, x: Array, clip: float | None = None) -> Array:
    """Return delta(w): the mean of phi, every example's phi first clipped to norm `clip`."""
    phi = net.phi(w, x)
    if clip is not None:
        norms = np.linalg.norm(phi, axis=1, keepdims=True)
        phi = phi * np.minimum(1.0, clip * MARGIN / np.maximum(norms, 1e-300))
    return phi.mean(axis=0)


def back_to_phi(net: Net, w: Array, x: Array, to_mean: Array, clip: float | None = None) -> Array:
    """Return d value/d phi, one row per example, from d value/d mean of the clipped phi."""
    rows = np.tile(to_mean / len(x), (len(x), 1))
    if clip is None:
        return rows
    phi = net.phi(w, x)
    for i, one in enumerate(phi):
        norm = np.linalg.norm(one)
        if norm > clip * MARGIN:
            unit = one / norm
            rows[i] = clip * MARGIN / norm * (rows[i] - unit * (unit @ rows[i]))
    return rows


def pairwise_value(
    net: Net, w: Array, x: Array, others: list[Array], clip: float | None = None
) -> float:
    """rFedAvg: (1/|J|) sum_j ||mean phi - delta_j||^2."""
    mine = mean_phi(net, w, x, clip)
    if not others:
        return 0.0
    return sum(float(((mine - delta) ** 2).sum()) for delta in others) / len(others)


def pairwise_gradient(
    net: Net, w: Array, x: Array, others: list[Array], clip: float | None = None
) -> Array:
    """Differentiate `pairwise_value`, one delta_j after the other."""
    mine = mean_phi(net, w, x, clip)
    to_mean = np.zeros_like(mine)
    for delta in others:
        to_mean = to_mean + 2.0 * (mine - delta) / len(others)
    return net.backward(w, x, back_to_phi(net, w, x, to_mean, clip))


def centred_value(net: Net, w: Array, x: Array, centre: Array, clip: float | None = None) -> float:
    """rFedAvg+: ||mean phi - dtil||^2."""
    return float(((mean_phi(net, w, x, clip) - centre) ** 2).sum())


def centred_gradient(
    net: Net, w: Array, x: Array, centre: Array, clip: float | None = None
) -> Array:
    """Return the gradient of that distance."""
    to_mean = 2.0 * (mean_phi(net, w, x, clip) - centre)
    return net.backward(w, x, back_to_phi(net, w, x, to_mean, clip))


def _others(table: dict[int, Array], i: int, include_self: bool) -> list[Array]:
    return [delta for j, delta in table.items() if include_self or j != i]


# ---- the two algorithms --------------------------------------------------------------------------


def rfedavg(
    world: World,
    participants: Rounds,
    batches: Batches,
    local: Local,
    *,
    strength: float = 1e-4,
    include_self: bool = False,
    clip: float | None = None,
) -> Trajectory:
    """local   CE_b + (strength/|J|) sum_{j in J} ||mean_b phi - delta_j||^2, J everybody else
    after   delta_i = mean of phi over all own data at the own final model
    server  size-weighted mean; the table keeps what it knows of the others
    The table starts with everybody's delta at x_0.
    """
    net = Net.of(world)
    trajectory = Trajectory()
    x = world.w0.copy()
    table = {i: mean_phi(net, x, world.data[i][0], clip) for i in range(len(world.data))}
    for r, sampled in enumerate(participants):
        old = x
        models = {}
        for i in usable(world, sampled):
            others = _others(table, i, include_self)
            direction = _pairwise_direction(world, net, i, strength, others, clip)
            models[i] = walk(x, batches[r, i], local, r, direction)
        models = finite_only(models)
        for i, y in models.items():
            table[i] = mean_phi(net, y, world.data[i][0], clip)
        if models:
            x = x + size_mean(world, moves(models, x))
        server = {"delta": np.array([table[i] for i in sorted(table)])}
        trajectory.record(x, moves(models, old), x - old, server=server)
    return trajectory


def _pairwise_direction(
    world: World, net: Net, i: int, strength: float, others: list[Array], clip: float | None
) -> Direction:
    inputs, labels = world.data[i]

    def direction(y: Array, batch: Array) -> Array:
        plain = world.gradient(y, inputs[batch], labels[batch])
        if strength == 0.0:
            return plain
        return plain + strength * pairwise_gradient(net, y, inputs[batch], others, clip)

    return direction


def rfedavg_plus(
    world: World,
    participants: Rounds,
    batches: Batches,
    local: Local,
    *,
    strength: float = 1e-4,
    include_self: bool = False,
    refresh: str = "cohort",
    clip: float | None = None,
) -> Trajectory:
    """local   CE_b + strength ||mean_b phi - dtil_i||^2, dtil_i = mean of the others' delta_j
    after   the new x goes out once more, delta_i = mean of phi over all own data at the new x
    `refresh`: who answers the second exchange, "cohort" or "all".
    """
    net = Net.of(world)
    trajectory = Trajectory()
    x = world.w0.copy()
    table = {i: mean_phi(net, x, world.data[i][0], clip) for i in range(len(world.data))}
    for r, sampled in enumerate(participants):
        old = x
        models = {}
        for i in usable(world, sampled):
            others = _others(table, i, include_self)
            pull = strength if others else 0.0  # alone there is nobody to be pulled to
            centre = np.mean(others, axis=0) if others else np.zeros(0)
            direction = _centred_direction(world, net, i, pull, centre, clip)
            models[i] = walk(x, batches[r, i], local, r, direction)
        models = finite_only(models)
        if models:
            x = x + size_mean(world, moves(models, x))
        for i in usable(world, sampled) if refresh == "cohort" else sorted(table):
            table[i] = mean_phi(net, x, world.data[i][0], clip)
        server = {"delta": np.array([table[i] for i in sorted(table)])}
        trajectory.record(x, moves(models, old), x - old, server=server)
    return trajectory


def _centred_direction(
    world: World, net: Net, i: int, strength: float, centre: Array, clip: float | None
) -> Direction:
    inputs, labels = world.data[i]

    def direction(y: Array, batch: Array) -> Array:
        plain = world.gradient(y, inputs[batch], labels[batch])
        if strength == 0.0:
            return plain
        return plain + strength * centred_gradient(net, y, inputs[batch], centre, clip)

    return direction
