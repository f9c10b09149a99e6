"""SCAFFOLD as other people write it, replayed to 1e-10."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import undrift as fl
from replay.world import (
    CLIP,
    CLIPPED,
    FALL,
    HEAVY,
    LR,
    MEAN,
    SGD,
    SIZES,
    SOME,
    N,
    Told,
    add_to_grads,
    batches,
    check,
    flat,
    full_gradient,
    heavy_length,
    keep,
    mean_of,
    model_at,
    net,
    torch_sgd,
    train,
    vec,
)
from undrift.core.tree import replace
from undrift.rules import compat

ZERO = torch.zeros_like(vec(net()))


# ---- the paper -----------------------------------------------------------------------------------
@pytest.mark.parametrize("option", ["I", "II"])
@pytest.mark.parametrize("rho", [0.0, 0.8])
def test_scaffold_of_the_paper(option: str, rho: float) -> None:
    order, x, c, told, eta_g = batches(SOME), vec(net()), ZERO, [], 0.8
    c_i = dict.fromkeys(range(N), ZERO)
    for r, ids in enumerate(SOME):
        models, change = {}, ZERO
        for i in ids:
            model = model_at(x)

            def correct(m: nn.Module, i: int = i, c: Tensor = c) -> None:
                add_to_grads(m, c - c_i[i])

            train(model, i, order[r, i], torch_sgd(model, r, rho), change=correct)
            models[i] = vec(model)
            length = heavy_length(len(order[r, i]), rho) * LR * FALL**r
            new = c_i[i] - c + (x - models[i]) / length
            new = full_gradient(x, i) if option == "I" else new
            change, c_i[i] = change + new - c_i[i], new
        c = c + change / N
        average = mean_of(models, by_size=False)
        x = x + eta_g * (average - x)
        own = {i: {"c_i": v} for i, v in c_i.items() if any(i in s for s in SOME[: r + 1])}
        told.append(Told(x, models, average, {"c": c}, own))
    local = HEAVY if rho else SGD
    check(fl.scaffold(option=option, server_lr=eta_g, local=local), told, SOME, order)


# ---- NIID-Bench: state dicts, a correction after the step, size weights, random first variates ---
@pytest.mark.parametrize("first", ["zero", "random"])
def test_scaffold_of_niid_bench(first: str) -> None:
    order, server, told = batches(SOME), net(), []
    start = ZERO if first == "zero" else 0.1 * torch.sin(torch.arange(len(ZERO)).double())
    c_global = model_at(start)
    c_nets = {i: model_at(start) for i in range(N)}
    for r, ids in enumerate(SOME):
        lr, nets, total = LR * FALL**r, {}, None
        for i in ids:
            nets[i] = model_at(vec(server))
            c_para, own = c_global.state_dict(), c_nets[i].state_dict()

            def correct(m: nn.Module, own: dict = own, c: dict = c_para, lr: float = lr) -> None:
                para = m.state_dict()
                for key in para:
                    para[key] = para[key] - lr * (c[key] - own[key])
                m.load_state_dict(para)

            train(nets[i], i, order[r, i], torch_sgd(nets[i], r, 0.8), after=correct)
            count, para, before = len(order[r, i]), nets[i].state_dict(), server.state_dict()
            new, delta = keep(own), keep(own)
            for key in para:
                new[key] = own[key] - c_para[key] + (before[key] - para[key]) / (count * lr)
                delta[key] = new[key] - own[key]
            c_nets[i].load_state_dict(new)
            total = delta if total is None else {k: total[k] + delta[k] for k in total}
        state = c_global.state_dict()
        c_global.load_state_dict({k: state[k] + total[k] / N for k in state})
        freq = {i: SIZES[i] / sum(SIZES[j] for j in ids) for i in ids}
        mean = {k: sum(freq[i] * nets[i].state_dict()[k] for i in ids) for k in state}
        server.load_state_dict(mean)
        own = {i: {"c_i": vec(c_nets[i])} for i in ids}
        told.append(
            Told(vec(server), {i: vec(m) for i, m in nets.items()}, vec(server),
                 {"c": vec(c_global)}, own)
        )  # fmt: skip
    algorithm = fl.scaffold(correction="post_step", by_size=True, local=HEAVY)
    states = {}
    if first == "random":
        name = "0.ScaffoldPostStep"
        states = {
            "server_state": {name: start},
            "client_states": {i: {name: start.numpy()} for i in range(N)},
        }
    check(algorithm, told, SOME, order, **states)


# ---- FedDyn's repository -------------------------------------------------------------------------
@pytest.mark.parametrize("base", [True, False])
def test_scaffold_of_feddyns_code(base: bool) -> None:
    """Inner products in the loss, r_i = n_i / mean(n), n_minibatch times the undecayed rate."""
    n_minibatch = 4
    order, x, told = batches(SOME, lambda i: n_minibatch), vec(net()), []
    state, acted, eta_g = torch.zeros(N + 1, len(x)).double(), 0, 0.9
    params, weight = x.repeat(N, 1), torch.tensor(SIZES).double() / sum(SIZES) * N
    for r, ids in enumerate(SOME):
        delta, before = torch.zeros_like(x), x.clone()
        for i in ids:
            model, diff = model_at(x), -state[i] + state[-1] / weight[i]

            def inner(m: nn.Module, diff: Tensor = diff) -> Tensor:
                return torch.sum(flat(m) * diff)

            acted += train(model, i, order[r, i], torch_sgd(model, r), more=inner, clip=CLIP)
            params[i], rate = vec(model), LR if base else LR * FALL**r
            new = state[i] - state[-1] + 1 / n_minibatch / rate * (before - params[i])
            delta += (new - state[i]) * weight[i]
            state[i] = new
        average = params[ids].mean(0)
        x = eta_g * average + (1 - eta_g) * before
        state[-1] += delta / N
        told.append(
            Told(x, {i: params[i].clone() for i in ids}, average, {"c": state[-1].clone()},
                 {i: {"c_i": state[i].clone()} for i in ids}, params.mean(0))
        )  # fmt: skip
    assert acted > 3
    algorithm = fl.scaffold(
        correction="unbalanced", scaffold_base_lr=base, server_lr=eta_g, local=CLIPPED
    )
    check(algorithm, told, SOME, order)


def divided(per: Callable[[int, float], float], rho: float = 0.0) -> list[Told]:
    """SCAFFOLD whose c_i divides by some number of (K_i, lr)."""
    order, x, c, told = batches(SOME), vec(net()), ZERO, []
    c_i = dict.fromkeys(range(N), ZERO)
    for r, ids in enumerate(SOME):
        models, change = {}, ZERO
        for i in ids:
            model = model_at(x)
            correct = lambda m, i=i, c=c: add_to_grads(m, c - c_i[i])  # noqa: E731
            train(model, i, order[r, i], torch_sgd(model, r, rho), change=correct)
            models[i] = vec(model)
            step = (x - models[i]) / per(len(order[r, i]), LR * FALL**r) - c
            change, c_i[i] = change + step, c_i[i] + step
        c, x = c + change / N, mean_of(models, by_size=False)
        told.append(Told(x, models, x, {"c": c}, {i: {"c_i": c_i[i]} for i in ids}))
    return told


def test_the_undecayed_rate() -> None:
    told = divided(lambda k, lr: k * LR)
    check(fl.scaffold(scaffold_base_lr=True, local=SGD), told, SOME, batches(SOME))
    with pytest.raises(AssertionError, match="round 1, c"):
        check(fl.scaffold(local=SGD), told, SOME, batches(SOME))


def test_plato_divides_by_epochs() -> None:
    told = divided(lambda k, lr: 3.0)
    algorithm = replace(fl.scaffold(local=SGD), rules=(compat.ScaffoldBaseLr(lr=1.0, steps=3.0),))
    check(algorithm, told, SOME, batches(SOME))


def test_k_times_lr_under_momentum() -> None:
    """As printed, although c_i is then no mean gradient."""
    told = divided(lambda k, lr: k * lr, 0.8)
    rule = compat.ScaffoldBaseLr(lr=None, by_path=False)
    check(replace(fl.scaffold(local=HEAVY), rules=(rule,)), told, SOME, batches(SOME))


def test_scaffold_of_rfedavgs_code_is_fedavg() -> None:
    """Its correction is written into a copy of the gradient and never reaches the model."""
    order, x, told = batches(SOME), vec(net()), []
    for r, ids in enumerate(SOME):
        models = {}
        for i in ids:
            model = model_at(x)

            def lost(m: nn.Module) -> None:
                copied = torch.cat([p.grad.reshape(-1) for p in m.parameters()])
                copied += 5.0

            train(model, i, order[r, i], torch_sgd(model, r), change=lost)
            models[i] = vec(model)
        x = mean_of(models, by_size=False)
        told.append(Told(x, models, x))
    check(fl.fedavg(by_size=False, local=SGD), told, SOME, order)


# ---- AdaBest's SCAFFOLD/m ------------------------------------------------------------------------
@pytest.mark.parametrize("printed", [False, True])
def test_scaffold_that_uploads_models_only(printed: bool) -> None:
    steps = 3
    order, x, h, told = batches(SOME, lambda i: steps), vec(net()), ZERO, []
    h_i = dict.fromkeys(range(N), ZERO)
    for r, ids in enumerate(SOME):
        models, per = {}, steps * LR * FALL**r
        for i in ids:
            model = model_at(x)
            correct = lambda m, i=i, h=h: add_to_grads(m, h - h_i[i])  # noqa: E731
            train(model, i, order[r, i], torch_sgd(model, r), change=correct)
            models[i] = vec(model)
            h_i[i] = h_i[i] - h + (x - models[i]) / per
        average, share = mean_of(models, by_size=False), len(ids) / N
        keeps = (N - 1) / N if printed else 1 - share
        h, x = keeps * h + share * (x - average) / per, average
        told.append(Told(x, models, average, {"h": h}, {i: {"h_i": h_i[i]} for i in ids}))
    check(fl.scaffold_m(printed_decay=printed, local=SGD), told, SOME, order)


def test_sizes_are_unequal() -> None:
    assert len(set(SIZES)) == N and abs(MEAN - 6.5) < 1e-12
