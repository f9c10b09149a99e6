"""Server optimizers and momentum as other people write them, replayed to 1e-10."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import undrift as fl
from replay.world import (
    DATA,
    DECAY,
    FALL,
    HEAVY,
    LR,
    SGD,
    SIZES,
    SOME,
    N,
    Told,
    add_to_grads,
    batches,
    check,
    full_gradient,
    loss_of,
    mean_of,
    model_at,
    net,
    torch_sgd,
    train,
    vec,
)
from undrift.rules import compat

ZERO = torch.zeros_like(vec(net()))
Step = Callable[[int, Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]


def rounds(step: Step, by_size: bool = True) -> list[Told]:
    """Clients train as in FedAvg; `step` makes (round, x, mean of models) the next model."""
    order, x, told = batches(SOME), vec(net()), []
    for r, ids in enumerate(SOME):
        models = {}
        for i in ids:
            model = model_at(x)
            train(model, i, order[r, i], torch_sgd(model, r))
            models[i] = vec(model)
        average = mean_of(models, by_size)
        x, letters = step(r, x, average)
        told.append(Told(x, models, average, letters))
    return told


# ---- Flower --------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["adam", "yogi", "adagrad"])
def test_fedopt_of_flower(kind: str) -> None:
    """Moments of D = mean - x, no bias correction, sqrt(v) + tau."""
    b1, b2, tau, eta = 0.0 if kind == "adagrad" else 0.9, 0.99, 1e-3, 0.05
    m = v = ZERO

    def step(r: int, x: Tensor, mean: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        nonlocal m, v
        delta = mean - x
        m = b1 * m + (1 - b1) * delta
        square = delta * delta
        v = {
            "adam": b2 * v + (1 - b2) * square,
            "yogi": v - (1 - b2) * square * torch.sign(v - square),
            "adagrad": v + square,
        }[kind]
        return x + eta * m / (torch.sqrt(v) + tau), {"m": m, "v": v}

    build = {"adam": fl.fedadam, "yogi": fl.fedyogi, "adagrad": fl.fedadagrad}[kind]
    check(build(server_lr=eta, tau=tau, local=SGD), rounds(step), SOME, batches(SOME))


@pytest.mark.parametrize("correction", ["flower", "standard"])
@pytest.mark.parametrize("by_size", [True, False])
def test_fedadam_with_a_bias_correction(correction: str, by_size: bool) -> None:
    b1, b2, tau, eta, first = 0.8, 0.9, 1e-3, 0.05, 1e-4
    m, v = ZERO, ZERO + first

    def step(r: int, x: Tensor, mean: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        nonlocal m, v
        m = b1 * m + (1 - b1) * (mean - x)
        v = b2 * v + (1 - b2) * (mean - x) ** 2
        t = r + 1
        if correction == "flower":
            rate = eta * (1 - b2 ** (t + 1)) ** 0.5 / (1 - b1 ** (t + 1))
            return x + rate * m / (v.sqrt() + tau), {"m": m, "v": v}
        moved = m / (1 - b1**t) / ((v / (1 - b2**t)).sqrt() + tau)
        return x + eta * moved, {"m": m, "v": v}

    options = {"beta1": b1, "beta2": b2, "tau": tau, "v0": first, "bias_correction": correction}
    algorithm = fl.fedadam(server_lr=eta, by_size=by_size, local=SGD, **options)
    check(algorithm, rounds(step, by_size), SOME, batches(SOME))


def test_amsgrad_and_the_printed_root() -> None:
    b1, b2, tau, eta = 0.8, 0.6, 1e-2, 0.05
    m = v = top = ZERO

    def step(r: int, x: Tensor, mean: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        nonlocal m, v, top
        m = b1 * m + (1 - b1) * (mean - x)
        v = b2 * v + (1 - b2) * (mean - x) ** 2
        top = torch.maximum(top, v)
        return x + eta * m / (top + tau).sqrt(), {"m": m, "v": v, "vmax": top}

    options = {"beta1": b1, "beta2": b2, "tau": tau, "eps_inside": True}
    check(fl.fedamsgrad(server_lr=eta, local=SGD, **options), rounds(step), SOME, batches(SOME))


@pytest.mark.parametrize("whose", ["flower", "moon", "fedsim"])
def test_fedavgm(whose: str) -> None:
    """Flower's vector starts as the first step; MOON's is an average; fedsim's is torch's."""
    beta, eta, vector, buffer = 0.7, 0.9, None, torch.optim.SGD([ZERO.clone()], lr=1.0)

    def step(r: int, x: Tensor, mean: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        nonlocal vector, buffer
        pseudo = x - mean
        if whose == "moon":
            vector = (1 - beta) * pseudo + (0 if vector is None else beta * vector)
            return x - vector, {"v": -vector}
        if whose == "fedsim":
            if r == 0:
                buffer = torch.optim.SGD([x.clone()], lr=eta, momentum=beta)
            (cloud,) = buffer.param_groups[0]["params"]
            cloud.grad = pseudo
            buffer.step()
            return cloud.clone(), {"v": -buffer.state[cloud]["momentum_buffer"].clone()}
        vector = pseudo if r == 0 else beta * vector + pseudo
        return x - eta * vector, {"v": -vector}

    algorithm = fl.fedavgm(beta=beta, server_lr=eta, local=SGD)
    if whose == "moon":
        algorithm = fl.fedavgm(beta=beta, dampening=True, local=SGD)
    check(algorithm, rounds(step), SOME, batches(SOME))


# ---- SlowMo --------------------------------------------------------------------------------------
@pytest.mark.parametrize("buffers", ["reset", "keep", "average"])
def test_slowmo(buffers: str) -> None:
    """The slow momentum is in units of gradients; the base optimizer's buffer in three ways."""
    beta, alpha, rho = 0.6, 0.8, 0.7
    order, x, u, told = batches(SOME), vec(net()), ZERO, []
    mine, common = dict.fromkeys(range(N)), None
    for r, ids in enumerate(SOME):
        lr, models, ends = LR * FALL**r, {}, {}
        for i in ids:
            model = model_at(x)
            optimizer = torch_sgd(model, r, rho)
            held = {"reset": None, "keep": mine[i], "average": common}[buffers]
            for n, p in enumerate(model.parameters()):
                if held is not None:
                    optimizer.state[p]["momentum_buffer"] = held[n].clone()
            train(model, i, order[r, i], optimizer)
            models[i] = vec(model)
            ends[i] = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
            mine[i] = ends[i]
        common = [sum(ends[i][n] for i in ids) / len(ids) for n in range(4)]
        average = mean_of(models, by_size=False)
        u = beta * u + (x - average) / lr
        x = x - alpha * lr * u
        letters, own = {"u": u}, {}
        joined = lambda parts: torch.cat([v.reshape(-1) for v in parts])  # noqa: E731
        if buffers == "average":
            letters["buf"] = joined(common)
        if buffers == "keep":
            own = {i: {"buf_i": joined(ends[i])} for i in ids}
        told.append(Told(x, models, average, letters, own))
    local = fl.sgd(LR, rho, lr_decay=FALL, weight_decay=DECAY)
    algorithm = fl.slowmo(beta=beta, server_lr=alpha, buffers=buffers, local=local)
    check(algorithm, told, SOME, order)


# ---- FedADC --------------------------------------------------------------------------------------
@pytest.mark.parametrize("form", ["heavy_ball", "nesterov"])
def test_fedadc(form: str) -> None:
    """beta_l m / K_i in every step, taken out of the mean again."""
    beta_l, beta_g, alpha = 0.6, 0.8, 0.7
    order, x, m, told = batches(SOME), vec(net()), ZERO, []
    for r, ids in enumerate(SOME):
        lr, models = LR * FALL**r, {}
        for i in ids:
            share, y = beta_l * m / len(order[r, i]), x.clone()
            for batch in order[r, i]:
                at = y - lr * share if form == "nesterov" else y
                model = model_at(at)
                loss_of(model, i, batch).backward()
                g = torch.cat([p.grad.reshape(-1) for p in model.parameters()]) + DECAY * at
                y = at - lr * g if form == "nesterov" else y - lr * (g + share)
            models[i] = y
        average = mean_of(models, by_size=False)
        pure = -(average - x) / lr
        m = pure + (beta_g - beta_l) * m
        x = x - alpha * lr * m
        told.append(Told(x, models, average, {"m": m}))
    algorithm = fl.fedadc(
        beta_local=beta_l, beta_global=beta_g, server_lr=alpha, form=form, local=SGD
    )
    check(algorithm, told, SOME, order)


# ---- Mime ----------------------------------------------------------------------------------------
BETA, B2, EPS = 0.7, 0.9, 1e-2
State = tuple[Tensor, Tensor]


def taken(base: str, g: Tensor, state: State, t: int) -> tuple[Tensor, State]:
    """Give the direction and the next state of a base optimizer."""
    m, v = state
    if base == "trace":
        m = g + BETA * m
        return m, (m, v)
    m = (1 - BETA) * g + BETA * m
    if base == "sgdm":
        return m, (m, v)
    v = (1 - B2) * g * g + B2 * v
    if base == "adam":
        return m / (v.sqrt() + EPS), (m, v)
    return m / (1 - BETA**t) / ((v / (1 - B2**t)).sqrt() + EPS), (m, v)


def gradient(at: Tensor, i: int, batch: list[int]) -> Tensor:
    model = model_at(at)
    loss_of(model, i, batch).backward()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()]) + DECAY * at


@pytest.mark.parametrize("lite", [True, False])
@pytest.mark.parametrize("base", ["sgdm", "trace", "adam", "corrected"])
def test_mime(lite: bool, base: str) -> None:
    """The server's state is applied in every local step and moves between rounds alone.

    `trace` and `corrected` are optax's momentum and Adam, as in fedjax.
    """
    order, x, told, eta_s, state = batches(SOME), vec(net()), [], 0.9, (ZERO, ZERO)
    for r, ids in enumerate(SOME):
        lr, models = LR * FALL**r, {}
        c = mean_of({i: full_gradient(x, i) for i in ids}, by_size=True)
        for i in ids:
            y = x.clone()
            for batch in order[r, i]:
                g = gradient(y, i, batch)
                g = g if lite else g - gradient(x, i, batch) + c
                y = y - lr * taken(base, g, state, r + 1)[0]
            models[i] = y
        average = mean_of(models, by_size=True)
        x = x + eta_s * (average - x)
        _, state = taken(base, c, state, r + 1)
        told.append(Told(x, models, average, dict(zip("mv", state, strict=True))))
        if base in ("sgdm", "trace"):
            told[-1].letters.pop("v")
    name, adam = base, {}
    if base in ("adam", "corrected"):
        name, adam = "adam", {"beta2": B2, "eps": EPS, "bias_correction": base == "corrected"}
    build = fl.mimelite if lite else fl.mime
    algorithm = build(beta=BETA, base=name, server_lr=eta_s, local=SGD, **adam)
    check(algorithm, told, SOME, order)


# ---- q-FFL ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("whose", ["original", "rfedavg", "one step"])
def test_q_ffl(whose: str) -> None:
    q, order, x, told = 1.5, batches(SOME), vec(net()), []
    if whose == "one step":
        order = {key: [list(range(SIZES[key[1]]))] for key in order}
    for r, ids in enumerate(SOME):
        lr, models, deltas, hs, own = LR * FALL**r, {}, [], [], {}
        for i in ids:
            model = model_at(x)
            with torch.no_grad():
                loss = float(loss_of(model, i))
            train(model, i, order[r, i], torch_sgd(model, r))
            models[i] = vec(model)
            L = 3.0 if whose == "rfedavg" else 1 / lr
            f, grads = loss if whose == "rfedavg" else loss + 1e-10, L * (x - models[i])
            deltas.append(f**q * grads)
            length = deltas[-1] if whose == "rfedavg" else grads
            hs.append(q * f ** (q - 1) * float((length**2).sum()) + L * f**q)
            numbers = torch.tensor([loss, hs[-1]], dtype=torch.float64)
            own[i] = dict(zip(("F_i", "h_i"), numbers, strict=True))
        x = x - sum(deltas) / sum(hs)
        told.append(Told(x, models, mean_of(models, by_size=False), {}, own))
    algorithm = {
        "original": fl.qfedavg(q=q, local=SGD),
        "rfedavg": replace(fl.qfedavg(local=SGD), aggregate=compat.QFairFree(q, 3.0)),
        "one step": fl.qfedsgd(q=q, local=SGD),
    }[whose]
    check(algorithm, told, SOME, order)


def test_parts_combine() -> None:
    """MOON's code has FedAvgM under any method: here FedProx with an averaged server momentum."""
    beta, mu, vector = 0.6, 0.4, ZERO
    order, x, told = batches(SOME), vec(net()), []
    for r, ids in enumerate(SOME):
        models = {}
        for i in ids:
            model = model_at(x)

            def pull(m: nn.Module, x: Tensor = x) -> None:
                add_to_grads(m, mu * (vec(m) - x))

            train(model, i, order[r, i], torch_sgd(model, r, 0.8), change=pull)
            models[i] = vec(model)
        average = mean_of(models, by_size=True)
        vector = beta * vector + (1 - beta) * (x - average)
        x = x - vector
        told.append(Told(x, models, average, {"v": -vector}))
    server = fl.ServerMomentum(beta=beta, dampening=True)
    algorithm = replace(fl.fedprox(mu=mu, local=HEAVY), server=server)
    check(algorithm, told, SOME, order)
    assert len(DATA) == N
