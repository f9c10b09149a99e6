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


READINGS = [
    (mode, option, correction, weights)
    for mode, option, correction in [
        *(("persistent", o, c) for o in ("I", "II") for c in ("gradient", "post_step")),
        *(("fresh", "I", c) for c in ("gradient", "post_step")),
        *(("literal", o, "gradient") for o in ("I", "II")),
    ]
    for weights in (None, "uniform", "size")
]


def scaf(mode: str, option: str, correction: str, by_size: bool) -> list[Told]:
    """Persistent: c_i is kept; fresh: c_i = grad f_i(x) at once; literal: c_i <- c at first."""
    order, x, c, told, kept = batches(SOME), vec(net()), ZERO, [], dict.fromkeys(range(N), ZERO)
    for r, ids in enumerate(SOME):
        models, change, lr = {}, {}, LR * FALL**r
        for i in ids:
            gradient = full_gradient(x, i)
            c_i = {"persistent": kept[i], "fresh": gradient, "literal": c}[mode]
            model, extra = model_at(x), c - c_i
            if correction == "gradient":
                how = {"change": lambda m, extra=extra: add_to_grads(m, extra)}
                length = lr * heavy_length(len(order[r, i]), RHO)
            else:
                how = {"after": lambda m, extra=extra, lr=lr: shift(m, -lr * extra)}
                length = lr * len(order[r, i])
            train(model, i, order[r, i], torch_sgd(model, r, RHO), **how)
            models[i] = vec(model)
            new = gradient if option == "I" else c_i - c + (x - models[i]) / length
            change[i] = new - (ZERO if mode == "fresh" else c_i)
            kept[i] = new
        mean = mean_of(change, by_size=by_size)
        shared = mean if by_size or mode == "fresh" else mean * len(ids) / N
        c = shared if mode == "fresh" else c + shared
        x = mean_of(models, by_size=True)
        own = {i: {"c_i": kept[i]} for i in ids} if mode == "persistent" else {}
        told.append(Told(x, models, x, {"c": c}, own))
    return told


def shift(model: nn.Module, by: Tensor) -> None:
    torch.nn.utils.vector_to_parameters(vec(model) + by, model.parameters())


@pytest.mark.parametrize(("mode", "option", "correction", "weights"), READINGS)
def test_readings_of_scaf(mode: str, option: str, correction: str, weights: str | None) -> None:
    """Each with c by size and with equal weights; left out, as the paper has them in that mode."""
    by_size = weights == "size" or (weights is None and mode != "persistent")
    told = scaf(mode, option, correction, by_size)
    algorithm = fl.comfed(
        "scaf", local=HEAVY, mode=mode, option=option, correction=correction, c_weights=weights
    )
    check(algorithm, told, SOME, batches(SOME))
    other = scaf(mode, option, correction, not by_size)
    assert (other[-1].letters["c"] - told[-1].letters["c"]).abs().max() > 1e-3


# ---- server momentum in local steps --------------------------------------------------------------
def pulled_length(steps: int, lr: float, pull: float) -> float:
    """||a||_1 of heavy ball beside a pull: how far whole gradients move a model, over lr."""
    moved = buffer = 0.0
    for _ in range(steps):
        buffer = RHO * buffer + 1 - pull * lr * moved
        moved += buffer
    return moved


def going(style: str, server: str, b: float, scale: bool, mu: float = 0.0) -> list[Told]:
    """M = -m / (eta K), m the average of D, K the mean of ||a_i||_1 by size.

    A pull towards x shortens K by as much as it acts: with mu (1 - b) in a mixture.
    """
    order, x, told, opt = batches(SOME), vec(net()), [], Server(server)
    m, v, unit = ZERO, ZERO, 1.0
    for r, ids in enumerate(SOME):
        lr, models = LR * FALL**r, {}
        acts = mu * (1 - b) if style == "mimelite" else mu
        a = {i: pulled_length(len(order[r, i]), lr, acts) for i in ids}
        M = -m / unit
        if scale:
            s = 1 / (v.sqrt() + TAU)
            M = M * s / s.mean()
        for i in ids:
            y, buf = x.clone(), ZERO
            for batch in order[r, i]:
                g = _gradient(y, i, batch) + mu * (y - x)
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


@pytest.mark.parametrize("style", ["mimelite", "fedadc"])
def test_server_momentum_beside_a_pull(style: str) -> None:
    """K counts the pull as it acts."""
    told = going(style, "sgd", 0.6, scale=False, mu=1.5)
    algorithm = fl.comfed("prox", mu=1.5, local_momentum=style, b=0.6, local=HEAVY)
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
