"""Algorithms with a paper of their own, one sentence each; see `named` for the first ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from undrift.core.algorithm import Algorithm
from undrift.core.local import Sgd
from undrift.core.rule import Mean, Rule
from undrift.core.tree import refuse_unused, replace
from undrift.errors import ConfigError, unknown_name
from undrift.rules.adabest import AdaBest
from undrift.rules.choice import choice
from undrift.rules.client import Prox, Scaffold
from undrift.rules.compat import AverageOptimizer, KeepOptimizer, MoonRounds, QFairFree
from undrift.rules.compat.optimizers import need_state
from undrift.rules.contrast import Moon
from undrift.rules.dual_recipes import UNIFORM, fedadmm, feddc, feddyn, fedpd, vrlsgd
from undrift.rules.fair import QFair
from undrift.rules.features import RFedAvg, RFedAvgPlus, RFedAvgPlusAll
from undrift.rules.local import local_of
from undrift.rules.mime import Ema, EmaAdam, Mime, MimeLite, Trace
from undrift.rules.momentum import FedAdc, SlowMo
from undrift.rules.policy import Policy, policy_named
from undrift.rules.private import FeatureNoise
from undrift.rules.server import Adaptive, Step
from undrift.rules.steered import Steered
from undrift.rules.two_blocks import Ball, two_blocks
from undrift.rules.vra import FedVra, FedVraEach, PerClient, ShareSum, per_client

# A number, a sequence by client id, or a function of a ClientInfo.  Any, because a list in an
# experiment file is a sweep there; {use = "PerClient", values = [...]} is not.
PerClientNumber = Any


# ------------------------------------------------------------------------- drift and variance
def adabest(
    lr: float | None = None,
    *,
    mu: float = 0.02,
    beta: float = 0.96,
    unbalanced: bool = False,
    patience: float | None = None,
    by_size: bool = False,
    server_lr: float = 1.0,
    local: Sgd | None = None,
) -> Algorithm:
    """AdaBest (Varno et al. 2022); `patience` lets beta fall on a plateau."""
    rule = AdaBest(mu, beta, unbalanced, patience)
    return Algorithm((rule,), local_of(lr, local), Mean(by_size), Step(server_lr))


def fedvra(
    lr: float | None = None,
    *,
    gamma: PerClientNumber = 0.1,
    a: PerClientNumber = None,
    d: PerClientNumber = None,
    by_size: bool = True,
    local: Sgd | None = None,
) -> Algorithm:
    """FedVRA (Wang et al. 2023); a and d follow the paper's remark 1 unless given.

    gamma, a and d are numbers, sequences by client id or functions of a ClientInfo; d = "cohort"
    takes the weights over the cohort again, as FedAvg does.
    """
    if isinstance(d, str) and d != "cohort":
        raise unknown_name("d", d, ["cohort"], "fedvra")
    again = d == "cohort"
    gamma, a, d = (per_client(v) for v in (gamma, a, 1.0 if again else d))
    rule = (FedVraEach if isinstance(gamma, PerClient) else FedVra)(gamma, a, d, by_size)
    return Algorithm((rule,), local_of(lr, local), (Mean if again else ShareSum)(by_size))


def fedvra_u(
    lr: float | None = None,
    *,
    objective: Any = None,
    rate: float = 1.0,
    steps: int = 5,
    radius: float | None = None,
    gamma: PerClientNumber = 0.1,
    a: PerClientNumber = None,
    d: PerClientNumber = None,
    by_size: bool = True,
    local: Sgd | None = None,
) -> Algorithm:
    """FedVRA-U (Wang et al. 2023, alg. 2): FedVRA on a problem with a private block.

    `objective` None is `PseudoLabels()`; `rate` and `steps` are the private block's; `radius` keeps
    the model in a ball.
    """
    shared = fedvra(lr, gamma=gamma, a=a, d=d, by_size=by_size, local=local)
    made = two_blocks(shared, objective, rate=rate, steps=steps)
    return made if radius is None else replace(made, rules=(*made.rules, Ball(radius)))


# ----------------------------------------------------------------------------------- features
def rfedavg(
    lr: float | None = None,
    *,
    strength: float = 1e-4,
    noise: FeatureNoise | None = None,
    single_batch: int | None = None,
    by_size: bool = True,
    local: Sgd | None = None,
) -> Algorithm:
    """rFedAvg (Wang et al. 2023): needs a task with a feature layer.

    `single_batch` examples make a feature mean; `compat.RFedAvgAtStart` is the authors' code.
    """
    rule = RFedAvg(strength, noise, _few(single_batch, noise))
    return Algorithm((rule,), local_of(lr, local), Mean(by_size))


def _few(batch: int | None, noise: FeatureNoise | None) -> int | None:
    if batch is not None and noise is not None:
        raise ConfigError("single_batch: noise is accounted for means over all own examples")
    if batch is not None and (isinstance(batch, bool) or batch < 1):
        raise ConfigError(f"single_batch = {batch!r} must be a number of examples, or None for all")
    return batch


def rfedavg_plus(
    lr: float | None = None,
    *,
    strength: float = 1e-4,
    noise: FeatureNoise | None = None,
    refresh: Literal["cohort", "all"] = "cohort",
    include_self: bool = False,
    single_batch: int | None = None,
    by_size: bool = True,
    local: Sgd | None = None,
) -> Algorithm:
    """rFedAvg+ (Wang et al. 2023): needs a task with a feature layer.

    `include_self` counts the own feature mean too and `single_batch` examples make one, as in the
    authors' code, which is `compat.RFedAvgPlusAtStart`.
    """
    kinds: dict[str, type[RFedAvgPlus]] = {"cohort": RFedAvgPlus, "all": RFedAvgPlusAll}
    kind = choice("refresh", refresh, kinds, "rfedavg_plus")
    rule = kind(strength, noise, include_self, _few(single_batch, noise))
    return Algorithm((rule,), local_of(lr, local), Mean(by_size))


def moon(
    lr: float | None = None,
    *,
    mu: float = 1.0,
    temperature: float = 0.5,
    stored: int = 1,
    pool: Literal["participations", "rounds"] = "participations",
    by_size: bool = True,
    local: Sgd | None = None,
) -> Algorithm:
    """MOON (Li, He & Song 2021): needs a task with a feature layer.

    `pool` "rounds" keeps the last rounds' models, as the authors' code does.
    """
    kinds: dict[str, Callable[..., Rule]] = {"participations": Moon, "rounds": MoonRounds}
    rule = choice("pool", pool, kinds, "moon")(mu, temperature, stored)
    return Algorithm((rule,), local_of(lr, local), Mean(by_size))


# ----------------------------------------------------------------------------------- fairness
def qfedavg(
    lr: float | None = None,
    *,
    q: float = 1.0,
    lipschitz: float | None = None,
    free: bool = False,
    local: Sgd | None = None,
) -> Algorithm:
    """q-FedAvg (Li et al. 2020); `lipschitz` None is 1 / lr.

    `free`: another h_i, and `lipschitz` None is 1, as in rFedAvg's code (`compat.QFairFree`).
    """
    L = 1.0 if free and lipschitz is None else lipschitz
    return Algorithm((), local_of(lr, local), QFairFree(q, L) if free else QFair(q, L))


def qfedsgd(lr: float | None = None, *, q: float = 1.0, local: Sgd | None = None) -> Algorithm:
    """q-FedSGD (Li et al. 2020): one local step per round, Work(steps=1, batch=None)."""
    return Algorithm((), local_of(lr, local), QFair(q, one_step=True))


# ----------------------------------------------------------------------------------- momentum
def slowmo(
    lr: float | None = None,
    *,
    beta: float = 0.5,
    server_lr: float = 1.0,
    buffers: Literal["reset", "keep", "average"] = "reset",
    local: Sgd | None = None,
) -> Algorithm:
    """SlowMo (Wang et al. 2020): uniform weights; `buffers` are the local optimizer's."""
    chosen = local_of(lr, local)
    if buffers in ("keep", "average"):
        need_state(f"slowmo: buffers = {buffers!r}", chosen)
    kinds: dict[str, tuple[Rule, ...]] = {
        "reset": (),
        "keep": (KeepOptimizer(chosen),),
        "average": (AverageOptimizer(chosen),),
    }
    rules = choice("buffers", buffers, kinds, "slowmo")
    return Algorithm(rules, chosen, UNIFORM, SlowMo(beta, server_lr))


def fedadc(
    lr: float | None = None,
    *,
    beta_local: float = 0.9,
    beta_global: float = 0.9,
    server_lr: float = 1.0,
    form: Literal["heavy_ball", "nesterov"] = "heavy_ball",
    local: Sgd | None = None,
) -> Algorithm:
    """FedADC (Ozfatura et al. 2021): uniform weights."""
    if form not in ("heavy_ball", "nesterov"):
        raise unknown_name("form", form, ["heavy_ball", "nesterov"], "fedadc")
    rule = FedAdc(beta_local, beta_global, server_lr, form == "nesterov")
    return Algorithm((rule,), local_of(lr, local), UNIFORM)


def mime(
    lr: float | None = None,
    *,
    beta: float = 0.9,
    base: Literal["sgdm", "trace", "adam"] = "sgdm",
    beta2: float = 0.99,
    eps: float = 1e-3,
    bias_correction: bool = False,
    server_lr: float = 1.0,
    local: Sgd | None = None,
) -> Algorithm:
    """Mime (Karimireddy et al. 2021); `beta2`, `eps` and `bias_correction` are Adam's.

    `base` "trace" is momentum as a sum, g + beta m, as in fedjax.
    """
    adam = {"beta2": beta2, "eps": eps, "bias_correction": bias_correction}
    rule = Mime(_base(mime, base, beta, **adam))
    return Algorithm((rule,), local_of(lr, local), server=Step(server_lr))


def mimelite(
    lr: float | None = None,
    *,
    beta: float = 0.9,
    base: Literal["sgdm", "trace", "adam"] = "sgdm",
    beta2: float = 0.99,
    eps: float = 1e-3,
    bias_correction: bool = False,
    server_lr: float = 1.0,
    local: Sgd | None = None,
) -> Algorithm:
    """MimeLite (Karimireddy et al. 2021): as `mime`, without the second exchange."""
    adam = {"beta2": beta2, "eps": eps, "bias_correction": bias_correction}
    rule = MimeLite(_base(mimelite, base, beta, **adam))
    return Algorithm((rule,), local_of(lr, local), server=Step(server_lr))


def _base(owner: Callable[..., Any], name: str, beta: float, **adam: Any) -> Any:
    bases: dict[str, Callable[[], Any]] = {
        "sgdm": lambda: Ema(beta),
        "trace": lambda: Trace(beta),
        "adam": lambda: EmaAdam(beta, **adam),
    }
    made = choice("base", name, bases, owner.__name__)()
    if name != "adam":
        refuse_unused(owner, f"base {name!r} has one moment, 'adam' has two", **adam)
    return made


def fedamsgrad(
    lr: float | None = None,
    *,
    server_lr: float = 0.01,
    local: Sgd | None = None,
    by_size: bool = True,
    **server: Any,
) -> Algorithm:
    """FedOpt (Reddi et al. 2021) with AMSGrad; further settings are those of `Adaptive`."""
    step = Adaptive("amsgrad", server_lr, **server)
    return Algorithm((), local_of(lr, local), Mean(by_size), step)


def fedrl(
    lr: float | None = None,
    *,
    policy: Any = "digits",
    client: Literal["sgd", "prox", "scaf"] = "sgd",
    mu: float = 0.01,
    server_lr: float = 0.01,
    alpha1: float = 0.9,
    alpha2: float = 0.99,
    tau: float = 1e-3,
    pca: Literal["clients", "rounds"] = "clients",
    local: Sgd | None = None,
) -> Algorithm:
    """FedRL: FedAdam whose moments a trained policy steers; uniform weights.

    `policy` is the name of a shipped one or a file of `undrift train-agent`.  `client` "prox" is
    ProxRL, "scaf" ScafRL; only "prox" reads `mu`.
    """
    clients: dict[str, tuple[Rule, ...]] = {"sgd": (), "prox": (Prox(mu),), "scaf": (Scaffold(),)}
    own = choice("client", client, clients, "fedrl")
    if client != "prox":
        refuse_unused(fedrl, f"client {client!r} has no pull", mu=mu)
    chosen = policy if isinstance(policy, Policy) else policy_named(policy)
    rule = Steered(chosen, server_lr, alpha1, alpha2, tau, pca, chosen.agent.steering)
    return Algorithm((*own, rule), local_of(lr, local), UNIFORM)


__all__ = [
    "adabest",
    "fedadc",
    "fedadmm",
    "fedamsgrad",
    "feddc",
    "feddyn",
    "fedpd",
    "fedrl",
    "fedvra",
    "fedvra_u",
    "mime",
    "mimelite",
    "moon",
    "qfedavg",
    "qfedsgd",
    "rfedavg",
    "rfedavg_plus",
    "slowmo",
    "vrlsgd",
]
