"""A run in its folder: rounds get their lines, checkpoints promise them, whatever stops the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from undrift.core.algorithm import Server
from undrift.core.noise import draws_noise
from undrift.errors import ChangedExperiment, ConfigError
from undrift.experiment.blueprint import check_preparation
from undrift.experiment.environment import environment
from undrift.experiment.events import Listener, RunInfo
from undrift.experiment.folder import RunFolder
from undrift.experiment.history import History, main_metric
from undrift.experiment.measure import Measure
from undrift.experiment.tables import Table
from undrift.interrupts import StoppedAtOnce
from undrift.rounds import Advance, Reading
from undrift.trainer import Trainer

MOST_UNREAD = 50  # rounds queued on a device before the host looks at them


class Job:
    """What is run: who it is, and how its trainer is made."""

    name: str
    label: str
    seed: int
    rounds: int
    home: Path | None = None  # the folder of the experiment file
    kept: Mapping[str, Mapping[str, Any]] = MappingProxyType({})  # files beside the experiment

    def table(self) -> Table:
        """Give everything that decides the run."""
        raise TypeError(f"{type(self).__name__} must define table")

    def code(self) -> dict[str, Any]:
        """Describe the code that the table names."""
        return {}

    def start(self, state_path: Path | None) -> tuple[Trainer, Measure]:
        """Make the trainer and what measures it."""
        raise TypeError(f"{type(self).__name__} must define start")

    def restore(self, folder: RunFolder) -> None:
        """Bring what the user holds to where a complete run is."""


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
        check_preparation(folder, job.kept)  # before the checkpoint, which tells less
        load_checkpoint(self.trainer, folder)
        folder.check_rounds(self.trainer.rounds_done)
        folder.starts()
        # only now: what cannot be built, or is damaged, is left as it was
        folder.begin(job.table())
        folder.keep(job.kept)
        self.trainer.keep_key(folder.checkpoint)  # rounds that are trained again have equal noise
        self.past = folder.cut(self.trainer.rounds_done)
        self.trainer.keeper.tidy(folder.checkpoint)
        device = self.trainer.engine.device
        folder.started(
            {**environment(device, self.trainer.rounds_done, job.home), "code": job.code()}
        )
        self.measure.before = self.trainer.server
        self._saved, self._saved_at = self.trainer.rounds_done, time.monotonic()
        self.written = self.trainer.rounds_done  # how many rounds have their line
        self.pending: list[Advance] = []  # rounds that are trained and have none yet
        self.before = self.trainer.server  # what the last of them began with
        self._records: Callable[[], list[dict[str, Any]]] | None = None
        self._busy = self._closed = False

    @property
    def left(self) -> int:
        """Count the rounds that are missing."""
        return max(0, self.job.rounds - self.trainer.rounds_done)

    @property
    def stretch(self) -> int:
        """Count the rounds that may be trained before one of them is judged or shown."""
        return stretch(self.job, self.trainer, self.measure)

    @property
    def torn(self) -> bool:
        """Whether to stop now would lose a round that is done, or leave a complete run open."""
        known = self.written + len(self.pending) == self.trainer.rounds_done
        return self._busy or not known or not (self.left or self._closed)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Tell listeners, and whatever stops the run, keep what is done."""
        with told(self.info, self.listeners, self.past):
            try:
                yield
            except StoppedAtOnce:
                raise
            except BaseException:
                self._busy = True
                with suppress(Exception):  # what stopped the run tells more
                    self._write_pending()
                self._keep()
                raise
            self._keep()

    def _keep(self) -> None:
        """Save what is done, unless a round has no line or nobody will go on from here."""
        done = self.trainer.rounds_done
        if self._saved < done == self.written and not (self.lean and self._closed):
            self._save()

    def queue(self) -> None:
        """Measure the pending rounds, without waiting for a device."""
        self._busy = True
        self._records = queued_records(self.job, self.measure, self.pending, self.before)

    def write(self) -> None:
        """Write down what was queued and tell listeners; every few seconds, save."""
        records = self._write_pending()
        self._busy = False
        for record in records:
            for listener in self.listeners:
                listener.round(self.info, record)
        if time.monotonic() - self._saved_at > self.seconds:
            self._save()

    def _write_pending(self) -> list[dict[str, Any]]:
        """Give every pending round its line."""
        if not self.pending:
            return []
        if self._records is None:
            self.queue()
        assert self._records is not None
        found, self._records = self._records, None
        records = found()
        for record in records:
            self.folder.append(record)
            self.written += 1
            del self.pending[0]
        return records

    def _save(self) -> None:
        self._busy = True
        self.folder.sync()  # a checkpoint at round r promises r lines
        self.folder.write_plan(self.trainer.engine.plan())
        self.trainer.save(self.folder.checkpoint)
        self._saved, self._saved_at = self.trainer.rounds_done, time.monotonic()
        self._busy = False

    def close(self) -> History:
        """Save for the last time, and write the model and the summary."""
        if not self.lean:
            self._keep()
        self.folder.sync()
        self.folder.check_rounds(self.trainer.rounds_done)  # none may have been lost meanwhile
        self.folder.write_model(self.trainer.model())
        history = self.folder.history()
        self.folder.write_evaluation(self.measure.whole())
        self.trainer.private_key.forget(self.folder.checkpoint)
        self.folder.finish({**_summary(history), **_noise(self.trainer)})
        self._closed = True
        return history


def train(
    sessions: Sequence[Session], advance: Callable[[], Sequence[Advance]], rounds: int
) -> None:
    """Train so many rounds, the last one of which is judged, and write them down."""
    for _ in range(rounds):
        for session in sessions:
            session.before = session.trainer.server
        for session, one in zip(sessions, advance(), strict=True):
            session.pending.append(one)
    for session in sessions:  # all of them, before the first is waited for
        session.queue()
    for session in sessions:
        session.write()


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


def load_checkpoint(trainer: Trainer, folder: RunFolder) -> None:
    """Go on from the newest checkpoint, if there is one; other data are refused as such."""
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


def _noise(trainer: Trainer) -> dict[str, str]:
    """Say where secret noise came from, if there was any."""
    return {"noise": str(trainer.private_key)} if draws_noise(trainer.algorithm) else {}


def _summary(history: History) -> dict[str, Any]:
    metric = main_metric(history)
    seconds = sum(h for h in history["seconds"])
    told = {"metric": metric, "last": history.last(metric), "best": history.best(metric)}
    sent = {n: int(sum(history[n])) for n in ("bytes_down", "bytes_up")}
    return {"rounds": len(history), **told, "seconds": seconds, **sent}


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
