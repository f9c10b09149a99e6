"""FedDyn, AdaBest, FedADMM, FedPD, FedDC and VRL-SGD, written out; FedVRA has its own file."""

from dataclasses import dataclass

import numpy as np

from .control import option_two_divisor
from .local import Local, Trajectory, local_training, round_lr
from .steps import (
    Direction,
    batch_gradient,
    finite_only,
    moves,
    path,
    relative_sizes,
    uniform_mean,
    usable,
    walk,
    zeros_for_all,
)
from .worlds import Array, Batches, World

Rounds = list[list[int]]


def feddyn(
    world: World,
    participants: Rounds,
    batches: Batches,
    local: Local,
    *,
    alpha: float = 0.01,
    by_size: bool = False,
) -> Trajectory:
    """Convention A: h_i contains alpha, h does not.

    local   y <- y - eta (g - h_i + alpha_i (y - x)), then h_i <- h_i + alpha_i (x - y_i)
    server  h <- h + (m/N)(x - xbar), x <- xbar - h
    `by_size`: alpha_i = alpha mean(n)/n_i; xbar stays uniform.
    """
    trajectory = Trajectory()
    x = world.w0.copy()
    population = len(world.data)
    ratio = relative_sizes(world)
    alphas = {i: alpha / ratio[i] if by_size else alpha for i in ratio}
    h = np.zeros_like(x)
    duals = zeros_for_all(world)
    xbar = x
    for r, sampled in enumerate(participants):
        old = x
        models = {}
        for i in usable(world, sampled):
            steps, dual = batches[r, i], -duals[i]
            models[i] = local_training(world, i, x, steps, local, r, mu=alphas[i], correction=dual)
        models = finite_only(models)
        if models:
            for i, y in models.items():
                duals[i] = duals[i] + alphas[i] * (x - y)
            xbar = uniform_mean(models)
            h = h + (len(models) / population) * (x - xbar)
            x = xbar - h
        states = {i: {"h": duals[i]} for i in duals}
        server = {"h": h, "xbar": xbar}
        trajectory.record(x, moves(models, old), x - old, server=server, clients=states)
    return trajectory


# ---- AdaBest -------------------------------------------------------------------------------------


@dataclass
class Plateau:
    """Lower beta when the smallest ||h|| seen has not fallen by `threshold` for `patience` rounds.

    After it was lowered, `patience` rounds are ignored and the search for a smallest starts anew.
    `one_more` waits patience + 1 rounds, as torch's ReduceLROnPlateau does; with `watch` the
    smallest value is looked for in the ignored rounds too.
    """

    patience: int = 50
    factor: float = 0.9
    threshold: float = 1e-2
    one_more: bool = False
    watch: bool = False
    best: float = np.inf
    waited: int = 0
    cooldown: int = 0

    def next_beta(self, beta: float, size: float) -> float:
        ignored = self.cooldown > 0
        self.cooldown = max(0, self.cooldown - 1)
        if ignored and not self.watch:
            return beta
        if size < (1.0 - self.threshold) * self.best:
            self.best, self.waited = size, 0
            return beta
        self.waited = 0 if ignored else self.waited + 1
        if self.waited < self.patience + self.one_more:
            return beta
        self.best, self.waited, self.cooldown = np.inf, 0, self.patience
        return self.factor * beta


def adabest(
    world: World,
    participants: Rounds,
    batches: Batches,
    local: Local,
    *,
    mu: float = 0.02,
    beta: float = 0.96,
    unbalanced: bool = False,
    prox: float = 0.0,
    plateau: Plateau | None = None,
) -> Trajectory:
    """h_i does not contain mu; rounds are numbered t = 1, 2, ...

    local   y <- y - eta (g - mu_i h_i), then h_i <- h_i/(t - t_i') + (x - y_i)
    server  h <- beta (xbar_old - xbar), x <- xbar - h
    `unbalanced`: mu_i = mu nbar/n_i, nbar the mean n over all participations before this round.
    `prox` adds prox (y - x) to the local gradient (I-17).
    """
    trajectory = Trajectory()
    x = world.w0.copy()
    xbar = x
    h = np.zeros_like(x)
    memory = zeros_for_all(world)
    last: dict[int, int] = {}
    examples, participations = 0, 0
    for t, sampled in enumerate(participants, start=1):
        old = x
        nbar = examples / participations if participations else 0.0
        r = t - 1
        models = {}
        for i in usable(world, sampled):
            mu_i = mu * nbar / len(world.data[i][0]) if unbalanced else mu
            steps, push = batches[r, i], -mu_i * memory[i]
            models[i] = local_training(world, i, x, steps, local, r, mu=prox, correction=push)
        models = finite_only(models)
        for i, y in models.items():
            kept = memory[i] / (t - last[i]) if i in last else np.zeros_like(x)
            memory[i] = kept + (x - y)
            last[i] = t
            examples += len(world.data[i][0])
            participations += 1
        if models:
            new = uniform_mean(models)
            h = beta * (xbar - new)
            x = new - h
            xbar = new
            if plateau is not None:
                beta = plateau.next_beta(beta, float(np.linalg.norm(h)))
        states = {i: {"h": memory[i], "last": np.array(last.get(i, 0))} for i in memory}
        server = {"h": h, "xbar": xbar, "beta": np.array(beta), "nbar": np.array(nbar)}
        trajectory.record(x, moves(models, old), x - old, server=server, clients=states)
    return trajectory


# ---- ADMM ----------------------------------------------------------------------------------------


def fedadmm(
    world: World,
    participants: Rounds,
    batches: Batches,
    local: Local,
    *,
    rho: float = 0.01,
    eta_g: float = 1.0,
) -> Trajectory:
    """local   y <- y - eta (g + a_i + rho (y - x)), then a_i+ = a_i + rho (y_i - x)
    upload  U_i = (y_i - y_i^prev) + (a_i+ - a_i)/rho
    server  x <- x + (eta_g/m) sum U_i
    """
    trajectory = Trajectory()
    x = world.w0.copy()
    duals = zeros_for_all(world)
    previous = {i: x.copy() for i in duals}
    for r, sampled in enumerate(participants):
        old = x
        models = {}
        for i in usable(world, sampled):
            steps, dual = batches[r, i], duals[i]
            models[i] = local_training(world, i, x, steps, local, r, mu=rho, correction=dual)
        models = finite_only(models)
        uploads = {}
        for i, y in models.items():
            dual = duals[i] + rho * (y - x)
            uploads[i] = (y - previous[i]) + (dual - duals[i]) / rho
            duals[i], previous[i] = dual, y
        if uploads:
            x = x + eta_g * uniform_mean(uploads)
        states = {i: {"a": duals[i], "y": previous[i]} for i in duals}
        trajectory.record(x, moves(models, old), x - old, clients=states)
    return trajectory


def fedpd(
    world: World,
    participants: Rounds,
    batches: Batches,
    local: Local,
    *,
    rho: float,
    start: str = "received",
    communicate: list[bool] | None = None,
) -> Trajectory:
    """Everybody, every round, s = 1/rho.

    local   y <- y - eta (g + lambda_i + (y - x0_i)/s), lambda_i <- lambda_i + (y - x0_i)/s,
            x0_i+ = y + s lambda_i
    server  x0_i <- mean x0_j+ in a round with communication, else x0_i <- x0_i+
    `start`: y begins at x0_i ("received") or at the client's last y ("own").
    """
    trajectory = Trajectory()
    x = world.w0.copy()
    s = 1.0 / rho
    duals = zeros_for_all(world)
    centres = {i: x.copy() for i in duals}
    last = {i: x.copy() for i in duals}
    for r, sampled in enumerate(participants):
        if sorted(sampled) != sorted(duals):
            raise ValueError("FedPD is defined for full participation only")
        old = x
        models = {}
        for i in usable(world, sampled):
            begin = centres[i] if start == "received" else last[i]
            direction = _augmented(world, i, centres[i], duals[i], s)
            models[i] = walk(begin, batches[r, i], local, r, direction)
        for i, y in models.items():
            duals[i] = duals[i] + (y - centres[i]) / s
            centres[i] = y + s * duals[i]
            last[i] = y
        if communicate is None or communicate[r]:
            x = uniform_mean(centres)
            centres = {i: x.copy() for i in centres}
        states = {i: {"lambda": duals[i], "x0": centres[i], "y": last[i]} for i in duals}
        trajectory.record(x, moves(models, old), x - old, clients=states)
    return trajectory


def _augmented(world: World, i: int, centre: Array, dual: Array, s: float) -> Direction:
    """Gradient of f_i(y) + <dual, y - centre> + ||y - centre||^2 / (2 s)."""
    gradient = batch_gradient(world, i)
    return lambda y, batch: gradient(y, batch) + dual + (y - centre) / s


# ---- FedDC, VRL-SGD ------------------------------------------------------------------------------


def feddc(
    world: World,
    participants: Rounds,
    batches: Batches,
    local: Local,
    *,
    alpha: float = 0.01,
    by_size: bool = True,
    control: bool = True,
    drift: bool = True,
    divisor: str = "path",
) -> Trajectory:
    """r_i = n_i/mean(n), 1 without `by_size`.

    local   y <- y - eta (g + (alpha/r_i)(y - x + h_i) + c/r_i - c_i)
    after   h_i <- h_i + (y_i - x), c_i+ = c_i - c/r_i + (x - y_i)/(K_i eta)
    server  x <- mean_S y_i + (1/N) sum_all h_i, c <- c + (1/N) sum_S r_i (c_i+ - c_i)
    With local momentum K_i is ||a_i||_1 (`divisor` "steps": it stays K_i).
    `control` False leaves the c terms out, `drift` False keeps every h_i at 0 (I-28).
    """
    trajectory = Trajectory()
    x = world.w0.copy()
    population = len(world.data)
    ratio = relative_sizes(world) if by_size else dict.fromkeys(range(population), 1.0)
    c = np.zeros_like(x)
    controls, drifts = zeros_for_all(world), zeros_for_all(world)
    for r, sampled in enumerate(participants):
        old = x
        models = {}
        for i in usable(world, sampled):
            pull = alpha / ratio[i]
            extra = pull * drifts[i] + c / ratio[i] - controls[i]
            steps = batches[r, i]
            models[i] = local_training(world, i, x, steps, local, r, mu=pull, correction=extra)
        models = finite_only(models)
        change = np.zeros_like(x)
        for i, y in models.items():
            if drift:
                drifts[i] = drifts[i] + (y - x)
            if control:
                count = len(batches[r, i])
                weight = count if divisor == "steps" else path(local, r, count)
                new = controls[i] - c / ratio[i] + (x - y) / (weight * round_lr(local, r))
                change = change + ratio[i] * (new - controls[i])
                controls[i] = new
        if models:
            x = uniform_mean(models) + uniform_mean(drifts)
            c = c + change / population
        states = {i: {"h": drifts[i], "c": controls[i]} for i in drifts}
        trajectory.record(x, moves(models, old), x - old, server={"c": c}, clients=states)
    return trajectory


def vrlsgd(world: World, participants: Rounds, batches: Batches, local: Local) -> Trajectory:
    """local   y <- y - eta (g - d_i)
    server  x <- xbar = mean y_j, d_i <- d_i + (xbar - y_i)/(K eta); everybody, the same K
    """
    trajectory = Trajectory()
    x = world.w0.copy()
    deviations = zeros_for_all(world)
    for r, sampled in enumerate(participants):
        if sorted(sampled) != sorted(deviations):
            raise ValueError("VRL-SGD is defined for full participation only")
        if len({len(batches[r, i]) for i in sampled}) > 1:
            raise ValueError("VRL-SGD is defined for equal K only")
        old = x
        models = {}
        for i in usable(world, sampled):
            steps = batches[r, i]
            models[i] = local_training(world, i, x, steps, local, r, correction=-deviations[i])
        x = uniform_mean(models)
        for i, y in models.items():
            divisor = option_two_divisor(local, r, len(batches[r, i]))
            deviations[i] = deviations[i] + (x - y) / divisor
        states = {i: {"d": deviations[i]} for i in deviations}
        trajectory.record(x, moves(models, old), x - old, clients=states)
    return trajectory
