"""`undrift reproduce`: the papers' own tables, run and set beside what was printed."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from undrift.arguments import known_device
from undrift.cli.common import (
    DONE,
    FOUND,
    UNFINISHED,
    WRONG,
    Commands,
    finite,
    listening,
    printable,
)
from undrift.core.precision import PRECISIONS
from undrift.errors import ConfigError, unknown_name
from undrift.experiment.comparison import aligned
from undrift.experiment.family import (
    Setting,
    is_figure,
    paper_files,
    paper_settings,
    settings_of,
)
from undrift.papers import Options, Reproduced, chosen_settings, counts, reproduce
from undrift.papers.counted import COUNTED
from undrift.papers.figures import CURVES_OF
from undrift.papers.plan import experiments_of
from undrift.papers.records import UNFINISHED as UNFINISHED_CELL
from undrift.papers.records import check_place, full_cells
from undrift.papers.scores import number
from undrift.papers.tuning import best_of, told

OUT, TINY_OUT, RECORDS = "runs/reproduce", "runs/reproduce-tiny", "reproductions"


def add_commands(commands: Commands) -> None:
    """Describe the command."""
    made = commands.add_parser(
        "reproduce", help="run a table of a paper and set our numbers beside the printed ones"
    )
    made.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="a table, a setting, or how their names begin; NAME=VALUE tries another reading, "
        "which is recorded apart",
    )
    made.add_argument("--list", action="store_true", help="show tables (of NAME: its settings)")
    made.add_argument("--seeds", type=int, metavar="K", help="repetitions (default: the table's)")
    made.add_argument("--rounds", type=int, metavar="R", help="default: the paper's")
    made.add_argument("--tiny", action="store_true", help="try it out: few rounds, clients, data")
    made.add_argument("--only", nargs="+", default=[], metavar="METHOD", help="some methods")
    made.add_argument("--minutes", type=finite, metavar="M", help="stop then; run again to go on")
    made.add_argument("--device", help="cpu, cuda, or auto: a GPU if there is one")
    made.add_argument("--precision", help=f"on a GPU: {', '.join(PRECISIONS)} (default tf32)")
    made.add_argument("--out", metavar="FOLDER", help=f"where runs are kept (default {OUT})")
    made.add_argument(
        "--records", metavar="FOLDER", help=f"default: {RECORDS}, or in --out if tiny"
    )
    made.add_argument("--jobs", type=int, metavar="N", help="on a CPU: runs at a time")
    made.add_argument("--quiet", action="store_true", help="show errors and results only")
    made.set_defaults(action=do_reproduce, track=[])


def do_reproduce(chosen: argparse.Namespace) -> int:
    """Run cells, or list them."""
    if chosen.list:
        return _list(chosen)
    names = [name for name in chosen.names if "=" not in name]
    if not names:
        raise ConfigError(f"reproduce needs a name: one of {', '.join([*paper_files(), *COUNTED])}")
    _check(chosen)
    settings = chosen_settings([name for name in names if name not in COUNTED])
    _show_counted(names)
    return _run(chosen, settings) if settings else 0


def _run(chosen: argparse.Namespace, settings: Sequence[Setting]) -> int:
    options = _options(chosen, settings)
    out = _folder(chosen.out, "--out", TINY_OUT if chosen.tiny else OUT)
    records = _folder(chosen.records, "--records", str(out) if chosen.tiny else RECORDS)
    check_place(out, "--out")
    check_place(records, "--records")
    total = sum(len(experiments_of(setting, options)) for setting in settings)
    jobs = 1 if chosen.tiny and chosen.jobs is None else chosen.jobs
    with listening(chosen, out, total) as listeners:
        made = reproduce(
            settings, options, out, records,
            minutes=chosen.minutes, jobs=jobs, listeners=listeners,
        )  # fmt: skip
    if made.entries or not made.failures:
        _show(made.entries)
        _show_counts(settings, records)
    for failure in made.failures:  # the last thing that is read
        print(f"undrift: {printable(str(failure))}", file=sys.stderr)
    return _code(made)


def _code(made: Reproduced) -> int:
    if made.failures and not (made.entries and all(one.no_data for one in made.failures)):
        return WRONG
    if made.unfinished:
        return UNFINISHED
    return FOUND if made.failures else DONE  # settings were left out


def _check(chosen: argparse.Namespace) -> None:
    """Refuse numbers and devices that cannot be."""
    if chosen.minutes is not None and chosen.minutes <= 0:
        raise ConfigError(f"--minutes {chosen.minutes:g} leaves no time: give more than 0")
    if chosen.jobs is not None and chosen.jobs < 1:
        raise ConfigError(f"--jobs {chosen.jobs}: give the number of runs at a time, 1 or more")
    if chosen.device not in (None, "auto"):
        known_device(chosen.device)


def _options(chosen: argparse.Namespace, settings: Sequence[Setting]) -> Options:
    if chosen.precision is not None and chosen.precision not in PRECISIONS:
        raise unknown_name("precision", chosen.precision, list(PRECISIONS), "--precision")
    # --only takes all that follows it, changes too; some methods are called like one: "d=1"
    methods = {n.lower() for s in settings for pair in s.paper["methods"].items() for n in pair}
    named = [name for name in chosen.only if "=" not in name or name.lower() in methods]
    given = [*chosen.names, *(name for name in chosen.only if name not in named)]
    return Options(
        seeds=chosen.seeds,
        rounds=chosen.rounds,
        tiny=chosen.tiny,
        only=tuple(named),
        changes=tuple(name for name in given if "=" in name),
        device=chosen.device,
        precision=chosen.precision,
    )


def _folder(given: str | None, option: str, default: str) -> Path:
    if given is not None and (not given or "\0" in given or Path(given).is_file()):
        raise ConfigError(f"{option} {given!r} is no folder")
    return Path(default if given is None else given)


# ------------------------------------------------------------------------------------- showing
def _show(entries: Sequence[dict[str, Any]]) -> None:
    """Print the cells side by side with the paper's."""
    if not entries:
        print("no cell has anything to show yet: run the same command again to go on")
        return
    rows = [["cell", "ours", "paper", "difference", ""]]
    for one in entries:
        small = (one["paper"].get("value") or 1) < 1  # a loss
        gap = "" if one["difference"] is None else f"{one['difference']:+.{4 if small else 2}f}"
        mark = "differs" if one["differs"] else ""
        note = mark if one["kind"] == "full" else f"{one['kind']}, {_rounds(one['rounds'])}"
        cell = f"{one['setting']} {one['name']}"
        rows.append([cell, *(number(one[n], missing="-") for n in ("ours", "paper")), gap, note])
    print("\n".join(aligned(rows)))
    if any(one["kind"] == UNFINISHED_CELL for one in entries):
        print("unfinished cells go on when the same command is run again")
    for one in best_of([e for e in entries if e["kind"] != UNFINISHED_CELL]):
        print(told(one))


def _show_counted(names: Sequence[str]) -> None:
    """Print the tables that need no training."""
    for one in (COUNTED[name] for name in dict.fromkeys(names) if name in COUNTED):
        print(textwrap.fill(f"{one.of}, {one.table}: {one.about}", 100))
        print("\n".join(aligned([one.head, *one.rows()])) + "\n")


def _show_counts(settings: Sequence[Setting], records: Path) -> None:
    """Print how much of each table has been recorded."""
    for family in dict.fromkeys(setting.family for setting in settings):
        figure = is_figure(family)
        done, cells = counts(records, figure)[family]
        what = "curves" if figure else "cells"
        print(f"{family}: {done} of {cells} {what} have a full record in {records}")


def _rounds(count: int) -> str:
    return f"{count} round" + ("" if count == 1 else "s")


def _list(chosen: argparse.Namespace) -> int:
    """Print tables, or the settings of some."""
    records = _folder(chosen.records, "--records", RECORDS)
    if chosen.names:
        _list_counted([name for name in chosen.names if name in COUNTED])
        for setting in chosen_settings([name for name in chosen.names if name not in COUNTED]):
            found = full_cells(records / f"{setting.family}.json")
            done = sum(name == setting.name for name, _ in found)
            title = f"{setting.paper['of']} {setting.paper['table']}, {setting.title}"
            print(f"{setting.name}: {done} of {len(setting.cells)} cells  {title}".rstrip(", "))
        return 0
    tables = _rows(counts(records))
    print("\n".join(aligned([["table", "recorded", "cells", "settings", "about"], *tables])))
    total = [sum(int(row[i]) for row in tables) for i in (1, 2, 3)]
    print(f"{total[0]} of {total[1]} cells in {total[2]} settings have a full record.\n")
    _list_figures(records)
    print("`undrift reproduce NAME --list` shows the settings of a table or figure.")
    return 0


def _rows(found: dict[str, tuple[int, int]]) -> list[list[str]]:
    rows = []
    for family, (done, cells) in found.items():
        some = settings_of(family)
        about = f"{some[0].paper['of']}, {some[0].paper['table']}"
        rows.append([family, str(done), str(cells), str(len(some)), about])
    return rows


def _list_figures(records: Path) -> None:
    """Print the figures, whose curves no paper's number stands beside and which are not counted."""
    rows = _rows(counts(records, figures=True))
    if rows:
        print("\n".join(aligned([["figure", "recorded", "curves", "settings", "about"], *rows])))
        print()
    for name, drawn in CURVES_OF.items():
        if all(any(f"{n}-".startswith(f"{s}-") for n in paper_settings()) for s in drawn.settings):
            print(f"{name}: {drawn}")
    _list_counted(list(COUNTED))


def _list_counted(names: Sequence[str]) -> None:
    for name in names:
        print(f"{name}: counted, nothing is trained ({COUNTED[name].of}, {COUNTED[name].table})")
