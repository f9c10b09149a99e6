"""Write docs/reproductions.md and its curves from reproductions/*.json.

python scripts/reproductions_page.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from undrift.experiment.family import Setting, paper_files, settings_of
from undrift.papers import counts, read_records

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "reproductions"
PAGE = ROOT / "docs" / "reproductions.md"
PICTURES = "pictures/reproductions"
FEW_COLUMNS = 5  # of a table with many

INTRODUCTION = """\
# Reproductions

The papers' own tables, run as the papers describe them and set beside what was printed. Made by
`python scripts/reproductions_page.py` from `reproductions/*.json`, which `undrift reproduce` writes
and which hold more: every seed, every column, the curves, versions and device
([the command](commands.md)).

Accuracies are in %, mean ± standard deviation over our seeds. A difference in **bold** is more than
three times the larger of the paper's deviation and ours (ours alone where the paper prints none).
Rounds to a target are those of the median run, in brackets those of the mean curve; `> n` is never.
"""


def page() -> str:
    """Write the page."""
    parts = [INTRODUCTION, overview()]
    parts += [section(family) for family in paper_files()]
    return "\n".join(part.strip("\n") + "\n" for part in parts)


def overview() -> str:
    """Count the cells of every table that have a record, and the time they took."""
    rows = []
    for family, (done, cells) in counts(RECORDS).items():
        paper = settings_of(family)[0].paper
        found = read_records(RECORDS / f"{family}.json")
        spent = wall_clock(found["sessions"])
        anchor = f"[{paper['of']}, {paper['table']}](#{family})"
        rows.append([anchor, f"`{family}`", f"{done} of {cells}", spent])
    return table(["table", "name", "cells with a record", "time"], rows)


def wall_clock(sessions: Sequence[dict[str, Any]]) -> str:
    """Add up the time of full runs, device by device."""
    by_device: dict[str, float] = {}
    for one in sessions:
        if one["kind"] == "full" and one.get("device"):
            by_device[one["device"]] = by_device.get(one["device"], 0.0) + one["seconds"]
    return ", ".join(f"{s / 60:.1f} min on {device}" for device, s in by_device.items())


# ------------------------------------------------------------------------------------ one table
def section(family: str) -> str:
    """Write one table of a paper."""
    settings = settings_of(family)
    paper, records = settings[0].paper, read_records(RECORDS / f"{family}.json")
    cells = {(e["setting"], e["method"]): e for e in records["cells"]}
    parts = [f"## {family}", f"{paper['of']}, {paper['table']}. {reading(paper)}"]
    parts.append("Ours to choose:\n\n" + "\n".join(f"- {line}" for line in paper["ours"]))
    if cells:
        parts += [made_with(list(cells.values())), side_by_side(settings, cells)]
        parts += [*pictures(settings, cells)]
    if records["alternatives"]:
        parts += ["### Other readings", alternatives(records["alternatives"])]
    parts.append(missing(settings, cells))
    return "\n\n".join(part for part in parts if part)


def reading(paper: dict[str, Any]) -> str:
    """Say what the table shows."""
    told = {
        "last": "Test accuracy of the last round.",
        "five": "Mean test accuracy of the last five rounds.",
        "best": "Best test accuracy so far, averaged over trials.",
    }
    return told[paper["shows"]]


def made_with(entries: Sequence[dict[str, Any]]) -> str:
    """Say on what and with which seeds the records were made."""
    devices = sorted({f"{e['device']} ({e['precision']})" for e in entries})
    seeds = sorted({len(e["seeds"]) for e in entries})
    versions = sorted({f"undrift {e['versions']['undrift']}, torch {e['versions']['torch']}"
                       for e in entries})  # fmt: skip
    models = sorted({e["inference"] for e in entries})
    return (
        f"{', '.join(map(str, seeds))} seeds, {'; '.join(devices)}, {'; '.join(versions)}. "
        f"Model that is judged: {', '.join(models)}."
    )


def side_by_side(settings: Sequence[Setting], cells: dict[tuple[str, str], Any]) -> str:
    """Set our numbers beside the paper's."""
    paper = settings[0].paper
    others = sorted({n for e in cells.values() for n in e["others"]})
    head = ["setting", "method", *columns(paper), *others]
    rows = []
    for setting in settings:
        for method in setting.cells:
            entry = cells.get((setting.name, method))
            if entry is not None:
                more = [number(entry["others"].get(n, {})) for n in others]
                rows.append([setting.title, entry["name"], *numbers(paper, entry), *more])
    return table(head, rows)


def columns(paper: dict[str, Any]) -> list[str]:
    """Name the columns between the method and further models."""
    if paper["shows"] == "best":
        at = shown_rounds(paper)
        return [*(f"{r}: ours / paper" for r in at), "difference"]
    goals = [f"rounds to {100 * t:g} %: ours / paper" for t in paper.get("targets", [])]
    return ["ours", "paper", "difference", *goals]


def shown_rounds(paper: dict[str, Any]) -> list[int]:
    """Choose a few of many columns, the last one always."""
    at: list[int] = paper["at"]
    step = max(1, len(at) // FEW_COLUMNS)
    return at[::-1][::step][::-1]


def numbers(paper: dict[str, Any], entry: dict[str, Any]) -> list[str]:
    """Write the numbers of one cell."""
    ours, theirs = entry["ours"], entry["paper"]
    if paper["shows"] == "best":
        pairs = {c["round"]: (c, p)
                 for c, p in zip(ours["columns"], theirs["columns"], strict=False)}  # fmt: skip
        told = [f"{number(pairs[r][0], 1)} / {pairs[r][1]}" for r in shown_rounds(paper)]
        return [*told, difference(entry)]
    goals = [
        f"{rounds(o, entry['rounds'])} / {p}"
        for o, p in zip(ours.get("rounds_to", []), theirs.get("rounds_to", []), strict=True)
    ]
    return [number(ours), number(theirs), difference(entry), *goals]


def number(found: dict[str, Any], digits: int = 2) -> str:
    """Write mean ± deviation."""
    if found.get("value") is None:
        return "diverged" if found.get("diverged") else ""
    std = found.get("std")
    return f"{found['value']:.{digits}f}" + ("" if std is None else f" ± {std:.{digits}f}")


def difference(entry: dict[str, Any]) -> str:
    """Write the difference; bold where it is a clear one."""
    if entry["difference"] is None:
        return ""
    text = f"{entry['difference']:+.2f}"
    return f"**{text}**" if entry["differs"] else text


def rounds(found: dict[str, Any], most: int) -> str:
    """Write rounds to a target: of the median run, and on the mean curve."""
    median, on_mean = (f"> {most}" if found[n] is None else str(found[n])
                       for n in ("median", "on_mean"))  # fmt: skip
    return median if median == on_mean else f"{median} ({on_mean})"


def alternatives(entries: Sequence[dict[str, Any]]) -> str:
    """List runs with something changed."""
    rows = [
        [e["title"], e["name"], ", ".join(f"`{c}`" for c in e["changes"]), number(e["ours"]),
         number(e["paper"]), difference(e)]
        for e in entries
    ]  # fmt: skip
    return table(["setting", "method", "changed", "ours", "paper", "difference"], rows)


def missing(settings: Sequence[Setting], cells: dict[tuple[str, str], Any]) -> str:
    """Name the cells that were not run."""
    lines = []
    for setting in settings:
        names = [setting.paper["methods"][m] for m in setting.cells
                 if (setting.name, m) not in cells]  # fmt: skip
        if names:
            what = "all" if len(names) == len(setting.cells) else ", ".join(names)
            lines.append(f"`{setting.name}` ({what})")
    return f"No full record yet: {'; '.join(lines)}." if lines else ""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)


# ------------------------------------------------------------------------------------- pictures
def pictures(settings: Sequence[Setting], cells: dict[tuple[str, str], Any]) -> Iterator[str]:
    """Show the curves of every setting that has some."""
    for setting in settings:
        if any((setting.name, m) in cells for m in setting.cells):
            title = setting.title or setting.name
            yield f"![Curves: {title}]({PICTURES}/{setting.name}.png)"


def draw(folder: Path) -> None:
    """Draw the mean curves of every setting, the paper's numbers as marks at the end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    from undrift.report.curves import line_style

    for family in paper_files():
        cells = {(e["setting"], e["method"]): e
                 for e in read_records(RECORDS / f"{family}.json")["cells"]}  # fmt: skip
        for setting in settings_of(family):
            found = [cells.get((setting.name, m)) for m in setting.cells]
            if not any(found):
                continue
            figure, axes = plt.subplots(figsize=(7.2, 4))
            for place, entry in enumerate(found):
                if entry is not None:
                    style = line_style(place)
                    dash = (0, style.pattern) if style.pattern else "-"
                    curve = entry["curve"]
                    axes.plot(curve["rounds"], curve["mean"], color=style.light, linestyle=dash,
                              linewidth=1.4, label=entry["name"])  # fmt: skip
                    axes.plot(entry["rounds"], entry["paper"]["value"], "x", color=style.light)
            axes.set(xlabel="round", ylabel="test accuracy in %",
                     title=f"{setting.name} (x: the paper's)")  # fmt: skip
            axes.grid(color="#e3e7ea")
            axes.legend(fontsize=7, ncols=2, loc="lower right")
            folder.mkdir(parents=True, exist_ok=True)
            figure.savefig(folder / f"{setting.name}.png", dpi=110, bbox_inches="tight")
            plt.close(figure)


if __name__ == "__main__":
    draw(ROOT / "docs" / PICTURES)
    PAGE.write_text(page(), "utf-8")
    print(PAGE)
