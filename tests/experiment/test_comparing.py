"""What `compare` says early, and what a folder takes for the same run."""

from __future__ import annotations

import pytest

from experiment.tiny import tiny
from undrift.cli import main
from undrift.comparing import compare
from undrift.errors import ConfigError
from undrift.experiment.folder import ChangedExperiment, RunFolder
from undrift.experiment.pool import run_all


@pytest.mark.parametrize("every", [1, 2])
def test_a_metric_that_nobody_tells_of_is_refused_when_the_first_round_was_judged(tmp_path, every):
    wrong = tiny(f"evaluate.every={every}", "rounds=5")
    with pytest.raises(ConfigError, match=r"named 'test_acuracy'\. Did you mean 'test_accuracy'"):
        compare([wrong], tmp_path, metric="test_acuracy", jobs=1)
    (run,) = tmp_path.glob("*/seed-*")
    assert len(RunFolder(run).history()) == every
    found = compare([wrong], tmp_path, metric="test_loss", jobs=1)  # goes on from there
    assert found.metric == "test_loss" and len(RunFolder(run).history()) == 5


def test_whatever_the_machine_has_is_the_device_it_has(tmp_path):
    run_all([tiny("engine.device=auto", "rounds=2")], tmp_path, jobs=1)
    (history,) = run_all([tiny("engine.device=cpu", "rounds=4")], tmp_path, jobs=1)
    assert len(history) == 4
    (run,) = tmp_path.glob("*/seed-*")
    folder, now = RunFolder(run), tiny("engine.device=cpu").to_table()
    folder.check({**now, "engine": {**now["engine"], "device": "auto"}})
    folder._write_table(now)
    with pytest.raises(ChangedExperiment, match=r"engine\.device"):
        folder.check({**now, "engine": {**now["engine"], "device": "cuda"}})


@pytest.mark.parametrize("metric", [None, "test_loss", "test_accuracy"])
@pytest.mark.parametrize("target", [None, 0.4])
def test_a_report_compares_as_the_comparison_did(tmp_path, metric, target):
    runs = [tiny("rounds=2", "evaluate.target=0.3", f"seed={s}") for s in (0, 1)]
    made = compare(runs, tmp_path, metric=metric, target=target, jobs=1)
    kept = (tmp_path / "comparison.json").read_text()
    given = [] if metric is None else ["--metric", metric]
    given += [] if target is None else ["--target", str(target)]
    assert main(["report", str(tmp_path), *given]) == 0
    assert (tmp_path / "comparison.json").read_text() == kept
    assert made.target == (target or (None if metric == "test_loss" else 0.3))


@pytest.mark.parametrize(
    ("metric", "told"),
    [("test_f1", r"test_f1 is not measured: add 'f1' to `metrics`"), ("auc", r"e\.g\. test_auc")],
)
def test_a_metric_that_nobody_measures_is_refused_before_training(tmp_path, metric, told):
    with pytest.raises(ConfigError, match=told):
        compare([tiny()], tmp_path / "out", metric=metric)
    assert not (tmp_path / "out").exists()
