"""Silos that hold tables: the same preparation and the same model as a simulation's."""

from __future__ import annotations

import json
import logging
import runpy

import pytest
import torch

import undrift as fl
from federated.clinics import (
    COLUMNS,
    HEADER,
    SITES,
    Nodes,
    assert_close,
    brief,
    cells,
    deployed,
    experiment,
    furthest,
    loader_of,
    own_file,
    own_files,
    preparation,
    write,
)
from undrift.cli import main
from undrift.deploy.folder import Wanted, init
from undrift.errors import ConfigError, DataError, FederationError
from undrift.federated.project import load_silo, read_project
from undrift.federated.running import run_deployed


# ---- the same numbers ----------------------------------------------------------------------------
@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A run over silos that read their own files, and the simulation of the same experiment."""
    folder = tmp_path_factory.mktemp("done")
    project = deployed(folder)
    run_deployed(project, own_files(folder, project, folder / "state"), folder / "run")
    fl.run(project.experiment, folder / "simulated")
    return folder, project


def test_a_silos_own_file_gives_the_simulations_numbers(done):
    folder, project = done
    assert project.names == tuple(sorted(SITES))
    ours, theirs = preparation(folder / "run"), preparation(folder / "simulated")
    assert_close(ours, theirs)
    assert ours["parts"][0] == theirs["parts"][0]  # ages are whole: their sums are exact
    assert ours["parts"][2]["levels"] == theirs["parts"][2]["levels"] == ["0", "A", "B"]
    assert furthest(folder / "run", folder / "simulated") <= 1e-9
    assert not (folder / "run" / "refused.jsonl").exists()


def test_sites_are_named_where_the_model_is_judged(done):
    folder, _ = done
    told = json.loads((folder / "run" / "evaluation.json").read_text())
    assert {row["site"] for row in told["sites"]} == set(SITES)
    both = [
        [json.loads(line)["client_accuracy_worst"]
         for line in (folder / run / "rounds.jsonl").read_text().splitlines()]
        for run in ("run", "simulated")
    ]  # fmt: skip
    assert both[0] == both[1]
    assert json.loads((folder / "run" / "model.json").read_text())["client_names"] == sorted(SITES)


def test_a_silo_predicts_on_its_own_with_the_model_it_was_sent(done, tmp_path, capsys):
    folder, _ = done
    rows = write(tmp_path / "new.csv", [row[1:] for row in cells(7)][:9], HEADER[1:])
    for client in range(4):
        [model] = (folder / "state" / f"client-{client}").rglob("model.safetensors")
        assert model.stat().st_mode & 0o077 == 0
        predicted = fl.load_model(model)(rows)
        assert len(predicted) == 9 and not predicted.errors
        wanted = fl.load_model(folder / "run")(rows)
        assert abs(predicted.outputs - wanted.outputs).max() == 0
    assert main(["predict", str(model), str(rows)]) == 0
    assert "ill" in capsys.readouterr().out


def test_a_try_out_with_the_experiments_own_rows_is_the_same(done, tmp_path):
    folder, project = done

    def as_written(client):
        path = tmp_path / f"loader-{client}.py"
        path.write_text((folder / "p/silos" / f"client-{client}/loader.py").read_text()
                        .replace('return "mine.csv"',
                                 'return share(place / "experiment.toml", client)'))  # fmt: skip
        return f"{path}:load"

    nodes = Nodes(folder, project, tmp_path / "state", as_written)
    run_deployed(project, nodes, tmp_path / "run")
    assert_close(preparation(tmp_path / "run"), preparation(folder / "run"), 0)
    assert furthest(tmp_path / "run", folder / "run") == 0


@pytest.mark.parametrize("model", ["tabular_mlp", "tabular_resnet"])
def test_models_that_know_the_columns_are_the_same(model, tmp_path):
    project = deployed(tmp_path, f"model.use={model}", "rounds=1")
    run_deployed(project, own_files(tmp_path, project, tmp_path / "state"), tmp_path / "run")
    fl.run(project.experiment, tmp_path / "simulated")
    assert furthest(tmp_path / "run", tmp_path / "simulated") <= 1e-9


def test_numbers_to_predict_are_scaled_by_sums_too(tmp_path):
    columns = COLUMNS.replace('age = { kind = "number", fill = "median", indicator = true }',
                              'age = { kind = "number" }')  # fmt: skip
    columns = columns.replace('{ kind = "classes", levels = ["well", "ill"] }',
                              '{ kind = "category", levels = ["well", "ill"] }')  # fmt: skip
    settings = ["data.target=age", "data.missing_target=drop", "rounds=1"]
    project = deployed(tmp_path, *settings, columns=columns)
    run_deployed(project, own_files(tmp_path, project, tmp_path / "state"), tmp_path / "run")
    fl.run(project.experiment, tmp_path / "simulated")
    assert_close(preparation(tmp_path / "run"), preparation(tmp_path / "simulated"))
    assert preparation(tmp_path / "run")["target"]["std"] > 10
    rows = own_file(tmp_path, 1)
    ours, theirs = (fl.load_model(tmp_path / n)(rows).outputs for n in ("run", "simulated"))
    assert abs(ours - theirs).max() < 1e-9 * abs(theirs).max() and theirs.mean() > 10
    assert furthest(tmp_path / "run", tmp_path / "simulated") <= 1e-9


# ---- what cannot work ----------------------------------------------------------------------------
def test_a_table_without_columns_is_refused_with_the_next_move(tmp_path):
    with pytest.raises(ConfigError, match="undrift init"):
        init(tmp_path / "p", experiment(tmp_path, columns=""), Wanted(insecure=True))
    assert not (tmp_path / "p").exists()


def test_an_operator_without_any_table_names_the_number_of_silos(tmp_path):
    made = experiment(tmp_path)
    (tmp_path / "clinics.csv").unlink()
    with pytest.raises(DataError, match="is not there"):
        init(tmp_path / "p", made, Wanted(insecure=True))
    project = read_project(
        init(tmp_path / "p", made, Wanted(clients=3, insecure=True)) / "app/silos"
    )
    assert (project.clients, project.judge, project.names) == (3, False, ())


def test_both_sides_must_have_the_same_columns(tmp_path):
    plans = set()
    for number, more in enumerate(("", ", indicator = true")):
        folder = tmp_path / str(number)
        folder.mkdir()
        columns = COLUMNS.replace('fill = "mean"', f'fill = "mean"{more}')
        one = experiment(tmp_path, columns=columns)
        place = init(folder / "p", one, Wanted(insecure=True))
        plans.add(read_project(place / "app/silos").plan)
    assert len(plans) == 2


def test_a_silos_loader_says_how_many_rows_it_has_or_all_that_is_wrong(done, monkeypatch, capsys):
    folder, _ = done
    monkeypatch.chdir(folder / "p/silos/client-2")
    loader_of(folder, 2)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path("loader.py", run_name="__main__")
    assert not ended.value.code and "36 rows to train on" in capsys.readouterr().out
    mine = own_file(folder, 2)
    text = mine.read_text()
    try:
        mine.write_text(text.replace("dose", "does").replace("outcome", "end"))
        with pytest.raises(SystemExit, match=r"'dose'(.|\n)*'outcome'"):
            runpy.run_path("loader.py", run_name="__main__")
    finally:
        mine.write_text(text)


def test_what_a_loader_gives_must_be_what_the_federation_is_of(done, tmp_path):
    folder, project = done
    (tmp_path / "mine.py").write_text("def load(client, place): return [1, 2]\n")
    nodes = Nodes(folder, project, tmp_path, lambda client: f"{tmp_path / 'mine.py'}:load")
    with pytest.raises(FederationError, match="0 of 4 clients came"):
        run_deployed(brief(project), nodes, tmp_path / "run")
    with pytest.raises(DataError, match="made for tensors"):
        load_silo(loader_of(folder, 1), 1, folder / "p/app/silos")


def test_a_data_frame_is_a_table(done, tmp_path):
    pandas = pytest.importorskip("pandas")
    folder, project = done
    assert pandas.read_csv(own_file(folder, 0)).shape == (20, 6)
    (tmp_path / "mine.py").write_text(
        "import pandas\ndef load(client, place): "
        f"return pandas.read_csv({str(own_file(folder, 0))!r})"
    )
    from undrift.federated.project import load_rows

    found = load_rows(f"{tmp_path / 'mine.py'}:load", 0, folder, project.asked)
    wanted = load_rows(loader_of(folder, 0), 0, folder, project.asked)
    for name in project.asked.schema.names:
        if found[name].names is None:
            assert torch.equal(
                torch.tensor(found[name].values).nan_to_num(-1),
                torch.tensor(wanted[name].values).nan_to_num(-1),
            )


# ---- what goes wrong on a node -------------------------------------------------------------------
def test_bad_cells_are_named_on_the_node_and_nowhere_else(tmp_path, caplog):
    project = brief(deployed(tmp_path))
    mine = own_file(tmp_path, 1)
    lines = mine.read_text().splitlines()
    lines[3] = "4711-secret,0.001,A,yes,2024-01-01,well"
    lines[5] = "30,0.001,A,perhaps,2024-01-01,unheard"
    mine.write_text("\n".join(lines) + "\n")
    with caplog.at_level(logging.INFO, logger="undrift"):
        run_deployed(project, own_files(tmp_path, project, tmp_path / "state"), tmp_path / "run")
    said = [
        r.getMessage() for r in caplog.records if r.getMessage().startswith("client 1, round 0")
    ]
    assert "line 4, column 'age': '4711-secret'" in said[0]
    assert "line 6, column 'smoker'" in said[0] and "'unheard' is no class" in said[0]
    assert not [
        r for r in caplog.records if r.exc_info
    ]  # no traceback for what is no mistake of ours
    refused = (tmp_path / "run/refused.jsonl").read_text()
    assert "DataError" in refused and "client 1 (north)" in refused
    for path in (tmp_path / "run").rglob("*"):
        assert path.is_dir() or b"4711-secret" not in path.read_bytes(), path
    assert set(json.loads((tmp_path / "run/members.json").read_text())["sizes"]) == {"0", "2", "3"}


def test_classes_are_balanced_by_the_counts_of_all_silos(tmp_path):
    settings = ["task.class_weights=balanced", "rounds=1"]
    project = deployed(tmp_path, *settings)
    run_deployed(project, own_files(tmp_path, project, tmp_path / "state", True), tmp_path / "run")
    fl.run(project.experiment, tmp_path / "simulated")
    assert furthest(tmp_path / "run", tmp_path / "simulated") <= 1e-9
    plain = deployed(tmp_path / "plain", "rounds=1")
    fl.run(plain.experiment, tmp_path / "unweighted")
    assert furthest(tmp_path / "run", tmp_path / "unweighted") > 1e-3
