"""Run `undrift verify` and write its table into README.md and docs/verify.md.

python scripts/verify_page.py
"""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

from undrift.cli.proofs import HEADER, LEGEND, row
from undrift.experiment.pool import cores
from undrift.verify import Verdict, verify_together

ROOT = Path(__file__).resolve().parent.parent
MARKS = re.compile(r"(<!-- verify -->\n).*?(<!-- /verify -->)", re.DOTALL)


def table(rows: list[list[str]]) -> str:
    """Write rows without their last cell, which is "ok" in all of them."""
    kept = [[f"`{name}`", *cells[:-1]] for name, *cells in rows]
    lines = [HEADER[:-1], ["---", *["---:"] * (len(HEADER) - 2)], *kept]
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
        [f"`{one.name}`", says, f"{gap:.1e}"] for one in found for says, gap, _ in one.identities
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
