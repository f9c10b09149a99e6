"""An exit code of 0 says that all of it was done."""

import subprocess
import sys

import pytest

from undrift.cli import main

TINY = ["digits", "rounds=2", "partition.clients=4", "sampler.count=2", "work.epochs=1"]
QUIET = ["--quiet", "--jobs", "1"]


def test_a_run_in_which_everybody_was_left_out_is_no_success(tmp_path, capsys):
    command = ["run", *TINY, "algorithm.lr=0.1,1e38", *QUIET, "--out", str(tmp_path)]
    for _ in range(2):  # complete, it is only read
        assert main(command) == 1
        said = capsys.readouterr()
        assert said.out.count("2 rounds, test_accuracy") == 2
        [line] = [one for one in said.err.splitlines() if "changed nothing" in one]
        assert "lr=1e+38" in line and "2 of 2 rounds, the first of them 1" in line
    assert main([*command[:6], "algorithm.lr=0.1", *command[7:]]) == 0


def test_a_comparison_with_a_variant_that_never_trained_is_no_success(tmp_path, capsys):
    command = ["compare", *TINY, "algorithm.lr=0.1,1e38", *QUIET, "--out", str(tmp_path)]
    assert main(command) == 1
    said = capsys.readouterr()
    assert "95 % interval" in said.out and "lr=1e+38 seed 0: 2 of 2 rounds" in said.err


@pytest.mark.parametrize("arguments", [["list"], ["show", "digits"], ["list", "algorithms"]])
def test_output_that_nobody_read_to_its_end_is_no_success(arguments):
    """Its reader has closed it: what was not written was not done."""
    text = f"import os, sys\nfrom undrift.cli import main\nsys.exit(main({arguments!r}))"
    process = subprocess.Popen(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()
    told = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) == 141 and told == b""
