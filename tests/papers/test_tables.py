"""The papers' tables: every cell is there, and every setting is an experiment by name."""

from __future__ import annotations

import pytest

from undrift.cli import main
from undrift.errors import ConfigError
from undrift.experiment.family import (
    is_figure,
    paper_files,
    paper_settings,
    read_family,
    settings_of,
)
from undrift.experiment.spec import load
from undrift.papers.plan import Options, chosen_settings, experiments_of, methods_of
from undrift.papers.scores import SHOWS

CELLS = {
    "adabest-table2": 108,
    "comfed-table4": 16,
    "fedvra-table3": 15,
    "fedvra-table4": 10,
    "rfedavg-table1": 48,
    "rfedavg-table2": 48,
}
TABLES = [name for name, setting in paper_settings().items() if setting.family in CELLS]


def test_every_cell_of_every_table_is_there():
    tables = [name for name in paper_files() if not is_figure(name)]
    assert {f: sum(len(s.cells) for s in settings_of(f)) for f in tables} == CELLS
    assert sum(CELLS.values()) == 245


@pytest.mark.parametrize("name", paper_settings())
def test_a_setting_is_an_experiment_with_a_printed_cell_for_each_method(name):
    setting = paper_settings()[name]
    made = load(name)
    assert made == experiments_of(setting, Options())
    labels = list(dict.fromkeys(one.label for one in made))
    assert labels == list(setting.paper["methods"])
    assert set(setting.cells) == set(labels)
    assert len(made) == len(labels) * setting.paper["seeds"]
    assert len({one.folder for one in made}) == len(made)
    assert setting.paper["shows"] in SHOWS and setting.paper["ours"]


@pytest.mark.parametrize("name", TABLES)
def test_a_cell_has_as_many_numbers_as_the_table_has_columns(name):
    setting = paper_settings()[name]
    paper, made = setting.paper, load(name)[0]
    columns = len(paper["at"]) if paper["shows"] == "best" else 2 + len(paper.get("targets", []))
    assert {len(cell) for cell in setting.cells.values()} == {columns}
    if paper["shows"] == "best":
        assert paper["at"][-1] == made.rounds
    if paper["shows"] != "last" or paper.get("targets"):
        assert made.evaluate.every == 1


def test_numbers_that_the_specification_names():
    cells = {name: setting.cells for name, setting in paper_settings().items()}
    assert cells["fedvra-table3-noniid"]["fedvra"] == [73.70, 0.54, 76, 114, 191]
    assert cells["comfed-table4"]["proxyogi"][2] == 59.3
    assert cells["adabest-table2-cifar100-10pc-a0.3"]["adabest"] == [54.51, 0.35]
    assert cells["rfedavg-table2-mnist-s0"]["qfedavg"] == [74.42, 10.17]
    assert cells["rfedavg-table1-sent140-iid"]["fedprox"] == [61.41, 2.35]


def local_of(name: str, label: str):
    return next(one for one in load(name) if one.label == label).algorithm


def test_parts_change_what_the_papers_change():
    assert local_of("adabest-table2-emnist-10pc-iid", "feddyn").local.weight_decay == 1e-4
    assert local_of("adabest-table2-cifar10-10pc-iid", "feddyn").local.weight_decay == 1e-3
    assert local_of("adabest-table2-cifar10-100pc-iid", "adabest").rules[0].beta == 0.98
    assert local_of("rfedavg-table1-mnist-s0", "rfedavg").rules[0].strength == 1e-4
    assert local_of("rfedavg-table1-cifar10-s0", "rfedavg_plus").rules[0].strength == 1e-5
    assert local_of("rfedavg-table2-cifar10-s10", "fedprox").local.lr == 0.01
    assert type(local_of("rfedavg-table2-sent140-iid", "qfedavg").local).__name__ == "RmsProp"
    hlu = load("fedvra-table4-noniid-hlu")[0]
    assert hlu.work.epochs == (1, 5) and hlu.partition.alpha == 0.1
    few = load("adabest-table2-cifar10-1pc-a0.03")[0]
    assert (few.rounds, few.sampler.count, few.partition.alpha) == (1000, 1, 0.03)


def test_seeds_vary_what_the_papers_vary():
    fedvra = {tuple(one.seeds) for one in load("fedvra-table3-iid")}
    assert fedvra == {(0, i, i) for i in range(5)}
    adabest = {tuple(one.seeds) for one in load("adabest-table2-cifar10-10pc-iid")}
    assert adabest == {(i, 0, 0) for i in range(3)}


def test_a_table_is_no_single_experiment():
    with pytest.raises(ConfigError, match="undrift reproduce fedvra-table3"):
        load("fedvra-table3")


def test_names_by_table_setting_and_beginning():
    assert len(chosen_settings(["adabest-table2"])) == 27
    assert [s.name for s in chosen_settings(["fedvra-table3-noniid"])] == ["fedvra-table3-noniid"]
    assert len(chosen_settings(["adabest-table2-cifar10", "adabest-table2-cifar10-1pc"])) == 9
    with pytest.raises(ConfigError, match="Did you mean 'fedvra-table3'"):
        chosen_settings(["fedvra-tabel3"])


def test_methods_by_label_and_by_the_papers_name():
    setting = paper_settings()["comfed-table4"]
    assert methods_of(setting, ["ProxYogi", "scaffold"]) == ["proxyogi", "scaffold"]
    with pytest.raises(ConfigError, match="no method named 'moon'"):
        methods_of(setting, ["moon"])


def test_a_change_of_some_methods_of_a_sweep():
    options = Options(only=("SgdAdagrad", "NovaYogi"), changes=("algorithm.beta1=0",), seeds=1)
    found = experiments_of(paper_settings()["comfed-table4"], options)
    assert [one.label for one in found] == ["fedadagrad", "novayogi"]
    assert {one.to_table()["algorithm"]["server"]["beta1"] for one in found} == {0}


def test_another_method_in_a_cell_s_place_keeps_the_cell_s_name():
    setting = paper_settings()["rfedavg-table1-mnist-s0"]
    one, _ = experiments_of(setting, Options(only=("Scaffold",), changes=("algorithm.use=fedavg",)))
    assert one.label == "scaffold" and not one.algorithm.rules


def test_a_part_that_is_not_there_is_named(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('[paper]\nseeds = 1\nvaries = []\n[part.iid]\n[[setting]]\nparts = ["idi"]\n')
    with pytest.raises(ConfigError, match="Did you mean 'iid'"):
        read_family(path)


def test_settings_are_shown_by_name(capsys):
    assert main(["show", "adabest-table2-cifar10-10pc-a0.3"]) == 0
    out = capsys.readouterr().out
    assert 'use = "feddyn_cnn"' in out and "and 11 more of this sweep" in out
    assert main(["list", "tables"]) == 0
    assert "FedVRA (Wang et al. 2023), Table 3" in capsys.readouterr().out
