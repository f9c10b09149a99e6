"""What a few seeds can tell: means, spreads, paired differences with their intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from statistics import mean, stdev
from typing import NamedTuple

CONFIDENCE = 0.95


class Spread(NamedTuple):
    """Mean and standard deviation over seeds."""

    mean: float
    std: float  # NaN for a single seed


class Difference(NamedTuple):
    """How much one variant differs from another, seed by seed."""

    mean: float
    low: float  # of the confidence interval; NaN for a single seed
    high: float
    pairs: int

    @property
    def clear(self) -> bool:
        """Whether the interval excludes zero."""
        return self.low > 0 or self.high < 0


def spread(values: Sequence[float]) -> Spread:
    """Summarise one number per seed.

    >>> spread([1.0, 2.0, 3.0])
    Spread(mean=2.0, std=1.0)
    """
    if not values or any(math.isnan(v) for v in values):
        return Spread(math.nan, math.nan)
    return Spread(mean(values), stdev(values) if len(values) > 1 else math.nan)


def mean_of_curves(curves: Sequence[Mapping[int, float]]) -> dict[int, Spread]:
    """Average curves, one a seed, in the rounds that all of them have.

    >>> mean_of_curves([{1: 0.2, 2: 0.4}, {1: 0.4}])[1].mean
    0.30000000000000004
    """
    shared = set.intersection(*map(set, curves)) if curves else set()
    return {r: _moments([c[r] for c in curves]) for r in sorted(shared)}


def _moments(values: Sequence[float]) -> Spread:
    """Summarise without an overflow on the way."""
    mean = math.fsum(v / len(values) for v in values)
    if len(values) < 2:
        return Spread(mean, math.nan)
    return Spread(mean, math.hypot(*(v - mean for v in values)) / math.sqrt(len(values) - 1))


def paired_difference(
    these: Sequence[float], those: Sequence[float], grain: float = 0.0
) -> Difference:
    """Compare pair by pair: a Student interval for the mean of the differences.

    `grain` is the step in which the numbers can change (one test example, for an accuracy): their
    spread counts as at least that, so that equal differences of coarse numbers prove nothing.

    >>> made = paired_difference([2.0, 3.0, 4.0], [1.0, 1.0, 1.0])
    >>> round(made.mean, 3), round(made.low, 3), round(made.high, 3)
    (2.0, -0.484, 4.484)
    """
    gaps = [a - b for a, b in zip(these, those, strict=True)]
    found = spread(gaps)
    if math.isnan(found.std):
        return Difference(found.mean, math.nan, math.nan, len(gaps))
    std = max(found.std, grain)
    half = student_quantile(0.5 + CONFIDENCE / 2, len(gaps) - 1) * std / math.sqrt(len(gaps))
    return Difference(found.mean, found.mean - half, found.mean + half, len(gaps))


@cache
def student_quantile(chance: float, freedom: int) -> float:
    """Invert Student's distribution for a chance above 1/2.

    >>> round(student_quantile(0.975, 2), 4), round(student_quantile(0.975, 30), 4)
    (4.3027, 2.0423)
    """
    return _root(lambda t: _student(t, freedom) - chance, 0.0, 1e6)


def _student(t: float, freedom: int) -> float:
    """P(T <= t) for t >= 0, by its finite series in the angle atan(t / sqrt(freedom))."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine, even = math.cos(angle) ** 2, freedom % 2 == 0
    term = math.sin(angle) if even else math.sin(angle) * math.cos(angle)
    total = term if even else (term if freedom > 1 else 0.0)
    for k in range(1, (freedom - 1 if not even else freedom) // 2):
        term *= cosine * ((2 * k - 1) / (2 * k) if even else 2 * k / (2 * k + 1))
        total += term
    between = total if even else 2 / math.pi * (angle + total)
    return 0.5 + between / 2


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < 0 else (low, middle)
    return (low + high) / 2


def median(values: Sequence[float]) -> float:
    """Give the middle value; of an even number the lower one, so that it really occurred."""
    return sorted(values)[(len(values) - 1) // 2]
