"""The view where there is no terminal: a line now and then, without escape codes."""

from __future__ import annotations

from collections.abc import Sequence

from undrift.report.terminal_draw import NAMES, error_text, value_text, why_text
from undrift.report.terminal_state import (
    RunView,
    ViewState,
    best_of,
    key_of,
    seconds_left,
    spent_text,
)
from undrift.report.terminal_text import amount, clean, duration

PARTS = 10  # a line for every tenth of the rounds
AT_LEAST_EVERY = 30.0  # seconds


class Pace:
    """Decides which rounds of which run are worth a line."""

    def __init__(self) -> None:
        self.last: dict[object, tuple[int, float]] = {}  # run: tenths done, when it was told

    def begin(self, view: RunView, now: float) -> None:
        """Remember where a run stands when it begins."""
        self.last[key_of(view.run)] = (_parts(view), now)

    def is_due(self, view: RunView, now: float) -> bool:
        """Tell whether this round gets a line; if so, the next one is counted from here."""
        parts, told = self.last.get(key_of(view.run), (0, now))
        if _parts(view) <= parts and now - told < AT_LEAST_EVERY:
            return False
        self.last[key_of(view.run)] = (_parts(view), now)
        return True


def _parts(view: RunView) -> int:
    return PARTS * view.round // max(1, view.run.rounds)


def start_text(view: RunView) -> str:
    """Say that a run begins, or where it goes on."""
    rounds = view.run.rounds
    if view.past:
        return f"{_who(view)}: resumes after round {view.past} of {rounds}"
    return f"{_who(view)}: starts, {rounds} rounds"


def round_text(view: RunView, now: float) -> str:
    """Say how far a run is."""
    share = 100 * view.round // max(1, view.run.rounds)
    left = seconds_left(view, now)
    parts = [f"round {view.round}/{view.run.rounds} ({share} %)", *_value_texts(view)]
    if view.speed is not None:
        parts.append(f"{amount(view.speed)} steps/s")
    if left is not None:
        parts.append(f"ETA {duration(left)}")
    return f"{_who(view)}: {', '.join(parts)}"


def done_text(state: ViewState, view: RunView) -> str:
    """Say what has become of a run that is complete."""
    parts = [spent_text(view, state.now), *_value_texts(view), *_best_texts(view)]
    if state.total != 1:
        of = f" of {state.total}" if state.total is not None else ""
        parts.append(f"{state.finished}{of} runs done")
    return f"{_who(view)}: finished, {', '.join(parts)}"


def failed_text(view: RunView, error: BaseException) -> str:
    """Say why a run stopped early."""
    story = f": {error_text(error)}" if isinstance(error, Exception) else ""
    return f"{_who(view)}: {why_text(error)} after round {view.round}{story}"


def _who(view: RunView) -> str:
    return f"{clean(view.run.label)} seed {view.run.seed_text}"


def _value_texts(view: RunView) -> Sequence[str]:
    name, curve = view.curve
    return [f"{NAMES[name]} {value_text(name, curve[-1][1])}"] if curve else []


def _best_texts(view: RunView) -> Sequence[str]:
    name, curve = view.curve
    if not curve:
        return []
    number, value = best_of(name, curve)
    return [f"best {value_text(name, value)} in round {number}"]
