"""`undrift bench`: it measures and says so; no timing is judged."""

import json

import pytest

from undrift.bench import LOADS, bench
from undrift.cli import main
from undrift.errors import ConfigError


@pytest.mark.parametrize("name", LOADS)
def test_every_work_can_be_measured(name):
    found = bench(name, "scaffold", rounds=1, tiny=True)
    assert found.loop > 0 and found.undrift > 0
    assert found.faster == pytest.approx(found.loop / found.undrift)


def test_the_command_prints_and_writes(tmp_path, capsys):
    out = tmp_path / "bench.json"
    arguments = ["bench", "emnist_mlp", "--tiny", "--rounds", "1", "--device", "cpu"]
    assert main([*arguments, "--json", str(out)]) == 0
    written = json.loads(out.read_text())
    assert [one["algorithm"] for one in written["results"]] == ["fedavg", "scaffold"]
    assert "emnist_mlp" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nope"], "no work named 'nope'"),
        (["--precision", "fp8"], "no precision named 'fp8'"),
        (["--rounds", "0"], "--rounds"),
        (
            ["emnist_mlp", "--tiny", "--rounds", "1", "--json", "/nowhere/x.json"],
            "cannot be written",
        ),
    ],
)
def test_wrong_arguments_are_told(arguments, says, capsys):
    assert main(["bench", *arguments, "--device", "cpu"]) != 0
    assert says in capsys.readouterr().err


def test_an_algorithm_that_is_not_measured_is_named():
    with pytest.raises(ConfigError, match="no algorithm named 'fedprox'"):
        bench("emnist_mlp", "fedprox", tiny=True)
