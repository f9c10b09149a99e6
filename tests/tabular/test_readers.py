"""Readers agree: the careful one, pyarrow, parquet, pandas; new rows stay, whatever is wrong."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from undrift import sources
from undrift.errors import DataError
from undrift.tabular import Frame, Preparation, Schema, agree
from undrift.tabular import arrow as arrow_module
from undrift.tabular import reading as reading_module
from undrift.tabular.arrow import read_csv
from undrift.tabular.delimited import Delimited
from undrift.tabular.growing import RawTable
from undrift.tabular.reading import NewRows, open_table, read_rows

HEADER = "clinic,age,size,code,blood,smoker,visited,outcome\n"


def text(rows: int = 300) -> str:
    draw = np.random.default_rng(0)

    def line(k: int) -> str:
        cells = [
            f"{draw.normal(50, 12):.3f}",
            str(draw.integers(0, 9)),
            f"{draw.integers(0, 300):03}",
            ["A", " B ", '"A, B"', "0"][k % 4],
            ["true", "FALSE"][k % 2],
            f"2024-0{k % 9 + 1}-1{k % 10}",
        ]
        cells = [c if draw.random() > 0.08 else ["", "NA", "?", " "][k % 4] for c in cells]
        return ",".join(["NSW"[k % 3], *cells, str(k % 2)])

    return HEADER + "\n".join(map(line, range(rows))) + "\n"


def write(place: Path, content: str | bytes, name: str = "t.csv") -> Path:
    (place / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return place / name


WISHES: Any = {
    **dict.fromkeys(("age", "size", "code", "blood", "smoker", "visited"), "feature"),
    "outcome": "target",
    "clinic": "texts",
}


def plain(table: RawTable) -> dict[str, Any]:
    def cell(raw: Any, value: Any) -> Any:
        if raw.form == "texts":
            return raw.names[value] if value >= 0 else None
        return None if math.isnan(value) else value

    columns = table.columns.items()
    return {n: (raw.form, raw.whole, [cell(raw, v) for v in raw.values]) for n, raw in columns}


def test_pyarrow_reads_what_the_careful_reader_reads(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    opened = Delimited(write(tmp_path, text().replace(", ,", ",,")))
    fast = read_csv(opened, WISHES)
    assert fast is not None
    slow = opened.read(WISHES)
    assert plain(fast) == plain(slow)
    assert fast.place.unit == "line" and fast.place.numbers.tolist() == slow.place.numbers.tolist()
    assert plain(slow)["code"][0] == "numbers" and plain(slow)["outcome"][:2] == ("texts", True)


ODD = {
    "a text among numbers": "N,old,1,1,A,true,2024-01-01,1",
    "infinity": "N,inf,1,1,A,true,2024-01-01,1",
    "another nan": "N,NAN,1,1,A,true,2024-01-01,1",
    "a huge number": f"N,{2**60},1,1,A,true,2024-01-01,1",
    "a short row": "N,1",
    "an open quote": '"N,1,1,1,A,true,2024-01-01,1',
    "a hexadecimal number": "N,0x10,1,1,A,true,2024-01-01,1",
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("at", ["first", "last"])
def test_what_is_odd_is_left_to_the_careful_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, at: str
) -> None:
    pytest.importorskip("pyarrow")
    monkeypatch.setattr(arrow_module, "SAMPLE", 20)  # the last row is not among them
    good = text().replace(", ,", ",,")
    lines = good.splitlines()
    lines.insert(1 if at == "first" else len(lines), ODD[name])
    assert read_csv(Delimited(write(tmp_path, good)), WISHES) is not None
    assert read_csv(Delimited(write(tmp_path, "\n".join(lines) + "\n")), WISHES) is None


def test_two_columns_of_a_name_are_not_read_fast(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    opened = Delimited(write(tmp_path, "a,a\n1,2\n"))
    assert read_csv(opened, {"a": "feature"}) is None


def test_a_large_file_is_read_fast_and_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pyarrow")
    path = write(tmp_path, text(400).replace(", ,", ",,"))
    settings: dict[str, Any] = {"path": path, "target": "outcome", "client": "clinic"}
    settings["exclude"] = ["code"]
    slow = sources.load("table", **settings)
    monkeypatch.setattr(reading_module, "FAST_BYTES", 1)
    monkeypatch.setattr(Delimited, "read", lambda *a: pytest.fail("read carefully"))
    fast = sources.load("table", **settings)
    assert fast.train_x.equal(slow.train_x) and fast.test_y.equal(slow.test_y)
    assert fast.info == slow.info


def test_quoted_line_breaks_are_read_fast(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    opened = Delimited(write(tmp_path, 'a,b\n1,"x\ny"\n2,z\n'))
    wishes: Any = {"a": "feature", "b": "feature"}
    fast = read_csv(opened, wishes)
    assert fast is not None and plain(fast) == plain(opened.read(wishes))
    assert fast.place.unit == "row"  # lines are not rows here


# ---- pandas --------------------------------------------------------------------------------------
def test_dtypes_of_pandas(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({
        "int": pandas.array([1, None, 3, 4], dtype="Int64"),
        "float": [1.5, None, math.nan, 2.0],
        "flag": pandas.array([True, None, False, True], dtype="boolean"),
        "bool": [True, False, True, False],
        "level": pandas.Categorical(["a", None, "b", "a"], categories=["a", "b", "unused"]),
        "day": pandas.to_datetime(["2024-01-01", None, "2024-01-03", "2024-01-04"]),
        "zone": pandas.to_datetime(["2024-01-01"] * 4, utc=True),
        "text": ["x", None, "NA", "y"],
        "string": pandas.array(["x", None, "y", "y"], dtype="string"),
        "mixed": [1, "b", None, True],
        "y": ["p", "q", "p", "q"],
    })  # fmt: skip
    made = sources.load("table", path=frame, target="y", test_share=0, standardise=False)
    assert made.info.form == "in memory" and made.info.path is None
    assert [type(kind).__name__ for _, kind in made.info.preparation.schema.features] == [
        *("Number", "Number", "Flag", "Flag", "Category", "Date", "Date"),
        *("Category", "Category", "Category"),
    ]
    x = dict(zip(made.info.feature_names, made.train_x.T.tolist(), strict=True))
    assert x["int is missing"] == [0, 1, 0, 0] and x["float is missing"] == [0, 1, 1, 0]
    assert x["flag is missing"] == [0, 1, 0, 0] and x["level is missing"] == [0, 1, 0, 0]
    assert x["day is missing"] == [0, 1, 0, 0] and x["text is missing"] == [0, 1, 1, 0]
    assert x["day time"][0] == 19723 == x["zone time"][0] and x["string=y"] == [0, 0, 1, 1]
    assert "level=unused" not in x and x["mixed=true"] == [0, 0, 0, 1]
    if pytest.importorskip("pyarrow"):
        path = tmp_path / "t.parquet"
        frame.drop(columns="mixed").to_parquet(path)
        other = sources.load("table", path=path, target="y", test_share=0, standardise=False)
        names = list(other.info.feature_names)
        assert names == [n for n in made.info.feature_names if not n.startswith("mixed")]
        kept = [k for k, n in enumerate(made.info.feature_names) if n in names]
        assert made.train_x[:, kept].equal(other.train_x)
        strings = frame[["string", "text", "y"]].astype("string[pyarrow]")
        assert sources.load("table", path=strings, target="y", test_share=0).train_x.shape == (4, 6)


def test_what_pandas_holds_that_is_no_column() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({
        "span": pandas.to_timedelta([1, 2], unit="s"), "z": [1j, 2j], "y": ["a", "b"]
    })  # fmt: skip
    with pytest.raises(DataError, match=r"(?s)has 2 problems.*'span' is of the type.*'z'"):
        sources.load("table", path=frame, target="y")
    with pytest.raises(DataError, match="columns but no rows"):
        sources.load("table", path=frame[:0][["y"]].assign(a=1.0), target="y")


def test_columns_in_memory() -> None:
    made = sources.load(
        "table", path={"a": [1, None, 3], "y": np.array([1.5, 2.5, 3.5])}, target="y", test_share=0
    )
    assert made.train_x.tolist() == [[-1, 0], [0, 1], [1, 0]] and made.info.target_scale[0] == 2.5


# ---- new rows ------------------------------------------------------------------------------------
@pytest.fixture
def preparation() -> Preparation:
    schema = Schema.of(
        {
            "age": {"kind": "number", "indicator": True},
            "blood": {"kind": "category"},
            "seen": {"kind": "date", "parts": ["time"], "format": "d/m/Y"},
            "y": "classes",
        },
        target="y",
    )
    data: dict[str, Any] = {"age": [1.0, 3.0, None], "blood": ["A", "B", "A"], "y": ["p", "q", "p"]}
    data["seen"] = ["1/2/2024", "3/2/2024", "5/2/2024"]
    return agree(schema, Frame.of(schema, data), least=1)


NEW = """seen,blood,age,more
3/2/2024,A,2,x
3/2/2024,never,,x
32/1/2024,A,old,x
3/2/2024,A
4/2/2024,B,inf,x
"""


def rows(found: NewRows) -> tuple[list[list[int]], dict[int, str], list[int]]:
    return found.frame["age"].empty.tolist(), found.errors, list(found.numbers)


def test_new_rows_stay_and_their_errors_are_told(tmp_path: Path, preparation: Any) -> None:
    found = read_rows(write(tmp_path, NEW), preparation)
    assert len(found.frame) == 5 and list(found.numbers) == [2, 3, 4, 5, 6]
    assert sorted(found.errors) == [2, 3, 4]
    assert found.errors[2] == (
        "column 'age': 'old' is no number; "
        "column 'seen': '32/1/2024' is no date of the format 'd/m/Y'"
    )
    assert found.errors[3] == "line 5 has 2 cells where the header names 4 columns"
    assert found.errors[4] == "column 'age': inf is no finite number"
    x = preparation.encode(found.frame)
    assert x.shape == (5, 5) and np.isfinite(x).all()
    assert x[0].tolist() == [0, 0, 1, 0, 0] and x[1].tolist() == [0, 1, 0, 0, 0]


def test_new_rows_of_pandas_and_of_dicts(preparation: Any) -> None:
    data = {"age": [2, "old"], "blood": ["A", None], "seen": ["3/2/2024", "4/2/2024"]}
    found = read_rows(data, preparation)
    assert found.errors == {1: "column 'age': 'old' is no number"}
    pandas = pytest.importorskip("pandas")
    assert read_rows(pandas.DataFrame(data), preparation).errors == found.errors
    target = read_rows({**data, "y": ["p", "strange"]}, preparation)
    assert target.errors == found.errors and target.frame["y"].names == ("p", "strange")


def test_new_rows_that_lack_columns(tmp_path: Path, preparation: Any) -> None:
    with pytest.raises(DataError) as caught:
        read_rows(write(tmp_path, "blood,more\nA,1\n"), preparation)
    assert "has 2 problems" in str(caught.value)
    assert "'age' is not there" in str(caught.value) and "'seen'" in str(caught.value)
    with pytest.raises(DataError, match=r"cannot be read .*a quote that opens must close"):
        read_rows(write(tmp_path, 'seen,blood,age\n1/2/2024,"A,2\n'), preparation)
    with pytest.raises(DataError, match="several columns are named 'age'"):
        read_rows(write(tmp_path, "seen,blood,age,age\n1/2/2024,A,2,3\n"), preparation)


def test_a_file_is_opened_by_its_ending(tmp_path: Path) -> None:
    assert open_table(write(tmp_path, "a\tb\n1\t2\n", "t.TSV")).names == ["a", "b"]


def test_whole_numbers_of_a_parquet_file_need_nobody_elses_import(tmp_path: Path) -> None:
    """pandas imports pyarrow.compute, so that other tests do not see that it is missing."""
    pq = pytest.importorskip("pyarrow.parquet")
    import pyarrow as pa

    columns = {"site": ["A", "B"] * 30, "a": [*range(17)] * 3 + [1] * 9, "y": ["u", "v", "v"] * 20}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    text = (
        "from undrift import sources\n"
        f"sources.load('table', path={str(tmp_path / 't.parquet')!r}, client='site', target='y')"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_of_times_with_and_without_a_zone_the_fewer_are_to_blame() -> None:
    zoned = [f"2024-03-{k:02d}T10:00:00+01:00" for k in range(1, 9)]
    for when, line, told in (
        ([*zoned, "2024-03-09"], 9, "has no zone, where most"),
        (
            ["2024-03-01T08:00:00+01:00", *(f"2024-03-{k:02d}" for k in range(1, 9))],
            1,
            "has a zone",
        ),
    ):
        with pytest.raises(DataError, match=told) as caught:
            sources.load(
                "table", path={"when": when, "y": ["a", "b", "c"] * 3}, target="y",
                columns={"when": {"kind": "date", "format": "iso"}, "y": {"kind": "classes"}},
            )  # fmt: skip
        assert f"row {line}" in str(caught.value)
