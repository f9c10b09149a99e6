"""docs/reproductions.md is what its script writes, and the script can write every kind of table."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from undrift.cli import main
from undrift.experiment.family import settings_of

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
    (small / "reproductions/small.md").write_text("Nobody's numbers are ours.\n")
    text = script.page()
    assert "### What we make of it\n\nNobody's numbers are ours.\n\nNo full record yet" in text
    assert "| `small` | 2 of 4 |" in text
    assert "| slow | FedAvg | " in text and "50.00 ± 1.00" in text and "> 4 / >4" in text
    assert "`algorithm.mu=0.5`" in text
    assert "No full record yet: `small-slow` (FedProx)" in text
    pytest.importorskip("matplotlib")
    script.draw(small / "reproductions", small / "pictures")
    assert {p.name for p in (small / "pictures").iterdir()} == {"small-slow.png", "small-fast.png"}


def test_many_columns_are_thinned(script) -> None:
    at = list(range(100, 2001, 100))
    assert script.shown_rounds({"at": at}) == [400, 800, 1200, 1600, 2000]
    ours = {"columns": [{"round": r, "value": 50.0, "std": 0.5} for r in at], "value": 50.0}
    entry = {"ours": ours, "paper": {"columns": [51.0] * 20}, "difference": -1.0, "differs": True}
    told = script.numbers({"shows": "best", "at": at}, entry)
    assert told == [*["50.0 ± 0.5 / 51.0"] * 5, "**-1.00**"]


def test_the_deviation_within_a_run_stands_beside_that_of_the_seeds(script) -> None:
    ours = {"value": 97.0, "std": 0.5, "each": [96.6, 97.4], "within": 0.25}
    paper = {"value": 97.07, "std": 0.34}
    entry = {"ours": ours, "paper": paper, "difference": -0.07, "differs": False, "rounds": 60}
    told = script.numbers({"shows": "five"}, entry)
    assert told == ["97.00 ± 0.50", "97.07 ± 0.34", "-0.07", "± 0.25"]
    assert len(told) == len(script.columns({"shows": "five"}))


def test_rows_without_data_are_told_from_rows_that_were_not_run(script) -> None:
    told = script.missing(settings_of("rfedavg-table1"), {})
    run, absent = told.split("\n\n")
    assert "`rfedavg-table1-mnist-s0` (all)" in run and "sent140" not in run
    assert absent == (
        "The data were not available (Sent140): `rfedavg-table1-sent140-noniid` (all); "
        "`rfedavg-table1-sent140-iid` (all)."
    )


def test_many_methods_are_drawn_in_panels(script) -> None:
    pictures = importlib.import_module("reproductions_pictures")
    few = {i: {"curves": {"train_loss": {}, "drift": {}}} for i in range(6)}
    assert pictures.panels_of(few) == [(few, None), (few, "train_loss")]
    many = {i: {"name": str(i)} for i in range(16) if i != 5}
    assert [list(part) for part, _ in pictures.panels_of(many)] == [
        [0, 1, 2, 3], [4, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15],
    ]  # fmt: skip


def test_best_values_stand_at_their_columns(script) -> None:
    pictures = importlib.import_module("reproductions_pictures")
    (setting,) = settings_of("comfed-table4")
    columns = [{"round": 100, "value": 33.0}, {"round": 200, "value": None}]
    paper = {"value": 75.4, "columns": [33.1, 43.8]}
    entry = {"ours": {"columns": columns}, "paper": paper, "curve": {}}
    rounds, values = pictures.curve_of(entry, None)
    assert rounds == [100, 200] and values[0] == 33.0 and math.isnan(values[1])
    assert pictures.marks_of(setting, entry)[0][:2] == [100, 200]
    assert pictures.marks_of(setting, entry)[1] == [33.1, 43.8]
