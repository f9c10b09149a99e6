"""One row per algorithm: what holds, and how exactly."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from undrift import rules as r
from undrift.core.algorithm import Algorithm
from undrift.data import Uniform
from undrift.errors import UndriftError, unknown_name
from undrift.rules.named import catalogue
from undrift.testing.compare import TOLERANCE
from undrift.testing.world import numbers
from undrift.verify.identities import IDENTITIES, LR
from undrift.verify.worlds import Setting, distance, trainer

OPTIMUM = 1e-8  # what counts as reaching it
NEEDS_EVERYBODY = ("vrlsgd", "fedpd")
ONE_STEP = ("qfedsgd",)
SHOWN_BY_OTHERS = ("fedvra_u",)  # its problem has a second block: tests prove it

# Who promises to reach the optimum of heterogeneous quadratics, and how it is set there.
PROMISES: dict[str, Callable[[], Algorithm]] = {
    "scaffold": lambda: r.scaffold(0.05),
    "scaffold_m": lambda: r.scaffold_m(0.05),
    "vrlsgd": lambda: r.vrlsgd(0.05),
    "feddyn": lambda: r.feddyn(0.05, alpha=1.0),
    "fedadmm": lambda: r.fedadmm(0.05, rho=1.0),
    "fedpd": lambda: r.fedpd(0.05, rho=1.0),
    "feddc": lambda: r.feddc(0.05, alpha=0.1),
}


# With half of the clients FedADMM's theory wants a server step of cohort over population.
HALF: dict[str, Callable[[], Algorithm]] = {
    "fedadmm": lambda: r.fedadmm(0.05, rho=1.0, server_lr=0.5),
}


class Verdict(NamedTuple):
    """What was measured of one algorithm; NaN where nothing is promised."""

    name: str
    identities: tuple[tuple[str, float, bool], ...]  # (what, difference, holds)
    engines: float
    optimum: float  # everybody takes part
    optimum_half: float  # half of them
    down: float  # floats per client and round, in models
    up: float
    problem: str = ""

    @property
    def holds(self) -> bool:
        """Whether every number is what it must be."""
        near = [v for v in (self.optimum, self.optimum_half) if not math.isnan(v)]
        return (
            not self.problem
            and all(ok for _, _, ok in self.identities)
            and self.engines <= TOLERANCE
            and all(v <= OPTIMUM for v in near)
        )


def names() -> list[str]:
    """List what can be verified: every algorithm, ComFed's cells by their own names."""
    return [n for n in catalogue() if n not in SHOWN_BY_OTHERS]


def verify(only: Sequence[str] = ()) -> list[Verdict]:
    """Measure algorithms on this machine."""
    known = names()
    for name in only:
        if name not in known:
            raise unknown_name("algorithm to verify", name, known, "verify")
    return [_verdict(name) for name in (only or known)]


def _verdict(name: str) -> Verdict:
    try:
        algorithm = catalogue()[name].build(lr=LR)
        setting = Setting(everybody=name in NEEDS_EVERYBODY, equal_steps=False)
        if name in ONE_STEP:
            setting = Setting(steps=1, full_batch=True)
        sent = _traffic(algorithm, setting)
        return Verdict(
            name, _identities(name), _engines(algorithm, setting), *_optimum(name), *sent
        )
    except UndriftError as error:
        nothing = math.nan
        return Verdict(name, (), nothing, nothing, nothing, nothing, nothing, str(error))


def _identities(name: str) -> tuple[tuple[str, float, bool], ...]:
    found = [(i.says, i.difference(), i.limit) for i in IDENTITIES if i.of == name]
    return tuple((says, gap, gap <= limit) for says, gap, limit in found)


def _engines(algorithm: Algorithm, setting: Setting) -> float:
    """Find the largest difference between the engines in any number after 3 rounds."""
    ends = []
    for engine in ("reference", "vectorised"):
        made = trainer(algorithm, setting, engine)
        made.run(3)
        ends.append(numbers(made))
    gaps = [(ends[0][n] - ends[1][n]).abs() for n in ends[0] if ends[0][n].numel()]
    return max(float(gap.double().max()) for gap in gaps)


def _optimum(name: str) -> tuple[float, float]:
    if name not in PROMISES:
        return math.nan, math.nan
    whole = distance(PROMISES[name](), 150)
    if name in NEEDS_EVERYBODY:
        return whole, math.nan
    return whole, distance(HALF.get(name, PROMISES[name])(), 250, Uniform(count=3))


def _traffic(algorithm: Algorithm, setting: Setting) -> tuple[float, float]:
    """Count what is sent in the second round per client, in models."""
    made = trainer(algorithm, setting)
    made.round()
    result = made.round()
    size = made.task.size * len(result.ids)
    return result.floats_down / size, result.floats_up / size
