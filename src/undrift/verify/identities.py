"""What one algorithm must be equal to, and where (the numbers are docs/conventions.md's)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from undrift import rules as r
from undrift.core.algorithm import Algorithm
from undrift.core.local import HeavyBall, Sgd
from undrift.core.rule import Mean
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

    def difference(self) -> float:
        """Measure the largest difference over 5 rounds."""
        gap = path(self.left(), self.where) - path(self.right(), self.where)
        return float(gap.abs().max())


def uniform() -> Algorithm:
    """FedAvg with equal weights."""
    return r.fedavg(LR, by_size=False)


def _with_prox(mu: float) -> Algorithm:
    return Algorithm((r.Prox(mu), r.AdaBest(mu, 1.0)), Sgd(lr=LR), Mean(by_size=False))


EVERYBODY, ALIKE = Setting(everybody=True), Setting(equal_sizes=True)
ONE_STEP = Setting(everybody=True, steps=1, full_batch=True)
BALL = HeavyBall(lr=0.05, momentum=0.9)

IDENTITIES = [
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
    Identity("scaffold", "one step, everybody: FedAvg", lambda: r.scaffold(LR), uniform, ONE_STEP),
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
    Identity("adabest", "mu = beta = 0: FedAvg", lambda: r.adabest(LR, mu=0.0, beta=0.0), uniform),
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
    Identity("qfedavg", "q = 0: FedAvg", lambda: r.qfedavg(LR, q=0.0), uniform),
    Identity("fedavgm", "beta = 0: FedAvg", lambda: r.fedavgm(LR, beta=0.0), lambda: r.fedavg(LR)),
    Identity("slowmo", "beta = 0: FedAvg", lambda: r.slowmo(LR, beta=0.0), uniform),
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
        "beta = 0: FedAvg",
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
