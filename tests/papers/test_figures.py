"""Figures: curves without a printed number, apart from the tables; t-SNE; what is only counted."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from undrift.cli import main
from undrift.errors import ConfigError
from undrift.experiment.family import is_figure, paper_files, paper_settings, settings_of
from undrift.experiment.sections import choice
from undrift.experiment.spec import load
from undrift.experiment.world import build
from undrift.papers import counted
from undrift.papers.figures import CURVES_OF
from undrift.papers.plan import Options, chosen_settings, experiments_of, groups
from undrift.papers.records import counts, read_records
from undrift.papers.scores import compared, printed, score
from undrift.papers.stand_in import few_table
from undrift.papers.tuning import best_of, told

from .small import SMALL, small
from .test_scores import history

__all__ = ["small"]
ROOT = Path(__file__).parent.parent.parent
FAMILIES = [name for name in paper_files() if is_figure(name)]
FIGURES = [name for name in FAMILIES if "-fig" in name]
STAND_INS = [name for name in FAMILIES if name.startswith("ours-")]
ASKED = {
    "comfed": {2},
    "rfedavg": set(range(1, 13)),
    "fedvra": {2, 3, 4},
    "adabest": {1, 3, 4, 5, 6, 7},
    "fedrl": {1, 3, 4, 5},
}


@pytest.fixture
def scripts() -> Iterator[None]:
    sys.path.insert(0, str(ROOT / "scripts"))
    yield
    sys.path.remove(str(ROOT / "scripts"))


def test_every_figure_is_there() -> None:
    found: dict[str, set[int]] = {}
    for name in [*FIGURES, *CURVES_OF]:
        paper, number = re.match(r"(\w+)-fig(\d+)", name).groups()  # type: ignore[union-attr]
        found.setdefault(paper, set()).add(int(number))
    assert found == ASKED


@pytest.mark.parametrize("family", FIGURES)
def test_what_the_papers_do_not_print_is_said_to_be_ours(family) -> None:
    for setting in settings_of(family):
        assert setting.paper["ours"] and setting.paper["table"].startswith("Fig.")
        assert all(isinstance(n, int) or n == "never" for c in setting.cells.values() for n in c)
        assert all(len(c) <= len(setting.paper.get("targets", [])) for c in setting.cells.values())


def test_data_that_stand_in_for_a_paper_s_have_no_printed_numbers() -> None:
    stand_ins = [setting for name in STAND_INS for setting in settings_of(name)]
    assert {s.name.split("-")[2] for s in stand_ins} == {"fashion", "shakespeare", "mnist"}
    for setting in stand_ins:
        assert "stands in for" in setting.paper["ours"][0]
        assert not any(setting.cells.values())


def test_a_figure_of_a_table_runs_the_table() -> None:
    assert chosen_settings(["comfed-fig2"]) == chosen_settings(["comfed-table4"])
    names = [s.name for s in chosen_settings(["fedvra-fig3"])]
    assert names == [
        "fedvra-table3-noniid", "fedvra-table3-noniid-hlu", "fedvra-table4-noniid",
        "fedvra-table4-noniid-hlu",
    ]  # fmt: skip
    for name in CURVES_OF:
        assert chosen_settings([name])
    with pytest.raises(ConfigError, match="Did you mean 'comfed-fig2'"):
        chosen_settings(["comfed-fgi2"])


def first(name: str, label: str):
    return next(one for one in load(name) if one.label == label)


def test_figures_begin_with_what_their_tables_are() -> None:
    one, table = load("adabest-fig1")[0], load("adabest-table2-cifar100-10pc-a0.3")[0]
    assert one.work == table.work and one.task == table.task and one.data == table.data
    assert (one.partition.clients, one.sampler.count, one.evaluate.drift) == (1100, 5, True)
    seven = first("adabest-fig7-m20", "beta=0.6").algorithm
    assert seven.rules[0].beta == 0.6 and seven.local.weight_decay == 1e-3
    assert first("adabest-fig6-emnist-10pc-iid", "feddyn mu=0.08").algorithm.rules[0].alpha == 0.08
    unequal = first("adabest-fig3-n1000-unbalanced", "adabest")
    assert unequal.algorithm.rules[0].unbalanced and unequal.partition.sigma == 0.3
    assert unequal.algorithm.rules[0].beta == 0.8
    nine = first("rfedavg-fig9-cifar10-s0-lambda", "rfedavg 1e-3")
    assert nine.algorithm.rules[0].strength == 1e-3 and nine.rounds == 200
    noisy = first("rfedavg-fig12-cifar10-s0", "sigma2=5").algorithm.rules[0]
    assert (noisy.noise.sigma, noisy.strength) == (5.0, 1e-5)
    grown = first("fedrl-fig5-cifar10-medium", "fedadam")
    assert (grown.arrival.rounds, grown.arrival.first, grown.rounds) == (100, 0.1, 200)
    for label in ("fedavg", "fedadam", "fedadagrad", "fedamsgrad", "fedrl"):
        tuned = first("fedrl-fig3-cifar10-medium", label).algorithm
        assert first("fedrl-fig4-cifar10-high", label).algorithm == tuned
        assert first("fedrl-fig5-cifar10-medium", label).algorithm == tuned


def test_settings_may_have_their_own_targets() -> None:
    told = {
        name: (setting.paper.get("metric"), setting.paper["targets"])
        for name, setting in paper_settings().items()
        if name.startswith("fedrl-") or "autoencoder" in name
    }
    mnist, cifar, loss = (None, [0.99]), (None, [0.74]), ("test_loss", [0.005])
    assert told == {
        "fedrl-fig1-mnist-iid": mnist, "fedrl-fig1-mnist-high": mnist,
        "fedrl-fig3-mnist-medium": mnist, "fedrl-fig3-cifar10-medium": cifar,
        "fedrl-fig3-emnist-medium": loss, "ours-autoencoder-mnist-medium": loss,
        "fedrl-fig4-mnist-low": mnist, "fedrl-fig4-cifar10-low": cifar,
        "fedrl-fig4-cifar10-high": cifar, "fedrl-fig5-mnist-medium": mnist,
        "fedrl-fig5-cifar10-medium": cifar,
        "fedrl-tuning-mnist": ("validation_accuracy", [0.99, 0.985]),
        "fedrl-tuning-autoencoder": ("validation_loss", [0.005]),
        "fedrl-tuning-cifar10": ("validation_accuracy", [0.74]),
    }  # fmt: skip


def test_every_method_is_tuned_alike_and_not_on_the_test_set() -> None:
    setting = paper_settings()["fedrl-tuning-mnist"]
    figure = {one.label: one for one in load("fedrl-fig3-mnist-medium")}
    rates: dict[str, list[float]] = {}
    for one in experiments_of(setting, Options(seeds=1)):
        method = one.label.partition(" ")[0]
        rates.setdefault(method, []).append(float(one.label.partition("=")[2]))
        assert (one.work, one.model, one.data) == (
            figure[method].work, figure[method].model, figure[method].data
        )  # fmt: skip
    assert rates.keys() == figure.keys()
    assert {tuple(round(r / v[2], 9) for r in v) for v in rates.values()} == {(0.1, 0.3, 1, 3, 10)}
    world = build(
        replace(load("fedrl-tuning-mnist")[0], data=choice(few_table({"use": "mnist"}, 880), ""))
    )
    assert world.trainer.federation.num_clients == 100 and len(world.dealt.validation) > 0


def entry(method, each, value, **more):
    rounds = [{"target": 99.0, "each": each, "median": None, "on_mean": None}]
    ours = {"value": value, "rounds_to": rounds, **more}
    return {"setting": "fedrl-tuning-mnist", "method": method, "ours": ours, "seeds": each}


def test_the_best_of_what_was_tried() -> None:
    tried = [
        entry("fedavg server_lr=1", [70, 80], 99.2),
        entry("fedavg server_lr=3", [20, None], 99.9),
        entry("fedavg server_lr=10", [10, 10], 99.9, diverged=1),
        entry("fedadam server_lr=0.1", [None, None], 98.0),
        entry("fedadam server_lr=0.01", [None, None], 98.5),
        entry("fedrl server_lr=0.01", [60, 60], 99.0),
        entry("fedrl server_lr=0.03", [60, 60], 99.1),
        entry("fedamsgrad server_lr=1", [], None),
    ]
    best = best_of([*tried, {"setting": "fedrl-fig3-mnist-medium", "method": "fedavg"}])
    names = [one["method"] for one in best]
    assert names[:2] == ["fedavg server_lr=1", "fedadam server_lr=0.01"]
    assert names[2:] == ["fedrl server_lr=0.03", "fedamsgrad server_lr=1"]
    assert "best is fedavg server_lr=1; rounds to 99: 70, 80; 99.2" in told(best[0])
    assert "never, never" in told(best[1]) and "no value of fedamsgrad" in told(best[3])
    loss = [
        {**entry(f"fedavg server_lr={r}", [None], v), "setting": "fedrl-tuning-autoencoder"}
        for r, v in ((1, 0.02), (3, 0.01))
    ]
    assert best_of(loss)[0]["method"] == "fedavg server_lr=3"


def test_some_methods_of_a_file() -> None:
    setting = paper_settings()["rfedavg-fig10-cifar10-s0-rfedavg"]
    assert list(setting.cells) == list(setting.paper["methods"]) == ["rfedavg"]
    assert {one.label for one in load(setting.name)} == {"rfedavg"}


def test_what_is_timed_shares_with_nobody(tmp_path) -> None:
    timed = groups(chosen_settings(["rfedavg-fig10"]), Options(), tmp_path)
    assert [len(group.settings) for group in timed] == [1] * 6
    assert len(groups(chosen_settings(["fedvra-fig2"]), Options(), tmp_path)) == 1


# -------------------------------------------------------------------------------------- records
def test_a_loss_is_no_share() -> None:
    runs = [history(0.9), history(0.9)]
    for run, value in zip(runs, (0.0041, 0.0061), strict=True):
        run.records[0]["test_loss"] = value
    paper = {"shows": "curve", "targets": [0.005]}
    found = score(paper, runs, "test_loss")
    assert (found["value"], found["each"]) == (0.0051, [0.0041, 0.0061])
    assert found["rounds_to"][0]["each"] == [1, None]
    assert printed(paper, [328]) == {"value": None, "std": None, "rounds_to": [328]}
    assert compared({**found, "diverged": 1}, printed(paper, [])) == {
        "difference": None, "differs": None,
    }  # fmt: skip


FIGURE = """\
# Nobody's figure: one method of the small table.
like = "small"

[paper]
of = "Nobody"
table = "Fig. 0"
shows = "curve"
also = ["train_*", "norm_model"]
seeds = 1
varies = []
ours = ["everything"]

[[setting]]
parts = ["slow"]
only = ["fedprox"]
"""


def test_a_figure_has_curves_and_is_counted_apart(small, capsys, scripts, monkeypatch) -> None:
    (small / "papers/small-fig.toml").write_text(FIGURE)
    paper_settings.cache_clear()
    assert SMALL.count("[[setting]]") == 2
    assert main(["reproduce", "small-fig", "--jobs", "1", "--quiet"]) == 0
    assert "small-fig: 1 of 1 curves have a full record" in capsys.readouterr().out
    (one,) = read_records(small / "reproductions/small-fig.json")["cells"]
    assert one["paper"]["value"] is None and one["differs"] is None
    assert {"train_loss", "train_accuracy", "norm_model"} == set(one["curves"])
    assert one["curve"]["rounds"] == [1, 2, 3, 4]
    assert counts(small / "reproductions") == {"small": (0, 4)}
    assert counts(small / "reproductions", figures=True) == {"small-fig": (1, 1)}
    assert main(["reproduce", "--list"]) == 0
    out = capsys.readouterr().out
    assert "0 of 4 cells in 2 settings" in out and "small-fig" in out.partition("figure")[2]
    page = importlib.reload(importlib.import_module("reproductions_page"))
    monkeypatch.setattr(page, "RECORDS", small / "reproductions")
    text = page.page()
    assert "| `small-fig` | 1 of 1 |" in text and "| slow | FedProx | " in text
    pytest.importorskip("matplotlib")
    page.draw(small / "reproductions", small / "pictures")
    assert (small / "pictures/small-fig-slow.png").stat().st_size > 1000


# ------------------------------------------------------------------------------ counted, pictured
def test_bytes_and_operations_are_counted() -> None:
    assert counted.means_sent("rFedAvg", 20) == 19 and counted.means_sent("rFedAvg+", 20) == 1
    assert ["rFedAvg", "cross-silo", "CNN", "19 / 20", "38912 / 56160"] in counted.delta_rows()
    # FedDyn: K (g + ns + nm) + 3 K ns + K nm + n (s + m)
    dyn, best, scaffold = (counted.COSTS[n] for n in ("FedDyn", "AdaBest", "SCAFFOLD/m"))
    assert counted.client_operations(dyn, 10, 5) == (10 * (20 + 1), 10 * (10 + 1))
    assert counted.client_operations(best, 1, 5) == (11, 6)
    assert counted.server_operations(scaffold, 1, 10) == (12, 2)
    assert counted.client_rows()[1][1] == "K g + n (3 K + 2) s + n (K + 2) m"
    assert counted.server_rows()[0][1] == "n (P) s"


def test_counted_tables_are_shown_by_name(small, capsys) -> None:
    assert main(["reproduce", "rfedavg-table3", "adabest-table5"]) == 0
    out = capsys.readouterr().out
    assert "rFedAvg, Table III" in out and "19 / 20" in out and "n (P + 3) s" in out
    assert not (small / "runs").exists() and not (small / "reproductions").exists()
    assert main(["reproduce", "adabest-table4", "small-slow", "--quiet", "--jobs", "1"]) == 0
    out = capsys.readouterr().out
    assert out.index("K g + n") < out.index("small-slow FedAvg")
    assert main(["reproduce", "--list"]) == 0
    assert "rfedavg-table3: counted" in capsys.readouterr().out
    assert main(["reproduce", "--list", "adabest-table4", "small"]) == 0
    out = capsys.readouterr().out
    assert "adabest-table4: counted" in out and "small-slow: 2 of 2 cells" in out
    assert main(["reproduce", "rfedavg-tabel3"]) == 2
    assert "Did you mean 'rfedavg-table3'" in capsys.readouterr().err


def test_neighbours_stay_neighbours(scripts) -> None:
    picture: Any = importlib.import_module("feature_picture")
    draw = np.random.default_rng(0)
    owners = np.repeat(range(3), 20)
    x = draw.normal(5.0 * owners[:, None], 1.0, (60, 8))
    y = picture.tsne(x, steps=400)
    gaps = picture.distances(y)
    np.fill_diagonal(gaps, np.inf)
    assert (owners[gaps.argmin(1)] == owners).mean() > 0.95
    shares = picture.neighbours(x, 10.0)
    assert shares.sum() == pytest.approx(1.0) and np.array_equal(shares, shares.T)
    assert np.array_equal(y, picture.tsne(x, steps=400))
