"""`undrift verify`: the proofs, on this machine."""

from __future__ import annotations

import argparse
import math
import textwrap
from collections.abc import Sequence

from undrift.cli.common import Commands
from undrift.errors import ConfigError
from undrift.verify import Verdict, verify_together

LEGEND = (
    "float64. identities: how many, and the worst difference (at most 1e-12; 1e-8 where a limit is "
    "taken). long-hand: from an independent loop in numpy. engines: between the two. optimum: "
    "distance to it on heterogeneous quadratics, everybody and half taking part. down, up: models "
    "per client and round."
)
HEADER = (
    "algorithm", "identities", "worst", "long-hand", "engines", "optimum", "half", "down", "up", ""
)  # fmt: skip
WIDTHS = (20, 10, 8, 9, 8, 8, 8, 5, 5, 5)


def add_commands(commands: Commands) -> None:
    """Describe the command."""
    made = commands.add_parser("verify", help="prove the algorithms right on this machine")
    made.add_argument("names", nargs="*", metavar="NAME", help="algorithms; all if none is given")
    made.add_argument("--all", action="store_true", help="show every identity by itself")
    made.add_argument("--jobs", type=int, metavar="N", help="processes (default: the cores)")
    made.set_defaults(action=do_verify)


def do_verify(chosen: argparse.Namespace) -> int:
    """Print one table, row by row; exit code 1 if anything fails."""
    if chosen.jobs is not None and chosen.jobs < 1:
        raise ConfigError(f"--jobs {chosen.jobs}: at least 1 process must work")
    wrong, count = [], 0
    for one in verify_together(chosen.names, chosen.jobs):
        if not count:
            print(_line(HEADER))
        print(_line(row(one)), flush=True)
        for says, gap, ok in one.identities:
            if chosen.all or not ok:
                print(f"  {says}: {gap:.1e}{'' if ok else '  FAILS'}")
        if one.problem:
            print(f"  {one.problem}")
        wrong += [] if one.holds else [one.name]
        count += 1
    print(f"\n{count - len(wrong)} of {count} hold.\n{textwrap.fill(LEGEND, 98)}")
    if wrong:
        print(f"FAILS: {', '.join(wrong)}")
    return 1 if wrong else 0


def _line(cells: Sequence[str]) -> str:
    first, *rest = zip(cells, WIDTHS, strict=True)
    return "  ".join([first[0].ljust(first[1]), *(c.rjust(w) for c, w in rest)]).rstrip()


def row(one: Verdict) -> list[str]:
    """Write what was measured as the cells under HEADER."""
    worst = max((gap for _, gap, _ in one.identities), default=math.nan)
    exact = (worst, one.longhand, one.engines, one.optimum, one.optimum_half)
    sent = ["" if math.isnan(v) else f"{v:.2f}" for v in (one.down, one.up)]
    count = str(len(one.identities)) if one.identities else ""
    return [one.name, count, *map(_short, exact), *sent, "ok" if one.holds else "FAILS"]


def _short(value: float) -> str:
    return "" if math.isnan(value) else "0" if value == 0 else f"{value:.1e}"
