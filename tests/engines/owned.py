"""Trainers whose clients have owners in this process, and what is compared of them."""

import logging

import pytest

from rules.needs import world_for
from undrift.engines import ENGINES, Sharded
from undrift.testing.compare import distance
from undrift.testing.engines import standard_algorithms
from undrift.testing.world import numbers, tiny_world


@pytest.fixture(autouse=True)
def owners(monkeypatch):
    monkeypatch.setitem(ENGINES, "owners", Sharded)
    monkeypatch.setattr(logging.getLogger("undrift"), "propagate", True)


def world_of(name):
    world = tiny_world(sizes=(5, 9, 3, 7, 1, 6, 4, 8))
    return world._replace(**world_for(name, world.sampler, world.work))


def far(found, wanted):
    ours, theirs = numbers(found), numbers(wanted)
    assert ours.keys() == theirs.keys()
    return distance(list(ours.values()), list(theirs.values()))


def everything(world, actors=2, rounds=0, label="every hook", **options):
    trainer = world.trainer(standard_algorithms()[label], engine="owners", actors=actors, **options)
    trainer.run(rounds)
    return trainer


def both(one, other):
    ours, theirs = numbers(one), numbers(other)
    return [(ours[n], theirs[n]) for n in theirs]
