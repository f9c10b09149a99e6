"""Small files of text that ask for much: refused in little memory, with the limit and its move."""

from __future__ import annotations

import io
import json
import tracemalloc
from contextlib import redirect_stderr, redirect_stdout

import pytest

from undrift import sources
from undrift.cli import main
from undrift.errors import CheckpointError, ConfigError, DataError, UndriftError
from undrift.experiment.folder import RunFolder
from undrift.experiment.sweep import expand
from undrift.experiment.tables import parse_value, read_table
from undrift.guarded.limits import LIMITS, VARIABLE, Unreadable, limit
from undrift.guarded.text import lines_of, parse_json, parse_toml, read_bytes

from .bounded import bounded

TOML = {
    "a key of 40,000 dots": "a" + ".a" * 40_000 + " = 1",
    "a key of 100,000 dots": "a" + ".a" * 100_000 + " = 1",
    "quoted parts": '"a"' + " . 'a'" * 40_000 + " = 1",
    "a header": "[a" + ".a" * 40_000 + "]",
    "an array of tables": "[[a" + ".a" * 40_000 + "]]",
    "lists": "a = " + "[" * 40_000,
    "closed lists": "a = " + "[" * 40_000 + "]" * 40_000,
    "inline tables": "a = " + "{a=" * 40_000,
    "dots in inline tables": "a = {a" + ".a" * 40_000 + " = 1}",
    "many deep headers": "".join(f"[k{i}{'.x' * 60}]\n" for i in range(20_000)),
    "many deep keys": "".join(f"k{i}{'.x' * 60} = 1\n" for i in range(20_000)),
    "a number of a million digits": "a = 0x" + "f" * 1_000_000,
    "a file of 5 megabytes": "#" * 5_000_000,
}
LATER = {
    "behind a string": 'b = "[" \n',
    "behind a string with quotes": 'b = "\\"[" \n',
    "behind a long string": 'b = """\n"[""\\"""" \n',
    "behind a literal": "b = '[\\' \n",
    "behind a comment": "# it's [ \"\n",
}


@pytest.mark.parametrize("name", TOML)
def test_a_bomb_of_toml_is_refused(name, tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text(TOML[name])
    ended = bounded(lambda: read_table(path))
    assert ended.how == "refused", ended
    assert str(path) in ended.said
    assert "digits" in ended.said or f"{VARIABLE}='" in ended.said


@pytest.mark.parametrize("before", LATER)
def test_a_bomb_is_found_whatever_stands_before_it(before):
    with pytest.raises(Unreadable, match="parts of one key: 1001"):
        parse_toml(LATER[before] + TOML["a header"].replace(".a" * 40_000, ".a" * 1000))


@pytest.mark.parametrize("before", LATER)
def test_brackets_and_dots_in_strings_do_not_count(before):
    dots = "." * 1000
    text = LATER[before] + f"c = '{dots}[[[' # {dots}\nd = [1.5, 2.5]\n'e{dots}'.f = 1"
    assert parse_toml(text)["e" + dots] == {"f": 1}


def test_deep_but_honest_toml_is_read():
    keys = ".".join(["a"] * 60)
    assert parse_toml(f"{keys} = {'[' * 60}{']' * 60}")["a"]["a"]


@pytest.mark.parametrize("command", ["run", "show", "report", "compare", "partition", "evaluate"])
def test_commands_refuse_a_bomb(command, tmp_path):
    run = tmp_path / "seed-0"
    run.mkdir()
    for name in ("experiment.toml", "rounds.jsonl"):
        (run / name).write_text(TOML["a key of 40,000 dots"])
    given = run / "experiment.toml" if command in ("run", "compare", "partition") else run

    def call():
        err = io.StringIO()
        with redirect_stdout(io.StringIO()), redirect_stderr(err):
            code = main([command, str(given)])
        assert code == 2, err.getvalue()
        raise ConfigError(err.getvalue())

    ended = bounded(call)
    assert ended.how == "refused", ended
    assert "parts of one key: 40001 where at most 64" in ended.said


def test_a_setting_on_the_command_line_is_bounded():
    for value in ("[" * 50_000, "{a=" * 50_000, "{" + "a." * 40_000 + "a=1}"):
        assert bounded(lambda value=value: parse_value(value)).how == "refused"


JSON = {
    "lists": "[" * 1_000_000,
    "closed lists": "[" * 1000 + "]" * 1000,
    "tables": '{"a":' * 100_000,
    "a number of a million digits": "[" + "1" * 1_000_000 + "]",
    "a number that is no float": '{"round": 1' + "0" * 400 + "}",
    "an open string": '["' + "\\" * 1_000_000,
    "33 megabytes": "[" + "{}," * 11 * 2**20 + "0]",
}


@pytest.mark.parametrize("name", JSON)
def test_a_bomb_of_json_is_refused(name, tmp_path):
    run = RunFolder(tmp_path)
    for file in ("experiment.json", "summary.json", "environment.json"):
        (tmp_path / file).write_text(JSON[name])
    for read in (run.table, run.summary, lambda: run.started({})):
        ended = bounded(read)
        assert ended.how == "refused", ended
        assert str(tmp_path) in ended.said


def test_brackets_in_strings_of_json_do_not_count():
    value = {"a": "[" * 1000 + '"' + "1" * 1000, "b": [1e300, 0.1, 12345678901234567890]}
    assert parse_json(json.dumps(value)) == value


def test_a_line_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, "line_bytes=1000")
    lines = b'{"round":1}\n' + b'{"round":2,"a":"' + b"x" * 1000
    (tmp_path / "rounds.jsonl").write_bytes(lines)
    with pytest.raises(CheckpointError, match=r"rounds\.jsonl.*line 2.*at most 1000.*line_bytes="):
        RunFolder(tmp_path).history()
    with pytest.raises(Unreadable, match="line 2"):
        list(lines_of(io.BytesIO(lines)))


def test_a_file_without_end_is_refused(tmp_path):
    (tmp_path / "bad.toml").symlink_to("/dev/zero")
    with pytest.raises(Unreadable, match="no file"):
        read_bytes(tmp_path / "bad.toml", "toml_bytes")
    with pytest.raises(ConfigError, match="no file"):
        read_table(tmp_path / "bad.toml")


# ------------------------------------------------------------------------------------ the limits
def test_limits_are_raised_and_lowered_by_the_environment(monkeypatch):
    deep = "[" * 70 + "]" * 70
    with pytest.raises(Unreadable, match="UNDRIFT_LIMITS='depth=128' reads it"):
        parse_json(deep)
    monkeypatch.setenv(VARIABLE, "depth=128, toml_bytes=10")
    assert parse_json(deep)
    assert (limit("depth"), limit("toml_bytes"), limit("table_columns")) == (128, 10, 100_000)
    with pytest.raises(Unreadable, match="at most 10"):
        parse_toml("a = 1 # and more")


@pytest.mark.parametrize("text", ["deep=1", "depth", "depth=", "depth=0", "depth=-1", "depth=1e9"])
def test_a_limit_that_makes_no_sense_is_refused(text, monkeypatch):
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(UndriftError, match=VARIABLE):
        limit("depth")


def test_every_limit_is_on_the_page(request):
    page = (request.config.rootpath / "docs/data.md").read_text()
    for name, value in LIMITS.items():
        assert f"| `{name}` | {value:,} |" in page


def test_a_long_sweep_is_refused_before_its_tables_are_made():
    """Each of its values would get a copy of the table, with all of them in it."""
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match=r"20000 values of work\.epochs"):
            expand({"work": {"epochs": list(range(20_000))}})
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "settings", [{"clients": 10**8, "sizes": 100}, {"clients": 10**7}, {"sizes": [10**9] * 30}]
)
def test_examples_that_no_memory_holds_are_refused_before_they_are_made(settings):
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="table_values"):
            sources.load("synthetic", **settings)
        assert tracemalloc.get_traced_memory()[1] < 1e6
    finally:
        tracemalloc.stop()
