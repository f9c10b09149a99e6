"""Run the cells of a paper's table, go on where they stopped, and write a record of each."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from undrift.errors import CheckpointError, DataError, UndriftError
from undrift.experiment.batch import OutOfTime, run_together
from undrift.experiment.events import Listener, Record, RunInfo
from undrift.experiment.family import Setting
from undrift.experiment.folder import RunFolder, whole_history
from undrift.experiment.history import History
from undrift.experiment.pool import Task, run_tasks
from undrift.experiment.world import device_named, examples_of
from undrift.papers.entries import About, cell_entries
from undrift.papers.plan import Group, Options, groups
from undrift.papers.records import UNFINISHED, Entry, place_of, put, read_records
from undrift.sources import Info

log = logging.getLogger("undrift")
CHECKPOINT_SECONDS = 300.0  # on a device, where a batch may hold gigabytes of client states

Stop = Callable[[], bool]


class Failure(NamedTuple):
    """Settings that could not be run to their ends, and why."""

    settings: list[str]
    error: UndriftError
    no_data: bool  # nothing was tried: the data cannot be loaded

    def __str__(self) -> str:
        names, more = ", ".join(self.settings[:3]), len(self.settings) - 3
        names += f" and {more} more" if more > 0 else ""
        return f"{names} {'left out' if self.no_data else 'failed'}: {self.error}"


class Reproduced(NamedTuple):
    """What one call has made."""

    entries: list[Entry]
    failures: list[Failure]
    unfinished: bool = False  # the time was over before the end


def reproduce(
    settings: Sequence[Setting],
    options: Options,
    out: Path,
    records: Path,
    *,
    minutes: float | None = None,
    jobs: int | None = None,
    listeners: Sequence[Listener] = (),
) -> Reproduced:
    """Run the cells of some settings; gives the records of this call, and what failed.

    After `minutes` everything is saved between two rounds; the same call goes on.  A setting that
    fails, or whose data are not there, does not stop the others.
    """
    end = None if minutes is None else time.monotonic() + 60 * minutes
    stop: Stop = lambda: end is not None and time.monotonic() >= end  # noqa: E731
    for setting in settings:  # a damaged file is better found before hours of training
        for kind in (UNFINISHED, options.kind(setting)):
            read_records(place_of(records, setting.family, kind))
    made = Reproduced([], [])
    planned = groups(settings, options, out)
    for group in planned:
        if stop():
            break
        try:
            failure = _try_group(group, stop, jobs, listeners)
        finally:  # Ctrl-C too leaves records of what is complete
            made.entries.extend(_write(group, options, records))
        if failure is not None:
            made.failures.append(failure)
            if len(planned) > 1:  # hours may pass before all of them are told
                log.warning("%s", failure)
    tasks = [task for group in planned for task in group.all_tasks]
    return made._replace(unfinished=stop() and not all(_complete(task) for task in tasks))


# ------------------------------------------------------------------------------------- running
def _try_group(
    group: Group, stop: Stop, jobs: int | None, listeners: Sequence[Listener]
) -> Failure | None:
    left = [task for task in group.all_tasks if not _complete(task)]
    if not left:
        return None
    info: Info | None = None
    try:
        info = examples_of(left[0].experiment).info
        _run_group(group, left, info, stop, jobs, listeners)
    except UndriftError as error:
        tasks = group.tasks.items()
        names = [name for name, own in tasks if not all(_complete(task) for task in own)]
        return Failure(names, error, no_data=info is None and isinstance(error, DataError))
    return None


def _run_group(
    group: Group,
    left: Sequence[Task],
    info: Info,
    stop: Stop,
    jobs: int | None,
    listeners: Sequence[Listener],
) -> None:
    data = left[0].experiment.data
    verified = isinstance(data, str) or data.table().get("verify", True)
    before = {task.folder: len(history_of(task)) for task in left}
    for tasks in group.tasks.values():
        begun: dict[str, bool] = {}
        for task in (one for one in tasks if one.folder in before):
            label = task.experiment.label
            begun[label] = begun.get(label, False) or before[task.folder] > 0
        About(_place(tasks)).note_start(info, verified, begun)
    start = time.monotonic()
    try:
        _run(left, stop, jobs, listeners)
    finally:
        _note_time(group, before, time.monotonic() - start)


def _run(
    tasks: Sequence[Task], stop: Stop, jobs: int | None, listeners: Sequence[Listener]
) -> None:
    if any(device_named(task.experiment.engine.device) == "cpu" for task in tasks):
        with suppress(OutOfTime):
            run_tasks(tasks, jobs=jobs, listeners=[*listeners, Deadline(stop)])
        return
    found = run_together(
        tasks, listeners=listeners, stop=stop, checkpoint_seconds=CHECKPOINT_SECONDS, lean=True
    )
    errors = [one for one in found if isinstance(one, UndriftError)]
    if errors:
        raise errors[0]


class Deadline:
    """A listener that ends runs when their time is over; what they did is saved."""

    def __init__(self, stop: Stop) -> None:
        self.stop = stop

    def started(self, run: RunInfo, past: Sequence[Record]) -> None:
        """A run may always begin."""

    def round(self, run: RunInfo, record: Record) -> None:
        """End the runs after a round."""
        if self.stop():
            raise OutOfTime("the time is over; the same command goes on")

    def finished(self, run: RunInfo, history: Sequence[Record]) -> None:
        """One that is complete needs no end."""

    def failed(self, run: RunInfo, error: BaseException) -> None:
        """Nor does one that failed."""

    def close(self) -> None:
        """Nothing to close."""


def history_of(task: Task) -> History:
    """Read what there is of a run, at most the rounds that are asked for.

    A damaged run has none: it is no result, and whoever runs it is told.
    """
    folder = RunFolder(task.folder)
    if not folder.path.is_dir() or folder.table() is None:
        return History(())
    folder.check(task.experiment.to_table())
    try:
        return History(tuple(whole_history(folder))[: task.experiment.rounds])
    except CheckpointError:
        return History(())


def _complete(task: Task) -> bool:
    if len(history_of(task)) < task.experiment.rounds:
        return False
    folder = RunFolder(task.folder)
    longer = (folder.table() or {}).get("rounds", 0) > task.experiment.rounds
    return longer or folder.summary() is not None


# ------------------------------------------------------------------------------------- writing
def _place(tasks: Sequence[Task]) -> Path:
    """Tell where a setting's runs are."""
    return tasks[0].folder.parent.parent


def _note_time(group: Group, before: dict[Path, int], seconds: float) -> None:
    """Share the time among the methods, by the local steps that were taken."""
    steps: dict[tuple[str, str], float] = {}
    for name, tasks in group.tasks.items():
        for task in tasks:
            new = tuple(history_of(task))[before.get(task.folder, 10**9) :]
            key = (name, task.experiment.label)
            steps[key] = steps.get(key, 0) + sum(r["client_steps"] for r in new)
    total = sum(steps.values())
    for name, tasks in group.tasks.items():
        own = {label: n for (setting, label), n in steps.items() if setting == name and n}
        if own:
            shares = {label: seconds * n / total for label, n in own.items()}
            About(_place(tasks)).add_seconds(shares)


def _write(group: Group, options: Options, records: Path) -> list[Entry]:
    """Write the records of a group's settings, and how long they took since the last time."""
    made: list[Entry] = []
    for setting in group.settings:
        tasks = group.tasks[setting.name]
        found = [(task, history_of(task)) for task in tasks]
        about = About(_place(tasks))
        entries = cell_entries(setting, options, found, about)
        put(records, setting.family, entries, _session(setting, options, about, entries))
        made += entries
    return made


def _session(
    setting: Setting, options: Options, about: About, entries: Sequence[Entry]
) -> dict[str, Any] | None:
    """Tell how long this setting has taken since that was last written down."""
    seconds = about.take_unwritten()
    if not seconds:
        return None
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "setting": setting.name,
        "kind": options.kind(setting),
        "seconds": round(seconds, 1),
        "device": entries[0]["device"] if entries else None,
    }
