"""Whole rounds, recorded and replayed the way a device does it: the numbers of the reference."""

from functools import partial

import pytest
import torch
from replaying import Replayed
from test_device_round import BUILDS, SPECIAL, agree
from test_device_round import world as small
from test_lanes import BUILDS as UNEQUAL
from test_lanes import world as unequal
from test_looks import BUILDS as LOOKING
from test_looks import agree as same
from test_looks import world as skewed
from torch import nn

import undrift as fl
from undrift.core.histories import Histories
from undrift.core.seam import Seam
from undrift.rules.named import catalogue
from undrift.testing.compare import distance

NAMES = [
    "fedavg",
    "scaffold",
    "mime",
    "feddyn",
    "adabest",
    "fedvra_u",
    "moon",
    "rfedavg",
    "qfedavg",
    "fedrl",
]
FAST = ("scaffold", "mime", "fedvra_u", "rfedavg", "fedrl")


pytestmark = pytest.mark.usefixtures("recorded")


def test_what_an_earlier_recording_may_write_over_is_destroyed(recorded):
    """The stand-in itself: a held result does not survive a graph that was recorded before it."""
    held = {}
    first = Replayed(lambda: held.update(a=torch.zeros(2) + 1), None)
    second = Replayed(lambda: held.update(b=torch.ones(2) * 3), None)
    for piece in (first, first, second, second):
        piece()
    first()
    assert recorded == [first, second] and held["a"].tolist() == [1, 1]
    assert held["b"].isnan().all()
    second()
    assert held["b"].tolist() == [3, 3]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in NAMES]
)
def test_replayed_rounds_are_those_of_the_reference(name, recorded):
    build = BUILDS.get(name, lambda: catalogue()[name].build(lr=0.05))
    special = SPECIAL.get(name, {})
    fast = small(build(), graph=True, **special)
    agree(small(build(), engine="reference", **special), fast, 4)
    assert len(recorded) >= 3 and fast.engine.plan()["graph"]


@pytest.mark.parametrize(
    ("world", "builds"),
    [
        (skewed, LOOKING[:1]),
        (skewed, LOOKING[3:4]),
        pytest.param(skewed, LOOKING, marks=pytest.mark.slow),
        (unequal, UNEQUAL[:1]),
        (unequal, UNEQUAL[-1:]),
        pytest.param(unequal, UNEQUAL, marks=pytest.mark.slow),
    ],
)
def test_replayed_lanes_are_those_of_the_reference(world, builds, recorded):
    """Of passes over own data, and of steps."""
    fleet = fl.Fleet([world(build(), seed) for seed, build in enumerate(builds)])
    fleet.run(3)
    assert len(recorded) >= 3
    for seed, (trainer, build) in enumerate(zip(fleet.trainers, builds, strict=True)):
        alone = world(build(), seed, engine="reference")
        alone.run(3)
        same(alone, trainer)


@pytest.mark.parametrize(
    ("sizes", "sampler"), [((3, 3, 3, 12), fl.Uniform(1)), ((6, 8, 5, 7), fl.Bernoulli(0.6))]
)
def test_replayed_layers_that_remember_are_those_of_the_reference(sizes, sampler, monkeypatch):
    """In cohorts of changing size, and where nobody takes a step until the third round."""
    monkeypatch.setattr(Histories, "for_task", partial(Histories.for_task, least=0))
    source = torch.Generator().manual_seed(0)
    clients = [
        (torch.randn(n, 9, generator=source).double(), torch.randint(0, 3, (n,), generator=source))
        for n in sizes
    ]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(9, 64), nn.ReLU(), nn.Linear(64, 3))

    def trainer(**settings) -> fl.Trainer:
        task, work = fl.Task(net, dtype=torch.float64), fl.Work(epochs=2, batch=4, last="drop")
        some = {"work": work, "sampler": sampler, "seed": 3}
        return fl.Trainer(task, fl.Federation.of(clients), fl.fedavg(0.1), **some, **settings)

    made, alone = trainer(graph=True), trainer(engine="reference")
    made.task.seam = Seam(default="loop")  # as a device has one
    made.run(8)
    alone.run(8)
    assert made.engine._rounds[0].histories.known and made.engine.plan()["graph"]
    assert distance([made.server.w], [alone.server.w]) < 1e-12
