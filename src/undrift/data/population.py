"""Who could take part in a round, who does, and what chooses between them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from undrift.errors import ConfigError

Ids = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Population:
    """The clients enrolled in a round that have something to train on, and how much of it.

    >>> Population.of([30, 0, 10]).ids
    array([0, 2])
    """

    ids: Ids  # [N] ascending
    sizes: Ids  # [N] examples of each, at least one

    def __post_init__(self) -> None:
        if self.ids.ndim != 1 or self.ids.shape != self.sizes.shape:
            raise ConfigError(
                f"a population needs one size per id, got {self.ids.shape} and {self.sizes.shape}"
            )
        if (np.diff(self.ids) <= 0).any():
            raise ConfigError("a population's ids must ascend without repetition; sort them")

    @classmethod
    def of(cls, sizes: ArrayLike, ids: ArrayLike | None = None) -> Population:
        """Enrol clients by their sizes, leaving out those without an example."""
        held = np.asarray(sizes, dtype=np.int64)
        names = np.arange(len(held)) if ids is None else np.asarray(ids, dtype=np.int64)
        if names.shape != held.shape:
            raise ConfigError(f"one size per id: got {held.shape} sizes, {names.shape} ids")
        return cls(names[held > 0], held[held > 0])

    @property
    def count(self) -> int:
        """Count the enrolled clients."""
        return len(self.ids)

    @cached_property
    def total(self) -> int:
        """Count their examples."""
        return int(self.sizes.sum())

    @property
    def mean_size(self) -> float:
        """Tell the average number of examples; 0 of nobody."""
        return self.total / max(1, self.count)


class Cohort(NamedTuple):
    """The clients of one round, and the probability with which each came to be in it."""

    ids: Ids  # [m] ascending
    probability: Floats  # [m]


class Sampler(Protocol):
    """Any object with these two methods chooses clients.

    `probability` gives Prob(i in S) for every enrolled client, in the order of `population.ids`;
    rules that weigh by its inverse stay unbiased only if it is true.
    """

    def sample(self, seed: int, round: int, population: Population) -> Cohort:
        """Choose the clients of a round; the same arguments give the same cohort."""

    def probability(self, population: Population) -> Floats:
        """Tell for all enrolled clients how probable it is that they are chosen."""
