"""FedVRA-U and others on f_i(x, z_i), x shared and z_i private, written out.

Two objectives: pseudo-labels (label -1 = unlabelled) and clusters. z_i has one row per example,
each row on the probability simplex.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from .control import option_two_divisor
from .features import Net
from .fedvra import default_a, population_weights
from .local import Local, Trajectory, round_lr
from .steps import Direction, finite_only, moves, size_mean, uniform_mean, usable, walk
from .worlds import Array, Batches, World, mlp_world

States = tuple[dict[str, Array], dict[int, dict[str, Array]]]


def project_simplex(rows: Array) -> Array:
    """Return the nearest point of the probability simplex for each row (by sorting).

    The answer is max(v - theta, 0); theta is the mean excess of the entries that stay positive.
    """
    projected = np.empty_like(rows)
    for j, v in enumerate(rows):
        descending = np.sort(v)[::-1]
        theta, total = 0.0, 0.0
        for count, value in enumerate(descending, start=1):
            total += value
            candidate = (total - 1.0) / count
            if value > candidate:
                theta = candidate
        projected[j] = np.maximum(v - theta, 0.0)
    return projected


# ---- objectives ----------------------------------------------------------------------------------


@dataclass
class PseudoLabels:
    """mean_labelled CE + w_u mean_unlabelled( sum_c z_c (-log p_c) - t H(z) ), H the entropy.

    `floor` bounds z from below inside the logarithm: the projection makes exact zeros, at which
    H has no derivative.
    """

    net: Net
    w_u: float = 1.0
    t: float = 0.5
    floor: float = 1e-12

    def start(self, n: int) -> Array:
        return np.full((n, self.net.classes), 1.0 / self.net.classes)

    def loss(self, w: Array, z: Array, x: Array, y: Array) -> float:
        log_p = self.net.log_probabilities(w, x)
        known, unknown = y >= 0, y < 0
        value = 0.0
        if known.any():
            value -= float(log_p[known, y[known]].mean())
        if unknown.any():
            log_z = np.log(np.maximum(z[unknown], self.floor))
            rows = (z[unknown] * (self.t * log_z - log_p[unknown])).sum(axis=1)
            value += self.w_u * float(rows.mean())
        return value

    def model_gradient(self, w: Array, z: Array, x: Array, y: Array) -> Array:
        p = np.exp(self.net.log_probabilities(w, x))
        known, unknown = y >= 0, y < 0
        to_logits = np.zeros_like(p)
        if known.any():
            one_hot = np.eye(self.net.classes)[y[known]]
            to_logits[known] = (p[known] - one_hot) / known.sum()
        if unknown.any():
            share = self.w_u / unknown.sum()
            mass = z[unknown].sum(axis=1, keepdims=True)
            to_logits[unknown] = share * (mass * p[unknown] - z[unknown])
        return self.net.backward(w, x, np.zeros((len(x), self.net.hidden)), to_logits)

    def z_gradient(self, w: Array, z: Array, x: Array, y: Array) -> Array:
        log_p = self.net.log_probabilities(w, x)
        unknown = y < 0
        gradient = np.zeros_like(z)
        if unknown.any():
            log_z = np.log(np.maximum(z[unknown], self.floor))
            rows = -log_p[unknown] + self.t * (log_z + 1.0)
            gradient[unknown] = self.w_u * rows / unknown.sum()
        return gradient


@dataclass
class Clusters:
    """mean_j sum_k z_jk ||point_j - centre_k||^2 / 2; w holds the centres one after the other."""

    count: int
    dim: int

    def start(self, n: int) -> Array:
        return np.full((n, self.count), 1.0 / self.count)

    def _squares(self, w: Array, x: Array) -> Array:
        away = x[:, None, :] - w.reshape(self.count, self.dim)[None]
        return (away**2).sum(axis=2)

    def loss(self, w: Array, z: Array, x: Array, y: Array) -> float:
        return float((z * self._squares(w, x)).sum(axis=1).mean() / 2.0)

    def model_gradient(self, w: Array, z: Array, x: Array, y: Array) -> Array:
        centres = w.reshape(self.count, self.dim)
        gradient = np.zeros_like(centres)
        for k in range(self.count):
            gradient[k] = (z[:, k : k + 1] * (centres[k] - x)).mean(axis=0)
        return gradient.ravel()

    def z_gradient(self, w: Array, z: Array, x: Array, y: Array) -> Array:
        return self._squares(w, x) / (2.0 * len(x))


Objective = PseudoLabels | Clusters


def pseudo_label_world(seed: int, sizes: list[int], every: int = 3) -> tuple[World, PseudoLabels]:
    """Keep the label of every `every`-th example of `mlp_world`'s data; the others become -1."""
    full = mlp_world(seed, sizes, features=4, hidden=6, classes=3)
    data = []
    for x, y in full.data:
        kept = np.where(np.arange(len(y)) % every == 0, y, -1)
        data.append((x, kept))
    return World(data, full.gradient, full.loss, full.w0), PseudoLabels(Net.of(full))


def cluster_world(seed: int, sizes: list[int], count: int, dim: int) -> tuple[World, Clusters]:
    """Points around `count` centres; every client sees the clusters in its own proportions."""
    rng = np.random.default_rng(seed)
    centres = 2.0 * rng.standard_normal((count, dim))
    data = []
    for size in sizes:
        proportions = rng.dirichlet(np.full(count, 0.5))
        which = rng.choice(count, size=size, p=proportions)
        points = centres[which] + 0.3 * rng.standard_normal((size, dim))
        data.append((points, np.zeros((size, 1))))
    w0 = (centres + 0.7 * rng.standard_normal((count, dim))).ravel()
    none = World(data, lambda w, x, y: np.zeros_like(w), lambda w, x, y: 0.0, w0)
    return none, Clusters(count, dim)


# ---- what happens to the shared block ------------------------------------------------------------


@dataclass
class Average:
    """FedAvg; FedProx with mu."""

    mu: float = 0.0

    def begin(self, world: World, local: Local) -> None:
        self.world = world

    def pull(self, i: int) -> tuple[float, Array]:
        return self.mu, np.zeros_like(self.world.w0)

    def server(self, x: Array, models: dict[int, Array], steps: dict[int, int], r: int) -> Array:
        return x + size_mean(self.world, moves(models, x))

    def states(self) -> States:
        return {}, {}


@dataclass
class Scaffold:
    """SCAFFOLD, option II, uniform weights."""

    def begin(self, world: World, local: Local) -> None:
        self.local, self.population = local, len(world.data)
        self.c = np.zeros_like(world.w0)
        self.variates = {i: np.zeros_like(world.w0) for i in range(self.population)}

    def pull(self, i: int) -> tuple[float, Array]:
        return 0.0, self.c - self.variates[i]

    def server(self, x: Array, models: dict[int, Array], steps: dict[int, int], r: int) -> Array:
        change = np.zeros_like(x)
        for i, y in models.items():
            step = (x - y) / option_two_divisor(self.local, r, steps[i])
            change = change + (step - self.c)
            self.variates[i] = self.variates[i] + (step - self.c)
        self.c = self.c + change / self.population
        return uniform_mean(models)

    def states(self) -> States:
        return {"c": self.c}, {i: {"c": c} for i, c in self.variates.items()}


@dataclass
class Dyn:
    """FedDyn, convention A."""

    alpha: float

    def begin(self, world: World, local: Local) -> None:
        self.population = len(world.data)
        self.h = np.zeros_like(world.w0)
        self.duals = {i: np.zeros_like(world.w0) for i in range(self.population)}

    def pull(self, i: int) -> tuple[float, Array]:
        return self.alpha, -self.duals[i]

    def server(self, x: Array, models: dict[int, Array], steps: dict[int, int], r: int) -> Array:
        for i, y in models.items():
            self.duals[i] = self.duals[i] + self.alpha * (x - y)
        xbar = uniform_mean(models)
        self.h = self.h + (len(models) / self.population) * (x - xbar)
        return xbar - self.h

    def states(self) -> States:
        return {"h": self.h}, {i: {"h": h} for i, h in self.duals.items()}


@dataclass
class Vra:
    """FedVRA with one gamma > 0 for everybody; a and d numbers, or None as in `fedvra`."""

    gamma: float = 0.1
    a: float | None = None
    d: float | None = None
    omega: str = "size"
    chances: Sequence[float] | None = None
    duals: dict[int, Array] = field(default_factory=dict)

    def begin(self, world: World, local: Local) -> None:
        self.local = local
        self.weights = population_weights(world, self.omega)
        self.lam = np.zeros_like(world.w0)
        self.duals = {i: np.zeros_like(world.w0) for i in self.weights}

    def pull(self, i: int) -> tuple[float, Array]:
        return self.gamma, -self.duals[i]

    def _d(self, i: int) -> float:
        if self.d is not None:
            return self.d
        return 1.0 if self.chances is None else 1.0 / self.chances[i]

    def server(self, x: Array, models: dict[int, Array], steps: dict[int, int], r: int) -> Array:
        eta, total = round_lr(self.local, r), np.zeros_like(x)
        for i, y in models.items():
            d = self._d(i)
            a = default_a(self.gamma, eta, steps[i], d) if self.a is None else self.a
            self.duals[i] = self.duals[i] + a * self.gamma * (x - y)
            self.lam = self.lam + self.weights[i] * a * self.gamma * (x - y)
            total = total + self.weights[i] * d * (y - x)  # beta gamma = 1
        return x + total - self.lam / self.gamma

    def states(self) -> States:
        return {"lambda": self.lam}, {i: {"lambda": v} for i, v in self.duals.items()}


Method = Average | Scaffold | Dyn | Vra


# ---- the loop ------------------------------------------------------------------------------------


def two_blocks(
    world: World,
    participants: list[list[int]],
    batches: Batches,
    local: Local,
    *,
    objective: Objective,
    method: Method,
    eta_z: float = 1.0,
    steps_z: int = 5,
    z_scale: str = "mean",
    project: Callable[[Array], Array] | None = None,
) -> Trajectory:
    """z_i <- Proj(z_i - eta_z grad_z f_i(x, z_i)), steps_z times over all own data, x as received;
    then the method's local steps on grad_y f_i(y, z_i), and its server; then x <- project(x).

    `z_scale`: grad_z as it is ("mean": 1/n in it) or multiplied by n ("row": each example's own).
    """
    trajectory = Trajectory()
    x = world.w0.copy()
    private = {i: objective.start(len(world.data[i][0])) for i in range(len(world.data))}
    method.begin(world, local)
    for r, sampled in enumerate(participants):
        old = x
        models, rows = {}, {}
        for i in usable(world, sampled):
            inputs, labels = world.data[i]
            factor = eta_z * (_rows(objective, labels) if z_scale == "row" else 1.0)
            z = private[i]
            for _ in range(steps_z):
                step = factor * objective.z_gradient(x, z, inputs, labels)
                z = project_simplex(z - step)
            direction = _direction(world, objective, i, x, z, *method.pull(i))
            models[i] = walk(x, batches[r, i], local, r, direction)
            rows[i] = z
        models = finite_only(models)
        for i in models:
            private[i] = rows[i]
        if models:
            x = method.server(x, models, {i: len(batches[r, i]) for i in models}, r)
            x = x if project is None else project(x)
        server, clients = method.states()
        states = {i: {**clients.get(i, {}), "z": private[i]} for i in private}
        trajectory.record(x, moves(models, old), x - old, server=server, clients=states)
    return trajectory


def _rows(objective: Objective, labels: Array) -> float:
    """Return how many rows the objective averages over."""
    if isinstance(objective, PseudoLabels):
        return float(max(1, int((labels < 0).sum())))
    return float(len(labels))


def _direction(
    world: World,
    objective: Objective,
    i: int,
    x: Array,
    z: Array,
    mu: float,
    correction: Array | float,
) -> Direction:
    inputs, labels = world.data[i]

    def direction(y: Array, batch: Array) -> Array:
        g = objective.model_gradient(y, z[batch], inputs[batch], labels[batch])
        return g + mu * (y - x) + correction

    return direction
