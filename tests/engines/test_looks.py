"""Passes over own data on lanes: the same numbers as one client at a time."""

import pytest
import torch
from torch import nn

import undrift as fl
from undrift.core.tree import record, replace
from undrift.rules.client import ScaffoldGradient
from undrift.testing.compare import distance
from undrift.testing.world import numbers

SIZES = (1300, 5, 30, 270, 12, 8, 3, 520, 40, 2, 7, 15)


def world(algorithm, seed=0, sizes=SIZES, **settings) -> fl.Trainer:
    maker = torch.Generator().manual_seed(1)
    clients = [
        (torch.randn(n, 6, generator=maker).double(), torch.randint(0, 3, (n,), generator=maker))
        for n in sizes
    ]
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.2))
    net.append(nn.Linear(5, 3))
    chosen = {"work": fl.Work(steps=2, batch=8), "sampler": fl.Uniform(9), "graph": True}
    if "engine" in settings:
        del chosen["graph"]
    task = fl.Task(net, dtype=torch.float64, feature=settings.pop("feature", "0"))
    return fl.Trainer(task, fl.Federation.of(clients), algorithm, seed=seed, **chosen | settings)


def agree(one: fl.Trainer, other: fl.Trainer) -> None:
    wanted = numbers(one)
    for name, value in numbers(other).items():
        assert distance([value], [wanted[name]]) < 1e-12, name


BUILDS = [
    *[lambda lr=lr: fl.scaffold(lr, option="I") for lr in (0.05, 0.1)],
    lambda: fl.mime(0.05),
    lambda: fl.rfedavg(0.05),
    lambda: fl.fedavg(0.05),
]


@pytest.mark.parametrize(
    "builds",
    [
        BUILDS[2:3],
        BUILDS[3:4],
        BUILDS[:2],
        pytest.param(BUILDS, marks=pytest.mark.slow),
    ],
)
def test_lanes_change_no_number(builds):
    """Own probes, shared ones, reviews; one sentence with other numbers; several sentences."""
    fleet = fl.Fleet([world(build(), seed) for seed, build in enumerate(builds)])
    fleet.run(2)
    lanes = fleet._runner.looks.lanes
    assert lanes and all(one.size < 9 * len(builds) / 2 for one in lanes.values())
    for seed, (trainer, build) in enumerate(zip(fleet.trainers, builds, strict=True)):
        alone = world(build(), seed, engine="reference")
        alone.run(2)
        agree(alone, trainer)


@pytest.mark.parametrize("sizes", [SIZES * 2, (9, 4) * 12])
def test_the_padding_of_a_cohort_is_not_asked(sizes):
    """On lanes or side by side: a shared probe is the mean of those who are there."""
    settings = {"sampler": fl.Bernoulli(0.95), "sizes": sizes}
    one, other = (
        world(fl.mime(0.05), engine="reference", **settings),
        world(fl.mime(0.05), **settings),
    )
    asked = [len(r.ids) for r in one.run(3)]
    other.run(3)
    assert len(set(asked)) > 1
    runners = other.engine._rounds
    assert any(count < r.shape.clients for r in runners for count in asked)
    assert all(bool(r.looks.lanes) == (max(sizes) > 256) for r in runners)
    agree(one, other)


def test_what_is_not_finite_stays_with_its_client():
    def broken(**settings) -> fl.Trainer:
        made = world(fl.mime(0.05), sampler=fl.Everyone(), **settings)
        made.federation.x[made.federation.members[:1300]] = torch.inf  # the first and largest
        return made

    one, other = broken(), broken(engine="reference")
    for a, b in zip(one.run(2), other.run(2), strict=True):
        assert a.skipped == b.skipped == [0]
    agree(other, one)


@record
class Elsewhere(ScaffoldGradient):
    """Asks for the gradient at another model than the received one."""

    def probe(self, view):
        return view.grad_at(0.5 * view.w0)


@pytest.mark.parametrize(
    ("build", "known"),
    [
        (lambda lr: fl.scaffold(local=fl.sgd(lr, weight_decay=0.1), option="I"), True),
        (fl.mime, True),
        (lambda lr: fl.qfedavg(lr, q=1.0), False),
        (lambda lr: replace(fl.scaffold(lr, option="I"), rules=(Elsewhere(),)), False),
    ],
)
def test_gradients_at_the_received_model_are_taken_once(build, known, traced):
    """What rules make of them is traced; one who asks for more is asked as it is."""
    fleet = fl.Fleet([world(build(lr), seed, feature=None) for seed, lr in enumerate((0.05, 0.1))])
    fleet.run(2)
    (lanes,) = fleet._runner.looks.lanes.values()
    assert lanes._add_known.is_plain is not known
    for seed, (trainer, lr) in enumerate(zip(fleet.trainers, (0.05, 0.1), strict=True)):
        alone = world(build(lr), seed, feature=None, engine="reference")
        alone.run(2)
        agree(alone, trainer)
