"""Run an experiment, or a trainer of your own: in memory, or in a folder where it can go on."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from undrift.core.losses import LOSSES
from undrift.data.checks import check_whole
from undrift.describe import describe_own, describe_test
from undrift.errors import ConfigError, DataError
from undrift.experiment.blueprint import files_of
from undrift.experiment.events import Listener
from undrift.experiment.exam import Paper
from undrift.experiment.exams import exams_of
from undrift.experiment.folder import RunFolder
from undrift.experiment.history import History
from undrift.experiment.losses import meaning_of_task
from undrift.experiment.measure import Measure
from undrift.experiment.sections import Evaluation, section_table
from undrift.experiment.session import (
    Job,
    Session,
    has_more,
    info_of,
    load_checkpoint,
    queued_records,
    stretch,
    told,
    train,
)
from undrift.experiment.spec import Experiment, check_name
from undrift.experiment.tables import Table
from undrift.experiment.world import build
from undrift.interrupts import Shield
from undrift.trainer import Trainer

log = logging.getLogger("undrift")
CHECKPOINT_SECONDS = 10.0


def run(
    what: Experiment | Trainer,
    folder: Path | str | None = None,
    *,
    rounds: int | None = None,
    test: tuple[Tensor, Tensor] | None = None,
    evaluate: Evaluation | None = None,
    label: str | None = None,
    listeners: Sequence[Listener] = (),
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
) -> History:
    """Run to the end and give the history; in a folder, go on where the last process stopped.

    An `Experiment` brings everything; a `Trainer` needs `rounds`, and `test` to be judged on.

    >>> from undrift.rules import fedavg
    >>> from undrift.data.partitions import Iid
    >>> len(run(Experiment("digits", "mlp", fedavg(lr=0.1), Iid(4), rounds=2)))
    2
    """
    _check_arguments(listeners, checkpoint_seconds, evaluate)
    if isinstance(what, Experiment):
        given = {"rounds": rounds, "test": test, "evaluate": evaluate, "label": label}
        for name, value in given.items():
            if value is not None:
                raise ConfigError(f"run({name}=...) is for a Trainer; an Experiment has its own")
        one: Job = ExperimentJob(what)
    elif isinstance(what, Trainer):
        one = TrainerJob(what, rounds, test, evaluate or Evaluation(), label or "run")
    else:
        raise ConfigError(f"run takes an Experiment or a Trainer, got {what!r}")
    if folder is None:
        return _in_memory(one, listeners)
    return _in_folder(one, RunFolder(folder), listeners, checkpoint_seconds)


def _check_arguments(listeners: Any, seconds: Any, evaluate: Any) -> None:
    if not isinstance(listeners, Sequence) or isinstance(listeners, str):
        raise ConfigError(f"listeners must be a list of listeners, got {listeners!r}")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds >= 0:
        raise ConfigError(f"checkpoint_seconds must be a number, 0 or more; got {seconds!r}")
    if evaluate is not None and not isinstance(evaluate, Evaluation):
        raise ConfigError(f"evaluate must be an Evaluation, got {evaluate!r}")


def finished(experiment: Experiment, folder: Path | str) -> History | None:
    """Read the history of a run that is complete already; None if something is left to do."""
    place = RunFolder(folder)
    if not place.path.is_dir() or place.table() is None:
        return None
    table = experiment.to_table()
    place.check(table)
    history = place.history()
    if place.summary() is None or len(history) < experiment.rounds:
        return None
    place.check_code(describe_own(table, experiment.home))
    return History(tuple(history)[: experiment.rounds])


# ---------------------------------------------------------------------------------------- jobs
class ExperimentJob(Job):
    """An experiment, built only when it is needed."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        self.name, self.label = experiment.name, experiment.label
        self.seed, self.rounds = experiment.seed_number, experiment.rounds
        self.home = experiment.home

    def table(self) -> Table:
        """Give everything that decides the run."""
        return self.experiment.to_table()

    def code(self) -> dict[str, Any]:
        """Describe the code that the table names."""
        return describe_own(self.table(), self.home)

    def start(self, state_path: Path | None) -> tuple[Trainer, Measure]:
        """Build the world."""
        world = build(self.experiment, state_path)
        examples, task = world.dealt.examples, world.trainer.task
        parts = world.dealt.parts
        rows = sum(map(len, parts))
        self.kept = files_of(self.experiment, examples, task, len(parts), rows)
        return world.trainer, world.measure


class TrainerJob(Job):
    """A trainer of the user's own."""

    def __init__(
        self,
        trainer: Trainer,
        rounds: int | None,
        test: tuple[Tensor, Tensor] | None,
        evaluate: Evaluation,
        label: str,
    ) -> None:
        if rounds is None:
            raise ConfigError("run(trainer) needs rounds=, the number of rounds in all")
        check_whole("rounds", rounds)
        check_name("label", label)
        beyond = set(evaluate.models) != {"cloud"} or evaluate.drift or evaluate.clients
        if beyond or evaluate.per_class:
            raise ConfigError(
                "a Trainer is judged by its server's model as a whole: evaluate.models, drift, "
                "clients and per_class need an Experiment"
            )
        if test is not None and not (isinstance(test, tuple | list) and len(test) == 2):
            raise DataError(f"test must be a pair (x, y), got {type(test).__name__}")
        self.trainer, self.test, self.evaluate = trainer, test, evaluate
        self.name, self.label, self.seed, self.rounds = label, label, trainer.seeds.run, rounds

    def table(self) -> Table:
        """Give everything that decides the run."""
        mine = {"label": self.label, "rounds": self.rounds, "trainer": self.trainer.describe()}
        evaluate = section_table(self.evaluate)
        return {**mine, "evaluate": evaluate, "test": describe_test(self.test)}

    def restore(self, folder: RunFolder) -> None:
        """Give the user's trainer what the run has learned."""
        if not self.trainer.rounds_done:
            load_checkpoint(self.trainer, folder)
        if self.trainer.rounds_done != self.rounds:
            log.warning(
                "%s is at round %d, not %d: the trainer is too",
                folder.path, self.trainer.rounds_done, self.rounds,
            )  # fmt: skip

    def start(self, state_path: Path | None) -> tuple[Trainer, Measure]:
        """Take the trainer as it is."""
        papers, task = {}, self.trainer.task
        meaning = meaning_of_task(task)
        if meaning is None and self.evaluate.metrics:
            raise ConfigError(
                "evaluate.metrics: the outputs under a loss of your own have no known meaning; use "
                f"one of {', '.join(LOSSES)}, or give Task(metrics=...)"
            )
        if self.test is not None:
            x, y = (torch.as_tensor(v) for v in self.test)
            papers["test"] = Paper(x, y)
        exams = exams_of(task, papers, self.evaluate, meaning, self.trainer.engine.device)
        return self.trainer, Measure(self.trainer, self.evaluate, exams, meaning)


# --------------------------------------------------------------------------------------- loops
def _in_memory(job: Job, listeners: Sequence[Listener]) -> History:
    trainer, measure = job.start(None)
    info, records = info_of(job, None), []
    with told(info, listeners, []):
        while trainer.rounds_done < job.rounds:
            for record in _next_records(job, trainer, measure):
                records.append(record)
                for listener in listeners:
                    listener.round(info, record)
    history = History(tuple(records))
    for listener in listeners:
        listener.finished(info, history)
    return history


def _next_records(job: Job, trainer: Trainer, measure: Measure) -> list[dict[str, Any]]:
    """Train up to the next round that is judged, judge it, and wait once; on a CPU one round."""
    under_way = [trainer.advance() for _ in range(stretch(job, trainer, measure) - 1)]
    before = trainer.server
    return queued_records(job, measure, [*under_way, trainer.advance()], before)()


def _in_folder(
    job: Job, folder: RunFolder, listeners: Sequence[Listener], checkpoint_seconds: float
) -> History:
    info = info_of(job, folder.path)
    table = dict(info.experiment)
    folder.check(table)  # a folder of others does not even get a lock
    with folder.locked():
        folder.check(table)
        history = folder.history()
        if has_more(job, folder, history):
            session = Session(job, folder, info, listeners, checkpoint_seconds)
            with Shield(lambda: session.torn) as shield:
                with session.kept():
                    while session.left:
                        train([session], lambda: [session.trainer.advance()], session.stretch)
                        shield.release()
                history = session.close()
        else:
            folder.check_code(job.code())
            history = History(tuple(history)[: job.rounds])
            job.restore(folder)
            for listener in listeners:
                listener.started(info, history)
    for listener in listeners:
        listener.finished(info, history)
    return history
