"""`undrift data get`, `undrift data list`, `undrift init`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from undrift import sources
from undrift.cli.common import Commands
from undrift.errors import ConfigError
from undrift.experiment.comparison import aligned
from undrift.experiment.starter import starter_file
from undrift.sources.place import data_directory
from undrift.state import disk
from undrift.tabular.propose import Proposal, read_kinds


def add_commands(commands: Commands) -> None:
    """Describe the commands about data."""
    data = commands.add_parser("data", help="obtain data sets and list what is there")
    inner = data.add_subparsers(dest="what", required=True, metavar="get|list")
    get = inner.add_parser("get", help="obtain a data set and verify it")
    get.add_argument("name", metavar="NAME", help="e.g. mnist; `undrift data list` shows all")
    get.set_defaults(action=do_get)
    inner.add_parser("list", help="show every source and where its files lie").set_defaults(
        action=do_list
    )
    init = commands.add_parser("init", help="write an experiment file for a table of your own")
    init.add_argument("table", metavar="TABLE", help="a .csv, .tsv or .parquet file")
    init.add_argument("--client", metavar="COLUMN", help="the column that names the client")
    init.add_argument("--target", metavar="COLUMN", required=True, help="the column to predict")
    init.add_argument(
        "--kind",
        action="append",
        default=[],
        metavar="KIND",
        help="classes, numbers or count: what the target holds; COLUMN=number, category, flag, "
        "date or date:d/m/Y: what a column holds; repeat it for several",
    )
    init.add_argument("--exclude", metavar="A,B,...", help="columns that are not to be used")
    init.add_argument("--features", metavar="A,B,...", help="the columns to learn from")
    init.add_argument("--missing", metavar="A,B,...", help="texts of a cell that holds nothing")
    init.add_argument("--out", metavar="FILE", help="default: TABLE with .toml for its ending")
    init.set_defaults(action=do_init)


class Progress:
    """Shows how far a download is: one line on a terminal, few lines elsewhere."""

    def __init__(self) -> None:
        self.last = ""

    def __call__(self, what: str, done: int, total: int | None) -> None:
        """Show one step."""
        tenth = f" {10 * (10 * done // total)} %" if total else ""
        megabytes = f" {done / 1e6:.1f} MB" if done else ""
        if sys.stderr.isatty():
            print(f"\r\033[2K{what}{tenth}{megabytes}", end="", file=sys.stderr, flush=True)
        elif f"{what}{tenth}" != self.last:
            print(f"{what}{tenth}", file=sys.stderr, flush=True)
        self.last = f"{what}{tenth}"

    def close(self) -> None:
        """End the line."""
        if self.last and sys.stderr.isatty():
            print(file=sys.stderr)


def do_get(chosen: argparse.Namespace) -> int:
    """Obtain a data set."""
    progress = Progress()
    try:
        path = sources.get(chosen.name, progress=progress)
    finally:
        progress.close()
    print(f"{chosen.name}: {'nothing to obtain' if path is None else f'verified, in {path}'}")
    return 0


def do_list(chosen: argparse.Namespace) -> int:
    """List every source."""
    rows = [["source", "state", "MB", "where"]]
    for one in sources.available():
        size = f"{one.bytes / 1e6:.1f}" if one.bytes else ""
        rows.append([one.name, one.state, size, "" if one.path is None else str(one.path)])
    lines = aligned([[a, b, c] for a, b, c, _ in rows])
    print(f"data directory: {data_directory()}")
    print("\n".join(f"{line}  {row[3]}".rstrip() for line, row in zip(lines, rows, strict=True)))
    return 0


def do_init(chosen: argparse.Namespace) -> int:
    """Write an experiment file for a table."""
    table = Path(chosen.table)
    if not table.name:
        raise ConfigError(f"{chosen.table!r} is no table: give a .csv, .tsv or .parquet file")
    out = table.with_suffix(".toml") if chosen.out is None else Path(chosen.out)
    if out.exists():
        raise ConfigError(f"{out} is there already: choose another name with --out")
    settings: dict[str, Any] = {
        name: [part.strip() for part in given.split(",")]
        for name in ("features", "exclude", "missing")
        if (given := getattr(chosen, name)) is not None
    }
    settings["kinds"] = read_kinds(chosen.kind, chosen.target)
    text, about, proposal = starter_file(table, chosen.client, chosen.target, out, **settings)
    disk.make_directory(out.parent)
    disk.write_atomically(out, [text.encode()])
    print("\n".join(shown(proposal)))
    print(f"{out} is written ({about}); next:\n  undrift partition {out}\n  undrift run {out}\n"
          f"  undrift compare {out} --algorithms fedavg,scaffold,fedadam --seeds 3")  # fmt: skip
    return 0


def shown(proposal: Proposal) -> list[str]:
    """Show what the columns of a table are, and everything noticeable."""
    rows = [["column", "kind", "missing", "holds"], *map(list, proposal.lines)]
    widths = [max(len(row[k]) for row in rows) for k in range(3)]
    lines = ["  ".join([*(row[k].ljust(widths[k]) for k in range(3)), row[3]]) for row in rows]
    made = [line.rstrip() for line in lines]
    if proposal.clients:
        made.append(f"{len(proposal.clients)} clients: {', '.join(proposal.clients[:12])}"
                    f"{', ...' if len(proposal.clients) > 12 else ''}")  # fmt: skip
    if proposal.dropped:
        made.append(f"{proposal.dropped} of {proposal.rows} rows have no target: they are left out")
    if proposal.findings:
        made += ["", "look at:", *(f"  {finding}" for finding in proposal.findings)]
    return [*made, ""]
