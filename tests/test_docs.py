"""The documentation is run, so that it cannot rot."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from undrift.cli import main
from undrift.experiment.run import run
from undrift.experiment.spec import Experiment, load
from undrift.experiment.tables import parse_table

DOCS = Path(__file__).parent.parent / "docs"


def blocks(page: str, kind: str) -> list[str]:
    text = (DOCS / page).read_text("utf-8")
    return re.findall(rf"^```{re.escape(kind)}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:  # another test has modules of these names
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def test_the_quickstart_runs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    make_table, twelve_lines = blocks("quickstart.md", "python")
    exec(compile(make_table, "quickstart", "exec"), {})
    (commands,) = blocks("quickstart.md", "sh")
    lines = commands.splitlines()
    assert len(lines) == 5
    for line in lines:
        _, *arguments = shlex.split(line)
        quick = ["rounds=3", "--quiet", "--jobs", "1"] if arguments[0] == "compare" else []
        assert main([*arguments, *quick]) == 0, line
    out = capsys.readouterr().out
    assert "12 clients (0 empty)" in out and "L (6)" in out and "patient: an identifier" in out
    assert "scaffold" in out and "Sites by" in out
    _, *rows = out[out.index("row,p_well,p_ill,class,error") :].splitlines()
    assert len(rows) == 2 and all(float(r.split(",")[1]) > 0 and r.endswith(",") for r in rows)
    assert (here / "runs/clinics/report.html").stat().st_size > 10_000
    assert len(twelve_lines.strip().splitlines()) <= 12
    quick = twelve_lines.replace('"seed=0,1,2"', '"seed=0", "rounds=2"')
    exec(compile(quick, "quickstart", "exec"), {})


def test_tables_are_read_as_written(here: Path) -> None:
    space: dict[str, Any] = {}
    load_it, new_rows = blocks("tables.md", "python")
    exec(compile(load_it, "tables", "exec"), space)
    data = space["data"]
    assert data.info.dropped == 5 and data.info.feature_names[:3] == (
        *("age", "age is missing", "blood=A"),
    )
    exec(compile(new_rows, "tables", "exec"), space)
    assert space["rows"].errors == {1: "column 'age': 'old' is no number"}
    assert space["x"].shape == (2, len(data.info.feature_names))
    line = "undrift init patients.csv --client clinic --target outcome"
    assert line in (DOCS / "tables.md").read_text("utf-8")
    assert main(shlex.split(line)[1:]) == 0


def test_own_parts_run_as_written(here: Path) -> None:
    parts = blocks("bring-your-own.md", "python file=my_parts.py")
    (here / "my_parts.py").write_text("\n".join(parts))
    base: dict[str, Any] = {
        "rounds": 1,
        "data": {"use": "synthetic", "clients": 6, "sizes": 20, "classes": 2, "features": 4},
        "model": {"use": "mlp", "hidden": 4},
        "algorithm": {"use": "fedavg"},
        "engine": {"device": "cpu"},
    }
    tables = [parse_table(text, "docs") for text in blocks("bring-your-own.md", "toml")]
    assert len(tables) == 7
    for table in tables:
        (made,) = load({**base, **table}, trust=True)
        assert Experiment.from_toml(made.to_toml(), trust=True) == made
        assert len(run(made)) == 1, table


def test_own_objects_run_as_written(here: Path) -> None:
    (example,) = blocks("bring-your-own.md", "python")
    exec(compile(example, "bring-your-own", "exec"), {})
    assert (here / "runs/mine/model.safetensors").is_file()


def test_the_example_file_is_an_experiment() -> None:
    whole, sentence = blocks("experiments.md", "toml")
    (made,) = load(parse_table(whole, "docs"))
    assert made.label == "scaffold"
    assert Experiment.from_table({**parse_table(whole, "docs"), **parse_table(sentence, "docs")})


def test_every_command_is_documented(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = re.findall(r"^    (\w+) ", capsys.readouterr().out, re.MULTILINE)
    page = (DOCS / "commands.md").read_text("utf-8")
    assert shown
    for command in shown:
        assert f"undrift {command}" in page


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"
