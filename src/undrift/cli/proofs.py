"""`undrift verify`: the proofs, on this machine."""

from __future__ import annotations

import argparse
import math

from undrift.cli.common import Commands
from undrift.experiment.comparison import aligned
from undrift.verify import Verdict, verify

LEGEND = (
    "float64; identities hold to 1e-12; engines: largest difference of any number; optimum: "
    "distance to it on heterogeneous quadratics, everybody and half; down, up: models per client "
    "and round."
)


def add_commands(commands: Commands) -> None:
    """Describe the command."""
    made = commands.add_parser("verify", help="prove the algorithms right on this machine")
    made.add_argument("names", nargs="*", metavar="NAME", help="algorithms; all if none is given")
    made.add_argument("--all", action="store_true", help="show every identity by itself")
    made.set_defaults(action=do_verify)


def do_verify(chosen: argparse.Namespace) -> int:
    """Print one table; exit code 1 if anything fails."""
    found = verify(chosen.names)
    header = ["algorithm", "identities", "worst", "engines", "optimum", "half", "down", "up", ""]
    print("\n".join(aligned([header, *map(_row, found)])))
    for one in found:
        for says, gap, ok in one.identities if chosen.all else ():
            print(f"  {one.name}: {says}: {gap:.1e}{'' if ok else '  FAILS'}")
        if one.problem:
            print(f"  {one.name}: {one.problem}")
    wrong = [one.name for one in found if not one.holds]
    print(f"\n{len(found) - len(wrong)} of {len(found)} hold. {LEGEND}")
    if wrong:
        print(f"FAILS: {', '.join(wrong)}")
    return 1 if wrong else 0


def _row(one: Verdict) -> list[str]:
    worst = max((gap for _, gap, _ in one.identities), default=math.nan)
    exact = [_short(v) for v in (worst, one.engines, one.optimum, one.optimum_half)]
    sent = [f"{v:.2f}" for v in (one.down, one.up)]
    count = str(len(one.identities)) if one.identities else ""
    return [one.name, count, *exact, *sent, "ok" if one.holds else "FAILS"]


def _short(value: float) -> str:
    return "" if math.isnan(value) else "0" if value == 0 else f"{value:.1e}"
