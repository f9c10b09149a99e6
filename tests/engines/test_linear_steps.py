"""Loops in C for linear rules on stacks of linear layers, against one client at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_native_steps import MODULES, federation, needs_loops, stack

import undrift as fl
from undrift.engines import vectorised
from undrift.engines.linear_steps import LinearSteps

pytestmark = needs_loops
Make = Callable[[], fl.Algorithm]
LINEAR: dict[str, Make] = {
    "scaffold, momentum, decay": lambda: fl.scaffold(
        local=fl.sgd(0.05, momentum=0.9, weight_decay=0.01)
    ),
    "fedprox, falling": lambda: fl.fedprox(
        local=fl.Sgd(lr=0.1, schedule=fl.Exponential(0.9)), mu=0.1
    ),
    "adabest": lambda: fl.adabest(0.05),
    "feddyn": lambda: fl.feddyn(0.05, alpha=0.1),
    "nesterov": lambda: fl.fedavg(local=fl.Nesterov(lr=0.05)),
    "fednova": lambda: fl.fednova(0.05),
    "fedvra": lambda: fl.fedvra(0.05),
}
ALIKE = ("fednova", "fedprox, falling")  # another has their structure
OTHERS: dict[str, Make] = {
    "clipped": lambda: fl.scaffold(local=fl.sgd(0.05, clip=1.0)),
    "adaptive": lambda: fl.fedavg(local=fl.AdamW(lr=0.01)),
    "second look": lambda: fl.mime(0.05),
}


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectorised, "WORTH_LOOKING", 1)


def world(algorithm: fl.Algorithm, module: Any = None, **settings: Any) -> fl.Trainer:
    module = module or stack(6, 17, 3)
    chosen = {"work": fl.Work(epochs=(1, 3), batch=4), "sampler": fl.Uniform(4), **settings}
    data = federation(module[-1].in_features if len(module) == 1 else 6)
    return fl.Trainer(fl.Task(module, dtype=torch.float64), data, algorithm, seed=1, **chosen)


def taken(trainer: fl.Trainer) -> bool:
    """Whether loops in C took steps of linear rules."""
    return any(rules for worker in trainer.engine._crew for rules in worker._linear_rules.values())


def assert_same(one: fl.Trainer, other: fl.Trainer, rounds: int = 3) -> None:
    for a, b in zip(one.run(rounds), other.run(rounds), strict=True):
        assert a.loss == pytest.approx(b.loss, abs=1e-12)
        assert a.scores == pytest.approx(b.scores, abs=1e-12)
    torch.testing.assert_close(one.server.w, other.server.w, rtol=0, atol=1e-12)
    for ours, theirs in zip(one.store.gather(range(5)), other.store.gather(range(5)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if n in ALIKE else ()) for n in LINEAR],
)
def test_linear_rules_are_those_of_the_reference(name: str) -> None:
    one = world(LINEAR[name]())
    assert_same(one, world(LINEAR[name](), engine="reference"))
    assert taken(one)


@pytest.mark.parametrize("name", ["no bias", "many vectors", "nested"])
def test_stacks_of_all_shapes(name: str) -> None:
    make = LINEAR["scaffold, momentum, decay"]
    one = world(make(), MODULES[name]())
    assert_same(one, world(make(), MODULES[name](), engine="reference"))
    assert taken(one)


@pytest.mark.parametrize("name", OTHERS)
def test_other_rules_go_another_way(name: str) -> None:
    one = world(OTHERS[name]())
    assert_same(one, world(OTHERS[name](), engine="reference"))
    assert not taken(one)


class Shy(fl.Rule):
    """Slows down where a batch has few examples: not the same for every batch."""

    def direction(self, g: Any, view: Any) -> Any:
        return g * view.batch.mask.to(g.dtype).mean()


def test_a_rule_that_asks_for_examples_goes_another_way() -> None:
    def make() -> fl.Algorithm:
        return fl.Algorithm(rules=(Shy(),), local=fl.sgd(0.05))

    one = world(make())
    one.run(2)
    assert not taken(one)


def test_it_begins_when_it_pays_and_goes_on_after_a_stop(monkeypatch: Any, tmp_path: Any) -> None:
    monkeypatch.setattr(vectorised, "WORTH_LOOKING", 10)
    make = LINEAR["scaffold, momentum, decay"]
    whole, found = world(make()), []
    for _ in range(5):
        whole.round()
        found.append(taken(whole))
    change = found.index(True)
    assert 0 < change < 4
    for stop in (change, change + 1):
        first = world(make())
        first.run(stop)
        first.save(tmp_path / str(stop))
        second = world(make())
        second.load(tmp_path / str(stop))
        second.run(5 - stop)
        assert torch.equal(second.server.w, whole.server.w)


def test_chunks_and_workers_change_nothing() -> None:
    make = LINEAR["adabest"]
    one, other = world(make()), world(make(), chunk=2, workers=2)
    one.run(3)
    other.run(3)
    torch.testing.assert_close(one.server.w, other.server.w, rtol=0, atol=1e-12)
    assert taken(one) and taken(other)


def test_steps_are_taken_by_the_loops(monkeypatch: Any) -> None:
    called: list[int] = []
    take = LinearSteps.take_all
    monkeypatch.setattr(
        LinearSteps, "take_all", lambda self, *given: (called.append(1), take(self, *given))[1]
    )
    world(LINEAR["feddyn"]()).run(2)
    assert len(called) == 2
