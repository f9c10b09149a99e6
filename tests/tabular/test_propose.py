"""What init proposes for an unknown table, and what it asks back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from undrift.cli import main
from undrift.experiment.spec import load
from undrift.experiment.world import examples_of
from undrift.tabular import Category, Classes, Counts, Date, Flag, Number, Numbers
from undrift.tabular.propose import Proposal, propose

N = 300
DRAW = np.random.default_rng(3)
ILL = DRAW.random(N) < 0.2
Y = np.where(ILL, "ill", "well").tolist()
NOISE, OTHER = DRAW.normal(size=N), DRAW.normal(size=N)


def column(values: Any) -> Proposal:
    return propose({"a": list(values), "noise": NOISE, "y": Y}, "y")


def kind(values: Any, **kinds: str) -> Any:
    made = propose({"a": list(values), "noise": NOISE, "y": Y}, "y", kinds=kinds)
    return dict(made.schema.features).get("a")


def told(values: Any) -> str:
    return "\n".join(f for f in column(values).findings if f.startswith("a: "))


def few(values: list[Any]) -> list[Any]:
    return [values[k] for k in DRAW.integers(0, len(values), N)]


def test_plain_columns_are_no_findings() -> None:
    assert kind(DRAW.normal(size=N)) == Number() and told(DRAW.normal(size=N)) == ""
    missing = np.where(DRAW.random(N) < 0.1, np.nan, DRAW.normal(size=N))
    assert kind(missing) == Number("median", indicator=True)
    assert kind(few(["A", "B", None])) == Category(("A", "B")) and told(few(["A", "B"])) == ""
    assert kind(few([True, False])) == Flag() and kind(few(["TRUE", None])) is None
    assert kind(few(["TRUE", "false", None])) == Flag(indicator=True)
    assert kind(few(["yes", "no"])) == Category(("no", "yes"))


FINDINGS: dict[str, tuple[Any, Any, list[str]]] = {
    "constant": (["x"] * N, None, ["constant ('x'), left out", "--kind a=category keeps it"]),
    "nothing": ([None] * N, None, ["every cell is missing"]),
    "texts that do not repeat": (
        [f"p{k}" for k in range(N)], None, ["an identifier (300 different values in 300 rows)"]),
    "a running number": (list(range(N)), None, ["an identifier", "--kind a=number keeps it"]),
    "few whole numbers": (
        few([1, 2, 3]), Number(), ["3 different whole numbers", "--kind a=category"]),
    "flags as numbers": (few([0, 1]), Number(), ["2 different whole numbers"]),
    "dates": (
        [f"2024-0{k % 9 + 1}-1{k % 10}" for k in few(list(range(90)))],
        Date(format="iso"), ["dates (iso); --kind a=category says otherwise"],
    ),
    "ambiguous dates": (
        [f"{k % 12 + 1}/{k % 7 + 1}/2024" for k in few(list(range(84)))], None,
        ["d/m/Y and m/d/Y, left out", "say --kind a=date:d/m/Y or --kind a=date:m/d/Y"],
    ),
    "rare levels": (
        [*few(["A", "B"])[:-2], "C", "C"], Category(("A", "B")), ["rare levels ('C') go to"]),
    "many levels": (
        [f"l{k}" for k in range(70)] * 4 + ["l0"] * 20, ..., ["70 levels", "50 most frequent"]),
    "levels that differ in case": (
        few(["Yes", "yes", "no"]), ..., ["'Yes' and 'yes' differ in case or blanks only"]),
    "mostly missing": (
        [None] * 200 + few([1.5, 2.5, 3.5, 4.5])[:100], ..., ["67 % of its cells are missing"]),
    "the target in other words": (
        np.where(ILL, "positive", "negative"), None, ["suspect, equals the target", "left out"]),
    "the target as a number": (np.where(ILL, 1, 0), None, ["suspect, equals the target"]),
    "a code of the target": (
        [f"{'IJ'[k % 2] if ill else 'WXYZ'[k % 4]}" for k, ill in enumerate(ILL)], ...,
        ["suspect, determines the target", "--exclude a drops it"],
    ),
    "a measure of the target": (
        NOISE * 0.01 + ILL, ..., ["suspect, separates the classes without an error"]),
    "missing with the target": (
        np.where(ILL, np.nan, NOISE + 5), ..., ["suspect, is missing exactly where"]),
}  # fmt: skip


@pytest.mark.parametrize("name", FINDINGS)
def test_everything_noticeable_is_told_with_the_way_to_say_otherwise(name: str) -> None:
    values, wanted, parts = FINDINGS[name]
    if wanted is not ...:
        assert kind(values) == wanted
    text = told(values)
    assert text.startswith("a: ")
    for part in parts:
        assert part in text


def test_codes_with_zeros_in_front_are_texts(tmp_path: Path) -> None:
    rows = [
        f"{['007', '012', '3'][k % 3]},{v},{y}"
        for k, (v, y) in enumerate(zip(NOISE, Y, strict=True))
    ]
    (tmp_path / "t.csv").write_text("a,noise,y\n" + "\n".join(rows))
    made = propose(tmp_path / "t.csv", "y")
    assert dict(made.schema.features)["a"] == Category(("3", "007", "012"))
    assert any("begin with zeros" in f for f in made.findings)


def test_what_is_said_wins() -> None:
    whole = few([1, 2, 3])
    assert kind(whole, a="category") == Category(("1", "2", "3"))
    assert kind([f"p{k}" for k in range(N)], a="category").levels is not None
    assert kind(few([0, 1]), a="flag") == Flag()
    days = few(["1/2/2024", "3/4/2024"])
    assert kind(days, a="date:d/m/Y") == Date(format="d/m/Y")


def test_targets() -> None:
    def goal(values: Any, kind: str | None = None) -> tuple[Any, str]:
        given = {} if kind is None else {"t": kind}
        made = propose({"a": OTHER, "t": list(values)}, "t", kinds=given)
        return made.schema.goal, "\n".join(f for f in made.findings if f.startswith("t: "))

    assert goal(Y) == (Classes(("well", "ill")), "")
    assert goal(few([0, 1]))[0] == Classes(("0", "1"))
    found, said = goal(few([1, 2, 3]))
    assert found == Classes(("1", "2", "3")) and "--kind t=numbers or --kind t=count" in said
    found, said = goal(few(list(range(40))))
    assert found == Numbers() and "taken for number" in said and "--kind t=classes" in said
    assert goal(few(list(range(40))), "count")[0] == Counts()
    assert goal(NOISE) == (Numbers(), "")
    assert "the class 'C' has 2 rows only" in goal([*few(["A", "B"])[:-2], "C", "C"])[1]
    suspect = propose({"a": NOISE * 3 + 1, "b": DRAW.normal(size=N), "t": NOISE}, "t")
    assert suspect.exclude == ["a"] and "on another scale" in suspect.findings[0]


def test_a_column_of_nothing_may_be_kept() -> None:
    made = propose({"a": OTHER, "b": [None] * N, "t": Y}, "t", kinds={"b": "category"})
    assert dict(made.schema.features)["b"] == Category()


def test_words_are_not_advised_to_be_numbers() -> None:
    found = propose({"a": OTHER, "t": [*Y[:-2], "rare", "rare"]}, "t").findings
    assert any("'rare' has 2 rows only; join classes in the table" in f for f in found)
    assert not any("=numbers" in f for f in found)


def test_clients_are_looked_at() -> None:
    sites = ["big"] * 280 + ["small"] * 6 + ["none"] * 14
    y = [*Y[:280], *["ill"] * 6, *[None] * 14]
    made = propose({"s": sites, "a": NOISE, "y": y}, "y", client="s")
    text = "\n".join(made.findings)
    assert made.clients == ("big", "none", "small") and made.dropped == 14
    assert "fewer than 10 rows: small (6)" in text and "without any target: none" in text
    assert "one class only: small" in text


def test_init_shows_all_and_writes_a_file_that_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [
        f"{'NSW'[k % 3]},p{k},{20 + k % 50 if k % 9 else ''},{'AB0'[k % 3]},{2020 + k % 4}-01-05,"
        f"{Y[k] if k % 50 else ''},DE"
        for k in range(N)
    ]
    Path("t.csv").write_text("site,id,age,blood group,seen,outcome,country\n" + "\n".join(rows))
    command = ["init", "t.csv", "--client", "site", "--target", "outcome"]
    assert main([*command, "--exclude", "country", "--kind", "seen=date"]) == 0
    out = capsys.readouterr().out
    assert "age          number           11.3 %   20 to 69, mean" in out
    assert "6 of 300 rows have no target: they are left out" in out
    assert "  id: an identifier (300 different values in 300 rows), left out; --kind id=ca" in out
    text = Path("t.toml").read_text()
    assert 'exclude = ["country", "id"]\nmissing_target = "drop"    # 6 rows have none' in text
    assert 'age           = { kind = "number", fill = "median", indicator = true }' in text
    assert '"blood group" = { kind = "category", levels = ["0", "A", "B"] }' in text
    assert 'outcome       = { kind = "classes", levels = ["well", "ill"] }' in text
    (made,) = load("t.toml")
    data = examples_of(made)
    assert data.info.dropped == 6 and data.info.client_names == ("N", "S", "W")
    assert len(data.train_x) + len(data.test_x) == 294
    assert main(["run", "t.toml", "rounds=1", "--quiet"]) == 0
