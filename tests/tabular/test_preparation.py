"""From columns to inputs: fill, scale, levels, calendar; and back from JSON."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch

from undrift.errors import ConfigError, DataError
from undrift.tabular import Frame, Preparation, Schema, agree

YES = ["no", "yes"] * 3


def prepared(columns: dict[str, Any], data: dict[str, Any], **settings: Any) -> Any:
    schema = Schema.of({**columns, "y": {"kind": "classes"}}, target="y")
    size = len(next(iter(data.values())))
    frame = Frame.of(schema, {**data, "y": (YES * size)[:size]})
    return schema, frame, agree(schema, frame, **{"least": 1, **settings})


def new(schema: Schema, made: Preparation, **columns: list[Any]) -> list[list[float]]:
    found: list[list[float]] = made.encode(Frame.of(schema, columns)).tolist()
    return found


@pytest.mark.parametrize(
    ("fill", "value"), [("mean", 3.0), ("median", 2.0), ("zero", 0.0), (7, 7.0)]
)
def test_a_missing_number_is_filled(fill: Any, value: float) -> None:
    columns = {"a": {"kind": "number", "fill": fill, "indicator": True}}
    data = {"a": [1, 2, None, 6, 2, 4]}
    _, frame, made = prepared(columns, data, standardise=False)
    assert made.feature_names == ("a", "a is missing") and made.blocks == (2,)
    x = made.encode(frame)
    assert x.dtype == np.float32 and x[:, 1].tolist() == [0, 0, 1, 0, 0, 0]
    assert abs(x[2, 0] - value) < 0.03 and x[3, 0] == 6
    scaled = prepared(columns, data)[2].encode(frame)
    std = math.sqrt((4 + 1 + 9 + 1 + 1) / 5)
    assert np.allclose(scaled[:, 0], (x[:, 0] - 3) / std, atol=1e-6)


def test_an_indicator_that_nobody_needs_is_left_out() -> None:
    columns = {"a": {"kind": "number", "indicator": True}}
    schema, _, made = prepared(columns, {"a": [1.0, 2.0, 3.0]})
    assert made.feature_names == ("a",)
    assert new(schema, made, a=[None]) == [[0.0]]


def test_levels_missing_rare_and_unknown_ones() -> None:
    columns = {"a": {"kind": "category"}}
    data = {"a": ["b"] * 6 + ["a"] * 5 + ["rare"] + [None]}
    schema, frame, made = prepared(columns, data, least=5)
    assert made.feature_names == ("a=a", "a=b", "a is other", "a is missing")
    assert made.encode(frame).sum() == 13 and made.encode(frame)[11].tolist() == [0, 0, 1, 0]
    fresh = new(schema, made, a=["b", " a ", "never seen", None, "NA"])
    assert [row.index(1) for row in fresh] == [1, 0, 2, 3, 3]
    schema, _, plain = prepared(columns, {"a": ["10", "9", "9"]})
    assert plain.feature_names == ("a=9", "a=10")
    assert new(schema, plain, a=["8", None]) == [[0, 0], [0, 0]]


def test_declared_levels_stay_in_their_order() -> None:
    columns = {"a": {"kind": "category", "levels": ["z", "a", "never"]}}
    schema, _, made = prepared(columns, {"a": ["a", "z", "q"]})
    assert made.feature_names == ("a=z", "a=a", "a=never", "a is other")
    assert new(schema, made, a=["q", "z"]) == [[0, 0, 0, 1], [1, 0, 0, 0]]


def test_a_level_that_looks_like_a_number_is_found_again() -> None:
    columns = {"a": {"kind": "category", "levels": ["1", "2", "007"]}}
    schema, _, made = prepared(columns, {"a": ["1", "2", "007"]})
    assert new(schema, made, a=[1.0, None, 2.0]) == [[1, 0, 0], [0, 0, 0], [0, 1, 0]]
    assert new(schema, made, a=["1.0", "007", "7"]) == [[1, 0, 0], [0, 0, 1], [0, 0, 1]]


def test_the_most_frequent_levels_are_kept() -> None:
    columns = {"a": {"kind": "category", "most": 2, "fill": "mode"}}
    data = {"a": ["x"] * 3 + ["c"] * 4 + ["b"] * 2 + [None]}
    _, frame, made = prepared(columns, data)
    assert made.feature_names == ("a=c", "a=x", "a is other")
    assert made.encode(frame)[-1].tolist() == [1, 0, 0]  # filled with the most frequent level


def test_flags_are_zero_and_one() -> None:
    values = [True, "FALSE", "yes", 0, None, "1"]
    for fill, wanted in (("mode", 1), ("mean", 0.6), (False, 0)):
        columns = {"a": {"kind": "flag", "fill": fill, "indicator": True}}
        _, frame, made = prepared(columns, {"a": values})
        x = made.encode(frame)
        assert x[:, 0].tolist() == pytest.approx([1, 0, 1, 0, wanted, 1])
        assert x[:, 1].tolist() == [0, 0, 0, 0, 1, 0]


def test_a_date_becomes_a_number_and_parts_of_the_calendar() -> None:
    parts = ["time", "year", "month", "day", "weekday", "hour"]
    columns = {"a": {"kind": "date", "parts": parts, "indicator": True}}
    data = {"a": ["2024-01-01", "2024-07-01T06:00", None, "2026-04-01"]}
    _, frame, made = prepared(columns, data, standardise=False)
    assert made.feature_names == (
        *("a time", "a year", "a month sin", "a month cos", "a day sin", "a day cos"),
        *("a weekday sin", "a weekday cos", "a hour sin", "a hour cos", "a is missing"),
    )
    x = made.encode(frame)
    assert x[0, :2].tolist() == [19723, 2024] and x[1, 0] == 19905.25
    assert np.allclose(x[0, 2:10], [0, 1] * 4, atol=1e-7)  # January, the first, Monday, midnight
    assert np.allclose(x[1, 2:4], [0, -1], atol=1e-6)  # July is opposite to January
    assert np.allclose(x[3, 2:4], [1, 0], atol=1e-6)
    assert np.allclose(x[1, 8:10], [1, 0], atol=1e-6)
    wednesday = 2 * math.pi * 2 / 7
    assert np.allclose(x[3, 6:8], [math.sin(wednesday), math.cos(wednesday)], atol=1e-6)
    assert x[2, 2:].tolist() == [0] * 8 + [1]
    scaled = prepared(columns, data)[2].encode(frame)
    days = np.array([19723, 19905.25, 20544])
    assert np.allclose(scaled[[0, 1, 3], 0], (days - days.mean()) / days.std(), atol=1e-6)
    assert scaled[2, 0] == 0  # the mean, whose year is 2024
    assert np.allclose(scaled[2, 1], (2024 - 6074 / 3) / np.std([2024, 2024, 2026]), atol=1e-5)


def test_a_date_is_read_in_the_format_that_all_cells_fit() -> None:
    columns = {"a": {"kind": "date", "parts": ["time"]}}
    for cells in (["31.01.2024", "1.2.2024"], ["01/31/2024", "02/01/2024"]):
        _, frame, made = prepared(columns, {"a": cells}, standardise=False)
        assert made.encode(frame)[:, 0].tolist() == [19753, 19754]
    said = {"a": {"kind": "date", "parts": ["time"], "format": "d/m/Y"}}
    _, frame, made = prepared(said, {"a": ["1/2/2024", "2/2/2024"]}, standardise=False)
    assert made.encode(frame)[:, 0].tolist() == [19754, 19755]
    zone = {"a": ["2024-01-01T00:00+01:00", "2024-01-01T00:00Z"]}
    _, frame, made = prepared(columns, zone, standardise=False)
    assert np.allclose(np.diff(made.encode(frame)[:, 0]), 1 / 24, atol=1e-3)


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (["1/2/2024", "2/2/2024"], r"two formats: say format = \"d/m/Y\" or format = \"m/d/Y\""),
        (["2024-01-01", "2024-01-02", "1.2.2024"], "row 3, .*'1.2.2024' is no date .* 'iso'"),
        (["2024-01-01", "2024-02-30"], "row 2, .*'2024-02-30' is no date"),
        (["2024-01-01T10:00Z", "2024-01-01T10:00"], "has a zone"),
        ([1.0, 2.0], "holds numbers, no dates"),
    ],
)
def test_dates_that_are_none(cells: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        prepared({"a": {"kind": "date"}}, {"a": cells})


def test_a_constant_column_is_zeros() -> None:
    schema, frame, made = prepared({"a": "number"}, {"a": [0.1] * 7})
    assert made.encode(frame).tolist() == [[0]] * 7 and new(schema, made, a=[5.0]) == [[0]]


def test_targets() -> None:
    def made(kind: str, cells: list[Any]) -> tuple[Preparation, Any]:
        schema = Schema.of({"a": "number", "y": kind}, target="y")
        frame = Frame.of(schema, {"a": [1.0] * len(cells), "y": cells})
        found = agree(schema, frame, least=1)
        return found, found.encode_target(frame)

    preparation, y = made("classes", ["b", "a", "b"])
    assert preparation.target.class_names == ("a", "b") and y.tolist() == [1, 0, 1]
    assert y.dtype == torch.int64
    preparation, y = made("number", [1.0, 3.0])
    assert preparation.target[3:5] == (2.0, 1.0) and y.tolist() == [[-1], [1]]
    preparation, y = made("count", [0, 3, 2])
    assert y.tolist() == [[0], [3], [2]] and preparation.target[3:5] == (0.0, 1.0)
    with pytest.raises(DataError, match=r"(?s)row 2, .*-1 is no count.*row 3, .*0.5 is no count"):
        made("count", [1, -1, 0.5])
    with pytest.raises(DataError, match="one class only"):
        made("classes", ["a", "a"])
    with pytest.raises(DataError, match="row 2, column 'y': the target is missing"):
        made("classes", ["a", None, "b"])
    with pytest.raises(DataError, match="too few rows"):
        schema = Schema.of({"a": "number", "y": "classes"}, target="y")
        agree(schema, Frame.of(schema, {"a": [1.0] * 3, "y": ["p", "q", "q"]}))


def test_all_cells_that_are_wrong_are_told_at_once() -> None:
    schema = Schema.of({"a": "number", "b": "flag", "y": "classes"}, target="y")
    data = {"a": ["1", "old", "inf", "1_0", "1,5"], "b": ["maybe"] + ["true"] * 4, "y": YES[:5]}
    with pytest.raises(DataError) as caught:
        Frame.of(schema, data)
    text = str(caught.value)
    assert "has 5 problems" in text and "'old' is no number" in text and "'1_0'" in text
    assert "inf is no finite number" in text and "decimals with a point" in text
    assert "row 1, column 'b': 'maybe' is no flag" in text


def test_a_preparation_is_plain_data() -> None:
    columns = {
        "a": {"kind": "number", "fill": "median", "indicator": True},
        "b": {"kind": "category", "fill": "mode"},
        "c": {"kind": "flag", "fill": True},
        "d": {"kind": "date", "parts": ["time", "weekday"], "format": "iso"},
    }
    data = {
        "a": [1.0, None, 2.5, 1e30],
        "b": ["x", None, "y", "x"],
        "c": [True, None, False, True],
        "d": ["2024-01-01", None, "2024-02-01", "1969-12-31"],
    }
    schema, frame, made = prepared(columns, data)
    again = Preparation.from_json(json.loads(json.dumps(made.to_json())))
    assert again == made and again.feature_names == made.feature_names
    assert np.array_equal(again.encode(frame), made.encode(frame))
    assert Schema.from_json(json.loads(json.dumps(schema.to_json()))) == schema


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.pop("parts"),
        lambda d: d.update(undrift_preparation=2),
        lambda d: d["parts"].pop(),
        lambda d: d["parts"][0].update(fill="x"),
        lambda d: d["parts"][0].update(fill=math.nan),
        lambda d: d["parts"][0].update(scales=[]),
        lambda d: d["parts"][0].update(more=1),
        lambda d: d["parts"][0].update(missing=3),
        lambda d: d["parts"][1].update(levels=[1, 2]),
        lambda d: d["target"].update(kind="count"),
        lambda d: d["target"].update(mean="0"),
        lambda d: d["schema"].update(target="a"),
        lambda d: d["schema"]["columns"].append(["a", {"kind": "number"}]),
        lambda d: d.update(rows="many"),
    ],
)
def test_a_damaged_preparation_is_refused(change: Any) -> None:
    _, _, made = prepared({"a": "number", "b": "category"}, {"a": [1.0, 2.0], "b": ["x", "y"]})
    data = json.loads(json.dumps(made.to_json()))
    change(data)
    with pytest.raises(DataError, match=r"no preparation|no schema"):
        Preparation.from_json(data)
    for nothing in (None, [], "x", {}):
        with pytest.raises(DataError, match="no preparation"):
            Preparation.from_json(nothing)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"kind": "nmber"}, "no kind named 'nmber'. Did you mean 'number'"),
        ({}, "needs `kind`, one of: number, category, flag, date"),
        (5, "must be a table such as"),
        ({"kind": "number", "fil": 1}, "no setting of 'number' named 'fil'. Did you mean 'fill'"),
        ({"kind": "number", "fill": "meen"}, "Did you mean 'mean'.*or a number"),
        ({"kind": "number", "fill": math.inf}, "no fill named inf"),
        ({"kind": "number", "indicator": 1}, "indicator is true or false, got 1"),
        ({"kind": "category", "levels": ["a", "a"]}, "levels names 'a' twice"),
        ({"kind": "category", "levels": ["a", " a"]}, "differ by blanks"),
        ({"kind": "category", "levels": [1]}, "put quotes around 1"),
        ({"kind": "category", "levels": "ab"}, "must be a list of texts"),
        ({"kind": "category", "levels": []}, "must name 1 or more"),
        ({"kind": "category", "levels": ["NA", "b"]}, "'NA' stands for a missing cell"),
        ({"kind": "category", "most": 0}, "most must be a whole number above 0"),
        ({"kind": "date", "parts": ["moth"]}, "Did you mean 'month'"),
        ({"kind": "date", "parts": []}, "leaves nothing of the date"),
        ({"kind": "date", "format": "D.M.Y"}, "no format named 'D.M.Y'"),
        ({"kind": "classes"}, "no kind named 'classes'"),
    ],
)
def test_a_line_that_cannot_be(line: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        Schema.of({"a": line, "y": {"kind": "classes"}}, target="y")
    assert "[columns]: a: " in str(caught.value)


def test_all_lines_that_are_wrong_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Schema.of({"a": {"kind": "x"}, "b": {"kind": "number", "fill": "y"}}, target="z")
    text = str(caught.value)
    assert "has 3 problems" in text and "\n  a: " in text and "\n  b: " in text
    assert "no line for the target 'z'" in text
