"""Metrics that an experiment asks for: in records, by site, and in evaluation.json."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as sk

import undrift as fl
from undrift.cli import main
from undrift.comparing import compare
from undrift.core.losses import Focal
from undrift.errors import CheckpointError, ConfigError, DataError
from undrift.experiment.batch import run_together
from undrift.experiment.folder import RunFolder
from undrift.experiment.pool import run_all
from undrift.experiment.run import run
from undrift.experiment.spec import Experiment, load
from undrift.experiment.world import World, build

from .test_run import Recorder
from .tiny import tiny

SITES = ("Aachen", "Bonn", "Celle", "Dachau")


@pytest.fixture(scope="module")
def clinics(tmp_path_factory) -> Path:
    """Four sites; nobody in Dachau is ill.  `stay` is a number of days, `visits` a count."""
    path, draw = tmp_path_factory.mktemp("clinics") / "clinics.csv", np.random.default_rng(0)
    rows = []
    for site, n in zip(SITES, (60, 40, 80, 30), strict=True):
        for _ in range(n):
            age, marker = draw.normal(60, 10), draw.normal()
            ill = site != "Dachau" and marker + draw.normal() > 0.8
            stay = 5 + 3 * marker + draw.normal()
            visits = draw.poisson(np.exp(0.5 + 0.4 * marker))
            rows.append([site, f"{age:.2f}", f"{marker:.3f}", "ill" if ill else "well",
                         f"{stay:.3f}", visits])  # fmt: skip
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(
            [["clinic", "age", "marker", "outcome", "stay", "visits"], *rows]
        )
    return path


def experiment(path: Path, *changes: str, target: str = "outcome") -> Experiment:
    table: dict[str, Any] = {
        "name": "clinics",
        "rounds": 3,
        "data": {"use": "table", "path": str(path), "client": "clinic", "target": target,
                 "features": ["age", "marker"], "test_share": 0.4},
        "model": {"use": "mlp", "hidden": 4},
        "algorithm": {"use": "fedavg", "lr": 0.3},
        "work": {"steps": 5, "batch": 10},
        "engine": {"device": "cpu"},
    }  # fmt: skip
    (made,) = load(table, changes)
    return made


def scores_of(world: World) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Judge the world's own model in plain torch: outputs, targets, names of sites."""
    examples = world.dealt.examples
    with torch.no_grad():
        outputs = world.trainer.model()(examples.test_x).double()
    assert examples.test_clients is not None
    names = np.array(examples.info.client_names)[examples.test_clients.numpy()]
    return outputs.numpy(), examples.test_y.numpy(), names


def test_asked_metrics_are_in_every_judged_record(clinics: Path) -> None:
    asked = 'evaluate.metrics=["auc", "brier", "pr_auc"]'
    made = experiment(clinics, asked, "evaluate.every=2", "evaluate.clients=true", "rounds=5")
    world = build(made)
    records = [world.measure.record(world.trainer.round(), last=i == 4) for i in range(5)]
    assert ["test_auc" in r for r in records] == [False, True, False, True, True]
    outputs, y, sites = scores_of(world)
    p = torch.from_numpy(outputs).softmax(1).numpy()[:, 1]
    last = records[-1]
    assert last["test_auc"] == pytest.approx(sk.roc_auc_score(y, p), abs=1e-9)
    assert last["test_brier"] == pytest.approx(sk.brier_score_loss(y, p), abs=1e-9)
    assert last["test_average_precision"] == pytest.approx(sk.average_precision_score(y, p))
    each = [sk.roc_auc_score(y[sites == s], p[sites == s]) for s in SITES[:3]]
    assert last["client_auc_undefined"] == 1  # Dachau
    assert last["client_auc_mean"] == pytest.approx(np.mean(each), abs=1e-9)
    assert last["client_auc_worst"] == pytest.approx(min(each), abs=1e-9)
    briers = [((p - y)[sites == s] ** 2).mean() for s in SITES]
    assert last["client_brier_worst10"] == pytest.approx(max(briers), abs=1e-9)
    assert "client_brier_undefined" not in last
    assert {"test_accuracy", "client_accuracy_worst"} <= set(last)


def test_evaluation_json_has_every_metric_curves_and_sites_by_name(clinics, tmp_path) -> None:
    made = experiment(clinics, "evaluate.metrics=auc")
    run(made, tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    found, world = folder.evaluation(), build(made)
    assert found is not None and world.trainer.load(folder.checkpoint)
    outputs, y, sites = scores_of(world)
    p = torch.from_numpy(outputs).softmax(1).numpy()
    assert (found["model"], found["round"], found["examples_of"]) == ("cloud", 3, "test")
    assert found["classes"] == list(world.dealt.examples.info.class_names)
    assert found["confusion"] == sk.confusion_matrix(y, p.argmax(1)).tolist()
    expected = {"auc": sk.roc_auc_score(y, p[:, 1]), "log_loss": sk.log_loss(y, p)}
    assert {n: found["metrics"][n] for n in expected} == pytest.approx(expected, abs=1e-9)
    assert set(found["metrics"]) == {
        *("auc", "accuracy", "balanced_accuracy", "f1", "average_precision", "log_loss"),
        *("brier", "ece"),
    }
    (curve,) = found["roc"]
    assert curve["class"] == "well" and curve["x"][0] == 0.0 and curve["y"][-1] == 1.0
    assert len(curve["thresholds"]) == len(curve["x"]) and curve["thresholds"][0] is None
    assert sum(found["calibration"]["examples"]) == found["examples"] == len(y)
    rows = {row["site"]: row for row in found["sites"]}
    assert set(rows) == set(SITES) and rows["Dachau"]["auc"] is None
    assert found["sites"][-1]["site"] == "Dachau"  # where nothing is defined comes last
    aucs = [row["auc"] for row in found["sites"][:-1]]
    assert aucs == sorted(aucs)
    for site, row in rows.items():
        mine = sites == site
        assert row["examples"] == mine.sum()
        assert row["accuracy"] == pytest.approx((p.argmax(1) == y)[mine].mean())
    history = folder.history()
    assert history.last("test_auc") == found["metrics"]["auc"]
    assert not any(n.startswith("client_a") for n in history.metrics)  # nobody asked


def test_an_old_run_is_evaluated_and_prints_its_sites(clinics, tmp_path, capsys) -> None:
    made = experiment(clinics)
    run(made, tmp_path / "run")
    path = tmp_path / "run/evaluation.json"
    written = path.read_text()
    path.unlink()
    assert main(["evaluate", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    assert path.read_text() == written
    assert "test_auc: 0." in out and "Sites by accuracy, the worst first:" in out
    lines = out.split("worst first:\n")[1].splitlines()
    assert lines[0].split()[:3] == ["site", "examples", "accuracy"]
    assert sorted(line.split()[0] for line in lines[1:]) == sorted(SITES)
    shown = [float(line.split()[2]) for line in lines[1:]]
    assert shown == sorted(shown)
    assert next(line for line in lines if "Dachau" in line).split()[5] == "-"  # its AUC
    assert main(["evaluate", str(tmp_path / "run"), "evaluate.metrics=brier", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == json.loads(path.read_text()) and next(iter(told["metrics"])) == "brier"
    worst_first = [row["brier"] for row in told["sites"]]
    assert worst_first == sorted(worst_first, reverse=True)


def test_numbers_are_judged_in_their_own_units(clinics, tmp_path) -> None:
    made = experiment(clinics, "evaluate.metrics=rmse,pinball_0.9", target="stay")
    world = build(made)
    record = world.measure.record(world.trainer.round(), last=True)
    outputs, y, _ = scores_of(world)
    mean, std = world.dealt.examples.info.target_scale
    assert 4 < mean < 6 and 2 < std < 5
    own, truth = outputs[:, 0] * std + mean, y[:, 0].astype(float) * std + mean
    assert record["test_rmse"] == pytest.approx(sk.root_mean_squared_error(truth, own), abs=1e-9)
    pinball = sk.mean_pinball_loss(truth, own, alpha=0.9)
    assert record["test_pinball_0.9"] == pytest.approx(pinball, abs=1e-9)
    whole = world.measure.whole()
    assert whole is not None and "roc" not in whole and whole["kind"] == "numbers"
    assert whole["metrics"]["r2"] == pytest.approx(sk.r2_score(truth, own), abs=1e-9)
    assert [row["rmse"] for row in whole["sites"]] == sorted(
        (row["rmse"] for row in whole["sites"]), reverse=True
    )


def test_counts_are_judged_as_counts(clinics) -> None:
    changes = (
        "task.loss=poisson",
        "data.standardise=false",
        "data.kind=numbers",
        "algorithm.lr=0.0001",
    )
    made = experiment(clinics, *changes, "evaluate.metrics=poisson_deviance,mae", target="visits")
    world = build(made)
    record = world.measure.record(world.trainer.round(), last=True)
    outputs, y, _ = scores_of(world)
    mu = np.exp(outputs[:, 0])
    expected = sk.mean_poisson_deviance(y[:, 0].astype(float), mu)
    assert record["test_poisson_deviance"] == pytest.approx(expected, rel=1e-9)
    assert record["test_mae"] == pytest.approx(np.abs(y[:, 0] - mu).mean(), rel=1e-9)


def test_metrics_that_the_targets_do_not_have_are_refused_before_training(clinics) -> None:
    with pytest.raises(ConfigError, match=r"evaluate.metrics = \['rmse'\].*choose from accuracy"):
        build(experiment(clinics, "evaluate.metrics=auc,rmse"))
    with pytest.raises(ConfigError, match=r"\['auc'\]: targets that are numbers.*rmse, mae, r2"):
        build(experiment(clinics, "evaluate.metrics=auc", target="stay"))
    for wrong, told in (
        ("evaluate.metrics=aoc", "Did you mean 'auc'"),
        ("evaluate.metrics=auc,roc_auc", "each metric once"),
        ("evaluate.metrics=3", "list of names"),
    ):
        with pytest.raises(ConfigError, match=told):
            experiment(clinics, wrong)


def test_a_list_of_metrics_is_no_sweep_and_reads_back(clinics) -> None:
    made = experiment(clinics, 'evaluate.metrics=["auc", "f1"]', "task.class_weights=[1, 4]")
    assert made.evaluate.metrics == ("auc", "f1") and made.task.class_weights == (1.0, 4.0)
    assert Experiment.from_toml(made.to_toml()) == made
    plain = experiment(clinics)
    assert "metrics" not in plain.to_table()["evaluate"]  # folders of before go on
    assert not {"gamma", "quantile", "class_weights"} & set(plain.to_table()["task"])


def test_comparisons_rank_by_an_asked_metric(clinics, tmp_path) -> None:
    runs = [experiment(clinics, "evaluate.metrics=auc", f"seed={s}") for s in (0, 1)]
    made = compare(runs, tmp_path, metric="test_auc", jobs=1)
    assert made.metric == "test_auc" and "auc" in made.text() and not made.percent


ASKED = ('evaluate.metrics=["auc"]', "evaluate.clients=true")


def test_a_fleet_has_the_numbers_of_runs_alone(clinics, tmp_path) -> None:
    runs = [experiment(clinics, *ASKED, f"seed={s}") for s in (0, 1)]
    fleet = run_together([(r, tmp_path / f"fleet{i}") for i, r in enumerate(runs)])
    for i, one in enumerate(runs):
        alone = run(one, tmp_path / f"alone{i}").curve("client_auc_worst")
        assert fleet[i].curve("client_auc_worst")[1] == pytest.approx(alone[1])
        rows = [RunFolder(tmp_path / f"{n}{i}").evaluation()["sites"] for n in ("alone", "fleet")]
        assert [r["auc"] for r in rows[0]] == pytest.approx([r["auc"] for r in rows[1]])


@pytest.mark.slow
def test_workers_have_the_numbers_of_runs_alone(clinics, tmp_path) -> None:
    runs = [experiment(clinics, *ASKED, f"seed={s}") for s in (0, 1)]
    for one, history in zip(runs, run_all(runs, tmp_path / "pool", jobs=2), strict=True):
        alone = run(one, tmp_path / f"alone{one.seed}")
        assert history["client_auc_worst"] == alone["client_auc_worst"]
        whole = [RunFolder(p).evaluation() for p in (tmp_path / "pool" / one.folder,
                                                     tmp_path / f"alone{one.seed}")]  # fmt: skip
        assert whole[0] is not None and whole[0] == whole[1]


def test_a_longer_run_renews_its_evaluation(clinics, tmp_path) -> None:
    run(experiment(clinics), tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        stop = Recorder(4, KeyboardInterrupt)
        run(experiment(clinics, "rounds=5"), tmp_path / "run", listeners=[stop])
    assert RunFolder(tmp_path / "run").evaluation() is None  # it was that of round 3
    run(experiment(clinics, "rounds=5"), tmp_path / "run")
    found = RunFolder(tmp_path / "run").evaluation()
    run(experiment(clinics, "rounds=5"), tmp_path / "straight")
    assert found == RunFolder(tmp_path / "straight").evaluation()
    assert found is not None and found["round"] == 5


def test_sites_without_names_have_numbers_and_their_own_test_examples(tmp_path) -> None:
    world = build(tiny("hold.client_test=0.25", "evaluate.metrics=auc"))
    record = world.measure.record(world.trainer.round(), last=True)
    whole = world.measure.whole()
    assert whole is not None and whole["sites_of"] == "own" and whole["examples_of"] == "test"
    assert sorted(row["site"] for row in whole["sites"]) == list("012345")
    assert {"own_auc", "test_auc", "client_auc_mean"} <= set(record)


def test_a_trainer_of_ones_own_can_be_judged_by_metrics(tmp_path) -> None:
    x, y = torch.randn(40, 3), torch.randint(0, 2, (40,))
    data = fl.Federation.of([(x, y)])

    def judged(loss, **settings):
        task = fl.Task(torch.nn.Linear(3, 2), loss)
        trainer = fl.Trainer(task, data, fl.fedavg(0.1))
        evaluate = fl.Evaluation(metrics=("auc",))
        return run(trainer, tmp_path / settings["to"], rounds=2, test=(x, y), evaluate=evaluate)

    assert 0 <= judged("focal", to="a").last("test_auc") <= 1
    assert (tmp_path / "a/evaluation.json").is_file()

    def own(value, y):
        return torch.nn.functional.cross_entropy(value, y, reduction="none")

    with pytest.raises(ConfigError, match="no known meaning"):
        judged(own, to="b")


def test_a_model_that_diverged_has_no_metric_and_a_sound_file(clinics, tmp_path) -> None:
    made = experiment(clinics, "evaluate.metrics=rmse", "algorithm.lr=1e30", target="stay")
    run(made, tmp_path / "run")
    text = (tmp_path / "run/evaluation.json").read_text() + (
        tmp_path / "run/rounds.jsonl"
    ).read_text()
    assert "NaN" not in text and "Infinity" not in text
    found = RunFolder(tmp_path / "run").evaluation()
    assert found is not None


# ---- losses ----------------------------------------------------------------------------------
def test_balanced_weights_count_what_clients_train_on(clinics) -> None:
    made = experiment(clinics, "task.class_weights=balanced", "hold.client_test=0.3")
    world = build(made)
    y = world.dealt.examples.train_y[np.concatenate(world.dealt.parts)]
    counts = [int((y == c).sum()) for c in (0, 1)]
    expected = [len(y) / (2 * n) for n in counts]
    loss: Any = world.trainer.task.loss
    assert loss.loss.weight.tolist() == pytest.approx(expected, rel=1e-6)
    record = world.measure.record(world.trainer.round(), last=True)
    assert 0 <= record["test_accuracy"] <= 1
    focal = build(experiment(clinics, "task.loss=focal", "task.gamma=1.5",
                             "task.class_weights=[1, 4]")).trainer.task.loss  # fmt: skip
    assert isinstance(focal, Focal) and focal.gamma == 1.5 and focal.weight.tolist() == [1, 4]


@pytest.mark.parametrize("loss", ["auto", "focal"])
def test_engines_agree_on_weighted_runs(clinics, loss: str) -> None:
    changes = ("task.class_weights=balanced", f"task.loss={loss}", "task.dtype=float64")
    ends = []
    for engine in ("vectorised", "reference"):
        world = build(experiment(clinics, *changes, f"engine.use={engine}"))
        world.trainer.run(2)
        ends.append(world.trainer.server.w)
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-12)


WRONG = [
    ("outcome", ["task.loss=mae"], "needs numbers; these targets are classes"),
    ("outcome", ["task.loss=poisson"], "needs counts; these targets are classes"),
    ("stay", ["task.loss=focal"], "needs classes; these targets are numbers"),
    ("stay", ["task.loss=poisson"], "standardised"),
    ("stay", ["task.class_weights=balanced"], "needs classes"),
    ("outcome", ["task.class_weights=[1, 2, 3]"], "3 weights for 2 classes"),
    ("outcome", ["task.class_weights=[0, 0]"], "at least one above 0"),
    ("outcome", ["task.class_weights=[1, -1]"], "0 or more"),
    ("outcome", ["task.class_weights=equal"], "write 'balanced'"),
    ("outcome", ["task.gamma=1"], "task.gamma belongs to task.loss = 'focal'"),
    ("outcome", ["task.loss=focal", "task.gamma=-1"], "must not be below 0"),
    ("stay", ["task.quantile=0.5"], "belongs to task.loss = 'pinball'"),
    ("stay", ["task.loss=pinball", "task.quantile=1"], "between 0 and 1"),
    ("stay", ["task.loss=mse", "task.class_weights=balanced"], "class_weights belongs to"),
]


@pytest.mark.parametrize(("target", "changes", "told"), WRONG)
def test_losses_that_do_not_fit_are_refused(clinics, target, changes, told) -> None:
    with pytest.raises(ConfigError, match=told):
        build(experiment(clinics, *changes, target=target))


def test_numbers_that_are_no_counts_are_refused(clinics) -> None:
    changes = ("task.loss=poisson", "data.standardise=false")
    with pytest.raises(DataError, match=r"needs counts; \d+ of \d+ training targets are not"):
        build(experiment(clinics, *changes, target="stay"))


@pytest.mark.parametrize("loss", ["mae", "huber", "pinball"])
def test_losses_of_numbers_learn(clinics, loss: str) -> None:
    changes = [f"task.loss={loss}", "rounds=10"]
    changes += ["task.quantile=0.9"] if loss == "pinball" else []
    history = run(experiment(clinics, *changes, target="stay"))
    assert history.last("test_loss") < 0.8 * history["test_loss"][0]


def test_declared_counts_learn_by_their_likelihood(clinics) -> None:
    made = experiment(clinics, "data.kind=count", "evaluate.metrics=poisson_deviance,rmse",
                      "rounds=20", "algorithm.lr=0.02", target="visits")  # fmt: skip
    world = build(made)
    meaning = world.measure.meaning
    assert world.trainer.task.loss_name == "poisson"
    assert meaning is not None and (meaning.kind, meaning.log, meaning.std) == ("counts", True, 1.0)
    history = run(made)
    assert history.last("test_poisson_deviance") < 0.8 * history["test_poisson_deviance"][0]
    squared = build(experiment(clinics, "data.kind=count", "task.loss=mse", target="visits"))
    meaning = squared.measure.meaning
    assert meaning is not None and (meaning.kind, meaning.log) == ("counts", False)


def test_a_folder_that_nobody_may_write_to_is_judged_all_the_same(
    clinics, tmp_path, capsys, monkeypatch
) -> None:
    run(experiment(clinics, "rounds=1"), tmp_path / "run")

    def refused(*_: Any) -> None:
        raise CheckpointError("cannot write evaluation.json: read-only file system")

    monkeypatch.setattr(RunFolder, "write_evaluation", refused)
    assert main(["evaluate", str(tmp_path / "run"), "--json"]) == 0
    out, told = capsys.readouterr()
    assert json.loads(out)["round"] == 1 and "read-only" in told


def test_many_sites_are_printed_up_to_some(clinics, tmp_path, capsys, monkeypatch) -> None:
    run(experiment(clinics, "rounds=1"), tmp_path / "run")
    monkeypatch.setattr("undrift.cli.folders.MOST_SITES", 3)
    assert main(["evaluate", str(tmp_path / "run")]) == 0
    assert "... and 1 more, see --json" in capsys.readouterr().out
