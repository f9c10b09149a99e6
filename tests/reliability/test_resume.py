"""B6, B7 and I-46: a checkpoint goes on exactly, and only in the experiment that wrote it."""

from __future__ import annotations

import pytest
import torch

from rules.needs import KINDS, every
from undrift.core.algorithm import Algorithm
from undrift.core.losses import cross_entropy
from undrift.core.task import Task
from undrift.data import Everyone, Federation, Sequential, Uniform, Work
from undrift.errors import ChangedExperiment
from undrift.rules import Adaptive, HeavyBall, Prox, Scaffold, fedprox
from undrift.testing import EveryHook

from .tiny import assert_same_bits, everything, examples, network, stored, trainer

TOGETHER = Algorithm((Scaffold(), Prox(0.1)), HeavyBall(lr=0.05), server=Adaptive("yogi"))
HOOKS = Algorithm((EveryHook(), Prox(0.1)), HeavyBall(lr=0.05))


def halves(folder, algorithm, **settings):
    """Train 6 rounds at one go, and 3 and 3 in two trainers; give both."""
    whole = trainer(algorithm, **settings)
    whole.run(6)
    first = trainer(algorithm, **settings)
    first.run(3)
    first.save(folder)
    second = trainer(algorithm, **settings)
    assert second.load(folder) and second.rounds_done == 3
    assert_same_bits(everything(second), everything(first))
    second.run(3)
    return whole, second


@pytest.mark.parametrize("name", [*every(KINDS), TOGETHER, HOOKS])
def test_a_resumed_run_is_the_same_run(tmp_path, name):
    whole, resumed = halves(tmp_path, name)
    never = set(range(20)) - set(whole.store.seen)
    assert never or isinstance(whole.roster.sampler, Everyone)
    assert resumed.store.seen == whole.store.seen
    assert_same_bits(everything(resumed), everything(whole))


@pytest.mark.parametrize(
    "settings", [{"chunk": 2}, {"in_place": False}, {"engine": "reference"}, {"state": "host"}]
)
@pytest.mark.parametrize("name", ["scaffold", "fedavg"])
def test_a_resumed_run_is_the_same_run_however_it_is_computed(tmp_path, name, settings):
    whole, resumed = halves(tmp_path, name, **settings)
    assert_same_bits(everything(resumed), everything(whole))


@pytest.mark.parametrize("store", ["device", "host", "file"])
def test_the_states_of_a_hundred_clients_survive(tmp_path, store):
    settings = {"clients": 100, "sampler": Uniform(count=10), **stored(store, tmp_path)}
    settings |= {} if store == "file" else {"state": store}
    run = trainer(**settings)
    for _ in range(6):
        run.round()
        run.save(tmp_path / "run")
    again = trainer(**settings)
    again.load(tmp_path / "run")
    assert 20 < len(again.store.seen) < 61
    assert_same_bits(everything(again), everything(run))


def test_a_run_is_resumed_on_its_own_plan(tmp_path):
    first = trainer(chunk=2, in_place=False)
    first.round()
    first.save(tmp_path)
    again = trainer()
    again.load(tmp_path)
    assert again.engine.chunk == 2 and not again.engine.in_place


def test_who_is_enrolled_is_resumed(tmp_path):
    runs = [trainer(enrolled=range(10)) for _ in range(2)]
    for run in runs:
        run.round()
        run.enroll([15])
        run.leave([0, 1])
        run.round()
    runs[0].save(tmp_path)
    again = trainer()
    again.load(tmp_path)
    again.run(2), runs[1].run(2)
    assert list(again.enrolled) == [*range(2, 10), 15]
    assert_same_bits(everything(again), everything(runs[1]))


# -- another experiment -------------------------------------------------------------------------
def doubled(output, target):
    return 2 * cross_entropy(output, target)


def prox(**settings):
    given = {"lr": 0.1, "mu": 0.01} | {k: settings.pop(k) for k in ("lr", "mu") if k in settings}
    return trainer(fedprox(**given), **settings)


CHANGES = {
    "algorithm.local.lr: stored 0.1, given 0.2": {"lr": 0.2},
    "algorithm.rules.0.mu: stored 0.01, given 0.02": {"mu": 0.02},
    "work.batch: stored 4, given 5": {"work": Work(epochs=1, batch=5)},
    "sampler.count: stored 3, given 4": {"sampler": Uniform(count=4)},
    "sampler.use: stored 'Uniform', given 'Sequential'": {"sampler": Sequential(3)},
    "seeds.run: stored": {"seed": 1},
    "task.parameters.0.weight.0: stored 8, given 9": {"task": Task(network(9))},
    "task.loss: stored 'cross_entropy', given": {"task": Task(network(), doubled)},
    "federation.digest: stored": {"federation": Federation.of(examples(salt=1))},
    "task.dtype: stored 'torch.float32', given 'torch.float64'": {"dtype": torch.float64},
    "engine: stored 'vectorised', given 'reference'": {"engine": "reference"},
    "state: stored 'device', given 'host'": {"state": "host"},
}


@pytest.mark.parametrize("told", CHANGES)
def test_another_experiment_is_refused_by_the_name_of_what_changed(tmp_path, told):
    run = prox()
    run.round()
    run.save(tmp_path)
    other = prox(**CHANGES[told])
    before = everything(other)
    with pytest.raises(ChangedExperiment, match="belongs to another experiment") as caught:
        other.load(tmp_path)
    assert f"\n  {told}" in str(caught.value)
    assert_same_bits(everything(other), before)


class Scaled(torch.nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.inner = network()
        self.register_buffer("scale", torch.tensor([scale]))

    def forward(self, x):
        return self.inner(x * self.scale)


def smoothed(amount):
    return Task(network(), torch.nn.CrossEntropyLoss(label_smoothing=amount))


@pytest.mark.parametrize(
    "one, other",
    [(smoothed(0.1), smoothed(0.2)), (Task(Scaled(1.0)), Task(Scaled(2.0)))],
    ids=["a setting of the loss", "a constant of the module"],
)
def test_settings_inside_a_module_count_too(tmp_path, one, other):
    run = prox(task=one)
    run.round()
    run.save(tmp_path)
    with pytest.raises(ChangedExperiment):
        prox(task=other).load(tmp_path)


def test_another_version_of_the_code_is_refused(tmp_path, monkeypatch):
    run = prox()
    run.round()
    run.save(tmp_path)
    monkeypatch.setattr("undrift.trainer.__version__", "99.0")
    with pytest.raises(ChangedExperiment, match=r"\n  undrift: stored .*99.0"):
        prox().load(tmp_path)
