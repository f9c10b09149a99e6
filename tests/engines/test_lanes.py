"""Clients of unequal length share lanes: the timetable, and the same numbers as alone."""

import pytest
import torch
from torch import nn

import undrift as fl
from undrift.engines import copies, stepping
from undrift.engines.lanes import cohorts, lanes_for, length, timetable
from undrift.testing.compare import distance
from undrift.testing.world import numbers

SIZES = (80, 4, 12, 24, 5, 44, 16, 8)


@pytest.mark.parametrize("lanes", [1, 2, 5, 9])
def test_everybody_has_a_lane_of_its_own_while_it_trains(lanes):
    steps = [5, 1, 9, 0, 3, 3, 7, 2, 2, 1]
    stays = timetable(steps, lanes)
    assert sorted(s.client for s in stays) == [c for c, k in enumerate(steps) if k]
    assert all(s.steps == steps[s.client] for s in stays)
    taken = [(s.lane, t) for s in stays for t in range(s.start, s.start + s.steps)]
    assert len(set(taken)) == len(taken) == sum(steps)
    assert {lane for lane, _ in taken} <= set(range(lanes))
    # a list schedule: no lane is idle while somebody waits
    assert length(stays) <= sum(steps) / lanes + max(steps)


def test_long_clients_come_first_so_that_lanes_end_together():
    assert length(timetable([8, 1, 1, 1, 1, 1, 1, 1, 1], 2)) == 8


def test_cohorts_are_drawn_from_everybody_and_always_the_same():
    drawn = cohorts(list(range(100)), 10)
    assert drawn == cohorts(list(range(100)), 10) and len(drawn) > 1
    assert all(len(set(one)) == 10 for one in drawn) and drawn[0] != drawn[1]
    assert cohorts([3, 1], 2) and all(sorted(one) == [1, 3] for one in cohorts([3, 1], 2))


def test_lanes_are_taken_where_padding_wastes():
    assert lanes_for([[[5, 5, 5]]], idle=0) is None
    assert lanes_for([[[50, 2, 2, 2, 2]]], idle=0) == [1]
    assert lanes_for([[[50, 40, 30, 2, 2]]], idle=2) == [3]
    assert lanes_for([[[50, 2, 2, 2, 2]]], idle=1000) is None  # a step is not cheaper with fewer
    assert lanes_for([[[]]], idle=0) is None


def test_lanes_are_about_as_many_as_take_least_time():
    tries = [[[60, 30, *[4] * 30]], [[20, 15, *[4] * 30]], [[9, 8, *[4] * 30]]]
    (chosen,) = lanes_for(tries, idle=4)

    def cost(lanes):
        return sum(length(timetable(crews[0], lanes)) for crews in tries) * (4 + lanes)

    assert cost(chosen) <= 1.1 * min(map(cost, range(1, 33)))
    assert cost(chosen) < 0.8 * cost(32)


def world(algorithm, seed=0, **settings) -> fl.Trainer:
    maker = torch.Generator().manual_seed(1)
    clients = [
        (torch.randn(n, 6, generator=maker).double(), torch.randint(0, 3, (n,), generator=maker))
        for n in SIZES
    ]
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
    chosen = {"work": fl.Work(epochs=1, batch=4), "sampler": fl.Uniform(5)}
    if "engine" not in settings:
        chosen["graph"] = True
    task = fl.Task(net, dtype=torch.float64)
    return fl.Trainer(task, fl.Federation.of(clients), algorithm, seed=seed, **chosen | settings)


BUILDS = [
    *[lambda lr=lr: fl.scaffold(local=fl.sgd(lr, momentum=0.9)) for lr in (0.05, 0.1)],
    *[lambda mu=mu: fl.fedprox(0.1, mu=mu) for mu in (0.1, 1.0)],
    lambda: fl.fednova(local=fl.sgd(0.1, momentum=0.5)),
    lambda: fl.feddyn(0.1),
    lambda: fl.fedavg(0.1),
]


@pytest.mark.parametrize(
    ("builds", "large"),  # bytes of what is copied by a table; the rest is left to torch
    [
        *((builds, copies.LARGE) for builds in (BUILDS[:1], BUILDS[-1:])),
        pytest.param(BUILDS, copies.LARGE, marks=pytest.mark.slow),
        (BUILDS[:2], 1),
    ],
)
def test_lanes_change_no_number(builds, large, monkeypatch, traced):
    """One experiment, plain steps in place, one sentence with other numbers, several sentences."""
    monkeypatch.setattr(copies, "LARGE", large)
    fleet = fl.Fleet([world(build(), seed) for seed, build in enumerate(builds)])
    fleet.run(2)
    lanes = fleet._runner.lanes
    assert lanes is not None and lanes.size < 5 * len(builds)
    for seed, (trainer, build) in enumerate(zip(fleet.trainers, builds, strict=True)):
        alone = world(build(), seed, engine="reference")
        alone.run(2)
        wanted = numbers(alone)
        for name, value in numbers(trainer).items():
            assert distance([value], [wanted[name]]) < 1e-12, name


def test_cohorts_of_unequal_size_share_lanes():
    """An experiment with fewer clients than others leaves places empty, and nobody else's."""
    builds, who = (
        [BUILDS[0], BUILDS[1], BUILDS[0]],
        [fl.Uniform(2), fl.Bernoulli(0.6), fl.Uniform(5)],
    )
    pairs = list(enumerate(zip(builds, who, strict=True)))
    fleet = fl.Fleet([world(build(), seed, sampler=some) for seed, (build, some) in pairs])
    fleet.run(3)
    assert fleet._runner.lanes is not None
    for seed, (build, some) in pairs:
        alone = world(build(), seed, engine="reference", sampler=some)
        alone.run(3)
        wanted = numbers(alone)
        for name, value in numbers(fleet.trainers[seed]).items():
            assert distance([value], [wanted[name]]) < 1e-12, (seed, name)


def test_crews_that_fill_a_device_take_their_steps_side_by_side(monkeypatch):
    seen = []

    def one_after_the_other(calls, device):
        seen.append(len(calls))
        for call in reversed(calls):  # they need nothing of each other
            call()

    monkeypatch.setitem(stepping.ENOUGH, "cpu", 0)
    monkeypatch.setattr(stepping, "side_by_side", one_after_the_other)
    test_lanes_change_no_number(BUILDS[3:6], copies.LARGE, monkeypatch, None)
    assert set(seen) == {3}


def test_a_lane_that_goes_wrong_keeps_it_to_its_client():
    def broken(**settings) -> fl.Trainer:
        made = world(fl.scaffold(0.1), sampler=fl.Everyone(), **settings)
        made.federation.x[made.federation.members[:80]] = torch.inf  # the first and longest
        return made

    one, other = broken(), broken(engine="reference")
    for a, b in zip(one.run(2), other.run(2), strict=True):
        assert a.skipped == b.skipped == [0]
    assert distance([one.server.w], [other.server.w]) < 1e-12
