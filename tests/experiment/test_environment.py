"""What is noted about where a run was made."""

import pytest
import torch

from undrift.experiment.environment import environment


@pytest.mark.parametrize(
    ("called", "noted"),
    [
        ("/opt/bin/undrift", "undrift"),
        ("/opt/lib/undrift/__main__.py", "undrift"),  # python -m undrift
        ("/opt/lib/mine/__main__.py", "mine"),  # somebody else's program, by python -m
        ("study.py", "study.py"),
    ],
)
def test_a_command_begins_with_what_was_called(called, noted, monkeypatch):
    monkeypatch.setattr("sys.argv", [called, "run"])
    assert environment(torch.device("cpu"), 0)["command"] == [noted, "run"]
