"""Bad tables: one error each, which lists all problems, and no traceback on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from undrift.cli import main
from undrift.errors import UndriftError

GOOD = "site,age,blood,seen,outcome\n" + "".join(
    f"{'NS'[k % 2]},{20 + k * 7 % 30}.5,{['A', 'B'][k // 2 % 2]},2024-01-{k % 28 + 1:02},"
    f"{['ill', 'well'][k // 3 % 2]}\n"
    for k in range(24)
)
LINES = GOOD.splitlines(keepends=True)
COLUMNS = {
    "age": '{ kind = "number" }',
    "blood": '{ kind = "category", levels = ["A", "B"] }',
    "seen": '{ kind = "date", format = "iso" }',
    "outcome": '{ kind = "classes", levels = ["ill", "well"] }',
}


def cell(line: int, column: str, text: str, table: str = GOOD) -> str:
    """Write another cell: `line` as an editor counts."""
    rows = [row.split(",") for row in table.splitlines()]
    rows[line - 1][rows[0].index(column)] = text
    return "\n".join(",".join(row) for row in rows) + "\n"


def cells(*changes: tuple[int, str, str]) -> str:
    made = GOOD
    for line, column, text in changes:
        made = cell(line, column, text, made)
    return made


def column(name: str, values: list[str]) -> str:
    """Put values into a column, over and over."""
    made = GOOD
    for line in range(2, 26):
        made = cell(line, name, values[line % len(values)], made)
    return made


# what is wrong -> (the file, [columns] other than the usual, [data] beside, what is said)
FILES: dict[str, tuple[Any, dict[str, Any], dict[str, Any], list[str]]] = {
    "an empty file": ("", {}, {}, ["is empty"]),
    "blank lines only": ("\n\n \n", {}, {}, ["is empty"]),
    "a header only": (LINES[0], {}, {}, ["has a header but no rows"]),
    "utf-16": (GOOD.encode("utf-16"), {}, {}, ["line 1 is not UTF-8 (the file is UTF-16)"]),
    "utf-16 without a mark": (GOOD.encode("utf-16-le"), {}, {}, ["zero bytes"]),
    "latin-1": (
        cells((3, "blood", "é"), (9, "blood", "ü")).encode("latin-1"),
        {}, {}, ["lines 3 and 9 are not UTF-8", "perhaps the file is latin-1", "save the table as"],
    ),
    "a picture": (b"\x89PNG\r\n\x1a\n" + bytes(range(256)), {}, {}, ["lines 1 and 4 are not UTF"]),
    "two columns of a name": (GOOD.replace("age", "blood", 1), {}, {}, [
        "two columns are named 'blood'", "[columns] names the column 'age'"]),
    "three columns of a name": (GOOD.replace("age,blood,seen", "x,x,x"), {}, {}, [
        "three columns are named 'x'"]),
    "a column without a name": ("," + GOOD.replace("\n", "\n1,")[:-2], {}, {}, [
        "column 1 has no name"]),
    "ragged rows": (
        LINES[0] + "N,1,A\n" + LINES[1] + "N,1,A,2024-01-01,ill,6,7\n",
        {}, {}, ["line 2 has 3 cells where the header names 5", "line 4 has 7 cells",
                 "needs quotes", "has 2 problems"],
    ),
    "an open quote": (cell(5, "blood", '"A'), {}, {}, [
        "line 5 cannot be read", "a quote that opens must close"]),
    "ragged rows and an open quote": (
        LINES[0] + "N,1,A\n" + 'N,1,"A,2024-01-01,ill\n',
        {}, {}, ["has 2 problems", "line 2 has 3 cells", "line 3 cannot be read"],
    ),
    "another delimiter": (GOOD.replace(",", "|"), {}, {}, ["names the column 'age', which is not"]),
    "texts among numbers": (
        cells((2, "age", "old"), (7, "age", "n/a"), (9, "age", "old")),
        {}, {}, ["lines 2 and 9, column 'age': 'old' is no number", "'n/a'", "2 problems"],
    ),
    "mixed types, inferred": (
        cell(4, "age", "old"), {"": None}, {}, ["'old' is no number, but 23 of 24 cells"]),
    "decimal commas": (cell(4, "age", '"5"').replace('"5"', '"1,5"'), {}, {}, [
        "'1,5' is no number; write decimals with a point"]),
    "infinities": (cells((2, "age", "inf"), (3, "age", "-inf")), {}, {}, [
        "line 2", "inf is no finite number", "-inf is no finite"]),
    "a strange nan": (cell(2, "age", "NAN"), {}, {}, ["NAN is no finite number"]),
    "a huge number": (cell(2, "age", "1e39"), {}, {}, ["1e+39 is too large"]),
    "a huge whole number": (cell(2, "age", "9" * 30), {}, {}, ["is too large to be kept exactly"]),
    "numbers with lines in them": (cell(2, "age", "1_000"), {}, {}, ["'1_000' is no number"]),
    "hexadecimal numbers": (cell(2, "age", "0x1F"), {}, {}, ["'0x1F' is no number"]),
    "dates in two formats": (
        cells((4, "seen", "31.1.2024"), (8, "seen", "1/31/2024")),
        {}, {}, ["line 4", "'31.1.2024' is no date of the format 'iso'", "line 8", "2 problems"],
    ),
    "a date that is none": (cell(4, "seen", "2024-02-30"), {}, {}, ["'2024-02-30' is no date"]),
    "ambiguous dates": (
        column("seen", ["1/2/2024", "3/4/2024"]), {"seen": '{ kind = "date" }'}, {},
        ["may be of two formats", 'format = "d/m/Y" or format = "m/d/Y"'],
    ),
    "times with and without a zone": (
        column("seen", ["2024-01-01T10:00", "2024-01-01T10:00Z"]), {}, {}, ["has a zone, where"]),
    "numbers where dates belong": (column("seen", ["5", "6"]), {}, {}, ["'5' is no date"]),
    "flags that are none": (
        column("blood", ["true", "maybe", "perhaps"]), {"blood": '{ kind = "flag" }'}, {},
        ["'maybe' is no flag", "'perhaps' is no flag", "2 problems"],
    ),
    "counts that are none": (
        column("outcome", ["3", "-1", "0.5"]), {"outcome": '{ kind = "count" }'}, {},
        ["-1 is no count", "0.5 is no count"],
    ),
    "a class that nobody declared": (
        cell(3, "outcome", "dead"), {}, {}, ["1 rows hold a class that [columns] does not name"]),
    "a target missing at a site": (
        "".join(r.rsplit(",", 1)[0] + ",\n" if r.startswith("S") else r for r in LINES),
        {}, {}, ["lines 3, 5, 7 and 9 more", "the target is missing", "'S' has no target at all"],
    ),
    "a target missing everywhere": (
        column("outcome", ["NA", ""]), {}, {"missing_target": '"drop"'}, ["no row has a target"]),
    "one class": (
        column("outcome", ["ill"]), {"": None}, {}, ["one class only ('ill')"]),
    "one class of several declared, at least": (
        column("outcome", ["ill"]), {"outcome": '{ kind = "classes", levels = ["ill"] }'}, {},
        ["outcome: levels = ['ill'] must name 2 or more"],
    ),
    "a client that is empty": (cells((3, "site", ""), (6, "site", "NA")), {}, {}, [
        "lines 3 and 6, column 'site': the cell is empty, so that nobody holds the row"]),
    "everything at once": (
        cells((2, "age", "old"), (3, "site", ""), (4, "seen", "soon"), (5, "outcome", "")),
        {}, {}, ["has 4 problems", "line 2", "line 3", "line 4", "line 5", "the target is missing"],
    ),
    "everything at once, inferred": (
        cells((2, "age", "old"), (3, "site", ""), (5, "outcome", "")), {"": None}, {},
        ["has 3 problems", "line 2", "line 3", "line 5"],
    ),
    "twenty problems": (
        cells(*((k, "age", f"x{k}") for k in range(2, 22))), {}, {}, [
            "has 20 problems", "'x2' is no number", "... and 10 more"]),
    "a column of [columns] that is not there": (
        GOOD, {"agee": '{ kind = "number" }'}, {}, ["'agee', which is not there. Did you mean"],
    ),
    "a column that is not in [columns]": (GOOD, {"blood": None, "seen": None}, {}, [
        "'blood' is not in [columns]", "'seen' is not in [columns]", "2 problems"]),
    "an unknown kind": (GOOD, {"age": '{ kind = "nmber" }', "seen": '{ kind = "day" }'}, {}, [
        "age: no kind named 'nmber'. Did you mean 'number'", "seen: no kind named 'day'"]),
    "an unknown setting": (GOOD, {"age": '{ kind = "number", fil = 3 }'}, {}, ["named 'fil'"]),
    "levels given twice": (
        GOOD, {"blood": '{ kind = "category", levels = ["A", "A"] }'}, {}, ["names 'A' twice"]),
    "levels that are numbers": (
        GOOD, {"blood": '{ kind = "category", levels = [1, 2] }'}, {}, ["put quotes around 1"]),
    "a level that stands for a missing cell": (
        GOOD, {"blood": '{ kind = "category", levels = ["A", "?"] }'}, {}, [
            "the level '?' stands for a missing cell"]),
    "a line without a kind": (GOOD, {"age": "{ fill = 3 }"}, {}, ["age: needs `kind`"]),
    "a line that is a number": (GOOD, {"age": "3"}, {}, ["age: must be a table such as"]),
    "no line for the target": (GOOD, {"outcome": None}, {}, ["no line for the target 'outcome'"]),
    "a target of a feature's kind": (
        GOOD, {"outcome": '{ kind = "flag" }'}, {}, ["outcome: no kind named 'flag'"]),
    "a client with a line": (GOOD, {"site": '{ kind = "category" }'}, {}, ["'site', the client"]),
    "an excluded column with a line": (GOOD, {}, {"exclude": '["age"]'}, ["is in `exclude` and"]),
    "an excluded column that is not there": (
        GOOD, {}, {"exclude": '["agee", "sen"]'}, ["'agee'", "'sen'. Did you mean 'seen'"]),
    "exclude as a text": (GOOD, {}, {"exclude": '"age"'}, ["exclude must be a list of columns"]),
    "missing as a text": (GOOD, {}, {"missing": '"-"'}, ["missing must be a list of texts"]),
    "another way to treat a missing target": (
        GOOD, {}, {"missing_target": '"keep"'}, ["no choice named 'keep'"]),
    "a minimum of no rows": (GOOD, {}, {"least": "0"}, ["least must be at least 1"]),
    "no level that enough rows have": (
        column("outcome", ["a", "b", "c", "d", "e", "f"]),
        {"outcome": '{ kind = "classes" }'}, {}, ["too few rows of a client", "declare the levels"],
    ),
}  # fmt: skip


def experiment(columns: dict[str, Any], data: dict[str, Any]) -> str:
    """Write an experiment file; a column of None is left out, {"": None} leaves out the section."""
    lines = {**COLUMNS, **columns}
    shown = "".join(f"{name} = {line}\n" for name, line in lines.items() if line is not None)
    more = "".join(f"{name} = {value}\n" for name, value in data.items())
    section = "" if "" in columns else f"[columns]\n{shown}"
    return (
        'rounds = 1\n[data]\nuse = "table"\npath = "t.csv"\nclient = "site"\ntarget = "outcome"\n'
        f'{more}{section}[model]\nuse = "mlp"\nhidden = 2\n[algorithm]\nuse = "fedavg"\nlr = 0.1\n'
    )


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 2
    text = capsys.readouterr().err
    assert text.startswith("undrift: ") and "Traceback" not in text and "Error:" not in text
    return text


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", FILES)
def test_one_message_lists_all_that_is_wrong(
    name: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, columns, data, wanted = FILES[name]
    (here / "t.csv").write_bytes(table.encode() if isinstance(table, str) else table)
    (here / "e.toml").write_text(experiment(columns, data))
    text = said(capsys, "partition", "e.toml")
    for part in wanted:
        assert part in text, text
    assert sorted(p.name for p in here.iterdir()) == ["e.toml", "t.csv"]  # nothing is left behind


def test_the_good_table_is_good(here: Path) -> None:
    (here / "t.csv").write_text(GOOD)
    (here / "e.toml").write_text(experiment({}, {}))
    assert main(["partition", "e.toml"]) == 0


def test_there_are_enough_cases() -> None:
    assert len(FILES) + len(ASKED) >= 60


# ---- init --------------------------------------------------------------------------------------
IDS = "a,b,y\n" + "".join(f"x{k},{k},{k % 2}\n" for k in range(100))
ASKED: dict[str, tuple[str, list[str], list[str]]] = {
    "identifiers only": (IDS, [], ["no column is left", "a: an identifier", "b: an identifier"]),
    "no such target": (GOOD, ["--target", "outcme"], ["'outcme'. Did you mean 'outcome'"]),
    "no such client": (GOOD, ["--client", "sit"], ["'sit'. Did you mean 'site'"]),
    "several names that are none": (
        GOOD, ["--exclude", "a,b", "--kind", "c=number"], ["3 problems", "'a'", "'b'", "'c'"]),
    "kinds that are none": (
        GOOD, ["--kind", "age=x", "--kind", "seen=date:x", "--kind", "word"],
        ["--kind has 3 problems", "age: no kind named 'x'", "no format of a date named 'x'"],
    ),
    "two kinds of a column": (GOOD, ["--kind", "age=number", "--kind", "age=flag"], ["two things"]),
    "a kind of the client": (GOOD, ["--client", "site", "--kind", "site=number"], ["has no kind"]),
    "excluded and asked for": (
        GOOD, ["--exclude", "age", "--kind", "age=number"], ["is excluded and asked for"]),
    "the target excluded": (GOOD, ["--exclude", "outcome"], ["is excluded and asked for"]),
    "features and exclude": (
        GOOD, ["--features", "age", "--exclude", "seen"], ["both choose columns"]),
    "a feature that is not there": (GOOD, ["--features", "agee"], ["'agee'. Did you mean 'age'"]),
    "mixed columns": (
        cells((2, "age", "old"), (5, "age", "-")), [], ["line 2", "'old'", "line 5", "'-'"]),
    "dates of several formats": (
        column("seen", ["2024-01-31", "31.1.2024"]), [],
        ["dates of several formats", "--kind seen=category"],
    ),
    "a kind that the cells are not": (
        GOOD, ["--kind", "blood=number"], ["'A' is no number", "'B' is no number"]),
    "one class": (column("outcome", ["ill"]), [], ["one class only ('ill')"]),
    "an empty client": (
        cell(3, "site", ""), ["--client", "site"], ["line 3, column 'site': the cell is empty"]),
    "another ending": (GOOD, ["t.xlsx"], ["cannot read '.xlsx'"]),
    "missing that is a level": (GOOD, ["--missing", "A,A"], ["missing names 'A' twice"]),
}  # fmt: skip


@pytest.mark.parametrize("name", ASKED)
def test_init_says_all_that_is_wrong_and_writes_nothing(
    name: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, more, wanted = ASKED[name]
    path = "t.csv"
    if more and more[0].startswith("t."):
        path, *more = more
    (here / path).write_text(table)
    target = [] if "--target" in more else ["--target", "y" if table == IDS else "outcome"]
    text = said(capsys, "init", path, *target, *more)
    for part in wanted:
        assert part in text, text
    assert [p.name for p in here.iterdir()] == [path]


# ---- damaged preparations reach the user as one error ------------------------------------------
def test_a_damaged_preparation_is_one_error(tmp_path: Path) -> None:
    from undrift.guarded.text import read_json
    from undrift.tabular import Preparation

    (tmp_path / "preparation.json").write_text(json.dumps({"undrift_preparation": 1}))
    with pytest.raises(UndriftError, match="no preparation of a table"):
        Preparation.from_json(read_json(tmp_path / "preparation.json"))
