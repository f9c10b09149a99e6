"""What is known of a round: about to be trained, under way, done, judged.

Letter: C clients of a round.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from undrift.core.algorithm import Row, Server
from undrift.core.noise import Known
from undrift.engines.engine import Assignment
from undrift.engines.traffic import Traffic
from undrift.norms import FACTOR, bounds, middle

log = logging.getLogger("undrift")

Numbers = NDArray[np.float64]

TOGETHER = 32  # rounds of trainers that are read as one


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
    known: Known
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
    ended: float  # true where no device is at work
    warned: set[str]  # what the run has warned of already

    def result(self) -> RoundResult:
        """Read what is known of it; waits for the device."""
        return Reading([self]).results()[0]

    def told(self) -> list[Tensor]:
        """Give what is read of it, one number for each client."""
        rows = self.rows
        return [rows.accepted, rows.steps, rows.length, rows.loss, *rows.scores.values()]

    def result_of(self, told: Numbers) -> RoundResult:
        """Make the result of a round in which somebody was left out."""
        accepted, steps, lengths, *values = told
        kept = accepted != 0
        if kept.any():
            self.warn_of_long(np.where(kept, lengths, 0.0), steps)
        skipped = sorted(i for i, ok in zip(self.ids, kept.tolist(), strict=True) if not ok)
        why = "no report, not finite, or no batch to train on"
        log.warning("round %d: left out clients %s (%s)", self.round, skipped, why)
        with np.errstate(all="ignore"):  # a loss may be infinite
            means = [float(v[kept].mean()) if kept.any() else math.nan for v in values]
        return self.made(skipped, float(steps.sum()), means)

    def warn_of_long(self, lengths: Numbers, steps: Numbers) -> None:
        """Name, once in a run, the clients whose changes silos would be refused for."""
        if "long" in self.warned or not lengths.max() > FACTOR * lengths.min():
            return
        typical = middle(lengths)
        long = lengths > bounds(typical, steps)
        if not long.any():
            return
        self.warned.add("long")
        ids = sorted(np.array(self.ids)[long].tolist())
        log.warning(
            "round %d: the changes of clients %s are more than %g times as long as the cohort's "
            "median (%.4g): are their data and their learning rate sound? Of silos such reports "
            "are refused (limits.relative). This is said once", self.round, ids, FACTOR, typical,
        )  # fmt: skip

    def made(self, skipped: list[int], steps: float, means: list[float]) -> RoundResult:
        """Make the result of means over clients, of the loss and of scores."""
        loss, *rest = means
        scores = dict(zip(self.rows.scores, rest, strict=True))
        seconds = self.ended - self.started
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
    """Fetch a few tensors as one vector, in a type that holds all of their numbers."""
    return Fetch(torch.cat([v.detach().reshape(-1) for v in tensors]))


class Reading:
    """What some rounds tell, on its way to the host a few rounds at a time.

    While the last ones are still under way, results of the others are made.
    """

    def __init__(self, rounds: Iterable[Advance]) -> None:
        self._parts: list[list[Block]] = []
        left = iter(rounds)
        while some := list(islice(left, TOGETHER)):
            by_form: dict[Any, list[tuple[int, Advance]]] = {}
            for place, one in enumerate(some):
                by_form.setdefault(_form(one), []).append((place, one))
            self._parts.append([Block(alike) for alike in by_form.values()])

    def results(self) -> list[RoundResult]:
        """Give the results, once they are here."""
        found: list[RoundResult] = []
        for part in self._parts:
            placed = dict(pair for block in part for pair in block.results())
            found += [placed[place] for place in sorted(placed)]
        if not any(block.waits for part in self._parts for block in part):
            return found
        # which round took how long is not known
        first = min(one.started for part in self._parts[:1] for b in part for one in b.rounds)
        each = (time.perf_counter() - first) / len(found)
        return [one._replace(seconds=each) for one in found]


class Block:
    """Rounds that tell alike, as many values of as many clients, and where each stands."""

    def __init__(self, placed: Sequence[tuple[int, Advance]]) -> None:
        self._places = [place for place, _ in placed]
        self.rounds = [one for _, one in placed]
        # value by value: one launch puts those of one type together
        told = zip(*(one.told() for one in self.rounds), strict=True)
        columns = [torch.cat(column) for column in told]
        self._shape = (len(columns), len(self.rounds), -1)
        self._fetch = fetched(columns)

    @property
    def waits(self) -> bool:
        """Whether a device sends what they tell."""
        return self._fetch.waits

    def results(self) -> Iterator[tuple[int, RoundResult]]:
        """Make the results, once it is here."""
        # in float64, whatever the device has: rounds are many, and numpy is quick with few numbers
        told: Numbers = self._fetch.read().double().numpy().reshape(self._shape)
        with np.errstate(all="ignore"):  # a loss may be infinite
            whole = (told[0] != 0).all(1).tolist()
            steps, means = told[1].sum(1).tolist(), told[3:].mean(2).T.tolist()
        for r, (place, one) in enumerate(zip(self._places, self.rounds, strict=True)):
            if whole[r]:
                one.warn_of_long(told[2, r], told[1, r])
            yield place, one.made([], steps[r], means[r]) if whole[r] else one.result_of(told[:, r])


def _form(one: Advance) -> tuple[Any, ...]:
    """Tell which values a round tells, and of how many clients."""
    return tuple((v.dtype, v.numel()) for v in one.told())


class Judged:
    """Means over examples, or still sums on a device."""

    def __init__(self, names: Sequence[str], sums: Tensor) -> None:
        self.names = list(names)
        self._fetch = Fetch(sums)  # [2, names]: what is divided, and by what

    def result(self) -> dict[str, float]:
        """Read the means; waits for the device."""
        sums, weights = self._fetch.read()
        return dict(zip(self.names, (sums / weights).tolist(), strict=True))


class JudgedClients:
    """Means over the examples of each of some clients, or still sums on a device."""

    def __init__(self, ids: list[int], names: Sequence[str], sums: Tensor) -> None:
        self.ids, self.names = ids, list(names)
        self._fetch = Fetch(sums)  # [2, names, C]

    def each(self) -> dict[str, list[float]]:
        """Read every client's own means, in the order of `ids`; waits for the device."""
        sums, weights = self._fetch.read()
        return dict(zip(self.names, (sums / weights).tolist(), strict=True))

    def result(self) -> dict[str, float]:
        """Read the means over all of their examples; waits for the device."""
        sums, weights = self._fetch.read().sum(2)
        return dict(zip(self.names, (sums / weights).tolist(), strict=True))
