"""B1: a run that is killed at any moment ends, when it is resumed, as if nothing had happened."""

from __future__ import annotations

from .forked import ask


def test_fifty_killed_runs_end_as_if_they_had_not_been_killed(tmp_path):
    parts = ask("killing", tmp_path)  # client states in memory and in a file, saved often or not
    assert sum(p["kills"] for p in parts) == sum(p["same"] for p in parts) == 50, parts
    assert sum(p["in a save"] for p in parts) >= 10, parts
    assert {n for p in parts for n in p["after saves"]} >= {0, 1, 2, 3, 4}, parts
