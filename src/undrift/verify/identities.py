"""What one algorithm must be equal to, and where (the numbers are docs/conventions.md's)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from undrift import rules as r
from undrift.core.algorithm import Algorithm
from undrift.core.local import HeavyBall, Sgd
from undrift.core.rule import Mean
from undrift.rules.named import COMFED_CLIENTS, COMFED_SERVERS
from undrift.verify.worlds import Setting, path

LR = 0.1
Make = Callable[[], Algorithm]


class Identity(NamedTuple):
    """Two sentences that must move the model alike."""

    of: str  # the algorithm it speaks about
    says: str
    left: Make
    right: Make
    where: Setting = Setting()
    limit: float = 1e-12
    rounds: int = 5
    elsewhere: Setting | None = None  # of the right one, if it lives in another world

    def difference(self) -> float:
        """Measure the largest difference over all rounds."""
        left = path(self.left(), self.where, self.rounds)
        right = path(self.right(), self.elsewhere or self.where, self.rounds)
        return float((left - right).abs().max().nan_to_num(nan=math.inf))


def uniform() -> Algorithm:
    """FedAvg with equal weights."""
    return r.fedavg(LR, by_size=False)


def _with_prox(mu: float) -> Algorithm:
    return Algorithm((r.Prox(mu), r.AdaBest(mu, 1.0)), Sgd(lr=LR), Mean(by_size=False))


EVERYBODY, ALIKE = Setting(everybody=True), Setting(equal_sizes=True)
ONE_STEP = Setting(everybody=True, steps=1, full_batch=True)
BALL = HeavyBall(lr=0.05, momentum=0.9)
HALF_LABELLED = r.PseudoLabels(classes=3, every=2)
ALL_LABELLED = r.PseudoLabels(classes=3, every=1)
TAU = 1e9  # adaptive steps lr m / (sqrt(v) + tau) become lr m / tau; the rest is of order 1 / tau

ONE_PAPER = [
    Identity(
        "fedavg",
        "one step on all data, everybody: gradient descent on the pooled data",
        lambda: r.fedavg(LR),
        lambda: r.fedavg(LR),
        ONE_STEP,
        elsewhere=ONE_STEP._replace(pooled=True),
    ),
    Identity("fedprox", "mu = 0: FedAvg", lambda: r.fedprox(LR, mu=0.0), lambda: r.fedavg(LR)),
    Identity("fednova", "equal steps: FedAvg", lambda: r.fednova(LR), lambda: r.fedavg(LR)),
    Identity(
        "fednova",
        "equal steps, any momentum: FedAvg",
        lambda: r.fednova(local=BALL),
        lambda: r.fedavg(local=BALL),
    ),
    Identity(
        "fednova",
        "with prox, equal steps: FedProx",
        lambda: r.fednova(LR, mu=0.3),
        lambda: r.fedprox(LR, mu=0.3),
    ),
    Identity(
        "scaffold",
        "one step, everybody: FedAvg, uniform weights",
        lambda: r.scaffold(LR),
        uniform,
        ONE_STEP,
    ),
    Identity(
        "scaffold",
        "one step on all data: option I = option II",
        lambda: r.scaffold(LR, option="I"),
        lambda: r.scaffold(LR),
        Setting(steps=1, full_batch=True),
    ),
    Identity(
        "scaffold_m", "equal steps: SCAFFOLD", lambda: r.scaffold_m(LR), lambda: r.scaffold(LR)
    ),
    Identity(
        "vrlsgd", "everybody: SCAFFOLD", lambda: r.vrlsgd(LR), lambda: r.scaffold(LR), EVERYBODY
    ),
    Identity(
        "adabest",
        "mu = beta = 0: FedAvg, uniform weights",
        lambda: r.adabest(LR, mu=0.0, beta=0.0),
        uniform,
    ),
    Identity(
        "adabest",
        "beta = 1 beside Prox(mu), everybody: FedDyn",
        lambda: _with_prox(0.3),
        lambda: r.feddyn(LR, alpha=0.3),
        EVERYBODY,
    ),
    Identity(
        "fedvra",
        "a = gamma = 0, d = 1 / sum omega: FedAvg",
        lambda: r.fedvra(LR, gamma=0.0, a=0.0, d="cohort"),
        lambda: r.fedavg(LR),
    ),
    Identity(
        "fedvra",
        "a = 0, gamma = mu: FedProx",
        lambda: r.fedvra(LR, gamma=0.3, a=0.0, d="cohort"),
        lambda: r.fedprox(LR, mu=0.3),
    ),
    Identity(
        "fedvra",
        "a = 1, d = N / m, equal sizes: FedDyn",
        lambda: r.fedvra(LR, gamma=0.3, a=1.0, d=1.5),
        lambda: r.feddyn(LR, alpha=0.3),
        ALIKE,
    ),
    Identity(
        "fedadmm",
        "everybody: FedDyn",
        lambda: r.fedadmm(LR, rho=0.3),
        lambda: r.feddyn(LR, alpha=0.3),
        EVERYBODY,
    ),
    Identity(
        "fedpd",
        "always communicating: FedDyn",
        lambda: r.fedpd(LR, rho=0.3),
        lambda: r.feddyn(LR, alpha=0.3),
        EVERYBODY,
    ),
    Identity(
        "feddyn",
        "everybody: FedADMM",
        lambda: r.feddyn(LR, alpha=0.3),
        lambda: r.fedadmm(LR, rho=0.3),
        EVERYBODY,
    ),
    Identity("qfedavg", "q = 0: FedAvg, uniform weights", lambda: r.qfedavg(LR, q=0.0), uniform),
    Identity("fedavgm", "beta = 0: FedAvg", lambda: r.fedavgm(LR, beta=0.0), lambda: r.fedavg(LR)),
    Identity(
        "slowmo", "beta = 0: FedAvg, uniform weights", lambda: r.slowmo(LR, beta=0.0), uniform
    ),
    Identity(
        "mimelite", "beta = 0: FedAvg", lambda: r.mimelite(LR, beta=0.0), lambda: r.fedavg(LR)
    ),
    Identity(
        "mime",
        "one step on all data, everybody: MimeLite",
        lambda: r.mime(LR),
        lambda: r.mimelite(LR),
        ONE_STEP,
    ),
    Identity(
        "fedadc",
        "beta = 0: FedAvg, uniform weights",
        lambda: r.fedadc(LR, beta_local=0.0, beta_global=0.0),
        uniform,
    ),
    Identity(
        "fedadc",
        "beta_local = 0: SlowMo",
        lambda: r.fedadc(LR, beta_local=0.0, beta_global=0.5),
        lambda: r.slowmo(LR, beta=0.5),
    ),
    Identity(
        "rfedavg", "strength 0: FedAvg", lambda: r.rfedavg(LR, strength=0.0), lambda: r.fedavg(LR)
    ),
    Identity(
        "rfedavg_plus",
        "strength 0: FedAvg",
        lambda: r.rfedavg_plus(LR, strength=0.0),
        lambda: r.fedavg(LR),
    ),
    Identity("moon", "mu = 0: FedAvg", lambda: r.moon(LR, mu=0.0), lambda: r.fedavg(LR)),
]


def _limit_of(kind: str) -> Identity:
    """An adaptive server with a large tau."""
    build = {"adam": r.fedadam, "adagrad": r.fedadagrad, "yogi": r.fedyogi, "amsgrad": r.fedamsgrad}
    make = partial(build[kind], LR, server_lr=TAU, tau=TAU, beta1=0.0)
    return Identity(
        f"fed{kind}", "beta1 = 0, tau = lr = 1e9: FedAvg", make, lambda: r.fedavg(LR), limit=1e-8
    )


def _comfed(*cell: str, **settings: Any) -> Make:
    return partial(r.comfed, *cell, lr=0.05, **settings)


def _cell(client: str, server: str) -> list[Identity]:
    """What a cell of ComFed becomes: FedAvg's column, and itself without local momentum."""
    of = f"comfed:{client}-{server}"
    column = {
        "prox": ("mu = 0: the column of FedAvg", {"mu": 0.0}, Setting()),
        "nova": ("equal steps: the column of FedAvg", {}, Setting()),
        "scaf": (
            "one step, everybody, equal sizes: the column of FedAvg",
            {},
            ONE_STEP._replace(equal_sizes=True),
        ),
    }
    found = []
    for style in ("mimelite", "fedadc"):
        taken = _comfed(client, server, local_momentum=style, b=0.0)
        found.append(Identity(of, f"{style}, b = 0: without", taken, _comfed(client, server)))
    if client in column:
        says, settings, where = column[client]
        left, right = _comfed(client, server, **settings), _comfed("sgd", server)
        found.append(Identity(of, says, left, right, where))
    return found


def _first_round(of: str, build: Callable[..., Algorithm]) -> Identity:
    right = partial(r.fedadam, LR)
    return Identity(of, "first round: FedAdam", partial(build, LR), right, rounds=1)


IDENTITIES = [
    *ONE_PAPER,
    *(_limit_of(kind) for kind in ("adam", "adagrad", "yogi", "amsgrad")),
    _first_round("fedyogi", r.fedyogi),
    _first_round("fedamsgrad", r.fedamsgrad),
    Identity(
        "fedrl",
        "no actions: FedAdam, uniform weights",
        lambda: r.fedrl(LR, policy="still"),
        lambda: r.fedadam(LR, by_size=False),
        limit=0.0,
    ),
    Identity(
        "fedvra_u",
        "all labelled: FedVRA",
        lambda: r.fedvra_u(LR, objective=ALL_LABELLED, gamma=0.3),
        lambda: r.fedvra(LR, gamma=0.3),
    ),
    Identity(
        "qfedsgd",
        "q = 0: q-FedAvg",
        lambda: r.qfedsgd(LR, q=0.0),
        lambda: r.qfedavg(LR, q=0.0),
        Setting(steps=1, full_batch=True),
    ),
    *(i for c in COMFED_CLIENTS for s in COMFED_SERVERS for i in _cell(c, s)),
]
