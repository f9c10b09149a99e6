"""SlowMo, FedADC and ComFed with local momentum, written out."""

import numpy as np

from .local import Local, Trajectory, full_gradient, round_lr, step_lr
from .steps import (
    Direction,
    batch_gradient,
    finite_only,
    moves,
    path,
    size_mean,
    uniform_mean,
    usable,
    walk,
    zeros_for_all,
)
from .worlds import Array, Batches, World

Rounds = list[list[int]]


def slowmo(
    world: World,
    participants: Rounds,
    batches: Batches,
    local: Local,
    *,
    beta: float = 0.5,
    alpha: float = 1.0,
    buffers: str = "reset",
) -> Trajectory:
    """u <- beta u + (x - xbar)/eta_r, x <- x - alpha eta_r u; xbar the uniform mean.

    `buffers` of the local heavy ball at the end of a round: reset, keep, or average (over the
    cohort, and everybody goes on with the mean).
    """
    trajectory = Trajectory()
    x = world.w0.copy()
    u = np.zeros_like(x)
    kept: dict[int, dict[str, Array]] = {i: {} for i in range(len(world.data))}
    for r, sampled in enumerate(participants):
        old, eta = x, round_lr(local, r)
        models = {}
        for i in usable(world, sampled):
            state = {} if buffers == "reset" else kept[i]
            models[i] = walk(x, batches[r, i], local, r, batch_gradient(world, i), state)
        models = finite_only(models)
        if models:
            u = beta * u + (x - uniform_mean(models)) / eta
            x = x - alpha * eta * u
        if buffers == "average":
            mean = uniform_mean({i: kept[i]["buf"] for i in models})
            kept = {i: {"buf": mean.copy()} for i in kept}
        trajectory.record(x, moves(models, old), x - old, server={"u": u})
    return trajectory


# ---- FedADC --------------------------------------------------------------------------------------


def fedadc(
    world: World,
    participants: Rounds,
    batches: Batches,
    local: Local,
    *,
    beta_local: float = 0.9,
    beta_global: float = 0.9,
    alpha: float = 1.0,
    form: str = "heavy_ball",
    share: str = "path",
) -> Trajectory:
    """mbar_i = beta_l m/K_i, so that every client's move contains -eta beta_l m.

    heavy ball  y <- y - eta (g(y) + mbar)
    nesterov    z = y - eta mbar, y <- z - eta g(z)
    server      Dbar = -mean D_i/eta, m <- Dbar + (beta_g - beta_l) m, x <- x - alpha eta m
    With local momentum ||a_i||_1 stands for K_i (`share` "steps": K_i does all the same, and
    part of beta_l m stays in the server's m).
    """
    if form not in ("heavy_ball", "nesterov"):
        raise ValueError(f"unknown form {form!r}")
    trajectory = Trajectory()
    x = world.w0.copy()
    m = np.zeros_like(x)
    for r, sampled in enumerate(participants):
        old, eta = x, round_lr(local, r)
        models = {}
        for i in usable(world, sampled):
            steps = batches[r, i]
            length = path(local, r, len(steps)) if share == "path" else len(steps)
            mbar = beta_local * m / length
            if form == "nesterov":
                models[i] = _look_ahead(world, i, x, steps, local, r, mbar)
            else:
                models[i] = walk(x, steps, local, r, _plus(batch_gradient(world, i), mbar))
        models = finite_only(models)
        if models:
            mean_step = uniform_mean({i: (x - y) / eta for i, y in models.items()})
            m = mean_step + (beta_global - beta_local) * m
            x = x - alpha * eta * m
        trajectory.record(x, moves(models, old), x - old, server={"m": m})
    return trajectory


def _plus(gradient: Direction, constant: Array) -> Direction:
    return lambda y, batch: gradient(y, batch) + constant


def _look_ahead(
    world: World, i: int, x: Array, batches: list[Array], local: Local, r: int, mbar: Array
) -> Array:
    """Step along the momentum first, and take the gradient (decay included) where that leads."""
    if local.optimizer != "sgd" or local.clip is not None:
        raise ValueError("the Nesterov form is written for plain SGD")
    inputs, labels = world.data[i]
    y = x.copy()
    with np.errstate(all="ignore"):
        for k, batch in enumerate(batches):
            eta = step_lr(local, r, k)
            z = y - eta * mbar
            gradient = world.gradient(z, inputs[batch], labels[batch]) + local.weight_decay * z
            y = z - eta * gradient
    return y


# ---- ComFed with the server's momentum in the local steps ----------------------------------------


def comfed_momentum(
    world: World,
    participants: Rounds,
    batches: Batches,
    local: Local,
    *,
    client: str,
    server: str,
    style: str,
    b: float = 0.9,
    mu: float = 0.005,
    eta_g: float | None = None,
    b1: float = 0.9,
    b2: float = 0.99,
    tau: float = 1e-3,
    v0: float = 0.0,
    decay: str = "inside",
    sent: str = "last",
    weights: str = "size",
    rate: str = "now",
    cancel: str = "now",
) -> Trajectory:
    """M = -m/(eta Kbar): the server's EMA of updates in the units of a gradient.

    mimelite  u = (1-b) gtil + b M
    fedadc    u = gtil + b M, and the server takes it out again: D <- D + b eta Kbar M
    gtil = g + mu (y - x) [prox], g + c - c_i [scaf: option I, persistent]; g contains wd y
    (`decay` "outside": wd y is added behind, unscaled). m <- b1 m + (1-b1) D under every server.
    M's Kbar: of the cohort before ("last") or of this one ("now"); the mean of ||a_i||_1 is
    weighted by "size" or "uniform"; M's eta: this round's ("now") or the "last" one's.
    What is taken out uses this round's Kbar ("now") or the one that M was "sent" with.
    """
    trajectory = Trajectory()
    x = world.w0.copy()
    m, v = np.zeros_like(x), np.full_like(x, v0)
    c, variates = np.zeros_like(x), zeros_for_all(world)
    kbar, last_eta = 1.0, local.lr  # before the first round m is 0
    if eta_g is None:
        eta_g = 1.0 if server == "sgd" else 0.005
    scale = 1.0 - b if style == "mimelite" else 1.0
    lost = b * local.weight_decay if style == "mimelite" and decay == "inside" else 0.0
    pull = mu if client == "prox" else 0.0
    for r, sampled in enumerate(participants):
        old, eta = x, round_lr(local, r)
        who = usable(world, sampled)
        norms = {i: path(local, r, len(batches[r, i]), scale * pull) for i in who}
        now = float(_mean(world, norms, weights))
        used = now if sent == "now" else kbar
        big = -m / ((eta if rate == "now" else last_eta) * used)
        models = {}
        for i in who:
            extra = c - variates[i] if client == "scaf" else np.zeros_like(x)
            direction = _mixed(batch_gradient(world, i), x, pull, extra, scale, b * big, lost)
            models[i] = walk(x, batches[r, i], local, r, direction)
        models = finite_only(models)
        if models:
            total = _combine(world, client, moves(models, x), norms)
            if style == "fedadc":
                total = total + b * eta * (now if cancel == "now" else used) * big
            if client == "scaf":
                c = _option_one(world, x, local, c, variates, list(models))
            m = b1 * m + (1.0 - b1) * total
            x, v = _serve(server, x, m, v, total, eta_g, b2, tau)
            kbar, last_eta = now, eta
        states = {i: {"c": variates[i]} for i in variates} if client == "scaf" else {}
        kept = {"m": m, "v": v, "c": c}
        trajectory.record(x, moves(models, old), x - old, server=kept, clients=states, norms=norms)
    return trajectory


def _mean(world: World, values: dict[int, float], weights: str) -> Array:
    arrays = {i: np.array(value) for i, value in values.items()}
    return size_mean(world, arrays) if weights == "size" else uniform_mean(arrays)


def _mixed(
    gradient: Direction,
    x: Array,
    pull: float,
    extra: Array | float,
    scale: float,
    momentum: Array,
    lost: float,
) -> Direction:
    """Return scale * gtil + momentum, less what C4 adds too much of the weight decay."""

    def direction(y: Array, batch: Array) -> Array:
        corrected = gradient(y, batch) + pull * (y - x) + extra
        return scale * corrected + momentum - lost * y

    return direction


def _combine(
    world: World, client: str, updates: dict[int, Array], norms: dict[int, float]
) -> Array:
    if client != "nova":
        return size_mean(world, updates)
    examples = sum(len(world.data[i][0]) for i in updates)
    tau_eff, mean = 0.0, np.zeros_like(world.w0)
    for i, update in updates.items():
        q = len(world.data[i][0]) / examples
        tau_eff += q * norms[i]
        mean = mean + q * update / norms[i]
    return tau_eff * mean


def _option_one(
    world: World, x: Array, local: Local, c: Array, variates: dict[int, Array], who: list[int]
) -> Array:
    """Replace c_i by grad f_i(x) and return the server's c + (1/N) sum dc_i."""
    new_c = c.copy()
    for i in who:
        new = full_gradient(world, i, x, local)
        new_c = new_c + (new - variates[i]) / len(world.data)
        variates[i] = new
    return new_c


def _serve(
    server: str, x: Array, m: Array, v: Array, total: Array, eta_g: float, b2: float, tau: float
) -> tuple[Array, Array]:
    if server == "sgd":
        return x + eta_g * total, v
    if server == "adam":
        v = b2 * v + (1 - b2) * total**2
    elif server == "adagrad":
        v = v + total**2
    elif server == "yogi":
        v = v - (1 - b2) * total**2 * np.sign(v - total**2)
    else:
        raise ValueError(f"unknown server optimiser {server!r}")
    return x + eta_g * m / (np.sqrt(v) + tau), v
