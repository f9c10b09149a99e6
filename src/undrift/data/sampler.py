"""Samplers: which enrolled clients take part in a round, and with which probability.

A sample is a function of (seed, round, population) alone: calls do not follow one another, so a
resumed run and every engine see the same cohorts.  Letters: N enrolled clients, m sampled ones.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from undrift.core.random import bits, host_fold, uniform
from undrift.core.tree import record, static
from undrift.data.checks import check_whole
from undrift.data.population import Cohort, Floats, Population, Sampler
from undrift.errors import ConfigError, EmptyRoundError

__all__ = [
    "Bernoulli",
    "Cohort",
    "Everyone",
    "Explicit",
    "Population",
    "Sampler",
    "Sequential",
    "Uniform",
    "Weighted",
]


def _cohort(sampler: Sampler, population: Population, chosen: NDArray[Any]) -> Cohort:
    """Take the chosen positions (or mask) of the population."""
    picked = np.sort(np.arange(population.count)[chosen])
    return Cohort(population.ids[picked], sampler.probability(population)[picked])


def _check_populated(population: Population) -> None:
    if not population.count:
        raise EmptyRoundError("no enrolled client has an example to train on in this round")


def _check_enough(owner: str, count: int, population: Population) -> None:
    _check_populated(population)
    if count > population.count:
        raise ConfigError(
            f"{owner}.count = {count} but only {population.count} clients are enrolled; "
            "lower the count or sample by a fraction"
        )


def _uniforms(population: Population, seed: int, *words: int | str) -> Floats:
    # Keyed by the id, not by the place: who else has enrolled does not change a client's number.
    drawn: Floats = uniform(host_fold(seed, *words), torch.from_numpy(population.ids)).numpy()
    return drawn


def _share(default: Any) -> Any:
    return field(default=default, metadata={"static": True, "range": (0.0, 1.0, "(]")})


@record
class Uniform:
    """Sample without replacement: `count` clients, or max(1, round(fraction * N)).

    >>> Uniform(fraction=0.1).sample(0, 0, Population.of([5] * 30)).ids.shape
    (3,)
    """

    count: int | None = static(default=None)
    fraction: float | None = _share(None)

    def __post_init__(self) -> None:
        if (self.count is None) == (self.fraction is None):
            raise ConfigError("Uniform needs either a count or a fraction, not both or none")
        if self.count is not None:
            check_whole("Uniform.count", self.count)

    def size(self, population: Population) -> int:
        """Tell how many clients are sampled from this population."""
        if self.fraction is not None:
            _check_populated(population)
            return max(1, round(self.fraction * population.count))
        count = int(self.count or 0)
        _check_enough("Uniform", count, population)
        return count

    def sample(self, seed: int, round: int, population: Population) -> Cohort:
        size = self.size(population)
        ranks = bits(host_fold(seed, "cohort", round), torch.from_numpy(population.ids)).numpy()
        return _cohort(self, population, np.argpartition(ranks, size - 1)[:size])

    def probability(self, population: Population) -> Floats:
        return np.full(population.count, self.size(population) / population.count)


@record
class Bernoulli:
    """Let every client take part by its own coin, and throw again while nobody does.

    >>> float(Bernoulli(0.5).probability(Population.of([5, 5]))[0])
    0.6666666666666666
    """

    fraction: float = _share(0.1)

    def _nonempty(self, population: Population) -> float:
        _check_populated(population)
        if self.fraction == 1:
            return 1.0
        # 1 - (1 - C)^N without cancellation for a small C
        return -math.expm1(population.count * math.log1p(-self.fraction))

    def sample(self, seed: int, round: int, population: Population) -> Cohort:
        if self._nonempty(population) < 1e-4:
            raise ConfigError(
                f"Bernoulli.fraction = {self.fraction} leaves a round of {population.count} "
                "clients empty in nearly every throw; raise it"
            )
        for attempt in itertools.count():
            chosen = _uniforms(population, seed, "cohort", round, attempt) < self.fraction
            if chosen.any():
                break
        return _cohort(self, population, chosen)

    def probability(self, population: Population) -> Floats:
        return np.full(population.count, self.fraction / self._nonempty(population))


@record
class Sequential:
    """Take the clients in turns: no chance at all, good for tests.

    Its probability is the share of rounds in which a client takes part, m / N.

    >>> [Sequential(2).sample(0, r, Population.of([5, 5, 5])).ids.tolist() for r in range(3)]
    [[0, 1], [0, 2], [1, 2]]
    """

    count: int = static(default=1)

    def __post_init__(self) -> None:
        check_whole("Sequential.count", self.count)

    def sample(self, seed: int, round: int, population: Population) -> Cohort:
        _check_enough("Sequential", self.count, population)
        turns = np.arange(round * self.count, (round + 1) * self.count) % population.count
        return _cohort(self, population, turns)

    def probability(self, population: Population) -> Floats:
        _check_enough("Sequential", self.count, population)
        return np.full(population.count, self.count / population.count)


@record
class Weighted:
    """Sample systematically, `count` clients, with inclusion probabilities m * w_i.

    `by` is "size" or one weight per client id.  What exceeds 1 is clipped and redistributed.
    Clients are lined up in a fresh random order every round (Hartley and Rao 1962), so neighbours
    do not exclude each other for ever.

    >>> Weighted(count=2).probability(Population.of([80, 10, 10]))
    array([1. , 0.5, 0.5])
    """

    count: int = static(default=1)
    by: Literal["size"] | Sequence[float] = static(default="size")

    def __post_init__(self) -> None:
        check_whole("Weighted.count", self.count)
        if isinstance(self.by, str):
            if self.by != "size":
                raise ConfigError(f'Weighted.by must be "size" or weights, got {self.by!r}')
            return
        weights = tuple(float(w) for w in self.by)
        if not all(math.isfinite(w) and w >= 0 for w in weights):
            raise ConfigError("Weighted.by must hold finite weights that are not negative")
        object.__setattr__(self, "by", weights)

    def _weights(self, population: Population) -> Floats:
        _check_enough("Weighted", self.count, population)
        if isinstance(self.by, str):
            return population.sizes.astype(np.float64)
        if population.ids[-1] >= len(self.by):
            raise ConfigError(
                f"Weighted.by has {len(self.by)} weights but client {population.ids[-1]} is "
                "enrolled; give one weight per client id"
            )
        return np.asarray(self.by)[population.ids]

    def probability(self, population: Population) -> Floats:
        weights = self._weights(population)
        if np.count_nonzero(weights) < self.count:
            raise ConfigError(
                f"Weighted.count = {self.count} but only {np.count_nonzero(weights)} enrolled "
                "clients have a positive weight; lower the count or raise weights"
            )
        return _inclusion(weights, self.count)

    def sample(self, seed: int, round: int, population: Population) -> Cohort:
        chance = self.probability(population)
        chosen = chance == 1
        open_to = np.flatnonzero((chance > 0) & ~chosen)
        line = open_to[np.argsort(_uniforms(population, seed, "line", round)[open_to])]
        start = float(uniform(host_fold(seed, "cohort", round), 0))
        chosen[line[_ticks(chance[line], self.count - int(chosen.sum()), start)]] = True
        return _cohort(self, population, chosen)


def _inclusion(weights: Floats, count: int) -> Floats:
    """Scale weights to probabilities that sum to `count`, clipping at 1 until none exceeds it."""
    weights = weights / weights.max()  # so that no sum overflows
    chance, sure = np.zeros(len(weights)), np.zeros(len(weights), dtype=bool)
    while not sure.all():
        rest = np.where(sure, 0.0, weights)
        total = rest.sum()
        chance = (count - sure.sum()) * rest / total if total > 0 else rest
        # A hair below 1 is 1 as well: rounding must not pick a client twice.
        over = chance >= 1 - 1e-9
        if not over.any():
            break
        sure |= over
    return np.where(sure, 1.0, chance)


def _ticks(chance: Floats, count: int, start: float) -> NDArray[np.bool_]:
    """Lay the chances end to end and mark those that hold start, start + 1, ..., `count` times."""
    if not count:
        return np.zeros(len(chance), dtype=bool)
    ends = np.cumsum(chance)
    ends *= count / ends[-1]
    ends[-1] = count  # exactly, so that exactly `count` ticks are passed
    passed = np.ceil(ends - start)
    return np.diff(passed, prepend=0.0) > 0


@record
class Explicit:
    """Replay given participants, one list of client ids per round.

    `chances` are the probabilities by client id, if the lists were drawn at random; 1 otherwise.

    >>> Explicit([[2, 0], [1]]).sample(0, 0, Population.of([5, 5, 5])).ids
    array([0, 2])
    """

    rounds: Sequence[Sequence[int]] = static()
    chances: Sequence[float] | None = static(default=None)

    def __post_init__(self) -> None:
        rounds = tuple(tuple(int(i) for i in ids) for ids in self.rounds)
        for number, ids in enumerate(rounds):
            if not ids or len(set(ids)) < len(ids):
                raise ConfigError(
                    f"Explicit.rounds[{number}] = {list(ids)} must name each client once, "
                    "and at least one"
                )
        object.__setattr__(self, "rounds", rounds)
        if self.chances is not None:
            chances = tuple(float(p) for p in self.chances)
            if not all(0 < p <= 1 for p in chances):
                raise ConfigError("Explicit.chances must lie in (0, 1]")
            object.__setattr__(self, "chances", chances)

    def sample(self, seed: int, round: int, population: Population) -> Cohort:
        _check_populated(population)
        if not 0 <= round < len(self.rounds):
            raise ConfigError(
                f"Explicit.rounds lists {len(self.rounds)} rounds; add a list for round {round}"
            )
        wanted = np.asarray(self.rounds[round], dtype=np.int64)
        unknown = np.setdiff1d(wanted, population.ids)
        if len(unknown):
            raise ConfigError(
                f"Explicit.rounds[{round}] names client {unknown[0]}, which is not enrolled or "
                "has no examples; take it off the list"
            )
        return _cohort(self, population, np.searchsorted(population.ids, wanted))

    def probability(self, population: Population) -> Floats:
        if self.chances is None:
            return np.ones(population.count)
        if population.count and population.ids[-1] >= len(self.chances):
            raise ConfigError(
                f"Explicit.chances has {len(self.chances)} entries but client "
                f"{population.ids[-1]} is enrolled; give one per client id"
            )
        return np.asarray(self.chances)[population.ids]


@record
class Everyone:
    """Full participation.

    >>> Everyone().sample(0, 0, Population.of([5, 5, 5])).probability
    array([1., 1., 1.])
    """

    def sample(self, seed: int, round: int, population: Population) -> Cohort:
        _check_populated(population)
        return _cohort(self, population, np.arange(population.count))

    def probability(self, population: Population) -> Floats:
        return np.ones(population.count)
