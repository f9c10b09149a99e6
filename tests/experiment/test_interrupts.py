"""A signal at any phase: what is trained gets its line and its checkpoint."""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from undrift.experiment import batch, pool, session
from undrift.experiment.batch import run_together
from undrift.experiment.folder import RunFolder
from undrift.experiment.history import History
from undrift.experiment.measure import Measure
from undrift.experiment.run import run
from undrift.experiment.session import Session
from undrift.experiment.spec import Experiment
from undrift.fleet import Fleet
from undrift.interrupts import SIGNALS, Shield, StoppedAtOnce, deaf_children, stop_on_signals
from undrift.state import disk
from undrift.state.checkpoint import CheckpointFolder
from undrift.trainer import Trainer

from .test_run import Recorder, numbers
from .tiny import tiny

running = importlib.import_module("undrift.experiment.run")  # `run` is a function there
ROUNDS = 3
CHANGES = ("algorithm.use=scaffold", f"rounds={ROUNDS}")


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Hear signals as the command line does."""
    before = [signal.getsignal(number) for number in SIGNALS]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    stop_on_signals()
    yield
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


class Count:
    """How many rounds have become the present of each trainer."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._done: dict[int, int] = {}
        taken = Trainer._taken

        def counted(trainer: Trainer, *given: Any) -> Any:
            found = taken(trainer, *given)
            self._done[trainer.seeds.run] = trainer.rounds_done
            return found

        patch.setattr(Trainer, "_taken", counted)

    def done(self, seed: int = 0) -> int:
        return self._done.get(tiny(f"seed={seed}").seeds.run, 0)


def check_kept(folder: Path, done: int) -> None:
    """Every round that was done has its line, and the checkpoint is as far."""
    assert len(RunFolder(folder).history()) == done
    assert max(CheckpointFolder(folder / "checkpoint").rounds, default=0) == done
    assert not [p for p in folder.rglob("*") if p.name.startswith(disk.TEMPORARY)]


WHOLE: dict[int, list[dict[str, Any]]] = {}


def check_ends(history: History, seed: int = 0) -> None:
    if seed not in WHOLE:
        WHOLE[seed] = numbers(run(tiny(*CHANGES, f"seed={seed}")))
    assert numbers(history) == WHOLE[seed]


# ------------------------------------------------------------------------------------- named phases
PHASES: dict[str, tuple[Any, str]] = {
    "building": (running, "build"),
    "writing the experiment": (RunFolder, "begin"),
    "loading": (Trainer, "load"),
    "training": (Trainer, "finished"),
    "a round becomes the present": (Trainer, "_taken"),
    "judging": (Measure, "measuring"),
    "reading results": (Measure, "told"),
    "writing a line": (RunFolder, "append"),
    "telling listeners": (Recorder, "round"),
    "syncing lines": (RunFolder, "sync"),
    "saving": (Trainer, "save"),
    "writing the model": (RunFolder, "write_model"),
    "writing the summary": (RunFolder, "finish"),
}


def signalled(patch: pytest.MonkeyPatch, phase: str, call: int, after: bool, number: int) -> None:
    """Send a signal before or after the n-th call of a phase."""
    place, name = PHASES[phase]
    real, calls = getattr(place, name), [0]

    def noisy(*given: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == call and not after:
            signal.raise_signal(number)
        found = real(*given, **named)
        if calls[0] == call and after:
            signal.raise_signal(number)
        return found

    patch.setattr(place, name, noisy)


def stop_at(place: Path, phase: str, call: int, after: bool, number: int, seconds: float) -> bool:
    """Send a signal at a phase of a run, and go on; tell whether the signal stopped it."""
    stopped = False
    with pytest.MonkeyPatch.context() as patch:
        count = Count(patch)
        signalled(patch, phase, call, after, number)
        try:
            run(tiny(*CHANGES), place, listeners=[Recorder()], checkpoint_seconds=seconds)
        except KeyboardInterrupt:
            stopped = True
    if place.is_dir():
        check_kept(place, count.done())
    check_ends(run(tiny(*CHANGES), place))
    return stopped


@pytest.mark.parametrize("phase", PHASES)
def test_a_signal_at_a_phase_loses_nothing(tmp_path: Path, phase: str) -> None:
    first = list(PHASES).index(phase)
    numbers = [SIGNALS[(first + i) % 3] for i in range(3)]
    stopped = [
        stop_at(tmp_path / "0", phase, 1, False, numbers[0], 1e9),
        stop_at(tmp_path / "1", phase, 1, True, numbers[1], 0.0),
        stop_at(tmp_path / "2", phase, 2, False, numbers[2], 1e9),
    ]
    assert sum(stopped) >= 2, "the phase was not reached"


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, 1e9])
@pytest.mark.parametrize("phase", PHASES)
def test_every_signal_at_every_phase_loses_nothing(
    tmp_path: Path, phase: str, seconds: float
) -> None:
    for number in SIGNALS:
        for i, after in enumerate((False, True) * ROUNDS):
            place = tmp_path / f"{number}-{i}"
            stop_at(place, phase, 1 + i // 2, after, number, seconds)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, SystemExit])
def test_what_stops_an_evaluation_without_a_signal_loses_nothing_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    measuring, calls = Measure.measuring, [0]

    def failing(*given: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2:
            raise error
        return measuring(*given, **named)

    count = Count(monkeypatch)
    monkeypatch.setattr(Measure, "measuring", failing)
    with pytest.raises(error):
        run(tiny(*CHANGES), tmp_path)
    check_kept(tmp_path, count.done())
    check_ends(run(tiny(*CHANGES), tmp_path))


@pytest.mark.parametrize("phase", ["judging", "writing a line", "saving"])
def test_ctrl_c_twice_stops_at_once_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    with monkeypatch.context() as patch:
        for after in (False, False):  # one within the other
            signalled(patch, phase, 1, after, signal.SIGINT)
        with pytest.raises(StoppedAtOnce):
            run(tiny(*CHANGES), tmp_path, checkpoint_seconds=0)
    check_ends(run(tiny(*CHANGES), tmp_path))


def test_a_terminal_that_closes_sends_its_signal_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        count = Count(patch)
        for phase in ("training", "saving"):
            signalled(patch, phase, 1, False, signal.SIGHUP)
        with pytest.raises(KeyboardInterrupt):
            run(tiny(*CHANGES), tmp_path)
    check_kept(tmp_path, count.done())


# --------------------------------------------------------------------------- between any two lines
def codes_of(*places: Any) -> set[CodeType]:
    """Find the functions of modules and classes."""
    found: set[CodeType] = set()
    for place in places:
        for value in vars(place).values():
            value = value.fget if isinstance(value, property) else value
            value = getattr(value, "__wrapped__", value)
            if hasattr(value, "__code__"):
                found.add(value.__code__)
    return found


LINES = codes_of(Session, Shield, RunFolder) | {
    f.__code__
    for f in (
        *(session.train, session.queued_records, running._in_folder, Trainer.advance),
        *(Trainer._taken, batch._train, batch._train_batch, Fleet._one_round),
    )
}


@contextmanager
def signal_at_line(n: int, number: int) -> Iterator[list[int]]:
    """Send a signal before the n-th line of what is watched; counts the lines."""
    seen = [0]

    def lines(frame: Any, event: str, arg: Any) -> Any:
        if event == "line":
            seen[0] += 1
            if seen[0] == n:
                signal.raise_signal(number)
        return lines

    before = sys.gettrace()
    sys.settrace(lambda frame, event, arg: lines if frame.f_code in LINES else None)
    try:
        yield seen
    finally:
        sys.settrace(before)


Work = Callable[[Path], list[History]]


def alone(place: Path) -> list[History]:
    return [run(tiny(*CHANGES), place / "0")]


def together(place: Path) -> list[History]:
    tasks = [(tiny(*CHANGES, f"seed={seed}"), place / str(seed)) for seed in (0, 1)]
    found = run_together(tasks)
    assert all(isinstance(one, History) for one in found)
    return [one for one in found if isinstance(one, History)]


def interrupt_lines(place: Path, work: Work, step: int, patch: pytest.MonkeyPatch) -> int:
    """Send signals at every step-th line; tell how many of the runs were stopped."""
    n, stopped = 1, 0
    while True:
        folder = place / str(n)
        count = Count(patch)
        try:
            with signal_at_line(n, SIGNALS[n % 3]) as seen:
                work(folder)
        except KeyboardInterrupt:
            stopped += 1
        patch.undo()
        for seed in (0, 1):
            if (folder / str(seed)).is_dir():
                check_kept(folder / str(seed), count.done(seed))
        if seen[0] < n:
            return stopped
        for seed, history in enumerate(work(folder)):
            check_ends(history, seed)
        n += step


@pytest.mark.parametrize(("work", "step"), [(alone, 23), (together, 101)])
def test_a_signal_between_two_lines_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: Work, step: int
) -> None:
    assert interrupt_lines(tmp_path, work, step, monkeypatch) >= 8


@pytest.mark.slow
@pytest.mark.parametrize("work", [alone, together])
def test_a_signal_between_any_two_lines_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: Work
) -> None:
    assert interrupt_lines(tmp_path, work, 1, monkeypatch) >= 200


# ------------------------------------------------------------------------------------------ workers
STUBBORN = """import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(60)"""


class Impatient(Recorder):
    """Presses Ctrl-C while workers are at work."""

    def refresh(self) -> None:
        signal.raise_signal(signal.SIGINT)


def two() -> list[Experiment]:
    return [tiny(*CHANGES, f"seed={seed}") for seed in (0, 1)]


def test_workers_that_do_not_end_are_no_kept_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "WORKER", STUBBORN)
    monkeypatch.setattr(pool, "PATIENCE", 0.1)
    with pytest.raises(StoppedAtOnce):
        pool.run_all(two(), tmp_path, jobs=2, listeners=[Impatient()])


def test_a_signal_while_a_worker_is_started_is_heard() -> None:
    with pytest.raises(KeyboardInterrupt), deaf_children():
        signal.raise_signal(signal.SIGINT)


def test_an_ignored_signal_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as `nohup` does
    stop_on_signals()
    with Shield(lambda: False):
        signal.raise_signal(signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_a_handler_of_the_users_own_that_does_not_stop_is_called_every_time() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    torn = [False]
    with Shield(lambda: torn[0]) as shield:
        signal.raise_signal(signal.SIGTERM)
        torn[0] = True
        signal.raise_signal(signal.SIGTERM)
        assert len(heard) == 1
        torn[0] = False
        shield.release()
        assert len(heard) == 2
    signal.raise_signal(signal.SIGTERM)
    assert len(heard) == 3
