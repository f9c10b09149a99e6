"""One row per algorithm: what holds, and how exactly."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from undrift import rules as r
from undrift.core.algorithm import Algorithm
from undrift.data import Uniform
from undrift.errors import UndriftError, unknown_name
from undrift.rules.named import catalogue
from undrift.testing.compare import TOLERANCE
from undrift.testing.world import numbers
from undrift.verify.block_cases import BLOCK_CASES
from undrift.verify.cases import CASES
from undrift.verify.identities import HALF_LABELLED, IDENTITIES, LR
from undrift.verify.worlds import Setting, distance, trainer

LONGHAND = 1e-12  # what counts as equal to the loop in numpy
OPTIMUM = 1e-8  # what counts as reaching it
NEEDS_EVERYBODY = ("vrlsgd", "fedpd")
ONE_STEP = ("qfedsgd",)

# Who promises to reach the optimum of heterogeneous quadratics, and how it is set there.
PROMISES: dict[str, Callable[[], Algorithm]] = {
    "scaffold": lambda: r.scaffold(0.2),
    "scaffold_m": lambda: r.scaffold_m(0.2),
    "vrlsgd": lambda: r.vrlsgd(0.2),
    "feddyn": lambda: r.feddyn(0.2, alpha=1.0),
    "fedadmm": lambda: r.fedadmm(0.2, rho=1.0),
    "fedpd": lambda: r.fedpd(0.2, rho=1.0),
    "feddc": lambda: r.feddc(0.2, alpha=0.1),
}
# With half of the clients FedADMM's theory wants a server step of cohort over population.
HALF: dict[str, Callable[[], Algorithm]] = {
    "fedadmm": lambda: r.fedadmm(0.2, rho=1.0, server_lr=0.5),
}
BUILDS: dict[str, Callable[[], Algorithm]] = {
    "fedvra_u": lambda: r.fedvra_u(LR, objective=HALF_LABELLED),
}


class Verdict(NamedTuple):
    """What was measured of one algorithm; NaN where nothing is promised."""

    name: str
    identities: tuple[tuple[str, float, bool], ...]  # (what, difference, holds)
    longhand: float  # the worst of its cases
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
            and self.longhand <= LONGHAND
            and self.engines <= TOLERANCE
            and all(v <= OPTIMUM for v in near)
        )


def names() -> list[str]:
    """List what can be verified: every algorithm, ComFed's cells by their own names."""
    return list(catalogue())


def check_names(only: Sequence[str]) -> list[str]:
    """Take the names that were asked for, or all."""
    known = names()
    for name in only:
        if name not in known:
            raise unknown_name("algorithm to verify", name, known, "verify")
    return list(dict.fromkeys(only)) or known


def verify(only: Sequence[str] = ()) -> Iterator[Verdict]:
    """Measure algorithms on this machine, one after the other."""
    return map(verdict, check_names(only))


def verdict(name: str) -> Verdict:
    """Measure one algorithm; what is refused on the way becomes its problem."""
    try:
        algorithm = BUILDS.get(name, lambda: catalogue()[name].build(lr=LR))()
        setting = Setting(everybody=name in NEEDS_EVERYBODY, equal_steps=False)
        if name in ONE_STEP:
            setting = Setting(steps=1, full_batch=True)
        return Verdict(
            name,
            _identities(name),
            _longhand(name),
            _engines(algorithm, setting),
            *_optimum(name),
            *_traffic(algorithm, setting),
        )
    except UndriftError as error:
        nothing = math.nan
        return Verdict(name, (), nothing, nothing, nothing, nothing, nothing, nothing, str(error))


def _identities(name: str) -> tuple[tuple[str, float, bool], ...]:
    found = [(i.says, i.difference(), i.limit) for i in IDENTITIES if i.of == name]
    return tuple((says, gap, gap <= limit) for says, gap, limit in found)


def _longhand(name: str) -> float:
    blocks = [case.difference() for case in BLOCK_CASES if case.of == name]
    return max(blocks + [case.difference() for case in CASES if case.of == name])


def _engines(algorithm: Algorithm, setting: Setting) -> float:
    """Find the largest difference between the engines in any number after 3 rounds."""
    ends = []
    for engine in ("reference", "vectorised"):
        made = trainer(algorithm, setting, engine)
        made.run(3)
        ends.append(numbers(made))
    gaps = [(ends[0][n] - ends[1][n]).abs() for n in ends[0] if ends[0][n].numel()]
    return max(float(gap.double().max().nan_to_num(nan=math.inf)) for gap in gaps)


def _optimum(name: str) -> tuple[float, float]:
    if name not in PROMISES:
        return math.nan, math.nan
    whole = distance(PROMISES[name](), 80)
    if name in NEEDS_EVERYBODY:
        return whole, math.nan
    return whole, distance(HALF.get(name, PROMISES[name])(), 160, Uniform(count=3))


def _traffic(algorithm: Algorithm, setting: Setting) -> tuple[float, float]:
    """Count what is sent in the second round per client, in models."""
    made = trainer(algorithm, setting)
    made.round()
    result = made.round()
    size = made.task.size * len(result.ids)
    return result.floats_down / size, result.floats_up / size
