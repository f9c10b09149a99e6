"""Whatever a user does wrong ends in one clear message, and nothing is lost."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .case import Case, Outcome, happen
from .cases import CASES

ROOT = Path(__file__).parents[2]
Happened = Callable[[Case], Outcome]


@pytest.fixture(scope="session")
def happened(tmp_path_factory: pytest.TempPathFactory) -> Happened:
    """Let every case happen once, for its own test and for the page."""
    known: dict[str, Outcome] = {}

    def of(case: Case) -> Outcome:
        if case.name not in known:
            known[case.name] = happen(case, tmp_path_factory.mktemp("user"))
        return known[case.name]

    return of


def why_not(case: Case) -> str:
    """Say why a case cannot be tried here."""
    missing = [name for name in case.needs if importlib.util.find_spec(name) is None]
    return case.expected_bug or (f"needs {missing[0]}" if missing else "")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_bad_input_ends_in_one_clear_message(case: Case, happened: Happened) -> None:
    if why_not(case):
        pytest.skip(why_not(case))
    ended, said = happened(case)
    assert ended == case.ends, said
    assert re.search(case.says, said, re.DOTALL), said
    assert "Traceback" not in said
    assert ended == 0 or (len(said.splitlines()) <= 8 and len(said) < 1000), "too much to read"
    assert all(char.isprintable() or char == "\n" for char in said), "would act on a terminal"


def test_there_are_many_cases_and_each_has_a_name() -> None:
    assert len(CASES) >= 80
    assert [name for name, count in Counter(c.name for c in CASES).items() if count > 1] == []


def errors_page() -> Any:
    spec = importlib.util.spec_from_file_location("errors_page", ROOT / "scripts/errors_page.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_errors_shows_what_is_said_now(happened: Happened) -> None:
    script, path = errors_page(), ROOT / "docs/errors.md"
    shown = [case for case in CASES if not case.expected_bug]
    if any(why_not(case) for case in shown) or script.written_with() not in path.read_text("utf-8"):
        pytest.skip("the page quotes other versions of Python and torch than there are here")
    made = script.page([(case, happened(case)) for case in shown])
    assert made == path.read_text("utf-8"), "run scripts/errors_page.py"
