"""A model card says what somebody needs who did not train the model, and nothing of single rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from undrift.using.card import card_of
from undrift.using.export import export
from undrift.using.runs import read_run

from .making import COLUMNS, packaged, trained

EVALUATION = {
    "examples": 40,
    "kind": "classes",
    "metrics": {"auc": 0.8123, "log_loss": None},
    "worst_site": {"site": "south", "auc": 0.51},
    "judged_sites": 3,
}


def test_it_says_what_is_needed() -> None:
    about = {"rounds": 20, "planned": 20, "complete": True, "evaluation": EVALUATION,
             "label": "scaffold", "seed": 3, "undrift": "1.2"}  # fmt: skip
    card = card_of(packaged(**about))
    for words in (
        "# Model card: clinics",
        "Predicts `outcome`: the probabilities of 2 classes (ill, well)",
        "8 rows of 3 sites: north, south, west.",
        "| age | number | filled by median, and marked |",
        '| blood | category: 0, A, B; any other level counts as "other" | a level of its own |',
        "| visited | date: time, month |",
        "with scaffold (Karimireddy et al. 2020)",
        "Rounds: 20. Network: `tabular_mlp`.",
        "On 40 rows that were not trained on:",
        "| metric | all sites | worst of 3 sites (south) |",
        "| auc | 0.8123 | 0.51 |",
        "| log_loss | - | - |",
        "| seed | 3 |",
        "undrift predict model.safetensors new.csv",
    ):
        assert words in card, words


def test_it_holds_no_cell_of_a_row() -> None:
    card = card_of(packaged(evaluation=EVALUATION))
    for cell in (*COLUMNS["age"], *COLUMNS["visited"]):
        assert cell is None or f" {cell} " not in card.replace("|", " "), cell


def test_numbers_and_tensors_are_told_as_what_they_are(tmp_path: Path) -> None:
    assert "`outcome`: a number in its own units" in card_of(packaged("number"))
    assert "a count, by its expected value" in card_of(packaged("count"))
    card = card_of(read_run(trained(tmp_path / "a")))
    assert "It reads tensors [n, 5] of numbers." in card and "## Columns" not in card
    assert "| accuracy | 0." in card and "Scaffold" in card and "Sgd (lr 0.1)" in card
    (tmp_path / "a/evaluation.json").unlink()  # of before: its summary tells one number
    assert "test_accuracy: 0." in card_of(read_run(tmp_path / "a"))


def test_a_run_that_is_not_complete_says_so(tmp_path: Path) -> None:
    folder = trained(tmp_path / "a")
    for name in ("summary.json", "evaluation.json"):
        (folder / name).unlink()
    card = card_of(read_run(tmp_path / "a"))
    assert "Rounds: 2 of 2: not complete." in card
    assert "The run is not complete: it has no result yet." in card
    assert "- The run was not complete when this was written." in card


@pytest.mark.parametrize("name", ["a | b\n# x", "<script>", "`rm`", "\x1b[31m"])
def test_names_stay_in_their_place_on_the_page(name: str) -> None:
    package = packaged()
    blueprint = replace(package.blueprint, client_names=(name,), class_names=(name, "b"))
    card = card_of(replace(package, blueprint=blueprint, about={"name": name}))
    assert "\n# x" not in card and "<script" not in card and "\x1b" not in card
    assert "`rm`" not in card


def test_it_is_written_alone(tmp_path: Path) -> None:
    place, package = export(trained(tmp_path / "a"), tmp_path / "card.md")
    assert place.read_text() == card_of(package)
