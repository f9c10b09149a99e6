"""A user's own table: what columns become, how rows are held out, what is wrong in which line."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import undrift as fl
from undrift import sources
from undrift.data.partitions import ByKey
from undrift.errors import ConfigError, DataError, MissingExtra
from undrift.tabular import growing

HOSPITALS = """hospital,age,smoker,blood,outcome
north,31,true,A,well
south,45,False,B,ill
north,58,TRUE,0,well
south,62,false,A,ill
east,20,true,B,well
north,41,false,A,ill
"""


def write(place: Path, text: str | bytes, name: str = "table.csv") -> Path:
    path = place / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def load(path: Path, **settings: Any) -> sources.Examples:
    return sources.load("table", path=path, **{"target": "outcome", **settings})


@pytest.fixture
def hospitals(tmp_path: Path) -> Path:
    return write(tmp_path, HOSPITALS)


# ---- what columns become -------------------------------------------------------------------------
def test_numbers_flags_and_texts_become_columns(hospitals: Path) -> None:
    made = load(hospitals, client="hospital", test_share=0, standardise=False)
    assert made.info.feature_names == ("age", "smoker", "blood=0", "blood=A", "blood=B")
    assert made.train_x.tolist() == [
        [31, 1, 0, 1, 0],
        [45, 0, 0, 0, 1],
        [58, 1, 1, 0, 0],
        [62, 0, 0, 1, 0],
        [20, 1, 0, 0, 1],
        [41, 0, 0, 1, 0],
    ]
    assert made.train_x.dtype == torch.float32 and len(made.test_x) == 0
    assert made.info.class_names == ("ill", "well") and made.classes == 2
    assert made.train_y.tolist() == [1, 0, 1, 0, 1, 0] and made.train_y.dtype == torch.int64
    assert made.info.client_names == ("east", "north", "south")
    assert made.train_clients.tolist() == [1, 2, 1, 2, 0, 1]


def test_numbers_are_standardised_by_the_training_rows(hospitals: Path) -> None:
    made = load(hospitals, client="hospital")
    ages = made.train_x[:, 0].double()
    assert abs(float(ages.mean())) < 1e-6 and abs(float(ages.std(correction=0)) - 1) < 1e-6
    assert set(made.train_x[:, 1:].flatten().tolist()) == {0.0, 1.0}  # flags and texts stay
    back = torch.cat([made.train_x, made.test_x])[:, 0] * made.info.std[0] + made.info.mean[0]
    assert sorted(round(float(age)) for age in back) == [20, 31, 41, 45, 58, 62]
    assert made.info.normalise == "train" and len(made.info.mean) == 5


def test_a_constant_column_becomes_zeros(tmp_path: Path) -> None:
    rows = "".join(f"{k},0.1,{k % 2}\n" for k in range(9))
    made = load(write(tmp_path, "a,b,outcome\n" + rows))
    assert made.train_x[:, 1].abs().max() == 0 and made.test_x[:, 1].abs().max() == 0
    other = write(tmp_path, "a,b,outcome\n1,7,0\n", "test.csv")
    assert load(write(tmp_path, "a,b,outcome\n" + rows), test_path=other).test_x[0, 1] == 0


@pytest.mark.parametrize(
    ("cells", "kind", "names"),
    [
        (["b", "a", "b"], "auto", ("a", "b")),
        (["10", "9", "-1"], "auto", ("-1", "9", "10")),
        (["007", "7", "07"], "auto", ("007", "07", "7")),
        (["true", "FALSE", "true"], "auto", ("FALSE", "true")),
        (["1.5", "2", "3"], "auto", ()),
        (["1", "0", "1"], "numbers", ()),
        (["1.0", "2.0", "1.0"], "classes", ("1.0", "2.0")),
        (["1", "2", "other"], "classes", ("1", "2", "other")),
        (["9" * 30, "8", "7"], "auto", None),
        (["9" * 30, "8", "7"], "classes", ("7", "8", "9" * 30)),
    ],
)
def test_what_a_target_is(tmp_path: Path, cells: list[str], kind: str, names: Any) -> None:
    path = write(tmp_path, "a,outcome\n" + "".join(f"{k},{c}\n" for k, c in enumerate(cells)))
    if names is None:
        with pytest.raises(DataError, match=r"line 2, column 'outcome': 9+ is too large"):
            load(path, kind=kind)
        return
    made = load(path, kind=kind, test_share=0, standardise=False)
    assert made.info.class_names == names and made.classes == len(names)
    if names:
        assert [names[k] for k in made.train_y] == cells
    else:
        assert made.train_y[:, 0].tolist() == [float(c) for c in cells]
        assert made.train_y.shape == (3, 1) and made.train_y.dtype == torch.float32


def test_features_are_taken_in_the_order_asked_for(hospitals: Path) -> None:
    made = load(hospitals, features=["smoker", "age"], test_share=0, standardise=False)
    assert made.info.feature_names == ("smoker", "age") and made.train_x[0].tolist() == [1, 31]
    assert made.train_clients is None and made.info.client_names == ()


# ---- files as people write them ------------------------------------------------------------------
SAME = {
    "semicolons": HOSPITALS.replace(",", ";"),
    "tabs": HOSPITALS.replace(",", "\t"),
    "windows": HOSPITALS.replace("\n", "\r\n"),
    "old mac": HOSPITALS.replace("\n", "\r"),
    "byte order mark": "\ufeff" + HOSPITALS,
    "quotes": re.sub(r"([^,\n]+)", r'"\1"', HOSPITALS),
    "no last newline": HOSPITALS.strip(),
    "blank lines": "\n" + HOSPITALS.replace("\n", "\n\n") + "  \n",
    "blanks around cells": HOSPITALS.replace(",", " , "),
}


@pytest.mark.parametrize("name", SAME)
def test_the_same_table_in_other_clothes(tmp_path: Path, hospitals: Path, name: str) -> None:
    one = load(hospitals, client="hospital")
    other = load(write(tmp_path, SAME[name], "other.csv"), client="hospital")
    assert torch.equal(one.train_x, other.train_x) and torch.equal(one.test_y, other.test_y)
    assert one.info[4:] == other.info[4:]


def test_unicode_quotes_and_delimiters_inside_cells(tmp_path: Path) -> None:
    text = 'Stadt;größe;outcome\n"Köln; am Rhein";1.5;x\n"a ""b""\nc";2;y\n'
    made = load(write(tmp_path, text), client="Stadt", test_share=0)
    assert made.info.client_names == ("Köln; am Rhein", 'a "b"\nc')
    assert made.info.feature_names == ("größe",)


def test_a_tsv_is_cut_at_tabs_alone(tmp_path: Path) -> None:
    made = load(write(tmp_path, "a,b;c\toutcome\n1\tx\n2\ty\n", "t.TSV"), test_share=0)
    assert made.info.feature_names == ("a,b;c",) and made.info.form == "tsv"


def test_a_long_file_is_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = "".join(f"{k},{k % 7},{k % 3}\n" for k in range(100))
    path = write(tmp_path, "a,client,outcome\n" + rows)
    one = load(path, client="client")
    monkeypatch.setattr("undrift.tabular.delimited.BLOCK", 9)
    other = load(path, client="client")
    assert torch.equal(one.train_x, other.train_x)
    assert torch.equal(one.train_clients, other.train_clients)


# ---- holding out -----------------------------------------------------------------------------
def many(place: Path, sizes: tuple[int, ...]) -> Path:
    owners = [f"c{i},{k},{k % 2}\n" for i, n in enumerate(sizes) for k in range(n)]
    return write(place, "client,a,outcome\n" + "".join(owners))


def test_every_client_with_two_rows_is_on_both_sides(tmp_path: Path) -> None:
    made = load(many(tmp_path, (1, 2, 3, 10, 40)), client="client")
    assert torch.bincount(made.train_clients).tolist() == [1, 1, 2, 8, 32]
    assert torch.bincount(made.test_clients, minlength=5).tolist() == [0, 1, 1, 2, 8]
    most = load(many(tmp_path, (1, 2, 3, 10, 40)), client="client", test_share=0.99)
    assert torch.bincount(most.train_clients).tolist() == [1, 1, 1, 1, 1]


def test_the_split_depends_on_its_seed_alone(tmp_path: Path) -> None:
    path = many(tmp_path, (20, 30))
    one, two, other = (load(path, client="client", split_seed=s) for s in (0, 0, 1))
    assert torch.equal(one.test_x, two.test_x) and not torch.equal(one.test_x, other.test_x)
    plain = load(path, test_share=0.3)
    assert len(plain.test_x) == 15 and plain.test_clients is None


def test_one_client_is_allowed(tmp_path: Path) -> None:
    made = load(many(tmp_path, (5,)), client="client")
    assert made.info.client_names == ("c0",) and made.train_clients.tolist() == [0] * 4


def test_a_second_file_may_hold_the_test_rows(hospitals: Path, tmp_path: Path) -> None:
    later = "outcome,blood,smoker,age,more,hospital\nill,0,true,99,x,south\n"
    made = load(
        hospitals,
        client="hospital",
        test_path=write(tmp_path, later, "later.csv"),
        standardise=False,
    )
    assert len(made.train_x) == 6 and made.test_x.tolist() == [[99, 1, 1, 0, 0]]
    assert made.test_y.tolist() == [0] and made.test_clients.tolist() == [2]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("dead,A,true,9,south", "line 2, column 'outcome': 'dead' is no class that is known: ill"),
        ("ill,A,true,9,west", "line 2, column 'hospital': 'west' does not occur"),
        ("ill,A,true,old,south", "line 2, column 'age': 'old' is no number"),
        ("ill,A,maybe,9,south", "line 2, column 'smoker': 'maybe' is no flag"),
    ],
)
def test_a_second_file_must_fit_the_first(
    hospitals: Path, tmp_path: Path, row: str, message: str
) -> None:
    later = write(tmp_path, f"outcome,blood,smoker,age,hospital\n{row}\n", "later.csv")
    with pytest.raises(DataError, match=message):
        load(hospitals, client="hospital", test_path=later)
    lacking = write(tmp_path, "outcome,blood,smoker\nill,A,true\n", "lacking.csv")
    with pytest.raises(DataError, match=r"(?s)lacking.csv has 2 .* 'age'.* 'hospital'"):
        load(hospitals, client="hospital", test_path=lacking)


def test_a_level_that_only_the_second_file_has_makes_zeros(hospitals: Path, tmp_path: Path) -> None:
    later = write(tmp_path, "outcome,blood,smoker,age,hospital\nill,AB,true,9,south\n", "later.csv")
    made = load(hospitals, client="hospital", test_path=later)
    assert made.info.feature_names[2:] == ("blood=0", "blood=A", "blood=B")
    assert made.test_x[0, 2:].tolist() == [0, 0, 0]


# ---- what is wrong -------------------------------------------------------------------------------
GOOD = "a,b,outcome\n1,x,yes\n2,y,no\n3,x,yes\n"
CELLS = "a,b,outcome\n" + "".join(f"{k},x,yes\n" for k in range(5))
WRONG: dict[str, tuple[str | bytes, dict[str, Any], str]] = {
    "empty": ("", {}, "is empty"),
    "blank": ("\n \n", {}, "is empty"),
    "header only": ("a,outcome\n", {}, "has a header but no rows"),
    "latin-1": ("a,outcome\n1,x\n2,né\n".encode("latin-1"), {}, "line 3 is not UTF-8 .* save"),
    "utf-16": (GOOD.encode("utf-16"), {}, "line 1 is not UTF-8"),
    "utf-16 without a mark": (GOOD.encode("utf-16-le"), {}, "is no text: .* zero bytes"),
    "duplicate names": ("a,a,outcome\n1,2,x\n", {}, "two columns are named 'a'"),
    "no name": (",a,outcome\n1,2,x\n", {}, "column 1 has no name.*index"),
    "unknown target": (GOOD, {"target": "outcom"}, "no column named 'outcom'. Did you mean 'outc"),
    "unknown client": (GOOD, {"client": "c"}, "table.csv: no column named 'c'.* Known: a, b, outc"),
    "unknown feature": (GOOD, {"features": ["bb"]}, "no column named 'bb'. Did you mean 'b'"),
    "few cells": ("a,b,outcome\n1,x,yes\n\n2,y\n", {}, "line 4 has 2 cells .* names 3 columns"),
    "many cells": ("a,b,outcome\n1,x,y,z\n", {}, "line 2 has 4 cells .* needs quotes"),
    "open quote": ('a,b,outcome\n1,x,yes\n2,"x,no\n', {}, "line 3 cannot be read"),
    "empty target": (GOOD + "4,x,\n", {}, "line 5, column 'outcome': .* the cell is empty; fill"),
    "blank target": (GOOD + "4,x,  \n", {}, "line 5, column 'outcome': .* missing_target = \"drop"),
    "empty client": ("c,a,outcome\n,1,x\n", {"client": "c"}, "line 2, column 'c': the cell is emp"),
    "nan": (GOOD + "NAN,x,no\n", {}, "line 5, column 'a': NAN is no finite number"),
    "infinity": (GOOD + "-inf,x,no\n", {}, "line 5, column 'a': -inf is no finite number"),
    "nan target": ("a,outcome\n1,2.5\n2,nan\n", {}, "line 3, column 'outcome': the target is"),
    "text among numbers": (
        CELLS + "n/a,x,no\n",
        {},
        "line 7, column 'a': 'n/a' is no number, but 5 of 6 cells .* features=",
    ),
    "decimal comma": (CELLS + '"1,5",x,no\n', {}, "'1,5' is no number.*decimals with a point"),
    "code with a score": (CELLS + "1_0,x,no\n", {}, "'1_0' is no number"),
    "text as numbers": (
        GOOD,
        {"kind": "numbers"},
        "lines 2 and 4, column 'outcome': 'yes' is no num",
    ),
    "too many texts": (
        "a,outcome\n" + "".join(f"t{k},{k % 2}\n" for k in range(51)),
        {},
        r"column 'a' holds more than 50 different values: leave it out with exclude=\[",
    ),
    "too many classes": (
        "a,outcome\n" + "".join(f"1,{k}\n" for k in range(1001)),
        {},
        "column 'outcome' holds more than 1000 different values: say kind='classes'",
    ),
    "huge integer": (GOOD + "9007199254740993,x,no\n", {}, "line 5, column 'a': 9007.* too large"),
    "huger integer": (
        GOOD + "1" * 400 + ",x,no\n",
        {},
        r"line 5, column 'a': 1+... \(400 digits\) is too large",
    ),
    "large number": (GOOD + "1e39,x,no\n", {}, r"line 5, column 'a': 1e\+39 is too large"),
    "target among features": (GOOD, {"features": ["a", "outcome"]}, "'outcome' is asked for two"),
    "client among features": (GOOD, {"features": ["a"], "client": "a"}, "'a' is asked for two"),
    "client is target": (GOOD, {"client": "outcome"}, "'outcome' is asked for two times"),
    "feature twice": (GOOD, {"features": ["a", "a"]}, "'a' is asked for two times"),
    "no feature": ("outcome\nx\ny\n", {}, "no column is left for the features"),
    "no features": (GOOD, {"features": []}, "no column is left for the features"),
    "one class": ("a,outcome\n1,x\n2,x\n", {}, r"column 'outcome' holds one class only \('x'\)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_names_file_line_and_column(tmp_path: Path, name: str) -> None:
    text, settings, message = WRONG[name]
    path = write(tmp_path, text)
    with pytest.raises(DataError, match=message) as caught:
        load(path, **settings)
    assert str(path) in str(caught.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    for path, message in (
        (tmp_path / "missing.csv", "is not there: check the path, which starts from"),
        (tmp_path, "is a folder"),
        (write(tmp_path, GOOD, "table.xlsx"), "cannot read '.xlsx'; use .csv, .tsv, .parquet"),
        (write(tmp_path, GOOD, "table"), "cannot read ''"),
    ):
        with pytest.raises(DataError, match=message):
            load(path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "class"}, "no kind named 'class'. Did you mean 'classes'"),
        ({"test_share": 1}, "test_share must be a number in"),
        ({"split_seed": -1}, "split_seed must be at least 0"),
        ({"features": "a"}, "features must be a list of columns, got 'a'"),
        ({"path": 5}, "path must be a file name, got 5"),
        ({"standardize": True}, "no setting named 'standardize'. Did you mean 'standardise'"),
    ],
)
def test_settings_that_cannot_work(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    given = {"path": write(tmp_path, GOOD), "target": "outcome", **settings}
    with pytest.raises(ConfigError, match=message):
        sources.load("table", **given)
    with pytest.raises(ConfigError, match="needs the setting 'path'"):
        sources.load("table", target="outcome")


# ---- training on it ------------------------------------------------------------------------------
def test_a_table_trains(tmp_path: Path) -> None:
    data = load(many(tmp_path, (8, 5, 12)), client="client")
    parts = ByKey().split(data.train_y.numpy(), seed=0, keys=data.train_clients.numpy())
    federation = fl.Federation.split(data.train_x, data.train_y, parts)
    assert federation.sizes.tolist() == torch.bincount(data.train_clients).tolist()
    trainer = fl.Trainer(fl.Task(torch.nn.Linear(1, 2)), federation, fl.fedavg(0.1))
    assert trainer.round().loss > 0


# ---- parquet ---------------------------------------------------------------------------------
def parquet(place: Path, text: str = HOSPITALS, name: str = "table.parquet", **types: Any) -> Path:
    pandas, _ = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    frame = pandas.read_csv(io.StringIO(text))
    for column, kind in types.items():
        frame[column] = frame[column].astype(kind)
    frame.to_parquet(place / name)
    return place / name


@pytest.mark.parametrize("kind", ["str", "category"])
def test_parquet_gives_what_csv_gives(hospitals: Path, tmp_path: Path, kind: str) -> None:
    path = parquet(tmp_path, hospital=kind, blood=kind, smoker="bool")
    one, other = (load(p, client="hospital") for p in (hospitals, path))
    assert torch.equal(one.train_x, other.train_x) and torch.equal(one.test_y, other.test_y)
    assert torch.equal(one.train_clients, other.train_clients)
    assert one.info[4:] == other.info[4:] and other.info.form == "parquet"
    mixed = load(hospitals, client="hospital", test_path=path)
    assert torch.equal(mixed.train_x, mixed.test_x)


def test_parquet_targets(tmp_path: Path) -> None:
    text = "a,b,c,d\n1,1.5,true,x\n2,2.5,false,y\n3,1.0,true,x\n"
    path = parquet(tmp_path, text)

    def target(name: str, kind: str = "auto") -> tuple[str, ...]:
        return load(path, target=name, kind=kind, test_share=0).info.class_names

    assert target("a") == ("1", "2", "3") and target("a", "numbers") == ()
    assert target("b") == () and target("b", "classes") == ("1.0", "1.5", "2.5")
    assert target("c") == ("false", "true") and target("d") == ("x", "y")
    with pytest.raises(DataError, match="column 'd': 'x' is no number"):
        target("d", "numbers")


def test_what_is_wrong_in_parquet(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    store = pytest.importorskip("pyarrow.parquet")

    def refused(message: str, **made: Any) -> None:
        store.write_table(arrow.table({**made, "outcome": ["x", "y"]}), tmp_path / "t.parquet")
        with pytest.raises(DataError, match=message):
            load(tmp_path / "t.parquet")

    refused("row 2, column 'a': inf is no finite number", a=[1.0, float("inf")])
    refused("row 1, column 'a': 9007199254740993 is too large", a=[2**53 + 1, 0])
    refused("row 2, column 'a': 18446744073709551615 is", a=arrow.array([1, 2**64 - 1], "uint64"))
    refused(r"column 'a' is of the type list<.*leave it out", a=[[1], [2]])
    write(tmp_path, b"no parquet", "t.parquet")
    with pytest.raises(DataError, match="cannot be read as parquet"):
        load(tmp_path / "t.parquet")
    empty = arrow.table({"a": arrow.array([], "int64"), "outcome": arrow.array([], "string")})
    store.write_table(empty, tmp_path / "t.parquet")
    with pytest.raises(DataError, match="has columns but no rows"):
        load(tmp_path / "t.parquet")


def test_categories_of_parquet_stay_categories(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    made = {"a": ["3", "1", "3"], "outcome": ["x", "y", "x"], "owner": [2**60 + 1, 2**60, 0]}
    frame = pandas.DataFrame(made)
    frame["a"] = frame["a"].astype("category").cat.add_categories(["unused"])
    frame.to_parquet(tmp_path / "t.parquet")
    found = load(tmp_path / "t.parquet", client="owner", test_share=0)
    assert found.info.feature_names == ("a=1", "a=3") and found.train_x[0].tolist() == [0, 1]
    assert found.info.client_names == ("0", str(2**60), str(2**60 + 1))


def test_an_index_that_pandas_kept_is_no_feature(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    frame = pandas.DataFrame({"a": [1.0, 2.0], "outcome": ["x", "y"]}, index=[5, 9])
    frame.to_parquet(tmp_path / "t.parquet")
    assert load(tmp_path / "t.parquet", test_share=0).info.feature_names == ("a",)


def test_many_texts_in_parquet(tmp_path: Path) -> None:
    text = "a,outcome\n" + "".join(f"t{k},{k % 2}\n" for k in range(growing.MOST_TEXTS + 1))
    with pytest.raises(DataError, match="column 'a' holds more than 50"):
        load(parquet(tmp_path, text))


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(MissingExtra, match=r"pip install 'undrift\[parquet\]'"):
        load(write(tmp_path, b"", "t.parquet"))


# ---- documentation -------------------------------------------------------------------------------
DOCUMENT = Path(__file__).parents[2] / "docs" / "data.md"
SECTIONS = ("Own tensors", "Datasets and DataLoaders", "A table with", "Augmentation")


@pytest.mark.parametrize("title", SECTIONS)
def test_the_documented_examples_run(
    title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    section = DOCUMENT.read_text().partition(f"## {title}")[2].partition("\n## ")[0]
    blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, f"docs/data.md, {title}", "exec"), {})
