"""Run `undrift verify` and write its table into README.md and docs/verify.md.

python scripts/verify_page.py
"""

from __future__ import annotations

import math
import re
import sys
import time
from pathlib import Path

from undrift.cli.proofs import LEGEND
from undrift.experiment.pool import cores
from undrift.verify import Verdict, verify_together

ROOT = Path(__file__).resolve().parent.parent
MARKS = re.compile(r"(<!-- verify -->\n).*?(<!-- /verify -->)", re.DOTALL)
HEADS = [
    "algorithm", "identities", "worst", "long-hand", "engines", "optimum", "half", "down", "up"
]  # fmt: skip


def short(value: float) -> str:
    return "" if math.isnan(value) else "0" if value == 0 else f"{value:.1e}"


def row(one: Verdict) -> list[str]:
    worst = max((gap for _, gap, _ in one.identities), default=math.nan)
    count = str(len(one.identities)) if one.identities else ""
    exact = map(short, (worst, one.longhand, one.engines, one.optimum, one.optimum_half))
    return [f"`{one.name}`", count, *exact, f"{one.down:.2f}", f"{one.up:.2f}"]


def table(rows: list[list[str]]) -> str:
    lines = [HEADS, ["---", *["---:"] * (len(HEADS) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def together(cells: list[Verdict]) -> Verdict:
    """Make one row of many: the worst of each."""
    first = cells[0]
    identities = tuple(i for one in cells for i in one.identities)
    return first._replace(
        name=f"comfed(...), {len(cells)} cells",
        identities=identities,
        longhand=max(one.longhand for one in cells),
        engines=max(one.engines for one in cells),
        down=max(one.down for one in cells),
        up=max(one.up for one in cells),
    )


def main() -> int:
    start = time.monotonic()
    found = list(verify_together())
    seconds = time.monotonic() - start
    wrong = [one.name for one in found if not one.holds]
    if wrong:
        print(f"not written, for these fail: {', '.join(wrong)}", file=sys.stderr)
        return 1
    cells = [one for one in found if one.name.startswith("comfed:")]
    singles = [one for one in found if one not in cells]
    text = (ROOT / "README.md").read_text()
    shown = table([row(one) for one in (*singles, together(cells))])
    (ROOT / "README.md").write_text(MARKS.sub(lambda m: m[1] + shown + m[2], text))
    identities = [
        [f"`{one.name}`", says, short(gap)] for one in found for says, gap, _ in one.identities
    ]
    what = "\n".join(f"| {' | '.join(cells)} |" for cells in identities)
    (ROOT / "docs" / "verify.md").write_text(
        f"# What `undrift verify` measured\n\n{LEGEND}\n\n"
        f"{len(found)} algorithms in {seconds:.0f} seconds on {cores()} cores "
        f"(`python scripts/verify_page.py` wrote this page).\n\n{table([row(o) for o in found])}\n"
        f"## The identities\n\n| algorithm | becomes | difference |\n|---|---|---:|\n{what}\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
