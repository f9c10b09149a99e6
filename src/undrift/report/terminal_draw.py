"""The view as lines of text: a pure function of its state and the terminal's size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from undrift.metrics import in_percent
from undrift.report.sparkline import ASCII, BLOCKS, sparkline
from undrift.report.terminal_state import (
    RunView,
    Style,
    ViewState,
    all_seconds_left,
    best_of,
    seconds_left,
    spent_text,
)
from undrift.report.terminal_text import amount, cells, clean, duration, fit, pad

TONES = {"plain": "", "quiet": "2", "strong": "1", "bar": "36", "good": "32", "bad": "31"}
GAP = "  "
LABEL_CELLS = 28  # longer labels are cut
BAR = (8, 32)  # least and most cells
CURVE = (8, 32)
GIVEN_UP = ("curve", "speed", "left", "bar", "seed", "value")  # in this order, if it gets narrow
NAMES = {"test_accuracy": "acc", "test_loss": "loss", "train_loss": "train loss", "": ""}


class Span(NamedTuple):
    """A piece of a line in one tone."""

    text: str
    tone: str = "plain"


Line = list[Span]


def render(state: ViewState, width: int, height: int) -> list[str]:
    """Draw the live block: a header and a line per run, within the terminal's size."""
    room, rows = max(1, width - 1), max(1, height - 1)
    runs = list(state.active.values())
    shown = runs if len(runs) < rows else runs[: max(0, rows - 2)]
    apart: list[Line] = [[]] if len(runs) + 2 <= rows else []  # what is done stands apart
    lines = [*apart, _header(state, room), *_table(state, shown, room)]
    if len(shown) < len(runs):
        lines.append([Span(f"{GAP}and {len(runs) - len(shown)} more runs", "quiet")])
    return [paint(line, room, state.style) for line in lines[:rows]]


def paint(line: Iterable[Span], room: int, style: Style) -> str:
    """Join spans to one line of at most `room` cells."""
    more, painted = "…" if style.unicode else "~", ""
    for span in line:
        text = fit(span.text, room, more)
        room -= cells(text)
        code = TONES[span.tone] if style.colour and text else ""
        painted += f"\x1b[{code}m{text}\x1b[0m" if code else text
        if text != span.text:
            break
    return painted.rstrip(" ")


def done_line(state: ViewState, view: RunView, room: int) -> str:
    """Draw what stays on the screen of a run that is complete."""
    mark = Span("✓ " if state.style.unicode else "+ ", "good")
    spent = Span(GAP + spent_text(view, state.now), "quiet")
    groups = [[mark, *_who(state, view, room)], *_results(view), [spent]]
    return paint(_whole(groups, room), room, state.style)


def _results(view: RunView) -> list[Line]:
    name, curve = view.curve
    if not curve:
        return []
    best_round, best = best_of(name, curve)
    last_text, best_text = (f"{value_text(name, value):>6}" for value in (curve[-1][1], best))
    where = f" in round {best_round:>{len(str(view.run.rounds))}}"
    return [
        [Span(f"{GAP}{NAMES[name]} ", "quiet"), Span(last_text)],
        [Span(f"{GAP}best ", "quiet"), Span(best_text), Span(where, "quiet")],
    ]


def _whole(groups: Sequence[Line], room: int) -> Line:
    """Take as many groups as there is room for: half a number would be a wrong one."""
    line: Line = []
    for group in groups:
        if line and sum(cells(span.text) for span in [*line, *group]) > room:
            break
        line += group
    return line


def failed_line(state: ViewState, view: RunView, error: BaseException, room: int) -> str:
    """Draw what stays on the screen of a run that stopped early."""
    mark = Span("✗ " if state.style.unicode else "x ", "bad")
    why = Span(f"{GAP}{why_text(error)}", "bad")
    where = Span(f" after round {view.round}", "quiet")
    story = Span(f": {error_text(error)}") if isinstance(error, Exception) else Span("")
    return paint([mark, *_who(state, view, room), why, where, story], room, state.style)


def final_line(state: ViewState, room: int) -> str:
    """Draw the last line: what has become of everything."""
    return paint(_header(state, room, ended=True), room, state.style)


def value_text(name: str, value: float) -> str:
    """Write a share in per cent, everything else in four digits.

    >>> value_text("test_accuracy", 0.7134), value_text("test_loss", 0.43219)
    ('71.3 %', '0.4322')
    """
    return f"{100 * value:.1f} %" if in_percent(name, [value]) else f"{value:.4g}"


def why_text(error: BaseException) -> str:
    """Tell a failure from the user's own stop."""
    return "failed" if isinstance(error, Exception) else "stopped"


def error_text(error: BaseException) -> str:
    """Write an error in one line."""
    return clean(f"{type(error).__name__}: {error}")


def _who(state: ViewState, view: RunView, room: int) -> Line:
    width = _label_width(state, room)
    label = fit(clean(view.run.label), width, "…" if state.style.unicode else "~")
    return [Span(pad(label, width), "strong"), Span(f"{GAP}seed {view.run.seed_text}", "quiet")]


def _label_width(state: ViewState, room: int) -> int:
    return min(state.label_width, LABEL_CELLS, max(6, room // 4))


def _header(state: ViewState, room: int, ended: bool = False) -> Line:
    spans = [Span(fit(clean(state.name), 40), "strong")]
    if state.total != 1:
        of = f"/{state.total}" if state.total is not None else ""
        spans.append(Span(f"{state.finished}{of} runs"))
    spoilt = {"failed": state.failed, "stopped": state.stopped}
    spans += [Span(f"{count} {word}", "bad") for word, count in spoilt.items() if count]
    left = None if ended else all_seconds_left(state)
    if left is not None:
        spans.append(Span(f"ETA {duration(left)}", "quiet"))
    word = "in" if ended else "elapsed"
    spans.append(Span(f"{word} {duration(state.now - state.began)}", "quiet"))
    return _whole([spans[:1], *([Span(GAP + " "), span] for span in spans[1:])], room)


def _table(state: ViewState, runs: Sequence[RunView], room: int) -> list[Line]:
    """Draw a line per run; all lines have the same columns, as many as there is room for."""
    texts = [_texts(state, view) for view in runs]
    widths = {
        name: max((cells(row[name]) for row in texts), default=0) for name in _texts_of(texts)
    }
    widths |= {"label": _label_width(state, room), "bar": BAR[0], "curve": CURVE[0]}
    widths = {name: width for name, width in widths.items() if width}
    for name in GIVEN_UP:
        if _needed(widths) > room:
            widths.pop(name, None)
    for name, most in (("bar", BAR[1] // 2), ("curve", CURVE[1]), ("bar", BAR[1])):
        _grow(widths, name, room, most)
    return [_row(state, view, row, widths) for view, row in zip(runs, texts, strict=True)]


def _texts_of(texts: Sequence[dict[str, str]]) -> list[str]:
    return list(texts[0]) if texts else []


def _needed(widths: dict[str, int]) -> int:
    return sum(width + len(GAP) for width in widths.values())


def _grow(widths: dict[str, int], name: str, room: int, most: int) -> None:
    if name in widths:
        widths[name] = min(most, widths[name] + max(0, room - _needed(widths)))


def _texts(state: ViewState, view: RunView) -> dict[str, str]:
    """Write every column of a run, in the order in which they stand."""
    name, curve = view.curve
    left = seconds_left(view, state.now)
    rounds = str(view.run.rounds)
    return {
        "label": clean(view.run.label),
        "seed": f"seed {view.run.seed_text}",
        "bar": "",
        "progress": f"{view.round:>{len(rounds)}}/{rounds}",
        "left": f"ETA {duration(left)}" if left is not None else "",
        "value": f"{NAMES[name]} {value_text(name, curve[-1][1])}" if curve else "",
        "speed": f"{amount(view.speed)} steps/s" if view.speed is not None else "",
        "curve": "",
    }


def _row(state: ViewState, view: RunView, texts: dict[str, str], widths: dict[str, int]) -> Line:
    line: Line = []
    for name, width in widths.items():
        line.append(Span(GAP))
        line += _column(name, view, texts[name], width, state.style)
    return line


def _column(name: str, view: RunView, text: str, width: int, style: Style) -> Line:
    if name == "label":
        return [Span(pad(fit(text, width, "…" if style.unicode else "~"), width), "strong")]
    if name == "bar":
        return _bar(view, width, style)
    if name == "curve":
        values = [value for _, value in view.curve[1]]
        return [Span(sparkline(values, width, BLOCKS if style.unicode else ASCII), "bar")]
    tone = "plain" if name in ("value", "progress") else "quiet"
    return [Span(" " * (width - cells(text)) + text, tone)]


def _bar(view: RunView, width: int, style: Style) -> Line:
    share = min(1.0, view.round / max(1, view.run.rounds))
    done = int(width * share)
    full, empty = "━─" if style.unicode else "#."
    return [Span(full * done, "bar"), Span(empty * (width - done), "quiet")]
