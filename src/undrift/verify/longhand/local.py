"""What happens on one client: the local steps, the full-batch gradient and FedNova's ||a||_1."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from .worlds import Array, World

ADAPTIVE = ("rmsprop", "adamw")


@dataclass(frozen=True)
class Local:
    """Local settings. `optimizer`: sgd | heavy_ball | nesterov | rmsprop | adamw.

    `step_factor(k)` multiplies the learning rate of local step k = 0, 1, ...
    """

    lr: float
    lr_decay: float = 1.0
    step_factor: Callable[[int], float] | None = None
    optimizer: str = "sgd"
    rho: float = 0.9
    alpha: float = 0.99
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float | None = None


@dataclass
class Trajectory:
    """One entry per round, each taken AFTER the round's server step.

    x[r]                     server model
    server_states[r][name]   e.g. "c", "m", "v", "h"
    client_states[r][i][name]  for every client i of the population, sampled or not
    updates[r][i]            D_i of the clients that were used (C8 leaves the others out)
    aggregate[r]             D as the server optimiser saw it (zeros if nobody could be used)
    norms[r][i]              ||a_i||_1 where the algorithm uses one
    """

    x: list[Array] = field(default_factory=list)
    server_states: list[dict[str, Array]] = field(default_factory=list)
    client_states: list[dict[int, dict[str, Array]]] = field(default_factory=list)
    updates: list[dict[int, Array]] = field(default_factory=list)
    aggregate: list[Array] = field(default_factory=list)
    norms: list[dict[int, float]] = field(default_factory=list)

    def record(
        self,
        x: Array,
        updates: dict[int, Array],
        aggregate: Array,
        server: dict[str, Array] | None = None,
        clients: dict[int, dict[str, Array]] | None = None,
        norms: dict[int, float] | None = None,
    ) -> None:
        """Append copies, so that nothing recorded can change later."""
        self.x.append(x.copy())
        self.updates.append({i: d.copy() for i, d in updates.items()})
        self.aggregate.append(aggregate.copy())
        self.server_states.append({name: s.copy() for name, s in (server or {}).items()})
        self.client_states.append(
            {
                i: {name: s.copy() for name, s in states.items()}
                for i, states in (clients or {}).items()
            }
        )
        self.norms.append(dict(norms or {}))


def round_lr(local: Local, r: int) -> float:
    """Return eta_r = eta * gamma^r, r = 0 in the first round (C5)."""
    return local.lr * local.lr_decay**r


def step_lr(local: Local, r: int, k: int) -> float:
    """Return the learning rate of step k in round r."""
    factor = 1.0 if local.step_factor is None else local.step_factor(k)
    return round_lr(local, r) * factor


def clip_global_norm(u: Array, limit: float | None) -> Array:
    """Return u * min(1, limit / (||u|| + 1e-6)), as torch's clip_grad_norm_ does."""
    if limit is None:
        return u
    norm = float(np.sqrt(np.sum(u * u)))
    return u * min(1.0, limit / (norm + 1e-6))


def optimizer_step(y: Array, u: Array, state: dict[str, Array], lr: float, local: Local) -> Array:
    """One step of the local optimiser in torch's form; `state` starts empty every round (C3)."""
    if local.optimizer == "sgd":
        return y - lr * u
    if local.optimizer == "heavy_ball":
        state["buf"] = u.copy() if "buf" not in state else local.rho * state["buf"] + u
        return y - lr * state["buf"]
    if local.optimizer == "nesterov":
        state["buf"] = u.copy() if "buf" not in state else local.rho * state["buf"] + u
        return y - lr * (u + local.rho * state["buf"])
    if local.optimizer == "rmsprop":
        old = state.get("sq", np.zeros_like(u))
        state["sq"] = local.alpha * old + (1.0 - local.alpha) * u * u
        return y - lr * u / (np.sqrt(state["sq"]) + local.eps)
    if local.optimizer == "adamw":
        return _adam(y, u, state, lr, local)
    raise ValueError(f"unknown local optimizer {local.optimizer!r}")


def _adam(y: Array, u: Array, state: dict[str, Array], lr: float, local: Local) -> Array:
    t = state.get("t", np.zeros(())) + 1
    m = local.b1 * state.get("m", np.zeros_like(u)) + (1.0 - local.b1) * u
    v = local.b2 * state.get("v", np.zeros_like(u)) + (1.0 - local.b2) * u * u
    state["t"], state["m"], state["v"] = t, m, v
    m_hat = m / (1.0 - local.b1**t)
    v_hat = v / (1.0 - local.b2**t)
    return y - lr * m_hat / (np.sqrt(v_hat) + local.eps)


def local_training(
    world: World,
    client: int,
    x: Array,
    batches: list[Array],
    local: Local,
    r: int,
    *,
    mu: float = 0.0,
    correction: Array | None = None,
    after_step: Array | None = None,
) -> Array:
    """Run the client's local steps from x and return y_i (C4).

    Every step: u = clip(gradient + mu (y - x) + correction) + wd y, then the optimiser on u.
    `after_step` is NIID-Bench's form of a correction: it moves y by -lr * after_step after the
    optimiser, outside momentum and clipping.
    """
    inputs, labels = world.data[client]
    y = x.copy()
    state: dict[str, Array] = {}
    # A client may diverge on purpose in a test (C8): the numbers tell, warnings need not.
    with np.errstate(all="ignore"):
        for k, batch in enumerate(batches):
            lr = step_lr(local, r, k)
            u = world.gradient(y, inputs[batch], labels[batch])
            if mu != 0.0:
                u = u + mu * (y - x)
            if correction is not None:
                u = u + correction
            u = clip_global_norm(u, local.clip)
            if local.optimizer == "adamw":
                y = y * (1.0 - lr * local.weight_decay)  # decoupled: never enters u
            elif local.weight_decay != 0.0:
                u = u + local.weight_decay * y
            y = optimizer_step(y, u, state, lr, local)
            if after_step is not None:
                y = y - lr * after_step
    return y


def full_gradient(world: World, client: int, x: Array, local: Local) -> Array:
    """Return grad f_i(x) over all of D_i, weight decay included (C2).

    With adamw the decay is not part of any gradient the client steps along, so C2's reason (c_i
    and g must not disagree by wd*x) asks for leaving it out there.
    """
    inputs, labels = world.data[client]
    with np.errstate(all="ignore"):
        gradient = world.gradient(x, inputs, labels)
    if local.optimizer == "adamw":
        return gradient
    return gradient + local.weight_decay * x


# ---- ||a_i||_1 -----------------------------------------------------------------------------------


def _require_linear(local: Local) -> None:
    if local.clip is not None:
        raise ValueError("||a||_1 does not exist under clipping")
    if local.optimizer in ADAPTIVE:
        raise ValueError(f"||a||_1 does not exist for the adaptive optimizer {local.optimizer}")


def response(local: Local, r: int, gradients: list[float], mu: float = 0.0) -> float:
    """Run the optimiser on ONE scalar that starts at 0 and sees these gradients; return -w_K/eta.

    Weight decay is part of the gradient g (section 0), so it is not part of this recursion; the
    prox term is, because it depends on how far the earlier gradients moved the scalar.
    """
    _require_linear(local)
    eta = round_lr(local, r)
    w = 0.0
    buf = 0.0
    for k, gradient in enumerate(gradients):
        u = gradient + mu * w
        if local.optimizer == "sgd":
            direction = u
        elif local.optimizer == "heavy_ball":
            buf = local.rho * buf + u
            direction = buf
        else:  # nesterov
            buf = local.rho * buf + u
            direction = u + local.rho * buf
        w = w - step_lr(local, r, k) * direction
    return -w / eta


def impulse_norm(local: Local, r: int, steps: int, mu: float = 0.0) -> float:
    """Return ||a||_1 by section 2's rule: constant gradient 1, (w_0 - w_K)/eta."""
    return response(local, r, [1.0] * steps, mu)


def impulse_coefficients(local: Local, r: int, steps: int, mu: float = 0.0) -> list[float]:
    """Return every a_k on its own: the response to a gradient of 1 at step k and 0 elsewhere."""
    coefficients = []
    for k in range(steps):
        gradients = [0.0] * steps
        gradients[k] = 1.0
        coefficients.append(response(local, r, gradients, mu))
    return coefficients


def closed_form_norm(local: Local, r: int, steps: int, mu: float = 0.0) -> float:
    """Return ||a||_1 by the printed formulas of 1.5 (constant learning rate within the round)."""
    _require_linear(local)
    if local.step_factor is not None:
        raise ValueError("the closed forms hold for a constant learning rate")
    if local.optimizer == "sgd" and mu == 0.0:
        return float(steps)
    if local.optimizer == "sgd":
        shrink = round_lr(local, r) * mu
        return (1.0 - (1.0 - shrink) ** steps) / shrink
    if local.optimizer == "heavy_ball" and mu == 0.0:
        rho = local.rho
        return (steps - rho * (1.0 - rho**steps) / (1.0 - rho)) / (1.0 - rho)
    raise ValueError("1.5 prints no closed form for this local optimiser with this mu")


# ---- who counts in a round (C8, C9) --------------------------------------------------------------


def has_samples(world: World, client: int) -> bool:
    """Tell whether a client owns an example."""
    return len(world.data[client][0]) > 0


def finite(*uploads: Array) -> bool:
    """Tell whether every number is one."""
    return all(bool(np.all(np.isfinite(upload))) for upload in uploads)


def client_weights(world: World, clients: list[int], weighting: str) -> dict[int, float]:
    """Return q_i = n_i / sum over the given clients ("size"), or 1/m ("uniform")."""
    if weighting == "uniform":
        return {i: 1.0 / len(clients) for i in clients}
    if weighting == "size":
        total = 0
        for i in clients:
            total += len(world.data[i][0])
        return {i: len(world.data[i][0]) / total for i in clients}
    raise ValueError(f"unknown weighting {weighting!r}")
