"""What stands beside a comparison: constant answers, each site alone, all data pooled, trees."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from sklearn.dummy import DummyClassifier, DummyRegressor
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

from undrift.cli import main
from undrift.comparing import compare
from undrift.errors import ConfigError, DataError
from undrift.experiment.baselines import baselines_of, boosting, fitted, keeping
from undrift.experiment.baselines.fitted import alone, constant, pooled, pooled_work
from undrift.experiment.baselines.scene import Scene, scene_of, values_of
from undrift.experiment.folder import RunFolder
from undrift.experiment.run import run
from undrift.experiment.spec import Experiment, load

from .tiny import tiny

SITES = ("Aachen", "Bonn", "Celle", "Dachau")


@pytest.fixture(scope="module")
def clinics(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four sites; nobody in Dachau is ill, and Bonn has six rows."""
    path, draw = tmp_path_factory.mktemp("clinics") / "clinics.csv", np.random.default_rng(0)
    rows = []
    for site, n in zip(SITES, (60, 6, 80, 30), strict=True):
        for _ in range(n):
            age, marker = draw.normal(60, 10), draw.normal()
            ill = site != "Dachau" and marker + draw.normal() > 0.8
            stay, visits = 5 + 3 * marker + draw.normal(), draw.poisson(np.exp(0.5 + 0.4 * marker))
            rows.append([site, f"{age:.2f}", f"{marker:.3f}", "ill" if ill else "well",
                         f"{stay:.3f}", visits])  # fmt: skip
    with path.open("w", newline="") as file:
        names = ["clinic", "age", "marker", "outcome", "stay", "visits"]
        csv.writer(file).writerows([names, *rows])
    return path


def experiment(path: Path, *changes: str, target: str = "outcome") -> Experiment:
    table: dict[str, Any] = {
        "name": "clinics",
        "rounds": 4,
        "data": {"use": "table", "path": str(path), "client": "clinic", "target": target,
                 "features": ["age", "marker"], "test_share": 0.4},
        "model": {"use": "logistic" if target == "outcome" else "linear"},
        "algorithm": {"use": "fedavg", "lr": 0.3},
        "work": {"epochs": 2, "batch": "all"},
        "task": {"dtype": "float64"},
        "engine": {"device": "cpu"},
    }  # fmt: skip
    if target != "outcome":
        table["model"] = {"use": "mlp", "hidden": 3}
    (made,) = load(table, changes)
    return made


def scene(path: Path, *changes: str, target: str = "outcome") -> Scene:
    found = scene_of(experiment(path, *changes, target=target))
    assert found is not None
    return found


# ---- by hand -------------------------------------------------------------------------------------
def descend(w: np.ndarray, b: np.ndarray, x: np.ndarray, y: np.ndarray, steps: int) -> Any:
    """Full gradient steps of a softmax regression, as a textbook has them."""
    w, b, n = w.copy(), b.copy(), len(x)
    for _ in range(steps):
        z = x @ w.T + b
        p = np.exp(z - z.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        p[np.arange(n), y] -= 1
        w, b = w - 0.3 * p.T @ x / n, b - 0.3 * p.mean(0)
    return w, b


def beginning(made: Scene) -> tuple[np.ndarray, np.ndarray]:
    named = {n: p.detach().double().numpy() for n, p in made.task.module.named_parameters()}
    (w,) = (v for v in named.values() if v.ndim == 2)
    (b,) = (v for v in named.values() if v.ndim == 1)
    return w, b


def test_alone_and_pooled_are_a_plain_loop_over_the_same_rows(clinics: Path) -> None:
    made = scene(clinics)
    examples = made.dealt.examples
    x, y = examples.train_x.double().numpy(), examples.train_y.numpy()
    tx = examples.test_x.double().numpy()
    w, b = descend(*beginning(made), x, y, 8)
    assert pooled(made)["test"].outputs.numpy() == pytest.approx(tx @ w.T + b, abs=1e-9)
    answer = alone(made)["test"]
    assert answer.rows is not None
    found = np.empty_like(tx[:, :2])
    found[answer.rows.numpy()] = answer.outputs.numpy()
    assert examples.train_clients is not None and examples.test_clients is not None
    assert sorted(answer.rows.tolist()) == list(range(len(tx)))
    for site in range(4):
        mine = examples.train_clients.numpy() == site
        w, b = descend(*beginning(made), x[mine], y[mine], 8)
        theirs = examples.test_clients.numpy() == site
        assert found[theirs] == pytest.approx(tx[theirs] @ w.T + b, abs=1e-9)


def test_numbers_of_all_sites_come_from_the_union_of_their_rows(clinics: Path) -> None:
    made = scene(clinics, "evaluate.clients=true")
    answer = alone(made)["test"]
    values, y = values_of(made, {"test": answer}), made.papers["test"].y[answer.rows]
    p = answer.outputs.softmax(1)[:, 1]
    assert values["test_auc"] == pytest.approx(sk.roc_auc_score(y, p), abs=1e-12)
    right = (answer.outputs.argmax(1) == y).double().mean()
    assert values["test_accuracy"] == pytest.approx(float(right))
    loss = torch.nn.functional.cross_entropy(answer.outputs, y)
    assert values["test_loss"] == pytest.approx(float(loss), abs=1e-12)
    assert values["client_auc_undefined"] >= 1  # Dachau
    assert 0 <= values["client_accuracy_worst"] <= values["test_accuracy"]


def test_pooled_steps_are_those_of_all_clients_together() -> None:
    work = tiny("work={steps=3, batch=5}").work
    assert pooled_work(work, 6).steps == 18
    assert pooled_work(tiny("work={epochs=3, batch=5}").work, 6).epochs == 3
    assert pooled_work(replace(work, batch=None), 6).steps == 3  # a step sees everything


# ---- constant answers ----------------------------------------------------------------------------
def test_always_the_majority_is_scikit_learns_dummy(clinics: Path) -> None:
    made = scene(clinics)
    label, answers = constant(made)
    assert label == "always 'well'"
    values, x = values_of(made, answers), np.zeros((len(made.y), 1))
    dummy = DummyClassifier(strategy="prior").fit(x, made.y)
    y = made.papers["test"].y.numpy()
    p = dummy.predict_proba(np.zeros((len(y), 1)))
    assert values["test_accuracy"] == pytest.approx(sk.accuracy_score(y, p.argmax(1)), abs=1e-12)
    assert values["test_log_loss"] == pytest.approx(sk.log_loss(y, p), abs=1e-9)
    assert values["test_brier"] == pytest.approx(sk.brier_score_loss(y, p[:, 1]), abs=1e-9)
    assert values["test_balanced_accuracy"] == values["test_auc"] == 0.5


COUNTS = ("task.loss=poisson", "data.kind=numbers", "data.standardise=false")


@pytest.mark.parametrize(
    ("target", "change", "label", "dummy"),
    [
        ("stay", "task.loss=mse", "always the mean", DummyRegressor()),
        ("stay", "task.loss=mae", "always the median", DummyRegressor(strategy="median")),
        (
            "stay",
            "task={loss='pinball', quantile=0.9}",
            "always the 0.9 quantile",
            DummyRegressor(strategy="quantile", quantile=0.9),
        ),
        ("visits", "task.loss=poisson", "always the mean", DummyRegressor()),
    ],
)
def test_always_the_same_number(
    clinics: Path, target: str, change: str, label: str, dummy: DummyRegressor
) -> None:
    found = scene(clinics, *COUNTS if target == "visits" else (change,), target=target)
    told, answers = constant(found)
    assert told == label
    values = values_of(found, answers)
    y, test = found.meaning.truths(found.y).numpy(), found.meaning.truths(found.papers["test"].y)
    dummy.fit(np.zeros((len(y), 1)), y)
    always = dummy.predict(np.zeros((len(test), 1)))
    rmse = sk.root_mean_squared_error(test, always)
    assert values["test_rmse"] == pytest.approx(rmse, rel=1e-6)
    assert values["test_mae"] == pytest.approx(sk.mean_absolute_error(test, always), rel=1e-6)
    if target == "visits":
        deviance = sk.mean_poisson_deviance(test, always)
        assert values["test_poisson_deviance"] == pytest.approx(deviance, rel=1e-6)


def test_what_nobody_can_guess_has_no_baselines() -> None:
    assert scene_of(tiny("task.target=input", "model={use='mlp', classes=5}")) is None


# ---- trees ---------------------------------------------------------------------------------------
def test_boosting_is_scikit_learns_on_the_prepared_rows(clinics: Path) -> None:
    made = scene(clinics, "seed=3")
    values = values_of(made, boosting.boosted(made))
    e = made.dealt.examples
    model = HistGradientBoostingClassifier(random_state=3).fit(e.train_x, e.train_y)
    p = model.predict_proba(e.test_x)[:, 1]
    assert values["test_auc"] == pytest.approx(sk.roc_auc_score(e.test_y, p), abs=1e-9)
    made = scene(clinics, target="stay")
    values, e = values_of(made, boosting.boosted(made)), made.dealt.examples
    model = HistGradientBoostingRegressor(random_state=0).fit(e.train_x, e.train_y[:, 0].double())
    _, std = e.info.target_scale
    rmse = sk.root_mean_squared_error(e.test_y[:, 0], model.predict(e.test_x)) * std
    assert values["test_rmse"] == pytest.approx(rmse, rel=1e-6)


def test_without_scikit_learn_one_line_says_how_to_get_it(
    clinics: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boosting, "is_installed", lambda: False)
    found = baselines_of([experiment(clinics)], tmp_path)
    assert [row.kind for row in found.rows] == ["always", "alone", "pooled"]
    assert found.notes == (boosting.MISSING,) and "undrift[boosting]" in boosting.MISSING


# ---- in the folder -------------------------------------------------------------------------------
@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the baselines that were computed; trees are left out, they are slow."""
    made: list[str] = []
    answers = keeping._answers

    def computed(scene: Scene, kind: str) -> Any:
        made.append(f"{kind} {scene.experiment.seed_number}")
        return answers(scene, kind)

    monkeypatch.setattr(keeping, "_answers", computed)
    monkeypatch.setattr(boosting, "is_installed", lambda: False)
    return made


def test_what_is_there_is_not_computed_again(
    clinics: Path, tmp_path: Path, counted: list[str]
) -> None:
    both = [experiment(clinics, f"seed={s}") for s in (0, 1)]
    first = baselines_of(both, tmp_path)
    every = [f"{kind} {s}" for s in (0, 1) for kind in ("always", "alone", "pooled")]
    assert counted == every
    assert baselines_of(both, tmp_path) == first and counted == every
    counted.clear()
    baselines_of([replace(both[0], rounds=5)], tmp_path)
    assert counted == ["alone 0", "pooled 0"]  # a constant has no rounds
    counted.clear()
    other = replace(both[1], algorithm=replace(both[1].algorithm, local=fast()))
    assert baselines_of([other, both[1]], tmp_path).rows[1].values == (first.rows[1].values[1],)
    assert counted == []  # they are those of the second variant
    (tmp_path / "baselines.json").write_text("{")
    assert baselines_of([both[1]], tmp_path).rows[2].values == (first.rows[2].values[1],)
    assert counted == ["always 1", "alone 1", "pooled 1"]


def fast() -> Any:
    return tiny("algorithm.lr=0.7").algorithm.local


def test_changed_rows_are_computed_anew(clinics: Path, tmp_path: Path, counted: list[str]) -> None:
    path = tmp_path / "copy.csv"
    path.write_text(clinics.read_text())
    baselines_of([experiment(path)], tmp_path)
    counted.clear()
    path.write_text(clinics.read_text().replace("ill", "sick"))
    found = baselines_of([experiment(path)], tmp_path)
    assert counted == ["always 0", "alone 0", "pooled 0"] and found.rows[0].label == "always 'well'"


def test_what_was_done_before_a_stop_is_kept(
    clinics: Path, tmp_path: Path, counted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(fitted, "pooled", stop)
        baselines_of([experiment(clinics)], tmp_path)
    assert not list(tmp_path.glob("*.tmp*"))
    counted.clear()
    assert len(baselines_of([experiment(clinics)], tmp_path).rows) == 3
    assert counted == ["pooled 0"]


def test_a_baseline_that_fails_stops_nothing(
    clinics: Path, tmp_path: Path, counted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise DataError("the rows are wet")

    monkeypatch.setattr(fitted, "alone", fail)
    found = baselines_of([experiment(clinics)], tmp_path)
    assert [row.kind for row in found.rows] == ["always", "pooled"]
    assert "Each site alone: none, the rows are wet" in found.notes


def test_who_gets_which(
    clinics: Path, tmp_path: Path, counted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def kinds(made: Experiment, folder: str) -> list[str]:
        counted.clear()
        baselines_of([made], tmp_path / folder)
        return [one.split()[0] for one in counted]

    dealt = "partition={use='dirichlet_client', clients=3, alpha=1.0}"
    picture = tiny(dealt, "evaluate.clients=true")
    assert kinds(picture, "a") == ["always"]
    asked = replace(picture, evaluate=replace(picture.evaluate, baselines=True))
    assert kinds(asked, "b") == ["always", "alone", "pooled"]
    monkeypatch.setattr(keeping, "MOST_SITES", 2)
    assert kinds(asked, "c") == ["always", "pooled"]
    assert kinds(experiment(clinics, "evaluate.baselines=false"), "d") == []
    monkeypatch.setattr(keeping, "MOST_ROWS", 100)
    assert kinds(experiment(clinics), "e") == ["always"]
    (note,) = baselines_of([experiment(clinics)], tmp_path / "e").notes
    assert "beyond 100 training rows (106 here): evaluate.baselines = true" in note
    assert len(kinds(experiment(clinics, "evaluate.baselines=true"), "f")) == 3


def test_the_setting_is_no_part_of_a_run(clinics: Path, tmp_path: Path) -> None:
    assert experiment(clinics, "evaluate.baselines=auto") == experiment(clinics)
    assert "baselines" not in experiment(clinics).to_toml()
    run(experiment(clinics), tmp_path / "run")
    RunFolder(tmp_path / "run").check(experiment(clinics, "evaluate.baselines=true").to_table())
    with pytest.raises(ConfigError, match="'auto', true or false, got 'all'"):
        experiment(clinics, "evaluate.baselines=all")


# ---- in a comparison -----------------------------------------------------------------------------
def test_a_useless_model_is_seen_to_be_one(
    clinics: Path, tmp_path: Path, counted: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    useless = [
        replace(experiment(clinics, f"seed={s}", "algorithm.lr=1e-9"), label="idle") for s in (0, 1)
    ]
    good = [
        replace(experiment(clinics, f"seed={s}", "algorithm.lr=3", "rounds=20"), label="good")
        for s in (0, 1)
    ]
    made = compare(useless, tmp_path / "idle", jobs=1)
    assert made.verdict()[-1] == "No variant is better than always saying 'well'."
    table = made.text().splitlines()
    assert set(table[2]) == {"-"} and table[3].startswith("always 'well'")
    assert table[4].startswith("each site alone") and table[5].startswith("all data pooled")
    mean, std = made.baselines.rows[0].last("test_accuracy")
    assert table[3].split("  ")[-1].strip() == f"{100 * mean:.1f} ± {100 * std:.1f}"
    assert f"| *always 'well'* | {100 * mean:.1f} ± {100 * std:.1f} |  |" in made.markdown()
    told = json.loads((tmp_path / "idle/comparison.json").read_text())["baselines"]
    assert [one["kind"] for one in told] == ["always", "alone", "pooled"]
    assert told[0]["metrics"]["test_accuracy"]["mean"] == mean and told[0]["seeds"] == [0, 1]
    counted.clear()
    assert main(["report", str(tmp_path / "idle")]) == 0
    assert "No variant is better" in capsys.readouterr().out and counted == []
    made = compare([*useless, *good], tmp_path / "both", metric="test_loss", jobs=1)
    assert not any("always saying" in line for line in made.verdict())


def test_report_takes_the_folders_word_where_the_data_have_gone(
    clinics: Path, tmp_path: Path, counted: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "copy.csv"
    path.write_text(clinics.read_text())
    compare([experiment(path, f"seed={s}") for s in (0, 1)], tmp_path / "out", jobs=1)
    before = json.loads((tmp_path / "out/comparison.json").read_text())
    path.unlink()
    assert main(["report", str(tmp_path / "out")]) == 0
    after = json.loads((tmp_path / "out/comparison.json").read_text())
    assert after["baselines"] == before["baselines"] and len(after["baselines"]) == 3


def test_run_of_several_seeds_tells_them(
    clinics: Path, tmp_path: Path, counted: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.toml"
    path.write_text(experiment(clinics, "rounds=1").to_toml())
    out = ["--out", str(tmp_path / "out"), "--jobs", "1", "--quiet"]
    assert main(["run", str(path), *out]) == 0
    assert "always" not in capsys.readouterr().out
    assert main(["run", str(path), "seed=0,1", *out]) == 0
    assert "always 'well': test_accuracy 0." in capsys.readouterr().out
