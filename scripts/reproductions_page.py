"""Write docs/reproductions.md and its curves from reproductions/*.json.

python scripts/reproductions_page.py
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from reproductions_claims import claim_rows
from reproductions_pictures import draw, shown

from undrift.experiment.family import Setting, is_figure, paper_files, settings_of
from undrift.papers import counts, read_records
from undrift.papers.counted import COUNTED
from undrift.papers.figures import CURVES_OF
from undrift.papers.scores import number

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "reproductions"
PAGE = ROOT / "docs" / "reproductions.md"
PICTURES = "pictures/reproductions"
FEW_COLUMNS = 5  # of a table with many
ABSENT = {"emnist": "EMNIST", "femnist": "FEMNIST", "sent140": "Sent140"}  # not to be had

INTRODUCTION = """\
# Reproductions

The papers' own tables, run as the papers describe them and set beside what was printed. Made by
`python scripts/reproductions_page.py` from `reproductions/*.json`, which `undrift reproduce` writes
and which hold more: every seed, every column, the curves, versions and device
([the command](commands.md)); what we make of a table is in `reproductions/TABLE.md`.

Accuracies are in %, mean ± standard deviation over our seeds. A difference in **bold** is more than
three times the larger of the paper's deviation and ours (ours alone where the paper prints none).
Rounds to a target are those of the median run (of an even number the faster of the two in the
middle; one that never comes there counts as the slowest), in brackets those of the mean curve;
`> n` is never.
Times are of the clock; most of these runs shared their card with others.
"""


def page() -> str:
    """Write the page."""
    names = sorted(paper_files(), key=is_figure)
    parts = [INTRODUCTION, overview(), claims(), figures(), left_out()]
    parts += [section(family) for family in names]
    parts.append(counted())
    return "\n".join(part.strip("\n") + "\n" for part in parts)


def left_out() -> str:
    """Say what was not run, and what it would take: written by hand."""
    notes = RECORDS / "left-out.md"
    return f"## What was left out\n\n{notes.read_text('utf-8')}" if notes.is_file() else ""


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


def claims() -> str:
    """Tell what the papers claim, and whether our records agree."""
    head = ["paper", "claim", "read as", "verdict", "numbers"]
    intro = "Decided by the code in `scripts/reproductions_claims.py` from the full records alone."
    return f"## Claims\n\n{intro}\n\n{table(head, claim_rows(RECORDS))}"


def figures() -> str:
    """List the figures: those that are run, and those that draw the runs of others."""
    rows = []
    for family, (done, curves) in counts(RECORDS, figures=True).items():
        paper = settings_of(family)[0].paper
        spent = wall_clock(read_records(RECORDS / f"{family}.json")["sessions"])
        name = f"[{paper['of']}, {paper['table']}](#{family})"
        rows.append([name, f"`{family}`", f"{done} of {curves}", spent])
    for family, drawn in CURVES_OF.items():
        told = f"{drawn}" + (f"; ours to choose: {drawn.ours}" if drawn.ours else "")
        rows.append([f"{drawn.of}, {drawn.figure}", f"`{family}`", f"the {told}", ""])
    intro = (
        "A figure's record is its curve: no paper's number stands beside it, except rounds to a "
        "target that the text names. They are not counted among the cells above. "
        "`python scripts/feature_picture.py RUN` draws rFedAvg's Fig. 1 from a finished run."
    )
    head = ["figure", "name", "curves with a record", "time"]
    return f"## Figures\n\n{intro}\n\n{table(head, rows)}"


def counted() -> str:
    """Show the tables that need no training."""
    parts = [
        f"## {name}\n\n{textwrap.fill(f'{one.of}, {one.table}: {one.about}', 100)}\n\n"
        f"{table(one.head, one.rows())}"
        for name, one in COUNTED.items()
    ]
    return "\n\n".join(parts)


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
        parts += [*pictures(settings, records, whole=True)]
    if records["alternatives"]:
        parts += ["### Other readings", alternatives(records["alternatives"])]
        parts += [*pictures(settings, records, whole=False)]
    notes = RECORDS / f"{family}.md"
    if notes.is_file():  # written by hand: why our numbers differ, which reading fits the paper
        parts += ["### What we make of it", notes.read_text("utf-8").strip()]
    parts.append(missing(settings, cells))
    return "\n\n".join(part for part in parts if part)


def reading(paper: dict[str, Any]) -> str:
    """Say what the table shows."""
    told = {
        "last": "Test accuracy of the last round.",
        "five": "Mean test accuracy of the last five rounds.",
        "best": "Best test accuracy so far, averaged over trials.",
        "curve": "A curve; the table shows where it ends.",
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
    """Set our numbers beside the paper's, in a table for all settings that show the same."""
    others = sorted({n for e in cells.values() for n in e["others"]})
    made: dict[tuple[str, ...], list[list[str]]] = {}
    for setting in settings:
        rows = made.setdefault(tuple(columns(setting.paper)), [])
        for method in setting.cells:
            entry = cells.get((setting.name, method))
            if entry is not None:
                more = [number(entry["others"].get(n, {})) for n in others]
                rows.append([setting.title, entry["name"], *numbers(setting.paper, entry), *more])
    return "\n\n".join(
        table(["setting", "method", *head, *others], rows) for head, rows in made.items() if rows
    )


def columns(paper: dict[str, Any]) -> list[str]:
    """Name the columns between the method and further models."""
    if paper["shows"] == "best":
        at = shown_rounds(paper)
        return [*(f"{r}: ours / paper" for r in at), "difference"]
    if paper["shows"] == "curve":
        loss = "loss" in paper.get("metric", "")
        goals = [f"rounds to {t:g}" if loss else f"rounds to {100 * t:g} %"
                 for t in paper.get("targets", [])]  # fmt: skip
        return ["last", "best", *goals]
    goals = [f"rounds to {100 * t:g} %: ours / paper" for t in paper.get("targets", [])]
    more = "our ± within five rounds" if paper["shows"] == "five" else "our best"
    return ["ours", "paper", "difference", *goals, more]


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
    if paper["shows"] == "curve":
        return curve_numbers(paper, entry)
    goals = [
        f"{rounds(o, entry['rounds'])} / {p}"
        for o, p in zip(ours.get("rounds_to", []), theirs.get("rounds_to", []), strict=True)
    ]
    within = ours.get("within")
    more = number(ours["best"]) if paper["shows"] == "last" else plus_minus(within)
    return [number(ours), number(theirs), difference(entry), *goals, more]


def plus_minus(std: float | None) -> str:
    """Write a deviation alone."""
    return "" if std is None else f"± {std:.2f}"


def curve_numbers(paper: dict[str, Any], entry: dict[str, Any]) -> list[str]:
    """Write where a curve ends, and when it reached its targets."""
    ours, digits = entry["ours"], 4 if "loss" in paper.get("metric", "") else 2
    found = [rounds(one, entry["rounds"]) for one in ours.get("rounds_to", [])]
    printed = entry["paper"].get("rounds_to", [])
    goals = [f"{o} / {p}" for o, p in zip(found, printed, strict=False)] or found
    return [number(ours, digits), number(ours["best"], digits), *goals]


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
    goals = [[rounds(one, e["rounds"]) for one in e["ours"].get("rounds_to", [])] for e in entries]
    rows = [
        [e["title"], e["name"], ", ".join(f"`{c}`" for c in e["changes"]),
         number(e["ours"]),
         number(e["paper"]), difference(e), *([", ".join(goal)] if any(goals) else [])]
        for e, goal in zip(entries, goals, strict=True)
    ]  # fmt: skip
    head = ["setting", "method", "changed", "ours", "paper", "difference"]
    return table([*head, *(["rounds to target"] if any(goals) else [])], rows)


def missing(settings: Sequence[Setting], cells: dict[tuple[str, str], Any]) -> str:
    """Name the cells that were not run, those apart whose data were not to be had."""
    lines: dict[str, list[str]] = {}
    for setting in settings:
        names = [setting.paper["methods"][m] for m in setting.cells
                 if (setting.name, m) not in cells]  # fmt: skip
        if names:
            what = "all" if len(names) == len(setting.cells) else ", ".join(names)
            absent = ABSENT.get(setting.table["data"]["use"])
            why = f"The data were not available ({absent})" if absent else "No full record yet"
            lines.setdefault(why, []).append(f"`{setting.name}` ({what})")
    return "\n\n".join(f"{why}: {'; '.join(some)}." for why, some in lines.items())


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)


# ------------------------------------------------------------------------------------- pictures
def pictures(settings: Sequence[Setting], records: dict[str, Any], *, whole: bool) -> Iterator[str]:
    """Show the curves of every setting that has some: of its cells, or of another reading."""
    for setting in settings:
        found = list(shown(setting, records).values())
        if found and (found[0] in records["cells"]) == whole:
            changed = "" if whole else f", {', '.join(found[0]['changes'])}"
            title = f"{setting.title or setting.name}{changed}"
            yield f"![Curves: {title}]({PICTURES}/{setting.name}.png)"


if __name__ == "__main__":
    draw(RECORDS, ROOT / "docs" / PICTURES)
    PAGE.write_text(page(), "utf-8")
    print(PAGE)
