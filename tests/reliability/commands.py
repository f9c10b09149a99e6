"""Whole commands that are stopped at single operations on the disk, and are given again.

A command and its workers are one group of processes.  They count their operations together; who
makes the n-th one kills all of them, as a power cut does, or sends them a signal.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import ClassVar, NamedTuple

from undrift.cli import main as undrift
from undrift.experiment import batch, pool, worker
from undrift.experiment.spec import load
from undrift.experiment.tables import write_table
from undrift.interrupts import stop_on_signals
from undrift.papers import running
from undrift.state import disk
from undrift.state.checkpoint import CheckpointFolder
from undrift.trainer import Trainer

from . import forked
from .left_behind import differences, results

OPERATIONS = (
    *("_mkdir", "_os_open", "_os_write", "_os_pwrite", "_os_fsync", "_os_replace", "_os_remove"),
)
HALVES = ("_os_write", "_os_pwrite")
TABLE = {
    "name": "tiny",
    "rounds": 3,
    "data": {"use": "synthetic", "clients": 6, "sizes": 20, "features": 5, "classes": 3},
    "model": {"use": "mlp", "hidden": 4},
    "algorithm": {"use": "scaffold", "lr": 0.1},
    "work": {"steps": 2, "batch": 5},
    "sampler": {"use": "uniform", "count": 3},
    "engine": {"device": "cpu"},
}
AGENT = {
    "data": {"use": "digits", "test_share": 0.3},
    "partition": {"use": "iid", "clients": 40},
    "hold": {"validation_clients": 0.9},
    "model": {"use": "mlp", "hidden": 4},
    "work": {"steps": 2, "batch": 8},
    "algorithm": {"lr": 0.1, "server_lr": 0.03},
    "agent": {
        "target": 0.9,
        "rounds": 4,
        "episodes": 3,
        "rollouts": 3,
        "batch": 4,
        "evaluation": 1,
    },
    "engine": {"device": "cpu"},
}


# ----------------------------------------------------------------------------------- the commands
def command(*words: str) -> int:
    return undrift([*words, "--quiet"])


def fleet() -> int:
    tasks = [(one, Path("out") / f"{one.seed_number}") for one in load("tiny.toml", ["seed=0,1"])]
    found = batch.run_together(tasks, checkpoint_seconds=0.0)
    return 0 if all(len(history) == TABLE["rounds"] for history in found) else 2


COMMANDS: dict[str, Callable[[], int]] = {
    "run": partial(command, "run", "tiny.toml", "engine.state=file", "--out", "out"),
    "compare": partial(
        command,
        *("compare", "tiny.toml", "algorithm.use=fedavg,scaffold", "seed=0,1"),
        *("--jobs", "2", "--out", "out"),
    ),
    "fleet": fleet,
    "reproduce": partial(
        command,
        *("reproduce", "fedvra-table3-iid", "--tiny", "--only", "FedAvg", "SCAFFOLD"),
        *("--out", "out"),
    ),
    "train-agent": partial(command, "train-agent", "agent.toml", "--out", "out"),
}


def prepare(place: Path) -> None:
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    (place / "tiny.toml").write_text(write_table(TABLE))
    (place / "agent.toml").write_text(write_table(AGENT))


def save_after_every_round() -> None:
    """Let checkpoints be a matter of rounds here, and not of seconds."""
    pool.run = worker.run = partial(pool.run, checkpoint_seconds=0.0)
    together = partial(batch.run_together, checkpoint_seconds=0.0)
    pool.run_together = together
    running.run_together = lambda *given, **named: together(
        *given, **{**named, "checkpoint_seconds": 0.0}
    )
    pool._start = Forked


class Forked:
    """A worker process, forked instead of started anew, which would take seconds."""

    # of the pipes to workers, which other workers must not hold open
    ends: ClassVar[set[int]] = set()

    def __init__(self, threads: int) -> None:
        theirs_in, mine_out = os.pipe()
        mine_in, theirs_out = os.pipe()
        self.ends |= {mine_in, mine_out}
        self.returncode: int | None = None
        self._lock = threading.Lock()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the others only listen
            self.pid = os.fork()
        if not self.pid:
            code = 70
            try:
                for end in self.ends:
                    os.close(end)
                os.dup2(theirs_in, 0)
                os.dup2(theirs_out, 1)
                sys.stdin = os.fdopen(0)
                code = worker.main()
            finally:
                os._exit(code)
        os.close(theirs_in)
        os.close(theirs_out)
        self.stdin, self.stdout = os.fdopen(mine_out, "wb"), os.fdopen(mine_in, "rb")

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None:
                found, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if found else None
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        until = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired("worker", timeout or 0.0)
            time.sleep(0.002)
        return code

    def send_signal(self, how: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, how)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


# -------------------------------------------------------------------------------------- stopping
class Stop(NamedTuple):
    """Where a command is stopped, and how: by SIGKILL, amid an operation or beside it."""

    operation: int = 0  # none
    moment: str = "before"
    how: int = signal.SIGKILL


NOWHERE = Stop()


class Operations:
    """Counts the operations of all processes of a command, and stops it at one of them."""

    def __init__(self, place: Path, stop: Stop) -> None:
        # bytes of a file that is appended to: a counter that several processes share
        self.fd = os.open(place / "count", os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        self.stop, self.sent = stop, place / "sent"
        for name in HALVES if stop.moment == "half" else OPERATIONS:
            setattr(disk, name, self.wrapped(getattr(disk, name)))

    def wrapped(self, real: Callable[..., object]) -> Callable[..., object]:
        def operation(first: object, *rest: object, **named: object) -> object:
            os.write(self.fd, b".")
            size, moment = os.fstat(self.fd).st_size, self.stop.moment
            if not self.stop.operation or size < self.stop.operation:
                return real(first, *rest, **named)
            if moment == "half":
                real(first, bytes(rest[0])[: len(rest[0]) // 2], *rest[1:])
            if moment == "after":
                found = real(first, *rest, **named)
            self.send()
            return found if moment == "after" else real(first, *rest, **named)

        return operation

    def send(self) -> None:
        """Send the signal to whoever hears it: once, but for the one that nobody survives."""
        if self.stop.how == signal.SIGKILL:
            os.killpg(0, signal.SIGKILL)
        with contextlib.suppress(FileExistsError):
            os.close(os.open(self.sent, os.O_CREAT | os.O_EXCL))
            tell(os.getpgid(0), self.stop.how)


def tell(group: int, how: int) -> None:
    """Send a signal as a terminal does, to all of them, or as `kill` does, to the first."""
    (os.kill if how == signal.SIGTERM else os.killpg)(group, how)


def note_rounds(place: Path) -> None:
    """Write down every round that becomes the present of a trainer."""
    taken = Trainer._taken
    done = os.open(place / "done", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)

    def noted(trainer: Trainer, *given: object) -> object:
        found = taken(trainer, *given)
        who = hashlib.sha256(repr((trainer.seeds, trainer.algorithm)).encode()).hexdigest()
        os.write(done, f"{who} {trainer.rounds_done}\n".encode())
        return found

    Trainer._taken = noted


def start(name: str, place: Path, stop: Stop = NOWHERE) -> int:
    """Fork a process, the leader of a group of its own, that gives a command."""
    here, there = os.pipe()

    def work() -> None:
        os.setpgid(0, 0)
        os.chdir(place)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stop_on_signals()
        code = 130
        with open("said", "w") as said, contextlib.suppress(KeyboardInterrupt):
            os.dup2(said.fileno(), 2)
            with contextlib.redirect_stdout(said):
                save_after_every_round()
                note_rounds(place)
                Operations(place, stop)
                os.write(there, b".")  # from here on it may be stopped
                code = COMMANDS[name]()
        os._exit(code)

    child = forked.start(work)
    os.close(there)
    os.read(here, 1)
    os.close(here)
    return child


def give(name: str, place: Path, stop: Stop = NOWHERE) -> int:
    return forked.finish(start(name, place, stop))


def stopped(name: str, place: Path, stop: Stop) -> bool:
    """Give a command anew that is stopped there; False if it has fewer operations."""
    prepare(place)
    code, said = give(name, place, stop), (place / "said").read_text()
    if stop.how != signal.SIGKILL:
        if code == 130:
            check_kept(name, place, f"{name}, {stop}")
        assert code in (0, 130), f"{name}, {stop}: {code}: {said}"
        return (place / "sent").exists()
    assert code in (0, -signal.SIGKILL), f"{name}, {stop}: it failed by itself: {said}"
    return code != 0


def check_kept(name: str, place: Path, where: str) -> None:
    """Every round that was trained has its line, and a checkpoint is as far."""
    if name == "train-agent":
        return  # what its episodes train is not kept
    folders = [p.parent for p in (place / "out").rglob("rounds.jsonl")]
    lines = {p: len((p / "rounds.jsonl").read_bytes().splitlines()) for p in folders}
    saved = {p: max(CheckpointFolder(p / "checkpoint").rounds, default=0) for p in folders}
    done = set((place / "done").read_text().splitlines())
    assert lines == saved and sum(lines.values()) == len(done), f"{where}: {lines}, {saved}, {done}"


def check_resumes(name: str, place: Path, expected: dict[str, str], where: str) -> None:
    code = give(name, place)
    assert code == 0, f"{where}: cannot go on ({code}): {(place / 'said').read_text()}"
    wrong = differences(results(place / "out"), expected)
    assert not wrong, f"{where}: {wrong}"


def warm(place: Path, names: list[str]) -> None:
    """Import here, once, what every child would import again."""
    os.environ["UNDRIFT_DATA"] = str(place / "nothing")  # then examples are random
    if "compare" in names:
        import matplotlib.backends.backend_agg
        import matplotlib.pyplot  # noqa: F401
    if "train-agent" in names:
        import undrift.agent.making  # noqa: F401
    prepare(place / "warm")
    os.chdir(place / "warm")
    with contextlib.redirect_stdout(io.StringIO()):
        assert COMMANDS["run"]() == 0


def whole(name: str, place: Path) -> tuple[dict[str, str], dict[str, float]]:
    """Give a command that nothing stops; what it leaves, how many operations and seconds it has."""
    prepare(place / "whole")
    began = time.monotonic()
    code = give(name, place / "whole")
    seconds = time.monotonic() - began
    assert code == 0, (place / "whole" / "said").read_text()
    count = (place / "whole" / "count").stat().st_size
    return results(place / "whole" / "out"), {"operations": count, "seconds": seconds}


def main(place: Path, *plans: str) -> dict[str, dict[str, float]]:
    """Stop commands at operations: killed at moments of them, or by a signal.

    A plan is "COMMAND FIRST STEP TIMES MOMENT...": from the first operation every so many, at most
    so often.
    """
    words = [plan.split() for plan in plans]
    warm(place, [name for name, *_ in words])
    return {name: stop_at(name, place, *map(int, at[:3]), at[3:]) for name, *at in words}


def stop_at(
    name: str, place: Path, first: int, step: int, times: int, moments: list[str]
) -> dict[str, float]:
    expected, told = whole(name, place)
    for moment in moments:
        told[moment] = 0
        while told[moment] < times:
            stop = Stop(first + step * int(told[moment]), moment)
            if moment in ("SIGINT", "SIGTERM", "SIGHUP"):
                stop = stop._replace(moment="before", how=signal.Signals[moment])
            if not stopped(name, place / "stopped", stop):
                break
            check_resumes(name, place / "stopped", expected, f"{name}, {stop}")
            told[moment] += 1
    return told


def at_random(place: Path, name: str, how: str, times: str) -> dict[str, float]:
    """Send a command signals at random moments, and give it again each time."""
    warm(place, [name])
    expected, told = whole(name, place)
    number, chance, at = signal.Signals[how], random.Random(f"{name} {how}"), place / "stopped"
    told |= {"stopped": 0, "complete": 0}
    for i in range(int(times)):
        prepare(at)
        child = start(name, at)
        time.sleep(told["seconds"] * (i + chance.random()) / int(times))
        with contextlib.suppress(ProcessLookupError):
            tell(child, number)
        code = forked.finish(child)
        where = f"{name}, {how} number {i}"
        assert code in (0, 130), f"{where}: {code}: {(at / 'said').read_text()}"
        if code == 130:
            check_kept(name, at, where)
        told["stopped" if code else "complete"] += 1
        check_resumes(name, at, expected, where)
    return told
