"""Several runs in their folders, trained as one batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from undrift.errors import UndriftError
from undrift.experiment.events import Listener
from undrift.experiment.folder import RunFolder
from undrift.experiment.history import History
from undrift.experiment.run import CHECKPOINT_SECONDS, ExperimentJob
from undrift.experiment.session import Session, info_of, train
from undrift.experiment.spec import Experiment
from undrift.fleet import Fleet, parted
from undrift.interrupts import Shield
from undrift.rounds import Advance
from undrift.trainer import Trainer

log = logging.getLogger("undrift")


class OutOfTime(BaseException):
    """The time that runs were given is over: no failure, they can go on later."""


def never() -> bool:
    """Let runs go on to their ends."""
    return False


def run_together(
    tasks: Sequence[tuple[Experiment, Path]],
    *,
    listeners: Sequence[Listener] = (),
    stop: Callable[[], bool] = never,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    lean: bool = False,
) -> list[History | UndriftError]:
    """Run experiments to their ends; those that can, as one batch.  The same numbers as alone.

    One that cannot start does not stop the others: its error stands in its place.  When `stop`
    says so, all are saved between two rounds and what they have is given.  `lean` runs do not save
    once more when they are complete.
    """
    with ExitStack() as locks:
        opened = [_opened(*task, locks, listeners, checkpoint_seconds, lean) for task in tasks]
        sessions = [one for one in opened if isinstance(one, Session)]
        shield = Shield(lambda: any(session.torn for session in sessions))
        with shield, ExitStack() as kept:
            for session in sessions:
                kept.enter_context(session.kept())
            for session in sessions:
                if not session.left:
                    session.close()  # it had all of its rounds before
            _train(sessions, stop, shield)
        found = [_ended(one) if isinstance(one, Session) else one for one in opened]
    return found


def _opened(
    experiment: Experiment,
    path: Path,
    locks: ExitStack,
    listeners: Sequence[Listener],
    seconds: float,
    lean: bool,
) -> Session | UndriftError:
    job, folder = ExperimentJob(experiment), RunFolder(path)
    try:
        folder.check(job.table())  # a folder of others does not even get a lock
        locks.enter_context(folder.locked())
        folder.check(job.table())
        return Session(job, folder, info_of(job, path), listeners, seconds, lean)
    except UndriftError as error:
        return error


def _ended(session: Session) -> History:
    """Tell listeners what has become of a run."""
    history = session.folder.history()
    if session.left:
        for listener in session.listeners:
            listener.failed(session.info, OutOfTime("its time is over; it can go on"))
        return history
    for listener in session.listeners:
        listener.finished(session.info, history)
    return history


def _train(sessions: Sequence[Session], stop: Callable[[], bool], shield: Shield) -> None:
    """Train all of them, those with rounds left together."""
    while (left := [session for session in sessions if session.left]) and not stop():
        batches = parted([session.trainer for session in left])
        told = ", ".join(str(len(batch)) for batch in batches)
        log.info("%d runs train in batches of %s", len(left), told)
        fewest = min(session.left for session in left)
        for batch in batches:
            own = [session for session in left if any(session.trainer is t for t in batch)]
            _train_batch(own, fewest, stop, shield)
            for session in own:
                if not session.left:
                    session.close()  # now: what comes after it may be stopped


def _train_batch(
    sessions: Sequence[Session], rounds: int, stop: Callable[[], bool], shield: Shield
) -> None:
    """Train some runs for some rounds."""
    trainers = [session.trainer for session in sessions]
    fleet = Fleet(trainers) if len(trainers) > 1 else None
    while rounds and not stop():
        count = min(rounds, *(session.stretch for session in sessions))
        train(sessions, lambda: _advance(fleet, trainers), count)
        shield.release()
        rounds -= count


def _advance(fleet: Fleet | None, trainers: Sequence[Trainer]) -> list[Advance]:
    return fleet.advance() if fleet else [trainer.advance() for trainer in trainers]
