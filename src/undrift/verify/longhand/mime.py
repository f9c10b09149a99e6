"""Mime and MimeLite with SGDm or Adam as the base optimiser, written out."""

from dataclasses import dataclass, field

import numpy as np

from .local import Local, Trajectory, full_gradient, step_lr
from .steps import finite_only, moves, size_mean, usable
from .worlds import Array, Batches, World


@dataclass
class SGDm:
    """U = (1 - beta) g + beta m;  V: m <- (1 - beta) c + beta m."""

    beta: float = 0.9
    state: dict[str, Array] = field(default_factory=dict)

    def begin(self, x: Array) -> None:
        self.state = {"m": np.zeros_like(x)}

    def u(self, g: Array, r: int) -> Array:
        return (1.0 - self.beta) * g + self.beta * self.state["m"]

    def v(self, c: Array) -> None:
        self.state = {"m": (1.0 - self.beta) * c + self.beta * self.state["m"]}


@dataclass
class Adam:
    """U = m+/(sqrt(v+) + eps) with m+ = (1-b1) g + b1 m, v+ = (1-b2) g^2 + b2 v; V keeps them.

    `bias_correction` divides m+ by 1 - b1^(r+1) and v+ by 1 - b2^(r+1), r the rounds completed.
    """

    b1: float = 0.9
    b2: float = 0.99
    eps: float = 1e-3
    bias_correction: bool = False
    state: dict[str, Array] = field(default_factory=dict)

    def begin(self, x: Array) -> None:
        self.state = {"m": np.zeros_like(x), "v": np.zeros_like(x)}

    def _moments(self, g: Array) -> tuple[Array, Array]:
        m = (1.0 - self.b1) * g + self.b1 * self.state["m"]
        return m, (1.0 - self.b2) * g * g + self.b2 * self.state["v"]

    def u(self, g: Array, r: int) -> Array:
        m, v = self._moments(g)
        if self.bias_correction:
            m, v = m / (1.0 - self.b1 ** (r + 1)), v / (1.0 - self.b2 ** (r + 1))
        return m / (np.sqrt(v) + self.eps)

    def v(self, c: Array) -> None:
        m, v = self._moments(c)
        self.state = {"m": m, "v": v}


def mime(
    world: World,
    participants: list[list[int]],
    batches: Batches,
    local: Local,
    *,
    base: SGDm | Adam,
    lite: bool = False,
    eta_s: float = 1.0,
    decay: str = "inside",
) -> Trajectory:
    """The base's state is FIXED during a round.

    local   y <- y - eta U(g(y;b) - g(x;b) + c), or U(g(y;b)) with `lite`; one b for both gradients
    server  x <- x + eta_s sum q_i D_i, then V(c); c = sum n_i grad f_i(x) / sum n_i, old x
    g contains wd y. `decay` "outside" takes wd out of g and adds it behind U, unscaled.
    """
    if local.optimizer != "sgd" or local.clip is not None:
        raise ValueError("the base optimiser takes the place of the local one")
    trajectory = Trajectory()
    x = world.w0.copy()
    base.begin(x)
    for r, sampled in enumerate(participants):
        old = x
        who = usable(world, sampled)
        gradients = finite_only({i: full_gradient(world, i, x, local) for i in who})
        c = size_mean(world, gradients) if gradients else np.zeros_like(x)
        models = {}
        for i in gradients:
            models[i] = _train(world, i, x, batches[r, i], local, r, base, lite, c, decay)
        models = finite_only(models)
        if models:
            x = x + eta_s * size_mean(world, moves(models, x))
            base.v(size_mean(world, {i: gradients[i] for i in models}))
        trajectory.record(x, moves(models, old), x - old, server=base.state)
    return trajectory


def _train(
    world: World,
    i: int,
    x: Array,
    batches: list[Array],
    local: Local,
    r: int,
    base: SGDm | Adam,
    lite: bool,
    c: Array,
    decay: str,
) -> Array:
    inputs, labels = world.data[i]
    inside = local.weight_decay if decay == "inside" else 0.0
    y = x.copy()
    with np.errstate(all="ignore"):
        for k, batch in enumerate(batches):
            g = world.gradient(y, inputs[batch], labels[batch]) + inside * y
            if not lite:
                g = g - (world.gradient(x, inputs[batch], labels[batch]) + inside * x) + c
            u = base.u(g, r) + (local.weight_decay - inside) * y
            y = y - step_lr(local, r, k) * u
    return y
