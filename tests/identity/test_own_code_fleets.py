"""Experiments that differ in anything train apart, to the numbers that they have alone."""

from __future__ import annotations

import pytest
import torch

import undrift as fl
from undrift.errors import ConfigError
from undrift.fleet import Fleet, parted

from .kinds import CHOICES, KINDS, LOSSES, MODULES, RULES, built, trainer

TOGETHER = {**RULES, **{n: CHOICES[n] for n in list(CHOICES)[:2]}}  # in one batch or not
# A process has one module of a name: two experiments cannot import two.
IMPORTED_LATE = ("an import inside of a function", "a module that is imported by its name")
IN_ONE_PROCESS = [n for n in KINDS if n not in IMPORTED_LATE]
SAME_NUMBERS = ("a metric",)


def weights(some):
    return [t.server.w for t in some]


@pytest.mark.parametrize("name", IN_ONE_PROCESS)
def test_two_experiments_have_the_numbers_that_they_have_alone(tmp_path, name):
    def pair():
        return [built(tmp_path / v[0], KINDS[name], v) for v in ("1.0", "2.0")]

    alone, both = pair(), pair()
    for one in alone:
        one.run(2)
    if name not in TOGETHER:
        with pytest.raises(ConfigError, match="cannot train as one batch"):
            Fleet(both)
        assert [len(batch) for batch in parted(both)] == [1, 1]
    if name not in SAME_NUMBERS:
        assert not torch.allclose(*weights(alone), rtol=0, atol=1e-4)
    for batch in parted(both):
        fleet = Fleet(batch)
        fleet.run(2)
        assert fleet._together
    for one, other in zip(weights(alone), weights(both), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", [*LOSSES, *MODULES])
def test_what_is_made_twice_of_the_same_code_trains_as_one_batch(tmp_path, name):
    some = [built(tmp_path / str(i), KINDS[name], "2.0", seed=i) for i in range(2)]
    assert len(parted(some)) == 1


@pytest.mark.parametrize("name", RULES)
def test_rules_that_are_made_twice_of_the_same_code_are_one_group(tmp_path, name):
    some = [built(tmp_path / str(i), KINDS[name], "2.0", seed=i) for i in range(2)]
    fleet = Fleet(some)
    fleet.run(1)
    assert [g.size for g in fleet._runner.groups] == [1, 1]  # two imports make two classes
    made = [trainer({"rules": some[0].algorithm.rules}, seed=i) for i in range(2)]
    fleet = Fleet(made)
    fleet.run(1)
    assert [g.size for g in fleet._runner.groups] == [2]


def test_samplers_that_say_they_are_equal_draw_their_own_cohorts(tmp_path):
    kind = CHOICES["an own sampler's private attribute"]
    some = [built(tmp_path / v[0], kind, v) for v in ("1.0", "2.0")]
    cohorts = [one.ids for results in zip(*Fleet(some).run(3), strict=True) for one in results]
    alone = [built(tmp_path / v[0], kind, v) for v in ("1.0", "2.0")]
    assert cohorts == [t.round().ids for _ in range(3) for t in alone]


def test_an_unknown_object_keeps_experiments_apart_unless_it_is_one():
    class Loss:
        def __init__(self, held):
            self.held = held

        def __call__(self, output, target):
            return fl.core.losses.cross_entropy(output, target)

    held = torch.Generator()
    one, twin, other = (trainer({"loss": Loss(h)}) for h in (held, held, torch.Generator()))
    Fleet([one, twin])
    with pytest.raises(ConfigError, match="loss: held is a Generator, into which nobody can look"):
        Fleet([one, other])
