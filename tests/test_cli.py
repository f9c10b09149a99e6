from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiment.tiny import TABLE
from undrift import __version__, catalogue
from undrift.cli import main
from undrift.experiment.tables import write_table

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def tiny_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(write_table(TABLE))
    return "tiny.toml"


def test_list_names_everything(capsys: Capture) -> None:
    assert main(["list"]) == 0
    named = {line.split()[0] for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert set(catalogue()) <= named
    assert {"focal", "poisson", "auc", "rmse"} <= named
    assert {"dirichlet_client", "mnist", "mcmahan_cnn", "uniform", "Scaffold", "digits"} <= named


def test_list_of_one_kind(capsys: Capture) -> None:
    assert main(["list", "samplers"]) == 0
    assert "fedavg" not in capsys.readouterr().out
    assert main(["list", "sampler"]) == 2
    assert "Did you mean 'samplers'?" in capsys.readouterr().err


def test_version(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert __version__ in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["lits"], [], ["run"], ["run", "x", "--bogus"], ["list", "rules", "a=1"]]
)
def test_unknown_arguments_are_refused(arguments: list[str], capsys: Capture) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "usage: undrift" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["fedadam", "comfed:prox-yogi", "similarity", "mlp", "Prox"])
def test_show_tells_settings_and_defaults(name: str, capsys: Capture) -> None:
    assert main(["show", name]) == 0
    out = capsys.readouterr().out
    assert name in out and "default" in out


def test_show_writes_an_experiment_out(tiny_file: str, capsys: Capture) -> None:
    assert main(["show", tiny_file, "seed=0,1"]) == 0
    out = capsys.readouterr().out
    assert 'use = "synthetic"' in out and "# and 1 more of this sweep" in out


def test_run_show_evaluate(tiny_file: str, capsys: Capture) -> None:
    assert main(["run", tiny_file, "--quiet", "rounds=2", "--jobs", "1"]) == 0
    assert "runs/tiny/fedavg/seed-0: 2 rounds" in capsys.readouterr().out
    assert main(["show", "runs/tiny/fedavg/seed-0"]) == 0
    assert "2 of 2 rounds, complete" in capsys.readouterr().out
    assert main(["evaluate", "runs/tiny/fedavg/seed-0", "evaluate.per_class=true"]) == 0
    assert "per_class 2:" in capsys.readouterr().out
    assert main(["evaluate", "runs/tiny/fedavg/seed-0", "algorithm.lr=3"]) == 2
    assert "only evaluate.*" in capsys.readouterr().err
    assert main(["run", tiny_file, "rounds=2", "algorithm.lr=0.3", "--quiet"]) == 2
    assert "algorithm.local.lr: 0.1 there, 0.3 now" in capsys.readouterr().err


def test_compare_leaves_table_pictures_and_page(tiny_file: str, capsys: Capture) -> None:
    pytest.importorskip("matplotlib")
    command = ["compare", tiny_file, "--algorithms", "fedavg,scaffold", "--seeds", "2"]
    command += ["--out", "out", "--jobs", "1", "--quiet"]
    assert main([*command, "rounds=2"]) == 0
    out = capsys.readouterr().out
    assert "vs fedavg" in out and "open out/report.html" in out
    names = {p.name for p in Path("out").iterdir() if p.is_file()}
    assert names == {
        *("baselines.json", "comparison.md", "comparison.json", "curves.png", "curves.svg"),
        *("partition.png", "report.html"),
    }
    found = json.loads(Path("out/comparison.json").read_text())
    assert [line["label"] for line in found["variants"]] == ["fedavg", "scaffold"]
    assert main(["report", "out", "--baseline", "scaffold"]) == 0
    assert "vs scaffold" in capsys.readouterr().out
    assert main(["report", "out", "--baseline", "scafold"]) == 2
    assert "Did you mean 'scaffold'?" in capsys.readouterr().err


def test_partition_prints_and_draws(tiny_file: str, capsys: Capture) -> None:
    pytest.importorskip("matplotlib")
    assert main(["partition", tiny_file, "--out", "p.svg"]) == 0
    assert "6 clients (0 empty)" in capsys.readouterr().out
    assert Path("p.svg").stat().st_size > 1000
    assert main(["partition", tiny_file, "--out", "p.doc"]) == 2


def test_data_list_and_get(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNDRIFT_DATA", str(tmp_path))
    assert main(["data", "list"]) == 0
    out = capsys.readouterr().out
    assert "digits" in out and "embedded" in out and "missing" in out
    assert main(["data", "get", "digits"]) == 0
    assert "nothing to obtain" in capsys.readouterr().out
    assert main(["data", "get", "mnst"]) == 2
    assert "Did you mean 'mnist'?" in capsys.readouterr().err


def test_init_writes_a_file_that_runs(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = ["x,y,who"] + [f"{i % 7},{'ab'[i % 2]},{'pqr'[i % 3]}" for i in range(60)]
    Path("mine.csv").write_text("\n".join(rows))
    assert main(["init", "mine.csv", "--client", "who", "--target", "y"]) == 0
    assert main(["run", "mine.toml", "rounds=1", "--quiet"]) == 0
    assert main(["init", "mine.csv", "--target", "y", "--out", "other.toml"]) == 0
    assert main(["run", "other.toml", "rounds=1", "--quiet", "partition.clients=3"]) == 0
    assert main(["init", "mine.csv", "--target", "y", "--out", "other.toml"]) == 2
    assert "is there already" in capsys.readouterr().err
    assert main(["init", "mine.csv", "--target", "z", "--out", "third.toml"]) == 2
    assert not Path("third.toml").exists()


def test_the_view_is_plain_lines_where_there_is_no_terminal(
    tiny_file: str, capsys: Capture
) -> None:
    assert main(["run", tiny_file, "--jobs", "1"]) == 0
    err = capsys.readouterr().err
    assert "fedavg seed 0" in err and "\033" not in err
