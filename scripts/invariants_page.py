"""Run the tests of the invariants and write what they measure into docs/invariants.md.

python scripts/invariants_page.py
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/invariants.md"

INTRODUCTION = """\
# Invariants

What must be equal, and how nearly undrift is. Everything in float64, with batches that depend on
client, round and step alone; five rounds, at least four steps and five clients of unequal sizes
unless a line says otherwise. *Within* is the limit that the test holds, *measured* the largest
difference over all rounds and all parameters, *elsewhere* the smallest difference where two
algorithms must part. Letters are those of [conventions](conventions.md).

`python scripts/invariants_page.py` runs the tests and writes this page; the figures are of one
machine, and another one rounds differently.

| no | what holds | within | measured | elsewhere | tests |
|---:|---|---:|---:|---:|---|
"""

CLOSING = """
## Where these lines say less than a paper, or more

- I-28: FedDC weighs its variates by r_i = n_i / mean(n), SCAFFOLD does not; so its second half
  needs equal sizes.
- I-31: what is left is sqrt(1 - beta2) D |D| / tau. It falls with the square of the update.
- I-35: an average (1 - beta) g + beta m is g for beta = 0; Adam's moments are not, for they divide.
- I-40: a single client of rFedAvg+ has nobody else to take features from and is not pulled, as in
  rFedAvg. N equal clients are pulled to the mean that all of them have: as one with `include_self`.
- I-43: a round is affine there. Its matrix is read off undrift's own rounds and applied 4000 times;
  twelve real rounds agree with it to 1e-12.
- I-47: weights and sizes travel too and are counted, one float each: FedAvg sends n + 1 up.
"""


class Invariant(NamedTuple):
    """One line of the page."""

    number: int
    says: str
    within: float
    tests: tuple[str, ...]
    label: str = ""  # a pattern of the printed lines that count; empty: all


def _read() -> list[Invariant]:
    table = tomllib.loads((ROOT / "scripts/invariants.toml").read_text("utf-8"))
    return [Invariant(**{**one, "tests": tuple(one["tests"])}) for one in table["invariant"]]


INVARIANTS = _read()


class Figures(NamedTuple):
    """What the tests of one invariant print."""

    measured: str  # the largest difference; "equal" where integers or bits are compared
    elsewhere: str  # the smallest difference where there must be one


class Line(NamedTuple):
    """One measurement as a test prints it."""

    label: str
    value: float
    differs: bool


PRINTED = re.compile(r"^\.?(.+): (-?\d\.\de[+-]\d\d)( \(must differ\))?$", re.MULTILINE)


def measured(tests: Iterable[str]) -> dict[str, list[Line]]:
    """Run tests and give what each printed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", f"--junitxml={report}"]
        command += ["-o", "junit_logging=system-out", *sorted(tests)]
        subprocess.run(command, cwd=ROOT, check=True)
        cases = ElementTree.parse(report).iter("testcase")
        found: dict[str, list[Line]] = {}
        for case in cases:
            place = case.attrib["classname"].replace(".", "/") + ".py"
            place = place if place.startswith("tests/") else f"tests/{place}"
            name = f"{place}::{case.attrib['name'].partition('[')[0]}"
            found.setdefault(name, []).extend(_lines(case.findtext("system-out") or ""))
        return found


def _lines(text: str) -> list[Line]:
    return [Line(m[1], float(m[2]), m[3] is not None) for m in PRINTED.finditer(text)]


def figures_of(one: Invariant, printed: Mapping[str, list[Line]]) -> Figures:
    """Choose the lines that belong to an invariant."""
    lines = [line for test in one.tests for line in printed[test]]
    near = [v for label, v, differs in lines if not differs and re.search(one.label, label)]
    apart = [v for _, v, differs in lines if differs]
    worst = max(near, default=None)
    if worst is not None and worst > one.within:
        raise SystemExit(f"I-{one.number}: {worst:.1e} is above {one.within:g}")
    return Figures(
        "equal" if worst is None else _short(worst), f"{min(apart):.1e}" if apart else ""
    )


def _short(value: float) -> str:
    return "0" if value <= 0 else f"{value:.1e}"


def page(figures: Mapping[int, Figures]) -> str:
    """Write the page."""
    rows = [_row(one, figures[one.number]) for one in INVARIANTS]
    return INTRODUCTION + "".join(rows) + CLOSING


def _row(one: Invariant, found: Figures) -> str:
    tests = "<br>".join(f"`{test.removeprefix('tests/')}`" for test in one.tests)
    limit = "" if not one.tests else _short(one.within)
    cells = [str(one.number), one.says, limit, found.measured, found.elsewhere, tests]
    return f"| {' | '.join(cells)} |\n"


def main() -> None:
    """Measure and write."""
    tests = {test for one in INVARIANTS for test in one.tests}
    printed = measured(tests)
    nothing = Figures("", "")
    figures = {one.number: figures_of(one, printed) if one.tests else nothing for one in INVARIANTS}
    PAGE.write_text(page(figures), "utf-8")


if __name__ == "__main__":
    main()
