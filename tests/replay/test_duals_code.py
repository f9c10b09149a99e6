"""FedDyn, FedDC, FedADMM, FedPD and VRL-SGD as other people write them, replayed to 1e-10."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import undrift as fl
from replay.world import (
    ALL,
    CLIP,
    CLIPPED,
    DECAY,
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
    heavy_length,
    loss_of,
    mean_of,
    model_at,
    net,
    torch_sgd,
    train,
    vec,
)
from undrift.replay import letters, replay

ZERO = torch.zeros_like(vec(net()))


# ---- FedDyn --------------------------------------------------------------------------------------
@pytest.mark.parametrize("rho", [0.0, 0.8])
def test_feddyn_of_the_paper_by_sgd(rho: float) -> None:
    """AdaBest's letters: h_i with alpha, h without; the cohort's models count once."""
    alpha, order, x, h, told = 0.3, batches(SOME), vec(net()), ZERO, []
    h_i, last = dict.fromkeys(range(N), ZERO), {i: vec(net()) for i in range(N)}
    for r, ids in enumerate(SOME):
        models = {}
        for i in ids:
            model = model_at(x)

            def pull(m: nn.Module, i: int = i, x: Tensor = x) -> None:
                add_to_grads(m, alpha * (vec(m) - x) - h_i[i])

            train(model, i, order[r, i], torch_sgd(model, r, rho), change=pull)
            models[i] = last[i] = vec(model)
            h_i[i] = h_i[i] + alpha * (x - models[i])
        average = mean_of(models, by_size=False)
        h = h + len(ids) / N * (x - average)
        x = average - h
        everybody = sum(last.values()) / N
        own = {i: {"h_i": h_i[i]} for i in ids}
        told.append(Told(x, models, average, {"h": h}, own, everybody))
    check(fl.feddyn(alpha=alpha, local=HEAVY if rho else SGD), told, SOME, order)


def test_feddyn_of_its_code() -> None:
    """alpha_i sits in the optimizer's weight decay, so that alpha_i y is not clipped."""
    alpha, order, cloud, told, acted = 0.3, batches(SOME), vec(net()), [], 0
    sums, params = torch.zeros(N, len(cloud)).double(), cloud.repeat(N, 1)
    weight = torch.tensor(SIZES).double() / sum(SIZES) * N
    for r, ids in enumerate(SOME):
        start = cloud.clone()
        for i in ids:
            model, adapted = model_at(cloud), float(alpha / weight[i])

            def inner(m: nn.Module, i: int = i, a: float = adapted, x: Tensor = start) -> Tensor:
                return a * torch.sum(flat(m) * (-x + sums[i]))

            optimizer = torch_sgd(model, r, weight_decay=adapted + DECAY)
            acted += train(model, i, order[r, i], optimizer, more=inner, clip=CLIP)
            params[i] = vec(model)
            sums[i] += params[i] - start
        average = params[ids].mean(0)
        cloud = average + sums.mean(0)
        own = {i: {"hB_i": sums[i].clone()} for i in ids}
        told.append(
            Told(cloud, {i: params[i].clone() for i in ids}, average, {"h": -sums.mean(0)}, own,
                 params.mean(0))
        )  # fmt: skip
    assert acted > 3
    algorithm = fl.feddyn(alpha=alpha, by_size=True, clip_prox=False, local=CLIPPED)
    check(algorithm, told, SOME, order)
    with pytest.raises(AssertionError, match="round 0, server"):
        check(fl.feddyn(alpha=alpha, by_size=True, local=CLIPPED), told, SOME, order)


def test_feddyn_of_fedsim() -> None:
    """Half the pull, mu_i = mu mean(n) / n_i, h_i without mu, all of it clipped."""
    mu, order, x, h, told, acted = 0.5, batches(SOME), vec(net()), ZERO, [], 0
    own = dict.fromkeys(range(N), ZERO)
    for r, ids in enumerate(SOME):
        models = {}
        for i in ids:
            model, adaptive = model_at(x), mu / SIZES[i] * MEAN

            def change(m: nn.Module, i: int = i, a: float = adaptive, x: Tensor = x) -> None:
                add_to_grads(m, a * (0.5 * (vec(m) - x) - own[i]))

            optimizer = torch_sgd(model, r)
            acted += train(model, i, order[r, i], optimizer, change=change, clip=CLIP)
            models[i] = vec(model)
            own[i] = own[i] + (x - models[i])
        average = mean_of(models, by_size=False)
        h = h + len(ids) / N * (x - average)
        x = average - h
        states = {i: {"h_i": mu * own[i]} for i in ids}
        told.append(Told(x, models, average, {"h": h}, states))
    assert acted > 3
    check(fl.feddyn(alpha=mu, by_size=True, half_pull=True, local=CLIPPED), told, SOME, order)


@pytest.mark.parametrize("by_size", [False, True])
def test_feddyn_solved_exactly(by_size: bool) -> None:
    """Least squares with weight decay: every local problem is one linear system."""
    alpha, draw = 0.4, torch.Generator().manual_seed(2)
    sets = [
        (torch.randn(n, 3, generator=draw).double(), torch.randn(n, 1, generator=draw).double())
        for n in SIZES
    ]
    x, h, own = torch.zeros(4).double(), 0, dict.fromkeys(range(N), torch.zeros(4).double())
    first = {"weight": torch.zeros(1, 3), "bias": torch.zeros(1)}
    decay = fl.sgd(weight_decay=DECAY)
    algorithm = fl.feddyn(alpha=alpha, by_size=by_size, solver="exact", local=decay)
    found = replay(nn.Linear(3, 1), sets, algorithm, SOME, steps=1, loss="mse", initial=first)
    for moment, ids in zip(found, SOME, strict=True):
        models = []
        for i in ids:
            a, b = torch.cat([sets[i][0], torch.ones(SIZES[i], 1)], 1).double(), sets[i][1][:, 0]
            share = MEAN / SIZES[i] if by_size else 1.0
            left = 2 / SIZES[i] * a.T @ a + (DECAY + share * alpha) * torch.eye(4).double()
            right = 2 / SIZES[i] * a.T @ b + share * (alpha * x + own[i])
            y = torch.linalg.solve(left, right)
            own[i] = own[i] + alpha * (x - y)
            models.append(y)
            mine = moment.clients[i]
            assert (torch.cat([mine["weight"][0], mine["bias"]]) - y).abs().max() < 1e-10
            assert (letters(algorithm, moment).clients[i]["h_i"] - own[i]).abs().max() < 1e-10
        average = sum(models) / len(models)
        h = h + len(ids) / N * (x - average)
        x = average - h
        server = torch.cat([moment.server["weight"][0], moment.server["bias"]])
        assert (server - x).abs().max() < 1e-10


# ---- FedDC ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("code", [False, True])
def test_feddc(code: bool) -> None:
    """The code divides by a constant number of batches times the undecayed rate."""
    alpha, order, cloud, told, acted = 0.2, batches(SOME), vec(net()), [], 0
    drift, state = torch.zeros(N, len(cloud)).double(), torch.zeros(N + 1, len(cloud)).double()
    params, weight = cloud.repeat(N, 1), torch.tensor(SIZES).double() / sum(SIZES) * N
    for r, ids in enumerate(SOME):
        total, start = torch.zeros_like(cloud), cloud.clone()
        for i in ids:
            model, mine, common = model_at(cloud), state[i].clone(), state[-1] / weight[i]
            a, history = float(alpha / weight[i]), drift[i].clone()

            def augmented(
                m: nn.Module, a: float = a, x: Tensor = start, h: Tensor = history,
                c: Tensor = common - mine,
            ) -> Tensor:  # fmt: skip
                y = flat(m)
                gap = y - (x - h)
                return a / 2 * torch.sum(gap * gap) + torch.sum(y * c)

            optimizer = torch_sgd(model, r)
            acted += train(model, i, order[r, i], optimizer, more=augmented, clip=CLIP)
            params[i] = vec(model)
            drift[i] += params[i] - start
            length = 5 * LR if code else len(order[r, i]) * LR * FALL**r
            new = mine - common - (params[i] - start) / length
            total += (new - mine) * weight[i]
            state[i] = new
        average = params[ids].mean(0)
        state[-1] += total / N
        cloud = average + drift.mean(0)
        own = {i: {"h_i": drift[i].clone(), "c_i": state[i].clone()} for i in ids}
        told.append(
            Told(cloud, {i: params[i].clone() for i in ids}, average,
                 {"c": state[-1].clone(), "h": drift.mean(0)}, own, params.mean(0))
        )  # fmt: skip
    assert acted > 3
    options = {"steps": 5.0, "scaffold_base_lr": True} if code else {}
    check(fl.feddc(alpha=alpha, local=CLIPPED, **options), told, SOME, order)


# ---- FedADMM -------------------------------------------------------------------------------------
@pytest.mark.parametrize("restart", [False, True])
def test_fedadmm(restart: bool) -> None:
    """State dicts, gradients replaced, momentum, eta_g lowered; its code restarts y_prev at x."""
    rho, order, theta, told = 0.4, batches(SOME), net().state_dict(), []
    zero = {k: torch.zeros_like(v) for k, v in theta.items()}
    alpha = {i: {k: v.clone() for k, v in zero.items()} for i in range(N)}
    prev = {i: {k: v.clone() for k, v in theta.items()} for i in range(N)}
    for r, ids in enumerate(SOME):
        messages, models = [], {}
        for i in ids:
            model = net()
            model.load_state_dict(theta)

            def change(m: nn.Module, i: int = i, theta: dict = theta) -> None:
                for name, p in m.named_parameters():
                    p.grad = p.grad + (alpha[i][name] + rho * (p.detach() - theta[name]))

            train(model, i, order[r, i], torch_sgd(model, r, 0.8), change=change)
            weights = {k: v.clone() for k, v in model.state_dict().items()}
            new = {k: alpha[i][k] + rho * (weights[k] - theta[k]) for k in theta}
            before = theta if restart else prev[i]
            messages.append(
                {k: weights[k] - before[k] + (new[k] - alpha[i][k]) / rho for k in theta}
            )
            alpha[i], prev[i], models[i] = new, weights, vec(model)
        eta = 0.6 if r < 2 else 0.3
        theta = {k: theta[k] + eta * sum(m[k] for m in messages) / len(ids) for k in theta}
        joined = {i: torch.cat([v.reshape(-1) for v in alpha[i].values()]) for i in ids}
        own = {i: {"a_i": joined[i], "y_prev": models[i]} for i in ids}
        x = torch.cat([v.reshape(-1) for v in theta.values()])
        told.append(Told(x, models, mean_of(models, by_size=False), {}, own))
    algorithm = fl.fedadmm(
        rho=rho,
        server_lr=0.6,
        server_schedule=fl.Milestones((2,), (0.5,)),
        restart=restart,
        local=HEAVY,
    )
    check(algorithm, told, SOME, order)


# ---- FedPD ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("start", ["received", "own"])
@pytest.mark.parametrize("exchanges", [None, [1, 3]])
def test_fedpd(start: str, exchanges: list[int] | None) -> None:
    """Rounds without an exchange go on from the own centre; the code, from the own model too."""
    rho, order, told = 0.5, batches(ALL), []
    x_i, x0_i = ({i: vec(net()) for i in range(N)} for _ in range(2))
    dual, x = dict.fromkeys(range(N), ZERO), vec(net())
    for r, ids in enumerate(ALL):
        for i in ids:
            model, centre = model_at(x_i[i] if start == "own" else x0_i[i]), x0_i[i].clone()

            def change(m: nn.Module, i: int = i, centre: Tensor = centre) -> None:
                add_to_grads(m, dual[i] + rho * (vec(m) - centre))

            train(model, i, order[r, i], torch_sgd(model, r, 0.5), change=change)
            x_i[i] = vec(model)
            dual[i] = dual[i] + rho * (x_i[i] - centre)
            x0_i[i] = x_i[i] + dual[i] / rho
        own = {i: {"lambda_i": dual[i]} for i in ids}
        if exchanges is None or r in exchanges:
            x = sum(x0_i.values()) / N
            x0_i = dict.fromkeys(ids, x)
        models = dict(x_i)
        told.append(Told(x, models, mean_of(models, by_size=False), {}, own))
    local = fl.sgd(LR, 0.5, lr_decay=FALL, weight_decay=DECAY)
    algorithm = fl.fedpd(rho=rho, start=start, exchanges=exchanges, local=local)
    check(algorithm, told, ALL, order)


# ---- VRL-SGD -------------------------------------------------------------------------------------
@pytest.mark.parametrize("warm_up", [False, True])
def test_vrl_sgd_of_the_paper(warm_up: bool) -> None:
    """With a warm-up the first round has one step for everybody."""
    order, x, told = batches(ALL), vec(net()), []
    if warm_up:
        order |= {(0, i): order[0, i][:1] for i in range(N)}
    d = dict.fromkeys(range(N), ZERO)
    for r, ids in enumerate(ALL):
        models = {}
        for i in ids:
            model = model_at(x)
            minus = lambda m, i=i: add_to_grads(m, -d[i])  # noqa: E731
            train(model, i, order[r, i], torch_sgd(model, r, 0.8), change=minus)
            models[i] = vec(model)
        x = mean_of(models, by_size=False)
        for i in ids:
            length = heavy_length(len(order[r, i]), 0.8) * LR * FALL**r
            d[i] = d[i] + (x - models[i]) / length
        told.append(Told(x, models, x, {}, {i: {"d_i": d[i]} for i in ids}))
    check(fl.vrlsgd(local=HEAVY), told, ALL, order)


def test_vrl_sgd_of_its_code() -> None:
    """The deviation is taken off after momentum; buffers are averaged and never start afresh."""
    period, rho, models = 3, 0.8, {i: net() for i in range(N)}
    order, told = batches(ALL, lambda i: period), []
    buffers, vrl = {i: {} for i in range(N)}, {i: {} for i in range(N)}
    for r, ids in enumerate(ALL):
        lr = LR * FALL**r
        for i in ids:
            for batch in order[r, i]:
                models[i].zero_grad()
                loss_of(models[i], i, batch).backward()
                with torch.no_grad():
                    for name, p in models[i].named_parameters():
                        d_p = p.grad + DECAY * p
                        held = buffers[i].get(name)
                        buffers[i][name] = d_p.clone() if held is None else rho * held + d_p
                        p -= lr * (buffers[i][name] - vrl[i].get(name, torch.zeros_like(p)))
        ends = {i: vec(models[i]) for i in ids}
        for name in buffers[0]:
            shared = sum(buffers[i][name] for i in ids) / N
            with torch.no_grad():
                mean = sum(dict(models[i].named_parameters())[name].clone() for i in ids) / N
                for i in ids:
                    p = dict(models[i].named_parameters())[name]
                    gap = (mean - p) / (lr * period)
                    vrl[i][name] = vrl[i].get(name, torch.zeros_like(p)) + gap
                    buffers[i][name] = shared.clone()
                    p.copy_(mean)
        x = vec(models[0])
        d = {i: torch.cat([v.reshape(-1) for v in vrl[i].values()]) for i in ids}
        joined = torch.cat([v.reshape(-1) for v in buffers[0].values()])
        told.append(Told(x, ends, x, {"buf": joined}, {i: {"d_i": d[i]} for i in ids}))
    algorithm = fl.vrlsgd(correction="post_step", buffers="average", local=HEAVY)
    check(algorithm, told, ALL, order)
