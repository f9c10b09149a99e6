"""Small still charts of shares: ROC, precision and recall, calibration; a table behind each."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

from undrift.report.curves import COLOURS, DASHES
from undrift.report.judged import Bins, Judged, Line, shown

WIDTH, HEIGHT = 360, 320
LEFT, RIGHT, TOP, BOTTOM = 44, 12, 12, 42
MOST_ROWS = 25  # of the table behind a curve
TICKS = (0.0, 0.25, 0.5, 0.75, 1.0)


class Axes(NamedTuple):
    """Names of the two axes."""

    x: str
    y: str


class Chart(NamedTuple):
    """A picture, its name and what it says, and the table behind it."""

    name: str
    axes: Axes
    about: str  # for whoever does not see it
    inside: str  # SVG
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    lines: tuple[str, ...] = ()  # names of the lines, where there are several


def charts_of(judged: Judged) -> list[Chart]:
    """Draw what the evaluation has curves of."""
    made = []
    if roc := _there(judged.roc):
        made.append(_roc(judged, roc))
    if found := _there(judged.precision_recall):
        made.append(_precision_recall(judged, found))
    if judged.calibration is not None and judged.calibration.examples:
        made.append(_calibration(judged, judged.calibration))
    return made


def _there(lines: Sequence[Line]) -> list[Line]:
    """Leave out classes without a curve."""
    return [line for line in lines if line.x]


def _value(judged: Judged, metric: str) -> str:
    return shown(metric, dict(judged.metrics).get(metric))


def _roc(judged: Judged, lines: Sequence[Line]) -> Chart:
    area = f"AUC {_value(judged, 'auc')}"
    inside = _guide(0, 0, 1, 1, "dotted: guessing") + _drawn(lines)
    axes = Axes("false positives", "true positives")
    about = f"{area}; 0.5 is guessing, 1 is perfect."
    columns, rows = _table(lines, ("false positives", "true positives"))
    return Chart(f"ROC curve, {area}", axes, about, inside, columns, rows, _names(lines))


def _precision_recall(judged: Judged, lines: Sequence[Line]) -> Chart:
    area = f"average precision {_value(judged, 'average_precision')}"
    inside, about = _drawn(lines), f"{area.capitalize()}; 1 is perfect."
    if len(lines) == 1 and judged.confusion:
        share = _share_of(judged, lines[0].name)
        text = f"guessing: {_percent(share)}"
        inside = _guide(0, share, 1, share, text) + inside
        about += f" Guessing has precision {_percent(share)}."
    axes = Axes("recall", "precision")
    columns, rows = _table(lines, ("recall", "precision"))
    return Chart(f"Precision and recall, {area}", axes, about, inside, columns, rows, _names(lines))


def _share_of(judged: Judged, name: str) -> float:
    total = sum(map(sum, judged.confusion))
    place = judged.classes.index(name) if name in judged.classes else 0
    return sum(judged.confusion[place]) / total if total else 0.0


def _calibration(judged: Judged, bins: Bins) -> Chart:
    error = f"ECE {_value(judged, 'ece')}"
    most = max(bins.examples) or 1
    line = Line("", bins.said, bins.found)
    dots = "".join(
        f'<circle class="bin" cx="{_x(said):.1f}" cy="{_y(found):.1f}" '
        f'r="{2.5 + 5.5 * (count / most) ** 0.5:.1f}"/>'
        for count, said, found in zip(*bins, strict=True)
    )
    inside = _guide(0, 0, 1, 1, "dotted: as it should be") + _drawn([line]) + dots
    of = f"class {judged.classes[1]}" if len(judged.classes) == 2 else "most probable class"
    axes = Axes(f"probability of {of}", "share that is so")
    about = f"{error}, the mean distance from the diagonal; the larger a dot, the more rows."
    rows = tuple(
        (str(count), _percent(said), _percent(found))
        for count, said, found in zip(*bins, strict=True)
    )
    columns = ("rows", "mean probability", "share that is so")
    return Chart(f"Calibration, {error}", axes, about, inside, columns, rows)


# -------------------------------------------------------------------------------------- drawing
def look_of(place: int) -> str:
    """Give a line a colour and a dash: neighbours differ in both, no two of ten are alike.

    >>> look_of(0), look_of(1), look_of(8)
    ('c0 d0', 'c1 d1', 'c0 d1')
    """
    turn, colour = divmod(place, len(COLOURS))
    return f"c{colour} d{(colour + turn) % len(DASHES)}"


def _x(value: float) -> float:
    return LEFT + min(1.0, max(0.0, value)) * (WIDTH - LEFT - RIGHT)


def _y(value: float) -> float:
    return HEIGHT - BOTTOM - min(1.0, max(0.0, value)) * (HEIGHT - TOP - BOTTOM)


def _drawn(lines: Iterable[Line]) -> str:
    """Draw each line in a colour and dash of its own."""
    made = []
    for place, line in enumerate(lines):
        points = " ".join(f"{_x(a):.1f},{_y(b):.1f}" for a, b in zip(line.x, line.y, strict=True))
        made.append(f'<polyline class="mean {look_of(place)}" points="{points}"/>')
    return "".join(made)


def _guide(x1: float, y1: float, x2: float, y2: float, text: str) -> str:
    """Draw a line to compare with, and its name."""
    place = f'x1="{_x(x1):.1f}" y1="{_y(y1):.1f}" x2="{_x(x2):.1f}" y2="{_y(y2):.1f}"'
    level = y1 == y2
    at = (_x(0.02), _y(y1) + (14 if y1 > 0.1 else -6)) if level else (_x(0.99), _y(0.03))
    anchor = "start" if level else "end"
    name = f'<text class="target-name" x="{at[0]:.1f}" y="{at[1]:.1f}" text-anchor="{anchor}">'
    return f'<line class="target" {place}/>{name}{escape(text)}</text>'


def _frame(axes: Axes) -> str:
    made = []
    for tick in TICKS:
        x, y, text = _x(tick), _y(tick), f"{100 * tick:g}"
        made += [
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>',
            f'<text x="{LEFT - 8}" y="{y:.1f}" dy="0.35em" text-anchor="end">{text}</text>',
            f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 17}" text-anchor="middle">{text}</text>',
        ]
    middle, low = (LEFT + WIDTH - RIGHT) / 2, HEIGHT - BOTTOM
    made += [
        f'<line class="base" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{low}" y2="{low}"/>',
        f'<text class="axis-name" x="{middle:g}" y="{HEIGHT - 6}" text-anchor="middle">'
        f"{escape(_cut(axes.x, 44))} (%)</text>",
        f'<text class="axis-name" transform="translate(11 {(TOP + low) / 2:g}) rotate(-90)" '
        f'text-anchor="middle">{escape(_cut(axes.y, 36))} (%)</text>',
    ]
    return "".join(made)


def _cut(text: str, letters: int) -> str:
    return text if len(text) <= letters else f"{text[: letters - 1]}…"


def chart_html(chart: Chart, name: str) -> str:
    """Write a chart: its name, the picture, names of lines, and the table that opens below."""
    picture = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="{name}-title '
        f'{name}-about"><title id="{name}-title">{escape(chart.name)}</title>'
        f'<desc id="{name}-about">{escape(chart.about)}</desc>'
        f'<g aria-hidden="true">{_frame(chart.axes)}{chart.inside}</g></svg>'
    )
    return (
        f'<figure class="chart plot">\n<figcaption>{escape(chart.name)}</figcaption>\n{picture}\n'
        f"{_legend(chart.lines)}<details><summary>Numbers of this chart</summary>\n"
        f"{plain_table(chart.columns, chart.rows, chart.name)}</details>\n</figure>\n"
    )


def _legend(names: Sequence[str]) -> str:
    if not names:
        return ""
    line = '<line x1="1" x2="29" y1="5" y2="5"/>'
    items = "".join(
        f'<li><svg class="swatch {look_of(place)}" viewBox="0 0 30 10" aria-hidden="true">{line}'
        f"</svg><span>{escape(name)}</span></li>"
        for place, name in enumerate(names)
    )
    return f'<ul class="names">{items}</ul>\n'


# --------------------------------------------------------------------------------------- tables
def _names(lines: Sequence[Line]) -> tuple[str, ...]:
    return tuple(line.name for line in lines) if len(lines) > 1 else ()


def _table(
    lines: Sequence[Line], axes: tuple[str, str]
) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Give points of the lines; the class where there are several."""
    several = len(lines) > 1
    rows = [
        ((line.name,) if several else ()) + (_percent(x), _percent(y))
        for line in lines
        for x, y in thinned([*zip(line.x, line.y, strict=True)])
    ]
    return (("class",) if several else ()) + axes, tuple(rows)


def thinned(
    points: Sequence[tuple[float, float]], most: int = MOST_ROWS
) -> Sequence[tuple[float, float]]:
    """Keep so many points, the first and the last among them.

    >>> thinned([(i, i) for i in range(5)], 3)
    [(0, 0), (2, 2), (4, 4)]
    """
    if len(points) <= most:
        return points
    places = (round(i * (len(points) - 1) / (most - 1)) for i in range(most))
    return [points[i] for i, _ in itertools.groupby(places)]


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def plain_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], name: str, first: str = "td"
) -> str:
    """Write a table that scrolls within its place; numbers stand to the right."""
    heads = "".join(f'<th scope="col"><span>{escape(c)}</span></th>' for c in columns)
    body = "".join(f"<tr>{_cells(row, first)}</tr>\n" for row in rows)
    return (
        f'<div class="scroll" role="region" aria-label="{escape(name)}" tabindex="0">'
        f'<table class="results small"><thead><tr>{heads}</tr></thead>\n<tbody>\n{body}</tbody>'
        "</table></div>\n"
    )


def _cells(row: Sequence[str], first: str) -> str:
    scope = ' scope="row"' if first == "th" else ""
    head = f"<{first}{scope}>{escape(row[0])}</{first}>"
    return head + "".join(f'<td class="number">{escape(cell)}</td>' for cell in row[1:])
