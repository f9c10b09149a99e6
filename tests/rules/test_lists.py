"""Numbers by client or round that are too few: an error that names them, before they are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import undrift as fl
from undrift.core.tree import replace
from undrift.errors import ConfigError
from undrift.rules import compat
from undrift.testing.world import tiny_world

SHORT = [0.5, 0.4, 0.3]  # of six clients
ROWS = [[0.5] * 6] * 2  # two rounds


def weighed(weights: Any) -> fl.Algorithm:
    return replace(fl.fedavg(), aggregate=compat.MeanBy(weights))


def in_turn(nbar: Any) -> fl.Algorithm:
    return replace(fl.adabest(), rules=(compat.AdaBestInTurn(nbar=nbar),))


BY_CLIENT: dict[str, Callable[[Any], fl.Algorithm]] = {
    "FedVraEach.gamma": lambda v: fl.fedvra(gamma=v.values, a=0.5, d=1.0),
    "FedVra.a": lambda v: fl.fedvra(a=v.values, d=1.0),
    "FedVra.d": lambda v: fl.fedvra(a=1.0, d=v.values),
    "MeanBy.weights": weighed,
    "AdaBestInTurn.nbar": in_turn,
}
BY_ROUND: dict[str, Callable[[Any], fl.Algorithm]] = {
    "FedVra.a": lambda v: fl.fedvra(a=v.values, d=1.0),
    "FedVra.d": lambda v: fl.fedvra(a=1.0, d=v.values),
    "MeanBy.weights": weighed,
    "AdaBestInTurn.nbar": in_turn,
}


@pytest.mark.parametrize("engine", ["vectorised", "reference"])
@pytest.mark.parametrize("name", BY_CLIENT)
def test_a_list_by_client_has_a_number_for_each(name: str, engine: str) -> None:
    """Before training, whoever takes part in the first round."""
    algorithm = BY_CLIENT[name](fl.PerClient(SHORT))
    world = tiny_world()
    with pytest.raises(ConfigError, match=rf"{name} has numbers for 3 clients, but there are 6"):
        fl.Trainer(
            world.task, world.federation, algorithm, sampler=fl.Uniform(count=2), engine=engine
        )


@pytest.mark.parametrize("engine", ["vectorised", "reference"])
@pytest.mark.parametrize("name", BY_ROUND)
def test_a_list_by_round_has_a_row_for_each(name: str, engine: str) -> None:
    """The round that has none is refused, and the trainer stays as it was."""
    trainer = tiny_world().trainer(BY_ROUND[name](fl.rules.PerRound(ROWS)), engine=engine)
    trainer.run(2)
    before = trainer.server.w.clone()
    with pytest.raises(ConfigError, match=rf"{name} has rows for 2 rounds, but round 3"):
        trainer.round()
    assert trainer.rounds_done == 2 and torch.equal(trainer.server.w, before)


@pytest.mark.parametrize("rule", [compat.RFedAvgAtStart, compat.RFedAvgPlusAtStart])
@pytest.mark.parametrize(
    ("chosen", "why"),
    [
        ({(0, 0): [0]}, r"names no examples of client 1 in round 0"),
        ({(0, 0): [0], (0, 1): []}, r"names no examples of client 1 in round 0"),
        ({(0, 0): [0], (0, 1): [99]}, r"position 99 .* client 1 .* round 0"),
        ({(0, 0): [-1], (0, 1): [0]}, r"position -1 .* client 0 .* round 0"),
    ],
)
def test_chosen_examples_are_chosen_for_all(rule: Any, chosen: Any, why: str) -> None:
    world = tiny_world()
    algorithm = fl.Algorithm((rule(0.1, compat.chosen_examples(chosen)),))
    with pytest.raises(ConfigError, match=why):
        fl.Trainer(world.task, world.federation, algorithm, sampler=fl.Explicit([[0, 1]]))


@pytest.mark.parametrize("rule", [compat.RFedAvgAtStart, compat.RFedAvgPlusAtStart, fl.RFedAvg])
@pytest.mark.parametrize("batch", [0, -1, True, 2.5, "all"])
def test_a_batch_of_features_is_a_number_of_examples(rule: Any, batch: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{rule.__name__}.batch = {batch!r}"):
        rule(batch=batch)
