"""Run many experiments: one after the other, or in worker processes side by side.

Workers are plain subprocesses that read tables and write events as lines of JSON; they survive
neither their task's error nor their parent, and what they did so far is in the run's folder.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from undrift import errors
from undrift.errors import ConfigError, UndriftError
from undrift.experiment.batch import run_together
from undrift.experiment.events import Listener, RunInfo
from undrift.experiment.history import History
from undrift.experiment.run import ExperimentJob, finished, run
from undrift.experiment.session import info_of
from undrift.experiment.spec import Experiment
from undrift.experiment.world import device_named
from undrift.interrupts import Shield, StoppedAtOnce, deaf_children
from undrift.safe_path import program_folder, shared_path

log = logging.getLogger("undrift")
PATIENCE = 30.0  # seconds that workers get to save what they have done
WORKER = """import sys
sys.path[:] = sys.argv[1:]  # what the parent can import, its workers can
from undrift.experiment.worker import main
sys.exit(main())"""


class Task(NamedTuple):
    """One run and where it lives."""

    experiment: Experiment
    folder: Path

    def info(self) -> RunInfo:
        """Describe it for listeners."""
        return info_of(ExperimentJob(self.experiment), self.folder)


def run_folder(out: Path, experiment: Experiment) -> Path:
    """Name the folder of one run: OUT/LABEL/seed-N."""
    return out / experiment.folder


def run_all(
    experiments: Sequence[Experiment],
    out: Path,
    *,
    jobs: int | None = None,
    listeners: Sequence[Listener] = (),
) -> list[History]:
    """Run every experiment in its folder below `out`; those that are complete are only read.

    A run that fails does not stop the others; then the first error is raised.
    """
    tasks = [Task(e, run_folder(out, e)) for e in experiments]
    return run_tasks(tasks, jobs=jobs, listeners=listeners)


def run_tasks(
    tasks: Sequence[Task],
    *,
    jobs: int | None = None,
    listeners: Sequence[Listener] = (),
) -> list[History]:
    """Run every task in its own folder, as `run_all` does."""
    done = {i: h for i, t in enumerate(tasks) if (h := finished(*t)) is not None}
    for i, history in done.items():
        for listener in listeners:
            listener.started(tasks[i].info(), history)
            listener.finished(tasks[i].info(), history)
    left = [i for i in range(len(tasks)) if i not in done]
    count = _jobs(jobs, [tasks[i].experiment for i in left])
    if count <= 1:
        done |= _in_this_process(tasks, left, listeners)
    else:
        Crew(tasks, left, count, listeners).work()
        done |= {i: _read(tasks[i]) for i in left}
    return [done[i] for i in range(len(tasks))]


def _in_this_process(
    tasks: Sequence[Task], left: Sequence[int], listeners: Sequence[Listener]
) -> dict[int, History]:
    """Run one by one; on a device as one batch, and one by one if that stops."""
    found: list[History | UndriftError] | None = None
    if len(left) > 1 and all(_as_one(tasks[i].experiment) for i in left):
        try:
            found = run_together([tasks[i] for i in left], listeners=listeners)
        except UndriftError as error:
            log.warning("the runs go on one by one: %s", error)
    if found is None:
        found = [_alone(tasks[i], listeners) for i in left]
    failed = [one for one in found if isinstance(one, UndriftError)]
    if failed:
        raise _together(failed, len(tasks))
    pairs = zip(left, found, strict=True)
    return {i: history for i, history in pairs if isinstance(history, History)}


def _as_one(experiment: Experiment) -> bool:
    return _on_device(experiment) and experiment.engine.use != "ray"


def _on_device(experiment: Experiment) -> bool:
    return device_named(experiment.engine.device) != "cpu"


def _alone(task: Task, listeners: Sequence[Listener]) -> History | UndriftError:
    try:
        return run(*task, listeners=listeners)
    except UndriftError as error:
        return error


def _read(task: Task) -> History:
    history = finished(*task)
    assert history is not None, "the worker said that the run is complete"
    return history


def _jobs(jobs: int | None, left: Sequence[Experiment]) -> int:
    if jobs is not None and (isinstance(jobs, bool) or not isinstance(jobs, int) or jobs < 1):
        raise ConfigError(f"jobs = {jobs!r}: give the number of runs at a time, 1 or more")
    # a GPU, and a cluster, is best used by one run at a time
    in_turn = any(_on_device(e) or e.engine.use == "ray" for e in left)
    wanted = (1 if in_turn else cores()) if jobs is None else jobs
    return min(wanted, len(left))


def cores() -> int:
    """Count the processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Crew:
    """Worker processes and what they tell."""

    def __init__(
        self, tasks: Sequence[Task], left: Sequence[int], count: int, listeners: Sequence[Listener]
    ) -> None:
        self.tasks, self.left, self.listeners = tasks, list(left), listeners
        self.infos = {i: tasks[i].info() for i in left}
        self.events: queue.Queue[tuple[int, dict[str, Any] | None]] = queue.Queue()
        self.errors: list[UndriftError] = []
        self.busy: dict[int, int] = {}  # worker -> task
        self.threads = max(1, cores() // count)
        self.workers: list[subprocess.Popen[bytes]] = []
        self.listening: list[threading.Thread] = []
        for number in range(count):
            self.workers.append(self._hire(number))

    def _hire(self, number: int) -> subprocess.Popen[bytes]:
        worker = _start(self.threads)
        thread = threading.Thread(target=self._listen, args=(number, worker), daemon=True)
        self.listening.append(thread)
        thread.start()
        return worker

    def work(self) -> None:
        """Hand out tasks until none is left; stop workers whatever happens."""
        with Shield(lambda: False):
            try:
                for number in range(len(self.workers)):
                    self._give(number)
                while self.busy:
                    try:
                        self._hear(*self.events.get(timeout=1.0))
                    except queue.Empty:
                        self._refresh()
            except BaseException as error:
                self._stop(signal.SIGTERM)
                if not self._dismiss() and isinstance(error, KeyboardInterrupt):
                    raise StoppedAtOnce from error
                raise
            self._dismiss()
        if self.errors:
            raise _together(self.errors, len(self.tasks))

    def _refresh(self) -> None:
        """Let views move their clock while rounds are long."""
        for listener in self.listeners:
            refresh = getattr(listener, "refresh", None)
            if refresh is not None:
                refresh()

    def _give(self, number: int) -> None:
        if not self.left:
            return
        i = self.left.pop(0)
        self.busy[number] = i
        task = {
            "experiment": self.tasks[i].experiment.to_table(),
            "home": str(self.tasks[i].experiment.home or program_folder() or ""),
            "folder": str(self.tasks[i].folder),
            "command": sys.argv,
        }
        with suppress(OSError):  # if it died, the listening thread tells
            pipe = _pipe(self.workers[number].stdin)
            pipe.write(json.dumps(task).encode() + b"\n")
            pipe.flush()

    def _listen(self, number: int, worker: subprocess.Popen[bytes]) -> None:
        with _pipe(worker.stdout) as lines:
            for line in lines:
                with suppress(ValueError):  # cut off in the middle: it died
                    self.events.put((number, json.loads(line)))
        worker.wait()
        self.events.put((number, None))

    def _hear(self, number: int, event: dict[str, Any] | None) -> None:
        if event is None:
            if number in self.busy:
                self._lost(number)
            return
        info = self.infos[self.busy[number]]
        if event["event"] == "note":
            self._note(f"{info.label} seed {info.seed_text}: {event['value']}")
        elif event["event"] == "failed":
            error = _error(event)
            self.errors.append(error)
            for listener in self.listeners:
                listener.failed(info, error)
        else:
            for listener in self.listeners:
                getattr(listener, event["event"])(info, event["value"])
        if event["event"] in ("finished", "failed"):
            del self.busy[number]
            self._give(number)

    def _note(self, text: str) -> None:
        for listener in self.listeners:
            note = getattr(listener, "note", None)
            if note is not None:
                note(text)

    def _lost(self, number: int) -> None:
        """A worker died in the middle: start another one for the rest."""
        i, code = self.busy.pop(number), self.workers[number].returncode
        why = f"signal {signal.Signals(-code).name}" if code and code < 0 else f"exit code {code}"
        task = self.tasks[i]
        error = UndriftError(
            f"{task.experiment.label} seed {task.experiment.seed_number}: its process ended "
            f"({why}); what it saved is kept, the same command goes on"
        )
        self.errors.append(error)
        for listener in self.listeners:
            listener.failed(task.info(), error)
        if self.left:
            with suppress(OSError):
                _pipe(self.workers[number].stdin).close()
            self.workers[number] = self._hire(number)
            self._give(number)

    def _stop(self, how: signal.Signals) -> None:
        for worker in self.workers:
            if worker.poll() is None:
                worker.send_signal(how)

    def _dismiss(self) -> bool:
        """Let workers save and end; kill those that do not, and tell whether all did."""
        willing = True
        for worker in self.workers:
            with suppress(OSError):
                _pipe(worker.stdin).close()
        for worker in self.workers:
            try:
                worker.wait(PATIENCE)
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                willing = False
                worker.kill()
                worker.wait()
        for thread in self.listening:
            thread.join()
        return willing


def _start(threads: int) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    command = [sys.executable, "-P", "-c", WORKER, *shared_path()]
    pipe = subprocess.PIPE
    with deaf_children():
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment)


def _pipe(end: IO[bytes] | None) -> IO[bytes]:
    assert end is not None
    return end


def _error(event: dict[str, Any]) -> UndriftError:
    kind = getattr(errors, str(event.get("kind")), UndriftError)
    plain = kind if kind in (errors.ConfigError, errors.DataError, errors.TaskError,
                             errors.CheckpointError, errors.ChangedExperiment,
                             errors.MissingExtra) else UndriftError  # fmt: skip
    made: UndriftError = plain(str(event.get("message")))
    return made


def _together(found: Sequence[UndriftError], total: int) -> UndriftError:
    if len(found) == 1:
        return found[0]
    return type(found[0])(f"{len(found)} of {total} runs failed; the first one: {found[0]}")
