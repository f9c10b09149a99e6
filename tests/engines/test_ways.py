"""The ways that layers multiply, as a user names them."""

import logging

import pytest
import torch
from torch import nn

import undrift as fl
from undrift.core.conv_ways import TORCH_WAYS
from undrift.engines.seams import seam_for
from undrift.errors import ConfigError, MissingExtra
from undrift.experiment.spec import load


def trainer(**options):
    maker = torch.Generator().manual_seed(1)
    clients = [
        (torch.randn(n, 2, 6, 6, generator=maker), torch.randint(0, 3, (n,), generator=maker))
        for n in (6, 9, 4)
    ]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    data, task = fl.Federation.of(clients), fl.Task(net, dtype=torch.float64)
    made = fl.Trainer(task, data, fl.scaffold(0.1), work=fl.Work(steps=2, batch=4), **options)
    made.run(2)
    return made


@pytest.mark.parametrize(
    "ways", [*(n for n in TORCH_WAYS if n != "streams"), "auto", {"0": "loop"}], ids=str
)
def test_any_way_gives_the_same_numbers(ways):
    found, wanted = trainer(ways=ways), trainer()
    assert torch.allclose(found.server.w, wanted.server.w, rtol=0, atol=1e-12)
    told = found.engine.plan()["seam"]
    assert told["layers" if isinstance(ways, dict) else "default"] == ways
    assert wanted.engine.plan()["seam"] == {}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"ways": "gruped"}, "Did you mean 'grouped'"),
        ({"ways": {"9": "loop"}}, "no layer named '9'"),
        ({"ways": {"0": "lop"}}, "Did you mean 'loop'"),
        ({"ways": 3}, "one name, or names by layer"),
        ({"precision": ["bf16"]}, "no precision named"),
        ({"graph": "yes"}, "graph is true or false"),
        ({"in_place": "no"}, "in_place is true or false"),
        ({"seam": "grouped"}, "no setting named 'seam'"),
        ({"engine": "reference", "precision": "bf16"}, "no setting named 'precision'"),
    ],
)
def test_what_is_no_setting_is_refused(options, why):
    with pytest.raises(ConfigError, match=why):
        trainer(**options)


def test_a_precision_that_changes_nothing_is_told(caplog):
    with caplog.at_level(logging.WARNING, "undrift"):
        trainer(precision="bf16")
    assert "changes nothing here" in caplog.text


def test_in_a_file():
    table = {"data": "digits", "model": "mlp", "algorithm": "fedavg", "engine": {"ways": "auto"}}
    (found,) = load(table)
    assert found.engine.ways == "auto" and found.to_table()["engine"]["ways"] == "auto"
    (found,) = load({**table, "engine": {"ways": {"conv1": "loop"}}})
    assert found.engine.ways == {"conv1": "loop"}
    for wrong, why in (("atuo", "Did you mean 'auto'"), (3, "no choice named 3")):
        with pytest.raises(ConfigError, match=why):
            load({**table, "engine": {"ways": wrong}})
    with pytest.raises(ConfigError, match="belongs to"):
        load({**table, "engine": {"use": "reference", "ways": "auto"}})


def test_kernels_need_a_device(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(MissingExtra, match="Triton kernels"):
        trainer(ways="triton")


@pytest.mark.parametrize("ways", ["triton", "auto", {"1": "auto"}], ids=str)
def test_a_device_is_asked_about_batch_norm_wherever_it_may_take_kernels(ways, monkeypatch):
    batchnorm = pytest.importorskip("undrift.kernels.batchnorm", reason="the kernels need triton")
    asked: list[torch.device] = []
    monkeypatch.setattr(batchnorm, "prove", asked.append)
    task = fl.Task(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    seam_for(task, torch.device("cpu"), None, ways)
    assert asked == [torch.device("cpu")]
