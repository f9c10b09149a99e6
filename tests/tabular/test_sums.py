"""Federated statistics: what holders add up to is what the pooled rows say."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from undrift.errors import DataError
from undrift.tabular import (
    Frame,
    Question,
    Schema,
    Sums,
    answer,
    first_question,
    second_question,
    third_question,
)
from undrift.tabular.sums import BINS, WIDTH, deviations, means, quantile

COLUMNS = {
    "age": {"kind": "number", "fill": "median", "indicator": True},
    "far": {"kind": "number", "fill": "median"},
    "blood": {"kind": "category"},
    "smoker": {"kind": "flag"},
    "seen": {"kind": "date", "parts": ["time", "year"], "fill": "median"},
    "cost": {"kind": "number"},
}
SCHEMA = Schema.of(COLUMNS, target="cost")


def rows(n: int, seed: int) -> dict[str, list[Any]]:
    draw = np.random.default_rng(seed)

    def some(values: list[Any]) -> list[Any]:
        return [None if draw.random() < 0.1 else v for v in values]

    days = [f"20{k:02}-0{k % 9 + 1}-1{k % 7}" for k in draw.integers(10, 24, n)]
    return {
        "age": some(draw.normal(50, 12, n).tolist()),
        "far": some((1e6 + draw.standard_cauchy(n)).tolist()),
        "blood": some(
            [["A", "B", "0", "AB"][k] for k in draw.choice(4, n, p=[0.5, 0.3, 0.15, 0.05])]
        ),
        "smoker": some((draw.random(n) < 0.3).tolist()),
        "seen": some(days),
        "cost": draw.lognormal(3, 1, n).tolist(),
    }


SITES = [rows(n, k) for k, n in enumerate((1, 6, 40, 300, 1000))]
POOLED = {name: [v for site in SITES for v in site[name]] for name in COLUMNS}


def asked(sites: list[dict[str, list[Any]]], least: int = 1) -> tuple[Sums, Sums, Sums]:
    """Ask every holder, as silos are asked: only JSON travels."""
    frames = [Frame.of(SCHEMA, site) for site in sites]

    def total(question: Question | None) -> Sums:
        assert question is not None
        sent = Question.from_json(json.loads(json.dumps(question.to_json())))
        replies = [json.loads(json.dumps(answer(sent, SCHEMA, f).to_json())) for f in frames]
        made = [Sums.from_json(reply, SCHEMA) for reply in replies]
        first, *others = made
        for one in others:
            first += one
        return first

    counts = total(first_question(least))
    squares = total(second_question(counts))
    return counts, squares, total(third_question(SCHEMA, counts, squares))


def close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-12)


def longhand(values: list[Any]) -> tuple[float, float]:
    there = [v for v in values if v is not None]
    mean = math.fsum(there) / len(there)
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in there) / len(there))


def test_means_and_deviations_are_the_pooled_ones() -> None:
    counts, squares, _ = asked(SITES)
    for name in ("age", "far", "cost"):
        mean, std = longhand(POOLED[name])
        assert close(means(counts)[name], mean) and close(deviations(counts, squares)[name], std)
        missing = sum(v is None for v in POOLED[name])
        assert counts.series[name][:2] == (1347 - missing, missing)
    days = [None if d is None else float(np.datetime64(d).astype(int)) for d in POOLED["seen"]]
    assert close(means(counts)["seen"], longhand(days)[0])
    assert close(deviations(counts, squares)["seen"], longhand(days)[1])
    years = [None if d is None else float(d[:4]) for d in POOLED["seen"]]
    assert close(deviations(counts, squares)["seen year"], longhand(years)[1])
    assert counts.rows == 1347


def test_levels_are_the_pooled_ones() -> None:
    counts, _, _ = asked(SITES)
    for name in ("blood", "smoker"):
        texts = [None if v is None else str(v).lower() for v in POOLED[name]]
        wanted = {t: texts.count(t) for t in set(texts) - {None}}
        if name == "blood":
            wanted = {k.upper(): v for k, v in wanted.items()}
        assert dict(counts.levels[name]) == wanted
        assert counts.unnamed[name] == (0, texts.count(None))


def test_a_median_is_known_to_a_bin() -> None:
    counts, squares, bins = asked(SITES)
    for name in ("age", "far"):
        mean, std = means(counts)[name], deviations(counts, squares)[name]
        there = sorted(v for v in POOLED[name] if v is not None)
        for share in (0.1, 0.5, 0.9):
            true = there[math.ceil(share * len(there)) - 1]
            found = quantile(bins.series[name], share, mean, std)
            allowed = WIDTH * 1.02 * math.sqrt(std**2 + (true - mean) ** 2)
            assert abs(found - true) <= allowed, (name, share)


def test_owners_of_rows_are_holders() -> None:
    """One frame with the holder of each row answers as the holders do one by one."""
    owners = np.repeat(np.arange(5), [1, 6, 40, 300, 1000])
    frame = Frame.of(SCHEMA, POOLED)
    for least in (1, 5, 20):
        alone, _, _ = asked(SITES, least)
        made = answer(first_question(least), SCHEMA, frame, owners)
        assert made.levels == alone.levels and made.unnamed == alone.unnamed
        assert all(
            close(a, b)
            for n in made.series
            for a, b in zip(made.series[n], alone.series[n], strict=True)
        )


def test_a_holder_with_few_rows_of_a_level_does_not_name_it() -> None:
    schema = Schema.of({"a": "category", "y": {"kind": "classes"}}, target="y")
    site = Frame.of(schema, {"a": ["x"] * 5 + ["rare"] * 4 + [None], "y": ["p"] * 10})
    made = answer(first_question(5), schema, site)
    assert made.levels["a"] == {"x": 5} and made.unnamed["a"] == (4, 1)
    assert "rare" not in json.dumps(made.to_json())
    declared = Schema.of(
        {"a": {"kind": "category", "levels": ["rare", "x", "z"]}, "y": "classes"}, target="y"
    )
    named = answer(first_question(5), declared, site)
    assert named.levels["a"] == {"rare": 4, "x": 5, "z": 0} and named.unnamed["a"] == (0, 1)


def test_a_constant_column_has_no_deviation() -> None:
    schema = Schema.of({"a": "number", "b": "number", "y": "number"}, target="y")
    sites = [
        Frame.of(schema, {"a": [0.1] * n, "b": [1e9 + k for k in range(n)], "y": [1.0] * n})
        for n in (3, 7, 11)
    ]
    counts = [answer(first_question(), schema, s) for s in sites]
    total = counts[0] + counts[1] + counts[2]
    squares = [answer(second_question(total), schema, s) for s in sites]
    spread = deviations(total, squares[0] + squares[1] + squares[2])
    assert spread["a"] == 0 and spread["y"] == 0 and 2 < spread["b"] < 4


def test_a_column_without_a_cell_is_no_error() -> None:
    schema = Schema.of({"a": {"kind": "number", "fill": "median"}, "y": "number"}, target="y")
    frame = Frame.of(schema, {"a": [None, None], "y": [1.0, 2.0]})
    counts = answer(first_question(), schema, frame)
    squares = answer(second_question(counts), schema, frame)
    third = third_question(schema, counts, squares)
    assert third is not None
    bins = answer(third, schema, frame)
    assert quantile(bins.series["a"], 0.5, 0.0, 0.0) == 0 and len(bins.series["a"]) == BINS


DAMAGE: dict[str, Any] = {
    "no object": [],
    "a field is gone": lambda d: d.pop("rows"),
    "a field too many": lambda d: d.update(more=1),
    "another question": lambda d: d.update(asks="everything"),
    "a negative count": lambda d: d["levels"]["blood"].update(A=-1),
    "half a row": lambda d: d.update(rows=0.5),
    "infinity": lambda d: d["series"].update(age=[1.0, 0.0, math.inf]),
    "two numbers": lambda d: d["series"].update(age=[1.0, 0.0]),
    "a text": lambda d: d["series"].update(age="abc"),
    "a strange column": lambda d: d["series"].update(weight=[1.0, 0.0, 3.0]),
    "a column is gone": lambda d: d["levels"].pop("blood"),
    "cells below 0": lambda d: d["series"].update(age=[-1.0, 0.0, 3.0]),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_answer_is_refused(name: str) -> None:
    data = answer(first_question(), SCHEMA, Frame.of(SCHEMA, SITES[2])).to_json()
    data = json.loads(json.dumps(data))
    change = DAMAGE[name]
    if callable(change):
        change(data)
    else:
        data = change
    with pytest.raises(DataError, match="no answer about a table"):
        Sums.from_json(data, SCHEMA)
    with pytest.raises(DataError, match="no question about a table"):
        Question.from_json({"asks": "all", "given": {}, "least": 1})


def test_answers_to_different_questions_do_not_add() -> None:
    frame = Frame.of(SCHEMA, SITES[2])
    counts = answer(first_question(), SCHEMA, frame)
    with pytest.raises(DataError, match="different questions"):
        counts + answer(second_question(counts), SCHEMA, frame)
