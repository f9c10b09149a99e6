"""Triton exists on Linux only and is needed on CUDA alone: nothing else may import it."""

import os
import subprocess
import sys
from pathlib import Path

import undrift as fl

SOURCE = Path(fl.__file__).parent.parent

WITHOUT = """
import sys

class Nowhere:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError("there is no triton", name="triton")

sys.meta_path.insert(0, Nowhere())
"""
TRAINS = """
import undrift as fl
from undrift.cli import main
from undrift.testing.world import tiny_world

for options in ({"engine": "reference"}, {"workers": 1}, {"graph": True}):
    tiny_world().trainer(fl.scaffold(lr=0.1), **options).run(2)
assert main(["list"]) == 0
"""


def test_a_cpu_needs_no_triton():
    own = {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    run = [sys.executable, "-c", WITHOUT + TRAINS]
    done = subprocess.run(run, env={**os.environ, **own}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
