"""The papers' names, one line each, and ComFed's grid as the cross product it is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

from undrift.core.algorithm import Algorithm
from undrift.core.local import HeavyBall, Sgd
from undrift.core.rule import Aggregate, Mean, Rule
from undrift.core.tree import refuse_unused
from undrift.errors import ConfigError, unknown_name
from undrift.rules.aggregate import Nova
from undrift.rules.choice import choice
from undrift.rules.client import (
    Prox,
    Scaffold,
    ScaffoldFresh,
    ScaffoldGradient,
    ScaffoldLiteral,
    ScaffoldLiteralPath,
    ScaffoldM,
)
from undrift.rules.compat import (
    NovaBySteps,
    NovaHarmonic,
    ScaffoldBaseLr,
    ScaffoldFreshPostStep,
    ScaffoldMPrinted,
    ScaffoldPostStep,
    ScaffoldPostStepGradient,
    ScaffoldUnbalanced,
)
from undrift.rules.local import local_of, need_falling_rate, need_more_than_sgd
from undrift.rules.momentum import MomentumAdd, MomentumMix, MomentumScaled, SlowMo
from undrift.rules.recipes import (
    adabest,
    fedadc,
    fedadmm,
    fedamsgrad,
    feddc,
    feddyn,
    fedpd,
    fedrl,
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


def fedprox(
    lr: float | None = None, *, mu: float = 0.01, local: Sgd | None = None, by_size: bool = True
) -> Algorithm:
    """FedProx (Li et al. 2020)."""
    return Algorithm((Prox(mu),), local_of(lr, local), Mean(by_size))


def scaffold_rule(
    option: Literal["I", "II"] = "II",
    mode: Literal["persistent", "fresh", "literal"] = "persistent",
    c_weights: Literal["uniform", "size"] | None = None,
    correction: Literal["gradient", "post_step"] = "gradient",
) -> Rule:
    """Choose among SCAFFOLD's readings (docs/conventions.md, R4).

    `c_weights` None is "uniform" where clients keep c_i, and ComFed's weights q_i elsewhere.
    """
    if c_weights not in ("uniform", "size", None):
        raise unknown_name("c_weights", c_weights, ["uniform", "size"], "scaffold")
    by_size = mode != "persistent" if c_weights is None else c_weights == "size"
    inside: dict[tuple[str, str], Rule] = {
        ("persistent", "I"): ScaffoldGradient(by_size),
        ("persistent", "II"): Scaffold(by_size),
        ("fresh", "I"): ScaffoldFresh(by_size),
        ("literal", "I"): ScaffoldLiteral(by_size),
        ("literal", "II"): ScaffoldLiteralPath(by_size),
    }
    after: dict[tuple[str, str], Rule] = {
        ("persistent", "I"): ScaffoldPostStepGradient(by_size),
        ("persistent", "II"): ScaffoldPostStep(by_size),
        ("fresh", "I"): ScaffoldFreshPostStep(by_size),
    }
    places = {"gradient": inside, "post_step": after}
    choices = choice("correction", correction, places, "comfed")
    if (mode, option) not in tuple(choices):  # a list is no name, and no key either
        names = [f"mode={m!r}, option={o!r}" for m, o in choices]
        owner = f"scaffold with correction={correction!r}"
        raise unknown_name("SCAFFOLD", f"mode={mode!r}, option={option!r}", names, owner)
    return choices[mode, option]


def scaffold(
    lr: float | None = None,
    *,
    option: Literal["I", "II"] = "II",
    server_lr: float = 1.0,
    local: Sgd | None = None,
    by_size: bool = False,
    c_weights: Literal["uniform", "size"] = "uniform",
    correction: Literal["gradient", "post_step", "unbalanced"] = "gradient",
    scaffold_base_lr: bool = False,
) -> Algorithm:
    """SCAFFOLD (Karimireddy et al. 2020): uniform weights, option II unless asked otherwise.

    `correction` "post_step" acts after the optimizer's step, as in NIID-Bench; "unbalanced" scales
    by r_i = n_i / mean(n), as in FedDyn's code, which also divides by the undecayed lr
    (`scaffold_base_lr`).  All three are option II.
    """
    chosen = local_of(lr, local)
    if option == "I" and (scaffold_base_lr or correction in ("post_step", "unbalanced")):
        what = f"correction = {correction!r} and scaffold_base_lr = {scaffold_base_lr}"
        raise ConfigError(f"scaffold: {what} belong to option II, got option = {option!r}")
    by_data = choice("c_weights", c_weights, {"uniform": False, "size": True}, "scaffold")
    rule = _scaffold_of_code(correction, chosen, scaffold_base_lr, by_data)
    if rule is None:
        rule = scaffold_rule(option, "persistent", c_weights)
    return Algorithm((rule,), chosen, Mean(by_size), Step(server_lr))


def _scaffold_of_code(correction: str, local: Sgd, base: bool, c_by_size: bool) -> Rule | None:
    """Choose among other people's forms; None is the paper's."""
    if base:
        need_falling_rate("scaffold: scaffold_base_lr = True", local)
    if correction == "gradient":
        return ScaffoldBaseLr(c_by_size, local.lr) if base else None
    if correction not in ("post_step", "unbalanced"):
        known = ["gradient", "post_step", "unbalanced"]
        raise unknown_name("correction", correction, known, "scaffold")
    if correction == "post_step":
        if base:
            raise ConfigError(
                "scaffold: correction = 'post_step' divides by the round's own lr: leave "
                "scaffold_base_lr out"
            )
        need_more_than_sgd("scaffold: correction = 'post_step'", local)
        return ScaffoldPostStep(c_by_size)
    if c_by_size:
        raise ConfigError(
            "scaffold: correction = 'unbalanced' has uniform weights of c: leave c_weights out"
        )
    return ScaffoldUnbalanced(lr=local.lr if base else None)


def scaffold_m(
    lr: float | None = None, *, printed_decay: bool = False, local: Sgd | None = None
) -> Algorithm:
    """SCAFFOLD/m (Varno et al. 2022): SCAFFOLD that uploads models only.

    `printed_decay` keeps (N-1)/N of h, as printed (R9).
    """
    rule = (ScaffoldMPrinted if printed_decay else ScaffoldM)()
    return Algorithm((rule,), local_of(lr, local), Mean(by_size=False))


def fednova(
    lr: float | None = None,
    *,
    mu: float | None = None,
    gmf: float = 0.0,
    tau_eff: Literal["path", "steps", "harmonic"] = "path",
    by_size: bool = True,
    local: Sgd | None = None,
) -> Algorithm:
    """FedNova (Wang et al. 2020), with FedProx's pull if `mu` is given.

    `gmf` is the slow momentum of the server.  `tau_eff` is the common length: the mean of
    ||a_i||_1, that of K_i (the authors' code where mu is given), or the harmonic one (fedsim).
    """
    kinds: dict[str, Callable[[], Aggregate]] = {
        "path": lambda: Nova(by_size),
        "steps": NovaBySteps,
        "harmonic": NovaHarmonic,
    }
    aggregate = choice("tau_eff", tau_eff, kinds, "fednova")
    if not by_size and tau_eff != "path":
        raise ConfigError(
            f"fednova: tau_eff = {tau_eff!r} is weighted by size in that code: leave by_size out"
        )
    chosen = local_of(lr, local)
    if tau_eff == "steps" and mu is None:
        need_more_than_sgd("fednova: tau_eff = 'steps' without mu", chosen)
    rules = () if mu is None else (Prox(mu),)
    server = SlowMo(gmf) if gmf else Rule()
    return Algorithm(rules, chosen, aggregate(), server)


def fedavgm(
    lr: float | None = None,
    *,
    beta: float = 0.9,
    server_lr: float = 1.0,
    dampening: bool = False,
    by_size: bool = True,
    local: Sgd | None = None,
) -> Algorithm:
    """FedAvgM (Hsu et al. 2019)."""
    step = ServerMomentum(server_lr, beta, dampening=dampening)
    return Algorithm((), local_of(lr, local), Mean(by_size), step)


def fedadam(
    lr: float | None = None,
    *,
    server_lr: float = 0.01,
    local: Sgd | None = None,
    by_size: bool = True,
    **server: Any,
) -> Algorithm:
    """FedAdam (Reddi et al. 2021); further settings are those of `Adaptive`."""
    step = Adaptive("adam", server_lr, **server)
    return Algorithm((), local_of(lr, local), Mean(by_size), step)


def fedadagrad(
    lr: float | None = None,
    *,
    server_lr: float = 0.01,
    local: Sgd | None = None,
    by_size: bool = True,
    **server: Any,
) -> Algorithm:
    """FedAdagrad (Reddi et al. 2021): beta1 = 0 unless given."""
    step = Adaptive("adagrad", server_lr, **{"beta1": 0.0, **server})
    return Algorithm((), local_of(lr, local), Mean(by_size), step)


def fedyogi(
    lr: float | None = None,
    *,
    server_lr: float = 0.01,
    local: Sgd | None = None,
    by_size: bool = True,
    **server: Any,
) -> Algorithm:
    """FedYogi (Reddi et al. 2021)."""
    step = Adaptive("yogi", server_lr, **server)
    return Algorithm((), local_of(lr, local), Mean(by_size), step)


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
    c_weights: Literal["uniform", "size"] | None = None,
    correction: Literal["gradient", "post_step"] = "gradient",
    local_momentum: Literal["none", "mimelite", "fedadc"] = "none",
    b: float = 0.9,
    scale: bool = False,
    by_size: bool = True,
    **adaptive: Any,
) -> Algorithm:
    """ComFed: a client mechanism times a server optimizer, every cell a method.

    Defaults are the paper's: lr 0.01 with heavy-ball momentum 0.9 and weight decay 1e-4 on the
    client; `server_lr` is 1 for Sgd and 0.005 for the adaptive servers.  `correction` "post_step"
    lets SCAFFOLD correct after the optimizer's step, outside momentum.  `local_momentum` takes the
    server's momentum into local steps, with the weight `b` (R21), scaled by the server's
    second moment if `scale` is given.

    >>> len({comfed(c, s) for c in COMFED_CLIENTS for s in COMFED_SERVERS})
    16
    """
    if client not in COMFED_CLIENTS:
        raise unknown_name("ComFed client", client, list(COMFED_CLIENTS), "comfed")
    if server not in COMFED_SERVERS:
        raise unknown_name("ComFed server", server, list(COMFED_SERVERS), "comfed")
    rules: dict[str, tuple[Rule, ...]] = {
        "prox": (Prox(mu),),
        "scaf": (scaffold_rule(option, mode, c_weights, correction),),
    }
    local = _comfed_local(lr, local)
    if client == "scaf" and correction == "post_step":
        need_more_than_sgd("comfed: correction = 'post_step'", local)
    scaf = {"option": option, "mode": mode, "c_weights": c_weights, "correction": correction}
    _check_client(client, mu, scaf)
    aggregates: dict[str, Aggregate] = {"nova": Nova(by_size)}
    if server == "sgd" and adaptive:
        raise ConfigError(f"comfed: server 'sgd' has no {', '.join(adaptive)}; use an adaptive one")
    settings = {"beta1": 0.9, "beta2": 0.99, "tau": COMFED_TAU.get(server), **adaptive}
    taken = _comfed_momentum(local_momentum, b, settings["beta1"])
    if not taken:
        refuse_unused(comfed, "local_momentum is 'none'", b=b)
    if scale:
        taken = _scaled(taken, server, settings)
    return Algorithm(
        (*rules.get(client, ()), *taken),
        local,
        aggregates.get(client, Mean(by_size)),
        _comfed_server(server, server_lr, settings),
    )


def _check_client(client: str, mu: float, scaf: dict[str, Any]) -> None:
    """Refuse settings of another client mechanism."""
    if client != "prox":
        refuse_unused(comfed, f"client {client!r} has no pull", mu=mu)
    if client != "scaf":
        refuse_unused(comfed, f"client {client!r} has no control variates", **scaf)


def _comfed_local(lr: float | None, local: Sgd | None) -> Sgd:
    if local is not None:
        return local_of(lr, local)
    return HeavyBall(lr=0.01 if lr is None else lr, momentum=0.9, weight_decay=1e-4)


def _comfed_momentum(style: str, b: float, beta: Any) -> tuple[Rule, ...]:
    """Take along an average of updates: beta is the server's beta1."""
    styles: dict[str, tuple[Rule, ...]] = {
        "none": (),
        "mimelite": (MomentumMix(b, beta),),
        "fedadc": (MomentumAdd(b, beta),),
    }
    return choice("local_momentum", style, styles, "comfed")


def _scaled(taken: tuple[Rule, ...], server: str, settings: dict[str, Any]) -> tuple[Rule, ...]:
    """Scale the momentum that is taken along as the server scales its own."""
    if server == "sgd" or not all(type(rule) is MomentumMix for rule in taken) or not taken:
        raise ConfigError(
            "comfed: scale goes with an adaptive server and local_momentum 'mimelite'"
        )
    of_server = {n: settings[n] for n in ("beta2", "tau", "v0") if n in settings}
    mixes = [rule for rule in taken if isinstance(rule, MomentumMix)]
    return tuple(MomentumScaled(mix.b, mix.beta, server, **of_server) for mix in mixes)


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
        Named("fedrl", fedrl, "FedRL"),
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
