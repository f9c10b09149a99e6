"""What is known of a round: about to be trained, under way, done, judged.

Letter: C clients of a round.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from undrift.core.algorithm import Row, Server
from undrift.core.tree import Tree
from undrift.engines.engine import Assignment
from undrift.engines.traffic import Traffic

log = logging.getLogger("undrift")

Numbers = NDArray[np.float64]


class RoundResult(NamedTuple):
    """What is known after a round."""

    round: int  # 1 after the first
    ids: list[int]  # who was asked
    skipped: list[int]  # who was left out: a non-finite update, or nothing to train on
    loss: float  # mean over participants of their mean local loss
    scores: dict[str, float]
    floats_down: int  # sent to the cohort, in all
    floats_up: int
    seconds: float
    steps: int  # local steps of all clients together


class Opened(NamedTuple):
    """A round that is about to be trained."""

    server: Server
    cohort: Assignment
    everyone: Tree
    sent: Traffic  # before it
    holders: frozenset[int]
    started: float


class Advance(NamedTuple):
    """A round that is done, or still under way on a device."""

    round: int
    ids: list[int]
    rows: Row
    sent: Traffic
    started: float

    def result(self) -> RoundResult:
        """Read what is known of it; waits for the device."""
        return Reading([self]).results()[0]

    def told(self) -> list[Tensor]:
        """Give what is read of it, one number for each client."""
        rows = self.rows
        return [rows.accepted, rows.steps, rows.loss, *rows.scores.values()]

    def result_of(self, told: Numbers, at: float) -> RoundResult:
        """Make the result of a round in which somebody was left out, read at some time."""
        accepted, steps, *values = told
        kept = accepted != 0
        skipped = sorted(i for i, ok in zip(self.ids, kept.tolist(), strict=True) if not ok)
        why = "no report, not finite, or no batch to train on"
        log.warning("round %d: left out clients %s (%s)", self.round, skipped, why)
        means = [float(v[kept].mean()) if kept.any() else math.nan for v in values]
        return self.made(skipped, float(steps.sum()), means, at)

    def made(self, skipped: list[int], steps: float, means: list[float], at: float) -> RoundResult:
        """Make the result of means over clients, of the loss and of scores."""
        loss, *rest = means
        scores = dict(zip(self.rows.scores, rest, strict=True))
        seconds = at - self.started
        return RoundResult(
            self.round, self.ids, skipped, loss, scores, *self.sent, seconds, int(steps)
        )


class Fetch:
    """Numbers on their way to the host; what is queued on a device after them is not waited for."""

    def __init__(self, values: Tensor) -> None:
        self._values, self._here = values, None
        if values.is_cuda:
            place = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values = place.copy_(values, non_blocking=True)
            self._here = torch.cuda.Event()
            self._here.record(torch.cuda.current_stream(values.device))

    @property
    def waits(self) -> bool:
        """Whether a device sends them."""
        return self._here is not None

    def read(self) -> Tensor:
        """Give the numbers, once they are here."""
        if self._here is not None:
            self._here.synchronize()  # sync: what this object is for
        return self._values


def fetched(tensors: Sequence[Tensor]) -> Fetch:
    """Fetch tensors as one vector, in a type that holds all of their numbers."""
    return Fetch(torch.cat([v.detach().reshape(-1) for v in tensors]))


class Reading:
    """What some rounds tell, on its way to the host in one piece."""

    def __init__(self, rounds: Sequence[Advance]) -> None:
        self.rounds = list(rounds)
        self._told = [one.told() for one in self.rounds]
        self._fetch = fetched([v for told in self._told for v in told]) if rounds else None
        self._done = time.perf_counter()  # true where no device is at work

    def results(self) -> list[RoundResult]:
        """Give the results, once they are here."""
        if self._fetch is None:
            return []
        # in float64, whatever the device has: rounds are many, and numpy is quick with few numbers
        vector = self._fetch.read().double().numpy()
        at = time.perf_counter() if self._fetch.waits else self._done
        with np.errstate(all="ignore"):  # a loss may be infinite
            found = [one for some in self._alike(vector) for one in some.results(at)]
        if not self._fetch.waits:
            return found
        each = (at - self.rounds[0].started) / len(found)  # which took how long is not known
        return [one._replace(seconds=each) for one in found]

    def _alike(self, vector: Numbers) -> Iterator[Block]:
        """Part what was read into rounds in a row that tell alike."""
        begin = 0
        pairs = zip(self.rounds, self._told, strict=True)
        for (count, width), some in groupby(pairs, lambda pair: _shape(pair[1])):
            rounds = [one for one, _ in some]
            end = begin + len(rounds) * count * width
            yield Block(rounds, vector[begin:end].reshape(len(rounds), count, width))
            begin = end


class Block(NamedTuple):
    """Rounds with as many clients, and what they tell: [rounds, values, C]."""

    rounds: list[Advance]
    told: Numbers

    def results(self, at: float) -> list[RoundResult]:
        """Make the results of what was told, read at some time."""
        whole = (self.told[:, 0] != 0).all(1).tolist()
        steps, means = self.told[:, 1].sum(1).tolist(), self.told[:, 2:].mean(2).tolist()
        return [
            one.made([], steps[r], means[r], at) if whole[r] else one.result_of(self.told[r], at)
            for r, one in enumerate(self.rounds)
        ]


def _shape(told: Sequence[Tensor]) -> tuple[int, int]:
    """Tell how many numbers there are, and of how many clients."""
    return len(told), told[0].numel()


class Judged:
    """Means over examples, or still sums on a device."""

    def __init__(self, names: Sequence[str], sums: Tensor, count: int) -> None:
        self.names, self._count, self._fetch = list(names), count, Fetch(sums)

    def result(self) -> dict[str, float]:
        """Read the means; waits for the device."""
        sums = self._fetch.read().tolist()
        return {name: total / self._count for name, total in zip(self.names, sums, strict=True)}


class JudgedClients:
    """Means over the examples of each of some clients, or still sums on a device."""

    def __init__(self, ids: list[int], names: Sequence[str], sums: Tensor, sizes: Tensor) -> None:
        self.ids, self.names, self._sizes = ids, list(names), sizes
        self._fetch = Fetch(sums)  # [names, C]

    def each(self) -> dict[str, list[float]]:
        """Read every client's own means, in the order of `ids`; waits for the device."""
        means = self._fetch.read() / self._sizes
        return dict(zip(self.names, means.tolist(), strict=True))

    def result(self) -> dict[str, float]:
        """Read the means over all of their examples; waits for the device."""
        means = self._fetch.read().sum(1) / self._sizes.sum()
        return dict(zip(self.names, means.tolist(), strict=True))
