"""Rules whose step is linear: wide layers remember their steps, to the reference's numbers."""

import pytest
import torch
from torch import nn

import undrift as fl
from undrift.core import histories
from undrift.core.seam import Seam
from undrift.core.tree import EMPTY, leaves, record, static
from undrift.data.work import ExplicitWork
from undrift.engines import device_round, linear_end
from undrift.testing.compare import distance
from undrift.testing.world import numbers

MOMENTUM = fl.sgd(0.1, momentum=0.9)
LINEAR = {
    "momentum": lambda: fl.fedavg(local=MOMENTUM),
    "nesterov": lambda: fl.fedavg(local=fl.Nesterov(lr=0.1, momentum=0.8, weight_decay=0.05)),
    "decay": lambda: fl.fedavg(local=fl.sgd(0.1, weight_decay=0.1, lr_decay=0.9)),
    "prox": lambda: fl.fedprox(0.1, mu=0.3),
    "scaffold": lambda: fl.scaffold(local=MOMENTUM),
    "scaffold, option I": lambda: fl.Algorithm((fl.ScaffoldGradient(),), local=MOMENTUM),
    "scaffold_m": lambda: fl.scaffold_m(0.1),
    "feddyn": lambda: fl.feddyn(0.1),
    "adabest": lambda: fl.adabest(0.1),
    "fedvra": lambda: fl.fedvra(0.1),
    "feddc": lambda: fl.feddc(0.1),
    "fedadmm": lambda: fl.fedadmm(0.1),
    "vrlsgd": lambda: fl.vrlsgd(0.1),
    "nova": lambda: fl.fednova(local=MOMENTUM),
    "comfed": lambda: fl.comfed("scaf", "yogi", local=MOMENTUM),
    "chain": lambda: fl.Algorithm(
        (fl.Prox(0.1), fl.Scaffold()), fl.sgd(0.05, momentum=0.9), fl.Nova(), fl.Adaptive("yogi")
    ),
    "schedule": lambda: fl.scaffold(
        local=fl.sgd(0.1, momentum=0.5, schedule=fl.Listed(steps=(1.0, 0.5, 0.0)))
    ),
}
OTHERS = {
    "clipping": lambda: fl.scaffold(local=fl.sgd(0.1, momentum=0.9, clip=0.5)),
    "adam": lambda: fl.fedavg(local=fl.Adam(lr=0.01)),
    "features": lambda: fl.rfedavg_plus(0.1),
    "momentum that stays": lambda: fl.Algorithm((fl.rules.compat.KeepOptimizer(),), local=MOMENTUM),
}
# Directions that look linear and are not, or only as far as the length of the vectors is known.
ODD = {
    "some places": lambda g, view: g * (torch.arange(len(g)) % 2),
    "the first places": lambda g, view: torch.where(torch.arange(len(g)) < 3, g, 0),
    "places that are counted": lambda g, view: g * (torch.ones_like(g).cumsum(0) % 2),
    "the length": lambda g, view: g / len(g) ** 0.5,
    "a tensor of the length": lambda g, view: g * torch.tensor(len(g) ** -0.5),
    "the length as a sum": lambda g, view: g / torch.ones_like(g).sum(),
    "a long vector": lambda g, view: g if len(g) > 100 else 2 * g,
    "how many parameters": lambda g, view: g / len(view.task.names),
    "another axis last": lambda g, view: g.expand(len(g), -1).T[0],
    "one place for all": lambda g, view: g.expand(len(g), -1)[:, 0],
    "integers": lambda g, view: (100 * g).int().double() / 100,
    "two pieces": lambda g, view: torch.cat(g.split([5, len(g) - 5])),
    "half precision": lambda g, view: g.half().double(),
    "the model as a state": None,
}
EVEN = {
    "ones": lambda g, view: g * torch.full_like(g, 0.5) * view.lr + torch.zeros_like(g),
    "alpha": lambda g, view: torch.add(g, view.w - view.w0, alpha=0.3),
    "the task's size": lambda g, view: g / view.task.size**0.5,
    "the batch": lambda g, view: g * view.batch.mask.sum(),
    "one of two results": lambda g, view: g * view.batch.mask.sort().values.sum(),
    "one of several": lambda g, view: g.reshape(1, -1).expand(3, -1)[2],
    "momentum": lambda g, view: g + 0.1 * view.optimizer,
}


@record
class Directed(fl.Rule):
    """A rule whose direction is given, by name."""

    name: str = static(default="ones")

    def direction(self, g, view):
        return (ODD | EVEN)[self.name](g, view)


@record
class Ended(fl.Rule):
    """A rule whose report is given, by name."""

    name: str = static(default="double")

    def finish(self, delta, view):
        return ENDS[self.name](delta, view), EMPTY, EMPTY

    def row(self, delta, view):
        return {"norm": delta.norm(), "mean": (2 * delta - view.w0).sum()}


ENDS = {
    "double": lambda delta, view: 2 * delta,
    "less by the model": lambda delta, view: delta - 0.1 * (view.w - view.w0),
    "clipped": lambda delta, view: delta * (0.05 / delta.norm()).clamp(max=1.0),
    "by a sum": lambda delta, view: delta * delta.sum().sigmoid(),
    "squared": lambda delta, view: delta * delta.abs(),
    "some places": lambda delta, view: delta * (torch.arange(len(delta)) % 2),
    "their mean": lambda delta, view: delta - delta.mean(),
    "by the length": lambda delta, view: delta / len(delta) ** 0.5,
    "one norm": lambda delta, view: delta + 0 * torch.linalg.vector_norm(delta, 1),
    "chosen": lambda delta, view: torch.where(view.size > 6, delta, 0 * view.w0),
}


@record
class FromModel(fl.HeavyBall):
    """Momentum that begins at the model: at 0 in the first round of a model that is 0."""

    def init(self, w):
        return w.clone()


def directed(name: str) -> fl.Algorithm:
    if (ODD | EVEN)[name] is None:
        return fl.Algorithm(local=FromModel(lr=0.1))
    return fl.Algorithm((Directed(name),), local=MOMENTUM)


@pytest.fixture(autouse=True)
def _remembering(monkeypatch):
    monkeypatch.setattr(histories, "pays", lambda layer, *rest: layer.out_features > 10)


def check_chain(runner: device_round.DeviceRound) -> None:
    """Else nothing would be tested."""
    assert runner.stepping.chains and set(runner.histories.layers) == {"2", "5"}
    assert runner.end is not None


def world(build, seed: int = 0, sizes=(6, 8, 5, 7), **settings) -> fl.Trainer:
    maker = torch.Generator().manual_seed(seed)
    clients = [
        (torch.randn(n, 9, generator=maker).double(), torch.randint(0, 3, (n,), generator=maker))
        for n in sizes
    ]
    torch.manual_seed(seed)
    net = nn.Sequential(
        *(nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 64), nn.ReLU(), nn.Dropout(0.2)),
        *(nn.Linear(64, 48, bias=False), nn.Tanh(), nn.Linear(48, 3)),
    )
    task = fl.Task(net, dtype=torch.float64, feature="3")
    whole = {"sampler": fl.Everyone()} if build is LINEAR["vrlsgd"] else {"sampler": fl.Uniform(3)}
    chosen = {"work": fl.Work(steps=(2, 3), batch=4), **whole, **settings}
    made = fl.Trainer(task, fl.Federation.of(clients), build(), seed=seed, **chosen)
    if "graph" in settings:
        made.task.seam = Seam(default="loop")  # as a device has one
    return made


def same(one: fl.Trainer, other: fl.Trainer) -> None:
    wanted = numbers(one)
    for name, value in numbers(other).items():
        assert distance([value], [wanted[name]]) < 1e-12, name


@pytest.mark.parametrize("name", LINEAR)
def test_a_linear_chain_is_the_reference(name, traced, caplog):
    fast, alone = world(LINEAR[name], graph=True), world(LINEAR[name], engine="reference")
    start = fast.server.w.clone()
    with caplog.at_level("INFO", "undrift"):
        for a, b in zip(alone.run(4), fast.run(4), strict=True):
            assert (a.ids, a.skipped, a.steps) == (b.ids, b.skipped, b.steps)
            assert a.loss == pytest.approx(b.loss, abs=1e-12)
    (runner,) = fast.engine._rounds
    check_chain(runner)
    assert "unfused" not in caplog.text
    vectors = [v for v in leaves(runner.buffers["state 0"]) if v.shape[-1] == fast.task.size]
    assert all(v.stride(1) * v.element_size() % 64 == 0 for v in vectors)
    same(alone, fast)
    assert float((fast.server.w - start).norm()) > 1e-3


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_linear_moves_as_ever(name):
    fast, alone = world(OTHERS[name], graph=True), world(OTHERS[name], engine="reference")
    fast.run(3)
    alone.run(3)
    (runner,) = fast.engine._rounds
    assert not runner.stepping.chains and runner.histories is None
    same(alone, fast)


@pytest.mark.parametrize("name", [*ODD, *EVEN])
def test_what_a_rule_does_by_place_or_length_is_not_taken_for_linear(name):
    fast, alone = (
        world(lambda: directed(name), **how) for how in ({"graph": True}, {"engine": "reference"})
    )
    for trainer in (fast, alone) if ODD.get(name, 0) is None else ():
        trainer.server.w.zero_()
    fast.run(3)
    alone.run(3)
    (runner,) = fast.engine._rounds
    assert bool(runner.stepping.chains) == (name in EVEN)
    assert fast.engine.plan()["graph"]
    same(alone, fast)


def test_several_experiments_have_numbers_of_their_own():
    rates = [0.05, 0.1, 0.2]
    builds = [lambda lr=lr: fl.scaffold(local=fl.sgd(lr, momentum=lr * 4)) for lr in rates]
    fleet = fl.Fleet([world(b, seed, graph=True) for seed, b in enumerate(builds)])
    fleet.run(3)
    check_chain(fleet._runner)
    for seed, (build, trainer) in enumerate(zip(builds, fleet.trainers, strict=True)):
        alone = world(build, seed, engine="reference")
        alone.run(3)
        same(alone, trainer)


def broken(build, who: int, seed: int = 0, **settings) -> fl.Trainer:
    """A world in which one client of four computes nothing finite."""
    made = world(build, seed, sampler=fl.Everyone(), **settings)
    first = sum((6, 8, 5, 7)[:who])
    made.federation.x[made.federation.members[first : first + 5]] = torch.inf
    return made


@pytest.mark.parametrize("who", [0, 2, 3])
@pytest.mark.parametrize("name", ["scaffold", "adabest", "vrlsgd", "feddc", "plain"])
def test_a_client_that_is_not_finite_is_left_out_alone(name, who):
    """All of its state stays, numbers as well as vectors, and nobody else's does."""
    build = LINEAR.get(name, lambda: fl.fedavg(0.1))
    whole = {"work": fl.Work(steps=3, batch=None)}
    alone, fast = (
        broken(build, who, engine="reference", **whole),
        broken(build, who, graph=True, **whole),
    )
    for a, b in zip(alone.run(3), fast.run(3), strict=True):
        assert a.skipped == b.skipped == [who]
    assert fast.engine._rounds[0].end is not None
    same(alone, fast)


def test_a_fleet_leaves_out_whoever_is_not_finite():
    whole = {"work": fl.Work(steps=3, batch=None)}
    rates = [0.05, 0.1, 0.2]
    fleet = fl.Fleet(
        [
            broken(lambda lr=lr: fl.adabest(lr), i, i, graph=True, **whole)
            for i, lr in enumerate(rates)
        ]
    )
    fleet.run(3)
    check_chain(fleet._runner)
    for i, (lr, trainer) in enumerate(zip(rates, fleet.trainers, strict=True)):
        alone = broken(lambda lr=lr: fl.adabest(lr), i, i, engine="reference", **whole)
        alone.run(3)
        same(alone, trainer)


def explicit(counts: tuple[int, ...]) -> ExplicitWork:
    """As many steps a round as are given, for everybody."""
    maker, orders = torch.Generator().manual_seed(3), {}
    for number, count in enumerate(counts):
        for client, size in enumerate((6, 8, 5, 7)):
            batches = torch.randint(0, size, (count, 3), generator=maker)
            orders[number, client] = batches.tolist()
    return ExplicitWork(orders)


@pytest.mark.parametrize("name", ["plain", "scaffold"])
@pytest.mark.parametrize("stopped", [1, 3])
def test_a_run_goes_on_to_the_same_bits_whatever_its_first_round_was(name, stopped, tmp_path):
    build = LINEAR.get(name, lambda: fl.fedavg(0.1))
    settings = {"work": explicit((5, 3, 4, 2, 3)), "sampler": fl.Everyone(), "graph": True}
    whole, first, second = (world(build, **settings) for _ in range(3))
    whole.run(5)
    first.run(stopped)
    first.save(tmp_path / "run")
    second.load(tmp_path / "run")
    second.run(5 - stopped)
    assert torch.equal(whole.server.w, second.server.w)


def test_a_round_without_a_step_is_a_round_like_others():
    settings = {"work": explicit((0, 2, 0, 3)), "sampler": fl.Everyone()}
    for name in ("scaffold", "feddyn"):
        fast = world(LINEAR[name], graph=True, **settings)
        alone = world(LINEAR[name], engine="reference", **settings)
        fast.run(4)
        alone.run(4)
        assert fast.engine.plan()["graph"]
        same(alone, fast)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("name", ["plain", "momentum", "scaffold"])
def test_cohorts_of_any_size_end_by_numbers(name, count):
    build = LINEAR.get(name, lambda: fl.fedavg(0.1))
    settings = {"sampler": fl.Uniform(count)}
    fast, alone = world(build, graph=True, **settings), world(build, engine="reference", **settings)
    fast.run(2)
    alone.run(2)
    assert fast.engine._rounds[0].end is not None
    same(alone, fast)


def test_an_optimizer_that_asks_for_the_true_length():
    @record
    class TwoPieces(fl.HeavyBall):
        def init(self, w):
            first, second = w.split([70, len(w) - 70])
            return torch.cat([0 * first, 0 * second])

    build = lambda: fl.fedavg(local=TwoPieces(lr=0.1))  # noqa: E731
    fast, alone = world(build, graph=True), world(build, engine="reference")
    fast.run(3)
    alone.run(3)
    assert fast.engine.plan()["graph"]
    same(alone, fast)


@pytest.mark.parametrize("name", ["scaffold", "feddyn", "nesterov"])
def test_replayed_chains_are_those_of_the_reference(name, recorded):
    """In cohorts of changing size, with clients who take no step."""
    settings = {"work": fl.Work(epochs=2, batch=4, last="drop"), "sampler": fl.Bernoulli(0.7)}
    fast = world(LINEAR[name], 3, (6, 3, 5, 7), graph=True, **settings)
    alone = world(LINEAR[name], 3, (6, 3, 5, 7), engine="reference", **settings)
    fast.run(7)
    alone.run(7)
    check_chain(fast.engine._rounds[0])
    assert len(recorded) >= 3 and fast.engine.plan()["graph"]
    same(alone, fast)


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("local", [fl.sgd(0.1), MOMENTUM], ids=["plain", "momentum"])
def test_an_end_that_is_not_linear_sees_the_models(name, local):
    def build() -> fl.Algorithm:
        return fl.Algorithm((Ended(name),), local=local)

    fast, alone = world(build, graph=True), world(build, engine="reference")
    for _ in range(3):
        said = [trainer.advance().rows for trainer in (alone, fast)]
        assert distance(*([v.length, *leaves(v.notes)] for v in said)) < 1e-12
    (runner,) = fast.engine._rounds
    assert runner.histories is not None and fast.engine.plan()["graph"]
    assert (runner.end is not None) == (name in ("double", "less by the model"))
    same(alone, fast)


@pytest.mark.parametrize("build", [lambda: fl.fedavg(0.1), LINEAR["scaffold"]])
def test_models_are_written_when_somebody_asks(build, monkeypatch, recorded):
    """Layers that remember never write them in a round of their own accord."""
    lazy, eager = (world(build, graph=True) for _ in range(2))
    found = []
    for trainer in (lazy, eager):
        seen = []
        if trainer is eager:
            monkeypatch.setattr(linear_end.LinearEnd, "find", lambda *given: None)
        for number in range(5):
            trainer.round()
            if number == 2:
                continue
            ids = trainer._trained.ids
            seen += [trainer._trained.models().clone(), trainer._own_models(ids[:1])[0]]
            judged = trainer.judge_clients(ids, own=True).result()
            seen += [torch.tensor(list(judged.values()))]
        found.append(seen)
    (runner,) = lazy.engine._rounds
    assert runner.end is not None and runner._written
    assert distance(*found) < 1e-12
    lazy.round()
    assert not runner._written
