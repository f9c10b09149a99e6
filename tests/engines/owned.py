"""Trainers whose clients have owners in this process, and what is compared of them."""

import logging

import pytest

from undrift.engines import ENGINES, Sharded
from undrift.testing.engines import standard_algorithms
from undrift.testing.world import numbers


@pytest.fixture(autouse=True)
def owners(monkeypatch):
    monkeypatch.setitem(ENGINES, "owners", Sharded)
    monkeypatch.setattr(logging.getLogger("undrift"), "propagate", True)


def everything(world, actors=2, rounds=0, label="every hook", **options):
    trainer = world.trainer(standard_algorithms()[label], engine="owners", actors=actors, **options)
    trainer.run(rounds)
    return trainer


def both(one, other):
    ours, theirs = numbers(one), numbers(other)
    return [(ours[n], theirs[n]) for n in theirs]
