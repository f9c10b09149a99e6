from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from undrift.errors import ConfigError
from undrift.experiment.tables import (
    differences,
    flatten,
    override,
    parse_value,
    read_table,
    write_table,
)

texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
floats = st.floats(allow_nan=False)
plain = st.booleans() | st.integers(-(2**63), 2**63 - 1) | floats | texts
inline = st.recursive(
    plain,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
tables = st.dictionaries(texts, inline | st.dictionaries(texts, inline, max_size=3), max_size=4)


@given(tables)
def test_what_is_written_reads_back(table: dict[str, Any]) -> None:
    assert tomllib.loads(write_table(table)) == table


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("0.5", 0.5),
        ("1e-3", 1e-3),
        ("false", False),
        ("fedavg", "fedavg"),
        ("'a b'", "a b"),
        ("a b", "a b"),
        ("0.1,0.2", [0.1, 0.2]),
        ("[1, 2]", [1, 2]),
        ("{use='mlp', hidden=3}", {"use": "mlp", "hidden": 3}),
        ("fedavg, scaffold", ["fedavg", "scaffold"]),
        ("comfed:prox-adam", "comfed:prox-adam"),
        ("", ""),
        ("1\nrounds = 2", "1\nrounds = 2"),  # one value, never a second setting
    ],
)
def test_values_on_the_command_line(text: str, value: Any) -> None:
    assert parse_value(text) == value


def test_an_override_reaches_every_table_of_an_array() -> None:
    table = {"algorithm": [{"use": "a"}, {"use": "b"}]}
    made = override(table, ["algorithm.lr=0.1"])
    assert [one["lr"] for one in made["algorithm"]] == [0.1, 0.1]
    assert "lr" not in table["algorithm"][0]


@pytest.mark.parametrize("change", ["rounds", "=3", "a..b=3", ".a=1", "x=[1", "x={a=1", 'x="a'])
def test_an_override_that_is_none_is_refused(change: str) -> None:
    with pytest.raises(ConfigError):
        override({}, [change])


def test_a_value_has_no_settings_inside() -> None:
    with pytest.raises(ConfigError, match="has no settings inside"):
        override({"rounds": 3}, ["rounds.x=1"])


def test_differences_name_every_change() -> None:
    old = {"a": {"b": 1, "c": [1]}, "d": 2}
    new = {"a": {"b": 1, "c": [2]}, "e": "x"}
    assert differences(old, new) == [
        "a.c: [1] there, [2] now",
        "d: 2 there, not set now",
        'e: not set there, "x" now',
    ]
    assert flatten(old) == {"a.b": 1, "a.c": [1], "d": 2}


def test_files_that_are_no_experiments(tmp_path: Path) -> None:
    bad = tmp_path / "bad.toml"
    with pytest.raises(ConfigError, match=r"cannot read the experiment file .*no such file"):
        read_table(bad)
    bad.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_table(bad)
    bad.write_text("rounds = = 3")
    with pytest.raises(ConfigError, match="line 1"):
        read_table(bad)
    bad.write_text("#" * 5_000_000)
    with pytest.raises(ConfigError, match="no experiment file"):
        read_table(bad)
    with pytest.raises(ConfigError, match="is no file"):
        read_table(tmp_path)
