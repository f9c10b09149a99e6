"""A run's folder, or an exported file, predicts what its trainer's model says."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import undrift as fl
from undrift.errors import ChangedExperiment, ConfigError, DataError
from undrift.experiment.blueprint import Blueprint, check_preparation
from undrift.experiment.folder import RunFolder
from undrift.experiment.run import ExperimentJob
from undrift.experiment.spec import load
from undrift.experiment.world import build
from undrift.models import build as build_model
from undrift.using import Predictor
from undrift.using.export import export

from .making import COLUMNS, TABLE, packaged, prepared, spread, trained


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("runs") / "seed-0")


def rows(n: int = 7) -> torch.Tensor:
    return torch.randn(n, 5, generator=torch.Generator().manual_seed(0))


def said(folder: Path, x: torch.Tensor) -> np.ndarray:
    """Load the checkpoint into the experiment's own trainer, and ask its model."""
    experiment = load(folder)[0]
    world = build(experiment)
    assert world.trainer.load(folder / "checkpoint")
    return world.trainer.model().eval()(x).double().softmax(1).detach().numpy()


def test_a_run_predicts_what_its_trainers_model_says(folder: Path) -> None:
    found = fl.load_model(folder)(rows())
    assert np.abs(found.probabilities - said(folder, rows())).max() < 1e-7
    assert found.classes == [str(k) for k in said(folder, rows()).argmax(1)]
    assert found.errors == {} and list(found.numbers) == list(range(7))


def test_more_rows_than_a_batch_stay_in_order(folder: Path) -> None:
    model, x = fl.load_model(folder), rows(2500)
    whole = model(x).probabilities
    assert np.abs(whole[2400:] - model(x[2400:]).probabilities).max() < 1e-7
    assert np.abs(whole - said(folder, x)).max() < 1e-7
    assert len(model(x[:0])) == 0 and model(x[:0]).probabilities.shape == (0, 3)


def test_a_run_that_was_stopped_predicts_with_its_checkpoint(folder: Path, tmp_path: Path) -> None:
    trained(tmp_path / "a", "rounds=1")
    (longer,) = load(TABLE, ["rounds=3"])
    RunFolder(tmp_path / "a").begin(longer.to_table())  # it is to go on, and is not complete
    model = fl.load_model(tmp_path / "a")
    assert "is not complete: this is its model after round 1 of 3" in model.package.note
    assert np.abs(model(rows()).probabilities - said(tmp_path / "a", rows())).max() < 1e-7
    assert fl.load_model(folder).package.note == ""


def test_data_are_not_needed_and_old_runs_are_asked_for_them(folder: Path, tmp_path: Path) -> None:
    old, x = trained(tmp_path / "old"), rows()
    (old / "model.json").unlink()
    again = fl.load_model(old)(x).probabilities
    assert np.array_equal(again, fl.load_model(folder)(x).probabilities)


def test_a_table_that_has_changed_is_not_taken_for_the_training_data(tmp_path: Path) -> None:
    path, place = tmp_path / "t.csv", tmp_path / "a"
    lines = [f"{'ab'[i % 2]},{i},{'no' if i % 3 else 'yes'}" for i in range(20)]
    path.write_text("\n".join(["site,age,y", *lines]))
    data = {"use": "table", "path": str(path), "client": "site", "target": "y"}
    fl.run(load({**TABLE, "data": data, "model": "logistic"})[0], place)
    told = fl.load_model(place)({"age": [3]}).probabilities
    (place / "preparation.json").unlink()
    assert np.array_equal(fl.load_model(place)({"age": [3]}).probabilities, told)
    path.write_text("\n".join(["site,age,y", *lines[:15]]))
    with pytest.raises(ChangedExperiment):
        fl.load_model(place)


@pytest.mark.parametrize(
    ("changes", "shape"),
    [
        (["data=digits", "partition.use=iid", "partition.clients=4", "rounds=1"], (1, 8, 8)),
        (["task.dtype=float64"], (5,)),
        (["model={use='tabular_resnet', width=4}"], (5,)),
    ],
)  # fmt: skip
def test_any_network_of_the_catalogue_predicts(
    changes: list[str], shape: tuple[int, ...], tmp_path: Path
) -> None:
    base = {**TABLE, "model": "mlp"}
    experiment = load(base, changes)[0]
    fl.run(experiment, tmp_path / "a")
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1))
    assert np.abs(
        fl.load_model(tmp_path / "a")(x).probabilities - said(tmp_path / "a", x)
    ).max() < (1e-6)


def test_an_autoencoder_gives_its_outputs(tmp_path: Path) -> None:
    changes = ["model={use='autoencoder', hidden=3}", "task.target=input"]
    found = fl.load_model(trained(tmp_path / "a", *changes))(rows())
    assert found.values.shape == (7, 5) and found.class_names == ()
    assert found.header == ["row", *(f"value_{k}" for k in range(5)), "error"]


def test_text_comes_back_as_whole_numbers(tmp_path: Path) -> None:
    blueprint = Blueprint(
        "shakespeare_lstm", {"classes": 9, "hidden": 4}, (6,), True, "probabilities",
        tuple("abcdefghi"),
    )  # fmt: skip
    tensors = build_model("shakespeare_lstm", 0, classes=9, hidden=4).state_dict()
    model = Predictor(fl.using.Package(blueprint, None, tensors, {}, "here"))
    assert model(torch.zeros(2, 6, dtype=torch.uint8)).probabilities.shape == (2, 9)
    with pytest.raises(DataError, match="reads whole numbers"):
        model(torch.zeros(2, 6))


def test_rows_with_nan_have_an_error_and_the_others_their_prediction(folder: Path) -> None:
    x = rows()
    x[2, 1], x[5, 0] = float("nan"), float("inf")
    model = fl.load_model(folder)
    found, clean = model(x), model(rows())
    assert found.errors == dict.fromkeys((2, 5), "it holds NaN or infinity")
    assert found.classes[2] is None and np.isnan(found.probabilities[[2, 5]]).all()
    good = [0, 1, 3, 4, 6]
    assert np.array_equal(found.probabilities[good], clean.probabilities[good])
    assert found.summary() == "7 rows, 2 with errors: it holds NaN or infinity (2)"


def test_an_output_that_overflows_is_an_error_of_its_row() -> None:
    package = packaged("count")
    with torch.no_grad():
        package.tensors["head.weight"].fill_(1e30)
    x = torch.ones(2, package.blueprint.shape[0])
    found = Predictor(package)(x)
    assert found.errors == dict.fromkeys((0, 1), "the model's output is not finite")


def test_dropout_is_off() -> None:
    package = spread(packaged())
    settings = {**package.blueprint.settings, "dropout": 0.5}
    dropping = replace(package, blueprint=replace(package.blueprint, settings=settings))
    wanted = Predictor(package)(COLUMNS).probabilities
    assert np.array_equal(Predictor(dropping)(COLUMNS).probabilities, wanted)


def test_a_diverged_model_is_refused() -> None:
    package = packaged()
    with torch.no_grad():
        package.tensors["fc1.weight"][0, 0] = float("nan")
    with pytest.raises(ConfigError, match=r"diverged, fc1\.weight is not finite"):
        Predictor(package)


# ------------------------------------------------------------------------------------- tables
def test_rows_of_a_table_are_prepared_as_in_training() -> None:
    frame, preparation = prepared()
    package = spread(packaged())
    x = torch.from_numpy(preparation.encode(frame))
    wanted = package.module()(x).double().softmax(1).detach().numpy()
    found = Predictor(package)({n: v for n, v in COLUMNS.items() if n != "outcome"})
    assert np.abs(found.probabilities - wanted).max() < 1e-7
    assert found.class_names == ("ill", "well") and found.target == "outcome"
    prepared_rows = Predictor(package)(x)  # a tensor holds prepared features
    assert np.array_equal(prepared_rows.probabilities, found.probabilities)


def test_a_file_a_frame_and_columns_say_the_same(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    model = Predictor(spread(packaged()))
    path = tmp_path / "new.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["more", *COLUMNS])  # a further column is not looked at
        writer.writerows((1, *row) for row in zip(*COLUMNS.values(), strict=True))
    by_columns, by_file = model(COLUMNS), model(path)
    assert np.array_equal(by_columns.probabilities, by_file.probabilities)
    assert list(by_file.numbers) == list(range(2, 10))  # lines of the file
    by_frame = model(pandas.DataFrame(COLUMNS))
    assert np.array_equal(by_columns.probabilities, by_frame.probabilities)


def test_no_row_is_dropped_and_unknown_levels_count_as_other() -> None:
    new = {
        "age": [40, "old", 40, float("inf")],
        "blood": ["A", "A", "never seen", "B"],
        "smoker": ["yes", "no", "maybe", "no"],
        "visited": ["2024-01-05", "2024-01-05", "2024-01-05", "soon"],
    }
    model = Predictor(spread(packaged()))
    found = model(new)
    assert len(found) == 4 and sorted(found.errors) == [1, 2, 3]
    for row, words in ((1, ["'age'", "'old'"]), (2, ["'smoker'", "'maybe'"]), (3, ["'visited'"])):
        assert all(word in found.errors[row] for word in words), found.errors[row]
    assert np.isnan(found.probabilities[1:]).all()
    alone = model({name: values[:1] for name, values in new.items()})
    assert np.array_equal(found.probabilities[:1], alone.probabilities)
    other = model({"age": [40], "blood": ["never seen"], "smoker": ["no"], "visited": [None]})
    assert other.errors == {} and np.isfinite(other.probabilities).all()


def test_numbers_come_back_in_their_own_units() -> None:
    frame, preparation = prepared("number")
    package = packaged("number")
    x = torch.from_numpy(preparation.encode(frame))
    outputs = package.module()(x).double().detach().numpy()[:, 0]
    wanted = [float(v) * np.std(range(8)) * 25 + 1087.5 for v in outputs]
    assert np.allclose(Predictor(package)(COLUMNS).values, wanted, rtol=1e-12)


def test_counts_come_back_as_rates() -> None:
    frame, preparation = prepared("count")
    package = packaged("count")
    outputs = package.module()(torch.from_numpy(preparation.encode(frame))).double()
    found = Predictor(package)(COLUMNS)
    assert np.allclose(found.values, np.exp(outputs.detach().numpy()[:, 0]), rtol=1e-12)
    assert found.header == ["row", "value", "error"]


# ---------------------------------------------------------------------------------- what is kept
def test_a_run_goes_on_only_with_the_preparation_that_it_began_with(tmp_path: Path) -> None:
    place = RunFolder(trained(tmp_path / "a"))
    kept = {"preparation.json": prepared()[1].to_json()}
    place.keep(kept)
    check_preparation(place, kept)
    other = json.loads(json.dumps(kept))
    other["preparation.json"]["parts"][0]["fill"] = 40.0
    with pytest.raises(ChangedExperiment, match=r"column 'age', fill, was \d+\.\d+, is 40\.0 now"):
        check_preparation(place, other)
    check_preparation(RunFolder(tmp_path / "new"), other)


def test_what_a_run_keeps_is_written_before_its_first_round(tmp_path: Path) -> None:
    class Stopped(Exception):
        pass

    class Stop:
        def started(self, run: object, past: object) -> None:
            raise Stopped

        def round(self, run: object, record: object) -> None: ...
        def failed(self, run: object, error: object) -> None: ...
        def finished(self, run: object, history: object) -> None: ...
        def close(self) -> None: ...

    with pytest.raises(Stopped):
        fl.run(load(TABLE)[0], tmp_path / "a", listeners=[Stop()])
    told = json.loads((tmp_path / "a" / "model.json").read_text())
    assert told["use"] == "mlp" and told["settings"] == {"inputs": 5, "classes": 3, "hidden": 4}
    assert Blueprint.from_json(told, "here").clients == 4
    with pytest.raises(ConfigError, match="has no checkpoint yet"):
        fl.load_model(tmp_path / "a")


def test_blocks_are_the_categories_of_the_preparation() -> None:
    from undrift.experiment.world import _blocks

    assert _blocks(prepared()[1]) == [1, 1, 4, 1, 1, 1, 1]


def test_a_network_of_ones_own_needs_trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nets.py").write_text(
        "from torch import nn\n\n\ndef small(inputs, classes):\n"
        "    return nn.Sequential(nn.Linear(inputs, 3), nn.Linear(3, classes))\n"
    )
    monkeypatch.chdir(tmp_path)
    own = {**TABLE, "model": {"use": "nets:small"}}
    fl.run(load(own, trust=True)[0], tmp_path / "a")
    with pytest.raises(ConfigError, match=r"nets:small.*trust"):
        fl.load_model(tmp_path / "a")
    found = fl.load_model(tmp_path / "a", trust=True)(rows())
    with pytest.raises(ConfigError, match=r"nets:small.*trust"):
        export(tmp_path / "a", tmp_path / "a.safetensors")
    export(tmp_path / "a", tmp_path / "a.safetensors", trust=True)
    with pytest.raises(ConfigError, match=r"nets:small.*trust"):
        fl.load_model(tmp_path / "a.safetensors")
    again = fl.load_model(tmp_path / "a.safetensors", trust=True)(rows())
    assert np.array_equal(found.probabilities, again.probabilities)


def test_a_job_of_a_trainer_keeps_nothing() -> None:
    assert dict(ExperimentJob(load(TABLE)[0]).kept) == {}
