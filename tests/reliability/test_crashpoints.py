"""B2: no single operation on the disk is a bad moment to die."""

from __future__ import annotations

import pytest

from .forked import ask


def test_a_run_that_dies_before_or_amid_any_operation_ends_as_if_it_had_not(tmp_path):
    told = ask("crashing", tmp_path, "before", "half")
    for store in ("device", "file"):
        assert told[store]["before"] >= 40 and told[store]["half"] >= 25, told
        assert told[store]["states"] >= 40, told


@pytest.mark.slow  # nearly the same bytes on the disk as before the next operation
def test_a_run_that_dies_after_any_operation_ends_as_if_it_had_not(tmp_path):
    told = ask("crashing", tmp_path, "after")
    assert told["device"]["after"] >= 40 and told["file"]["after"] >= 50, told
