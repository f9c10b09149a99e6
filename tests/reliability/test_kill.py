"""B1: a run that is killed at any moment ends, when it is resumed, as if nothing had happened."""

from __future__ import annotations

import pytest

from .forked import ask

PARTS = {("device", 1): 13, ("device", 2): 12, ("file", 1): 13, ("file", 2): 12}  # 50 kills


@pytest.mark.parametrize("store, every", PARTS)
def test_a_killed_run_ends_as_if_it_had_not_been_killed(tmp_path, store, every):
    kills = PARTS[store, every]
    told = ask("killing", tmp_path, store, str(kills), str(every))
    assert told["kills"] == told["same"] == kills, told
    assert told["in a save"] >= 1 and len(set(told["after saves"])) >= 3, told


def test_fifty_kills_are_made():
    assert sum(PARTS.values()) == 50
