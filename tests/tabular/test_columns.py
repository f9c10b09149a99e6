"""The section [columns] of an experiment: read, written, swept, refused when changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from undrift import sources
from undrift.errors import ChangedExperiment, ConfigError, DataError
from undrift.experiment.run import run
from undrift.experiment.spec import Experiment, load
from undrift.experiment.world import examples_of
from undrift.tabular import Number

FILE = """\
rounds = 1

[data]
use = "table"
path = "t.csv"
client = "clinic"
target = "outcome"
exclude = ["id"]
missing_target = "drop"

[columns]
age     = { kind = "number", fill = "median", indicator = true }
"blood group" = { kind = "category", levels = ["A", "B", "0"] }
outcome = { kind = "classes", levels = ["well", "ill"] }

[model]
use = "mlp"
hidden = 4

[algorithm]
use = "fedavg"
lr = 0.1

[engine]
device = "cpu"
"""
ROWS = "clinic,id,age,blood group,outcome\n" + "".join(
    f"{'NS'[k % 2]},p{k},{20 + k if k % 5 else ''},{['A', 'B', 'x', ''][k % 4]},"
    f"{['ill', 'well', '?'][(k // 2) % 3]}\n"
    for k in range(48)
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "t.csv").write_text(ROWS)
    (tmp_path / "e.toml").write_text(FILE)
    return tmp_path / "e.toml"


def test_columns_come_from_the_file_and_go_back(file: Path) -> None:
    (made,) = load(file)
    data = examples_of(made)
    assert data.info.feature_names == (
        *("age", "age is missing", "blood group=A", "blood group=B", "blood group=0"),
        *("blood group is other", "blood group is missing"),
    )
    assert data.info.class_names == ("well", "ill") and data.info.preparation.blocks == (2, 5)
    assert data.info.dropped == 16 and "16 dropped" in repr(data)
    assert Experiment.from_toml(made.to_toml()) == made
    assert 'age = { kind = "number", fill = "median", indicator = true }' in made.to_toml()
    assert load({**made.to_table()}, trust=True) == [made]
    with pytest.raises(ConfigError, match=r"\[columns\] .* data 'digits' has none"):
        examples_of(Experiment("digits", "mlp", made.algorithm, columns=made.columns))


def test_a_setting_of_a_column_can_be_swept(file: Path) -> None:
    made = load(file, ["columns.age.fill=mean,median"])
    assert [one.label for one in made] == ["fedavg fill=mean", "fedavg fill=median"]
    assert made[0].columns.lines[0] == ("age", Number("mean", indicator=True))


def test_a_begun_run_keeps_its_columns(file: Path, tmp_path: Path) -> None:
    (made,) = load(file)
    run(made, tmp_path / "run")
    text = (tmp_path / "run" / "experiment.toml").read_text()
    assert 'outcome = { kind = "classes", levels = ["well", "ill"] }' in text
    assert len(run(made, tmp_path / "run")) == 1
    assert load(tmp_path / "run", trust=True)[0] == made
    (other,) = load(file, ["columns.age.fill=mean"])
    with pytest.raises(ChangedExperiment, match=r'columns.age.fill: "median" there, "mean" now'):
        run(other, tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["columns.age.kind=numbr"], r"\[columns\]: age: no kind named 'numbr'"),
        (["columns.age.fil=mean"], r"\[columns\]: age: no setting of 'number' named 'fil'"),
        (["columns.outcome.kind=category"], r"outcome: no kind named 'category'.*classes"),
        (["data.target=other"], r"(?s)outcome: no kind named 'classes'.*no line for the target"),
        (["columns=3"], r"\[columns\] needs a line for every column, got 3"),
        (["columns={}"], r"\[columns\] needs a line"),
    ],
)
def test_a_section_that_cannot_be(file: Path, changes: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(file, changes)


def test_the_file_and_the_section_must_name_the_same_columns(file: Path) -> None:
    def asked(**changes: Any) -> None:
        settings = {"client": "clinic", "target": "outcome", "exclude": ["id"], **changes}
        sources.load("table", path=file.parent / "t.csv", missing_target="drop", **settings)

    lines: dict[str, Any] = {"age": "number", "blood group": "category", "outcome": "classes"}
    asked(columns=lines)
    with pytest.raises(DataError) as caught:
        asked(columns={**lines, "agee": "number", "weight": "number"}, exclude=[])
    text = str(caught.value)
    assert "has 3 problems" in text and "'agee', which is not there. Did you mean 'age'" in text
    assert "'weight', which is not there" in text and "'id' is not in [columns]: add" in text
    with pytest.raises(DataError, match="'age' is in `exclude` and used all the same"):
        asked(columns=lines, exclude=["id", "age"])
    with pytest.raises(DataError, match="a line for 'clinic', the client"):
        asked(columns={**lines, "clinic": "category"})
    with pytest.raises(ConfigError, match=r"features and \[columns\] both choose columns"):
        asked(columns=lines, features=["age"], exclude=None)
    with pytest.raises(ConfigError, match="features and exclude both choose columns"):
        asked(features=["age"])


def test_clients_name_levels_that_enough_of_their_rows_have(tmp_path: Path) -> None:
    rows = "".join(f"{c},{a},{k % 2}\n" for k, (c, a) in enumerate(
        [("n", "x")] * 6 + [("s", "x")] * 2 + [("n", "y")] * 4 + [("s", "y")] * 4 + [("s", "z")]
    ))  # fmt: skip
    (tmp_path / "t.csv").write_text("c,a,outcome\n" + rows)
    settings: dict[str, Any] = {
        "path": tmp_path / "t.csv", "client": "c", "target": "outcome", "test_share": 0.0
    }  # fmt: skip
    columns = {"a": "category", "outcome": {"kind": "classes", "levels": ["0", "1"]}}
    named = sources.load("table", **settings, columns=columns).info.feature_names
    assert named == ("a=x", "a is other")  # eight rows are y, but no client has five of them
    named = sources.load("table", **settings, columns=columns, least=4).info.feature_names
    assert named == ("a=x", "a=y", "a is other")
    assert sources.load("table", **settings).info.feature_names == ("a=x", "a=y", "a=z")
