"""Linear chains of rules whose steps layers take while going back, to the reference's numbers."""

import pytest
import torch
from torch import nn

import undrift as fl
from undrift.core import histories
from undrift.core.seam import Seam
from undrift.core.tree import EMPTY, record, static
from undrift.engines import deciding, device_round, stepping
from undrift.kernels.settling import fits
from undrift.testing.compare import distance
from undrift.testing.world import numbers

MOMENTUM = fl.sgd(0.1, momentum=0.9, weight_decay=0.01)
CHAINS = {
    "momentum": lambda: fl.fedavg(local=MOMENTUM),
    "nesterov": lambda: fl.fedavg(local=fl.Nesterov(lr=0.1, momentum=0.8)),
    "scaffold": lambda: fl.scaffold(local=MOMENTUM),
    "feddyn": lambda: fl.feddyn(0.1),
    "feddc": lambda: fl.feddc(0.1),
    "prox, nova": lambda: fl.comfed("nova", "yogi", local=MOMENTUM),
    "kept momentum": lambda: fl.Algorithm((fl.rules.compat.KeepOptimizer(MOMENTUM),), MOMENTUM),
    "chain": lambda: fl.Algorithm(
        (fl.Prox(0.1), fl.Scaffold()), fl.sgd(0.05, momentum=0.9), fl.Nova(), fl.Adaptive("yogi")
    ),
}


@pytest.fixture(autouse=True)
def _inside(monkeypatch):
    """As on a CUDA device; and nothing is remembered."""
    monkeypatch.setattr(deciding, "STEPS_INSIDE", {"cpu"})
    monkeypatch.setattr(histories, "pays", lambda *_: False)


UNREAD = {  # directions that look at a client's own vector and have nothing of it
    "zeros": lambda g, view: g + torch.zeros_like(view.mine),
    "full": lambda g, view: g * torch.full_like(view.mine, 0.5),
    "forgotten": lambda g, view: (view.mine + view.w, g)[1],
}


@record
class Unread(fl.Rule):
    """A rule that keeps a vector of each client, which its steps do not depend on."""

    name: str = static(default="zeros")

    def init_client(self, w, sizes):
        return torch.zeros_like(w)

    def direction(self, g, view):
        return UNREAD[self.name](g, view)

    def finish(self, delta, view):
        return delta, view.mine + delta, EMPTY


def network(seed: int) -> nn.Sequential:
    """BatchNorm's parameters do not move while going back."""
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten()),
        *(nn.Linear(27, 8, bias=False), nn.Tanh(), nn.Linear(8, 3)),
    )


def world(build, seed: int = 0, sizes=(6, 8, 5, 7), steps=(2, 3), **settings) -> fl.Trainer:
    maker = torch.Generator().manual_seed(seed)
    clients = [
        (
            torch.randn(n, 1, 3, 3, generator=maker).double(),
            torch.randint(0, 3, (n,), generator=maker),
        )
        for n in sizes
    ]
    task = fl.Task(network(seed), dtype=torch.float64)
    work = fl.Work(steps=steps, batch=4) if steps else fl.Work(epochs=2, batch=4)
    chosen = {"work": work, "sampler": fl.Uniform(3), **settings}
    made = fl.Trainer(task, fl.Federation.of(clients), build(), seed=seed, **chosen)
    if "graph" in settings:
        made.task.seam = Seam(default="loop")  # as a device has one
    return made


def same(one: fl.Trainer, other: fl.Trainer) -> None:
    wanted = numbers(one)
    for name, value in numbers(other).items():
        assert distance([value], [wanted[name]]) < 1e-12, name


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_inside_is_the_reference(name, traced, monkeypatch):
    stored = []
    apply = stepping.LinearChain.apply
    monkeypatch.setattr(
        stepping.LinearChain, "apply",
        lambda self, moved, live, step: (stored.append({*step.found.gradient}),
                                         apply(self, moved, live, step))[1],
    )  # fmt: skip
    fast, alone = world(CHAINS[name], graph=True), world(CHAINS[name], engine="reference")
    start = fast.server.w.clone()
    for a, b in zip(alone.run(4), fast.run(4), strict=True):
        assert (a.ids, a.skipped, a.steps) == (b.ids, b.skipped, b.steps)
        assert a.loss == pytest.approx(b.loss, abs=1e-12)
    (runner,) = fast.engine._rounds
    assert runner.stepping.chains[0].fits and runner.histories is None
    assert fast.engine.plan()["graph"]
    # of convolutions and linear layers no gradient was left
    assert stored and all(names == {"1.weight", "1.bias"} for names in stored)
    carried = [
        runner.buffers["carry 0"].w,
        *runner.stepping.chains[0].own(runner.seating.seat(0).clients),
    ]
    assert all(v.stride(-2) * v.element_size() % 64 == 0 for v in carried)
    same(alone, fast)
    assert float((fast.server.w - start).norm()) > 1e-3


@pytest.mark.parametrize("remembers", [False, True])
@pytest.mark.parametrize("name", UNREAD)
def test_vectors_of_clients_that_no_step_reads(name, remembers, monkeypatch):
    monkeypatch.setattr(histories, "pays", lambda *_: remembers)
    rule = fl.Algorithm((Unread(name),), local=MOMENTUM)
    fast, alone = (world(lambda: rule, **k) for k in ({"graph": True}, {"engine": "reference"}))
    fast.run(3)
    alone.run(3)
    (runner,) = fast.engine._rounds
    assert runner.stepping.chains and fast.engine.plan()["graph"]
    assert (runner.histories is not None) == remembers
    same(alone, fast)


def test_rounds_that_are_replayed(recorded):
    fast = world(CHAINS["scaffold"], graph=True)
    alone = world(CHAINS["scaffold"], engine="reference")
    fast.run(5)
    alone.run(5)
    assert fast.engine._rounds[0].stepping.chains
    same(alone, fast)


@pytest.mark.parametrize("name", ["scaffold", "plain"])
def test_rounds_of_other_lengths_between_whole_ones(name, recorded, monkeypatch):
    """Whole rounds are one recording, others several: each reads what its own have left."""
    monkeypatch.setattr(device_round, "lanes_for", lambda *_: None)
    build = CHAINS.get(name, lambda: fl.fedavg(0.1))
    how = {"sizes": (12, 9, 4, 3, 4, 4), "steps": None, "sampler": fl.Uniform(2)}
    fast, alone = (world(build, **how, **k) for k in ({"graph": True}, {"engine": "reference"}))
    taken = [r.steps for r in fast.run(14)]
    alone.run(14)
    (runner,) = fast.engine._rounds
    assert runner.lanes is None and {"round", "finish"} <= {k[0] for k in runner._pieces}
    assert len(set(taken)) > 1
    same(alone, fast)


def test_crews_side_by_side_and_clients_on_lanes(monkeypatch):
    """Each crew has a chain of its own; clients of unequal length share lanes."""
    monkeypatch.setitem(stepping.ENOUGH, "cpu", 0)
    sizes, names = (40, 4, 6, 5, 8, 4), ("momentum", "scaffold", "feddyn", "momentum")
    how = {"sizes": sizes, "steps": None, "sampler": fl.Uniform(4)}
    fleet = fl.Fleet([world(CHAINS[n], s, graph=True, **how) for s, n in enumerate(names)])
    fleet.run(3)
    runner = fleet._runner
    assert runner.lanes is not None and set(runner.stepping.chains) == {0, 1, 2}
    for seed, (name, trainer) in enumerate(zip(names, fleet.trainers, strict=True)):
        alone = world(CHAINS[name], seed, engine="reference", **how)
        alone.run(3)
        same(alone, trainer)


def cut() -> fl.Algorithm:
    """Its step is not linear: gradients are cut to a length."""
    return fl.fedavg(local=fl.sgd(0.1, clip=0.5))


@pytest.mark.parametrize("lanes", [False, True])
@pytest.mark.parametrize(
    ("builds", "linear"),
    [
        ([CHAINS[n] for n in ("momentum", "scaffold", "feddyn", "momentum")], {0, 1, 2}),
        ([CHAINS["momentum"], cut, CHAINS["scaffold"]], {0, 2}),
    ],
)
def test_crews_with_chains_of_their_own_share_their_passes(builds, linear, lanes, monkeypatch):
    passes, found = [], stepping.Stepping._found
    monkeypatch.setattr(
        stepping.Stepping, "_found",
        lambda self, w, *rest: (passes.append(len(w)), found(self, w, *rest))[1],
    )  # fmt: skip
    how = {"sizes": (40, 4, 6, 5, 8, 4), "steps": None, "sampler": fl.Uniform(4)} if lanes else {}
    fleet = fl.Fleet([world(b, s, graph=True, **how) for s, b in enumerate(builds)])
    fleet.run(3)
    runner = fleet._runner
    assert (runner.lanes is not None) == lanes and set(runner.stepping.chains) == linear
    groups = runner.lanes.groups if lanes else runner.groups
    sizes = [g.size for g in groups]
    together = [sum(sizes)] if len(linear) == len(groups) else sizes  # neighbours alone
    assert passes and passes == together * (len(passes) // len(together))
    for seed, (build, trainer) in enumerate(zip(builds, fleet.trainers, strict=True)):
        alone = world(build, seed, engine="reference", **how)
        alone.run(3)
        same(alone, trainer)


def test_who_goes_wrong_stands_alone():
    def broken(**settings) -> fl.Trainer:
        made = world(CHAINS["scaffold"], sampler=fl.Everyone(), **settings)
        made.federation.x[made.federation.members[:6]] = torch.inf
        return made

    one, other = broken(graph=True), broken(engine="reference")
    for a, b in zip(one.run(2), other.run(2), strict=True):
        assert a.skipped == b.skipped == [0]
    assert one.engine._rounds[0].stepping.chains
    same(other, one)


def test_what_kernels_have_room_for():
    assert fits(2, 2, 2) and not fits(3, 1, 1) and not fits(1, 3, 1) and not fits(1, 1, 3)


def test_more_vectors_than_kernels_have_room_for(monkeypatch):
    """On lanes and off them: gradients are put together, as under any other rule."""
    from undrift.engines import linear_chain

    monkeypatch.setattr(linear_chain, "fits", lambda *_: False)
    fast, alone = (
        world(CHAINS["scaffold"], **how) for how in ({"graph": True}, {"engine": "reference"})
    )
    fast.run(2)
    alone.run(2)
    assert not fast.engine._rounds[0].stepping.chains
    same(alone, fast)
