"""B2: no single operation on the disk is a bad moment to die."""

from __future__ import annotations

import pytest

from .forked import ask


@pytest.mark.parametrize("store", ["device", "file"])
def test_a_run_that_dies_at_any_operation_ends_as_if_it_had_not(tmp_path, store):
    told = ask("crashing", tmp_path, store)
    assert told["before"] == told["half"] == told["after"] >= 30, told
