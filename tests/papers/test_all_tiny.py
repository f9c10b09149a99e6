"""Every experiment file of the papers runs end to end with `--tiny`; `pytest -m slow`."""

from __future__ import annotations

import json

import pytest

from undrift.cli import main
from undrift.experiment.family import paper_files, settings_of

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", paper_files())
def test_a_paper_s_table_or_figure_runs(name, tmp_path, monkeypatch):
    monkeypatch.setenv("UNDRIFT_DATA", str(tmp_path / "nothing"))  # then examples are random
    out = tmp_path / "out"
    assert main(["reproduce", name, "--tiny", "--quiet", "--out", str(out)]) == 0
    (record,) = out.rglob(f"{name}.json")
    cells = json.loads(record.read_text())["cells"]
    settings = settings_of(name)
    assert {(c["setting"], c["method"]) for c in cells} == {
        (s.name, label) for s in settings for label in s.paper["methods"]
    }
    assert all(c["kind"] == "tiny" and not c["data"]["real"] for c in cells)
    assert {c["rounds"] for c in cells} == {2}
