"""A round without a decision on the host, on a CPU: the same numbers as one client at a time."""

from functools import partial

import pytest
import torch
from torch import nn

import undrift as fl
from crossed import crossed
from undrift.core.histories import Histories
from undrift.core.seam import Seam
from undrift.engines import drawing
from undrift.engines.device_round import DeviceRound
from undrift.engines.fused import Fused
from undrift.engines.turns import Shape
from undrift.rules.named import catalogue
from undrift.testing.compare import distance
from undrift.testing.world import numbers

SIZES = (9, 14, 5, 20, 11, 7, 1)
# settings that a small world needs
SPECIAL = {
    "qfedsgd": {"work": fl.Work(steps=1, batch=None)},
    "vrlsgd": {"sampler": fl.Everyone()},
    "fedpd": {"sampler": fl.Everyone()},
}
BUILDS = {"fedvra_u": lambda: fl.fedvra_u(0.05, objective=fl.PseudoLabels(classes=3, every=2))}


def world(algorithm, dropout=0.2, **settings) -> fl.Trainer:
    maker = torch.Generator().manual_seed(1)
    clients = [
        (torch.randn(n, 6, generator=maker).double(), torch.randint(0, 3, (n,), generator=maker))
        for n in SIZES
    ]
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Dropout(dropout), nn.Linear(5, 3))
    task = fl.Task(net, dtype=torch.float64, feature="0")
    chosen = {"work": fl.Work(epochs=1, batch=5), "sampler": fl.Uniform(4), **settings}
    return fl.Trainer(task, fl.Federation.of(clients), algorithm, seed=5, **chosen)


def agree(one: fl.Trainer, other: fl.Trainer, rounds: int = 2) -> None:
    for a, b in zip(one.run(rounds), other.run(rounds), strict=True):
        assert (a.ids, a.skipped, a.steps) == (b.ids, b.skipped, b.steps)
        assert (a.floats_down, a.floats_up) == (b.floats_down, b.floats_up)
        assert a.loss == pytest.approx(b.loss, abs=1e-12)
        assert a.scores == pytest.approx(b.scores, abs=1e-12)
    wanted = numbers(one)
    for name, value in numbers(other).items():
        assert distance([value], [wanted[name]]) < 1e-12, name


def all_but_draws(function, name, **settings) -> Fused:
    """Trace everything but the draws of a round, whose trace takes longest."""
    made = Fused(function, name, **settings)
    made._plain = name == "batches and keys"
    return made


ALIKE = ("fedadagrad", "fedyogi", "fedamsgrad", "fedavgm", "slowmo", "mimelite", "feddc", "fedadmm")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.slow if n in ALIKE else ())  # another has its structure
        for n in catalogue()
        if not n.startswith("comfed:")
    ],
)
def test_every_algorithm_is_the_reference(name, traced, caplog, monkeypatch):
    if name != "fedavg":  # all draw alike
        monkeypatch.setattr(drawing, "Fused", all_but_draws)
    build = BUILDS.get(name, lambda: catalogue()[name].build(lr=0.05))
    special = SPECIAL.get(name, {})
    fast = world(build(), graph=True, **special)
    with caplog.at_level("INFO", "undrift"):
        agree(world(build(), engine="reference", **special), fast)
    assert fast.engine.plan()["graph"]
    assert ("unfused" in caplog.text) == (name == "mime")  # it runs the model in its own move


def test_rates_from_a_list_are_algebra_too(traced, caplog):
    local = fl.sgd(0.1, schedule=fl.Listed(rounds=(1.0, 0.5), steps=(1.0, 0.7, 0.3)))
    for algorithm in (fl.fedavg(local=local), fl.scaffold(local=local)):
        with caplog.at_level("INFO", "undrift"):
            agree(world(algorithm, engine="reference"), world(algorithm, graph=True), 3)
    assert "unfused" not in caplog.text


WORKS = [
    fl.Work(epochs=(1, 2), batch=7),
    fl.Work(epochs=2, batch=7, last="drop"),
    fl.Work(epochs=1, batch=6, last="bootstrap"),
    fl.Work(steps=3, batch=4),
    fl.Work(steps=(1, 3), batch=None),
]


@pytest.mark.parametrize(("work", "in_place"), crossed(WORKS, [True, False]))
def test_any_work(work, in_place):
    algorithm = fl.fedavg(local=fl.sgd(0.1, weight_decay=0.1, lr_decay=0.9))
    agree(
        world(algorithm, engine="reference", work=work),
        world(algorithm, graph=True, work=work, in_place=in_place),
    )


def test_a_cohort_of_changing_size_is_padded():
    algorithm, chance = fl.scaffold(0.1), fl.Bernoulli(0.6)
    fast = world(algorithm, graph=True, sampler=chance)
    agree(world(algorithm, engine="reference", sampler=chance), fast, rounds=4)


def test_buffers_are_kept_while_a_cohort_fits():
    room = fl.Work(epochs=1, batch=4).room(torch.tensor([20]))
    shape = Shape(40, room, 0)
    assert shape.holds(shape._replace(clients=35))
    assert not shape.holds(shape._replace(clients=34))  # would waste more than an eighth
    assert not shape.holds(shape._replace(clients=41))


def test_a_client_that_is_not_finite_is_left_out():
    def broken(**settings) -> fl.Trainer:
        made = world(fl.scaffold(0.1), dropout=0.0, sampler=fl.Everyone(), **settings)
        made.federation.x[made.federation.members[:9]] = torch.inf
        return made

    one, other = broken(engine="reference"), broken(graph=True)
    agree(one, other)
    assert other.round().skipped == [0]


@fl.record
class Counting(fl.Rule):
    """Counts the pieces of data that it looks at before a round."""

    def init_client(self, w, sizes):
        return w.new_zeros(())

    def begin(self, view):
        return view.mine + 1


def test_whoever_is_left_out_has_not_begun():
    """Neither who has no batch to train on nor who is not finite."""
    work = fl.Work(epochs=1, batch=5, last="drop")
    one, other = (
        world(fl.Algorithm((Counting(),)), work=work, sampler=fl.Everyone(), **how)
        for how in ({"engine": "reference"}, {"graph": True})
    )
    for trainer in (one, other):
        trainer.federation.x[trainer.federation.members[:9]] = torch.inf
    agree(one, other)
    left = other.run(1)[0].skipped
    assert 0 in left and len(left) > 1
    assert not any(v.any() for i in left for v in other.client_state(i).values())


def test_rounds_read_later_are_rounds_read_at_once():
    one, other = (world(fl.feddyn(0.1), graph=True) for _ in range(2))
    together = [r._replace(seconds=0) for r in one.run(4)]
    assert together == [other.round()._replace(seconds=0) for _ in range(4)]


def test_a_model_that_was_read_stays():
    trainer = world(fl.fedavgm(0.1), graph=True)
    trainer.run(2)
    server = trainer.server
    kept = server.w.clone()
    trainer.run(2)
    assert torch.equal(server.w, kept) and not torch.equal(trainer.server.w, kept)


def test_clients_may_join_and_leave():
    """Also where a rule reads the record of everybody, whose length then changes."""
    each = fl.fedvra(0.1, gamma=[0.1, 0.2, 0.3, 0.1, 0.2, 0.3, 0.1], a=0.5, d=1.0)
    one, other = (world(each, **s) for s in ({"engine": "reference"}, {"graph": True}))
    assert any(rule.reads_everyone for rule in one.algorithm.chain)
    agree(one, other)
    for trainer in (one, other):
        trainer.leave([6])
    agree(one, other)
    assert other.engine.plan()["graph"]


def test_it_goes_on_from_a_checkpoint(tmp_path):
    whole, first = (world(fl.adabest(0.1), graph=True) for _ in range(2))
    whole.run(5)
    first.run(3)
    first.save(tmp_path)
    second = world(fl.adabest(0.1), graph=True)
    assert second.load(tmp_path)
    second.run(2)
    assert torch.equal(second.server.w, whole.server.w)


def test_what_cannot_be_traced_runs_as_it_is(traced):
    seen = Fused(lambda a: a * float(a.sum()), "a test", compiled=False)
    assert torch.equal(seen(torch.ones(3)), torch.full((3,), 3.0)) and seen.is_plain
    assert torch.equal(seen(torch.full((3,), 2.0)), torch.full((3,), 12.0))


def test_a_traced_function_writes_in_place_once(traced):
    def add_one(a, b):
        a.add_(1)
        return a + b

    fused = Fused(add_one, "a test", compiled=False)
    a = torch.zeros(2)
    for wanted in (1.0, 2.0, 3.0):
        result = fused(a, torch.ones(2))
        assert a.tolist() == [wanted] * 2 and result.tolist() == [wanted + 1] * 2


def test_a_round_that_cannot_be_captured_runs_piece_by_piece(monkeypatch, caplog):
    def fails(self, *arguments):
        raise RuntimeError("no such thing here")

    monkeypatch.setattr(DeviceRound, "run", fails)
    fast = world(fl.scaffold(0.1), graph=True)
    agree(world(fl.scaffold(0.1), engine="reference"), fast)
    assert "no such thing here" in caplog.text and not fast.engine.plan()["graph"]


@pytest.mark.parametrize("runs", [1, 2])
def test_wide_layers_remember_their_steps(monkeypatch, runs):
    monkeypatch.setattr(Histories, "for_task", partial(Histories.for_task, least=0))

    def wide(seed: int, **settings) -> fl.Trainer:
        maker = torch.Generator().manual_seed(seed)
        clients = [
            (
                torch.randn(n, 9, generator=maker).double(),
                torch.randint(0, 3, (n,), generator=maker),
            )
            for n in (6, 8, 5, 7)
        ]
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(9, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 3))
        chosen = {"work": fl.Work(steps=(2, 3), batch=4), "sampler": fl.Uniform(3)}
        data, task = fl.Federation.of(clients), fl.Task(net, dtype=torch.float64)
        made = fl.Trainer(task, data, fl.fedavg(0.1), seed=seed, **chosen | settings)
        if "graph" in settings:
            made.task.seam = Seam(default="loop")  # as a device has one
        return made

    fleet = fl.Fleet([wide(seed, graph=True) for seed in range(runs)])
    fleet.run(3)
    histories = fleet._runner.histories
    assert list(histories.layers) == ["0"]
    rest = [part.numel() for part in histories.others(fleet.trainers[0].server.w)]
    assert rest == [64 + 64 * 3 + 3], "the wide layer's weights are written at the end alone"
    for seed, trainer in enumerate(fleet.trainers):
        alone = wide(seed, engine="reference")
        alone.run(3)
        assert distance([trainer.server.w], [alone.server.w]) < 1e-12


def test_nothing_is_recorded_before_a_step_tells_who_remembers(monkeypatch):
    monkeypatch.setattr(Histories, "for_task", partial(Histories.for_task, least=0))
    source = torch.Generator().manual_seed(0)
    clients = [
        (torch.randn(n, 9, generator=source).double(), torch.randint(0, 3, (n,), generator=source))
        for n in (3, 3, 3, 12)
    ]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(9, 64), nn.ReLU(), nn.Linear(64, 3))
    drops = fl.Work(epochs=2, batch=4, last="drop")  # more than three have: they take no step

    def trainer(**settings) -> fl.Trainer:
        task, data = fl.Task(net, dtype=torch.float64), fl.Federation.of(clients)
        some = {"work": drops, "sampler": fl.Uniform(1), "seed": 3}
        return fl.Trainer(task, data, fl.fedavg(0.1), **some, **settings)

    made, alone = trainer(graph=True), trainer(engine="reference")
    made.task.seam = Seam(default="loop")
    start = made.server.w.clone()
    assert all(3 not in made.round().ids for _ in range(2)), "choose another seed"
    (runner,) = made.engine._rounds
    assert not runner.histories.known and not runner._pieces
    assert torch.equal(made.server.w, start)
    made.run(6)
    alone.run(8)
    assert runner.histories.known and runner._pieces
    assert (
        distance([made.server.w], [alone.server.w]) < 1e-12 < float((made.server.w - start).norm())
    )


@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
def test_a_server_of_another_round_draws_the_same_batches(name):
    """They are planned with the cohort; what the server counts is its own."""
    made = [
        world({"fedavg": fl.fedavg, "scaffold": fl.scaffold}[name](0.1), dropout=0.2, **options)
        for options in ({"graph": True}, {"engine": "reference"})
    ]
    for one in made:
        one.run(1)
        kept = one.server
        one.run(2)
        one.put(kept)
    agree(made[1], made[0])
