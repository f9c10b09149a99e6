"""`undrift predict` and `undrift export` as they are typed."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np
import pytest

import undrift as fl
from undrift.cli import main
from undrift.using import exported
from undrift.using.card import card_of

from .making import COLUMNS, packaged, spread, trained

NEW = "age,blood,smoker,visited\n40,A,yes,2024-01-05\nold,B,no,\n,Q,no,2024-02-05\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    package = spread(packaged())
    (tmp_path / "m.safetensors").write_bytes(exported.encode(package, card_of(package)))
    (tmp_path / "new.csv").write_text(NEW)
    return tmp_path


def test_predict_prints_a_line_for_each_row_in_order(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", "m.safetensors", "new.csv"]) == 1
    said = capsys.readouterr()
    lines = list(csv.DictReader(io.StringIO(said.out)))
    assert [line["row"] for line in lines] == ["2", "3", "4"]
    assert list(lines[0]) == ["row", "p_ill", "p_well", "class", "error"]
    wanted = fl.load_model("m.safetensors")("new.csv")
    for line, p, name in zip(lines, wanted.probabilities, wanted.classes, strict=True):
        if line["error"]:
            assert not line["p_ill"] and not line["class"] and "'old' is no number" in line["error"]
        else:
            assert float(line["p_ill"]) == pytest.approx(p[0], rel=1e-8) and line["class"] == name
    assert said.err == "undrift: 3 rows, 1 with errors: column 'age': 'old' is no number\n"


def test_predict_writes_a_file_and_replaces_one_only_if_told(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["predict", "m.safetensors", "new.csv", "--out", "out.tsv"]
    assert main(command) == 1
    assert (here / "out.tsv").read_text().splitlines()[0].split("\t")[:2] == ["row", "p_ill"]
    assert main(command) == 2 and "is there already" in capsys.readouterr().err
    assert main([*command, "--force"]) == 1


def test_a_table_without_errors_ends_well(here: Path) -> None:
    (here / "new.csv").write_text("age,blood,smoker,visited\n40,A,yes,2024-01-05\n")
    assert main(["predict", "m.safetensors", "new.csv"]) == 0


def test_export_names_its_file_after_the_experiment(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(here / "runs" / "a")
    assert main(["export", "runs/a"]) == 0
    assert capsys.readouterr().out == "tiny.safetensors: tiny, scaffold, after round 2\n"
    assert main(["export", "runs/a"]) == 2
    assert main(["export", "runs/a", "--force", "--to", "tiny.md"]) == 0
    assert (here / "tiny.md").read_text().startswith("# Model card: tiny")


def test_predictions_become_a_frame_that_says_the_same() -> None:
    pandas = pytest.importorskip("pandas")
    model = fl.Predictor(spread(packaged()))
    frame = model({n: v[:3] for n, v in COLUMNS.items()}).to_pandas()
    assert list(frame.columns) == ["p_ill", "p_well", "class", "error"]
    assert frame.index.name == "row" and isinstance(frame, pandas.DataFrame)
    assert np.allclose(frame["p_ill"] + frame["p_well"], 1)
    values = fl.Predictor(packaged("number"))(COLUMNS).to_pandas()
    assert list(values.columns) == ["value", "error"] and len(values) == 8
