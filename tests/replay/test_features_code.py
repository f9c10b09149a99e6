"""MOON and rFedAvg as papers and their authors' code have them, replayed to 1e-10."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import undrift as fl
from replay.world import (
    DATA,
    HEAVY,
    LR,
    SGD,
    SIZES,
    SOME,
    N,
    Told,
    batches,
    check,
    keep,
    mean_of,
    model_at,
    net,
    torch_sgd,
    vec,
)
from undrift.rules import compat

FEATURE = {"feature": "1"}  # the hidden layer after tanh


def phi(model: nn.Module, inputs: Tensor) -> Tensor:
    return model[1](model[0](inputs))


def penalised(
    model: nn.Module, i: int, order: list[list[int]], optimizer: torch.optim.Optimizer,
    more: Callable[[nn.Module, Tensor], Tensor],
) -> None:  # fmt: skip
    """A local loop whose extra loss sees the batch."""
    for batch in order:
        inputs, labels = DATA[i][0][batch], DATA[i][1][batch]
        optimizer.zero_grad()
        (F.cross_entropy(model(inputs), labels) + more(model, inputs)).backward()
        optimizer.step()


# ---- MOON ----------------------------------------------------------------------------------------
def contrast(model: nn.Module, inputs: Tensor, others: Sequence[nn.Module], t: float) -> Tensor:
    """Cross-entropy with target 0 over the likeness to the global and the previous models."""
    mine, cos = phi(model, inputs), nn.CosineSimilarity(dim=-1)
    logits = torch.stack([cos(mine, phi(m, inputs).detach()) for m in others], 1) / t
    return F.cross_entropy(logits, torch.zeros(len(inputs)).long())


@pytest.mark.parametrize(("stored", "pool"), [(1, "own"), (2, "own"), (1, "code"), (2, "code")])
def test_moon(stored: int, pool: str) -> None:
    """The code's pool: snapshots of all nets after each round, none before the first."""
    mu, t, order, x, told = 2.0, 0.5, batches(SOME), vec(net()), []
    nets = {i: net() for i in range(N)}
    own: dict[int, list[nn.Module]] = {i: [] for i in range(N)}
    snapshots: list[dict[int, nn.Module]] = []
    for r, ids in enumerate(SOME):
        server, models = model_at(x), {}
        for i in ids:
            previous = own[i] or [net()] if pool == "own" else [s[i] for s in snapshots]
            nets[i] = model_at(x)
            others = [server, *previous]

            def more(m: nn.Module, inputs: Tensor, others: list = others) -> Tensor:
                return mu * contrast(m, inputs, others, t)

            penalised(nets[i], i, order[r, i], torch_sgd(nets[i], r, 0.8), more)
            models[i] = vec(nets[i])
        for i in ids:
            own[i] = [keep(nets[i]), *own[i]][:stored]
        snapshots = [*snapshots, keep(nets)][-stored:]
        x = mean_of(models, by_size=True)
        told.append(Told(x, models, x))
    kind = "participations" if pool == "own" or stored == 1 else "rounds"  # of one: the same
    algorithm = fl.moon(mu=mu, temperature=t, stored=stored, pool=kind, local=HEAVY)
    check(algorithm, told, SOME, order, **FEATURE)


def test_moons_states_are_the_last_models() -> None:
    order, x, told, mu = batches(SOME), vec(net()), [], 2.0
    last = {i: vec(net()) for i in range(N)}
    for r, ids in enumerate(SOME):
        server, models = model_at(x), {}
        for i in ids:
            model, previous = model_at(x), model_at(last[i])
            more = lambda m, z, o=(server, previous): mu * contrast(m, z, o, 0.5)  # noqa: E731
            penalised(model, i, order[r, i], torch_sgd(model, r), more)
            models[i] = last[i] = vec(model)
        x = mean_of(models, by_size=True)
        told.append(Told(x, models, x, {}, {i: {"y_prev": last[i][None]} for i in ids}))
    check(fl.moon(mu=mu, local=SGD), told, SOME, order, **FEATURE)


# ---- rFedAvg -------------------------------------------------------------------------------------
def feature_mean(x: Tensor, i: int, at: Sequence[int] | slice = slice(None)) -> Tensor:
    with torch.no_grad():
        return phi(model_at(x), DATA[i][0][at]).mean(0)


def towards(targets: Sequence[Tensor], strength: float) -> Callable[[nn.Module, Tensor], Tensor]:
    def more(m: nn.Module, inputs: Tensor) -> Tensor:
        mean = phi(m, inputs).mean(0)
        return strength * sum(((mean - f) ** 2).sum() for f in targets) / max(len(targets), 1)

    return more


@pytest.mark.parametrize("by_size", [True, False])
def test_rfedavg_of_the_paper(by_size: bool) -> None:
    """A table of means, each taken at the own final model; the first ones at x_0."""
    strength, order, x, told = 0.8, batches(SOME), vec(net()), []
    table = [feature_mean(x, i) for i in range(N)]
    for r, ids in enumerate(SOME):
        models = {}
        for i in ids:
            model = model_at(x)
            others = [table[j] for j in range(N) if j != i]
            penalised(model, i, order[r, i], torch_sgd(model, r), towards(others, strength))
            models[i] = vec(model)
        table = [feature_mean(models[i], i) if i in ids else f for i, f in enumerate(table)]
        x = mean_of(models, by_size)
        told.append(Told(x, models, x, {"delta": torch.stack(table)}))
    algorithm = fl.rfedavg(strength=strength, by_size=by_size, local=SGD)
    check(algorithm, told, SOME, order, **FEATURE)


@pytest.mark.parametrize(
    ("refresh", "include_self", "few"),
    [("cohort", False, None), ("all", False, None), ("cohort", True, None), ("all", True, 3)],
)
def test_rfedavg_plus_of_the_paper(refresh: str, include_self: bool, few: int | None) -> None:
    """Means at the NEW model, each client's target leaves itself out; code's flags beside it."""
    strength, order, x, told = 0.8, batches(SOME), vec(net()), []

    def looked(x: Tensor, i: int, r: int) -> Tensor:
        """`few` examples: the next ones in every round."""
        at = slice(None) if few is None else [(few * r + k) % SIZES[i] for k in range(few)]
        return feature_mean(x, i, at)

    table = [looked(x, i, 0) for i in range(N)]
    for r, ids in enumerate(SOME):
        models = {}
        for i in ids:
            model = model_at(x)
            others = [table[j] for j in range(N) if include_self or j != i]
            target = sum(others) / len(others)
            penalised(model, i, order[r, i], torch_sgd(model, r), towards([target], strength))
            models[i] = vec(model)
        x = mean_of(models, by_size=True)
        seen = range(N) if refresh == "all" else ids
        table = [looked(x, i, r + 1) if i in seen else f for i, f in enumerate(table)]
        told.append(Told(x, models, x, {"delta": torch.stack(table)}))
    options = {"refresh": refresh, "include_self": include_self, "single_batch": few}
    algorithm = fl.rfedavg_plus(strength=strength, local=SGD, **options)
    check(algorithm, told, SOME, order, **FEATURE)


# batches that a shuffling loader gave for the features, by (round, client)
DRAWN = {
    (r, i): [(3 * r + 2 * i) % SIZES[i], (r + i) % SIZES[i]] for r in range(4) for i in range(N)
}


@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("plus", [False, True])
def test_rfedavg_of_its_code(plus: bool, drawn: bool) -> None:
    """Means when a round starts, of sampled clients alone, in one batch each; plain averages.

    rFedAvg takes them at the clients' own last models, rFedAvg+ at the broadcast one with
    everybody's, oneself included.  Optimizers live for ever.
    """
    strength, order, x, told = 0.8, batches(SOME), vec(net()), []
    clients = [net() for _ in range(N)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=LR, momentum=0.8) for m in clients]
    for r, ids in enumerate(SOME):
        f_t = {}
        for i in ids:
            if plus:
                torch.nn.utils.vector_to_parameters(x.clone(), clients[i].parameters())
            at = DRAWN[r, i] if drawn else slice(None)
            f_t[i] = feature_mean(vec(clients[i]), i, at)
        for i in ids:
            torch.nn.utils.vector_to_parameters(x.clone(), clients[i].parameters())
            others = [f for j, f in f_t.items() if j != i]
            targets = [sum(f_t.values()) / len(ids)] if plus else others
            more = towards(targets, strength) if targets else (lambda m, z: torch.zeros(()))
            penalised(clients[i], i, order[r, i], optimizers[i], more)
        models = {i: vec(clients[i]) for i in ids}
        x = mean_of(models, by_size=False)
        told.append(Told(x, models, x, {}, {i: {"delta_i": f} for i, f in f_t.items()}))
    kind = compat.RFedAvgPlusAtStart if plus else compat.RFedAvgAtStart
    rule = kind(strength, compat.chosen_examples(DRAWN) if drawn else None)
    algorithm = replace(fl.fedavg(by_size=False, local=fl.sgd(LR, 0.8)), rules=(rule,))
    cohorts = SOME
    check(compat.keep_client_opt(algorithm), told, cohorts, order, **FEATURE)
