"""Where the kernels run: on a CUDA device, or in Triton's interpreter (see tests/conftest.py)."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def compiled() -> Callable[[str], list[list]]:
    """Compile some programs for a card that is not here: names, and widths of loads and stores.

    The interpreter takes what no compiler would, and knows no assembler.
    """

    def found(what: str) -> list[list]:
        script = Path(__file__).with_name("compiled.py")
        environment = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
        command = [sys.executable, str(script), what]
        made = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert made.returncode == 0, made.stderr[-2000:]
        return [json.loads(line) for line in made.stdout.splitlines()]

    return found


@pytest.fixture(autouse=True)
def fresh():
    """Forget configurations that another test has set."""
    from undrift.kernels import tuner

    before = dict(tuner.chosen)
    yield
    tuner.chosen.clear()
    tuner.chosen.update(before)
