"""Several trainers, a round at a time, as one batch.

Seeds, hyper-parameters and algorithms of one structure train in the same calls; other structures
share forward and backward.  Each trainer keeps its own data, states, server and checkpoints, and
gets the same numbers as alone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from undrift.data import Work
from undrift.data.checks import check_whole
from undrift.engines.capacity import USED, free_bytes, has_convolution
from undrift.engines.device_round import DeviceRound
from undrift.engines.sharded import Sharded
from undrift.engines.turns import Shape
from undrift.engines.vectorised import SLOTS, Vectorised
from undrift.errors import ConfigError, UndriftError
from undrift.identity import same, unlike
from undrift.interrupts import uninterrupted
from undrift.rounds import Advance, Opened, Reading, RoundResult
from undrift.trainer import Trainer

log = logging.getLogger("undrift")


class Fleet:
    """Trains several trainers together.

    They need one architecture and loss, one kind of local work and one device; data, partition,
    cohort, seed and algorithm are their own.  It is for GPUs, and on a CPU for models of some
    thousand parameters: larger ones train faster one after the other there.  What cannot be one
    batch after all trains one by one, with a warning; with `alone=False` that is an error.

    >>> from torch import nn
    >>> from undrift import Federation, Task, fedavg, scaffold
    >>> clients = [(torch.randn(20, 8), torch.randint(0, 3, (20,))) for _ in range(10)]
    >>> data, task = Federation.of(clients), Task(nn.Linear(8, 3))
    >>> fleet = Fleet([Trainer(task, data, a) for a in (fedavg(0.1), fedavg(0.2), scaffold(0.1))])
    >>> [results[-1].round for results in fleet.run(2)]
    [2, 2, 2]
    """

    def __init__(self, trainers: Sequence[Trainer], *, alone: bool = True) -> None:
        trainers = _checked(trainers)
        why = next((w for t in trainers[1:] if (w := difference(trainers[0], t))), None)
        why = why or next((w for t in trainers if (w := hindrance(t))), None)
        if why:
            raise ConfigError(f"these trainers cannot train as one batch: {why}")
        self.trainers = trainers
        share_examples(self.trainers)
        self._runner: DeviceRound | None = None
        self._together, self._alone = True, alone
        self._drawn_by: list[tuple[Any, Any]] = []  # what the twins were found by
        self._twins: list[int] = []  # of each trainer the first one that draws the same cohorts

    def run(self, rounds: int) -> list[list[RoundResult]]:
        """Train all of them for some rounds; gives the results trainer by trainer."""
        check_whole("rounds", rounds, low=0)
        found = Reading(one for _ in range(rounds) for one in self.advance()).results()
        return [found[i :: len(self.trainers)] for i in range(len(self.trainers))]

    def advance(self) -> list[Advance]:
        """Train one round of every trainer, without waiting for a device."""
        if not self._together:
            return [trainer.advance() for trainer in self.trainers]
        try:
            return self._one_round()
        except UndriftError:
            raise
        except Exception as error:
            if not self._alone:
                raise
            log.warning("these runs cannot be one batch (%s); they run one by one", error)
            self._together = False
            return self.advance()
        finally:
            for trainer in self.trainers:
                trainer.settle()

    def _one_round(self) -> list[Advance]:
        opened = self._opened()
        turns = []
        for trainer, one in zip(self.trainers, opened, strict=True):
            population = trainer.roster.count
            turns.append(
                _engine(trainer).turn(
                    trainer.algorithm, one.server, one.cohort, population, one.known
                )
            )
        found = self._runner_for(opened).run(turns)
        finished = []
        for trainer, one, turn, done in zip(self.trainers, opened, turns, found, strict=True):
            server, outcome = _engine(trainer).take(trainer.algorithm, turn, done)
            finished.append(trainer.finished(one, server, outcome))
        # all or nobody: whoever falls back takes the round again
        with uninterrupted():
            return [take() for take in finished]

    def _opened(self) -> list[Opened]:
        """Open a round of everybody; trainers that draw the same cohort draw it once."""
        rosters = [trainer.roster for trainer in self.trainers]
        known = [(roster.enrolled, roster.seeds) for roster in rosters]
        if any(a is not b or s != t for (a, s), (b, t) in zip(self._drawn_by, known, strict=False)):
            self._twins = []  # somebody joined or left, or began again with another seed
        if not self._twins:
            self._drawn_by = known
            self._twins = [
                next(i for i, other in enumerate(rosters) if other.draws_like(roster))
                for roster in rosters
            ]
        opened: list[Opened] = []
        for trainer, twin in zip(self.trainers, self._twins, strict=True):
            drawn = twin < len(opened) and self.trainers[twin].rounds_done == trainer.rounds_done
            one = trainer.open_round(opened[twin].cohort if drawn else None)
            opened.append(one._replace(cohort=_engine(trainer).seated(one.cohort)))
        return opened

    def _runner_for(self, opened: Sequence[Opened]) -> DeviceRound:
        """Find the buffers that hold these cohorts, or make some."""
        shapes = [
            _engine(trainer).shape(trainer.algorithm, one.cohort, one.known.everyone)
            for trainer, one in zip(self.trainers, opened, strict=True)
        ]
        wanted = shapes[0]
        for shape in shapes[1:]:
            wanted = wanted.joined(shape)
        if self._runner is None or not _fits(self._runner.shape, wanted):
            engines = [_engine(trainer) for trainer in self.trainers]
            algos = [trainer.algorithm for trainer in self.trainers]
            plan = self.trainers[0].roster.work
            self._runner = DeviceRound(
                engines, algos, plan if isinstance(plan, Work) else Work(), wanted
            )
        return self._runner


def _fits(room: Shape, wanted: Shape) -> bool:
    return room.holds(wanted._replace(clients=room.clients)) and wanted.clients <= room.clients


def _engine(trainer: Trainer) -> Vectorised:
    assert isinstance(trainer.engine, Vectorised)
    return trainer.engine


def hindrance(trainer: Trainer) -> str | None:
    """Tell why a trainer cannot be one of several in a batch; None if it can."""
    if not isinstance(trainer.engine, Vectorised):
        own = isinstance(trainer.engine, Sharded)
        return "actors train one run" if own else "the reference engine trains one client at a time"
    if not trainer.engine.is_resident:
        return "examples are read from disk"
    if _plan_slots(trainer) > SLOTS[trainer.engine.device.type]:
        return "clients differ so much in their work that a cohort trains in parts"
    return None


def _plan_slots(trainer: Trainer) -> int:
    """Count the positions in the plan of a cohort that is padded to the longest client."""
    work, sizes = trainer.roster.work, trainer.federation.sizes
    if not isinstance(work, Work):
        return 0  # the plan is there already
    cohort = trainer.roster.cohort(trainer.rounds_done, ordered=False)
    return int(work.slots_each(sizes, work.most_steps(sizes)).max()) * len(cohort.clients)


def _checked(trainers: Any) -> list[Trainer]:
    """Refuse what is no list of different trainers."""
    if isinstance(trainers, Trainer) or not isinstance(trainers, Iterable):
        raise ConfigError(f"a fleet takes a list of trainers, got {type(trainers).__name__}")
    found = list(trainers)
    if not found:
        raise ConfigError("a fleet needs at least one trainer")
    strange = next((t for t in found if not isinstance(t, Trainer)), None)
    if strange is not None:
        raise ConfigError(f"a fleet takes trainers, got {strange!r} among them")
    if len({id(t) for t in found}) < len(found):
        raise ConfigError("a trainer stands in this fleet twice: give each its own")
    return found


def difference(one: Trainer, other: Trainer) -> str | None:
    """Tell what keeps two trainers from sharing a batch; None if nothing does."""
    mine, theirs = one.portraits(), other.portraits()
    for part in ("module", "loss", "metrics", "augmentation", "work"):
        found = unlike(mine[part], theirs[part])
        if found is not None:
            return f"{'local work' if part == 'work' else part}: {found}"
    a, b = _settings(one), _settings(other)
    return next((f"{n}: {a[n]} and {b[n]}" for n in a if not same(a[n], b[n])), None)


def _settings(trainer: Trainer) -> dict[str, Any]:
    """List the settings that all trainers of a fleet have in common."""
    task = trainer.task
    return {
        "parameters": (task.names, task.shapes),
        "feature": task.feature,
        "precision": (task.dtype, task.seam),
        "device": trainer.engine.device,
        "engine": type(trainer.engine).__name__,
    }


def parted(trainers: Sequence[Trainer]) -> list[list[Trainer]]:
    """Put trainers that can train as one batch together, as many as memory holds."""
    batches: list[list[Trainer]] = []
    for trainer in trainers:
        fitting = (b for b in batches if difference(b[0], trainer) is None and _room(b, trainer))
        batch = next(fitting, None) if pays(trainer) else None
        if batch is None:
            batches.append([trainer])
        else:
            batch.append(trainer)
    return batches


def pays(trainer: Trainer) -> bool:
    """Whether sharing a batch is faster: on a CPU convolutions of many clients are slow ones."""
    if hindrance(trainer) is not None:
        return False
    on_cpu = trainer.engine.device.type == "cpu"
    return not (on_cpu and has_convolution(trainer.task.module))


def _room(batch: Sequence[Trainer], trainer: Trainer) -> bool:
    free = USED * free_bytes(trainer.engine.device)
    return sum(_bytes(t) for t in (*batch, trainer)) < free


def _bytes(trainer: Trainer) -> int:
    """Tell how much memory a trainer's cohort takes while it trains."""
    cohort = trainer.roster.cohort(trainer.rounds_done, ordered=False)
    return _engine(trainer).bytes_for(trainer.algorithm, cohort)


def share_examples(trainers: Sequence[Trainer]) -> None:
    """Let trainers with equal examples hold them once."""
    pools: list[Any] = []
    for trainer in trainers:
        own = trainer.federation
        twin = next((p for p in pools if _equal(p.x, own.x) and _equal(p.y, own.y)), None)
        if twin is None:
            pools.append(own)
        elif twin.x is not own.x or twin.y is not own.y:
            shared = replace(own, x=twin.x, y=twin.y)
            trainer.federation = trainer.roster.federation = trainer.engine.federation = shared


def _equal(a: Any, b: Any) -> bool:
    return a is b or (a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b))


__all__ = ["Fleet", "difference", "hindrance", "parted"]
