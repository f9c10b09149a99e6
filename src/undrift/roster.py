"""Who is enrolled, who takes part in a round, and on which batches."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from typing import Any

import numpy as np
import torch
from torch import Tensor

from undrift.core.random import Seeds
from undrift.core.rule import ClientInfo
from undrift.data import Cohort, Federation, LocalWork, Population, Sampler
from undrift.engines.engine import Assignment
from undrift.engines.sums import summing_order
from undrift.errors import ConfigError, DataError

Ids = np.ndarray[Any, np.dtype[np.int64]]


class Roster:
    """The server's record of its clients."""

    def __init__(
        self,
        federation: Federation,
        sampler: Sampler,
        work: LocalWork,
        seeds: Seeds,
        dtype: torch.dtype,
        enrolled: Iterable[int] | None,
    ) -> None:
        self.federation, self.sampler, self.work = federation, sampler, work
        self.seeds, self.dtype = seeds, dtype
        self.enrolled = self.valid(range(federation.num_clients) if enrolled is None else enrolled)

    @property
    def count(self) -> int:
        """Count the clients that are enrolled."""
        return len(self.enrolled)

    def known(self, ids: Iterable[int]) -> set[int]:
        """Refuse ids of clients that do not exist."""
        try:
            made = {index(i) for i in ids}
        except TypeError as error:
            raise ConfigError(f"clients are given as a list of ids, got {ids!r}") from error
        wrong = sorted(i for i in made if not 0 <= i < self.federation.num_clients)
        if wrong:
            last = self.federation.num_clients - 1
            raise DataError(f"no client {wrong[0]}: ids run from 0 to {last}")
        return made

    def valid(self, ids: Iterable[int]) -> Ids:
        """Make a population of these clients."""
        made = np.array(sorted(self.known(ids)), dtype=np.int64)
        if not len(made):
            raise ConfigError("nobody is enrolled: a federation needs at least one client")
        return made

    def cohort(self, round: int) -> Assignment:
        """Choose the cohort of a round and its batches."""
        available = self.federation.available(round)
        population = Population.of(available[self.enrolled].numpy(), self.enrolled)
        drawn = self._drawn(round, population)
        chance = dict(zip(drawn.ids.tolist(), drawn.probability.tolist(), strict=True))
        ids = summing_order(list(chance))
        clients, sizes = torch.tensor(ids, dtype=torch.int64), available[ids]
        device = self.federation.device
        plan = self.work.plan(self.seeds.run, round, clients, sizes, device)
        info = self._info(clients, sizes, [chance[i] for i in ids], available)
        return Assignment(clients, info, plan.order, plan.steps.cpu(), sizes, self.seeds.run)

    def _drawn(self, round: int, population: Population) -> Cohort:
        """Ask the sampler, and check what somebody else's sampler answers."""
        drawn = self.sampler.sample(self.seeds.run, round, population)
        ids = np.asarray(drawn.ids)
        strangers = np.setdiff1d(ids, population.ids)
        if not len(ids) or len(np.unique(ids)) < len(ids) or len(strangers):
            raise ConfigError(
                f"{type(self.sampler).__name__}.sample gave clients {ids.tolist()} in round "
                f"{round}: they must be at least one, different, and among those enrolled with data"
            )
        return drawn

    def lookers(self, round: int, ids: Iterable[int] | None = None) -> Assignment:
        """List clients (all that are enrolled) that have data, without any local work."""
        available = self.federation.available(round)
        wanted = self.enrolled.tolist() if ids is None else ids
        names = summing_order([i for i in wanted if available[i] > 0])
        clients, sizes = torch.tensor(names, dtype=torch.int64), available[names]
        info = self._info(clients, sizes, [1.0] * len(names), available)
        order = torch.zeros(len(names), 0, 0, dtype=torch.int64, device=self.federation.device)
        return Assignment(clients, info, order, torch.zeros_like(clients), sizes, self.seeds.run)

    def longest(self) -> Assignment | None:
        """List who may be sampled at all, each with the most steps it may ever take.

        None where somebody else's sampler or work does not tell.
        """
        if not (hasattr(self.sampler, "probability") and hasattr(self.work, "most_steps")):
            return None
        who, available = self.lookers(0), self.federation.available(0)
        population = Population.of(available[self.enrolled].numpy(), self.enrolled)
        chances = dict(zip(population.ids, self.sampler.probability(population), strict=True))
        asked = torch.tensor([chances[i] > 0 for i in who.ids])
        info = self._info(who.clients, who.sizes, [chances[i] for i in who.ids], available)
        steps = self.work.most_steps(self.federation.sizes[who.clients].cpu())
        return who._replace(info=info, steps=steps).part(asked.nonzero().flatten())

    def _info(
        self, clients: Tensor, sizes: Tensor, chances: list[float], available: Tensor
    ) -> ClientInfo:
        """Tell what the record says of each client of a cohort."""
        held, device = available[self.enrolled].double(), self.federation.device

        def numbers(values: Any) -> Tensor:
            made = torch.as_tensor(values, dtype=torch.float64).expand(len(clients))
            return made.to(device, self.dtype)

        share, mean = numbers(sizes / held.sum()), numbers(held.mean())
        return ClientInfo(clients.to(device), numbers(sizes), numbers(chances), share, mean)
