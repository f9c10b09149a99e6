"""The papers' names, one line each, and ComFed's grid as the cross product it is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

from undrift.core.algorithm import Algorithm
from undrift.core.local import HeavyBall, Sgd
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
from undrift.rules.compat import ScaffoldPostStep
from undrift.rules.local import local_of
from undrift.rules.momentum import MomentumAdd, MomentumMix
from undrift.rules.recipes import (
    adabest,
    fedadc,
    fedadmm,
    fedamsgrad,
    feddc,
    feddyn,
    fedpd,
    fedvra,
    fedvra_u,
    mime,
    mimelite,
    moon,
    qfedavg,
    qfedsgd,
    rfedavg,
    rfedavg_plus,
    slowmo,
    vrlsgd,
)
from undrift.rules.server import Adaptive, ServerMomentum, Step


def fedavg(lr: float | None = None, *, local: Sgd | None = None, by_size: bool = True) -> Algorithm:
    """FedAvg (McMahan et al. 2017)."""
    return Algorithm(local=local_of(lr, local), aggregate=Mean(by_size))


def fedprox(lr: float | None = None, *, mu: float = 0.01, local: Sgd | None = None) -> Algorithm:
    """FedProx (Li et al. 2020)."""
    return Algorithm((Prox(mu),), local=local_of(lr, local))


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
    correction: Literal["gradient", "post_step"] = "gradient",
) -> Algorithm:
    """SCAFFOLD (Karimireddy et al. 2020): uniform weights, option II unless asked otherwise.

    `correction` "post_step" acts after the optimizer's step, as in NIID-Bench (option II).
    """
    if correction not in ("gradient", "post_step"):
        raise unknown_name("correction", correction, ["gradient", "post_step"], "scaffold")
    rule = scaffold_rule(option, "persistent", c_weights)
    if correction == "post_step":
        if (option, c_weights) != ("II", "uniform"):
            raise ConfigError("scaffold: post_step is option II with uniform weights of c")
        rule = ScaffoldPostStep()
    return Algorithm((rule,), local_of(lr, local), Mean(by_size), Step(server_lr))


def scaffold_m(lr: float | None = None, *, local: Sgd | None = None) -> Algorithm:
    """SCAFFOLD/m (Varno et al. 2022): SCAFFOLD that uploads models only."""
    return Algorithm((ScaffoldM(),), local_of(lr, local), Mean(by_size=False))


def fednova(
    lr: float | None = None, *, mu: float | None = None, local: Sgd | None = None
) -> Algorithm:
    """FedNova (Wang et al. 2020), with FedProx's pull if `mu` is given."""
    rules = () if mu is None else (Prox(mu),)
    return Algorithm(rules, local_of(lr, local), Nova())


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
        local=local_of(lr, local), server=ServerMomentum(server_lr, beta, dampening=dampening)
    )


def fedadam(
    lr: float | None = None, *, server_lr: float = 0.01, local: Sgd | None = None, **server: Any
) -> Algorithm:
    """FedAdam (Reddi et al. 2021); further settings are those of `Adaptive`."""
    return Algorithm(local=local_of(lr, local), server=Adaptive("adam", server_lr, **server))


def fedadagrad(
    lr: float | None = None, *, server_lr: float = 0.01, local: Sgd | None = None, **server: Any
) -> Algorithm:
    """FedAdagrad (Reddi et al. 2021): beta1 = 0 unless given."""
    settings = {"beta1": 0.0, **server}
    return Algorithm(local=local_of(lr, local), server=Adaptive("adagrad", server_lr, **settings))


def fedyogi(
    lr: float | None = None, *, server_lr: float = 0.01, local: Sgd | None = None, **server: Any
) -> Algorithm:
    """FedYogi (Reddi et al. 2021)."""
    return Algorithm(local=local_of(lr, local), server=Adaptive("yogi", server_lr, **server))


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
    local_momentum: Literal["none", "mimelite", "fedadc"] = "none",
    b: float = 0.9,
    **adaptive: Any,
) -> Algorithm:
    """ComFed: a client mechanism times a server optimizer, every cell a method.

    Defaults are the paper's: lr 0.01 with heavy-ball momentum 0.9 and weight decay 1e-4 on the
    client; `server_lr` is 1 for Sgd and 0.005 for the adaptive servers.  `local_momentum` takes the
    server's momentum into local steps, with the weight `b` (R21).

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
    taken = _comfed_momentum(local_momentum, b, settings["beta1"])
    return Algorithm(
        (*rules.get(client, ()), *taken),
        _comfed_local(lr, local),
        aggregates.get(client, Mean()),
        _comfed_server(server, server_lr, settings),
    )


def _comfed_local(lr: float | None, local: Sgd | None) -> Sgd:
    if local is not None:
        return local_of(lr, local)
    return HeavyBall(lr=0.01 if lr is None else lr, momentum=0.9, weight_decay=1e-4)


def _comfed_momentum(style: str, b: float, beta: Any) -> tuple[Rule, ...]:
    """Take along an average of updates: beta is the server's beta1."""
    styles = {"none": (), "mimelite": (MomentumMix(b, beta),), "fedadc": (MomentumAdd(b, beta),)}
    if style not in styles:
        raise unknown_name("local_momentum", style, list(styles), "comfed")
    return styles[style]


def _comfed_server(server: str, lr: float | None, settings: dict[str, Any]) -> Rule:
    if server == "sgd":
        return Step(1.0 if lr is None else lr)
    return Adaptive(server, lr=0.005 if lr is None else lr, **settings)


class Named(NamedTuple):
    """One entry of the catalogue."""

    name: str
    build: Callable[..., Algorithm]
    paper: str
    needs: Literal["", "everybody", "features", "one step"] = ""  # of sampler, task or work


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
        Named("fedamsgrad", fedamsgrad, "Reddi et al. 2021, with AMSGrad"),
        Named("slowmo", slowmo, "Wang et al. 2020 (SlowMo)"),
        Named("fedadc", fedadc, "Ozfatura et al. 2021"),
        Named("mime", mime, "Karimireddy et al. 2021"),
        Named("mimelite", mimelite, "Karimireddy et al. 2021"),
        Named("feddyn", feddyn, "Acar et al. 2021"),
        Named("feddc", feddc, "Gao et al. 2022"),
        Named("fedpd", fedpd, "Zhang et al. 2021", "everybody"),
        Named("fedadmm", fedadmm, "Gong, Li & Freris 2022"),
        Named("vrlsgd", vrlsgd, "Liang et al. 2019", "everybody"),
        Named("adabest", adabest, "Varno et al. 2022"),
        Named("fedvra", fedvra, "Wang et al. 2023 (FedVRA)"),
        Named("fedvra_u", fedvra_u, "Wang et al. 2023 (FedVRA), algorithm 2"),
        Named("rfedavg", rfedavg, "Wang et al. 2023 (rFedAvg)", "features"),
        Named("rfedavg_plus", rfedavg_plus, "Wang et al. 2023 (rFedAvg)", "features"),
        Named("moon", moon, "Li, He & Song 2021", "features"),
        Named("qfedavg", qfedavg, "Li et al. 2020 (q-FFL)"),
        Named("qfedsgd", qfedsgd, "Li et al. 2020 (q-FFL)", "one step"),
    ]
    cells = [
        Named(f"comfed:{c}-{s}", partial(comfed, c, s), f"ComFed, {comfed_name(c, s)}")
        for c in COMFED_CLIENTS
        for s in COMFED_SERVERS
    ]
    return {entry.name: entry for entry in [*singles, *cells]}
