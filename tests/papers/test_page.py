"""docs/reproductions.md is what its script writes, and the script can write every kind of table."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from undrift.cli import main

from .small import small

__all__ = ["small"]
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def script() -> Iterator[Any]:
    sys.path.insert(0, str(ROOT / "scripts"))
    yield importlib.reload(importlib.import_module("reproductions_page"))
    sys.path.remove(str(ROOT / "scripts"))


def test_the_page_is_up_to_date(script: Any) -> None:
    assert script.page() == (ROOT / "docs/reproductions.md").read_text("utf-8"), (
        "run python scripts/reproductions_page.py"
    )


def test_records_stand_beside_the_papers(small, script, monkeypatch) -> None:
    fast = ["reproduce", "small", "--quiet", "--jobs", "1"]
    assert main([*fast, "--only", "FedAvg"]) == 0
    assert main([*fast, "--only", "FedProx", "algorithm.mu=0.5"]) == 0
    monkeypatch.setattr(script, "RECORDS", small / "reproductions")
    text = script.page()
    assert "| `small` | 2 of 4 |" in text
    assert "| slow | FedAvg | " in text and "50.00 ± 1.00" in text and "> 4 / >4" in text
    assert "`algorithm.mu=0.5`" in text
    assert "No full record yet: `small-slow` (FedProx)" in text
    pytest.importorskip("matplotlib")
    script.draw(small / "pictures")
    assert {p.name for p in (small / "pictures").iterdir()} == {"small-slow.png", "small-fast.png"}


def test_many_columns_are_thinned(script) -> None:
    at = list(range(100, 2001, 100))
    assert script.shown_rounds({"at": at}) == [400, 800, 1200, 1600, 2000]
    ours = {"columns": [{"round": r, "value": 50.0, "std": 0.5} for r in at], "value": 50.0}
    entry = {"ours": ours, "paper": {"columns": [51.0] * 20}, "difference": -1.0, "differs": True}
    told = script.numbers({"shows": "best", "at": at}, entry)
    assert told == [*["50.0 ± 0.5 / 51.0"] * 5, "**-1.00**"]
