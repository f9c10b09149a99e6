"""Write docs/errors.md: what undrift says to each bad input that the tests try."""

from __future__ import annotations

import platform
import re
import sys
import tempfile
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from bad_inputs.case import Case, Outcome, happen  # noqa: E402
from bad_inputs.cases import CASES  # noqa: E402

INTRODUCTION = """\
# Errors

{written_with}

What goes wrong ends in one message that names the value, the place and the next move: on the
command line with exit code 2 (130 after Ctrl-C), in Python as an `undrift.UndriftError` of the kind
that is named below. Nothing that was done before is lost. Every line was tried by a test, and the
messages are the real ones; only long lists of names are cut.

`my.toml` is an experiment on six generated clients, `clinics.csv` a table as in the
[quickstart](quickstart.md), `mine.py` a file as in [bring your own](bring-your-own.md). In Python,
`x` [8, 6] and `y` [8] are examples of three classes, `net` is a network and `trainer()` a trainer
for them. `FOLDER` is where you are.
"""

TIDY = (
    (re.compile(r"(Known: (?:[^,\n]+, ){4}[^,\n]+), [^\n]*"), r"\1, ..."),
    (re.compile(r"x{40,}"), "xxx..."),
    (re.compile(r"0x[0-9a-f]{6,}"), "0x..."),
    (re.compile(r"(: \d+ rounds), .*"), r"\1"),  # measurements differ between machines,
    (re.compile(r"has \d+ bytes instead of \d+"), "has ... bytes instead of ..."),  # so do sizes
)


def written_with() -> str:
    """Name the versions whose words some messages quote."""
    python, version = platform.python_version_tuple(), torch.__version__.partition("+")[0]
    return f"<!-- written with Python {python[0]}.{python[1]} and torch {version} -->"


def page(found: Sequence[tuple[Case, Outcome]]) -> str:
    """Write the page."""
    made = [INTRODUCTION.format(written_with=written_with())]
    for group, pairs in groupby(found, key=lambda pair: pair[0].group):
        made += [f"\n## {group}\n\n| what you do | what undrift says |\n|---|---|\n"]
        made += [f"| {done(case)} | {answer(outcome)} |\n" for case, outcome in pairs]
    return "".join(made)


def done(case: Case) -> str:
    """Write what a user does."""
    return f"{cell(case.title)}<br>{code(tidy(case.typed))}"


def answer(outcome: Outcome) -> str:
    """Write what is said, line by line."""
    lines = [code(line) for line in essence(tidy(outcome.said)).split("\n") if line.strip()]
    if isinstance(outcome.ended, type):
        lines = [f"{outcome.ended.__name__}: {lines[0]}", *lines[1:]]
    elif outcome.ended == 0:
        lines = ["done" + (": " if lines else "") + "<br>".join(lines)]
    return "<br>".join(lines)


def tidy(text: str) -> str:
    """Leave out what differs from machine to machine, and what is too long for a page."""
    for pattern, instead in TIDY:
        text = pattern.sub(instead, text)
    return text


def essence(text: str) -> str:
    """Leave out progress, usage and the name of the program."""
    start = [m.start() for m in re.finditer(r"^undrift\b[^\n]*?: ", text, re.MULTILINE)]
    last = text[start[-1] :] if start else text
    return re.sub(r"^undrift( \w+)*: (error: )?", "", last)


def code(text: str) -> str:
    """Write a text as code that a table can hold."""
    fence = "``" if "`" in text else "`"
    space = " " if "`" in text else ""
    return f"{fence}{space}{cell(text)}{space}{fence}"


def cell(text: str) -> str:
    """Let no character end a cell."""
    return text.replace("|", "\\|").replace("\n", " ")


def main() -> int:
    """Let every case happen and write the page."""
    torch.set_num_threads(1)
    found = []
    for case in CASES:
        if not case.expected_bug:
            with tempfile.TemporaryDirectory() as folder:
                found.append((case, happen(case, Path(folder).resolve())))
    (ROOT / "docs/errors.md").write_text(page(found), "utf-8")
    print(f"docs/errors.md: {len(found)} of {len(CASES)} cases")
    return 0


if __name__ == "__main__":
    sys.exit(main())
