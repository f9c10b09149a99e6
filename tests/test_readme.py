"""The README's Python is run, and its first example stays within twelve lines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_the_readme_runs(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(BLOCKS[number], f"README block {number}", "exec"), {})


def test_own_model_and_data_take_at_most_twelve_lines() -> None:
    assert len([line for line in BLOCKS[0].splitlines() if line.strip()]) <= 12


def test_ci_calls_the_test_command_of_the_readme() -> None:
    command = "./scripts/test"
    assert command in (ROOT / "README.md").read_text()
    assert command in (ROOT / ".ci" / "run").read_text()
