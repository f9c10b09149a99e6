"""What a terminal view knows: the runs that go on, those that are done, and how long they take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

from undrift.experiment.events import Record, RunInfo
from undrift.metrics import lower_is_better
from undrift.report.terminal_text import cells, clean, duration

SHOWN = ("test_accuracy", "test_loss", "train_loss")  # the first that a run has is shown
SMOOTHING = 0.3  # weight of the latest round in the shown speed
Key = tuple[str, str, int, Path | None]


class Style(NamedTuple):
    """What the terminal can show."""

    colour: bool = False
    unicode: bool = True


@dataclass
class RunView:
    """One run as the view follows it; times are the view's clock."""

    run: RunInfo
    began: float
    past: int  # rounds done before: not measured
    round: int
    speed: float | None = None  # local steps per second, of all clients together
    first_at: float | None = None  # when the first measured round ended
    first_took: float | None = None  # its own seconds, without what was set up before it
    last_at: float = 0.0
    curves: dict[str, list[tuple[int, float]]] = field(default_factory=dict)

    @property
    def was_complete(self) -> bool:
        """Tell whether nothing was left to do when this run was started here."""
        return self.past >= self.run.rounds

    @property
    def curve(self) -> tuple[str, list[tuple[int, float]]]:
        """Return the measure that is shown, with its rounds and values."""
        found = [name for name in SHOWN if self.curves.get(name)]
        return (found[0], self.curves[found[0]]) if found else ("", [])


@dataclass
class ViewState:
    """Everything a picture of the view is drawn from."""

    total: int | None = None
    style: Style = field(default_factory=Style)
    began: float = 0.0
    now: float = 0.0
    name: str = ""
    active: dict[Key, RunView] = field(default_factory=dict)
    finished: int = 0
    failed: int = 0
    stopped: int = 0
    side_by_side: int = 1  # the most runs that went on at the same time
    lengths: list[float] = field(default_factory=list)  # seconds of whole runs, where measured
    label_width: int = 12  # cells of the widest label so far: keeps lines aligned


def key_of(run: RunInfo) -> Key:
    """Tell runs apart; a RunInfo itself holds tables and cannot be a key."""
    return run.name, run.label, run.seed, run.folder


def start_run(state: ViewState, run: RunInfo, past: Sequence[Record]) -> RunView:
    """Take in a run that begins or goes on."""
    done = round_of(past[-1]) if past else 0
    view = RunView(run, began=state.now, past=done, round=done)
    for record in past:
        _take_measures(view, record)
    state.name = state.name or run.name
    state.active[key_of(run)] = view
    state.side_by_side = max(state.side_by_side, len(state.active))
    state.label_width = max(state.label_width, cells(clean(run.label)))
    return view


def take_round(state: ViewState, view: RunView, record: Record) -> None:
    """Take in what is known after one more round."""
    view.round = round_of(record, view.round + 1)
    view.last_at = state.now
    seconds, steps = number_in(record, "seconds"), number_in(record, "client_steps")
    if view.first_at is None:
        view.first_at, view.first_took = state.now, seconds
    if seconds and steps is not None:
        speed = steps / seconds
        view.speed = speed if view.speed is None else view.speed + SMOOTHING * (speed - view.speed)
    _take_measures(view, record)


def end_run(state: ViewState, run: RunInfo, error: BaseException | None = None) -> RunView:
    """Take a run out; one that was never announced counts too."""
    view = state.active.pop(key_of(run), None) or RunView(run, state.now, past=0, round=0)
    pace = seconds_per_round(view)
    if error is None and pace is not None:
        state.lengths.append(pace * max(view.round, 1))
    state.finished += error is None
    state.failed += isinstance(error, Exception)
    state.stopped += error is not None and not isinstance(error, Exception)
    return view


def ended(state: ViewState) -> int:
    """Count the runs that are over, well or not."""
    return state.finished + state.failed + state.stopped


def seconds_per_round(view: RunView) -> float | None:
    """Measure the pace since this run began here; start-up is left out as soon as it can be."""
    measured = view.round - view.past
    if view.first_at is None or measured < 1:
        return None
    if measured == 1:
        return view.last_at - view.began if view.first_took is None else view.first_took
    return (view.last_at - view.first_at) / (measured - 1)


def seconds_left(view: RunView, now: float) -> float | None:
    """Estimate when a run ends, from its own measured rounds alone."""
    pace = seconds_per_round(view)
    if pace is None:
        return None
    return max(0.0, pace * (view.run.rounds - view.round) - (now - view.last_at))


def all_seconds_left(state: ViewState) -> float | None:
    """Estimate when everything ends; None without a total or a measured round."""
    left = [seconds_left(view, state.now) for view in state.active.values()]
    known = [seconds for seconds in left if seconds is not None]
    lengths = state.lengths or _expected_lengths(state)
    if state.total is None or not lengths:
        return None
    mean = sum(lengths) / len(lengths)
    waiting = max(0, state.total - ended(state) - len(left))
    work = sum(known) + mean * (waiting + len(left) - len(known))
    return max(work / state.side_by_side, max(known, default=0.0))


def _expected_lengths(state: ViewState) -> list[float]:
    paces = [(seconds_per_round(view), view.run.rounds) for view in state.active.values()]
    return [pace * rounds for pace, rounds in paces if pace is not None]


def best_of(name: str, curve: Sequence[tuple[int, float]]) -> tuple[int, float]:
    """Return the round and the value of the best measurement."""
    sign = -1 if lower_is_better(name) else 1
    finite = [(number, value) for number, value in curve if isfinite(value)]
    return max(finite or curve, key=lambda point: sign * point[1])


def round_of(record: Record, otherwise: int = 0) -> int:
    """Return a record's round."""
    return int(number_in(record, "round") or otherwise)


def spent_text(view: RunView, now: float) -> str:
    """Say how long a run took here, and from where on if it was resumed."""
    if view.was_complete:
        return f"{view.round} rounds, done before"
    since = f" since round {view.past}" if view.past else ""
    return f"{view.round} rounds in {duration(now - view.began)}{since}"


def number_in(record: Mapping[str, Any], name: str) -> float | None:
    """Return a record's number, None where there is none."""
    value = record.get(name)
    return float(value) if isinstance(value, Real) else None


def _take_measures(view: RunView, record: Record) -> None:
    for name in SHOWN:
        value = number_in(record, name)
        if value is not None:
            view.curves.setdefault(name, []).append((round_of(record), value))
