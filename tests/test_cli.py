from __future__ import annotations

import pytest

from undrift import __version__, catalogue
from undrift.cli import main


def test_list_names_every_algorithm(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    named = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert named == list(catalogue())


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert __version__ in capsys.readouterr().out


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["lits"])
    assert stop.value.code == 2
    assert "lits" in capsys.readouterr().err
