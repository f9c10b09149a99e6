"""Who is enrolled, who takes part in a round, and on which batches."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from typing import Any

import numpy as np
import torch
from torch import Tensor

from undrift.arguments import able
from undrift.core.random import Seeds
from undrift.core.rule import ClientInfo
from undrift.core.transfer import send
from undrift.data import (
    Cohort,
    Everyone,
    Explicit,
    Federation,
    LocalWork,
    Population,
    Sampler,
    Work,
)
from undrift.engines.engine import Assignment
from undrift.engines.sums import summing_order
from undrift.errors import ConfigError, DataError
from undrift.identity import same

Ids = np.ndarray[Any, np.dtype[np.int64]]


class Roster:
    """The server's record of its clients."""

    def __init__(
        self,
        federation: Federation,
        sampler: Sampler | None,  # everyone
        work: LocalWork | None,  # an epoch of the usual batches
        seeds: Seeds,
        dtype: torch.dtype,
        enrolled: Iterable[int] | None,
    ) -> None:
        self.federation = federation
        self.sampler = able("sampler", Everyone() if sampler is None else sampler, "sample")
        self.work = able("work", Work() if work is None else work, "plan")
        self.seeds, self.dtype = seeds, dtype
        self._known: tuple[Ids, Population] | None = None
        # a cohort and what was told of it, by whether it was told on the device
        self._last: dict[bool, tuple[Any, ClientInfo]] = {}
        everybody = np.arange(federation.num_clients)
        self.enrolled = everybody if enrolled is None else self.valid(enrolled)

    @property
    def count(self) -> int:
        """Give N, the enrolled clients that hold examples; the others are in no formula."""
        return self._population(0).count

    def holding(self, ids: Iterable[int]) -> list[int]:
        """Sort ids and leave out clients without an example."""
        made = np.array(sorted(ids), dtype=np.int64)
        held: list[int] = made[self.federation.sizes.numpy()[made] > 0].tolist()
        return held

    def draws_like(self, other: Roster) -> bool:
        """Whether both choose the same cohorts with the same work, round by round."""
        mine, theirs = self.federation, other.federation
        return (
            (self.seeds.run, self.dtype, mine.device)
            == (other.seeds.run, other.dtype, theirs.device)
            and torch.equal(mine.sizes, theirs.sizes)
            and np.array_equal(self.enrolled, other.enrolled)
            and same(self.sampler, other.sampler)
            and same(self.work, other.work)
            and same(mine.arrival, theirs.arrival)
        )

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

    @property
    def orders_late(self) -> bool:
        """Whether engines can make the order of batches themselves, chunk by chunk."""
        return isinstance(self.work, Work)

    def cohort(self, round: int, *, ordered: bool = True) -> Assignment:
        """Choose the cohort of a round and its batches; unless `ordered`, only how many."""
        available = self.federation.available(round)
        drawn = self._drawn(round, self._population(round))
        chance = dict(zip(drawn.ids.tolist(), drawn.probability.tolist(), strict=True))
        ids = summing_order(list(chance))
        clients = torch.tensor(ids, dtype=torch.int64)
        sizes, device, seed = available[clients], self.federation.device, self.seeds.run
        if ordered:
            order, steps = self.work.plan(seed, round, clients, sizes, device)
        else:
            steps = self.work.steps_of(seed, round, clients, sizes)
            order = torch.empty(len(ids), 0, 0, dtype=torch.int64, device=device)
        told = self._info(clients, sizes, [chance[i] for i in ids], round, there=ordered)
        return Assignment(clients, told, order, steps.cpu(), sizes, seed, round, self.work)

    def always_alone(self) -> bool:
        """Whether every cohort is one client.

        Chances sum to the mean size of a cohort, which is 1 only so: no cohort is empty.  False
        where somebody else's sampler does not tell them.
        """
        if isinstance(self.sampler, Explicit):  # its chances may be left out
            return all(len(ids) == 1 for ids in self.sampler.rounds)
        if not hasattr(self.sampler, "probability"):
            return False
        return float(np.sum(self.sampler.probability(self._population(0)))) <= 1 + 1e-9

    def _population(self, round: int) -> Population:
        """Tell who has examples in a round; the same object as long as nothing changes."""
        fixed = self.federation.arrival is None
        if not (fixed and self._known is not None and self._known[0] is self.enrolled):
            available = self.federation.available(round)[torch.from_numpy(self.enrolled)]
            self._known = (self.enrolled, Population.of(available.numpy(), self.enrolled))
        return self._known[1]

    def _drawn(self, round: int, population: Population) -> Cohort:
        """Ask the sampler, and check what somebody else's sampler answers."""
        drawn = self.sampler.sample(self.seeds.run, round, population)
        ids = np.asarray(drawn.ids)
        places = np.searchsorted(population.ids, ids).clip(max=population.count - 1)
        strange = not np.array_equal(population.ids[places], ids)
        if not len(ids) or len(set(ids.tolist())) < len(ids) or strange:
            raise ConfigError(
                f"{type(self.sampler).__name__}.sample gave clients {ids.tolist()} in round "
                f"{round}: they must be at least one, different, and among those enrolled with data"
            )
        return drawn

    def lookers(self, round: int, ids: Iterable[int] | None = None) -> Assignment:
        """List clients (all that are enrolled) that have data, without any local work."""
        available = self.federation.available(round)
        wanted = self.enrolled if ids is None else np.array(list(ids), dtype=np.int64)
        names = summing_order(wanted[available.numpy()[wanted] > 0].tolist())
        clients, sizes = torch.tensor(names, dtype=torch.int64), available[names]
        info = self._info(clients, sizes, [1.0] * len(names), round)
        order = torch.zeros(len(names), 0, 0, dtype=torch.int64, device=self.federation.device)
        steps = torch.zeros_like(clients)
        return Assignment(clients, info, order, steps, sizes, self.seeds.run, round)

    def longest(self) -> Assignment | None:
        """List who may be sampled at all, each with the most steps it may ever take.

        None where somebody else's sampler or work does not tell.
        """
        if not (hasattr(self.sampler, "probability") and hasattr(self.work, "most_steps")):
            return None
        who, population = self.lookers(0), self._population(0)
        chances = dict(zip(population.ids, self.sampler.probability(population), strict=True))
        asked = torch.tensor([chances[i] > 0 for i in who.ids])
        info = self._info(who.clients, who.sizes, [chances[i] for i in who.ids], 0)
        steps = self.work.most_steps(self.federation.sizes[who.clients].cpu())
        return who._replace(info=info, steps=steps).part(asked.nonzero().flatten())

    def _info(
        self, clients: Tensor, sizes: Tensor, chances: list[float], round: int, there: bool = True
    ) -> ClientInfo:
        """Tell what the record says of each client of a cohort, `there` on the device."""
        device, population = self.federation.device, self._population(round)
        same = (self._known, clients.tolist(), sizes.tolist(), chances)
        last, told = self._last.get(there, ((None,), None))
        if told is not None and last[0] is same[0] and last[1:] == same[1:]:
            return told  # where everybody takes part nothing new is sent to a device
        mean = torch.full((len(clients),), population.mean_size, dtype=torch.float64)
        chance = torch.tensor(chances, dtype=torch.float64)
        numbers = torch.stack([sizes.double(), chance, sizes.double() / population.total, mean])
        if there:  # one transfer for all of them
            info = ClientInfo(send(clients, device), *send(numbers.to(self.dtype), device))
        else:
            info = ClientInfo(clients, *numbers.to(self.dtype))
        self._last[there] = (same, info)
        return info
