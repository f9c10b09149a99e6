"""The client x class picture of a partition.

Up to 60 clients a bubble per client and class, its area the number of examples; beyond, a heat map
of each client's label shares.  A strip above shows the sizes.  One hue from light to dark, so that
it reads without colour vision and in print.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from undrift.data.partitions.labels import count_examples, find_classes, is_continuous
from undrift.data.partitions.protocol import Floats, Ids, Labels
from undrift.data.summary import check_parts, count_table
from undrift.errors import ConfigError, MissingExtra
from undrift.report.curves import PLAIN_TEXT
from undrift.state.disk import make_directory, write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, PALE, FAINT, TEXT = "#1f5a85", "#9fb9cc", "#e3e7ea", "#333a40"
BUBBLES_UP_TO = 60  # clients, and classes: beyond, bubbles are too small to compare
SUFFIXES = (".png", ".svg", ".pdf")


def draw_partition(labels: Labels, parts: Sequence[Ids], path: str | Path, title: str = "") -> Path:
    """Draw a partition to a file; the suffix .png, .svg or .pdf decides the format."""
    target = Path(path)
    if target.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"{target}: the picture's name must end in {', '.join(SUFFIXES)}")
    # Without a date and with fixed ids, the same partition is the same file.
    fixed = {"Date": None} if target.suffix.lower() == ".svg" else None
    buffer = io.BytesIO()
    with _matplotlib().rc_context({"svg.hashsalt": "undrift", **PLAIN_TEXT}):
        figure = partition_figure(labels, parts, title)
        figure.savefig(buffer, format=target.suffix[1:].lower(), dpi=150, metadata=fixed)
    make_directory(target.parent)
    write_atomically(target, [buffer.getvalue()])
    return target


def _matplotlib() -> Any:
    try:
        import matplotlib.figure
    except ImportError as error:
        raise MissingExtra(
            "matplotlib is needed to draw a partition: pip install 'undrift[plots]'"
        ) from error
    return matplotlib


def partition_figure(labels: Labels, parts: Sequence[Ids], title: str = "") -> Figure:
    """Make the picture as a matplotlib figure; targets without classes show sizes only."""
    _matplotlib()
    from matplotlib.figure import Figure

    check_parts(parts, count_examples(labels, 1, "partition_figure"))
    sizes = np.array([len(part) for part in parts])
    if is_continuous(labels):
        figure = Figure(figsize=(_width(len(parts)), 2.2), layout="constrained")
        _draw_sizes(figure.subplots(), sizes, title)
        return figure
    classes = find_classes(labels, 1, "partition_figure")
    table = count_table(classes, parts)
    height = float(np.clip(0.28 * table.shape[1], 1.6, 7.0))
    figure = Figure(figsize=(_width(len(parts)), 1.5 + height), layout="constrained")
    top, main = figure.subplots(2, 1, sharex=True, height_ratios=[0.8, height])
    _draw_sizes(top, sizes, title)
    top.set_xlabel("")
    top.tick_params(bottom=False, labelbottom=False)
    draw = _draw_bubbles if max(table.shape) <= BUBBLES_UP_TO else _draw_heat
    draw(main, table)
    _name_axes(main, classes.names)
    figure.align_ylabels([top, main])
    return figure


def _width(num_clients: int) -> float:
    return float(np.clip(1.6 + 0.28 * num_clients, 4.5, 9.0))


def _draw_sizes(axes: Axes, sizes: NDArray[Any], title: str) -> None:
    axes.bar(np.arange(len(sizes)), sizes, width=0.7 if len(sizes) <= 60 else 1.0, color=PALE)
    axes.set_ylabel("examples", color=TEXT, fontsize=9)
    axes.set_xlabel("client", color=TEXT, fontsize=9)
    axes.set_title(title, loc="left", color=TEXT, fontsize=11)
    axes.set_yticks([0, int(sizes.max())])
    _quiet(axes)


def _draw_bubbles(axes: Axes, table: Ids) -> None:
    axes.set_xlabel(f"client  (largest bubble: {table.max():,} examples)", color=TEXT, fontsize=9)
    client, class_ = np.nonzero(table)
    held = table[client, class_]
    # The largest bubble nearly touches its neighbours, in a cell of 0.28 inches.
    largest = (0.25 * 72 * min(1.0, 26 / max(table.shape[0], 1))) ** 2
    axes.scatter(client, class_, s=largest * held / table.max(), color=INK, linewidths=0)
    axes.set_axisbelow(True)
    axes.grid(color=FAINT, linewidth=0.6)
    axes.set_xlim(-0.7, table.shape[0] - 0.3)
    axes.set_ylim(-0.7, table.shape[1] - 0.3)
    _quiet(axes)


def _draw_heat(axes: Axes, table: Ids) -> None:
    from matplotlib.colors import PowerNorm

    axes.set_xlabel("client", color=TEXT, fontsize=9)
    shares: Floats = table / np.maximum(table.sum(axis=1, keepdims=True), 1)
    # The square root keeps small shares visible where there are many classes.
    scale = PowerNorm(gamma=0.5, vmin=0)
    image = axes.imshow(
        shares.T, aspect="auto", origin="lower", cmap="Blues", norm=scale, interpolation="nearest"
    )
    bar = axes.figure.colorbar(image, ax=axes, pad=0.01, aspect=30)
    bar.set_label("share of the client's examples", color=TEXT, fontsize=9)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8, colors=TEXT)
    _quiet(axes)


def _name_axes(axes: Axes, names: NDArray[Any]) -> None:
    axes.set_ylabel("class", color=TEXT, fontsize=9)
    step = max(1, len(names) // 20)
    places = np.arange(0, len(names), step)
    axes.set_yticks(places, [str(names[i]) for i in places])
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True, steps=[1, 2, 5, 10]))


def _quiet(axes: Axes) -> None:
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=8, colors=TEXT)
