"""B1: a run that is killed at any moment ends, when it is resumed, as if nothing had happened."""

from __future__ import annotations

import pytest

from .forked import ask


# client states in memory and in a file, saved often or not
@pytest.mark.parametrize("kills", [12, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_runs_end_as_if_they_had_not_been_killed(tmp_path, kills):
    parts = ask("killing", tmp_path, str(kills))
    assert sum(p["kills"] for p in parts) == sum(p["same"] for p in parts) == kills, parts
    assert sum(p["in a save"] for p in parts) >= kills // 2, parts  # those that are aimed
    saves = {n for p in parts for n in p["after saves"]}
    assert saves >= ({0, 1, 2, 3, 4, 5} if kills == 50 else {0, 1, 3}), parts
