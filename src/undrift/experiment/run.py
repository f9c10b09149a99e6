"""Run an experiment, or a trainer of your own: in memory, or in a folder where it can go on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from undrift.core.algorithm import Server
from undrift.data.checks import check_whole
from undrift.describe import describe_test
from undrift.errors import ChangedExperiment, ConfigError, DataError
from undrift.experiment.environment import environment
from undrift.experiment.events import Listener, RunInfo
from undrift.experiment.exam import Exam, Paper
from undrift.experiment.folder import RunFolder
from undrift.experiment.history import History, main_metric
from undrift.experiment.measure import Measure
from undrift.experiment.sections import Evaluation, section_table
from undrift.experiment.spec import Experiment, check_name
from undrift.experiment.tables import Table
from undrift.experiment.world import build
from undrift.rounds import Advance, Reading
from undrift.trainer import Trainer

log = logging.getLogger("undrift")
CHECKPOINT_SECONDS = 10.0
MOST_UNREAD = 50  # rounds queued on a device before the host looks at them


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
    place.check(experiment.to_table())
    history = place.history()
    if place.summary() is None or len(history) < experiment.rounds:
        return None
    return History(tuple(history)[: experiment.rounds])


# ---------------------------------------------------------------------------------------- jobs
class Job:
    """What is run: who it is, and how its trainer is made."""

    name: str
    label: str
    seed: int
    rounds: int
    home: Path | None = None  # the folder of the experiment file

    def table(self) -> Table:
        """Give everything that decides the run."""
        raise TypeError(f"{type(self).__name__} must define table")

    def start(self, state_path: Path | None) -> tuple[Trainer, Measure]:
        """Make the trainer and what measures it."""
        raise TypeError(f"{type(self).__name__} must define start")

    def restore(self, folder: RunFolder) -> None:
        """Bring what the user holds to where a complete run is."""


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

    def start(self, state_path: Path | None) -> tuple[Trainer, Measure]:
        """Build the world."""
        world = build(self.experiment, state_path)
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
            _load(self.trainer, folder)
        if self.trainer.rounds_done != self.rounds:
            log.warning(
                "%s is at round %d, not %d: the trainer is too",
                folder.path, self.trainer.rounds_done, self.rounds,
            )  # fmt: skip

    def start(self, state_path: Path | None) -> tuple[Trainer, Measure]:
        """Take the trainer as it is."""
        exams = {}
        if self.test is not None:
            x, y = (torch.as_tensor(v) for v in self.test)
            device = self.trainer.engine.device
            exams["test"] = Exam(self.trainer.task, Paper(x, y), device, self.evaluate.batch)
        return self.trainer, Measure(self.trainer, self.evaluate, exams)


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


def stretch(job: Job, trainer: Trainer, measure: Measure) -> int:
    """Tell how many rounds may be trained before one of them is judged or shown."""
    if trainer.engine.device.type == "cpu":
        return 1
    done, every = trainer.rounds_done, measure.evaluation.every
    return min(job.rounds - done, every - done % every, MOST_UNREAD)


def queued_records(
    job: Job, measure: Measure, rounds: Sequence[Advance], before: Server
) -> Callable[[], list[dict[str, Any]]]:
    """Measure what was just trained; what this gives waits for a device and writes rounds down.

    Only the last round is judged; `before` is what it began with.
    """
    reading, last = Reading(rounds), rounds[-1].round
    measure.before = before
    measured = measure.measuring(last, last=last == job.rounds)

    def records() -> list[dict[str, Any]]:
        *told, end = reading.results()
        return [*(measure.told(result) for result in told), measure.told(end, measured())]

    return records


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
            with session.kept():
                while session.left:
                    session.take(_next_records(job, session.trainer, session.measure))
            history = session.close()
        else:
            history = History(tuple(history)[: job.rounds])
            job.restore(folder)
            for listener in listeners:
                listener.started(info, history)
    for listener in listeners:
        listener.finished(info, history)
    return history


class Session:
    """A run in its folder, from its first missing round to its summary; the folder is locked."""

    def __init__(
        self,
        job: Job,
        folder: RunFolder,
        info: RunInfo,
        listeners: Sequence[Listener],
        seconds: float,
        lean: bool = False,
    ) -> None:
        self.job, self.folder, self.info = job, folder, info
        self.listeners, self.seconds, self.lean = listeners, seconds, lean
        self.trainer, self.measure = job.start(folder.rows)
        _check_fresh(self.trainer, folder)
        _load(self.trainer, folder)
        folder.check_rounds(self.trainer.rounds_done)
        folder.starts()
        # only now: what cannot be built, or is damaged, is left as it was
        folder.begin(job.table())
        self.past = folder.cut(self.trainer.rounds_done)
        device = self.trainer.engine.device
        folder.started(environment(device, self.trainer.rounds_done, job.home))
        self.measure.before = self.trainer.server
        self._saved, self._saved_at = self.trainer.rounds_done, time.monotonic()

    @property
    def left(self) -> int:
        """Count the rounds that are missing."""
        return max(0, self.job.rounds - self.trainer.rounds_done)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Tell listeners, and whatever stops the run, keep what is done."""
        with told(self.info, self.listeners, self.past):
            try:
                yield
            finally:
                lines = len(self.folder.history())
                if self.lean and not self.left:
                    lines = -1  # nobody will go on from here
                if self._saved < self.trainer.rounds_done == lines:  # else one has no line yet
                    self._save()

    def take(self, records: Sequence[dict[str, Any]]) -> None:
        """Write rounds down; every few seconds, save."""
        for record in records:
            self.folder.append(record)
        for record in records:
            for listener in self.listeners:
                listener.round(self.info, record)
        if time.monotonic() - self._saved_at > self.seconds:
            self._save()

    def _save(self) -> None:
        self.folder.sync()  # a checkpoint at round r promises r lines
        self.folder.write_plan(self.trainer.engine.plan())
        self.trainer.save(self.folder.checkpoint)
        self._saved, self._saved_at = self.trainer.rounds_done, time.monotonic()

    def close(self) -> History:
        """Write the model and the summary."""
        self.folder.sync()
        self.folder.check_rounds(self.trainer.rounds_done)  # none may have been lost meanwhile
        self.folder.write_model(self.trainer.model())
        history = self.folder.history()
        self.folder.finish(_summary(history))
        return history


def has_more(job: Job, folder: RunFolder, history: History) -> bool:
    """Whether something is left to do: rounds, or closing a run that has them all."""
    if len(history) < job.rounds:
        return True
    longer = (folder.table() or {}).get("rounds", 0) > job.rounds
    return folder.summary() is None and not longer


def _check_fresh(trainer: Trainer, folder: RunFolder) -> None:
    if trainer.rounds_done and not folder.checkpoint.is_dir():
        raise ConfigError(
            f"this trainer has done {trainer.rounds_done} rounds already, of which {folder.path} "
            "knows nothing: hand over a new one, or run without a folder"
        )


def _load(trainer: Trainer, folder: RunFolder) -> None:
    try:
        trainer.load(folder.checkpoint)
    except ChangedExperiment as error:
        if "federation." not in str(error):
            raise
        raise ChangedExperiment(
            f"{folder.path} was begun with other data than there are now, so it cannot go on: "
            f"restore the data, or choose another folder with --out\n{error}"
        ) from error


@contextmanager
def told(info: RunInfo, listeners: Sequence[Listener], past: Sequence[Any]) -> Iterator[None]:
    """Tell listeners that a run starts, and if it stops early."""
    for listener in listeners:
        listener.started(info, past)
    try:
        yield
    except BaseException as error:
        for listener in listeners:
            listener.failed(info, error)
        raise


def info_of(job: Job, folder: Path | None) -> RunInfo:
    """Describe a run for listeners."""
    return RunInfo(job.name, job.label, job.seed, job.rounds, folder, job.table())


def _summary(history: History) -> dict[str, Any]:
    metric = main_metric(history)
    seconds = sum(h for h in history["seconds"])
    told = {"metric": metric, "last": history.last(metric), "best": history.best(metric)}
    sent = {n: int(sum(history[n])) for n in ("bytes_down", "bytes_up")}
    return {"rounds": len(history), **told, "seconds": seconds, **sent}
