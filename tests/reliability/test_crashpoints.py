"""B2: no single operation on the disk is a bad moment to die."""

from __future__ import annotations

from .forked import ask


def test_a_run_that_dies_at_any_operation_ends_as_if_it_had_not(tmp_path):
    told = ask("crashing", tmp_path)
    for store in ("device", "file"):  # before, after and, where bytes are written, amid each
        assert told[store]["before"] == told[store]["after"] >= 40, told
        assert told[store]["half"] >= 25 and told[store]["states"] >= 40, told
