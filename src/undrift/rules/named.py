"""The papers' names, one line each, and ComFed's grid as the cross product it is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

from undrift.core.algorithm import Algorithm
from undrift.core.local import HeavyBall, Nesterov, Sgd
from undrift.core.rule import Aggregate, Mean, Rule
from undrift.errors import ConfigError, unknown_name
from undrift.rules.aggregate import Nova
from undrift.rules.client import (
    Prox,
    Scaffold,
    ScaffoldFresh,
    ScaffoldGradient,
    ScaffoldLiteral,
    ScaffoldM,
)
from undrift.rules.server import Adaptive, ServerMomentum, Step


def sgd(lr: float = 0.1, momentum: float = 0.0, *, nesterov: bool = False, **more: Any) -> Sgd:
    """Local SGD as in torch: plain, heavy ball or Nesterov.

    >>> type(sgd(0.1, momentum=0.9)).__name__
    'HeavyBall'
    """
    if momentum == 0 and nesterov:
        raise ConfigError("sgd(nesterov=True) needs a momentum above 0")
    if momentum == 0:
        return Sgd(lr=lr, **more)
    return (Nesterov if nesterov else HeavyBall)(lr=lr, momentum=momentum, **more)


def _local(lr: float | None, local: Sgd | None) -> Sgd:
    """Plain SGD with this learning rate, or the given local optimizer, which has its own."""
    if local is None:
        return Sgd(lr=0.1 if lr is None else lr)
    if lr is not None:
        raise ConfigError(f"lr = {lr!r} and local = {local!r}: give the learning rate once")
    return local


def fedavg(lr: float | None = None, *, local: Sgd | None = None, by_size: bool = True) -> Algorithm:
    """FedAvg (McMahan et al. 2017)."""
    return Algorithm(local=_local(lr, local), aggregate=Mean(by_size))


def fedprox(lr: float | None = None, *, mu: float = 0.01, local: Sgd | None = None) -> Algorithm:
    """FedProx (Li et al. 2020)."""
    return Algorithm((Prox(mu),), local=_local(lr, local))


def scaffold_rule(
    option: Literal["I", "II"] = "II",
    mode: Literal["persistent", "fresh", "literal"] = "persistent",
    c_weights: Literal["uniform", "size"] = "uniform",
) -> Rule:
    """Choose among SCAFFOLD's readings (docs/conventions.md, R4)."""
    if c_weights not in ("uniform", "size"):
        raise unknown_name("c_weights", c_weights, ["uniform", "size"], "scaffold")
    by_size = c_weights == "size"
    choices: dict[tuple[str, str], Rule] = {
        ("persistent", "I"): ScaffoldGradient(c_by_size=by_size),
        ("persistent", "II"): Scaffold(c_by_size=by_size),
        ("fresh", "I"): ScaffoldFresh(),
        ("literal", "I"): ScaffoldLiteral(),
    }
    if (mode, option) not in choices:
        known = [f"mode={m!r}, option={o!r}" for m, o in choices]
        raise unknown_name("SCAFFOLD", f"mode={mode!r}, option={option!r}", known, "scaffold")
    return choices[mode, option]


def scaffold(
    lr: float | None = None,
    *,
    option: Literal["I", "II"] = "II",
    server_lr: float = 1.0,
    local: Sgd | None = None,
    by_size: bool = False,
    c_weights: Literal["uniform", "size"] = "uniform",
) -> Algorithm:
    """SCAFFOLD (Karimireddy et al. 2020): uniform weights, option II unless asked otherwise."""
    rule = scaffold_rule(option, "persistent", c_weights)
    return Algorithm((rule,), _local(lr, local), Mean(by_size), Step(server_lr))


def scaffold_m(lr: float | None = None, *, local: Sgd | None = None) -> Algorithm:
    """SCAFFOLD/m (Varno et al. 2022): SCAFFOLD that uploads models only."""
    return Algorithm((ScaffoldM(),), _local(lr, local), Mean(by_size=False))


def fednova(
    lr: float | None = None, *, mu: float | None = None, local: Sgd | None = None
) -> Algorithm:
    """FedNova (Wang et al. 2020), with FedProx's pull if `mu` is given."""
    rules = () if mu is None else (Prox(mu),)
    return Algorithm(rules, _local(lr, local), Nova())


def fedavgm(
    lr: float | None = None,
    *,
    beta: float = 0.9,
    server_lr: float = 1.0,
    dampening: bool = False,
    local: Sgd | None = None,
) -> Algorithm:
    """FedAvgM (Hsu et al. 2019)."""
    return Algorithm(
        local=_local(lr, local), server=ServerMomentum(server_lr, beta, dampening=dampening)
    )


def fedadam(
    lr: float | None = None, *, server_lr: float = 0.01, local: Sgd | None = None, **server: Any
) -> Algorithm:
    """FedAdam (Reddi et al. 2021); further settings are those of `Adaptive`."""
    return Algorithm(local=_local(lr, local), server=Adaptive("adam", server_lr, **server))


def fedadagrad(
    lr: float | None = None, *, server_lr: float = 0.01, local: Sgd | None = None, **server: Any
) -> Algorithm:
    """FedAdagrad (Reddi et al. 2021): beta1 = 0 unless given."""
    settings = {"beta1": 0.0, **server}
    return Algorithm(local=_local(lr, local), server=Adaptive("adagrad", server_lr, **settings))


def fedyogi(
    lr: float | None = None, *, server_lr: float = 0.01, local: Sgd | None = None, **server: Any
) -> Algorithm:
    """FedYogi (Reddi et al. 2021)."""
    return Algorithm(local=_local(lr, local), server=Adaptive("yogi", server_lr, **server))


# ------------------------------------------------------------------------------------- ComFed
COMFED_CLIENTS = ("sgd", "prox", "scaf", "nova")
COMFED_SERVERS = ("sgd", "adam", "adagrad", "yogi")
COMFED_TAU = {"adam": 1e-9, "adagrad": 1e-9, "yogi": 1e-3}  # Flower's, on which ComFed was built


def comfed(
    client: str = "sgd",
    server: str = "sgd",
    *,
    lr: float | None = None,
    local: Sgd | None = None,
    mu: float = 0.005,
    server_lr: float | None = None,
    option: Literal["I", "II"] = "I",
    mode: Literal["persistent", "fresh", "literal"] = "persistent",
    c_weights: Literal["uniform", "size"] = "uniform",
    **adaptive: Any,
) -> Algorithm:
    """ComFed: a client mechanism times a server optimizer, every cell a method.

    Defaults are the paper's: lr 0.01 with heavy-ball momentum 0.9 and weight decay 1e-4 on the
    client; `server_lr` is 1 for Sgd and 0.005 for the adaptive servers.

    >>> len({comfed(c, s) for c in COMFED_CLIENTS for s in COMFED_SERVERS})
    16
    """
    if client not in COMFED_CLIENTS:
        raise unknown_name("ComFed client", client, list(COMFED_CLIENTS), "comfed")
    if server not in COMFED_SERVERS:
        raise unknown_name("ComFed server", server, list(COMFED_SERVERS), "comfed")
    rules: dict[str, tuple[Rule, ...]] = {
        "prox": (Prox(mu),),
        "scaf": (scaffold_rule(option, mode, c_weights),),
    }
    aggregates: dict[str, Aggregate] = {"nova": Nova()}
    if server == "sgd" and adaptive:
        raise ConfigError(f"comfed: server 'sgd' has no {', '.join(adaptive)}; use an adaptive one")
    settings = {"beta1": 0.9, "beta2": 0.99, "tau": COMFED_TAU.get(server), **adaptive}
    return Algorithm(
        rules.get(client, ()),
        _comfed_local(lr, local),
        aggregates.get(client, Mean()),
        _comfed_server(server, server_lr, settings),
    )


def _comfed_local(lr: float | None, local: Sgd | None) -> Sgd:
    if local is not None:
        return _local(lr, local)
    return HeavyBall(lr=0.01 if lr is None else lr, momentum=0.9, weight_decay=1e-4)


def _comfed_server(server: str, lr: float | None, settings: dict[str, Any]) -> Rule:
    if server == "sgd":
        return Step(1.0 if lr is None else lr)
    return Adaptive(server, lr=0.005 if lr is None else lr, **settings)


class Named(NamedTuple):
    """One entry of the catalogue."""

    name: str
    build: Callable[..., Algorithm]
    paper: str


COMFED_NAMES = {
    ("sgd", "sgd"): "fedavg",
    ("sgd", "adam"): "fedadam",
    ("sgd", "adagrad"): "fedadagrad",
    ("sgd", "yogi"): "fedyogi",
    ("prox", "sgd"): "fedprox",
    ("scaf", "sgd"): "scaffold",
    ("nova", "sgd"): "fednova",
}


def comfed_name(client: str, server: str) -> str:
    """Give the paper's name of a cell, e.g. `proxyogi`."""
    return COMFED_NAMES.get((client, server), client + server)


def catalogue() -> dict[str, Named]:
    """List every algorithm that has a name."""
    singles = [
        Named("fedavg", fedavg, "McMahan et al. 2017"),
        Named("fedprox", fedprox, "Li et al. 2020"),
        Named("scaffold", scaffold, "Karimireddy et al. 2020"),
        Named("scaffold_m", scaffold_m, "Varno et al. 2022 (AdaBest), SCAFFOLD/m"),
        Named("fednova", fednova, "Wang et al. 2020"),
        Named("fedavgm", fedavgm, "Hsu et al. 2019"),
        Named("fedadam", fedadam, "Reddi et al. 2021"),
        Named("fedadagrad", fedadagrad, "Reddi et al. 2021"),
        Named("fedyogi", fedyogi, "Reddi et al. 2021"),
    ]
    cells = [
        Named(f"comfed:{c}-{s}", partial(comfed, c, s), f"ComFed, {comfed_name(c, s)}")
        for c in COMFED_CLIENTS
        for s in COMFED_SERVERS
    ]
    return {entry.name: entry for entry in [*singles, *cells]}
