"""The wheel builds, installs into an empty environment and imports."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_the_wheel_installs_into_an_empty_environment(tmp_path: Path) -> None:
    run = [sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(run, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    venv.create(tmp_path / "empty", with_pip=True)
    python = tmp_path / "empty" / "bin" / "python"
    limits = ROOT / "constraints.txt"
    install = [python, "-m", "pip", "install", "--quiet", "-c", limits, wheel]
    subprocess.run(install, check=True, capture_output=True)
    check = "import undrift; print(undrift.__version__)"
    made = subprocess.run([python, "-c", check], check=True, capture_output=True, text=True)
    assert made.stdout.strip()
    listed = subprocess.run([python.parent / "undrift", "list"], check=True, capture_output=True)
    assert b"scaffold" in listed.stdout
