import sys

import numpy as np
import pytest

from crossed import crossed
from undrift.data.partitions import DirichletClient, QuantitySkew
from undrift.errors import ConfigError, MissingExtra
from undrift.report.partition_picture import draw_partition, partition_figure

LABELS = np.arange(300) % 5


@pytest.mark.parametrize(("clients", "suffix"), crossed([1, 12, 70], ["png", "svg"]))
def test_the_same_partition_is_the_same_file(tmp_path, clients, suffix):
    pytest.importorskip("matplotlib")
    parts = DirichletClient(clients, 0.3).split(LABELS, seed=0)
    paths = [tmp_path / f"{name}.{suffix}" for name in "ab"]
    first, second = (draw_partition(LABELS, parts, path, "title").read_bytes() for path in paths)
    assert first == second and len(first) > 2000


def test_many_clients_are_a_heat_map_and_few_are_bubbles():
    pytest.importorskip("matplotlib")
    for clients, images in [(60, 0), (61, 1)]:
        parts = DirichletClient(clients, 0.3).split(LABELS, seed=0)
        assert len(partition_figure(LABELS, parts).axes[1].images) == images


def test_targets_without_classes_show_sizes():
    pytest.importorskip("matplotlib")
    targets = np.linspace(0, 1, 300)
    figure = partition_figure(targets, QuantitySkew(8).split(targets, seed=0))
    assert len(figure.axes) == 1


def test_empty_clients_and_named_classes_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    names = np.array(["cat", "dog"])[LABELS % 2]
    parts = [np.arange(10), np.array([], dtype=np.int64)]
    ticks = partition_figure(names, parts).axes[1].get_yticklabels()
    assert [tick.get_text() for tick in ticks] == ["cat", "dog"]


def test_an_unknown_suffix_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"must end in \.png"):
        draw_partition(LABELS, [np.arange(3)], tmp_path / "picture.bmp")


def test_a_missing_matplotlib_is_a_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtra, match=r"undrift\[plots\]"):
        partition_figure(LABELS, [np.arange(3)])
