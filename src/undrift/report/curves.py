"""Learning curves as picture files: mean over seeds, one standard deviation as a band.

Eight colours, told apart also under the common kinds of colour blindness (each pair was spread in
a perceptual space, as seen normally and under three simulated deficiencies), times four dashes.
"""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from undrift.errors import DataError, MissingExtra, unknown_name
from undrift.report.page_data import (
    Group,
    MeanCurve,
    finite,
    in_percent,
    known_metrics,
    mean_curve,
)
from undrift.state.disk import make_directory, write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# On white, and the same hue on a dark page.
COLOURS = (
    ("#314d92", "#6381db"),
    ("#c2491c", "#ef912e"),
    ("#108670", "#17c397"),
    ("#873cd3", "#bb9cfc"),
    ("#c28b09", "#f1d145"),
    ("#1797ff", "#45e8fd"),
    ("#2e2d0d", "#defad1"),
    ("#872251", "#f32f4a"),
)
DASHES: tuple[tuple[float, ...], ...] = ((), (7, 3.5), (2, 2.5), (10, 3, 2, 3))  # in pixels
FAINT, TEXT = "#e3e7ea", "#333a40"
LABELS_UP_TO = 8  # groups: beyond, names at the ends of the lines would wander too far off
LONGEST_LABEL = 34
WIDTH, HEIGHT = 760, 400  # of the picture inside a page
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 30, 44  # its margins
GAP = 0.062  # between two names at line ends, as a share of the height


class LineStyle(NamedTuple):
    """How a group's line looks everywhere: places of its colour and of its dash."""

    colour: int
    dash: int

    @property
    def light(self) -> str:
        """The colour on white."""
        return COLOURS[self.colour][0]

    @property
    def pattern(self) -> tuple[float, ...]:
        """Lengths of strokes and gaps; empty for a solid line."""
        return DASHES[self.dash]


def line_style(place: int) -> LineStyle:
    """Tell how the group at this place looks: all colours solid, then all dashed, and so on.

    >>> line_style(0), line_style(9).pattern
    (LineStyle(colour=0, dash=0), (7, 3.5))
    """
    return LineStyle(place % len(COLOURS), place // len(COLOURS) % len(DASHES))


def look_of(place: int) -> str:
    """Name the classes under which a page's style knows the line at this place."""
    style = line_style(place)
    return f"c{style.colour} d{style.dash}"


# a label's dollar signs are no formula, whatever a matplotlibrc in the current folder says
PLAIN_TEXT: Any = {"text.parse_math": False, "text.usetex": False}


def metric_label(metric: str, percent: bool) -> str:
    """Write a metric's name as words.

    >>> metric_label("test_accuracy", percent=True)
    'test accuracy (%)'
    """
    name = "".join(c if c.isprintable() else "?" for c in metric)  # of a file, maybe a stranger's
    return name.replace("_", " ") + (" (%)" if percent else "")


def short(label: str, longest: int = LONGEST_LABEL) -> str:
    """Cut a label that would not fit, on one line.

    >>> short("fedavg with a very long name", 10)
    'fedavg wi…'
    """
    line = " ".join(label.split())
    return line if len(line) <= longest else line[: longest - 1] + "…"


def draw_curves(
    path: Path,
    groups: Sequence[Group],
    metric: str,
    *,
    title: str = "",
    target: float | None = None,
) -> list[Path]:
    """Draw one metric of all groups over rounds, as PNG and SVG beside each other."""
    _check_metric(groups, metric)
    try:
        import matplotlib
    except ImportError as error:
        raise MissingExtra(
            "matplotlib is needed to draw curves: pip install 'undrift[plots]'"
        ) from error
    make_directory(Path(path).parent)
    # Fixed ids make the same curves the same file.
    with matplotlib.rc_context({"svg.hashsalt": "undrift", **PLAIN_TEXT}):
        figure = curves_figure(groups, metric, title=title, target=target)
        return [_save(figure, Path(path), suffix) for suffix in (".png", ".svg")]


def curves_figure(
    groups: Sequence[Group], metric: str, *, title: str = "", target: float | None = None
) -> Figure:
    """Make the picture as a matplotlib figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    factor = 100.0 if in_percent(groups, metric) else 1.0
    figure = Figure(figsize=(8.0, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    curves = {g: _scaled(mean_curve(group, metric), factor) for g, group in enumerate(groups)}
    drawn = {g: curve for g, curve in curves.items() if curve.rounds}
    for g, curve in drawn.items():
        _draw_group(axes, curve, line_style(g), 0.13 if len(drawn) <= LABELS_UP_TO else 0.07)
    if target is not None:
        _draw_target(axes, target * factor)
    _dress(axes, metric_label(metric, factor > 1), title)
    name_lines = _name_at_ends if len(drawn) <= LABELS_UP_TO else _name_in_legend
    name_lines(axes, drawn, [short(group.label) for group in groups])
    return figure


def _check_metric(groups: Sequence[Group], metric: str) -> None:
    known = known_metrics(groups)
    if not known:
        raise DataError(f"{metric}: no run has a value to draw. Train at least one round first")
    if metric not in known:
        raise unknown_name("metric", metric, list(known))


def _save(figure: Figure, path: Path, suffix: str) -> Path:
    buffer = io.BytesIO()
    undated = {"Date": None} if suffix == ".svg" else None
    figure.savefig(buffer, format=suffix[1:], dpi=150, metadata=undated)
    target = path.with_suffix(suffix)
    write_atomically(target, [buffer.getvalue()])
    return target


def _scaled(curve: MeanCurve, factor: float) -> MeanCurve:
    return MeanCurve(
        curve.rounds, tuple(factor * m for m in curve.mean), tuple(factor * s for s in curve.std)
    )


def _draw_group(axes: Axes, curve: MeanCurve, style: LineStyle, alpha: float) -> None:
    if any(curve.std):
        axes.fill_between(
            curve.rounds, curve.low, curve.high, color=style.light, alpha=alpha, linewidth=0
        )
    marker = "o" if len(curve.rounds) == 1 else ""
    axes.plot(curve.rounds, curve.mean, marker=marker, markersize=4, **_strokes(style))


def _strokes(style: LineStyle) -> dict[str, Any]:
    width = 1.6
    # matplotlib counts dashes in line widths.
    dash = (0, tuple(length * 0.75 / width for length in style.pattern))
    return {
        "color": style.light,
        "linewidth": width,
        "linestyle": dash if style.pattern else "-",
        "solid_capstyle": "round",
        "dash_capstyle": "butt",
    }


def _draw_target(axes: Axes, target: float) -> None:
    axes.axhline(target, color=TEXT, linewidth=0.9, linestyle=(0, (1, 2)))
    axes.annotate(
        f"target {target:.4g}",
        (0, target),
        xycoords=("axes fraction", "data"),
        xytext=(4, 3),
        textcoords="offset points",
        fontsize=8,
        color=TEXT,
    )


def _dress(axes: Axes, ylabel: str, title: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title, loc="left", color=TEXT, fontsize=11)
    axes.set_xlabel("round", color=TEXT, fontsize=9)
    axes.set_ylabel(ylabel, color=TEXT, fontsize=9)
    axes.set_axisbelow(True)
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#b9c2c9")
    axes.tick_params(length=0, labelsize=8.5, colors=TEXT)
    axes.margins(x=0.01)
    axes.xaxis.set_major_locator(
        MaxNLocator(nbins=10, integer=True, steps=[1, 2, 5, 10], min_n_ticks=1)
    )


def _name_at_ends(axes: Axes, curves: dict[int, MeanCurve], labels: list[str]) -> None:
    """Write each name beside the end of its line, moved apart where ends meet."""
    low, high = axes.get_ylim()
    ends = {g: (curve.mean[-1] - low) / (high - low) for g, curve in curves.items()}
    for g, height in spread(ends, GAP).items():
        strokes = _strokes(line_style(g))
        x = (1.012, 1.05)
        axes.plot(x, (height,) * 2, transform=axes.transAxes, clip_on=False, **strokes)
        axes.text(
            1.06, height, labels[g], transform=axes.transAxes, va="center", fontsize=9, color=TEXT
        )
    axes.set_ylim(low, high)


def spread(heights: dict[int, float], gap: float) -> dict[int, float]:
    """Move heights between 0 and 1 apart to at least `gap`, each crowd around its middle.

    >>> spread({7: 0.5, 8: 0.5, 9: 0.1}, 0.25)
    {9: 0.1, 7: 0.375, 8: 0.625}
    """
    crowds: list[list[int]] = []
    for g in sorted(heights, key=lambda g: (heights[g], g)):
        crowds.append([g])
        while len(crowds) > 1 and _bottom(crowds[-1], heights, gap) < gap + _top(
            crowds[-2], heights, gap
        ):
            crowds[-2:] = [crowds[-2] + crowds[-1]]
    starts = [(crowd, _bottom(crowd, heights, gap)) for crowd in crowds]
    return {g: start + i * gap for crowd, start in starts for i, g in enumerate(crowd)}


def _bottom(crowd: list[int], heights: dict[int, float], gap: float) -> float:
    extent = (len(crowd) - 1) * gap
    middle = sum(heights[g] for g in crowd) / len(crowd)
    return max(0.0, min(middle - extent / 2, 1.0 - extent))


def _top(crowd: list[int], heights: dict[int, float], gap: float) -> float:
    return _bottom(crowd, heights, gap) + (len(crowd) - 1) * gap


def _name_in_legend(axes: Axes, curves: dict[int, MeanCurve], labels: list[str]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], **_strokes(line_style(g))) for g in curves]
    legend = axes.legend(
        handles,
        [""] * len(handles),
        loc="upper left",
        bbox_to_anchor=(1.01, 1.02),
        ncols=-(-len(handles) // 20),
        frameon=False,
        fontsize=8.5,
        handlelength=3.0,
        labelcolor=TEXT,
    )
    # Set afterwards: matplotlib hides legend entries whose name begins with an underscore.
    for text, g in zip(legend.get_texts(), curves, strict=True):
        text.set_text(labels[g])


# ---- inside a page -------------------------------------------------------------------------------


class Frame(NamedTuple):
    """What the edges of the picture stand for."""

    x: tuple[float, float]
    y: tuple[float, float]

    def across(self, x: float) -> str:
        """Tell how far from the left a value stands."""
        share = (x - self.x[0]) / (self.x[1] - self.x[0])
        return f"{LEFT + share * (WIDTH - LEFT - RIGHT):.1f}"

    def down(self, y: float) -> str:
        """Tell how far from the top a value stands; what is beyond the edges stands at them."""
        share = min(1.0, max(0.0, (y - self.y[0]) / (self.y[1] - self.y[0])))
        return f"{HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM):.1f}"


def curves_svg(groups: Sequence[Group], metric: str, target: float | None = None) -> str:
    """Draw one metric as an svg element whose colours come from the page around it."""
    percent = in_percent(groups, metric)
    factor = 100.0 if percent else 1.0
    curves = {g: _scaled(mean_curve(group, metric), factor) for g, group in enumerate(groups)}
    drawn = {g: curve for g, curve in curves.items() if curve.rounds}
    goal = None if finite(target) is None else factor * (target or 0.0)
    frame = _frame(list(drawn.values()), goal)
    name = escape(metric_label(metric, percent))
    lines = "\n".join(_svg_group(g, curve, frame) for g, curve in drawn.items())
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{name} over rounds">\n'
        f"<title>{name} over rounds</title>\n{_svg_axes(frame, name)}\n"
        f"{lines}\n{_svg_target(goal, frame)}</svg>"
    )


def _frame(curves: Sequence[MeanCurve], goal: float | None) -> Frame:
    rounds = [number for curve in curves for number in curve.rounds]
    heights = [h for curve in curves for h in (*curve.mean, *curve.low, *curve.high)]
    usable = [h for h in (*heights, goal) if h is not None and finite(h) is not None]
    return Frame(_apart(min(rounds), max(rounds)), _apart(min(usable), max(usable)))


def _apart(low: float, high: float) -> tuple[float, float]:
    reach = max(1.0, abs(low) / 2)
    return (low, high) if low < high else (low - reach, high + reach)


def _svg_group(g: int, curve: MeanCurve, frame: Frame) -> str:
    line = _path(curve.rounds, curve.mean, frame)
    parts = [f'<path class="mean" d="M{line}"/>']
    if any(curve.std):
        above = _path(curve.rounds, curve.high, frame)
        below = _path(curve.rounds[::-1], curve.low[::-1], frame)
        parts.insert(0, f'<path class="band" d="M{above}L{below}Z"/>')
    if len(curve.rounds) == 1:
        place = f'cx="{frame.across(curve.rounds[0])}" cy="{frame.down(curve.mean[0])}"'
        parts.append(f'<circle class="alone" r="4.5" {place}/>')
    return f'<g class="{look_of(g)}">{"".join(parts)}</g>'


def _path(xs: Sequence[float], ys: Sequence[float], frame: Frame) -> str:
    pairs = zip(xs, ys, strict=True)
    return "L".join(f"{frame.across(x)} {frame.down(y)}" for x, y in pairs)


def _svg_target(goal: float | None, frame: Frame) -> str:
    if goal is None:
        return ""
    y = frame.down(goal)
    line = f'<line class="target" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>'
    place = f'x="{LEFT + 5}" y="{y}" dy="-6"'
    return f'{line}<text class="target-name" {place}>target {goal:.4g}</text>\n'


def _svg_axes(frame: Frame, name: str) -> str:
    parts = [f'<text class="axis-name" x="2" y="14">{name}</text>']
    for value in _ticks(*frame.y, least=0.0):
        y = frame.down(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        place = f'x="{LEFT - 9}" y="{y}" dy="4" text-anchor="end"'
        parts.append(f"<text {place}>{value:.4g}</text>")
    for value in _ticks(*frame.x, least=1.0):
        place = f'x="{frame.across(value)}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle"'
        parts.append(f"<text {place}>{value:.0f}</text>")
    place = f'x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle"'
    return "\n".join([*parts, f'<text class="axis-name" {place}>round</text>'])


def _ticks(low: float, high: float, least: float) -> list[float]:
    """Choose some six round numbers between two others."""
    raw = max((high - low) / 6, least, sys.float_info.min)
    power = 10.0 ** math.floor(math.log10(raw))
    step = power * next(m for m in (1, 2, 5, 10) if m * power >= raw * 0.999999)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
