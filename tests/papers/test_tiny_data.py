"""What `--tiny` takes of a data set can be dealt, however its examples lie."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from undrift.data import Population
from undrift.experiment import world
from undrift.experiment.family import paper_files, settings_of
from undrift.papers import stand_in
from undrift.papers.plan import Options, experiments_of
from undrift.sources import Examples


def sorted_source(of: str):
    """A data set whose first examples are of one class and one person."""

    def load(**settings) -> Examples:
        made = stand_in.stand_in(of, 2000, settings)
        order = made.train_y if made.train_clients is None else made.train_clients
        rows = order.argsort(stable=True)
        owners = None if made.train_clients is None else made.train_clients[rows]
        y = made.train_y[rows]
        return replace(made, train_x=made.train_x[rows], train_y=y, train_clients=owners)

    return load


@pytest.fixture
def sorted_sources(monkeypatch):
    # nobody looks at the pictures
    monkeypatch.setattr(stand_in, "_drawn", lambda kind, count: torch.zeros(count, *kind.shape))
    sources = {name: sorted_source(name) for name in stand_in.KINDS}
    monkeypatch.setattr(stand_in, "sections", lambda: {"data": sources})
    world._load.cache_clear()
    yield
    world._load.cache_clear()  # others load other data by these names


@pytest.mark.parametrize("name", paper_files())
def test_every_setting_deals_a_little_of_any_data(name, sorted_sources):
    seen = set()
    for setting in settings_of(name):
        one = experiments_of(setting, Options(tiny=True))[0]
        key = str([one.to_table()[part] for part in ("data", "partition", "sampler", "hold")])
        if key in seen:
            continue
        seen.add(key)
        dealt = world.deal(one)
        assert len(dealt.examples.train_x) == 120
        assert len(dealt.parts) > 4
        sizes = [len(part) for part in dealt.parts]
        assert len(one.sampler.sample(0, 0, Population.of(sizes)).ids), setting.name


def test_a_little_is_of_every_class_and_of_several_people(sorted_sources):
    digits = stand_in.few("mnist")
    assert np.bincount(digits.train_y).tolist() == [12] * 10
    assert np.bincount(digits.test_y).tolist() == [4] * 10
    texts = stand_in.few("shakespeare")
    assert np.bincount(texts.train_clients).tolist() == [10] * 12
    assert set(texts.test_clients.tolist()) <= set(range(12))


def test_numbers_have_no_classes_to_choose_by(monkeypatch):
    made = stand_in.stand_in("mnist", 200, {})
    values = {"train_y": torch.rand(200, 1), "test_y": torch.rand(40, 1), "classes": 0}
    whole = replace(made, **values)
    monkeypatch.setattr(stand_in, "sections", lambda: {"data": {"mnist": lambda: whole}})
    assert torch.equal(stand_in.few("mnist", 50).train_y, whole.train_y[:50])
