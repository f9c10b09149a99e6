"""The page names every metric with its direction, and its examples run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from experiment.tiny import TABLE
from undrift.experiment.run import run
from undrift.experiment.spec import load
from undrift.experiment.tables import parse_table
from undrift.metrics import METRICS, metric_named

PAGE = (Path(__file__).parents[2] / "docs/metrics.md").read_text("utf-8")


def test_every_metric_has_its_line() -> None:
    rows = re.findall(r"^\| (`.*?`) \| (more|less) \|", PAGE, re.MULTILINE)
    named = {name: better for cell, better in rows for name in re.findall(r"`(.*?)`", cell)}
    assert {metric_named(n).name for n in named} >= set(METRICS)
    for name, better in named.items():
        assert metric_named(name).better == better, name


def test_the_examples_run() -> None:
    (toml,) = re.findall(r"^```toml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    (made,) = load({**TABLE, **parse_table(toml, "docs"), "rounds": 1})
    assert {"test_auc", "client_balanced_accuracy_worst10"} <= set(run(made)[0])
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    *before, last = code.strip().splitlines()
    scope: dict[str, object] = {}
    exec("\n".join(before), scope)
    assert eval(last.split("#")[0], scope) == pytest.approx(1.0)
