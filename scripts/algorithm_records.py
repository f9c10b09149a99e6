"""The recorded runs of all algorithms on the digits: kept small, read back, drawn.

`keep` makes one line per run of what `undrift compare` left behind; tables and pictures come from
these lines, so that nothing is trained to write a page.
"""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from undrift.experiment.comparison import Comparison, Line, comparison_of
from undrift.experiment.folder import find_runs, whole_history
from undrift.experiment.history import History
from undrift.experiment.shipped import shipped_experiments
from undrift.experiment.spec import Experiment

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "docs/records/all-digits"
EXPERIMENTS = (
    "all-digits",
    "all-digits-everybody",
    "all-digits-one-step",
    "all-digits-labels",
)
METRICS = ("test_accuracy",)


class Timed(NamedTuple):
    """How long a comparison took."""

    command: str
    seconds: float
    cpus: int
    torch: str
    system: str


# ---------------------------------------------------------------------------------------- keep
def keep(runs: Path, seconds: dict[str, float]) -> None:
    """Write the records of every comparison below a folder of runs."""
    RECORDS.mkdir(parents=True, exist_ok=True)
    timed = {}
    for name in EXPERIMENTS:
        found = find_runs(runs / name)
        lines = [json.dumps(line_of(run), separators=(",", ":")) for run in found]
        (RECORDS / f"{name}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
        shutil.copy(shipped_experiments()[name], RECORDS / f"{name}.toml")
        start = json.loads((found[0].path / "environment.json").read_text("utf-8"))["starts"][0]
        known = {n: start[n] for n in ("cpus", "torch", "system")}
        timed[name] = Timed(f"undrift compare {name}", seconds[name], **known)._asdict()
    (RECORDS / "timed.json").write_text(json.dumps(timed, indent=1) + "\n", "utf-8")


def line_of(run: Any) -> dict[str, Any]:
    """Make one line of a run: who, how long, and its curves in the rounds that were judged."""
    history, table = whole_history(run), run.table()
    judged = [r for r in history if "test_accuracy" in r]
    return {
        "label": table["label"],
        "seed": Experiment.from_table(table).seed_number,
        "rounds": len(history),
        "seconds": round(sum(r["seconds"] for r in history), 2),
        "bytes_down": sum(r["bytes_down"] for r in history),
        "bytes_up": sum(r["bytes_up"] for r in history),
        "skipped": sum(len(r["skipped"]) for r in history),
        "at": [r["round"] for r in judged],
        # in full: a rounded accuracy may cross a target that the run did not
        **{m: [r[m] for r in judged] for m in METRICS},
    }


# ---------------------------------------------------------------------------------------- read
@cache
def timed(name: str) -> Timed:
    """Tell how long the comparison took."""
    return Timed(**json.loads((RECORDS / "timed.json").read_text("utf-8"))[name])


@cache
def lines_kept(name: str) -> tuple[dict[str, Any], ...]:
    """Read the runs of one comparison."""
    text = (RECORDS / f"{name}.jsonl").read_text("utf-8")
    return tuple(json.loads(line) for line in text.splitlines())


@cache
def comparison(name: str) -> Comparison:
    """Compare the recorded runs as `undrift compare` does."""
    table = tomllib.loads((RECORDS / f"{name}.toml").read_text("utf-8"))
    runs = [(k["label"], k["seed"], history_of(k)) for k in lines_kept(name)]
    return comparison_of(name, runs, table["evaluate"]["target"], order=list(choices(name)))


def history_of(kept: dict[str, Any]) -> History:
    """Give a record its rounds back; those that were not judged are empty."""
    values = zip(kept["at"], *(kept[m] for m in METRICS), strict=True)
    judged = {at: dict(zip(METRICS, found, strict=True)) for at, *found in values}
    return History(tuple({"round": r, **judged.get(r, {})} for r in range(1, kept["rounds"] + 1)))


@cache
def lines(name: str) -> tuple[Line, ...]:
    """Compute the lines of a comparison, once."""
    return tuple(comparison(name).lines())


def line(name: str, label: str) -> Line:
    """Find one line of a comparison."""
    return next(found for found in lines(name) if found.label == label)


def home_of(label: str) -> str:
    """Name the comparison in which an algorithm stands."""
    return next(n for n in EXPERIMENTS if label in choices(n))


class Choice(NamedTuple):
    """How an algorithm was set in an experiment, and why so."""

    settings: str
    why: str


@cache
def choices(name: str) -> dict[str, Choice]:
    """Read settings and reasons from an experiment file: a comment on every [[algorithm]]."""
    text = (RECORDS / f"{name}.toml").read_text("utf-8")
    reasons = re.findall(r"^\[\[algorithm\]\] *#? *(.*)$", text, re.MULTILINE)
    tables = tomllib.loads(text)["algorithm"]
    made: dict[str, Choice] = {}
    for table, why in zip(tables, reasons, strict=True):
        for label, settings in labelled(table):
            made[label] = Choice(settings, why)
    return made


def labelled(table: dict[str, Any]) -> Iterable[tuple[str, str]]:
    """Give every label that one [[algorithm]] stands for, with its settings as text."""
    from undrift.experiment.sweep import expand

    hidden = ("use", "label", "client", "server")
    for variant in expand({"algorithm": table}):
        settings = {n: v for n, v in variant.table["algorithm"].items() if n not in hidden}
        yield variant.label, ", ".join(f"{n} {said(v)}" for n, v in settings.items())


def said(value: Any) -> str:
    """Write a setting in a few words."""
    if isinstance(value, list):
        return " · ".join(map(said, value))
    if isinstance(value, dict):
        inner = [f"{n}={said(v)}" for n, v in value.items() if n != "use"]
        return f"{value.get('use', '')}({', '.join(inner)})"
    return f"{value:g}" if isinstance(value, float) else str(value)
