"""The benchmark runs, finds nothing wrong and writes what it measured."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the kernels need triton")

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kernels.py"


def test_it_runs(monkeypatch, tmp_path, capsys):
    out = tmp_path / "kernels.json"
    arguments = ["--tiny", "--precisions", "fp16", "--only", "linear", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert not end.value.code
    found = json.loads(out.read_text())
    assert [row["layer"] for row in found["ops"]] == ["50->20", "64->32"]
    assert all(row["right"] for row in found["ops"])
    assert "2 layers, 0 wrong" in capsys.readouterr().out
