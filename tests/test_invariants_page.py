"""docs/invariants.md names tests that exist, leaves no number out and keeps within its limits."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
LAST = 48


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    sys.path.insert(0, str(ROOT / "scripts"))
    yield importlib.import_module("invariants_page")
    sys.path.remove(str(ROOT / "scripts"))


@cache
def functions(path: Path) -> set[str]:
    """Names of the functions that a file defines, without running it."""
    tree = ast.parse(path.read_text("utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def rows() -> dict[int, list[str]]:
    """The cells of the page's table by number."""
    text = (ROOT / "docs/invariants.md").read_text("utf-8")
    lines = [line for line in text.splitlines() if re.match(r"\| \d", line)]
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]
    return {int(row[0]): [*row, *[""] * (6 - len(row))] for row in cells}


def test_no_number_is_missing_and_every_test_exists(script: Any) -> None:
    assert [one.number for one in script.INVARIANTS] == list(range(1, LAST + 1))
    for one in script.INVARIANTS:
        assert one.tests, one.number
        for test in one.tests:
            path, _, name = test.partition("::")
            assert name in functions(ROOT / path), test


def test_the_page_is_as_the_script_writes_it(script: Any) -> None:
    """All but the figures, which the script measures."""
    found = {n: script.Figures(row[3], row[4]) for n, row in rows().items()}
    assert script.page(found) == script.PAGE.read_text("utf-8")


def test_what_was_measured_is_within_its_limit(script: Any) -> None:
    table = rows()
    for one in script.INVARIANTS:
        measured = table[one.number][3]
        assert measured
        assert measured in ("", "equal") or float(measured) <= one.within, one.number


def test_tests_that_say_a_number_belong_to_it(script: Any) -> None:
    for one in script.INVARIANTS:
        said = [re.search(r"::test_i(\d+)_", test) for test in one.tests]
        assert all(int(m[1]) == one.number for m in said if m), one.number
