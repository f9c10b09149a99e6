"""A complete run of the user's code does not stand for other code."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from undrift.errors import ChangedExperiment
from undrift.experiment.run import finished, run
from undrift.experiment.spec import Experiment

from .tiny import TABLE

PARTS = """
import torch
import helper

def cost(output, target):
    return helper.scaled(torch.nn.functional.cross_entropy(output, target, reduction="none"))
"""
HELPER = "def scaled(values):\n    return 1.0 * values\n"


def experiment(home: Path, helper: str) -> Experiment:
    """Write own parts as they are now, and read the experiment as a new process would."""
    (home / "my_parts.py").write_text(PARTS)
    (home / "helper.py").write_text(helper)
    for name in [n for n in sys.modules if n.startswith("undrift.own.")]:
        del sys.modules[name]
    table = {**TABLE, "task": {"loss": "my_parts:cost"}, "rounds": 1}
    return Experiment.from_table(table, trust=True, home=home)


def test_a_complete_run_is_not_shown_for_other_code(tmp_path: Path) -> None:
    place = tmp_path / "run"
    first = experiment(tmp_path, HELPER)
    loss = run(first, place).last("test_loss")
    for same in (first, experiment(tmp_path, f"# scales\n\n{HELPER}")):
        for look in (run, finished):
            assert look(same, place).last("test_loss") == loss
    other = experiment(tmp_path, HELPER.replace("1.0", "200.0"))
    for look in (run, finished):
        with pytest.raises(ChangedExperiment, match=r"helper\.scaled: its code has changed"):
            look(other, place)
