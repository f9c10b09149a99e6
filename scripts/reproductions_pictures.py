"""The curves of docs/reproductions.md: one picture for every setting that has records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from undrift.experiment.family import Setting, paper_files, settings_of
from undrift.papers import read_records

ALSO_DRAWN = ("train_loss", "train_accuracy", "norm_model", "client_accuracy_worst10")
MOST_LINES = 8  # of one panel; more methods are drawn in panels of
FEW_LINES = 4
CLOSE = "target"  # the panel around a figure's target
WIDE = 100.0  # largest over smallest value from which on a panel is logarithmic

Found = dict[int, dict[str, Any]]  # the record of each method, by its place in the table


def draw(records: Path, folder: Path) -> None:
    """Draw the mean curves of every setting, the paper's numbers as marks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    for family in paper_files():
        known = read_records(records / f"{family}.json")
        for setting in settings_of(family):
            found = shown(setting, known)
            if not found:
                continue
            panels = panels_of(found)
            if setting.paper["shows"] == "curve" and targets_of(found):
                panels += [(some, CLOSE) for some, metric in panels if metric is None]
            across = min(2, len(panels)) if len(panels) > 3 else len(panels)
            down = math.ceil(len(panels) / across)
            figure, axes = plt.subplots(
                down, across, figsize=(7.2 * across, 4 * down), squeeze=False, layout="tight"
            )
            for place, (some, metric) in zip(axes.flat, panels, strict=False):
                draw_curves(place, setting, some, None if metric == CLOSE else metric)
                if metric == CLOSE:
                    loss = "loss" in setting.paper.get("metric", "")
                    go_close(place, targets_of(found)[-1], loss)
            for place in axes.flat[len(panels) :]:
                place.set_axis_off()
            folder.mkdir(parents=True, exist_ok=True)
            figure.savefig(folder / f"{setting.name}.png", dpi=110, bbox_inches="tight")
            plt.close(figure)


def shown(setting: Setting, records: dict[str, Any]) -> Found:
    """Give what is drawn: its cells or, where there is none, another reading of all methods."""
    own = [e for e in records["cells"] if e["setting"] == setting.name]
    if not own:
        others = [e for e in records["alternatives"] if e["setting"] == setting.name]
        readings = {tuple(e["changes"]) for e in others}
        whole = (r for r in readings if _methods(others, r) >= set(setting.cells))
        first = min(whole, default=None)
        own = [e for e in others if tuple(e["changes"]) == first]
    by_method = {e["method"]: e for e in own}
    return {i: by_method[m] for i, m in enumerate(setting.cells) if m in by_method}


def _methods(entries: Sequence[dict[str, Any]], changes: tuple[str, ...]) -> set[str]:
    return {e["method"] for e in entries if tuple(e["changes"]) == changes}


def panels_of(found: Found) -> list[tuple[Found, str | None]]:
    """Share out what there is to draw: methods, and a metric; None is what the paper judges by."""
    more = [n for n in ALSO_DRAWN if all(n in e.get("curves", {}) for e in found.values())]
    parts = [found]
    if len(found) > MOST_LINES:
        starts = range(0, max(found) + 1, FEW_LINES)
        own = [{i: found[i] for i in range(s, s + FEW_LINES) if i in found} for s in starts]
        parts = [part for part in own if part]
    return [(part, metric) for metric in (None, *more) for part in parts]


def draw_curves(axes: Any, setting: Setting, found: Found, metric: str | None) -> None:
    """Draw one metric of some methods."""
    from undrift.report.curves import line_style

    name = metric or setting.paper.get("metric", "test_accuracy")
    drawn = []
    for place, entry in found.items():
        style = line_style(place)
        dash = (0, style.pattern) if style.pattern else "-"
        rounds, values = curve_of(entry, metric)
        drawn += [v for v in values if math.isfinite(v)]
        axes.plot(rounds, values, color=style.light, linestyle=dash, linewidth=1.4,
                  label=entry["name"])  # fmt: skip
        if metric is None:
            axes.plot(*marks_of(setting, entry), "x", color=style.light, markersize=5)
    if drawn and "accuracy" not in name and 0 < min(drawn) * WIDE < max(drawn):
        axes.set_yscale("log")  # one that diverges must not flatten the others
    what = "best test accuracy so far" if best_so_far(setting, metric) else name.replace("_", " ")
    axes.set(xlabel="round", ylabel=what + (" in %" if "accuracy" in name else ""))
    figure = setting.paper["shows"] == "curve" or metric
    changed = next(iter(found.values())).get("changes", ())
    title = ", ".join([setting.name, *changed])
    axes.set_title(title + ("" if figure else " (x: the paper's)"))
    axes.grid(color="#e3e7ea")
    axes.legend(fontsize=7, ncols=2)


def targets_of(found: Found) -> list[float]:
    """Give the targets that rounds were counted to."""
    return [goal["target"] for goal in next(iter(found.values()))["ours"].get("rounds_to", [])]


def go_close(axes: Any, target: float, loss: bool) -> None:
    """Show what happens around the target: an accuracy in %, or a loss."""
    axes.axhline(target, color="#888888", linewidth=0.8, linestyle=":")
    axes.set_yscale("linear")
    axes.set_ylim(*((0, 4 * target) if loss else (target - 3, min(100.0, target + 1))))
    axes.set_title(f"around {target:g}")


def best_so_far(setting: Setting, metric: str | None) -> bool:
    """Tell whether a panel shows the columns of a table of best values."""
    return setting.paper["shows"] == "best" and metric is None


def curve_of(entry: dict[str, Any], metric: str | None) -> tuple[list[int], list[float]]:
    """Give rounds and values of a curve; of a table of best values, its columns."""
    columns = [] if metric else entry["ours"].get("columns", [])
    if columns:
        rounds, values = [c["round"] for c in columns], [c["value"] for c in columns]
    else:
        curve = entry["curves"][metric] if metric else entry["curve"]
        rounds, values = curve["rounds"], curve["mean"]
    return rounds, [math.nan if v is None else float(v) for v in values]


def marks_of(setting: Setting, entry: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Give the paper's numbers and the rounds that they are of."""
    paper = entry["paper"]
    if "columns" in paper:
        return list(setting.paper["at"]), list(paper["columns"])
    return ([], []) if paper["value"] is None else ([entry["rounds"]], [paper["value"]])
