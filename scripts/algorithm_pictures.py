"""Pictures of the recorded runs: each algorithm beside FedAvg, ComFed's grid, all families."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from algorithm_facts import entries, facts_of
from algorithm_records import EXPERIMENTS, ROOT, comparison, home_of

from undrift.experiment.comparison import Variant
from undrift.report.curves import COLOURS, FAINT, TEXT, spread
from undrift.report.page_data import MeanCurve, groups_from, mean_curve
from undrift.rules.named import COMFED_CLIENTS, COMFED_SERVERS, comfed_name

PICTURES = ROOT / "docs/pictures/algorithms"
GREY = "#9aa3aa"
LOWEST = 50  # of the axis: what matters happens above
FAMILIES = {
    "averaging": ["fedprox", "fednova", "qfedavg"],
    "control variates": ["scaffold", "scaffold_m", "mime", "mimelite"],
    "duals and drift": ["feddyn", "feddc", "fedadmm", "adabest", "fedvra"],
    "adaptive servers": ["fedadam", "fedadagrad", "fedyogi", "fedamsgrad", "fedrl"],
    "momentum": ["fedavgm", "slowmo", "fedadc"],
    "features": ["rfedavg", "rfedavg_plus", "moon"],
}


def curve(name: str, label: str) -> MeanCurve:
    """Average the test accuracy of one variant, in percent."""
    variant: Variant = next(v for v in comparison(name).variants if v.label == label)
    runs = zip(variant.seeds, variant.histories, strict=True)
    (group,) = groups_from([(label, seed, tuple(history)) for seed, history in runs])
    found = mean_curve(group, "test_accuracy")
    return MeanCurve(found.rounds, *(tuple(100 * v for v in s) for s in (found.mean, found.std)))


def draw_all() -> list[Path]:
    """Draw every picture."""
    made = [draw_one(n) for n in entries() if n != "comfed"]
    return [*made, draw_grid(), draw_families()]


def draw_one(name: str) -> Path:
    """Draw one algorithm beside FedAvg."""
    home = home_of(name)
    others = [] if name == "fedavg" else [(name, COLOURS[0][0])]
    figure, axes = _figure(1, 1, (5.2, 2.7))
    _panel(axes[0], home, [("fedavg", GREY if others else COLOURS[0][0]), *others], names=True)
    axes[0].set_ylabel("test accuracy (%)", color=TEXT, fontsize=8)
    axes[0].set_xlabel("round", color=TEXT, fontsize=8)
    return _save(figure, f"{name}.png", 110)


def draw_grid() -> Path:
    """Draw ComFed's cells, each beside FedAvg."""
    figure, axes = _figure(len(COMFED_CLIENTS), len(COMFED_SERVERS), (9.0, 6.8))
    cells = [(c, s) for c in COMFED_CLIENTS for s in COMFED_SERVERS]
    for panel, (client, server) in zip(axes, cells, strict=True):
        label = comfed_name(client, server)
        _panel(panel, EXPERIMENTS[0], [("fedavg", GREY), (label, COLOURS[0][0])], names=False)
        title = facts_of(label)["title"] if label in entries() else label
        panel.set_title(f"{client} · {server}: {title}", loc="left", fontsize=8, color=TEXT)
    return _save(figure, "comfed.png", 100)


def draw_families() -> Path:
    """Draw all algorithms of the main comparison, family by family."""
    figure, axes = _figure(2, 3, (11.0, 6.4))
    for panel, (family, names) in zip(axes, FAMILIES.items(), strict=True):
        lines = [(n, COLOURS[k][0]) for k, n in enumerate(names)]
        _panel(panel, EXPERIMENTS[0], [("fedavg", GREY), *lines], names=True)
        panel.set_title(family, loc="left", fontsize=10, color=TEXT)
    return _save(figure, "all-digits.png", 120)


def _figure(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, list[Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    made = figure.subplots(rows, columns, sharey=True, sharex=True, squeeze=False)
    return figure, list(made.flat)


def _panel(axes: Any, home: str, lines: Sequence[tuple[str, str]], *, names: bool) -> None:
    """Draw some variants: the mean with its band, names at the ends of the lines."""
    ends = {}
    for at, (label, colour) in enumerate(lines):
        found = curve(home, label)
        if not found.rounds:
            continue
        axes.fill_between(found.rounds, found.low, found.high, color=colour, alpha=0.16, lw=0)
        axes.plot(found.rounds, found.mean, color=colour, lw=1.6, solid_capstyle="round")
        ends[at] = found.mean[-1]
    axes.set_ylim(LOWEST, 100)
    axes.set_axisbelow(True)
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#b9c2c9")
    axes.tick_params(length=0, labelsize=8, colors=TEXT)
    axes.margins(x=0.01)
    if names:
        _name(axes, ends, lines)


def _name(axes: Any, ends: dict[int, float], lines: Sequence[tuple[str, str]]) -> None:
    for at, height in spread({k: _height(v) for k, v in ends.items()}, 0.085).items():
        label, colour = lines[at]
        said = facts_of(label)["title"] if label in entries() else label
        axes.text(1.02, height, said, transform=axes.transAxes, va="center", fontsize=8,
                  color=TEXT if colour == GREY else colour)  # fmt: skip


def _height(percent: float) -> float:
    return max(0.0, (percent - LOWEST) / (100 - LOWEST))


def _save(figure: Any, name: str, dpi: int) -> Path:
    PICTURES.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    (PICTURES / name).write_bytes(buffer.getvalue())
    return PICTURES / name
