"""ComFed's sixteen cells and its future work, written as one loop in torch, replayed to 1e-10."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import undrift as fl
from replay.world import (
    DECAY,
    FALL,
    HEAVY,
    LR,
    SIZES,
    SOME,
    N,
    Told,
    add_to_grads,
    batches,
    check,
    full_gradient,
    heavy_length,
    loss_of,
    mean_of,
    model_at,
    net,
    torch_sgd,
    train,
    vec,
)
from undrift.rules.named import COMFED_CLIENTS, COMFED_SERVERS

ZERO = torch.zeros_like(vec(net()))
RHO, MU, B1, B2, TAU, RATE = 0.8, 0.4, 0.9, 0.99, 1e-3, 0.05


class Server:
    """A plain step, or moments of D."""

    def __init__(self, kind: str) -> None:
        self.kind, self.m, self.v = kind, ZERO, ZERO

    def step(self, x: Tensor, d: Tensor) -> Tensor:
        if self.kind == "sgd":
            return x + d
        self.m = B1 * self.m + (1 - B1) * d
        self.v = {
            "adam": B2 * self.v + (1 - B2) * d * d,
            "adagrad": self.v + d * d,
            "yogi": self.v - (1 - B2) * d * d * torch.sign(self.v - d * d),
        }[self.kind]
        return x + RATE * self.m / (self.v.sqrt() + TAU)

    @property
    def letters(self) -> dict[str, Tensor]:
        return {} if self.kind == "sgd" else {"m": self.m, "v": self.v}


def lengths(order: dict, r: int, ids: list[int]) -> dict[int, float]:
    return {i: heavy_length(len(order[r, i]), RHO) for i in ids}


def aggregated(client: str, x: Tensor, models: dict[int, Tensor], a: dict[int, float]) -> Tensor:
    """D: the mean by size, or FedNova's."""
    total = sum(SIZES[i] for i in models)
    q = {i: SIZES[i] / total for i in models}
    if client != "nova":
        return sum(q[i] * (models[i] - x) for i in models)
    tau = sum(q[i] * a[i] for i in models)
    return tau * sum(q[i] * (models[i] - x) / a[i] for i in models)


@pytest.mark.parametrize("server", COMFED_SERVERS)
@pytest.mark.parametrize("client", COMFED_CLIENTS)
def test_a_cell(client: str, server: str) -> None:
    """Scaf: c_i is the full gradient at x, c moves by the sum of changes over N."""
    order, x, c, told, opt = batches(SOME), vec(net()), ZERO, [], Server(server)
    c_i = dict.fromkeys(range(N), ZERO)
    for r, ids in enumerate(SOME):
        models, moved = {}, ZERO
        for i in ids:
            model = model_at(x)

            def change(m: nn.Module, i: int = i, x: Tensor = x, c: Tensor = c) -> None:
                if client == "prox":
                    add_to_grads(m, MU * (vec(m) - x))
                if client == "scaf":
                    add_to_grads(m, c - c_i[i])

            train(model, i, order[r, i], torch_sgd(model, r, RHO), change=change)
            models[i] = vec(model)
            moved, c_i[i] = moved + full_gradient(x, i) - c_i[i], full_gradient(x, i)
        x = opt.step(x, aggregated(client, x, models, lengths(order, r, ids)))
        letters, own, c = dict(opt.letters), {}, c + moved / N
        if client == "scaf":
            letters["c"], own = c, {i: {"c_i": c_i[i]} for i in ids}
        told.append(Told(x, models, mean_of(models, by_size=True), letters, own))
    adaptive = {} if server == "sgd" else {"server_lr": RATE, "tau": TAU}
    pull = {"mu": MU} if client == "prox" else {}
    algorithm = fl.comfed(client, server, local=HEAVY, **pull, **adaptive)
    check(algorithm, told, SOME, order)


@pytest.mark.parametrize("mode", ["fresh", "literal", "size"])
def test_readings_of_scaf(mode: str) -> None:
    """fresh: c_i = grad f_i(x) at once, c for the next round; literal: no correction at all."""
    order, x, c, told, c_i = batches(SOME), vec(net()), ZERO, [], dict.fromkeys(range(N), ZERO)
    for r, ids in enumerate(SOME):
        models, fresh = {}, {i: full_gradient(x, i) for i in ids}
        for i in ids:
            model = model_at(x)
            extra = {"fresh": c - fresh[i], "literal": ZERO, "size": c - c_i[i]}[mode]
            correct = lambda m, extra=extra: add_to_grads(m, extra)  # noqa: E731
            train(model, i, order[r, i], torch_sgd(model, r, RHO), change=correct)
            models[i] = vec(model)
        c = {
            "fresh": mean_of(fresh, by_size=True),
            "literal": c + sum(fresh[i] - c for i in ids) / N,
            "size": c + mean_of({i: fresh[i] - c_i[i] for i in ids}, by_size=True),
        }[mode]
        c_i |= fresh
        x = mean_of(models, by_size=True)
        told.append(Told(x, models, x, {"c": c}))
    options = {"c_weights": "size"} if mode == "size" else {"mode": mode}
    check(fl.comfed("scaf", "sgd", local=HEAVY, **options), told, SOME, order)


# ---- server momentum in local steps --------------------------------------------------------------
def going(style: str, server: str, b: float, scale: bool) -> list[Told]:
    """M = -m / (eta K), m the average of D, K the mean of ||a_i||_1 by size."""
    order, x, told, opt = batches(SOME), vec(net()), [], Server(server)
    m, v, unit = ZERO, ZERO, 1.0
    for r, ids in enumerate(SOME):
        lr, models, a = LR * FALL**r, {}, lengths(order, r, ids)
        M = -m / unit
        if scale:
            s = 1 / (v.sqrt() + TAU)
            M = M * s / s.mean()
        for i in ids:
            y, buf = x.clone(), ZERO
            for batch in order[r, i]:
                g = _gradient(y, i, batch)
                u = (1 - b) * g + b * M if style == "mimelite" else g + b * M
                buf = RHO * buf + u
                y = y - lr * buf
            models[i] = y
        total = sum(SIZES[i] for i in ids)
        unit = lr * sum(SIZES[i] / total * a[i] for i in ids)
        d = aggregated("sgd", x, models, a)
        d = d + b * unit * M if style == "fedadc" else d
        m, v = B1 * m + (1 - B1) * d, B2 * v + (1 - B2) * d * d
        x = opt.step(x, d)
        letters = {"mo": m}
        told.append(Told(x, models, mean_of(models, by_size=True), letters))
    return told


def _gradient(y: Tensor, i: int, batch: list[int]) -> Tensor:
    model = model_at(y)
    loss_of(model, i, batch).backward()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()]) + DECAY * y


@pytest.mark.parametrize("server", ["sgd", "adam"])
@pytest.mark.parametrize("style", ["mimelite", "fedadc"])
def test_server_momentum_in_local_steps(style: str, server: str) -> None:
    told = going(style, server, 0.6, scale=False)
    adaptive = {} if server == "sgd" else {"server_lr": RATE, "tau": TAU}
    algorithm = fl.comfed("sgd", server, local_momentum=style, b=0.6, local=HEAVY, **adaptive)
    check(algorithm, told, SOME, batches(SOME))


def test_server_momentum_scaled_by_its_second_moment() -> None:
    told = going("mimelite", "adam", 0.6, scale=True)
    algorithm = fl.comfed(
        "sgd", "adam", local_momentum="mimelite", b=0.6, scale=True, server_lr=RATE, tau=TAU,
        local=HEAVY,
    )  # fmt: skip
    check(algorithm, told, SOME, batches(SOME))


@pytest.mark.parametrize(
    "settings",
    [
        {"server": "sgd", "local_momentum": "mimelite"},
        {"server": "adam", "local_momentum": "fedadc"},
        {"server": "adam"},
    ],
)
def test_what_has_no_second_moment_cannot_be_scaled(settings: dict[str, str]) -> None:
    with pytest.raises(fl.UndriftError, match="scale goes with an adaptive server"):
        fl.comfed("sgd", scale=True, **settings)
