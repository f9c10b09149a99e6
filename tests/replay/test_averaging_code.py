"""FedAvg, FedProx and FedNova as other people write them, replayed to 1e-10."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import undrift as fl
from replay.world import (
    ALL,
    CLIP,
    CLIPPED,
    DATA,
    DECAY,
    FALL,
    HEAVY,
    LR,
    SGD,
    SIZES,
    SOME,
    Told,
    add_to_grads,
    batches,
    check,
    flat,
    heavy_length,
    keep,
    mean_of,
    model_at,
    net,
    torch_sgd,
    train,
    vec,
)
from undrift.replay import in_order
from undrift.rules import Adam, compat


# ---- FedDyn's repository: a matrix of all clients' parameters, clipping at a norm ----------------
def feddyns_fedavg(mu: float | None) -> list[Told]:
    order, x = batches(SOME), vec(net())
    params, told, acted = x.repeat(len(SIZES), 1), [], 0
    weights = torch.tensor(SIZES).double()[:, None]
    for r, ids in enumerate(SOME):
        for i in ids:
            model = model_at(x)

            def prox(m: nn.Module, x: Tensor = x) -> Tensor:
                y = flat(m)
                return mu / 2 * torch.sum(y * y) - mu * torch.sum(y * x)

            more = None if mu is None else prox
            acted += train(model, i, order[r, i], torch_sgd(model, r), more=more, clip=CLIP)
            params[i] = vec(model)
        x = (params[ids] * weights[ids] / weights[ids].sum()).sum(0)
        everybody = (params * weights / weights.sum()).sum(0)
        told.append(Told(x, {i: params[i].clone() for i in ids}, x, everybody=everybody))
    assert acted > 3
    return told


def test_fedavg_of_feddyns_code() -> None:
    check(fl.fedavg(local=CLIPPED), feddyns_fedavg(None), SOME, batches(SOME))


def test_fedprox_of_feddyns_code() -> None:
    check(fl.fedprox(mu=0.7, local=CLIPPED), feddyns_fedavg(0.7), SOME, batches(SOME))


# ---- rFedAvg's repository: optimizers that live for ever, plain means, drop_last -----------------
@pytest.mark.parametrize("optimizer", ["heavy", "rmsprop"])
@pytest.mark.parametrize("strength", [0.0, 0.4])
def test_fedprox_of_rfedavgs_code(optimizer: str, strength: float) -> None:
    order, x = in_order(SIZES, SOME, batch=3, epochs=2, drop_last=True), vec(net())
    models = [net() for _ in SIZES]
    kinds = {
        "heavy": lambda m: torch.optim.SGD(m.parameters(), lr=LR, momentum=0.8),
        "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=LR / 10),
    }
    optimizers = [kinds[optimizer](m) for m in models]
    rate, told = LR if optimizer == "heavy" else LR / 10, []
    for r, ids in enumerate(SOME):
        for i in ids:
            torch.nn.utils.vector_to_parameters(x.clone(), models[i].parameters())
            optimizers[i].param_groups[0]["lr"] = rate
            more = None if strength == 0 else lambda m, x=x: strength * ((flat(m) - x) ** 2).sum()
            train(models[i], i, order[r, i], optimizers[i], more=more)
        x = sum(vec(models[i]) for i in ids) / len(ids)
        rate *= FALL
        told.append(Told(x, {i: vec(models[i]) for i in ids}, x))
    local = fl.sgd(LR, 0.8, lr_decay=FALL)
    if optimizer == "rmsprop":
        local = fl.RmsProp(lr=LR / 10, schedule=fl.Exponential(FALL))
    rules = (compat.prox_of_rfedavg(strength),) if strength else ()
    algorithm = fl.Algorithm(rules, local, fl.Mean(by_size=False))
    check(compat.keep_client_opt(algorithm), told, SOME, order)


# ---- fedsim: gradients are changed in place, the server holds an optimizer -----------------------
def test_fedprox_of_fedsim() -> None:
    """Half the mu, and a torch optimizer that is fed x - mean as a gradient."""
    order, mu, cloud = batches(SOME), 0.6, vec(net())
    server, told, acted = torch.optim.SGD([cloud], lr=0.7), [], 0
    for r, ids in enumerate(SOME):
        models = {}
        for i in ids:
            model, start = model_at(cloud), cloud.clone()

            def change(m: nn.Module, start: Tensor = start) -> None:
                add_to_grads(m, mu * 0.5 * (vec(m) - start))

            optimizer = torch_sgd(model, r)
            acted += train(model, i, order[r, i], optimizer, change=change, clip=CLIP)
            models[i] = vec(model)
        average = mean_of(models, by_size=True)
        cloud.grad = cloud - average
        server.step()
        told.append(Told(cloud.clone(), models, average))
    assert acted > 3
    rule = compat.prox_of_fedsim(mu)
    check(fl.Algorithm((rule,), CLIPPED, server=fl.Step(0.7)), told, SOME, order)


def test_fednova_of_fedsim() -> None:
    order, x, told = batches(SOME), vec(net()), []
    for r, ids in enumerate(SOME):
        models = {}
        for i in ids:
            model = model_at(x)
            train(model, i, order[r, i], torch_sgd(model, r))
            models[i] = vec(model)
        weights = {i: SIZES[i] / len(order[r, i]) for i in ids}
        average = mean_of(models, by_size=True)
        x = sum(weights[i] * models[i] for i in ids) / sum(weights.values())
        told.append(Told(x, models, average))
    check(fl.fednova(tau_eff="harmonic", local=SGD), told, SOME, order)


# ---- FedNova's repository: an optimizer of its own -----------------------------------------------
class NovaSgd(torch.optim.Optimizer):
    """Counts its normalizing number while it steps; the pull comes after momentum, in place."""

    def __init__(self, params, lr, momentum=0.0, mu=0.0, weight_decay=0.0, nesterov=False) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self.momentum, self.mu, self.nesterov = momentum, mu, nesterov
        self.counter = self.length = 0.0
        self.steps = 0

    @torch.no_grad()
    def step(self) -> None:
        group = self.param_groups[0]
        for p in group["params"]:
            kept = self.state[p]
            kept.setdefault("first", p.clone())
            d = self.moved(p.grad + group["weight_decay"] * p, kept)
            if self.mu:
                d.add_(p - kept["first"], alpha=self.mu)  # d may be the buffer itself
            p.add_(d, alpha=-group["lr"])
        self.count(group["lr"])

    def moved(self, d: Tensor, kept: dict[str, Tensor]) -> Tensor:
        if not self.momentum:
            return d
        if "buffer" not in kept:
            kept["buffer"] = d.clone()
        else:
            kept["buffer"].mul_(self.momentum).add_(d)
        return d + self.momentum * kept["buffer"] if self.nesterov else kept["buffer"]

    def count(self, lr: float) -> None:
        if self.momentum:
            self.counter = self.counter * self.momentum + 1
            self.length += self.counter
        if self.mu:
            self.length = self.length * (1 - lr * self.mu) + 1
        if not self.momentum and not self.mu:
            self.length += 1
        self.steps += 1


def novas_code(gmf: float = 0.0, **settings: float) -> list[Told]:
    order, x, told, buffer = batches(SOME), vec(net()), [], None
    for r, ids in enumerate(SOME):
        lr, models, optimizers = LR * FALL**r, {}, {}
        for i in ids:
            model = model_at(x)
            optimizers[i] = NovaSgd(model.parameters(), lr, weight_decay=DECAY, **settings)
            train(model, i, order[r, i], optimizers[i])
            models[i] = vec(model)
        ratio = {i: SIZES[i] / sum(SIZES[j] for j in ids) for i in ids}
        pulled = settings.get("mu", 0.0) != 0
        tau = sum(ratio[i] * (o.steps if pulled else o.length) for i, o in optimizers.items())
        step = sum(ratio[i] * tau / optimizers[i].length * (x - models[i]) for i in ids)
        average = mean_of(models, by_size=True)
        if gmf:
            buffer = step / lr if buffer is None else gmf * buffer + step / lr
            x = x - lr * buffer
        else:
            x = x - step
        told.append(Told(x, models, average, {"u": buffer.clone()} if gmf else {}))
    return told


def test_fednova_of_its_code_without_a_pull() -> None:
    check(fl.fednova(local=SGD), novas_code(), SOME, batches(SOME))
    check(fl.fednova(local=HEAVY), novas_code(momentum=0.8), SOME, batches(SOME))


def test_fednova_of_its_code_with_a_pull() -> None:
    told = novas_code(mu=0.5)
    check(fl.fednova(mu=0.5, tau_eff="steps", local=SGD), told, SOME, batches(SOME))
    with pytest.raises(AssertionError, match="round 0, server"):
        check(fl.fednova(mu=0.5, local=SGD), told, SOME, batches(SOME))


def test_fednova_of_its_code_counts_both_recursions() -> None:
    """In heavy ball's buffer the pull is where `Prox` puts it; the length is no length."""
    told = novas_code(mu=0.5, momentum=0.8)
    counted = compat.NovaCounted(0.8, 0.5)
    check(fl.Algorithm((fl.Prox(0.5),), HEAVY, counted), told, SOME, batches(SOME))


def test_fednova_of_its_code_with_nesterov_momentum() -> None:
    """There the pull does not reach the buffer, and lengths are heavy ball's."""
    told = novas_code(mu=0.5, momentum=0.8, nesterov=True)
    local = fl.sgd(LR, 0.8, nesterov=True, lr_decay=FALL, weight_decay=DECAY)
    rules = (compat.ProxAfterMomentum(0.5),)
    check(fl.Algorithm(rules, local, compat.NovaCounted(0.8, 0.5)), told, SOME, batches(SOME))
    plain = novas_code(momentum=0.8, nesterov=True)
    check(fl.Algorithm((), local, compat.NovaCounted(0.8)), plain, SOME, batches(SOME))


def test_fednova_of_its_code_with_slow_momentum() -> None:
    told = novas_code(gmf=0.6, momentum=0.8)
    check(fl.fednova(gmf=0.6, local=HEAVY), told, SOME, batches(SOME))


@pytest.mark.parametrize("by_size", [True, False])
def test_fednova_of_the_paper(by_size: bool) -> None:
    """||a||_1 by impulses: each gradient alone is 1, and the real optimizer runs on a scalar."""
    order, x, told, mu, rho = batches(SOME), vec(net()), [], 0.5, 0.8
    for r, ids in enumerate(SOME):
        lr, models, lengths = LR * FALL**r, {}, {}
        for i in ids:
            model = model_at(x)

            def change(m: nn.Module, x: Tensor = x) -> None:
                add_to_grads(m, mu * (vec(m) - x))

            train(model, i, order[r, i], torch_sgd(model, r, rho), change=change)
            models[i], lengths[i] = vec(model), 0.0
            for k in range(len(order[r, i])):
                y = buf = 0.0
                for j in range(len(order[r, i])):
                    buf = rho * buf + float(j == k) + mu * y
                    y -= lr * buf
                lengths[i] += -y / lr
        weight = {i: SIZES[i] if by_size else 1 for i in ids}
        q = {i: weight[i] / sum(weight.values()) for i in ids}
        tau = sum(q[i] * lengths[i] for i in ids)
        average = mean_of(models, by_size)
        x = x + tau * sum(q[i] * (models[i] - x) / lengths[i] for i in ids)
        own = {i: {"norm(a_i)": torch.tensor(lengths[i], dtype=torch.float64)} for i in ids}
        told.append(Told(x, models, average, {}, own))
    check(fl.fednova(mu=mu, by_size=by_size, local=HEAVY), told, SOME, order)


def test_lengths_of_heavy_ball() -> None:
    for steps in range(1, 8):
        k = torch.tensor(float(steps)).double()
        found = compat.aggregates.counted_length(0.8, 0.0, k)
        assert abs(float(found) - heavy_length(steps, 0.8)) < 1e-12
        # equal factors have a limit of their own
        near, at = (compat.aggregates.counted_length(0.8, s, k) for s in (0.2 + 1e-9, 0.2))
        assert abs(float(near - at)) < 1e-6


# ---- given weights -------------------------------------------------------------------------------
def test_means_with_weights_of_ones_own() -> None:
    """fedsim weighs by examples processed, n_i filled up to whole batches."""
    order, x, told = batches(ALL), vec(net()), []
    weights = [4 * -(-n // 4) for n in SIZES]
    for r, ids in enumerate(ALL):
        models = {}
        for i in ids:
            model = model_at(x)
            train(model, i, order[r, i], torch_sgd(model, r))
            models[i] = vec(model)
        x = sum(weights[i] * models[i] for i in ids) / sum(weights)
        told.append(Told(x, models, mean_of(models, by_size=True)))
    aggregate = compat.MeanBy(fl.PerClient(weights))
    check(replace(fl.fedavg(local=SGD), aggregate=aggregate), told, ALL, order)


LOCALS = {
    "nesterov": (
        fl.sgd(LR, 0.8, nesterov=True, weight_decay=DECAY, clip=CLIP),
        lambda p: torch.optim.SGD(p, lr=LR, momentum=0.8, nesterov=True, weight_decay=DECAY),
    ),
    "rmsprop": (
        fl.RmsProp(lr=0.02, weight_decay=DECAY, clip=CLIP),
        lambda p: torch.optim.RMSprop(p, lr=0.02, weight_decay=DECAY),
    ),
    "adam": (
        Adam(lr=0.02, weight_decay=DECAY, clip=CLIP),
        lambda p: torch.optim.Adam(p, lr=0.02, weight_decay=DECAY),
    ),
    "adamw": (
        fl.AdamW(lr=0.02, weight_decay=DECAY, clip=CLIP),
        lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=DECAY),
    ),
}


@pytest.mark.parametrize("name", LOCALS)
def test_torchs_local_optimizers(name: str) -> None:
    """Clipping sees the gradient alone; the optimizer adds weight decay in its own way."""
    order, x, told, acted = batches(SOME), vec(net()), [], 0
    local, build = LOCALS[name]
    for r, ids in enumerate(SOME):
        models = {}
        for i in ids:
            model = model_at(x)
            acted += train(model, i, order[r, i], build(model.parameters()), clip=CLIP)
            models[i] = vec(model)
        x = mean_of(models, by_size=True)
        told.append(Told(x, models, x))
    assert acted > 3
    check(fl.fedavg(local=local), told, SOME, order)


def test_learning_rates_may_be_listed() -> None:
    order, x, told, rates = batches(SOME), vec(net()), [], [0.3, 0.3, 0.05, 0.2]
    for r, ids in enumerate(SOME):
        models = {}
        for i in ids:
            model = model_at(x)
            optimizer = torch.optim.SGD(model.parameters(), lr=rates[r], weight_decay=DECAY)
            train(model, i, order[r, i], optimizer)
            models[i] = vec(model)
        x = mean_of(models, by_size=True)
        told.append(Told(x, keep(models), x))
    assert len(DATA) == len(SIZES)
    check(fl.fedavg(local=fl.sgd(rates, weight_decay=DECAY)), told, SOME, order)
