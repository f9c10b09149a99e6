"""B2: no single operation on the disk is a bad moment to die."""

from __future__ import annotations

import pytest

from .forked import ask


def test_a_run_that_dies_before_an_operation_ends_as_if_it_had_not(tmp_path):
    """Before every fourth one; of two stores that do the same ones, not before the same."""
    told = ask("crashing", tmp_path, "4", "before")
    assert told["device"]["before"] >= 10 and told["file"]["before"] >= 12, told
    assert told["device"]["states"] >= 7 and told["file"]["states"] >= 9, told


@pytest.mark.slow
def test_a_run_that_dies_before_any_operation_ends_as_if_it_had_not(tmp_path):
    told = ask("crashing", tmp_path, "1", "before")
    assert told["device"]["before"] >= 40 and told["file"]["before"] >= 50, told
    assert told["device"]["states"] >= 30 and told["file"]["states"] >= 40, told


@pytest.mark.slow  # after one is before the next, but for the last; halves of writes are new
def test_a_run_that_dies_amid_or_after_any_operation_ends_as_if_it_had_not(tmp_path):
    told = ask("crashing", tmp_path, "1", "half", "after")
    assert told["device"]["after"] >= 40 and told["file"]["after"] >= 50, told
    assert told["device"]["half"] >= 25 and told["file"]["half"] >= 40, told
